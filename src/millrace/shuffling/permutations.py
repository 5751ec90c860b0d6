"""The permutation of a shuffle: where each input item goes, and what goes to each place.

`numpy` is `numpy.random.default_rng(seed).permutation(size)`, which anyone can check; it takes 16
bytes per item on the disk. `keyed` is a `KeyedPermutation`, which takes none.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from millrace.checks import MAX_INT64, absolute_path, whole
from millrace.errors import ConfigError, DataError
from millrace.order import KeyedPermutation
from millrace.ragged import Numbers
from millrace.shuffling.row_tables import Table, new_table

NUMPY_MEMORY = 16
"""Bytes of memory per item while "numpy" is made: for the permutation and its inverse."""

_BLOCK = 1 << 20  # places that are worked on at a time


class Permutation(Protocol):
    """A permutation of 0 to size - 1. It pickles to a few bytes, so every task can carry it."""

    @property
    def name(self) -> str:
        """How it is made: "numpy" or "keyed"."""

    @property
    def size(self) -> int:
        """Number of items."""

    def places(self, start: int, stop: int) -> Numbers:
        """The places of the input items `start` to `stop` - 1: int64 [stop - start]."""

    def sources(self, start: int, stop: int) -> Numbers:
        """The input items at the places `start` to `stop` - 1: int64 [stop - start]."""


def choose_permutation(name: str, size: int, memory: int) -> str:
    """The name of a permutation for `make_permutation`.

    Args:
        name: "numpy", "keyed" or "auto": "numpy" as long as it takes at most half of the memory
            while it is made, otherwise "keyed".
        size: Number of items.
        memory: Bytes that the job may use.
    """
    if name != "auto":
        return name
    return "numpy" if NUMPY_MEMORY * size <= memory // 2 else "keyed"


def make_permutation(name: str, size: int, seed: int, folder: str) -> Permutation:
    """Makes a permutation.

    "numpy" writes `permutation.npy` and `inverse.npy` into the folder. Meanwhile it takes 16 bytes
    of memory per item, and afterwards none.

    Args:
        name: "numpy" or "keyed".
        size: Number of items.
        seed: Seed of the permutation, at least 0.
        folder: Existing folder for the files of "numpy".

    Raises:
        ConfigError: A size or seed outside its limits.
        OSError: A file that cannot be written.
    """
    size, seed = whole("size", size, 0, MAX_INT64), whole("seed", seed, 0)
    if name == KeyedRanges.name:
        return KeyedRanges(KeyedPermutation(size, seed))
    return NumpyPermutation(*_write_files(absolute_path(folder), size, seed))


class NumpyPermutation:
    """A permutation in two tables; each call reads the range that it returns.

    Reads instead of maps: the pages of a map would count as memory of every process.

    Args:
        places: Place of each item.
        sources: Item at each place.
    """

    name = "numpy"

    def __init__(self, places: Table, sources: Table) -> None:
        self._places, self._sources, self.size = places, sources, places.num_rows

    def places(self, start: int, stop: int) -> Numbers:
        """See `Permutation`; a DataError if a file is missing or has become shorter."""
        return self._read(self._places, start, stop)

    def sources(self, start: int, stop: int) -> Numbers:
        """See `Permutation`; a DataError if a file is missing or has become shorter."""
        return self._read(self._sources, start, stop)

    def _read(self, table: Table, start: int, stop: int) -> Numbers:
        _check_range(start, stop, self.size)
        try:
            rows = table.rows(start, stop)
        except FileNotFoundError:
            rows = np.empty(0, np.int64)
        if len(rows) < stop - start:
            raise DataError(
                f"{table.path} is missing or has become shorter: places {start} to {stop} cannot "
                "be read. Run the same command again, which makes the file again"
            )
        return rows


@dataclass(frozen=True)
class KeyedRanges:
    """Ranges of a `KeyedPermutation`, computed when they are needed."""

    permutation: KeyedPermutation

    name = "keyed"

    @property
    def size(self) -> int:
        return self.permutation.size

    def places(self, start: int, stop: int) -> Numbers:
        """See `Permutation`."""
        _check_range(start, stop, self.size)
        return self.permutation.places(np.arange(start, stop, dtype=np.int64))

    def sources(self, start: int, stop: int) -> Numbers:
        """See `Permutation`."""
        _check_range(start, stop, self.size)
        return self.permutation.sources(np.arange(start, stop, dtype=np.int64))


def _check_range(start: int, stop: int, size: int) -> None:
    if not 0 <= start <= stop <= size:
        raise ConfigError(f"the range {start} to {stop} must lie in 0 to {size}")


def _write_files(folder: str, size: int, seed: int) -> list[Table]:
    """Writes the tables of places and of sources."""
    places = np.random.default_rng(seed).permutation(size)  # int64
    tables = [_write_table(os.path.join(folder, "permutation.npy"), places)]
    sources = np.empty(size, np.int64)
    for start in range(0, size, _BLOCK):
        stop = min(start + _BLOCK, size)
        sources[places[start:stop]] = np.arange(start, stop)
    del places
    return [*tables, _write_table(os.path.join(folder, "inverse.npy"), sources)]


def _write_table(path: str, values: Numbers) -> Table:
    with new_table(path, values.dtype) as append:
        for start in range(0, len(values), _BLOCK):
            append(values[start : start + _BLOCK])
    return Table(path)
