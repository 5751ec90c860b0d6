"""From a configuration and token files to what must be built: counts alone, no index yet."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from millrace.errors import ConfigError, DuplicateDataWarning
from millrace.feed.datasets import plan_dataset
from millrace.order import SPLITS, GPTPlan, normalize, samples_per_dataset, split_ranges
from millrace.order.splits import VALID, Range
from millrace.run.config import DatasetConfig
from millrace.store import IndexedDataset
from millrace.store.bytes import Access
from millrace.store.publish import bin_path, idx_path


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """What a plan knows of a token file.

    Attributes:
        prefix: its path.
        sizes: bytes of the `.bin` and the `.idx`.
        times: when each was last changed, in nanoseconds.
        content: its fingerprint (see `IndexedDataset.fingerprint`).
        lengths: a checksum of all sequence lengths, which decide the indices.
        num_sequences, num_documents, num_tokens: counts.
    """

    prefix: str
    sizes: tuple[int, int]
    times: tuple[int, int]
    content: str
    lengths: str
    num_sequences: int
    num_documents: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class DatasetPlan:
    """One dataset: a range of sequences of a token file.

    Attributes:
        file: its number among the run's files.
        sequences: (start, stop).
        num_samples: to have at least; None: one epoch's.
        gpt: epochs and samples.
    """

    file: int
    sequences: Range
    num_samples: int | None
    gpt: GPTPlan


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """One split.

    Attributes:
        name: "train", "valid" or "test".
        datasets: that it draws from.
        kind: "one" dataset, a "blend", or several "apart".
        weights: of a blend, as they were normalised; None: its datasets' lengths.
        size: of a blend; None: all samples of all datasets.
    """

    name: str
    datasets: Sequence[DatasetPlan]
    kind: str
    weights: Sequence[float] | None
    size: int | None

    @property
    def num_samples(self) -> int:
        """Of the blend, the dataset, or the datasets together."""
        built = sum(dataset.gpt.num_samples for dataset in self.datasets)
        return built if self.size is None else self.size


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The token files and splits of a run."""

    files: Sequence[TokenFile]
    splits: Sequence[SplitPlan | None]


def plan_run(config: DatasetConfig) -> tuple[list[IndexedDataset], RunPlan]:
    """Opens every token file and works out what to build.

    Raises:
        ConfigError, DataError: see `build_datasets`.
    """
    prefixes: dict[str, int] = {}
    for number in range(len(SPLITS)):
        given = config.blend_of(number)
        for prefix in given[0] if given is not None else []:
            prefixes.setdefault(os.fspath(prefix), len(prefixes))
    with ThreadPoolExecutor(config.num_threads) as pool:
        looked = list(pool.map(functools.partial(look_at, access=config.access), prefixes))
    opened, files = [dataset for dataset, _ in looked], [file for _, file in looked]
    splits: list[SplitPlan | None] = []
    for number, name in enumerate(SPLITS):
        given = config.blend_of(number)
        if given is None:
            splits.append(None)
            continue
        numbers = [prefixes[os.fspath(prefix)] for prefix in given[0]]
        ranges = [_range_of(config, number, opened[file]) for file in numbers]
        if any(sequences is None for sequences in ranges):
            splits.append(None)
            continue
        splits.append(
            _plan_split(config, number, name, numbers, opened, ranges, given[1])  # type: ignore[arg-type]
        )
    return opened, RunPlan(files=files, splits=splits)


def warn_of_copies(plan: RunPlan) -> None:
    """Warns of the same data, wherever it lies, twice in a blend."""
    for split in plan.splits:
        if split is None or split.kind != "blend":
            continue
        first: dict[tuple[str, str], str] = {}
        for dataset in split.datasets:
            file = plan.files[dataset.file]
            same_data = (file.content, file.lengths)
            if same_data in first:
                warnings.warn(
                    f"the {split.name} blend has the data of {file.prefix} twice (also as "
                    f"{first[same_data]}): the same samples are drawn twice, in the same order. "
                    "Give it once, with the sum of the weights",
                    DuplicateDataWarning,
                    stacklevel=4,  # the line that calls `build_datasets`
                )
            first.setdefault(same_data, file.prefix)


def look_at(prefix: str, access: Access = "mmap") -> tuple[IndexedDataset, TokenFile]:
    """Opens a token file, and says what is in it."""
    # Before it is opened: of a file that is replaced meanwhile, the times are then the old ones,
    # and the next look at it finds out.
    _, times = _sizes_and_times(prefix)
    dataset = IndexedDataset(prefix, access=access)
    return dataset, TokenFile(
        prefix=prefix,
        sizes=(dataset.reader.size, dataset.num_bytes - dataset.reader.size),
        times=times,
        content=dataset.fingerprint,
        lengths=dataset.lengths_checksum,
        num_sequences=len(dataset),
        num_documents=dataset.num_documents,
        num_tokens=dataset.num_tokens,
    )


def has_same_times(file: TokenFile) -> bool:
    """Whether a token file has the sizes and times that it had."""
    return _sizes_and_times(file.prefix) == (file.sizes, file.times)


def _sizes_and_times(prefix: str) -> tuple[tuple[int, int], tuple[int, int]]:
    try:
        data, index = os.stat(bin_path(prefix)), os.stat(idx_path(prefix))
    except FileNotFoundError:
        return (0, 0), (0, 0)  # missing, or published halfway, which opening it tells apart
    return (data.st_size, index.st_size), (data.st_mtime_ns, index.st_mtime_ns)


def _range_of(config: DatasetConfig, number: int, dataset: IndexedDataset) -> Range | None:
    if config.split is None:
        return 0, len(dataset)
    return split_ranges(len(dataset), config.split)[number]


def _plan_split(
    config: DatasetConfig,
    number: int,
    name: str,
    files: Sequence[int],
    opened: Sequence[IndexedDataset],
    ranges: Sequence[Range],
    weights: Sequence[float] | None,
) -> SplitPlan:
    asked = config.num_samples[number]
    is_apart = number == VALID and config.multiple_validation_sets and len(files) > 1
    is_one = len(files) == 1 and (weights is None or config.blend_per_split is not None)
    if is_apart or is_one:
        weights, counts = None, [asked] * len(files)
    elif weights is None:
        counts = [None] * len(files)
    else:
        weights = normalize(weights)
        try:
            shares = samples_per_dataset(weights, asked or 0, config.surplus)
        except ConfigError as error:
            raise ConfigError(f"the {name} split: {error}") from None
        counts = [built for _, built in shares]
        asked = sum(share for share, _ in shares)

    def plan(file: int, sequences: Range, count: int | None) -> DatasetPlan:
        gpt = plan_dataset(
            opened[file],
            sequences,
            count,
            config.sample_options,
            drop_last_partial_sequence=number != VALID
            or config.drop_last_partial_validation_sequence,
        )
        return DatasetPlan(file=file, sequences=sequences, num_samples=count, gpt=gpt)

    try:
        datasets = [plan(*one) for one in zip(files, ranges, counts, strict=True)]
    except ConfigError as error:
        raise ConfigError(f"the {name} split: {error}") from None
    if weights is None and asked is not None:
        asked = min(asked, sum(dataset.gpt.num_samples for dataset in datasets))
    return SplitPlan(
        name=name,
        datasets=datasets,
        kind="apart" if is_apart else "one" if is_one else "blend",
        weights=weights,
        size=asked if not (is_apart or is_one) else None,
    )
