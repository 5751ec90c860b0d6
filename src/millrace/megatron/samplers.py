"""Megatron-LM's samplers and its data loader: `megatron.training.datasets.data_samplers`.

The samplers give lists of ints, step by step, from `consumed_samples` on; numbers outside their
limits are AssertionErrors. Those of `millrace.feed` can also check where they start.
"""

import contextlib
import operator
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from millrace import _native
from millrace.errors import ConfigError
from millrace.megatron.errors import EmptyStepError, require


@dataclass(eq=False)
class MegatronPretrainingSampler:
    """Consecutive blocks of sample numbers, a slice to each rank (`single`).

    Args:
        total_samples: Number of samples in the dataset; also the length of the sampler.
        consumed_samples: Number of samples consumed before the first batch.
        micro_batch_size: Number of samples in a batch.
        data_parallel_rank, data_parallel_size: Number of this rank, and of ranks.
        drop_last: Whether to leave out an incomplete last block; else its slice is the last batch,
            which can be shorter or empty.
    """

    total_samples: int
    consumed_samples: int
    micro_batch_size: int
    data_parallel_rank: int
    data_parallel_size: int
    drop_last: bool = True

    def __post_init__(self) -> None:
        _check_numbers(self)
        self.micro_batch_times_data_parallel_size = self.micro_batch_size * self.data_parallel_size
        require(
            0 <= self.consumed_samples < self.total_samples,
            f"consumed_samples is {self.consumed_samples}; 0 is the least, and the dataset has "
            f"{self.total_samples} samples. Build it with a larger size to train on",
        )

    def __len__(self) -> int:
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
        """The blocks that are left, and the incomplete last one unless it is dropped."""
        numbers = range(self.consumed_samples, self.total_samples)
        step = size if size > 0 else len(numbers)  # without a size, no block is complete
        for start in range(0, len(numbers), step):
            block = numbers[start : start + step]
            if len(block) == size or not self.drop_last:
                yield block


class HybridCPMegatronPretrainingSampler(MegatronPretrainingSampler):
    """A rank's part of each whole global batch at once: its micro batches, one after the other.

    `global_batch_size` is the number of samples for all ranks at one step, rounded down to a
    multiple of micro_batch_size * data_parallel_size.
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
        ranks = data_parallel_rank, data_parallel_size
        super().__init__(total_samples, consumed_samples, micro_batch_size, *ranks, drop_last)
        self.global_batch_size = global_batch_size
        self.num_micro_batches = global_batch_size // self.micro_batch_times_data_parallel_size

    def get_start_end_idx_global_batch(self) -> tuple[list[int], list[int]]:
        """The rank's slices of a global batch: their starts and their ends."""
        first, _ = self.get_start_end_idx()
        block_size = self.micro_batch_times_data_parallel_size
        starts = [first + block * block_size for block in range(self.num_micro_batches)]
        return starts, [start + self.micro_batch_size for start in starts]

    def __iter__(self) -> Iterator[list[int]]:
        size = self.micro_batch_times_data_parallel_size * self.num_micro_batches
        for batch in self._blocks(size):
            slices = zip(*self.get_start_end_idx_global_batch(), strict=True)
            yield [number for start, end in slices for number in batch[start:end]]


@dataclass(eq=False)
class MegatronFullValidationSampler:
    """Every sample once, one for a rank at each step; ranks beyond the last sample end earlier."""

    total_samples: int
    data_parallel_rank: int
    data_parallel_size: int

    def __post_init__(self) -> None:
        self.micro_batch_size = 1
        _check_numbers(self)

    def __len__(self) -> int:
        return len(self._numbers())

    def __iter__(self) -> Iterator[list[int]]:
        return ([number] for number in self._numbers())

    def _numbers(self) -> range:
        return range(self.data_parallel_rank, self.total_samples, self.data_parallel_size)


@dataclass(eq=False, repr=False)
class MegatronPretrainingRandomSampler:
    """One epoch, shuffled by `torch.randperm` with the number of the epoch as its seed (`cyclic`).

    Each iteration goes from `consumed_samples` to the end of the epoch that it lies in, and counts
    on `consumed_samples`; `epoch` is the number of that epoch. It starts with an AssertionError
    where no step can start, and with a ZeroDivisionError if no step is complete. Not sharded, some
    ranks can have one batch more than others at the end of an epoch, as in Megatron-LM.

    Args:
        dataset: The dataset; a `RandomSeedDataset` is told the epoch.
        data_sharding: Whether each rank shuffles a contiguous part of the dataset, its shard. Else
            all shuffle the whole, and each takes every data_parallel_size-th sample.
    """

    dataset: Any
    total_samples: int
    consumed_samples: int
    micro_batch_size: int
    data_parallel_rank: int
    data_parallel_size: int
    data_sharding: bool

    def __post_init__(self) -> None:
        _check_numbers(self)
        self.micro_batch_times_data_parallel_size = self.micro_batch_size * self.data_parallel_size
        self.last_batch_size = self.total_samples % self.micro_batch_times_data_parallel_size

    def __len__(self) -> int:
        return self.total_samples

    def __iter__(self) -> Iterator[list[int]]:
        size, block_size = self.micro_batch_size, self.micro_batch_times_data_parallel_size
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
        rank, num_ranks, shift = self.data_parallel_rank, self.data_parallel_size, 0
        if self.data_sharding:
            shard = samples_per_epoch // num_ranks
            numbers = _permutation(shard, self.epoch)[position // num_ranks :]
            shift = rank * shard
        else:
            whole = self.total_samples // size * size
            numbers = _permutation(whole, self.epoch)[position:][rank::num_ranks]
        for end in range(size, len(numbers) + 1, size):
            self.consumed_samples += block_size
            yield (numbers[end - size : end].astype(np.int64) + shift).tolist()


class RandomSeedDataset(torch.utils.data.Dataset):  # type: ignore[misc]
    """A dataset that seeds torch, random and NumPy with index + seed + epoch before each sample."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.base_seed = self.curr_seed = seed
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Changes the seeds of all samples to those of an epoch."""
        self.curr_seed = self.base_seed + epoch

    def __getitem__(self, idx: int) -> Any:
        for set_seed in (torch.manual_seed, random.seed, np.random.seed):
            set_seed(idx + self.curr_seed)
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
    ranks = {
        "data_parallel_rank": parallel_state.get_data_parallel_rank(),
        "data_parallel_size": parallel_state.get_data_parallel_world_size(),
    }
    has_workers = args.num_workers > 0
    exit_signal = args.exit_signal if getattr(args, "exit_signal_handler", False) else None
    is_hybrid = getattr(args, "hybrid_context_parallel", False)
    return torch.utils.data.DataLoader(
        dataset,
        batch_sampler=_sampler(dataset, consumed_samples, args, ranks, is_hybrid),
        num_workers=args.num_workers,
        pin_memory=True,
        persistent_workers=has_workers,
        worker_init_fn=partial(_start_worker, exit_signal=exit_signal) if has_workers else None,
        **({"collate_fn": list} if is_hybrid else {}),  # the samples as they are
    )


def _sampler(
    dataset: Any, consumed_samples: int, args: Any, ranks: dict[str, Any], is_hybrid: bool
) -> Any:
    # By name: the dataset's Split can be Megatron-LM's or ours.
    split = getattr(getattr(dataset, "split", getattr(dataset, "index_split", None)), "name", None)
    prefix = "eval_" if split in ("valid", "test") else ""
    micro_batch_size, global_batch_size = (
        getattr(args, name) if size is None else size
        for name in ("micro_batch_size", "global_batch_size")
        for size in [getattr(args, f"{prefix}{name}", None)]
    )
    position = len(dataset), consumed_samples, micro_batch_size
    if split == "valid" and getattr(args, "full_validation", False):
        return MegatronFullValidationSampler(len(dataset), **ranks)
    if args.dataloader_type == "single" and is_hybrid:
        return HybridCPMegatronPretrainingSampler(*position, global_batch_size, **ranks)
    if args.dataloader_type == "single":
        return MegatronPretrainingSampler(*position, **ranks)
    if args.dataloader_type == "cyclic":
        shards = args.data_sharding
        return MegatronPretrainingRandomSampler(dataset, *position, **ranks, data_sharding=shards)
    raise ConfigError(
        f"dataloader_type is {args.dataloader_type!r}; 'single', 'cyclic' or 'external' is possible"
    )


def _check_numbers(sampler: Any) -> None:
    for name in ("total_samples", "micro_batch_size", "data_parallel_size"):
        if (value := getattr(sampler, name)) <= 0:
            raise EmptyStepError(f"{name} is {value}; at least 1 is needed")
    rank, size = sampler.data_parallel_rank, sampler.data_parallel_size
    require(0 <= rank < size, f"data_parallel_rank is {rank}; 0 to {size - 1} is possible")


def _permutation(size: int, epoch: int) -> Any:
    size, epoch = operator.index(size), operator.index(epoch)
    return _native.torch_randperm(size, epoch, dtype=np.uint32 if size <= 2**32 else np.int64)


def _start_worker(_: int, exit_signal: Any) -> None:
    """In a worker: closes NVIDIA's devices, so that they are free once it has died.

    With an exit signal, the worker ignores it in the way of Megatron-LM.
    """
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the folder is closed by now
            if os.readlink(f"/proc/self/fd/{name}").startswith("/dev/nvidia"):
                os.close(int(name))
    if exit_signal is not None:
        from megatron.training.dist_signal_handler import DistributedSignalHandler

        DistributedSignalHandler(exit_signal).__enter__()
