"""Groups of items that fit a buffer: buckets of the output, and runs of the input."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from millrace.ragged import Numbers
from millrace.shuffling.memory_budget import ITEM_OVERHEAD
from millrace.shuffling.permutations import Permutation
from millrace.shuffling.shuffle_items import Items

_BLOCK = 1 << 16  # items whose sizes are looked up at a time


def bucket_bounds(
    items: Items, permutation: Permutation, starts: Numbers, buffer_size: int
) -> Numbers:
    """First place of each bucket, and the end: int64 [buckets + 1].

    Args:
        items: The items.
        permutation: The place of each.
        starts: Places that no bucket contains but at its start, and the end: those of the shards.
        buffer_size: Bytes of the buffer that each bucket must fit.
    """

    def sizes(start: int, stop: int) -> Numbers:
        return items.sizes(permutation.sources(start, stop))

    ends = [
        _group_ends(items, sizes, start, stop, buffer_size)
        for start, stop in itertools.pairwise(starts.tolist())
    ]
    return np.concatenate([np.zeros(1, np.int64), *ends])


def run_bounds(items: Items, buffer_size: int) -> Numbers:
    """First item of each run of the input, and the end; a run fits the buffer."""

    def sizes(start: int, stop: int) -> Numbers:
        return items.sizes(np.arange(start, stop))

    ends = _group_ends(items, sizes, 0, items.num_items, buffer_size)
    return np.concatenate([np.zeros(1, np.int64), ends])


def _group_ends(
    items: Items,
    sizes: Callable[[int, int], Numbers],
    start: int,
    stop: int,
    buffer_size: int,
) -> Numbers:
    """Ends of consecutive groups of items, each of which fits the buffer; the last is `stop`."""
    if start == stop:
        return np.empty(0, np.int64)
    if items.item_size is not None:  # groups of equal size
        most = buffer_size // (items.item_size * items.dtype.itemsize + ITEM_OVERHEAD)
        count = -(-(stop - start) // most)
        return start + np.arange(1, count + 1, dtype=np.int64) * (stop - start) // count
    ends = _ends_by_size(sizes, items.dtype.itemsize, start, stop, buffer_size)
    return np.array([*ends, stop], np.int64)


def _ends_by_size(
    sizes: Callable[[int, int], Numbers],
    token_size: int,
    start: int,
    stop: int,
    buffer_size: int,
) -> Iterator[int]:
    """As `_group_ends`, for items of any size, without the last end."""
    used = 0  # bytes of the group that is not ended
    for block in range(start, stop, _BLOCK):
        costs = sizes(block, min(block + _BLOCK, stop)) * token_size + ITEM_OVERHEAD
        totals = np.cumsum(costs)
        before = -used  # the total before the first item of the group
        while True:
            index = int(np.searchsorted(totals, before + buffer_size, side="right"))
            if index == len(totals):
                break
            yield block + index
            before = int(totals[index - 1]) if index > 0 else 0
        used = int(totals[-1]) - before
