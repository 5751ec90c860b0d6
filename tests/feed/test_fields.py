"""The arrays of a batch: only those that are asked for, in the dtype that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from millrace import BlendedDataset, ConfigError, GPTDataset, IndexedDataset
from millrace.feed import BatchForm
from millrace.feed.fields import FIELDS
from millrace.order import Spans

Make = Callable[..., IndexedDataset]


@dataclass(frozen=True)
class Runs:
    """An order in Python: sample k has the first tokens of sequences k and k + 1."""

    num_sequences: int
    count: int

    def __len__(self) -> int:
        return self.num_sequences - 1

    def spans(self, sample_numbers: NDArray[np.int64]) -> Spans:
        sequences = np.stack([sample_numbers, sample_numbers + 1], axis=1).reshape(-1)
        bounds = 2 * np.arange(len(sample_numbers) + 1)
        return Spans(sequences, np.zeros_like(sequences), np.full_like(sequences, 4), bounds)

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "runs"}


def make_datasets(
    make_dataset: Make, dtype: Any = np.uint16, **options: Any
) -> dict[str, GPTDataset | BlendedDataset]:
    """One dataset of each kind: mapped, read by file, an order in Python, blends of these."""
    data = make_dataset([5, 0, 40, 13, 1, 100, 17, 9], dtype=dtype)
    files = IndexedDataset(data.prefix, access="file")
    options = {"sequence_length": 8, **options}
    mapped = GPTDataset(data, seed=1, num_samples=60, **options)
    partial = GPTDataset(data, seed=1, drop_last_partial_sequence=False, **options)
    by_file = GPTDataset(files, seed=2, drop_last_partial_sequence=False, **options)
    long = make_dataset([9] * 20, name="long", dtype=dtype)
    in_python = GPTDataset(long, order=Runs(20, 4), **options)
    core_blend = BlendedDataset([mapped, partial])
    return {
        "mapped": mapped,
        "partial": partial,
        "file": by_file,
        "order in Python": in_python,
        "blend of the core": core_blend,
        "blend": BlendedDataset([mapped, by_file, in_python, core_blend]),
    }


KINDS = ("mapped", "partial", "file", "order in Python", "blend of the core", "blend")
VIEWS: list[dict[str, Any]] = [
    {},
    {"pad_token": 3},
    {"pad_token": -1, "add_extra_token": False},
    {"eod_token": 7, "eod_mask_loss": True, "reset_position_ids": True},
    {"eod_token": 3, "pad_token": 3, "eod_mask_loss": True, "reset_position_ids": True},
    {"eod_token": -1, "pad_token": -1, "reset_position_ids": True, "add_extra_token": False},
    {"eod_token": 200, "pad_token": 2**40, "eod_mask_loss": True, "reset_position_ids": True},
]


def assert_rows(dataset: Any, numbers: NDArray[np.int64], form: BatchForm) -> dict[str, Any]:
    """Compares FIELDS of a batch with those of a batch without a form."""
    expected = dataset.batch(numbers)
    batch: dict[str, Any] = dataset.batch(numbers, form)
    assert tuple(batch) == form.fields
    for name, array in batch.items():
        if name not in FIELDS:
            continue
        if name in ("tokens", "labels"):
            dtype = dataset.file_dtype if form.token_dtype == "file" else form.token_dtype
            np.testing.assert_array_equal(array, expected[name].astype(dtype), strict=True)
        else:
            np.testing.assert_array_equal(array, expected[name], strict=True)
    return batch


# ---- rows ----


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_every_form_has_the_rows_of_a_batch_without_a_form(
    make_dataset: Make, view: dict[str, Any], dtype: Any
) -> None:
    for dataset in make_datasets(make_dataset, dtype, **view).values():
        for numbers in (np.arange(len(dataset)), np.arange(3), np.arange(0)):
            for token_dtype in ("int64", "int32", "file"):
                for share_labels in (False, True):
                    for fields in (
                        FIELDS,
                        ("tokens", "labels"),
                        ("labels",),
                        ("loss_mask", "tokens"),
                        ("position_ids",),
                        ("loss_mask",),
                    ):
                        form = BatchForm(
                            fields=fields, token_dtype=token_dtype, share_labels=share_labels
                        )
                        assert_rows(dataset, numbers, form)


# ---- texts ----


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_the_tokens_without_padding(make_dataset: Make, kind: str) -> None:
    dataset = make_datasets(make_dataset)[kind]
    numbers = np.random.default_rng(0).integers(0, len(dataset), 30)
    batch = dataset.batch(numbers)
    tokens, ends = dataset.texts(numbers)
    assert tokens.dtype == ends.dtype == np.int64
    texts = np.split(tokens, ends[:-1])
    assert len(texts) == 30
    for row, text in enumerate(texts):
        assert len(text) <= 9
        assert np.array_equal(text[:8], batch["tokens"][row])
        assert np.array_equal(text[1:], batch["labels"][row][: len(text) - 1])
    empty, no_ends = dataset.texts([])
    assert (len(empty), len(no_ends), empty.dtype) == (0, 0, np.int64)
    with pytest.raises(IndexError):
        dataset.texts([len(dataset)])


def test_the_text_of_a_partial_sample_is_short(make_dataset: Make) -> None:
    dataset = GPTDataset(
        make_dataset([20]), sequence_length=8, seed=1, drop_last_partial_sequence=False
    )
    tokens, ends = dataset.texts(np.arange(3))
    assert sorted(np.diff(ends, prepend=0).tolist()) == [4, 9, 9]
    assert len(tokens) == 22


def test_a_dataset_without_texts_is_named(make_dataset: Make) -> None:
    @dataclass(frozen=True)
    class Zeros:
        def __len__(self) -> int:
            return 50

        def batch(self, sample_numbers: Any) -> dict[str, NDArray[Any]]:
            zeros = np.zeros((len(sample_numbers), 8), np.int64)
            mask = zeros.astype(np.float32)
            return {"tokens": zeros, "labels": zeros, "loss_mask": mask, "position_ids": zeros}

        def fingerprint(self) -> dict[str, Any]:
            return {}

    gpt = GPTDataset(make_dataset([300]), sequence_length=8, seed=1)
    with pytest.raises(ConfigError, match="Zeros has no method `texts`"):
        BlendedDataset([gpt, Zeros()]).texts(np.arange(20))
