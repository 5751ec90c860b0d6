"""Bad arguments, states of other data, and files that are damaged under the loader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace import (
    BlendedDataset,
    ConfigError,
    DataError,
    GPTDataset,
    IndexedDataset,
    IndexedDatasetBuilder,
    Loader,
    ResumeError,
)
from millrace.feed import (
    BatchSizeSchedule,
    CyclicSampler,
    FullValidationSampler,
    GlobalBatchSampler,
    RampUp,
    SequentialSampler,
)

SAMPLERS = (SequentialSampler, CyclicSampler, FullValidationSampler)


def write(prefix: Path, num_documents: int = 400) -> IndexedDataset:
    """Document i has 1,000 tokens i."""
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for number in range(num_documents):
            builder.add_document(np.full(1000, number))
    return IndexedDataset(prefix)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> GPTDataset:
    data = write(tmp_path_factory.mktemp("data") / "text", 40)
    return GPTDataset(data, sequence_length=64, seed=1)


# ---- arguments ----


def test_what_is_not_a_dataset_is_refused_with_the_remedy(dataset: GPTDataset) -> None:
    torch_data = pytest.importorskip("millrace.torch")
    for value, remedy in [
        (dataset.dataset, "GPTDataset"),
        ([1, 2, 3], "ExternalBatches"),
        (torch_data.MapDataset(dataset), "`dataset`"),
        (None, "GPTDataset"),
    ]:
        with pytest.raises(ConfigError, match=rf"{type(value).__name__}, .*batch.*{remedy}"):
            Loader(value, micro_batch_size=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [2, -1, np.int64(2), 2**70])
def test_a_rank_outside_its_range_is_refused(dataset: GPTDataset, rank: Any) -> None:
    share = {"micro_batch_size": 2, "data_parallel_rank": rank, "data_parallel_size": 2}
    message = rf"data_parallel_rank is {rank}; 0 to 1 is possible"
    with pytest.raises(ConfigError, match=message):
        Loader(dataset, **share)
    for kind in SAMPLERS:
        with pytest.raises(ConfigError, match=message):
            kind(100, **share)
    with pytest.raises(ConfigError, match=message):
        GlobalBatchSampler(100, global_batch_size=4, **share)


@pytest.mark.parametrize(
    "name",
    [
        "micro_batch_size",
        "data_parallel_rank",
        "data_parallel_size",
        "consumed_samples",
        "prefetch",
        "threads",
        "vocab_size",
    ],
)
@pytest.mark.parametrize("value", [True, 1.0, "1", float("nan"), np.float64(1)])
def test_counts_are_whole_numbers(dataset: GPTDataset, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} is .*; a whole number is needed"):
        Loader(dataset, **{"micro_batch_size": 2, name: value})


def test_numbers_of_numpy_are_as_good_as_pythons(dataset: GPTDataset) -> None:
    loader = Loader(
        dataset,
        micro_batch_size=np.int32(2),
        data_parallel_rank=np.uint8(1),
        data_parallel_size=np.int64(2),
        consumed_samples=np.uint64(8),
        drop_last=np.True_,
        vocab_size=np.int16(100),
        prefetch=np.int8(2),
        threads=np.uint16(2),
        watchdog=np.float32(60),
    )
    with loader:
        assert np.array_equal(next(loader)["tokens"], dataset.batch([10, 11])["tokens"])
        state = loader.state_dict()
    assert json.loads(json.dumps(state)) == state
    assert type(state["consumed_samples"]) is int
    assert RampUp(np.int32(4), np.int8(2), np.uint8(10), np.int16(8)).batch_size(5) == 6
    numbers = CyclicSampler(np.int64(10), micro_batch_size=np.int8(2)).sample_numbers(np.int32(2))
    assert numbers.dtype == np.int64


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((float("nan"), 2, 10, 8), "start is nan; a whole number"),
        ((4, float("nan"), 10, 8), "increment is nan; a whole number"),
        ((4, 2, float("nan"), 8), "samples is nan; a whole number"),
        ((4, 2, float("inf"), 8), "samples is inf; a whole number"),
        ((4, 2, 10, float("nan")), "global_batch_size is nan; a whole number"),
        ((-4, 2, 10, 8), "start is -4; 1 to"),
        ((0, 2, 10, 8), "start is 0; 1 to"),
        ((4, -2, 10, 8), "increment is -2; 1 to"),
        ((4, 2, -10, 8), "samples is -10; 1 to"),
        ((4, 2, 10, -8), "global_batch_size is -8; 1 to"),
        ((4, 2, True, 8), "samples is True; a whole number"),
        ((4, 2, 10, 7), "increments of 2 do not reach it"),
        ((8, 2, 10, 4), "increments of 2 do not reach it"),
    ],
)
def test_ramp_ups_that_cannot_be_are_refused(arguments: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        RampUp(*arguments)


def test_a_global_batch_that_does_not_divide_is_refused() -> None:
    share = {"micro_batch_size": 2, "data_parallel_size": 2}
    with pytest.raises(ConfigError, match=r"size is 6 after 0 samples; .* a multiple of .* = 4"):
        GlobalBatchSampler(100, global_batch_size=6, **share)
    with pytest.raises(ConfigError, match=r"size is 6 after 8 samples; .* a multiple of .* = 4"):
        GlobalBatchSampler(100, global_batch_size=RampUp(4, 2, 10, 8), **share)
    schedule = BatchSizeSchedule([(0, 4), (500, 5)])  # never reached
    assert GlobalBatchSampler(100, global_batch_size=schedule, **share).num_steps() == 25


# ---- positions and states ----


def test_a_position_past_the_end_is_refused(dataset: GPTDataset) -> None:
    end = len(dataset)
    message = f"consumed_samples is {end + 1}; the dataset has {end} samples"
    with pytest.raises(ConfigError, match=message):
        Loader(dataset, micro_batch_size=2, consumed_samples=end + 1)
    for kind in (SequentialSampler, FullValidationSampler):
        with pytest.raises(ConfigError, match=message):
            Loader(dataset, sampler=kind(end, micro_batch_size=2), consumed_samples=end + 1)
    with Loader(dataset, micro_batch_size=2, consumed_samples=end) as loader:
        assert next(loader, None) is None
    cyclic = CyclicSampler(end, micro_batch_size=5)
    with pytest.raises(ConfigError, match=f"consumed_samples is {end * 5 + 3}, .* starts at"):
        Loader(dataset, sampler=cyclic, consumed_samples=end * 5 + 3)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_loader_goes_on_after_it_has_refused_a_state(dataset: GPTDataset, prefetch: int) -> None:
    other = GPTDataset(dataset.dataset, sequence_length=32, seed=2)
    with (
        Loader(dataset, micro_batch_size=2, prefetch=prefetch, threads=2) as loader,
        Loader(other, micro_batch_size=2) as foreign,
    ):
        next(loader)
        good = loader.state_dict()
        for state, error, problem in (
            (foreign.state_dict(), ResumeError, "seed: saved 2, now 1"),
            ({**good, "consumed_samples": len(dataset) + 1}, ConfigError, "the dataset has"),
            ({**good, "consumed_samples": float("nan")}, ConfigError, "a whole number"),
            ({**good, "consumed_samples": -2}, ConfigError, "at least 0"),
            ({**good, "version": 99}, ResumeError, "version 99"),
            ({}, ResumeError, "has no consumed_samples, fingerprint, version"),
            (None, ResumeError, "the state is None"),
        ):
            with pytest.raises(error, match=problem):
                loader.load_state_dict(state)
        assert loader.state_dict() == good
        assert np.array_equal(next(loader)["tokens"], dataset.batch([2, 3])["tokens"])


# ---- data ----


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("is_blend", [False, True])
def test_a_token_beyond_the_vocabulary_is_named(
    dataset: GPTDataset, prefetch: int, is_blend: bool
) -> None:
    source = BlendedDataset([dataset]) if is_blend else dataset
    numbers = np.flatnonzero(dataset.batch(np.arange(len(dataset)))["tokens"].max(axis=1) >= 30)
    step = int(numbers[0]) // 4
    with Loader(source, micro_batch_size=4, vocab_size=30, prefetch=prefetch) as loader:
        for _ in range(step):
            assert next(loader)["tokens"].max() < 30
        for _ in range(2):
            with pytest.raises(DataError) as caught:
                next(loader)
            message = str(caught.value)
            assert f"consumed_samples={4 * step}" in message
            for part in ("text", "sample", "token id 3", r"is outside [0, 30)"):
                assert part in message
        assert loader.consumed_samples == 4 * step
        assert loader.state_dict()["consumed_samples"] == 4 * step
    with Loader(source, micro_batch_size=4, vocab_size=40) as loader:
        assert sum(1 for _ in loader) == len(loader)


_CUT = """
import itertools, os, sys, threading, time
from millrace import BlendedDataset, DataError, GPTDataset, IndexedDataset, Loader
prefix, access = sys.argv[1:]
with open(prefix + ".bin", "rb") as file:
    content = file.read()
dataset = GPTDataset(IndexedDataset(prefix, access=access), sequence_length=512, seed=1)
for source, prefetch in itertools.product([dataset, BlendedDataset([dataset])], [0, 4]):
    loader = Loader(source, micro_batch_size=2, prefetch=prefetch, threads=3)
    next(loader)
    os.truncate(prefix + ".bin", 8192)
    errors = []
    while len(errors) < 2:
        try:
            next(loader)
        except DataError as error:
            assert not errors or loader.consumed_samples == position
            position = loader.consumed_samples
            errors.append(str(error))
    print("\\n".join(errors))
    with open(prefix + ".bin", "r+b") as file:
        file.write(content)
    next(loader)
    assert loader.consumed_samples == position + 2
    os.truncate(prefix + ".bin", 0)
    loader.close()
    while threading.active_count() > 1:  # a thread that was reading ahead of an error
        time.sleep(0.01)
    with open(prefix + ".bin", "r+b") as file:
        file.write(content)
"""


@pytest.mark.parametrize("access", ["mmap", "file"])
def test_a_file_cut_short_under_the_loader_is_named(tmp_path: Path, access: str) -> None:
    """No bus error, no hang; when the file is whole again, so is the loader."""
    write(tmp_path / "text")
    command = [sys.executable, "-c", _CUT, str(tmp_path / "text"), access]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    errors = result.stdout.splitlines()
    assert len(errors) == 8
    for error in errors:
        assert str(tmp_path / "text") in error
        assert "shorter" in error or "cut short" in error
        assert "in the step that starts at consumed_samples=" in error
        assert "sample numbers [" in error


@pytest.mark.parametrize("access", ["mmap", "file"])
def test_a_file_that_vanishes_under_the_loader_is_read_on(tmp_path: Path, access: Any) -> None:
    write(tmp_path / "text")
    data = IndexedDataset(tmp_path / "text", access=access)
    dataset = GPTDataset(data, sequence_length=512, seed=1)
    with Loader(dataset, micro_batch_size=2, threads=2) as loader:
        next(loader)
        os.unlink(tmp_path / "text.bin")
        os.unlink(tmp_path / "text.idx")
        assert sum(1 for _ in loader) == len(loader) - 1


def test_an_error_in_a_thread_ends_no_other_step(dataset: GPTDataset) -> None:
    """The steps before it are handed out, and the loader can be closed in the middle."""

    class Fails:
        def __len__(self) -> int:
            return 40

        def batch(self, sample_numbers: Any) -> dict[str, Any]:
            if 20 in np.asarray(sample_numbers):
                raise OSError(5, "the disk does not answer")
            return {"x": np.asarray(sample_numbers)}

        def fingerprint(self) -> dict[str, Any]:
            return {}

    for prefetch in (0, 4):
        with Loader(Fails(), micro_batch_size=4, prefetch=prefetch, threads=3) as loader:
            assert [next(loader)["x"][0] for _ in range(5)] == [0, 4, 8, 12, 16]
            for _ in range(2):
                with pytest.raises(OSError, match="the disk does not answer") as caught:
                    next(loader)
                if sys.version_info >= (3, 11):
                    assert "consumed_samples=20" in caught.value.__notes__[0]
                assert loader.consumed_samples == 20


def test_a_closed_loader_says_so(dataset: GPTDataset) -> None:
    loader = Loader(dataset, micro_batch_size=2, threads=2)
    next(loader)
    loader.close()
    loader.close()
    with pytest.raises(ConfigError, match="the loader is closed"):
        next(loader)
    assert loader.state_dict()["consumed_samples"] == 2
