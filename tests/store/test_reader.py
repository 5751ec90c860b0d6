"""Reading indexed datasets: access, properties and refusals."""

import os
from pathlib import Path

import numpy as np
import pytest

from millrace import ConfigError, DataError, IndexedDataset, IndexedDatasetBuilder
from millrace.storage import Access, Bytes


@pytest.fixture
def dataset(tmp_path: Path) -> IndexedDataset:
    with IndexedDatasetBuilder(tmp_path / "data", np.int32) as builder:
        builder.add_document([1, 2, 3, 4, 5], lengths=[3, 2])
        builder.add_document([])
        builder.add_document([], lengths=[])
        builder.add_document([6, 7, 8, 9])
    return IndexedDataset(tmp_path / "data")


class PageReader:
    """An object store's reader whose pages are all in memory."""

    def __init__(self, data: bytes) -> None:
        self.size = len(data)
        self.bytes = np.frombuffer(data, np.uint8).copy()

    def read(self, byte_offset: int, num_bytes: int) -> Bytes:
        raise AssertionError

    def gather(self, byte_offsets: np.ndarray, byte_counts: np.ndarray) -> Bytes:
        raise AssertionError


def test_a_reader_with_all_bytes_in_memory_is_read_as_a_map(
    dataset: IndexedDataset, tmp_path: Path
) -> None:
    reader = PageReader((tmp_path / "data.bin").read_bytes())
    paged = IndexedDataset(tmp_path / "data", bin_reader=reader)
    filed = IndexedDataset(tmp_path / "data", access="file")
    assert [d.is_mapped for d in (dataset, paged, filed)] == [True, True, False]
    assert [s.tolist() for s in paged] == [s.tolist() for s in dataset]
    assert paged.tokens.tolist() == dataset.tokens.tolist()
    assert np.shares_memory(paged[3], reader.bytes)
    assert paged.read([3, 0])[0].tolist() == [6, 7, 8, 9, 1, 2, 3]
    for one in (dataset, paged):
        assert not one[0].flags.writeable
    reader.bytes = reader.bytes[:-4]
    with pytest.raises(ConfigError, match=r"a contiguous uint8 \[36\] is needed"):
        IndexedDataset(tmp_path / "data", bin_reader=reader)
    paged.close()
    with pytest.raises(ConfigError, match="is closed"):
        _ = paged.is_mapped


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, 5), (5, None), (2, 3), (0, -1)])
def test_a_span_outside_its_sequence_is_refused(
    dataset: IndexedDataset, offset: int, length: int | None
) -> None:
    with pytest.raises(ConfigError, match="sequence 3"):
        dataset.get(3, offset, length)


@pytest.mark.parametrize("access", ["mmap", "file"])
def test_sequence_ids_may_be_any_integers(dataset: IndexedDataset, access: Access) -> None:
    dataset = IndexedDataset(os.fsencode(dataset.prefix), access=access)  # type: ignore[arg-type]
    for dtype in (np.uint64, np.int8, ">i4"):
        ids = np.array([3, 2, 0, 1], dtype)[::2]
        assert dataset.read(ids)[0].tolist() == [6, 7, 8, 9, 1, 2, 3]
    for bad in ([0.5], ["1"], [[1]], [2**63], 3):
        with pytest.raises(ConfigError, match="sequence_ids"):
            dataset.read(bad)
    with pytest.raises(ConfigError, match="must be a path"):
        IndexedDataset(3)  # type: ignore[arg-type]


# ---- bad files: one clear error that names the file ----


def damage(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def test_a_missing_file_is_named(dataset: IndexedDataset, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"given without \.bin or \.idx"):
        IndexedDataset(tmp_path / "data.bin")
    for suffix in (".idx", ".bin"):
        path = (tmp_path / f"data{suffix}").rename(tmp_path / "elsewhere")
        with pytest.raises(DataError, match=rf"data\{suffix} not found"):
            IndexedDataset(tmp_path / "data")
        path.rename(tmp_path / f"data{suffix}")


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (0, b"TNTIDX\0\0\0", "a Megatron-LM index has"),
        (9, b"\x02", "version 2"),
        (17, b"\x09", "dtype code 9"),
        (17, b"\x00", "dtype code 0"),
        (18, b"\xff" * 8, "document entries take"),
        (18, b"\x05", "document entries take"),
        (26, b"\x00", "document entries take"),
        (34 + 12, b"\xff\xff\xff\xff", "negative length"),
        (34 + 16, b"\x04", "starts at byte 4"),
        (34 + 16 + 32, b"\x01", "from 1 to 4"),
        (34 + 16 + 32 + 32, b"\x03", "from 0 to 3"),
        (34 + 16 + 32 + 40, b"x", r"data\.idx.*truncated"),
    ],
)
def test_a_damaged_index_is_refused_when_it_is_opened(
    dataset: IndexedDataset, tmp_path: Path, offset: int, data: bytes, message: str
) -> None:
    damage(tmp_path / "data.idx", offset, data)
    with pytest.raises(DataError, match=message):
        IndexedDataset(tmp_path / "data")


@pytest.mark.parametrize("size", [0, 35, 37])
def test_tokens_that_do_not_end_with_their_index(
    dataset: IndexedDataset, tmp_path: Path, size: int
) -> None:
    os.truncate(tmp_path / "data.bin", size)
    message = rf"data\.bin has {size} bytes, but its index ends at byte 36.*not belong together"
    with pytest.raises(DataError, match=message):
        IndexedDataset(tmp_path / "data")


def test_damage_in_the_middle_is_refused_when_it_is_read(
    dataset: IndexedDataset, tmp_path: Path
) -> None:
    damage(tmp_path / "data.idx", 34 + 4, b"\xff\xff\xff\xff")  # the length of sequence 1
    damage(tmp_path / "data.idx", 34 + 16 + 16, b"\x00\x01")  # the pointer of sequence 2
    damaged = IndexedDataset(tmp_path / "data")
    assert damaged[0].tolist() == [1, 2, 3]
    for number in (1, 2):
        with pytest.raises(DataError, match=f"sequence {number}"):
            damaged[number]


@pytest.mark.parametrize("access", ["mmap", "file"])
def test_reads_of_a_cold_file_are_equal(tmp_path: Path, access: Access) -> None:
    """Outside the page cache, reads are prefetched."""
    random = np.random.default_rng(5)
    lengths = random.integers(0, 3000, 3000)
    tokens = random.integers(0, 60000, lengths.sum(), dtype=np.uint16)
    with IndexedDatasetBuilder(tmp_path / "data", np.uint16) as builder:
        builder.add_documents(tokens, lengths)
    sequences = np.split(tokens, np.cumsum(lengths)[:-1])
    sequences = [sequence for sequence in sequences if len(sequence)]
    with open(tmp_path / "data.bin", "rb") as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dataset = IndexedDataset(tmp_path / "data", access=access)
    ids = random.permutation(len(sequences))
    flat, offsets = dataset.read(ids)
    assert np.array_equal(flat, np.concatenate([sequences[i] for i in ids]))
    assert np.array_equal(np.diff(offsets), [len(sequences[i]) for i in ids])
