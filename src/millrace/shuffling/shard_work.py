"""The tasks of a shuffle: a worker writes a shard, or a run of the input sorted by place."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.engine import Done, Run, Task
from millrace.errors import DataError
from millrace.files import naming, sum_of, temporary_name, xxh3
from millrace.ragged import Numbers
from millrace.shuffling.memory_budget import in_units
from millrace.shuffling.permutations import Permutation
from millrace.shuffling.shuffle_items import Items

Sums = dict[str, tuple[int, str]]  # size and XXH3-64 of each file, by its path
Function = Callable[[Any, Task], tuple[dict[str, Any], Sums]]

SHARD = "shard"  # path prefix of a shard in the folder of its task
_RUN, _SECTIONS = "run.bin", "sections"
_BLOCK = 4 << 20  # bytes that are hashed and written at a time
_ALIGNMENT = 4096  # of memory, offsets and sizes of direct writes: the largest that disks ask for


class HashedFile:
    """A file of a task: hashed while it is written, and renamed to its path when it is whole.

    Data go past the page cache where the file system can. A job writes more than the memory that it
    may use, and reads none of it soon: pages of it would drive others out, and the memory for them
    would have to be cleared first, which takes longer than the write.

    After the `with` block, `sum` is its size and XXH3-64.
    """

    def __init__(self, path: str) -> None:
        self.path, self.sum = path, (0, "")
        self._temporary = temporary_name(path)
        self._digest, self._size = xxh3(), 0
        self._filled = 0  # bytes of the block

    def __enter__(self) -> HashedFile:
        with naming(self.path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self._temporary, flags, 0o666)
            self._set_direct(True)
        # A map and not a NumPy array: it begins at a page.
        self._block = np.frombuffer(mmap.mmap(-1, _BLOCK, mmap.MAP_PRIVATE), np.uint8)
        return self

    def write(self, data: NDArray[np.uint8]) -> None:
        """Appends bytes."""
        while len(data):
            count = min(len(data), _BLOCK - self._filled)
            self._block[self._filled : self._filled + count] = data[:count]
            self._filled += count
            data = data[count:]
            if self._filled == _BLOCK:
                self._write_block()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self._write_block()
                os.rename(self._temporary, self.path)
                self.sum = self._size, str(self._digest.hexdigest())
        finally:
            os.close(self._descriptor)
            del self._block
            with contextlib.suppress(OSError):  # it has its name, or is not whole
                os.unlink(self._temporary)

    def _write_block(self) -> None:
        block = self._block[: self._filled]
        self._digest.update(block)
        self._size += self._filled
        self._filled = 0
        with naming(self.path):
            while len(block):
                if len(block) % _ALIGNMENT:  # the end of the file, or of a disk that is nearly full
                    self._set_direct(False)
                try:
                    block = block[os.write(self._descriptor, block.data) :]
                except OSError as error:
                    if not (self._is_direct and error.errno == errno.EINVAL):
                        raise
                    self._set_direct(False)  # a file system with rules of its own

    def _set_direct(self, is_direct: bool) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & ~os.O_DIRECT
        self._is_direct = False
        with contextlib.suppress(OSError):  # a file system without direct writes
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_DIRECT * is_direct)
            self._is_direct = is_direct


class Buffer:
    """Memory that a worker keeps between tasks: the pages of new memory would have to be cleared.

    It is never shared: each job has one in its own process, and each worker process another one.
    """

    def __init__(self) -> None:
        self.drop()

    def drop(self) -> None:
        """Frees the memory."""
        self.bytes = np.empty(0, np.uint8)
        self.bucket: int | None = None  # that is in the buffer
        self.ends = np.empty(0, np.int64)  # of its items, in tokens

    def take(self, size: int) -> NDArray[np.uint8]:
        """The first bytes of the buffer, with what the last task has left in them: uint8 [size]."""
        self.bucket = None
        if len(self.bytes) < size:
            self.drop()  # first: there is no room for both
            self.bytes = np.empty(size, np.uint8)
        return self.bytes[:size]

    def __reduce__(self) -> tuple[type[Buffer], tuple[()]]:
        return Buffer, ()  # the content is not for another process


@dataclass(frozen=True)
class Work:
    """What every task of a plan needs to know.

    A bucket is read at a time; a shard may have a part of one, or several. Without runs, buckets
    are read from the input.
    """

    items: Items
    permutation: Permutation
    starts: Numbers  # first place of each shard, and the end: int64 [shards + 1]
    buckets: Numbers  # first place of each bucket, and the end: int64 [buckets + 1]
    runs: Numbers | None = None  # first item of each run, and the end: int64 [runs + 1]
    run_folders: tuple[str, ...] = ()  # of the files of each run, once they are written
    buffer: Buffer = field(default_factory=Buffer)

    def write(self, run: Run, workers: int) -> list[Done]:
        """Writes the runs if there are any, then the shards; returns what each shard's task did."""
        work = self
        if self.runs is not None:
            runs = self._map(run, "phase 3: sort runs", write_run, "run", len(self.runs), workers)
            work = replace(self, run_folders=tuple(done.folder for done in runs))
        label, num_starts = "phase 4: write shards", len(self.starts)
        return work._map(run, label, write_shard, "shard", num_starts, workers)

    def _map(
        self, run: Run, label: str, function: Function, unit: str, num_bounds: int, workers: int
    ) -> list[Done]:
        """Runs a function on the numbers of all runs or shards."""
        count, num_bytes = num_bounds - 1, 0
        results: list[Done] = []

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
        targets = ends - sizes
        data = self.buffer.take(int(ends[-1]) * self.items.dtype.itemsize)
        if self.runs is None:
            order = np.argsort(numbers)
            self.items.read(numbers[order], data.view(self.items.dtype), targets[order])
        else:
            runs = np.searchsorted(self.runs, numbers, side="right") - 1
            order = np.argsort(runs, kind="stable")
            bounds = np.searchsorted(runs[order], np.arange(len(self.runs)))
            for run in np.flatnonzero(np.diff(bounds)).tolist():
                part = order[bounds[run] : bounds[run + 1]]
                self._read_section(run, bucket, sizes[part], targets[part], data)
        self.buffer.bucket, self.buffer.ends = bucket, ends

    def _read_section(
        self, run: int, bucket: int, sizes: Numbers, targets: Numbers, buffer: NDArray[np.uint8]
    ) -> None:
        """Reads a bucket's section of a run, which has its items in the order of places."""
        sections, path = (os.path.join(self.run_folders[run], name) for name in (_SECTIONS, _RUN))
        start, stop = np.fromfile(sections, np.int64, 2, offset=8 * bucket).tolist()
        sizes, targets = (counts * self.items.dtype.itemsize for counts in (sizes, targets))
        ends = start + np.cumsum(sizes)
        with naming(path), open(path, "rb", buffering=0) as file:
            try:
                if ends[-1] != stop:
                    raise ValueError
                _native.read_pieces(file.fileno(), ends - sizes, sizes, buffer, targets)
            except ValueError:
                raise DataError(
                    f"{path} was cut short or changed while the job ran: run the same command "
                    "again, and it is written again"
                ) from None


def write_run(work: Work, task: Task) -> tuple[dict[str, Any], Sums]:
    """Writes run `task.payload` of the input, sorted by place; pass 1 of `scatter`.

    `sections` has the byte at which each bucket begins in it, and the end: int64 [buckets + 1].
    """
    assert work.runs is not None
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
