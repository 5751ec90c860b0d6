"""Which task of a tokenise job reads which part of the input."""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

from millrace.checks import absolute_path
from millrace.errors import ConfigError
from millrace.text import InputFile, Part, parts_of
from millrace.text.streams import STDIN
from millrace.tokenizing.workers import MB, UNPACKED

# Bytes of input. A kill costs at most one task per worker: half a second of a core's work.
_DEFAULT_TASK = 64 * MB
_SMALLEST_TASK = MB
_TASKS_PER_WORKER = 8  # of a short job: the workers end within an eighth of each other
_MOST_TASKS = 20_000  # of a long job: each is a few files in one folder
_MOST_PARTS = 1_000  # of a task that reads many small files
_UNPACKED_PER_WORKER = 4
_PARTS_PER_SHARD = 64  # shards differ by at most one part, 2 % of their size
LARGEST_PIECE = 32 * MB  # of a file that is unpacked: two copies of it are in memory


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
        earlier: The steps of an interrupted run, before some files changed. A task begins wherever
            one began there, and steps that read the same keep their numbers.

    Raises:
        ConfigError: A shard of a pipe.
    """
    if earlier is None:
        to_unpack = {
            number
            for number, file in enumerate(files)
            if file.has_pieces and UNPACKED * (file.size or 0) > task_size
        }
        if len(to_unpack) > _UNPACKED_PER_WORKER * workers:
            to_unpack.clear()
    else:
        to_unpack = {step.file for step in earlier if step.file is not None}
        to_unpack = {n for n in to_unpack if files[n].has_pieces}
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
    steps = _steps_of(sources, task_size, {step.cuts[0][:2] for step in earlier or () if step.cuts})
    numbers = {step.key(): step.number for step in earlier or ()}
    unused = itertools.count(max(numbers.values(), default=-1) + 1)
    return [
        step._replace(number=numbers.pop(key) if (key := step.key()) in numbers else next(unused))
        for step in steps
    ]


def _steps_of(
    sources: Sequence[Cut | int], task_size: int, begins: Container[tuple[int, int]]
) -> list[Step]:
    """Steps of about `task_size` bytes that read the sources; a step ends where another begins."""
    steps: list[Step] = []
    cuts: list[Cut] = []

    def end_task() -> None:
        if cuts:
            steps.append(Step(0, [*cuts], None))
            cuts.clear()

    for source in sources:
        if isinstance(source, int):
            end_task()
            steps.append(Step(0, [], source))
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
    return steps


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
