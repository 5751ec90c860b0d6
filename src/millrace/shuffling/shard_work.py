"""The tasks of a shuffle: a worker writes a shard, or a run of the input sorted by place."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.engine import Done, Run, Task
from millrace.errors import DataError
from millrace.files import naming, sum_of
from millrace.ragged import Numbers
from millrace.shuffling.hashed_file import HashedFile
from millrace.shuffling.memory_budget import in_units
from millrace.shuffling.permutations import Permutation
from millrace.shuffling.shuffle_items import Items

Sums = dict[str, tuple[int, str]]
"""Size and XXH3-64 of each file, by its path."""

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
        self.drop()

    def drop(self) -> None:
        """Frees the memory."""
        self.bytes, self.ends = np.empty(0, np.uint8), np.empty(0, np.int64)
        self.bucket: int | None = None

    def take(self, size: int) -> NDArray[np.uint8]:
        """The first bytes of the buffer, with what the last task has left in them: uint8 [size]."""
        self.bucket = None
        if len(self.bytes) < size:
            self.drop()  # first: there is no room for both
            self.bytes = np.empty(size, np.uint8)
        return self.bytes[:size]

    def __reduce__(self) -> tuple[type[Buffer], tuple[()]]:
        return Buffer, ()  # the content is not for another process


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every task of a plan needs to know.

    Attributes:
        items, permutation: The items, and the place of each.
        starts: First place of each shard, and the end: int64 [shards + 1].
        buckets: First place of each bucket, and the end: int64 [buckets + 1]. A bucket is read at a
            time; a shard may have a part of one, or several.
        buffer: Memory for the items of a run or bucket.
    """

    items: Items
    permutation: Permutation
    starts: Numbers
    buckets: Numbers
    buffer: Buffer = field(default_factory=Buffer)

    def write(self, run: Run, workers: int) -> list[Done]:
        """Writes the shards, by tasks of a run; returns what each task has done."""
        count = len(self.starts) - 1
        return self._map(run, "phase 4: write shards", write_shard, "shard", count, workers)

    def _map(
        self,
        run: Run,
        label: str,
        function: Callable[..., Any],
        unit: str,
        count: int,
        workers: int,
    ) -> list[Done]:
        """Runs a function on the numbers of all runs or shards."""
        results: list[Done] = []
        num_bytes = 0

        def report(done: Done) -> tuple[int, str]:
            nonlocal num_bytes
            num_bytes += done.record["bytes"]
            return 1, f"{len(results):,} of {count:,} {unit}s  {in_units(num_bytes)}"

        tasks = [Task((unit == "shard", n), n, f"{unit} {n}") for n in range(count)]
        try:
            results.extend(
                run.map(function, tasks, self, phase=label, workers=workers, report=report)
            )
        finally:
            self.buffer.drop()
        return results

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
        self.read_bucket(bucket, numbers, sizes, ends - sizes, data.view(self.items.dtype))
        self.buffer.bucket, self.buffer.ends = bucket, ends

    def read_bucket(
        self,
        bucket: int,
        numbers: Numbers,
        sizes: Numbers,
        targets: Numbers,
        buffer: NDArray[Any],
    ) -> None:
        """Reads the items of a bucket from all over the input.

        Args:
            bucket: Number of the bucket.
            numbers: Its items, in the order of their places: int64 [n].
            sizes, targets: Tokens of each item, and its place in the buffer: int64 [n].
            buffer: Memory for the tokens.
        """
        order = np.argsort(numbers)
        self.items.read(numbers[order], buffer, targets[order])


@dataclass(frozen=True, kw_only=True)
class ScatterWork(Work):
    """Work in two passes: the input is written as runs, which are sorted by place.

    Attributes:
        runs: First item of each run, and the end: int64 [runs + 1].
        run_folders: Folder of the files of each run, once they are written.
    """

    runs: Numbers
    run_folders: tuple[str, ...] = ()

    def write(self, run: Run, workers: int) -> list[Done]:
        """Writes the runs, then the shards from them."""
        count = len(self.runs) - 1
        runs = self._map(run, "phase 3: sort runs", write_run, "run", count, workers)
        with_runs = replace(self, run_folders=tuple(done.folder for done in runs))
        return super(ScatterWork, with_runs).write(run, workers)

    def read_bucket(
        self,
        bucket: int,
        numbers: Numbers,
        sizes: Numbers,
        targets: Numbers,
        buffer: NDArray[Any],
    ) -> None:
        """Reads a bucket's section of every run; a section has its items in the order of places."""
        runs = np.searchsorted(self.runs, numbers, side="right") - 1
        order = np.argsort(runs, kind="stable")
        sizes, targets = sizes[order] * buffer.itemsize, targets[order] * buffer.itemsize
        bounds = np.searchsorted(runs[order], np.arange(len(self.runs)))
        for run in np.flatnonzero(np.diff(bounds)).tolist():
            part = slice(*bounds[run : run + 2])
            self._read_section(run, bucket, sizes[part], targets[part], buffer.view(np.uint8))

    def _read_section(
        self, run: int, bucket: int, sizes: Numbers, targets: Numbers, buffer: NDArray[np.uint8]
    ) -> None:
        ends = np.cumsum(sizes)
        path = os.path.join(self.run_folders[run], _SECTIONS)
        start, stop = np.fromfile(path, np.int64, 2, offset=8 * bucket).tolist()
        path = os.path.join(self.run_folders[run], _RUN)
        with naming(path), open(path, "rb", buffering=0) as file:
            try:
                if stop - start != ends[-1]:
                    raise ValueError
                _native.read_pieces(file.fileno(), start + ends - sizes, sizes, buffer, targets)
            except ValueError:
                raise DataError(
                    f"{path} was cut short or changed while the job ran: run the same command "
                    "again, and it is written again"
                ) from None


# ---- the tasks ----


def write_run(work: ScatterWork, task: Task) -> tuple[dict[str, Any], Sums]:
    """Writes run `task.payload` of the input, sorted by place; pass 1 of `scatter`.

    `sections` has the byte at which each bucket begins in it, and the end: int64 [buckets + 1].
    """
    items = work.items
    start, stop = work.runs[task.payload : task.payload + 2].tolist()
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
    files = {}
    for name, data in ((_RUN, buffer), (_SECTIONS, sections.view(np.uint8))):
        with HashedFile(os.path.join(task.folder, name)) as file:
            file.write(data)
        files[file.path] = file.sum
    return {"bytes": len(buffer)}, files


def write_shard(work: Work, task: Task) -> tuple[dict[str, Any], Sums]:
    """Writes shard `task.payload` with its index and sidecars."""
    start, stop = work.starts[task.payload : task.payload + 2].tolist()
    prefix = os.path.join(task.folder, SHARD)
    with HashedFile(f"{prefix}.bin") as data:
        for block in work.blocks(start, stop):
            data.write(block)
    files = {data.path: data.sum}
    for path in work.items.write_index(prefix, work.permutation.sources, start, stop):
        files[path] = sum_of(path)
    sums = {os.path.basename(path): list(sums) for path, sums in files.items()}
    return {"bytes": data.sum[0], "files": sums}, files
