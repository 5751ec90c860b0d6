"""`millrace bench`: what it reports for real files, and its errors. No test asserts a rate."""

import json
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace import ConfigError, DatasetConfig, IndexedDataset, InstantConfig
from millrace.jobs import BenchResult, bench
from millrace.jobs.benchmark_report import format_result
from millrace.jobs.benchmarking import bound_by, drop_from_page_cache, resident_pages

SHORT: dict[str, Any] = {"seconds": 0.05, "step_time": 0.001}
SHORT_OPTIONS = ["--seconds", "0.05", "--step-time", "0.001"]


@pytest.fixture
def config(make_dataset: Callable[..., IndexedDataset]) -> DatasetConfig:
    """Two blended token files, 100 samples of 16 tokens."""
    prefixes = [make_dataset([30] * num, name=str(num)).prefix for num in (60, 61)]
    return DatasetConfig(
        sequence_length=16, seed=1, num_samples=(100, 0, 0), blend=(prefixes, None), split="1,0,0"
    )


def test_bench_measures_cold_paced_and_warm_data(config: DatasetConfig) -> None:
    result = bench(config, micro_batch_size=4, **SHORT)
    assert [one.name for one in result.measurements] == ["cold", "paced", "warm"]
    assert (result.num_files, result.sequence_length) == (2, 16)
    assert result.num_samples >= 100
    assert result.options["fields"] == ["tokens", "labels", "loss_mask", "position_ids"]
    assert 0 < result.opening_seconds < result.first_batch_seconds
    for one in result.measurements:
        assert one.num_steps > 0
        assert one.tokens_per_second == pytest.approx(16 * one.samples_per_second)
        assert 0 <= one.wait_share <= 1
        assert 0 <= one.wait_median <= one.wait_percentile_99 <= one.wait_longest
        assert (one.accelerators is None) == (one.step_time > 0)
        assert one.bound_by in ("step", "disk", "CPU", "other")
    cold = result.measurements[0]
    assert cold.accelerators == int(cold.tokens_per_second // 10_000)
    lines = format_result(result).splitlines()
    for one in result.measurements:
        assert any(line.startswith(one.name) for line in lines)
    assert f"{result.num_samples:,} samples of 16 tokens" in lines[0]


def test_bench_feeds_several_ranks_and_leaves_the_page_cache(config: DatasetConfig) -> None:
    result = bench(config, ranks=2, threads=2, prefetch=0, drop_cache=False, **SHORT)
    assert [one.name for one in result.measurements] == ["paced", "warm"]
    assert result.page_cache == "left as it was"
    assert (result.options["ranks"], result.options["threads"]) == (2, 2)
    assert all(one.num_steps >= 2 for one in result.measurements)


def test_bench_takes_the_samples_before_another_sequence_length(config: DatasetConfig) -> None:
    assert config.blend is not None
    sources: Any = {name: {"prefix": name, "weight": 1} for name in config.blend[0]}
    phases: Any = [{"until": 24, "sequence_length": 8}, {"sequence_length": 4}]
    run = InstantConfig(
        sequence_length=16, seed=1, sources=sources, dtype="uint16", phases=phases, skips=[[3, 11]]
    )
    result = bench(run, micro_batch_size=4, **SHORT)
    assert (result.sequence_length, result.num_measured) == (8, 16)  # without those skipped
    assert [one.num_steps for one in result.measurements[:2]] == [3, 3]  # after a first batch


def test_bench_of_a_run_with_a_cache_folder(config: DatasetConfig, tmp_path: Path) -> None:
    values = {name: getattr(config, name) for name in ("sequence_length", "seed", "num_samples")}
    cached = DatasetConfig(**values, blend=config.blend, split="1,0,0", cache=tmp_path / "cache")
    num_files = []
    for _ in range(2):  # the second time, index arrays are there to be dropped
        result = bench(cached, **SHORT)
        num_files.append(result.page_cache.rpartition(" in ")[2])
    assert num_files[-1] == "9 files)"


def test_the_verb(config: DatasetConfig, tmp_path: Path, verb: Callable[..., str]) -> None:
    assert config.blend is not None
    path = tmp_path / "run.yaml"
    arguments = {"data-path": config.blend[0], "split": "1,0,0", "seq-length": 16, "lr": 0.1}
    path.write_text(json.dumps({**arguments, "num-samples": [50, 0, 0]}))
    report = json.loads(verb("bench", path, "--json", *SHORT_OPTIONS))
    assert report["num_samples"] >= 50
    assert report.keys() == BenchResult.__dataclass_fields__.keys()
    output = verb("bench", path, "--keep-cache", *SHORT_OPTIONS)
    for text in ("samples of 16 tokens", "warm data feed", "left out: lr"):
        assert text in output
    (tmp_path / "run.toml").write_text("seq-length = 16\n")
    for words, message in [
        ([tmp_path / "gone.yaml"], "No such file"),
        ([tmp_path / "data"], "data is neither .yaml, .yml nor .toml"),
        ([tmp_path / "run.toml"], "no data given"),
        ([path, "--micro-batch-size", 100], "lower one of them, or use more data"),
    ]:
        error = verb("bench", *words, status=1)
        assert message in error
        assert error.count("\n") == 1


def test_a_run_without_training_data_is_refused(
    make_dataset: Callable[..., IndexedDataset],
) -> None:
    blend = [make_dataset([30] * 60).prefix], None
    values: dict[str, Any] = {"sequence_length": 16, "seed": 1, "num_samples": (None, 0, 0)}
    with pytest.raises(ConfigError, match="no training data"):
        bench(DatasetConfig(**values, blend_per_split=[None, blend, None]), **SHORT)
    with pytest.raises(ConfigError, match="give train a share"):
        bench(DatasetConfig(**values, blend=blend, split="0,1,0"), **SHORT)


@pytest.mark.parametrize(
    ("wait_share", "busy_share", "disk_rate", "expected"),
    [
        (0.001, 0.1, 1e9, "step"),
        (0.5, 0.1, 1e9, "disk"),
        (None, 0.1, 1e9, "disk"),
        (None, 0.1, 0.0, "other"),
        (None, 0.9, 1e9, "CPU"),
    ],
)
def test_the_bound_follows_from_the_measured_quantities(
    wait_share: float | None, busy_share: float, disk_rate: float, expected: str
) -> None:
    cause, reason = bound_by(wait_share=wait_share, busy_share=busy_share, disk_rate=disk_rate)
    assert cause == expected
    assert "%" in reason


def test_dropping_a_file_from_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(np.random.default_rng(0).bytes(40 * mmap.PAGESIZE))
    size = path.stat().st_size
    descriptor = os.open(path, os.O_RDONLY)
    try:
        assert resident_pages(descriptor, 0, size).sum() == 40
        with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as pages:
            assert len(pages[:]) == size  # pages in use stay
            assert drop_from_page_cache([str(path)]).startswith("partly dropped: 0.2 of 0.2 MB")
        message = drop_from_page_cache([str(path)])
        if message.startswith("dropped"):  # not on a file system in memory
            assert message == "dropped (0.2 MB in 1 files)"
            assert not resident_pages(descriptor, 0, size).any()
    finally:
        os.close(descriptor)
