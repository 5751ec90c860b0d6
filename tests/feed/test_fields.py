"""The arrays of a batch: only those that are asked for, in the dtype that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from millrace import BlendedDataset, ConfigError, GPTDataset, IndexedDataset
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


def make_datasets(make_dataset: Make, **options: Any) -> dict[str, GPTDataset | BlendedDataset]:
    """One dataset of each kind: mapped, read by file, an order in Python, blends of these."""
    data = make_dataset([5, 0, 40, 13, 1, 100, 17, 9])
    files = IndexedDataset(data.prefix, access="file")
    options = {"sequence_length": 8, **options}
    mapped = GPTDataset(data, seed=1, num_samples=60, **options)
    by_file = GPTDataset(files, seed=2, num_samples=60, **options)
    long = IndexedDataset(make_dataset([9] * 20, name="long").prefix)
    in_python = GPTDataset(long, order=Runs(20, 4), **options)
    core_blend = BlendedDataset([mapped, mapped], [1, 2], 50)
    return {
        "mapped": mapped,
        "file": by_file,
        "order in Python": in_python,
        "blend of the core": core_blend,
        "blend": BlendedDataset([mapped, by_file, in_python, core_blend], [1, 1, 0.3, 1], 40),
    }


KINDS = ("mapped", "file", "order in Python", "blend of the core", "blend")


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
        assert len(text) in (8, 9)
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
