"""The plan of a tokenise job: which task reads which part of the input."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from millrace.checks import absolute_path
from millrace.cores import available_cores, available_memory
from millrace.errors import ConfigError
from millrace.text import InputFile, Part, parts_of
from millrace.text.streams import STDIN

MB = 1_000_000
_DEFAULT_TASK = 64 * MB  # bytes of input: half a second of a core's work, which a kill may cost
_SMALLEST_TASK = MB
_TASKS_PER_WORKER = 8  # of a short job: the workers end within an eighth of each other
_MOST_TASKS = 20_000  # of a long job: each is a few files in one folder
_MOST_PARTS = 1_000  # of a task that reads many small files
_UNPACKED_PER_WORKER = 4
_PARTS_PER_SHARD = 64  # that are looked at: shards differ by a part, 2 % of their size
_WORTH_A_WORKER = 32 * MB
_UNPACKED = 4  # bytes of text in a byte of a compressed file, about
LARGEST_PIECE = 32 * MB  # of a file that is unpacked: two copies of it are in memory
PIECES = 1_000_000  # task numbers that belong to one step of the plan

# Private memory in bytes, measured with GPT-2 and a vocabulary of 100 k and rounded up: the job's
# process (NumPy, Arrow, the sidecar's rows), and a worker (two libraries with a tokenizer each, the
# encoder's cache of words, three batches of text and their ids).
_JOB_MEMORY = 120 * MB
_WORKER_MEMORY = 280 * MB
# Copies of a document while it is encoded, in bytes per byte of its line: the line, a str of up to
# 4 bytes a character, its UTF-8, and up to one id of 4 bytes for each byte, in three copies.
_BYTES_PER_BYTE = 20
# Of the reference libraries, which keep more than ids, for the worst texts that were tried: many
# tokens of one byte.
_REFERENCE_BYTES_PER_BYTE = {"tokenizers": 330, "sentencepiece": 75, "tiktoken": 60}
DEFAULT_LIMIT = 100 * MB  # of a document


@dataclass(frozen=True, kw_only=True)
class Resources:
    """How much of the machine a job uses.

    Attributes:
        workers: Number of worker processes.
        max_document_size: Longest line, or text, in bytes: longer ones are rejected.
    """

    workers: int
    max_document_size: int


def resources_for(
    workers: int | None,
    memory: int | None,
    max_document_size: int | None,
    encoder: str = "",
    *,
    unpacking_memory: int = 0,
) -> Resources:
    """Chooses the number of workers so that the job fits into memory.

    Args:
        workers: Number of worker processes; None: one per core, or fewer if memory is short.
        memory: Bytes that all processes of the job may use; None: no limit but the machine's.
        max_document_size: Longest line in bytes; None: 100 MB. It decides the output, so it depends
            on nothing else.
        encoder: Name of the library that encodes, if it is known.
        unpacking_memory: Most bytes that unpacking a file takes for each byte of a document.

    Raises:
        ConfigError: Too little memory.
    """
    limit = max_document_size or DEFAULT_LIMIT
    if memory is None:
        most = (available_memory() - _JOB_MEMORY) // _WORKER_MEMORY
        return Resources(
            workers=workers or max(min(available_cores(), most), 1), max_document_size=limit
        )
    per_worker = _WORKER_MEMORY + limit * _REFERENCE_BYTES_PER_BYTE.get(encoder, _BYTES_PER_BYTE)
    job_memory = _JOB_MEMORY + limit * unpacking_memory
    most = (memory - job_memory) // per_worker
    if most < (workers or 1):
        needed = job_memory + (workers or 1) * per_worker
        raise ConfigError(
            f"memory is {memory / MB:,.0f} MB; {needed / MB:,.0f} MB are needed for "
            f"{workers or 1} worker{'s' if (workers or 1) > 1 else ''}"
            f"{' with ' + encoder if encoder else ''} and documents of up to "
            f"{limit / MB:,.0f} MB. Give more memory, fewer workers, or a lower limit of "
            "documents: --max-document-size (max_document_size=...)"
        )
    return Resources(workers=workers or min(available_cores(), most), max_document_size=limit)


def workers_worth(files: Sequence[InputFile]) -> int:
    """The number of workers that is worth their start, which takes as long as 32 MB of text."""
    if any(file.size is None for file in files):
        return available_cores()
    size = sum((file.size or 0) * (_UNPACKED if file.compression else 1) for file in files)
    return max(size // _WORTH_A_WORKER, 1)


def task_size_for(files: Sequence[InputFile], workers: int) -> int:
    """Bytes of input for one task: many tasks for each worker, but not too many in all."""
    total = sum(file.size or 0 for file in files)
    size = min(_DEFAULT_TASK, max(total // (_TASKS_PER_WORKER * workers), _SMALLEST_TASK))
    return max(size, total // _MOST_TASKS)


class Cut(NamedTuple):
    """A part of a file, as the fields of `Part` and the number of the file in the job."""

    file: int
    start: int
    stop: int | None
    size: int
    first_line: int | None

    def part(self, file: InputFile) -> Part:
        return Part(
            path=absolute(file.path),
            format=file.format,
            compression=file.compression,
            start=self.start,
            stop=self.stop,
            size=self.size,
            source=file.path,
            first_line=self.first_line,
            file_size=file.size,
            mtime_ns=file.mtime_ns,
        )


class Step(NamedTuple):
    """A step of the plan: one task that reads `cuts`, or a file that is unpacked into tasks.

    Attributes:
        number: Number that no other step has; it does not tell the order.
        cuts: What the task reads.
        file: Number of the file to unpack, or None.
    """

    number: int
    cuts: list[Cut]
    file: int | None

    def key(self) -> tuple[Any, ...]:
        """What the step reads: two plans have a step in common if this is the same."""
        return (self.file, *((cut.file, cut.start, cut.stop) for cut in self.cuts))


def plan_steps(
    files: Sequence[InputFile],
    *,
    task_size: int,
    workers: int,
    shard: tuple[int, int] | None = None,
    earlier: Sequence[Step] | None = None,
) -> list[Step]:
    """The steps that read all files, or those of a shard, in their order.

    A file that can be cut is cut into parts of about `task_size` bytes, and small parts share a
    task. A file that cannot be cut (a pipe, compressed lines, CSV) is unpacked into tasks if there
    are few of them, so that all workers read it; many are read by a task each.

    Args:
        earlier: The plan of an interrupted run, before some files changed. A task begins wherever
            one began there, and steps that read the same keep their numbers.

    Raises:
        ConfigError: A shard of a pipe.
    """
    if earlier is None:
        large = {
            number
            for number, file in enumerate(files)
            if file.has_pieces and _UNPACKED * (file.size or 0) > task_size
        }
        to_unpack = large if len(large) <= _UNPACKED_PER_WORKER * workers else set()
    else:
        to_unpack = {step.file for step in earlier if step.file is not None}
        to_unpack = {n for n in to_unpack if files[n].has_pieces}
    begins = {step.cuts[0][:2] for step in earlier or () if step.cuts}
    # Where a shard begins must not depend on the size of its tasks: the others may have another.
    part_size = task_size if shard is None else _shard_part_size(files, shard[1])
    sources: list[Cut | int] = []  # an int: a file to unpack
    for number, file in enumerate(files):
        if file.is_pipe or number in to_unpack:
            sources.append(number)
        else:
            sources += [
                Cut(number, part.start, part.stop, part.size, part.first_line)
                for part in parts_of(file, part_size)
            ]
    if shard is not None:
        sources = _sources_of_shard(sources, files, *shard)
    steps: list[Step] = []
    cuts: list[Cut] = []

    def end_task() -> None:
        if cuts:
            steps.append(Step(len(steps), [*cuts], None))
            cuts.clear()

    for source in sources:
        if isinstance(source, int):
            end_task()
            steps.append(Step(len(steps), [], source))
            continue
        if source[:2] in begins:
            end_task()
        if cuts and _continues(cuts[-1], source):
            last = cuts.pop()
            source = last._replace(stop=source.stop, size=last.size + source.size)
        cuts.append(source)
        if sum(cut.size for cut in cuts) >= task_size or len(cuts) >= _MOST_PARTS:
            end_task()
    end_task()
    if earlier is None:
        return steps
    numbers = {step.key(): step.number for step in earlier}
    unused = itertools.count(max(numbers.values(), default=-1) + 1)
    return [
        step._replace(number=numbers.pop(key) if (key := step.key()) in numbers else next(unused))
        for step in steps
    ]


def _shard_part_size(files: Sequence[InputFile], num_shards: int) -> int:
    total = sum(file.size or 0 for file in files)
    return min(max(total // (_PARTS_PER_SHARD * num_shards), 1), _DEFAULT_TASK)


def _continues(cut: Cut, following: Cut) -> bool:
    return cut.file == following.file and following.start > 0 and cut.stop == following.start


def _sources_of_shard(
    sources: Sequence[Cut | int], files: Sequence[InputFile], shard: int, num_shards: int
) -> list[Cut | int]:
    """The parts of one of several independent jobs, whose outputs follow each other.

    The bytes of all together are divided evenly; a part belongs to the shard in which it begins.
    """
    for source in sources:
        if isinstance(source, int) and files[source].is_pipe:
            raise ConfigError(
                f"{files[source].path} is a pipe, which shards cannot share; give files"
            )
    sizes = [
        files[source].size or 0 if isinstance(source, int) else source.size for source in sources
    ]
    first, end = (number * sum(sizes) // num_shards for number in (shard, shard + 1))
    begins = itertools.accumulate(sizes, initial=0)
    # What has no bytes at the very end belongs to the last shard.
    return [
        source
        for source, begin in zip(sources, begins, strict=False)
        if first <= begin and (begin < end or shard == num_shards - 1)
    ]


def size_of(steps: Sequence[Step], files: Sequence[InputFile]) -> int:
    """Bytes of the steps' input, without pipes."""
    return sum(
        sum(cut.size for cut in step.cuts) if step.file is None else files[step.file].size or 0
        for step in steps
    )


def from_json(rows: Sequence[Any]) -> list[Step]:
    return [Step(number, [Cut(*cut) for cut in cuts], file) for number, cuts, file in rows]


def absolute(path: str) -> str:
    """A path that is the same file from any folder, and for the workers of a Ray cluster."""
    return path if path == STDIN else absolute_path(path)
