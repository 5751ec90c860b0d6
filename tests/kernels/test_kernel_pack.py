"""The twin law for packing documents, and for dealing packs to ranks."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tests.kernels.twins import assert_refused, assert_twin


@given(data=st.data())
@settings(deadline=None, max_examples=300)
def test_packs_equal_their_twin(data: st.DataObject) -> None:
    capacity = data.draw(st.sampled_from([1, 2, 10, 63, 64, 65, 4095, 4096, 4097, 300_000]))
    length = st.one_of(st.integers(1, capacity), st.integers(1, min(capacity, 4)))
    lengths = np.array(data.draw(st.lists(length, max_size=60)), np.int32)
    documents, ends = assert_twin("pack", lengths, capacity)
    assert np.array_equal(np.sort(documents), np.arange(len(lengths)))
    sizes = np.add.reduceat(lengths[documents], np.append(0, ends[:-1])) if len(ends) else ends
    assert np.all((sizes >= 1) & (sizes <= capacity))


def test_many_documents_equal_their_twin() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 1, 2000).clip(1, 1000).astype(np.int32)
    assert_twin("pack", lengths, 1000)


@pytest.mark.parametrize("lengths", [[0], [-1], [11], [5, 2**31 - 1]])
def test_documents_that_fit_no_pack_are_refused(lengths: list[int]) -> None:
    assert_refused(ValueError, "10", "pack", np.array(lengths, np.int32), 10)


@given(data=st.data(), num_ranks=st.integers(1, 6), share=st.integers(0, 5))
@settings(deadline=None, max_examples=300)
def test_a_deal_equals_its_twin(data: st.DataObject, num_ranks: int, share: int) -> None:
    cost = data.draw(st.sampled_from([st.floats(0, 1e300), st.integers(0, 9), st.floats(0.9, 1.1)]))
    size = num_ranks * share
    costs = np.array(data.draw(st.lists(cost, min_size=size, max_size=size)), np.float64)
    items = assert_twin("deal", costs, num_ranks)
    assert np.array_equal(np.sort(items), np.arange(size))
    assert np.all(np.diff(costs[items].reshape(num_ranks, share), axis=1) <= 0)


@pytest.mark.parametrize("sigma", [0.1, 1, 2])
def test_the_deal_of_many_packs_equals_its_twin(sigma: float) -> None:
    assert_twin("deal", np.random.default_rng(3).lognormal(0, sigma, 64 * 4), 64)


@pytest.mark.parametrize("costs", [[1.0], [1, -1], [1, np.nan], [1, np.inf], [1, 1e301]])
def test_what_cannot_be_dealt_is_refused(costs: list[float]) -> None:
    assert_refused(ValueError, "cost|dealt", "deal", np.array(costs, np.float64), 2)
    assert_refused(ValueError, "dealt", "deal", np.array(costs, np.float64), 0)
