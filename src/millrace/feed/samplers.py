"""Which sample numbers a data-parallel rank takes at each step."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from millrace.checks import MAX_INT64, flag, shown, whole
from millrace.errors import ConfigError


class Sampler(Protocol):
    """The steps of one rank, each a pure function of the number of samples consumed before it."""

    def has_step(self, consumed_samples: int) -> bool:
        """Whether a step is left after that many samples."""
        ...

    def sample_numbers(self, consumed_samples: int) -> NDArray[np.int64]:
        """The rank's sample numbers at the step that starts there: int64 [micro_batch_size]."""
        ...

    def consumed_after(self, consumed_samples: int) -> int:
        """The number of consumed samples after the step that starts there."""
        ...


class SequentialSampler:
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
        self.num_samples = whole("num_samples", num_samples, 1, MAX_INT64)
        micro_batch_size = whole("micro_batch_size", micro_batch_size, 1, MAX_INT64)
        data_parallel_size = whole("data_parallel_size", data_parallel_size, 1, MAX_INT64)
        rank = whole("data_parallel_rank", data_parallel_rank, 0, data_parallel_size - 1)
        self.block_size = micro_batch_size * data_parallel_size
        self.drop_last = flag("drop_last", drop_last)
        self._start = rank * micro_batch_size
        self._stop = self._start + micro_batch_size

    def num_steps(self, consumed_samples: int = 0) -> int:
        left = max(self.num_samples - whole("consumed_samples", consumed_samples, 0), 0)
        return left // self.block_size if self.drop_last else -(-left // self.block_size)

    def consumed_at(self, step: int) -> int:
        return whole("step", step, 0) * self.block_size

    def check_position(self, consumed_samples: int) -> None:
        if consumed_samples > self.num_samples:
            raise ConfigError(
                f"consumed_samples is {shown(consumed_samples)}; the dataset has "
                f"{self.num_samples} samples. Build it with a larger num_samples to train on"
            )

    def has_step(self, consumed_samples: int) -> bool:
        consumed_samples = whole("consumed_samples", consumed_samples, 0)
        need = self.block_size if self.drop_last else 1
        return consumed_samples + need <= self.num_samples

    def sample_numbers(self, consumed_samples: int) -> NDArray[np.int64]:
        consumed_samples = whole("consumed_samples", consumed_samples, 0)
        end = min(consumed_samples + self.block_size, self.num_samples)
        start = min(consumed_samples + self._start, end)
        return np.arange(start, min(consumed_samples + self._stop, end), dtype=np.int64)

    def consumed_after(self, consumed_samples: int) -> int:
        consumed_samples = whole("consumed_samples", consumed_samples, 0)
        return min(consumed_samples + self.block_size, self.num_samples)
