"""The plan of a shuffle: groups that fit their buffers, and the choice between plans."""

import os
import pickle
import tracemalloc
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from millrace.errors import ConfigError, DataError, MillraceError
from millrace.ragged import even_sizes, starts_of
from millrace.shuffling import plans
from millrace.shuffling.permutations import Permutation, choose_permutation, make_permutation
from millrace.shuffling.plans import (
    ITEM_OVERHEAD,
    MB,
    PLANS,
    ShufflePlan,
    budget_of,
    fit_plan,
    group_bounds,
    resume_plan,
    sizes_of,
)
from tests.jobs.shuffle_cases import sequence_items

GB = 10**9


class FakeItems:
    """Items that take no time to read: of given sizes, or any number of one size."""

    def __init__(
        self, sizes: Any, item_size: int | None = None, *, has_origins: bool = False
    ) -> None:
        self.item_size = item_size
        self._sizes = np.asarray(sizes, np.int64)
        self.num_items = sizes if item_size is not None else len(self._sizes)
        self.dtype, self.has_origins = np.dtype(np.uint16), has_origins

    def sizes(self, numbers: Any) -> Any:
        if self.item_size is not None:
            return np.full(len(numbers), self.item_size)
        return self._sizes[numbers]

    def read(self, *arguments: Any) -> None:
        pass


@given(st.lists(st.integers(0, 300), min_size=1), st.integers(0, 5000), st.integers(1, 9))
def test_groups_fit_their_buffer_and_lie_in_one_shard(
    sizes: list[int], more: int, num_shards: int
) -> None:
    with pytest.MonkeyPatch.context() as context:
        context.setattr(plans, "_BLOCK", 7)
        kinds: list[Any] = [FakeItems(sizes), FakeItems(len(sizes), max(*sizes, 1, 1))]
        for items in kinds:
            largest = int(items.sizes(np.arange(items.num_items)).max())
            buffer_size = 2 * largest + ITEM_OVERHEAD + more
            shuffled = Permutation("keyed", items.num_items, 0)
            starts = starts_of(even_sizes(items.num_items, min(num_shards, items.num_items)))
            buckets = group_bounds(items, shuffled.sources, starts, buffer_size)
            runs = group_bounds(items, np.arange, starts[[0, -1]], buffer_size)
            assert set(starts.tolist()) <= set(buckets.tolist())
            for bounds, order in (
                (runs, np.arange(items.num_items)),
                (buckets, shuffled.sources(0, items.num_items)),
            ):
                assert bounds[0] == 0
                assert bounds[-1] == items.num_items
                assert (np.diff(bounds) > 0).all()
                costs = 2 * items.sizes(order) + ITEM_OVERHEAD
                assert (np.add.reduceat(costs, bounds[:-1]) <= buffer_size).all()


@given(
    st.sampled_from(PLANS), st.integers(8 * MB, 100 * GB), st.integers(1, 64), st.integers(1, 10**9)
)
def test_workers_and_buffers_fit_the_memory(
    name: str, memory: int, workers: int, num_items: int
) -> None:
    items: Any = FakeItems(num_items, 4096)
    plan = fit_plan(name, sizes_of(items), budget_of(memory, items), workers)
    assert 1 <= plan.workers <= workers
    assert plan.buffer_size >= min(8192, 8192 * num_items) + ITEM_OVERHEAD
    processes = plan.workers * 45 * MB if plan.workers > 1 else 0
    assert processes + plan.workers * plan.buffer_size <= memory
    again = resume_plan(asdict(plan), items, workers=workers, memory=memory)
    assert again.workers * again.buffer_size <= memory


def choose(tmp_path: Path, items: Any, **options: Any) -> ShufflePlan:
    options = {"name": "auto", "memory": 4 * GB, "workers": 4, **options}
    return plans.choose_plan(items, output_dir=str(tmp_path), **options)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The free bytes of every disk, and its read rates."""
    disk = SimpleNamespace(free=10**15, random=1e9, sequential=1e9)

    def status(folder: str) -> Any:
        return SimpleNamespace(f_bavail=disk.free, f_frsize=1)

    monkeypatch.setattr(plans.os, "statvfs", status)
    monkeypatch.setattr(plans, "read_rates", lambda items, size: (disk.random, disk.sequential))
    return disk


def test_the_choice_of_a_plan(tmp_path: Path, disk: SimpleNamespace) -> None:
    small, large = FakeItems(1000, 4096), FakeItems(10**6, 4096)  # 8 MB and 8 GB
    plan = choose(tmp_path, small)
    assert (plan.name, plan.workers, plan.buffer_size) == ("gather", 1, 1000 * (8192 + 128))
    assert str(choose(tmp_path, large)) == (
        "gather, because the disk reads 1.0 GB of random items a second, and 1.0 GB of "
        "consecutive ones, reads 8.2 GB, writes 8.2 GB"
    )
    for sequential, random, memory, name, workers in (
        (1e9, 1e9, 20, "gather", 4),
        (4e9, 1e9, 4, "gather", 4),  # random reads, 4 at a time, keep up with the writes
        (6e8, 2e8, 4, "gather", 4),  # a third as fast
        (6e8, 1.9e8, 20, "gather", 1),  # all data at once
        (6e8, 1.9e8, 4, "scatter", 4),
    ):
        disk.sequential, disk.random = sequential, random
        plan = choose(tmp_path, large, memory=memory * GB)
        assert (plan.name, plan.workers) == (name, workers)
        assert (plan.buffer_size == 10**6 * (8192 + 128)) == (workers == 1)
    assert plan.num_bytes == 16_384 * 10**6
    disk.free = 10 * GB
    plan = choose(tmp_path, large)
    assert plan.name == "gather"
    assert "scatter needs 16.4 GB of disk, and 10.0 GB are free" in str(plan)
    with pytest.raises(MillraceError, match=r"No space left: the plan scatter needs 16.4 GB"):
        choose(tmp_path, large, name="scatter")
    disk.free = 8 * GB
    with pytest.raises(MillraceError, match=r"No space left for the output: it has 8.2 GB"):
        choose(tmp_path, large)


def test_documents_and_their_origins_take_memory(tmp_path: Path, disk: SimpleNamespace) -> None:
    items = FakeItems([10, 200 * MB, 5])
    plan = choose(tmp_path, items, memory=2 * GB, name="gather")
    assert plan.workers * (plan.buffer_size + 45 * MB) <= 2 * GB
    assert plan.buffer_size >= 400 * MB + ITEM_OVERHEAD
    with pytest.raises(ConfigError, match=r"not 300.0 MB: the largest item has 400.0 MB"):
        choose(tmp_path, items, memory=300 * MB)
    for has_origins, workers in ((False, 3), (True, 1)):  # which take Arrow
        items = FakeItems(np.full(2000, 100_000), has_origins=has_origins)
        assert choose(tmp_path, items, memory=200 * MB, name="gather").workers == workers
    with pytest.raises(ConfigError, match=r"copying their origins takes 90.0 MB"):
        choose(tmp_path, items, memory=90 * MB)


def test_a_smaller_memory_continues_with_fewer_workers() -> None:
    items: Any = FakeItems(10**6, 4096)
    plan = ShufflePlan(name="scatter", sizes=sizes_of(items), workers=4, buffer_size=100 * MB)
    content = asdict(plan)
    assert resume_plan(content, items, workers=4, memory=300 * MB).workers == 2
    assert resume_plan(content, items, workers=4, memory=100 * MB).workers == 1
    with pytest.raises(ConfigError, match=r"not 99.0 MB: .*Give memory=100000000 or more"):
        resume_plan(content, items, workers=4, memory=99 * MB)


# ---- the permutation ----


def test_files_that_are_lost_while_the_job_runs_are_an_error(tmp_path: Path) -> None:
    permutation = make_permutation("numpy", 1000, 1, str(tmp_path))
    assert len(pickle.dumps(permutation)) < 1000  # every task carries it
    os.truncate(tmp_path / "places", 5000)
    assert len(permutation.places(0, 500)) == 500
    with pytest.raises(DataError, match=r"places is missing or has become shorter"):
        permutation.places(500, 1000)
    (tmp_path / "sources").unlink()
    with pytest.raises(DataError, match=r"sources is missing"):
        permutation.sources(0, 1)


def test_the_choice_depends_on_the_memory() -> None:
    for name, size, memory, expected in (
        ("auto", 1000, 32_000, "numpy"),
        ("auto", 1001, 32_000, "keyed"),
        ("auto", 0, 0, "numpy"),
        ("numpy", 1001, 20_000, "numpy"),
        ("keyed", 1, 10**12, "keyed"),
    ):
        assert choose_permutation(name, size, memory, "sequences") == expected
    with pytest.raises(ConfigError, match=r"takes 16.0 MB .* 1,000,001 sequences, and 0 bytes are"):
        choose_permutation("numpy", 1_000_001, -1, "sequences")


# ---- the measurement of the disk ----


def test_rates_of_tiny_sequences_take_little_memory(tmp_path: Path) -> None:
    np.zeros(8_000_000, np.uint16).tofile(tmp_path / "web.bin")
    items = sequence_items([(1, str(tmp_path / "web.bin"))], seq_len=1, dtype="uint16")
    tracemalloc.start()
    try:
        plans.read_rates(items, 16_000_000)
        assert tracemalloc.get_traced_memory()[1] < 30_000_000
    finally:
        tracemalloc.stop()
