"""Megatron-LM's `build_pretraining_data_loader`, over the samplers of millrace."""

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from millrace.errors import ConfigError
from millrace.megatron.errors import as_assertions
from millrace.sampling import (
    CyclicSampler,
    FullValidationSampler,
    GlobalBatchSampler,
    SequentialSampler,
)

__all__ = ["build_pretraining_data_loader"]


class RankBatches:
    """The batches of a rank as lists of ints: a `batch_sampler` of torch, over one of ours.

    An iteration goes from `consumed_samples` to the last sample; with a cyclic sampler, to the end
    of its epoch, and it counts `consumed_samples` on, for the next one.
    """

    def __init__(self, sampler: Any, consumed_samples: int) -> None:
        sampler.check_position(consumed_samples)
        self.sampler, self.consumed_samples = sampler, consumed_samples

    def __len__(self) -> int:
        if isinstance(self.sampler, CyclicSampler):
            return self.sampler.steps_per_epoch
        return int(self.sampler.num_steps(self.consumed_samples))

    def __iter__(self) -> Iterator[list[int]]:
        sampler, position, end = self.sampler, self.consumed_samples, None
        if isinstance(sampler, CyclicSampler):
            end = (position // sampler.samples_per_epoch + 1) * sampler.samples_per_epoch
        while position != end and sampler.has_step(position):
            numbers = sampler.sample_numbers(position).tolist()
            position = sampler.consumed_after(position)
            if end is not None:
                self.consumed_samples = position
            if numbers:  # in full validation, a rank's last step can lack samples
                yield numbers


def build_pretraining_data_loader(dataset: Any, consumed_samples: int) -> Any:
    """A torch DataLoader of this rank, by the arguments of a Megatron-LM program.

    The call imports `megatron.training.get_args()` and, for the ranks,
    `megatron.core.parallel_state`.

    Args:
        dataset: Dataset of samples with a length; its `split` or `index_split` decides between the
            batch sizes of training and of evaluation. With the dataloader type `external`, any
            iterable, which is returned as it is.
        consumed_samples: Number of samples before the first batch; full validation ignores it.

    Returns:
        The loader; None without a dataset, or if it is empty.

    Raises:
        ConfigAssertionError: If no step can start there, or no step is complete.
    """
    with contextlib.suppress(TypeError):  # an iterable need not have a length
        if dataset is None or len(dataset) == 0:
            return None
    try:
        from megatron.core import parallel_state
        from megatron.training import get_args
    except ImportError as error:
        raise ImportError(
            f"build_pretraining_data_loader belongs into a Megatron-LM program: {error}. Put "
            "Megatron-LM's source tree on the path, or use millrace.Loader"
        ) from error
    args = get_args()
    if args.dataloader_type == "external":
        return dataset
    ranks: dict[str, Any] = {
        "data_parallel_rank": parallel_state.get_data_parallel_rank(),
        "data_parallel_size": parallel_state.get_data_parallel_world_size(),
    }
    has_workers = args.num_workers > 0
    exit_signal = args.exit_signal if getattr(args, "exit_signal_handler", False) else None
    with as_assertions():
        sampler = _sampler(dataset, args, ranks)
        is_whole = isinstance(sampler, FullValidationSampler)
        batches = RankBatches(sampler, 0 if is_whole else consumed_samples)
    # A global batch at once: the samples as they are.
    collate = {"collate_fn": list} if getattr(args, "hybrid_context_parallel", False) else {}
    return torch.utils.data.DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=args.num_workers,
        pin_memory=True,
        persistent_workers=has_workers,
        worker_init_fn=partial(_start_worker, exit_signal=exit_signal) if has_workers else None,
        **collate,
    )


def _sampler(dataset: Any, args: Any, ranks: dict[str, Any]) -> Any:
    # By name: Split can be Megatron-LM's or ours.
    split = getattr(getattr(dataset, "split", getattr(dataset, "index_split", None)), "name", None)
    prefix, size = "eval_" if split in ("valid", "test") else "", len(dataset)
    if split == "valid" and getattr(args, "full_validation", False):
        return FullValidationSampler(size, **ranks)
    micro_batch_size, global_batch_size = (
        getattr(args, name) if given is None else given
        for name in ("micro_batch_size", "global_batch_size")
        for given in [getattr(args, f"{prefix}{name}", None)]
    )
    share = {"micro_batch_size": micro_batch_size, **ranks}
    if args.dataloader_type == "cyclic":
        return CyclicSampler(size, data_sharding=args.data_sharding, **share)
    if args.dataloader_type != "single":
        raise ConfigError(
            f"dataloader_type is {args.dataloader_type!r}; 'single', 'cyclic' or 'external' is "
            "possible"
        )
    if getattr(args, "hybrid_context_parallel", False):
        return GlobalBatchSampler(size, global_batch_size=global_batch_size, **share)
    return SequentialSampler(size, **share)


def _start_worker(_: int, exit_signal: Any) -> None:
    """Closes a worker's NVIDIA devices, which are then free once it has died; and ignores an exit
    signal in Megatron-LM's way."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own is closed by now
            if os.readlink(f"/proc/self/fd/{name}").startswith("/dev/nvidia"):
                os.close(int(name))
    if exit_signal is not None:
        from megatron.training.dist_signal_handler import DistributedSignalHandler

        DistributedSignalHandler(exit_signal).__enter__()
