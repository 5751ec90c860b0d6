"""The tasks of a tokenise job, from its steps: parts of files, and pieces that are unpacked."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

from millrace.engine import Run, Task
from millrace.files import xxh3
from millrace.text import InputFile, Part, Piece, pieces_of
from millrace.tokenizing import cuts
from millrace.tokenizing.chunk import Work, is_of, task_name
from millrace.tokenizing.tokenize_options import TokenizeOptions


def plan_tasks(
    run: Run, options: TokenizeOptions, files: Sequence[InputFile], workers: int
) -> InputTasks:
    """The tasks of a job, as an interrupted run has planned them as far as its files are the same.

    Raises:
        ConfigError: A size of chunks that gives too many.
        TextError: A file that cannot be read.
    """
    if options.shard is not None:  # all shards of a job have the same plan
        workers = options.shard[1]
    identities = [identity_of_file(file) for file in files]
    task_size, changes, earlier = options.chunk_size, "", None
    plan = run.stored("plan")
    if plan is not None:
        earlier, task_size = cuts.from_json(plan["steps"]), plan["task_size"]
        pairs = zip(files, identities, plan["files"], strict=True)
        changed = [file.path for file, new, old in pairs if new != old]
        if changed:
            more = f" and {len(changed) - 1:,} more files" if len(changed) > 1 else ""
            changes = f"{changed[0]}{more} changed after the interrupted run"
    task_size = task_size or cuts.task_size_for(files, workers)
    steps = earlier
    if steps is None or changes:
        with run.phase("plan"):
            steps = cuts.plan_steps(
                files,
                task_size=task_size,
                workers=workers,
                shard=options.shard,
                earlier=earlier,
            )
        run.store("plan", {"steps": steps, "files": identities, "task_size": task_size})
    return InputTasks(run, options, files, steps, task_size, changes)


def identity_of_file(file: InputFile) -> list[int | None]:
    """What changes if the file does: size, and time of the last change."""
    return [file.size, file.mtime_ns]


class InputTasks:
    """The tasks of a job.

    Args:
        steps: The steps of the plan.
        task_size: Bytes of input of a task.
        changes: What is said of inputs that changed after an interrupted run; or empty.

    Attributes:
        options: The options of the job.
        size: Bytes of input, without pipes.
        notices: What the user should know, after the last task was drawn.
    """

    def __init__(
        self,
        run: Run,
        options: TokenizeOptions,
        files: Sequence[InputFile],
        steps: Sequence[cuts.Step],
        task_size: int,
        changes: str,
    ) -> None:
        self._run, self._files, self._steps, self._changes = run, files, steps, changes
        self._piece_size = min(task_size, cuts.LARGEST_PIECE)
        self._size_kept = 0
        self.options = options
        self.size = cuts.size_of(steps, files)
        self.notices: list[str] = []

    def draw(self) -> Generator[Task, None, None]:
        """The tasks, in the order of the output."""
        for step in self._steps:
            if step.file is None:
                parts = tuple(cut.part(self._files[cut.file]) for cut in step.cuts)
                yield Task((step.number, 0), Work(parts=parts), task_name(parts))
            else:
                yield from self._pieces(step.number, self._files[step.file])
        if self._changes:
            notice = (
                f"{self._changes}: {self._run.num_kept:,} chunks ({self._size_kept / 1e6:,.1f} MB "
                "of input) that do not depend on the change are kept"
            )
            self.notices.append(notice)
            self._run.note(notice)

    def keep(self, task: Task, record: dict[str, Any]) -> bool:
        """Whether a task has read this, and would not end otherwise with today's `on_error`.

        So a job that stopped at a bad line can go on without such lines.
        """
        work: Work = task.payload
        has_ended_so = record["on_error"] == self.options.on_error
        has_ended_so = has_ended_so or not (any(record["rejects"]) or record["empty"])
        if not (has_ended_so and is_of(record, work.parts, work.checksum)):
            return False
        self._size_kept += self.size_of(task)
        self.remove_piece(task)
        return True

    def remove_piece(self, task: Task) -> None:
        """Removes what a task has read, if it was unpacked for it."""
        work: Work = task.payload
        if work.checksum is not None and os.path.exists(work.parts[0].path):
            os.unlink(work.parts[0].path)

    def size_of(self, task: Task) -> int:
        """Bytes of input of a task."""
        return sum(part.size for part in task.payload.parts)

    def _pieces(self, number: int, file: InputFile) -> Iterator[Task]:
        """The tasks of a file that cannot be cut: each piece is written to a file of its own."""
        source = file.path
        pieces = pieces_of(
            replace(file, path=cuts.absolute(source)),
            self._piece_size,
            max_document_size=self.options.longest_document,
        )
        for count, piece in enumerate(pieces):
            path = os.path.join(self._run.scratch, f"{number}-{count}.piece")
            digest = _write_piece(piece, path)
            parts: tuple[Part, ...] = (replace(piece.part, path=path, source=source),)
            work = Work(parts=parts, checksum=digest)
            yield Task((number, count), work, task_name(parts))


def _write_piece(piece: Piece, path: str) -> str:
    """Writes a piece to a file; returns a checksum of what a task reads of it."""
    digest = xxh3()
    with open(path, "wb") as file:
        for data in piece.chunks:
            digest.update(data)
            file.write(data)
    digest.update(str(piece.part.byte_offset).encode())
    return str(digest.hexdigest())
