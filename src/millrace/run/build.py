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

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from millrace.checks import limit
from millrace.errors import CacheError, ConfigError
from millrace.feed import BlendedDataset, GPTDataset
from millrace.order import BlendOrder, normalize
from millrace.run.config import DatasetConfig
from millrace.run.manifest import Manifest, manifest_path
from millrace.run.plan import RunPlan, SplitPlan, plan_run, warn_of_copies
from millrace.run.sets import SplitArrays, SplitSet, build_in_memory, set_key

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
        run = _build_in_memory(plan_run(config), progress)
    else:
        folder = os.fspath(config.cache)
        run = _find(config, folder) or _build_in_cache(config, folder, progress, wait_limit)
    plan, arrays = run
    warn_of_copies(plan)
    datasets = [split and _dataset(plan, split, arrays[split.name]) for split in plan.splits]
    return plan, Datasets(*datasets)  # type: ignore[arg-type]


Run = tuple[RunPlan, dict[str, SplitArrays]]
"""The plan of a run, and the arrays of its splits by their names."""


def _dataset(plan: RunPlan, split: SplitPlan, arrays: SplitArrays) -> SplitDataset:
    options = plan.config.sample_options
    datasets = [
        GPTDataset(part.file, order=part.order.load(part.inputs, indices), options=options)
        for part, indices in zip(split.datasets, arrays.datasets, strict=True)
    ]
    if arrays.blend is None:
        return datasets if split.kind == "apart" else datasets[0]
    weights = normalize(split.weights or split.lengths)
    order = BlendOrder(weights, split.num_samples, arrays.blend)
    return BlendedDataset(datasets, order=order)


def _counter(plan: RunPlan, progress: Progress | None) -> Callable[[], None]:
    """A function to call after each dataset that is built."""
    numbers = itertools.count(1)
    if progress is None:
        return lambda: None
    progress(0, plan.num_datasets)
    return lambda: progress(next(numbers), plan.num_datasets)


def _build_in_memory(plan: RunPlan, progress: Progress | None) -> Run:
    count = _counter(plan, progress)
    with ThreadPoolExecutor(plan.config.num_threads) as pool:
        splits = plan.present_splits
        return plan, {split.name: build_in_memory(split, pool, count) for split in splits}


def _find(config: DatasetConfig, folder: str) -> Run | None:
    """The run by its manifest, if there is one that fits the token files and its sets."""
    key = config.order_key()
    manifest = Manifest.read(manifest_path(folder, key))
    plan = manifest.plan(config) if manifest is not None and manifest.config == key else None
    if manifest is None or plan is None:
        return None
    arrays: dict[str, SplitArrays] = {}
    for split, name in zip(plan.splits, manifest.sets, strict=True):
        if split is not None:
            in_folder = SplitSet(split, set_key(config, split), name).find(folder)
            if in_folder is None:
                return None
            arrays[split.name] = in_folder
    if not config.trust_cache and any(file.record.change() for file in plan.files):
        return None
    return plan, arrays


def _build_in_cache(
    config: DatasetConfig, folder: str, progress: Progress | None, wait_limit: float | None
) -> Run:
    if config.trust_cache:
        raise ConfigError(
            f"{folder} has no manifest for this configuration, or sets of arrays that it needs are "
            "missing or damaged: build it ahead with `millrace index`, or leave trust_cache out"
        )
    plan = plan_run(config)
    sets = {split.name: SplitSet(split, set_key(config, split)) for split in plan.present_splits}
    names = [None if split is None else sets[split.name].name for split in plan.splits]
    count = _counter(plan, progress)
    try:
        # First, so that `prune` in another process leaves this run what is built now.
        Manifest.of(plan, names).write(folder, limit=wait_limit)
        with ThreadPoolExecutor(config.num_threads) as pool:
            arrays = {
                name: split_set.load_or_build(folder, pool, count, wait_limit)
                for name, split_set in sets.items()
            }
    except OSError as error:
        present = {name: split_set.find(folder) for name, split_set in sets.items()}
        arrays = {name: found for name, found in present.items() if found is not None}
        if len(arrays) < len(sets):
            raise _cache_error(folder, error) from error
        # Only the manifest could not be written: the next start takes the long way, too.
    for file in plan.files:
        file.close()  # a sample opens it again
    return plan, arrays


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
