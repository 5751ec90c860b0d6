"""What a sampler is: three methods, and those that it may have beside them. Then samplers in the
order of the sample numbers, and one that shuffles each epoch anew.
"""

import math
import threading
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.checks import MAX_INT64, check_bool, check_int, shown
from millrace.errors import ConfigError
from millrace.forks import Renewed
from millrace.sampling.schedules import BatchSizeSchedule


class Sampler(Protocol):
    """The steps of one rank, each a pure function of the number of samples consumed before it.

    A `Loader` uses more methods, if they are there and not None:

    - `num_steps(consumed_samples=0)`: number of steps from there to the end;
    - `consumed_at(step)`: number of samples consumed before a step; step 0 starts at sample 0, the
      one after the last at the end; IndexError for a later one;
    - `step_at(consumed_samples)`: number of the step that starts there; ConfigError inside a step
      or past the end;
    - `check_position(consumed_samples)`: raises ConfigError where no step can start;
    - `fingerprint()`: what decides the global order of the samples, for a loader's state.
    """

    def has_step(self, consumed_samples: int) -> bool:
        """Whether a step is left after that many samples."""

    def sample_numbers(self, consumed_samples: int) -> NDArray[np.int64]:
        """The rank's sample numbers at the step that starts there: int64 [batch]."""

    def consumed_after(self, consumed_samples: int) -> int:
        """The number of consumed samples after the step that starts there."""


def num_steps(sampler: Any, consumed_samples: int = 0) -> int:
    """The number of steps from a position on; TypeError without an end."""
    if not getattr(sampler, "num_steps", None):
        raise TypeError(f"a {type(sampler).__name__} has no number of steps")
    return check_int("num_steps", sampler.num_steps(consumed_samples), 0)


def steps_on(sampler: Sampler, position: int, num_steps: int) -> tuple[int, int]:
    """The position so many steps on, or at the end, and the steps to it."""
    for step in range(num_steps):
        if not sampler.has_step(position):
            return position, step
        position = sampler.consumed_after(position)
    return position, num_steps


def checked_position(sampler: Any, consumed_samples: Any) -> int:
    """A position as a whole number; ConfigError where no step can start."""
    position = check_int("consumed_samples", consumed_samples, 0)
    if getattr(sampler, "check_position", None):
        sampler.check_position(position)
    return position


@dataclass(eq=False, repr=False, kw_only=True)
class RankSampler:
    """A rank's share of a dataset; `block_size`: samples of all ranks' micro batches."""

    num_samples: int = field(kw_only=False)
    micro_batch_size: int
    data_parallel_rank: int = 0
    data_parallel_size: int = 1

    def __post_init__(self) -> None:
        for name in ("num_samples", "micro_batch_size", "data_parallel_size"):
            setattr(self, name, check_int(name, getattr(self, name), 1, MAX_INT64))
        last = self.data_parallel_size - 1
        self.data_parallel_rank = check_int("data_parallel_rank", self.data_parallel_rank, 0, last)
        self.block_size = self.micro_batch_size * self.data_parallel_size

    def check_block(self, remedy: str = "", num_samples: int | None = None) -> None:
        """Raises ConfigError unless the dataset fills a step of all ranks."""
        size = self.num_samples if num_samples is None else num_samples
        if self.block_size > size:
            raise ConfigError(
                f"micro_batch_size * data_parallel_size is {self.block_size}; the dataset has "
                f"{size} samples, so that no step is complete. Lower one{remedy}"
            )


@dataclass(eq=False, repr=False, kw_only=True)
class GlobalBatchSampler(RankSampler):
    """A rank's part of each whole global batch at once.

    The step that starts at sample number c takes the global batch [c, c + global_batch_size). Of
    each of its blocks of micro_batch_size * data_parallel_size samples, rank r has the r-th slice
    of micro_batch_size numbers: those of its micro batches under a `SequentialSampler`, one after
    the other, as in Megatron-LM's `HybridCPMegatronPretrainingSampler`.

    Args:
        num_samples: Number of samples in the dataset.
        global_batch_size: Number of samples for all ranks at one step, or a `BatchSizeSchedule`,
            such as `RampUp`. Each size must be a multiple of micro_batch_size * data_parallel_size.
        micro_batch_size: Number of samples in a slice.
        data_parallel_rank: Number of this rank, 0 to data_parallel_size - 1.
        data_parallel_size: Number of ranks.
        drop_last: Whether to leave out an incomplete last global batch; else the last ranks have
            shorter or empty slices.

    Raises:
        ConfigError: A number outside its limits, or a size that is not a multiple.

    Example:
        >>> ranks = {"data_parallel_rank": 1, "data_parallel_size": 2}
        >>> sampler = GlobalBatchSampler(100, global_batch_size=8, micro_batch_size=2, **ranks)
        >>> sampler.sample_numbers(16).tolist()
        [18, 19, 22, 23]
    """

    global_batch_size: int | BatchSizeSchedule
    drop_last: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.drop_last = check_bool("drop_last", self.drop_last)
        # The classes below have no such argument: their steps take one block.
        size = getattr(self, "global_batch_size", self.block_size)
        if not isinstance(size, BatchSizeSchedule):
            size = BatchSizeSchedule([(0, check_int("global_batch_size", size, 1, MAX_INT64))])
        self.schedule = size
        size.check_micro_batches(self.num_samples, self.micro_batch_size, self.data_parallel_size)

    def has_step(self, consumed_samples: int) -> bool:
        start, end = self._bounds(consumed_samples)
        return (end if self.drop_last else start + 1) <= self.num_samples

    def sample_numbers(self, consumed_samples: int) -> NDArray[np.int64]:
        start, end = self._bounds(consumed_samples)
        first = start + self.data_parallel_rank * self.micro_batch_size
        if first >= (end := min(end, self.num_samples)):
            return np.empty(0, np.int64)
        places = np.arange(min(self.micro_batch_size, end - first), dtype=np.int64)
        if end - start <= self.block_size:
            return places + first
        starts = np.arange(first, end, self.block_size, dtype=np.int64)
        numbers = (starts[:, None] + places).ravel()
        return numbers[(numbers >= first) & (numbers < end)]  # a sum may overflow

    def consumed_after(self, consumed_samples: int) -> int:
        return min(self._bounds(consumed_samples)[1], self.num_samples)

    def _bounds(self, consumed_samples: int) -> tuple[int, int]:
        """Where a step starts and ends, if the dataset does not end before."""
        start = check_int("consumed_samples", consumed_samples, 0)
        return start, start + self.schedule.batch_size(start)

    def num_steps(self, consumed_samples: int = 0) -> int:
        return self.schedule.num_steps(self.num_samples, consumed_samples, drop_last=self.drop_last)

    def check_position(self, consumed_samples: int) -> None:
        consumed_samples = check_int("consumed_samples", consumed_samples, 0)
        if consumed_samples > self.num_samples:
            raise ConfigError(
                f"consumed_samples is {shown(consumed_samples)}; the dataset has "
                f"{self.num_samples} samples. Build more (num_samples) to train on"
            )

    def consumed_at(self, step: int) -> int:
        start, num_steps = self.schedule.consumed_at(step), GlobalBatchSampler.num_steps(self)
        if step > num_steps:
            raise IndexError(f"there is no step {step}: the sampler has {num_steps} steps")
        return min(start, self.num_samples)

    def step_at(self, consumed_samples: int) -> int:
        self.check_position(consumed_samples)
        if consumed_samples == self.num_samples and not self.drop_last:
            return self.num_steps()  # the last step may have been shorter
        return self.schedule.step_at(consumed_samples)


@dataclass(eq=False, repr=False, kw_only=True)
class SequentialSampler(GlobalBatchSampler):
    """Consecutive blocks of sample numbers, a slice to each rank (Megatron-LM's `single`).

    The step that starts at sample number c takes the block [c, c + micro_batch_size *
    data_parallel_size); rank r has the r-th slice of micro_batch_size numbers.

    The arguments, but for `global_batch_size`, and errors are those of a `GlobalBatchSampler`.
    """

    global_batch_size: int = field(init=False)


@dataclass(eq=False, repr=False, kw_only=True)
class FullValidationSampler(GlobalBatchSampler):
    """Every sample once, with the same number of steps on every rank.

    Steps are those of a `SequentialSampler`; the last block may be incomplete. With one sample per
    rank and step, the numbers are Megatron-LM's (`MegatronFullValidationSampler`).

    At an incomplete last step, ranks without enough samples have shorter batches, down to an empty
    one (int64 [0]). With `pad` all are full: the missing places take the rank's samples of the
    first step again, as Megatron-LM's evaluation does, and `is_padding` tells which they are.

    Args:
        pad: Whether to fill up the last batches to micro_batch_size samples.

    The other arguments, and errors, are those of a `SequentialSampler`.

    Example:
        >>> sampler = FullValidationSampler(5, data_parallel_rank=1, data_parallel_size=2, pad=True)
        >>> [sampler.sample_numbers(consumed).tolist() for consumed in (0, 2, 4)]
        [[1], [3], [1]]
        >>> [sampler.is_padding(consumed).tolist() for consumed in (0, 2, 4)]
        [[False], [False], [True]]
    """

    global_batch_size: int = field(init=False)
    micro_batch_size: int = 1
    pad: bool = False
    drop_last: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pad = check_bool("pad", self.pad)

    def sample_numbers(self, consumed_samples: int) -> NDArray[np.int64]:
        numbers = super().sample_numbers(consumed_samples)
        if not self.pad:
            return numbers
        first = self.data_parallel_rank * self.micro_batch_size
        places = np.arange(first + len(numbers), first + self.micro_batch_size, dtype=np.int64)
        return np.append(numbers, places % self.num_samples)

    def is_padding(self, consumed_samples: int) -> NDArray[np.bool_]:
        """Which samples of the step that starts there are padding: bool [batch]."""
        num_samples = len(super().sample_numbers(consumed_samples))
        return np.arange(self.micro_batch_size if self.pad else num_samples) >= num_samples


@dataclass(eq=False, repr=False, kw_only=True)
class CyclicSampler(Renewed, RankSampler):
    """Epoch after epoch without end, each shuffled anew (Megatron-LM's `cyclic`).

    The permutation of an epoch is `torch.randperm` with its number as the seed. An epoch has the
    same number of steps on every rank; samples that do not fill a step of all ranks are left out.
    `consumed_samples` goes beyond the number of samples in the dataset.

    Sharded, each rank shuffles a contiguous part of the dataset, its shard, and takes
    micro_batch_size samples of it at each step. Else all ranks shuffle the whole dataset, and a
    step takes micro_batch_size * data_parallel_size samples, dealt out to the ranks in turn.

    The permutations of up to two epochs stay in memory: 4 bytes for each sample that the rank
    shuffles (8 from 2**32 samples on).

    The loader refuses a state whose ranks or micro batch would change the order.

    Args:
        data_sharding: Whether each rank has a shard of the dataset.

    The other arguments are those of a `SequentialSampler`. A dataset with too few samples for one
    step is a ConfigError, too.

    Example:
        >>> sampler = CyclicSampler(10, micro_batch_size=4, data_sharding=False)
        >>> [sampler.sample_numbers(consumed).tolist() for consumed in (0, 4, 8)]
        [[4, 0, 7, 3], [2, 5, 1, 6], [5, 4, 2, 6]]
    """

    data_sharding: bool = True
    _renewed = ("_drawing", "_permutations")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.data_sharding = check_bool("data_sharding", self.data_sharding)
        self.check_block()
        self.steps_per_epoch = self.num_samples // self.block_size
        self.samples_per_epoch = self.steps_per_epoch * self.block_size
        step = self.block_size if self.data_sharding else self.micro_batch_size
        self._num_shuffled = self.num_samples // step * self.micro_batch_size  # of each shard
        self._permutations: dict[int, NDArray[Any]]
        self.renew()

    def after_fork(self) -> None:
        self._drawing = threading.RLock()
        vars(self).setdefault("_permutations", {})  # a child keeps what its parent has drawn

    def has_step(self, consumed_samples: int) -> bool:
        check_int("consumed_samples", consumed_samples, 0, MAX_INT64)
        return True

    def sample_numbers(self, consumed_samples: int) -> NDArray[np.int64]:
        epoch, position = divmod(self._step_start(consumed_samples), self.samples_per_epoch)
        permutation = self._permutation(epoch)
        if self.data_sharding:
            start = position // self.data_parallel_size
            numbers = permutation[start : start + self.micro_batch_size].astype(np.int64)
            return numbers + self.data_parallel_rank * self._num_shuffled
        first, end = position + self.data_parallel_rank, position + self.block_size
        return permutation[first : end : self.data_parallel_size].astype(np.int64)

    def consumed_after(self, consumed_samples: int) -> int:
        return self._step_start(consumed_samples) + self.block_size

    def consumed_at(self, step: int) -> int:
        return check_int("step", step, 0, MAX_INT64) * self.block_size

    def step_at(self, consumed_samples: int) -> int:
        return self._step_start(consumed_samples) // self.block_size

    check_position = step_at

    def fingerprint(self) -> dict[str, Any]:
        return {
            "kind": "cyclic",
            "shards": self.data_parallel_size if self.data_sharding else 1,
            "shuffled_samples": self._num_shuffled,  # of one shard
            "samples_per_epoch": self.samples_per_epoch,
        }

    def _step_start(self, consumed_samples: int) -> int:
        """The number of consumed samples, if a step starts there."""
        consumed_samples = check_int("consumed_samples", consumed_samples, 0, MAX_INT64)
        start = consumed_samples // self.block_size * self.block_size
        if start < consumed_samples:
            common = math.gcd(consumed_samples, self.samples_per_epoch)
            raise ConfigError(
                f"consumed_samples is {consumed_samples}; a step takes micro_batch_size * "
                f"data_parallel_size = {self.block_size} samples and starts at {start} or "
                f"{start + self.block_size}. Resume with a product of both that divides {common}"
            )
        return start

    def _permutation(self, epoch: int) -> NDArray[Any]:
        """Keeps two: prefetching asks for the end of one epoch and the start of the next."""
        if epoch not in (kept := self._permutations):
            with self._drawing:  # else several threads draw the same one
                if epoch not in (kept := self._permutations):
                    dtype = np.uint32 if self._num_shuffled <= 2**32 else np.int64
                    drawn = _native.torch_randperm(self._num_shuffled, epoch, dtype=dtype)
                    # A new dict: other threads read the old one without the lock.
                    kept = self._permutations = {**dict([*kept.items()][-1:]), epoch: drawn}
        return kept[epoch]
