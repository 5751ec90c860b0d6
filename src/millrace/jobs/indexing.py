"""Build every index of a training run ahead of time, off the nodes with GPUs."""

import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any, cast

from millrace.cache.megatron import (
    BLEND_ARRAYS,
    GPT_ARRAYS,
    CacheSet,
    check_blend_arrays,
    check_gpt_arrays,
    load_or_build,
)
from millrace.checks import check_float, check_local, text_table
from millrace.engine.progress import Progress
from millrace.errors import ConfigError
from millrace.option_class import StrPath, option
from millrace.order import SPLITS, GPTPlan, normalize, parse_split
from millrace.order.order_plans import build_arrays
from millrace.run import DatasetConfig, Datasets
from millrace.run.build import build_blend, build_run
from millrace.run.config import source_of
from millrace.run.plan import DatasetPlan, RunPlan, SplitPlan, plan_run
from millrace.samples.loss_ranges import LOSS_CHOICES


@dataclass(frozen=True, kw_only=True)
class IndexRow:
    """What one dataset gives to one split.

    Attributes:
        split: "train", "valid" or "test".
        prefix: Path prefix of the token file.
        num_documents: Number of documents of the file.
        num_sequences: Number of sequences of the range that the split draws from.
        num_tokens: Number of tokens of that range; None in another order than Megatron-LM's.
        num_epochs: Number of epochs that the samples take; None as for `num_tokens`.
        num_samples: Number of samples.
        weight: Normalised weight in a blend; None elsewhere.
    """

    split: str
    prefix: str
    num_documents: int
    num_sequences: int
    num_tokens: int | None
    num_epochs: int | None
    num_samples: int
    weight: float | None


@dataclass(frozen=True, kw_only=True)
class IndexResult:
    """What `index` did.

    Attributes:
        rows: One row for each dataset and split.
        sizes: Number of samples of each split, in all of its validation sets.
        num_built: Number of datasets and blends whose indices were built now.
        num_found: Number of datasets and blends whose indices were there already.
    """

    rows: list[IndexRow]
    sizes: dict[str, int]
    num_built: int
    num_found: int


_optional = partial(option, default=None)
_data = partial(_optional, group="data", metavar="FILE")
_items = partial(_data, nargs="+", metavar="ITEM")
_order = partial(_optional, group="order", metavar="N")
_switch = partial(_optional, group="order")


@dataclass(frozen=True, kw_only=True)
class IndexOptions:
    """The options of `index`; Megatron-LM's are texts, checked together with the file's."""

    config: str | None = _optional(
        "YAML or TOML file of arguments", flags="config", nargs="?", metavar="FILE"
    )
    megatron_cache_folder: str | None = _optional(
        "output folder: Megatron-LM's --data-cache-path", flags="--megatron-cache", metavar="DIR"
    )
    tokenizer_identifiers: str | None = _optional(
        "identifiers of Megatron-LM's tokenizer, part of those files' names: JSON, a JSON "
        "file, or a *-description.txt written by Megatron-LM",
        metavar="JSON",
    )
    wait_limit: float | None = _optional(
        "maximum wait for another process that builds the same indices",
        default_text="no limit",
        metavar="SECONDS",
    )
    data_path: Sequence[str] | None = _items(
        "list divided by --split: prefixes, or a weight before each prefix"
    )
    train_data_path: Sequence[str] | None = _items("list for train only")
    valid_data_path: Sequence[str] | None = _items("list for valid only")
    test_data_path: Sequence[str] | None = _items("list for test only")
    data_args_path: str | None = _data("file with the --data-path list")
    per_split_data_args_path: str | None = _data("JSON file with a list per split")
    split: str | None = _data('train, valid, test: "969,30,1"', metavar="SHARES")
    seq_length: str | None = _order("")
    seed: str | None = _order("")
    train_samples: str | None = _order("")
    train_iters: str | None = _order("")
    global_batch_size: str | None = _order("")
    eval_iters: str | None = _order("")
    eval_interval: str | None = _order("")
    eval_global_batch_size: str | None = _order("")
    start_eval_at_iter: str | None = _order("")
    num_dataset_builder_threads: str | None = _order("")
    num_samples: Sequence[str] | None = _order(
        "instead of iterations and batch sizes: whole numbers, or none for one epoch",
        nargs=3,
        metavar=("TRAIN", "VALID", "TEST"),
    )
    mid_level_dataset_surplus: str | None = _order("", metavar="SHARE")
    skip_train: bool | None = _switch("")
    full_validation: bool | None = _switch("")
    multiple_validation_sets: bool | None = _switch("")
    any_tokenizer: bool | None = _switch(
        "mix data of different tokenizers, too (millrace's own option)"
    )
    loss_ranges: str | None = _switch(
        "ranges beside the token files that are not trained on (millrace's own option)",
        choices=LOSS_CHOICES,
    )
    order: str | None = _order(
        "another order than Megatron-LM's, package.module:name (millrace's own option)",
        metavar="NAME",
    )
    data_cache_path: str | None = _order(
        "output folder: millrace's cache", flags=("--data-cache-path", "--cache"), metavar="DIR"
    )


def index(
    config: DatasetConfig,
    *,
    megatron_cache_folder: StrPath | None = None,
    tokenizer: Any = None,
    wait_limit: float | None = None,
    show_progress: bool = False,
) -> IndexResult:
    """Builds a run's indices into its cache folder, or into one for Megatron-LM, or both.

    Args:
        config: Configuration of the run.
        megatron_cache_folder: Folder for the files of Megatron-LM's `--data-cache-path`, with which
            it starts without building any.
        tokenizer: Unique identifiers of Megatron-LM's tokenizer, part of those files' names: plain
            JSON values, as in its `*-description.txt`.
        wait_limit: Seconds to wait for another process that builds the same; None: no limit.
        show_progress: Whether to show the progress on stderr.

    Raises:
        ConfigError: Neither of the two folders, or no tokenizer for the second.
        OSError: A folder that cannot be written.
    """
    wait_limit = None if wait_limit is None else check_float("wait_limit", wait_limit, 0)
    if config.cache is None and megatron_cache_folder is None:
        raise ConfigError("there is nowhere to put the indices: give a cache folder")
    if megatron_cache_folder is not None:
        folder = check_local(os.fspath(megatron_cache_folder))
        _check_for_megatron(config, tokenizer)
    datasets, num_built, total = None, 0, 0
    if config.cache is None:
        plan = plan_run(config)
    else:
        with Progress("indices", enabled=show_progress) as bar:
            plan, datasets = build_run(config, progress=bar.count, wait_limit=wait_limit)
        num_built, total = bar.num_done, plan.num_datasets
    if megatron_cache_folder is not None:
        num_sets = plan.num_datasets + sum(split.kind == "blend" for split in plan.present_splits)
        total += num_sets
        with Progress("Megatron-LM's cache", enabled=show_progress) as bar:
            written = _write_megatron_cache(plan, datasets, folder, tokenizer, wait_limit)
            for done, is_new in enumerate(written, start=1):
                num_built += is_new
                bar.count(done, num_sets)
    return IndexResult(
        rows=[row for split in plan.present_splits for row in _rows(split)],
        sizes={split.name: split.num_samples for split in plan.present_splits},
        num_built=num_built,
        num_found=total - num_built,
    )


def _check_for_megatron(config: DatasetConfig, tokenizer: Any) -> None:
    """Refuses what Megatron-LM's cache files cannot tell apart."""
    if tokenizer is None:
        raise ConfigError(
            "the names of Megatron-LM's cache files hold its tokenizer's identifiers: give "
            "--tokenizer-identifiers (tokenizer=), such as a *-description.txt from a folder that "
            "was its --data-cache-path with this tokenizer"
        )
    refused = []
    if config.order is not None:
        refused.append(f"Megatron-LM's order, and order is {config.order}")
    if not isinstance(config.split, str | None):
        refused.append(f"a split as a string such as '969,30,1', and it is {config.split}")
    for blend in filter(None, map(config.blend_of, range(len(SPLITS)))):
        refused += [
            f"whole token files, and {prefix} has the part {part}"
            for prefix, part in map(source_of, blend[0])
            if part is not None
        ]
    if refused:
        raise ConfigError(f"Megatron-LM's cache files hold {refused[0]}: leave out one of the two")


def _write_megatron_cache(
    plan: RunPlan, datasets: Datasets | None, folder: str, tokenizer: Any, wait_limit: float | None
) -> Iterator[bool]:
    """Writes the files that Megatron-LM's datasets look for, unless they are there and fit.

    The indices are those of `datasets`; None: they are built. Yields for each dataset and blend
    whether its files were written.
    """

    def write(names: dict[str, Any], split: str, kind: Any, check: Any, build: Any) -> bool:
        files = CacheSet.of(folder, names, split, kind)
        return load_or_build(files, check, lambda _: build(), limit=wait_limit)[1]

    def write_dataset(dataset: DatasetPlan, names: dict[str, Any], ours: Any) -> bool:
        order, inputs, prefix = cast(GPTPlan, dataset.order), dataset.inputs, dataset.file.prefix
        start, stop = inputs.sequences
        return write(
            names,
            names["index_split"],
            GPT_ARRAYS,
            lambda arrays: check_gpt_arrays(arrays, order, stop - start, inputs.lengths),
            lambda: build_arrays(order, inputs, prefix) if ours is None else ours.indices._asdict(),
        )

    def write_blend(split: SplitPlan, parts: Sequence[Any], built: Any) -> bool:
        # With a size, Megatron-LM's blend normalises weights that its builder has normalised.
        lengths = split.lengths
        weights = lengths if split.size is None else normalize(split.weights or lengths)
        names = {"class": "BlendedDataset", "datasets": parts, "split": split.name}
        return write(
            {**names, "weights": weights, "size": split.size},
            split.name,
            BLEND_ARRAYS,
            lambda arrays: check_blend_arrays(arrays, split.num_samples, len(parts)),
            lambda: build_blend(split) if built is None else built.order.indices._asdict(),
        )

    for split, built in zip(plan.splits, datasets or (None,) * len(SPLITS), strict=True):
        if split is None:
            continue
        parts = [_identifiers(plan.config, split, one, tokenizer) for one in split.datasets]
        ours = built if isinstance(built, list) else getattr(built, "datasets", [built])
        ours = itertools.repeat(None) if built is None else ours
        with ThreadPoolExecutor(plan.config.num_threads) as pool:
            yield from pool.map(write_dataset, split.datasets, parts, ours)
        if split.kind == "blend":
            yield write_blend(split, parts, built)


def _identifiers(
    config: DatasetConfig, split: SplitPlan, dataset: DatasetPlan, tokenizer: Any
) -> dict[str, Any]:
    shares = config.split
    return {
        "class": "GPTDataset",
        "dataset_path": dataset.file.prefix,
        "num_samples": dataset.inputs.num_samples,
        "index_split": split.name,
        "random_seed": config.seed,
        "sequence_length": config.sequence_length,
        "split": shares,
        "split_matrix": None if shares is None else parse_split(shares),  # type: ignore[arg-type]
        "tokenizer": tokenizer,
    }


def _rows(split: SplitPlan) -> Iterator[IndexRow]:
    weights: Sequence[Any] = [None] * len(split.datasets)
    if split.kind == "blend":
        weights = normalize(split.weights or split.lengths)
    for dataset, weight in zip(split.datasets, weights, strict=True):
        plan, (start, stop) = dataset.order, dataset.inputs.sequences
        yield IndexRow(
            split=split.name,
            prefix=dataset.file.prefix,
            num_documents=dataset.file.record.num_documents,
            num_sequences=stop - start,
            num_tokens=plan.num_tokens_per_epoch if isinstance(plan, GPTPlan) else None,
            num_epochs=plan.num_epochs if isinstance(plan, GPTPlan) else None,
            num_samples=plan.num_samples,
            weight=weight,
        )


def format_result(result: IndexResult) -> str:
    """The result as a table."""
    cells = [["split", "documents", "sequences", "tokens", "epochs", "samples", "weight"]]
    for row in result.rows:
        split, _, *counts, weight = astuple(row)
        texts = ["" if count is None else f"{count:,}" for count in counts]
        cells.append([split, *texts, "" if weight is None else f"{weight:.4g}"])
    prefixes = ["prefix", *(row.prefix for row in result.rows)]
    table = map("  ".join, zip(text_table(cells), prefixes, strict=True))
    sizes = ", ".join(f"{name} {size:,}" for name, size in result.sizes.items())
    indices = f"{result.num_built:,} built, {result.num_found:,} were there"
    return "\n".join([*table, f"samples: {sizes}", f"indices: {indices}"])
