"""A stranger's order in a run: named in a file, with arrays in the cache folder, resumed."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace import ConfigError, DatasetConfig, IndexedDatasetBuilder, Loader, build_datasets
from millrace.cli import main
from millrace.jobs import index
from millrace.order import OrderInputs, Spans
from millrace.testing import assert_resumes

S = 8
NAME = "tests.strangers.test_order:Windows"


class WindowOrder:
    """Sample k is window k of the index: (sequence, offset)."""

    def __init__(self, plan: "Windows", seed: int, arrays: Any) -> None:
        self.plan, self.seed, self.arrays = plan, seed, arrays

    def __len__(self) -> int:
        return self.plan.num_samples

    def spans(self, sample_numbers: np.ndarray) -> Spans:
        rows = self.arrays.value["window_index"][sample_numbers]
        count = len(rows)
        return Spans(rows[:, 0], rows[:, 1], np.full(count, S + 1), np.arange(count + 1))

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "windows", "seed": self.seed, "num_samples": self.plan.num_samples}


@dataclass(frozen=True)
class Windows:
    """Windows that never leave a document, in a random order: an `OrderPlan`."""

    num_samples: int

    @classmethod
    def of(cls, inputs: OrderInputs) -> "Windows":
        start, stop = inputs.sequences
        return cls(int(np.sum(inputs.lengths[start:stop] // (inputs.sequence_length + 1))))

    def arrays(self, inputs: OrderInputs) -> Mapping[str, Any]:
        return {"window_index": (np.int64, (self.num_samples, 2))}

    def build(self, inputs: OrderInputs) -> Mapping[str, np.ndarray]:
        length = inputs.sequence_length + 1
        windows = [
            (sequence, offset)
            for sequence in range(*inputs.sequences)
            for offset in range(0, int(inputs.lengths[sequence]) - length + 1, length)
        ]
        order = np.random.default_rng(inputs.seed).permutation(len(windows))
        return {"window_index": np.array(windows, np.int64)[order]}

    def load(self, inputs: OrderInputs, arrays: Any) -> WindowOrder:
        return WindowOrder(self, inputs.seed, arrays)


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    """Token files whose documents hold consecutive numbers."""
    names = [str(tmp_path / name) for name in "ab"]
    for first, name in enumerate(names):
        with IndexedDatasetBuilder(name, np.uint16) as builder:
            for length in range(40):
                builder.add_document(np.arange(first, first + length))
    return names


def config_of(prefixes: list[str], **options: Any) -> DatasetConfig:
    common = {"sequence_length": S, "seed": 5, "num_samples": (None,) * 3, "order": NAME}
    return DatasetConfig(**{**common, "blend": (prefixes, None), "split": "8,1,1", **options})


def test_a_file_names_the_order_and_the_cache_keeps_its_arrays(
    prefixes: list[str], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    (tmp_path / "run.yaml").write_text(
        f"data-path: {json.dumps(prefixes)}\nsplit: 8,1,1\nseq-length: {S}\nseed: 5\n"
        f"num-samples: [none, none, none]\norder: {NAME}\n"
    )
    assert main(["index", str(tmp_path / "run.yaml"), "--cache", str(cache)]) == 0
    assert len(list(cache.glob("*-window_index.npy"))) == 3
    assert not list(cache.glob("*-shuffle_index.npy"))

    for order in (NAME, Windows):
        config = config_of(prefixes, order=order, cache=cache, trust_cache=True)
        train = build_datasets(config).train
        assert train is not None
        tokens = train.batch(np.arange(len(train)))["tokens"]
        assert np.all(np.diff(tokens, axis=1) == 1)  # no window leaves its document
        assert len(train) == 2 * sum(length // (S + 1) for length in range(32))
        memory = build_datasets(config_of(prefixes, order=order)).train
        assert memory is not None
        np.testing.assert_array_equal(tokens, memory.batch(np.arange(len(train)))["tokens"])
        make = partial(Loader, train, micro_batch_size=9)
        assert assert_resumes(make, steps_after_resume=3) == len(train) // 9
    other = build_datasets(config_of(prefixes, order=None, cache=cache)).train
    assert other is not None
    assert other.fingerprint() != train.fingerprint()


@dataclass(frozen=True)
class ArrayPlan(Windows):
    size: Any = None

    @classmethod
    def of(cls, inputs: OrderInputs) -> "ArrayPlan":
        return cls(5, np.array([1]))


@dataclass(frozen=True)
class WrongPlan(Windows):
    @classmethod
    def of(cls, inputs: OrderInputs) -> "WrongPlan":
        return cls(5)


@dataclass(frozen=True)
class NamedAsBlends(Windows):
    def arrays(self, inputs: OrderInputs) -> Mapping[str, Any]:
        return {"dataset_index": (np.int64, (self.num_samples,))}

    of = classmethod(lambda cls, inputs: cls(5))  # type: ignore[assignment]


class NoPlan:
    pass


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("tests.strangers.test_order:Nothing", "order .*Nothing.* cannot be imported"),
        ("nowhere:Windows", "order .*nowhere:Windows"),
        ("Windows", "order 'Windows'"),
        (5, "order must be .* not 5"),
        (lambda inputs: Windows(5), "order must be .* not <function"),
        (NoPlan, "order .*NoPlan has no method of, arrays, build, load"),
        (ArrayPlan, r"a, sequences 0 to 32: .*ArrayPlan .*JSON.*array\(\[1\]\)"),
        (NamedAsBlends, "array of NamedAsBlends .*dataset_index"),
        (WrongPlan, r"a: WrongPlan .*\(5, 2\)"),
    ],
)
def test_what_is_no_order_is_refused(prefixes: list[str], order: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_datasets(config_of(prefixes, order=order))


def test_a_plan_of_too_few_samples_is_refused(prefixes: list[str]) -> None:
    config = config_of(prefixes[:1], num_samples=(43, None, None))
    with pytest.raises(ConfigError, match=r"train split: .*num_samples of Windows .*43.* 42"):
        build_datasets(config)


def test_megatrons_cache_holds_no_other_order(prefixes: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"order is .*Windows"):
        index(config_of(prefixes), megatron_cache_folder=tmp_path / "m", tokenizer={})
    assert not (tmp_path / "m").exists()
