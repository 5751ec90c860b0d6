"""An order of one's own, by public names alone."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from millrace import ConfigError, DataError, IndexedDataset, ResumeError, ViewChangeWarning
from millrace.feed import BlendedDataset, GPTDataset, Loader
from millrace.order import Spans
from tests.feed.helpers import Numbers

Make = Callable[..., IndexedDataset]
ACCESS = pytest.mark.parametrize("access", ["mmap", "file"])


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


@ACCESS
def test_another_order_blends_with_megatrons(make_dataset: Make, access: Any) -> None:
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
    longer = GPTDataset(data, sequence_length=16, order=toy.order)
    with pytest.warns(ViewChangeWarning, match=r"view\.sequence_length: saved 8, now 16"):
        Loader(longer, micro_batch_size=2).load_state_dict(
            Loader(toy, micro_batch_size=2).state_dict()
        )
    moved = GPTDataset(data, sequence_length=8, order=ConstantOffset(8, 6, 9))
    with pytest.raises(ResumeError, match=r"datasets\[0\].offset: saved 5, now 6"):
        Loader(BlendedDataset([moved, gpt], [1, 3], 24), micro_batch_size=2).load_state_dict(state)


@dataclass(frozen=True)
class Changed(ConstantOffset):
    """Spans that are changed by a function."""

    change: Callable[[Spans], Spans]

    def spans(self, sample_numbers: np.ndarray) -> Spans:
        return self.change(super().spans(sample_numbers))


def changed(
    make_dataset: Make, change: Callable[[Spans], Spans], access: Any = "mmap"
) -> GPTDataset:
    data = IndexedDataset(make_dataset([30] * 8).prefix, access=access)
    return GPTDataset(data, sequence_length=8, order=Changed(8, 0, 9, change))


def test_spans_outside_the_data_are_refused(make_dataset: Make) -> None:
    for span, message in (
        ((9, 0, 9), "sequence is 9"),
        ((-1, 0, 9), "sequence is -1"),
        ((0, 25, 9), "tokens"),
        ((0, -1, 9), "tokens"),
        ((0, 0, -1), "tokens"),
        ((0, 0, 10), "not fit"),
    ):
        columns = [np.array([value]) for value in span]
        dataset = changed(make_dataset, lambda spans: Spans(*columns, spans.bounds))  # noqa: B023
        with pytest.raises(ValueError, match=message):
            dataset.batch([0])


@ACCESS
@pytest.mark.parametrize(
    "bounds", [[1, 2, 3], [-1, 1, 2], [0, 1], [0, 1, 2, 2], [0, 1, 1], [0, -1, 2], [0.0, 1.0, 2.0]]
)
def test_bounds_of_other_spans_are_refused(
    make_dataset: Make, access: Any, bounds: list[Any]
) -> None:
    dataset = changed(make_dataset, lambda spans: spans._replace(bounds=np.array(bounds)), access)
    for read in (dataset.batch, dataset.spans):
        with pytest.raises(ConfigError, match="bounds"):
            read([2, 3])


def test_spans_may_be_lists_of_any_integers(make_dataset: Make) -> None:
    lists = changed(make_dataset, lambda spans: Spans(*(column.tolist() for column in spans)))
    arrays = changed(make_dataset, lambda spans: spans)
    assert np.array_equal(lists.batch([2, 3])["labels"], arrays.batch([2, 3])["labels"])


def test_spans_say_where_the_tokens_of_a_sample_are(make_dataset: Make) -> None:
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


def test_options_of_the_order_that_is_not_given_are_refused(make_dataset: Make) -> None:
    gpt = partial(GPTDataset, make_dataset([30]), sequence_length=8)
    options = {"seed": 1, "sequences": np.array([0, 5]), "drop_last_partial_sequence": False}
    for name, value in options.items():
        with pytest.raises(ConfigError, match="belong to Megatron-LM's order"):
            gpt(order=ConstantOffset(1, 0, 9), **{name: value})
    with pytest.raises(ConfigError, match=r"the seed must be .*, not None"):
        gpt()


@pytest.mark.parametrize(
    "batch",
    [
        {},
        {"other": np.zeros((10, 8), np.int64)},
        {"tokens": np.zeros((10, 8), np.float64)},
        {"tokens": np.zeros((1, 8), np.int64)},
        {"tokens": np.zeros((10, 1), np.int64)},
    ],
)
def test_a_blend_refuses_a_batch_of_another_form(batch: dict[str, np.ndarray]) -> None:
    class Tokens(Numbers):
        def batch(self, sample_numbers: Any) -> dict[str, np.ndarray]:
            return {"tokens": np.zeros((len(sample_numbers), 8), np.int64)}

    class Changing(Tokens):
        def batch(self, sample_numbers: Any) -> dict[str, np.ndarray]:
            return batch if len(sample_numbers) > 0 else super().batch(sample_numbers)

    with pytest.raises(DataError, match=r"Changing returned .* needed"):
        BlendedDataset([Tokens(), Changing()]).batch(np.arange(20))
