"""Small frozen results, which hold the order to Megatron-LM's where the oracle is not installed.

megatron-core 0.16.1 wrote the arrays; tests/oracle compares many more with it.
"""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import millrace
from millrace import _native
from millrace.order import blend, blend_exhaustively, build_gpt_indices, plan_gpt
from tests.kernels import reference

LENGTHS = np.array([20, 50, 60, 30, 100, 5], dtype=np.int32)
S = 30


def sha256(array: NDArray[np.generic]) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


@pytest.mark.parametrize("module", [_native, reference])
@pytest.mark.parametrize("extra", [False, True])
def test_the_sample_index_of_documents_in_order(module, extra: bool) -> None:
    """The rows are from an early description of the order.

    Every sample starts inside a document, so the extra token makes no difference.
    """
    rows = module.sample_index(
        LENGTHS, np.arange(6, dtype=np.int32), S, 8, add_extra_token=extra
    ).tolist()
    starts = [(0, 0), (1, 10), (1, 40), (2, 20), (2, 50), (3, 20), (4, 20), (4, 50), (4, 80)]
    assert [tuple(row) for row in rows] == starts


@pytest.mark.parametrize("module", [_native, reference])
def test_a_start_between_documents_depends_on_the_extra_token(module) -> None:
    lengths, documents = np.full(3, S, np.int32), np.arange(3, dtype=np.int32)
    with_extra = module.sample_index(lengths, documents, S, 2, add_extra_token=True)
    assert with_extra.tolist() == [[0, 0], [1, 0], [2, 0]]
    without = module.sample_index(lengths, documents, S, 2, add_extra_token=False)
    assert without.tolist() == [[0, 0], [0, S], [1, S]]


def test_two_epochs_with_the_last_one_shuffled_separately() -> None:
    plan = plan_gpt(265, 12, S)
    assert (plan.num_epochs, plan.num_samples) == (2, 17)
    assert plan.num_samples_before_final_epoch == 8
    indices = build_gpt_indices(LENGTHS, (0, 6), plan, seed=1234)
    assert indices.document_index.tolist() == [2, 1, 5, 0, 4, 3, 0, 4, 3, 2, 5, 1]
    # fmt: off
    assert indices.sample_index.tolist() == [
        [0, 0], [0, 30], [1, 0], [1, 30], [3, 5], [4, 15], [4, 45], [4, 75], [5, 5],
        [6, 5], [7, 15], [7, 45], [7, 75], [8, 5], [9, 5], [9, 35], [11, 0], [11, 30],
    ]
    assert indices.shuffle_index.tolist() == [
        1, 0, 3, 5, 2, 7, 4, 6, 15, 14, 10, 11, 9, 16, 13, 12, 8,
    ]
    # fmt: on


def test_one_epoch_without_the_extra_token_with_a_partial_last_sample() -> None:
    plan = plan_gpt(265, None, S, add_extra_token=False, drop_last_partial_sequence=False)
    indices = build_gpt_indices(LENGTHS, (0, 6), plan, seed=1234)
    assert indices.document_index.tolist() == [2, 1, 5, 0, 4, 3]
    # fmt: off
    assert indices.sample_index.tolist() == [
        [0, 0], [0, 30], [0, 60], [1, 30], [3, 5], [4, 15], [4, 45], [4, 75], [5, 5], [5, 30],
    ]
    # fmt: on
    assert indices.shuffle_index.tolist() == [6, 4, 0, 5, 3, 2, 8, 7, 1]


def test_indices_over_many_blocks_of_the_generator() -> None:
    lengths = (np.arange(1000) * 7919 % 211).astype(np.int32)
    plan = plan_gpt(int(lengths[100:900].sum()), 3000, 64)
    indices = build_gpt_indices(lengths, (100, 900), plan, seed=2**32 - 1)
    assert [
        (array.shape, str(array.dtype), sha256(array))
        for array in (indices.document_index, indices.sample_index, indices.shuffle_index)
    ] == [
        ((2400,), "int32", "b3c77ac6cd82c001732aff5e1a97b93ce3b0cbd6b471a98da574f0b48ebc7dad"),
        ((3927, 2), "int32", "823bc8a52f9398b77b84926c61992f149b08cd3f11ba74e51de21ad2a4b89091"),
        ((3926,), "uint32", "d69e1c8bea9aa7495f344edba446d31e9cc2029a063b2888d6d03972e2bf1a9a"),
    ]


def test_a_blend_by_weight() -> None:
    dataset_index, dataset_sample_index = blend([3.0, 1.0, 1.0, 5.0], 20)
    # fmt: off
    assert dataset_index.tolist() == [
        3, 0, 1, 3, 2, 0, 3, 3, 0, 3, 0, 3, 1, 3, 2, 0, 3, 3, 0, 3,
    ]
    assert dataset_sample_index.tolist() == [
        0, 0, 0, 1, 0, 1, 2, 3, 2, 4, 3, 5, 1, 6, 1, 4, 7, 8, 5, 9,
    ]
    # fmt: on
    dataset_index, dataset_sample_index = blend([1 / k for k in range(1, 41)], 5000)
    assert (str(dataset_index.dtype), str(dataset_sample_index.dtype)) == ("int16", "int64")
    assert [sha256(dataset_index), sha256(dataset_sample_index)] == [
        "d6a6c3071d160c7b50aaefa1685f331f9aa961b1fd683bb94def557043f02f0c",
        "c9e75bed3a6a509d171d5c64ee0392fe55a4948cc679b70c408d2ef90a7e860d",
    ]


def test_an_exhaustive_blend() -> None:
    dataset_index, dataset_sample_index = blend_exhaustively([4, 1, 7])
    assert dataset_index.tolist() == [2, 0, 2, 1, 2, 0, 2, 0, 2, 2, 0, 2]
    assert dataset_sample_index.tolist() == [0, 0, 1, 0, 2, 1, 3, 2, 4, 5, 3, 6]


def test_the_bytes_of_a_small_file(tmp_path: Path) -> None:
    with millrace.IndexedDatasetBuilder(tmp_path / "data", np.uint16) as builder:
        builder.add_document([1, 2, 500], [2, 1])
        builder.add_document([])
    assert (tmp_path / "data.bin").read_bytes() == bytes.fromhex("01000200f401")
    assert (tmp_path / "data.idx").read_bytes() == (
        b"MMIDIDX\x00\x00"
        + (1).to_bytes(8, "little")  # version
        + bytes([8])  # uint16
        + (3).to_bytes(8, "little")  # sequences
        + (3).to_bytes(8, "little")  # document entries
        + np.array([2, 1, 0], "<i4").tobytes()
        + np.array([0, 4, 6], "<i8").tobytes()
        + np.array([0, 2, 3], "<i8").tobytes()
    )


def test_the_samples_of_a_small_file(tmp_path: Path) -> None:
    with millrace.IndexedDatasetBuilder(tmp_path / "data", np.uint16) as builder:
        builder.add_document(np.arange(1, 266), LENGTHS.tolist())
    dataset = millrace.IndexedDataset(tmp_path / "data")
    samples = millrace.GPTDataset(dataset, sequence_length=S, seed=1234, num_samples=12)
    text = np.concatenate([dataset[number] for number in [2, 1, 5, 0, 4, 3, 0, 4, 3, 2, 5, 1]])
    batch = samples.batch([0, 1, 8])
    for row, start in enumerate((1 * S, 0 * S, 15 * S)):  # by the shuffle index above
        np.testing.assert_array_equal(batch["tokens"][row], text[start : start + S])
        np.testing.assert_array_equal(batch["labels"][row], text[start + 1 : start + 1 + S])
