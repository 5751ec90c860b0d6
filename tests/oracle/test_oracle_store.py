"""The format law: both sides write the same bytes, merge alike, and read each other's files."""

import operator
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import oracle_megatron as megatron
import pytest
import torch
from numpy.typing import NDArray

import millrace
import millrace.megatron as by_names

# Megatron-LM's builder converts tensors in a way that NumPy 2 deprecates.
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
)

CASES = 192  # 8 of each dtype and mode
DTYPES = ("u1", "i1", "i2", "i4", "i8", "f8", "f4", "u2")

Document = tuple[np.ndarray, list[int], list[int]]  # tokens, lengths and modes of its sequences


def random_documents(random: np.random.Generator, dtype: Any, count: int) -> list[Document]:
    """Documents of zero, one or several sequences, some of them empty."""
    documents = []
    for _ in range(count):
        lengths = random.geometric(0.15, size=random.choice([0, 1, 1, 1, 3, 9])) - 1
        lengths[random.random(len(lengths)) < 0.1] = 0
        size = int(lengths.sum())
        if np.dtype(dtype).kind == "f":
            tokens = random.standard_normal(size).astype(dtype)
        else:
            limits = np.iinfo(dtype)
            tokens = random.integers(limits.min, limits.max, size, dtype=dtype, endpoint=True)
        modes = random.integers(-128, 128, len(lengths)).tolist()
        documents.append((tokens, lengths.tolist(), modes))
    return documents


def write_ours(prefix: Path, documents: list[Document], dtype: Any, **how: bool) -> None:
    multimodal = how["multimodal"]
    with millrace.IndexedDatasetBuilder(prefix, dtype, multimodal=multimodal) as builder:
        add_all(builder, builder.add_sequence, np.asarray, documents, **how)


def write_theirs(
    prefix: Path, documents: list[Document], dtype: Any, side: Any = megatron, **how: bool
) -> None:
    builder = side.IndexedDatasetBuilder(f"{prefix}.bin", dtype, how["multimodal"])
    add_all(builder, builder.add_item, torch.from_numpy, documents, **how)
    builder.finalize(f"{prefix}.idx")


def add_all(
    builder: Any, add: Any, convert: Any, documents: list[Document], multimodal: bool, whole: bool
) -> None:
    for tokens, lengths, modes in documents:
        if whole:
            builder.add_document(convert(tokens), lengths, modes if multimodal else None)
        else:
            for part, mode in zip(parts_of(tokens, lengths), modes, strict=True):
                add(convert(part), mode)
            builder.end_document()


def parts_of(tokens: np.ndarray, lengths: list[int]) -> list[np.ndarray]:
    return np.split(tokens, np.cumsum(lengths)[:-1]) if lengths else []


def tokens_of(result: Any) -> Any:
    """Megatron-LM gives (tokens, mode) in a multimodal dataset."""
    return result[0] if isinstance(result, tuple) else result


WRITERS = (write_ours, write_theirs, partial(write_theirs, side=by_names))


class RemoteBytes:
    """A `.bin` that is not a file, as the reader of an object store would be; counts its reads."""

    def __init__(self, path: Path) -> None:
        self._content = path.read_bytes()
        self.size, self.num_reads = len(self._content), 0

    def read(self, byte_offset: int, num_bytes: int) -> NDArray[np.uint8]:
        self.num_reads += 1
        return np.frombuffer(self._content[byte_offset : byte_offset + num_bytes], np.uint8)

    def gather(
        self, byte_offsets: NDArray[np.int64], byte_counts: NDArray[np.int64]
    ) -> NDArray[np.uint8]:
        return millrace.store.gather_in_turn(self.read, byte_offsets, byte_counts)


def merge_ours(prefix: Path, parts: list[Path], dtype: Any, *, multimodal: bool) -> None:
    with millrace.IndexedDatasetBuilder(prefix, dtype, multimodal=multimodal) as builder:
        for part in parts:
            builder.add_index(part)


def merge_theirs(
    side: Any, prefix: Path, parts: list[Path], dtype: Any, *, multimodal: bool
) -> None:
    builder = side.IndexedDatasetBuilder(f"{prefix}.bin", dtype, multimodal)
    for part in parts:
        builder.add_index(str(part))
    builder.finalize(f"{prefix}.idx")


def bytes_of(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def assert_equal(left: Any, right: Any, what: str) -> None:
    # Compare bits, NaN included; NumPy's comparison would take most of the test's time.
    assert left.dtype == right.dtype, what
    assert left.shape == right.shape, what
    assert left.tobytes() == right.tobytes(), what


def assert_lists_equal(left: Any, right: Any, what: str) -> None:
    assert len(left) == len(right), what
    for one, other in zip(left, right, strict=True):
        assert_equal(one, other, what)


def assert_reads_alike(
    ours: millrace.IndexedDataset, theirs: megatron.IndexedDataset, random: np.random.Generator
) -> None:
    """Every way to read ours gives what Megatron-LM's gives."""
    assert ours.dtype == theirs.index.dtype
    assert len(ours) == len(theirs)
    assert_equal(ours.sequence_lengths, theirs.sequence_lengths, "lengths")
    assert_equal(ours.sequence_pointers, theirs.index.sequence_pointers, "pointers")
    assert_equal(ours.document_indices, theirs.document_indices, "documents")
    if ours.sequence_modes is None:
        assert theirs.index.sequence_modes is None
    else:
        assert_equal(ours.sequence_modes, theirs.index.sequence_modes, "modes")
    all_theirs = [tokens_of(theirs[number]) for number in range(len(theirs))]
    assert_lists_equal([ours[number] for number in range(len(ours))], all_theirs, "[i]")
    assert_lists_equal([ours.get(number) for number in range(len(ours))], all_theirs, "get(i)")
    assert_lists_equal(list(ours), all_theirs, "iteration")
    assert_lists_equal(ours[:], tokens_of(theirs[:]), "[:]")
    ids = random.integers(-len(ours), len(ours), random.integers(1, 20))
    flat, offsets = ours.read(ids)
    parts = [all_theirs[number] for number in ids.tolist()]
    assert_equal(flat, np.concatenate(parts), "read(ids)")
    assert_equal(offsets, np.cumsum([0, *map(len, parts)]), "read(ids) offsets")
    assert_lists_equal(ours[ids], parts, "[ids]")
    for number in random.integers(0, len(ours), 8).tolist():
        length = int(ours.sequence_lengths[number])
        offset = int(random.integers(0, length + 1))
        count = int(random.integers(0, length - offset + 1))
        rest, piece = theirs.get(number, offset), theirs.get(number, offset, count)
        assert_equal(ours.get(number, offset), tokens_of(rest), "get(i, offset)")
        assert_equal(ours.get(number, offset, count), tokens_of(piece), "get(i, offset, length)")
        stop = number + int(random.integers(1, 9))
        assert_lists_equal(ours[number:stop], tokens_of(theirs[number:stop]), "[a:b]")
        assert_lists_equal(ours[stop:number:-2], all_theirs[stop:number:-2], "[b:a:-2]")
    ends = theirs.document_indices.tolist()
    empty = np.empty(0, ours.dtype)
    sizes = []
    for number in range(ours.num_documents):
        expected = np.concatenate([empty, *all_theirs[ends[number] : ends[number + 1]]])
        assert_equal(ours.document(number), expected, "document(j)")
        sizes.append(len(expected))
    assert_equal(ours.document_lengths, np.array(sizes, np.int64), "document_lengths")


def assert_named_alike(ours: by_names.IndexedDataset, theirs: megatron.IndexedDataset) -> None:
    """The drop-in's methods and attributes give what Megatron-LM's give."""
    count, last = len(theirs), int(theirs.sequence_lengths[-1])
    numbers = [*range(-count, count), np.int32(0)]
    spans = [slice(None), slice(0, 0), slice(-2, None), slice(1, 4), slice(count - 1, count + 9)]
    attributes = "sequence_pointers document_indices dtype dtype_size sequence_count document_count"
    for read in (
        len,
        lambda data: [data[number] for number in numbers],
        lambda data: [data[span] for span in spans],
        lambda data: [data.get(number, 0) for number in range(count)],
        lambda data: [data.get(np.int64(count - 1), last // 2, n) for n in {0, last - last // 2}],
        lambda data: [data.index[number] for number in range(count)],
        lambda data: [len(data.index), data.sequence_lengths, data.document_indices],
        lambda data: [getattr(data.index, name) for name in attributes.split()],
        lambda data: data.bin_reader.read(dtype=np.uint8, count=1, offset=1),
        operator.attrgetter("path_prefix", "multimodal", "mmap"),
        lambda data: data.exists(data.path_prefix),
    ):
        megatron.assert_alike(read(ours), read(theirs))
    megatron.assert_alike(pickle.loads(pickle.dumps(ours))[0], theirs[0])
    if ours.multimodal:
        assert_equal(ours.sequence_modes, theirs.index.sequence_modes, "modes")
    assert isinstance(ours, torch.utils.data.Dataset)
    ours.set_document_indices(ours.document_indices[:1])
    assert_equal(ours.get_document_indices(), theirs.document_indices[:1], "replaced")


@pytest.mark.parametrize("seed", range(CASES))
def test_written_merged_and_read_alike(seed: int, tmp_path: Path) -> None:
    """Each side writes, each merges, and both read in every way."""
    random = np.random.default_rng([30, seed])
    dtype = np.dtype(DTYPES[seed % len(DTYPES)]).type
    multimodal = seed // len(DTYPES) % 3 == 2
    parts = []
    for number in range(int(random.integers(1, 4))):
        documents = random_documents(random, dtype, int(random.choice([0, 1, 3, 20])))
        if number == 0:  # Megatron-LM cannot map an empty .bin, or merge an index without sequences
            documents.append((np.ones(2, dtype), [0, 2], [5, 1]))
        whole = bool(random.integers(2))
        folder = tmp_path / str(number)
        folder.mkdir()
        written = write_both(folder, documents, dtype, multimodal=multimodal, whole=whole)
        parts.append(written[int(random.integers(2))])
    ours, theirs, named = (tmp_path / name for name in ("ours", "theirs", "named"))
    merge_ours(ours, parts, dtype, multimodal=multimodal)
    for side, prefix in ((megatron, theirs), (by_names, named)):
        merge_theirs(side, prefix, parts, dtype, multimodal=multimodal)
    assert bytes_of(ours) == bytes_of(theirs) == bytes_of(named)

    # Each reader on the other's file.
    remote = RemoteBytes(Path(f"{theirs}.bin"))
    ways: list[Any] = [{"access": "mmap"}, {"access": "file"}, {"bin_reader": remote}]
    for mapped in (True, False):
        reference = megatron.IndexedDataset(str(ours), multimodal=multimodal, mmap=mapped)
        for way in ways:
            assert_reads_alike(millrace.IndexedDataset(theirs, **way), reference, random)
        assert_named_alike(by_names.IndexedDataset(str(ours), multimodal, mapped), reference)
    assert remote.num_reads > 0
    assert millrace.store.verify([theirs])[0].problems == []


def write_both(folder: Path, documents: list[Document], dtype: Any, **how: bool) -> list[Path]:
    """The pairs that the sides write, which are equal in every byte."""
    prefixes = [folder / "ours", folder / "theirs", folder / "named"]
    for write, prefix in zip(WRITERS, prefixes, strict=True):
        write(prefix, documents, dtype, **how)
    assert bytes_of(prefixes[0]) == bytes_of(prefixes[1]) == bytes_of(prefixes[2])
    return prefixes[:2]


@pytest.mark.parametrize("count", [400, 3000, 10_000])
@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_files_of_many_documents_are_byte_equal(dtype: Any, count: int, tmp_path: Path) -> None:
    random = np.random.default_rng(count)
    multimodal, whole = count == 400, count != 3000
    documents = random_documents(random, dtype, count)
    documents.append((np.ones(3, dtype), [3], [1]))
    ours, theirs = write_both(tmp_path, documents, dtype, multimodal=multimodal, whole=whole)
    if count == 400:  # it looks at every sequence in every way
        reference = megatron.IndexedDataset(str(ours), multimodal=multimodal)
        assert_reads_alike(millrace.IndexedDataset(theirs), reference, random)


@pytest.mark.parametrize(
    "documents",
    [[], [[]], [[0]], [[0, 0], []]],
    ids=["no document", "no sequence", "an empty sequence", "several empty ones"],
)
@pytest.mark.parametrize("multimodal", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_files_without_tokens_are_byte_equal(
    documents: list[list[int]], multimodal: bool, whole: bool, tmp_path: Path
) -> None:
    nothing = np.zeros(0, np.int32)
    written = [(nothing, lengths, [7, 1][: len(lengths)]) for lengths in documents]
    _, theirs = write_both(tmp_path, written, np.int32, multimodal=multimodal, whole=whole)
    for mapped in (True, False):
        named = by_names.IndexedDataset(str(theirs), mmap=mapped)
        assert len(named) == sum(map(len, documents))
    dataset = millrace.IndexedDataset(theirs)  # Megatron-LM cannot open it
    assert (len(dataset), dataset.num_documents) == (sum(map(len, documents)), len(documents))
    assert dataset.num_tokens == 0


@pytest.mark.parametrize(
    "vocabulary", [None, 1, 255, 256, 50_257, 65_499, 65_500, 65_501, 65_535, 65_536, 10**6]
)
def test_the_dtype_of_a_vocabulary_is_megatrons(vocabulary: int | None) -> None:
    assert millrace.optimal_dtype(vocabulary) == megatron.DType.optimal_dtype(vocabulary)
