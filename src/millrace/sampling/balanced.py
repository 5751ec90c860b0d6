"""A sampler that deals the packs of each global batch so that every rank has as much work."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from millrace import _native
from millrace.checks import check_bool, check_float, check_int, shown
from millrace.errors import ConfigError
from millrace.option_class import take_options
from millrace.sampling.samplers import GlobalBatchSampler

LINEAR = 61_000.0
"""Cost of a token, in units of a pair of tokens that attention multiplies, of a dense model of 8 B
parameters."""

_MAX_COST = 1e300  # sums of costs are finite


@dataclass(eq=False, repr=False, kw_only=True)
class BalancedSampler(GlobalBatchSampler):
    """A rank's part of each whole global batch, dealt by cost.

    The step that starts at sample number c takes the global batch [c, c + global_batch_size), as a
    `GlobalBatchSampler` does, but deals it so that the dearest rank costs as little as can be found
    quickly. Every rank computes the same deal from the costs alone. A rank has its samples in
    descending order of their costs. An incomplete last global batch is not dealt.

    Which samples a global batch has does not change, nor do its loss and gradients, if the trainer
    divides by the number of tokens that the whole batch trains on.

    Args:
        costs: Function from sample numbers, int64 [batch], to their costs: floats [batch], from 0
            to 1e300; see `DocumentCosts`.
        lockstep: Whether the ranks wait for each other after each micro batch, as with FSDP and
            pipelines, rather than once a step: micro batches are then more alike, and the ranks'
            sums a little less; see `deal`. It needs `drop_last`.

    The other arguments, and errors, are those of a `GlobalBatchSampler`.

    Example:
        >>> def costs(numbers):
        ...     return 10.0 - numbers
        >>> share = {"micro_batch_size": 1, "data_parallel_rank": 0, "data_parallel_size": 2}
        >>> BalancedSampler(8, costs=costs, global_batch_size=4, **share).sample_numbers(0).tolist()
        [0, 3]
    """

    costs: Callable[[NDArray[np.int64]], Any]
    lockstep: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if check_bool("lockstep", self.lockstep) and not self.drop_last:
            raise ConfigError(
                "ranks with fewer micro batches would hang in lockstep: leave out drop_last=False"
            )
        if not callable(self.costs):
            raise ConfigError(f"costs is {shown(self.costs)}; give a function of sample numbers")

    @classmethod
    def of(cls, dataset: Any, **options: Any) -> "BalancedSampler":
        """The sampler of a dataset, by the costs of `DocumentCosts.of`, whose options it takes."""
        costs = DocumentCosts.of(dataset, **take_options(DocumentCosts, options))
        return cls(len(dataset), costs=costs, **options)

    def sample_numbers(self, consumed_samples: int) -> NDArray[np.int64]:
        start, end = self._bounds(consumed_samples)
        if end > self.num_samples:
            return super().sample_numbers(consumed_samples)
        numbers = np.arange(start, end, dtype=np.int64)
        costs = _checked_costs(self.costs(numbers.copy()))
        if len(costs) != len(numbers):
            raise ConfigError(f"costs returned {len(costs)} numbers for {len(numbers)} samples")
        places = deal(costs, self.data_parallel_size, lockstep=self.lockstep)
        share = len(numbers) // self.data_parallel_size
        first = self.data_parallel_rank * share
        answer: NDArray[np.int64] = numbers[places[first : first + share]]
        return answer


def _checked_costs(values: ArrayLike, num_ranks: int = 1) -> NDArray[np.float64]:
    """Costs as float64 [n]; ConfigError for others, and for ranks that they cannot be dealt to."""
    costs = np.asarray(values)
    if costs.ndim != 1 or costs.dtype.kind not in "iuf":
        raise ConfigError(f"costs must be numbers [n], not {costs.dtype} {list(costs.shape)}")
    costs = costs.astype(np.float64)
    bad = costs[~((costs >= 0) & (costs <= _MAX_COST))]
    if len(bad) > 0:
        raise ConfigError(f"a cost is {bad[0]:g}; it must be 0 to {_MAX_COST:g}")
    if len(costs) % check_int("num_ranks", num_ranks, 1) != 0:
        raise ConfigError(f"{len(costs)} samples cannot be dealt evenly to {num_ranks} ranks")
    return costs


def deal(
    costs: NDArray[np.float64], num_ranks: int, *, lockstep: bool = False
) -> NDArray[np.int64]:
    """Places of samples, dealt to ranks so that these have about as much work.

    In lockstep, the dearest samples, as many as there are ranks, come first, then the next ones,
    and of each such group the dearest goes to the rank that has the least so far. Else the dearest
    rank costs as little as can be found quickly; see `cpp/balance.hpp`.

    Args:
        costs: Costs of the samples: float64 [num_ranks * share], from 0 to 1e300.
        num_ranks: Number of ranks.
        lockstep: Whether the ranks wait for each other after each of their samples.

    Returns:
        int64 [num_ranks * share], the places of rank 0, the dearest first, then of rank 1, etc.
    """
    if not lockstep:
        return _native.deal(costs, num_ranks)
    groups: NDArray[np.int64] = np.argsort(-costs, kind="stable").reshape(-1, num_ranks)
    work = np.zeros(num_ranks)
    for group in groups:
        ranks = np.argsort(work, kind="stable")
        work[ranks] += costs[group]
        group[ranks] = group.copy()
    return groups.ravel(order="F")


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
            check_float(name, getattr(self, name), 0, _MAX_COST)
        check_int("multiple", self.multiple, 1)

    @classmethod
    def of(cls, dataset: Any, *, multiple: int | None = None, **options: float) -> "DocumentCosts":
        """The costs of the samples of a dataset with a method `spans`.

        Without a multiple, it is the greatest of those for which the dataset's packs have room.
        """
        for one in (*getattr(dataset, "datasets", ()), dataset):
            if not hasattr(getattr(one, "source", None) or one, "spans"):
                raise ConfigError(
                    f"a {type(one).__name__} has no method `spans`, which gives lengths: give "
                    'costs, or the TextDataset order="packs"'
                )
        multiple = _multiple_of(dataset) if multiple is None else multiple
        return cls(spans=dataset.spans, multiple=multiple, **options)

    def __call__(self, sample_numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        """The costs of some samples: float64 [batch]."""
        spans = self.spans(sample_numbers)
        counts = np.asarray(spans.counts, np.int64)
        lengths = -(-counts // self.multiple) * float(self.multiple)
        sums = np.append(0.0, np.cumsum((self.quadratic * lengths + self.linear) * lengths))
        return np.diff(sums[spans.bounds])


def _multiple_of(dataset: Any) -> int:
    """The greatest multiple for which packs of the dataset have room."""
    plan = getattr(getattr(dataset, "order", None), "plan", None)
    inner = [getattr(dataset, "source", None), *getattr(dataset, "datasets", ())]
    multiples = [_multiple_of(one) for one in inner if one is not None]
    return max([getattr(plan, "multiple", 1), *multiples])


def imbalance(costs: ArrayLike, num_ranks: int, waits: int = 1) -> float:
    """The work of a step over the mean of the ranks, where the ranks wait for the dearest one.

    Args:
        costs: Costs of the samples, those of a rank side by side: floats [num_ranks * share].
        num_ranks: Number of ranks.
        waits: How often the ranks wait for each other in a step, at equal distances: 1, or with
            FSDP and pipelines the number of micro batches.
    """
    each = _checked_costs(
        costs, check_int("num_ranks", num_ranks, 1) * check_int("waits", waits, 1)
    )
    if not each.any():
        return 1.0
    work = each.reshape(num_ranks, waits, -1).sum(axis=2)
    return float(work.max(axis=0).sum() / work.sum() * num_ranks)


def least_imbalance(costs: ArrayLike, num_ranks: int) -> float:
    """A lower bound on `imbalance` for any deal of as many samples to each rank.

    The greatest of 1; of the mean of k ranks that have the k dearest samples and else the cheapest
    ones, for any k; and of the cost of a rank that must exist in any deal: with i + 1 of the
    i * num_ranks + 1 dearest samples, for any i; or, for any q < j, with some number m of the j
    dearest and at most m * q / j of the q cheapest.
    """
    dearest = np.sort(_checked_costs(costs, num_ranks))[::-1]
    if not dearest.any():
        return 1.0
    size, share = len(dearest), len(dearest) // num_ranks
    sums, cheap = (np.append(0.0, np.cumsum(one)) for one in (dearest, dearest[::-1]))
    mean = sums[-1] / num_ranks
    k, i = np.arange(1, num_ranks + 1), np.arange(share)
    first = i * num_ranks
    least = max(mean, ((sums[k] + cheap[k * (share - 1)]) / k).max())
    least = max(least, (sums[first + 1] - sums[first - i] + cheap[share - 1 - i]).max())
    for q in range(min(num_ranks, 32)):
        j = np.arange(q + 1, min(q + num_ranks, size - q - share) + 1)
        costs_of_m = np.full((share, len(j)), np.inf)
        for m in range(1, share + 1):
            t = np.minimum(m * q // j, share - m)
            rest = cheap[t] + cheap[q + share - m - t] - cheap[q]
            costs_of_m[m - 1] = np.where(m > j, np.inf, sums[j] - sums[np.maximum(j - m, 0)] + rest)
        least = max(least, costs_of_m.min(axis=0).max(initial=0))
    return float(least / mean)
