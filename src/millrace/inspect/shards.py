"""Describes the output folder of a global shuffle: counts, domains, shards, the distribution."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.checks import printable
from millrace.encoding import Tokenizer
from millrace.errors import ConfigError, DataError
from millrace.inspect.description import (
    bar_lines,
    describe_document,
    document_lines,
    excerpts_of,
    labelled_lines,
)
from millrace.shards.metadata import (
    METADATA,
    ShardsMetadata,
    bin_paths,
    metadata_path,
    read_metadata,
    shard_prefix,
)
from millrace.shards.reader import Shards
from millrace.shuffling.distribution import Parts, format_figures
from millrace.store import IndexedDataset


@dataclass(frozen=True, kw_only=True)
class ShardsDescription:
    """A folder of shards in numbers. An *item* is a sequence, or a document.

    Attributes:
        folder: The folder.
        shuffle_type: What was shuffled, as in the metadata.
        dtype: Dtype of the tokens.
        sequence_length: Number of tokens in a sequence; None for documents.
        num_items, num_tokens, num_shards: Counts.
        num_bytes: Size of all `.bin` files.
        shard_sizes: Number of items of the smallest and of the largest shard.
        seed, permutation, carry, eod: How the shuffle was made; None: unknown, or no EOD.
        num_inputs: Number of input files; 0: unknown.
        has_checksums: Whether `verify_shards` can check every byte.
        domains: Items of each domain, and its share of all items.
        distribution: For the head, the shards (or groups of them, if there are very many) and the
            windows of the output: the figures of `millrace.shuffling.distribution.Parts`. None:
            unknown.
        document: Number, shard, counts, head and tail of one item, as in `Description.document`.
    """

    folder: str
    shuffle_type: str
    dtype: str
    sequence_length: int | None
    num_items: int
    num_tokens: int
    num_bytes: int
    num_shards: int
    shard_sizes: tuple[int, int]
    seed: int | None
    permutation: str | None
    carry: bool
    eod: int | None
    num_inputs: int
    has_checksums: bool
    domains: dict[str, tuple[int, float]]
    distribution: dict[str, dict[str, Any]] | None
    document: dict[str, Any] | None


def describe_shards(
    folder: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    tokenizer: Tokenizer | None = None,
    document: int = 0,
) -> ShardsDescription:
    """What a folder of shards holds, and one of its sequences or documents.

    Args:
        folder: Folder of the shards.
        dtype: Dtype of the tokens, for metadata that do not say it; None: uint32.
        tokenizer: Tokenizer that decodes the item.
        document: Number of the sequence or document.

    Raises:
        ConfigError: A number out of range, or a dtype that token files cannot have.
        DataError: Metadata or shards that are missing, damaged or do not agree.
    """
    metadata = read_metadata(folder, dtype=dtype)
    name, total = os.fspath(folder), metadata.num_items
    num_bytes = sum(map(os.path.getsize, bin_paths(name, metadata)))
    distribution = item = None
    if metadata.distribution:
        keys = "head", "shards", "windows"
        distribution = {key: parts_of(metadata, name, key).figures() for key in keys}
    if total:
        item = _item(name, metadata, dtype, tokenizer, document)
    return ShardsDescription(
        folder=name,
        shuffle_type=metadata.shuffle_type,
        dtype=metadata.dtype,
        sequence_length=metadata.seq_len,
        num_items=total,
        num_tokens=num_bytes // metadata.token_dtype.itemsize,
        num_bytes=num_bytes,
        num_shards=metadata.num_shards,
        shard_sizes=(min(metadata.shard_sizes), max(metadata.shard_sizes)),
        seed=metadata.seed,
        permutation=metadata.permutation,
        carry=metadata.carry,
        eod=metadata.eod,
        num_inputs=len(metadata.inputs),
        has_checksums=bool(metadata.checksums),
        domains={
            domain: (count, count / max(total, 1))
            for domain, count in metadata.domain_stats.items()
        },
        distribution=distribution,
        document=item,
    )


def _item(
    folder: str,
    metadata: ShardsMetadata,
    dtype: str | None,
    tokenizer: Tokenizer | None,
    number: int,
) -> dict[str, Any]:
    if not 0 <= number < metadata.num_items:
        raise ConfigError(
            f"there is no document {number}; {folder} has 0 to {metadata.num_items - 1}"
        )
    ends = np.cumsum(metadata.shard_sizes)
    shard = int(np.searchsorted(ends, number, side="right"))
    place = number - int(ends[shard]) + metadata.shard_sizes[shard]
    if metadata.has_documents:
        dataset = IndexedDataset(shard_prefix(folder, shard))
        if place >= dataset.num_documents:
            raise DataError(
                f"{dataset.prefix}.idx has {dataset.num_documents} documents; {METADATA} says "
                f"{metadata.shard_sizes[shard]}: `millrace verify` names the damage"
            )
        document = describe_document(dataset, tokenizer, place)
    else:
        tokens = Shards(folder, dtype=dtype)[number]
        counts = {"num_sequences": 1, "num_tokens": len(tokens)}
        origin = {"origin": None, "origin_error": None}
        document = {**origin, **counts, **excerpts_of(tokens, tokenizer)}
    return {**document, "number": number, "shard": shard}


def parts_of(metadata: ShardsMetadata, folder: str, key: str) -> Parts:
    """The counts of the domains in parts of the output, in the order of `domain_stats`.

    Args:
        metadata: Metadata with a distribution.
        folder: The folder, for messages.
        key: "head", "shards" or "windows".

    Raises:
        DataError: A distribution that does not fit the metadata.
    """
    distribution, domains = metadata.distribution, metadata.domain_stats
    totals = np.array([*domains.values()])
    try:
        columns = [distribution["domains"].index(name) for name in domains]
        table = np.array(distribution[key]["counts"])
        if table.dtype.kind != "i" or table.ndim != 2 or table.shape[1] != len(columns):
            raise ValueError
        table = table[: 1 if key == "head" else None, columns].astype(np.int64)
        if (table < 0).any() or (table > totals).any() or not table.sum(axis=1).all():
            raise ValueError
        if key != "head" and (table.sum(axis=0) != totals).any():
            raise ValueError
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError):
        raise DataError(
            f"{metadata_path(folder)}: the {key} of the distribution do not fit "
            "domain_stats. The metadata are damaged, the shards may be whole: `millrace verify` "
            "says so. Shuffle again to have a distribution"
        ) from None
    is_grouped = key == "shards" and len(table) < metadata.num_shards
    name = "shard group" if is_grouped else key.removesuffix("s")
    return Parts(name, tuple(domains), table, totals)


def format_shards(description: ShardsDescription) -> str:
    """A description as text for people."""
    length = description.sequence_length
    item = "documents" if length is None else "sequences"
    least, most = description.shard_sizes
    sizes = f"{least:,}"
    if most > least:
        sizes += f" or {most:,}" if most == least + 1 else f" to {most:,}"
    rows = {
        "shuffled": f"{item}{'' if length is None else f' of {length:,} tokens'}",
        item: f"{description.num_items:,}",
        "tokens": f"{description.num_tokens:,} ({description.dtype})",
        "size": f"{description.num_bytes / 1e6:,.1f} MB",
        "shards": f"{description.num_shards:,} of {sizes} {item}",
        "checksums": "yes" if description.has_checksums else "none",
        "seed": description.seed,
        "permutation": description.permutation,
        "carry": "yes" if description.carry else None,
        "eod": description.eod,
        "inputs": f"{description.num_inputs:,} files" if description.num_inputs else None,
    }
    lines = [description.folder, *labelled_lines(rows), "", f"  {item} of each domain"]
    lines += bar_lines(
        (printable(name), share, f"{share:7.2%}  {count:,}")
        for name, (count, share) in description.domains.items()
    )
    if description.distribution is not None:
        lines += ["", "  domains along the output, against what chance allows"]
        lines += [f"  {format_figures(one)}" for one in description.distribution.values()]
    if description.document:
        shard = description.document["shard"]
        lines += document_lines(description.document, item[:-1], f" (in shard {shard})")
    return "\n".join(lines)
