"""The plans of a shuffle: ways to move the items that write the same bytes.

    gather   for each bucket of places, read its items from all over the input; write them in order
    scatter  sort each run of the input by place, and write it; for each bucket, read its section of
             every run; write it in order

`gather` reads the data once, at random places, or from start to end if a bucket holds all items.
`scatter` reads and writes the data twice, in large pieces. The measured rates of the disk decide
between them.
"""

import math
import os
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from millrace.errors import ConfigError, MillraceError
from millrace.ragged import Numbers
from millrace.shuffling.memory_budget import (
    ITEM_OVERHEAD,
    MB,
    Budget,
    ItemSizes,
    budget_of,
    check_memory,
    group_bounds,
    in_units,
    sizes_of,
)
from millrace.shuffling.permutations import Permutation
from millrace.shuffling.shard_work import Work
from millrace.shuffling.shuffle_items import Items

PLANS = "gather", "scatter"
_LARGEST_BUFFER = 256 * MB  # of a worker; a larger one is not faster
_GOOD_BUFFER = 16 * MB
_GOOD_SECTION = 256 << 10  # bytes that pass 2 of `scatter` reads of a run at a time
_LARGE_SECTION = 8 << 20
_GOOD_WRITE_RATE = 1e9  # bytes per second of a good disk: reads that keep up with it are fast
_TRANSFERS = 3  # of `scatter`: it reads, reads again, and writes
_INDEX_ENTRY = 20  # bytes of an item in the index of a shard: a size, an offset, a document
_LARGE_ITEM = 1 << 20  # bytes: a random read of them is as fast as a sequential one


@dataclass(frozen=True, kw_only=True)
class ShufflePlan:
    """How the items move."""

    name: str  # "gather" or "scatter"
    sizes: ItemSizes
    workers: int
    buffer_size: int  # bytes of a worker, with `ITEM_OVERHEAD` for each item
    reason: str = "it was asked for"

    @property
    def has_one_bucket(self) -> bool:
        return self.name == "gather" and self.sizes.in_buffer <= self.buffer_size

    @property
    def num_bytes(self) -> int:
        """Bytes that the plan reads; it writes as many."""
        return self.sizes.num_bytes * (2 if self.name == "scatter" else 1)

    def work(self, items: Items, permutation: Permutation, starts: Numbers) -> Work:
        """What the tasks need to know; `starts` of the shards: int64 [shards + 1]."""
        whole, runs = starts[[0, -1]], None
        if self.name == "scatter":
            runs = group_bounds(items, np.arange, whole, self.buffer_size)
        # With one worker, a bucket of `gather` may hold several shards.
        cuts = whole if self.workers == 1 and runs is None else starts
        buckets = group_bounds(items, permutation.sources, cuts, self.buffer_size)
        return Work(items, permutation, starts, buckets, runs)

    def __str__(self) -> str:
        num_bytes = in_units(self.num_bytes)
        return f"{self.name}, because {self.reason}, reads {num_bytes}, writes {num_bytes}"


def fit_plan(name: str, sizes: ItemSizes, budget: Budget, workers: int) -> ShufflePlan:
    """The plan with as many workers, and buffers as large, as the memory allows."""
    good, most, least = _GOOD_BUFFER, _LARGEST_BUFFER, sizes.largest + ITEM_OVERHEAD
    if name == "scatter":
        # With buffers of M bytes, pass 2 reads M * M / num_bytes of a run at a time.
        good = max(good, math.isqrt(sizes.num_bytes * _GOOD_SECTION))
        most = max(most, math.isqrt(sizes.num_bytes * _LARGE_SECTION))
    elif sizes.in_buffer <= min(most, budget.buffers):
        return ShufflePlan(name=name, sizes=sizes, workers=1, buffer_size=sizes.in_buffer)
    workers = budget.num_workers(workers, max(good, least))
    size = budget.buffers if workers == 1 else budget.buffers // workers - budget.worker
    size = min(size, max(most, least))
    return ShufflePlan(name=name, sizes=sizes, workers=workers, buffer_size=size)


def choose_plan(
    items: Items, name: str, output_dir: str, memory: int | None, workers: int
) -> ShufflePlan:
    """The plan of that name, or the fastest one for "auto"; an error if memory or disk is short."""
    sizes, budget = sizes_of(items), budget_of(memory, items)
    check_memory(budget, sizes)
    free = check_room(items, sizes.num_bytes, output_dir)
    if name == "auto":
        return _best_plan(items, sizes, budget, workers, free)
    plan = fit_plan(name, sizes, budget, workers)
    remedy = "give the plan gather, "
    _check_free(f"plan {name}: it writes", plan.num_bytes, free, output_dir, remedy)
    return plan


def resume_plan(
    content: dict[str, Any], items: Items, memory: int | None, workers: int
) -> ShufflePlan:
    """The plan in the journal, with as many workers as the memory allows now.

    Without a limit of the memory, one works in any case.
    """
    plan = ShufflePlan(**{**content, "sizes": ItemSizes(**content["sizes"])})
    budget = budget_of(memory, items)
    if memory is not None and budget.buffers < plan.buffer_size:
        least = budget.own + plan.buffer_size
        raise ConfigError(
            f"memory must be at least {least} bytes, not {in_units(budget.total)}: the interrupted "
            f"job was planned with buffers of {in_units(plan.buffer_size)}. Give memory={least} or "
            "more, or start over: --restart"
        )
    if plan.has_one_bucket:
        return plan
    return replace(plan, workers=budget.num_workers(workers, plan.buffer_size))


def _best_plan(
    items: Items, sizes: ItemSizes, budget: Budget, workers: int, free: int
) -> ShufflePlan:
    """The fastest plan for a disk with `free` bytes left."""
    gather = fit_plan("gather", sizes, budget, workers)
    mean = sizes.num_bytes // sizes.num_items
    if gather.has_one_bucket:
        return replace(gather, reason="the data fit one buffer")
    if mean >= _LARGE_ITEM:
        return replace(gather, reason=f"items of {in_units(mean)} are read fast at any place")
    random, sequential = read_rates(items, mean=mean, size=min(16 * MB, budget.buffers // 4))
    plan = gather
    if random < min(sequential / _TRANSFERS, _GOOD_WRITE_RATE / gather.workers):
        plan = fit_plan("scatter", sizes, budget, workers)
        if sizes.in_buffer <= budget.buffers:
            plan = replace(gather, workers=1, buffer_size=sizes.in_buffer)
    if free < plan.num_bytes:
        needed = f"the plan scatter needs {in_units(plan.num_bytes)} of disk"
        return replace(gather, reason=f"{needed}, and {in_units(free)} are free")
    reason = (
        f"the disk reads {in_units(random)} of random items a second, and "
        f"{in_units(sequential)} of consecutive ones"
    )
    return replace(plan, reason=reason)


def check_room(items: Items, num_bytes: int, output_dir: str) -> int:
    """Free bytes of the disk beside the indices of an output; a MillraceError without room."""
    status, index_size = os.statvfs(output_dir), _INDEX_ENTRY * items.num_items
    free = status.f_bavail * status.f_frsize
    _check_free("output: it has", num_bytes + index_size, free, output_dir)
    return free - index_size


def _check_free(text: str, needed: int, free: int, output_dir: str, remedy: str = "") -> None:
    if free < needed:
        raise MillraceError(
            f"No space left for the {text} {in_units(needed)}, and the disk of {output_dir} has "
            f"{in_units(free)} free. Make room, {remedy}or write elsewhere"
        )


_NUM_ITEMS = 256  # random items
_NUM_GROUPS = 8  # of random items, for a median: another process may interrupt one of them
_MOST_ITEMS = 1 << 17  # consecutive items: the numbers of tiny ones take more memory than tokens


def read_rates(items: Items, *, mean: int, size: int) -> tuple[float, float]:
    """Bytes per second of reading random items, and consecutive ones.

    Reads items of `mean` bytes, about `size` bytes at a time.
    """
    random = np.random.default_rng()  # other items in each run: the last ones are cached
    scattered = np.unique(random.integers(0, items.num_items, _NUM_ITEMS))
    count = min(size // max(mean, 1) + 1, items.num_items, _MOST_ITEMS)
    consecutive = random.integers(0, items.num_items - count + 1) + np.arange(count)
    _rate(items, consecutive[:1], size)  # the first call opens files and loads code
    # Once each: the disk reads ahead, so a second round would find items in memory.
    groups = np.array_split(scattered, min(_NUM_GROUPS, len(scattered)))
    rate = statistics.median(_rate(items, group, size // _NUM_GROUPS) for group in groups)
    return rate, _rate(items, consecutive, size)


def _rate(items: Items, numbers: Numbers, size: int) -> float:
    """Bytes per second of reading the first items that fit `size` bytes."""
    sizes = items.sizes(numbers)
    ends = np.cumsum(sizes)
    count = max(int(np.searchsorted(ends, size // items.dtype.itemsize, side="right")), 1)
    buffer = np.ones(int(ends[count - 1]), items.dtype)  # its pages exist before the clock starts
    start = time.perf_counter()
    items.read(numbers[:count], buffer, (ends - sizes)[:count])
    return float(max(buffer.nbytes, 1) / max(time.perf_counter() - start, 1e-9))
