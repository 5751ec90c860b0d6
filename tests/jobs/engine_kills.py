"""Kills a job on the engine, and its workers, at random instants.

    python -m tests.jobs.engine_kills --kills 100 --seed 1

Each round starts the job anew and kills it (SIGKILL), or first some of its workers and then it. In
the end the output equals an undisturbed run's, only tasks in flight ran twice, and no file and no
process is left.
"""

import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

from tests.jobs.engine_job import command, expected_output
from tests.jobs.kills import (
    DEADLINE,
    KillError,
    kill,
    members_of,
    run_command,
    run_jobs,
    wait_for_end,
)

WORKERS = 2
SECONDS = 0.02  # of a task


def run(num_kills: int, seed: int, num_tasks: int = 60) -> Counter[str]:
    """Kills jobs of about that many tasks; returns how often what was killed."""
    jobs = [SimpleNamespace(name="files", num_tasks=num_tasks + more) for more in (-20, 0, 30)]
    return run_jobs(lambda folder: jobs, run_job, num_kills, seed)


def run_job(
    job: SimpleNamespace, output: Path, choices: random.Random, counts: Counter[str]
) -> None:
    output.mkdir()
    before = Counter(counts)
    log, options = output / "out.log", {"workers": WORKERS, "seconds": SECONDS}
    arguments = command(output / "out", num_tasks=job.num_tasks, **options)
    status = -signal.SIGKILL
    while status == -signal.SIGKILL:
        process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, start_new_session=True)
        _disturb(process, log, choices, counts)
        status = process.wait(DEADLINE)
        wait_for_end(members_of(process.pid))
    if status != 0:
        raise KillError(f"exit status {status}")
    if (output / "out.out").read_bytes() != expected_output(job.num_tasks):
        raise KillError("not as in an undisturbed run")
    if left := {path.name for path in output.iterdir()} - {
        "out.out",
        "out.log",
        "out.job.info.json",
    }:
        raise KillError(f"files are left: {left}")
    num_runs, now = log.read_text().count("\n"), counts - before
    if not job.num_tasks <= num_runs <= job.num_tasks + now["parent"] * WORKERS + now["worker"]:
        raise KillError(f"{num_runs} runs of {job.num_tasks} tasks: {now}")
    counts["repeated tasks"] += num_runs - job.num_tasks


def _disturb(
    process: subprocess.Popen[bytes], log: Path, choices: random.Random, counts: Counter[str]
) -> None:
    """Kills some workers, and perhaps the job: at its start or while tasks run."""
    if choices.random() < 0.8:
        size = _size(log)
        while _size(log) == size and process.poll() is None:
            time.sleep(0.002)
    # A task fails whose worker is killed three times: so at most two of a run are.
    for _ in range(choices.randrange(3)):
        time.sleep(choices.uniform(0, 0.3))
        if workers := sorted({*members_of(process.pid)} - {process.pid}):
            counts["worker"] += kill(choices.choice(workers))
    if choices.random() < 0.7:
        time.sleep(choices.uniform(0, 0.5))
        if process.poll() is None:
            process.kill()
            counts["parent"] += 1


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


if __name__ == "__main__":
    run_command(__doc__ or "", run, "tasks", 60)
