"""How much memory a shuffle may take, how its workers share it, and which items fit a buffer.

Memory is counted, not measured: `ITEM_OVERHEAD` for each item in a buffer, and a constant for each
process.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from millrace.cores import available_memory
from millrace.errors import ConfigError
from millrace.ragged import Numbers
from millrace.shuffling.shuffle_items import Items, ItemsAt

MB = 1_000_000

ITEM_OVERHEAD = 128
"""Bytes per item in a buffer: its number, place, size and offsets, and copies of them.

It decides where runs and buckets end: change the version in `shuffle_options.identity` with it.
"""

# Private memory of processes, measured and rounded up. The job's own process has 100 MB beside the
# budget, which is enough without Arrow.
_WORKER_MEMORY = 45 * MB  # of a worker process: Python, NumPy and this package
_ARROW_MEMORY = 90 * MB  # more in each process that copies the origins of documents
_LEAST_BUFFER = 8 * MB  # of a worker
_BLOCK = 1 << 16  # items whose sizes are looked up at a time


class Budget(NamedTuple):
    """Memory of a shuffle in bytes."""

    total: int  # for all processes of the job
    own: int  # for the job's own process, if it copies the origins of documents
    worker: int  # for a worker process beside its buffer

    @property
    def buffers(self) -> int:
        """Bytes for all workers and their buffers."""
        return self.total - self.own

    def num_workers(self, workers: int, buffer_size: int) -> int:
        """The number of workers, each with a buffer; one worker is the job's own process."""
        return max(min(workers, self.buffers // (self.worker + buffer_size)), 1)


def budget_of(memory: int | None, items: Items) -> Budget:
    """The budget of a job; without a limit half of the available memory."""
    arrow = _ARROW_MEMORY if items.has_origins else 0
    total = available_memory() // 2 if memory is None else memory  # half is for the page cache
    return Budget(total, arrow, _WORKER_MEMORY + arrow)


@dataclass(frozen=True)
class ItemSizes:
    """Number of items, and bytes of all and of the largest one."""

    num_items: int
    num_bytes: int
    largest: int

    @property
    def in_buffer(self) -> int:
        """Bytes of a buffer for all items."""
        return self.num_bytes + self.num_items * ITEM_OVERHEAD


def sizes_of(items: Items) -> ItemSizes:
    """The sizes of all items; looks up each one if they differ."""
    count, size = items.num_items, items.dtype.itemsize
    if items.item_size is not None:
        return ItemSizes(count, count * items.item_size * size, items.item_size * size)
    total = largest = 0
    for start in range(0, count, _BLOCK):
        sizes = items.sizes(np.arange(start, min(start + _BLOCK, count))) * size
        total, largest = total + int(sizes.sum()), max(largest, int(sizes.max()))
    return ItemSizes(count, total, largest)


def check_memory(budget: Budget, sizes: ItemSizes) -> None:
    """Raises a ConfigError if a buffer or the largest item does not fit the memory."""
    least = budget.own + max(_LEAST_BUFFER, sizes.largest + ITEM_OVERHEAD)
    if budget.total >= least:
        return
    origins = f", and copying their origins takes {in_units(budget.own)}" if budget.own else ""
    raise ConfigError(
        f"memory must be at least {least} bytes ({in_units(least)}), not {in_units(budget.total)}: "
        f"the largest item has {in_units(sizes.largest)}{origins}. Give more memory"
    )


def in_units(num_bytes: float) -> str:
    """A number of bytes for a message: "6.0 GB"."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"


def group_bounds(items: Items, items_at: ItemsAt, starts: Numbers, buffer_size: int) -> Numbers:
    """Cuts places into groups whose items fit a buffer: buckets of the output, runs of the input.

    A group begins at each of the starts, of which the last is the end. Returns the starts of all
    groups, and the end: int64 [groups + 1].
    """
    bounds = [np.zeros(1, np.int64)]
    for start, stop in itertools.pairwise(starts.tolist()):
        if items.item_size is None:
            ends = _ends_by_size(items, items_at, start, stop, buffer_size)
            bounds.append(np.array([*ends, stop], np.int64))
        else:  # groups of equal size
            most = buffer_size // (items.item_size * items.dtype.itemsize + ITEM_OVERHEAD)
            count = -(-(stop - start) // most)
            bounds.append(start + np.arange(1, count + 1) * (stop - start) // count)
    return np.concatenate(bounds)


def _ends_by_size(
    items: Items, items_at: ItemsAt, start: int, stop: int, buffer_size: int
) -> Iterator[int]:
    """Ends of groups that are as large as the buffer allows, without the last one."""
    used = 0  # bytes of the last group
    for block in range(start, stop, _BLOCK):
        sizes = items.sizes(items_at(block, min(block + _BLOCK, stop)))
        totals = np.cumsum(sizes * items.dtype.itemsize + ITEM_OVERHEAD)
        before = -used  # total before the first item of the group
        while (index := np.searchsorted(totals, before + buffer_size, "right")) < len(totals):
            yield block + int(index)
            before = int(totals[index - 1]) if index > 0 else 0
        used = int(totals[-1]) - before
