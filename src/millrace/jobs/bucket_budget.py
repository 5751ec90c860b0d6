"""What a run asks of buckets, computed before it begins: requests, bytes, seconds and money."""

import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from millrace.feed import BlendedDataset
from millrace.option_class import option, parse_size
from millrace.samples.stored import StoredTokens
from millrace.storage.transfers import start_pieces

RATE_OF_PREFIX = 5_500  # GETs a second that a store promises for the objects of one prefix
_REQUESTS = 64  # in flight, of `ObjectStorage`
_STEPS = 32  # that are computed, from all over the run

_priced = partial(option, group="of data in buckets")


@dataclass(frozen=True, kw_only=True)
class BucketOptions:
    """What decides the budget of a run whose token files are in buckets."""

    get_price: float = _priced("price of 1,000 GETs", 0.0004, least=0.0)
    gigabyte_price: float = _priced("price of a GB that leaves the bucket", 0.0, least=0.0)
    mirror: int | None = _priced(
        "size of a mirror on each node: 500G", None, least=0, parse=parse_size, metavar="SIZE"
    )
    nodes: int = _priced("nodes of the run, each with a mirror", 1, least=1)


@dataclass(frozen=True, kw_only=True)
class BucketBudget:
    """What a run takes from buckets; a step is one micro batch of all ranks.

    Attributes:
        requests_per_step, bytes_per_step: GETs, and bytes that they bring.
        bytes_over_used: Bytes that come over bytes that are used.
        seconds_per_step: Seconds of a step's requests, 64 in flight, without reading ahead.
        requests_per_sample: GETs of a sample.
        accelerators_per_prefix: Number of accelerators that 5,500 GETs a second feed.
        total_requests, total_bytes, price: Those of all training samples.
        mirror_saving: Share of the bytes that the mirrors save; None without one.
    """

    requests_per_step: float
    bytes_per_step: float
    bytes_over_used: float
    seconds_per_step: float
    requests_per_sample: float
    accelerators_per_prefix: int
    total_requests: int
    total_bytes: int
    price: float
    mirror_saving: float | None


def budget_of(
    dataset: Any, own: Any, block_size: int, tokens_per_second: float
) -> BucketBudget | None:
    """The budget of a dataset in steps of `block_size` samples; None if it is not in buckets."""
    if not dataset.is_remote:
        return None
    block_size, fetched = min(block_size, len(dataset)), list[int]()

    def count(start: int, stop: int) -> "Future[Any]":
        fetched.append(stop - start)
        return Future()

    num_steps = min(_STEPS, len(dataset) // block_size)
    starts = np.linspace(0, len(dataset) - block_size, num_steps).astype(np.int64)
    starts -= starts % block_size  # a step has one sequence length
    used = 0
    for start in starts.tolist():
        for source, numbers in _sources(dataset, np.arange(start, start + block_size)):
            pieces = list(zip(*(one.tolist() for one in source.ranges(numbers)), strict=True))
            start_pieces(count, pieces)
            used += sum(num_bytes for _, num_bytes in pieces)
    begins = time.perf_counter()
    dataset.tokens(starts[:1])
    round_trip = time.perf_counter() - begins
    per_step, bytes_per_step = len(fetched) / num_steps, sum(fetched) / num_steps
    all_steps = len(dataset) / block_size
    total_requests = round(per_step * all_steps)
    total_bytes = round(bytes_per_step * all_steps)
    return BucketBudget(
        requests_per_step=per_step,
        bytes_per_step=bytes_per_step,
        bytes_over_used=sum(fetched) / max(used, 1),
        seconds_per_step=max(per_step / _REQUESTS, 1) * round_trip,
        requests_per_sample=per_step / block_size,
        accelerators_per_prefix=int(RATE_OF_PREFIX / (per_step / block_size * tokens_per_second)),
        total_requests=total_requests,
        total_bytes=total_bytes,
        price=total_requests / 1e3 * own.get_price + total_bytes / 1e9 * own.gigabyte_price,
        mirror_saving=_mirror_saving(dataset, own, total_bytes),
    )


def _sources(dataset: Any, numbers: Any) -> Iterator[tuple[StoredTokens, Any]]:
    """The stored tokens of samples, and the samples' numbers in them."""
    if isinstance(dataset, BlendedDataset):
        which, inside = dataset.order.draws(dataset.run_numbers(numbers))
        for number in np.unique(which).tolist():
            yield from _sources(dataset.datasets[number], np.asarray(inside)[which == number])
    elif isinstance(dataset.source, StoredTokens):
        yield dataset.source, numbers
    elif dataset.source is not None:
        yield from _sources(dataset.source, numbers)


def _mirror_saving(dataset: Any, own: Any, total_bytes: int) -> float | None:
    """A node reads epochs / nodes of the data; its part of them comes once."""
    if own.mirror is None:
        return None
    files = {one.prefix: one.store.reader.size for one in dataset.stores}
    size = max(sum(files.values()), 1)
    reads = total_bytes / size / own.nodes
    return max(min(own.mirror / size, 1) * (1 - 1 / reads), 0.0) if reads > 0 else 0.0


def budget_lines(budget: BucketBudget) -> list[str]:
    """The budget as text for people."""
    one = budget
    lines = [
        f"\nbuckets      a step: {one.requests_per_step:,.1f} requests, "
        f"{one.bytes_per_step / 1e6:,.2f} MB ({one.bytes_over_used:.2f} times what is used), "
        f"{one.seconds_per_step:.3f} s with {_REQUESTS} in flight",
        f"one prefix   {RATE_OF_PREFIX:,} GETs/s feed {one.accelerators_per_prefix:,} accelerators",
        f"the run      {one.total_requests:,} requests, {one.total_bytes / 1e9:,.1f} GB, price "
        f"{one.price:,.2f}",
    ]
    if one.mirror_saving is not None:
        lines.append(f"mirrors      save {one.mirror_saving:.1%} of the bytes")
    if one.requests_per_sample > 2:
        lines.append(
            f"remedy       a sample takes {one.requests_per_sample:.1f} requests, as its documents "
            "are short: shuffle them into shards (millrace shuffle), which take one"
        )
    return lines
