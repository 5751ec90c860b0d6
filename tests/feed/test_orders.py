"""An order of one's own, by public names alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from millrace import BlendedDataset, ConfigError, GPTDataset, IndexedDataset, Loader, ResumeError
from millrace.order import Spans


@dataclass(frozen=True)
class ConstantOffset:
    """Sample k has the tokens of sequence k from a fixed offset on."""

    num_sequences: int
    offset: int
    count: int

    def __len__(self) -> int:
        return self.num_sequences

    def spans(self, sample_numbers: np.ndarray) -> Spans:
        constant = np.ones_like(sample_numbers)
        bounds = np.arange(len(sample_numbers) + 1)
        return Spans(sample_numbers, self.offset * constant, self.count * constant, bounds)

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "constant offset", "offset": self.offset}


@pytest.mark.parametrize("access", ["mmap", "file"])
def test_another_order_blends_with_megatrons(
    make_dataset: Callable[..., IndexedDataset], access: Any
) -> None:
    data = IndexedDataset(make_dataset([30] * 8).prefix, access=access)
    toy = GPTDataset(data, sequence_length=8, order=ConstantOffset(8, 5, 9))
    gpt = GPTDataset(data, sequence_length=8, seed=1)
    blend = BlendedDataset([toy, gpt], [1, 3], 24)
    batch = blend.batch(np.arange(24))
    for row, number in enumerate(blend.dataset_index):
        sample = blend.datasets[number][blend.dataset_sample_index[row]]
        assert np.array_equal(batch["tokens"][row], sample["tokens"])
    assert np.array_equal(toy[2]["labels"], data[2][6:14])
    state = Loader(blend, micro_batch_size=2, consumed_samples=4).state_dict()
    moved = GPTDataset(data, sequence_length=8, order=ConstantOffset(8, 6, 9))
    with pytest.raises(ResumeError, match=r"datasets\[0\].offset: saved 5, now 6"):
        Loader(BlendedDataset([moved, gpt], [1, 3], 24), micro_batch_size=2).load_state_dict(state)


@dataclass(frozen=True)
class Zeros:
    """A dataset that has no token file."""

    dtype: Any = np.int64

    def __len__(self) -> int:
        return 50

    def batch(self, sample_numbers: Any) -> dict[str, np.ndarray]:
        shape = (len(sample_numbers), 8)
        names = {"tokens": self.dtype, "labels": np.int64, "loss_mask": np.float32}
        return {name: np.zeros(shape, dtype) for name, dtype in names.items()} | {
            "position_ids": np.tile(np.arange(8), (len(sample_numbers), 1))
        }

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "zeros"}


def test_a_blend_mixes_any_datasets_of_equal_shape(
    make_dataset: Callable[..., IndexedDataset],
) -> None:
    data = make_dataset([300])
    gpt = GPTDataset(data, sequence_length=8, seed=1)
    masked = GPTDataset(data, sequence_length=8, seed=1, eod_token=3, eod_mask_loss=True)
    blend = BlendedDataset([gpt, Zeros(), masked, BlendedDataset([gpt, Zeros()])])
    batch = blend.batch(np.arange(len(blend)))
    for row, number in enumerate(blend.dataset_index.tolist()):
        sample = blend.datasets[number].batch([blend.dataset_sample_index[row]])
        for name, array in sample.items():
            assert np.array_equal(array[0], batch[name][row])
    for other in (Zeros(np.int32), GPTDataset(data, sequence_length=9, seed=1)):
        with pytest.raises(ConfigError, match=r"dataset 1 .* samples of .*make them equal"):
            BlendedDataset([gpt, other])


@pytest.mark.parametrize(
    ("sequence", "offset", "count", "message"),
    [
        (9, 0, 9, "sequence is 9"),
        (-1, 0, 9, "sequence is -1"),
        (0, 25, 9, "tokens"),
        (0, -1, 9, "tokens"),
        (0, 0, -1, "tokens"),
        (0, 0, 10, "does not fit"),
    ],
)
def test_spans_outside_the_data_are_refused(
    make_dataset: Callable[..., IndexedDataset],
    sequence: int,
    offset: int,
    count: int,
    message: str,
) -> None:
    class Wrong(ConstantOffset):
        def spans(self, sample_numbers: np.ndarray) -> Spans:
            one = np.ones_like(sample_numbers)
            bounds = np.arange(len(one) + 1)
            return Spans(sequence * one, offset * one, count * one, bounds)

    dataset = GPTDataset(make_dataset([30] * 8), sequence_length=8, order=Wrong(8, 0, 9))
    with pytest.raises(ValueError, match=message):
        dataset.batch([0])
    with pytest.raises(ConfigError, match="belong to Megatron-LM's order"):
        GPTDataset(make_dataset([30]), sequence_length=8, seed=1, order=Wrong(8, 0, 9))
    with pytest.raises(ConfigError, match="the seed is None"):
        GPTDataset(make_dataset([30]), sequence_length=8)


def test_spans_say_where_the_tokens_of_a_sample_are(
    make_dataset: Callable[..., IndexedDataset],
) -> None:
    data = make_dataset([5, 0, 40, 13, 1, 100])
    dataset = GPTDataset(data, sequence_length=16, seed=2, num_samples=30)
    numbers = np.arange(len(dataset))
    spans = dataset.spans(numbers)
    batch = dataset.batch(numbers)
    for number in numbers:
        rows = range(*spans.bounds[number : number + 2].tolist())
        parts = [data.get(*(int(column[row]) for column in spans[:3])) for row in rows]
        assert np.array_equal(np.concatenate(parts)[:-1], batch["tokens"][number])
    with pytest.raises(IndexError):
        dataset.spans([len(dataset)])
