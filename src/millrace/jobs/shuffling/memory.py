"""The plan `memory`: all items in one buffer, filled and written by threads of this process."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from millrace.interrupts import interruptible
from millrace.jobs.engine import Task
from millrace.jobs.shuffling.sources import Numbers
from millrace.jobs.shuffling.tasks import Work, commit_shard

READ_SIZE = 8_000_000
"""Bytes of items that a thread reads at a time, about."""

MOST_ITEMS = 1 << 16
"""Items that a thread reads at a time."""


class MemoryShuffle:
    """Some shards of a shuffle in memory.

    Args:
        work: What every task knows.
        tasks: The task of each shard that is not done.
        threads: Number of threads.
    """

    def __init__(self, work: Work, tasks: Sequence[Task], *, threads: int) -> None:
        self._work, self._tasks, self._threads = work, tasks, threads
        self._places = _Places(work, [task.payload for task in tasks])
        self._buffer = np.empty(self._places.num_tokens, work.items.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of these shards."""
        return self._buffer.nbytes

    def read(self) -> Iterator[int]:
        """Reads the items, each to its place; yields the bytes of some items, in any order."""
        count = self._work.items.num_items
        mean = self.num_bytes // max(self._places.num_items, 1) + 1
        size = max(min(READ_SIZE // mean, MOST_ITEMS), 1)
        starts = range(0, count, size)
        calls = ((self._read, start, min(start + size, count)) for start in starts)
        return _in_threads(self._threads, calls)

    def write(self) -> Iterator[tuple[Task, dict[str, Any]]]:
        """Writes the shards; yields each task and its record, as they end."""
        bounds = self._places.bounds
        calls = ((self._write, *call) for call in zip(self._tasks, bounds, strict=True))
        return _in_threads(self._threads, calls)

    def _read(self, start: int, stop: int) -> int:
        items = self._work.items
        numbers, targets = self._places.targets(start, stop)
        items.read(numbers, self._buffer, targets)
        return int(items.sizes(numbers).sum()) * items.dtype.itemsize

    def _write(self, task: Task, bounds: tuple[int, int]) -> tuple[Task, dict[str, Any]]:
        data = self._buffer[slice(*bounds)].view(np.uint8)
        return task, commit_shard(self._work, task, [data])


class _Places:
    """Where the items of some shards lie in one buffer.

    Attributes:
        num_items, num_tokens: Counts of these items.
        bounds: First token of each shard in the buffer, and the end.
    """

    def __init__(self, work: Work, shards: Sequence[int]) -> None:
        self._work = work
        self._is_whole = len(shards) == work.num_shards
        offsets = self._offsets = None if work.items.item_size is not None else _offsets(work)
        starts = work.starts
        firsts = starts * (work.items.item_size or 0) if offsets is None else offsets[starts]
        self.bounds: list[tuple[int, int]] = []
        self.num_items = self.num_tokens = 0
        # Tokens before each shard that are not in the buffer; -1: the shard is not in it.
        self._left_out = np.full(work.num_shards, -1, np.int64)
        for shard in shards:
            size = int(firsts[shard + 1] - firsts[shard])
            self._left_out[shard] = firsts[shard] - self.num_tokens
            self.bounds.append((self.num_tokens, self.num_tokens + size))
            self.num_items += int(starts[shard + 1] - starts[shard])
            self.num_tokens += size

    def targets(self, start: int, stop: int) -> tuple[Numbers, Numbers]:
        """Those of the items [start, stop) that are in the buffer, and the first token of each."""
        work = self._work
        numbers, places = np.arange(start, stop), work.permutation.places(start, stop)
        if not self._is_whole:
            shards = np.searchsorted(work.starts, places, side="right") - 1
            left_out = self._left_out[shards]
            is_in = left_out >= 0
            numbers, places, left_out = numbers[is_in], places[is_in], left_out[is_in]
        if self._offsets is None:
            targets = places * (work.items.item_size or 0)
        else:
            targets = self._offsets[places]
        return numbers, targets if self._is_whole else targets - left_out


def _offsets(work: Work) -> Numbers:
    """First token of each place in the output, and the end."""
    offsets = np.zeros(work.items.num_items + 1, np.int64)
    for start in range(0, work.items.num_items, MOST_ITEMS):
        stop = min(start + MOST_ITEMS, work.items.num_items)
        sizes = work.items.sizes(work.permutation.sources(start, stop))
        np.cumsum(sizes, out=offsets[start + 1 : stop + 1])
        offsets[start + 1 : stop + 1] += offsets[start]
    return offsets


def _in_threads(count: int, calls: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
    """Calls functions in threads, and yields their results as they end; takes Ctrl-C meanwhile.

    Args:
        count: Number of threads.
        calls: Each a function and its arguments.
    """
    waiting: set[concurrent.futures.Future[Any]] = set()
    most = 2 * count
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        try:
            for call in calls:
                waiting.add(pool.submit(*call))
                if len(waiting) == most:
                    yield from _results(waiting)
            while waiting:
                yield from _results(waiting)
        finally:
            for future in waiting:
                future.cancel()


def _results(waiting: set[concurrent.futures.Future[Any]]) -> Iterator[Any]:
    """Waits for one or more calls, and takes them from the set."""
    with interruptible():
        done, _ = concurrent.futures.wait(waiting, return_when=concurrent.futures.FIRST_COMPLETED)
    waiting -= done
    for future in done:
        yield future.result()
