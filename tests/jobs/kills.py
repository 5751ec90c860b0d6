"""Kills of jobs: a process tree, what a journal holds, and a process that dies at a certain call.

`run_jobs` kills commands at random moments, as often as it is told; `tokenize_kills`,
`shuffle_kills` and `engine_kills` say which commands, and what must hold afterwards.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

DEADLINE = 120.0  # seconds that a run, or the end of an orphan, may take
KILLED = 9  # status of a process that `run_and_die` has ended


class KillError(AssertionError):
    """Something was lost, done twice, or left behind."""


def finished_tasks(folder: Path) -> dict[str, str]:
    """The folder of the files of each task in the journals of a folder, by the task's id."""
    attempts: dict[str, str] = {}
    with contextlib.suppress(FileNotFoundError):  # the job ends, and removes its journal
        for path in folder.glob("*.journal/*/done.jsonl"):
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # a torn line
                    entry = json.loads(line)["entry"]
                    if "task" in entry:
                        attempts[entry["task"]] = entry["attempt"]
    return attempts


def descendants(pid: int) -> list[int]:
    """The living processes that a process has started, and theirs."""
    processes = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                processes += [child, *descendants(child)]
    return [pid for pid in processes if not is_ended(pid)]


def workers_of(pid: int) -> list[int]:
    """The worker processes of a process."""
    workers = []
    for child in descendants(pid):
        with contextlib.suppress(OSError):
            if b"engine.local" in Path(f"/proc/{child}/cmdline").read_bytes():
                workers.append(child)
    return workers


def members_of(session: int) -> list[int]:
    """The living processes of a session."""
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] not in "ZX":
                members.append(int(path.parent.name))
    return members


def is_ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


def wait_for_end(pids: Sequence[int]) -> None:
    """Waits for processes whose parent was killed; KillError if they stay."""
    end = time.monotonic() + DEADLINE
    while left := [pid for pid in pids if not is_ended(pid)]:
        if time.monotonic() > end:
            for pid in left:
                kill(pid)
            raise KillError(f"{len(left)} workers live {DEADLINE:.0f} s after their parent's death")
        time.sleep(0.005)


def kill(pid: int) -> bool:
    """Kills a process; returns whether there was one."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def run_and_die(job: Callable[[], object], num_calls: int) -> None:
    """Runs a job in a forked child, but ends the process after a number of calls of the kernel."""

    def limited(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal num_calls
            num_calls -= 1
            if num_calls < 0:
                os._exit(KILLED)
            return function(*arguments, **options)

        return call

    for name in ("rename", "unlink", "mkdir", "rmdir", "fsync"):
        setattr(os, name, limited(getattr(os, name)))
    try:
        job()
    finally:
        os._exit(0 if num_calls >= 0 and sys.exc_info()[0] is None else 1)


def deaths_of(job: Callable[[], object], step: int = 1) -> Iterator[None]:
    """Runs a job in children that die before each of its calls of the kernel, and after all."""
    num_calls, status = random.randrange(step), KILLED
    while status == KILLED:
        if (child := os.fork()) == 0:
            run_and_die(job, num_calls)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        num_calls += step
        yield
    assert status == 0


def run_jobs(
    make_jobs: Callable[[Path], Sequence[Any]],
    run_job: Callable[[Any, Path, random.Random, Counter[str]], None],
    num_kills: int,
    seed: int,
) -> Counter[str]:
    """Runs jobs in random order, until there were that many kills; returns what was counted.

    `make_jobs` writes the inputs into a folder and returns the jobs, which have names. `run_job`
    runs a job with kills, which it counts as "parent" and "worker".
    """
    choices = random.Random(seed)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = make_jobs(folder)
        order: list[Any] = []
        while counts["parent"] + counts["worker"] < num_kills:
            order = order or choices.sample(jobs, len(jobs))
            job: Any = order.pop()
            output = folder / "output"
            try:
                run_job(job, output, choices, counts)
            except KillError as error:
                raise KillError(f"seed {seed}, job {job.name!r}: {error}") from None
            counts["jobs"] += 1
            shutil.rmtree(output)
    return counts


def run_command(
    description: str, run: Callable[[int, int, int], Counter[str]], unit: str, default: int
) -> None:
    """The command line of a script that kills jobs; `run` gets kills, seed and size of the input.

    `unit` is what the size counts, `default` the usual one.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(f"--{unit}", dest="size", type=int, default=default, help="in an input")
    options = parser.parse_args()
    start = time.monotonic()
    counts = run(options.kills, options.seed, options.size)
    seconds = time.monotonic() - start
    print(f"seed {options.seed}: {dict(counts)}, {seconds:.0f} s; nothing was lost or done twice")
