"""A small job on the engine, for its tests: each task writes a file, and the job joins them."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from millrace.files import atomic_file, temporaries_of, temporary_name
from millrace.interrupts import interrupts_held
from millrace.jobs.engine import Executor, Journal, Task, commit, run_local, task_folder

Context = tuple[str, float, str]
"""The journal's folder, seconds that a task takes, and a file that gets a line for each attempt:
the number of the task, the worker's process, and its parent."""


def content_of(number: int) -> bytes:
    """What task `number` writes."""
    return hashlib.sha256(str(number).encode()).digest() * (1 + number % 7)


def write_file(context: Context, task: Task) -> int:
    """The function of the job: writes a file in two steps, and commits it."""
    folder, seconds, log = context
    with open(log, "ab", buffering=0) as file:
        file.write(f"{task.number} {os.getpid()} {os.getppid()}\n".encode())
    content = content_of(task.number)
    path = os.path.join(task_folder(folder, task.number), "data")
    temporary = temporary_name(path)
    with open(temporary, "xb", buffering=0) as file:
        file.write(content[:10])
        time.sleep(seconds)
        file.write(content[10:])
    os.rename(temporary, path)
    commit(folder, task.number, {"size": len(content)}, [path])
    return len(content)


def run_job(
    prefix: str,
    num_tasks: int,
    *,
    workers: int | None,
    executor: Executor = run_local,
    seconds: float = 0.0,
    restart: bool = False,
) -> tuple[int, int]:
    """Writes PREFIX.out; returns how many tasks ran now, and how many an earlier run had done."""
    job = {"num_tasks": num_tasks}
    with interrupts_held(), Journal(f"{prefix}.journal", job, restart=restart) as journal:
        for temporary in temporaries_of(f"{prefix}.out"):  # of a job that was killed
            os.unlink(temporary)
        if journal.result is not None:  # killed while it removed the journal
            journal.remove()
            return 0, journal.result
        if journal.plan is None:
            journal.set_plan(list(range(num_tasks)))
        left = [number for number in journal.plan if journal.record(number) is None]
        context = journal.folder, seconds, f"{prefix}.log"
        results = executor(write_file, context, tasks_of(journal, left), workers=workers)
        with contextlib.closing(results):
            sizes = {task.number: size for task, size in results}
        assert sizes == {number: len(content_of(number)) for number in left}
        with atomic_file(f"{prefix}.out") as output:
            for number in journal.plan:
                with open(os.path.join(journal.folder_of(number), "data"), "rb") as file:
                    output.write(file.read())
        journal.finish(num_tasks)
    return len(left), num_tasks - len(left)


def tasks_of(journal: Journal, numbers: list[int]) -> Iterator[Task]:
    for number in numbers:
        journal.new_folder_of(number)
        yield Task(number, None, f"part {number}")


def expected_output(num_tasks: int) -> bytes:
    return b"".join(map(content_of, range(num_tasks)))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prefix")
    parser.add_argument("--tasks", type=int, default=40)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.01)
    parser.add_argument("--restart", action="store_true")
    options = parser.parse_args(arguments)
    counts: Any = run_job(
        options.prefix,
        options.tasks,
        workers=options.workers,
        seconds=options.seconds,
        restart=options.restart,
    )
    print(*counts)


def command(prefix: object, *options: object) -> list[str]:
    """A command that runs the job. Workers cannot load a function of a script."""
    code = "from tests.jobs.engine_job import main; main()"
    return [sys.executable, "-c", code, str(prefix), *map(str, options)]
