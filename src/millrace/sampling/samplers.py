"""Which sample numbers a data-parallel rank takes at each step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millrace.checks import MAX_INT64, flag, shown, whole
from millrace.errors import ConfigError
from millrace.sampling.protocols import RankSampler
from millrace.sampling.schedules import BatchSizeSchedule, as_schedule


class GlobalBatchSampler(RankSampler):
    """A rank's part of each whole global batch at once.

    The step that starts at sample number c takes the global batch [c, c + global_batch_size). It
    consists of blocks of micro_batch_size * data_parallel_size samples; of each block, rank r has
    the r-th slice of micro_batch_size numbers. So the rank's numbers are those of its micro batches
    under a `SequentialSampler`, one after the other, as in Megatron-LM's
    `HybridCPMegatronPretrainingSampler`.

    Args:
        num_samples: Number of samples in the dataset.
        global_batch_size: Number of samples for all ranks at one step, or a `RampUp` or another
            `BatchSizeSchedule`. Each size must be a multiple of micro_batch_size *
            data_parallel_size.
        micro_batch_size: Number of samples in a slice.
        data_parallel_rank: Number of this rank, 0 to data_parallel_size - 1.
        data_parallel_size: Number of ranks.
        drop_last: Whether to leave out an incomplete last global batch; else its slices are handed
            out as they are (shorter or empty for the last ranks).

    Raises:
        ConfigError: A number outside its limits, or a global batch size that is not a multiple.

    Example:
        >>> sampler = GlobalBatchSampler(
        ...     100,
        ...     global_batch_size=8,
        ...     micro_batch_size=2,
        ...     data_parallel_rank=1,
        ...     data_parallel_size=2,
        ... )
        >>> sampler.sample_numbers(16).tolist()
        [18, 19, 22, 23]
    """

    def __init__(
        self,
        num_samples: int,
        *,
        global_batch_size: int | BatchSizeSchedule,
        micro_batch_size: int,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        drop_last: bool = True,
    ) -> None:
        super().__init__(num_samples, micro_batch_size, data_parallel_rank, data_parallel_size)
        self.drop_last = flag("drop_last", drop_last)
        self.schedule = as_schedule("global_batch_size", global_batch_size)
        self.schedule.check_micro_batches(
            self.num_samples, self.micro_batch_size, self.data_parallel_size
        )

    def has_step(self, consumed_samples: int) -> bool:
        consumed_samples = whole("consumed_samples", consumed_samples, 0)
        need = self.schedule.batch_size(consumed_samples) if self.drop_last else 1
        return consumed_samples + need <= self.num_samples

    def sample_numbers(self, consumed_samples: int) -> NDArray[np.int64]:
        consumed_samples = whole("consumed_samples", consumed_samples, 0)
        first = consumed_samples + self.data_parallel_rank * self.micro_batch_size
        size = self.schedule.batch_size(consumed_samples)
        end = min(consumed_samples + size, self.num_samples)
        if first >= end:
            return np.empty(0, np.int64)
        starts = np.arange(first, end, min(self.block_size, end), dtype=np.int64)
        places = np.arange(min(self.micro_batch_size, end - first), dtype=np.int64)
        numbers = (starts[:, None] + places).ravel()
        return numbers[(numbers >= first) & (numbers < end)]  # a sum may overflow

    def consumed_after(self, consumed_samples: int) -> int:
        consumed_samples = whole("consumed_samples", consumed_samples, 0)
        size = self.schedule.batch_size(consumed_samples)
        return min(consumed_samples + size, self.num_samples)

    def num_steps(self, consumed_samples: int = 0) -> int:
        """Number of steps from a number of consumed samples to the end."""
        return self.schedule.num_steps(self.num_samples, consumed_samples, drop_last=self.drop_last)

    def check_position(self, consumed_samples: int) -> None:
        """Raises ConfigError beyond the end; a step can start at any sample."""
        consumed_samples = whole("consumed_samples", consumed_samples, 0)
        if consumed_samples > self.num_samples:
            raise ConfigError(
                f"consumed_samples is {shown(consumed_samples)}; the dataset has "
                f"{self.num_samples} samples. Build it with a larger num_samples to train on"
            )

    def consumed_at(self, step: int) -> int:
        """Number of samples consumed before a step; step 0 starts at sample 0.

        Raises:
            IndexError: A step beyond the end. The step after the last one gives the end.
        """
        consumed_samples = self.schedule.consumed_at(step)
        num_steps = self.schedule.num_steps(self.num_samples, drop_last=self.drop_last)
        if step > num_steps:
            raise IndexError(f"there is no step {step}: the sampler has {num_steps} steps")
        return min(consumed_samples, self.num_samples)

    def step_at(self, consumed_samples: int) -> int:
        """The number of the step that starts there; step 0 starts at sample 0.

        Raises:
            ConfigError: A number of samples inside a step, or beyond the end.
        """
        self.check_position(consumed_samples)
        if consumed_samples == self.num_samples and not self.drop_last:
            return self.num_steps()  # the last step may have been shorter
        return self.schedule.step_at(consumed_samples)


class SequentialSampler(GlobalBatchSampler):
    """Consecutive blocks of sample numbers, a slice to each rank (Megatron-LM's `single`).

    The step that starts at sample number c takes the block [c, c + micro_batch_size *
    data_parallel_size); rank r has the r-th slice of micro_batch_size numbers.

    Args:
        num_samples: Number of samples in the dataset.
        micro_batch_size: Number of samples for one rank at one step.
        data_parallel_rank: Number of this rank, 0 to data_parallel_size - 1.
        data_parallel_size: Number of ranks.
        drop_last: Whether to leave out an incomplete last block; else its slices are handed out as
            they are (shorter or empty for the last ranks).

    Raises:
        ConfigError: A number outside its limits.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        micro_batch_size: int,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        drop_last: bool = True,
    ) -> None:
        super().__init__(
            num_samples,
            global_batch_size=_block_size(micro_batch_size, data_parallel_size),
            micro_batch_size=micro_batch_size,
            data_parallel_rank=data_parallel_rank,
            data_parallel_size=data_parallel_size,
            drop_last=drop_last,
        )


class FullValidationSampler(GlobalBatchSampler):
    """Every sample once, with the same number of steps on every rank.

    The step that starts at sample number c takes the block [c, c + micro_batch_size *
    data_parallel_size), of which rank r has the r-th slice; the last block may be incomplete. With
    one sample per rank and step, the sample numbers of each rank are Megatron-LM's
    (`MegatronFullValidationSampler`).

    At an incomplete last step, ranks without enough samples have shorter batches, down to an empty
    one (int64 [0]), or with `pad` full batches: the missing places take the rank's samples of the
    first step again, as Megatron-LM's evaluation does, and `is_padding` tells which they are.

    Args:
        num_samples: Number of samples in the dataset.
        micro_batch_size: Number of samples for one rank at one step.
        data_parallel_rank: Number of this rank, 0 to data_parallel_size - 1.
        data_parallel_size: Number of ranks.
        pad: Whether to fill up the last batches, so that all have micro_batch_size samples.

    Raises:
        ConfigError: A number outside its limits.

    Example:
        >>> sampler = FullValidationSampler(5, data_parallel_rank=1, data_parallel_size=2, pad=True)
        >>> [sampler.sample_numbers(consumed).tolist() for consumed in (0, 2, 4)]
        [[1], [3], [1]]
        >>> [sampler.is_padding(consumed).tolist() for consumed in (0, 2, 4)]
        [[False], [False], [True]]
    """

    def __init__(
        self,
        num_samples: int,
        *,
        micro_batch_size: int = 1,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        pad: bool = False,
    ) -> None:
        self.pad = flag("pad", pad)
        super().__init__(
            num_samples,
            global_batch_size=_block_size(micro_batch_size, data_parallel_size),
            micro_batch_size=micro_batch_size,
            data_parallel_rank=data_parallel_rank,
            data_parallel_size=data_parallel_size,
            drop_last=False,
        )

    def sample_numbers(self, consumed_samples: int) -> NDArray[np.int64]:
        numbers = super().sample_numbers(consumed_samples)
        if not self.pad or len(numbers) == self.micro_batch_size:
            return numbers
        first = self.data_parallel_rank * self.micro_batch_size
        places = np.arange(first + len(numbers), first + self.micro_batch_size, dtype=np.int64)
        return np.concatenate([numbers, places % self.num_samples])

    def is_padding(self, consumed_samples: int) -> NDArray[np.bool_]:
        """Which samples of the step that starts there are padding: bool [batch]."""
        num_samples = len(super().sample_numbers(consumed_samples))
        size = self.micro_batch_size if self.pad else num_samples
        is_padding: NDArray[np.bool_] = np.arange(size) >= num_samples
        return is_padding


def _block_size(micro_batch_size: int, data_parallel_size: int) -> int:
    micro_batch_size = whole("micro_batch_size", micro_batch_size, 1, MAX_INT64)
    return micro_batch_size * whole("data_parallel_size", data_parallel_size, 1, MAX_INT64)
