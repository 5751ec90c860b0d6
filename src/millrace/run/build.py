"""The datasets of a training run, from one configuration.

    config ──> plan: which ranges of which token files, how many samples of each, what blends
           ──> indices: built in parallel, or found in the cache folder
           ──> train, valid, test

A cache folder holds a set of arrays for each split, and a manifest for each configuration: which
token files it was made from, what they held, which sets it needs. A start with a manifest and its
sets opens no token file before the first sample.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from millrace.checks import limit
from millrace.errors import CacheError, ConfigError
from millrace.feed import BlendedDataset, GPTDataset
from millrace.order import BlendOrder, normalize
from millrace.run.config import DatasetConfig
from millrace.run.manifest import Manifest, manifest_path
from millrace.run.plan import RunPlan, SplitPlan, plan_run, warn_of_copies
from millrace.run.sets import SplitArrays, SplitSet, build_in_memory, sets_of

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


Run = tuple[RunPlan, Mapping[str, SplitArrays]]
"""The plan of a run, and the arrays of its splits by their names."""


def build_run(
    config: DatasetConfig, *, progress: Progress | None = None, wait_limit: float | None = None
) -> tuple[RunPlan, Datasets]:
    """The same as `build_datasets`, and the plan of the run."""
    wait_limit = limit("wait_limit", wait_limit)
    plan, arrays = _find(config) or _build(config, progress, wait_limit)
    warn_of_copies(plan)
    datasets = [split and _dataset(plan, split, arrays[split.name]) for split in plan.splits]
    return plan, Datasets(*datasets)  # type: ignore[arg-type]


def _dataset(plan: RunPlan, split: SplitPlan, arrays: SplitArrays) -> SplitDataset:
    options = plan.config.sample_options
    datasets = [
        GPTDataset(part.file, order=part.order.load(part.inputs, indices), options=options)
        for part, indices in zip(split.datasets, arrays.datasets, strict=True)
    ]
    if arrays.blend is None:
        return datasets if split.kind == "apart" else datasets[0]
    weights = normalize(split.weights or split.lengths)
    return BlendedDataset(datasets, order=BlendOrder(weights, split.num_samples, arrays.blend))


def _find(config: DatasetConfig) -> Run | None:
    """The run by its manifest, if there is one that fits the token files and its sets."""
    if config.cache is None:
        return None
    folder, key = os.fspath(config.cache), config.order_key()
    manifest = Manifest.read(manifest_path(folder, key))
    plan = manifest.plan(config) if manifest is not None and manifest.config == key else None
    arrays = None if plan is None else _find_sets(sets_of(plan), folder)
    if plan is None or arrays is None:
        return None
    has_changed = not config.trust_cache and any(file.record.change() for file in plan.files)
    return None if has_changed else (plan, arrays)


def _find_sets(sets: Mapping[str, SplitSet], folder: str) -> dict[str, SplitArrays] | None:
    arrays = {name: split_set.find(folder) for name, split_set in sets.items()}
    present = {name: one for name, one in arrays.items() if one is not None}
    return present if len(present) == len(sets) else None


def _build(config: DatasetConfig, progress: Progress | None, wait_limit: float | None) -> Run:
    if config.trust_cache:
        raise ConfigError(
            f"{config.cache} has no manifest for this configuration, or sets of arrays that it "
            "needs are missing or damaged: build it ahead with `millrace index`, or leave "
            "trust_cache out"
        )
    plan = plan_run(config)
    numbers = itertools.count()

    def count() -> None:
        """Is called before the first dataset, and after each that is built."""
        if progress is not None:
            progress(next(numbers), plan.num_datasets)

    count()
    with ThreadPoolExecutor(config.num_threads) as pool:
        if config.cache is not None:
            return plan, _build_in_cache(plan, os.fspath(config.cache), pool, count, wait_limit)
        return plan, {
            split.name: build_in_memory(split, pool, count) for split in plan.present_splits
        }


def _build_in_cache(
    plan: RunPlan,
    folder: str,
    pool: ThreadPoolExecutor,
    count: Callable[[], None],
    wait_limit: float | None,
) -> Mapping[str, SplitArrays]:
    sets = sets_of(plan)
    try:
        # First, so that `prune` in another process leaves this run what is built now.
        Manifest.of(plan, sets).write(folder, limit=wait_limit)
        arrays = {
            name: split_set.load_or_build(folder, pool, count, wait_limit)
            for name, split_set in sets.items()
        }
    except OSError as error:
        present = _find_sets(sets, folder)
        if present is None:
            raise _cache_error(folder, error) from error
        arrays = present  # the manifest could not be written: the next start takes the long way
    for file in plan.files:
        file.close()  # a sample opens it again
    return arrays


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
