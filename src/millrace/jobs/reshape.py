"""Merge and split token files."""

import contextlib
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.cache.loss_files import joined_ranges, write_loss_ranges
from millrace.errors import ConfigError
from millrace.files import check_split
from millrace.names import BIN, IDX, SHARD_NUMBER, UNFINISHED
from millrace.option_class import Options, StrPath, option, parse_size
from millrace.provenance import check_tokenizers, common_tokenizer, copied_origins, read_tokenizer
from millrace.store import IndexedDataset, IndexedDatasetBuilder
from millrace.store.info import read_info
from millrace.store.publish import building, check_prefix, files_of, prefix_lock, remove

_SHOWN_OTHERS = 4


@dataclass(frozen=True, kw_only=True)
class PairOptions(Options):
    """The options of everything that writes pairs."""

    # fmt: off
    checksums: bool = option(
        "write no sidecar PREFIX.info.json; `verify` then checks the structure only", True)
    origins: bool = option("leave out the origins of the documents, PREFIX.origins.parquet", True)
    loss_ranges: bool = option(
        "leave out which tokens are not trained on, PREFIX.loss.json: train on all", True)
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class MergeOptions(PairOptions):
    # fmt: off
    prefixes: Sequence[StrPath] = option(
        "path prefixes of the inputs", flags="prefixes", metavar="PREFIX")
    output_prefix: StrPath = option("path prefix of the output", metavar="PREFIX")
    any_tokenizer: bool = option(
        "merge data of different tokenizers or splitters of sentences, too", False)
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class SplitOptions(PairOptions):
    # fmt: off
    prefix: StrPath = option(
        "path prefix of the input, without .bin or .idx", flags="prefix", metavar="PREFIX")
    output_prefix: StrPath = option("path prefix of the output", metavar="PREFIX")
    documents: int | None = option("documents per shard", None, least=1)
    num_bytes: int | None = option(
        "bytes per shard: 500M, 20G", None, least=1, flags="--size", parse=parse_size,
        metavar="SIZE")
    # fmt: on

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.documents is None) == (self.num_bytes is None):
            raise ConfigError(
                f"documents is {self.documents} and num_bytes (--size) {self.num_bytes}: give one "
                "of them"
            )


def merge(prefixes: Sequence[StrPath], output_prefix: StrPath, **options: Any) -> IndexedDataset:
    """Concatenates indexed datasets; documents keep their order.

    The output has origins of documents if all inputs have them, and its sidecar names the tokenizer
    if all inputs name the same.

    Args:
        prefixes: Path prefixes of the input pairs, at least one, of the same dtype; all have modes,
            or none has.
        output_prefix: Path prefix of the output pair; it may be one of the inputs.
        options: The other fields of `MergeOptions`.

    Raises:
        ConfigError: An empty list, or pairs that differ in dtype, modes, tokenizer or splitter.
        DataError: A missing or damaged pair, a split that did not end, or ranges that do not fit.
    """
    own = MergeOptions(prefixes=prefixes, output_prefix=output_prefix, **options)
    names = [os.fspath(prefix) for prefix in own.prefixes]
    if not names:
        raise ConfigError("there is nothing to merge; give at least one prefix")
    if not own.any_tokenizer:
        check_tokenizers(map(read_tokenizer, names))
    datasets = [IndexedDataset(name) for name in names]
    check_split(*names)
    with pair_builder(own, output_prefix, datasets, {"merged": names}) as builder:
        for dataset in datasets:  # the open ones: the files at their prefixes may change meanwhile
            builder.add_index(dataset)
    return IndexedDataset(output_prefix)


def split(prefix: StrPath, output_prefix: StrPath, **options: Any) -> list[str]:
    """Cuts an indexed dataset into shards of whole documents, with their origins.

    Shard i gets the path prefix `{output_prefix}_{i:05}`; merging the shards restores the dataset,
    byte for byte. All shards of an earlier split with this output prefix are replaced or removed,
    so a glob pattern matches the new shards only. Their sidecars tell them from other pairs. While
    a split is unfinished, also after a kill, a marker says so, and its shards are refused together.

    Args:
        prefix: Path prefix of the input pair.
        output_prefix: First part of the shards' path prefixes.
        options: The other fields of `SplitOptions`, of which either `documents`, the number per
            shard, or `num_bytes`: a longer document gets its own shard.

    Returns:
        The shards' path prefixes.

    Raises:
        ConfigError: Not exactly one of `documents` and `num_bytes`, a value below 1, or a pair of a
            shard's name that no earlier split wrote.
        DataError: A missing or damaged pair, or ranges of tokens that do not fit it.
    """
    own = SplitOptions(prefix=prefix, output_prefix=output_prefix, **options)
    dataset = IndexedDataset(prefix)
    dataset.check()
    if own.documents is not None:
        bounds = [*range(0, dataset.num_documents, own.documents), dataset.num_documents]
    elif own.num_bytes is not None:
        bounds = bounds_by_size(dataset, own.num_bytes)
    shards = [f"{own.output_prefix}_{number:05}" for number in range(len(bounds) - 1)]
    surplus = _surplus_shards(os.fspath(own.output_prefix), len(shards), dataset.prefix)
    with _marked_unfinished(os.fspath(own.output_prefix)):
        for shard, span in zip(shards, itertools.pairwise(bounds), strict=True):
            provenance = {"split": dataset.prefix, "documents": list(span)}
            with pair_builder(own, shard, [dataset], provenance, documents=span) as builder:
                builder.add_index(dataset, span)
        for shard in surplus:
            with building(shard):  # holds the lock: no other process builds this shard
                # The index last: a kill leaves no tokens without one, which would be raw tokens.
                remove(*reversed(files_of(shard)))
    return shards


@contextlib.contextmanager
def _marked_unfinished(output_prefix: str) -> Iterator[None]:
    """Keeps a file that `check_split` finds, from before the first shard until all are whole."""
    marker = f"{output_prefix}_{UNFINISHED}"
    with prefix_lock(output_prefix):
        open(marker, "wb").close()  # a shard's publication brings it to the disk
        yield
        os.unlink(marker)


@contextlib.contextmanager
def pair_builder(
    options: PairOptions,
    prefix: StrPath,
    sources: Sequence[IndexedDataset],
    provenance: dict[str, Any],
    *,
    dtype: np.dtype[Any] | None = None,
    documents: tuple[int, int] | None = None,
) -> Iterator[IndexedDatasetBuilder]:
    """A builder for `documents` of `sources`; `dtype` is that of the first by default.

    The ranges that are not trained on, and the origins, are published after the pair.
    """
    check_prefix(os.fspath(prefix))
    tokenizer = common_tokenizer([read_tokenizer(source.prefix) for source in sources])
    if tokenizer is not None:
        provenance = {**provenance, "tokenizer": tokenizer}
    parts = [(source, documents) for source in sources]
    ranges = joined_ranges(parts) if options.loss_ranges else None
    if ranges is not None:
        provenance = {**provenance, "loss_ranges": len(ranges)}
    with IndexedDatasetBuilder(
        prefix,
        sources[0].dtype if dtype is None else dtype,
        # A dataset without sequences does not show whether it has modes.
        multimodal=any(source.sequence_modes is not None for source in sources),
        checksums=options.checksums,
        provenance=provenance if options.checksums or ranges is not None else None,
    ) as builder:
        # Read before the pair is replaced: one of the sources may be at its prefix.
        writer = copied_origins(os.fspath(prefix), parts) if options.origins else None
        yield builder
    if ranges is not None:
        write_loss_ranges(prefix, ranges)
    if writer is not None:
        writer.publish()


def _surplus_shards(output_prefix: str, count: int, source: str) -> list[str]:
    """The shards of an earlier split from number `count` on, but not the source.

    A ConfigError for a pair with a shard's name that another command wrote, as its sidecar says, or
    that would be removed, though no sidecar says who wrote it.
    """
    check_prefix(f"{output_prefix}_00000")
    folder, name = os.path.split(output_prefix)
    index_name = re.compile(re.escape(name) + SHARD_NUMBER + re.escape(IDX))
    surplus, others = list[str](), list[str]()
    for match in filter(None, map(index_name.fullmatch, sorted(os.listdir(folder or ".")))):
        index, is_surplus = os.path.join(folder, match[0]), int(match[1]) >= count
        if is_surplus and os.path.realpath(index) == os.path.realpath(source + IDX):
            continue
        shard = index.removesuffix(IDX)
        surplus += [shard] * is_surplus
        info = read_info(shard)
        # A split that is killed while it removes a shard leaves an index alone.
        is_others = is_surplus if info is None else "split" not in info.provenance
        if is_others and os.path.exists(shard + BIN):
            others.append(shard)
    if others:
        names = ", ".join([*others[:_SHOWN_OTHERS], "..."][: len(others)])
        raise ConfigError(
            f"a split would replace or remove {names}, and no sidecar (.info.json) says that an "
            "earlier split wrote that. Give another output prefix, or remove it"
        )
    return surplus


def bounds_by_size(dataset: IndexedDataset, num_bytes: int) -> list[int]:
    """The first document of each shard of at most `num_bytes`, then the number of documents."""
    ends = np.cumsum(dataset.document_lengths) * dataset.dtype.itemsize
    bounds = [0]
    while bounds[-1] < dataset.num_documents:
        begin = int(ends[bounds[-1] - 1]) if bounds[-1] else 0
        stop = int(np.searchsorted(ends, begin + num_bytes, side="right"))
        bounds.append(max(stop, bounds[-1] + 1))
    return bounds
