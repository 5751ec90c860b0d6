"""The journal of a job: what it has done so far, in a folder beside its output.

    PREFIX.journal.lock                   exists while a process runs the job
    PREFIX.journal/owner                  that process, on a file system without locks
    PREFIX.journal/job.json               what the job is, and the name of the folder RUN
    PREFIX.journal/RUN/done.jsonl         a line for each stored value and each finished task
    PREFIX.journal/RUN/files/ID.ATTEMPT/  the files of one attempt of a task
    PREFIX.journal/RUN/scratch/           other files of the job, removed when it starts again

Only the process that runs the job writes `done.jsonl`, and only at its end. Each line has a
checksum, and the line of a task has the size and checksum of each file of the task. A torn line,
and a task with a missing or damaged file, do not count. So neither the lines of tasks nor their
files need to reach the disk at once: a power cut costs some tasks. Stored values are flushed.

Each attempt of a task has a folder of its own. A worker that was given up for lost, and still runs,
cannot disturb its successor; and as each start from nothing has another RUN, it cannot write into a
later job.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from millrace import checks
from millrace.checks import NOTHING, absolute_path, one_path, place_of, shown
from millrace.errors import ConfigError, MillraceError
from millrace.files import (
    atomic_file,
    checksum,
    file_lock,
    flush_to_disk,
    fsync_folder,
    sum_of,
    temporaries_of,
    temporary_name,
)

Sums = Mapping[str, tuple[int, str]]
"""Size and XXH3-64 of files, by name."""

_FORMAT = 3  # version of the folder's layout
_JOB, _OWNER, _DONE, _FILES, _SCRATCH = "job.json", "owner", "done.jsonl", "files", "scratch"
_RUN = re.compile(r"[0-9a-f]{12}")
_FLUSH_INTERVAL = 1.0  # seconds between flushes of the lines of tasks
_MOST_DIFFERENCES = 5  # in a message


class Journal:
    """The journal of one job; only one process at a time has it.

    Making it takes the lock; `open` continues the job whose journal is in the folder, or begins a
    new journal. A journal without a finished task is removed when it is closed: a job that fails at
    its start leaves nothing behind.

    Args:
        path: Path of the journal's folder, beside the output and named after it: `PREFIX.journal`.

    Attributes:
        path: Path of the journal's folder.
        run: Name of the run, after `open`.
        folder: Absolute path of the run's folder, after `open`.

    Raises:
        ConfigError: If the path cannot have a journal.
        MillraceError: If another process has the journal, or the folder cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = one_path("path", path).rstrip(os.sep)
        self.run = self.folder = ""
        self._process = os.getpid()
        self._is_ours = False
        self._file: BinaryIO | None = None
        self._flushed_at = 0.0
        # Place and size of the last line of each value and task: the lines may be large.
        self._values: dict[str, tuple[int, int]] = {}
        self._tasks: dict[str, tuple[int, int]] = {}
        _check_place(self.path)
        with contextlib.ExitStack() as stack, _explained(self.path):
            try:
                self._has_lock = stack.enter_context(file_lock(self.path + ".lock", limit=0))
            except BlockingIOError as error:
                raise _is_held(self.path, str(error.strerror)) from None
            for left in temporaries_of(self.path):  # of a removal that was cut off
                _remove_tree(left)
            _check_entries(self.path)
            self._stack = stack.pop_all()

    def open(self, job: Mapping[str, Any], *, restart: bool = False, published: str = "") -> bool:
        """Continues the job, or begins a new journal; returns whether an earlier run is continued.

        Args:
            job: What decides the tasks and their files, as plain JSON values.
            restart: Whether to discard what an earlier run has done.
            published: Name of a run whose output is whole, and whose journal is of no more use.

        Raises:
            ConfigError: If the journal is damaged, of another job, or of another version.
        """
        job = plain_json(dict(job))
        with _explained(self.path):
            os.makedirs(self.path, exist_ok=True)
            if not self._has_lock:
                self._claim()
            run = None if restart else self._earlier_run(job, published)
            self._is_ours = not (is_continued := run is not None)
            if run is None:
                _remove_tree(os.path.join(self.path, _JOB))  # from here on the earlier job is gone
                run = os.urandom(6).hex()
                os.mkdir(os.path.join(self.path, run))
                content = {"format": _FORMAT, "run": run, "job": job}
                with atomic_file(os.path.join(self.path, _JOB)) as file:
                    file.write(json.dumps(content).encode())
            self.run, self.folder = run, os.path.join(absolute_path(self.path), run)
            self._read_lines()
            self._is_ours = True
            self._remove_leftovers()
        return is_continued

    def remove_if_of(self, job: Mapping[str, Any], published: str) -> None:
        """Removes a journal of this job, or of the run that has published its output, if any."""
        with contextlib.suppress(ValueError, KeyError, TypeError, OSError):
            try:
                content = _read_json(os.path.join(self.path, _JOB))
            except FileNotFoundError:  # killed before it had a job
                content = {"run": published}
            if published == content["run"] or content["job"] == job:
                self.remove()

    def close(self) -> None:
        """Lets other processes have the journal, and removes it if no task is finished."""
        with self._stack, contextlib.suppress(OSError, MillraceError):  # what stays does no harm
            if self._file is not None:
                self._file.close()
            if os.getpid() != self._process:  # a forked child leaves it to its parent
                return
            if self._is_ours and not self._tasks:
                self.remove()

    def remove(self) -> None:
        """Removes the folder; the lock is held until `close`."""
        # The rename is the instant at which the journal is gone. If the process is killed
        # afterwards, the next run of this prefix removes the rest.
        doomed = temporary_name(self.path)
        try:
            os.rename(self.path, doomed)
            _remove_tree(doomed)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise MillraceError(
                f"the journal {self.path} cannot be removed: {error}. Remove it by hand"
            ) from None

    # ---- lines ----

    def value(self, name: str) -> Any:
        """The value that was last stored under a name, or None."""
        entry = self._entry_at(self._values.get(name))
        return None if entry is None else entry["value"]

    def store(self, name: str, value: Any) -> Any:
        """Stores a value, plain JSON, and flushes it to the disk; returns it as `value` does."""
        value = plain_json(value)
        self._append(self._values, name, {"name": name, "value": value})
        self._flush()
        return value

    def add(self, task: str, attempt: str, record: Any, sums: Sums) -> Any:
        """Adds a finished task; returns its record as `record` does.

        Args:
            task: Id of the task.
            attempt: Name of the attempt's folder.
            record: What the job needs to know about the task: plain JSON values.
            sums: Size and checksum of each file in the folder.
        """
        record = plain_json(record)
        entry = {"task": task, "attempt": attempt, "files": sums, "record": record}
        self._append(self._tasks, task, entry)
        if time.monotonic() - self._flushed_at > _FLUSH_INTERVAL:
            self._flush()
        return record

    def record(self, task: str) -> tuple[Any, str] | None:
        """The record of a finished task, and the folder of its files; None if it must run.

        Reads the files. If one is missing or damaged, the task does not count as finished.
        """
        entry = self._entry_at(self._tasks.get(task))
        if entry is None:
            return None
        folder = os.path.join(self.folder, _FILES, entry["attempt"])
        return (entry["record"], folder) if _are_whole(folder, entry["files"]) else None

    def _append(self, places: dict[str, tuple[int, int]], key: str, entry: Any) -> None:
        assert self._file is not None
        line = json.dumps({"xxh3": _sum_of_json(entry), "entry": entry}).encode() + b"\n"
        with _explained(self.path):
            place = self._file.seek(0, os.SEEK_END)
            self._file.write(line)
            self._file.flush()
        places[key] = place, len(line)

    def _flush(self) -> None:
        assert self._file is not None
        with _explained(self.path):
            flush_to_disk(self._file)
        self._flushed_at = time.monotonic()

    def _entry_at(self, place: tuple[int, int] | None) -> Any:
        if place is None:
            return None
        assert self._file is not None
        self._file.seek(place[0])
        return _entry_of(self._file.read(place[1]))

    def _read_lines(self) -> None:
        """Opens the file of lines, and notes where the last one of each value and task is."""
        path = os.path.join(self.folder, _DONE)
        is_new = not os.path.exists(path)
        file = self._file = open(path, "a+b")  # noqa: SIM115
        if is_new:
            flush_to_disk(file)
            fsync_folder(path)
        place = file.seek(0)
        for line in file:
            if not line.endswith(b"\n"):
                file.truncate(place)
                break
            entry = _entry_of(line)
            if entry is not None:
                places = self._tasks if "task" in entry else self._values
                places[entry["task" if "task" in entry else "name"]] = place, len(line)
            place += len(line)

    # ---- the folder ----

    def _claim(self) -> None:
        """Names this process as the owner; raises a MillraceError if another one may be at work."""
        path = os.path.join(self.path, _OWNER)
        here = os.uname().nodename
        with contextlib.suppress(FileNotFoundError), open(path) as file:
            host, _, process = file.read().rpartition(" ")
            is_alive = os.path.exists(f"/proc/{process}") and process != str(os.getpid())
            if host != here or is_alive:
                raise _is_held(
                    self.path,
                    f"held by process {process} on {host}, as far as a file system without locks "
                    f"tells; if that process has ended, remove {path} and run again",
                )
            os.unlink(path)
        with open(path, "x") as file:
            file.write(f"{here} {os.getpid()}")
        self._stack.callback(self._disown, path)

    def _disown(self, path: str) -> None:
        if os.getpid() == self._process:
            _remove_tree(path)

    def _earlier_run(self, job: Mapping[str, Any], published: str) -> str | None:
        """The run to continue, or None to begin a new one."""
        path = os.path.join(self.path, _JOB)
        if not os.path.lexists(path):
            return None
        try:
            content = _read_json(path)
            if content["format"] != _FORMAT or not _RUN.fullmatch(content["run"]):
                raise ValueError
            run, other = str(content["run"]), dict(content["job"])
        except (ValueError, KeyError, TypeError, IsADirectoryError):
            raise ConfigError(
                f"{self.path} is damaged, or was written by another version of millrace. Give "
                "--restart (restart=True) to discard it, or another output"
            ) from None
        if run == published:
            return None
        text = differences(other, dict(job))
        if not text:
            return run
        if not _has_tasks(os.path.join(self.path, run, _DONE)):
            return None
        raise ConfigError(
            f"{self.path} is the journal of an unfinished job, and this job differs from it: "
            f"{text}. Run the same command again to continue that job, give --restart "
            "(restart=True) to discard it, or give another output"
        )

    def _remove_leftovers(self) -> None:
        """Removes earlier runs, and what attempts without a line in the journal have left."""
        for entry in os.listdir(self.path):
            if entry not in (_JOB, _OWNER, self.run):
                _remove_tree(os.path.join(self.path, entry))
        _remove_tree(os.path.join(self.folder, _SCRATCH))
        for name in (_FILES, _SCRATCH):
            os.makedirs(os.path.join(self.folder, name), exist_ok=True)
        attempts = {self._entry_at(place)["attempt"] for place in self._tasks.values()}
        for entry in os.listdir(os.path.join(self.folder, _FILES)):
            if entry not in attempts:
                _remove_tree(os.path.join(self.folder, _FILES, entry))


def _is_held(path: str, text: str) -> MillraceError:
    return MillraceError(
        f"another process is at work on this job: {path} is {text}. Or give another output"
    )


def _check_place(path: str) -> None:
    """Raises a ConfigError if there can be no journal at a path."""
    parent = os.path.dirname(path) or "."
    if not os.path.isdir(parent):
        raise ConfigError(f"{parent} is not a folder; create it, or give another output")
    # Files are renamed between the journal and the folder of the output.
    if os.path.islink(path) or os.path.ismount(path):
        raise ConfigError(
            f"{path} is a link or a mounted file system; the journal must lie in the folder of the "
            "output: remove the link, or give another output"
        )


def _check_entries(path: str) -> None:
    """Raises a ConfigError if there is anything but a journal at a path."""
    try:
        entries = sorted(os.listdir(path))
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise ConfigError(
            f"{path} is a file; the journal of the job needs this name: remove the file, or give "
            "another output"
        ) from None
    for entry in entries:
        is_temporary = entry.startswith(_JOB + ".") and entry.endswith(".tmp")
        if not (entry in (_JOB, _OWNER) or is_temporary or _RUN.fullmatch(entry)):
            raise ConfigError(
                f"{path} holds {shown(entry)}, which is not part of a journal; the journal of the "
                "job needs this name: give another output"
            )


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
    """Turns an OSError into one that says what the journal is and what can be done."""
    try:
        yield
    except OSError as error:
        raise MillraceError(
            f"the journal {path} cannot be written: {error}. The job keeps what it has done there: "
            "make room and grant access, or write to another folder"
        ) from error


# ---- lines and files ----


def plain_json(value: Any) -> Any:
    """The value as JSON returns it: tuples become lists."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{shown(value)} cannot be stored as JSON: {error}. Give texts, numbers, lists and "
            "dicts"
        ) from None


def differences(old: Any, new: Any) -> str:
    """A text on the entries in which two plain JSON values differ; empty if they are equal."""
    texts = [
        _difference(place_of(path), *values)
        for path, *values in checks.differences(old, new, _equal)
    ]
    more = len(texts) - _MOST_DIFFERENCES
    return "; ".join(texts[:_MOST_DIFFERENCES]) + (f"; {more} more" * (more > 0))


def _equal(old: Any, new: Any) -> bool:
    return old == new and type(old) is type(new)


def _difference(place: str, old: Any, new: Any) -> str:
    """Says which entry differs: the old value, and the new one."""
    if old is NOTHING:
        return f"{place} is {shown(new, 60)} now, and was not there"
    if new is NOTHING:
        return f"{place} was {shown(old, 60)}, and is not there now"
    return f"{place} was {shown(old, 60)}, and is {shown(new, 60)} now"


def _read_json(path: str) -> Any:
    with open(path, "rb") as file:
        return json.loads(file.read())


def _sum_of_json(value: Any) -> str:
    return checksum([json.dumps(value).encode()])


def _entry_of(line: bytes) -> Any:
    """The entry of a line, or None if the line is damaged."""
    try:
        content = json.loads(line)
        entry = content["entry"]
        return entry if content["xxh3"] == _sum_of_json(entry) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _has_tasks(path: str) -> bool:
    """Whether a file of lines has a finished task."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        return any("task" in (_entry_of(line) or ()) for line in file)
    return False


def _are_whole(folder: str, sums: Mapping[str, Any]) -> bool:
    """Whether all files of a task have their size and checksum."""
    try:
        # The size first: it needs no reading.
        return all(
            os.path.getsize(path) == size and sum_of(path) == (size, digest)
            for name, (size, digest) in sums.items()
            for path in [os.path.join(folder, name)]
        )
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False


def _remove_tree(path: str) -> None:
    """Removes a folder or file, also if another process removes parts of it meanwhile."""
    if os.path.isdir(path) and not os.path.islink(path):
        while os.path.isdir(path):
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
