"""`BlendedDataset`: several datasets, mixed."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from millrace import _native
from millrace.cache import megatron as cache
from millrace.megatron.caching import MappedArrays, open_arrays, prepare_arrays
from millrace.megatron.config import BlendedMegatronDatasetConfig
from millrace.megatron.errors import ConfigAssertionError, OversampledError, require
from millrace.megatron.utils import log_on_first_rank, normalize
from millrace.order import count_draws

logger = logging.getLogger(__name__)


class BlendedDataset(torch.utils.data.Dataset):  # type: ignore[misc]
    """Samples of several datasets of one class and split.

    Args:
        datasets: to mix.
        weights: one for each dataset, positive. With a size they are normalised (in Megatron-LM's
            builder for the second time); without one they are numbers of samples.
        size: number of samples; None: exactly weights[d] samples of each dataset d.
        config: the options.

    Attributes:
        dataset_index: int16 [size], each sample's dataset.
        dataset_sample_index: int64 [size], its number there. With `defer_npy_index_mmap` both are
            None until the first sample.
        unique_description, unique_description_hash: as of a `MegatronDataset`.

    Raises:
        ConfigAssertionError: datasets or weights that do not go together.
        OversampledError: more samples of a dataset than it has (an IndexError).
    """

    def __init__(
        self,
        datasets: Sequence[Any],
        weights: Sequence[float],
        size: int | None,
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        _check_blend(datasets, weights, size)
        if len(datasets) == 1:
            message = "A BlendedDataset of one dataset mixes nothing"
            log_on_first_rank(logger, logging.WARNING, message)
        self.datasets = datasets
        self.split = datasets[0].index_split
        self.weights = weights if size is None else normalize(weights)
        self.size = size
        self.config = config
        self.unique_description, self.unique_description_hash = cache.describe(
            cache.blend_identifiers(
                class_name=type(self).__name__,
                datasets=[dataset.unique_identifiers for dataset in datasets],
                split=self.split.name,
                weights=self.weights,
                size=size,
            )
        )
        self.dataset_index: Any
        self.dataset_sample_index: Any
        self.dataset_index, self.dataset_sample_index = self._build_indices()

    def __len__(self) -> int:
        if self.config.defer_npy_index_mmap:
            return self._num_samples()
        return int(self.dataset_index.shape[0])

    def __getitem__(self, idx: Any) -> dict[str, Any]:
        """A sample of one of the datasets, with that one's number as `dataset_id` (int16)."""
        if self.dataset_index is None:
            arrays = open_arrays(self._files(), self._what(), self._check)
            self.dataset_index = arrays["dataset_index"]
            self.dataset_sample_index = arrays["dataset_sample_index"]
        dataset_id = self.dataset_index[idx]
        return {
            "dataset_id": dataset_id,
            **self.datasets[dataset_id][self.dataset_sample_index[idx]],
        }

    def _build_indices(self) -> tuple[Any, Any]:
        if self.config.defer_npy_index_mmap:
            for name in cache.BLEND_ARRAYS:
                setattr(self, f"path_to_{name}", self._files().path(name))
            return None, None
        if self.config.path_to_cache and self.config.fast_cache_load:
            arrays = open_arrays(self._files(), self._what(), self._check)
        else:
            files = self._files() if self.config.path_to_cache else None
            arrays = prepare_arrays(files, self._what(), self._check, self._build)
        return arrays["dataset_index"], arrays["dataset_sample_index"]

    def _files(self) -> cache.CacheSet:
        return cache.CacheSet(
            folder=os.fspath(self.config.path_to_cache or ""),
            stem=f"{self.unique_description_hash}-{type(self).__name__}-{self.split.name}",
            description=self.unique_description,
            arrays=cache.BLEND_ARRAYS,
        )

    def _what(self) -> str:
        return f"{type(self).__name__} indices"

    def _num_samples(self) -> int:
        return int(sum(self.weights)) if self.size is None else self.size

    def _check(self, arrays: cache.Arrays) -> None:
        cache.check_blend_arrays(arrays, self._num_samples(), len(self.datasets))

    def _build(self) -> cache.Arrays:
        try:
            if self.size is None:
                sizes = np.array([int(weight) for weight in self.weights], np.int64)
                built = _native.blend_by_sizes(sizes)
            else:
                built = _native.blend_by_weights(np.array(self.weights, np.float64), self.size)
        except ValueError as error:
            raise ConfigAssertionError(f"the {self.split.name} blend: {error}") from error
        self._check_sizes(built[0])
        return dict(zip(cache.BLEND_ARRAYS, built, strict=True))

    def _check_sizes(self, dataset_index: NDArray[np.int16]) -> None:
        wanted = count_draws(dataset_index, len(self.datasets)).tolist()
        for number, (dataset, count) in enumerate(zip(self.datasets, wanted, strict=True)):
            if count > len(dataset):
                raise OversampledError(
                    f"the {self.split.name} blend draws {count} samples of dataset {number} "
                    f"({dataset.dataset_path}), which has {len(dataset)}. Raise "
                    f"mid_level_dataset_surplus (it is {self.config.mid_level_dataset_surplus}) "
                    "twofold or tenfold"
                )

    def __getstate__(self) -> dict[str, Any]:
        return MappedArrays.put_into(self.__dict__.copy(), cache.BLEND_ARRAYS)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(MappedArrays.open_in(state))


def _check_blend(datasets: Sequence[Any], weights: Sequence[float], size: int | None) -> None:
    require(
        len(datasets) == len(weights),
        f"there are {len(datasets)} datasets and {len(weights)} weights: give one for each",
    )
    require(
        len(datasets) <= _native.MAX_DATASETS,
        f"there are {len(datasets)} datasets; {_native.MAX_DATASETS} can be blended. Merge some",
    )
    for number, (dataset, weight) in enumerate(zip(datasets, weights, strict=True)):
        first = datasets[0]
        require(
            type(dataset) is type(first) and dataset.index_split == first.index_split,
            f"dataset {number} is a {type(dataset).__name__} of the split "
            f"{getattr(dataset, 'index_split', None)}, dataset 0 a {type(first).__name__} of "
            f"{getattr(first, 'index_split', None)}: blend like with like",
        )
        require(
            weight > 0,
            f"the weight of dataset {number} ({getattr(dataset, 'dataset_path', None)}) is "
            f"{weight}; it must be above 0. Leave the dataset out (without weights, the weight is "
            "its number of samples)",
        )
        require(
            type(weight) is type(weights[0]),
            f"weight {number} is a {type(weight).__name__}, weight 0 a {type(weights[0]).__name__}",
        )
        require(
            size is not None or not isinstance(weight, float) or weight == int(weight),
            f"without a size, weights are numbers of samples: weight {number} is {weight}",
        )
