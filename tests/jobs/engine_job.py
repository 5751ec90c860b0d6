"""A small job on the engine, for its tests: each task writes a file, and the job joins them."""

import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from millrace.engine import Executor, Run, Task
from millrace.files import atomic_file, temporaries_of

Context = tuple[float, str]
"""Seconds that a task takes, and a file that gets a line for each attempt: the number of the task,
the worker's process, and its parent."""


def content_of(number: int) -> bytes:
    """What task `number` writes."""
    return hashlib.sha256(str(number).encode()).digest() * (1 + number % 7)


def write_file(context: Context, task: Task) -> tuple[dict[str, int], list[str]]:
    """The function of the job: writes a file in two steps."""
    seconds, log = context
    with open(log, "ab", buffering=0) as file:
        file.write(f"{task.number} {os.getpid()} {os.getppid()}\n".encode())
    assert isinstance(task.number, int)
    content = content_of(task.number)
    path = os.path.join(task.folder, "data")
    with open(path, "xb", buffering=0) as file:
        file.write(content[:10])
        time.sleep(seconds)
        file.write(content[10:])
    return {"size": len(content)}, [path]


def run_job(
    prefix: str,
    num_tasks: int,
    *,
    workers: int | None,
    engine: str | Executor = "local",
    seconds: float = 0.0,
    restart: bool = False,
) -> tuple[int, int]:
    """Writes PREFIX.out; returns how many tasks ran now, and how many an earlier run had done."""
    output = f"{prefix}.out"
    with Run(
        prefix, {"num_tasks": num_tasks}, outputs=[output], engine=engine, restart=restart
    ) as run:
        if run.result is not None:
            return 0, run.result
        for temporary in temporaries_of(output):  # of a job that was killed
            os.unlink(temporary)
        numbers = run.once("plan", lambda: list(range(num_tasks)))
        folders = []
        tasks = [Task(number, None, f"part {number}") for number in numbers]
        context = seconds, f"{prefix}.log"
        for done in run.map(write_file, tasks, context, phase="write", workers=workers):
            assert done.task.number == len(folders)
            assert done.record == {"size": len(content_of(len(folders)))}
            folders.append(done.folder)

        def publish() -> None:
            with atomic_file(output) as file:
                for folder in folders:
                    with open(os.path.join(folder, "data"), "rb") as data:
                        file.write(data.read())

        run.publish(publish, num_tasks)
        return run.num_done, run.num_kept


def expected_output(num_tasks: int) -> bytes:
    return b"".join(map(content_of, range(num_tasks)))


def command(prefix: Path, **options: Any) -> list[str]:
    """A command that runs the job. Workers cannot load a function of a script."""
    options = {"num_tasks": 40, "workers": 2, "seconds": 0.01, **options}
    code = (
        f"from tests.jobs.engine_job import run_job; print(*run_job({str(prefix)!r}, **{options}))"
    )
    return [sys.executable, "-c", code]
