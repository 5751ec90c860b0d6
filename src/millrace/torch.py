"""torch at the edge: tensors, and processes that torch.distributed connects."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from numpy.typing import NDArray
from torch import distributed

from millrace.errors import ConfigError
from millrace.feed import DatasetConfig, Datasets
from millrace.feed import build_datasets as _build_datasets

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

    Raises:
        What `millrace.build_datasets` raises on any rank is raised on every rank: none is left
        waiting.
    """
    if builders not in ("one", "one per node"):
        raise ConfigError(f"builders is {builders!r}; 'one' or 'one per node' is possible")
    if builders == "one per node" and local_rank is None:
        raise ConfigError("one builder per node needs to know which rank that is: give local_rank")
    if not (distributed.is_available() and distributed.is_initialized()):
        return _build_datasets(config)
    rank = distributed.get_rank(group) if builders == "one" else local_rank
    return first_then_rest(lambda: _build_datasets(config), rank == 0, group)


def first_then_rest(
    work: Callable[[], T], is_first: bool, group: distributed.ProcessGroup | None = None
) -> T:
    """Does work on the first ranks, then on all others; an error is raised on every rank."""
    result = together(lambda: work() if is_first else None, group)
    other = together(lambda: None if is_first else work(), group)
    return result if is_first else other  # type: ignore[return-value]


def together(work: Callable[[], T], group: distributed.ProcessGroup | None = None) -> T:
    """Does work on each rank, and waits for all; an error on one rank is raised on every rank."""
    result: T | None = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    errors: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(errors, _portable(error), group=group)
    if error is not None:
        raise error
    for rank, other in enumerate(errors):
        if other is not None:
            if hasattr(other, "add_note"):  # not on Python 3.10
                other.add_note(f"raised on rank {rank}")
            raise other
    return result  # type: ignore[return-value]


def _portable(error: Exception | None) -> Exception | None:
    """The error without what only its own process can hold; errors are sent by pickle."""
    try:
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]
    except Exception:
        return RuntimeError(repr(error))
