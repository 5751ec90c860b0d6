"""Chooses the plan of a shuffle, by the sizes of the items, the memory, and the disk."""

from __future__ import annotations

import os
from dataclasses import replace

from millrace.errors import MillraceError
from millrace.shuffling.disk_rates import read_rates
from millrace.shuffling.memory_budget import (
    MB,
    Budget,
    ItemSizes,
    budget_of,
    check_memory,
    in_units,
    sizes_of,
)
from millrace.shuffling.plans import Gather, Scatter, ShufflePlan, plan_named
from millrace.shuffling.shuffle_items import Items

_INDEX_ENTRY = 20  # bytes of an item in the index of a shard: a size, an offset, a document
_LARGE_ITEM = 1 << 20  # bytes: a random read of this size is as fast as a sequential one
_PROBE_SIZE = 16 * MB  # bytes that each measurement of the disk reads


def choose_plan(
    items: Items, *, name: str, memory: int | None, workers: int, output_dir: str
) -> ShufflePlan:
    """Chooses how the items move.

    Args:
        items: The items.
        name: "auto", or the plan that the user wants.
        memory: Bytes of memory for the processes of the job; None: half of what is available.
        workers: The largest number of workers.
        output_dir: Folder of the output.

    Raises:
        ConfigError: Too little memory.
        MillraceError: Too little room on the disk.
    """
    sizes, budget = sizes_of(items), budget_of(memory, items)
    check_memory(budget, sizes, items)
    free = _room_beside_output(items, sizes.num_bytes, output_dir)
    if name == "auto":
        return _best_plan(items, sizes, budget, workers, free)
    plan = plan_named(name).fit(sizes, budget, workers)
    if free < plan.num_bytes:
        raise MillraceError(
            f"No space left for the plan {name}: it writes {in_units(plan.num_bytes)}, and the "
            f"disk of {output_dir} has {in_units(free)} free. Make room, give the plan gather, or "
            "write elsewhere"
        )
    return plan


def check_room(items: Items, output_dir: str) -> None:
    """Raises a MillraceError if the disk has no room for the output, by the number of items alone.

    With large weights, an output may be too large even for its permutation to be computed.
    """
    least = items.num_items * (items.item_size or 0) * items.dtype.itemsize
    _room_beside_output(items, least, output_dir)


def _best_plan(
    items: Items, sizes: ItemSizes, budget: Budget, workers: int, free: int
) -> ShufflePlan:
    """The fastest plan for this disk.

    Args:
        items: The items.
        sizes: Their sizes.
        budget: The memory.
        workers: The largest number of workers.
        free: Free bytes of the disk.
    """
    gather = Gather.fit(sizes, budget, workers)
    mean = sizes.num_bytes // sizes.num_items
    if sizes.in_buffer <= gather.buffer_size:
        return replace(gather, reason="the data fit one buffer")
    if mean >= _LARGE_ITEM:
        return replace(gather, reason=f"items of {in_units(mean)} are read fast at any place")
    rates = read_rates(items, mean=mean, size=min(_PROBE_SIZE, budget.buffers // 4))
    whole, scatter = Gather.in_one_bucket(sizes, budget), Scatter.fit(sizes, budget, workers)
    plans = [gather, *([whole] if whole else []), scatter]
    plan = min(plans, key=lambda plan: plan.seconds_per_byte(rates))
    reason = (
        f"the disk reads {in_units(rates.random)} of random items a second, and "
        f"{in_units(rates.sequential)} of consecutive ones"
    )
    if free < plan.num_bytes:
        needed = f"the plan {plan.name} needs {in_units(plan.num_bytes)} of disk"
        plan, reason = gather, f"{needed}, and {in_units(free)} are free"
    return replace(plan, reason=reason)


def _room_beside_output(items: Items, num_bytes: int, output_dir: str) -> int:
    """Free bytes of the disk without the indices of the output; an error if it has no room.

    Args:
        items: The items.
        num_bytes: Bytes of the items.
        output_dir: Folder of the output.
    """
    index_size, free = _INDEX_ENTRY * items.num_items, _free_bytes(output_dir)
    if free < num_bytes + index_size:
        raise MillraceError(
            f"No space left for the output: it has {in_units(num_bytes + index_size)}, and the "
            f"disk of {output_dir} has {in_units(free)} free. Make room, or write elsewhere"
        )
    return free - index_size


def _free_bytes(folder: str) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
