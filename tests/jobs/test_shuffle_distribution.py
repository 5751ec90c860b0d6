"""The distribution check: fair shuffles pass, and every other one that we could think of fails."""

import json
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from millrace.errors import MillraceError
from millrace.ragged import even_sizes
from millrace.shuffling import distribution as module
from millrace.shuffling.distribution import (
    Distribution,
    Parts,
    check_distribution,
    distribution_json,
    format_distribution,
    measure_distribution,
)


class Sources:
    """A permutation that is given by the item at each place."""

    def __init__(self, sources: np.ndarray) -> None:
        self._sources, self.size = sources, len(sources)

    def sources(self, start: int, stop: int) -> np.ndarray:
        return self._sources[start:stop]


def measure(sources: np.ndarray, counts: list[int], num_shards: int = 64) -> Distribution:
    domains = {f"domain {number}": count for number, count in enumerate(counts)}
    return measure_distribution(Sources(sources), domains, even_sizes(len(sources), num_shards))


def domains_of(sources: np.ndarray, counts: list[int]) -> np.ndarray:
    return np.repeat(np.arange(len(counts)), counts)[sources]


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
    domains = domains_of(sources, counts)
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


def test_very_many_shards_are_counted_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = np.random.default_rng(1).permutation(TOTAL)
    alone = measure(sources, COUNTS, 64)["shards"]
    monkeypatch.setattr(module, "_MOST_COUNTS", 64 * len(COUNTS) // 10)
    together = measure(sources, COUNTS, 64)["shards"]
    assert (alone.name, together.name) == ("shard", "shard group")
    assert len(together.sizes) == 7  # of 10 shards, the last one of 4
    starts = np.arange(0, 64, 10)
    assert together.sizes.tolist() == np.add.reduceat(alone.sizes, starts).tolist()
    assert together.counts.tolist() == np.add.reduceat(alone.counts, starts).tolist()
    assert "7 shard groups: " in format_distribution(measure(sources, COUNTS, 64))


# ---- fair shuffles ----


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
        measured = measure(random.permutation(total), counts, num_shards)
        check_distribution(measured)
        assert "NOT" not in format_distribution(measured)


def test_figures_of_fair_shuffles_are_spread_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEAD", 1000)
    counts = [2500, 1000, 300, 100, 50, 40, 8, 2]
    orders = [np.random.default_rng(seed).permutation(4000) for seed in range(300)]
    tables = [measure(order, counts, 20) for order in orders]
    for name in ("head", "shards", "windows"):
        values = [table[name].figures()["p_value"] for table in tables]
        tenths = np.bincount((np.array(values) * 10).astype(int).clip(0, 9), minlength=10)
        assert float(((tenths - 30) ** 2 / 30).sum()) < 34, (name, tenths)  # p = 1e-4
        deviations = np.concatenate([table[name].deviations for table in tables])
        assert abs(deviations.mean()) < 0.05, name
        assert 0.9 < deviations[:, :5].std() < 1.1, name
    whole = Parts("head", ("a", "b"), np.array([[60, 40]]), np.array([60, 40]))
    assert whole.deviations.tolist() == [[0.0, 0.0]]


def test_the_smallest_outputs_pass() -> None:
    for counts in ([1], [0, 1, 0]):
        measured = measure(np.arange(1), counts, 1)
        check_distribution(measured)
        assert measured["windows"].chi_square == measured["shards"].chi_square == (0, 0)


# ---- other shuffles ----


def unfair_shuffles() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    fair, ends = random.permutation(TOTAL), np.cumsum(COUNTS)
    starts = ends - COUNTS
    blocks = np.arange(TOTAL).reshape(-1, 20)
    missing, crowded = fair.copy(), fair.copy()
    in_shard = slice(0, even_sizes(TOTAL, 64)[0])
    domains = domains_of(fair, COUNTS)
    theirs = np.flatnonzero(domains[in_shard] == 3)  # about 140 of 1,563
    web = in_shard.stop + np.flatnonzero(domains[in_shard.stop :] == 0)
    others = random.choice(web, len(theirs), replace=False)
    missing[theirs], missing[others] = fair[others], fair[theirs]
    ours = np.flatnonzero(domains[in_shard] == 0)[:80]
    rare = in_shard.stop + np.flatnonzero(domains[in_shard.stop :] == 4)[:80]
    crowded[ours], crowded[rare] = fair[rare], fair[ours]
    even = np.concatenate([(np.arange(count) + 0.5) / max(count, 1) for count in COUNTS])
    half = TOTAL // 2
    return {
        "identity": np.arange(TOTAL),
        "reversed": np.arange(TOTAL)[::-1],
        "blocks": blocks[random.permutation(len(blocks))].reshape(-1),
        "within domains": np.concatenate(
            [random.permutation(np.arange(a, b)) for a, b in zip(starts, ends, strict=True)]
        ),
        "within halves": np.append(random.permutation(half), half + random.permutation(half)),
        "rotated": np.roll(np.arange(TOTAL), 12_345),
        "one domain missing from a shard": missing,
        "one domain crowded into a shard": crowded,
        "dealt in turn": np.argsort(even, kind="stable"),
        "a small window": np.argsort(np.arange(TOTAL) + random.uniform(0, 20_000, TOTAL)),
    }


@pytest.mark.parametrize("name", unfair_shuffles())
def test_other_shuffles_fail(name: str) -> None:
    sources = unfair_shuffles()[name]
    assert np.array_equal(np.sort(sources), np.arange(TOTAL))
    measured = measure(sources, COUNTS)
    with pytest.raises(MillraceError, match="is not shuffled evenly") as caught:
        check_distribution(measured)
    text = format_distribution(measured)
    assert text.splitlines()[-1].startswith("NOT uniform: ")
    assert text.splitlines()[-1].removeprefix("NOT uniform: ") in str(caught.value)
    message = {
        "one domain missing from a shard": (
            r"shard 0 has 0 of its 1,563 items from domain domain 3, and a fair shuffle 140\.7; "
            r"that deviates by -12\.\d sigma"
        ),
        "one domain crowded into a shard": "shard 0 has",
        "dealt in turn": "too small",
    }
    assert re.search(message.get(name, ""), str(caught.value))


def test_small_outputs_fail_too() -> None:
    check_distribution(measure(np.random.default_rng(0).permutation(300), [150, 150], 2))
    with pytest.raises(MillraceError, match="not shuffled evenly"):
        check_distribution(measure(np.arange(300)[::-1], [150, 150], 2))


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


def test_small_domains_are_tested_together() -> None:
    counts = [5000] + [10] * 200
    shards = measure(np.random.default_rng(3).permutation(7000), counts, 10)["shards"]
    # One item of each small domain is expected in a shard: five make a class.
    assert shards.chi_square[1] == 40 * 9
    assert abs(shards.z) < 3


# Chi-square, its degrees of freedom, and the probability of at least as much, by mpmath.
CHI_SQUARES = [(63, 63, 0.4763024), (100.1, 100, 0.4783), (1000, 1000, 0.4957975), (700, 600, 3e-3)]


@pytest.mark.parametrize(("value", "degrees", "probability"), CHI_SQUARES)
def test_p_values(value: float, degrees: int, probability: float) -> None:
    class Given(Parts):
        chi_square = value, degrees  # type: ignore[assignment]

    one = np.ones((1, 1), np.int64)
    parts = Given("head", ("web",), one, one[0])
    assert parts.figures()["p_value"] == pytest.approx(probability, rel=0.05)


# ---- text ----


def test_the_table() -> None:
    """Also of domains whose names have control characters, which do not reach the terminal."""
    counts = {"\x1b[31mred\n": 25_000, "Ärzte\u202e": 24_000, "C": 1_000, "empty": 0}
    for order in (np.random.default_rng(1).permutation(50_000), np.arange(50_000)):
        measured = measure_distribution(Sources(order), counts, even_sizes(50_000, 4))
        lines = format_distribution(measured).splitlines()
        assert lines[0] == "distribution of 50,000 items, first 50,000 places:"
        assert lines[1].split() == ["domain", "actual", "expected", "deviation", "sigma"]
        assert lines[2].split() == [r"\x1b[31mred\n", "25,000", "25,000.0", "+0.00%", "+0.0"]
        assert lines[3].startswith(r"  Ärzte\u202e   ")
        assert lines[5].split() == ["empty", "0", "0.0", "-", "+0.0"]
        assert lines[6].startswith("head: too few items, parts or domains for chi-square; largest")
        assert lines[7].startswith("4 shards: chi-square ")
        assert "degrees of freedom, p = " in lines[7]
        assert lines[8].startswith("64 windows: chi-square ")
        is_fair = lines[-1] == "uniform: chance explains all deviations"
        assert is_fair == (order[0] != 0)
        assert all(line.isprintable() for line in lines)
