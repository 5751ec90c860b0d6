"""The format law: the bytes that millrace writes are Megatron-LM's, and each reads the other's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import oracle_megatron as megatron
import pytest
import torch

import millrace

# Megatron-LM's builder converts tensors in a way that NumPy 2 deprecates.
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
)

DTYPES = (
    np.uint8,
    np.int8,
    np.int16,
    np.int32,
    np.int64,
    np.float64,
    np.float32,
    np.uint16,
)

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


def write_ours(
    prefix: Path, documents: list[Document], dtype: Any, *, multimodal: bool, whole: bool
) -> None:
    with millrace.IndexedDatasetBuilder(prefix, dtype, multimodal=multimodal) as builder:
        for tokens, lengths, modes in documents:
            if whole:
                builder.add_document(tokens, lengths, modes if multimodal else None)
            else:
                for part, mode in zip(parts_of(tokens, lengths), modes, strict=True):
                    builder.add_sequence(part, mode)
                builder.end_document()


def write_theirs(
    prefix: Path, documents: list[Document], dtype: Any, *, multimodal: bool, whole: bool
) -> None:
    builder = megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype, multimodal)
    for tokens, lengths, modes in documents:
        if whole:
            builder.add_document(torch.from_numpy(tokens), lengths, modes if multimodal else None)
        else:
            for part, mode in zip(parts_of(tokens, lengths), modes, strict=True):
                builder.add_item(torch.from_numpy(part), mode)
            builder.end_document()
    builder.finalize(f"{prefix}.idx")


def parts_of(tokens: np.ndarray, lengths: list[int]) -> list[np.ndarray]:
    return np.split(tokens, np.cumsum(lengths)[:-1]) if lengths else []


def assert_reads_alike(
    ours_prefix: Path, theirs_prefix: Path, random: np.random.Generator, *, multimodal: bool
) -> None:
    ours = millrace.IndexedDataset(ours_prefix)
    theirs = megatron.IndexedDataset(str(theirs_prefix), multimodal=multimodal)
    assert ours.dtype == theirs.index.dtype
    assert len(ours) == len(theirs)
    assert_equal(ours.sequence_lengths, theirs.sequence_lengths)
    assert_equal(ours.sequence_pointers, theirs.index.sequence_pointers)
    assert_equal(ours.document_indices, theirs.document_indices)
    if multimodal:
        assert ours.sequence_modes is not None
        assert_equal(ours.sequence_modes, theirs.index.sequence_modes)
    else:
        assert ours.sequence_modes is None
    for number in random.integers(0, len(ours), 20).tolist():
        length = int(ours.sequence_lengths[number])
        offset = int(random.integers(0, length + 1))
        count = int(random.integers(0, length - offset + 1))
        assert_equal(ours[number], tokens_of(theirs[number]))
        assert_equal(ours.get(number, offset), tokens_of(theirs.get(number, offset)))
        assert_equal(ours.get(number, offset, count), tokens_of(theirs.get(number, offset, count)))
        theirs_slice = tokens_of(theirs[number : number + 5])
        for left, right in zip(ours[number : number + 5], theirs_slice, strict=True):
            assert_equal(left, right)


def tokens_of(result: Any) -> Any:
    """Megatron-LM gives (tokens, mode) in a multimodal dataset."""
    return result[0] if isinstance(result, tuple) else result


def assert_equal(left: np.ndarray, right: np.ndarray) -> None:
    np.testing.assert_array_equal(left, right, strict=True)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", DTYPES)
def test_files_are_byte_equal_and_read_by_both(dtype: Any, seed: int, tmp_path: Path) -> None:
    random = np.random.default_rng([DTYPES.index(dtype), seed])
    multimodal, whole = seed % 3 == 2, seed % 2 == 0
    count = [1, 2, 37, 400, 3000, 64][seed]
    documents = random_documents(random, dtype, count)
    documents.append((np.ones(3, dtype), [3], [1]))  # Megatron-LM cannot map an empty .bin
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    write_ours(ours, documents, dtype, multimodal=multimodal, whole=whole)
    write_theirs(theirs, documents, dtype, multimodal=multimodal, whole=whole)
    for suffix in (".bin", ".idx"):
        assert Path(f"{ours}{suffix}").read_bytes() == Path(f"{theirs}{suffix}").read_bytes()
    # Each reader on the other's files.
    assert_reads_alike(theirs, ours, random, multimodal=multimodal)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_files_of_10_000_documents_are_byte_equal(dtype: Any, tmp_path: Path) -> None:
    random = np.random.default_rng(10_000)
    documents = random_documents(random, dtype, 10_000)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    write_ours(ours, documents, dtype, multimodal=False, whole=True)
    write_theirs(theirs, documents, dtype, multimodal=False, whole=True)
    for suffix in (".bin", ".idx"):
        assert Path(f"{ours}{suffix}").read_bytes() == Path(f"{theirs}{suffix}").read_bytes()
    assert_reads_alike(theirs, ours, random, multimodal=False)


@pytest.mark.parametrize(
    "documents",
    [
        [],
        [(np.zeros(0), [], [])],
        [(np.zeros(0), [0], [7])],
        [(np.zeros(0), [0, 0], [1, 2]), (np.zeros(0), [], [])],
    ],
    ids=["no document", "no sequence", "an empty sequence", "several empty ones"],
)
@pytest.mark.parametrize("multimodal", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_files_without_tokens_are_byte_equal(
    documents: list[Document], multimodal: bool, whole: bool, tmp_path: Path
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    documents = [(tokens.astype(np.int32), *rest) for tokens, *rest in documents]
    write_ours(ours, documents, np.int32, multimodal=multimodal, whole=whole)
    write_theirs(theirs, documents, np.int32, multimodal=multimodal, whole=whole)
    for suffix in (".bin", ".idx"):
        assert Path(f"{ours}{suffix}").read_bytes() == Path(f"{theirs}{suffix}").read_bytes()
    sequences = sum(len(lengths) for _, lengths, _ in documents)
    dataset = millrace.IndexedDataset(theirs)  # Megatron-LM cannot open it
    assert (len(dataset), dataset.num_documents, dataset.num_tokens) == (
        sequences,
        len(documents),
        0,
    )


@pytest.mark.parametrize(
    "vocabulary", [None, 1, 255, 256, 50_257, 65_499, 65_500, 65_501, 65_535, 65_536, 10**6]
)
def test_the_dtype_of_a_vocabulary_is_megatrons(vocabulary: int | None) -> None:
    assert millrace.optimal_dtype(vocabulary) == megatron.DType.optimal_dtype(vocabulary)
