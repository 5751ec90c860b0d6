"""Writing indexed datasets: the bytes, the refusals, and the old pair."""

import struct
from pathlib import Path

import numpy as np
import pytest

from millrace import ConfigError, IndexedDataset, IndexedDatasetBuilder, MillraceError
from tests.store.pairs import names


def test_the_bytes_of_a_small_pair(tmp_path: Path) -> None:
    """The example of the format description, byte by byte."""
    with IndexedDatasetBuilder(tmp_path / "data", np.int32) as builder:
        builder.add_document([1, 2, 3, 4, 5], lengths=[3, 2])
        builder.add_document([6, 7, 8, 9])
    assert (tmp_path / "data.bin").read_bytes() == struct.pack("<9i", *range(1, 10))
    assert (tmp_path / "data.idx").read_bytes() == (
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, 4, 3, 3)
        + struct.pack("<3i", 3, 2, 4)
        + struct.pack("<3q", 0, 12, 20)
        + struct.pack("<3q", 0, 2, 3)
    )


def test_many_documents_at_once_give_the_same_bytes(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(0, 5, 100)
    tokens = random.integers(0, 1000, lengths.sum())
    with IndexedDatasetBuilder(tmp_path / "a", np.uint16) as single:
        for part in np.split(tokens, np.cumsum(lengths)[:-1]):
            single.add_document(part, lengths=[len(part)] if len(part) else [])
    with IndexedDatasetBuilder(tmp_path / "b", np.uint16) as many:
        half = lengths[:50].sum()
        many.add_documents(tokens[:half], lengths[:50])
        many.add_documents(tokens[half:], lengths[50:])
    assert (many.num_documents, many.num_sequences) == (100, np.count_nonzero(lengths))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


# ---- refusals ----


@pytest.mark.parametrize(
    ("dtype", "tokens", "message"),
    [
        (np.uint16, [1, 65536], "token 65536 does not fit uint16, which holds 0 to 65535"),
        (np.uint16, [-1], "token -1 does not fit uint16"),
        (np.int8, np.array([200]), "token 200 does not fit int8"),
        (np.int32, np.array([2**31]), "does not fit int32"),
        (np.int32, [1.5], "integers are needed"),
        (np.int32, [[1], [2]], "one dimension"),
        (np.int32, [[1], [2, 3]], "one dimension"),
        (np.int32, "abc", "one dimension"),
        (np.int32, None, "one dimension"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(
    tmp_path: Path, dtype: type, tokens: object, message: str
) -> None:
    with IndexedDatasetBuilder(tmp_path / "data", dtype) as builder:
        with pytest.raises(ConfigError, match=message):
            builder.add_document(tokens)  # type: ignore[arg-type]
        builder.add_document([1])  # a refused document leaves no trace
    assert [s.tolist() for s in IndexedDataset(tmp_path / "data")] == [[1]]


@pytest.mark.parametrize("lengths", [[2], [2, 2], [4, -1], []])
def test_lengths_that_do_not_add_up_are_refused(tmp_path: Path, lengths: list[int]) -> None:
    builder = IndexedDatasetBuilder(tmp_path / "data")
    with pytest.raises(ConfigError, match="lengths"):
        builder.add_document([1, 2, 3], lengths=lengths)
    with pytest.raises(ConfigError, match="lengths"):
        builder.add_documents([1, 2, 3], lengths)
    builder.abort()


# ---- nothing half-written ----


def test_an_error_in_the_block_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError), IndexedDatasetBuilder(tmp_path / "data", np.uint16) as builder:
        builder.add_documents([1, 2, 100_000], [2, 1])
    assert names(tmp_path) == []


def test_a_merge_that_fails_in_the_middle_closes_the_builder(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "wide", np.int32) as builder:
        builder.add_documents([1, 70_000], [1, 1])
    builder = IndexedDatasetBuilder(tmp_path / "data", np.uint16)
    with pytest.raises(ConfigError, match="70000 does not fit uint16"):
        builder.add_index(tmp_path / "wide", change_dtype=True)
    with pytest.raises(ConfigError, match=r"builder of .* is closed"):
        builder.add_document([1])


def test_two_builders_of_one_prefix_are_refused(tmp_path: Path) -> None:
    first = IndexedDatasetBuilder(tmp_path / "data")
    with pytest.raises(MillraceError, match="being built by another process"):
        IndexedDatasetBuilder(tmp_path / "data")
    first.abort()
    IndexedDatasetBuilder(tmp_path / "data").finalize()
