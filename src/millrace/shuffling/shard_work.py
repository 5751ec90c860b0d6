"""The tasks of a shuffle: to write a shard, or a run of the input sorted by place."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from millrace import _native
from millrace.engine import Done, Run, Task
from millrace.engine.uploading import put_file
from millrace.errors import DataError
from millrace.files import flush_to_disk, naming, sum_of, xxh3
from millrace.names import BIN, IDX, INFO, ORIGINS
from millrace.ragged import Numbers, equal_runs
from millrace.shards.metadata import shard_prefix
from millrace.shuffling.permutations import Permutation
from millrace.shuffling.shuffle_items import Items
from millrace.storage import Bytes
from millrace.store.info import BlockHasher, Info, PairChecksums, write_info

Sums = dict[str, tuple[int, str]]  # size and XXH3-64 of each file, by its path

_RUN, _SECTIONS = "run.bin", "sections"


def write_hashed(path: str, parts: Iterable[Bytes], *hashers: Any) -> tuple[int, str]:
    """Writes a file of a task to the disk; returns its size and XXH3-64.

    Its pages leave the page cache: a job writes more than its memory, and reads none of it soon.
    """
    digest = xxh3()
    with naming(path), open(path, "wb") as file:
        for part in parts:
            for one in (digest, *hashers):
                one.update(part)
            file.write(part.data)
        flush_to_disk(file)
        with contextlib.suppress(OSError):  # a hint, which the kernel may refuse
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return file.tell(), str(digest.hexdigest())


class Buffer:
    """Memory that a process keeps between tasks: new memory would have to be cleared."""

    def __init__(self) -> None:
        self.bytes = np.empty(0, np.uint8)
        self.bucket: int | None = None  # that is in the buffer
        self.ends = np.empty(0, np.int64)  # of its items, in bytes

    def take(self, size: int) -> Bytes:
        """The first bytes of the buffer, with what the last task left there: uint8 [size]."""
        self.bucket = None
        if len(self.bytes) < size:
            self.bytes = np.empty(0, np.uint8)  # first: there is no room for both
            self.bytes = np.empty(size, np.uint8)
        return self.bytes[:size]

    def __reduce__(self) -> tuple[type["Buffer"], tuple[()]]:
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
    run_folders: tuple[str, ...] = ()  # of each run, once it is written
    buffer: Buffer = field(default_factory=Buffer)
    upload_to: str | None = None  # folder in a bucket to which the shards move

    def write(self, run: Run, workers: int) -> list[Done]:
        """Writes the runs if there are any, then the shards; returns the shards' tasks."""
        work = self
        options: dict[str, Any] = {"workers": workers, "is_durable": True}
        if self.runs is not None:
            tasks = _tasks("run", len(self.runs) - 1)
            runs = run.map(write_run, tasks, self, phase="phase 3: sort runs", **options)
            work = replace(self, run_folders=tuple(done.folder for done in runs))
        tasks = _tasks("shard", len(self.starts) - 1)
        return [*run.map(write_shard, tasks, work, phase="phase 4: write shards", **options)]

    def blocks(self, start: int, stop: int) -> Iterator[Bytes]:
        """The bytes of the items at places [start, stop), by bucket."""
        bucket = int(np.searchsorted(self.buckets, start, side="right")) - 1
        while start < stop:
            first, end = self.buckets[bucket : bucket + 2].tolist()
            self._fill_buffer(bucket, first, end)
            end = min(end, stop)
            ends = self.buffer.ends
            low = int(ends[start - first - 1]) if start > first else 0
            yield self.buffer.bytes[low : int(ends[end - first - 1])]
            start, bucket = end, bucket + 1

    def _fill_buffer(self, bucket: int, start: int, stop: int) -> None:
        """Reads the items of a bucket, unless they are in the buffer still."""
        if self.buffer.bucket == bucket:
            return
        numbers, dtype = self.permutation.sources(start, stop), self.items.dtype
        sizes = self.items.sizes(numbers) * dtype.itemsize
        ends = np.cumsum(sizes)
        targets = ends - sizes
        data = self.buffer.take(int(ends[-1]))
        if self.runs is None:
            order = np.argsort(numbers)
            self.items.read(numbers[order], data.view(dtype), targets[order] // dtype.itemsize)
        else:
            runs = np.searchsorted(self.runs, numbers, side="right") - 1
            order = np.argsort(runs, kind="stable")
            for section in equal_runs(runs[order]):
                rows = order[section]
                self._read_section(int(runs[rows[0]]), bucket, sizes[rows], targets[rows], data)
        self.buffer.bucket, self.buffer.ends = bucket, ends

    def _read_section(
        self, run: int, bucket: int, sizes: Numbers, targets: Numbers, buffer: Bytes
    ) -> None:
        """Reads a bucket's section of a run, whose items are in the order of places."""
        sections, path = (os.path.join(self.run_folders[run], name) for name in (_SECTIONS, _RUN))
        start, stop = np.fromfile(sections, np.int64, 2, offset=8 * bucket).tolist()
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


def _tasks(unit: str, count: int) -> list[Task]:
    """Tasks of all runs, or of all shards: their numbers differ."""
    return [Task((unit == "shard", number), number, f"{unit} {number}") for number in range(count)]


def write_run(work: Work, task: Task) -> tuple[dict[str, Any], Sums]:
    """Writes run `task.payload` of the input, sorted by place: pass 1 of `scatter`.

    `sections` has the byte at which each bucket begins, and the end: int64 [buckets + 1].
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
    sections = np.append(0, ends)[first_items] * items.dtype.itemsize
    del places, order, sizes
    buffer = work.buffer.take(int(ends[-1]) * items.dtype.itemsize)
    items.read(numbers, buffer.view(items.dtype), targets)
    files = {}
    for name, data in ((_RUN, buffer), (_SECTIONS, sections.view(np.uint8))):
        path = os.path.join(task.folder, name)
        files[path] = write_hashed(path, [data])
    return {"bytes": len(buffer)}, files


def write_shard(work: Work, task: Task) -> tuple[dict[str, Any], Sums]:
    """Writes shard `task.payload` with its index and sidecars.

    One has the checksums of its blocks, with which a mirror compares what it fetches.
    """
    start, stop = work.starts[task.payload : task.payload + 2].tolist()
    prefix, items, hasher = shard_prefix(task.folder, task.payload), work.items, BlockHasher()
    files = {prefix + BIN: write_hashed(prefix + BIN, work.blocks(start, stop), hasher)}
    sums: dict[str, Any] = {"bin": hasher.finish()}
    items.write_index(prefix, work.permutation.sources, start, stop)
    for kind, path in (("idx", prefix + IDX), ("origins", prefix + ORIGINS)):
        if os.path.exists(path):  # the origins may be missing
            hasher = BlockHasher()
            files[path], sums[kind] = sum_of(path, hasher.update), hasher.finish()
    provenance = {"tokenizer": items.tokenizer} if items.tokenizer is not None else {}
    write_info(prefix, Info(provenance=provenance, checksums=PairChecksums(**sums)), durable=False)
    files[prefix + INFO] = sum_of(prefix + INFO)
    record = {os.path.basename(path): sum_ for path, sum_ in files.items()}
    if work.upload_to is not None:
        for path in files:
            put_file(path, os.path.join(work.upload_to, os.path.basename(path)))
            os.unlink(path)
        files = {}
    return {"bytes": sums["bin"].size, "files": record}, files
