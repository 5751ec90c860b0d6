"""The distribution of domains: exact counts, figures, and a check that fair shuffles pass."""

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from millrace.errors import MillraceError
from millrace.ragged import even_sizes
from millrace.shuffling import permutations as module
from millrace.shuffling.permutations import (
    Parts,
    distribution_json,
    format_figures,
    measure_distribution,
)


class Sources:
    """A permutation that is given by the item at each place."""

    def __init__(self, sources: np.ndarray) -> None:
        self._sources, self.size = sources, len(sources)

    def sources(self, start: int, stop: int) -> np.ndarray:
        return self._sources[start:stop]


def measure(sources: np.ndarray, counts: list[int], num_shards: int = 64) -> dict[str, Parts]:
    domains = {f"domain {number}": count for number, count in enumerate(counts)}
    return measure_distribution(Sources(sources), domains, even_sizes(len(sources), num_shards))


COUNTS = [60_000, 30_000, 0, 9_000, 1_000]
TOTAL = sum(COUNTS)


# ---- counts ----


@given(
    counts=st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(any),
    num_shards=st.integers(1, 70),
    head=st.integers(1, 100),
    seed=st.integers(0, 100),
)
@settings(deadline=None, derandomize=True, max_examples=200)
def test_counts_are_exact(counts: list[int], num_shards: int, head: int, seed: int) -> None:
    total = sum(counts)
    num_shards = min(num_shards, total)
    sources = np.random.default_rng(seed).permutation(total)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "HEAD", head)
        patch.setattr(module, "_BLOCK", 7)
        measured = measure(sources, counts, num_shards)
    domains = np.repeat(np.arange(len(counts)), counts)[sources]
    for name, sizes in (
        ("head", [min(head, total)]),
        ("shards", even_sizes(total, num_shards).tolist()),
        ("windows", even_sizes(total, min(64, total)).tolist()),
    ):
        parts = np.split(domains[: sum(sizes)], np.cumsum(sizes)[:-1])
        expected = [np.bincount(part, minlength=len(counts)).tolist() for part in parts]
        assert measured[name].sizes.tolist() == sizes
        assert measured[name].counts.tolist() == expected
        assert measured[name].totals.tolist() == counts
        assert distribution_json(measured)[name]["counts"] == expected
        assert distribution_json(measured)[name]["sizes"] == sizes
    data = distribution_json(measured)
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert list(data) == ["domains", "domain_counts", "head", "shards", "windows"]


# ---- figures ----


def test_figures_are_what_the_formulas_say() -> None:
    """Two domains in two shards of 100: the square of the standardised hypergeometric count."""
    parts = np.split(np.arange(200), [30, 40, 110])
    shards = measure(np.concatenate([parts[n] for n in (0, 2, 1, 3)]), [40, 160], 2)["shards"]
    variance = 100 * 0.2 * 0.8 * 100 / 199
    expected = (30 - 20) / math.sqrt(variance)
    assert shards.counts.tolist() == [[30, 70], [10, 90]]
    signs = np.array([[1, -1], [-1, 1]])
    assert shards.deviations == pytest.approx(signs * expected)
    assert shards.chi_square == (pytest.approx(expected**2), 1)
    whole = Parts("head", ("a", "b"), np.array([[60, 40]]), np.array([60, 40]))
    assert whole.deviations.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("counts", "degrees"),
    [
        ([3000, 3000], 9),
        ([3000, 0], 0),
        ([3000, 40], 0),  # 4 are expected in a window
        ([3000, 60, 40], 9),  # the last two are one class
        ([3000, 60, 40, 30], 18),  # ... and again
        ([5000] + [10] * 200, 9),
    ],
)
def test_small_domains_are_one_class(counts: list[int], degrees: int) -> None:
    total = sum(counts)
    shards = measure(np.random.default_rng(3).permutation(total), counts, 10)["shards"]
    value, found = shards.chi_square
    assert found == degrees
    assert abs(value - degrees) <= 4 * math.sqrt(2 * degrees)


def test_figures_as_text() -> None:
    """Also of domains whose names have control characters, which do not reach the terminal."""
    counts = {"\x1b[31mred\n": 25_000, "\u00c4rzte\u202e": 25_000, "empty": 0}
    measured = measure_distribution(Sources(np.arange(50_000)), counts, even_sizes(50_000, 4))
    red = r"\x1b[31mred\n: "
    assert [format_figures(parts.figures()) for parts in measured.values()] == [
        f"1 head: largest deviation +0.0 sigma (head 0, {red}25,000, expected 25,000.0)",
        f"4 shards: largest deviation +129.1 sigma (shard 0, {red}12,500, expected 6,250.0)",
        f"64 windows: largest deviation +28.2 sigma (window 0, {red}782, expected 391.0); "
        "chi-square 49,967.3, 63 degrees of freedom",
    ]


# ---- the check ----


@pytest.mark.parametrize("first", range(0, 320, 80))
def test_fair_shuffles_of_any_shape_pass(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one domain, empty domains, one item, and totals around powers of two."""
    for seed in range(first, first + 80):
        random = np.random.default_rng(seed)
        monkeypatch.setattr(module, "HEAD", int(random.choice([50, 500, 50_000])))
        total = int(10 ** random.uniform(0, 4.5))
        if seed % 4 == 0:
            total = 2 ** int(random.integers(0, 15)) + int(random.integers(0, 3))
        num_domains = 1 if seed % 10 == 0 else int(random.integers(1, 20))
        shares = random.dirichlet(np.full(num_domains, 10 ** random.uniform(-1.5, 1)))
        counts = random.multinomial(total, shares).tolist()
        num_shards = int(random.integers(1, min(total, 200) + 1))
        for parts in measure(random.permutation(total), counts, num_shards).values():
            parts.check()
            assert parts.figures()["parts"] == len(parts.counts)


def test_other_shuffles_fail() -> None:
    random = np.random.default_rng(0)
    fair, half = random.permutation(TOTAL), TOTAL // 2
    bounds = itertools.pairwise([0, *np.cumsum(COUNTS).tolist()])
    crowded = fair.copy()  # one domain into the first shard
    web = np.flatnonzero(fair[:1500] < 60_000)[:160]
    code = 1600 + np.flatnonzero((fair[1600:] >= 90_000) & (fair[1600:] < 99_000))[:160]
    crowded[web], crowded[code] = fair[code], fair[web]
    missing = fair.copy()  # one domain from the first shard
    ours = np.flatnonzero((fair[:1562] >= 90_000) & (fair[:1562] < 99_000))
    web = 1600 + np.flatnonzero(fair[1600:] < 60_000)[: len(ours)]
    missing[ours], missing[web] = fair[web], fair[ours]
    for sources in (
        np.arange(TOTAL),
        np.arange(TOTAL)[::-1],
        np.concatenate([random.permutation(np.arange(*pair)) for pair in bounds]),
        np.append(random.permutation(half), half + random.permutation(half)),
        np.roll(np.arange(TOTAL), 12_345),
        np.argsort(np.arange(TOTAL) + random.uniform(0, 20_000, TOTAL)),
        crowded,
        missing,
    ):
        assert np.array_equal(np.sort(sources), np.arange(TOTAL))
        measured = measure(sources, COUNTS)
        with pytest.raises(MillraceError, match=r"deviates by .* sigma, and at most 12 are poss"):
            [parts.check() for parts in measured.values()]
