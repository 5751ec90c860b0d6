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
from millrace.feed import ExternalBatches, StreamDataset
from tests.conftest import write_documents
from tests.feed.helpers import Numbers
from tests.feed.test_external import OPTIONS, Counting

OWN: dict[str, Any] = {"sequence_length": 8, "seed": 1, "loss_ranges": "apply"}


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    """Two token files, of which the second's tokens are those from 1000 on."""
    for number, name in enumerate(("a", "b")):
        write_documents(tmp_path / name, [np.arange(90) + 1000 * number] * 10)
        write_loss_ranges(tmp_path / name, [(n, 0, 45) for n in range(10)])
    return [str(tmp_path / name) for name in ("a", "b")]


@pytest.mark.parametrize("order", ["gpt", "instant", "transformed"])
@pytest.mark.parametrize("prefetch", [0, 4])
def test_counters_are_those_of_the_batches(order: str, prefetch: int, prefixes: list[str]) -> None:
    gpt = DatasetConfig(blend=(prefixes, [0.3, 0.7]), split="1,0,0", num_samples=(400, 0, 0), **OWN)
    sources = {"a": {"prefix": prefixes[0], "weight": 3}, "b": {"prefix": prefixes[1], "weight": 7}}
    phases = [{"until": 32}, {"weights": {"a": 7}}]
    instant = InstantConfig(sources=sources, phases=phases, **OWN, skips=[(8, 24)], mix_window=2)
    dataset = build_datasets(gpt if order == "gpt" else instant).train
    dataset = TransformedDataset(dataset, []) if order == "transformed" else dataset
    loader = Loader(dataset, micro_batch_size=8, prefetch=prefetch)
    other = Loader(dataset, micro_batch_size=8, token_dtype="int32", fields=("tokens",))
    # In the instant order, an epoch has (900 - 16) // 16 windows of 16 tokens.
    size, skipped = (900, 0) if order == "gpt" else (880, 160)
    names = prefixes if order == "gpt" else ["a", "b"]
    assert loader.metrics() == {}
    drawn = dict.fromkeys(names, 0)
    for step in range(40):
        batch, _ = next(loader), next(other)
        metrics = loader.metrics()
        assert json.loads(json.dumps(metrics)) == metrics
        assert (metrics["consumed_samples"], metrics["tokens"]) == (8 * step + 8, 64)
        assert metrics["trained_share"] == pytest.approx(batch["loss_mask"].mean())
        for number, source in enumerate(names):
            count = int((batch["tokens"] // 1000 == number).sum())
            assert metrics.get(f"tokens/{source}", 0) == count
            drawn[source] += count
            if count > 0:
                epochs = pytest.approx(drawn[source] / size, abs=skipped / size + 1e-9)
                assert metrics[f"epoch/{source}"] == epochs
        assert other.metrics()["checksum"] == metrics["checksum"] < 2**53
    assert loader.wait_stats().seconds >= metrics["wait_seconds"] >= 0
    loader.load_state_dict(loader.state_dict())
    assert loader.metrics() == {}


def test_datasets_of_other_kinds(prefixes: list[str]) -> None:
    one = GPTDataset(IndexedDataset(prefixes[0]), **OWN | {"loss_ranges": "ignore"})
    stream = StreamDataset(Counting(), OPTIONS)
    odd = {"tokens": np.array(["text", None])}
    external = ExternalBatches([{"tokens": np.ones((4, 4))}, odd, "text"], samples_per_step=4)

    def zeroed(batch: Any) -> Any:
        for array in batch.values() if type(batch) is dict else ():
            array[:] = 0
        return batch

    for dataset, expected in (
        (one, {"tokens": 32, f"tokens/{prefixes[0]}": 32, "trained_share": 1.0}),
        (Numbers(), {"tokens": 4}),
        (BlendedDataset([Numbers(), Numbers()], [1, 1], 20), {"tokens": 4, "tokens/Numbers": 4}),
        (stream, {"tokens": 12, "trained_share": 1.0}),
        (external, {"tokens": 16}),
    ):
        share = {} if dataset is external else {"micro_batch_size": 4}
        loader = Loader(dataset, transform=zeroed, **share)
        next(loader)
        metrics = loader.metrics()
        assert metrics | expected == metrics
        assert ("trained_share" in metrics) == ("trained_share" in expected)
    for _ in range(2):
        next(loader)
        assert loader.metrics().keys() == {"consumed_samples", "wait_seconds"}
