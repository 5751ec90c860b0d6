"""How often each sequence or document of the input is taken: the weights of domains."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from millrace.checks import MAX_INT64
from millrace.errors import ConfigError
from millrace.ragged import Numbers, starts_of


class WeightedUnits:
    """Items, which are the units of domains (sequences or documents) as often as weights say.

    A domain of n units and weight 5/2 has 5n/2 items, rounded down: each unit, each unit again, and
    n/2 units at even distances.

    Args:
        num_units: Number of units of each domain.
        weights: Weight of each domain.

    Attributes:
        num_items: Number of items of each domain.

    Raises:
        ConfigError: More items than 64 bits can count.

    >>> WeightedUnits([4], [Fraction(5, 2)]).units(np.arange(10)).tolist()
    [0, 1, 2, 3, 0, 1, 2, 3, 0, 2]
    """

    def __init__(self, num_units: Sequence[int], weights: Sequence[Fraction]) -> None:
        pairs = list(zip(num_units, weights, strict=True))
        self.num_items = [int(count * weight) for count, weight in pairs]
        if sum(self.num_items) > MAX_INT64:
            raise ConfigError(
                f"the weights make {sum(self.num_items)} items, which must be at most {MAX_INT64}: "
                "give smaller weights"
            )
        self._is_identity = self.num_items == list(num_units)  # item i is unit i
        self._num_units = np.array(num_units, np.int64)
        self._first_units = starts_of(num_units)[:-1]
        self._first_items = starts_of(self.num_items)[:-1]
        rests = [n % max(count, 1) for n, count in zip(self.num_items, num_units, strict=True)]
        self._num_rest = np.array(rests, np.int64)  # items of the last pass, which is not whole
        self._num_whole = np.array(self.num_items, np.int64) - self._num_rest

    def units(self, items: Numbers) -> Numbers:
        """The unit of each item: int64 [n]."""
        if self._is_identity:
            return items
        domains = np.searchsorted(self._first_items, items, side="right") - 1
        places = items - self._first_items[domains]
        counts = self._num_units[domains]
        units = places % counts
        in_rest = places - self._num_whole[domains]  # place in the last pass, or negative
        last = np.flatnonzero(in_rest >= 0)
        rests = self._num_rest[domains[last]]
        units[last] = _times_over(in_rest[last], counts[last], rests)
        return units + self._first_units[domains]

    def ascending_units(self, items: Numbers, targets: Numbers) -> tuple[Numbers, Numbers]:
        """The units of ascending items, in ascending order, and the targets in the same order."""
        units = self.units(items)
        if self._is_identity:
            return units, targets
        order = np.argsort(units, kind="stable")
        return units[order], targets[order]

    def items_in(self, domain: int, start: int, stop: int) -> int:
        """The number of items of units [start, stop), which are all of one domain."""
        count, rest = int(self._num_units[domain]), int(self._num_rest[domain])
        if count == 0:
            return 0
        start, stop = (number - int(self._first_units[domain]) for number in (start, stop))
        # Unit j * count // rest is below `stop` exactly for j < stop * rest / count.
        in_rest = -(-stop * rest // count) - -(-start * rest // count)
        return int(self._num_whole[domain]) // count * (stop - start) + in_rest


def _times_over(places: Numbers, counts: Numbers, rests: Numbers) -> Numbers:
    """places * counts // rests, without overflow."""
    if len(places) and int(places.max()) * int(counts.max()) > MAX_INT64:
        exact = places.astype(object) * counts.astype(object) // rests.astype(object)
        return np.array(exact, np.int64)
    return places * counts // rests
