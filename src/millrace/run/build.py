"""The datasets of a training run, from one configuration.

A cache folder holds a set of arrays for each split, and a manifest for each configuration: its
plan, its token files, and what they held. A start with a manifest and its sets opens no token file
before the first sample. In the files of a set, the arrays of all datasets lie one after the other;
those of the blend have their own files.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from millrace.cache import arrays as array_sets
from millrace.checks import check_float
from millrace.deferred import Deferred
from millrace.errors import CacheError, ConfigError, DataError, DuplicateDataWarning
from millrace.feed import BlendedDataset, GPTDataset
from millrace.order import BlendOrder, build_blend_indices, normalize
from millrace.order.order_plans import Arrays, Layout, build_arrays, key_of
from millrace.run.config import DatasetConfig, name_of_order
from millrace.run.instant_config import AnyConfig, InstantConfig
from millrace.run.phased_dataset import instant_datasets
from millrace.run.plan import REQUESTS, DatasetPlan, Manifest, RunPlan, SplitPlan, plan_run
from millrace.store.token_file import TokenFile, listed_storages

SplitDataset = GPTDataset | BlendedDataset | list[GPTDataset]
"""What a split becomes; several validation sets are a list."""

Progress = Callable[[int, int], None]
"""Called with the numbers of datasets whose indices are built, and of all datasets."""

ForEach = Callable[[SplitPlan, Callable[[int, Arrays], Any]], list[Any]]
"""Builds the arrays of each dataset of a split; calls a function with its number and them."""

_BLEND = {"dataset_index": np.dtype(np.int16), "dataset_sample_index": np.dtype(np.int64)}


class Datasets(NamedTuple):
    """The three splits; None for a split without a share. Several validation sets are a list."""

    train: GPTDataset | BlendedDataset | None
    valid: SplitDataset | None
    test: GPTDataset | BlendedDataset | None


class SplitArrays(NamedTuple):
    """The arrays of each dataset and of the blend, loaded at the first sample."""

    datasets: Sequence[Deferred[Arrays]]
    blend: Deferred[Arrays] | None


def build_datasets(
    config: AnyConfig, *, progress: Progress | None = None, wait_limit: float | None = None
) -> Datasets:
    """The train, valid and test datasets of a run, in Megatron-LM's order or the instant one.

    For the instant order nothing is built, and the other arguments mean nothing. Else, indices in
    the cache folder are mapped; missing ones are built and kept there. Of several processes that
    start together one builds, and the others wait for it; if it dies, another one goes on. Without
    a cache folder, indices are built in memory.

    Args:
        progress: Function to call with the progress; see `Progress`.
        wait_limit: Seconds to wait for another process that builds the same; None: no limit.

    Raises:
        ConfigError: Data that cannot give what the configuration asks for, or, with
            `trust_cache`, no manifest.
        DataError: A token file that is missing or damaged.
        CacheError: Indices to build, while the cache folder cannot be written or another process
            builds them beyond the limit.
    """
    if isinstance(config, InstantConfig):
        return Datasets(*instant_datasets(config))
    return build_run(config, progress=progress, wait_limit=wait_limit)[1]


def build_run(
    config: DatasetConfig, *, progress: Progress | None = None, wait_limit: float | None = None
) -> tuple[RunPlan, Datasets]:
    """The plan of the run, and what `build_datasets` returns."""
    wait_limit = None if wait_limit is None else check_float("wait_limit", wait_limit, 0)
    plan, arrays = _find(config) or _build(config, progress, wait_limit)
    for message in copies_in(plan):
        warnings.warn(message, DuplicateDataWarning, stacklevel=3)  # that calls `build_datasets`
    _fetch_ahead(plan.files)
    datasets = [split and _dataset(plan, split, arrays[split.name]) for split in plan.splits]
    return plan, Datasets(*datasets)  # type: ignore[arg-type]


def _dataset(plan: RunPlan, split: SplitPlan, arrays: SplitArrays) -> SplitDataset:
    look: Any = {"options": plan.config.sample_options, "loss_ranges": plan.config.loss_ranges}
    datasets = [
        GPTDataset(part.file, order=part.order.load(part.inputs, indices), **look)
        for part, indices in zip(split.datasets, arrays.datasets, strict=True)
    ]
    if arrays.blend is None:
        return datasets if split.kind == "apart" else datasets[0]
    weights = normalize(split.weights or split.lengths)
    order = BlendOrder(weights, split.num_samples, arrays.blend, split.size is None)
    return BlendedDataset(datasets, order=order)


def copies_in(plan: RunPlan) -> Iterator[str]:
    """Tells of the same sequences, in whatever files, twice in a blend."""
    for split in plan.present_splits:
        parts = sorted(
            (part.file.fingerprint, part.file.lengths_checksum, *part.inputs.sequences, number)
            for number, part in enumerate(split.datasets)
            if split.kind == "blend" and part.inputs.sequences[0] < part.inputs.sequences[1]
        )
        for one, other in itertools.pairwise(parts):
            if one[:2] == other[:2] and other[2] < one[3]:
                prefixes = [split.datasets[part[-1]].file.prefix for part in (other, one)]
                yield (
                    f"the {split.name} blend has the data of {prefixes[0]} twice (also as "
                    f"{prefixes[1]}): give it once, with the sum of the weights"
                )


def _find(config: DatasetConfig) -> tuple[RunPlan, Mapping[str, SplitArrays]] | None:
    """The run by its manifest, if that fits the token files and sets."""
    manifest = Manifest.find(config)
    plan = None if manifest is None else manifest.plan(config)
    arrays = None if plan is None else _find_sets(plan, os.fspath(config.cache or ""))
    if plan is None or arrays is None:
        return None
    if not config.trust_cache:
        storages = listed_storages([file.prefix for file in plan.files], config.storage)
        pairs = zip(plan.files, storages, strict=True)
        if any(file.record.change(storage) for file, storage in pairs):
            return None
    return plan, arrays


def _fetch_ahead(files: Sequence[TokenFile]) -> None:
    """Fetches indices from buckets side by side, while the trainer starts. Each process begins at
    another one: those of a node fetch each index once, and wait little for each other."""
    remote = [file for file in files if file.is_remote]
    first = os.getpid() % max(len(remote), 1)
    pool = ThreadPoolExecutor(REQUESTS)
    for file in remote[first:] + remote[:first]:
        pool.submit(file.fetch_index)
    pool.shutdown(wait=False)


def _build(
    config: DatasetConfig, progress: Progress | None, wait_limit: float | None
) -> tuple[RunPlan, Mapping[str, SplitArrays]]:
    if config.trust_cache:
        raise ConfigError(
            f"{config.cache} has no manifest of this run, or its arrays are damaged: leave "
            "trust_cache out, or run `millrace index`"
        )
    plan, numbers = plan_run(config), itertools.count(1)
    report: Progress = progress or (lambda done, total: None)

    def for_each(split: SplitPlan, use: Callable[[int, Arrays], Any]) -> list[Any]:
        def build(number: int, dataset: DatasetPlan) -> Any:
            used = use(number, build_arrays(dataset.order, dataset.inputs, dataset.file.prefix))
            report(next(numbers), plan.num_datasets)
            return used

        return list(pool.map(build, itertools.count(), split.datasets))

    report(0, plan.num_datasets)
    with ThreadPoolExecutor(config.num_threads) as pool:
        if config.cache is not None:
            return plan, _load_or_build(plan, os.fspath(config.cache), for_each, wait_limit)
        arrays = {}
        for split in plan.present_splits:
            blend = Deferred.of(build_blend(split)) if split.kind == "blend" else None
            datasets = for_each(split, lambda _, built: Deferred.of(built))
            arrays[split.name] = SplitArrays(datasets, blend)
        return plan, arrays


def _load_or_build(
    plan: RunPlan, folder: str, for_each: ForEach, limit: float | None
) -> Mapping[str, SplitArrays]:
    sets = {split.name: SplitSet(plan.config, split) for split in plan.present_splits}
    try:
        # First, so that `prune` in another process keeps what is built now.
        names = {name: one.name for name, one in sets.items()}
        Manifest.of(plan, names).write(folder, limit=limit)
        arrays = {name: one.load_or_build(folder, for_each, limit) for name, one in sets.items()}
    except OSError as error:
        present, place = _find_sets(plan, folder), error.filename or folder
        if present is None and isinstance(error, BlockingIOError):
            what = f"another process builds the indices: {place} is {error.strerror}"
            raise CacheError(what) from error
        if present is None:
            raise CacheError(
                f"the indices must be built, and {place} cannot be written: "
                f"{error.strerror or error}. Give a cache folder that can be written and has room, "
                "or that `millrace index` has filled"
            ) from error
        arrays = present  # without a manifest: the next start plans again
    for file in plan.files:
        file.close()  # a sample opens it again
    return arrays


def build_blend(split: SplitPlan) -> Arrays:
    """The arrays of a blend; ConfigError if a dataset has too few samples."""
    prefixes = [dataset.file.prefix for dataset in split.datasets]
    try:
        return build_blend_indices(prefixes, split.lengths, split.weights, split.size)._asdict()
    except ConfigError as error:
        raise ConfigError(f"the {split.name} split: {error}") from None


def set_key(config: DatasetConfig, split: SplitPlan) -> dict[str, Any]:
    """What decides the arrays of a split: plain JSON values."""
    inputs = [dataset.inputs for dataset in split.datasets]
    key: dict[str, Any] = {
        "kind": split.kind,
        "seed": config.seed,
        "sequence_length": config.sequence_length,
        "add_extra_token": config.add_extra_token,
        "datasets": [
            [file.lengths, file.num_sequences, *one.inputs.sequences, *key_of(one.order)]
            for one, file in ((one, one.file.record) for one in split.datasets)
        ],
        "weights": None if split.weights is None else list(split.weights),
        "size": split.size,
    }
    if config.order is not None:
        key["order"] = name_of_order(config.order)
        if config.order_options:
            key["order_options"] = dict(config.order_options)
        key["inputs"] = [[one.num_samples, one.drop_last_partial_sequence] for one in inputs]
    return key


def _find_sets(plan: RunPlan, folder: str) -> dict[str, SplitArrays] | None:
    splits = plan.present_splits
    arrays = {split.name: SplitSet(plan.config, split).find(folder) for split in splits}
    return None if None in arrays.values() else arrays  # type: ignore[return-value]


class SplitSet:
    """The set of arrays of a split, named by its key."""

    def __init__(self, config: DatasetConfig, split: SplitPlan) -> None:
        self.split, self.key = split, set_key(config, split)
        self.name = array_sets.fingerprint(self.key)
        self._places: list[Mapping[str, slice]] = []  # each dataset's rows of each array
        dtypes: dict[str, set[Any]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for dataset in split.datasets:
            place = {}
            for name, (dtype, shape) in dataset.order.arrays(dataset.inputs).items():
                dtypes.setdefault(name, set()).add(dtype)
                start = shapes.get(name, (0,))[0]
                place[name] = slice(start, start + shape[0])
                shapes[name] = (start + shape[0], *shape[1:])
            self._places.append(place)
        of_blend = _BLEND if split.kind == "blend" else {}
        self._layout: Layout = {
            **{name: (np.result_type(*dtypes[name]), shape) for name, shape in shapes.items()},
            **{name: (dtype, (split.num_samples,)) for name, dtype in of_blend.items()},
        }

    def find(self, folder: str) -> SplitArrays | None:
        """The arrays in a folder, if all are there without damage."""
        array_set = array_sets.usable(folder, self.name, self.key, self._layout)
        return None if array_set is None else self._arrays(array_set)

    def load_or_build(self, folder: str, for_each: ForEach, limit: float | None) -> SplitArrays:
        """The arrays in a folder, built if need be; see `arrays.load_or_build`."""

        def build(writers: Mapping[str, array_sets.ArrayWriter]) -> None:
            def write(number: int, arrays: Arrays) -> None:
                for name, array in arrays.items():
                    writers[name].write(self._places[number][name].start, array)

            if self.split.kind == "blend":
                for name, index in build_blend(self.split).items():
                    writers[name].write(0, index)
                del index  # the memory is needed below
            for_each(self.split, write)

        place = folder, self.name, self.key, self._layout
        return self._arrays(array_sets.load_or_build(*place, build, limit=limit)[0])

    def _arrays(self, array_set: array_sets.ArraySet) -> SplitArrays:
        every = dict.fromkeys(_BLEND, slice(None))
        blend = Deferred(partial(_load, array_set, every)) if self.split.kind == "blend" else None
        datasets = [Deferred(partial(_load, array_set, places)) for places in self._places]
        return SplitArrays(datasets, blend)


def _load(array_set: array_sets.ArraySet, places: Mapping[str, slice]) -> Arrays:
    try:
        return {name: array_set[name][place] for name, place in places.items()}
    except DataError as error:  # removed or damaged between the start and the first sample
        raise DataError(f"{error}. To build it, start it again, or run `millrace index`") from None
