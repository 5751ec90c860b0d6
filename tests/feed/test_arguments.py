"""Numbers, flags and arrays from callers: any exact type gives the same result, others an error."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from millrace import (
    ConfigError,
    DatasetConfig,
    IndexedDataset,
    build_datasets,
    samples_per_dataset,
    split_ranges,
)
from millrace.feed import BlendedDataset, GPTDataset, Loader
from millrace.order import blend, plan_gpt

Make = Callable[..., IndexedDataset]
INTEGERS = [np.dtype(code) for code in "bBhHiIlLqQ"]
CONFIG: dict[str, Any] = {
    "sequence_length": 8,
    "seed": 1,
    "num_samples": (10, 1, 1),
    "blend": (["a"], None),
    "split": "1",
}


def gpt(data: IndexedDataset, **options: Any) -> GPTDataset:
    return GPTDataset(data, **{"sequence_length": 8, "seed": 3, **options})


@pytest.fixture
def data(make_dataset: Make) -> IndexedDataset:
    return make_dataset([30, 0, 50, 7, 101])


@pytest.fixture
def dataset(data: IndexedDataset) -> GPTDataset:
    return gpt(data, num_samples=50)


# ---- the same result for all integer types ----


DATASET = {"sequence_length": 8, "seed": 3, "num_samples": 100, "eod_token": 5, "pad_token": 7}
DATASET |= {"reset_position_ids": True, "drop_last_partial_sequence": False}
LOADER = {"micro_batch_size": 3, "data_parallel_rank": 1, "data_parallel_size": 2, "threads": 2}
LOADER |= {"consumed_samples": 12, "drop_last": True, "vocab_size": 100, "prefetch": 2}


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(draw=st.data())
def test_integer_types_do_not_change_a_run(data: IndexedDataset, draw: st.DataObject) -> None:
    def any_type(value: int) -> Any:
        is_flag = isinstance(value, bool)
        return (np.bool_ if is_flag else draw.draw(st.sampled_from(INTEGERS)).type)(value)

    def run(convert: Callable[[int], Any]) -> tuple[Any, ...]:
        options, others = (
            {name: convert(value) for name, value in values.items()} for values in (DATASET, LOADER)
        )
        dataset = GPTDataset(data, **options, sequences=(convert(0), convert(4)))
        with Loader(dataset, **others) as loader:
            batch = next(loader)
        return json.dumps(loader.state_dict()), {k: v.tolist() for k, v in batch.items()}

    assert run(any_type) == run(lambda value: value)


# ---- refusals when an object is made ----


@pytest.mark.parametrize("value", [2.0, True, None])
def test_invalid_counts_are_refused(data: IndexedDataset, dataset: GPTDataset, value: Any) -> None:
    def loader(_: Any, **options: Any) -> Loader:
        return Loader(dataset, **{"micro_batch_size": 2, **options})

    optional = ("num_samples", "eod_token", "pad_token", "prefetch", "vocab_size")
    gpt_counts = "sequence_length seed num_samples eod_token pad_token"
    ranks = "micro_batch_size data_parallel_rank data_parallel_size consumed_samples"
    calls: list[tuple[str, Callable[[], Any]]] = [
        (name, partial(make, data, **{name: value}))
        for make, names in ((gpt, gpt_counts), (loader, f"{ranks} prefetch threads vocab_size"))
        for name in names.split()
    ]
    calls += [
        (r"the range of sequences\[1\]", lambda: gpt(data, sequences=(0, value))),
        ("the sample number", lambda: dataset[value]),
        ("size", lambda: blend([1.0], value)),
        ("samples", lambda: samples_per_dataset([1.0], value)),
        ("num_sequences", lambda: split_ranges(value, "1,1")),
        ("num_tokens_per_epoch", lambda: plan_gpt(value, 5, 8)),
        ("sequence_length", lambda: plan_gpt(100, 5, value)),
    ]
    for name, call in calls:
        if value is not None or name not in optional:
            with pytest.raises(ConfigError, match=f"{name} must be a whole number, not "):
                raise AssertionError(f"{name} gave {call()}")


@pytest.mark.parametrize("value", [1, None])
def test_flags_must_be_bools(data: IndexedDataset, dataset: GPTDataset, value: Any) -> None:
    loader = partial(Loader, dataset, micro_batch_size=1)
    gpt_flags = "add_extra_token reset_position_ids eod_mask_loss drop_last_partial_sequence"
    config_flags = "multiple_validation_sets full_validation trust_cache"
    for make, flags in (
        (partial(gpt, data, eod_token=1), gpt_flags),
        (loader, "drop_last"),
        (partial(DatasetConfig, **CONFIG), config_flags),
    ):
        for name in flags.split():
            with pytest.raises(ConfigError, match=f"{name} must be True or False, not .*"):
                make(**{name: value})


@pytest.mark.parametrize(
    "sequences",
    [(5, 2), (-1, 3), (0, 6), (6, 6), (0, 2**63), (0,), (0, 1, 2), 5, "01", (0, 10**5000)],
)
def test_invalid_ranges_are_refused(data: IndexedDataset, sequences: Any) -> None:
    with pytest.raises(ConfigError, match="the range of sequences ") as caught:
        gpt(data, sequences=sequences)
    assert len(str(caught.value)) < 1000


def test_invalid_sample_numbers_are_not_reported_as_damage(dataset: GPTDataset) -> None:
    wrong: list[Any] = [[0.5], [[1]], [[0], [0, 1]], "1", [None], 5]
    wrong += [np.array([2**63], np.uint64), np.zeros(3)]
    for numbers in wrong:
        for source in (dataset, BlendedDataset([dataset], [1.0], 20)):
            with pytest.raises(ConfigError, match="sample numbers"):
                source.batch(numbers)


@pytest.mark.parametrize("limit", ["1", True, -1, float("nan"), [1], 1j])
def test_the_wait_limit_is_a_number_of_seconds(
    data: IndexedDataset, tmp_path: Path, limit: Any
) -> None:
    options = {"blend": ([data.prefix], None), "cache": tmp_path / "cache"}
    config = DatasetConfig(**CONFIG | options)
    with pytest.raises(ConfigError, match="wait_limit must be"):
        build_datasets(config, wait_limit=limit)
    assert build_datasets(config, wait_limit=np.float32(5)).train is not None
