"""What a worker does: it writes a run of the input sorted by place, or a shard."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.errors import DataError
from millrace.files import naming, sum_of
from millrace.jobs.engine import Task, commit, task_folder
from millrace.jobs.shuffling.items import Items
from millrace.jobs.shuffling.permutations import Permutation
from millrace.jobs.shuffling.sources import Numbers
from millrace.jobs.shuffling.writing import HashedFile

Function = Callable[["Work", Task], dict[str, Any]]

SHARD = "shard"
"""Path prefix of a shard in the folder of its task."""

_RUN, _SECTIONS = "run.bin", "sections"


class Buffer:
    """Memory that a worker keeps between tasks: the pages of new memory would have to be cleared.

    It is never shared: each job has one in its own process, and each worker process another one.
    """

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def take(self, size: int) -> NDArray[np.uint8]:
        """The first bytes of the buffer, with what the last task has left in them: uint8 [size]."""
        if len(self._bytes) < size:
            self.drop()  # first: there is no room for both
            self._bytes = np.empty(size, np.uint8)
        return self._bytes[:size]

    def drop(self) -> None:
        """Frees the memory."""
        self._bytes = np.empty(0, np.uint8)

    def __reduce__(self) -> tuple[type[Buffer], tuple[()]]:
        return Buffer, ()  # the content is not for another process


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every task needs to know.

    Attributes:
        journal: Folder of the journal's run.
        items, permutation: The items, and the place of each.
        starts: First place of each shard, and the end, int64 [shards + 1].
        buckets: First place of each bucket, and the end. A shard has one or more.
        runs: First item of each run of the input, and the end; None: there are no runs.
        buffer: Memory for the items of a run or bucket.
    """

    journal: str
    items: Items
    permutation: Permutation
    starts: Numbers
    buckets: Numbers
    runs: Numbers | None
    buffer: Buffer = field(default_factory=Buffer)

    @property
    def num_shards(self) -> int:
        return len(self.starts) - 1


# ---- the tasks ----


def write_run(work: Work, task: Task) -> dict[str, Any]:
    """Writes run `task.payload` of the input, sorted by place; pass 1 of `scatter`.

    `sections` has the byte at which each bucket begins in it, and the end: int64 [buckets + 1].
    """
    items, run = work.items, task.payload
    assert work.runs is not None
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
    folder = task_folder(work.journal, task.number)
    files = {}
    for name, data in ((_RUN, buffer), (_SECTIONS, sections.view(np.uint8))):
        with HashedFile(os.path.join(folder, name)) as file:
            file.write(data)
        files[file.path] = file.sum
    record = {"bytes": len(buffer)}
    commit(work.journal, task.number, record, list(files), files, durable=task.durable)
    return record


def write_shard(work: Work, task: Task) -> dict[str, Any]:
    """Writes shard `task.payload`, bucket by bucket, from the input or from the runs."""
    items = work.items
    first, end = work.starts[task.payload : task.payload + 2]
    buckets = range(*np.searchsorted(work.buckets, [first, end]).tolist())

    def blocks() -> Iterator[NDArray[np.uint8]]:
        for bucket in buckets:
            start, stop = int(work.buckets[bucket]), int(work.buckets[bucket + 1])
            numbers = work.permutation.sources(start, stop)
            sizes = items.sizes(numbers)
            ends = np.cumsum(sizes)
            buffer = work.buffer.take(int(ends[-1]) * items.dtype.itemsize)
            if work.runs is None:
                order = np.argsort(numbers)
                targets = (ends - sizes)[order]
                items.read(numbers[order], buffer.view(items.dtype), targets)
            else:
                _read_bucket(work, bucket, numbers, sizes, ends, buffer)
            yield buffer

    return commit_shard(work, task, blocks())


def _read_bucket(
    work: Work,
    bucket: int,
    numbers: Numbers,
    sizes: Numbers,
    ends: Numbers,
    buffer: NDArray[np.uint8],
) -> None:
    """Reads a bucket's section of every run; a section has its items in the order of places."""
    assert work.runs is not None
    token_size = work.items.dtype.itemsize
    runs = np.searchsorted(work.runs, numbers, side="right") - 1
    order = np.argsort(runs, kind="stable")
    sizes = sizes[order] * token_size
    targets = ends[order] * token_size - sizes
    counts = np.bincount(runs, minlength=len(work.runs) - 1)
    last = 0
    for run in np.flatnonzero(counts).tolist():
        first, last = last, last + int(counts[run])
        ends_in_section = np.cumsum(sizes[first:last])
        folder = task_folder(work.journal, work.num_shards + run)
        path = os.path.join(folder, _SECTIONS)
        start, stop = np.fromfile(path, np.int64, 2, offset=8 * bucket).tolist()
        path = os.path.join(folder, _RUN)
        if stop - start != ends_in_section[-1]:
            raise _damaged(path)
        with naming(path), open(path, "rb", buffering=0) as file:
            try:
                _native.read_pieces(
                    file.fileno(),
                    start + ends_in_section - sizes[first:last],
                    sizes[first:last],
                    buffer,
                    targets[first:last],
                )
            except ValueError:
                raise _damaged(path) from None


def _damaged(path: str) -> DataError:
    return DataError(
        f"{path} was cut short or changed while the job ran: run the same command again, and it "
        "is written again"
    )


def commit_shard(work: Work, task: Task, blocks: Iterable[NDArray[np.uint8]]) -> dict[str, Any]:
    """Writes a shard with its index and sidecars, and commits the task.

    Args:
        work: What every task knows.
        task: The task, whose payload is the number of the shard.
        blocks: The bytes of the shard, some at a time.
    """
    prefix = os.path.join(task_folder(work.journal, task.number), SHARD)
    with HashedFile(f"{prefix}.bin") as data:
        for block in blocks:
            data.write(block)
    start, stop = work.starts[task.payload : task.payload + 2].tolist()
    files = {data.path: data.sum}
    for path in work.items.write_index(prefix, work.permutation.sources, start, stop):
        files[path] = sum_of(path)
    record = {
        "bytes": data.sum[0],
        "files": {os.path.basename(path): list(sums) for path, sums in files.items()},
    }
    commit(work.journal, task.number, record, list(files), files, durable=task.durable)
    return record
