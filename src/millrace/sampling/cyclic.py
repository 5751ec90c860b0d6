"""Epoch after epoch, each shuffled anew."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.checks import MAX_INT64, flag, whole
from millrace.errors import ConfigError
from millrace.forks import ForkLock
from millrace.sampling.protocols import RankSampler

_EPOCHS_KEPT = 2  # prefetching threads ask for the end of one epoch and the start of the next


class CyclicSampler(RankSampler):
    """Epoch after epoch without end, each shuffled anew (Megatron-LM's `cyclic`).

    The permutation of an epoch is `torch.randperm` with the number of the epoch as its seed. An
    epoch ends after the same number of steps on every rank; samples that do not fill a step of all
    ranks are left out. `consumed_samples` goes beyond the number of samples in the dataset.

    Sharded, each rank shuffles a contiguous part of the dataset, its shard, and takes
    micro_batch_size samples of it at each step. Else all ranks shuffle the whole dataset, and a
    step takes micro_batch_size * data_parallel_size samples of it, dealt out to the ranks in turn.

    The permutations of up to two epochs stay in memory: 4 bytes for each sample that the rank
    shuffles (8 bytes from 2**32 samples on).

    Resuming with another number of ranks or micro batch is possible where the order of the samples
    stays the same: if they are not sharded, and an epoch has the same length and holds a whole
    number of steps from the saved position on. Else the loader refuses the state.

    Args:
        num_samples: Number of samples in the dataset.
        micro_batch_size: Number of samples for one rank at one step.
        data_parallel_rank: Number of this rank, 0 to data_parallel_size - 1.
        data_parallel_size: Number of ranks.
        data_sharding: Whether each rank has a shard of the dataset.

    Raises:
        ConfigError: A number outside its limits, or too few samples for one step.

    Example:
        >>> sampler = CyclicSampler(10, micro_batch_size=4, data_sharding=False)
        >>> [sampler.sample_numbers(consumed).tolist() for consumed in (0, 4, 8)]
        [[4, 0, 7, 3], [2, 5, 1, 6], [5, 4, 2, 6]]
    """

    def __init__(
        self,
        num_samples: int,
        *,
        micro_batch_size: int,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        data_sharding: bool = True,
    ) -> None:
        super().__init__(num_samples, micro_batch_size, data_parallel_rank, data_parallel_size)
        self.data_sharding = flag("data_sharding", data_sharding)
        self.check_block()
        self.steps_per_epoch = self.num_samples // self.block_size
        self.samples_per_epoch = self.steps_per_epoch * self.block_size
        self._permutations: dict[int, NDArray[Any]] = {}

    def has_step(self, consumed_samples: int) -> bool:
        whole("consumed_samples", consumed_samples, 0, MAX_INT64)
        return True

    def sample_numbers(self, consumed_samples: int) -> NDArray[np.int64]:
        consumed_samples = self._step_start(consumed_samples)
        epoch, position = divmod(consumed_samples, self.samples_per_epoch)
        permutation = self._permutation(epoch)
        if self.data_sharding:
            start = position // self.data_parallel_size
            numbers = permutation[start : start + self.micro_batch_size].astype(np.int64)
            numbers += self.data_parallel_rank * self._num_shuffled
            return numbers
        step = slice(
            position + self.data_parallel_rank, position + self.block_size, self.data_parallel_size
        )
        return permutation[step].astype(np.int64)

    def consumed_after(self, consumed_samples: int) -> int:
        return self._step_start(consumed_samples) + self.block_size

    def check_position(self, consumed_samples: int) -> None:
        """Raises ConfigError unless a step of this sampler starts there."""
        self._step_start(consumed_samples)

    def consumed_at(self, step: int) -> int:
        """Number of samples consumed before a step; step 0 starts at sample 0."""
        return whole("step", step, 0, MAX_INT64) * self.block_size

    def step_at(self, consumed_samples: int) -> int:
        """The number of the step that starts there; step 0 starts at sample 0.

        Raises:
            ConfigError: A number of samples inside a step.
        """
        return self._step_start(consumed_samples) // self.block_size

    def fingerprint(self) -> dict[str, Any]:
        """What decides the global order of the samples."""
        return {
            "kind": "cyclic",
            "shards": self._num_shards,
            "shuffled_samples": self._num_shuffled,  # of one shard
            "samples_per_epoch": self.samples_per_epoch,
        }

    def explain_difference(self) -> str:
        """Why a cyclic order can differ between two numbers of ranks."""
        return (
            "A cyclic order depends on the samples that fill an epoch and, with data_sharding, on "
            "the number of ranks. Resume with the micro batch, ranks and data_sharding of the "
            "saved run, or with others that give the same numbers."
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_permutations": {}}

    @property
    def _num_shards(self) -> int:
        return self.data_parallel_size if self.data_sharding else 1

    @property
    def _num_shuffled(self) -> int:
        """Number of samples in a permutation: of a shard, or of the dataset."""
        if self.data_sharding:
            return self.steps_per_epoch * self.micro_batch_size
        return self.num_samples // self.micro_batch_size * self.micro_batch_size

    def _step_start(self, consumed_samples: int) -> int:
        """The number of consumed samples, if a step starts there."""
        consumed_samples = whole("consumed_samples", consumed_samples, 0, MAX_INT64)
        excess = consumed_samples % self.block_size
        if excess:
            epoch, position = divmod(consumed_samples, self.samples_per_epoch)
            start = consumed_samples - excess
            common = math.gcd(position, self.samples_per_epoch)
            raise ConfigError(
                f"consumed_samples is {consumed_samples}, which is {position} samples into "
                f"epoch {epoch}; a step takes micro_batch_size * data_parallel_size = "
                f"{self.block_size} samples and starts at {start} or {start + self.block_size}. "
                f"Resume with a micro batch and a number of ranks whose product divides {common}"
            )
        return consumed_samples

    def _permutation(self, epoch: int) -> NDArray[Any]:
        permutation = self._permutations.get(epoch)
        if permutation is not None:
            return permutation
        with _drawing:
            permutation = self._permutations.get(epoch)
            if permutation is None:
                size = self._num_shuffled
                dtype = np.uint32 if size <= 2**32 else np.int64
                permutation = _native.torch_randperm(size, epoch, dtype=dtype)
                # A new dict: other threads read the old one without the lock.
                kept = list(self._permutations.items())[1 - _EPOCHS_KEPT :]
                self._permutations = {**dict(kept), epoch: permutation}
        return permutation


_drawing = ForkLock()  # so that threads do not draw the same permutation several times
