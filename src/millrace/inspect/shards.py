"""Describes the output folder of a global shuffle: counts, domains, shards, the distribution."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.checks import printable
from millrace.encoding import Tokenizer
from millrace.errors import ConfigError, DataError
from millrace.inspect.description import describe_document, document_lines, excerpts_of
from millrace.shards.metadata import (
    METADATA,
    ShardsMetadata,
    bin_paths,
    metadata_path,
    read_metadata,
    shard_prefix,
)
from millrace.shards.reader import Shards
from millrace.store import IndexedDataset

_PARTS = {"head": "head", "shards": "shard", "windows": "window"}
_BAR_WIDTH = 40


@dataclass(frozen=True, kw_only=True)
class ShardsDescription:
    """A folder of shards in numbers. An *item* is a sequence, or a document.

    Attributes:
        folder: The folder.
        shuffle_type: What was shuffled, as in the metadata.
        dtype: Dtype of the tokens.
        sequence_length: Number of tokens in a sequence; None for documents.
        num_items, num_tokens: Counts.
        num_bytes: Size of all `.bin` files.
        num_shards: Number of shards.
        shard_sizes: Number of items of the smallest and of the largest shard.
        seed, permutation, carry, eod: How the shuffle was made; None: unknown, or no EOD.
        num_inputs: Number of input files; 0: unknown.
        has_checksums: Whether `verify_shards` can check every byte.
        domains: Items of each domain, and its share of all items.
        distribution: For the head, the shards (or groups of them, if there are very many) and the
            windows of the output: the number of parts, the p-value of the chi-square test of all
            parts, the least p-value of a part and its number (None: too few items for a test), and
            the largest deviation of a domain's count from the expected one, in standard deviations,
            with its part, domain and counts. None: unknown.
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
    name = os.fspath(folder)
    num_bytes = sum(map(os.path.getsize, bin_paths(name, metadata)))
    total = metadata.num_items
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
        distribution=_worst_figures(metadata, name) if metadata.distribution else None,
        document=_item(name, metadata, dtype, tokenizer, document) if total else None,
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
        document = {
            "origin": None,
            "origin_error": None,
            "num_sequences": 1,
            "num_tokens": len(tokens),
            **excerpts_of(tokens, tokenizer),
        }
    return {**document, "number": number, "shard": shard}


# ---- the distribution ----


def domain_counts(metadata: ShardsMetadata, folder: str, parts: str) -> NDArray[np.int64]:
    """Items of each domain in each part of the output.

    Args:
        metadata: Metadata with a distribution.
        folder: The folder, for messages.
        parts: "head", "shards" or "windows".

    Returns:
        int64 [parts, domains], the domains in the order of `domain_stats`.

    Raises:
        DataError: A distribution that does not fit the metadata.
    """
    distribution, stats = metadata.distribution, metadata.domain_stats
    try:
        columns = [distribution["domains"].index(name) for name in stats]
        table = np.array(distribution[parts]["counts"])
        if table.dtype.kind != "i" or table.ndim != 2 or table.shape[1] != len(columns):
            raise ValueError
        table = table[: 1 if parts == "head" else None, columns].astype(np.int64)
        totals = np.array([*stats.values()])
        if (table < 0).any() or (table > totals).any() or not table.sum(axis=1).all():
            raise ValueError
        if parts != "head" and (table.sum(axis=0) != totals).any():
            raise ValueError
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError):
        raise DataError(
            f"{metadata_path(folder)}: the {parts} of the distribution do not fit "
            "domain_stats. The metadata are damaged, the shards may be whole: `millrace verify` "
            "says so. Shuffle again to have a distribution"
        ) from None
    return table


def deviations(counts: NDArray[np.int64], totals: NDArray[np.int64]) -> NDArray[np.float64]:
    """How far each count is from its expected value, in standard deviations of a fair shuffle.

    A fair shuffle draws the items of a part without putting any back.

    Args:
        counts: Items of each domain in each part: int64 [parts, domains].
        totals: Items of each domain in the whole output: int64 [domains].

    Returns:
        float64 [parts, domains]; 0 where there is no choice.
    """
    total, sizes = max(int(totals.sum()), 1), counts.sum(axis=1, keepdims=True).astype(np.float64)
    shares = totals / total
    variances = sizes * shares * (1 - shares) * ((total - sizes) / max(total - 1, 1))
    scores = (counts - sizes * shares) / np.sqrt(np.where(variances > 0, variances, 1))
    return np.where(variances > 0, scores, 0.0)


def _worst_figures(metadata: ShardsMetadata, folder: str) -> dict[str, dict[str, Any]]:
    figures: dict[str, dict[str, Any]] = {}
    names, totals = [*metadata.domain_stats], np.array([*metadata.domain_stats.values()])
    for parts in _PARTS:
        counts = domain_counts(metadata, folder, parts)
        scores = deviations(counts, totals)
        part, domain = divmod(int(np.abs(scores).argmax()), len(names))
        tests = metadata.distribution[parts]
        p_value, p_values = tests.get("p_value"), tests.get("p_values")
        least = None
        has_tests = tests.get("part_degrees") != 0  # else all p-values are 1
        if has_tests and isinstance(p_values, list) and len(p_values) >= len(counts):
            least = min(filter(_is_p_value, p_values[: len(counts)]), default=None)
        figures[parts] = {
            "parts": len(counts),
            "p_value": p_value if _is_p_value(p_value) and tests.get("degrees") != 0 else None,
            "least_p_value": least,
            "least_p_value_part": None if least is None else p_values.index(least),
            "largest_deviation": float(scores[part, domain]),
            "largest_deviation_part": part,
            "largest_deviation_domain": names[domain],
            "largest_deviation_count": int(counts[part, domain]),
            "largest_deviation_expected": float(counts[part].sum() * totals[domain] / totals.sum()),
        }
    return figures


def _is_p_value(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1


# ---- as text ----


def format_shards(description: ShardsDescription) -> str:
    """A description as text for people."""
    length = description.sequence_length
    item = "documents" if length is None else "sequences"
    least, most = description.shard_sizes
    sizes = f"{least:,}" if least == most else f"{least:,} or {most:,}"
    if most - least > 1:
        sizes = f"{least:,} to {most:,}"
    lines = [
        description.folder,
        f"  shuffled    {item}{'' if length is None else f' of {length:,} tokens'}",
        f"  {item:<11} {description.num_items:,}",
        f"  tokens      {description.num_tokens:,} ({description.dtype})",
        f"  size        {description.num_bytes / 1e6:,.1f} MB",
        f"  shards      {description.num_shards:,} of {sizes} {item}",
        f"  checksums   {'yes' if description.has_checksums else 'none'}",
    ]
    lines += [
        f"  {name:<11} {value}"
        for name, value in (
            ("seed", description.seed),
            ("permutation", description.permutation),
            ("carry", "yes" if description.carry else None),
            ("eod", description.eod),
            ("inputs", f"{description.num_inputs:,} files" if description.num_inputs else None),
        )
        if value is not None
    ]
    lines += ["", f"  {item} of each domain"]
    names = [printable(name) for name in description.domains]
    width = max(map(len, names), default=0)
    for name, (count, share) in zip(names, description.domains.values(), strict=True):
        bar = "#" * round(share * _BAR_WIDTH)
        lines.append(f"  {name:>{width}}  {bar:<{_BAR_WIDTH}}  {share:7.2%}  {count:,}")
    if description.distribution is not None:
        lines += ["", *_distribution_lines(description.distribution, description.num_shards)]
    if description.document:
        document = description.document
        head = (
            f"  {item.removesuffix('s')} {document['number']} (in shard {document['shard']}), "
            f"{document['num_tokens']:,} tokens:"
        )
        lines += ["", head, *document_lines(document)]
    return "\n".join(lines)


def _distribution_lines(distribution: dict[str, dict[str, Any]], num_shards: int) -> list[str]:
    lines = ["  domains along the output, against what chance allows (p-values by chi-square)"]
    for parts, figures in distribution.items():
        kind = _PARTS[parts]
        if kind == "shard" and figures["parts"] < num_shards:
            kind = "shard group"
        p_value = figures["p_value"]
        texts = ["no chi-square test" if p_value is None else f"p {p_value:.2g}"]
        least, part = figures["least_p_value"], figures["least_p_value_part"]
        if figures["parts"] > 1 and least is not None:
            texts.append(f"least p of one {kind} {least:.2g} ({kind} {part})")
        place = printable(figures["largest_deviation_domain"])
        if kind != "head":
            place += f" in {kind} {figures['largest_deviation_part']}"
        texts.append(
            f"largest deviation {figures['largest_deviation']:+.1f} standard deviations ({place}: "
            f"{figures['largest_deviation_count']:,}, expected "
            f"{figures['largest_deviation_expected']:,.1f})"
        )
        count = figures["parts"]
        name = "head" if kind == "head" else f"{count:,} {kind}{'s' if count != 1 else ''}"
        lines.append(f"  {name:>11}  {', '.join(texts)}")
    return lines
