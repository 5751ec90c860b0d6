"""kill -9 at any moment of `millrace tokenize`: `python -m tests.jobs.tokenize_kills --kills 100`.

Each job has a few hundred chunks. It runs as a process; at random moments the process, or one of
its workers, is killed; then the same command runs again, until the job is done. A job that loses
one worker must go on by itself. At the end

- the files equal those of an undisturbed run, byte for byte, and nothing else is left;
- no chunk was tokenised twice, except those in flight: the journal keeps the task of a chunk as it
  is, and the last run reports every task that it found as kept;
- no worker has outlived its parent.
"""

import contextlib
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import make_texts, train_tokenizer, write_jsonl
from tests.jobs.kills import (
    DEADLINE,
    KillError,
    descendants,
    finished_tasks,
    kill,
    run_command,
    run_jobs,
    wait_for_end,
)
from tests.jobs.preprocess_cases import compress

CHUNK_SIZE = 4000  # bytes
MOST_WORKER_KILLS = 2  # in one run; a task whose worker dies three times is an error


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command without its output, and what an undisturbed run writes, in how many seconds."""

    name: str
    options: Sequence[str]
    files: dict[str, bytes]
    num_tasks: int
    seconds: float


def make_jobs(folder: Path, num_documents: int, names: Sequence[str] = ()) -> list[Job]:
    """Writes inputs of that many documents, and runs each job (of these names) undisturbed."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    tokenizer = train_tokenizer(folder / "tokenizer.json")
    texts, titles = make_texts(num_documents, 1), make_texts(num_documents, 2)
    lines = [
        json.dumps({"id": f"document {i}", "text": text, "title": title[:40]}).encode() + b"\n"
        for i, (text, title) in enumerate(zip(texts, titles, strict=True))
    ]
    plain = b"".join(lines)
    (folder / "plain.jsonl").write_bytes(plain)
    for name, compression in (("gz", "gzip"), ("zst", "zstd")):
        (folder / f"compressed.jsonl.{name}").write_bytes(compress(plain, compression))
    table = pa.table({"text": texts, "title": titles})
    pq.write_table(table, folder / "table.parquet", row_group_size=num_documents // 40)
    poison = [b"{}\n", b"not JSON\n", b'{"text": "\xff"}\n', b'{"text": 5}\n', b'{"text": "\n']
    for place in range(0, len(lines), 37):
        lines.insert(place, poison[place % len(poison)])
    (folder / "poisoned.jsonl").write_bytes(b"".join(lines))
    (folder / "small").mkdir()
    for number in range(30):
        write_jsonl(folder / "small" / f"{number:02}.jsonl.gz", texts[number : number + 9])
    commands = {
        "plain": "plain.jsonl --append-eod",
        "keys": "plain.jsonl --json-keys text title",
        "gzip": "compressed.jsonl.gz --append-eod",
        "Parquet": "table.parquet --json-keys title text",
        "mixed": "compressed.jsonl.zst table.parquet plain.jsonl small",
        "poisoned": "poisoned.jsonl --on-error quarantine",
        "partitions": "plain.jsonl --partitions 3 --append-eod",
        "sentences": "plain.jsonl --split-sentences sentencex --append-eod",
    }
    jobs = []
    for number, (name, command) in enumerate(commands.items()):
        if names and name not in names:
            continue
        words = [str(folder / w) if "." in w or w == "small" else w for w in command.split()]
        options = ["--input", *words, "--tokenizer", str(tokenizer), "--json"]
        options += ["--chunk-size", str(CHUNK_SIZE), "--workers", str(1 if number % 4 == 0 else 2)]
        output, start = folder / "undisturbed", time.monotonic()
        output.mkdir()
        done, kept = chunks_of(finish(launch(options, output)))
        seconds, files = time.monotonic() - start, read_files(output)
        shutil.rmtree(output)
        if kept != 0:
            raise KillError(f"{name}: the first run kept {kept} chunks")
        jobs.append(Job(name=name, options=options, files=files, num_tasks=done, seconds=seconds))
    return jobs


def launch(
    options: Sequence[str], output: Path, wrapper: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Starts the command; `wrapper` is a command that runs it."""
    command = [*wrapper, sys.executable, "-m", "millrace", "tokenize", *options]
    command += ["--output-prefix", str(output / "out")]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The summary of a run that was not killed."""
    output, errors = process.communicate(timeout=DEADLINE)
    if process.returncode != 0:
        raise KillError(f"the job failed with status {process.returncode}: {errors[-2000:]}")
    summary: dict[str, Any] = json.loads(output)
    return summary


def chunks_of(summary: dict[str, Any]) -> tuple[int, int]:
    """Numbers of chunks that the run did and that it kept."""
    return summary["chunks_done"], summary["chunks_kept"]


def read_files(output: Path) -> dict[str, bytes]:
    """The files of an output; empty what tells of the run, not of the data."""
    return {
        path.name: b"" if path.is_dir() or path.suffix == ".json" else path.read_bytes()
        for path in output.iterdir()
    }


def run_job(job: Job, output: Path, choices: random.Random, counts: Counter[str]) -> None:
    """Runs a job until it is done, with kills at random moments; KillError if a law is broken."""
    output.mkdir()
    tasks: dict[str, str] = {}
    is_published = False
    while True:
        process = launch(job.options, output)
        for _ in range(MOST_WORKER_KILLS):
            if wait_for_moment(process, job, output, len(tasks), choices):
                break
            family = descendants(process.pid)
            if not family or choices.random() < 0.4:
                counts["parent"] += kill(process.pid)
                process.wait(DEADLINE)
                wait_for_end(family)
                break
            counts["worker"] += kill(choices.choice(family))
        if process.wait(DEADLINE) != -signal.SIGKILL:
            done, kept = chunks_of(finish(process))
            num_kept = job.num_tasks if is_published else len(tasks)
            if (done, kept) != (job.num_tasks - num_kept, num_kept):
                raise KillError(
                    f"{done} chunks done and {kept} kept, of {job.num_tasks}; the journal had "
                    f"{num_kept}"
                )
            break
        process.communicate()
        later = finished_tasks(output)
        if list(output.glob("*.journal")):
            changed = [task for task, attempt in tasks.items() if later.get(task) != attempt]
            if changed:
                raise KillError(f"tasks that ran again: {sorted(changed)[:5]}")
        elif list(output.glob("*.job.info.json")):  # published: the next run returns the result
            check_files(job, {n: data for n, data in read_files(output).items() if n in job.files})
            is_published = True
            counts["after the publication"] += 1
        tasks = later
        counts["runs"] += 1
    check_files(job, read_files(output))


def check_files(job: Job, files: dict[str, bytes]) -> None:
    names = {name for name in {*files, *job.files} if files.get(name) != job.files.get(name)}
    if names:
        raise KillError(f"not as in an undisturbed run: {sorted(names)}")


def wait_for_moment(
    process: subprocess.Popen[str], job: Job, output: Path, num_kept: int, choices: random.Random
) -> bool:
    """Waits for a random moment; returns whether the process has ended before.

    A third of the moments is at any time, and may be later than the end: the job must be able to
    end. The others are while chunks are tokenised.
    """
    seconds = choices.uniform(0, 1.2 * job.seconds)
    if choices.random() < 0.66:
        while process.poll() is None and len(finished_tasks(output)) <= num_kept:
            time.sleep(0.002)
        seconds *= choices.random() * (1 - num_kept / job.num_tasks) / 2
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
        return True
    return False


def run(
    num_kills: int, seed: int, num_documents: int = 6000, names: Sequence[str] = ()
) -> Counter[str]:
    """Kills jobs (of these names) that many times, of about 400 chunks; says what was killed."""
    return run_jobs(lambda path: make_jobs(path, num_documents, names), run_job, num_kills, seed)


if __name__ == "__main__":
    run_command(__doc__ or "", run, "documents", 6000)
