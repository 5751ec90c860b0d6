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
"""What Megatron-LM builds of each dataset beyond its share of a blend."""

_MOST_SURPLUS = 1_000_000  # so that what is built of a dataset can be counted

_COUNTED = 1 << 22  # entries that are counted at a time: np.bincount takes 8 bytes for each


def normalize(weights: Sequence[float]) -> list[float]:
    """The weights divided by their sum, in float64 and in NumPy's order of addition.

    Raises:
        ConfigError: a weight that is no number, negative or not finite, or nothing above 0.
    """
    weights = reals("the weights", weights)
    total = sum(weights) if all(weight >= 0 for weight in weights) else math.nan
    if not (math.isfinite(total) and total > 0):
        raise ConfigError(
            f"the weights are {shown(weights)}; they must be finite, not below 0, and not all 0"
        )
    array = np.array(weights, dtype=np.float64)
    normalized: list[float] = (array / np.sum(array)).tolist()
    return normalized


def samples_per_dataset(
    weights: Sequence[float], num_samples: int, surplus: float = SURPLUS
) -> list[tuple[int, int]]:
    """What each dataset gives to a blend: (its share of the samples, how many to build of it).

    The share is ceil(num_samples * weight); the blend's size is the sum of the shares. The greedy
    rule may ask a dataset for a little more than its share: hence the surplus.

    Args:
        weights: as `normalize` gives them: positive, with the sum 1.
        num_samples: that the blend shall have at least.
        surplus: what to build beyond each share, as a part of it.

    Raises:
        ConfigError: weights with another sum, or a number outside its limits.
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
        weights: one for each dataset, positive; they are normalised.
        size: number of samples.
        threads: that draw, which changes nothing else; None: one for each core.

    Returns:
        dataset_index int16 [size], and dataset_sample_index int64 [size]: the sample's number in
        that dataset.

    Raises:
        ConfigError: a weight that is not positive and finite, too many datasets, or no thread.
    """
    threads = _checked_threads(threads)
    size = whole("the blend's size", size, 0, _native.MAX_INT64 // 8)
    normalized = normalize(_checked_weights(weights))
    _checked_weights(normalized)  # a weight beside a far larger one may have become 0
    return _native.blend_by_weights(np.array(normalized), size, threads)


def blend_exhaustively(
    sizes: Sequence[int], *, threads: int | None = None
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Mixes datasets evenly until each has given all its samples.

    Args:
        sizes: each dataset's number of samples, at least 0.
        threads: that draw, which changes nothing else; None: one for each core.

    Returns:
        dataset_index int16 [sum of sizes], and dataset_sample_index int64 [sum of sizes].

    Raises:
        ConfigError: a negative size, too many datasets, or no thread.
    """
    threads = _checked_threads(threads)
    sizes = [whole("a dataset's size", size, 0) for size in sizes]
    _check_count(len(sizes))
    whole("the sum of the datasets' sizes", sum(sizes), most=_native.MAX_INT64 // 8)
    return _native.blend_by_sizes(np.array(sizes, dtype=np.int64), threads)


def count_draws(dataset_index: NDArray[np.int16], num_datasets: int) -> NDArray[np.int64]:
    """How many samples a blend draws from each dataset: int64 [num_datasets].

    Raises:
        ConfigError: an entry that is no dataset.
    """
    counts = np.zeros(whole("num_datasets", num_datasets, 0), np.int64)
    for start in range(0, len(dataset_index), _COUNTED):
        part = whole_numbers("the dataset numbers", dataset_index[start : start + _COUNTED])
        if not 0 <= part.min() <= part.max() < len(counts):
            raise ConfigError(
                f"the dataset numbers go from {part.min()} to {part.max()}; there are "
                f"{len(counts)} datasets"
            )
        counts += np.bincount(part, minlength=len(counts))
    return counts


def check_surplus(surplus: float) -> float:
    """The surplus as a float; raises ConfigError for one that cannot be."""
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
        if not (math.isfinite(weight) and weight > 0):
            raise ConfigError(
                f"the weight of dataset {number} is {weight}; weights are positive and finite. "
                "Leave a dataset out to draw nothing from it"
            )
    return weights
