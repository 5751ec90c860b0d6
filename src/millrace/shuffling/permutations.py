"""The permutation of a shuffle, and how it spreads the domains, against what chance gives.

A permutation is the place of each input item, and the item at each place. `numpy` is
`numpy.random.default_rng(seed).permutation(size)`, which takes 16 bytes per item on the disk.
`keyed` is a `KeyedPermutation`, which takes none.

A fair shuffle deals items like cards, so the number of items of a domain in a part of the output
(the head, a shard, a window) has a hypergeometric distribution. Deviations from the expected number
are in standard deviations ("sigma"). Pearson's chi-square of the windows is about as large as its
degrees of freedom; it is far larger if items stay together, and far smaller if they are dealt in
turn.
"""

import contextlib
import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.checks import printable
from millrace.errors import ConfigError, DataError, MillraceError
from millrace.order import KeyedPermutation
from millrace.ragged import Numbers, even_sizes
from millrace.shuffling.shuffle_items import in_units

HEAD = 50_000  # places
WINDOWS = 64
_MEMORY = 16  # bytes per item while "numpy" is made: for the permutation and its inverse
_BLOCK = 1 << 18  # places that are inverted or counted at a time: 2 MiB for each array
_LEAST_EXPECTED = 5  # items of a class in a window: with fewer, chi-square is not exact
# By Bernstein's inequality, fewer than one in 10**17 counts of a fair shuffle deviates by more than
# 12 sigma where sigma is at least 5 items.
_MOST_DEVIATION = 12
_LEAST_SIGMA = 5


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


# ---- the distribution of domains ----


@dataclass(frozen=True)
class Parts:
    """Parts of the output, of nearly equal size; none is empty."""

    name: str  # of a part: "head", "shard" or "window"
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
    def sigmas(self) -> NDArray[np.float64]:
        """Standard deviation of each count in a fair shuffle: float64 [parts, domains]."""
        total, sizes = int(self.totals.sum()), self.sizes[:, None]
        left = (total - sizes) / max(total - 1, 1)
        return np.asarray(np.sqrt(self.expected * (1 - self.totals / total) * left))

    @cached_property
    def deviations(self) -> NDArray[np.float64]:
        """Deviation of each count in sigma; 0 without a choice: float64 [parts, domains]."""
        deviations = (self.counts - self.expected) / np.maximum(self.sigmas, 1e-300)
        return np.where(self.sigmas > 0, deviations, 0.0)

    @property
    def chi_square(self) -> tuple[float, int]:
        """Pearson's chi-square of parts that make up the output, and its degrees of freedom.

        A domain with at least 5 expected items in a part is a class. The others are one class
        together, or part of the smallest one if they have fewer. With fewer than two classes there
        are 0 degrees of freedom.
        """
        total, order = int(self.totals.sum()), np.argsort(-self.totals, kind="stable")
        expected = self.totals[order] * (self.sizes.min() / total)
        is_class = np.append(np.inf, expected[:-1]) >= _LEAST_EXPECTED
        starts = np.flatnonzero(is_class & (np.cumsum(expected[::-1])[::-1] >= _LEAST_EXPECTED))
        counts = np.add.reduceat(self.counts[:, order], starts, axis=1)
        expected = np.outer(self.sizes, counts.sum(axis=0) / total)
        square = float(((counts - expected) ** 2 / expected).sum())
        # Drawn without replacement, counts vary less than drawn from an endless supply.
        return square * (total - 1) / total, max(len(starts) - 1, 0) * (len(counts) - 1)

    def figures(self) -> dict[str, Any]:
        """Kind and number of parts, and largest deviation; of windows the chi-square."""
        part, domain = divmod(int(np.abs(self.deviations).argmax()), len(self.domains))
        figures = {
            "part": self.name,
            "parts": len(self.counts),
            "largest_deviation": float(self.deviations[part, domain]),
            "largest_deviation_part": part,
            "largest_deviation_domain": self.domains[domain],
            "largest_deviation_count": int(self.counts[part, domain]),
            "largest_deviation_expected": float(self.expected[part, domain]),
        }
        if self.name == "window":
            figures["chi_square"], figures["degrees"] = self.chi_square
        return figures

    def check(self) -> None:
        """A MillraceError for a count that no fair shuffle gives."""
        most = np.abs(self.deviations[self.sigmas >= _LEAST_SIGMA]).max(initial=0)
        if most > _MOST_DEVIATION:
            raise MillraceError(
                f"the output is not shuffled evenly: a count deviates by {most:.1f} sigma, and at "
                f"most {_MOST_DEVIATION} are possible; {format_figures(self.figures())}. This is a "
                "fault of the shuffle, not of the data: nothing has been published. Please report "
                "it with the seed and the number of items in each domain; --permutation numpy or "
                "keyed chooses another permutation"
            )


def measure_distribution(
    permutation: Permutation, domain_counts: Mapping[str, int], shard_sizes: Numbers
) -> dict[str, Parts]:
    """Counts the items of each domain in the "head", the "shards" and the "windows" of the output.

    Items are numbered by domain. The head is the first 50,000 places, as one part. Windows are 64
    equal parts.
    """
    total, counts = permutation.size, np.array([*domain_counts.values()], np.int64)
    all_ends = {
        "head": np.array([min(HEAD, total), total]),
        "shards": np.cumsum(shard_sizes),
        "windows": np.cumsum(even_sizes(total, min(WINDOWS, total))),
    }
    tables = {key: np.zeros((len(ends), len(counts)), np.int64) for key, ends in all_ends.items()}
    domain_ends = np.cumsum(counts)
    cuts = np.unique(np.concatenate([*all_ends.values(), np.arange(0, total, _BLOCK)]))
    for start, stop in itertools.pairwise(cuts.tolist()):
        domains = np.searchsorted(domain_ends, permutation.sources(start, stop), side="right")
        block = np.bincount(domains, minlength=len(counts))
        for key, ends in all_ends.items():
            tables[key][np.searchsorted(ends, start, side="right")] += block
    tables["head"] = tables["head"][:1]  # without the places beyond it
    domain_names = tuple(domain_counts)
    return {
        key: Parts(key.removesuffix("s"), domain_names, table, counts)
        for key, table in tables.items()
    }


def distribution_json(distribution: Mapping[str, Parts]) -> dict[str, Any]:
    """The distribution as plain values; counts are [parts, domains]."""
    head, (square, degrees) = distribution["head"], distribution["windows"].chi_square
    figures = {"domains": list(head.domains), "domain_counts": head.totals.tolist()}
    for key, parts in distribution.items():
        figures[key] = {"sizes": parts.sizes.tolist(), "counts": parts.counts.tolist()}
    figures["windows"] |= {"chi_square": square, "degrees": degrees}
    return figures


def format_figures(figures: dict[str, Any]) -> str:
    """The figures of `Parts.figures` as a line for people."""
    text = (
        "{parts:,} {part}{plural}: largest deviation {largest_deviation:+.1f} sigma ({part} "
        "{largest_deviation_part}, {domain}: {largest_deviation_count:,}, expected "
        "{largest_deviation_expected:,.1f})"
    )
    if figures.get("degrees"):
        text += "; chi-square {chi_square:,.1f}, {degrees:,} degrees of freedom"
    plural, domain = "s" * (figures["parts"] != 1), printable(figures["largest_deviation_domain"])
    return text.format(plural=plural, domain=domain, **figures)
