"""The datasets of a training run, from one configuration.

    config ──> plan: which ranges of which token files, how many samples of each, what blends
           ──> indices: built in parallel, or found in the cache folder
           ──> train, valid, test

A cache folder holds, for each split, one set of arrays (see `cache.arrays`) with the indices of all
its datasets one after the other, named by what they are a function of; and, for each configuration,
a manifest that says which token files it was made from, what they held, and which sets it needs. A
start with a manifest and its sets opens no token file before the first sample.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from millrace.cache import arrays
from millrace.checks import limit
from millrace.deferred import Deferred
from millrace.dtypes import sample_index_dtype, shuffle_index_dtype
from millrace.errors import CacheError, ConfigError, DataError
from millrace.feed import BlendedDataset, GPTDataset
from millrace.order import (
    BlendIndices,
    BlendOrder,
    GPTIndices,
    GPTOrder,
    GPTPlan,
    build_blend_indices,
    normalize,
)
from millrace.run.config import DatasetConfig
from millrace.run.manifest import Manifest, manifest_path
from millrace.run.plan import DatasetPlan, RunPlan, SplitPlan, plan_run, warn_of_copies
from millrace.samples.indices import build_indices

SplitDataset = GPTDataset | BlendedDataset | list[GPTDataset]
"""What a split becomes; several validation sets apart from each other are a list."""


class Datasets(NamedTuple):
    """The three splits; None where a split has no share. Several validation sets are a list."""

    train: GPTDataset | BlendedDataset | None
    valid: SplitDataset | None
    test: GPTDataset | BlendedDataset | None


Progress = Callable[[int, int], None]
"""Called with the number of datasets whose indices are built, and the number of all."""


def build_datasets(
    config: DatasetConfig, *, progress: Progress | None = None, wait_limit: float | None = None
) -> Datasets:
    """The train, valid and test datasets of a run, in Megatron-LM's order.

    With a cache folder, indices that are there are mapped, and others are built and kept. Of
    several processes that start together one builds, and the others wait for it; if it dies,
    another one goes on. Without a cache folder, indices are built in memory.

    Args:
        progress: Function to call with the progress; see `Progress`.
        wait_limit: Seconds to wait for another process that builds the same; None: no limit.

    Raises:
        ConfigError: Data that cannot give what the configuration asks for, or, with
            `trust_cache`, no manifest.
        DataError: A token file that is missing or damaged.
        CacheError: Indices must be built, and the cache folder cannot be written, or another
            process still builds them when the limit is over.
    """
    return build_run(config, progress=progress, wait_limit=wait_limit)[1]


def build_run(
    config: DatasetConfig, *, progress: Progress | None = None, wait_limit: float | None = None
) -> tuple[RunPlan, Datasets]:
    """The same as `build_datasets`, and the plan of the run."""
    wait_limit = limit("wait_limit", wait_limit)
    if config.cache is None:
        plan = plan_run(config)
        datasets = _build_in_memory(plan, progress)
    else:
        folder = os.fspath(config.cache)
        with _without_garbage_collection():
            run = _from_manifest(config, folder)
        plan, datasets = run or _build_in_cache(config, folder, progress, wait_limit)
    warn_of_copies(plan)
    return plan, datasets


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Thousands of small objects are made that all stay; a collection looks at all other objects
    too, which takes 80 ms where torch is loaded, five times as long as the rest."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# ---- datasets of a plan ----


class _Indices(NamedTuple):
    """The indices of a split, loaded at the first sample."""

    datasets: Sequence[Deferred[GPTIndices]]
    blend: Deferred[BlendIndices] | None


def _datasets(plan: RunPlan, indices: Sequence[_Indices | None]) -> Datasets:
    return Datasets(
        *(  # type: ignore[arg-type]
            None if split is None or loaded is None else _split_dataset(plan, split, loaded)
            for split, loaded in zip(plan.splits, indices, strict=True)
        )
    )


def _split_dataset(plan: RunPlan, split: SplitPlan, indices: _Indices) -> SplitDataset:
    datasets = [
        GPTDataset(
            dataset.file,
            order=GPTOrder(
                dataset.gpt,
                sequences=dataset.sequences,
                seed=plan.seed,
                lengths=Deferred(dataset.file.sequence_lengths),
                indices=loaded,
            ),
            options=plan.options,
        )
        for dataset, loaded in zip(split.datasets, indices.datasets, strict=True)
    ]
    if indices.blend is None:
        return datasets if split.kind == "apart" else datasets[0]
    weights = normalize(split.weights or split.lengths)
    order = BlendOrder(weights, split.num_samples, indices.blend)
    return BlendedDataset(datasets, order=order)


def build_blend(split: SplitPlan) -> BlendIndices:
    """The indices of a split that is a blend.

    Raises:
        ConfigError: It draws more samples of a dataset than there are.
    """
    prefixes = [dataset.file.prefix for dataset in split.datasets]
    try:
        return build_blend_indices(prefixes, split.lengths, split.weights, split.size)
    except ConfigError as error:
        raise ConfigError(f"the {split.name} split: {error}") from None


def _counter(plan: RunPlan, progress: Progress | None) -> Callable[[], None]:
    numbers = itertools.count(1)
    if progress is None:
        return lambda: None
    progress(0, plan.num_datasets)
    return lambda: progress(next(numbers), plan.num_datasets)


def _build_in_memory(plan: RunPlan, progress: Progress | None) -> Datasets:
    count = _counter(plan, progress)

    def build(dataset: DatasetPlan) -> Deferred[GPTIndices]:
        file = dataset.file.dataset
        indices = build_indices(file, dataset.sequences, dataset.gpt, plan.seed)
        count()
        return Deferred.of(indices)

    def build_split(split: SplitPlan | None, pool: ThreadPoolExecutor) -> _Indices | None:
        if split is None:
            return None
        blend = Deferred.of(build_blend(split)) if split.kind == "blend" else None
        return _Indices(list(pool.map(build, split.datasets)), blend)

    with ThreadPoolExecutor(plan.num_threads) as pool:
        indices = [build_split(split, pool) for split in plan.splits]
    return _datasets(plan, indices)


# ---- indices in a cache folder ----

NOT_IN_SET_KEY = frozenset(
    {
        "num_tokens_per_epoch",  # the sum of the lengths, whose checksum is in the key
        *("sequence_length", "add_extra_token"),  # of all datasets: at the top of the key
    }
)
"""The fields of a `GPTPlan` that are not in a dataset's part of a set's key."""

_SET_FIELDS = attrgetter(
    *(f.name for f in dataclasses.fields(GPTPlan) if f.name not in NOT_IN_SET_KEY)
)


def set_key(plan: RunPlan, split: SplitPlan) -> dict[str, Any]:
    """What the arrays of a split are a function of: plain JSON values."""
    return {
        "kind": split.kind,
        "seed": plan.seed,
        "sequence_length": plan.options.sequence_length,
        "add_extra_token": plan.options.add_extra_token,
        "datasets": [
            [
                dataset.file.record.lengths,
                dataset.file.record.num_sequences,
                *dataset.sequences,
                *_SET_FIELDS(dataset.gpt),
            ]
            for dataset in split.datasets
        ],
        "weights": None if split.weights is None else list(split.weights),
        "size": split.size,
    }


def _build_in_cache(
    config: DatasetConfig, folder: str, progress: Progress | None, wait_limit: float | None
) -> tuple[RunPlan, Datasets]:
    if config.trust_cache:
        raise ConfigError(
            f"{folder} has no manifest for this configuration, or sets of arrays that it needs are "
            "missing or damaged: build it ahead with `millrace index`, or leave trust_cache out"
        )
    plan = plan_run(config)
    keys = [None if split is None else set_key(plan, split) for split in plan.splits]
    names = [None if key is None else arrays.fingerprint(key) for key in keys]
    manifest = Manifest.of(plan, names)
    try:
        # First, so that `prune` in another process leaves this run what is built now.
        manifest.write(folder, limit=wait_limit)
        sets = _build_sets(plan, folder, names, keys, progress, wait_limit)
    except OSError as error:
        sets = [
            None if name is None else arrays.usable(folder, name, key)
            for name, key in zip(names, keys, strict=True)
        ]
        if [array_set and array_set.name for array_set in sets] != names:
            raise _cache_error(folder, error) from error
        # Only the manifest could not be written: the next start takes the long way, too.
    plan = manifest.plan(config) or plan  # whose token files are closed until a sample needs them
    return plan, _from_sets(plan, sets)


def _cache_error(folder: str, error: OSError) -> CacheError:
    if isinstance(error, BlockingIOError):
        return CacheError(
            f"another process builds the indices: {error.filename} is {error.strerror}"
        )
    return CacheError(
        f"the indices must be built, and {error.filename or folder} cannot be written: "
        f"{error.strerror or error}. Give a cache folder that can be written and has room, or "
        "build them ahead with `millrace index`"
    )


def _build_sets(
    plan: RunPlan,
    folder: str,
    names: Sequence[str | None],
    keys: Sequence[dict[str, Any] | None],
    progress: Progress | None,
    wait_limit: float | None,
) -> list[arrays.ArraySet | None]:
    """The array set of each split."""
    count = _counter(plan, progress)
    sets: list[arrays.ArraySet | None] = []
    for split, name, key in zip(plan.splits, names, keys, strict=True):
        if split is None or name is None:
            sets.append(None)
            continue
        build = partial(_build_split, plan, split, count)
        array_set, _ = arrays.load_or_build(
            folder, name, key, partial(_layout, split), build, limit=wait_limit
        )
        sets.append(array_set)
    return sets


class _Places(NamedTuple):
    """Where a dataset's indices are in the arrays of its split: the rows of each array."""

    document_index: slice
    sample_index: slice
    shuffle_index: slice


def _places(split: SplitPlan) -> list[_Places]:
    places = []
    document = row = sample = 0
    for dataset in split.datasets:
        starts = document, row, sample
        document += dataset.num_entries
        row += dataset.gpt.num_samples + 1
        sample += dataset.gpt.num_samples
        places.append(_Places(*map(slice, starts, (document, row, sample))))
    return places


def _layout(split: SplitPlan) -> arrays.Layout:
    """Dtypes and shapes of a split's arrays: the indices of all its datasets, one after another."""
    num_entries = [dataset.num_entries for dataset in split.datasets]
    num_samples = sum(split.lengths)
    layout: dict[str, tuple[Any, tuple[int, ...]]] = {
        "document_index": (np.int32, (sum(num_entries),)),
        "sample_index": (
            sample_index_dtype(max(num_entries)),
            (num_samples + len(split.datasets), 2),
        ),
        "shuffle_index": (shuffle_index_dtype(max(split.lengths)), (num_samples,)),
    }
    if split.kind == "blend":
        layout["dataset_index"] = (np.int16, (split.num_samples,))
        layout["dataset_sample_index"] = (np.int64, (split.num_samples,))
    return layout


def _build_split(
    plan: RunPlan,
    split: SplitPlan,
    count: Callable[[], None],
    writers: Mapping[str, arrays.ArrayWriter],
) -> None:
    if split.kind == "blend":
        for name, index in build_blend(split)._asdict().items():
            writers[name].write(0, index)
        del index

    def build(dataset: DatasetPlan, places: _Places) -> None:
        file = dataset.file.dataset
        indices = build_indices(file, dataset.sequences, dataset.gpt, plan.seed)
        for name, place, index in zip(places._fields, places, indices, strict=True):
            writers[name].write(place.start, index)
        count()

    with ThreadPoolExecutor(plan.num_threads) as pool:
        for _ in pool.map(build, split.datasets, _places(split)):
            pass


def _from_sets(plan: RunPlan, sets: Sequence[arrays.ArraySet | None]) -> Datasets:
    indices = [
        None
        if split is None or array_set is None
        else _Indices(
            [Deferred(partial(_load_indices, array_set, place)) for place in _places(split)],
            Deferred(partial(_load_blend, array_set)) if split.kind == "blend" else None,
        )
        for split, array_set in zip(plan.splits, sets, strict=True)
    ]
    return _datasets(plan, indices)


def _load_indices(array_set: arrays.ArraySet, places: _Places) -> GPTIndices:
    with _remedy():
        return GPTIndices(*(array_set[name][place] for name, place in places._asdict().items()))


def _load_blend(array_set: arrays.ArraySet) -> BlendIndices:
    with _remedy():
        return BlendIndices(*(array_set[name] for name in BlendIndices._fields))


@contextlib.contextmanager
def _remedy() -> Iterator[None]:
    """For a set that was removed or damaged between the start and its first sample."""
    try:
        yield
    except DataError as error:
        raise DataError(
            f"{error}. It was whole when the run started: start it again, or run `millrace index`, "
            "and it is built anew"
        ) from None


def _from_manifest(config: DatasetConfig, folder: str) -> tuple[RunPlan, Datasets] | None:
    """The datasets by the manifest, if there is one that fits the token files and its sets."""
    key = config.order_key()
    manifest = Manifest.read(manifest_path(folder, key))
    plan = manifest.plan(config) if manifest is not None and manifest.key == key else None
    if manifest is None or plan is None:
        return None
    sets = [None if name is None else arrays.load(folder, name) for name in manifest.sets]
    for split, array_set in zip(plan.splits, sets, strict=True):
        if (split is None) != (array_set is None):
            return None
        if split is not None and array_set is not None:
            is_same = array_set.key == set_key(plan, split) and array_set.layout == _layout(split)
            if not is_same or array_set.damage():
                return None
    if not config.trust_cache and any(file.record.change() for file in plan.files):
        return None
    return plan, _from_sets(plan, sets)
