"""The twin law for gather_samples, and that damaged indices are refused, never followed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import ArrayLike
from tests.kernels import reference, twins
from tests.kernels.twins import MODULES, assert_same

from millrace import DataError, _native
from millrace.samples.fields import SampleOptions

TOKEN_DTYPES = (np.uint8, np.int8, np.int16, np.uint16, np.int32, np.int64)
NAMES = ("tokens", "labels", "loss_mask", "position_ids")
DEFAULTS: dict[str, Any] = {
    "sequence_length": 8,
    "add_extra_token": True,
    "pad_token": None,
    "eod_token": None,
    "reset_position_ids": False,
    "eod_mask_loss": False,
}
OPTIONS = SampleOptions(**DEFAULTS)
INT64_ENDS = (-(2**63), 2**63 - 1)

Arrays = dict[str, np.ndarray]


def make_arrays(
    seed: int,
    sequence_length: int,
    *,
    extra: bool,
    partial: bool = False,
    dtype: Any = np.uint16,
    index_dtypes: tuple[Any, Any] = (np.int32, np.uint32),
    num_sequences: int = 9,
    max_length: int = 25,
) -> Arrays:
    """One dataset's arrays: sequences with gaps between them, starting at any byte, two epochs."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, max_length + 1, num_sequences, dtype=np.int32)
    lengths[num_sequences // 2] = max_length  # at least one has tokens
    documents = random.permutation(np.tile(np.arange(num_sequences, dtype=np.int32), 2))
    width = np.dtype(dtype).itemsize
    gaps = random.integers(0, 2 * width, num_sequences)  # bytes: off the tokens' grid
    pointers = np.cumsum(np.append(0, lengths * width + gaps)[:-1])
    num_tokens = int(pointers[-1]) // width + max_length + 2
    tokens = random.integers(0, 12, num_tokens).astype(dtype)  # few values: many EOD and pad
    if tokens.dtype.kind == "i":
        tokens[::5] = -1
    total = 2 * int(lengths.sum()) - extra
    num_samples = -(-total // sequence_length) if partial else total // sequence_length
    return {
        "tokens": tokens,
        "sequence_pointers": pointers,
        "sequence_lengths": lengths,
        "document_index": documents,
        "sample_index": reference.sample_index(
            lengths,
            documents,
            sequence_length,
            num_samples,
            add_extra_token=extra,
            allow_partial=partial,
            dtype=index_dtypes[0],
        ),
        "shuffle_index": random.permutation(num_samples).astype(index_dtypes[1]),
    }


def one_sample(first: tuple[int, int], last: tuple[int, int]) -> Arrays:
    """The index of one sample between two (document, offset)."""
    samples = np.array([first, last], np.int32)
    return {"sample_index": samples, "shuffle_index": np.zeros(1, np.uint32)}


def options_of(**options: Any) -> Any:
    """Options that are not checked, such as EOD switches without EOD: kernel and twin take them."""
    return SimpleNamespace(**(DEFAULTS | options))


def token_source(module: Any, arrays: Arrays, num_bytes: int | None = None) -> Any:
    names = ("tokens", "sequence_pointers", "sequence_lengths")
    num_bytes = arrays["tokens"].nbytes if num_bytes is None else num_bytes
    return module.TokenSource(*(arrays[name] for name in names), num_bytes)


def gpt_order(module: Any, arrays: Arrays, **options: Any) -> Any:
    names = ("sequence_lengths", "document_index", "sample_index", "shuffle_index")
    shape = {name: (DEFAULTS | options)[name] for name in ("sequence_length", "add_extra_token")}
    return module.gpt_order(*(arrays[name] for name in names), **shape)


def gather(
    module: Any,
    arrays: list[Arrays],
    source_numbers: ArrayLike,
    sample_numbers: ArrayLike,
    **options: Any,
) -> tuple[np.ndarray, ...]:
    numbers = np.array(source_numbers, np.int64), np.array(sample_numbers, np.int64)
    everything = options_of(**options)
    rows: tuple[np.ndarray, ...] = module.gather_samples(
        *parts_of(module, arrays, **options), *numbers, everything
    )
    return rows


def parts_of(module: Any, arrays: list[Arrays], **options: Any) -> tuple[Any, Any]:
    """Sources and orders, over each dataset's arrays."""
    return (
        tuple(token_source(module, source) for source in arrays),
        tuple(gpt_order(module, source, **options) for source in arrays),
    )


def assert_twin(
    arrays: list[Arrays], source_numbers: ArrayLike, sample_numbers: ArrayLike, **options: Any
) -> None:
    actual = gather(_native, arrays, source_numbers, sample_numbers, **options)
    expected = gather(reference, arrays, source_numbers, sample_numbers, **options)
    read = gather_by_reading(arrays, source_numbers, sample_numbers, **options)
    for other in (actual, *read):
        assert_same(other, expected)


def assert_twin_of_all(arrays: Arrays, **options: Any) -> None:
    numbers = np.arange(len(arrays["shuffle_index"]))
    assert_twin([arrays], np.zeros_like(numbers), numbers, **options)


def pieces_of(
    module: Any, arrays: Arrays, sample_numbers: ArrayLike, **options: Any
) -> tuple[np.ndarray, ...]:
    """The spans of some samples, their bounds, and their bytes."""
    order = gpt_order(module, arrays, **options)
    *spans, bounds = module.spans(order, np.array(sample_numbers, np.int64))
    return *spans, bounds, *module.locate_spans(token_source(module, arrays), *spans)


def gather_by_reading(
    arrays: list[Arrays], source_numbers: ArrayLike, sample_numbers: ArrayLike, **options: Any
) -> list[tuple[np.ndarray, ...]]:
    """The same for files that are not mapped and one source: spans, their bytes, read, fill."""
    if not arrays or np.any(np.array(source_numbers) != 0):
        return []
    results = [pieces_of(module, arrays[0], sample_numbers, **options) for module in MODULES]
    assert_same(*results)
    *_, counts, bounds, byte_offsets, byte_counts = results[0]
    tokens = arrays[0]["tokens"]
    assert np.all(counts > 0)
    assert np.array_equal(counts * tokens.itemsize, byte_counts)
    flat = reference.copy_pieces(tokens.view(np.uint8), byte_offsets, byte_counts)
    ends = np.append(0, np.cumsum(counts))[bounds[1:]]
    everything = options_of(**options)
    return [module.fill_rows(flat.view(tokens.dtype), ends, everything) for module in MODULES]


def assert_refused(
    arrays: list[Arrays], source_numbers: ArrayLike, sample_numbers: ArrayLike, **options: Any
) -> None:
    # Behind each array's end lies its content once more: a read there would go unnoticed, but for
    # the missing error.
    roomy = [
        {name: np.concatenate([array, array])[: len(array)] for name, array in source.items()}
        for source in arrays
    ]
    for module in MODULES:
        with pytest.raises(ValueError, match=r"outside|not fit|goes from|above"):
            gather(module, roomy, source_numbers, sample_numbers, **options)
        if len(roomy) == 1 and not np.any(source_numbers):
            with pytest.raises(ValueError, match=r"outside|not fit|goes from|above"):
                pieces_of(module, roomy[0], sample_numbers, **options)


ANY_OPTIONS = st.fixed_dictionaries(
    {
        "sequence_length": st.integers(1, 70),
        "add_extra_token": st.booleans(),
        "pad_token": st.sampled_from([None, -1, 0, 5, 11, 99, 2**40]),
        "eod_token": st.sampled_from([None, -1, 0, 5, 10, 99, 2**40]),
        "reset_position_ids": st.booleans(),
        "eod_mask_loss": st.booleans(),
    }
)


def any_sources(data: st.DataObject, options: dict[str, Any], dtype: Any = None) -> list[Arrays]:
    return [
        make_arrays(
            data.draw(st.integers(0, 10**6)),
            options["sequence_length"],
            extra=options["add_extra_token"],
            partial=data.draw(st.booleans()),
            dtype=dtype or data.draw(st.sampled_from(TOKEN_DTYPES)),
            index_dtypes=(
                data.draw(st.sampled_from([np.int32, np.int64])),
                data.draw(st.sampled_from([np.uint32, np.int64])),
            ),
            num_sequences=data.draw(st.integers(1, 12)),
            max_length=data.draw(st.integers(1, 90)),
        )
        for _ in range(data.draw(st.integers(1, 4)))
    ]


def any_batch(data: st.DataObject, arrays: list[Arrays]) -> tuple[np.ndarray, np.ndarray]:
    """Source numbers and sample numbers."""
    sizes = [len(source["shuffle_index"]) for source in arrays]
    filled = [d for d, size in enumerate(sizes) if size > 0] or [0]
    pairs = st.lists(st.tuples(st.sampled_from(filled), st.integers(0, 10**6)), max_size=20)
    batch = data.draw(pairs) if any(sizes) else []
    numbers = [(d, number % sizes[d]) for d, number in batch]
    sources, samples = np.array(numbers, np.int64).reshape(-1, 2).T.copy()
    return sources, samples


@given(data=st.data())
@settings(deadline=None, derandomize=True, max_examples=200)
def test_equals_its_twin_for_any_batch(data: st.DataObject) -> None:
    options = data.draw(ANY_OPTIONS)
    arrays = any_sources(data, options)
    assert_twin(arrays, *any_batch(data, arrays), **options)


@pytest.mark.parametrize("batch", [0, 1, 2] + [2**k + d for k in (3, 7, 12) for d in (-1, 0, 1)])
def test_equals_its_twin_for_batches_of_any_size(batch: int) -> None:
    arrays = make_arrays(1, 3, extra=True)
    numbers = np.random.default_rng(batch).integers(0, len(arrays["shuffle_index"]), batch)
    assert_twin([arrays], np.zeros_like(numbers), numbers, sequence_length=3)


@pytest.mark.parametrize("length", [2**k + d for k in (1, 4, 9, 12) for d in (-1, 0, 1)])
def test_equals_its_twin_for_sequences_of_any_size(length: int) -> None:
    arrays = make_arrays(2, 511, extra=True, num_sequences=2, max_length=length, partial=True)
    assert_twin_of_all(arrays, sequence_length=511)


def test_no_samples_need_no_sources() -> None:
    assert_twin([], [], [], sequence_length=5)


def test_a_sample_without_tokens_is_all_padding() -> None:
    arrays = make_arrays(0, 8, extra=False)
    end = 17, arrays["sequence_lengths"][arrays["document_index"][17]]
    arrays |= one_sample(end, end)
    for pad_token in (None, -1, 0, 7):
        assert_twin([arrays], [0], [0], add_extra_token=False, pad_token=pad_token)


@pytest.mark.parametrize("dtype", TOKEN_DTYPES)
def test_reads_the_ends_of_the_dtype(dtype: Any) -> None:
    limits = np.iinfo(dtype)
    arrays = make_arrays(0, 8, extra=True, dtype=dtype)
    arrays["tokens"][::2], arrays["tokens"][1::3] = limits.max, limits.min
    for token in (int(limits.min), int(limits.max), *INT64_ENDS):
        tokens = {"pad_token": token, "eod_token": token}
        assert_twin_of_all(arrays, **tokens, eod_mask_loss=True, reset_position_ids=True)


@pytest.mark.parametrize("dtype", TOKEN_DTYPES)
def test_reads_past_2_to_the_32_bytes(dtype: Any, tmp_path: Path) -> None:
    """From a file with a hole, which takes no room on disk or in memory."""
    width = np.dtype(dtype).itemsize
    pointers = np.array([0, 2**31 - 4 * width, 2**31 + 3, 2**32 - 4 * width, 2**32 + 5])
    num_tokens = (2**32 + 1024) // width
    path = tmp_path / "tokens.bin"
    path.touch()
    with open(path, "r+b") as file:
        file.truncate(num_tokens * width)
        for pointer in pointers.tolist():
            file.seek(pointer)
            file.write(np.arange(pointer % 90, pointer % 90 + 9).astype(dtype).tobytes())
    arrays = make_arrays(0, 8, extra=True)
    arrays |= {
        "tokens": np.memmap(path, dtype, "r", shape=(num_tokens,)),
        "sequence_pointers": pointers,
        "sequence_lengths": np.full(5, 9, np.int32),
        "document_index": np.array([4, 0, 2, 1, 3], np.int32),
        "sample_index": np.array([[d, o] for d in range(5) for o in (0, 4)], np.int32)[:-1],
    }
    arrays["shuffle_index"] = np.arange(8, dtype=np.uint32)
    assert_twin([arrays], [0] * 8, range(8))


@pytest.mark.parametrize("dtype", TOKEN_DTYPES)
@pytest.mark.parametrize("number", [-1, 10**6, 2**31, 2**32, *INT64_ENDS])
def test_refuses_numbers_outside_the_arrays(dtype: Any, number: int) -> None:
    arrays = make_arrays(0, 8, extra=True, dtype=dtype)
    num_samples = len(arrays["shuffle_index"])
    assert_refused([arrays], [0], [number])
    assert_refused([arrays], [number], [0])
    assert_refused([arrays], [0, 0, 0], [0, num_samples, 1])
    assert_refused([arrays, arrays], [0, 2], [0, 0])
    assert_refused([], [0], [0])


@pytest.mark.parametrize("dtype", TOKEN_DTYPES)
@pytest.mark.parametrize("wide", [False, True])
def test_refuses_entries_of_the_shuffle_index_outside_the_samples(dtype: Any, wide: bool) -> None:
    index_dtypes = (np.int64, np.int64) if wide else (np.int32, np.uint32)
    arrays = make_arrays(0, 8, extra=True, dtype=dtype, index_dtypes=index_dtypes)
    num_samples = len(arrays["shuffle_index"])
    entries = [num_samples, num_samples + 1, 2**31, 2**32 - 1]
    for entry in [*entries, -1, 2**32, *INT64_ENDS] if wide else entries:
        arrays["shuffle_index"][2] = entry
        assert_refused([arrays], [0, 0], [0, 2])
    arrays["sample_index"] = arrays["sample_index"][:0]  # not even a first row
    assert_refused([arrays], [0], [0])


@pytest.mark.parametrize("dtype", TOKEN_DTYPES)
@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("row", [2, 3])
def test_refuses_entries_of_the_sample_index_outside_the_documents(
    dtype: Any, extra: bool, wide: bool, row: int
) -> None:
    """In the row where sample 2 begins, and in the one where it ends."""
    right = make_arrays(
        0, 8, extra=extra, dtype=dtype, index_dtypes=(np.int64 if wide else np.int32, np.uint32)
    )
    right["shuffle_index"] = np.arange(len(right["shuffle_index"]), dtype=np.uint32)
    ends = INT64_ENDS if wide else (-(2**31), 2**31 - 1)
    num_documents = len(right["document_index"])
    # A document of -2 + 2**32 and an offset of 2**32 are right ones to code that drops high bits.
    high = (2**32, 2**32 + int(right["sample_index"][row, 1])) if wide else ()
    for column, wrong in ((0, (-1, num_documents)), (1, (-1, -9, 26, 1000))):
        for entry in (*wrong, *ends, *high):
            arrays = right | {"sample_index": right["sample_index"].copy()}
            arrays["sample_index"][row, column] = entry
            assert_refused([arrays], [0], [2], add_extra_token=extra)


@pytest.mark.parametrize("dtype", TOKEN_DTYPES)
@pytest.mark.parametrize(
    ("first", "last"),
    [
        ((0, 5), (0, 3)),  # backwards in a document
        ((1, 0), (0, 7)),  # backwards by a document, though as many tokens lie between the offsets
        ((2, 0), (0, 7)),
        ((1, 15), (0, 2)),
        ((0, 0), (0, 9)),  # more tokens than a sample has
        ((0, 0), (17, 3)),
        ((0, 20), (1, 20)),
    ],
)
def test_refuses_rows_that_do_not_bound_a_sample(
    dtype: Any, first: tuple[int, int], last: tuple[int, int]
) -> None:
    arrays = make_arrays(0, 8, extra=True, dtype=dtype)
    arrays["sequence_lengths"][:] = 20
    arrays["tokens"] = np.zeros(2000, dtype)
    arrays |= one_sample(first, last)
    assert_refused([arrays], [0], [0])


@pytest.mark.parametrize("dtype", TOKEN_DTYPES)
@pytest.mark.parametrize(
    ("name", "entry"),
    [("document_index", entry) for entry in (-1, 9, 2**31 - 1, -(2**31))]
    + [("sequence_lengths", length) for length in (-1, -(2**31))],
)
def test_refuses_documents_outside_the_sequences_and_negative_lengths(
    dtype: Any, name: str, entry: int
) -> None:
    arrays = make_arrays(0, 8, extra=True, dtype=dtype)
    arrays[name][:] = entry
    assert_refused([arrays], [0], [0])


@pytest.mark.parametrize("dtype", TOKEN_DTYPES)
def test_refuses_sequences_outside_the_token_file(dtype: Any) -> None:
    width = np.dtype(dtype).itemsize
    arrays = make_arrays(0, 8, extra=True, dtype=dtype, num_sequences=1, max_length=9)
    arrays["tokens"] = np.arange(9).astype(dtype)
    arrays["sequence_lengths"][:] = 9
    arrays |= one_sample((0, 0), (0, 8))
    arrays["sequence_pointers"] = np.array([0])
    assert_twin([arrays], [0], [0])  # to the very last byte
    nbytes = 9 * width
    for pointer in (-1, 1, -width, nbytes, nbytes + 1, 2**32, -(2**32), *INT64_ENDS):
        arrays["sequence_pointers"] = np.array([pointer])
        assert_refused([arrays], [0], [0])
    arrays["sequence_pointers"] = np.array([0])
    for tokens in (arrays["tokens"][:-1], arrays["tokens"][:0]):
        assert_refused([arrays | {"tokens": tokens}], [0], [0])
    arrays["sequence_lengths"][:] = 2**31 - 1
    arrays |= one_sample((0, 2**31 - 10), (0, 2**31 - 2))
    assert_refused([arrays], [0], [0])


@given(data=st.data())
@settings(deadline=None, derandomize=True, max_examples=400)
def test_any_damage_is_refused_or_read_as_the_twin_reads_it(data: st.DataObject) -> None:
    arrays = make_arrays(
        data.draw(st.integers(0, 50)),
        8,
        extra=True,
        dtype=data.draw(st.sampled_from(TOKEN_DTYPES)),
        index_dtypes=(np.int64, np.int64),
    )
    numbers = np.arange(len(arrays["shuffle_index"]))
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from([name for name in arrays if name != "tokens"]))
        limits = np.iinfo(arrays[name].dtype)
        place = data.draw(st.integers(0, arrays[name].size - 1))
        arrays[name].reshape(-1)[place] = data.draw(
            st.one_of(st.integers(-3, 30), st.integers(int(limits.min), int(limits.max)))
        )
    try:
        expected = gather(reference, [arrays], np.zeros_like(numbers), numbers)
    except ValueError:
        with pytest.raises(ValueError, match=r"outside|not fit"):
            gather(_native, [arrays], np.zeros_like(numbers), numbers)
    else:
        assert_same(gather(_native, [arrays], np.zeros_like(numbers), numbers), expected)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("tokens", np.zeros(500, dtype)) for dtype in ("f4", "f8", "u4", "u8", "?", ">u2")),
        ("tokens", np.zeros((50, 10), np.int32)),
        ("sequence_pointers", np.zeros(9, np.int32)),
        ("sequence_pointers", np.zeros(18, np.int64)[::2]),
        ("sequence_pointers", np.zeros(8, np.int64)),
        ("sequence_lengths", np.zeros(9, np.int64)),
        ("sequence_lengths", np.zeros((9, 1), np.int32)),
        ("sequence_lengths", np.zeros(10, np.int32)),
        ("document_index", np.zeros(18, np.int64)),
        ("sample_index", np.zeros(8, np.int32)),
        ("sample_index", np.zeros((4, 3), np.int32)),
        ("sample_index", np.zeros((4, 2), np.uint32)),
        ("sample_index", np.zeros((4, 2), np.float64)),
        ("shuffle_index", np.zeros(3, np.int32)),
        ("shuffle_index", np.zeros(3, np.uint64)),
        ("shuffle_index", np.zeros((3, 1), np.uint32)),
    ],
)
def test_wrong_arrays_are_refused(name: str, wrong: np.ndarray) -> None:
    arrays = make_arrays(0, 8, extra=True) | {name: wrong}
    order = ("document_index", "sample_index", "shuffle_index")
    message = name if name in order else "integer dtype|incompatible|differ in size|sequence_len"
    with pytest.raises((ValueError, TypeError), match=message):
        gather(_native, [arrays], [], [])


def test_batches_whose_arrays_do_not_pair_up_are_refused() -> None:
    arrays = make_arrays(0, 8, extra=True)
    for sources, samples in (([0], [0, 1]), ([0, 0], [0]), ([], [0])):
        with pytest.raises(ValueError, match="differ in size"):
            gather(_native, [arrays], sources, samples)
    source, order = token_source(_native, arrays), gpt_order(_native, arrays)
    one, two = np.zeros(1, np.int64), np.zeros(2, np.int64)
    with pytest.raises(ValueError, match="differ in size"):
        _native.gather_samples((source, source), (order,), one, one, OPTIONS)
    for columns in ((one, one, two), (one, two, one), (two, one, one)):
        with pytest.raises(ValueError, match="differ in size"):
            _native.locate_spans(source, *columns)


# 2**62 rows of 4 and 2**63 of 2 are 0 to code that multiplies 64-bit counts.
@pytest.mark.parametrize("sequence_length", [0, -1, -(2**63), 2**60, 2**62, 2**63 - 1])
@pytest.mark.parametrize("batch", [0, 1, 4])
def test_refuses_impossible_sequence_lengths(sequence_length: int, batch: int) -> None:
    arrays = make_arrays(0, 8, extra=True)
    numbers = np.zeros(batch, np.int64)
    with pytest.raises(ValueError, match="sequence_length"):
        SampleOptions(sequence_length=sequence_length)
    options = options_of(sequence_length=sequence_length)
    with pytest.raises(ValueError, match="sequence_length"):
        _native.gather_samples(*parts_of(_native, [arrays]), numbers, numbers, options)
    with pytest.raises(ValueError, match="sequence_length"):
        _native.fill_rows(arrays["tokens"], numbers, options)
    if not 1 <= sequence_length < 2**59:  # of one row
        with pytest.raises(ValueError, match="sequence_length"):
            gpt_order(_native, arrays, sequence_length=sequence_length)


@pytest.mark.parametrize("wrong", [np.array([0.7]), np.array([[0]]), np.zeros(4, np.int64)[::2]])
def test_numbers_that_are_no_vectors_of_int64_are_refused(wrong: np.ndarray) -> None:
    arrays = make_arrays(0, 8, extra=True)
    source, order = token_source(_native, arrays), gpt_order(_native, arrays)
    right = np.zeros(len(wrong), np.int64)
    for call, arguments in (
        (_native.gather_samples, ((source,), (order,), wrong, right, OPTIONS)),
        (_native.gather_samples, ((source,), (order,), right, wrong, OPTIONS)),
        (_native.gather_tokens, ((source,), (order,), right, wrong)),
        (_native.spans, (order, wrong)),
        (_native.locate_spans, (source, right, right, wrong)),
        (_native.find_documents, (right, wrong)),
        (_native.fill_rows, (arrays["tokens"], wrong, OPTIONS)),
        (_native.look_up_draws, (right.astype(np.int16), right, wrong)),
    ):
        with pytest.raises(TypeError, match="incompatible"):
            call(*arguments)


@pytest.mark.parametrize("ends", [[9, 8], [10], [0, 41], [-1], [2**63 - 1]])
def test_fill_rows_refuses_what_does_not_fit(ends: list[int]) -> None:
    tokens = np.arange(80, dtype=np.uint16)[:40]
    rows = tokens, np.array(ends, np.int64), OPTIONS
    twins.assert_refused(ValueError, "not fit", "fill_rows", *rows)


def test_a_source_that_is_not_mapped_is_refused() -> None:
    arrays = make_arrays(0, 8, extra=True)
    nothing = arrays | {"tokens": arrays["tokens"][:0]}
    source = token_source(_native, nothing, arrays["tokens"].nbytes)
    order = gpt_order(_native, arrays)
    numbers = np.zeros(1, np.int64)
    with pytest.raises(ValueError, match="not mapped"):
        _native.gather_samples((source,), (order,), numbers, numbers, OPTIONS)
    spans = _native.spans(order, numbers)[:3]
    expected = reference.locate_spans(token_source(reference, arrays), *spans)
    assert all(map(np.array_equal, _native.locate_spans(source, *spans), expected))


@pytest.mark.parametrize("wrong", [{"sequence_length": 7}, {"add_extra_token": False}])
def test_samples_that_are_longer_than_their_rows_are_refused(wrong: dict[str, Any]) -> None:
    arrays = make_arrays(0, 8, extra=True)
    numbers = np.zeros(1, np.int64)
    options = SampleOptions(**(DEFAULTS | wrong))
    for module in MODULES:
        parts = parts_of(module, [arrays])
        with pytest.raises(ValueError, match="not fit"):
            module.gather_samples(*parts, numbers, numbers, options)


# ---- forms ----


def assert_same_rows(actual: Any, expected: Any, form: dict[str, Any]) -> None:
    assert len(actual) == len(expected)
    for name, left, right in zip((*NAMES, "", "", ""), actual, expected, strict=False):
        if name and not form.get(name, True):
            assert left is right is None
        else:
            np.testing.assert_array_equal(left, right, err_msg=name, strict=True)
    tokens, labels = actual[:2]
    if tokens is not None and labels is not None and tokens.size > 0:
        distance = labels.ctypes.data - tokens.ctypes.data
        assert (distance == tokens.itemsize) == form["share_labels"]
    assert all(array is None or array.flags.writeable for array in actual)


@given(data=st.data())
@settings(deadline=None, derandomize=True, max_examples=250)
def test_any_form_equals_its_twin(data: st.DataObject) -> None:
    options = data.draw(ANY_OPTIONS)
    one_dtype = data.draw(st.one_of(st.none(), st.sampled_from(TOKEN_DTYPES)))
    arrays = any_sources(data, options, one_dtype)
    if data.draw(st.booleans()):
        for source in arrays:
            tokens = source["tokens"]
            limits = limits_of(tokens)
            ids = [id_ for id_ in (5, limits[0], limits[-1], 2**31, 2**40) if id_ in limits]
            tokens[data.draw(st.integers(0, len(tokens) - 1))] = data.draw(st.sampled_from(ids))
    batch = any_batch(data, arrays)
    form = {name: data.draw(st.booleans()) for name in (*NAMES, "parts", "share_labels")}
    form |= {
        "token_dtype": data.draw(st.sampled_from(["int64", "int32", "file"])),
        "vocab_size": data.draw(st.sampled_from([None, None, 1, 11, 12, 100, 2**15, 2**40])),
    }
    results = []
    for module in MODULES:
        parts = *parts_of(module, arrays, **options), *batch
        shape = options_of(**options)
        gathered = module.gather_tokens(*parts)
        rows = [
            rows_or_error(call, *inputs, shape, module.RowForm(**form))
            for call, inputs in ((module.gather_samples, parts), (module.fill_rows, gathered[:2]))
        ]
        starts = (np.cumsum(gathered[4]) - gathered[4])[gathered[4] > 0]
        own = module.RowForm(**form | {"share_labels": False})
        rows.append(rows_or_error(module.fill_rows, *gathered[:2], shape, own, starts))
        results.append((gathered, rows))
    (gathered, rows), (expected_gathered, expected_rows) = results
    assert_same(gathered, expected_gathered)
    forms = form, form, form | {"share_labels": False}
    for actual, expected, one in zip(rows, expected_rows, forms, strict=True):
        if isinstance(expected, ValueError):
            assert isinstance(actual, ValueError)
        else:
            assert_same_rows(actual, expected, one)


def rows_or_error(call: Any, *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except ValueError as error:
        return error


def limits_of(array: np.ndarray) -> range:
    """The numbers that an array can hold."""
    limits = np.iinfo(array.dtype)
    return range(int(limits.min), int(limits.max) + 1)


@pytest.mark.parametrize("dtype", TOKEN_DTYPES)
@pytest.mark.parametrize("token_dtype", ["int64", "int32", "file"])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 1000])
def test_rows_of_any_length_equal_their_twin(dtype: Any, token_dtype: str, length: int) -> None:
    """From tokens at an odd address."""
    random = np.random.default_rng(length)
    for num_tokens in (0, 1, length, length + 1):
        memory = random.integers(0, 100, num_tokens * 8 + 1).astype(np.uint8)
        tokens = memory[1 : 1 + num_tokens * np.dtype(dtype).itemsize].view(dtype)
        tokens = np.minimum(tokens, 2**20) if tokens.itemsize > 4 else tokens
        ends = np.array([num_tokens, num_tokens])
        for pad_token, share_labels in ((None, True), (None, False), (5, True), (5, False)):
            shape = options_of(sequence_length=length, pad_token=pad_token, eod_token=7)
            form = {"token_dtype": token_dtype, "share_labels": share_labels}
            actual, expected = (
                module.fill_rows(tokens, ends, shape, module.RowForm(**form)) for module in MODULES
            )
            assert_same_rows(actual, expected, form)


@pytest.mark.parametrize("starts", [[], [0], [1, 3], [0, 0, 3], [0, 4], [0, 3, 6], [-1, 0, 3]])
def test_parts_that_do_not_start_with_the_samples_are_refused(starts: list[int]) -> None:
    rows = np.arange(6), np.array([3, 6]), OPTIONS, None, twins.int64(starts)
    twins.assert_refused(ValueError, "part", "fill_rows", *rows)


@pytest.mark.parametrize(
    ("dtype", "id_", "vocab_size", "pad_token", "is_bad"),
    [
        (np.uint16, 99, 100, None, False),
        (np.uint16, 100, 100, None, True),
        (np.uint16, 65535, 65535, None, True),
        (np.uint16, 65535, 65536, None, False),
        (np.int32, -1, 100, None, True),
        (np.int32, -1, 100, -1, False),
        (np.int32, 100, 100, 100, False),
        (np.int32, 100, 100, 101, True),
        (np.int8, -1, 2**40, None, True),
        (np.int64, 2**40, 2**40, None, True),
        (np.int64, 2**40, 2**40 + 1, None, False),
        (np.int64, 2**31, None, None, True),
        (np.int64, 2**31, None, 2**31, False),
        (np.int64, -(2**31) - 1, None, None, True),
        (np.int64, -(2**31), None, None, False),
        *((np.int64, id_, 2**41, None, True) for id_ in (2**31, 2**32 + 5, -1)),
    ],
)
def test_token_ids_outside_the_vocabulary_are_refused(
    dtype: Any, id_: int, vocab_size: int | None, pad_token: int | None, is_bad: bool
) -> None:
    tokens = np.ones(40, dtype)
    tokens[22] = id_
    ends = np.array([9, 18, 27, 36])
    token_dtype = "int32" if vocab_size in (None, 2**41) else "int64"
    for module in MODULES:
        form = module.RowForm(vocab_size=vocab_size, token_dtype=token_dtype)
        options = options_of(pad_token=pad_token)
        if not is_bad:
            labels = module.fill_rows(tokens, ends, options, form)[1]
            assert labels[2, 3] == (0 if id_ == pad_token else id_)
            continue
        with pytest.raises(ValueError, match=f"token id {id_} .*of row 2") as caught:
            module.fill_rows(tokens, ends, options, form)
        if module is _native:
            assert isinstance(caught.value, DataError)
            assert "it is token 4 of row" in str(caught.value)


@given(
    sizes=st.lists(st.integers(0, 3), max_size=20),
    sequences=st.lists(st.integers(-3, 70), max_size=20),
)
@settings(derandomize=True)
def test_documents_of_sequences_equal_their_twin(sizes: list[int], sequences: list[int]) -> None:
    bounds, numbers = np.cumsum([0, *sizes]), np.array(sequences, np.int64)
    expected = twins.assert_twin("find_documents", bounds, numbers)
    for sequence, document in zip(sequences, expected.tolist(), strict=True):
        if 0 <= sequence < bounds[-1]:
            assert bounds[document] <= sequence < bounds[document + 1]


# ---- spans of any order ----


@given(data=st.data())
@settings(deadline=None, derandomize=True, max_examples=400)
def test_spans_of_any_order_are_located_or_refused_as_the_twin_does(data: st.DataObject) -> None:
    arrays = make_arrays(data.draw(st.integers(0, 50)), 8, extra=True)
    damage = data.draw(st.sampled_from([None, "sequence_pointers", "sequence_lengths"]))
    if damage:
        limits = np.iinfo(arrays[damage].dtype)
        arrays[damage][data.draw(st.integers(0, 8))] = data.draw(
            st.one_of(st.integers(-3, 60), st.integers(int(limits.min), int(limits.max)))
        )
    number = st.one_of(st.integers(-2, 30), st.integers(*INT64_ENDS))
    rows = data.draw(st.lists(st.tuples(st.integers(-1, 9), number, number), max_size=4))
    spans = np.array(rows, np.int64).reshape(-1, 3).T.copy()
    num_bytes = data.draw(st.sampled_from([None, 0, 1, 2**40]))
    try:
        expected = reference.locate_spans(token_source(reference, arrays, num_bytes), *spans)
    except ValueError:
        with pytest.raises(ValueError, match="outside"):
            _native.locate_spans(token_source(_native, arrays, num_bytes), *spans)
    else:
        actual = _native.locate_spans(token_source(_native, arrays, num_bytes), *spans)
        assert_same(actual, expected)


# ---- draws of a blend ----


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 1000])
def test_draws_are_looked_up_as_the_twin_does(size: int) -> None:
    random = np.random.default_rng(size)
    datasets = random.integers(-(2**15), 2**15, size, np.int16)
    samples = random.integers(0, 2**62, size)
    for count in (0, 1, size, 3 * size):
        numbers = random.integers(0, size, count)
        twins.assert_twin("look_up_draws", datasets, samples, numbers)
    for bad in (-1, size, *INT64_ENDS):
        numbers = np.array([0, bad])
        twins.assert_refused(
            IndexError, "there is no|out", "look_up_draws", datasets, samples, numbers
        )


def test_draws_of_arrays_that_do_not_match_are_refused() -> None:
    datasets, samples = np.zeros(3, np.int16), np.zeros(3, np.int64)
    nothing = datasets[:0], samples[:0]
    assert [len(part) for part in _native.look_up_draws(*nothing, samples[:0])] == [0, 0]
    twins.assert_refused(IndexError, "there is no|out", "look_up_draws", *nothing, samples)
    with pytest.raises(ValueError, match="differ in size"):
        _native.look_up_draws(datasets, samples[:2], samples)
    for wrong in ((samples, samples), (datasets, datasets), (datasets[:, None], samples)):
        with pytest.raises(TypeError, match="incompatible"):
            _native.look_up_draws(*wrong, samples)


@given(data=st.data())
@settings(deadline=None, derandomize=True, max_examples=200)
def test_spans_of_the_whole_file_are_cut_as_the_twin_cuts_them(data: st.DataObject) -> None:
    lengths = np.array(data.draw(st.lists(st.integers(0, 5), min_size=6, max_size=12)), np.int32)
    lengths[0] += 20
    tokens = np.arange(lengths.sum(), dtype=data.draw(st.sampled_from(["uint8", "int32"])))
    pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * tokens.itemsize
    arrays = tokens, pointers, lengths, tokens.nbytes
    order = _native.InstantOrder((0, len(tokens)), 7, (0, 4, 0), 4, True)
    *whole, _ = _native.spans(order, np.arange(9))
    *columns, bounds = _native.spans(order, np.arange(9), _native.TokenSource(*arrays))
    twin = reference.TokenSource(*arrays)
    expected = [twin.cut([span]) for span in zip(*(c.tolist() for c in whole), strict=True)]
    spans = [span for sample in expected for span in sample]
    assert list(zip(*(c.tolist() for c in columns), strict=True)) == spans
    assert np.diff(bounds).tolist() == [len(sample) for sample in expected]
    read = [token for span in spans for token in twin.read(*span)]
    assert read == [token for start in whole[1].tolist() for token in range(start, start + 5)]


def test_a_damaged_index_cuts_nothing() -> None:
    tokens, lengths = np.arange(40), np.full(4, 10, np.int32)
    order = _native.InstantOrder((0, 40), 7, (0, 4, 0), 4, True)
    numbers = np.arange(9)
    for place, pointer in ((0, 80), (2, -(2**63)), (2, 240), (3, 2**62), (1, 8)):
        pointers = np.arange(0, 320, 80)
        pointers[place] = pointer
        source = _native.TokenSource(tokens, pointers, lengths, tokens.nbytes)
        with pytest.raises(ValueError, match=r"in no sequence|outside"):
            _native.spans(order, numbers, source)
