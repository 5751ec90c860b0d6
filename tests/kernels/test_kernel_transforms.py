"""Transforms of samples: the kernels equal their twins, and refuse arrays that do not fit."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tests.kernels.twins import assert_refused, assert_twin

from millrace import _native

FIM: dict[str, Any] = {
    "rate": 1.0,
    "spm_rate": 0.5,
    "prefix_token": 101,
    "middle_token": 102,
    "suffix_token": 103,
    "eod_token": 0,
    "pad_token": None,
    "seed": 7,
}
RATES = st.sampled_from([0.0, 1e-9, 0.3, 0.5, 1.0]) | st.floats(0, 1)
LENGTHS = st.lists(st.sampled_from([0, 1, 2, 3, 5, 6, 7, 8, 9]) | st.integers(0, 70), max_size=5)


def tokens_of(lengths: list[int], seed: int, num_values: int) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens from 0 up to num_values, and where each sample ends."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return np.random.default_rng(seed).integers(0, num_values, sum(lengths)), ends


@settings(max_examples=300, deadline=None)
@given(
    lengths=LENGTHS,
    seed=st.integers(0, 2**32 - 1),
    num_values=st.sampled_from([1, 2, 4, 30]),
    drawn=st.fixed_dictionaries(
        {
            "rate": RATES,
            "spm_rate": RATES,
            "eod_token": st.sampled_from([None, 0, 1]),
            "pad_token": st.sampled_from([None, 0, 1]),
            "seed": st.sampled_from([0, 1, 2**63 - 1]) | st.integers(0, 2**63 - 1),
        }
    ),
    first_number=st.sampled_from([0, 2**31, 2**32, 2**62]),
)
def test_fill_in_middle_equals_its_twin(
    lengths: list[int], seed: int, num_values: int, drawn: dict[str, Any], first_number: int
) -> None:
    """Its draws are NumPy's Philox, which the twin calls."""
    tokens, ends = tokens_of(lengths, seed, num_values)
    numbers = first_number + np.arange(len(lengths))
    options = FIM | {"prefix_token": 2**62} | drawn
    assert_twin("fill_in_middle", tokens, ends, numbers, **options)


@settings(max_examples=300, deadline=None)
@given(
    lengths=LENGTHS,
    seed=st.integers(0, 2**32 - 1),
    num_values=st.sampled_from([1, 2, 3]),
    limits=st.tuples(
        st.integers(1, 6) | st.just(2**31 - 1), st.integers(2, 6) | st.just(2**31 - 1)
    ),
    is_whole=st.booleans(),
)
def test_mark_repeats_equals_its_twin(
    lengths: list[int], seed: int, num_values: int, limits: tuple[int, int], is_whole: bool
) -> None:
    tokens, ends = tokens_of(lengths, seed, num_values)
    assert_twin("mark_repeats", tokens * 2**60, ends, *limits, is_whole)


@st.composite
def ranges_and_spans(draw: Any) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    base = draw(st.sampled_from([0, 2**31 - 60]))
    rows = []
    for sequence in draw(st.sets(st.integers(0, 6))):
        edges = sorted(draw(st.sets(st.integers(0, 50), max_size=8)))
        rows += [
            (sequence, base + start, base + stop)
            for start, stop in zip(edges[::2], edges[1::2], strict=False)
        ]
    spans = draw(
        st.lists(st.tuples(st.integers(0, 7), st.integers(0, 50), st.integers(0, 20)), max_size=6)
    )
    table = np.array(spans, np.int64).reshape(-1, 3) + np.array([0, base, 0])
    ranges = np.array(sorted(rows), np.int32).reshape(-1, 3)
    return ranges, tuple(np.ascontiguousarray(column) for column in table.T)


@settings(max_examples=200, deadline=None)
@given(ranges_and_spans())
def test_mark_ranges_equals_its_twin(arrays: tuple[np.ndarray, tuple[np.ndarray, ...]]) -> None:
    ranges, spans = arrays
    assert_twin("mark_ranges", ranges, *spans)


def test_ranges_may_start_at_any_byte() -> None:
    rows = np.array([(0, 1, 2), (4, 3, 7)], np.int32)
    at_odd_byte = np.frombuffer(b"x" + rows.tobytes(), np.int32, offset=1).reshape(-1, 3)
    columns = [np.array([column]) for column in (4, 2, 6)]
    assert _native.mark_ranges(at_odd_byte, *columns).tolist() == [0, 1, 1, 1, 1, 0]


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), max_size=5),
    seed=st.integers(0, 2**32 - 1),
    spare=st.integers(0, 2),
)
def test_mask_losses_equals_its_twin(lengths: list[int], seed: int, spare: int) -> None:
    length = max([1, *(length - 1 for length in lengths)]) + spare
    random = np.random.default_rng(seed)
    masks = random.integers(0, 2, (len(lengths), length)).astype(np.float32)
    ends = np.cumsum(lengths, dtype=np.int64)
    flags = random.integers(0, 2, sum(lengths)).astype(np.uint8)
    assert_twin("mask_losses", masks, flags, ends)


@pytest.mark.parametrize("ends", [[3], [5], [2, 1, 4], [-1, 4], [], [2**62]])
def test_ends_that_do_not_fit_are_refused(ends: list[int]) -> None:
    tokens, places = np.arange(4), np.array(ends, np.int64)
    flags, numbers = np.ones(4, np.uint8), np.arange(len(ends))
    masks = np.ones((len(ends), 9), np.float32)
    assert_refused(ValueError, "sample", "fill_in_middle", tokens, places, numbers, **FIM)
    assert_refused(ValueError, "sample", "mark_repeats", tokens, places, 1, 2, False)
    assert_refused(ValueError, "sample", "mask_losses", masks, flags, places)


def test_other_arrays_that_do_not_fit_are_refused() -> None:
    tokens, ends, one = np.arange(4), np.array([4]), np.array([1])
    flags = np.ones(4, np.uint8)
    with pytest.raises(ValueError, match="sample_numbers has 2 entries; 1 are needed"):
        _native.fill_in_middle(tokens, ends, np.array([1, 2]), **FIM)
    with pytest.raises(ValueError, match="sample 0 has 4 tokens, above 3"):
        _native.mask_losses(np.ones((1, 2), np.float32), flags, ends)
    with pytest.raises(ValueError, match="loss_masks has 4 entries; 2 are needed"):
        _native.mask_losses(np.ones((2, 2), np.float32), flags, ends)
    ranges = np.zeros((0, 3), np.int32)
    for spans in ([1, -1, 1], [1, 0, -1], [1, 2**62, 1], [1, 0, 2**62]):
        with pytest.raises(ValueError, match=r"span"):
            _native.mark_ranges(ranges, *(np.array([number]) for number in spans))
    with pytest.raises(TypeError, match="incompatible"):
        _native.mark_ranges(np.zeros((2, 2), np.int32), one, one, one)
    with pytest.raises(ValueError, match="counts has 2 entries; 1 are needed"):
        _native.mark_ranges(ranges, one, one, np.array([1, 1]))
