"""What a run asks of buckets, computed before it begins: requests, bytes, seconds and money."""

import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from millrace.feed import BlendedDataset
from millrace.option_class import Options, option, parse_size
from millrace.samples.stored import StoredTokens
from millrace.shuffling.shuffle_items import in_units
from millrace.storage.transfers import start_pieces

RATE_OF_PREFIX = 5_500  # GETs a second that a store promises for the objects of one prefix
_REQUESTS = 64  # in flight, of `ObjectStorage`
_STEPS = 32  # that are computed, from all over the run
_SAMPLES = 4096  # of whose sources the epochs are computed

_priced = partial(option, group="of data in buckets")


@dataclass(frozen=True, kw_only=True)
class BucketOptions(Options):
    """What decides the budget of a run whose token files are in buckets."""

    get_price: float = _priced("price of 1,000 GETs", 0.0004, least=0.0)
    gigabyte_price: float = _priced("price of a GB that leaves the bucket", 0.0, least=0.0)
    mirror: int | None = _priced(
        "size of a mirror on each node: 500G", None, least=0, parse=parse_size, metavar="SIZE"
    )
    nodes: int = _priced("nodes of the run, each with a mirror", 1, least=1)


def budget_of(
    dataset: Any, own: BucketOptions, block_size: int, samples_per_second: float, num_samples: int
) -> dict[str, float] | None:
    """What a run takes from buckets; None if its dataset is not in one.

    A step is a micro batch of all ranks: `block_size` samples. An accelerator trains on
    `samples_per_second`. The run takes `num_samples` of the dataset. The budget has

        requests_per_step, bytes_per_step         GETs, and bytes that they bring
        bytes_over_used                           bytes that come over bytes that are used
        seconds_per_step                          of its requests, without reading ahead
        requests_per_sample                       GETs of a sample
        accelerators_per_prefix                   that the GETs a second of a prefix feed
        total_requests, total_bytes, price        of all training samples
        mirror_saving                             share of the bytes, if there is a mirror
    """
    if not dataset.is_remote:
        return None
    num_samples = min(num_samples, len(dataset))
    block_size, fetched = min(block_size, num_samples), list[int]()

    def count(start: int, stop: int) -> "Future[Any]":
        fetched.append(stop - start)
        return Future()

    num_steps = min(_STEPS, num_samples // block_size)
    starts = np.linspace(0, num_samples - block_size, num_steps).astype(np.int64)
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
    # Where no step drew from a bucket, one request is the most that they may have needed.
    per_step, all_steps = max(len(fetched), 1) / num_steps, num_samples / block_size
    total_requests = round(per_step * all_steps)
    total_bytes = round(sum(fetched) / num_steps * all_steps)
    budget = {
        "requests_per_step": per_step,
        "bytes_per_step": sum(fetched) / num_steps,
        "bytes_over_used": sum(fetched) / max(used, 1),
        "seconds_per_step": max(per_step / _REQUESTS, 1) * round_trip,
        "requests_per_sample": per_step / block_size,
        "accelerators_per_prefix": int(RATE_OF_PREFIX * block_size / per_step / samples_per_second),
        "total_requests": total_requests,
        "total_bytes": total_bytes,
        "price": total_requests / 1e3 * own.get_price + total_bytes / 1e9 * own.gigabyte_price,
    }
    if own.mirror is not None:
        budget["mirror_saving"] = _mirror_saving(dataset, own, num_samples)
    return budget


def _mirror_saving(dataset: Any, own: BucketOptions, num_samples: int) -> float:
    """A node reads epochs / nodes of what a source draws from; the mirror's part comes once."""
    files = defaultdict[Any, Any](lambda: np.zeros(2))  # bytes of the run, and epochs
    some = np.linspace(0, num_samples - 1, _SAMPLES).astype(np.int64)
    for source, numbers in _sources(dataset, some):
        order, end = source.order, int(numbers.max()) + 1
        num_bytes = source.ranges(numbers)[1].sum() / len(numbers) * end
        epochs = num_bytes / source.store.reader.size
        if hasattr(order, "epochs"):  # which begin behind those of another sequence length
            epochs = order.epochs(end) - order.epochs(0)
        files[source.store] += num_bytes, epochs
    num_bytes, epochs = np.array([*files.values()]).T
    kept = min((own.mirror or 0) / (num_bytes / epochs).sum(), 1)
    return float(kept * np.average(1 - 1 / np.maximum(epochs / own.nodes, 1), weights=num_bytes))


def _sources(dataset: Any, numbers: Any) -> Iterator[tuple[StoredTokens, Any]]:
    """The tokens of samples that are in buckets, and the samples' numbers in them."""
    if isinstance(dataset, BlendedDataset):
        which, inside = dataset.order.draws(dataset.run_numbers(numbers))
        for number in np.unique(which).tolist():
            yield from _sources(dataset.datasets[number], np.asarray(inside)[which == number])
    elif isinstance(dataset.source, StoredTokens):
        if dataset.source.is_remote:
            yield dataset.source, numbers
    elif dataset.source is not None:
        yield from _sources(dataset.source, numbers)


def budget_lines(budget: dict[str, float]) -> list[str]:
    """The budget as text for people."""
    step, run = in_units(budget["bytes_per_step"]), in_units(budget["total_bytes"])
    lines = [*_LINES]
    if "mirror_saving" in budget:
        lines.append("mirrors      save {mirror_saving:.1%} of the bytes")
    if budget["requests_per_sample"] > 2:
        lines.append(_REMEDY)
    return [line.format(step=step, run=run, **budget) for line in lines]


_LINES = (
    "\nbuckets      a step: {requests_per_step:,.1f} requests, {step} "
    "({bytes_over_used:.2f} times what is used), {seconds_per_step:.3f} s with "
    f"{_REQUESTS} in flight",
    f"one prefix   {RATE_OF_PREFIX:,} GETs/s feed {{accelerators_per_prefix:,}} accelerators",
    "the run      {total_requests:,} requests, {run}, price {price:,.2f}",
)
_REMEDY = (
    "remedy       a sample takes {requests_per_sample:.1f} requests, as its documents are short: "
    "shuffle them into shards (millrace shuffle), which take one"
)
