"""The record of what a job has done, in a folder beside its output; it survives any kill.

    PREFIX.journal.lock         exists while a process runs the job
    PREFIX.journal/job.json     what the job is, and the name of the folder RUN of its data
    PREFIX.journal/RUN/plan.json
    PREFIX.journal/RUN/result.json            exists when the output is whole
    PREFIX.journal/RUN/files/NNNNNN/          files of task N
    PREFIX.journal/RUN/records/NNNNNN.json    record of task N: it is done if this file is whole and
                                              every file that it names has its size and checksum

A task writes its files under temporary names, renames them, and commits its record last. Records
and files of tasks are not flushed to the disk: after a power cut, what is damaged counts as not
done. On a cluster they are flushed: the job goes on when it loses the machine of a task that is
done, with what that machine had in memory. `job.json`, `plan.json` and `result.json` are flushed.

Two attempts of one task may run at once: an executor tries a task again when it has lost a machine
that may still be at work. Both write the same bytes, under temporary names that differ, so it does
not matter which one renames last. A late attempt creates no folders. So it fails, and does no harm,
after the journal was removed; and as each start from nothing has another RUN, it cannot commit into
a later job.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from millrace.checks import absolute_path, one_path, shown
from millrace.errors import ConfigError, DataError, MillraceError
from millrace.files import (
    atomic_file,
    checksum,
    file_lock,
    flush_to_disk,
    fsync_folder,
    naming,
    sum_of,
    temporaries_of,
    temporary_name,
)

_FORMAT = 2  # version of the folder's layout
_JOB, _PLAN, _RESULT = "job.json", "plan.json", "result.json"
_RECORDS, _FILES = "records", "files"
_RUN = re.compile(r"[0-9a-f]{12}")
_RECORD = re.compile(r"([0-9]+)\.json")
_MOST_DIFFERENCES = 5  # in a message


class Journal:
    """The journal of one job; only one process at a time has it open.

    Opening it continues the job whose journal is in the folder. If there is none, it creates the
    folder and a new journal. Leaving a `with` block closes it. A journal in which nothing is
    committed is removed then: a job that fails at its start leaves nothing behind.

    Args:
        path: The journal's folder, beside the output and named after it: `PREFIX.journal`.
        job: What decides the job's output, as plain JSON values: inputs, options, versions.
        restart: Whether to discard what an earlier run has done.
        on_restart: Called before the journal of an earlier run is discarded, with the lock held.

    Attributes:
        path: The journal's folder.
        folder: Absolute path of the folder inside it that tasks write to; the first argument of
            `commit`.
        plan: What `set_plan` has stored, in this run or an earlier one; None before.
        result: What `finish` has stored in an earlier run, which was killed while it removed the
            journal: the job is done, and only `remove` is left to do. None for other jobs.

    Raises:
        ConfigError: If the folder holds the journal of another job, or is not a journal; or if the
            job is not plain JSON.
        DataError: If a file of the journal is damaged.
        MillraceError: If another process has the journal open, or the folder cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with Journal(f"{folder}/web.journal", {"inputs": ["a"]}) as journal:
        ...         path = os.path.join(journal.new_folder_of(0), "letters")
        ...         with open(path, "w") as file:
        ...             _ = file.write("abc")
        ...         commit(journal.folder, 0, {"num_letters": 3}, [path])
        ...     with Journal(f"{folder}/web.journal", {"inputs": ["a"]}) as journal:
        ...         print(journal.record(0), journal.record(1))
        ...         journal.finish({"num_letters": 3})
        {'num_letters': 3} None
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        job: Mapping[str, Any],
        *,
        restart: bool = False,
        on_restart: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = one_path("path", path).rstrip(os.sep)
        self._owner = os.getpid()
        job = _plain_json(dict(job))
        parent = os.path.dirname(self.path) or "."
        if not os.path.isdir(parent):
            raise ConfigError(f"{parent} is not a folder; create it, or give another output")
        # Files are renamed between the journal and the folder of the output.
        if os.path.islink(self.path) or os.path.ismount(self.path):
            raise ConfigError(
                f"{self.path} is a link or a mounted file system; the journal must lie in the "
                "folder of the output: remove the link, or give another output"
            )
        with contextlib.ExitStack() as stack, _opening(self.path):
            try:
                self._is_alone = stack.enter_context(file_lock(self.path + ".lock", limit=0))
            except BlockingIOError as error:
                raise MillraceError(
                    f"another process is at work on this job: {self.path} is {error.strerror}. Or "
                    "give another output"
                ) from None
            run = self._run_of(job, restart)
            self._is_new = run is None
            if run is None:
                if restart and os.path.exists(self.path):
                    on_restart()
                    _remove_tree(os.path.join(self.path, _JOB))
                run = self._new_run(job)
            self.folder = os.path.join(absolute_path(self.path), run)
            for name in (_RECORDS, _FILES):  # a power cut may have left a run without them
                os.makedirs(os.path.join(self.folder, name), exist_ok=True)
            if self._is_alone:
                self._remove_all_but(run)
            self.plan = self._read(_PLAN)
            self.result = self._read(_RESULT)
            self._stack = stack.pop_all()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets other processes open the journal, and removes it if nothing is committed."""
        # A folder that stays does no harm. A forked child leaves it to its parent.
        with self._stack, contextlib.suppress(OSError, MillraceError):
            is_owner = (self._is_alone or self._is_new) and self._owner == os.getpid()
            if is_owner and self.result is None and not _has_records(self.folder):
                self.remove()

    def numbers(self) -> set[int]:
        """The numbers of the tasks that have a record, which may be damaged."""
        names = os.listdir(os.path.join(self.folder, _RECORDS))
        return {int(match[1]) for match in map(_RECORD.fullmatch, names) if match}

    def set_plan(self, plan: Any) -> None:
        """Stores the plan of the job, plain JSON, before its tasks run."""
        self.plan = self._write(_PLAN, plan)

    def folder_of(self, number: int) -> str:
        """The folder for the files of a task."""
        return os.path.join(self.folder, _FILES, _name(number))

    def new_folder_of(self, number: int) -> str:
        """Creates the folder for the files of a task, without what dead attempts have left in it.

        Call this before the task runs, and not in it: see the text at the top of the module.
        """
        folder = self.folder_of(number)
        with _opening(self.path):
            if self._is_alone:  # else another process may run the task
                _remove_tree(folder)
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder)
        return folder

    def record(self, number: int) -> dict[str, Any] | None:
        """The record that a task committed, or None if it is not done.

        Reads every file of the task. If one is missing or damaged, the task is not done, and its
        record and files are removed. Files that the record does not name are removed in any case.
        """
        path = os.path.join(self.folder, _RECORDS, f"{_name(number)}.json")
        try:
            content = _read_json(path)
        except FileNotFoundError:
            return None
        except (ValueError, IsADirectoryError):
            content = None
        folder = self.folder_of(number)
        names = _whole_files(content, folder)
        if self._is_alone:
            with _opening(self.path):
                if names is None:
                    _remove_tree(path)
                    _remove_tree(folder)
                elif names:
                    for name in set(os.listdir(folder)) - names:
                        _remove_tree(os.path.join(folder, name))
        return None if names is None else content["record"]

    def discard_result(self) -> None:
        """Forgets the result of an earlier run, before this one makes other output."""
        if self.result is not None:
            path = os.path.join(self.folder, _RESULT)
            with _opening(self.path):
                _remove_file(path)
                fsync_folder(path)
            self.result = None

    def finish(self, result: Any) -> None:
        """Stores the result of the job, whose output is whole, and removes the journal.

        Removing many files takes time. If the process is killed meanwhile, the next run finds the
        result and does not do the work again.
        """
        self.result = self._write(_RESULT, result)
        self.remove()

    def remove(self) -> None:
        """Removes the folder; the lock is held until `close`."""
        # The rename is the instant at which the journal is gone. What a kill leaves of the renamed
        # folder, the next run of this prefix removes.
        doomed = temporary_name(self.path)
        try:
            if self.result is not None:
                for name in (_FILES, _RECORDS):
                    _remove_tree(os.path.join(self.folder, name))
            os.rename(self.path, doomed)
            _remove_tree(doomed)
        except OSError as error:
            raise MillraceError(
                f"the journal {self.path} cannot be removed: {error}. The job is done and does not "
                "need it: remove it by hand"
            ) from None

    def _run_of(self, job: Mapping[str, Any], restart: bool) -> str | None:
        """The run of the journal that is in the folder, or None to begin a new one."""
        if self._is_alone:
            for left in temporaries_of(self.path):
                _remove_tree(left)
        try:
            entries = os.listdir(self.path)
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise ConfigError(
                f"{self.path} is a file; the journal of the job needs this name: remove the file, "
                "or give another output"
            ) from None
        foreign = [entry for entry in entries if not _is_ours(entry)]
        if foreign:
            raise ConfigError(
                f"{self.path} holds {shown(sorted(foreign)[0])}, which is not part of a journal; "
                "the journal of the job needs this name: give another output"
            )
        if restart or _JOB not in entries:
            return None
        try:
            content = _read_json(os.path.join(self.path, _JOB))
            if content["format"] != _FORMAT:
                raise ValueError
            run, other = content["run"], content["job"]
            if not (_RUN.fullmatch(run) and isinstance(other, dict)):
                raise ValueError
        except (ValueError, KeyError, TypeError, IsADirectoryError):
            raise ConfigError(
                f"{self.path} is damaged, or was written by another version of millrace. Give "
                "--restart (restart=True) to discard it, or another output"
            ) from None
        differences = list(_differences("", other, dict(job)))
        if not differences:
            return str(run)
        folder = os.path.join(self.path, run)
        if _has_records(folder) and not os.path.exists(os.path.join(folder, _RESULT)):
            more = len(differences) - _MOST_DIFFERENCES
            text = "; ".join(differences[:_MOST_DIFFERENCES]) + (f"; {more} more" * (more > 0))
            raise ConfigError(
                f"{self.path} is the journal of an unfinished job, and this job differs from it: "
                f"{text}. Run the same command again to continue that job, give --restart "
                "(restart=True) to discard it, or give another output"
            )
        return None  # that job is done, or has done nothing

    def _new_run(self, job: Mapping[str, Any]) -> str:
        run = os.urandom(6).hex()
        os.makedirs(os.path.join(self.path, run))
        _write_json(os.path.join(self.path, _JOB), {"format": _FORMAT, "run": run, "job": job})
        return run

    def _remove_all_but(self, run: str) -> None:
        for entry in os.listdir(self.path):
            if entry not in (_JOB, run):
                _remove_tree(os.path.join(self.path, entry))
        for folder in (self.folder, os.path.join(self.folder, _RECORDS)):
            for entry in os.listdir(folder):
                if entry.endswith(".tmp"):
                    _remove_file(os.path.join(folder, entry))

    def _read(self, name: str) -> Any:
        """The content of a file of the run; None if there is no file."""
        path = os.path.join(self.folder, name)
        try:
            content = _read_json(path)
            if content["xxh3"] != _sum_of_json(content["content"]):
                raise ValueError
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, RecursionError, IsADirectoryError):
            raise DataError(
                f"{path} is damaged. Give --restart (restart=True) to discard what the job has "
                "done, or another output"
            ) from None
        return content["content"]

    def _write(self, name: str, content: Any) -> Any:
        """Writes a file of the run, with its checksum; the content as `_read` returns it."""
        content = _plain_json(content)
        with _opening(self.path):
            _write_json(
                os.path.join(self.folder, name),
                {"xxh3": _sum_of_json(content), "content": content},
            )
        return content


def commit(
    folder: str,
    number: int,
    record: Mapping[str, Any],
    files: Sequence[str],
    sums: Mapping[str, tuple[int, str]] | None = None,
    *,
    durable: bool = False,
) -> None:
    """Records that a task is done; the last thing that a task does.

    Runs in any process of any machine that shares the file system. The record appears whole or not
    at all.

    Args:
        folder: `Journal.folder`.
        number: Number of the task.
        record: What the job needs to know about the task: plain JSON values.
        files: Paths of the files that the task has written into its folder, under their final
            names.
        sums: Size and XXH3-64 of files that the task has hashed while it wrote them, by path; the
            other files are read.
        durable: Whether to flush the files and the record to the disk; `Task.durable`.

    Raises:
        ConfigError: If a file is not in the folder of the task, or the record is not plain JSON.
        MillraceError: If the journal was removed: the job has ended, or has been started again. Or
            if a file does not have the size in `sums`.
        OSError: If a file cannot be read, or the record cannot be written.
    """
    home = task_folder(folder, number)
    names = [os.path.relpath(path, home) for path in files]
    for name, path in zip(names, files, strict=True):
        if os.path.dirname(name) or name in (os.curdir, os.pardir):
            raise ConfigError(f"{path} is not in {home}, the folder of task {number}")
    plain_record = _plain_json(dict(record))
    path = os.path.join(folder, _RECORDS, f"{_name(number)}.json")
    temporary = temporary_name(path)
    try:
        entries = []
        for name, source in zip(names, files, strict=True):
            size, digest = (sums or {}).get(source) or sum_of(source)
            if os.path.getsize(source) != size:
                raise MillraceError(
                    f"{source} has {os.path.getsize(source)} bytes, and {size} were written: "
                    "another program has changed it. Run again"
                )
            entries.append({"name": name, "size": size, "xxh3": digest})
            if durable:
                with naming(source), open(source, "rb") as data:
                    flush_to_disk(data)
        content = {"number": number, "files": entries, "record": plain_record}
        content["xxh3"] = _sum_of_record(content)
        with naming(path), open(temporary, "x", encoding="utf-8") as file:
            json.dump(content, file)
            if durable:
                flush_to_disk(file)
        os.rename(temporary, path)
    except FileNotFoundError:
        task_folder(folder, number)  # says so if the folder is gone
        raise
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def task_folder(folder: str, number: int) -> str:
    """The folder for the files of a task, in the process that runs it.

    Args:
        folder: `Journal.folder`.
        number: Number of the task.

    Raises:
        MillraceError: If it does not exist.
    """
    path = os.path.join(folder, _FILES, _name(number))
    if not os.path.isdir(path):
        raise MillraceError(
            f"{path} does not exist on {os.uname().nodename}. Either the job has ended or was "
            "started again while this task was at work, or this machine does not share the file "
            "system of the output: put the output on one that all machines share"
        )
    return path


def _has_records(folder: str) -> bool:
    """Whether anything is committed in the folder of a run."""
    with contextlib.suppress(FileNotFoundError):
        return bool(os.listdir(os.path.join(folder, _RECORDS)))
    return False


def _name(number: int) -> str:
    return f"{number:06d}"


def _is_ours(entry: str) -> bool:
    is_temporary = entry.startswith(_JOB + ".") and entry.endswith(".tmp")
    return entry == _JOB or is_temporary or _RUN.fullmatch(entry) is not None


@contextlib.contextmanager
def _opening(path: str) -> Iterator[None]:
    """Turns an OSError into one that says what the journal is and what can be done."""
    try:
        yield
    except MillraceError:
        raise
    except OSError as error:
        raise MillraceError(
            f"the journal {path} cannot be written: {error}. The job keeps what it has done there: "
            "make room and grant access, or write to another folder"
        ) from error


# ---- JSON ----


def _plain_json(value: Any) -> Any:
    """The value as JSON returns it: tuples become lists."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{shown(value)} cannot be stored as JSON: {error}. Give texts, numbers, lists and "
            "dicts"
        ) from None


def _write_json(path: str, content: Any) -> None:
    with atomic_file(path) as file:
        file.write(json.dumps(content).encode())


def _read_json(path: str) -> Any:
    with open(path, "rb") as file:
        return json.loads(file.read())


def _differences(place: str, old: Any, new: Any) -> Iterator[str]:
    """Texts on the entries that differ: which, the old value, and the new one."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            inner = f"{place}.{key}" if place else key
            if key not in old:
                yield f"{inner} is {shown(new[key], 60)} now, and was not there"
            elif key not in new:
                yield f"{inner} was {shown(old[key], 60)}, and is not there now"
            else:
                yield from _differences(inner, old[key], new[key])
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from _differences(f"{place}[{index}]", before, after)
    elif isinstance(old, list) and isinstance(new, list):
        yield f"{place} had {len(old)} entries, and has {len(new)} now"
    elif old != new or type(old) is not type(new):
        yield f"{place} was {shown(old, 60)}, and is {shown(new, 60)} now"


# ---- files ----


def _whole_files(content: Any, folder: str) -> set[str] | None:
    """The names of a record's files if they are as it says; else None."""
    try:
        if content["xxh3"] != _sum_of_record(content):
            return None
        sums = {file["name"]: (file["size"], file["xxh3"]) for file in content["files"]}
        for name, (size, digest) in sums.items():
            path = os.path.join(folder, name)
            # The size first: it needs no reading.
            if os.path.getsize(path) != size or sum_of(path) != (size, digest):
                return None
        return set(sums)
    except (KeyError, TypeError, FileNotFoundError, NotADirectoryError):
        return None


def _sum_of_record(content: dict[str, Any]) -> str:
    """XXH3-64 of what a record says."""
    return _sum_of_json([content["number"], content["files"], content["record"]])


def _sum_of_json(content: Any) -> str:
    return checksum([json.dumps(content).encode()])


def _remove_file(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _remove_tree(path: str) -> None:
    """Removes a folder or file, also if another process removes parts of it meanwhile."""
    if os.path.isdir(path) and not os.path.islink(path):
        while os.path.isdir(path):
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(path)
    else:
        _remove_file(path)
