"""Counters for dashboards: of each step, by source, in any order."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace import (
    BlendedDataset,
    DatasetConfig,
    GPTDataset,
    IndexedDataset,
    InstantConfig,
    Loader,
    TransformedDataset,
    build_datasets,
    write_loss_ranges,
)
from millrace.feed import ExternalBatches, SampleOptions, StreamDataset, TokenBatch
from tests.conftest import write_documents


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    for number, name in enumerate(("a", "b")):
        write_documents(tmp_path / name, [np.arange(90) + 1000 * number] * 10)
        write_loss_ranges(tmp_path / name, [(n, 0, 45) for n in range(10)])
    return [str(tmp_path / name) for name in ("a", "b")]


def datasets_of(prefixes: list[str]) -> dict[str, Any]:
    """A dataset in each order, whose tokens from 1000 on are those of the second source."""
    own: dict[str, Any] = {"sequence_length": 8, "seed": 1, "loss_ranges": "apply"}
    gpt = DatasetConfig(blend=(prefixes, [0.3, 0.7]), split="1,0,0", num_samples=(400, 0, 0), **own)
    sources = {"a": {"prefix": prefixes[0], "weight": 3}, "b": {"prefix": prefixes[1], "weight": 7}}
    phases = [{"until": 32}, {"weights": {"a": 7}}]
    instant = InstantConfig(sources=sources, phases=phases, **own, skips=[(8, 24)], mix_window=2)
    return {
        "gpt": build_datasets(gpt).train,
        "instant": build_datasets(instant).train,
        "transformed": TransformedDataset(build_datasets(instant).train, []),
    }


@pytest.mark.parametrize("name", ["gpt", "instant", "transformed"])
@pytest.mark.parametrize("prefetch", [0, 4])
def test_counters_are_those_of_the_batches(name: str, prefetch: int, prefixes: list[str]) -> None:
    loader = Loader(datasets_of(prefixes)[name], micro_batch_size=8, prefetch=prefetch)
    other = Loader(
        datasets_of(prefixes)[name], micro_batch_size=8, token_dtype="int32", fields=("tokens",)
    )
    names = prefixes if name == "gpt" else ["a", "b"]
    assert loader.metrics() == {}
    drawn = dict.fromkeys(names, 0)
    for step in range(40):
        batch = next(loader)
        metrics = loader.metrics()
        assert json.loads(json.dumps(metrics)) == metrics
        assert (metrics["consumed_samples"], metrics["tokens"]) == (8 * step + 8, 64)
        assert metrics["trained_share"] == pytest.approx(batch["loss_mask"].mean())
        for number, source in enumerate(names):
            count = int((batch["tokens"][:, 0] // 1000 == number).sum())
            assert metrics.get(f"tokens/{source}", 0) == count * 8
            drawn[source] += count * 8
            if count > 0:
                # In the instant order, an epoch has (900 - 16) // 16 windows of 16 tokens.
                size, skipped = (900, 0) if name == "gpt" else (880, 160)
                epochs = pytest.approx(drawn[source] / size, abs=skipped / size + 1e-9)
                assert metrics[f"epoch/{source}"] == epochs
        next(other)
        assert other.metrics()["checksum"] == metrics["checksum"] < 2**53
    waits = loader.wait_stats()
    assert waits.seconds >= metrics["wait_seconds"] >= 0
    loader.load_state_dict(loader.state_dict())
    assert loader.metrics() == {}


def test_datasets_of_other_kinds(prefixes: list[str]) -> None:
    one = GPTDataset(IndexedDataset(prefixes[0]), sequence_length=8, seed=1, loss_ranges="ignore")

    class Rows:
        def __len__(self) -> int:
            return 99

        def batch(self, numbers: Any) -> dict[str, Any]:
            return {"tokens": np.zeros((len(numbers), 4), np.int64)}

        def fingerprint(self) -> dict[str, Any]:
            return {}

    class Counting:
        def read(self, state: Any, count: int) -> Any:
            return TokenBatch(np.arange(5 * count), 5 * np.arange(1, count + 1)), {}

        def fingerprint(self, consumed_samples: Any = None) -> dict[str, Any]:
            return {}

    rows = BlendedDataset([Rows(), Rows()], [1, 1], 20)
    stream = StreamDataset(Counting(), SampleOptions(sequence_length=4))
    external = ExternalBatches([{"tokens": np.ones((4, 4))}, "text"], samples_per_step=4)
    for dataset, expected in (
        (one, {"tokens": 32, f"tokens/{prefixes[0]}": 32, "trained_share": 1.0}),
        (Rows(), {"tokens": 16}),
        (rows, {"tokens": 16, "tokens/Rows": 16}),
        (stream, {"tokens": 16, "trained_share": 1.0}),
        (external, {"tokens": 16}),
    ):
        share = {} if dataset is external else {"micro_batch_size": 4}
        loader = Loader(dataset, **share)
        next(loader)
        metrics = loader.metrics()
        assert metrics | expected == metrics
        assert ("trained_share" in metrics) == ("trained_share" in expected)
    next(loader)
    assert loader.metrics().keys() == {"consumed_samples", "wait_seconds"}
