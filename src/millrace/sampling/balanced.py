"""A sampler that deals the packs of each global batch so that every rank has as much work."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from millrace import _native
from millrace.checks import check_float, check_int
from millrace.errors import ConfigError
from millrace.sampling.samplers import GlobalBatchSampler

LINEAR = 61_000.0
"""Cost of a token, in units of a pair of tokens that attention multiplies, of a dense model of 8 B
parameters."""


@dataclass(eq=False, repr=False, kw_only=True)
class BalancedSampler(GlobalBatchSampler):
    """A rank's part of each whole global batch, dealt by cost.

    The step that starts at sample number c takes the global batch [c, c + global_batch_size), as a
    `GlobalBatchSampler` does, but deals it so that the dearest rank costs as little as can be found
    quickly (see `_native.deal`). Every rank computes the same deal from the costs alone. A rank has
    its samples in descending order of their costs, so that the ranks' micro batches are alike. An
    incomplete last global batch is not dealt.

    Which samples a global batch has does not change, nor do its loss and gradients, if the trainer
    divides by the number of tokens that the whole batch trains on.

    Args:
        costs: Function from sample numbers, int64 [batch], to their costs: floats [batch], finite
            and at least 0; see `DocumentCosts`.

    The other arguments, and errors, are those of a `GlobalBatchSampler`.

    Example:
        >>> def costs(numbers):
        ...     return 10.0 - numbers
        >>> share = {"micro_batch_size": 1, "data_parallel_rank": 0, "data_parallel_size": 2}
        >>> BalancedSampler(8, costs=costs, global_batch_size=4, **share).sample_numbers(0).tolist()
        [0, 3]
    """

    costs: Callable[[NDArray[np.int64]], Any]

    @classmethod
    def of(
        cls,
        dataset: Any,
        *,
        quadratic: float = 1.0,
        linear: float = LINEAR,
        multiple: int = 1,
        **options: Any,
    ) -> "BalancedSampler":
        """The sampler of a dataset with a method `spans`, by the `DocumentCosts` of its samples."""
        spans = getattr(dataset, "spans", None)
        if spans is None:
            name = type(dataset).__name__
            raise ConfigError(f"a {name} has no method `spans`, which gives lengths: give costs")
        costs = DocumentCosts(spans=spans, quadratic=quadratic, linear=linear, multiple=multiple)
        return cls(len(dataset), costs=costs, **options)

    def sample_numbers(self, consumed_samples: int) -> NDArray[np.int64]:
        start, end = self._bounds(consumed_samples)
        if end > self.num_samples:
            return super().sample_numbers(consumed_samples)
        numbers = np.arange(start, end, dtype=np.int64)
        costs = np.ascontiguousarray(self.costs(numbers), np.float64)
        if costs.shape != numbers.shape:
            raise ConfigError(f"costs returned {costs.shape} for {len(numbers)} samples")
        try:
            places = _native.deal(costs, self.data_parallel_size)
        except ValueError as error:
            raise ConfigError(f"samples {start} to {end} cannot be dealt: {error}") from None
        parts = np.split(numbers[places], self.data_parallel_size)
        return parts[self.data_parallel_rank]


@dataclass(frozen=True, kw_only=True)
class DocumentCosts:
    """The costs of samples: over their documents, the sum of quadratic * L**2 + linear * L.

    Args:
        spans: Function from sample numbers to `Spans`, such as `GPTDataset.spans`, whose counts are
            the documents' lengths L.
        quadratic, linear: Cost of a pair of tokens, and of a token, in a unit of your choice.
        multiple: Number of tokens to whose multiples documents are padded.
    """

    spans: Callable[[NDArray[np.int64]], Any]
    quadratic: float = 1.0
    linear: float = LINEAR
    multiple: int = 1

    def __post_init__(self) -> None:
        for name in ("quadratic", "linear"):
            if not 0 <= check_float(name, getattr(self, name)) < math.inf:
                raise ConfigError(f"{name} must be 0 or more, not {getattr(self, name)}")
        check_int("multiple", self.multiple, 1)

    def __call__(self, sample_numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        """The costs of some samples: float64 [batch]."""
        spans = self.spans(sample_numbers)
        lengths = -(-spans.counts // self.multiple) * float(self.multiple)
        sums = np.append(0.0, np.cumsum((self.quadratic * lengths + self.linear) * lengths))
        return np.diff(sums[spans.bounds])


def imbalance(costs: ArrayLike, num_ranks: int, waits: int = 1) -> float:
    """The work of a step over the mean of the ranks, where the ranks wait for the dearest one.

    Args:
        costs: Costs of the samples, those of a rank side by side: floats [num_ranks * share].
        num_ranks: Number of ranks.
        waits: How often the ranks wait for each other in a step, at equal distances: 1, or with
            FSDP and pipelines the number of micro batches.
    """
    work = np.asarray(costs, np.float64).reshape(num_ranks, waits, -1).sum(axis=2)
    return float(work.max(axis=0).sum() / work.sum() * num_ranks)


def least_imbalance(costs: ArrayLike, num_ranks: int) -> float:
    """A lower bound on `imbalance` for any deal of as many samples to each rank.

    The greatest of 1; of the mean over the ranks that have the j dearest samples and else the
    cheapest, for any j; of the same without the q cheapest samples, which q of these ranks may
    have, unless two of the dearest are on one rank; and of the ranks of which one must have i + 1
    of the i * ranks + 1 dearest.
    """
    dearest = np.sort(np.asarray(costs, np.float64))[::-1]
    size, share = len(dearest), len(dearest) // num_ranks
    sums = np.append(0.0, np.cumsum(dearest))
    least = sums[-1] / num_ranks
    for cheap in range(min(num_ranks, 64)):
        j = np.arange(cheap + 1, num_ranks + 1)
        ranks = j - cheap
        end = size - cheap
        apart = sums[j] - sums[cheap] + sums[end] - sums[end - (share - 1) * ranks]
        together = np.inf
        if cheap > 0 and share > 1:
            together = dearest[j - 1] + dearest[j - 2] + sums[size] - sums[size - share + 2]
        least = max(least, np.minimum(apart / ranks, together).max())
    for i in range(share):
        first = i * num_ranks
        least = max(
            least, sums[first + 1] - sums[first - i] + sums[size] - sums[size - share + i + 1]
        )
    return float(least / (sums[-1] / num_ranks))
