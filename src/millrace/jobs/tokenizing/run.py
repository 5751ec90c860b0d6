"""The tasks of a tokenise job: those to do, those done before, and their way to the output."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

from millrace.errors import ConfigError, MillraceError, TextError
from millrace.files import xxh3
from millrace.jobs.engine import Executor, Journal, Task
from millrace.jobs.progress import Progress
from millrace.jobs.tokenizing import plan
from millrace.jobs.tokenizing.output import Output
from millrace.jobs.tokenizing.task import Settings, Work, is_of, run_task, task_name
from millrace.text import InputFile, Part, Piece, pieces_of


class TaskRun:
    """The tasks of a job: those to do, those done before, and their way to the output.

    Args:
        steps: The steps of the plan.
        task_size: Bytes of input of a task.
        changes: What is said of inputs that changed after an interrupted run; or empty.
    """

    def __init__(
        self,
        journal: Journal,
        settings: Settings,
        output: Output,
        files: Sequence[InputFile],
        steps: Sequence[plan.Step],
        task_size: int,
        changes: str,
    ) -> None:
        self._journal, self._settings, self._output = journal, settings, output
        self._files, self._steps, self._changes = files, steps, changes
        self.size = plan.size_of(steps, files)  # in bytes
        self._progress: Progress | None = None
        self._piece_size = min(task_size, plan.LARGEST_PIECE)
        # Tasks in the order of the output, and the records of those that wait for one before them.
        # An error in the place of a record is raised when all before it are appended: so the error
        # of a job does not depend on which task was fast.
        self._order: deque[Task] = deque()
        self._records: dict[int, dict[str, Any] | MillraceError] = {}
        self._has_failed = False
        self.num_done = self.num_kept = self.num_bytes_done = 0
        self._size_kept = 0
        self.notices: list[str] = []

    def work(self, executor: Executor, workers: int | None, progress: Progress) -> None:
        start = time.monotonic()
        size = 0
        self._progress = progress
        # Closed at an error, too: the generators hold the input that is being read open.
        with (
            contextlib.closing(self._tasks()) as tasks,
            contextlib.closing(
                executor(run_task, self._settings, tasks, workers=workers)
            ) as results,
        ):
            for task, record in results:
                work: Work = task.payload
                self._records[task.number] = record
                if isinstance(record, MillraceError):
                    self._has_failed = True
                else:
                    self.num_done += 1
                    self.num_bytes_done += record["bytes"]
                    size += sum(part.size for part in work.parts)
                    if work.checksum is not None:
                        os.unlink(work.parts[0].path)
                self._append(size)
                rate = self.num_bytes_done / 1e6 / max(time.monotonic() - start, 1e-9)
                tokens = sum(self._output.num_tokens)
                progress.update(
                    size,
                    f"{self._output.num_documents:,} documents  {tokens:,} tokens  {rate:.1f} MB/s",
                )
        self._append(size)

    def _append(self, size: int) -> None:
        """Appends tasks to the output as far as they are done without a gap."""
        while self._order and self._order[0].number in self._records:
            task = self._order.popleft()
            record = self._records.pop(task.number)
            if isinstance(record, MillraceError):
                if isinstance(record, TextError) and self.num_done + self.num_kept:
                    record.args = (
                        f"{record}. The journal keeps what is done: "
                        f"{self.num_done + self.num_kept:,} chunks, "
                        f"{(size + self._size_kept) / 1e6:,.1f} MB of input",
                    )
                raise record
            work: Work = task.payload
            self._output.append(work.folder, record, work.parts)

    def _tasks(self) -> Generator[Task, None, None]:
        """The tasks that are not in the journal yet, until one fails."""
        try:
            with contextlib.closing(self._planned_tasks()) as tasks:
                for task in tasks:
                    yield task
                    if self._has_failed:
                        return
        except MillraceError as error:  # of reading the input here, after what tasks have read
            self._order.append(Task(-1, None))
            self._records[-1] = error
            return
        if self._changes:
            notice = (
                f"{self._changes}: {self.num_kept:,} chunks ({self._size_kept / 1e6:,.1f} MB of "
                "input) that do not depend on the change are kept"
            )
            self.notices.append(notice)
            if self._progress is not None:
                self._progress.note(f"millrace: {notice}")

    def _planned_tasks(self) -> Generator[Task, None, None]:
        for step in self._steps:
            number = step.number * plan.PIECES
            if step.file is None:
                parts = tuple(cut.part(self._files[cut.file]) for cut in step.cuts)
                record = self._journal.record(number)
                if record is None or not self._is_kept(record, parts, None):
                    yield self._task(number, parts, self._journal.new_folder_of(number))
                else:
                    self._keep(number, parts, record)
                continue
            end = number + plan.PIECES
            file = self._files[step.file]
            source, file = file.path, replace(file, path=plan.absolute(file.path))
            for piece in pieces_of(
                file,
                self._piece_size,
                max_document_size=self._settings.max_document_size,
            ):
                if number == end:
                    raise ConfigError(
                        f"{source} has more than {plan.PIECES:,} chunks of "
                        f"{self._piece_size:,} bytes. Give a larger chunk_size, and restart"
                    )
                yield from self._piece(number, piece, source)
                number += 1

    def _is_kept(self, record: dict[str, Any], parts: tuple[Part, ...], digest: str | None) -> bool:
        """Whether a task has read this, and would not end otherwise with today's `on_error`.

        So a job that stopped at a bad line can go on without such lines.
        """
        has_ended_so = record["on_error"] == self._settings.on_error
        has_ended_so = has_ended_so or not (any(record["rejects"]) or record["empty"])
        return has_ended_so and is_of(record, parts, digest)

    def _piece(self, number: int, piece: Piece, source: str) -> Iterator[Task]:
        """The task of a piece of a file that cannot be cut: it is written beside its results."""
        record = self._journal.record(number)
        if record is None:
            folder = self._journal.new_folder_of(number)
        else:  # its files stay until the piece is compared
            folder = self._journal.folder_of(number)
        # Each process has its own names: without locks, two of them may write the same piece.
        path = os.path.join(folder, f"{os.urandom(6).hex()}.piece")
        digest = xxh3()
        with open(path, "wb") as file:
            for data in piece.chunks:
                digest.update(data)
                file.write(data)
        part = piece.part  # as it is when its bytes are read
        digest.update(str(part.byte_offset).encode())
        parts = (replace(piece.part, path=path, source=source),)
        if record is None or not self._is_kept(record, parts, digest.hexdigest()):
            yield self._task(number, parts, folder, digest.hexdigest())
        else:
            os.unlink(path)
            self._keep(number, parts, record)

    def _task(
        self, number: int, parts: tuple[Part, ...], folder: str, digest: str | None = None
    ) -> Task:
        work = Work(journal=self._journal.folder, folder=folder, parts=parts, checksum=digest)
        task = Task(number, work, task_name(parts))
        self._order.append(task)
        return task

    def _keep(self, number: int, parts: tuple[Part, ...], record: dict[str, Any]) -> None:
        """Takes over what an earlier run has done."""
        self._task(number, parts, self._journal.folder_of(number))
        self._records[number] = record
        self.num_kept += 1
        size = sum(part.size for part in parts)
        self._size_kept += size
        if self._progress is not None:
            self._progress.skip(size)
