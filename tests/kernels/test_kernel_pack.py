"""The twin law for packing documents."""

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
