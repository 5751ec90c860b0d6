"""The twin law for blend_by_weights and blend_by_sizes."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tests.kernels import reference
from tests.kernels.twins import assert_same

from millrace import ConfigError, _native

WEIGHTS_OF: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "uniform": lambda random, count: random.random(count) + 1e-3,
    "zipf": lambda random, count: random.permutation(1 / np.arange(1.0, count + 1)),
    "one dominates": lambda random, count: np.append(random.random(count - 1) + 1e-6, 9 * count),
    "nearly equal": lambda random, count: 1 + 1e-12 * random.random(count),
    "few weights": lambda random, count: random.integers(1, 6, count).astype(float),
    "halves": lambda random, count: 0.5 ** np.minimum(np.arange(count), 1000),
    "nearly equal in pairs": lambda random, count: np.repeat(1 + random.random(count) / 100, 2),
    "two groups": lambda random, count: (
        (1 + random.random(count) / 1000) / (1 + 2 * (np.arange(count) > count // 4))
    ),
    "heavy tail": lambda random, count: random.gamma(0.1, size=count) + 1e-12,
}
SIZES = sorted({0, 1} | {2**k + d for k in range(1, 13) for d in (-1, 0, 1)})


def normalized(weights: np.ndarray) -> np.ndarray:
    return weights / weights.sum()


def assert_weights_twin(weights: np.ndarray, size: int, threads: Sequence[int] = (1,)) -> None:
    expected = reference.blend_by_weights(weights, size)
    for number in threads:
        assert_same(_native.blend_by_weights(weights, size, number), expected)


def assert_sizes_twin(sizes: np.ndarray, threads: Sequence[int] = (1,)) -> None:
    expected = reference.blend_by_sizes(sizes)
    for number in threads:
        actual = _native.blend_by_sizes(sizes, number)
        assert_same(actual, expected)
        np.testing.assert_array_equal(np.bincount(actual[0], minlength=len(sizes)), sizes)


@pytest.mark.parametrize("size", SIZES)
def test_equals_its_twin_for_each_size(size: int) -> None:
    random = np.random.default_rng(size)
    for num_datasets in (1, 2, 3, 7, 31):
        shares = normalized(random.random(num_datasets) + 1e-3)
        assert_weights_twin(shares, size)
        assert_sizes_twin(random.multinomial(size, shares).astype(np.int64))
    assert_weights_twin(np.full(4, 0.25), size)  # ties: the first one wins


@pytest.mark.parametrize("num_datasets", [1, 2, 127, 128, 129, 1023, 1024, 1025, 32_766])
def test_equals_its_twin_for_many_datasets(num_datasets: int) -> None:
    random = np.random.default_rng(num_datasets)
    sizes = np.zeros(num_datasets, np.int64)  # datasets without samples are never drawn
    assert_sizes_twin(sizes)
    sizes[[0, num_datasets // 2, -1]] = 5, 3, 9
    assert_sizes_twin(sizes)
    assert_weights_twin(normalized(random.random(num_datasets) ** 4 + 1e-9), 200)


@pytest.mark.parametrize(
    "weights",
    [
        [1.0, 5e-324],
        [5e-324, 1.0],
        [1e308, 1e308, 1.0],  # products that overflow to infinity
        [1e-300, 1e-300],
        [2.0**31, 2.0**33],  # not normalised: far ahead of what is taken
        [1 / 3, 1 / 3, 1 / 3],
        [0.1] * 10,  # a sum that is not 1
        [1e30] * 80,  # errors too large to tell two counts apart: the first one wins every time
        [1 / 80] * 80,
    ],
)
def test_by_weights_equals_its_twin_for_extreme_weights(weights: list[float]) -> None:
    assert_weights_twin(np.array(weights), 2000)


@pytest.mark.parametrize("kind", WEIGHTS_OF)
@pytest.mark.parametrize("num_datasets", [3, 9, 24, 25, 65, 193, 400])
def test_equals_its_twin_in_many_parts(num_datasets: int, kind: str) -> None:
    """Enough samples for several parts, for wrong guesses that are corrected, and for the margin of
    the floor to grow and to shrink."""
    random = np.random.default_rng(num_datasets)
    shares = normalized(WEIGHTS_OF[kind](random, num_datasets))
    assert_weights_twin(shares, 17_000 + 110 * min(num_datasets, 193), threads=(1, 2, 5))
    sizes = np.ceil(shares * 9000).astype(np.int64)
    assert_sizes_twin(sizes, threads=(1, 2, 5))
    sizes[:: max(num_datasets // 4, 2)] = 0
    assert_sizes_twin(sizes)


@pytest.mark.parametrize("size", [4095, 4096, 8191, 8192, 8193, 12_288])
def test_the_result_does_not_depend_on_the_number_of_parts(size: int) -> None:
    random = np.random.default_rng(size)
    weights = normalized(10.0 ** (-12 * random.random(20)))
    assert_weights_twin(weights, size, threads=(1, 2, 3, 4))
    assert_weights_twin(np.full(20, 0.05), size, threads=(1, 2, 3, 4))
    shares = random.multinomial(size, weights).astype(np.int64)
    assert_sizes_twin(shares, threads=(1, 2, 3, 4))


def test_by_weights_equals_its_twin_where_counts_do_not_change_errors() -> None:
    """Errors around 2**52 and 2**53: beyond them, equal weights no longer take turns."""
    for scale in (2.0**42, 2.0**43, 2.0**44, 2.0**45):
        assert_weights_twin(np.repeat([scale, scale / 2, scale + 2.0**-8], 30), 1100)


WEIGHTS = st.floats(min_value=0, exclude_min=True, allow_infinity=False)


@given(
    base=st.lists(WEIGHTS, min_size=1, max_size=20),
    places=st.none() | st.lists(st.integers(0, 5), min_size=1, max_size=100),
    normalise=st.booleans(),
    size=st.integers(0, 400),
)
@settings(deadline=None, derandomize=True, max_examples=200)
def test_by_weights_equals_its_twin_for_any_weights(
    base: list[float], places: list[int] | None, normalise: bool, size: int
) -> None:
    """All different, or many that are equal."""
    chosen = range(len(base)) if places is None else places
    weights = np.array([base[place % len(base)] for place in chosen])
    with np.errstate(over="ignore", under="ignore"):
        scaled = normalized(weights)
    usable = normalise and bool(np.all(np.isfinite(scaled) & (scaled > 0)))
    assert_weights_twin(scaled if usable else weights, size)


@given(sizes=st.lists(st.integers(0, 60), min_size=1, max_size=20))
@settings(deadline=None, derandomize=True, max_examples=200)
def test_by_sizes_equals_its_twin_for_any_sizes(sizes: list[int]) -> None:
    assert_sizes_twin(np.array(sizes, dtype=np.int64))


def test_wrong_arguments_are_refused() -> None:
    wrong_weights: list[Any] = [[], [1.0] * 32_767, [0.5, 0.0], [0.5, -0.1], [0.5, np.nan]]
    for weights in (*wrong_weights, [np.inf, 0.5]):
        with pytest.raises(ConfigError, match=r"weights|datasets"):
            _native.blend_by_weights(np.array(weights), 10)
    for sizes in ([], [1] * 32_767, [5, -1], [2**62, 2**62], [2**62]):
        with pytest.raises(ConfigError, match=r"sizes|datasets"):
            _native.blend_by_sizes(np.array(sizes, np.int64))
    for size in (-1, 2**62, 2**63):
        with pytest.raises(ConfigError, match="size"):
            _native.blend_by_weights(np.array([0.5, 0.5]), size)
