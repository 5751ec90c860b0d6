"""Megatron-LM's samplers and its data loader: `megatron.training.datasets.data_samplers`.

The samplers give lists of ints, step by step, from `consumed_samples` on. For a training loop of
your own, those of `millrace.feed` can start at any step and check where they start.
"""

from __future__ import annotations

import contextlib
import operator
import os
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from millrace import _native
from millrace.errors import ConfigError
from millrace.megatron.errors import EmptyStepError, require


class MegatronPretrainingSampler:
    """Consecutive blocks of sample numbers, a slice to each rank (`single`).

    Args:
        total_samples: Number of samples in the dataset.
        consumed_samples: Number of samples consumed before the first batch.
        micro_batch_size: Number of samples in a batch.
        data_parallel_rank: Number of this rank.
        data_parallel_size: Number of ranks.
        drop_last: Whether to leave out an incomplete last block; else its slice is the last batch,
            which can be shorter or empty.

    Raises:
        AssertionError: A number outside its limits.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        drop_last: bool = True,
    ) -> None:
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.data_parallel_rank = data_parallel_rank
        self.micro_batch_times_data_parallel_size = micro_batch_size * data_parallel_size
        self.drop_last = drop_last
        _check_numbers(total_samples, micro_batch_size, data_parallel_rank, data_parallel_size)
        require(consumed_samples >= 0, f"consumed_samples is {consumed_samples}; 0 is the least")
        require(
            consumed_samples < total_samples,
            f"consumed_samples is {consumed_samples}; the dataset has {total_samples} samples, so "
            "that none are left. Build it with a larger size to train on",
        )

    def __len__(self) -> int:
        """Number of samples, not of batches."""
        return self.total_samples

    def get_start_end_idx(self) -> tuple[int, int]:
        """The rank's slice of a block: its start and its end."""
        start = self.data_parallel_rank * self.micro_batch_size
        return start, start + self.micro_batch_size

    def __iter__(self) -> Iterator[list[int]]:
        for block in self._blocks(self.micro_batch_times_data_parallel_size):
            start, end = self.get_start_end_idx()
            yield list(block[start:end])

    def _blocks(self, size: int) -> Iterator[range]:
        """The blocks that are left, and the incomplete last one unless it is dropped.

        Without a size above 0, no block is ever complete.
        """
        numbers = range(self.consumed_samples, self.total_samples)
        end = len(numbers) - len(numbers) % size if size > 0 else 0
        for start in range(0, end, max(size, 1)):
            yield numbers[start : start + size]
        if end < len(numbers) and not self.drop_last:
            yield numbers[end:]


class HybridCPMegatronPretrainingSampler(MegatronPretrainingSampler):
    """A rank's part of each whole global batch at once: its micro batches, one after the other.

    Args:
        total_samples: Number of samples in the dataset.
        consumed_samples: Number of samples consumed before the first batch.
        micro_batch_size: Number of samples in a micro batch.
        global_batch_size: Number of samples for all ranks at one step. It is rounded down to a
            multiple of micro_batch_size * data_parallel_size.
        data_parallel_rank: Number of this rank.
        data_parallel_size: Number of ranks.
        drop_last: Whether to leave out an incomplete last global batch.

    Raises:
        AssertionError: A number outside its limits.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        global_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        drop_last: bool = True,
    ) -> None:
        super().__init__(
            total_samples,
            consumed_samples,
            micro_batch_size,
            data_parallel_rank,
            data_parallel_size,
            drop_last,
        )
        self.global_batch_size = global_batch_size
        self.data_parallel_size = data_parallel_size
        self.num_micro_batches = global_batch_size // self.micro_batch_times_data_parallel_size

    def get_start_end_idx_global_batch(self) -> tuple[list[int], list[int]]:
        """The rank's slices of a global batch: their starts and their ends."""
        first, _ = self.get_start_end_idx()
        block_size = self.micro_batch_size * self.data_parallel_size
        starts = [first + block * block_size for block in range(self.num_micro_batches)]
        return starts, [start + self.micro_batch_size for start in starts]

    def __iter__(self) -> Iterator[list[int]]:
        size = self.micro_batch_times_data_parallel_size * self.num_micro_batches
        for batch in self._blocks(size):
            slices = zip(*self.get_start_end_idx_global_batch(), strict=True)
            yield [number for start, end in slices for number in batch[start:end]]


class MegatronFullValidationSampler:
    """Every sample once, one for a rank at each step; ranks beyond the last sample end earlier.

    Args:
        total_samples: Number of samples in the dataset.
        data_parallel_rank: Number of this rank.
        data_parallel_size: Number of ranks.

    Raises:
        AssertionError: A number outside its limits.
    """

    def __init__(
        self, total_samples: int, data_parallel_rank: int, data_parallel_size: int
    ) -> None:
        self.total_samples = total_samples
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size
        self.micro_batch_size = 1
        _check_numbers(total_samples, 1, data_parallel_rank, data_parallel_size)

    def __len__(self) -> int:
        """Number of batches of this rank."""
        return len(self._numbers())

    def __iter__(self) -> Iterator[list[int]]:
        for number in self._numbers():
            yield [number]

    def _numbers(self) -> range:
        return range(self.data_parallel_rank, self.total_samples, self.data_parallel_size)


class MegatronPretrainingRandomSampler:
    """One epoch, shuffled by `torch.randperm` with the number of the epoch as its seed (`cyclic`).

    Each iteration goes from `consumed_samples` to the end of the epoch that it lies in, and counts
    on `consumed_samples`; `epoch` is the number of that epoch. Not sharded, some ranks can have one
    batch more than others at the end of an epoch, as in Megatron-LM.

    Args:
        dataset: The dataset; a `RandomSeedDataset` is told the epoch.
        total_samples: Number of samples in the dataset.
        consumed_samples: Number of samples consumed before the first batch, over all epochs.
        micro_batch_size: Number of samples in a batch.
        data_parallel_rank: Number of this rank.
        data_parallel_size: Number of ranks.
        data_sharding: Whether each rank shuffles a contiguous part of the dataset, its shard. Else
            all shuffle the whole, and each takes every data_parallel_size-th sample.

    Raises:
        AssertionError: A number outside its limits, or, at the first batch, a consumed_samples
            where no step can start.
        ZeroDivisionError: No step is complete.
    """

    def __init__(
        self,
        dataset: Any,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        data_sharding: bool,
    ) -> None:
        self.dataset = dataset
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size
        self.data_sharding = data_sharding
        self.micro_batch_times_data_parallel_size = micro_batch_size * data_parallel_size
        if self.micro_batch_times_data_parallel_size == 0:
            raise EmptyStepError(
                f"micro_batch_size is {micro_batch_size} and data_parallel_size is "
                f"{data_parallel_size}; both must be above 0"
            )
        self.last_batch_size = total_samples % self.micro_batch_times_data_parallel_size
        _check_numbers(total_samples, micro_batch_size, data_parallel_rank, data_parallel_size)

    def __len__(self) -> int:
        """Number of samples, not of batches."""
        return self.total_samples

    def __iter__(self) -> Iterator[list[int]]:
        micro_batch_size = self.micro_batch_size
        block_size = self.micro_batch_times_data_parallel_size
        samples_per_epoch = self.total_samples - self.last_batch_size
        if samples_per_epoch == 0:
            raise EmptyStepError(
                f"micro_batch_size * data_parallel_size is {block_size}; the dataset has "
                f"{self.total_samples} samples, so that no step is complete. Lower one of them"
            )
        self.epoch, position = divmod(self.consumed_samples, samples_per_epoch)
        require(
            position % block_size == 0,
            f"consumed_samples is {self.consumed_samples}, {position} samples into epoch "
            f"{self.epoch}; a step takes micro_batch_size * data_parallel_size = {block_size} "
            "samples. Resume with numbers whose product divides the former",
        )
        if isinstance(self.dataset, RandomSeedDataset):
            self.dataset.set_epoch(self.epoch)
        if self.data_sharding:
            size = samples_per_epoch // self.data_parallel_size
            numbers = _permutation(size, self.epoch)[position // self.data_parallel_size :]
            shift = self.data_parallel_rank * size
        else:
            size = self.total_samples // micro_batch_size * micro_batch_size
            numbers = _permutation(size, self.epoch)[position:]
            numbers = numbers[self.data_parallel_rank :: self.data_parallel_size]
            shift = 0
        for end in range(micro_batch_size, len(numbers) + 1, micro_batch_size):
            self.consumed_samples += block_size
            batch = numbers[end - micro_batch_size : end].astype(np.int64) + shift
            yield batch.tolist()


class RandomSeedDataset(torch.utils.data.Dataset):  # type: ignore[misc]
    """A dataset that seeds torch, random and NumPy before each sample.

    The seed is index + seed + epoch, so that a sample's random transforms can be repeated.

    Args:
        dataset: The dataset to read from.
        seed: Base of the seeds.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.base_seed = seed
        self.curr_seed = seed
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Changes the seeds of all samples to those of an epoch."""
        self.curr_seed = self.base_seed + epoch

    def __getitem__(self, idx: int) -> Any:
        seed = idx + self.curr_seed
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        return self.dataset[idx]


def build_pretraining_data_loader(dataset: Any, consumed_samples: int) -> Any:
    """A torch DataLoader of this rank, by the arguments of a Megatron-LM program.

    The arguments come from `megatron.training.get_args()`, the ranks from
    `megatron.core.parallel_state`; both are imported at the call.

    Args:
        dataset: A dataset of samples with a length; its `split` or `index_split` decides between
            the batch sizes of training and of evaluation. With the dataloader type `external`, any
            iterable, which is returned as it is.
        consumed_samples: Number of samples consumed before the first batch.

    Returns:
        The loader; None without a dataset, or if it is empty.

    Raises:
        AssertionError: A number outside its limits.
        ConfigError: A dataloader type that Megatron-LM does not have.
        ImportError: `megatron.training` cannot be imported.
    """
    if dataset is None or _is_empty(dataset):
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
    # By name: the dataset's Split can be Megatron-LM's or ours.
    split = getattr(getattr(dataset, "split", getattr(dataset, "index_split", None)), "name", None)
    prefix = "eval_" if split in ("valid", "test") else ""
    micro_batch_size, global_batch_size = (
        getattr(args, name) if size is None else size
        for name in ("micro_batch_size", "global_batch_size")
        for size in [getattr(args, f"{prefix}{name}", None)]
    )
    is_hybrid = getattr(args, "hybrid_context_parallel", False)
    ranks = {
        "data_parallel_rank": parallel_state.get_data_parallel_rank(),
        "data_parallel_size": parallel_state.get_data_parallel_world_size(),
    }
    sampler: Any
    if split == "valid" and getattr(args, "full_validation", False):
        sampler = MegatronFullValidationSampler(len(dataset), **ranks)
    elif args.dataloader_type == "single" and is_hybrid:
        sampler = HybridCPMegatronPretrainingSampler(
            len(dataset), consumed_samples, micro_batch_size, global_batch_size, **ranks
        )
    elif args.dataloader_type == "single":
        sampler = MegatronPretrainingSampler(
            len(dataset), consumed_samples, micro_batch_size, **ranks
        )
    elif args.dataloader_type == "cyclic":
        sampler = MegatronPretrainingRandomSampler(
            dataset,
            len(dataset),
            consumed_samples,
            micro_batch_size,
            **ranks,
            data_sharding=args.data_sharding,
        )
    else:
        raise ConfigError(
            f"dataloader_type is {args.dataloader_type!r}; 'single', 'cyclic' or 'external' is "
            "possible"
        )
    has_workers = args.num_workers > 0
    exit_signal = args.exit_signal if getattr(args, "exit_signal_handler", False) else None
    return torch.utils.data.DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=args.num_workers,
        pin_memory=True,
        persistent_workers=has_workers,
        worker_init_fn=partial(_start_worker, exit_signal=exit_signal) if has_workers else None,
        **({"collate_fn": _as_list} if is_hybrid else {}),
    )


def _check_numbers(
    total_samples: int, micro_batch_size: int, data_parallel_rank: int, data_parallel_size: int
) -> None:
    for name, value in (
        ("total_samples", total_samples),
        ("micro_batch_size", micro_batch_size),
        ("data_parallel_size", data_parallel_size),
    ):
        require(value > 0, f"{name} is {value}; at least 1 is needed")
    require(
        0 <= data_parallel_rank < data_parallel_size,
        f"data_parallel_rank is {data_parallel_rank}; 0 to {data_parallel_size - 1} is possible",
    )


def _permutation(size: int, epoch: int) -> Any:
    size, epoch = operator.index(size), operator.index(epoch)
    return _native.torch_randperm(size, epoch, dtype=np.uint32 if size <= 2**32 else np.int64)


def _is_empty(dataset: Any) -> bool:
    """Whether the dataset has a length of 0; an iterable need not have one."""
    try:
        return len(dataset) == 0
    except TypeError:
        return False


def _as_list(samples: list[Any]) -> list[Any]:
    return samples


def _start_worker(_: int, exit_signal: Any) -> None:
    """In a worker process: closes the devices of NVIDIA, so that they are free once it has died.

    With an exit signal, the worker ignores it in the way of Megatron-LM.
    """
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the folder is closed by now
            if os.readlink(f"/proc/self/fd/{name}").startswith("/dev/nvidia"):
                os.close(int(name))
    if exit_signal is not None:
        from megatron.training.dist_signal_handler import DistributedSignalHandler

        DistributedSignalHandler(exit_signal).__enter__()
