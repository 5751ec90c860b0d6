"""The plan of a tokenise job: which task reads which part of the input."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from millrace.cores import available_cores, available_memory
from millrace.errors import ConfigError
from millrace.text import InputFile, Part, parts_of

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
_DEFAULT_LIMIT = 100 * MB
_SMALLEST_LIMIT = 4 * MB


@dataclass(frozen=True, kw_only=True)
class Resources:
    """How much of the machine a job uses.

    Attributes:
        workers: Number of worker processes.
        max_document_size: Longest line, or text, in bytes: longer ones are rejected. It does not
            depend on the number of workers, nor on the machine, as the output depends on it.
    """

    workers: int
    max_document_size: int


def resources_for(
    workers: int | None, memory: int | None, max_document_size: int | None, encoder: str = ""
) -> Resources:
    """Chooses what is None so that the job fits into memory.

    Args:
        workers: Number of worker processes; None: one per core, or fewer if memory is short.
        memory: Bytes that all processes of the job may use; None: no limit but the machine's.
        max_document_size: Longest line in bytes; None: 100 MB, or less if memory is limited.
        encoder: Name of the library that encodes, if it is known.

    Raises:
        ConfigError: Too little memory.
    """
    limit = max_document_size or _DEFAULT_LIMIT
    if max_document_size is None and memory is not None:
        limit = min(max(memory // 1000, _SMALLEST_LIMIT), limit)
    if memory is None:
        most = (available_memory() - _JOB_MEMORY) // _WORKER_MEMORY
        return Resources(
            workers=workers or max(min(available_cores(), most), 1), max_document_size=limit
        )
    per_worker = _WORKER_MEMORY + limit * _REFERENCE_BYTES_PER_BYTE.get(encoder, _BYTES_PER_BYTE)
    most = (memory - _JOB_MEMORY) // per_worker
    if most < (workers or 1):
        needed = _JOB_MEMORY + (workers or 1) * per_worker
        raise ConfigError(
            f"memory is {memory / MB:,.0f} MB; {needed / MB:,.0f} MB are needed for "
            f"{workers or 1} worker{'s' if (workers or 1) > 1 else ''}"
            f"{' with ' + encoder if encoder else ''} and documents of up to "
            f"{limit / MB:,.0f} MB. Give more memory, fewer workers or a lower limit of documents"
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


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of the plan: one task that reads `parts`, or a `file` that is unpacked into tasks."""

    parts: tuple[Part, ...] = ()
    file: InputFile | None = None


def plan_steps(
    files: Sequence[InputFile],
    *,
    task_size: int,
    workers: int,
    separator: str | None,
    shard: tuple[int, int] | None = None,
) -> list[Step]:
    """The steps that read all files, or those of a shard, in their order.

    A file that can be cut is cut into parts of about `task_size` bytes, and small parts share a
    task. A file that cannot be cut (a pipe, compressed lines, CSV) is unpacked into tasks if there
    are few of them, so that all workers read it; many are read by a task each.

    Raises:
        ConfigError: A shard of a pipe.
    """
    large = [
        file
        for file in files
        if _can_be_unpacked(file, separator) and _UNPACKED * (file.size or 0) > task_size
    ]
    to_unpack = large if len(large) <= _UNPACKED_PER_WORKER * workers else []
    # Where a shard begins must not depend on the size of its tasks: the others may have another.
    part_size = task_size if shard is None else _shard_part_size(files, shard[1])
    sources: list[Step] = []  # each a part or a file
    for file in files:
        if file.is_pipe or file in to_unpack:
            sources.append(Step(file=file))
        else:
            sources += [Step(parts=(part,)) for part in parts_of(file, part_size)]
    if shard is not None:
        sources = _sources_of_shard(sources, *shard)
    steps: list[Step] = []
    parts: list[Part] = []

    def end_task() -> None:
        if parts:
            steps.append(Step(parts=tuple(parts)))
            parts.clear()

    for source in sources:
        if source.file is not None:
            end_task()
            steps.append(source)
            continue
        for part in source.parts:
            if parts and _continues(parts[-1], part):
                last = parts.pop()
                part = replace(last, stop=part.stop, size=last.size + part.size)
            parts.append(part)
        if sum(part.size for part in parts) >= task_size or len(parts) >= _MOST_PARTS:
            end_task()
    end_task()
    return steps


def _shard_part_size(files: Sequence[InputFile], num_shards: int) -> int:
    total = sum(file.size or 0 for file in files)
    return min(max(total // (_PARTS_PER_SHARD * num_shards), 1), _DEFAULT_TASK)


def _continues(part: Part, following: Part) -> bool:
    return part.path == following.path and following.start > 0 and part.stop == following.start


def _sources_of_shard(steps: Sequence[Step], shard: int, num_shards: int) -> list[Step]:
    """The steps of one of several independent jobs, whose outputs follow each other.

    The bytes of all steps together are divided evenly; a step belongs to the shard in which it
    begins.
    """
    for step in steps:
        if step.file is not None and step.file.is_pipe:
            raise ConfigError(f"{step.file.path} is a pipe, which shards cannot share; give files")
    total = sum(map(step_size, steps))
    first, end = (number * total // num_shards for number in (shard, shard + 1))
    begins = itertools.accumulate(map(step_size, steps), initial=0)
    # Steps without bytes at the very end belong to the last shard.
    return [
        step
        for step, begin in zip(steps, begins, strict=False)
        if first <= begin and (begin < end or shard == num_shards - 1)
    ]


def step_size(step: Step) -> int:
    """Bytes of a step's input; 0 for a pipe."""
    return (step.file.size or 0) if step.file else sum(part.size for part in step.parts)


def to_json(steps: Sequence[Step]) -> list[dict[str, Any]]:
    return [asdict(step) for step in steps]


def from_json(plan: list[dict[str, Any]]) -> list[Step]:
    return [
        Step(
            parts=tuple(Part(**part) for part in step["parts"]),
            file=None if step["file"] is None else InputFile(**step["file"]),
        )
        for step in plan
    ]


def _can_be_unpacked(file: InputFile, separator: str | None) -> bool:
    is_one_text = file.format == "text" and separator is None
    return file.has_pieces and not is_one_text
