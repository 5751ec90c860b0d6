"""Which dataset each sample of a blend comes from."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.errors import ConfigError

SURPLUS = 0.005
"""What Megatron-LM builds of each dataset beyond its share of a blend."""

_COUNTED = 1 << 22  # entries that are counted at a time: np.bincount takes 8 bytes for each


def normalize(weights: Sequence[float]) -> list[float]:
    """The weights divided by their sum, in float64 and in NumPy's order of addition.

    Raises:
        ConfigError: a weight that is negative or not finite, or nothing above 0.
    """
    total = sum(weights) if all(weight >= 0 for weight in weights) else math.nan
    if not (math.isfinite(total) and total > 0):
        raise ConfigError(
            f"the weights are {list(weights)}; they must be finite, not below 0, and not all 0"
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
    """
    _check_weights(weights)
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
    _check_threads(threads)
    _check_weights(weights)
    if not 0 <= size <= _native.MAX_INT64 // 8:
        raise ConfigError(f"the blend's size is {size}; at least 0 is needed")
    normalized = normalize(weights)
    _check_weights(normalized)  # a weight beside a far larger one may have become 0
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
    _check_threads(threads)
    _check_count(len(sizes))
    if min(sizes) < 0 or sum(sizes) > _native.MAX_INT64 // 8:
        raise ConfigError(
            f"the datasets' sizes go from {min(sizes)} to {max(sizes)} and sum to {sum(sizes)}; "
            "they are not below 0, and their sum must fit memory"
        )
    return _native.blend_by_sizes(np.array(sizes, dtype=np.int64), threads)


def count_draws(dataset_index: NDArray[np.int16], num_datasets: int) -> NDArray[np.int64]:
    """How many samples a blend draws from each dataset: int64 [num_datasets]."""
    counts = np.zeros(num_datasets, np.int64)
    for start in range(0, len(dataset_index), _COUNTED):
        part = dataset_index[start : start + _COUNTED]
        counts += np.bincount(part, minlength=num_datasets)
    return counts


def _check_threads(threads: int | None) -> None:
    if threads is not None and threads < 1:
        raise ConfigError(f"threads is {threads}; at least 1 is needed")


def _check_count(count: int) -> None:
    if not 1 <= count <= _native.MAX_DATASETS:
        raise ConfigError(
            f"a blend has {count} datasets; 1 to {_native.MAX_DATASETS} can be blended. "
            "Merge small ones"
        )


def _check_weights(weights: Sequence[float]) -> None:
    _check_count(len(weights))
    for number, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight > 0):
            raise ConfigError(
                f"the weight of dataset {number} is {weight}; weights are positive and finite. "
                "Leave a dataset out to draw nothing from it"
            )
