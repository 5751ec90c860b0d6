"""From which dataset each sample is drawn: mixtures, and Megatron-LM's blend."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.checks import (
    check_float,
    check_floats,
    check_int,
    check_ints,
    check_list,
    check_within,
    shown,
)
from millrace.deferred import Deferred
from millrace.errors import ConfigError
from millrace.order.order_plans import Arrays
from millrace.order.spans import RULES_VERSION

SURPLUS = 0.005
"""The part of each dataset's share that Megatron-LM builds beyond it."""

_MOST_SURPLUS = 1_000_000  # keeps the number of samples to build countable
_CHUNK_SIZE = 1 << 22  # draws to count at a time: np.bincount takes 8 bytes for each


class Mixture(Protocol):
    """From which source each sample is drawn: a pure function of the sample number.

    `BlendedDataset(datasets, order=...)` takes any mixture. A source is the number of a dataset;
    the n-th draw from it is its sample n.
    """

    def __len__(self) -> int:
        """The number of samples."""

    def draws(self, sample_numbers: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The sources of some samples, and the samples' numbers in them.

        Args:
            sample_numbers: int64 [batch], each in [0, len).

        Returns:
            The sources, integers [batch], and the numbers, int64 [batch].
        """

    def fingerprint(self, consumed_samples: int | None = None) -> dict[str, Any]:
        """What decides the draws, as plain values, for comparison with a saved state.

        Args:
            consumed_samples: As in `Order.fingerprint`, of draws.
        """


class BlendIndices(NamedTuple):
    """Indices of a blend.

    Attributes:
        dataset_index: Dataset of each sample: int16 [size].
        dataset_sample_index: Number of each sample in its dataset: int64 [size].
    """

    dataset_index: NDArray[np.int16]
    dataset_sample_index: NDArray[np.int64]


class BlendOrder:
    """Megatron-LM's mixture.

    Args:
        weights: Normalised weights.
        size: Number of samples.
        arrays: The two indices by their names, loaded at the first sample.
        is_exhaustive: Whether all samples of all datasets are drawn, so that the size decides how.
    """

    def __init__(
        self, weights: Sequence[float], size: int, arrays: Deferred[Arrays], is_exhaustive: bool
    ) -> None:
        self.weights, self._size, self._arrays = list(weights), size, arrays
        self._is_exhaustive = is_exhaustive

    def __len__(self) -> int:
        return self._size

    @property
    def indices(self) -> BlendIndices:
        return BlendIndices(**self._arrays.value)

    def draws(
        self, sample_numbers: NDArray[np.int64]
    ) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        return _native.look_up_draws(*self.indices, sample_numbers)

    def fingerprint(self, consumed_samples: int | None = None) -> dict[str, Any]:
        """What decides all draws: each of them depends on all weights."""
        size = {"size": len(self)} if self._is_exhaustive else {}  # else it only says where it ends
        return {"kind": "blend", "rules": RULES_VERSION, **size, "weights": self.weights}


def build_blend_indices(
    names: Sequence[str], lengths: Sequence[int], weights: Sequence[float] | None, size: int | None
) -> BlendIndices:
    """The indices of a blend.

    Args:
        names: Names of the datasets, for messages.
        lengths: Number of samples of each dataset.
        weights: Weight of each dataset; None: its length.
        size: Number of samples; None: all samples of all datasets.

    Raises:
        ConfigError: The blend draws more samples of a dataset than it has.
    """
    if size is None:
        indices = blend_exhaustively(lengths)
    else:
        indices = blend(lengths if weights is None else weights, size)
    counts = count_draws(indices.dataset_index, len(lengths)).tolist()
    short = [
        f"  dataset {number} ({name}): has {length}, {count} are drawn, {count - length} short"
        for number, (name, length, count) in enumerate(zip(names, lengths, counts, strict=True))
        if count > length
    ]
    if short:
        title = f"the blend draws more samples than {len(short)} of its datasets have:"
        remedy = "Build these with a larger num_samples or surplus (see samples_per_dataset)"
        raise ConfigError("\n".join([title, *short, remedy]))
    return indices


def normalize(weights: Sequence[float]) -> list[float]:
    """The weights divided by their sum, in float64 and in NumPy's order of addition.

    A weight that is not a number, negative or not finite is a ConfigError, as are zeros alone.
    """
    weights = check_floats("the weights", weights)
    total = sum(weights) if all(weight >= 0 for weight in weights) else math.nan
    if not 0 < total < math.inf:
        raise ConfigError(
            f"the weights are {shown(weights)}; they must be finite, not below 0, and not all 0"
        )
    array = np.array(weights, dtype=np.float64)
    return (array / np.sum(array)).tolist()  # type: ignore[no-any-return]


def samples_per_dataset(
    weights: Sequence[float], num_samples: int, surplus: float = SURPLUS
) -> list[tuple[int, int]]:
    """Each dataset's share of a blend and the number of samples to build of it.

    The share is ceil(num_samples * weight); the blend's size is the sum of the shares. The greedy
    rule may draw a little more than its share from a dataset: hence the surplus.

    Args:
        weights: Positive weights with the sum 1, as `normalize` returns them.
        num_samples: Smallest size of the blend.
        surplus: Part of each share to build beyond it.

    Raises:
        ConfigError: If a weight is not positive, the weights have another sum, or another argument
            is out of range.
    """
    num_samples = check_int("num_samples", num_samples, 0, _native.MAX_INT64)
    surplus, weights = check_surplus(surplus), _checked_weights(weights)
    if not math.isclose(sum(weights), 1.0, rel_tol=1e-5):
        raise ConfigError(f"the weights sum to {sum(weights)}; normalize() makes that 1")
    shares = [math.ceil(num_samples * weight) for weight in weights]
    return [(share, math.ceil(share * (1 + surplus))) for share in shares]


def blend(weights: Sequence[float], size: int) -> BlendIndices:
    """Mixes datasets by weight: each sample comes from the one that lags most behind its weight.

    Args:
        weights: Positive weights, one for each dataset; they are normalised.
        size: Number of samples.

    Returns:
        The dataset of each sample, int16 [size], and its number there, int64 [size].

    Raises:
        ConfigError: If a weight is not positive and finite, there are too many datasets, or another
            argument is out of range.
    """
    size = check_int("the blend's size", size)
    # A weight far below a larger one may have become 0.
    normalized = _checked_weights(normalize(weights))
    return BlendIndices(*_native.blend_by_weights(np.array(normalized), size))


def blend_exhaustively(sizes: Sequence[int]) -> BlendIndices:
    """Mixes datasets evenly until each has given all its samples.

    Args:
        sizes: Each dataset's number of samples, at least 0.

    Returns:
        As `blend`, for the sum of the sizes.

    Raises:
        ConfigError: If a size is negative, or there are too many datasets.
    """
    numbers = check_list("the datasets' sizes", sizes, "whole numbers", check_int)
    return BlendIndices(*_native.blend_by_sizes(check_ints("the datasets' sizes", numbers)))


def count_draws(dataset_index: NDArray[np.int16], num_datasets: int) -> NDArray[np.int64]:
    """How many samples a blend draws from each dataset: int64 [num_datasets].

    Raises:
        ConfigError: If an entry is not the number of a dataset.
    """
    counts = np.zeros(check_int("num_datasets", num_datasets, 0), np.int64)
    for start in range(0, len(dataset_index), _CHUNK_SIZE):
        chunk = check_ints("the dataset numbers", dataset_index[start : start + _CHUNK_SIZE])
        for number in (chunk.min(), chunk.max()):
            check_within("the dataset numbers", int(number), 0, len(counts) - 1)
        counts += np.bincount(chunk, minlength=len(counts))
    return counts


def check_surplus(surplus: float) -> float:
    return check_float("the surplus", surplus, 0, _MOST_SURPLUS)


def _checked_weights(weights: Sequence[float]) -> list[float]:
    weights = check_floats("the weights", weights)
    check_within("the number of datasets", len(weights), 1, _native.MAX_DATASETS)
    for number, weight in enumerate(weights):
        if not 0 < weight < math.inf:
            raise ConfigError(
                f"the weight of dataset {number} is {weight}; weights are positive and finite. "
                "Leave a dataset out to draw nothing from it"
            )
    return weights
