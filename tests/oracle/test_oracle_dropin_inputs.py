"""`add_item`, `add_document` and `get_blend_from_list` take what Megatron-LM's take."""

import tempfile
import warnings
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import oracle_megatron as oracle
import pytest
import torch
from hypothesis import example, given, settings, strategies as st

import millrace.megatron as ours
from millrace.errors import ConfigError

DTYPES = [np.uint8, np.int8, np.int16, np.uint16, np.int32, np.int64, np.float32, np.float64]

their_get_blend_from_list = oracle.name_of_megatron("get_blend_from_list")


def files_of(side: Any, dtype: Any, add: Callable[[Any], None], multimodal: bool = False) -> Any:
    """The bytes of `.bin` and `.idx`."""
    with tempfile.TemporaryDirectory() as folder:
        builder = side.IndexedDatasetBuilder(f"{folder}/a.bin", dtype=dtype, multimodal=multimodal)
        try:
            add(builder)
            builder.finalize(f"{folder}/a.idx")
        except BaseException:
            close = builder.data_file.close if side is oracle else builder._builder.abort
            close()
            raise
        return Path(f"{folder}/a.bin").read_bytes(), Path(f"{folder}/a.idx").read_bytes()


def outcome(work: Callable[[], Any]) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy warns of Megatron-LM's casts
            return work()
    except Exception as error:
        return error


whole = st.integers(-300, 70000) | st.integers(-(2**33), 2**33) | st.integers(-(2**63), 2**63 - 1)
fractions = st.floats(width=64) | st.sampled_from([0.5, 1.7, -2.5, 1e300])
numbers = (
    whole
    | whole.map(float)
    | whole.map(str)
    | whole.map(Decimal)
    | whole.map(np.int64)
    | st.booleans()
    | fractions
    | fractions.map(str)
    | fractions.map(Decimal)
    | st.sampled_from(["", "x", " 7 ", "1_000", "0x10", "1e3", b"12", None, 1j, 2**64])
)
small = st.integers(0, 120)
kinds = st.sampled_from([int, float, str, bytes, np.uint8, np.float16, np.int64, Decimal, bool])


def as_kind(kind: Any, number: int) -> Any:
    return str(number).encode() if kind is bytes else kind(number)


def as_array(dtype: Any, values: list[float]) -> Any:
    with np.errstate(all="ignore"):
        return np.array(values).astype(dtype)


# Lists that can mostly be stored, lists that mostly cannot, nested lists, arrays and tensors.
documents = (
    st.builds(
        lambda kind, values: [as_kind(kind, value) for value in values], kinds, st.lists(small)
    )
    | st.lists(numbers, max_size=6)
    | st.lists(st.lists(small, min_size=3, max_size=3), max_size=4)
    | st.lists(st.lists(numbers, min_size=2, max_size=2), max_size=3)
    | st.builds(
        as_array,
        st.sampled_from([*DTYPES, np.uint32, np.float16, np.complex128, ">i4", "U", "S", object]),
        st.lists(small) | st.lists(fractions, max_size=4),
    )
    | st.builds(
        lambda dtype, values: torch.tensor(values).to(dtype),
        st.sampled_from([torch.int32, torch.int64, torch.uint8, torch.float32, torch.bool]),
        st.lists(small, min_size=1),
    )
    | st.lists(small).map(tuple)
)


def size_of(document: Any) -> int:
    try:
        return np.asarray(document).size
    except ValueError:  # a ragged list
        return 0


def numbers_in(document: Any) -> list[float]:
    return np.array(document, dtype=np.float64).reshape(-1).tolist()


@settings(max_examples=150, deadline=None)
@given(document=documents, dtype=st.sampled_from(DTYPES))
@example(document=["7", "65000"], dtype=np.uint16)
@example(document=["300"], dtype=np.uint8)
@example(document=[1.0, 2.0], dtype=np.int32)
@example(document=[1.7], dtype=np.int32)
@example(document=[1.7, "2"], dtype=np.int32)
@example(document=[float("nan")], dtype=np.int32)
@example(document=np.array([np.inf]), dtype=np.int32)
@example(document=np.array([-1.0]), dtype=np.uint16)
@example(document=["9007199254740993", 1.0], dtype=np.int64)
@example(document=[[1, 2], ["3", 4]], dtype=np.int32)
@example(document=[[1, 2], [3]], dtype=np.int32)
@example(document=np.array([2 + 1j]), dtype=np.int32)
@example(document=[2**63, -1], dtype=np.int64)
def test_tokens_are_stored_as_by_megatron_or_refused(document: Any, dtype: Any) -> None:
    """The same bytes; what is refused fails or would be changed in Megatron-LM."""

    def add(builder: Any) -> None:
        builder.add_document(document, [size_of(document)])

    def add_item(builder: Any) -> None:
        builder.add_item(document)
        builder.end_document()

    mine = outcome(lambda: files_of(ours, dtype, add))
    theirs = outcome(lambda: files_of(oracle, dtype, add))
    if isinstance(mine, Exception):
        assert isinstance(mine, (ConfigError, AssertionError)), mine
        if not isinstance(theirs, Exception):
            stored = np.frombuffer(theirs[0], dtype).astype(np.float64).tolist()
            assert np.iscomplexobj(document) or stored != numbers_in(document)
    else:
        assert mine == theirs
    items = outcome(lambda: files_of(ours, dtype, add_item))
    assert type(items) is type(mine)
    assert isinstance(mine, Exception) or items == mine


@pytest.mark.parametrize(
    "lengths",
    [
        (2, 0, 3),
        np.array([2, 0, 3]),
        np.array([2, 0, 3], np.uint16),
        np.array([2, 9, 0, 9, 3])[::2],
        torch.tensor([2, 0, 3]),
        [np.int32(2), torch.tensor(0), 3],
    ],
    ids=repr,
)
@pytest.mark.parametrize("multimodal", [False, True])
def test_lengths_and_modes_of_any_kind(lengths: Any, multimodal: bool) -> None:
    def add(builder: Any) -> None:
        builder.add_document(np.arange(5), lengths, lengths)

    def add_plain(builder: Any) -> None:
        builder.add_document(np.arange(5), [2, 0, 3], [2, 0, 3])

    mine = files_of(ours, np.int32, add, multimodal)
    assert mine == files_of(oracle, np.int32, add_plain, multimodal)


@pytest.mark.parametrize("lengths", [[2.5, 2.5], [2.0, 3.0], ["2", "3"], [[2], [3]], 5])
def test_lengths_that_are_not_whole_numbers_are_refused(lengths: Any) -> None:
    with pytest.raises(ConfigError, match="lengths"):
        files_of(ours, np.int32, lambda builder: builder.add_document(np.arange(5), lengths))


weights = (
    st.integers(-5, 100)
    | st.floats(allow_nan=False)
    | st.integers(0, 100).map(np.int64)
    | st.floats(0, 1).map(np.float32)
    | st.integers(0, 100).map(str)
    | st.sampled_from(["0.7", " 1e3 ", "inf", "x"])
)
prefixes = st.sampled_from(["a", " data/web ", "3", "", "inf"])
words = prefixes | weights
pairs = st.lists(st.tuples(weights, prefixes), min_size=1)
blends = (
    pairs.map(lambda found: [word for pair in found for word in pair])
    | st.lists(prefixes)
    | st.lists(words, max_size=6)
)


@settings(max_examples=500, deadline=None)
@given(blend=blends)
@example(blend=[30, "prefix", 0.7, "other"])
@example(blend=(30, "prefix"))
@example(blend=[30, 40])
@example(blend=[None, "a"])
@example(blend=[1, "a", 2])
@example(blend=None)
@example(blend=["0.3", " a ", "7e-1", "b"])
@example(blend=["0.5", "a", "x", "b"])
@example(blend=["1", "2"])
def test_blends_of_numbers_and_words_are_read_as_by_megatron(blend: Any) -> None:
    mine = outcome(lambda: ours.get_blend_from_list(blend))
    theirs = outcome(lambda: their_get_blend_from_list(blend))
    if isinstance(mine, Exception):
        assert isinstance(mine, ConfigError), mine
        # Only some of the weights are numbers, the first among them.
        if not isinstance(theirs, Exception):
            assert theirs[1] is None
            with pytest.raises(ValueError, match="float"):
                [float(word) for word in blend[::2]]
            float(blend[0])
    elif isinstance(theirs, Exception):
        assert blend[0] is None  # a TypeError in Megatron-LM; not a number here
    else:
        assert mine == theirs
        assert blend is None or isinstance(mine, tuple)
