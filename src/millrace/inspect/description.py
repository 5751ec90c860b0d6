"""Describes indexed datasets and folders of shards: counts, lengths, domains, a document."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.checks import check_int, printable, printable_lines
from millrace.encoding import Tokenizer
from millrace.errors import ConfigError, DataError
from millrace.provenance import has_origins, read_tokenizer
from millrace.shards import metadata as shards
from millrace.shards.shard_reader import Shards
from millrace.shuffling.permutations import Parts, format_figures
from millrace.storage import storage_of
from millrace.store import IndexedDataset

_EXCERPT = 256  # tokens of a document's head, and of its tail
_BAR_WIDTH = 40
_BINS = [0, *(2**n for n in range(32))]  # of lengths: the start of each, and the end
_QUANTILES = {"p1": 0.01, "p10": 0.1, "median": 0.5, "p90": 0.9, "p99": 0.99}
_CHUNK = 1 << 24  # bytes of tokens that are counted at a time
NO_ORIGINS = "no PREFIX.origins.parquet, which `millrace tokenize` writes, tells file and line"


@dataclass(frozen=True, kw_only=True)
class Description:
    """An indexed dataset in numbers.

    Attributes:
        prefix: Path prefix of the pair.
        dtype: Dtype of the tokens.
        num_documents, num_sequences, num_tokens: Counts.
        num_bytes: Size of both files.
        has_modes: Whether sequences have modes.
        lengths: Tokens of the sequences: min, quantiles, max and mean; empty without sequences.
        document_lengths: The same of the documents.
        histogram: Rows (from, to, number of sequences) by length.
        special_tokens: Occurrences of each special token; None without a tokenizer.
        document: Number, counts, head and tail of one document; None: there are none. `head` and
            `tail` have `tokens` and, with a tokenizer, `text`; `tail` is None if the head is the
            whole. `origin` has `source`, `line`, `byte_offset` and `id`, or is None without a
            sidecar of origins; `origin_error` says why it cannot be read, or is None.
        provenance: Entries of the sidecar, such as the tokenizer.
        has_checksums: Whether `verify` can check every byte.
        has_origins: Whether there is a sidecar of origins.
        is_same_tokenizer: Whether the tokenizer wrote these tokens; None: not known.
        tokenizer_warning: Text that names the other tokenizer, if another one wrote them.
    """

    prefix: str
    dtype: str
    num_documents: int
    num_sequences: int
    num_tokens: int
    num_bytes: int
    has_modes: bool
    lengths: dict[str, float]
    document_lengths: dict[str, float]
    histogram: list[tuple[int, int, int]]
    special_tokens: dict[str, int] | None
    document: dict[str, Any] | None
    provenance: dict[str, Any] | None
    has_checksums: bool
    has_origins: bool
    is_same_tokenizer: bool | None
    tokenizer_warning: str | None


def describe(
    dataset: IndexedDataset, *, tokenizer: Tokenizer | None = None, document: int = 0
) -> Description:
    """Counts, dtype, lengths and one document of an indexed dataset.

    With a tokenizer, which decodes the document, all tokens are read to count the special ones;
    else only the index. A ConfigError for a number out of range, a DataError for damage.
    """
    lengths, info = dataset.sequence_lengths, dataset.info()
    is_same = warning = special_tokens = None
    if tokenizer is not None:
        special_tokens = _count_special(dataset, tokenizer)
        if (written_by := read_tokenizer(dataset.prefix)) is not None:
            is_same = written_by.is_same([tokenizer.fingerprint])
        if is_same is False:
            warning = (
                f"another tokenizer wrote these tokens: {written_by}, not {tokenizer.path} "
                f"({tokenizer.fingerprint[:12]}). Texts and special tokens below are wrong"
            )
    one = _describe_document(dataset, tokenizer, document) if dataset.num_documents else None
    return Description(
        prefix=dataset.prefix,
        dtype=str(dataset.dtype),
        num_documents=dataset.num_documents,
        num_sequences=len(dataset),
        num_tokens=dataset.num_tokens,
        num_bytes=dataset.num_bytes,
        has_modes=dataset.sequence_modes is not None,
        lengths=_spread(lengths),
        document_lengths=_spread(dataset.document_lengths),
        histogram=_histogram(lengths),
        special_tokens=special_tokens,
        document=one,
        provenance=None if info is None else info.provenance,
        has_checksums=info is not None and info.checksums is not None,
        has_origins=has_origins(dataset.prefix),
        is_same_tokenizer=is_same,
        tokenizer_warning=warning,
    )


def _spread(lengths: NDArray[Any]) -> dict[str, float]:
    if len(lengths) == 0:
        return {}
    values = np.quantile(lengths, list(_QUANTILES.values())).tolist()
    quantiles = dict(zip(_QUANTILES, values, strict=True))
    ends = {"mean": float(lengths.mean()), "max": int(lengths.max())}
    return {"min": int(lengths.min()), **quantiles, **ends}


def _histogram(lengths: NDArray[Any]) -> list[tuple[int, int, int]]:
    counts, _ = np.histogram(lengths, bins=_BINS)
    rows = [(low, end - 1, int(n)) for (low, end), n in zip(pairwise(_BINS), counts, strict=True)]
    occupied = np.flatnonzero(counts)
    return rows[occupied[0] : occupied[-1] + 1] if len(occupied) else []


def _count_special(dataset: IndexedDataset, tokenizer: Tokenizer) -> dict[str, int]:
    special_tokens = tokenizer.special_tokens()
    counts = dict.fromkeys(special_tokens, 0)
    size = dataset.reader.size
    for start in range(0, size, _CHUNK):
        part = dataset.reader.read(start, min(_CHUNK, size - start)).view(dataset.dtype)
        for text, number in special_tokens.items():
            counts[text] += int(np.count_nonzero(part == number))
    return counts


def _describe_document(dataset: IndexedDataset, tokenizer: Any, number: int) -> dict[str, Any]:
    check_int(f"the document of {dataset.prefix}", number, 0, dataset.num_documents - 1)
    first, last = dataset.document_indices[number : number + 2].tolist()
    origin = origin_error = None
    try:
        origin = dataset.origin(number)
    except (DataError, ConfigError) as error:  # damaged, or pyarrow is not installed
        origin_error = str(error)
    return {
        "number": number,
        "origin": None if origin is None else origin._asdict(),
        "origin_error": origin_error,
        "num_sequences": last - first,
        **_excerpts_of(dataset.document(number), tokenizer),
    }


def _excerpts_of(tokens: NDArray[Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    def excerpt(part: NDArray[Any]) -> dict[str, Any]:
        text = None if tokenizer is None else tokenizer.decode(part)
        return {"tokens": part.tolist(), "text": text}

    rest = tokens[_EXCERPT:][-_EXCERPT:]
    tail = excerpt(rest) if len(rest) else None
    return {"num_tokens": len(tokens), "head": excerpt(tokens[:_EXCERPT]), "tail": tail}


def format_description(description: Description) -> str:
    """A description as text for people."""
    rows = {
        "documents": f"{description.num_documents:,}",
        "sequences": f"{description.num_sequences:,}{' with modes' * description.has_modes}",
        "tokens": f"{description.num_tokens:,} ({description.dtype})",
        "size": f"{description.num_bytes / 1e6:,.1f} MB",
        "checksums": "yes" if description.has_checksums else "none",
        "origins": "yes" if description.has_origins else "none",
        "WARNING": description.tokenizer_warning,
    }
    lines = [f"{description.prefix}.bin/.idx", *_labelled_lines(rows)]
    lines += _labelled_lines({name: str(v) for name, v in (description.provenance or {}).items()})
    if description.lengths:
        lines += _spread_lines("tokens in a sequence", description.lengths)
        most = max(count for _, _, count in description.histogram)
        lines += _bar_lines(
            (f"{low:,}" if low == high else f"{low:,} to {high:,}", count / most, f"{count:,}")
            for low, high, count in description.histogram
        )
    if description.document_lengths and description.document_lengths != description.lengths:
        lines += _spread_lines("tokens in a document", description.document_lengths)
    if description.special_tokens:
        lines += ["", "  special tokens"]
        lines += [f"  {name:>20}  {n:,}" for name, n in description.special_tokens.items()]
    if description.document:
        lines += _document_lines(description.document)
    return "\n".join(lines)


def _spread_lines(title: str, spread: dict[str, float]) -> list[str]:
    values = "   ".join(f"{name} {value:,.10g}" for name, value in spread.items())
    return ["", f"  {title}", f"  {values}"]


def _labelled_lines(rows: Mapping[str, Any]) -> list[str]:
    return [f"  {name:<10} {value}" for name, value in rows.items() if value is not None]


def _bar_lines(rows: Iterable[tuple[str, float, str]]) -> list[str]:
    rows = list(rows)
    width = max((len(label) for label, _, _ in rows), default=0)
    return [
        f"  {label:>{width}}  {'#' * round(share * _BAR_WIDTH):<{_BAR_WIDTH}}  {value}"
        for label, share, value in rows
    ]


def _document_lines(document: dict[str, Any], name: str = "document", place: str = "") -> list[str]:
    number, num_tokens = document["number"], document["num_tokens"]
    head, tail = document["head"], document["tail"]
    lines = ["", f"  {name} {number}{place}, {num_tokens:,} tokens:"]
    if document["origin_error"] is not None:
        lines.append(f"  its origin cannot be read: {document['origin_error']}")
    elif document["origin"] is not None:
        lines.append(f"  from {format_origin(document['origin'])}")

    def excerpt_lines(tokens: list[int], text: str | None) -> list[str]:
        if text is None:
            return [f"  {tokens}"]
        return [f"  | {line}" for line in printable_lines(text).splitlines()]

    lines += excerpt_lines(**head)
    if tail is not None:
        omitted = num_tokens - len(head["tokens"]) - len(tail["tokens"])
        lines += [f"  ... {omitted:,} tokens ..." if omitted else "  ...", *excerpt_lines(**tail)]
    return lines if head["text"] is not None else [*lines, "  (--tokenizer FILE decodes it)"]


def format_origin(origin: Mapping[str, Any] | None) -> str:
    """File, line and id for people."""
    if origin is None:
        return NO_ORIGINS
    kind = "row" if origin["byte_offset"] < 0 else "line"
    id_ = "" if origin["id"] is None else f", id {origin['id']}"
    return printable(f"{origin['source']} {kind} {origin['line']}{id_}")


@dataclass(frozen=True, kw_only=True)
class ShardsDescription:
    """A folder of shards in numbers. An *item* is a sequence, or a document.

    Attributes:
        folder: The folder.
        metadata: Its `metadata.json`, without the counts of the distribution.
        num_tokens: Number of tokens.
        num_bytes: Size of all `.bin` files.
        distribution: For the head, the shards and the windows of the
            output: the figures of `millrace.shuffling.permutations.Parts`. None: unknown.
        document: Number, shard, counts, head and tail of an item, as in `Description.document`.
    """

    folder: str
    metadata: shards.ShardsMetadata
    num_tokens: int
    num_bytes: int
    distribution: dict[str, dict[str, Any]] | None
    document: dict[str, Any] | None


def describe_shards(
    folder: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    tokenizer: Tokenizer | None = None,
    document: int = 0,
) -> ShardsDescription:
    """What a folder of shards holds, and one of its items.

    Args:
        folder: Folder of the shards.
        dtype: Dtype of the tokens, for metadata that do not say it; None: uint32.
        tokenizer: Tokenizer that decodes the item.
        document: Number of the sequence or document.

    Raises:
        ConfigError: A number out of range, or a dtype that token files cannot have.
        DataError: Metadata or shards that are missing, damaged or do not agree.
    """
    metadata = shards.read_metadata(folder, dtype=dtype)
    name = os.fspath(folder)
    storage = storage_of(name)
    prefixes = (shards.shard_prefix(name, number) for number in range(metadata.num_shards))
    num_bytes = sum(storage.stat(f"{prefix}.bin").size for prefix in prefixes)
    keys = ("head", "shards", "windows") if metadata.distribution else ()
    is_empty = metadata.num_items == 0
    return ShardsDescription(
        folder=name,
        metadata=replace(metadata, distribution={}),
        num_tokens=num_bytes // metadata.token_dtype.itemsize,
        num_bytes=num_bytes,
        distribution={key: parts_of(metadata, name, key).figures() for key in keys} or None,
        document=None if is_empty else _item(name, metadata, dtype, tokenizer, document),
    )


def _item(
    folder: str, metadata: shards.ShardsMetadata, dtype: str | None, tokenizer: Any, number: int
) -> dict[str, Any]:
    check_int(f"the document of {folder}", number, 0, metadata.num_items - 1)
    ends = np.cumsum(metadata.shard_sizes)
    shard = int(np.searchsorted(ends, number, side="right"))
    place = number - int(ends[shard]) + metadata.shard_sizes[shard]
    if metadata.has_documents:
        dataset = IndexedDataset(shards.shard_prefix(folder, shard))
        if place >= dataset.num_documents:
            raise DataError(
                f"{dataset.prefix}.idx has {dataset.num_documents} documents; metadata.json says "
                f"{metadata.shard_sizes[shard]}: `millrace verify` names the damage"
            )
        document = _describe_document(dataset, tokenizer, place)
    else:
        document = {"origin": None, "origin_error": None, "num_sequences": 1}
        document |= _excerpts_of(Shards(folder, dtype=dtype)[number], tokenizer)
    return {**document, "number": number, "shard": shard}


def parts_of(metadata: shards.ShardsMetadata, folder: str, key: str) -> Parts:
    """Counts of the domains, in the order of `domain_stats`, in parts of the output.

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
        counts = np.array(distribution[key]["counts"], np.int64)[:, columns]
        sums = counts.sum(axis=0)
        is_whole = (sums <= totals if key == "head" else sums == totals).all()
        if (counts < 0).any() or not (is_whole and counts.sum(axis=1).all()):
            raise ValueError
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError):
        raise DataError(
            f"{shards.metadata_path(folder)}: the {key} of the distribution do not fit "
            "domain_stats. The metadata are damaged, the shards may be whole: `millrace verify` "
            "says so. Shuffle again to have a distribution"
        ) from None
    return Parts(key.removesuffix("s"), tuple(domains), counts, totals)


def format_shards(description: ShardsDescription) -> str:
    """A description as text for people."""
    metadata = description.metadata
    length, total = metadata.seq_len, metadata.num_items
    item = "documents" if metadata.has_documents else "sequences"
    sizes = sorted({min(metadata.shard_sizes), max(metadata.shard_sizes)})
    rows = {
        "shuffled": f"{item}{'' if length is None else f' of {length:,} tokens'}",
        item: f"{total:,}",
        "tokens": f"{description.num_tokens:,} ({metadata.dtype})",
        "size": f"{description.num_bytes / 1e6:,.1f} MB",
        "shards": f"{metadata.num_shards:,} of {' to '.join(map('{:,}'.format, sizes))} {item}",
        "checksums": "yes" if metadata.checksums else "none",
        "seed": metadata.seed,
        "permutation": metadata.permutation,
        "carry": "yes" if metadata.carry else None,
        "inputs": f"{len(metadata.inputs):,} files" if metadata.inputs else None,
    }
    lines = [description.folder, *_labelled_lines(rows), "", f"  {item} of each domain"]
    shares = [(name, n, n / max(total, 1)) for name, n in metadata.domain_stats.items()]
    lines += _bar_lines((printable(name), one, f"{one:7.2%}  {n:,}") for name, n, one in shares)
    if description.distribution is not None:
        lines += ["", "  domains along the output, beside what chance gives"]
        lines += [f"  {format_figures(one)}" for one in description.distribution.values()]
    if description.document:
        shard = description.document["shard"]
        lines += _document_lines(description.document, item[:-1], f" (in shard {shard})")
    return "\n".join(lines)
