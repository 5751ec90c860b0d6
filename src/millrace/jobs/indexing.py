"""Build every index of a training run ahead of time, off the nodes with GPUs."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from millrace.cache import megatron as megatron_cache
from millrace.checks import limit
from millrace.errors import ConfigError
from millrace.feed import BlendedDataset, GPTDataset
from millrace.feed.datasets import build_indices
from millrace.jobs.progress import Progress as ProgressBar
from millrace.order import normalize, parse_split
from millrace.run import DatasetConfig, Datasets
from millrace.run.build import Progress, build_planned, draw, open_unchanged
from millrace.run.plan import DatasetPlan, RunPlan, SplitPlan, plan_run
from millrace.store import IndexedDataset

Whole = GPTDataset | BlendedDataset | list[GPTDataset]
"""What a split is in `Datasets`."""


@dataclass(frozen=True, kw_only=True)
class IndexRow:
    """What one dataset gives to one split.

    Attributes:
        split: "train", "valid" or "test".
        prefix: of the token file.
        num_sequences, num_tokens: of the range that the split draws from.
        num_documents: of the whole file.
        num_epochs: that the samples take.
        num_samples: that there are.
        weight: normalised, in a blend; None where there is none.
    """

    split: str
    prefix: str
    num_documents: int
    num_sequences: int
    num_tokens: int
    num_epochs: int
    num_samples: int
    weight: float | None


@dataclass(frozen=True, kw_only=True)
class IndexResult:
    """What `index` did.

    Attributes:
        rows: one for each dataset and split.
        sizes: samples of each split; several validation sets are added up.
        num_built: datasets and blends whose indices were built now.
        num_found: those whose indices were there already.
    """

    rows: list[IndexRow]
    sizes: dict[str, int]
    num_built: int
    num_found: int


def index(
    config: DatasetConfig,
    *,
    megatron_cache_folder: str | os.PathLike[str] | None = None,
    tokenizer: Any = None,
    wait_limit: float | None = None,
    show_progress: bool = False,
) -> IndexResult:
    """Builds a run's indices into its cache folder, or into one for Megatron-LM, or both.

    Args:
        config: of the run.
        megatron_cache_folder: write the files that Megatron-LM looks for (its
            `--data-cache-path`), so that it starts without building any.
        tokenizer: the unique identifiers of Megatron-LM's tokenizer, which are part of those
            files' names: plain JSON values, as in its `*-description.txt`.
        wait_limit: Seconds to wait for another process that builds the same; None: no limit.
        show_progress: on stderr.

    Raises:
        ConfigError: neither of the two folders, or no tokenizer where one is needed.
        OSError: a folder that cannot be written.
    """
    wait_limit = limit("wait_limit", wait_limit)
    if config.cache is None and megatron_cache_folder is None:
        raise ConfigError("there is nowhere to put the indices: give a cache folder")
    if megatron_cache_folder is not None and tokenizer is None:
        raise ConfigError(
            "the names of Megatron-LM's cache files hold its tokenizer's identifiers: give them as "
            "in a *-description.txt that it wrote"
        )
    with contextlib.ExitStack() as shown:
        built = found = 0
        made: Datasets | None = None
        if config.cache is not None:
            counts = [0]
            bar = _bar(shown, "indices") if show_progress else _no_bar
            count = functools.partial(_count, counts, bar)
            plan, made = build_planned(config, progress=count, wait_limit=wait_limit)
            built, found = counts[0], _num_datasets(plan) - counts[0]
        if megatron_cache_folder is not None:
            bar = _bar(shown, "Megatron-LM's cache") if show_progress else _no_bar
            if made is None:
                opened, plan = plan_run(config)
            else:  # what the first half has found out holds
                opened = [open_unchanged(file, config.access) for file in plan.files]
            folder = os.fspath(megatron_cache_folder)
            for is_new in write_megatron_cache(
                config, plan, opened, made, folder, tokenizer, wait_limit
            ):
                built, found = built + is_new, found + (not is_new)
                bar(built + found, _num_datasets(plan) + _num_blends(plan))
    return IndexResult(
        rows=[row for split in plan.splits if split is not None for row in _rows(plan, split)],
        sizes={split.name: split.num_samples for split in plan.splits if split is not None},
        num_built=built,
        num_found=found,
    )


def write_megatron_cache(
    config: DatasetConfig,
    plan: RunPlan,
    opened: Sequence[IndexedDataset],
    made: Datasets | None,
    folder: str,
    tokenizer: Any,
    wait_limit: float | None = None,
) -> Iterator[bool]:
    """Writes the files that Megatron-LM's datasets look for; those that fit are left alone.

    Args:
        plan, opened: of the configuration, from `plan_run`.
        made: its datasets, if they have been built: their indices are taken.
        folder: its `--data-cache-path`.
        tokenizer, wait_limit: see `index`.

    Yields:
        for each dataset and blend, whether its files were written now.

    Raises:
        ConfigError: a split that Megatron-LM cannot be given.
        OSError: the folder cannot be written.
    """
    if not (config.split is None or isinstance(config.split, str)):
        raise ConfigError(
            f"the split is {config.split}; Megatron-LM takes a string such as '969,30,1' alone"
        )
    for split, whole in zip(plan.splits, made or [None] * len(plan.splits), strict=True):
        if split is None:
            continue
        named = [_identifiers(config, plan, split, part, tokenizer) for part in split.datasets]
        write = functools.partial(_write_dataset, config, split, folder, wait_limit)
        with ThreadPoolExecutor(config.num_threads) as pool:
            files = [opened[dataset.file] for dataset in split.datasets]
            parts = [None] * len(files) if whole is None else _parts(whole)
            yield from pool.map(write, files, split.datasets, parts, named)
        if split.kind == "blend":
            yield _write_blend(plan, split, whole, folder, wait_limit, named)


def _parts(whole: Whole) -> list[GPTDataset]:
    """The datasets of a split."""
    if isinstance(whole, BlendedDataset):
        return whole.datasets
    return whole if isinstance(whole, list) else [whole]


def _identifiers(
    config: DatasetConfig, plan: RunPlan, split: SplitPlan, dataset: DatasetPlan, tokenizer: Any
) -> dict[str, Any]:
    return megatron_cache.gpt_identifiers(
        dataset_path=plan.files[dataset.file].prefix,
        num_samples=dataset.num_samples,
        index_split=split.name,
        random_seed=config.seed,
        sequence_length=config.sequence_length,
        split=config.split if isinstance(config.split, str) else None,
        split_matrix=parse_split(config.split) if isinstance(config.split, str) else None,
        tokenizer=tokenizer,
    )


def _write_dataset(
    config: DatasetConfig,
    split: SplitPlan,
    folder: str,
    wait_limit: float | None,
    opened: IndexedDataset,
    dataset: DatasetPlan,
    made: GPTDataset | None,
    identifiers: Mapping[str, Any],
) -> bool:
    files = megatron_cache.cache_set(folder, identifiers, split.name, megatron_cache.GPT_ARRAYS)
    start, stop = dataset.sequences

    def check(arrays: megatron_cache.Arrays) -> None:
        megatron_cache.check_gpt_arrays(arrays, dataset.gpt, stop - start, opened.sequence_lengths)

    def build(_: str) -> megatron_cache.Arrays:
        if made is not None:
            return megatron_cache.gpt_arrays(made.indices)
        indices = build_indices(opened, dataset.sequences, dataset.gpt, config.seed)
        return megatron_cache.gpt_arrays(indices)

    return megatron_cache.load_or_build(files, check, build, limit=wait_limit)[1]


def _write_blend(
    plan: RunPlan,
    split: SplitPlan,
    made: Whole | None,
    folder: str,
    wait_limit: float | None,
    named: Sequence[Mapping[str, Any]],
) -> bool:
    lengths = [dataset.gpt.num_samples for dataset in split.datasets]
    # With a size, Megatron-LM's blend normalises what its builder has normalised before.
    weights = lengths if split.size is None else normalize(split.weights or lengths)
    identifiers = megatron_cache.blend_identifiers(
        datasets=named, split=split.name, weights=weights, size=split.size
    )
    files = megatron_cache.cache_set(folder, identifiers, split.name, megatron_cache.BLEND_ARRAYS)

    def check(arrays: megatron_cache.Arrays) -> None:
        megatron_cache.check_blend_arrays(arrays, split.num_samples, len(lengths))

    def build(_: str) -> megatron_cache.Arrays:
        if isinstance(made, BlendedDataset):
            drawn = made.dataset_index, made.dataset_sample_index
        else:
            drawn = draw(plan, split)
        return dict(zip(megatron_cache.BLEND_ARRAYS, drawn, strict=True))

    return megatron_cache.load_or_build(files, check, build, limit=wait_limit)[1]


def _bar(shown: contextlib.ExitStack, label: str) -> Progress:
    bars: list[ProgressBar] = []

    def show(done: int, total: int) -> None:
        if not bars:
            bars.append(shown.enter_context(ProgressBar(label, total)))
        bars[0].update(done, f"{done:,} of {total:,}")

    return show


def _no_bar(done: int, total: int) -> None:
    pass


def _count(counts: list[int], bar: Progress, done: int, total: int) -> None:
    counts[0] = done
    bar(done, total)


def _num_datasets(plan: RunPlan) -> int:
    return sum(len(split.datasets) for split in plan.splits if split is not None)


def _num_blends(plan: RunPlan) -> int:
    return sum(split is not None and split.kind == "blend" for split in plan.splits)


def _rows(plan: RunPlan, split: SplitPlan) -> Iterator[IndexRow]:
    lengths = [dataset.gpt.num_samples for dataset in split.datasets]
    weights = normalize(split.weights or lengths)
    for dataset, weight in zip(split.datasets, weights, strict=True):
        file = plan.files[dataset.file]
        start, stop = dataset.sequences
        yield IndexRow(
            split=split.name,
            prefix=file.prefix,
            num_documents=file.num_documents,
            num_sequences=stop - start,
            num_tokens=dataset.gpt.num_tokens_per_epoch,
            num_epochs=dataset.gpt.num_epochs,
            num_samples=dataset.gpt.num_samples,
            weight=weight if split.kind == "blend" else None,
        )


def format_result(result: IndexResult) -> str:
    """The result as a table."""
    head = ["split", "documents", "sequences", "tokens", "epochs", "samples", "weight", "prefix"]
    lines = [head]
    for row in result.rows:
        counts = (row.num_documents, row.num_sequences, row.num_tokens, row.num_epochs)
        weight = "" if row.weight is None else f"{row.weight:.4g}"
        texts = [f"{count:,}" for count in (*counts, row.num_samples)]
        lines.append([row.split, *texts, weight, row.prefix])
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    shown = [
        "  ".join(
            text.ljust(width) if column in (0, len(head) - 1) else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    sizes = ", ".join(f"{name} {size:,}" for name, size in result.sizes.items())
    return "\n".join(
        [
            *shown,
            f"samples: {sizes}",
            f"indices: {result.num_built:,} built, {result.num_found:,} were there",
        ]
    )
