"""The journal of a job: what it has done so far, in a folder beside its output.

    PREFIX.journal.lock                   exists while a process runs the job
    PREFIX.journal/owner                  that process, on a file system without locks
    PREFIX.journal/job.json               what the job is, and the name of the folder RUN
    PREFIX.journal/RUN/done.jsonl         a line for each stored value and each finished task
    PREFIX.journal/RUN/files/ID.ATTEMPT/  the files of one attempt of a task
    PREFIX.journal/RUN/scratch/           other files of the job, removed when it starts again

Only the process that runs the job writes `done.jsonl`, and only at its end. Each line has a
checksum, and the line of a task has the size and checksum of each of its files. A torn line, and a
task with a missing or damaged file, do not count. So lines and files of tasks need not reach the
disk at once: a power cut costs some tasks. Stored values are flushed.

A worker that was given up for lost, and still runs, does not disturb its successor, which has
another ATTEMPT, nor a later job: each start from nothing has another RUN.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from millrace import checks, files
from millrace.checks import absolute_path, place_of, plain_json, shown
from millrace.errors import ConfigError, MillraceError

_FORMAT = 4  # version of the folder's layout
_JOB, _OWNER, _DONE, _FILES, _SCRATCH = "job.json", "owner", "done.jsonl", "files", "scratch"
_RUN = re.compile(r"[0-9a-f]{12}")
_ENTRY = re.compile(r"job\.json(\..*\.tmp)?|owner|[0-9a-f]{12}", re.DOTALL)  # of the folder
_MOST_DIFFERENCES = 5  # in a message


class Journal:
    """The journal of one job; making it takes the lock, `open` gives it a run and its folder.

    Closing removes a journal without a finished task: a job that fails at its start leaves nothing.
    """

    def __init__(self, path: str) -> None:
        self.path, self.run, self.folder = path, "", ""  # there is a run when the journal is ours
        self._job_path = os.path.join(path, _JOB)
        self._process = os.getpid()
        self._file: Any = None
        # The last line of each value and task, as in the file.
        self._lines: dict[str, dict[str, bytes]] = {"name": {}, "task": {}}
        _check_folder(path)
        with contextlib.ExitStack() as stack:
            try:
                self._has_lock = stack.enter_context(files.file_lock(path + ".lock", limit=0))
            except BlockingIOError as error:
                raise _is_held(path, str(error.strerror)) from None
            for left in files.temporaries_of(path):  # of a removal that was cut off
                _remove_tree(left)
            self._stack = stack.pop_all()

    def open(self, job: Any, *, restart: bool = False) -> bool:
        """Continues an earlier run of the job, or begins a new one; returns whether it continues.

        Raises ConfigError for an unfinished journal of another job, or one that cannot be read, and
        MillraceError for one with another owner.
        """
        os.makedirs(self.path, exist_ok=True)
        if not self._has_lock:
            self._stack.enter_context(_owner_file(self.path))
        earlier = None if restart else self._earlier_run(job)
        run = earlier or os.urandom(6).hex()
        self.folder = os.path.join(absolute_path(self.path), run)
        if earlier is None:
            self.run = run
            _remove_tree(self._job_path)  # from here on the earlier job is gone
            os.mkdir(os.path.join(self.path, run))
            content = {"format": _FORMAT, "run": run, "job": job}
            files.write_file(self._job_path, json.dumps(content).encode())
        self._read_lines()
        self.run = run
        self._remove_leftovers()
        return earlier is not None

    def remove_if_of(self, job: Any) -> None:
        """Removes a journal of this job, or one that was killed before it had a job."""
        with contextlib.suppress(ValueError, KeyError, TypeError, OSError):
            path = Path(self._job_path)
            if not path.exists() or json.loads(path.read_bytes())["job"] == job:
                self.remove()

    def close(self) -> None:
        """Frees the lock, and removes a journal without a finished task."""
        with self._stack, contextlib.suppress(OSError):  # what stays does no harm
            # A forked child leaves it to its parent.
            if self.run and not self._lines["task"] and os.getpid() == self._process:
                self.remove()

    def remove(self) -> None:
        """Removes the folder; the lock is held until `close`."""
        # The rename ends the journal. After a kill, the next run of this prefix removes the rest.
        doomed = files.temporary_name(self.path)
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.path, doomed)
            _remove_tree(doomed)

    def value(self, name: str) -> Any:
        """The last value stored under a name, or None."""
        line = self._lines["name"].get(name)
        return line and _entry_of(line)["value"]

    def store(self, name: str, value: Any) -> Any:
        """Stores a value, plain JSON, and flushes it to the disk; returns it as `value` does."""
        return self._append("name", {"name": name, "value": value})["value"]

    def add(self, task: str, attempt: str, record: Any, sums: Mapping[str, Any]) -> Any:
        """Adds a finished task, with size and XXH3-64 of its files; returns the plain record."""
        entry = {"task": task, "attempt": attempt, "files": sums, "record": record}
        return self._append("task", entry)["record"]

    def record(self, task: str) -> tuple[Any, str] | None:
        """The record of a finished task and the folder of its files, which are checked; or None."""
        if line := self._lines["task"].get(task):
            entry = _entry_of(line)
            folder = self.folder_of(entry["attempt"])
            if _are_whole(folder, entry["files"]):
                return entry["record"], folder
        return None

    def folder_of(self, attempt: str) -> str:
        return os.path.join(self.folder, _FILES, attempt)

    def _append(self, kind: str, entry: Any) -> Any:
        entry = plain_json(entry)
        line = json.dumps({"xxh3": _sum_of_json(entry), "entry": entry}).encode() + b"\n"
        with files.naming(self._file.name):
            self._file.write(line)
            files.flush_to_disk(self._file, durable=kind == "name")
        self._lines[kind][entry[kind]] = line
        return entry

    def _read_lines(self) -> None:
        """Opens the file of lines, cuts off a torn one at its end, and reads the others."""
        path = os.path.join(self.folder, _DONE)
        file = self._file = self._stack.enter_context(open(path, "a+b"))  # noqa: SIM115
        files.flush_to_disk(file)
        files.fsync_folder(path)
        place = file.seek(0)
        for line in file:
            if not line.endswith(b"\n"):
                file.truncate(place)
                break
            if (entry := _entry_of(line)) is not None:
                kind = "task" if "task" in entry else "name"
                self._lines[kind][entry[kind]] = line
            place += len(line)

    def _earlier_run(self, job: Any) -> str | None:
        """The run to continue, or None to begin a new one."""
        if not os.path.lexists(self._job_path):
            return None
        try:
            content = json.loads(Path(self._job_path).read_bytes())
            if content["format"] != _FORMAT or not _RUN.fullmatch(content["run"]):
                raise ValueError
            run, other = str(content["run"]), dict(content["job"])
        except (ValueError, KeyError, TypeError, IsADirectoryError):
            raise ConfigError(
                f"{self.path} is damaged, or was written by another version of millrace. Give "
                "--restart (restart=True) to discard it, or another output"
            ) from None
        text = differences(other, job)
        if not text:
            return run
        path = os.path.join(self.path, run, _DONE)
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            if any("task" in (_entry_of(line) or ()) for line in file):
                raise ConfigError(
                    f"{self.path} is the journal of an unfinished job, and this job differs from "
                    f"it: {text}. Run the same command again to continue that job, give --restart "
                    "(restart=True) to discard it, or give another output"
                )
        return None

    def _remove_leftovers(self) -> None:
        """Removes earlier runs, and the files of attempts without a line in the journal."""
        _remove_others(self.path, {_JOB, _OWNER, self.run})
        _remove_tree(os.path.join(self.folder, _SCRATCH))
        for name in (_FILES, _SCRATCH):
            os.makedirs(os.path.join(self.folder, name), exist_ok=True)
        attempts = {_entry_of(line)["attempt"] for line in self._lines["task"].values()}
        _remove_others(os.path.join(self.folder, _FILES), attempts)


def _check_folder(path: str) -> None:
    """Raises a ConfigError if a path has anything but a journal, or cannot have one."""
    parent = os.path.dirname(path) or "."
    if not os.path.isdir(parent):
        raise ConfigError(f"{parent} is not a folder; create it, or give another output")
    problem = ""
    with contextlib.suppress(FileNotFoundError):  # or another process has just finished the job
        # Files are renamed between the journal and the folder of the output.
        if os.path.islink(path) or os.path.ismount(path) or os.path.isfile(path):
            problem = "is a file, a link or a mounted file system"
        elif foreign := [name for name in os.listdir(path) if not _ENTRY.fullmatch(name)]:
            problem = f"holds {shown(min(foreign))}, which is not part of a journal"
    if problem:
        raise ConfigError(
            f"{path} {problem}; a folder of this name is to hold the journal of the job, beside "
            "the output: move away what is there, or give another output"
        )


@contextlib.contextmanager
def _owner_file(folder: str) -> Iterator[None]:
    """Names this process as the owner; raises a MillraceError if another may be at work."""
    path, process, here = os.path.join(folder, _OWNER), str(os.getpid()), os.uname().nodename
    with contextlib.suppress(FileNotFoundError), open(path) as file:
        host, _, other = file.read().rpartition(" ")
        if host != here or (os.path.exists(f"/proc/{other}") and other != process):
            raise _is_held(
                folder,
                f"held by process {other} on {host}, as far as a file system without locks "
                f"tells; if that process has ended, remove {path} and run again",
            )
        os.unlink(path)
    with open(path, "x") as file:
        file.write(f"{here} {process}")
    try:
        yield
    finally:
        if process == str(os.getpid()):
            _remove_tree(path)


def _is_held(path: str, text: str) -> MillraceError:
    return MillraceError(
        f"another process is at work on this job: {path} is {text}. Or give another output"
    )


def differences(old: Any, new: Any) -> str:
    """The entries in which two plain JSON values differ, as a text; empty if they are equal."""
    found = checks.differences(old, new, lambda was, now: was == now and type(was) is type(now))
    texts = [
        f"{place_of(path)} was {shown(a, 60)}, and is {shown(b, 60)} now" for path, a, b in found
    ]
    more = len(texts) - _MOST_DIFFERENCES
    return "; ".join(texts[:_MOST_DIFFERENCES]) + (f"; {more} more" * (more > 0))


def _sum_of_json(value: Any) -> str:
    return files.checksum([json.dumps(value).encode()])


def _entry_of(line: bytes) -> Any:
    """The entry of a line; None if the line is damaged."""
    try:
        content = json.loads(line)
        entry = content["entry"]
        return entry if content["xxh3"] == _sum_of_json(entry) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _are_whole(folder: str, sums: Mapping[str, Any]) -> bool:
    try:
        # The size first: it needs no reading.
        return all(
            os.path.getsize(path) == size and files.sum_of(path) == (size, digest)
            for name, (size, digest) in sums.items()
            for path in [os.path.join(folder, name)]
        )
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False


def _remove_others(folder: str, names: set[str]) -> None:
    for name in {*os.listdir(folder)} - names:
        _remove_tree(os.path.join(folder, name))


def _remove_tree(path: str) -> None:
    """Removes a folder or file, of which another process may remove parts meanwhile."""
    while os.path.lexists(path):
        is_folder = os.path.isdir(path) and not os.path.islink(path)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path) if is_folder else os.unlink(path)
