"""The plan of a shuffle: groups that fit their buffers, and the choice between plans."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.errors import ConfigError, MillraceError
from millrace.jobs.shuffling import plan as planning
from millrace.jobs.shuffling import probe
from millrace.jobs.shuffling.plan import ITEM_OVERHEAD, MB, Plan
from millrace.jobs.shuffling.probe import is_gather_faster, read_rates
from millrace.order import KeyedPermutation

GB = 10**9


class FakeItems:
    """Items of given sizes that take no time to read."""

    def __init__(self, sizes: Any, *, has_origins: bool = False) -> None:
        self._sizes = np.asarray(sizes, np.int64)
        self.num_items, self.item_size = len(self._sizes), None
        self.dtype, self.has_origins = np.dtype(np.uint16), has_origins

    def sizes(self, numbers: Any) -> Any:
        return self._sizes[numbers]

    def read(self, *arguments: Any) -> None:
        pass


class LargeItems:
    """Any number of items of one size."""

    def __init__(self, num_items: int, item_size: int) -> None:
        self.num_items, self.item_size = num_items, item_size
        self.dtype, self.has_origins = np.dtype(np.uint16), False

    def sizes(self, numbers: Any) -> Any:
        return np.full(len(numbers), self.item_size)

    def read(self, *arguments: Any) -> None:
        pass


class Shuffled:
    """A permutation."""

    name = "keyed"

    def __init__(self, size: int) -> None:
        self.size = size

    def sources(self, start: int, stop: int) -> Any:
        return KeyedPermutation(self.size, 0).sources(np.arange(start, stop))


@given(st.lists(st.integers(0, 300), min_size=1), st.integers(0, 5000), st.integers(1, 9))
def test_groups_fit_their_buffer_and_lie_in_one_shard(
    sizes: list[int], more: int, num_shards: int
) -> None:
    with pytest.MonkeyPatch.context() as context:
        context.setattr(planning, "_BLOCK", 7)
        for items in (FakeItems(sizes), LargeItems(len(sizes), max(*sizes, 1, 1))):
            largest = int(items.sizes(np.arange(items.num_items)).max())
            buffer_size = 2 * largest + ITEM_OVERHEAD + more
            shuffled: Any = Shuffled(items.num_items)
            starts = planning.shard_starts(items.num_items, min(num_shards, items.num_items))
            buckets = planning.bucket_bounds(items, shuffled, starts, buffer_size)
            runs = planning.run_bounds(items, buffer_size)
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


@given(st.integers(1, 1000), st.integers(1, 50))
def test_shards_differ_by_one_at_most(num_items: int, num_shards: int) -> None:
    starts = planning.shard_starts(num_items, num_shards)
    sizes = [
        num_items // num_shards + (shard < num_items % num_shards) for shard in range(num_shards)
    ]
    assert np.diff(starts).tolist() == sizes


@given(
    st.sampled_from(["gather", "scatter"]),
    st.integers(8 * MB, 100 * GB),
    st.integers(1, 64),
    st.integers(1, 10**9),
)
def test_workers_and_buffers_fit_the_memory(
    name: str, memory: int, workers: int, num_items: int
) -> None:
    items = LargeItems(num_items, 4096)
    plan = Plan(name=name, reason="", workers=workers, buffer_size=0, bytes_read=0, bytes_written=0)
    num_bytes = 2 * 4096 * num_items
    plan = planning._share_memory(plan, items, num_bytes, 8192, memory)
    assert 1 <= plan.workers <= workers
    assert plan.buffer_size >= 8192 + ITEM_OVERHEAD
    processes = plan.workers * 45 * MB if plan.workers > 1 else 0
    assert processes + plan.workers * plan.buffer_size <= memory
    again = planning.plan_from_json(
        plan.to_json(),
        items,
        workers=workers,
        memory=memory,
    )
    assert again.workers * again.buffer_size <= memory


def choose(tmp_path: Path, items: Any, **options: Any) -> Plan:
    options = {"name": "auto", "memory": 4 * GB, "workers": 4, "engine": "local", **options}
    return planning.choose_plan(items, output_dir=str(tmp_path), **options)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The free bytes of every disk, and its read rates."""
    disk = SimpleNamespace(free=10**15, random=1e9, sequential=1e9)
    monkeypatch.setattr(planning, "_free_bytes", lambda folder: disk.free)
    monkeypatch.setattr(
        planning, "read_rates", lambda items, mean, size: (disk.random, disk.sequential)
    )
    return disk


def test_the_choice_of_a_plan(tmp_path: Path, disk: SimpleNamespace) -> None:
    small, large = LargeItems(1000, 4096), LargeItems(10**6, 4096)  # 8 MB and 8 GB
    assert choose(tmp_path, small).name == "memory"
    assert choose(tmp_path, small, engine="ray").name == "gather"
    plan = choose(tmp_path, large)
    assert str(plan) == (
        "gather, because random reads are about as fast as sequential ones (1.0 GB and 1.0 GB a "
        "second), reads 8.2 GB, writes 8.2 GB"
    )
    assert choose(tmp_path, large, memory=20 * GB).name == "gather"
    disk.sequential, disk.random = 4e9, 1e9
    assert "reads, 4 at a time, keep up with the writes" in str(choose(tmp_path, large))
    disk.sequential, disk.random = 6e8, 2e8
    assert "not much slower" in str(choose(tmp_path, large))
    assert choose(tmp_path, large, memory=20 * GB).name == "memory"
    assert choose(tmp_path, large, memory=20 * GB, engine="ray").name == "gather"
    disk.sequential, disk.random = 1e9, 1e8
    plan = choose(tmp_path, large)
    assert (plan.name, plan.bytes_read, plan.bytes_written) == (
        "scatter",
        16_384 * 10**6,
        16_384 * 10**6,
    )
    disk.free = 10 * GB
    assert "scatter needs 16.4 GB of disk, and 10.0 GB are free" in str(choose(tmp_path, large))
    with pytest.raises(MillraceError, match=r"No space left for the plan scatter"):
        choose(tmp_path, large, name="scatter")
    disk.free = 8 * GB
    with pytest.raises(MillraceError, match=r"No space left for the output: it has 8.2 GB"):
        choose(tmp_path, large)
    disk.free = 10**15
    assert choose(tmp_path, LargeItems(10**4, 10**6)).name == "gather"  # of large items


def test_a_document_must_fit_a_buffer(tmp_path: Path, disk: SimpleNamespace) -> None:
    items = FakeItems([10, 200 * MB, 5])
    plan = choose(tmp_path, items, memory=2 * GB, name="gather")
    assert plan.workers * (plan.buffer_size + 45 * MB) <= 2 * GB
    assert plan.buffer_size >= 400 * MB + ITEM_OVERHEAD
    with pytest.raises(ConfigError, match=r"300.0 MB, and the longest document has 400.0 MB"):
        choose(tmp_path, items, memory=300 * MB)


def test_origins_take_memory(tmp_path: Path, disk: SimpleNamespace) -> None:
    sizes = np.full(1000, 100_000)
    plain, with_origins = (FakeItems(sizes, has_origins=has) for has in (False, True))
    assert choose(tmp_path, plain, memory=200 * MB, name="gather").workers == 3
    assert choose(tmp_path, with_origins, memory=200 * MB, name="gather").workers == 1
    plan = choose(tmp_path, with_origins, memory=340 * MB, name="memory", workers=2)
    assert plan.buffer_size > 240 * MB
    with pytest.raises(ConfigError, match=r"more than the memory of 250\.0 MB"):
        choose(tmp_path, with_origins, memory=340 * MB, name="memory", workers=3)
    content = plan.to_json()
    more = planning.plan_from_json(content, with_origins, workers=8, memory=340 * MB)  # type: ignore[arg-type]
    assert more.workers == 2


def test_a_smaller_memory_continues_with_fewer_workers() -> None:
    items: Any = LargeItems(10**6, 4096)
    plan = Plan(
        name="scatter", reason="", workers=4, buffer_size=100 * MB, bytes_read=0, bytes_written=0
    )
    content = plan.to_json()
    assert planning.plan_from_json(content, items, workers=4, memory=300 * MB).workers == 2
    assert planning.plan_from_json(content, items, workers=4, memory=100 * MB).workers == 1
    with pytest.raises(ConfigError, match=r"memory is 99.0 MB.*give memory=100000000 or more"):
        planning.plan_from_json(content, items, workers=4, memory=99 * MB)


def test_gather_may_be_three_times_slower_at_reading() -> None:
    assert is_gather_faster(0.34e9, 1e9)
    assert not is_gather_faster(0.33e9, 1e9)
    assert is_gather_faster(2e9, 8e9)  # in memory, where writing takes longer than reading


def test_an_interruption_of_the_probe_does_not_change_its_rates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, calls = 0.0, 0

    class Interrupted(LargeItems):
        def read(self, numbers: Any, *arguments: Any) -> None:
            nonlocal now, calls
            now += 1e-6 * len(numbers) + (1.0 if calls % 4 == 1 else 0.0)
            calls += 1

    monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=lambda: now))
    items: Any = Interrupted(100_000, 500)
    assert read_rates(items, mean=1000, size=16_000_000)[0] == pytest.approx(1e9)
