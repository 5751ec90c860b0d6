"""From a configuration and token files to what must be built: counts alone, no index yet.

The manifest of a run is its plan in a cache folder. It is written before the first set is built, so
that `prune` in another process keeps the sets; a manifest whose sets are missing is not used. A
process that writes or removes one holds the folder's lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Literal

from millrace.cache import arrays
from millrace.checks import absolute_path
from millrace.errors import ConfigError
from millrace.files import check_split, write_file, writers_lock
from millrace.order import RULES_VERSION, SPLITS, OrderInputs, OrderPlan
from millrace.order.blends import normalize, samples_per_dataset
from millrace.order.order_plans import check_token_dtype, entries_of, plan_order
from millrace.order.splits import VALID, Bookends, Range, part_range, split_ranges
from millrace.provenance import check_tokenizers, read_tokenizer
from millrace.records import record_from
from millrace.run.config import Blend, DatasetConfig, source_of
from millrace.store.token_file import TokenFile, TokenFileRecord, listed_storages

Kind = Literal["one", "blend", "apart"]
"""One dataset, a blend, or several separate datasets."""

REQUESTS = 8  # token files in buckets that are opened side by side
MANIFEST = "run-"
"""Start of a manifest's name; a fingerprint and .json follow."""


@dataclass(frozen=True, kw_only=True)
class DatasetPlan:
    """A range of sequences of a token file, in an order."""

    file: TokenFile
    inputs: OrderInputs
    order: OrderPlan


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """The plan of a split.

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
        """Numbers of samples of the datasets."""
        return [dataset.order.num_samples for dataset in self.datasets]

    @property
    def num_samples(self) -> int:
        """Number of samples of the blend, or of all datasets."""
        return sum(self.lengths) if self.size is None else self.size


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What a run draws from; None for a split without a share."""

    config: DatasetConfig
    files: Sequence[TokenFile]
    splits: Sequence[SplitPlan | None]

    @property
    def present_splits(self) -> list[SplitPlan]:
        return [split for split in self.splits if split is not None]

    @property
    def num_datasets(self) -> int:
        return sum(len(split.datasets) for split in self.present_splits)


def plan_run(config: DatasetConfig) -> RunPlan:
    """Opens every token file and plans what to build; for the errors, see `build_datasets`."""
    blends = [config.blend_of(number) for number in range(len(SPLITS))]
    prefixes = dict.fromkeys(source_of(item)[0] for blend in blends if blend for item in blend[0])
    storages = listed_storages([*prefixes], config.storage)
    num_threads = config.num_threads if storages == [config.storage] * len(storages) else REQUESTS
    with ThreadPoolExecutor(num_threads) as pool:
        files = [*pool.map(TokenFile.open, prefixes, repeat(config.access), storages)]
        if len(files) > 1 and not config.any_tokenizer:
            check_tokenizers(pool.map(read_tokenizer, prefixes, storages))
    check_split(*prefixes)
    by_prefix = dict(zip(prefixes, files, strict=True))
    splits = [
        None if blend is None else _plan_split(config, number, blend, by_prefix)
        for number, blend in enumerate(blends)
    ]
    return RunPlan(config=config, files=files, splits=splits)


def _plan_split(
    config: DatasetConfig, number: int, blend: Blend, files: Mapping[str, TokenFile]
) -> SplitPlan | None:
    items, weights = blend
    sources = [source_of(item) for item in items]
    all_ranges = [_range(config, number, files[prefix], part) for prefix, part in sources]
    ranges = [one for one in all_ranges if one is not None]
    if len(ranges) < len(sources):
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
        datasets = []
        for (prefix, _), sequences, count in zip(sources, ranges, counts, strict=True):
            inputs = _inputs(config, number, files[prefix], sequences, count)
            check_token_dtype(files[prefix].dataset.dtype, prefix)
            order = plan_order(config.plan_of, inputs, prefix, config.order_options)
            datasets.append(DatasetPlan(file=files[prefix], inputs=inputs, order=order))
    except ConfigError as error:
        raise ConfigError(f"the {name} split: {error}") from None
    if weights is None and size is not None:
        size = min(size, sum(dataset.order.num_samples for dataset in datasets))
    return SplitPlan(name=name, datasets=datasets, kind=kind, weights=weights, size=size)


def _range(
    config: DatasetConfig, number: int, file: TokenFile, part: Bookends | None
) -> Range | None:
    """The sequences of a source that a split draws from; None for a split without a share."""
    start, stop = 0, file.record.num_sequences
    if part is not None:
        documents = part_range(file.record.num_documents, part)
        start, stop = file.dataset.check_documents(*documents)
    if config.split is None:
        return start, stop
    share = split_ranges(stop - start, config.split)[number]
    return None if share is None else (start + share[0], start + share[1])


def _inputs(
    config: DatasetConfig, split: int, file: TokenFile, sequences: Range, num_samples: int | None
) -> OrderInputs:
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


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a cache folder knows of a run: the key of its configuration, its token files (with their
    prefixes as given, and absolute `paths`), and each split's plan, with the numbers of its files,
    and name of its array set."""

    config: dict[str, Any]
    files: list[TokenFileRecord]
    splits: list[dict[str, Any] | None]
    sets: list[str | None]
    paths: list[str]

    @classmethod
    def of(cls, plan: RunPlan, sets: Mapping[str, str]) -> Manifest:
        return cls(
            config=plan.config.order_key(),
            files=[file.record for file in plan.files],
            splits=[None if split is None else _split_entry(plan, split) for split in plan.splits],
            sets=[None if split is None else sets[split.name] for split in plan.splits],
            paths=[absolute_path(file.prefix) for file in plan.files],
        )

    @classmethod
    def read(cls, path: str) -> Manifest | None:
        """The manifest in a file; None where there is none of this version."""
        return arrays.read_as(path, functools.partial(record_from, Manifest))

    @classmethod
    def find(cls, config: DatasetConfig) -> Manifest | None:
        if config.cache is None:
            return None
        key = config.order_key()
        manifest = cls.read(_manifest_path(os.fspath(config.cache), key))
        return manifest if manifest is not None and manifest.config == key else None

    def plan(self, config: DatasetConfig) -> RunPlan | None:
        """The plan of a configuration with this key; None for a record of another form."""
        files = [TokenFile(record, config.access, config.storage) for record in self.files]
        try:
            splits = [
                None if one is None else _split_plan(config, one, files) for one in self.splits
            ]
        except arrays.NO_RECORD:
            return None
        return RunPlan(config=config, files=files, splits=splits)

    def write(self, folder: str, *, limit: float | None = None) -> None:
        """Writes the manifest, or makes an equal one as young as a new one; waits `limit` seconds
        for the folder's lock."""
        text = arrays.seal({"logic": RULES_VERSION, **dataclasses.asdict(self)})
        path = _manifest_path(folder, self.config)
        os.makedirs(folder, exist_ok=True)
        with writers_lock(manifests_lock(folder), path, limit=limit):
            with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
                if file.read() == text:
                    with contextlib.suppress(PermissionError):  # another user's: its age stays
                        os.utime(path)
                    return
            write_file(path, text)


def manifests_lock(folder: str) -> str:
    return os.path.join(folder, "manifests.lock")


def _manifest_path(folder: str, key: dict[str, Any]) -> str:
    return os.path.join(folder, MANIFEST + arrays.fingerprint(key) + arrays.JSON)


_PLAN = "gpt"  # from the time when Megatron-LM's order was the only one


def _split_entry(plan: RunPlan, split: SplitPlan) -> dict[str, Any]:
    numbers = {id(file): number for number, file in enumerate(plan.files)}
    datasets = [
        {
            "file": numbers[id(dataset.file)],
            "sequences": dataset.inputs.sequences,
            "num_samples": dataset.inputs.num_samples,
            _PLAN: entries_of(dataset.order),
        }
        for dataset in split.datasets
    ]
    return {**vars(split), "datasets": datasets}


def _split_plan(config: DatasetConfig, entry: Any, files: Sequence[TokenFile]) -> SplitPlan:
    number, datasets = SPLITS.index(entry["name"]), []
    for part in entry["datasets"]:
        file, sequences = files[part["file"]], tuple(part["sequences"])
        inputs = _inputs(config, number, file, sequences, part["num_samples"])
        order = config.plan_of(**part[_PLAN])
        datasets.append(DatasetPlan(file=file, inputs=inputs, order=order))
    return SplitPlan(**{**entry, "datasets": datasets})
