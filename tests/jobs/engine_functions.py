"""Functions that the tests run in workers; they start fast, as this module imports little."""

from __future__ import annotations

import glob
import os
import signal
import sys
import time
from typing import Any

from millrace.engine import Task
from millrace.engine.tasks import Function
from millrace.errors import TextError


def multiply(factor: int, task: Task) -> int:
    return int(factor * task.payload)


def size_of(context: bytes, task: Task) -> int:
    return len(context) + len(task.payload)


def sleep(_: None, task: Task) -> int:
    time.sleep(task.payload)
    return os.getpid()


def environment(name: str, task: Task) -> str | None:
    return os.environ.get(name)


def note_unflushed(files: str, log: str, function: Function, context: Any, task: Task) -> Any:
    """Runs a task, and notes its id and the names of files in its folder without an fsync."""
    flushed = set()
    flush = os.fsync

    def fsync(descriptor: int) -> None:
        flush(descriptor)
        flushed.add(os.readlink(f"/proc/self/fd/{descriptor}"))

    os.fsync = fsync
    try:
        result = function(context, task)
    finally:
        os.fsync = flush
    (folder,) = glob.glob(f"{files}/{task.id}*")
    names = [name for name in os.listdir(folder) if os.path.join(folder, name) not in flushed]
    with open(log, "a") as file:
        file.write(f"{task.id}: {sorted(names)}\n")
    return result


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
