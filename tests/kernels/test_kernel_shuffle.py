"""The twin law for shuffled_ranges and its draws: results and generator states."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.random import RandomState
from tests.kernels import reference

from millrace import _core, _native

DTYPES = (np.int32, np.uint32, np.int64)

# Around the kernels' blocks of 512 targets, the generator's of 624 words, and powers of two, where
# the rejection mask changes.
SIZES = sorted(
    {0, 1}
    | {size + d for size in (512, 624, 1024, 1248) for d in (-1, 0, 1)}
    | {2**k + d for k in range(1, 13) for d in (-1, 0, 1)}
)


def generator(seed: int, position: int = 624) -> RandomState:
    """A generator of whose block of 624 words `position` count as drawn, with a cached normal."""
    random = RandomState(seed)
    kind, key, *_ = random.get_state()
    random.set_state((kind, key, position, 1, 0.25))
    return random


def assert_same_state(left: RandomState, right: RandomState) -> None:
    """The next draws are equal, whatever is drawn: words, bounded numbers, cached normals."""
    assert left.randint(0, 2**32, size=3).tolist() == right.randint(0, 2**32, size=3).tolist()
    assert left.standard_normal(3).tolist() == right.standard_normal(3).tolist()
    for one, other in zip(left.get_state()[1:], right.get_state()[1:], strict=True):
        np.testing.assert_array_equal(one, other)


def assert_twin(ranges: Any, dtype: Any, seed: int, position: int = 624) -> None:
    ours, twin = generator(seed, position), generator(seed, position)
    for _ in range(2):  # one generator, used again
        actual = _native.shuffled_ranges(ranges, dtype, ours)
        expected = reference.shuffled_ranges(ranges, dtype, twin)
        np.testing.assert_array_equal(actual, expected, strict=True)
    assert_same_state(ours, twin)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_shuffled_ranges_equals_its_twin(size: int, dtype: Any) -> None:
    start = 5
    for ranges in (
        [(0, size, 1)],
        [(start, start + size, 2), (start, start + size, 1)],
        [(0, size // 3, 1), (size // 3, size, 1)],
        [(0, 0, 1), (3, 3, 7), (0, size, 0), (0, size, 1), (size, size, 1)],
    ):
        assert_twin(ranges, dtype, size)
    for seed, position in ((0, 624), (1, 0), (2**32 - 1, 623), (7, 300)):
        assert_twin([(0, size, 1)], dtype, seed, position)


@given(
    seed=st.integers(0, 2**32 - 1),
    position=st.integers(0, 624),
    dtype=st.sampled_from(DTYPES),
    runs=st.lists(st.tuples(st.integers(0, 2**31 - 60), st.integers(0, 50), st.integers(0, 4))),
)
@settings(deadline=None, derandomize=True, max_examples=100)
def test_shuffled_ranges_equals_its_twin_for_any_ranges(
    seed: int, position: int, dtype: Any, runs: list[tuple[int, int, int]]
) -> None:
    ranges = [(start, start + length, copies) for start, length, copies in runs]
    assert_twin(ranges, dtype, seed, position)


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_ends_of_the_dtype_and_nothing(dtype: Any) -> None:
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    stop = min(high + 1, 2**63 - 1)  # stops are int64 themselves
    for ranges in ([(low, low + 600, 2)], [(stop - 600, stop, 2)], []):
        assert_twin(ranges, dtype, 1)
    # A loop over 2**40 copies of nothing would never end.
    for ranges in ([(0, 0, 2**40)], [(low, high, 0)]):
        nothing = _native.shuffled_ranges(ranges, dtype, RandomState(0))
        np.testing.assert_array_equal(nothing, np.array([], dtype), strict=True)


# ---- the draws, of which those of 64 bits belong to arrays beyond any test's memory ----


def draw_targets(first: int, count: int, random: RandomState) -> np.ndarray:
    state = random.get_state(legacy=False)
    words = state["state"]
    out, (words["key"], words["pos"]) = _core.draw_targets(first, count, words["key"], words["pos"])
    random.set_state(state)
    return out


# First steps and counts: within and across every mask, 2**31 and 2**32 (64-bit draws), blocks.
TARGETS = (
    [(0, 0), (1, 0), (1, 1), (2**63 - 1, 0)]
    + [(2**k + 2, min(2**k + 2, 5)) for k in range(1, 63)]
    + [(size, size) for size in SIZES if size > 0]
    + [(3000, count) for count in (1, 77, 1500)]
    + [(2**31 + d, 700) for d in (-1, 0, 1, 350)]
    + [(2**32 + d, 700) for d in (-1, 0, 1, 350, 511, 512, 513)]
    + [(2**33 + 17, 1300), (2**40 - 1, 600), (2**62, 513), (2**63 - 1, 700)]
)


@pytest.mark.parametrize(("first", "count"), TARGETS)
def test_draw_targets_equals_its_twin(first: int, count: int) -> None:
    for seed, position in ((0, 624), (1, 0), (2, 623), (3, 300)):
        ours, twin = generator(seed, position), generator(seed, position)
        expected = reference.draw_targets(first, count, twin)
        np.testing.assert_array_equal(draw_targets(first, count, ours), expected, strict=True)
        assert_same_state(ours, twin)


@pytest.mark.parametrize("first", [600, 2**31, 2**32 - 1, 2**32, 2**32 + 50, 2**50, 2**63 - 1])
def test_draw_targets_are_numpys_bounded_draws(first: int) -> None:
    """NumPy's own bounded integers check the twin too, where no shuffle is large enough to."""
    ours, numpys = RandomState(11), RandomState(11)
    expected = [
        numpys.randint(0, step + 1, dtype=np.int64) for step in range(first, first - 99, -1)
    ]
    assert draw_targets(first, 99, ours).tolist() == expected
    assert_same_state(ours, numpys)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("dtype", "run"),
    [
        *((dtype, None) for dtype in (np.int16, np.uint64, np.float64, ">i4")),
        (np.int32, (3, 2, 1)),
        (np.int32, (0, 3, -1)),
        (np.int32, (-(2**31) - 1, 0, 1)),
        (np.int32, (0, 2**31 + 1, 1)),
        (np.uint32, (-1, 3, 1)),
        (np.uint32, (0, 2**32 + 1, 1)),
        (np.int64, (2**63 - 5, 2**63, 1)),
        (np.int64, (0, 2**63 + 1, 1)),
        (np.int64, (0, 2**70, 1)),
        (np.int64, (0, 2**62, 1)),
        (np.int64, (-(2**63), 2**63 - 1, 1)),
        (np.int32, (0, 2, 2**62)),
        (np.int32, (0, 2, 2**70)),
    ],
)
def test_other_dtypes_and_what_does_not_fit_are_refused(
    dtype: Any, run: tuple[int, int, int] | None
) -> None:
    """The generator is left alone."""
    random, ranges = RandomState(9), [(0, 30, 1), *([run] if run else [])]
    with pytest.raises(ValueError, match=r"range" if run else "int32, uint32 or int64"):
        _native.shuffled_ranges(ranges, dtype, random)
    assert_same_state(random, RandomState(9))


def test_other_generators_are_refused() -> None:
    random = RandomState(np.random.PCG64(0))
    with pytest.raises(ValueError, match="MT19937"):
        _native.shuffled_ranges([(0, 3, 1)], np.int32, random)


@pytest.mark.parametrize(("words", "position"), [(623, 0), (625, 0), (0, 0), (624, -1), (624, 625)])
def test_the_core_refuses_a_malformed_state(words: int, position: int) -> None:
    with pytest.raises(ValueError, match="624 words"):
        _core.draw_targets(3, 3, np.zeros(words, np.uint32), position)


def test_the_core_refuses_other_counts_and_ranges() -> None:
    key = np.zeros(624, np.uint32)
    for first, count in ((3, 4), (0, 1), (-1, 0), (-1, 3), (5, -1), (2**63, 1)):
        with pytest.raises((ValueError, TypeError), match=r"count <= first|incompatible"):
            _core.draw_targets(first, count, key, 0)
    for ranges in (np.array([[0, 5, 1, 7]]), np.array([0, 5, 1]), np.array([[0.0, 5.0, 1.0]])):
        with pytest.raises(TypeError, match="incompatible"):
            _core.shuffled_ranges(ranges, np.empty(0, np.int32), key, 0)
