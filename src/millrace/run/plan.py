"""From a configuration and token files to what must be built: counts alone, no index yet.

The configuration ends here: whatever comes later takes what it needs from the plan.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from millrace.errors import ConfigError, DuplicateDataWarning
from millrace.order import (
    SPLITS,
    OrderInputs,
    OrderPlan,
    normalize,
    part_range,
    samples_per_dataset,
    split_ranges,
)
from millrace.order.plans import check_token_dtype, plan_order
from millrace.order.splits import VALID, Bookends, Range
from millrace.provenance import read_tokenizer, tokenizer_conflict
from millrace.run.config import Blend, DatasetConfig, source_of
from millrace.store.token_file import TokenFile

Kind = Literal["one", "blend", "apart"]
"""A split is one dataset, a blend, or several datasets apart from each other."""


@dataclass(frozen=True, kw_only=True)
class DatasetPlan:
    """One dataset: a range of sequences of a token file, in an order."""

    file: TokenFile
    inputs: OrderInputs
    order: OrderPlan


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """One split.

    Attributes:
        name: "train", "valid" or "test".
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
        return [dataset.order.num_samples for dataset in self.datasets]

    @property
    def num_samples(self) -> int:
        """Number of samples of the blend, the dataset, or the datasets together."""
        return sum(self.lengths) if self.size is None else self.size


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What a run draws from, and how; None for a split without a share."""

    config: DatasetConfig
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


def plan_run(config: DatasetConfig) -> RunPlan:
    """Opens every token file and works out what to build; for the errors, see `build_datasets`."""
    blends = [config.blend_of(number) for number in range(len(SPLITS))]
    prefixes = dict.fromkeys(source_of(item)[0] for blend in blends if blend for item in blend[0])
    with ThreadPoolExecutor(config.num_threads) as pool:
        files = [*pool.map(functools.partial(TokenFile.open, access=config.access), prefixes)]
        if len(files) > 1 and not config.any_tokenizer:
            conflict = tokenizer_conflict(pool.map(read_tokenizer, prefixes))
            if conflict:
                raise ConfigError(
                    f"{conflict}. Tokenize one of them again, or take them as they are with "
                    "any_tokenizer"
                )
    by_prefix = dict(zip(prefixes, files, strict=True))
    splits = [
        None if blend is None else _plan_split(config, number, blend, by_prefix)
        for number, blend in enumerate(blends)
    ]
    return RunPlan(config=config, files=files, splits=splits)


def order_inputs(
    config: DatasetConfig, split: int, file: TokenFile, sequences: Range, num_samples: int | None
) -> OrderInputs:
    """What the order of a dataset is a function of; `split` is the split's number in SPLITS."""
    return OrderInputs(
        num_sequences=file.record.num_sequences,
        num_tokens=file.record.num_tokens,
        sequences=sequences,
        num_samples=num_samples,
        sequence_length=config.sequence_length,
        add_extra_token=config.add_extra_token,
        drop_last_partial_sequence=(split != VALID or config.drop_last_partial_validation_sequence),
        seed=config.seed,
        load_lengths=file.sequence_lengths,
    )


def _plan_split(
    config: DatasetConfig, number: int, blend: Blend, files: Mapping[str, TokenFile]
) -> SplitPlan | None:
    """The plan of a split, by its number; None if it has no share."""
    items, weights = blend
    sources = [source_of(item) for item in items]
    ranges = [_range(config, number, files[prefix], part) for prefix, part in sources]
    if None in ranges:
        return None
    name, size = SPLITS[number], config.num_samples[number]
    kind: Kind = "blend"
    if number == VALID and config.multiple_validation_sets and len(sources) > 1:
        kind = "apart"
    elif len(sources) == 1 and (weights is None or config.blend_per_split is not None):
        kind = "one"
    counts: list[int | None] = [None if kind == "blend" else size] * len(sources)
    try:
        if kind != "blend":
            weights = size = None
        elif weights is not None:
            weights = normalize(weights)
            shares = samples_per_dataset(weights, size or 0, config.surplus)
            size, counts = sum(share for share, _ in shares), [built for _, built in shares]
        datasets = [
            _plan_dataset(config, number, files[prefix], sequences, count)
            for (prefix, _), sequences, count in zip(sources, ranges, counts, strict=True)
            if sequences is not None
        ]
    except ConfigError as error:
        raise ConfigError(f"the {name} split: {error}") from None
    if weights is None and size is not None:
        size = min(size, sum(dataset.order.num_samples for dataset in datasets))
    return SplitPlan(name=name, datasets=datasets, kind=kind, weights=weights, size=size)


def _range(
    config: DatasetConfig, number: int, file: TokenFile, part: Bookends | None
) -> Range | None:
    """The sequences of a source that a split draws from; None if the split has no share."""
    start, stop = 0, file.record.num_sequences
    if part is not None:
        documents = part_range(file.record.num_documents, part)
        start, stop = file.dataset.check_documents(*documents)
    if config.split is None:
        return start, stop
    share = split_ranges(stop - start, config.split)[number]
    return None if share is None else (start + share[0], start + share[1])


def _plan_dataset(
    config: DatasetConfig, split: int, file: TokenFile, sequences: Range, num_samples: int | None
) -> DatasetPlan:
    check_token_dtype(file.dataset.dtype, file.prefix)
    inputs = order_inputs(config, split, file, sequences, num_samples)
    plan = plan_order(config.plan_of, inputs, file.prefix)
    return DatasetPlan(file=file, inputs=inputs, order=plan)


def warn_of_copies(plan: RunPlan) -> None:
    """Warns of the same sequences, in whatever files, twice in a blend."""
    for split in plan.present_splits:
        drawn: dict[tuple[str, str], list[DatasetPlan]] = {}
        for dataset in split.datasets if split.kind == "blend" else ():
            others = drawn.setdefault((dataset.file.fingerprint, dataset.file.lengths_checksum), [])
            start, stop = dataset.inputs.sequences
            for other in others:
                if max(start, other.inputs.sequences[0]) < min(stop, other.inputs.sequences[1]):
                    warnings.warn(
                        f"the {split.name} blend has the data of {dataset.file.prefix} twice (also "
                        f"as {other.file.prefix}): the same samples are drawn twice, in the same "
                        "order. Give it once, with the sum of the weights",
                        DuplicateDataWarning,
                        stacklevel=4,  # the line that calls `build_datasets`
                    )
                    break
            others.append(dataset)
