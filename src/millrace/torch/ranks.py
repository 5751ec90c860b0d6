"""Datasets and errors over the ranks of torch.distributed."""

import pickle
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from torch import distributed

from millrace.errors import ConfigError, MillraceError
from millrace.interrupts import interrupts_held
from millrace.run import DatasetConfig, Datasets, build_datasets as _build_datasets

T = TypeVar("T")


def build_datasets(
    config: DatasetConfig,
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
    interrupt: BaseException | None = None
    for is_ours in (is_first, not is_first):
        error = interrupt  # which the next exchange tells
        if is_ours and error is None:
            try:
                result = work()
            except BaseException as caught:
                error = caught
        errors, interrupt = _exchange(error, group)
        if error is not None:
            raise error
        for rank, other in enumerate(errors):
            if other is not None:
                if hasattr(other, "add_note"):  # not on Python 3.10
                    other.add_note(f"raised on rank {rank}")
                raise other
    if interrupt is not None:
        raise interrupt
    return result  # type: ignore[no-any-return]


def _exchange(
    error: BaseException | None, group: distributed.ProcessGroup | None
) -> tuple[list[Exception | None], BaseException | None]:
    """The errors of all ranks, and what a Ctrl-C raised, which waits for the end: a rank that left
    early would block the others."""
    errors: list[Any] = [None] * distributed.get_world_size(group)
    is_done = False
    try:
        with interrupts_held():
            distributed.all_gather_object(errors, _portable(error, group), group=group)
            is_done = True
    except BaseException as interrupt:
        if not is_done:
            raise
        return errors, interrupt
    return errors, None


def _portable(error: Any, group: distributed.ProcessGroup | None) -> Exception | None:
    """The error as pickle can send it."""
    if error is not None and not isinstance(error, Exception):
        rank = distributed.get_rank(group)
        return MillraceError(f"rank {rank} was stopped by {error!r}; so every rank stops")
    try:
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]
    except Exception:
        return RuntimeError(repr(error))
