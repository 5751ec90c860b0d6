"""The plan of a shuffle: how the items move, and how many workers and how much memory that takes.

    memory   read all items in their order, each to its place in one buffer; write the shards
    gather   for each group of places, read its items from the input; write them in order
    scatter  sort each run of the input by place, and write it; for each group of places, read its
             part of every run; write it in order

The output is the same. `gather` reads items from all over the input; `scatter` reads and writes the
data twice, in large pieces.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.cores import available_memory
from millrace.errors import ConfigError, MillraceError
from millrace.jobs.shuffling.items import Items
from millrace.jobs.shuffling.passes import starts_of
from millrace.jobs.shuffling.permutations import Permutation, even_sizes
from millrace.jobs.shuffling.probe import is_gather_faster, read_rates

MB = 1_000_000
ITEM_OVERHEAD = 128
"""Bytes of memory per item in a buffer: its number, place, size and offsets, and copies of them.

It decides where runs and buckets end. A job of another version must not continue with these files:
change the version in `arguments.identity` with it.
"""

# Private memory of processes, measured and rounded up. The job's own process has 100 MB beside the
# budget, which is enough without Arrow.
_WORKER_MEMORY = 45 * MB  # Python, NumPy and this package in a worker process
_ARROW_MEMORY = 90 * MB  # more in each process that copies the origins of documents
_ORIGINS_MEMORY = 45 * MB  # of that, what a further thread takes in one process
_LEAST_BUFFER = 8 * MB  # of a worker
_GOOD_BUFFER = 16 * MB
_LARGEST_BUFFER = 256 * MB  # more makes nothing faster
_GOOD_SECTION = 256 << 10  # bytes that pass 2 reads of a run at a time
_LARGE_SECTION = 8 << 20
_INDEX_ENTRY = 20  # bytes of an item in the index of a shard: a size, an offset, a document
_BLOCK = 1 << 16  # items whose sizes are looked up at a time
_SHARE = 2  # of the available memory, a half: the rest is for the page cache

_LARGE_ITEM = 1 << 20  # bytes: a random read of this size is as fast as a sequential one
_PROBE_SIZE = 16 * MB  # bytes that each measurement of the disk reads
_WRITE_RATE = 1e9  # bytes per second, of a good disk
_GOOD_RATIO = 0.5  # `gather` writes while it reads, and `memory` reads all before it writes


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the items move.

    Attributes:
        name: "memory", "gather" or "scatter".
        reason: Why, for the user.
        workers: Number of worker processes, or threads of the memory plan.
        buffer_size: Bytes of memory for a group of items in a worker, with `ITEM_OVERHEAD` each.
        bytes_read, bytes_written: Predicted bytes.
    """

    name: str
    reason: str
    workers: int
    buffer_size: int
    bytes_read: int
    bytes_written: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.name}, because {self.reason}, reads {in_units(self.bytes_read)}, writes "
            f"{in_units(self.bytes_written)}"
        )


def choose_plan(
    items: Items,
    *,
    name: str,
    memory: int | None,
    workers: int,
    engine: str,
    output_dir: str,
) -> Plan:
    """Chooses how the items move.

    Args:
        items: The items.
        name: "auto", or the plan that the user wants.
        memory: Bytes of memory for the processes of the job; None: half of what is available.
        workers: The largest number of workers.
        engine: "local" or "ray".
        output_dir: Folder of the output.

    Raises:
        ConfigError: Too little memory, or a plan that cannot work.
        MillraceError: Too little room on the disk.
    """
    num_bytes, largest = _measure(items)
    budget, memory = memory_budget(memory), memory_for_buffers(memory, items)
    if memory < max(_LEAST_BUFFER, largest + ITEM_OVERHEAD):
        raise _too_little_memory(budget, memory, largest, items)
    free, index_size = _free_bytes(output_dir), _INDEX_ENTRY * items.num_items
    _check_room(num_bytes + index_size, free, output_dir)
    free -= index_size
    needed = memory_of_all(num_bytes, items.num_items, workers)
    if items.has_origins:
        needed += (workers - 1) * _ORIGINS_MEMORY
    if name == "memory" and engine == "ray":
        raise ConfigError(
            "plan is 'memory', which works in one process, and engine is 'ray'; give the plan "
            "gather or scatter, or the engine local"
        )
    if name == "memory" and needed > memory:
        raise ConfigError(
            f"plan is 'memory', and the items take {in_units(needed)}, more than the memory of "
            f"{in_units(memory)}; give the plan auto, or memory={needed + budget - memory}"
        )
    reason = "it was asked for"
    if name == "auto":
        fits = needed <= memory and engine == "local"
        if fits and num_bytes <= _LARGEST_BUFFER:
            name, reason = "memory", "the data are small"
        else:
            name, reason = _best_plan(
                items, num_bytes, fits=fits, free=free, memory=memory, workers=workers
            )
    elif name == "scatter" and free < 2 * num_bytes:
        raise MillraceError(
            f"No space left for the plan scatter: it writes {in_units(num_bytes)} twice, and the "
            f"disk of {output_dir} has {in_units(free)} free. Make room, give the plan gather, or "
            "write elsewhere"
        )
    times = 2 if name == "scatter" else 1
    plan = Plan(
        name=name,
        reason=reason,
        workers=workers,
        buffer_size=memory,
        bytes_read=times * num_bytes,
        bytes_written=times * num_bytes,
    )
    if name == "memory":
        return replace(plan, buffer_size=needed)
    return _share_memory(plan, items, num_bytes, largest, memory)


def check_room(items: Items, output_dir: str) -> None:
    """Raises a MillraceError if the disk has no room for the output, by the number of items alone.

    With large weights, an output may be too large even for its permutation to be computed.
    """
    least = items.num_items * (items.item_size or 0) * items.dtype.itemsize
    _check_room(least + _INDEX_ENTRY * items.num_items, _free_bytes(output_dir), output_dir)


def plan_from_json(
    content: dict[str, Any], items: Items, *, workers: int, memory: int | None
) -> Plan:
    """The plan of an interrupted job, with as many workers as the memory allows now.

    Args:
        content: The plan as `Plan.to_json` gave it.
        items: The items.
        workers: The largest number of workers.
        memory: Bytes of memory for the processes of the job; None: what is available, but as much
            as the plan needs at least.

    Raises:
        ConfigError: Less memory than one worker of the plan needs.
    """
    plan = Plan(**content)
    buffers = memory_for_buffers(memory, items)
    if buffers < plan.buffer_size and memory is not None:
        least = memory + plan.buffer_size - buffers
        raise ConfigError(
            f"memory is {in_units(memory)}, and the interrupted job was planned with buffers of "
            f"{in_units(plan.buffer_size)}; give memory={least} or more, or start over: --restart"
        )
    if plan.name == "memory":
        workers = min(workers, plan.workers)
    else:
        workers = _num_workers(workers, buffers, plan.buffer_size, items)
    return replace(plan, workers=workers)


def memory_budget(memory: int | None) -> int:
    """Bytes of memory for the processes of a job; by default half of what is available."""
    return available_memory() // _SHARE if memory is None else memory


def memory_for_buffers(memory: int | None, items: Items) -> int:
    """Bytes of memory for workers and buffers, without what the job's own process takes."""
    return memory_budget(memory) - (_ARROW_MEMORY if items.has_origins else 0)


def memory_of_all(num_bytes: int, num_items: int, workers: int) -> int:
    """Bytes of memory of the memory plan: all items, an offset each, and the threads' blocks."""
    return num_bytes + 8 * num_items + workers * min(_BLOCK, num_items) * ITEM_OVERHEAD


def in_units(num_bytes: float) -> str:
    """A number of bytes for a message: "6.0 GB"."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"


# ---- groups of items that fit a buffer ----


def shard_starts(num_items: int, num_shards: int) -> NDArray[np.int64]:
    """First place of each shard, and the end: int64 [num_shards + 1]."""
    return starts_of(even_sizes(num_items, num_shards))


def bucket_bounds(
    items: Items, permutation: Permutation, starts: NDArray[np.int64], buffer_size: int
) -> NDArray[np.int64]:
    """First place of each bucket, and the end; a bucket fits the buffer and lies in one shard."""

    def sizes(start: int, stop: int) -> NDArray[np.int64]:
        return items.sizes(permutation.sources(start, stop))

    ends = [
        _group_ends(items, sizes, start, stop, buffer_size)
        for start, stop in itertools.pairwise(starts.tolist())
    ]
    return np.concatenate([np.zeros(1, np.int64), *ends])


def run_bounds(items: Items, buffer_size: int) -> NDArray[np.int64]:
    """First item of each run of the input, and the end; a run fits the buffer."""

    def sizes(start: int, stop: int) -> NDArray[np.int64]:
        return items.sizes(np.arange(start, stop))

    ends = _group_ends(items, sizes, 0, items.num_items, buffer_size)
    return np.concatenate([np.zeros(1, np.int64), ends])


def _group_ends(
    items: Items,
    sizes: Callable[[int, int], NDArray[np.int64]],
    start: int,
    stop: int,
    buffer_size: int,
) -> NDArray[np.int64]:
    """Ends of consecutive groups of items, each of which fits the buffer; the last is `stop`."""
    if start == stop:
        return np.empty(0, np.int64)
    if items.item_size is not None:  # groups of equal size
        most = buffer_size // (items.item_size * items.dtype.itemsize + ITEM_OVERHEAD)
        count = -(-(stop - start) // most)
        return start + np.arange(1, count + 1, dtype=np.int64) * (stop - start) // count
    ends = _ends_by_size(sizes, items.dtype.itemsize, start, stop, buffer_size)
    return np.array([*ends, stop], np.int64)


def _ends_by_size(
    sizes: Callable[[int, int], NDArray[np.int64]],
    token_size: int,
    start: int,
    stop: int,
    buffer_size: int,
) -> Iterator[int]:
    """As `_group_ends`, for items of any size, without the last end."""
    used = 0  # bytes of the group that is not ended
    for block in range(start, stop, _BLOCK):
        costs = sizes(block, min(block + _BLOCK, stop)) * token_size + ITEM_OVERHEAD
        totals = np.cumsum(costs)
        before = -used  # the total before the first item of the group
        while True:
            index = int(np.searchsorted(totals, before + buffer_size, side="right"))
            if index == len(totals):
                break
            yield block + index
            before = int(totals[index - 1]) if index > 0 else 0
        used = int(totals[-1]) - before


# ---- what speaks for which plan ----


def _measure(items: Items) -> tuple[int, int]:
    """Bytes of all items, and of the largest one."""
    token_size = items.dtype.itemsize
    if items.item_size is not None:
        return items.num_items * items.item_size * token_size, items.item_size * token_size
    total = largest = 0
    for start in range(0, items.num_items, _BLOCK):
        sizes = items.sizes(np.arange(start, min(start + _BLOCK, items.num_items)))
        total, largest = total + int(sizes.sum()), max(largest, int(sizes.max()))
    return total * token_size, largest * token_size


def _too_little_memory(budget: int, memory: int, largest: int, items: Items) -> ConfigError:
    least = budget - memory + max(_LEAST_BUFFER, largest + ITEM_OVERHEAD)
    reason = ""
    if largest + ITEM_OVERHEAD > budget:
        what = "the longest document" if items.item_size is None else "a sequence"
        reason = f", and {what} has {in_units(largest)}, which must fit"
    elif budget > memory:
        reason = f", and copying the origins of documents takes {in_units(budget - memory)}"
    return ConfigError(
        f"memory is {in_units(budget)}{reason}; at least {least} bytes ({in_units(least)}) are "
        "needed. Give more memory"
    )


def _best_plan(
    items: Items, num_bytes: int, *, fits: bool, free: int, memory: int, workers: int
) -> tuple[str, str]:
    """The best plan for this disk, and the reason; `fits` says whether all items fit the memory."""
    mean = num_bytes // items.num_items
    if mean >= _LARGE_ITEM:
        return "gather", f"items of {in_units(mean)} are read at any place at full speed"
    random, sequential = read_rates(items, mean=mean, size=min(_PROBE_SIZE, memory // 4))
    rates = f"({in_units(random)} and {in_units(sequential)} a second)"
    if random >= _GOOD_RATIO * sequential:
        return "gather", f"random reads are about as fast as sequential ones {rates}"
    if random * workers >= _WRITE_RATE:
        return "gather", f"random reads, {workers} at a time, keep up with the writes {rates}"
    if fits:
        return "memory", f"the data fit it, and random reads are slow {rates}"
    if free < 2 * num_bytes:
        return "gather", (
            f"scatter needs {in_units(2 * num_bytes)} of disk, and {in_units(free)} are free"
        )
    if is_gather_faster(random, sequential):
        return "gather", f"random reads are not much slower than sequential ones {rates}"
    return "scatter", f"random reads are much slower than sequential ones {rates}"


# ---- memory ----


def _share_memory(plan: Plan, items: Items, num_bytes: int, largest: int, memory: int) -> Plan:
    """The plan with the number of workers and the buffers that fit the memory."""
    good, most = _GOOD_BUFFER, _LARGEST_BUFFER
    if plan.name == "scatter":
        # With buffers of M bytes, pass 2 reads M * M / num_bytes of a run at a time.
        good = max(good, math.isqrt(num_bytes * _GOOD_SECTION))
        most = max(most, math.isqrt(num_bytes * _LARGE_SECTION))
    good, most = max(good, largest + ITEM_OVERHEAD), max(most, largest + ITEM_OVERHEAD)
    workers = _num_workers(plan.workers, memory, good, items)
    size = memory if workers == 1 else memory // workers - _worker_memory(items)
    return replace(plan, workers=workers, buffer_size=min(size, most))


def _num_workers(workers: int, memory: int, buffer_size: int, items: Items) -> int:
    """The number of workers, each with a buffer; one worker is the job's own process."""
    return max(min(workers, memory // (_worker_memory(items) + buffer_size)), 1)


def _worker_memory(items: Items) -> int:
    """Bytes of memory of a worker process beside its buffer."""
    return _WORKER_MEMORY + (_ARROW_MEMORY if items.has_origins else 0)


def _check_room(num_bytes: int, free: int, output_dir: str) -> None:
    if free < num_bytes:
        raise MillraceError(
            f"No space left for the output: it has {in_units(num_bytes)}, and the disk of "
            f"{output_dir} has {in_units(free)} free. Make room, or write elsewhere"
        )


def _free_bytes(folder: str) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
