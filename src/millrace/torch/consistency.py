"""A check that all ranks agree: where they are, which samples come next, and what they have read.

1. Rank 0 puts a digest of its fingerprint into the store of the process group.
2. Every rank puts its report there: position, sample numbers, checksums, and how its fingerprint
   differs from rank 0's.
3. Rank 0 compares the reports and puts its verdict there, which every rank reads.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash
from torch import distributed
from torch.distributed import distributed_c10d

from millrace.checks import real, shown, whole
from millrace.errors import ConfigError, MillraceError
from millrace.feed import Loader

_SHARED_KEYS = ("fingerprint", "digest", "verdict", "readers", "all have read")
_TIMEOUT = 120.0  # seconds
_MOST_LISTED = 8  # ranks, or differences of a fingerprint, in a message
# Calls of this process by group: every rank of a group makes the same, so the numbers agree.
_num_calls: Counter[str] = Counter()


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
    samples at the next step and, on request, have read the same batches; processes with different
    ones must take different samples. Every rank of the group must call this at the same step.
    Without an initialised torch.distributed it does nothing.

    The ranks exchange some hundred bytes each through the store of the process group and use no
    collective operation: a rank that has died or hangs ends the call on the others by a timeout.

    Args:
        loader: The loader of this rank.
        data_parallel_rank: Data-parallel rank of this process. None: the rank in the group, so that
            no two processes are replicas.
        checksum_batches: Number of batches before the position that are read again and compared by
            checksum; fewer where fewer have been consumed.
        timeout: Seconds to wait for the others. Rank 0 waits half as long, so that it can still
            tell the others which rank is missing.
        group: Process group; None: all ranks.

    Raises:
        MillraceError: The ranks differ, one of them failed, or one did not answer in time.
        ConfigError: An argument outside its limits, or a group without this process.
    """
    error: BaseException | None = None
    try:
        checksum_batches = whole("checksum_batches", checksum_batches, 0)
        if data_parallel_rank is not None:
            data_parallel_rank = whole("data_parallel_rank", data_parallel_rank, 0)
        timeout = _checked_timeout(timeout)
    except ConfigError as caught:  # raised below: the other ranks wait for this rank's report
        error, timeout = caught, _TIMEOUT
    if not (distributed.is_available() and distributed.is_initialized()):
        if error is not None:
            raise error
        return
    rank, size = distributed.get_rank(group), distributed.get_world_size(group)
    if rank < 0:
        raise ConfigError("this process is not in the group: call check_consistency on its ranks")
    board = _Board(group, time.monotonic() + timeout)
    try:
        if error is not None:
            raise error
        fingerprint = dict(_leaves(loader.state_dict()["fingerprint"]))
        report = _report(loader, checksum_batches)
        report["data_parallel_rank"] = rank if data_parallel_rank is None else data_parallel_rank
    except BaseException as caught:
        error = caught
        fingerprint, report = {}, {"error": f"{type(error).__name__}: {error}"}
    try:
        if rank == 0:
            message = _lead(board, report, fingerprint, size, timeout)
        else:
            message = _follow(board, report, fingerprint, rank, timeout)
    except distributed.DistNetworkError as lost:
        message = f"the store of the process group is lost, its process has probably died: {lost}"
    if error is not None:
        raise error
    if message:
        raise MillraceError(message)


def _checked_timeout(timeout: Any) -> float:
    seconds = real("timeout", timeout)
    if not 0 < seconds <= 10**6:
        raise ConfigError(f"timeout is {seconds}; seconds above 0, up to 1,000,000, are possible")
    return seconds


class _Board:
    """Where the ranks of a group put their reports: the group's store, with a deadline."""

    def __init__(self, group: distributed.ProcessGroup | None, deadline: float) -> None:
        name = "" if group is None else group.group_name
        prefix = f"millrace/check_consistency/{name}/{_num_calls[name]}"
        _num_calls[name] += 1
        self.store = distributed.PrefixStore(prefix, distributed_c10d._get_default_store())
        self.deadline = deadline

    def put(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))

    def get(self, key: str) -> Any:
        return json.loads(self.store.get(key))

    def is_there(self, keys: Sequence[str], seconds: float | None = None) -> bool:
        """Waits for the keys; False if they are not all there in time."""
        end = self.deadline if seconds is None else time.monotonic() + seconds
        pause = 0.002
        while not self.store.check(list(keys)):  # a wait of the store could not be interrupted
            if time.monotonic() >= end:
                return False
            time.sleep(pause)
            pause = min(0.5, 1.5 * pause)
        return True


def _lead(
    board: _Board, report: dict[str, Any], fingerprint: dict[str, Any], size: int, timeout: float
) -> str:
    """Rank 0's part: compares all reports and tells the others the verdict."""
    board.put("fingerprint", fingerprint)
    board.put("digest", _digest(fingerprint))
    keys = [f"report {rank}" for rank in range(1, size)]
    missing: list[int] = []
    if keys and not board.is_there(keys, timeout / 2):
        missing = [rank for rank in range(1, size) if not board.store.check([f"report {rank}"])]
    if missing:
        message = _missing(missing, timeout / 2)
    else:
        message = _verdict([report, *(board.get(key) for key in keys)])
    num_readers = size - 1 - len(missing)
    board.put("verdict", {"message": message, "num_readers": num_readers})
    # The store may die with this process.
    if num_readers and board.is_there(["all have read"]) and not missing:
        for key in [*_SHARED_KEYS, *keys]:  # else each call would leave them in the store for ever
            board.store.delete_key(key)
    return message


def _follow(
    board: _Board, report: dict[str, Any], fingerprint: dict[str, Any], rank: int, timeout: float
) -> str:
    lost = _missing([0], timeout)
    if not board.is_there(["digest"]):
        return lost
    if "error" not in report and board.get("digest") != _digest(fingerprint):
        report["differences"] = _differences(board.get("fingerprint"), fingerprint)
    board.put(f"report {rank}", report)
    if not board.is_there(["verdict"]):
        return lost
    verdict = board.get("verdict")
    if board.store.add("readers", 1) == verdict["num_readers"]:
        board.put("all have read", True)
    message: str = verdict["message"]
    return message


def _report(loader: Loader, checksum_batches: int) -> dict[str, Any]:
    sampler, position = loader.sampler, loader.consumed_samples
    samples: list[int] = []
    is_external = getattr(loader.dataset, "is_sequential", False)  # its samples have no numbers
    if not is_external and sampler.has_step(position):
        numbers = sampler.sample_numbers(position)
        is_padding = getattr(sampler, "is_padding", None)  # these samples are taken twice
        samples = (numbers if is_padding is None else numbers[~is_padding(position)]).tolist()
    return {
        "position": position,
        "samples": samples,
        "checksums": list(_checksums(loader, checksum_batches)),
    }


def _checksums(loader: Loader, num_batches: int) -> Iterator[tuple[int, str]]:
    """The first position and the checksum of each of the last batches."""
    if num_batches == 0:
        return
    if getattr(loader.dataset, "is_sequential", False):
        raise ConfigError("external batches cannot be read again: leave out checksum_batches")
    step_at = getattr(loader.sampler, "step_at", None)
    consumed_at = getattr(loader.sampler, "consumed_at", None)
    if step_at is None or consumed_at is None:
        raise ConfigError(
            f"a {type(loader.sampler).__name__} cannot tell where earlier steps started (it has no "
            "step_at and consumed_at): leave out checksum_batches"
        )
    step = step_at(loader.consumed_samples)
    for earlier in range(max(0, step - num_batches), step):
        position = consumed_at(earlier)
        batch = loader.dataset.batch(loader.sampler.sample_numbers(position))
        checksum = xxhash.xxh3_128()
        for name in sorted(batch):
            array = np.ascontiguousarray(batch[name])
            checksum.update(f"{name} {array.dtype} {array.shape}".encode())
            checksum.update(array.data)
        yield position, checksum.hexdigest()


def _verdict(reports: list[dict[str, Any]]) -> str:
    """What is wrong, or ""."""
    errors = [f"rank {rank}: {r['error']}" for rank, r in enumerate(reports) if "error" in r]
    if errors:
        return "\n".join(_cut(errors))
    for check in (_check_positions, _check_fingerprints, _check_replicas, _check_disjoint):
        message = check(reports)
        if message:
            return message
    return ""


def _check_positions(reports: list[dict[str, Any]]) -> str:
    lines = [f"consumed_samples is {r['position']}" for r in reports]
    return _odd_ranks(list(range(len(reports))), lines, "load the same checkpoint on every rank")


def _check_fingerprints(reports: list[dict[str, Any]]) -> str:
    lines = ["\n".join(report.get("differences", [])) for report in reports]
    most = Counter(lines).most_common(1)[0][0]
    odd = [rank for rank, line in enumerate(lines) if line != most]
    if not odd:
        return ""
    # The differences are from rank 0: where rank 0 is the odd one, the others have them.
    differences = most if odd[0] == 0 else lines[odd[0]]
    return (
        f"{_ranks(odd)} has other data or another order than {_ranks(_others(odd, reports))}:\n"
        f"{differences}\nGive every rank the same files and options"
    )


def _check_replicas(reports: list[dict[str, Any]]) -> str:
    replicas = defaultdict(list)
    for rank, report in enumerate(reports):
        replicas[report["data_parallel_rank"]].append(rank)
    for number, ranks in replicas.items():
        samples = [f"the next samples are {shown(reports[rank]['samples'])}" for rank in ranks]
        remedy = f"all of them are data-parallel rank {number} and must take the same samples"
        checksums = [_checksum_line(reports[rank]["checksums"]) for rank in ranks]
        for lines, advice in (
            (samples, remedy),
            (checksums, "their token files differ: run `millrace verify` on them"),
        ):
            message = _odd_ranks(ranks, lines, advice)
            if message:
                return message
    return ""


def _checksum_line(checksums: list[tuple[int, str]]) -> str:
    batches = ", ".join(f"{checksum[:8]} at sample {start}" for start, checksum in checksums)
    return f"the checksums of the last batches are {batches}" if batches else "no batch was read"


def _check_disjoint(reports: list[dict[str, Any]]) -> str:
    owners: dict[int, int] = {}
    for rank, report in enumerate(reports):
        for sample in report["samples"]:
            owner = owners.setdefault(sample, rank)
            numbers = [reports[r]["data_parallel_rank"] for r in (owner, rank)]
            if numbers[0] != numbers[1]:
                return (
                    f"rank {rank} takes sample {sample} at the next step, and so does rank {owner}:"
                    f" they are data-parallel ranks {numbers[1]} and {numbers[0]} and must take "
                    "different samples. Check the data-parallel ranks and sizes of their samplers"
                )
    return ""


def _missing(ranks: list[int], seconds: float) -> str:
    return (
        f"{_ranks(ranks)} did not answer within {seconds:.4g} s: died, hangs, or has not called "
        "check_consistency at this step"
    )


def _odd_ranks(ranks: list[int], lines: list[str], remedy: str) -> str:
    """A message if the lines differ: which ranks have another one than most."""
    most, number = Counter(lines).most_common(1)[0]
    if number == len(lines):
        return ""
    odd = [(rank, line) for rank, line in zip(ranks, lines, strict=True) if line != most]
    rest = [rank for rank, line in zip(ranks, lines, strict=True) if line == most]
    return "\n".join(
        [
            *_cut([f"on rank {rank} {line}" for rank, line in odd]),
            f"on {_ranks(rest)} {most}: {remedy}",
        ]
    )


def _others(ranks: list[int], reports: list[dict[str, Any]]) -> list[int]:
    return [rank for rank in range(len(reports)) if rank not in set(ranks)]


def _ranks(ranks: list[int]) -> str:
    listed = ", ".join(_cut([str(rank) for rank in ranks]))
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


def _cut(lines: list[str]) -> list[str]:
    more = len(lines) - _MOST_LISTED
    return lines if more <= 0 else [*lines[:_MOST_LISTED], f"and {more} more"]


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Each single value of a fingerprint, by its place in it."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _leaves(entry, f"{place}.{key}" if place else str(key))
    elif isinstance(value, (list, tuple)):
        yield f"len({place})", str(len(value))
        for number, entry in enumerate(value):
            yield from _leaves(entry, f"{place}[{number}]")
    else:
        yield place, shown(value)


def _digest(fingerprint: dict[str, str]) -> str:
    return xxhash.xxh3_128(json.dumps(sorted(fingerprint.items())).encode()).hexdigest()


def _differences(first: dict[str, str], own: dict[str, str]) -> list[str]:
    places = [place for place in {**first, **own} if first.get(place) != own.get(place)]
    return _cut(
        [f"  {place}: {first.get(place)} on rank 0, {own.get(place)} elsewhere" for place in places]
    )
