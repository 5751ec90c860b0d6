"""The twin law for sample_index."""

import os
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import ArrayLike
from tests.kernels import reference, twins

from millrace import _native

# Powers of two, and the 32 documents by which the walk reads ahead.
SIZES = sorted({0, 1} | {2**k + d for k in range(1, 13) for d in (-1, 0, 1)})
MAX_LENGTH = 2**31 - 1


def int32(values: ArrayLike) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def assert_twin(*arguments: Any, **options: Any) -> Any:
    return twins.assert_twin("sample_index", *arguments, **options)


def assert_refused(match: str, *arguments: Any, **options: Any) -> None:
    twins.assert_refused(ValueError, match, "sample_index", *arguments, **options)


def whole_samples(num_tokens: int, sequence_length: int, extra: bool) -> int:
    return max(0, (num_tokens - extra) // sequence_length)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("extra", "dtype"), [(False, np.int64), (True, np.int32)])
def test_equals_its_twin(size: int, extra: bool, dtype: Any) -> None:
    """With whole samples, and with a partial last one; documents without tokens may come last."""
    random = np.random.default_rng(size)
    lengths = np.append(random.integers(0, 40, size, dtype=np.int32), int32([0]))
    documents = random.permutation(np.tile(np.arange(size, dtype=np.int32), 2))
    documents = np.append(documents, int32([size] * int(random.choice([0, 1, 3]))))
    num_tokens = int(lengths[documents].sum())
    options = {"add_extra_token": extra, "dtype": dtype}
    for sequence_length in (1, 2, 39, 40, 41, 512, 10_000, 100_000):
        num_samples = whole_samples(num_tokens, sequence_length, extra)
        beginning = min(num_samples, 3000)  # of a long index
        for count in {beginning, beginning // 2, min(beginning, 1), 0}:
            assert_twin(lengths, documents, sequence_length, count, **options)
        if num_samples < 3000 and num_tokens > 5:
            count = -(-(num_tokens - extra) // sequence_length)
            rows = assert_twin(
                lengths, documents, sequence_length, count, allow_partial=True, **options
            )
            assert rows.min() >= 0  # Megatron-LM's offset is -1 after an empty last document


@given(data=st.data())
@settings(deadline=None, derandomize=True, max_examples=300)
def test_equals_its_twin_for_any_documents(data: st.DataObject) -> None:
    lengths = int32(data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=40)))
    place = st.integers(0, len(lengths) - 1)
    documents = int32(data.draw(st.lists(place, min_size=1, max_size=80)))
    sequence_length, extra = data.draw(st.integers(1, 30)), data.draw(st.booleans())
    num_tokens = int(lengths[documents].sum())
    num_samples = data.draw(st.integers(0, whole_samples(num_tokens, sequence_length, extra) + 2))
    arguments = (lengths, documents, sequence_length, num_samples)
    options: dict[str, Any] = {
        "add_extra_token": extra,
        "allow_partial": data.draw(st.booleans()),
        "dtype": data.draw(st.sampled_from([np.int32, np.int64])),
    }
    try:
        reference.sample_index(*arguments, **options)
    except ValueError:
        with pytest.raises(ValueError, match="documents hold"):
            _native.sample_index(*arguments, **options)
    else:
        assert_twin(*arguments, **options)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize(("extra", "dtype"), [(False, np.int64), (True, np.int32)])
@pytest.mark.parametrize(
    "sequence_length", [2**20 + 1, 2**30, MAX_LENGTH - 1, MAX_LENGTH, 2**31, 2**31 + 1, 2**33 + 5]
)
def test_counts_tokens_past_2_to_the_32(
    sequence_length: int, dtype: Any, partial: bool, extra: bool
) -> None:
    lengths = int32([MAX_LENGTH, 0, MAX_LENGTH - 1, 1, 2**30, MAX_LENGTH])
    documents = int32([0, 2, 1, 4, 5, 3, 2, 0, 1, 5, 5, 1, 3])
    num_tokens = int(lengths[documents].sum(dtype=np.int64))
    assert num_tokens > 2**33
    num_samples = whole_samples(num_tokens, sequence_length, extra)
    options = {"add_extra_token": extra, "allow_partial": partial, "dtype": dtype}
    assert_twin(lengths, documents, sequence_length, num_samples, **options)
    if partial and (num_tokens - extra) % sequence_length > 0:
        assert_twin(lengths, documents, sequence_length, num_samples + 1, **options)
    else:
        with pytest.raises(ValueError, match=f"hold {num_tokens} tokens, too few"):
            _native.sample_index(lengths, documents, sequence_length, num_samples + 2, **options)


def test_a_last_sample_may_be_empty_only_where_its_end_has_a_name() -> None:
    lengths, documents = int32([4, 0]), int32([0, 1])
    rows = assert_twin(lengths, documents, 2, 3, add_extra_token=False, allow_partial=True)
    assert rows.tolist() == [[0, 0], [0, 2], [0, 4], [1, 0]]
    assert_refused("tokens", int32([0]), int32([0]), 2, 1, add_extra_token=True, allow_partial=True)
    assert_refused("tokens", lengths, documents, 2, 4, add_extra_token=False, allow_partial=True)


@pytest.mark.parametrize("partial", [False, True])
def test_refuses_entries_outside_the_sequences_and_negative_lengths(partial: bool) -> None:
    lengths, documents = int32([3, 4, 5]), int32([0, 1, 2, 1] * 25)
    num_samples = (int(lengths[documents].sum()) - 1) // 3
    for place, entry in product((0, 1, 31, 32, 33, 99), (-1, 3, 2**31 - 1, -(2**31))):
        wrong = documents.copy()
        wrong[place] = entry
        assert_refused("document_index", lengths, wrong, 3, num_samples, allow_partial=partial)
    for length in (-1, -(2**31)):
        wrong = int32([3, 4, length])
        assert_refused("negative", wrong, documents, 3, 4, allow_partial=partial)


def test_refuses_more_documents_than_int32_rows_can_name(tmp_path: Path) -> None:
    path = tmp_path / "documents"
    path.touch()
    os.truncate(path, 4 * 2**31)  # a hole: it takes no room
    documents = np.memmap(path, np.int32, "r")
    with pytest.raises(ValueError, match="int64 sample index"):
        _native.sample_index(int32([9]), documents, 2, 1)
    rows = _native.sample_index(int32([9]), documents, 2, 1, dtype=np.int64)
    assert rows.tolist() == [[0, 0], [0, 2]]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("sequence_length", value) for value in (0, -1, 2**63)),
        # The last one is refused before memory is asked for: its rows would take 8 PiB.
        *(("num_samples", value) for value in (-1, 2**63, 2**50)),
        ("document_index", int32([])),
        ("sequence_lengths", np.array([9], ">i4")),
        *(("dtype", value) for value in (np.uint32, np.float64)),
    ],
)
def test_refuses_wrong_arguments(name: str, value: Any) -> None:
    right = {"sequence_lengths": int32([9]), "document_index": int32([0])}
    right |= {"sequence_length": 2, "num_samples": 1}  # type: ignore[dict-item]
    _native.sample_index(**right)
    with pytest.raises((ValueError, TypeError), match=f"{name.split('_')[0]}|incompat|too few"):
        _native.sample_index(**right | {name: value})
