"""`BlendedDataset`, a mixture of datasets, and the builder of all splits."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
import torch

from millrace import _native
from millrace.cache import megatron as cache
from millrace.files import check_split
from millrace.megatron.base import CachedIndices, LowLevelDataset, MegatronDataset
from millrace.megatron.errors import BuildError, ConfigAssertionError, OversampledError, require
from millrace.megatron.utils import (
    Blend,
    BlendedMegatronDatasetConfig,
    Split,
    SplitMatrix,
    log_on_first_rank,
    normalize,
)
from millrace.order import count_draws, split_ranges
from millrace.provenance.tokenizers import read_tokenizer, tokenizer_conflict
from millrace.torch import distributed_rank, first_then_rest

__all__ = [
    "BlendedDataset",
    "BlendedMegatronDatasetBuilder",
    "DistributedDataset",
    "MidLevelDataset",
    "TopLevelDataset",
    "_get_size_per_split_per_dataset",
]

Sizes = Sequence[int | None]


@dataclass(eq=False, repr=False)
class BlendedDataset(CachedIndices, torch.utils.data.Dataset):  # type: ignore[misc]
    """Samples of several datasets of one class and split.

    Args:
        datasets: Datasets to mix.
        weights: Positive weights, which are normalised (again, after Megatron-LM's builder);
            without a size, each dataset's number of samples.
        size: Number of samples; None: the sum of the weights.
        config: Options.

    Attributes:
        dataset_index: int16 [size], the dataset of each sample.
        dataset_sample_index: int64 [size], the sample's number in that dataset. With
            `defer_npy_index_mmap` both are None until the first sample.
        unique_description, unique_description_hash: As in `MegatronDataset`.

    Raises:
        ConfigAssertionError: If the datasets or weights do not fit each other.
        OversampledError: If the blend draws more samples of a dataset than it has (an IndexError).
    """

    _INDICES = cache.BLEND_ARRAYS

    datasets: Sequence[Any]
    weights: Sequence[float]
    size: int | None
    config: BlendedMegatronDatasetConfig

    def __post_init__(self) -> None:
        _check_blend(self.datasets, self.weights, self.size)
        self.split = self.datasets[0].index_split
        self.weights = self.weights if self.size is None else normalize(self.weights)
        self.unique_identifiers = {
            "class": type(self).__name__,
            "datasets": [dataset.unique_identifiers for dataset in self.datasets],
            "split": self.split.name,
            "weights": list(self.weights),
            "size": self.size,
        }
        described = cache.describe(self.unique_identifiers)
        self.unique_description, self.unique_description_hash = described
        self.dataset_index, self.dataset_sample_index = self._build_indices()

    def __len__(self) -> int:
        return self._num_samples() if self.config.defer_npy_index_mmap else len(self.dataset_index)

    def __getitem__(self, idx: Any) -> dict[str, Any]:
        """A sample of one of the datasets, and the dataset's number as `dataset_id` (int16)."""
        self._open_deferred()
        dataset_id = self.dataset_index[idx]
        sample = self.datasets[dataset_id][self.dataset_sample_index[idx]]
        return {"dataset_id": dataset_id, **sample}

    def _build_indices(self) -> tuple[Any, ...]:
        folder, description = self.config.path_to_cache, f"{type(self).__name__} indices"
        is_trusted = bool(folder and self.config.fast_cache_load)
        return self._prepare_indices(folder, self.split, description, is_trusted=is_trusted)

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
    first: Any = None
    for number, (dataset, weight) in enumerate(zip(datasets, weights, strict=True)):
        kind = type(dataset), getattr(dataset, "index_split", None), type(weight)
        first = first or kind
        require(
            kind == first,
            f"dataset {number} has the class, split and type of weight {kind}, dataset 0 {first}: "
            "blend datasets of one class and split by weights of one type",
        )
        require(
            weight > 0 and (size is not None or weight % 1 == 0),
            f"the weight of dataset {number} ({getattr(dataset, 'dataset_path', None)}) is "
            f"{weight}; it must be above 0 and, without a size, a number of samples. Leave the "
            "dataset out (without weights, the weight is its number of samples)",
        )


MidLevelDataset = MegatronDataset
TopLevelDataset = BlendedDataset | MidLevelDataset
DistributedDataset = TopLevelDataset | LowLevelDataset | torch.utils.data.Dataset


@dataclass(eq=False, repr=False)
class BlendedMegatronDatasetBuilder:
    """Builds the datasets of train, valid and test.

    With torch.distributed every rank must call `build`: rank 0 builds and caches, then the others
    load.

    Args:
        cls: Class of the datasets below the blend, such as `GPTDataset`.
        sizes: Least number of samples of each split; None: one epoch (only without weights).
        is_built_on_rank: Whether this rank needs the datasets; rank 0 must. Called only with
            torch.distributed.
        config: Options.

    Raises:
        ConfigAssertionError: If a split has weights and no size.
    """

    cls: Any
    sizes: Sizes
    is_built_on_rank: Callable[[], bool]
    config: BlendedMegatronDatasetConfig

    def __post_init__(self) -> None:
        config, sizes = self.config, self.sizes
        log_on_first_rank(f"Building {self.cls.__name__} splits with {sizes=} and {config=}")
        for split in () if config.mock else Split:
            blends = config.blend_per_split
            blend = config.blend if blends is None else blends[split.value]
            require(
                sizes[split.value] is not None or blend is None or blend[1] is None,
                f"the {split.name} split has weights and no size: give the number of samples, or "
                "None for the weights (several validation sets need none)",
            )

    def build(self) -> list[Any]:
        """The datasets of train, valid and test.

        A split without a share or blend is None. One prefix (without weights, if all splits share a
        blend) gives a dataset of `cls`; several give a `BlendedDataset`, or for validation a list
        with `multiple_validation_sets`. With weights, a blend's size is the sum of the datasets'
        shares, each rounded up; without weights, all samples of the datasets, or fewer by `sizes`.

        Raises:
            ConfigAssertionError, OversampledError, MissingFileError, DataAssertionError: As in the
                datasets.
            BuildError: If the cache cannot be written (with torch.distributed, on rank 0), or mock
                datasets cannot be built.
        """
        self._warn_of_tokenizers()
        datasets = self._build_blended_dataset_splits()
        for dataset in datasets:
            if isinstance(dataset, MegatronDataset):
                size = dataset.num_samples
                require(
                    size is None or len(dataset) == 0 or size <= len(dataset),
                    f"{size} samples were requested, and {len(dataset)} built",
                )
        return datasets

    def _warn_of_tokenizers(self) -> None:
        """Warns, on rank 0, of different tokenizers, which Megatron-LM mixes silently."""
        if self.config.fast_cache_load or distributed_rank() not in (None, 0):
            return
        blends = [self.config.blend, *(self.config.blend_per_split or ())]
        prefixes = dict.fromkeys(str(prefix) for blend in blends if blend for prefix in blend[0])
        conflict = tokenizer_conflict(map(read_tokenizer, prefixes)) if len(prefixes) > 1 else ""
        if conflict:
            log_on_first_rank(f"{conflict}. Tokenize one of them again", is_warning=True)

    def _build_blended_dataset_splits(self) -> list[Any]:
        config: Any = self.config
        if config.mock:
            try:
                return self._build_megatron_dataset_splits(None, config.split_matrix, self.sizes)
            except Exception as error:
                raise BuildError(f"{self.cls.__name__} could not be built as a mock") from error
        if config.blend:
            prefixes, weights = config.blend
            return self._build_blends(prefixes, weights, config.split_matrix, self.sizes)
        pairs = zip(Split, config.blend_per_split, strict=True)
        return [blend and self._build_split(split, blend) for split, blend in pairs]

    def _build_split(self, split: Split, blend: Blend) -> Any:
        """One split from its own blend; several validation sets are a list."""
        prefixes, weights = blend
        place, size = split.value, self.sizes[split.value]
        matrix: SplitMatrix = [(0.0, 1.0) if other is split else None for other in Split]
        sizes = [size if other is split else 0 for other in Split]
        if len(prefixes) == 1:
            weights = None
        elif self.config.multiple_validation_sets and split is Split.valid:
            require(
                not self.config.full_validation or size is None,
                f"full_validation takes one epoch of each set; the size is {size}, not None",
            )
            build = self._build_megatron_dataset_splits
            return [build(prefix, matrix, sizes)[place] for prefix in prefixes]
        return self._build_blends(prefixes, weights, matrix, sizes)[place]

    def _build_blends(
        self, prefixes: list[str], weights: list[float] | None, matrix: SplitMatrix, sizes: Sizes
    ) -> list[Any]:
        if len(prefixes) == 1 and weights is None:
            return self._build_megatron_dataset_splits(prefixes[0], matrix, sizes)
        shares = None if weights is None else normalize(weights)
        sizes_per_dataset: Sequence[Sizes] = [[None] * len(Split)] * len(prefixes)  # one epoch
        if shares is not None:
            surplus = self.config.mid_level_dataset_surplus
            sizes_per_dataset = _get_size_per_split_per_dataset(shares, sizes, surplus)
        datasets = self._build_megatron_datasets_parallel(prefixes, matrix, sizes_per_dataset)
        return [
            None if ends is None else self._build_blend(parts, shares, size)
            for ends, parts, size in zip(matrix, datasets, sizes, strict=False)
        ]

    def _build_blend(
        self, datasets: list[Any], shares: list[float] | None, size: int | None
    ) -> Any:
        weights: list[Any]
        if shares is not None:
            weights = shares
            size = sum(row[0] for row in _get_size_per_split_per_dataset(shares, [size]))
        else:
            # On a rank that builds nothing, the datasets are None.
            weights = [0 if dataset is None else len(dataset) for dataset in datasets]
            size = None if size is None else min(size, sum(weights))
        built_first = self.is_built_on_rank, not self.config.fast_cache_load
        blend = datasets, weights, size, self.config
        return self.build_generic_dataset(BlendedDataset, *built_first, *blend)

    def _build_megatron_datasets_parallel(
        self, prefixes: list[str], split: SplitMatrix, sizes_per_dataset: Sequence[Sizes]
    ) -> list[list[Any]]:
        """For each split, the datasets of all prefixes; rank 0 builds first."""

        def build_all() -> list[list[Any]]:
            build = partial(self._build_megatron_dataset_splits, synchronize_ranks=False)
            with ThreadPoolExecutor(self.config.num_dataset_builder_threads) as pool:
                splits = [*pool.map(build, prefixes, repeat(split), sizes_per_dataset)]
            return [[datasets[place] for datasets in splits] for place in range(len(Split))]

        return build_all() if self.config.fast_cache_load else _rank_0_first(build_all)

    def _build_megatron_dataset_splits(
        self, dataset_path: Any, split: SplitMatrix, sizes: Sizes, synchronize_ranks: bool = True
    ) -> list[Any]:
        """One token file's dataset for each split."""

        def build() -> list[Any]:
            if distributed_rank() is not None and not self.is_built_on_rank():
                return [None] * len(Split)
            dataset = self.cls.build_low_level_dataset(dataset_path, self.config)
            check_split(str(dataset_path))
            ranges: Sequence[Any] = [None] * len(Split)
            if not self.config.fast_cache_load:
                ranges = split_ranges(self.cls.numel_low_level_dataset(dataset), split)
            first = self.cls, self.is_built_on_rank, False
            parts = []
            for kind, ends, elements, size in zip(Split, split, ranges, sizes, strict=True):
                indices = None if elements is None else np.arange(*elements, dtype=np.int32)
                part = dataset, dataset_path, indices, size, kind, self.config
                parts.append(ends and self.build_generic_dataset(*first, *part))
            return parts

        return _rank_0_first(build) if synchronize_ranks else build()

    @staticmethod
    def build_generic_dataset(
        cls: Any, is_built_on_rank: Callable[[], bool], synchronize_ranks: bool, *args: Any
    ) -> Any:
        """A dataset, `cls(*args)`, built on rank 0 first; None on a rank that does not build.

        An error on one rank is raised on every rank. (Megatron-LM leaves the others waiting.)

        Raises:
            BuildError: If `cls` raises an OSError on rank 0 of torch.distributed.
        """
        rank = distributed_rank()

        def build() -> Any:
            if rank is not None and not is_built_on_rank():
                return None
            try:
                return cls(*args)
            except OSError as error:
                if rank != 0:
                    raise
                raise BuildError(
                    f"the indices could not be read or cached: {error}. Give a path_to_cache that "
                    "can be written"
                ) from error

        return _rank_0_first(build) if synchronize_ranks else build()


def _rank_0_first(work: Callable[[], Any]) -> Any:
    return first_then_rest(work, distributed_rank() == 0)


def _get_size_per_split_per_dataset(
    normalized_weights: Sequence[float], target_size_per_split: Sizes, surplus: float = 0.0
) -> list[list[int]]:
    """Each dataset's samples in each split: its share rounded up, plus the surplus."""
    require(
        np.isclose(sum(normalized_weights), 1.0),
        f"the weights sum to {sum(normalized_weights)}, not 1: normalize() makes that so",
    )
    sizes: Sequence[Any] = target_size_per_split
    return [
        [math.ceil(math.ceil(size * weight) * (1 + surplus)) for size in sizes]
        for weight in normalized_weights
    ]
