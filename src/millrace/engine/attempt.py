"""An attempt of a task: what a worker does for a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from millrace.engine.tasks import Function, Task
from millrace.errors import ConfigError, MillraceError
from millrace.files import flush_to_disk, fsync_folder, naming, sum_of


def run_attempt(work: tuple[Function, Any, str, bool], task: Task) -> Any:
    """Runs a task in a folder of its own, in a worker.

    Args:
        work: The function and its context, the folder of all attempts, and whether files must be on
            the disk before the task is done: where the job goes on when it loses this machine.
        task: The task.

    Returns:
        The name of the attempt's folder, the record, and size and checksum of each file; or a
        MillraceError of the function.
    """
    function, context, folder, is_durable = work
    attempt = f"{task.id}.{os.urandom(6).hex()}"
    path = os.path.join(folder, attempt)
    try:
        os.mkdir(path)
    except FileNotFoundError:
        return MillraceError(
            f"{folder} does not exist on {os.uname().nodename}. Either the job has ended or was "
            "started again while this task was at work, or this machine does not share the file "
            "system of the output: put the output on one that all machines share"
        )
    try:
        record, files = function(context, task._replace(folder=path))
        sums = {
            os.path.relpath(file, path): _sum(file, files, is_durable=is_durable) for file in files
        }
    except MillraceError as error:
        return error
    for name in sums:
        if os.path.dirname(name) or name in (os.curdir, os.pardir):
            return ConfigError(f"{name} is not in {path}, the folder of {task}")
    if is_durable:
        fsync_folder(os.path.join(path, ""))
    return attempt, record, sums


def _sum(path: str, files: Any, *, is_durable: bool) -> tuple[int, str]:
    """Size and checksum of a file of a task; flushed, as another machine may go on without us."""
    size, digest = files[path] if isinstance(files, Mapping) else sum_of(path)
    if os.path.getsize(path) != size:
        raise MillraceError(
            f"{path} has {os.path.getsize(path)} bytes, and {size} were written: another program "
            "has changed it. Run again"
        )
    if is_durable:
        with naming(path), open(path, "rb") as file:
            flush_to_disk(file)
    return size, digest
