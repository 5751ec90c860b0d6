"""kill -9 at any moment of `millrace shuffle`: `python -m tests.jobs.shuffle_kills --kills 100`.

Each job runs as a process; at random moments the process, or one of its workers, is killed; then
the same command runs again, until the job is done. A job that loses one worker must go on by
itself. At the end

- the files equal those of an undisturbed run, byte for byte, and nothing else is left;
- no task ran twice, except those in flight: a finished task keeps its files, and the last run
  reports every one that it found as kept;
- no worker has outlived its parent.
"""

import contextlib
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from millrace import IndexedDatasetBuilder
from millrace.names import SHUFFLE_RESULT
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
from tests.jobs.tokenize_kills import MOST_WORKER_KILLS, Job, check_files, finish

# Of 4 tokens each, a sequence takes less memory than its overhead: the data need several runs.
COMMANDS: dict[str, str] = {
    "one bucket": "--plan gather --memory 300M --num-workers 2",
    "gather": "--plan gather --memory 130M --num-workers 2",
    "gather alone": "--plan gather --memory 10M --num-workers 1",
    "scatter": "--plan scatter --memory 130M --num-workers 2",
    "scatter alone": "--plan scatter --memory 16M --num-workers 1",
    "keyed": "--plan scatter --memory 130M --num-workers 2 --permutation keyed --carry",
    "documents": "--plan scatter --memory 130M --num-workers 2 --documents",
}


def make_jobs(folder: Path, num_sequences: int, names: Sequence[str] = ()) -> list[Job]:
    """Writes the input, and runs the jobs of these names, or all, undisturbed."""
    random_tokens = np.random.default_rng(0)
    for domain in "abc":
        (folder / "input" / domain).mkdir(parents=True)
        for number in range(3):
            tokens = random_tokens.integers(0, 2**16, 4 * num_sequences // 9 + 3, np.uint16)
            tokens.tofile(folder / "input" / domain / f"{number}.bin")
    (folder / "documents" / "a").mkdir(parents=True)
    for number in range(2):
        with IndexedDatasetBuilder(folder / "documents" / "a" / str(number)) as builder:
            lengths = random_tokens.integers(0, 9, num_sequences // 2)
            builder.add_documents(np.zeros(lengths.sum(), np.int32) + number, lengths)
    jobs = []
    for name, command in COMMANDS.items():
        if names and name not in names:
            continue
        source = "documents" if "--documents" in command else "input"
        options = ["--input-dir", str(folder / source), "--seq-len", "4", "--dtype", "uint16"]
        options += ["--num-shards", "40", "--json", *command.split()]
        output = folder / "undisturbed"
        start = time.monotonic()
        summary = finish(launch(options, output))
        seconds = time.monotonic() - start
        if (kept := summary["num_tasks_kept"]) != 0:
            raise KillError(f"{name}: the first run kept {kept} tasks")
        files, done = read_files(output), summary["num_tasks_done"]
        shutil.rmtree(output)
        jobs.append(Job(name=name, options=options, files=files, num_tasks=done, seconds=seconds))
    return jobs


def launch(options: Sequence[str], output: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "millrace", "shuffle", *options, "--output-dir", str(output)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )


def read_files(output: Path) -> dict[str, bytes]:
    """The files of an output; those of a job that has ended but for its result, which has times."""
    paths = [path for path in output.glob("*") if path.name != SHUFFLE_RESULT]
    return {path.name: b"" if path.is_dir() else path.read_bytes() for path in paths}


def run_job(job: Job, output: Path, choices: random.Random, counts: Counter[str]) -> None:
    """Runs a job until it is done, with kills at random moments; KillError if a law is broken."""
    tasks: dict[str, str] = {}
    while True:
        is_published = (output / "metadata.json").exists()
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
            summary = finish(process)
            done, kept = summary["num_tasks_done"], summary["num_tasks_kept"]
            if not is_published and (done, kept) != (job.num_tasks - len(tasks), len(tasks)):
                raise KillError(
                    f"{done} tasks done and {kept} kept, of {job.num_tasks}; the journal had "
                    f"{len(tasks)}"
                )
            break
        process.communicate()
        later = finished_tasks(output)
        if (output / "metadata.json").exists():
            check_files(job, {n: data for n, data in read_files(output).items() if n in job.files})
            counts["after the publication"] += 1
        else:
            changed = [task for task, attempt in tasks.items() if later.get(task) != attempt]
            if changed:
                raise KillError(f"tasks that ran again: {sorted(changed)[:5]}")
        tasks = later
        counts["runs"] += 1
    check_files(job, read_files(output))


def wait_for_moment(
    process: subprocess.Popen[str], job: Job, output: Path, num_kept: int, choices: random.Random
) -> bool:
    """Waits for a random moment; returns whether the process has ended before.

    A fifth of the moments is at any time, and may be later than the end: the job must be able to
    end. A fifth is while the shards are published, and the others while tasks run.
    """
    seconds = choices.uniform(0, 1.2 * job.seconds)
    kind = choices.random()
    if kind < 0.6:
        while process.poll() is None and len(finished_tasks(output)) <= num_kept:
            time.sleep(0.002)
        seconds *= choices.random() * (1 - num_kept / job.num_tasks) / 4
    elif kind < 0.8:
        first, last = output / "shard_0000.bin", output / "metadata.json"
        while process.poll() is None and not (first.exists() or last.exists()):
            time.sleep(0.0005)
        seconds = choices.uniform(0, 0.03)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
        return True
    return False


def run(
    num_kills: int, seed: int, num_sequences: int = 1_200_000, names: Sequence[str] = ()
) -> Counter[str]:
    """Kills jobs of these names, or all, at least that many times; returns what was killed."""
    return run_jobs(
        lambda folder: make_jobs(folder, num_sequences, names), run_job, num_kills, seed
    )


if __name__ == "__main__":
    run_command(__doc__ or "", run, "sequences", 1_200_000)
