"""Measures how fast the disk reads random items, and consecutive ones."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np

from millrace.ragged import Numbers
from millrace.shuffling.shuffle_items import Items

_NUM_ITEMS = 256  # random items
_NUM_GROUPS = 8  # of random items: their median, as another process may interrupt one of them
_MOST_ITEMS = 1 << 17  # consecutive items: the numbers of tiny ones take more memory than tokens
_WRITE_RATE = 2e9  # bytes per second of writing and hashing, at most


@dataclass(frozen=True)
class Rates:
    """Bytes per second of reading random items, and of reading consecutive ones."""

    random: float
    sequential: float

    @property
    def write(self) -> float:
        """Bytes per second of writing, by the rate of sequential reads."""
        return min(self.sequential, _WRITE_RATE)


def read_rates(items: Items, *, mean: int, size: int) -> Rates:
    """Reads some items, and measures the rates.

    Args:
        items: The items.
        mean: Mean size of an item in bytes.
        size: Bytes to read at most in each measurement, about.
    """
    random = np.random.default_rng()  # other items in each run: those of the last one are cached
    scattered = np.unique(random.integers(0, items.num_items, _NUM_ITEMS))
    count = min(size // max(mean, 1) + 1, items.num_items, _MOST_ITEMS)
    first = int(random.integers(0, items.num_items - count + 1))
    _rate(items, np.arange(first, first + 1), size)  # the first call opens files and loads code
    # Once each: the disk reads ahead, so a second round would find part of its items in memory.
    groups = np.array_split(scattered, min(_NUM_GROUPS, len(scattered)))
    rate = statistics.median(_rate(items, group, size // _NUM_GROUPS) for group in groups)
    return Rates(rate, _rate(items, np.arange(first, first + count), size))


def _rate(items: Items, numbers: Numbers, size: int) -> float:
    """Bytes per second of reading the first items that fit `size` bytes."""
    sizes = items.sizes(numbers)
    ends = np.cumsum(sizes)
    count = max(int(np.searchsorted(ends, size // items.dtype.itemsize, side="right")), 1)
    buffer = np.ones(int(ends[count - 1]), items.dtype)  # its pages exist before the clock starts
    start = time.perf_counter()
    items.read(numbers[:count], buffer, (ends - sizes)[:count])
    return float(max(buffer.nbytes, 1) / max(time.perf_counter() - start, 1e-9))
