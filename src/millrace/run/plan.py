"""From a configuration and token files to what must be built: counts alone, no index yet.

The configuration ends here: whatever comes later takes what it needs from the plan.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from millrace.errors import ConfigError, DuplicateDataWarning
from millrace.options import SampleOptions
from millrace.order import SPLITS, GPTPlan, normalize, samples_per_dataset, split_ranges
from millrace.order.splits import VALID, Range
from millrace.run.config import DatasetConfig
from millrace.samples.indices import plan_indices
from millrace.store.token_file import TokenFile
from millrace.store.tokenizers import read_tokenizer, tokenizer_conflict

Kind = Literal["one", "blend", "apart"]
"""A split is one dataset, a blend, or several datasets apart from each other."""


@dataclass(frozen=True, kw_only=True)
class DatasetPlan:
    """One dataset: a range of sequences of a token file.

    Attributes:
        file: The token file.
        sequences: (start, stop).
        num_samples: Least number of samples; None: one epoch.
        gpt: Epochs and samples.
    """

    file: TokenFile
    sequences: Range
    num_samples: int | None
    gpt: GPTPlan

    @property
    def num_entries(self) -> int:
        """Entries of the document index."""
        start, stop = self.sequences
        return (stop - start) * self.gpt.num_epochs


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """One split.

    Attributes:
        name: "train", "valid" or "test".
        datasets: The datasets that it draws from.
        kind: How it draws from them.
        weights: Normalised weights of a blend; None: its datasets' lengths.
        size: Number of samples of a blend; None: all samples of all datasets.
    """

    name: str
    datasets: Sequence[DatasetPlan]
    kind: Kind
    weights: Sequence[float] | None
    size: int | None

    @property
    def lengths(self) -> list[int]:
        """Number of samples of each dataset."""
        return [dataset.gpt.num_samples for dataset in self.datasets]

    @property
    def num_samples(self) -> int:
        """Number of samples of the blend, the dataset, or the datasets together."""
        return sum(self.lengths) if self.size is None else self.size


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What a run draws from, and how.

    Attributes:
        key: All options that decide the order (see `DatasetConfig.order_key`).
        seed: Seed of the order.
        options: What a sample looks like.
        num_threads: Number of threads that build indices.
        files: The token files.
        splits: Train, valid and test; None for a split without a share.
    """

    key: dict[str, Any]
    seed: int
    options: SampleOptions
    num_threads: int
    files: Sequence[TokenFile]
    splits: Sequence[SplitPlan | None]

    @property
    def present_splits(self) -> list[SplitPlan]:
        """The splits with a share."""
        return [split for split in self.splits if split is not None]

    @property
    def num_datasets(self) -> int:
        """Number of datasets of all splits."""
        return sum(len(split.datasets) for split in self.present_splits)


def make_plan(
    config: DatasetConfig, files: Sequence[TokenFile], splits: Sequence[SplitPlan | None]
) -> RunPlan:
    """The plan of a configuration, its token files and its splits."""
    return RunPlan(
        key=config.order_key(),
        seed=config.seed,
        options=config.sample_options,
        num_threads=config.num_threads,
        files=files,
        splits=splits,
    )


def plan_run(config: DatasetConfig) -> RunPlan:
    """Opens every token file and works out what to build.

    Raises:
        ConfigError, DataError: See `build_datasets`.
    """
    blends = [config.blend_of(number) for number in range(len(SPLITS))]
    prefixes = dict.fromkeys(os.fspath(p) for blend in blends if blend for p in blend[0])
    with ThreadPoolExecutor(config.num_threads) as pool:
        files = list(pool.map(functools.partial(TokenFile.open, access=config.access), prefixes))
        if len(files) > 1 and not config.any_tokenizer:
            conflict = tokenizer_conflict(pool.map(read_tokenizer, prefixes))
            if conflict:
                raise ConfigError(
                    f"{conflict}. Tokenize one of them again, or take them as they are with "
                    "any_tokenizer"
                )
    by_prefix = dict(zip(prefixes, files, strict=True))
    splits = [
        None
        if blend is None
        else _plan_split(config, number, [by_prefix[p] for p in blend[0]], blend[1])
        for number, blend in enumerate(blends)
    ]
    return make_plan(config, files, splits)


def _plan_split(
    config: DatasetConfig,
    number: int,
    files: Sequence[TokenFile],
    weights: Sequence[float] | None,
) -> SplitPlan | None:
    """The plan of a split; None if it has no share."""
    name, size = SPLITS[number], config.num_samples[number]
    if config.split is None:
        ranges: list[Range | None] = [(0, file.record.num_sequences) for file in files]
    else:
        ranges = [split_ranges(file.record.num_sequences, config.split)[number] for file in files]
    if any(sequences is None for sequences in ranges):
        return None
    kind: Kind = "blend"
    if number == VALID and config.multiple_validation_sets and len(files) > 1:
        kind = "apart"
    elif len(files) == 1 and (weights is None or config.blend_per_split is not None):
        kind = "one"
    drops_partial = number != VALID or config.drop_last_partial_validation_sequence
    try:
        if kind != "blend":
            weights, counts = None, [size] * len(files)
        elif weights is None:
            counts = [None] * len(files)
        else:
            weights = normalize(weights)
            shares = samples_per_dataset(weights, size or 0, config.surplus)
            size, counts = sum(share for share, _ in shares), [built for _, built in shares]
        datasets = [
            DatasetPlan(
                file=file,
                sequences=sequences,  # type: ignore[arg-type]
                num_samples=count,
                gpt=plan_indices(
                    file.dataset,
                    sequences,  # type: ignore[arg-type]
                    count,
                    config.sample_options,
                    drop_last_partial_sequence=drops_partial,
                ),
            )
            for file, sequences, count in zip(files, ranges, counts, strict=True)
        ]
    except ConfigError as error:
        raise ConfigError(f"the {name} split: {error}") from None
    if kind != "blend":
        size = None
    elif weights is None and size is not None:
        size = min(size, sum(dataset.gpt.num_samples for dataset in datasets))
    return SplitPlan(name=name, datasets=datasets, kind=kind, weights=weights, size=size)


def warn_of_copies(plan: RunPlan) -> None:
    """Warns of the same data, in whatever files, twice in a blend."""
    for split in plan.present_splits:
        if split.kind != "blend":
            continue
        prefixes: dict[tuple[str, str], str] = {}
        for dataset in split.datasets:
            data = (dataset.file.fingerprint, dataset.file.lengths_checksum)
            if data in prefixes:
                warnings.warn(
                    f"the {split.name} blend has the data of {dataset.file.prefix} twice (also as "
                    f"{prefixes[data]}): the same samples are drawn twice, in the same order. "
                    "Give it once, with the sum of the weights",
                    DuplicateDataWarning,
                    stacklevel=4,  # the line that calls `build_datasets`
                )
            prefixes.setdefault(data, dataset.file.prefix)
