"""The plans of a shuffle: ways to move the items that write the same bytes.

    gather   for each bucket of places, read its items from all over the input; write them in order
    scatter  sort each run of the input by place, and write it; for each bucket, read its section of
             every run; write it in order

`gather` reads the data once, at random places, or from start to end if a bucket holds all items.
`scatter` reads and writes the data twice, in large pieces. The measured rates of the disk decide
between them.

This module also says how much memory a shuffle may take, how its workers share it, and which items
fit a buffer. Memory is counted, not measured: `ITEM_OVERHEAD` for each item in a buffer, and a
constant for each process.
"""

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from millrace.cores import available_memory
from millrace.errors import ConfigError, MillraceError
from millrace.ragged import Numbers
from millrace.shuffling.permutations import Permutation
from millrace.shuffling.shard_work import Work
from millrace.shuffling.shuffle_items import Items, ItemsAt, in_units

PLANS = "gather", "scatter"
MB = 1_000_000

ITEM_OVERHEAD = 128
"""Bytes per item in a buffer: its number, place, size and offsets, and copies of them.

It decides where runs and buckets end: change the version in `shuffle_job._identity` with it.
"""

# Private memory of processes, measured and rounded up. The job's own process has 100 MB beside the
# budget, which is enough without Arrow.
_WORKER_MEMORY = 45 * MB  # of a worker process: Python, NumPy and this package
_ARROW_MEMORY = 90 * MB  # more in each process that copies the origins of documents
_LEAST_BUFFER = 8 * MB  # of a worker
_BLOCK = 1 << 16  # items whose sizes are looked up at a time
_LARGEST_BUFFER = 256 * MB  # of a worker; a larger one is not faster
_GOOD_BUFFER = 16 * MB
_GOOD_SECTION = 256 << 10  # bytes that pass 2 of `scatter` reads of a run at a time
_LARGE_SECTION = 8 << 20
_GOOD_WRITE_RATE = 1e9  # bytes per second of a good disk: reads that keep up with it are fast
_TRANSFERS = 3  # of `scatter`: it reads, reads again, and writes
_INDEX_ENTRY = 20  # bytes of an item in the index of a shard: a size, an offset, a document
_NUM_ITEMS = 256  # random items
_MOST_ITEMS = 1 << 17  # consecutive items: the numbers of tiny ones take more memory than tokens


class Budget(NamedTuple):
    """Memory of a shuffle in bytes."""

    total: int  # for all processes of the job
    own: int  # for the job's own process, if it copies the origins of documents
    worker: int  # for a worker process beside its buffer

    @property
    def buffers(self) -> int:
        """Bytes for all workers and their buffers."""
        return self.total - self.own

    def num_workers(self, workers: int, buffer_size: int) -> int:
        """The number of workers, each with a buffer; one worker is the job's own process."""
        return max(min(workers, self.buffers // (self.worker + buffer_size)), 1)


def budget_of(memory: int | None, items: Items) -> Budget:
    """The budget of a job; without a limit half of the available memory."""
    arrow = _ARROW_MEMORY if items.has_origins else 0
    total = available_memory() // 2 if memory is None else memory  # half is for the page cache
    return Budget(total, arrow, _WORKER_MEMORY + arrow)


@dataclass(frozen=True)
class ItemSizes:
    """Number of items, and bytes of all and of the largest one."""

    num_items: int
    num_bytes: int
    largest: int

    @property
    def in_buffer(self) -> int:
        """Bytes of a buffer for all items."""
        return self.num_bytes + self.num_items * ITEM_OVERHEAD


def sizes_of(items: Items) -> ItemSizes:
    """The sizes of all items; looks up each one if they differ."""
    count, size = items.num_items, items.dtype.itemsize
    if items.item_size is not None:
        return ItemSizes(count, count * items.item_size * size, items.item_size * size)
    total = largest = 0
    for start in range(0, count, _BLOCK):
        sizes = items.sizes(np.arange(start, min(start + _BLOCK, count))) * size
        total, largest = total + int(sizes.sum()), max(largest, int(sizes.max()))
    return ItemSizes(count, total, largest)


def group_bounds(items: Items, items_at: ItemsAt, starts: Numbers, buffer_size: int) -> Numbers:
    """Cuts places into groups whose items fit a buffer: buckets of the output, runs of the input.

    A group begins at each of the starts, of which the last is the end. Returns the starts of all
    groups, and the end: int64 [groups + 1].
    """
    bounds = [np.zeros(1, np.int64)]
    for start, stop in itertools.pairwise(starts.tolist()):
        if items.item_size is None:
            ends = _ends_by_size(items, items_at, start, stop, buffer_size)
            bounds.append(np.array([*ends, stop], np.int64))
        else:  # groups of equal size
            most = buffer_size // (items.item_size * items.dtype.itemsize + ITEM_OVERHEAD)
            count = -(-(stop - start) // most)
            bounds.append(start + np.arange(1, count + 1) * (stop - start) // count)
    return np.concatenate(bounds)


def _ends_by_size(
    items: Items, items_at: ItemsAt, start: int, stop: int, buffer_size: int
) -> Iterator[int]:
    """Ends of groups that are as large as the buffer allows, without the last one."""
    used = 0  # bytes of the last group
    for block in range(start, stop, _BLOCK):
        sizes = items.sizes(items_at(block, min(block + _BLOCK, stop)))
        totals = np.cumsum(sizes * items.dtype.itemsize + ITEM_OVERHEAD)
        before = -used  # total before the first item of the group
        while (index := np.searchsorted(totals, before + buffer_size, "right")) < len(totals):
            yield block + int(index)
            before = int(totals[index - 1]) if index > 0 else 0
        used = int(totals[-1]) - before


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

    def work(
        self, items: Items, permutation: Permutation, starts: Numbers, upload_to: str | None = None
    ) -> Work:
        """What the tasks need to know; `starts` of the shards: int64 [shards + 1]."""
        whole, runs = starts[[0, -1]], None
        if self.name == "scatter":
            runs = group_bounds(items, np.arange, whole, self.buffer_size)
        # With one worker, a bucket of `gather` may hold several shards.
        cuts = whole if self.workers == 1 and runs is None else starts
        buckets = group_bounds(items, permutation.sources, cuts, self.buffer_size)
        return Work(items, permutation, starts, buckets, runs, upload_to=upload_to)

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
    items: Items, name: str, output_dir: str, memory: int | None, workers: int, share: float = 1.0
) -> ShufflePlan:
    """The plan of that name, or the fastest one for "auto"; an error if memory or disk is short.

    At most `share` of the output is on the disk at a time.
    """
    check_room(items, 0, output_dir)  # with large weights, even sizes take too long
    sizes, budget = sizes_of(items), budget_of(memory, items)
    least = budget.own + max(_LEAST_BUFFER, sizes.largest + ITEM_OVERHEAD)
    if budget.total < least:
        origins = f", and copying their origins takes {in_units(budget.own)}" if budget.own else ""
        raise ConfigError(
            f"memory must be at least {least} bytes ({in_units(least)}), not "
            f"{in_units(budget.total)}: the largest item has {in_units(sizes.largest)}{origins}. "
            "Give more memory"
        )
    free = check_room(items, int(sizes.num_bytes * share), output_dir)
    is_auto = name == "auto"
    fit = partial(fit_plan, sizes=sizes, budget=budget, workers=workers)
    plan = _best_plan(items, budget, fit) if is_auto else fit(name)
    if plan.name == "gather" or plan.num_bytes <= free:
        return plan
    problem = f"scatter needs {in_units(plan.num_bytes)} of disk, and {in_units(free)} are free"
    if is_auto:
        return replace(fit("gather"), reason=problem)
    raise MillraceError(
        f"No space left: the plan {problem} in {output_dir}. Make room, give --plan gather, or "
        "write elsewhere"
    )


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


def _best_plan(items: Items, budget: Budget, fit: Callable[[str], ShufflePlan]) -> ShufflePlan:
    """The fastest plan, if the disk has room for it."""
    plan = fit("gather")
    if plan.has_one_bucket:
        return replace(plan, reason="the data fit one buffer")
    random, sequential = read_rates(items, min(16 * MB, budget.buffers // 4))
    if random < min(sequential / _TRANSFERS, _GOOD_WRITE_RATE / plan.workers):
        if plan.sizes.in_buffer <= budget.buffers:
            plan = replace(plan, workers=1, buffer_size=plan.sizes.in_buffer)
        else:
            plan = fit("scatter")
    reason = (
        f"the disk reads {in_units(random)} of random items a second, and "
        f"{in_units(sequential)} of consecutive ones"
    )
    return replace(plan, reason=reason)


def check_room(items: Items, num_bytes: int, output_dir: str) -> int:
    """Free bytes of the disk beside the indices of an output; a MillraceError without room."""
    status, index_size = os.statvfs(output_dir), _INDEX_ENTRY * items.num_items
    free, needed = status.f_bavail * status.f_frsize, num_bytes + index_size
    if free < needed:
        raise MillraceError(
            f"No space left for the output: it has {in_units(needed)}, and the disk of "
            f"{output_dir} has {in_units(free)} free. Make room, or write elsewhere"
        )
    return free - index_size


def read_rates(items: Items, size: int) -> tuple[float, float]:
    """Bytes per second of reading random and consecutive items, about `size` bytes of each."""
    random = np.random.default_rng()  # other items in each run: the last ones are cached
    scattered = np.unique(random.integers(0, items.num_items, _NUM_ITEMS))
    count = min(items.num_items, _MOST_ITEMS)
    consecutive = random.integers(0, items.num_items - count + 1) + np.arange(count)
    rates = []
    for numbers in (consecutive[:1], scattered, consecutive):  # the first opens files, loads code
        sizes = items.sizes(numbers)
        ends = np.cumsum(sizes)
        count = max(int(np.searchsorted(ends, size // items.dtype.itemsize, side="right")), 1)
        buffer = np.ones(int(ends[count - 1]), items.dtype)  # its pages exist before the clock
        start = time.perf_counter()
        items.read(numbers[:count], buffer, (ends - sizes)[:count])
        rates.append(max(buffer.nbytes, 1) / max(time.perf_counter() - start, 1e-9))
    return rates[1], rates[2]
