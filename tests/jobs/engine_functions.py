"""Functions that the tests run in workers; they start fast, as this module imports little."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from millrace.engine import Task
from millrace.errors import ConfigError, MillraceError, TextError


def tasks_of(*payloads: Any) -> list[Task]:
    return [Task(number, payload, f"part {number}") for number, payload in enumerate(payloads)]


PRELUDE = (
    "import os, sys; from millrace.engine import *; from tests.jobs.engine_functions import *\n"
)
HANG = 60.0  # seconds


def assert_drawn_as_they_finish(executor: Any, workers: int, most: int) -> None:
    """At most that many tasks are drawn and not finished."""
    num_drawn = num_finished = 0

    def tasks() -> Iterator[Task]:
        nonlocal num_drawn
        for number in range(30):
            num_drawn += 1
            assert num_drawn - num_finished <= most
            yield Task(number, 0)

    for _ in executor(sleep, None, tasks(), workers=workers):
        num_finished += 1
    assert (num_drawn, num_finished) == (30, 30)


def assert_interruptible(code: str, **environment: str) -> int:
    """Sends Ctrl-C to a script when it has printed a line; returns the process's id."""
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=HANG)
    assert process.returncode == -signal.SIGINT
    assert stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert stderr.count("Traceback") == 1
    return process.pid


def multiply(factor: int, task: Task) -> int:
    return int(factor * task.payload)


def size_of(context: bytes, task: Task) -> int:
    return len(context) + len(task.payload)


def sleep(_: None, task: Task) -> int:
    time.sleep(task.payload)
    return os.getpid()


def environment(name: str, task: Task) -> str | None:
    return os.environ.get(name)


def write_everywhere(_: None, task: Task) -> str:
    print("on stdout")
    print("on stderr", file=sys.stderr)
    return "done"


def die(how: Any, task: Task) -> None:
    """Ends the worker by a signal, or with an exit status."""
    if how == "abort":
        os.abort()
    if how == "exit":
        os._exit(3)
    os.kill(os.getpid(), how)


def die_at_first(folder: str, task: Task) -> tuple[int, int]:
    """Kills its worker in the first two attempts of every third task."""
    attempts = f"{folder}/{task.number}"
    with open(attempts, "ab", buffering=0) as file:
        file.write(b"x")
    size = os.path.getsize(attempts)
    if task.number % 3 == 0 and size < 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return size, os.getpid()


def fork_and_die(folder: str, task: Task) -> str:
    """In the first attempt, leaves a child process that holds the worker's socket, and dies."""
    try:
        os.mkdir(f"{folder}/attempt")
    except FileExistsError:
        return "second attempt"
    if os.fork() == 0:
        time.sleep(15)
        os._exit(0)
    os._exit(1)


FAILURES: list[tuple[Any, type[Exception], str]] = [
    (0, ZeroDivisionError, "division by zero"),
    ("text", TextError, "line 3 is bad"),
    ("unpicklable", MillraceError, "in a worker process: UnpicklableError"),
    ("result", ConfigError, "the result of a task cannot be sent"),
]
"""Payloads of `fail`, and the errors that they give."""


def fail(_: None, task: Task) -> float:
    class UnpicklableError(Exception):
        pass

    if task.payload == "unpicklable":
        raise UnpicklableError
    if task.payload == "text":
        raise TextError("line 3 is bad")
    if task.payload == "result":
        return lambda: None  # type: ignore[return-value]
    if task.payload == "wait":
        time.sleep(60)
    return 1 / task.payload


def beat(path: str, task: Task) -> None:
    """Appends to a file every 0.05 s, as often as the payload says."""
    for _ in range(task.payload):
        with open(path, "ab") as file:
            file.write(b"x")
        time.sleep(0.05)
