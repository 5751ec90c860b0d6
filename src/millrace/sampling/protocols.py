"""What a sampler is: three methods, and those that it may have beside them."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from millrace.checks import MAX_INT64, whole
from millrace.errors import ConfigError


class Sampler(Protocol):
    """The steps of one rank, each a pure function of the number of samples consumed before it.

    A sampler may have more methods, which a `Loader` uses: those of `SizedSampler`,
    `IndexedSampler`, `CheckedSampler`, `OrderedSampler` and `ExplainedSampler`.
    """

    def has_step(self, consumed_samples: int) -> bool:
        """Whether a step is left after that many samples."""
        ...

    def sample_numbers(self, consumed_samples: int) -> NDArray[np.int64]:
        """The rank's sample numbers at the step that starts there: int64 [batch]."""
        ...

    def consumed_after(self, consumed_samples: int) -> int:
        """The number of consumed samples after the step that starts there."""
        ...


@runtime_checkable
class SizedSampler(Sampler, Protocol):
    """A sampler with an end that is known."""

    def num_steps(self, consumed_samples: int = 0) -> int:
        """Number of steps from there to the end."""
        ...


@runtime_checkable
class IndexedSampler(Sampler, Protocol):
    """A sampler whose steps have numbers; step 0 starts at sample 0."""

    def consumed_at(self, step: int) -> int:
        """Number of samples consumed before a step."""
        ...

    def step_at(self, consumed_samples: int) -> int:
        """The number of the step that starts there."""
        ...


@runtime_checkable
class CheckedSampler(Sampler, Protocol):
    """A sampler whose steps cannot start anywhere."""

    def check_position(self, consumed_samples: int) -> None:
        """Raises ConfigError where no step can start."""
        ...


@runtime_checkable
class OrderedSampler(Protocol):
    """A sampler that does not take the samples in the order of their numbers."""

    def fingerprint(self) -> dict[str, Any]:
        """What decides the global order of the samples, for a loader's state."""
        ...


@runtime_checkable
class ExplainedSampler(OrderedSampler, Protocol):
    """A sampler that says how its order can differ."""

    def explain_difference(self) -> str:
        """A sentence for the error of another fingerprint."""
        ...


class RankSampler:
    """A rank's share of a dataset: the numbers that our samplers have in common.

    Attributes:
        num_samples: Number of samples in the dataset.
        micro_batch_size: Number of samples in a slice of one rank.
        data_parallel_rank: Number of this rank.
        data_parallel_size: Number of ranks.
        block_size: Number of samples in the slices of all ranks.
    """

    def __init__(
        self, num_samples: int, micro_batch_size: int, rank: int, data_parallel_size: int
    ) -> None:
        self.num_samples = whole("num_samples", num_samples, 1, MAX_INT64)
        self.micro_batch_size = whole("micro_batch_size", micro_batch_size, 1, MAX_INT64)
        self.data_parallel_size = whole("data_parallel_size", data_parallel_size, 1, MAX_INT64)
        self.data_parallel_rank = whole("data_parallel_rank", rank, 0, self.data_parallel_size - 1)
        self.block_size = self.micro_batch_size * self.data_parallel_size

    def check_block(self, remedy: str = "") -> None:
        """Raises ConfigError unless the dataset fills a step of all ranks."""
        if self.block_size > self.num_samples:
            raise ConfigError(
                f"micro_batch_size * data_parallel_size is {self.block_size}; the dataset has "
                f"{self.num_samples} samples, so that no step is complete. Lower one of them"
                f"{remedy}"
            )


def num_steps(sampler: Any, consumed_samples: int = 0) -> int:
    """The number of steps from a position to the end; TypeError if there is no end."""
    if not isinstance(sampler, SizedSampler):
        raise TypeError(f"a {type(sampler).__name__} has no number of steps")
    return whole("num_steps", sampler.num_steps(consumed_samples), 0)


def checked_position(sampler: Any, consumed_samples: Any) -> int:
    """A position as a whole number; ConfigError where no step of the sampler can start."""
    position = whole("consumed_samples", consumed_samples, 0)
    if isinstance(sampler, CheckedSampler):
        sampler.check_position(position)
    return position


def explanation(sampler: Any) -> str:
    """The sampler's sentence on how its order can differ; empty if it has none."""
    return sampler.explain_difference() if isinstance(sampler, ExplainedSampler) else ""
