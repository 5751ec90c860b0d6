"""Rows of several lengths, one after the other in a flat array: their starts and places."""

import itertools
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


def starts_of(counts: Iterable[int]) -> Numbers:
    """The start of each row of these sizes, and the end of the last: int64 [n + 1].

    >>> starts_of([2, 0, 3]).tolist()
    [0, 2, 2, 5]
    """
    return np.cumsum([0, *counts], dtype=np.int64)


def sizes_of(ends: Numbers) -> Numbers:
    """The size of each row by its end: `np.diff` with a first 0, in a sixth of its 13 us."""
    sizes: Numbers = ends.copy()
    sizes[1:] -= ends[:-1]
    return sizes


def spread(counts: Numbers) -> tuple[Numbers, Numbers]:
    """The row of each entry, and its place in the row: two arrays int64 [entries].

    >>> [column.tolist() for column in spread(np.array([2, 0, 3]))]
    [[0, 0, 2, 2, 2], [0, 1, 0, 1, 2]]
    """
    rows = np.repeat(np.arange(len(counts)), counts)
    ends = np.cumsum(counts)
    places = np.arange(len(rows)) - np.repeat(ends - counts, counts)
    return rows, places


def even_sizes(size: int, num_parts: int) -> Numbers:
    """Sizes of parts that differ by at most one, the larger ones first: int64 [num_parts].

    >>> even_sizes(8, 3).tolist(), even_sizes(0, 0).tolist()
    ([3, 3, 2], [])
    """
    least, larger = divmod(size, max(num_parts, 1))
    return least + (np.arange(num_parts) < larger).astype(np.int64)


def equal_runs(numbers: Numbers) -> list[slice]:
    """The runs of equal numbers, such as consecutive pieces in one file.

    >>> equal_runs(np.array([4, 4, 7]))
    [slice(0, 2, None), slice(2, 3, None)]
    """
    if len(numbers) == 0:
        return []
    bounds = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
    return [slice(start, stop) for start, stop in itertools.pairwise(bounds)]
