"""The twin law for the store's kernels, and the token buffer against NumPy's own casts."""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tests.kernels.twins import assert_refused, assert_twin, int64

from millrace import _native

INTEGERS = ("uint8", "int8", "int16", "uint16", "int32", "int64")
SOURCES = (*INTEGERS, "uint32", "uint64")
COUNTS = sorted({0, 1, 1023, 1024, 1025} | {2**k + d for k in (3, 7, 9, 12) for d in (-1, 0, 1)})


# ---- pieces ----


@settings(deadline=None, derandomize=True, max_examples=200)
@given(data=st.data())
def test_pieces_equal_their_twins(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    size = data.draw(st.integers(0, 300))
    content = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)
    bounds = st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted)
    pieces = data.draw(st.lists(bounds, max_size=40))
    offsets, counts = int64([a for a, _ in pieces]), int64([b - a for a, b in pieces])
    expected = assert_twin("copy_pieces", content, offsets, counts)
    path = tmp_path_factory.mktemp("pieces") / "data"
    path.write_bytes(content.tobytes())
    with open(path, "rb") as file:
        got = assert_twin("read_packed", file.fileno(), size, offsets, counts)
        assert np.array_equal(got, expected)
        _native.prefetch_file(file.fileno(), size, offsets, counts)
        _native.prefetch_mapped(content, offsets, counts)


@pytest.mark.parametrize(
    ("offset", "count"),
    [(-1, 1), (0, 11), (10, 1), (11, 0), (0, -1), (2**62, 2**62), (-(2**63), 5), (5, 2**63 - 1)],
)
def test_pieces_outside_are_refused(tmp_path: Path, offset: int, count: int) -> None:
    content = np.arange(20, dtype=np.uint8)[:10]
    (tmp_path / "data").write_bytes(content.tobytes())
    pieces = int64([0, offset]), int64([1, count])
    with open(tmp_path / "data", "rb") as file:
        for name in ("copy_pieces", "prefetch_mapped"):
            assert_refused(ValueError, "outside", name, content, *pieces)
        for name in ("read_packed", "prefetch_file"):
            assert_refused(ValueError, "outside", name, file.fileno(), 10, *pieces)


def test_columns_that_differ_in_size_are_refused() -> None:
    for name, first in (("copy_pieces", (np.zeros(9, np.uint8),)), ("read_packed", (0, 10))):
        with pytest.raises(ValueError, match="differ in size"):
            getattr(_native, name)(*first, int64([0]), int64([]))


# ---- sequences ----


@settings(deadline=None, derandomize=True, max_examples=200)
@given(data=st.data())
def test_sequences_equal_their_twin(data: st.DataObject) -> None:
    num_sequences = data.draw(st.integers(0, 40))
    width = data.draw(st.sampled_from([1, 2, 4, 8]))
    random = np.random.default_rng(num_sequences)
    lengths = random.integers(0, 30, num_sequences).astype(np.int32)
    pointers = int64(np.concatenate(([0], np.cumsum(int64(lengths) * width)))[:-1])
    content = random.integers(0, 256, int(lengths.sum()) * width).astype(np.uint8)
    some = st.lists(st.integers(-num_sequences, num_sequences - 1), max_size=50)
    ids = int64(data.draw(some) if num_sequences else [])
    name = "copy_sequences"
    assert_twin(name, content, pointers, lengths, ids, width)
    for bad in (num_sequences, -num_sequences - 1, 2**62, -(2**62)):
        assert_refused(
            IndexError, "there is no|out", name, content, pointers, lengths, int64([bad]), width
        )
    if num_sequences:
        place = data.draw(st.integers(0, num_sequences - 1))
        for column, value in (("lengths", -1), ("lengths", 2**31 - 1), ("pointers", -1)):
            arrays = {"lengths": lengths.copy(), "pointers": pointers.copy()}
            arrays[column][place] = value
            arrays |= {"ids": int64([place])}
            assert_refused(ValueError, "outside", name, content, token_size=width, **arrays)


def test_sequences_whose_columns_differ_in_size_are_refused() -> None:
    data, one, two = np.zeros(8, np.uint8), int64([0]), int64([0, 4])
    for pointers, lengths in ((two, np.array([4], np.int32)), (one, np.zeros(2, np.int32))):
        with pytest.raises(ValueError, match="differ in size"):
            _native.copy_sequences(data, pointers, lengths, one, 4)
        with pytest.raises(ValueError, match="differ in size"):
            _native.first_bad_sequence(lengths, pointers, 4, 0)


# ---- the index ----


@settings(deadline=None, derandomize=True, max_examples=300)
@given(data=st.data())
def test_the_first_bad_sequence_equals_its_twin(data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 40))
    random = np.random.default_rng(size)
    lengths = random.integers(0, 2**31, size).astype(np.int32)
    width = data.draw(st.sampled_from([1, 2, 4, 8]))
    start = data.draw(st.integers(0, 2**40))
    pointers = int64(start + np.concatenate(([0], np.cumsum(int64(lengths) * width)))[:size])
    if size and data.draw(st.booleans()):
        place = data.draw(st.integers(0, size - 1))
        if data.draw(st.booleans()):
            lengths[place] = data.draw(st.integers(-(2**31), 2**31 - 1))
        else:
            pointers[place] = data.draw(st.integers(-(2**63), 2**63 - 1))
    assert_twin("first_bad_sequence", lengths, pointers, width, start)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(entries=st.lists(st.integers(-3, 12), max_size=30), num_sequences=st.integers(0, 10))
def test_the_first_bad_document_equals_its_twin(entries: list[int], num_sequences: int) -> None:
    for values in (entries, sorted(entries)):
        assert_twin("first_bad_document", int64(values), num_sequences)


# ---- the token buffer ----


def held(buffer: _native.TokenBuffer, dtype: str) -> np.ndarray:
    """The tokens in a buffer."""
    return buffer.view().view(dtype).copy()


@pytest.mark.parametrize(("target", "source"), list(itertools.product(INTEGERS, SOURCES)))
def test_the_buffer_takes_what_fits_and_nothing_else(target: str, source: str) -> None:
    limits, of_source = np.iinfo(target), np.iinfo(source)
    low, high = max(limits.min, of_source.min), min(limits.max, of_source.max)
    buffer = _native.TokenBuffer(target, 16)
    expected = [np.empty(0, target)]
    for count in COUNTS:
        values = np.random.default_rng(count).integers(low, high, count, source, endpoint=True)
        if count:
            values[count // 2], values[-1] = low, high
        buffer.append(values)
        expected.append(values.astype(target))
        for misfit in (limits.min - 1, limits.max + 1, of_source.min, of_source.max):
            if count and of_source.min <= misfit <= of_source.max and not low <= misfit <= high:
                for place in (0, count // 2, count - 1):
                    bad = values.copy()
                    bad[place] = misfit
                    with pytest.raises(ValueError, match=f"token {misfit} does not fit {target}"):
                        buffer.append(bad)
    whole = np.concatenate(expected)
    assert buffer.num_bytes == whole.nbytes
    assert np.array_equal(held(buffer, target), whole)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_buffer_takes_floats_as_they_are(dtype: str) -> None:
    buffer = _native.TokenBuffer(dtype, 4)
    values = np.array([0.1, -np.inf, np.nan, -0.0], dtype)
    buffer.append(values)
    assert held(buffer, dtype).tobytes() == values.tobytes()
    for bad in ([1], values.astype("float16"), np.arange(3), values[::2]):
        with pytest.raises((TypeError, ValueError)):
            buffer.append(bad)
    assert buffer.num_bytes == values.nbytes


def test_tokens_become_sequences() -> None:
    buffer = _native.TokenBuffer("int32", 4)
    buffer.append(int64([1, 2, 3]))
    buffer.append(np.array([4, 5]))
    for bad in ([2, 2], [6], [-1, 6], []):
        with pytest.raises(ValueError, match=r"sum to|lengths hold"):
            buffer.add_sequences(int64(bad))
    with pytest.raises(ValueError, match="1 modes for 2 sequences"):
        buffer.add_sequences(int64([2, 3]), np.zeros(1, np.int8))
    buffer.add_sequences(int64([2, 3]), np.array([7, 8], np.int8), True)
    buffer.append(int64([6]))
    with pytest.raises(ValueError, match="sum to 2; there are 1 tokens"):
        buffer.add_documents(int64([1, 1]))
    buffer.add_documents(int64([0, 1, 0]))
    entries = [array.tolist() for array in buffer.take_entries()]
    assert entries == [[2, 3, 1], [7, 8, 0], [2, 2, 3, 3]]
    assert (buffer.num_tokens, buffer.num_sequences, buffer.num_documents) == (6, 3, 4)


def test_the_buffer_refuses_other_shapes_and_dtypes() -> None:
    buffer = _native.TokenBuffer("int32", 4)
    for bad in (np.zeros((2, 2), np.int32), np.zeros(2), np.zeros(2, bool), np.array(["a"])):
        with pytest.raises((TypeError, ValueError)):
            buffer.append(bad)
    with pytest.raises(ValueError, match="cannot be buffered as float16"):
        _native.TokenBuffer("float16", 4)
    assert buffer.num_bytes == 0


@settings(deadline=None, derandomize=True, max_examples=100)
@given(data=st.data())
def test_the_buffer_writes_documents_behind(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Documents of every kind, refused ones among them, in buffers of every size."""
    path = tmp_path_factory.mktemp("buffer") / "tokens"
    documents = data.draw(st.lists(st.lists(st.integers(-1, 300), max_size=40), max_size=30))
    tokens: list[int] = []
    lengths: list[int] = []
    ends: list[int] = []
    with open(path, "wb", buffering=0) as file:
        buffer = _native.TokenBuffer("uint8", data.draw(st.integers(0, 64)), file.fileno())
        for document in documents:
            cuts = sorted(data.draw(st.lists(st.integers(0, len(document)), max_size=3)))
            parts = np.diff([0, *cuts, len(document)]).tolist()
            values = int64(document)
            if not all(0 <= token <= 255 for token in document):
                with pytest.raises(ValueError, match="does not fit"):
                    buffer.append(values)
                continue
            buffer.append(values)
            for bad in ([*parts, 1], [-1, 1, *parts]):
                with pytest.raises(ValueError, match=r"sum to|lengths hold"):
                    buffer.add_sequences(int64(bad), None, True)
            buffer.add_sequences(int64(parts), None, True)
            tokens += document
            lengths += parts
            ends.append(len(lengths))
            if buffer.is_full:
                buffer.flush()
        assert (buffer.num_sequences, buffer.num_documents) == (len(lengths), len(ends))
        entries = [array.tolist() for array in buffer.take_entries()]
        assert entries == [lengths, [0] * len(lengths), ends]
        assert [array.tolist() for array in buffer.take_entries()] == [[], [], []]
        assert buffer.view().tolist() == tokens[len(tokens) - buffer.num_bytes :]
        buffer.flush()
        buffer.wait()
        assert path.read_bytes() == bytes(tokens)


def test_the_buffer_says_what_stopped_a_write(tmp_path: Path) -> None:
    (tmp_path / "read-only").touch()
    with open(tmp_path / "read-only", "rb") as file:
        buffer = _native.TokenBuffer("uint8", 4, file.fileno())
    buffer.append(int64([1]))
    buffer.flush()  # on a descriptor of its own, of a file that is open for reading
    with pytest.raises(OSError, match="Bad file descriptor"):
        buffer.wait()
    buffer.close()
    with pytest.raises(ValueError, match="no valid descriptor"):
        _native.TokenBuffer("uint8", 4, file=10**6)


@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
def test_a_forked_child_drops_a_buffer_that_is_being_written(tmp_path: Path) -> None:
    with open(tmp_path / "tokens", "wb", buffering=0) as file:
        buffer = _native.TokenBuffer("uint8", 1 << 24, file.fileno())
        buffer.append(np.zeros(1 << 24, np.uint8))
        buffer.flush()
        child = os.fork()
        if child == 0:
            del buffer  # would wait for ever for a thread that only the parent has
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        buffer.wait()
    assert (tmp_path / "tokens").stat().st_size == 1 << 24
