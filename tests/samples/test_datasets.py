"""Datasets: options, refusals, and damage that the core must detect."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace import BlendedDataset, ConfigError, DataError, GPTDataset, IndexedDataset
from millrace.samples import TokenBatch
from tests.conftest import write_documents
from tests.store.pairs import link_pairs, run

Make = Callable[..., IndexedDataset]


def test_negative_and_out_of_range_numbers(make_dataset: Make) -> None:
    dataset = GPTDataset(make_dataset([100]), sequence_length=8, seed=0)
    assert np.array_equal(dataset[-1]["tokens"], dataset[len(dataset) - 1]["tokens"])
    for number in (len(dataset), -len(dataset) - 1):
        with pytest.raises(IndexError):
            dataset[number]
    with pytest.raises(IndexError, match=r"from 0 to 12 .* there are 12, from 0 on"):
        dataset.batch([0, 12])
    with pytest.raises(ConfigError, match="a whole number"):
        dataset.batch([0.5])
    assert dataset.batch([])["tokens"].shape == (0, 8)


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([], {}, "the split holds 0 tokens"),
        ([0, 0], {}, "the split holds 0 tokens"),
        ([8], {}, "leaves no sample"),
        # Megatron-LM adds epochs of zero tokens for ever.
        ([50], {"sequences": (1, 1), "num_samples": 5}, "sequences 1 to 1: the split holds 0 tok"),
        ([50], {"sequences": (0, 2)}, "the file has 1"),
        ([50], {"sequence_length": 0}, r"sequence_length must be .*, not 0"),
        ([50], {"num_samples": -1}, r"num_samples must be .*, not -1"),
        ([50], {"seed": -1}, r"the seed must be .*, not -1"),
        ([50], {"seed": 2**32}, r"the seed must be .*, not 4294967296"),
        ([50], {"eod_mask_loss": True}, "give eod_token"),
    ],
)
def test_options_without_an_order_are_refused(
    make_dataset: Make, lengths: list[int], options: dict, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        GPTDataset(make_dataset(lengths), **{"sequence_length": 8, "seed": 0, **options})


def test_float_tokens_are_refused(make_dataset: Make) -> None:
    with pytest.raises(DataError, match="float32; token ids are integers"):
        GPTDataset(make_dataset([50], dtype=np.float32), sequence_length=8, seed=0)


def test_a_damaged_length_is_detected_when_the_order_is_made(make_dataset: Make) -> None:
    prefix = make_dataset([50, 60, 70]).prefix
    with open(f"{prefix}.idx", "r+b") as file:  # the length of sequence 1
        file.seek(34 + 4)
        file.write(b"\xff\xff\xff\xff")
    with pytest.raises(DataError, match="sequence 1 has the length -1"):
        GPTDataset(IndexedDataset(prefix), sequence_length=8, seed=0)


# ---- blends ----


@pytest.fixture
def parts(make_dataset: Make) -> list[GPTDataset]:
    lengths = [300, 20, 90]
    return [
        GPTDataset(make_dataset([length], name=f"part{i}"), sequence_length=8, seed=i)
        for i, length in enumerate(lengths)
    ]


def test_parts_of_a_blend_name_their_stores_where_some_are_not_drawn(parts: list[Any]) -> None:
    blend = BlendedDataset(parts)
    for numbers in ([0], np.flatnonzero(blend.dataset_index != 0)):
        batch = blend.tokens(numbers)
        drawn = np.repeat(blend.dataset_index[numbers], np.diff(batch.part_bounds))
        assert batch.part_source.tolist() == drawn.tolist()
    assert {*drawn.tolist()} == {1, 2}


@pytest.mark.parametrize(
    ("weights", "size", "message"),
    [
        ([1, 1], 100, r"(?s)dataset 1 .*has 2, 50 are drawn, 48 short"),
        ([1.0, 0.0], 10, "weight of dataset 1 is 0.0"),
        ([float("nan"), 1.0], 10, "weights are .nan, 1.0.; they must be finite"),
        ([1.0], 10, "1 weights for 2 datasets"),
        ([1, 1], None, "needs a size"),
    ],
)
def test_invalid_weights_are_refused(
    parts: list[GPTDataset], weights: Any, size: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        BlendedDataset(parts[:2], weights, size)


def test_invalid_blends_are_refused(parts: list[GPTDataset], make_dataset: Make) -> None:
    with pytest.raises(ConfigError, match="at least one dataset"):
        BlendedDataset([])
    other = GPTDataset(make_dataset([300], name="other"), sequence_length=9, seed=0)
    with pytest.raises(ConfigError, match="make them equal"):
        BlendedDataset([parts[0], other])


# ---- descriptors, and truncated files ----

_BLEND_OF_600 = """
import os, resource, sys, numpy as np
import millrace
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
prefixes = [f"{sys.argv[1]}/data-{number}" for number in range(600)]
config = millrace.DatasetConfig(
    sequence_length=8, seed=1, num_samples=(3000, 0, 0), blend_per_split=[(prefixes, [1.0] * 600),
    None, None], cache=sys.argv[1] + "/cache", access=sys.argv[2])
for _ in range(2):  # built, then from the cache
    datasets = millrace.build_datasets(config)
    batch = datasets.train.batch(np.arange(len(datasets.train)))
    print(len(batch["tokens"]), len(os.listdir("/proc/self/fd")) < 700)
"""


@pytest.mark.parametrize("access", ["mmap", "file"])
def test_a_blend_of_600_needs_no_more_than_1024_descriptors(tmp_path: Path, access: str) -> None:
    write_documents(tmp_path / "data-0", [np.arange(50)])
    link_pairs(tmp_path / "data", 600)
    assert run(_BLEND_OF_600, tmp_path, access).stdout == "3000 True\n" * 2


def test_a_blend_asks_other_classes_and_objects_for_their_own_batches(make_dataset: Make) -> None:
    class Reversed(GPTDataset):
        def batch(self, sample_numbers: Any, form: Any = None) -> Any:
            batch = super().batch(sample_numbers, form)
            return {name: array[:, ::-1].copy() for name, array in batch.items()}

        def tokens(self, sample_numbers: Any) -> TokenBatch:
            batch = super().tokens(sample_numbers)
            return replace(batch, tokens=batch.tokens + 1000)

    class Delegating:
        """A wrapper that changes two methods and has all else of the dataset in it."""

        def __init__(self, dataset: GPTDataset) -> None:
            self.dataset = dataset

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return getattr(self.dataset, name)

        def __len__(self) -> int:
            return len(self.dataset)

        def batch(self, sample_numbers: Any, form: Any = None) -> Any:
            return self.dataset.batch(sample_numbers, form)

        def tokens(self, sample_numbers: Any) -> TokenBatch:
            batch = self.dataset.tokens(sample_numbers)
            return replace(batch, tokens=batch.tokens + 1000)

    data = make_dataset([2000] * 5)
    parts: list[Any] = [kind(data, sequence_length=8, seed=1) for kind in (GPTDataset, Reversed)]
    parts.append(Delegating(parts[1]))
    parts.append(GPTDataset(data, sequence_length=8, seed=1))
    parts[3].batch, parts[3].tokens = parts[1].batch, parts[1].tokens
    blend = BlendedDataset(parts, [1] * 4, 20)
    numbers = np.arange(20)
    batch, tokens = blend.batch(numbers), blend.tokens(numbers)
    of, at = blend.dataset_index, blend.dataset_sample_index
    for number in numbers.tolist():
        part = parts[of[number]]
        assert np.array_equal(batch["tokens"][number], part.batch([at[number]])["tokens"][0])
        expected = part.tokens([at[number]]).tokens
        assert np.array_equal(np.split(tokens.tokens, tokens.ends)[number], expected)
