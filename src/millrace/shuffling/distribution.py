"""How a shuffle spreads the domains over the output, compared with what chance allows.

A fair shuffle deals items like cards, without putting any back. So the items of a domain in a part
of the output (the head, a shard, a window) have a hypergeometric distribution. Two figures use
that:

- The deviation of a count from the expected one, in standard deviations ("sigma"), finds single
  large deviations. Bernstein's inequality says which ones chance does not explain; it holds for
  counts of any size.
- Pearson's chi-square of all parts together finds many small deviations: blocks of items that stay
  together, or shares that are more even than chance makes them.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.checks import printable, text_table
from millrace.errors import MillraceError
from millrace.ragged import Numbers, even_sizes
from millrace.shuffling.permutations import Permutation

HEAD = 50_000  # places
WINDOWS = 64
_BLOCK = 1 << 18  # places that are counted at a time: 2 MiB for each array
_MOST_COUNTS = 1 << 19  # counts of domains in shards: with their figures they take 20 MB
_LEAST_EXPECTED = 5  # items of a class in a part: with fewer, chi-square is not exact enough
_LEAST_DEGREES = 30  # of freedom: with fewer, the far tail is not exact enough to refuse a shuffle
_LEAST_P = 1e-9  # a deviation that is less probable in any part is a fault
_MOST_Z = 7.0  # normal deviate of chi-square: p = 1e-12, as its tail may be 100 times heavier


@dataclass(frozen=True)
class Parts:
    """Equal, or nearly equal, parts of the output.

    No part is empty.
    """

    name: str  # of a part: "head", "shard", "shard group" or "window"
    domains: tuple[str, ...]
    counts: Numbers  # items of each domain in each part: int64 [parts, domains]
    totals: Numbers  # items of each domain in the whole output: int64 [domains]

    @cached_property
    def sizes(self) -> Numbers:
        """Places of each part: int64 [parts]."""
        return np.asarray(self.counts.sum(axis=1))

    @cached_property
    def expected(self) -> NDArray[np.float64]:
        """Expected number of items: float64 [parts, domains]."""
        return np.outer(self.sizes, self.totals / self.totals.sum())

    @cached_property
    def deviations(self) -> NDArray[np.float64]:
        """Each count's deviation in standard deviations; 0 where there is no choice."""
        sigmas = np.sqrt(self._variances())
        return np.where(sigmas > 0, (self.counts - self.expected) / np.maximum(sigmas, 1e-300), 0.0)

    @cached_property
    def chi_square(self) -> tuple[float, int]:
        """Pearson's chi-square of all parts together, and its degrees of freedom; 0: no test.

        The parts are not the whole output only for the head, which is compared with the rest.
        Parts that are so small that not even two classes of domains have enough items in each are
        put together with their neighbours, and small domains with each other.
        """
        total, counts = int(self.totals.sum()), self.counts
        rest = self.totals - counts.sum(axis=0)
        if rest.any():
            counts = np.vstack([counts, rest])
        rarer = total - int(self.totals.max())  # all domains but the largest
        num_groups = min(len(counts), rarer // (2 * _LEAST_EXPECTED))
        if num_groups < 2:
            return 0.0, 0
        counts = np.add.reduceat(counts, np.arange(num_groups) * len(counts) // num_groups)
        share = int(counts.sum(axis=1).min()) / total  # of the smallest part
        starts, order = _classes(self.totals, share)
        if len(starts) < 2:
            return 0.0, 0
        counts = np.add.reduceat(counts[:, order], starts, axis=1)
        expected = np.outer(counts.sum(axis=1), counts.sum(axis=0) / total)
        square = float(((counts - expected) ** 2 / expected).sum())
        # Drawn without replacement, counts vary less than drawn from an endless supply.
        return square * (total - 1) / total, (len(starts) - 1) * (len(counts) - 1)

    @property
    def z(self) -> float:
        """The normal deviate of the chi-square, by Wilson and Hilferty; 0 without a test."""
        value, degrees = self.chi_square
        spread = 2 / (9 * max(degrees, 1))
        return ((value / degrees) ** (1 / 3) - 1 + spread) / math.sqrt(spread) if degrees else 0.0

    def figures(self) -> dict[str, Any]:
        """What a part is, the number of parts, the chi-square, and the largest deviation."""
        value, degrees = self.chi_square
        part, domain = _place_of_largest(np.abs(self.deviations))
        return {
            "part": self.name,
            "parts": len(self.counts),
            "chi_square": value if degrees else None,
            "degrees": degrees,
            "p_value": math.erfc(self.z / math.sqrt(2)) / 2 if degrees else None,
            "largest_deviation": float(self.deviations[part, domain]),
            "largest_deviation_part": part,
            "largest_deviation_domain": self.domains[domain],
            "largest_deviation_count": int(self.counts[part, domain]),
            "largest_deviation_expected": float(self.expected[part, domain]),
        }

    def fault(self) -> str | None:
        """Why no fair shuffle gives these parts; None if one may."""
        # The probability of a deviation of t or more is at most 2 exp(-t**2 / 2 (variance + t/3)).
        distances = np.abs(self.counts - self.expected)
        exponents = distances**2 / np.maximum(2 * (self._variances() + distances / 3), 1e-300)
        part, domain = _place_of_largest(exponents)
        most = math.log(2 * 3 * exponents.size / _LEAST_P)  # in head, shards or windows
        is_head = self.name == "head"
        if exponents[part, domain] > most:
            return (
                f"{'the head' if is_head else f'{self.name} {part}'} has "
                f"{self.counts[part, domain]:,} of its {self.sizes[part]:,} items "
                f"from domain {printable(self.domains[domain])}, and a fair shuffle "
                f"{self.expected[part, domain]:,.1f}; that deviates by "
                f"{self.deviations[part, domain]:+.1f} sigma"
            )
        value, degrees = self.chi_square
        if degrees >= _LEAST_DEGREES and abs(self.z) > _MOST_Z:
            return (
                f"the differences {'in the head' if is_head else f'between {self.name}s'} are too "
                f"{'large' if self.z > 0 else 'small'}: chi-square is {value:,.1f}, and about "
                f"{degrees:,} for a fair shuffle"
            )
        return None

    def _variances(self) -> NDArray[np.float64]:
        """Variance of each count in a fair shuffle: float64 [parts, domains]."""
        total, sizes = int(self.totals.sum()), self.sizes[:, None].astype(np.float64)
        shares = self.totals / total
        return sizes * shares * (1 - shares) * ((total - sizes) / max(total - 1, 1))


Distribution = dict[str, Parts]
"""Where the items of each domain are in the output, by "head", "shards" and "windows".

The head is the first 50,000 places, as one part. If there are more than 2**19 counts of domains in
shards, which would take too much memory, groups of neighbours stand for shards. Windows are 64
equal parts of the output.
"""


def measure_distribution(
    permutation: Permutation, domain_counts: Mapping[str, int], shard_sizes: Numbers
) -> Distribution:
    """Counts the items of each domain in the head, the shards and the windows of the output.

    The items of each domain, and the places of each shard, follow those of the one before.
    """
    total, counts = permutation.size, np.array([*domain_counts.values()], np.int64)
    group = max(-(-len(shard_sizes) * len(counts) // _MOST_COUNTS), 1)  # shards in a group
    sizes = np.add.reduceat(shard_sizes, np.arange(0, len(shard_sizes), group))
    all_ends = {
        "head": np.array([min(HEAD, total), total]),
        "shard" if group == 1 else "shard group": np.cumsum(sizes),
        "window": np.cumsum(even_sizes(total, min(WINDOWS, total))),
    }
    tables = [np.zeros((len(ends), len(counts)), np.int64) for ends in all_ends.values()]
    domain_ends = np.cumsum(counts)
    cuts = np.unique(np.concatenate([*all_ends.values(), np.arange(0, total, _BLOCK)]))
    for start, stop in itertools.pairwise(cuts.tolist()):
        domains = np.searchsorted(domain_ends, permutation.sources(start, stop), side="right")
        block = np.bincount(domains, minlength=len(counts))
        for ends, table in zip(all_ends.values(), tables, strict=True):
            table[np.searchsorted(ends, start, side="right")] += block
    tables[0] = tables[0][:1]  # without the places beyond the head
    return {
        key: Parts(name, tuple(domain_counts), table, counts)
        for key, name, table in zip(("head", "shards", "windows"), all_ends, tables, strict=True)
    }


def distribution_json(distribution: Distribution) -> dict[str, Any]:
    """The distribution as plain values; counts are [parts, domains]."""
    head = distribution["head"]
    figures = {"domains": list(head.domains), "domain_counts": head.totals.tolist()}
    for key, parts in distribution.items():
        counts = {"sizes": parts.sizes.tolist(), "counts": parts.counts.tolist()}
        test = dict(zip(("chi_square", "degrees"), parts.chi_square, strict=True))
        figures[key] = {**counts, **test}
    return figures


def check_distribution(distribution: Distribution) -> None:
    """A MillraceError for a distribution that a fair shuffle gives once in a billion runs."""
    if fault := _fault_of(distribution):
        raise MillraceError(
            f"the output is not shuffled evenly: {fault}. This is a fault of the shuffle, not of "
            "the data: nothing has been published. Please report it with the seed and the number "
            "of items in each domain; --permutation numpy or keyed chooses another permutation"
        )


def format_distribution(distribution: Distribution) -> str:
    """The distribution as a table for people: the head by domain, the shards and the windows."""
    head = distribution["head"]
    rows = [["domain", "actual", "expected", "deviation", "sigma"]]
    columns = head.counts[0].tolist(), head.expected[0].tolist(), head.deviations[0].tolist()
    for name, actual, expected, sigma in zip(head.domains, *columns, strict=True):
        share = f"{(actual - expected) / expected:+.2%}" if expected > 0 else "-"
        rows.append([printable(name), f"{actual:,}", f"{expected:,.1f}", share, f"{sigma:+.1f}"])
    fault = _fault_of(distribution)
    lines = [f"distribution of {head.totals.sum():,} items, first {head.sizes[0]:,} places:"]
    lines += [f"  {line}" for line in text_table(rows)]
    lines += [format_figures(parts.figures()) for parts in distribution.values()]
    lines += [f"NOT uniform: {fault}" if fault else "uniform: chance explains all deviations"]
    return "\n".join(lines)


def _fault_of(distribution: Distribution) -> str | None:
    return next(filter(None, (parts.fault() for parts in distribution.values())), None)


def format_figures(figures: dict[str, Any]) -> str:
    """The figures of parts (see `Parts.figures`) as a line for people."""
    name, count = figures["part"], figures["parts"]
    label = name if name == "head" else f"{count:,} {name}{'s' if count != 1 else ''}"
    test = "too few items, parts or domains for chi-square"
    if figures["degrees"]:
        test = (
            f"chi-square {figures['chi_square']:,.1f}, {figures['degrees']:,} degrees of freedom, "
            f"p = {figures['p_value']:.2g}"
        )
    place = printable(figures["largest_deviation_domain"])
    if name != "head":
        place = f"{name} {figures['largest_deviation_part']}, {place}"
    return (
        f"{label}: {test}; largest deviation {figures['largest_deviation']:+.1f} sigma ({place}: "
        f"{figures['largest_deviation_count']:,}, expected "
        f"{figures['largest_deviation_expected']:,.1f})"
    )


def _classes(totals: Numbers, share: float) -> tuple[list[int], Numbers]:
    """Classes of domains, each with enough items in a part of this share of the output.

    That is the first place of each in an order of the domains, the largest first, and that order.
    """
    order = np.argsort(-totals, kind="stable")
    starts: list[int] = []
    expected = math.inf
    for place, count in enumerate(totals[order].tolist()):
        if expected >= _LEAST_EXPECTED:
            starts.append(place)
            expected = 0.0
        expected += count * share
    if len(starts) > 1 and expected < _LEAST_EXPECTED:
        starts.pop()
    return starts, order


def _place_of_largest(values: NDArray[np.float64]) -> tuple[int, int]:
    row, column = np.unravel_index(np.argmax(values), values.shape)
    return int(row), int(column)
