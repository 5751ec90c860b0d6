"""A check that all ranks agree: where they are, what they take next, and what they have read."""

import json
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xxhash
from torch import distributed
from torch.distributed import distributed_c10d

from millrace.checks import check_float, check_int
from millrace.errors import ConfigError, MillraceError
from millrace.feed import FullValidationSampler, Loader
from millrace.feed.stream_data import IN_TURN
from millrace.torch.ranks import distributed_rank

_TIMEOUT = 120.0  # seconds
_MOST_LISTED = 8  # ranks in a message
_MOST_SHOWN = 200  # characters of a value in a message
# What must be equal: an entry of the reports, its name in a message, and the remedy. The first two
# on all ranks, the others on those with one data-parallel rank.
_EQUAL = (
    ("position", "consumed_samples is", "load the same checkpoint on every rank"),
    ("fingerprint", "the checksum of the fingerprint is", "give all the same files and options"),
    ("samples", "the next samples are", "with one data-parallel rank, take the same samples"),
    ("checksums", "the checksums of the last batches are", "run `millrace verify` on their files"),
)
# Calls by group: every rank of a group makes the same, so the numbers agree.
_num_calls: Counter[str] = Counter()

Report = dict[str, Any]


def check_consistency(
    loader: Loader,
    *,
    data_parallel_rank: int | None = None,
    checksum_batches: int = 0,
    timeout: float = _TIMEOUT,
    group: distributed.ProcessGroup | None = None,
) -> None:
    """Compares the loaders of all ranks, and names the ranks that differ.

    All ranks must be at the same position of the same data in the same order. Processes with the
    same data-parallel rank (tensor-, pipeline- and context-parallel replicas) must take the same
    next samples and, on request, have read the same batches; others must take different samples.
    Every rank of the group must call this at the same step. Without an initialised
    torch.distributed it does nothing.

    Each rank sends some hundred bytes through the store of the process group, without a collective
    operation: if a rank has died or hangs, the call ends on the others by a timeout.

    Args:
        loader: The loader of this rank.
        data_parallel_rank: Data-parallel rank of this process. None: the rank in the group, so
            without replicas.
        checksum_batches: Number of batches before the position, or all if they are fewer, to read
            again and compare by checksum. At a position inside a step, which another number of
            ranks may leave, they are the batches before that step.
        timeout: Seconds to wait for the others.
        group: Process group; None: all ranks.

    Raises:
        MillraceError: The ranks differ, one of them failed, or one did not answer in time.
        ConfigError: An argument outside its limits, or a group without this process.
    """
    rank = distributed_rank(group)
    if rank == -1:
        raise ConfigError("this process is not in the group: call check_consistency on its ranks")
    error: BaseException | None = None
    seconds, report = _TIMEOUT, Report()
    try:
        checksum_batches = check_int("checksum_batches", checksum_batches, 0)
        number = (rank or 0) if data_parallel_rank is None else data_parallel_rank
        number = check_int("data_parallel_rank", number, 0)
        if not 0 < check_float("timeout", timeout) <= 10**6:
            raise ConfigError(f"timeout must be above 0, up to 1,000,000 seconds, not {timeout}")
        seconds = float(timeout)
        if rank is not None:
            report = {"data_parallel_rank": number, **_report(loader, checksum_batches)}
    except BaseException as caught:  # raised below: the other ranks wait for a report
        error, report = caught, {"error": f"{type(caught).__name__}: {caught}"}
    message = "" if rank is None else _exchange(report, group, seconds)
    if error is not None:
        raise error
    if message:
        raise MillraceError(message)


def _exchange(report: Report, group: distributed.ProcessGroup | None, timeout: float) -> str:
    """Sends a report, waits for all, and returns what is wrong with them, or ""."""
    name = "" if group is None else group.group_name
    call = _num_calls[name]
    _num_calls[name] += 1
    store = distributed.PrefixStore(
        f"millrace/check_consistency/{name}/{call}", distributed_c10d._get_default_store()
    )
    keys = [str(rank) for rank in range(distributed.get_world_size(group))]
    rank, deadline = distributed.get_rank(group), time.monotonic() + timeout

    def all_have_counted(times: int) -> bool:
        """Waits for each rank to count so often; False at the deadline."""
        pause = 0.002
        while store.add("count", 0) < times * len(keys):  # a wait of the store is deaf to Ctrl-C
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(0.5, 1.5 * pause)
        return True

    try:
        store.set(keys[rank], json.dumps(report))
        store.add("count", 1)
        if not all_have_counted(1):
            missing = _ranks([number for number, key in enumerate(keys) if not store.check([key])])
            return f"{missing} did not answer within {timeout:.4g} s: dead, hangs, or is elsewhere"
        message = _problem([json.loads(text) for text in store.multi_get(keys)])
        store.add("count", 1)
        if rank == 0:  # the store ends with this process, perhaps at once: let the others read
            all_have_counted(2)
        return message
    except distributed.DistNetworkError as lost:
        return f"the store of the process group is lost: its process, often rank 0, ended: {lost}"


def _report(loader: Loader, checksum_batches: int) -> Report:
    sampler, position, samples = loader.sampler, loader.consumed_samples, []
    if not isinstance(loader.dataset, IN_TURN) and sampler.has_step(position):
        numbers = sampler.sample_numbers(position)
        if isinstance(sampler, FullValidationSampler):  # padding is taken twice
            numbers = numbers[~sampler.is_padding(position)]
        samples = numbers.tolist()
    fingerprint = json.dumps(loader.state_dict()["fingerprint"], sort_keys=True, default=str)
    return {
        "position": position,
        "fingerprint": xxhash.xxh3_64(fingerprint.encode()).hexdigest(),
        "samples": samples,
        "checksums": list(_checksums(loader, checksum_batches)),
    }


def _checksums(loader: Loader, num_batches: int) -> Iterator[str]:
    """The checksum of each of the last batches, with its first position."""
    sampler: Any = loader.sampler
    if num_batches == 0:
        return
    if isinstance(loader.dataset, IN_TURN) or not getattr(sampler, "consumed_at", None):
        name = type(sampler).__name__
        raise ConfigError(f"a {name} cannot tell earlier steps: leave out checksum_batches")
    position = loader.consumed_samples
    limit = sampler.num_steps() if getattr(sampler, "num_steps", None) else position
    step = bisect_right(range(limit + 1), position, key=sampler.consumed_at) - 1
    for start in map(sampler.consumed_at, range(max(0, step - num_batches), step)):
        with loader._maker.lock:  # a thread of the loader may be in the dataset
            batch = loader.dataset.batch(sampler.sample_numbers(start))
        checksum = xxhash.xxh3_64()
        for name, array in sorted(batch.items()):
            array = np.ascontiguousarray(array)
            checksum.update(f"{name} {array.dtype} {array.shape}".encode())
            checksum.update(array.data)
        yield f"{checksum.hexdigest()} at sample {start}"


def _problem(reports: Sequence[Report]) -> str:
    """What is wrong, or ""."""
    errors = [f"rank {rank}: {r['error']}" for rank, r in enumerate(reports) if "error" in r]
    if errors:
        return "\n".join(_cut(errors))
    numbers = [report["data_parallel_rank"] for report in reports]
    ranks_of = [[r for r, one in enumerate(numbers) if one == number] for number in set(numbers)]
    for entry, name, remedy in _EQUAL:
        together = entry in ("position", "fingerprint")
        for ranks in [range(len(reports))] if together else ranks_of:
            values = {rank: repr(reports[rank][entry]) for rank in ranks}
            most, count = Counter(values.values()).most_common(1)[0]
            if count < len(values):
                others = [rank for rank in ranks if values[rank] != most]
                lines = [f"on rank {rank} {name} {values[rank][:_MOST_SHOWN]}" for rank in others]
                rest = _ranks([rank for rank in ranks if values[rank] == most])
                return "\n".join([*_cut(lines), f"on {rest} {name} {most[:_MOST_SHOWN]}: {remedy}"])
    owners: dict[int, int] = {}
    for rank, report in enumerate(reports):
        for sample in report["samples"]:
            owner = owners.setdefault(sample, rank)
            if numbers[owner] != numbers[rank]:
                return (
                    f"rank {rank} takes sample {sample} at the next step, and so does rank {owner}:"
                    f" they are data-parallel ranks {numbers[rank]} and {numbers[owner]}. Check "
                    "the data-parallel ranks and sizes of their samplers"
                )
    return ""


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} " + ", ".join(_cut([str(rank) for rank in ranks]))


def _cut(lines: list[str]) -> list[str]:
    more = len(lines) - _MOST_LISTED
    return lines if more <= 0 else [*lines[:_MOST_LISTED], f"and {more} more"]
