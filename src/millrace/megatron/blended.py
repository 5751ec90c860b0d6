"""`BlendedDataset`: a mixture of datasets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from millrace import _native
from millrace.cache import megatron as cache
from millrace.megatron.caching import CachedIndices
from millrace.megatron.config import BlendedMegatronDatasetConfig
from millrace.megatron.errors import ConfigAssertionError, OversampledError, require
from millrace.megatron.utils import log_on_first_rank, normalize
from millrace.order import count_draws


class BlendedDataset(CachedIndices, torch.utils.data.Dataset):  # type: ignore[misc]
    """Samples of several datasets of one class and split.

    Args:
        datasets: Datasets to mix.
        weights: A positive weight for each dataset. With a size they are normalised (again, if
            Megatron-LM's builder normalised them); without one they are numbers of samples.
        size: Number of samples; None: exactly weights[d] samples of each dataset d.
        config: Options.

    Attributes:
        dataset_index: int16 [size], the dataset of each sample.
        dataset_sample_index: int64 [size], the sample's number in that dataset. With
            `defer_npy_index_mmap` both are None until the first sample.
        unique_description, unique_description_hash: As in `MegatronDataset`.

    Raises:
        ConfigAssertionError: If the datasets or weights do not go together.
        OversampledError: If the blend draws more samples of a dataset than it has (an IndexError).
    """

    _INDICES = cache.BLEND_ARRAYS

    def __init__(
        self,
        datasets: Sequence[Any],
        weights: Sequence[float],
        size: int | None,
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        _check_blend(datasets, weights, size)
        if len(datasets) == 1:
            log_on_first_rank("A BlendedDataset of one dataset mixes nothing", is_warning=True)
        self.datasets = datasets
        self.split = datasets[0].index_split
        self.weights = weights if size is None else normalize(weights)
        self.size = size
        self.config = config
        self.unique_description, self.unique_description_hash = cache.describe(
            {
                "class": type(self).__name__,
                "datasets": [dataset.unique_identifiers for dataset in datasets],
                "split": self.split.name,
                "weights": list(self.weights),
                "size": size,
            }
        )
        self.dataset_index, self.dataset_sample_index = self._build_indices()

    def __len__(self) -> int:
        if self.config.defer_npy_index_mmap:
            return self._num_samples()
        return int(self.dataset_index.shape[0])

    def __getitem__(self, idx: Any) -> dict[str, Any]:
        """A sample of one of the datasets, and the dataset's number as `dataset_id` (int16)."""
        if self.dataset_sample_index is None:
            self._open_deferred()
        dataset_id = self.dataset_index[idx]
        sample = self.datasets[dataset_id][self.dataset_sample_index[idx]]
        return {"dataset_id": dataset_id, **sample}

    def _build_indices(self) -> tuple[Any, ...]:
        """The two indices, loaded or built; (None, None) if deferred."""
        config, description = self.config, f"{type(self).__name__} indices"
        is_trusted = bool(config.path_to_cache and config.fast_cache_load)
        return self._prepare_indices(
            config.path_to_cache, self.split, description, is_trusted=is_trusted
        )

    def _num_samples(self) -> int:
        return int(sum(self.weights)) if self.size is None else self.size

    def _check(self, arrays: cache.Arrays) -> None:
        cache.check_blend_arrays(arrays, self._num_samples(), len(self.datasets))

    def _build(self) -> cache.Arrays:
        try:
            if self.size is None:
                sizes = np.array([int(weight) for weight in self.weights], np.int64)
                indices = _native.blend_by_sizes(sizes)
            else:
                indices = _native.blend_by_weights(np.array(self.weights, np.float64), self.size)
        except ValueError as error:
            raise ConfigAssertionError(f"the {self.split.name} blend: {error}") from error
        counts = count_draws(indices[0], len(self.datasets)).tolist()
        for number, (dataset, count) in enumerate(zip(self.datasets, counts, strict=True)):
            if count > len(dataset):
                raise OversampledError(
                    f"the {self.split.name} blend draws {count} samples of dataset {number} "
                    f"({dataset.dataset_path}), which has {len(dataset)}. Raise "
                    f"mid_level_dataset_surplus (it is {self.config.mid_level_dataset_surplus}) "
                    "twofold or tenfold"
                )
        return dict(zip(self._INDICES, indices, strict=True))


def _check_blend(datasets: Sequence[Any], weights: Sequence[float], size: int | None) -> None:
    require(
        len(datasets) == len(weights),
        f"there are {len(datasets)} datasets and {len(weights)} weights: give one for each",
    )
    kinds = [(type(dataset), getattr(dataset, "index_split", None)) for dataset in datasets]
    for number, (dataset, weight) in enumerate(zip(datasets, weights, strict=True)):
        require(
            kinds[number] == kinds[0],
            f"dataset {number} has the class and split {kinds[number]}, dataset 0 {kinds[0]}: "
            "blend datasets of one class and split",
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
