"""Which dataset each sample of a blend comes from."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.checks import real, reals, shown, whole, whole_numbers
from millrace.errors import ConfigError

SURPLUS = 0.005
"""The part of its share that Megatron-LM builds of each dataset beyond the share."""

_MOST_SURPLUS = 1_000_000  # keeps the number of samples to build countable

_CHUNK_SIZE = 1 << 22  # entries to count at a time: np.bincount needs 8 bytes for each


def normalize(weights: Sequence[float]) -> list[float]:
    """The weights divided by their sum, in float64 and in NumPy's order of addition.

    Raises:
        ConfigError: If a weight is not a number, negative or not finite, or if all are 0.
    """
    weights = reals("the weights", weights)
    total = sum(weights) if all(weight >= 0 for weight in weights) else math.nan
    if not 0 < total < math.inf:
        raise ConfigError(
            f"the weights are {shown(weights)}; they must be finite, not below 0, and not all 0"
        )
    array = np.array(weights, dtype=np.float64)
    normalized: list[float] = (array / np.sum(array)).tolist()
    return normalized


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
    num_samples = whole("num_samples", num_samples, 0, _native.MAX_INT64)
    surplus = check_surplus(surplus)
    weights = _checked_weights(weights)
    if not math.isclose(sum(weights), 1.0, rel_tol=1e-5):
        raise ConfigError(f"the weights sum to {sum(weights)}; normalize() makes that 1")
    shares = [math.ceil(num_samples * weight) for weight in weights]
    return [(share, math.ceil(share * (1 + surplus))) for share in shares]


def blend(
    weights: Sequence[float], size: int, *, threads: int | None = None
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Mixes datasets by weight: each sample comes from the one that lags most behind its weight.

    Args:
        weights: Positive weights, one for each dataset; they are normalised.
        size: Number of samples.
        threads: Number of worker threads, on which the result does not depend; None: one for each
            core.

    Returns:
        dataset_index int16 [size], the dataset of each sample, and dataset_sample_index int64
        [size], the sample's number in that dataset.

    Raises:
        ConfigError: If a weight is not positive and finite, there are too many datasets, or another
            argument is out of range.
    """
    threads = _checked_threads(threads)
    size = whole("the blend's size", size, 0, _native.MAX_INT64 // 8)
    normalized = normalize(_checked_weights(weights))
    _checked_weights(normalized)  # a weight far below a larger one may have become 0
    return _native.blend_by_weights(np.array(normalized), size, threads)


def blend_exhaustively(
    sizes: Sequence[int], *, threads: int | None = None
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Mixes datasets evenly until each has given all its samples.

    Args:
        sizes: Each dataset's number of samples, at least 0.
        threads: Number of worker threads, on which the result does not depend; None: one for each
            core.

    Returns:
        dataset_index int16 [sum of sizes] and dataset_sample_index int64 [sum of sizes].

    Raises:
        ConfigError: If a size is negative, there are too many datasets, or `threads` is below 1.
    """
    threads = _checked_threads(threads)
    sizes = [whole("a dataset's size", size, 0) for size in sizes]
    _check_count(len(sizes))
    whole("the sum of the datasets' sizes", sum(sizes), most=_native.MAX_INT64 // 8)
    return _native.blend_by_sizes(np.array(sizes, dtype=np.int64), threads)


def count_draws(dataset_index: NDArray[np.int16], num_datasets: int) -> NDArray[np.int64]:
    """How many samples a blend draws from each dataset: int64 [num_datasets].

    Raises:
        ConfigError: If an entry is not the number of a dataset.
    """
    counts = np.zeros(whole("num_datasets", num_datasets, 0), np.int64)
    for start in range(0, len(dataset_index), _CHUNK_SIZE):
        chunk = whole_numbers("the dataset numbers", dataset_index[start : start + _CHUNK_SIZE])
        if not 0 <= chunk.min() <= chunk.max() < len(counts):
            raise ConfigError(
                f"the dataset numbers go from {chunk.min()} to {chunk.max()}; there are "
                f"{len(counts)} datasets"
            )
        counts += np.bincount(chunk, minlength=len(counts))
    return counts


def check_surplus(surplus: float) -> float:
    """The surplus as a float.

    Raises:
        ConfigError: If it is not a number in the valid range.
    """
    number = real("the surplus", surplus)
    if not 0 <= number <= _MOST_SURPLUS:
        raise ConfigError(f"the surplus is {number}; 0 to {_MOST_SURPLUS:,} is possible")
    return number


def _checked_threads(threads: int | None) -> int | None:
    return None if threads is None else whole("threads", threads, 1, _native.MAX_INT32)


def _check_count(count: int) -> None:
    if not 1 <= count <= _native.MAX_DATASETS:
        raise ConfigError(
            f"a blend has {count} datasets; 1 to {_native.MAX_DATASETS} can be blended. "
            "Merge small ones"
        )


def _checked_weights(weights: Sequence[float]) -> list[float]:
    weights = reals("the weights", weights)
    _check_count(len(weights))
    for number, weight in enumerate(weights):
        if not 0 < weight < math.inf:
            raise ConfigError(
                f"the weight of dataset {number} is {weight}; weights are positive and finite. "
                "Leave a dataset out to draw nothing from it"
            )
    return weights
