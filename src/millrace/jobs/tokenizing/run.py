"""The tasks of a tokenise job: those to do, those done before, and their way to the output."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

from millrace.errors import ConfigError
from millrace.files import checksum, xxh3
from millrace.jobs.engine import Executor, Journal, Task
from millrace.jobs.progress import Progress
from millrace.jobs.tokenizing import plan
from millrace.jobs.tokenizing.output import Output
from millrace.jobs.tokenizing.task import Settings, Work, run_task, task_name
from millrace.text import Part, Piece, pieces_of


class TaskRun:
    """The tasks of a job: those to do, those done before, and their way to the output.

    Args:
        names: For each path in the plan, the path that the user has given.
    """

    def __init__(
        self, journal: Journal, settings: Settings, output: Output, names: dict[str, str]
    ) -> None:
        self._journal, self._settings, self._output = journal, settings, output
        self._names = names
        self._progress: Progress | None = None
        self._earlier = journal.numbers()  # of an earlier run
        self.steps = plan.from_json(journal.plan["steps"])
        self._plan = checksum([json.dumps(journal.plan).encode()])
        self._piece_size = min(journal.plan["task_size"], plan.LARGEST_PIECE)
        # Tasks in the order of the output, and the records of those that wait for one before them.
        self._order: deque[Task] = deque()
        self._records: dict[int, dict[str, Any]] = {}
        self.num_done = self.num_kept = self.num_bytes_done = 0

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
                self.num_done += 1
                self.num_bytes_done += record["bytes"]
                self._records[task.number] = record
                if work.checksum is not None:
                    os.unlink(work.parts[0].path)
                self._append()
                size += sum(part.size for part in work.parts)
                rate = self.num_bytes_done / 1e6 / max(time.monotonic() - start, 1e-9)
                tokens = sum(self._output.num_tokens)
                progress.update(
                    size,
                    f"{self._output.num_documents:,} documents  {tokens:,} tokens  {rate:.1f} MB/s",
                )
        self._append()

    def _append(self) -> None:
        """Appends tasks to the output as far as they are done without a gap."""
        while self._order and self._order[0].number in self._records:
            task = self._order.popleft()
            work: Work = task.payload
            self._output.append(work.folder, self._records.pop(task.number), work.parts)

    def _tasks(self) -> Generator[Task, None, None]:
        """The tasks that are not in the journal yet."""
        for number, step in enumerate(self.steps):
            number *= plan.PIECES
            if step.file is None:
                yield from self._unless_done(number, step.parts)
            else:
                end = number + plan.PIECES
                for piece in pieces_of(
                    step.file,
                    self._piece_size,
                    separator=self._settings.separator,
                    max_document_size=self._settings.max_document_size,
                ):
                    if number == end:
                        raise ConfigError(
                            f"{step.file.path} has more than {plan.PIECES:,} chunks of "
                            f"{self._piece_size:,} bytes. Give a larger chunk_size, and restart"
                        )
                    yield from self._piece(number, piece)
                    number += 1
                if any(number <= earlier < end for earlier in self._earlier):
                    raise _other_input(step.file.path)

    def _record(self, number: int) -> dict[str, Any] | None:
        """The record of a task that is done, and would not end otherwise with today's `on_error`.

        So a job that stopped at a bad line can go on without such lines. The record of another
        plan's task (of a process that runs at the same time, on a file system without locks) does
        not count.
        """
        record = self._journal.record(number)
        if record is None or record["plan"] != self._plan:
            return None
        if record["on_error"] == self._settings.on_error:
            return record
        return None if any(record["rejects"]) or record["empty"] else record

    def _unless_done(self, number: int, parts: tuple[Part, ...]) -> Iterator[Task]:
        record = self._record(number)
        if record is not None:
            self._keep(number, parts, record)
            return
        folder = self._journal.new_folder_of(number)
        yield self._task(number, parts, folder)

    def _piece(self, number: int, piece: Piece) -> Iterator[Task]:
        """The task of a piece of a file that cannot be cut: it is written beside its results."""
        record = self._record(number)
        digest = xxh3()
        if record is not None:
            for data in piece.chunks:
                digest.update(data)
            if record["checksum"] != digest.hexdigest():
                raise _other_input(piece.part.source)
            self._keep(number, (piece.part,), record)
            return
        folder = self._journal.new_folder_of(number)
        # Each process has its own names: without locks, two of them may write the same piece.
        path = os.path.join(folder, f"{os.urandom(6).hex()}.piece")
        with open(path, "wb") as file:
            for data in piece.chunks:
                digest.update(data)
                file.write(data)
        yield self._task(number, (replace(piece.part, path=path),), folder, digest.hexdigest())

    def _task(
        self, number: int, parts: tuple[Part, ...], folder: str, digest: str | None = None
    ) -> Task:
        parts = tuple(
            replace(part, source=self._names.get(part.source, part.source)) for part in parts
        )
        work = Work(
            journal=self._journal.folder,
            folder=folder,
            plan=self._plan,
            parts=parts,
            checksum=digest,
        )
        task = Task(number, work, task_name(parts))
        self._order.append(task)
        return task

    def _keep(self, number: int, parts: tuple[Part, ...], record: dict[str, Any]) -> None:
        """Takes over what an earlier run has done."""
        self._task(number, parts, self._journal.folder_of(number))
        self._records[number] = record
        self.num_kept += 1
        if self._progress is not None:
            self._progress.skip(sum(part.size for part in parts))


def _other_input(path: str) -> ConfigError:
    return ConfigError(
        f"{path} is not the input that the interrupted job has read. Give the same input, or start "
        "over: --restart"
    )
