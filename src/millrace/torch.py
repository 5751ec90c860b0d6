"""torch at the edge: tensors, and processes that torch.distributed connects."""

from __future__ import annotations

import pickle
import signal
import threading
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from numpy.typing import NDArray
from torch import distributed

from millrace.errors import ConfigError, MillraceError
from millrace.run import DatasetConfig, Datasets
from millrace.run import build_datasets as _build_datasets

T = TypeVar("T")


def to_tensors(batch: dict[str, NDArray[Any]]) -> dict[str, torch.Tensor]:
    """A batch's arrays as torch tensors that share their memory. Pass it as a loader's `transform`.

    Args:
        batch: arrays of any shape, int64 or float32.

    Returns:
        CPU tensors of the same shapes and dtypes.
    """
    return {name: torch.from_numpy(array) for name, array in batch.items()}


def build_datasets(
    config: DatasetConfig,
    *,
    builders: Literal["one", "one per node"] = "one",
    local_rank: int | None = None,
    group: distributed.ProcessGroup | None = None,
    wait_limit: float | None = None,
) -> Datasets:
    """`millrace.build_datasets` on every rank: the indices are built first, then mapped by all.

    Every rank of the group must call it. Where torch.distributed is not initialised it is the same
    as `millrace.build_datasets`.

    Args:
        config: with a cache folder, so that what is built reaches the others.
        builders: "one": rank 0 builds, for a cache folder that all share; "one per node": the rank
            with local_rank 0 of each node does, for cache folders on local disks.
        local_rank: of this process on its node; needed for "one per node".
        group: None: all ranks.
        wait_limit: Seconds to wait for other processes that build the same; None: no limit.

    Raises:
        What `millrace.build_datasets` raises on any rank is raised on every rank: none is left
        waiting. Where Ctrl-C or `sys.exit` ends one, the others raise a MillraceError.
    """
    if builders not in ("one", "one per node"):
        raise ConfigError(f"builders is {builders!r}; 'one' or 'one per node' is possible")
    if builders == "one per node" and local_rank is None:
        raise ConfigError("one builder per node needs to know which rank that is: give local_rank")
    if not (distributed.is_available() and distributed.is_initialized()):
        return _build_datasets(config, wait_limit=wait_limit)
    rank = distributed.get_rank(group) if builders == "one" else local_rank
    return first_then_rest(lambda: _build_datasets(config, wait_limit=wait_limit), rank == 0, group)


def first_then_rest(
    work: Callable[[], T], is_first: bool, group: distributed.ProcessGroup | None = None
) -> T:
    """Does work on the first ranks, then on all others; an error is raised on every rank.

    So is an end by Ctrl-C or `sys.exit` on one rank: as a MillraceError on the others.
    """
    return _in_turns(work, (is_first, not is_first), group)


def together(work: Callable[[], T], group: distributed.ProcessGroup | None = None) -> T:
    """Does work on each rank, and waits for all; errors are as in `first_then_rest`."""
    return _in_turns(work, (True,), group)


def _in_turns(
    work: Callable[[], T], turns: tuple[bool, ...], group: distributed.ProcessGroup | None
) -> T:
    """Does work in the turn that is this rank's, and waits for all at the end of each."""
    result: T | None = None
    interrupt: BaseException | None = None
    for is_ours in turns:
        error = interrupt  # what came while we waited: the others learn of it at the next exchange
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
    return result  # type: ignore[return-value]


def _exchange(
    error: BaseException | None, group: distributed.ProcessGroup | None
) -> tuple[list[Exception | None], BaseException | None]:
    """(The errors of all ranks, what a Ctrl-C meanwhile has led to).

    A rank that left in the middle would leave the others waiting.
    """
    errors: list[Any] = [None] * distributed.get_world_size(group)
    is_main = threading.current_thread() is threading.main_thread()
    pressed: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    is_held = is_main and callable(before)
    if is_held:
        signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        distributed.all_gather_object(errors, _portable(error, group), group=group)
    finally:
        if is_held:
            signal.signal(signal.SIGINT, before)
    try:
        if pressed:
            signal.raise_signal(signal.SIGINT)
    except BaseException as interrupt:
        return errors, interrupt
    return errors, None


def _portable(
    error: BaseException | None, group: distributed.ProcessGroup | None
) -> Exception | None:
    """The error without what only its own process can hold; errors are sent by pickle."""
    if error is not None and not isinstance(error, Exception):
        rank = distributed.get_rank(group)
        return MillraceError(f"rank {rank} was stopped by {error!r}; so every rank stops")
    try:
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]
    except Exception:
        return RuntimeError(repr(error))
