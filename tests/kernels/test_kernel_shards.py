"""The twin law for sources of several files and for the order of sequences of one length."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tests.kernels import reference

from millrace import _native
from millrace.samples.fields import SampleOptions

DTYPES = (np.uint8, np.int8, np.int16, np.uint16, np.int32, np.int64)


def make_shards(sizes: list[int], length: int, dtype: Any) -> list[np.ndarray]:
    random = np.random.default_rng(len(sizes))
    return [random.integers(0, 100, size * length).astype(dtype) for size in sizes]


def sharded_source(module: Any, shards: Any, sizes: list[int], length: int) -> Any:
    if module is reference:
        return reference.sharded_source(shards, sizes, length)
    return _native.TokenSource(tuple(shards), np.array(sizes), length, any(map(len, shards)))


def gather(module: Any, shards: Any, sizes: list[int], length: int, numbers: Any) -> Any:
    source = sharded_source(module, shards, sizes, length)
    order = module.SequenceOrder(sum(sizes), length)
    options = SampleOptions(sequence_length=length, add_extra_token=False)
    places = np.zeros(len(numbers), np.int64)
    rows = module.gather_samples((source,), (order,), places, numbers, options)
    form = module.RowForm(parts=True)
    with_parts = module.gather_samples((source,), (order,), places, numbers, options, form)
    tokens = module.gather_tokens((source,), (order,), places, numbers)
    spans = module.spans(order, numbers)
    return *rows, *with_parts, *tokens, *spans, *module.locate_spans(source, *spans[:3])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any),
    st.sampled_from((1, 2, 7, 64)),
    st.sampled_from(DTYPES),
    st.data(),
)
def test_gather_equals_its_twin(sizes: list[int], length: int, dtype: Any, data: Any) -> None:
    shards = make_shards(sizes, length, dtype)
    numbers = data.draw(st.lists(st.integers(0, sum(sizes) - 1), max_size=9).map(np.int64))
    actual, expected = (
        gather(module, shards, sizes, length, numbers) for module in (_native, reference)
    )
    for left, right in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(left, right)
    flat = np.concatenate(shards).reshape(-1, length)
    np.testing.assert_array_equal(actual[0], flat[numbers])


@pytest.mark.parametrize("span", [(5, 0, 1), (-1, 0, 1), (0, 0, 6), (0, 5, 1), (0, -1, 1)])
@pytest.mark.parametrize("number", [-1, 5, 2**62])
def test_spans_and_samples_outside_are_refused(span: tuple[int, int, int], number: int) -> None:
    columns = [np.array([value]) for value in span]
    for module in (_native, reference):
        source = sharded_source(module, make_shards([2, 3], 5, np.uint16), [2, 3], 5)
        with pytest.raises(ValueError, match="sequence"):
            module.locate_spans(source, *columns)
        with pytest.raises(ValueError, match="sample"):
            module.spans(module.SequenceOrder(5, 5), np.array([number]))


def test_arguments_that_do_not_agree_are_refused() -> None:
    shard = np.zeros(10, np.uint16)
    for other in (np.zeros(10, np.int32), np.zeros(9, np.uint16), np.zeros(0, np.uint16)):
        with pytest.raises(ValueError, match="shard 1 has"):
            sharded_source(_native, [shard, other], [2, 2], 5)
    for shards in ([shard], [shard] * 3):
        with pytest.raises(ValueError, match="shard"):
            _native.TokenSource(tuple(shards), np.array([2, 2]), 5, True)


def test_large_offsets() -> None:
    """Byte offsets beyond 2**32, of files that are not mapped."""
    empty = np.empty(0, np.int32)
    sizes = [2**31, 2**31]
    for module in (_native, reference):
        source = sharded_source(module, [empty, empty], sizes, 4096)
        columns = np.array([2**32 - 1]), np.array([4000]), np.array([96])
        offsets, counts = module.locate_spans(source, *columns)
        assert offsets.tolist() == [((2**32 - 1) * 4096 + 4000) * 4]
        assert counts.tolist() == [384]
