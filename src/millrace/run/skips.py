"""Samples that a run leaves out. `docs/instant_order.md` defines them (K1 to K3)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.checks import check_int, check_list, shown
from millrace.errors import ConfigError


class Skips:
    """Which sample each position of a run is.

    Args:
        ranges: Sample numbers that are left out, pairs (start, stop).

    Raises:
        ConfigError: A range that is empty, or two that overlap.

    Example:
        >>> skips = Skips([(2, 5)])
        >>> skips.samples(np.arange(4)).tolist(), skips.position(6), skips.before(2)
        ([0, 1, 5, 6], 3, [])
    """

    def __init__(self, ranges: Any) -> None:
        self.ranges: list[tuple[int, int]] = []
        for start, stop in sorted(check_list("skips", ranges, "pairs (start, stop)", _range)):
            before = self.ranges[-1] if self.ranges else (0, -1)
            if start < before[1]:
                overlap = f"the skips {before} and {(start, stop)} overlap"
                raise ConfigError(f"{overlap}: make them one")
            if start == before[1]:  # the same samples as in one range
                start, _ = self.ranges.pop()
            self.ranges.append((start, stop))
        sizes = [stop - start for start, stop in self.ranges]
        self._totals = np.cumsum([0, *sizes], dtype=np.int64)
        starts = np.array([start for start, _ in self.ranges], np.int64)
        self._places = starts - self._totals[:-1]  # the positions behind the skips

    @property
    def num_samples(self) -> int:
        """Number of samples that are left out."""
        return int(self._totals[-1])

    def samples(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sample numbers at some positions: int64 [n]."""
        if not self.ranges:
            return positions
        return positions + self._totals[np.searchsorted(self._places, positions, "right")]

    def sample(self, position: int) -> int:
        """The sample number at a position."""
        return int(self.samples(np.array([position]))[0])

    def position(self, sample_number: int) -> int:
        """The position of a sample, or of the one behind the skip that it is in."""
        ranges = (pair for pair in self.ranges if pair[0] < sample_number)
        return sample_number - sum(min(stop, sample_number) - start for start, stop in ranges)

    def before(self, consumed_samples: int) -> list[list[int]]:
        """The skips that the first so many positions have passed."""
        count = int(np.searchsorted(self._places, consumed_samples))
        return [list(pair) for pair in self.ranges[:count]]


def _range(name: str, value: Any) -> tuple[int, int]:
    ends = check_list(name, value, "two sample numbers", check_int)
    if len(ends) != 2 or not 0 <= ends[0] < ends[1] < 1 << 62:
        form = "give [start, stop], with 0 <= start < stop < 2**62"
        raise ConfigError(f"{name} is {shown(value)}; {form}")
    return ends[0], ends[1]
