"""Kills a job on the engine, and its workers, at random instants.

    python -m tests.jobs.engine_kills --kills 100 --seed 1

Each round starts the job anew and kills it (SIGKILL), or first some of its workers and then it. In
the end the output equals an undisturbed run's, only tasks in flight ran twice, and no file and no
process is left.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.jobs.engine_job import command, expected_output
from tests.jobs.kills import DEADLINE, kill, members_of, wait_for_end

WORKERS = 2
SECONDS = 0.02  # of a task


def run_kills(folder: Path, num_kills: int, seed: int) -> str:
    """Makes at least `num_kills` kills in finished and unfinished jobs; a text on what happened."""
    chance = random.Random(seed)
    counts: Counter[str] = Counter()
    while counts["parents"] + counts["workers"] < num_kills:
        _run_one_job(folder / f"job{counts['jobs']}", chance, counts, num_kills)
        counts["jobs"] += 1
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _run_one_job(prefix: Path, chance: random.Random, counts: Counter[str], num_kills: int) -> None:
    num_tasks = chance.randrange(40, 90)
    start = Counter(counts)
    output, log = (prefix.with_name(prefix.name + ending) for ending in (".out", ".log"))
    arguments = command(prefix, "--tasks", num_tasks, "--workers", WORKERS, "--seconds", SECONDS)
    while True:
        process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, start_new_session=True)
        if counts["parents"] + counts["workers"] < num_kills:
            _disturb(process, log, chance, counts)
        status = process.wait(DEADLINE)
        wait_for_end(members_of(process.pid))
        assert status in (0, -signal.SIGKILL), f"{prefix}: exit status {status}"
        # A kill after the end of the work leaves at most an empty part of the journal.
        journal = prefix.with_name(prefix.name + ".journal")
        if status == 0 or (output.exists() and not journal.exists()):
            for part in prefix.parent.glob(journal.name + ".*") if status else ():
                shutil.rmtree(part) if part.is_dir() else part.unlink()
            break
    assert output.read_bytes() == expected_output(num_tasks)
    result = prefix.with_name(prefix.name + ".job.info.json")
    left = {path.name for path in prefix.parent.iterdir()} - {output.name, log.name, result.name}
    assert not left, f"files are left: {left}"
    runs = log.read_text().count("\n")
    killed = (counts - start)["parents"] * WORKERS + (counts - start)["workers"]
    assert num_tasks <= runs <= num_tasks + killed, f"{runs} runs of {num_tasks} tasks: {counts}"
    counts["repeated tasks"] += runs - num_tasks
    for path in (output, log, result):
        path.unlink(missing_ok=True)


def _disturb(
    process: subprocess.Popen[bytes], log: Path, chance: random.Random, counts: Counter[str]
) -> None:
    """Kills some workers, and perhaps the job: at its start or while tasks run."""
    if chance.random() < 0.8:
        size = _size(log)
        while _size(log) == size and process.poll() is None:
            time.sleep(0.002)
    # A task fails whose worker is killed three times: so at most two of a run are.
    for _ in range(chance.randrange(3)):
        time.sleep(chance.uniform(0, 0.3))
        workers = sorted({*members_of(process.pid)} - {process.pid})
        if workers:
            counts["workers"] += kill(chance.choice(workers))
    if chance.random() < 0.7:
        time.sleep(chance.uniform(0, 0.5))
        if process.poll() is None:
            process.kill()
            counts["parents"] += 1


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(run_kills(Path(folder), options.kills, options.seed))


if __name__ == "__main__":
    main()
