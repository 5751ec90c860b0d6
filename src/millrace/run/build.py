"""The datasets of a training run, from one configuration.

    config ──> plan: which ranges of which token files, how many samples of each, what blends
           ──> indices: built in parallel, or found in the cache folder
           ──> train, valid, test

In a cache folder lie, for each split, one set of arrays (see `order.arrays`) that holds the indices
of all its datasets one after the other, named by what they are a function of; and, for each
configuration, a manifest that says which token files it was made from, what they held, and which
sets it needs. A start with a manifest and its sets opens no token file before the first sample.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace.cache import arrays
from millrace.checks import limit
from millrace.dtypes import sample_index_dtype, shuffle_index_dtype
from millrace.errors import CacheError, ConfigError, DataError
from millrace.feed.datasets import (
    BlendedDataset,
    GPTDataset,
    build_indices,
    check_draws,
)
from millrace.order import GPTIndices, blend, blend_exhaustively, normalize
from millrace.run.config import DatasetConfig
from millrace.run.manifest import is_unchanged, manifest_path, read_manifest, write_manifest
from millrace.run.plan import (
    DatasetPlan,
    RunPlan,
    SplitPlan,
    TokenFile,
    has_same_times,
    plan_run,
    warn_of_copies,
)
from millrace.store import IndexedDataset
from millrace.store.bytes import Access

Arrays = tuple[NDArray[np.int16], NDArray[np.int64]]
"""A dataset index and a dataset sample index."""


class Datasets(NamedTuple):
    """The three splits; None where a split has no share. Several validation sets are a list."""

    train: GPTDataset | BlendedDataset | None
    valid: GPTDataset | BlendedDataset | list[GPTDataset] | None
    test: GPTDataset | BlendedDataset | None


Progress = Callable[[int, int], None]
"""Called with the number of datasets whose indices are there, and of all."""


def build_datasets(
    config: DatasetConfig, *, progress: Progress | None = None, wait_limit: float | None = None
) -> Datasets:
    """The train, valid and test datasets of a run, in Megatron-LM's order.

    With a cache folder, indices that are there are mapped, and others are built and kept. Of
    several processes that start together one builds, and the others wait for it; if it dies,
    another one goes on. Without a cache folder, indices are built in memory.

    Args:
        progress: See `Progress`.
        wait_limit: Seconds to wait for another process that builds the same; None: no limit.

    Raises:
        ConfigError: data that cannot give what the configuration asks for, or, with
            `trust_cache`, no manifest.
        DataError: a token file that is missing or damaged.
        CacheError: indices must be built, and the cache folder cannot be written, or another
            process still builds them when the limit is over.
    """
    return build_planned(config, progress=progress, wait_limit=wait_limit)[1]


def build_planned(
    config: DatasetConfig, *, progress: Progress | None = None, wait_limit: float | None = None
) -> tuple[RunPlan, Datasets]:
    """The same, and the plan that it was made by."""
    wait_limit = limit("wait_limit", wait_limit)
    if config.cache is None:
        opened, plan = plan_run(config)
        made = plan, _in_memory(config, plan, opened, progress)
    else:
        folder = os.fspath(config.cache)
        with _uncollected():
            found = _from_manifest(config, folder)
        made = found or _with_cache(config, folder, progress, wait_limit)
    warn_of_copies(made[0])
    return made


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection meanwhile: thousands of small objects are made that all stay, and a
    look at all others takes 80 ms where torch is loaded, five times as long as the rest."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# ---- indices in memory ----


def _in_memory(
    config: DatasetConfig,
    plan: RunPlan,
    opened: Sequence[IndexedDataset],
    progress: Progress | None,
) -> Datasets:
    count = _counter(plan, progress)

    def build(dataset: DatasetPlan) -> GPTIndices:
        indices = build_indices(opened[dataset.file], dataset.sequences, dataset.gpt, config.seed)
        count()
        return indices

    made: list[Any] = []
    with ThreadPoolExecutor(config.num_threads) as pool:
        for split in plan.splits:
            if split is None:
                made.append(None)
                continue
            draws = draw(plan, split) if split.kind == "blend" else None
            parts = [
                _dataset(
                    config,
                    plan.files[dataset.file],
                    dataset,
                    open_dataset=functools.partial(_same, opened[dataset.file]),
                    load_indices=functools.partial(_same, indices),
                )
                for dataset, indices in zip(
                    split.datasets, pool.map(build, split.datasets), strict=True
                )
            ]
            made.append(_assemble(split, parts, functools.partial(_same, draws)))
    return Datasets(*made)


def _same(value: Any) -> Any:
    return value


def _counter(plan: RunPlan, progress: Progress | None) -> Callable[[], None]:
    total = sum(len(split.datasets) for split in plan.splits if split is not None)
    numbers = itertools.count(1)
    if progress is not None:
        progress(0, total)
    return lambda: None if progress is None else progress(next(numbers), total)


def draw(plan: RunPlan, split: SplitPlan) -> Arrays:
    """The dataset index and dataset sample index of a blend."""
    lengths = [dataset.gpt.num_samples for dataset in split.datasets]
    if split.size is None:
        drawn = blend_exhaustively(lengths)
    else:
        drawn = blend(split.weights or lengths, split.size)
    prefixes = [plan.files[dataset.file].prefix for dataset in split.datasets]
    try:
        check_draws(prefixes, lengths, drawn[0])
    except ConfigError as error:
        raise ConfigError(f"the {split.name} split: {error}") from None
    return drawn


def _dataset(
    config: DatasetConfig,
    file: TokenFile,
    dataset: DatasetPlan,
    *,
    open_dataset: Callable[[], IndexedDataset],
    load_indices: Callable[[], GPTIndices],
    cached: arrays.ArraySet | None = None,
) -> GPTDataset:
    return GPTDataset.stored(
        file.prefix,
        dataset.sequences,
        config.seed,
        dataset.gpt,
        config.sample_options,
        open_dataset=open_dataset,
        load_indices=load_indices,
        content=file.content,
        lengths=file.lengths,
        cached=cached,
    )


def _assemble(
    split: SplitPlan,
    parts: list[GPTDataset],
    load_arrays: Callable[[], Arrays],
    cached: arrays.ArraySet | None = None,
) -> GPTDataset | BlendedDataset | list[GPTDataset]:
    if split.kind == "apart":
        return parts
    if split.kind == "one":
        return parts[0]
    lengths = [len(part) for part in parts]
    weights = normalize(split.weights or lengths)
    return BlendedDataset.stored(parts, weights, split.num_samples, load_arrays, cached)


# ---- indices in a cache folder ----


def set_key(config: DatasetConfig, plan: RunPlan, split: SplitPlan) -> dict[str, Any]:
    """What the arrays of a split are a function of: plain JSON values."""
    return {
        "kind": split.kind,
        "seed": config.seed,
        "sequence_length": config.sequence_length,
        "add_extra_token": config.add_extra_token,
        "datasets": [
            [
                plan.files[dataset.file].lengths,
                plan.files[dataset.file].num_sequences,
                *dataset.sequences,
                dataset.gpt.num_samples,
                dataset.gpt.num_epochs,
                dataset.gpt.num_samples_before_final_epoch,
                dataset.gpt.allow_partial,
            ]
            for dataset in split.datasets
        ],
        "weights": None if split.weights is None else list(split.weights),
        "size": split.size,
    }


def _with_cache(
    config: DatasetConfig, folder: str, progress: Progress | None, wait_limit: float | None
) -> tuple[RunPlan, Datasets]:
    if config.trust_cache:
        raise ConfigError(
            f"{folder} has no manifest for this configuration, or sets of arrays that it needs are "
            "missing or damaged: build it ahead with `millrace index`, or leave trust_cache out"
        )
    opened, plan = plan_run(config)
    keys = [None if split is None else set_key(config, plan, split) for split in plan.splits]
    names = [None if key is None else arrays.fingerprint(key) for key in keys]
    try:
        # First, so that what is built now is this run's for a `prune` in another process.
        write_manifest(config, plan, names, limit=wait_limit)
        sets = _build_sets(config, folder, plan, opened, keys, progress, wait_limit)
    except OSError as error:
        found = [
            None if name is None else arrays.usable(folder, name, key)
            for name, key in zip(names, keys, strict=True)
        ]
        if [stored and stored.name for stored in found] == names:
            return plan, _from_sets(config, plan, found)  # only the next start's short way is lost
        if isinstance(error, BlockingIOError):
            raise CacheError(
                f"another process builds the indices: {error.filename} is {error.strerror}"
            ) from error
        raise CacheError(
            f"the indices must be built, and {error.filename or folder} cannot be written: "
            f"{error.strerror or error}. Give a cache folder that can be written and has room, or "
            "build them ahead with `millrace index`"
        ) from error
    return plan, _from_sets(config, plan, sets)


def _build_sets(
    config: DatasetConfig,
    folder: str,
    plan: RunPlan,
    opened: Sequence[IndexedDataset],
    keys: Sequence[dict[str, Any] | None],
    progress: Progress | None,
    wait_limit: float | None,
) -> list[arrays.ArraySet | None]:
    """The set of each split."""
    count = _counter(plan, progress)
    sets: list[arrays.ArraySet | None] = []
    for split, key in zip(plan.splits, keys, strict=True):
        if split is None or key is None:
            sets.append(None)
            continue
        build = functools.partial(_build_split, config, plan, split, opened, count)
        layout = functools.partial(_layout, split)
        name = arrays.fingerprint(key)
        stored, _ = arrays.load_or_build(folder, name, key, layout, build, limit=wait_limit)
        sets.append(stored)
    return sets


def _layout(split: SplitPlan) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """The forms of a split's arrays: those of all its datasets, one after the other."""
    places = _places(split)[-1]
    most_documents = max(_num_entries(dataset) for dataset in split.datasets)
    most_samples = max(dataset.gpt.num_samples for dataset in split.datasets)
    layout: dict[str, tuple[Any, tuple[int, ...]]] = {
        "document_index": (np.int32, (places.documents.stop,)),
        "sample_index": (
            sample_index_dtype(most_documents),
            (places.rows.stop, 2),
        ),
        "shuffle_index": (
            shuffle_index_dtype(most_samples),
            (places.samples.stop,),
        ),
    }
    if split.kind == "blend":
        layout["dataset_index"] = (np.int16, (split.num_samples,))
        layout["dataset_sample_index"] = (np.int64, (split.num_samples,))
    return layout


class _Places(NamedTuple):
    """Where a dataset's indices are in the arrays of its split."""

    documents: slice
    rows: slice
    samples: slice


def _places(split: SplitPlan) -> list[_Places]:
    found = []
    documents = rows = samples = 0
    for dataset in split.datasets:
        count, size = _num_entries(dataset), dataset.gpt.num_samples
        found.append(
            _Places(
                slice(documents, documents + count),
                slice(rows, rows + size + 1),
                slice(samples, samples + size),
            )
        )
        documents, rows, samples = documents + count, rows + size + 1, samples + size
    return found


def _num_entries(dataset: DatasetPlan) -> int:
    """Of its document index."""
    start, stop = dataset.sequences
    return (stop - start) * dataset.gpt.num_epochs


def _build_split(
    config: DatasetConfig,
    plan: RunPlan,
    split: SplitPlan,
    opened: Sequence[IndexedDataset],
    count: Callable[[], None],
    writers: Mapping[str, arrays.ArrayWriter],
) -> None:
    if split.kind == "blend":
        dataset_index, dataset_sample_index = draw(plan, split)
        writers["dataset_index"].write(0, dataset_index)
        writers["dataset_sample_index"].write(0, dataset_sample_index)
        del dataset_index, dataset_sample_index

    def build(dataset: DatasetPlan, places: _Places) -> None:
        indices = build_indices(opened[dataset.file], dataset.sequences, dataset.gpt, config.seed)
        writers["document_index"].write(places.documents.start, indices.document_index)
        writers["sample_index"].write(places.rows.start, indices.sample_index)
        writers["shuffle_index"].write(places.samples.start, indices.shuffle_index)
        count()

    with ThreadPoolExecutor(config.num_threads) as pool:
        for _ in pool.map(build, split.datasets, _places(split)):
            pass


def _from_sets(
    config: DatasetConfig, plan: RunPlan, sets: Sequence[arrays.ArraySet | None]
) -> Datasets:
    made: list[Any] = []
    openings = [_Opening(file, config.access) for file in plan.files]
    for split, stored in zip(plan.splits, sets, strict=True):
        if split is None or stored is None:
            made.append(None)
            continue
        parts = [
            _dataset(
                config,
                plan.files[dataset.file],
                dataset,
                open_dataset=openings[dataset.file],
                load_indices=functools.partial(_load_indices, stored, places),
                cached=stored,
            )
            for dataset, places in zip(split.datasets, _places(split), strict=True)
        ]
        made.append(_assemble(split, parts, functools.partial(_load_blend, stored), stored))
    return Datasets(*made)


class _Opening:
    """Opens a token file that a manifest knows, once for all splits that draw from it."""

    def __init__(self, file: TokenFile, access: Access) -> None:
        self._made_of = file, access

    def __call__(self) -> IndexedDataset:
        return self._opened

    @functools.cached_property
    def _opened(self) -> IndexedDataset:
        return open_unchanged(*self._made_of)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Opening, self._made_of


def open_unchanged(file: TokenFile, access: Access) -> IndexedDataset:
    """Opens a token file that a manifest knows.

    Raises:
        DataError: it is not what its indices were built for.
    """
    is_same = has_same_times(file)  # before it is opened: see `look_at`
    dataset = IndexedDataset(file.prefix, access=access)
    now = (len(dataset), dataset.num_documents, dataset.num_tokens)
    then = (file.num_sequences, file.num_documents, file.num_tokens)
    has_content = is_same or dataset.fingerprint == file.content
    if now != then or not has_content or dataset.lengths_checksum != file.lengths:
        raise DataError(
            f"{file.prefix} has {now} sequences, documents and tokens; its indices were built for "
            f"{then}{', but for other ones' if now == then else ''}. Build them again with "
            "`millrace index`, and do not change data of a run"
        )
    return dataset


def _load_indices(stored: arrays.ArraySet, places: _Places) -> GPTIndices:
    with _remedy():
        return GPTIndices(
            document_index=stored["document_index"][places.documents],
            sample_index=stored["sample_index"][places.rows],
            shuffle_index=stored["shuffle_index"][places.samples],
        )


def _load_blend(stored: arrays.ArraySet) -> Arrays:
    with _remedy():
        return stored["dataset_index"], stored["dataset_sample_index"]


@contextlib.contextmanager
def _remedy() -> Iterator[None]:
    """For a set that went, or was damaged, between the start and its first sample."""
    try:
        yield
    except DataError as error:
        raise DataError(
            f"{error}. It was whole when the run started: start it again, or run `millrace index`, "
            "and it is built anew"
        ) from None


def _from_manifest(config: DatasetConfig, folder: str) -> tuple[RunPlan, Datasets] | None:
    """The datasets by the manifest, if there is one that fits the token files and its sets."""
    found = read_manifest(manifest_path(config))
    if found is None or found.config != config.order_key():
        return None
    plan, names = found.plan, found.sets
    sets = [None if name is None else arrays.load(folder, name) for name in names]
    for split, stored, name in zip(plan.splits, sets, names, strict=True):
        if (split is None) != (name is None) or (name is not None and stored is None):
            return None
        if split is not None and stored is not None:
            forms = {array: (np.dtype(d), s) for array, (d, s) in _layout(split).items()}
            if stored.key != set_key(config, plan, split) or stored.layout != forms:
                return None
            if stored.damage():
                return None
    if not config.trust_cache and not all(is_unchanged(file) for file in plan.files):
        return None
    return plan, _from_sets(config, plan, sets)
