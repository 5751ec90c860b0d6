"""The plans of a shuffle: ways to move the items, which all write the same bytes.

    gather   for each bucket of places, read its items from all over the input; write them in order
    scatter  sort each run of the input by place, and write it; for each bucket, read its section of
             every run; write it in order

`gather` reads and writes the data once, at random places. If a bucket holds all items, it reads
them from the start to the end. `scatter` reads and writes the data twice, in large pieces.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from millrace.errors import ConfigError
from millrace.ragged import Numbers
from millrace.shuffling.buckets import bucket_bounds, run_bounds
from millrace.shuffling.disk_rates import Rates
from millrace.shuffling.memory_budget import (
    LARGEST_BUFFER,
    Budget,
    ItemSizes,
    budget_of,
    in_units,
)
from millrace.shuffling.permutations import Permutation
from millrace.shuffling.shard_work import ScatterWork, Work
from millrace.shuffling.shuffle_items import Items

_GOOD_WRITE_RATE = 1e9  # bytes per second, of a good disk


@dataclass(frozen=True, kw_only=True)
class ShufflePlan(ABC):
    """How the items move.

    Attributes:
        name: Name of the plan.
        num_passes: How often it reads and writes the data.
        sizes: Sizes of the items.
        workers: Number of worker processes.
        buffer_size: Bytes of memory for a group of items in a worker, with `ITEM_OVERHEAD` each.
        reason: Why it was chosen, for the user.
    """

    name: ClassVar[str]
    num_passes: ClassVar[int]
    sizes: ItemSizes
    workers: int
    buffer_size: int
    reason: str = "it was asked for"

    @classmethod
    @abstractmethod
    def fit(cls, sizes: ItemSizes, budget: Budget, workers: int) -> ShufflePlan:
        """The plan with the number of workers and the buffers that fit the memory."""

    @abstractmethod
    def seconds_per_byte(self, rates: Rates) -> float:
        """About how long the plan takes on a disk with these rates."""

    @abstractmethod
    def work(self, items: Items, permutation: Permutation, starts: Numbers) -> Work:
        """What the tasks need to know; see `Work`."""

    @property
    def num_bytes(self) -> int:
        """Bytes that the plan reads, and bytes that it writes."""
        return self.num_passes * self.sizes.num_bytes

    def resumed(self, budget: Budget, workers: int) -> ShufflePlan:
        """The plan of an interrupted job, with as many workers as the memory allows now."""
        return replace(self, workers=budget.num_workers(workers, self.buffer_size))

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self)}

    def __str__(self) -> str:
        num_bytes = in_units(self.num_bytes)
        return f"{self.name}, because {self.reason}, reads {num_bytes}, writes {num_bytes}"


class Gather(ShufflePlan):
    """Reads the items of each bucket from wherever they are in the input."""

    name = "gather"
    num_passes = 1

    @classmethod
    def fit(cls, sizes: ItemSizes, budget: Budget, workers: int) -> ShufflePlan:
        """See `ShufflePlan`; a small shuffle takes one bucket in the job's own process."""
        if sizes.in_buffer <= LARGEST_BUFFER and (whole := cls.in_one_bucket(sizes, budget)):
            return whole
        workers, size = budget.shared(workers, *sizes.gather_buffers())
        return cls(sizes=sizes, workers=workers, buffer_size=size)

    @classmethod
    def in_one_bucket(cls, sizes: ItemSizes, budget: Budget) -> Gather | None:
        """The plan that reads all items into one buffer, in their order; None: they do not fit."""
        if sizes.in_buffer > budget.buffers:
            return None
        return cls(sizes=sizes, workers=1, buffer_size=sizes.in_buffer)

    @property
    def has_one_bucket(self) -> bool:
        return self.sizes.in_buffer <= self.buffer_size

    def seconds_per_byte(self, rates: Rates) -> float:
        """See `ShufflePlan`; buckets are read while others are written, unless there is one."""
        if self.has_one_bucket:
            return 1 / rates.sequential + 1 / rates.write
        if rates.random * self.workers >= _GOOD_WRITE_RATE:
            return 0.0  # reading keeps up with writing: nothing is faster
        return 1 / rates.random

    def work(self, items: Items, permutation: Permutation, starts: Numbers) -> Work:
        """See `ShufflePlan`; with one worker, a bucket may hold several shards."""
        cuts = starts if self.workers > 1 else starts[[0, -1]]
        return Work(
            items=items,
            permutation=permutation,
            starts=starts,
            buckets=bucket_bounds(items, permutation, cuts, self.buffer_size),
        )

    def resumed(self, budget: Budget, workers: int) -> ShufflePlan:
        """See `ShufflePlan`."""
        return self if self.has_one_bucket else super().resumed(budget, workers)


class Scatter(ShufflePlan):
    """Sorts runs of the input by place and writes them; reads each bucket from all runs."""

    name = "scatter"
    num_passes = 2

    @classmethod
    def fit(cls, sizes: ItemSizes, budget: Budget, workers: int) -> ShufflePlan:
        """See `ShufflePlan`."""
        workers, size = budget.shared(workers, *sizes.scatter_buffers())
        return cls(sizes=sizes, workers=workers, buffer_size=size)

    def seconds_per_byte(self, rates: Rates) -> float:
        """See `ShufflePlan`; one of the two passes writes while it reads."""
        return 2 / rates.sequential + 1 / rates.write

    def work(self, items: Items, permutation: Permutation, starts: Numbers) -> Work:
        """See `ShufflePlan`; the buckets do not depend on the number of workers."""
        return ScatterWork(
            items=items,
            permutation=permutation,
            starts=starts,
            buckets=bucket_bounds(items, permutation, starts, self.buffer_size),
            runs=run_bounds(items, self.buffer_size),
        )


PLANS: tuple[type[Gather], type[Scatter]] = Gather, Scatter


def plan_named(name: str) -> type[ShufflePlan]:
    """The class of a plan."""
    return next(plan for plan in PLANS if plan.name == name)


def resume_plan(
    content: dict[str, Any], items: Items, *, memory: int | None, workers: int
) -> ShufflePlan:
    """The plan of an interrupted job, with as many workers as the memory allows now.

    Args:
        content: The plan as `ShufflePlan.to_json` gave it.
        items: The items.
        memory: Bytes of memory for the processes of the job; None: half of what is available, but
            as much as the plan needs at least.
        workers: The largest number of workers.

    Raises:
        ConfigError: Less memory than one worker of the plan needs.
    """
    fields = {**content, "sizes": ItemSizes(**content["sizes"])}
    plan = plan_named(fields.pop("name"))(**fields)
    budget = budget_of(memory, items)
    if memory is not None and budget.buffers < plan.buffer_size:
        least = budget.own + plan.buffer_size
        raise ConfigError(
            f"memory must be at least {least} bytes, not {in_units(budget.total)}: the interrupted "
            f"job was planned with buffers of {in_units(plan.buffer_size)}. Give memory={least} or "
            "more, or start over: --restart"
        )
    return plan.resumed(budget, workers)
