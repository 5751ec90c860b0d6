"""How a shuffle spreads the domains over the output, compared with what chance allows.

A fair shuffle deals items like cards, without putting any back. So the items of a domain in a part
of the output (the head, a shard, a window) have a hypergeometric distribution. Two tests use that:

- Pearson's chi-square of all parts together finds many small deviations: blocks of items that stay
  together, or shares that are more even than chance makes them.
- The bound of Hoeffding (1963) for each domain in each part finds single large deviations. It holds
  for any size; chi-square only for counts that are not small.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.checks import printable
from millrace.errors import ConfigError, MillraceError
from millrace.jobs.shuffling.chi_square import chi_square_p, gamma_p
from millrace.jobs.shuffling.permutations import Permutation, even_sizes

HEAD = 50_000
"""Places of the head."""

WINDOWS = 64
"""Equal parts of the output that are called windows."""

_BLOCK = 1 << 18  # places that are counted at a time: 2 MiB for each array
_MOST_COUNTS = 1 << 19  # counts of domains in shards: with their tests they take 30 MB
_LEAST_EXPECTED = 5  # items of a class in a part: with fewer, chi-square is not exact enough
_LEAST_DEGREES = 30  # of freedom: with fewer, the far tail is not exact enough to refuse a shuffle
_LEAST_P = 1e-9  # a smaller `Parts.bound` is a fault; the bounds hold for any counts
_LEAST_TABLE_P = 1e-12  # the same of chi-square, whose far tail may be 10 to 100 times heavier
_ZERO = 1e-300  # smaller probabilities are shown as "below" this one

Counts = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Equal, or nearly equal, parts of the output.

    Attributes:
        name: What they are called: "head", "shard", "shard group" or "window".
        sizes: Places of each part, int64 [parts].
        counts: Items of each domain in each part, int64 [parts, domains].
        expected: Expected number of items, float64 [parts, domains].
        chi_squares: Pearson's chi-square of each part, corrected for draws without replacement,
            float64 [parts]. Domains that are too small to be tested alone are put together.
        part_degrees: Degrees of freedom of each part's chi-square; 0: not enough items for a test.
        p_values: Probability that the chi-square of a part is at least as large by chance,
            float64 [parts]. Without degrees of freedom it is 1.
        chi_square, degrees, p_value: The same of all parts together.
        log_bound: Logarithm of an upper limit for the probability that any domain in any part
            deviates from its expected number as much as the most unlikely one does.
        unlikeliest: Numbers of the part and the domain with that deviation.
    """

    name: str
    sizes: Counts
    counts: Counts
    expected: NDArray[np.float64]
    chi_squares: NDArray[np.float64]
    part_degrees: int
    p_values: NDArray[np.float64]
    chi_square: float
    degrees: int
    p_value: float
    log_bound: float
    unlikeliest: tuple[int, int]

    @property
    def bound(self) -> float:
        """The limit of `log_bound`, as a probability."""
        return math.exp(self.log_bound)

    def to_json(self) -> dict[str, Any]:
        """The counts and tests as plain values."""
        return {
            "sizes": self.sizes.tolist(),
            "counts": self.counts.tolist(),
            "chi_squares": self.chi_squares.tolist(),
            "part_degrees": self.part_degrees,
            "p_values": self.p_values.tolist(),
            "chi_square": self.chi_square,
            "degrees": self.degrees,
            "p_value": self.p_value,
            "bound": self.bound,
        }


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Where the items of each domain are in the output.

    Attributes:
        domain_names: Name of each domain.
        domain_counts: Items of each domain.
        head: The first 50,000 places, or all if there are fewer, as one part.
        shards: The shards; groups of neighbours if there are more than 2**19 counts of domains in
            shards, which would take too much memory.
        windows: 64 equal parts of the output, or one for each place if there are fewer.
    """

    domain_names: tuple[str, ...]
    domain_counts: tuple[int, ...]
    head: Parts
    shards: Parts
    windows: Parts

    def to_json(self) -> dict[str, Any]:
        """The distribution as plain values; counts are [parts, domains]."""
        return {
            "domains": list(self.domain_names),
            "domain_counts": list(self.domain_counts),
            "head": self.head.to_json(),
            "shards": self.shards.to_json(),
            "windows": self.windows.to_json(),
        }


def measure_distribution(
    permutation: Permutation,
    domain_names: Sequence[str],
    domain_counts: Sequence[int],
    shard_sizes: Sequence[int],
) -> Distribution:
    """Counts the items of each domain in the head, the shards and the windows of the output.

    Reads the permutation once, in blocks.

    Args:
        permutation: Permutation of all items.
        domain_names: Name of each domain.
        domain_counts: Items of each domain, whose numbers follow each other.
        shard_sizes: Places of each shard, which follow each other.

    Raises:
        ConfigError: Domains or shards that do not have as many items as the permutation.
    """
    total, counts = permutation.size, np.array(domain_counts, np.int64)
    if len(domain_names) != len(counts) or not total == counts.sum() == sum(shard_sizes):
        raise ConfigError(
            f"the permutation has {total} items, {len(domain_names)} domains have {counts.sum()} "
            f"and {len(shard_sizes)} shards {sum(shard_sizes)}; all must have the same number"
        )
    head = min(HEAD, total)
    group = max(-(-len(shard_sizes) * len(counts) // _MOST_COUNTS), 1)  # shards in a group
    starts = np.arange(0, len(shard_sizes), group)
    parts = {
        "head": np.array([head, total - head], np.int64),
        "shard": np.add.reduceat(np.array(shard_sizes, np.int64), starts),
        "window": even_sizes(total, min(WINDOWS, total)),
    }
    tables = {name: np.zeros((len(sizes), len(counts)), np.int64) for name, sizes in parts.items()}
    ends = {name: np.cumsum(sizes) for name, sizes in parts.items()}
    domain_ends = np.cumsum(counts)
    cuts = np.unique(np.concatenate([*ends.values(), np.arange(0, total, _BLOCK), [0, total]]))
    for start, stop in itertools.pairwise(cuts.tolist()):
        items = permutation.sources(start, stop)
        domains = np.searchsorted(domain_ends, items, side="right")
        block = np.bincount(domains, minlength=len(counts))
        for name, table in tables.items():
            table[np.searchsorted(ends[name], start, side="right")] += block
    return Distribution(
        domain_names=tuple(domain_names),
        domain_counts=tuple(counts.tolist()),
        head=_parts("head", parts["head"][:1], tables["head"][:1], counts),
        shards=_parts(
            "shard" if group == 1 else "shard group", parts["shard"], tables["shard"], counts
        ),
        windows=_parts("window", parts["window"], tables["window"], counts),
    )


def check_distribution(distribution: Distribution) -> None:
    """Refuses a distribution that no fair shuffle would give.

    A fair shuffle is refused less than once in a billion runs.

    Raises:
        MillraceError: A domain that is far from its share in a part of the output, or shares whose
            differences as a whole are too large, or too small, for chance.
    """
    fault = _fault(distribution)
    if fault:
        raise MillraceError(
            f"the output is not shuffled evenly: {fault}. This is a fault of the shuffle, not of "
            "the data: nothing has been published. Please report it with the seed and the number "
            "of items in each domain; --permutation numpy or keyed chooses another permutation"
        )


def format_distribution(distribution: Distribution) -> str:
    """The distribution as a table for people: the head by domain, the shards and the windows."""
    head, total = distribution.head, sum(distribution.domain_counts)
    size = int(head.sizes[0])
    names = [printable(name) for name in distribution.domain_names]
    width = max(map(len, ["domain", *names]))
    lines = [
        f"distribution of {total:,} items, first {size:,} places:",
        f"  {'domain':<{width}}  {'actual':>12}  {'expected':>14}  {'deviation':>10}",
    ]
    for name, actual, expected in zip(
        names, head.counts[0].tolist(), head.expected[0].tolist(), strict=True
    ):
        deviation = f"{(actual - expected) / expected:+.2%}" if expected > 0 else "-"
        lines.append(f"  {name:<{width}}  {actual:>12,}  {expected:>14,.1f}  {deviation:>10}")
    lines.append(f"  {_test_text(head)}")
    for parts in (distribution.shards, distribution.windows):
        count = len(parts.sizes)
        lines.append(
            f"{count:,} {parts.name}{'s' if count != 1 else ''}: {_largest(distribution, parts)}"
        )
        lines.append(f"  {_test_text(parts)}")
    fault = _fault(distribution)
    lines.append(f"NOT uniform: {fault}" if fault else "uniform: chance explains all deviations")
    return "\n".join(lines)


# ---- tests ----


def _parts(name: str, sizes: Counts, counts: Counts, domain_counts: Counts) -> Parts:
    total = int(domain_counts.sum())
    expected = np.outer(sizes, domain_counts / max(total, 1))
    chi_squares, part_degrees = _chi_squares(sizes, counts, domain_counts)
    if len(sizes) == 1:  # the head: the rest of the output is the other part of the table
        table, degrees = float(chi_squares[0]), part_degrees
    else:
        table, degrees = _chi_square_of_table(sizes, counts, domain_counts)
    log_bounds = _log_bounds(sizes, counts, domain_counts)
    place = int(np.argmin(log_bounds)) if log_bounds.size else 0
    least = float(log_bounds.min(initial=0.0)) + math.log(max(log_bounds.size, 1))
    return Parts(
        name=name,
        sizes=sizes,
        counts=counts,
        expected=expected,
        chi_squares=chi_squares,
        part_degrees=part_degrees,
        p_values=np.array([chi_square_p(value, part_degrees) for value in chi_squares.tolist()]),
        chi_square=table,
        degrees=degrees,
        p_value=chi_square_p(table, degrees),
        log_bound=min(least, 0.0),
        unlikeliest=divmod(place, max(len(domain_counts), 1)),
    )


def _chi_squares(
    sizes: Counts, counts: Counts, domain_counts: Counts
) -> tuple[NDArray[np.float64], int]:
    """The chi-square of each part, and its degrees of freedom."""
    total = int(domain_counts.sum())
    squares, num_classes = _squares(sizes, counts, domain_counts)
    if num_classes < 2 or np.any(sizes == total):
        return np.zeros(len(sizes)), 0
    # Drawn without replacement, counts vary less than drawn from an endless supply.
    return squares * (total - 1) / (total - sizes), num_classes - 1


def _chi_square_of_table(sizes: Counts, counts: Counts, domain_counts: Counts) -> tuple[float, int]:
    """The chi-square of all parts together, and its degrees of freedom.

    If the parts are so small that not even two classes of domains have enough items in each,
    neighbouring parts are put together.
    """
    total = int(domain_counts.sum())
    rarer = total - int(domain_counts.max(initial=0))  # all domains but the largest
    num_groups = min(len(sizes), rarer // (2 * _LEAST_EXPECTED))
    if num_groups < 2:
        return 0.0, 0
    starts = np.arange(num_groups) * len(sizes) // num_groups
    sizes, counts = np.add.reduceat(sizes, starts), np.add.reduceat(counts, starts, axis=0)
    squares, num_classes = _squares(sizes, counts, domain_counts)
    return float(squares.sum()) * (total - 1) / total, (num_classes - 1) * (num_groups - 1)


def _squares(
    sizes: Counts, counts: Counts, domain_counts: Counts
) -> tuple[NDArray[np.float64], int]:
    """The sum of (actual - expected)**2 / expected of each part, and the number of classes.

    A class is one domain, or several small ones: each has enough items in every part.
    """
    total = max(int(domain_counts.sum()), 1)
    share = int(sizes.min(initial=total)) / total  # of the smallest part
    order = np.argsort(-domain_counts, kind="stable")
    starts, expected = [], math.inf
    for place, count in enumerate(domain_counts[order].tolist()):
        if expected >= _LEAST_EXPECTED:
            starts.append(place)
            expected = 0.0
        expected += count * share
    if len(starts) > 1 and expected < _LEAST_EXPECTED:
        starts.pop()
    if not starts:
        return np.zeros(len(sizes)), 0
    class_counts = np.add.reduceat(counts[:, order], starts, axis=1)
    class_expected = np.outer(sizes, np.add.reduceat(domain_counts[order], starts) / total)
    with np.errstate(divide="ignore", invalid="ignore"):
        squares = np.nan_to_num((class_counts - class_expected) ** 2 / class_expected)
    return squares.sum(axis=1), len(starts)


def _log_bounds(sizes: Counts, counts: Counts, domain_counts: Counts) -> NDArray[np.float64]:
    """For each part and domain, the logarithm of an upper limit of the probability of its count.

    That is the probability of a deviation as large or larger, in either direction. Of `n` draws
    with a share p, x are of the domain with at most the probability exp(-n KL(x / n, p)); the same
    holds with the roles of part and domain exchanged, and the smaller limit counts.
    """
    total = max(int(domain_counts.sum()), 1)
    n, k = sizes[:, None].astype(np.float64), domain_counts[None, :].astype(np.float64)
    exponents = np.maximum(_divergence(counts, n, k / total), _divergence(counts, k, n / total))
    bounds: NDArray[np.float64] = np.minimum(math.log(2) - exponents, 0.0)
    return bounds


def _divergence(
    counts: Counts, draws: NDArray[np.float64], shares: NDArray[np.float64]
) -> NDArray[np.float64]:
    """n KL(x / n, p) of the counts x, the numbers of draws n and the shares p."""
    divergence = np.zeros(counts.shape)
    for x, p in ((counts, shares), (draws - counts, 1 - shares)):
        with np.errstate(divide="ignore", invalid="ignore"):
            divergence += np.where(x > 0, x * np.log(x / (draws * p)), 0.0)
    return np.maximum(divergence, 0.0)


def _fault(distribution: Distribution) -> str:
    """Why no fair shuffle gives this distribution; empty if one may."""
    for parts in (distribution.head, distribution.shards, distribution.windows):
        if 3 * parts.bound < _LEAST_P:  # any of head, shards and windows could deviate
            part, domain = parts.unlikeliest
            where = "the head" if parts.name == "head" else f"{parts.name} {part}"
            return (
                f"{where} has {parts.counts[part, domain]:,} of its {parts.sizes[part]:,} items "
                f"from domain {printable(distribution.domain_names[domain])}, and a fair shuffle "
                f"{parts.expected[part, domain]:,.1f}; the probability of such a deviation "
                f"anywhere is at most {max(parts.bound, _ZERO):.2g}"
            )
        if parts.degrees >= _LEAST_DEGREES:
            p_below = 1 - parts.p_value
            if p_below < 1e-3:  # too close to 1 for a difference
                p_below = gamma_p(parts.degrees / 2, parts.chi_square / 2)
            if min(parts.p_value, p_below) < _LEAST_TABLE_P:
                size = "large" if parts.p_value < p_below else "small"
                where = "in the head" if parts.name == "head" else f"between {parts.name}s"
                return (
                    f"the differences {where} are too {size}: chi-square is "
                    f"{parts.chi_square:,.1f}, and about {parts.degrees:,} for a fair shuffle "
                    f"({_p_text(min(parts.p_value, p_below))})"
                )
    return ""


# ---- text ----


def _largest(distribution: Distribution, parts: Parts) -> str:
    """The largest deviation, in percent of the expected number."""
    with np.errstate(divide="ignore", invalid="ignore"):
        deviations = np.abs(np.nan_to_num(parts.counts / parts.expected - 1, posinf=0, neginf=0))
    if deviations.size == 0:
        return "no items"
    part, domain = np.unravel_index(int(np.argmax(deviations)), deviations.shape)
    actual, expected = int(parts.counts[part, domain]), float(parts.expected[part, domain])
    return (
        f"largest deviation {deviations[part, domain]:.2%} ({parts.name} {part}, "
        f"{printable(distribution.domain_names[domain])}: actual {actual:,}, "
        f"expected {expected:,.1f})"
    )


def _test_text(parts: Parts) -> str:
    if parts.degrees == 0:
        return "chi-square: no test, as there are too few items, parts or domains"
    text = (
        f"chi-square {parts.chi_square:,.2f}, {parts.degrees:,} degrees of freedom, "
        f"{_p_text(parts.p_value)}"
    )
    if parts.part_degrees > 0 and len(parts.sizes) > 1:
        place = int(np.argmin(parts.p_values))
        text += (
            f"; lowest of {len(parts.sizes):,} {parts.name}s: {_p_text(parts.p_values[place])} "
            f"({parts.name} {place})"
        )
    return text


def _p_text(p: float) -> str:
    return f"p < {_ZERO:g}" if p < _ZERO else f"p = {p:.2g}"
