"""The permutation of a shuffle: the place of each input item, and the item at each place.

`numpy` is `numpy.random.default_rng(seed).permutation(size)`, which takes 16 bytes per item on the
disk. `keyed` is a `KeyedPermutation`, which takes none.
"""

import contextlib
import os
from dataclasses import dataclass

import numpy as np

from millrace.errors import ConfigError, DataError
from millrace.order import KeyedPermutation
from millrace.ragged import Numbers
from millrace.shuffling.memory_budget import in_units

_MEMORY = 16  # bytes per item while "numpy" is made: for the permutation and its inverse
_BLOCK = 1 << 20  # places that are inverted at a time


@dataclass(frozen=True)
class Permutation:
    """A permutation of 0 to size - 1. It pickles to a few bytes, so every task can carry it.

    "keyed" computes each range, and "numpy" reads it from two files of int64. Maps of the files
    would count as memory of every process.
    """

    name: str
    size: int
    seed: int
    folder: str = ""  # of the files: an absolute path

    def places(self, start: int, stop: int) -> Numbers:
        """The places of input items [start, stop): int64 [stop - start]."""
        return self._range("places", start, stop)

    def sources(self, start: int, stop: int) -> Numbers:
        """The input items at places [start, stop): int64 [stop - start]."""
        return self._range("sources", start, stop)

    def _range(self, name: str, start: int, stop: int) -> Numbers:
        if self.name == "keyed":
            permuted = getattr(KeyedPermutation(self.size, self.seed), name)
            return np.asarray(permuted(np.arange(start, stop)))
        path, values = os.path.join(self.folder, name), np.empty(0, np.int64)
        with contextlib.suppress(FileNotFoundError):
            values = np.fromfile(path, np.int64, stop - start, offset=8 * start)
        if len(values) < stop - start:
            raise DataError(
                f"{path} is missing or has become shorter: places {start} to {stop} cannot be "
                "read. Run the same command again, which makes the file again"
            )
        return values


def choose_permutation(name: str, size: int, memory: int, unit: str) -> str:
    """The name of a permutation; a ConfigError if it takes too much memory.

    "auto" is "numpy" if it takes at most half of the memory while it is made.
    """
    needed = _MEMORY * size
    if name == "auto":
        return "numpy" if needed <= memory // 2 else "keyed"
    if name == "numpy" and needed > memory:
        raise ConfigError(
            f"permutation is 'numpy', which takes {in_units(needed)} of memory for {size:,} {unit},"
            f" and {in_units(max(memory, 0))} are free for it; give more memory, or the permutation"
            " keyed"
        )
    return name


def make_permutation(name: str, size: int, seed: int, folder: str) -> Permutation:
    """Makes a permutation; "numpy" writes two files into the folder, an absolute path."""
    permutation = Permutation(name, size, seed, folder)
    if name == "keyed":
        return permutation
    places = np.random.default_rng(seed).permutation(size)  # int64
    sources = np.empty(size, np.int64)
    for start in range(0, size, _BLOCK):
        part = places[start : start + _BLOCK]
        sources[part] = np.arange(start, start + len(part))
    for file_name, values in (("places", places), ("sources", sources)):
        with open(os.path.join(folder, file_name), "wb") as file:
            file.write(values.data)
    return permutation
