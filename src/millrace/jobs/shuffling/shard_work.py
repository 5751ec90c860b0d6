"""The tasks of a shuffle: a worker writes a shard, or a run of the input sorted by place."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.engine import Task, commit, task_folder
from millrace.errors import DataError
from millrace.files import naming, sum_of
from millrace.ragged import Numbers
from millrace.shuffling.hashed_file import HashedFile
from millrace.shuffling.permutations import Permutation
from millrace.shuffling.shuffle_items import Items

SHARD = "shard"
"""Path prefix of a shard in the folder of its task."""

_RUN, _SECTIONS = "run.bin", "sections"


class Buffer:
    """Memory that a worker keeps between tasks: the pages of new memory would have to be cleared.

    It is never shared: each job has one in its own process, and each worker process another one.

    Attributes:
        bucket: Number of the bucket that is in the buffer; None: none is.
        ends: End of each of its items in tokens: int64 [items].
    """

    def __init__(self) -> None:
        self.bytes, self.ends = np.empty(0, np.uint8), np.empty(0, np.int64)
        self.bucket: int | None = None

    def take(self, size: int) -> NDArray[np.uint8]:
        """The first bytes of the buffer, with what the last task has left in them: uint8 [size]."""
        self.bucket = None
        if len(self.bytes) < size:
            self.drop()  # first: there is no room for both
            self.bytes = np.empty(size, np.uint8)
        return self.bytes[:size]

    def drop(self) -> None:
        """Frees the memory."""
        self.bytes, self.ends = np.empty(0, np.uint8), np.empty(0, np.int64)
        self.bucket = None

    def __reduce__(self) -> tuple[type[Buffer], tuple[()]]:
        return Buffer, ()  # the content is not for another process


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Tasks that can run at once.

    Attributes:
        label: What the phase does, for people.
        unit: What a task writes: "run" or "shard".
        function: Function of a task, whose payload is the number of the run or shard.
        first_task: Number of the task of run or shard 0.
        num_tasks: Number of tasks.
    """

    label: str
    unit: str
    function: Callable[[Any, Task], dict[str, Any]]
    first_task: int
    num_tasks: int


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every task of a plan needs to know.

    Attributes:
        folder: Folder of the journal's run.
        items, permutation: The items, and the place of each.
        starts: First place of each shard, and the end: int64 [shards + 1].
        buckets: First place of each bucket, and the end: int64 [buckets + 1]. A bucket is read at a
            time; a shard may have a part of one, or several.
        buffer: Memory for the items of a run or bucket.
    """

    folder: str
    items: Items
    permutation: Permutation
    starts: Numbers
    buckets: Numbers
    buffer: Buffer = field(default_factory=Buffer)

    @property
    def num_shards(self) -> int:
        return len(self.starts) - 1

    def phases(self) -> Sequence[Phase]:
        """The phases in their order; the last one writes the shards."""
        return [
            Phase(
                label="write shards",
                unit="shard",
                function=write_shard,
                first_task=0,
                num_tasks=self.num_shards,
            )
        ]

    def blocks(self, start: int, stop: int) -> Iterator[NDArray[np.uint8]]:
        """The bytes of the items at places [start, stop), a bucket's at a time."""
        size = self.items.dtype.itemsize
        bucket = int(np.searchsorted(self.buckets, start, side="right")) - 1
        while start < stop:
            first, end = self.buckets[bucket : bucket + 2].tolist()
            self._fill_buffer(bucket, first, end)
            end = min(end, stop)
            ends = self.buffer.ends
            low = int(ends[start - first - 1]) if start > first else 0
            yield self.buffer.bytes[low * size : int(ends[end - first - 1]) * size]
            start, bucket = end, bucket + 1

    def _fill_buffer(self, bucket: int, start: int, stop: int) -> None:
        """Reads the items of a bucket, unless the task before has left them in the buffer."""
        if self.buffer.bucket == bucket:
            return
        numbers = self.permutation.sources(start, stop)
        sizes = self.items.sizes(numbers)
        ends = np.cumsum(sizes)
        data = self.buffer.take(int(ends[-1]) * self.items.dtype.itemsize)
        self.read_bucket(bucket, numbers, sizes, ends, data)
        self.buffer.bucket, self.buffer.ends = bucket, ends

    def read_bucket(
        self,
        bucket: int,
        numbers: Numbers,
        sizes: Numbers,
        ends: Numbers,
        buffer: NDArray[np.uint8],
    ) -> None:
        """Reads the items of a bucket from all over the input.

        Args:
            bucket: Number of the bucket.
            numbers: Its items, in the order of their places: int64 [n].
            sizes, ends: Tokens of each item, and its end in the buffer in tokens: int64 [n].
            buffer: Memory for the items: uint8.
        """
        order = np.argsort(numbers)
        targets = (ends - sizes)[order]
        self.items.read(numbers[order], buffer.view(self.items.dtype), targets)


@dataclass(frozen=True, kw_only=True)
class ScatterWork(Work):
    """Work in two passes: the input is written as runs, which are sorted by place.

    Attributes:
        runs: First item of each run, and the end: int64 [runs + 1].
    """

    runs: Numbers

    def phases(self) -> Sequence[Phase]:
        """The phases in their order; the last one writes the shards."""
        sort = Phase(
            label="sort runs",
            unit="run",
            function=write_run,
            first_task=self.num_shards,
            num_tasks=len(self.runs) - 1,
        )
        return [sort, *super().phases()]

    def read_bucket(
        self,
        bucket: int,
        numbers: Numbers,
        sizes: Numbers,
        ends: Numbers,
        buffer: NDArray[np.uint8],
    ) -> None:
        """Reads a bucket's section of every run; a section has its items in the order of places."""
        token_size = self.items.dtype.itemsize
        runs = np.searchsorted(self.runs, numbers, side="right") - 1
        order = np.argsort(runs, kind="stable")
        sizes = sizes[order] * token_size
        targets = ends[order] * token_size - sizes
        counts = np.bincount(runs, minlength=len(self.runs) - 1)
        last = 0
        for run in np.flatnonzero(counts).tolist():
            first, last = last, last + int(counts[run])
            self._read_section(run, bucket, sizes[first:last], buffer, targets[first:last])

    def _read_section(
        self, run: int, bucket: int, sizes: Numbers, buffer: NDArray[np.uint8], targets: Numbers
    ) -> None:
        ends = np.cumsum(sizes)
        folder = task_folder(self.folder, self.num_shards + run)
        path = os.path.join(folder, _SECTIONS)
        start, stop = np.fromfile(path, np.int64, 2, offset=8 * bucket).tolist()
        path = os.path.join(folder, _RUN)
        if stop - start != ends[-1]:
            raise _damaged(path)
        with naming(path), open(path, "rb", buffering=0) as file:
            try:
                _native.read_pieces(file.fileno(), start + ends - sizes, sizes, buffer, targets)
            except ValueError:
                raise _damaged(path) from None


def _damaged(path: str) -> DataError:
    return DataError(
        f"{path} was cut short or changed while the job ran: run the same command again, and it "
        "is written again"
    )


# ---- the tasks ----


def write_run(work: ScatterWork, task: Task) -> dict[str, Any]:
    """Writes run `task.payload` of the input, sorted by place; pass 1 of `scatter`.

    `sections` has the byte at which each bucket begins in it, and the end: int64 [buckets + 1].
    """
    items, run = work.items, task.payload
    start, stop = int(work.runs[run]), int(work.runs[run + 1])
    places = work.permutation.places(start, stop)
    order = np.argsort(places)
    numbers = np.arange(start, stop)
    sizes = items.sizes(numbers)
    ends = np.cumsum(sizes[order])
    targets = np.empty_like(ends)
    targets[order] = ends - sizes[order]
    first_items = np.searchsorted(places[order], work.buckets)
    sections = np.concatenate([np.zeros(1, np.int64), ends])[first_items] * items.dtype.itemsize
    del places, order, sizes
    buffer = work.buffer.take(int(ends[-1]) * items.dtype.itemsize)
    items.read(numbers, buffer.view(items.dtype), targets)
    folder = task_folder(work.folder, task.number)
    files = {}
    for name, data in ((_RUN, buffer), (_SECTIONS, sections.view(np.uint8))):
        with HashedFile(os.path.join(folder, name)) as file:
            file.write(data)
        files[file.path] = file.sum
    record = {"bytes": len(buffer)}
    commit(work.folder, task.number, record, list(files), files, durable=task.durable)
    return record


def write_shard(work: Work, task: Task) -> dict[str, Any]:
    """Writes shard `task.payload` with its index and sidecars, and commits the task."""
    start, stop = work.starts[task.payload : task.payload + 2].tolist()
    prefix = os.path.join(task_folder(work.folder, task.number), SHARD)
    with HashedFile(f"{prefix}.bin") as data:
        for block in work.blocks(start, stop):
            data.write(block)
    files = {data.path: data.sum}
    for path in work.items.write_index(prefix, work.permutation.sources, start, stop):
        files[path] = sum_of(path)
    record = {
        "bytes": data.sum[0],
        "files": {os.path.basename(path): list(sums) for path, sums in files.items()},
    }
    commit(work.folder, task.number, record, list(files), files, durable=task.durable)
    return record
