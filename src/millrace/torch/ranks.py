"""Over the ranks of torch.distributed: datasets, errors, and a check that all ranks agree."""

import json
import pickle
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
from torch import distributed
from torch.distributed import distributed_c10d

from millrace.checks import check_float, check_int, shown
from millrace.errors import ConfigError, MillraceError
from millrace.feed import FullValidationSampler, Loader
from millrace.feed.stream_data import IN_TURN
from millrace.files import checksum
from millrace.interrupts import interruptible, interrupts_held
from millrace.run import Datasets, build_datasets as _build_datasets
from millrace.run.instant_config import AnyConfig

T = TypeVar("T")

_TIMEOUT = 120.0  # seconds
_MOST_LISTED = 8  # lines in a message
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


def build_datasets(
    config: AnyConfig,
    *,
    builders: Literal["one", "one per node"] = "one",
    local_rank: int | None = None,
    group: distributed.ProcessGroup | None = None,
    wait_limit: float | None = None,
) -> Datasets:
    """`millrace.build_datasets` on every rank: some ranks build the indices, then all map them.

    Every rank of the group must call it. Without an initialised torch.distributed it is
    `millrace.build_datasets`.

    Args:
        config: The configuration, with a cache folder that carries the indices to other ranks.
        builders: "one": rank 0 builds, in a cache folder that all ranks share; "one per node":
            local_rank 0 of each node builds, in folders on local disks.
        local_rank: Rank of this process on its node, for "one per node".
        group: Process group; None: all ranks.
        wait_limit: Seconds to wait for others that build the same; None: no limit.

    Raises:
        Any rank's error of `millrace.build_datasets`, on every rank; if Ctrl-C or `sys.exit` ends
        one, a MillraceError on the others.
    """
    if builders not in ("one", "one per node"):
        raise ConfigError(f"builders is {builders!r}; 'one' or 'one per node' is possible")
    if builders == "one per node" and local_rank is None:
        raise ConfigError("one builder per node needs the rank on the node: give local_rank")
    rank = distributed_rank(group) if builders == "one" else local_rank
    return first_then_rest(lambda: _build_datasets(config, wait_limit=wait_limit), rank == 0, group)


def distributed_rank(group: distributed.ProcessGroup | None = None) -> int | None:
    """The rank of this process; None without an initialised torch.distributed."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed.get_rank(group)  # type: ignore[no-any-return]


def first_then_rest(
    work: Callable[[], T], is_first: bool, group: distributed.ProcessGroup | None = None
) -> T:
    """Does work on the first ranks, then on all others; all exchange errors after each turn.

    An error on one rank is raised on every rank; Ctrl-C or `sys.exit`, as a MillraceError on the
    others. Without an initialised torch.distributed, just does the work.
    """
    if distributed_rank() is None:
        return work()
    result: Any = None
    with interrupts_held():  # a rank that left an exchange early would block the others
        for is_ours in (is_first, not is_first):
            error: BaseException | None = None
            try:
                with interruptible():
                    result = work() if is_ours else result
            except BaseException as caught:
                error = caught
            errors: list[Any] = [None] * distributed.get_world_size(group)
            distributed.all_gather_object(errors, _portable(error, group), group=group)
            if error is not None:
                raise error
            for rank, other in enumerate(errors):
                if other is not None:
                    if hasattr(other, "add_note"):  # not on Python 3.10
                        other.add_note(f"raised on rank {rank}")
                    raise other
    return result  # type: ignore[no-any-return]


def _portable(error: Any, group: distributed.ProcessGroup | None) -> Exception | None:
    """The error as pickle can send it."""
    if error is not None and not isinstance(error, Exception):
        rank = distributed.get_rank(group)
        return MillraceError(f"rank {rank} was stopped by {error!r}; so every rank stops")
    try:
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]
    except Exception:
        return RuntimeError(repr(error))


# ---- whether all ranks agree ----


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

    Reports go through the store of the process group, without a collective operation: if a rank has
    died or hangs, the call ends on the others by a timeout.

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
    seconds = _TIMEOUT
    try:
        seconds = check_float("timeout", timeout, 0, 10**6)
        checksum_batches = check_int("checksum_batches", checksum_batches, 0)
        number = (rank or 0) if data_parallel_rank is None else data_parallel_rank
        number = check_int("data_parallel_rank", number, 0)
        if rank is None:
            return
        report = {"data_parallel_rank": number, **_report(loader, checksum_batches)}
    except BaseException as error:
        if rank is not None:  # the other ranks wait for a report
            _compare({"error": f"{type(error).__name__}: {error}"}, group, seconds)
        raise
    if message := _compare(report, group, seconds):
        raise MillraceError(message)


def _compare(report: Report, group: distributed.ProcessGroup | None, timeout: float) -> str:
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
        while store.add("count", 0) < times * len(keys):  # a wait of the store is deaf to Ctrl-C
            if time.monotonic() >= deadline:
                return False
            time.sleep(min(0.001 * len(keys), 0.5))  # all together ask 1,000 times a second
        return True

    try:
        store.set(keys[rank], json.dumps(report))
        store.add("count", 1)
        if not all_have_counted(1):
            missing = shown([number for number, key in enumerate(keys) if not store.check([key])])
            late = f"ranks {missing} did not answer within {timeout:.4g} s"
            return f"{late}: they are dead, hang, or are elsewhere"
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
        "fingerprint": checksum([fingerprint.encode()]),
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
        parts: list[Any] = []
        for arrays in batch.get("micro_batches", [batch]):
            for name, array in sorted(arrays.items()):
                array = np.ascontiguousarray(array)
                parts += [f"{name} {array.dtype} {array.shape}".encode(), array.data]
        yield f"{checksum(parts)} at sample {start}"


def _problem(reports: Sequence[Report]) -> str:
    """What is wrong, or ""."""
    errors = [f"rank {rank}: {r['error']}" for rank, r in enumerate(reports) if "error" in r]
    if errors:
        return "\n".join(errors[:_MOST_LISTED])
    numbers = [report["data_parallel_rank"] for report in reports]
    for entry, name, remedy in _EQUAL:
        # The ranks of each value, among all ranks or those with one data-parallel rank.
        values: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank, report in enumerate(reports):
            group = 0 if entry in ("position", "fingerprint") else numbers[rank]
            values[group][repr(report[entry])].append(rank)
        for ranks_of in values.values():
            if len(ranks_of) > 1:
                lines = [
                    f"on ranks {shown(ranks)} {name} {shown(reports[ranks[0]][entry])}"
                    for ranks in sorted(ranks_of.values(), key=len)[-_MOST_LISTED:]
                ]
                return "\n".join(lines) + f": {remedy}"
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
