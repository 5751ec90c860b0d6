"""Describes an indexed dataset: counts, dtype, lengths, special tokens, a document."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.encoding import Tokenizer
from millrace.errors import ConfigError, DataError
from millrace.provenance import has_origins, read_tokenizer
from millrace.store import IndexedDataset

_EXCERPT = 256  # tokens of a document's head, and of its tail
_BAR_WIDTH = 40
_BINS = [0, *(2**n for n in range(32))]  # of lengths: the start of each, and the end
_QUANTILES = {"p1": 0.01, "p10": 0.1, "median": 0.5, "p90": 0.9, "p99": 0.99}
_CHUNK = 4 << 20  # tokens that are counted at a time


@dataclass(frozen=True, kw_only=True)
class Description:
    """An indexed dataset in numbers.

    Attributes:
        prefix: Path prefix of the pair.
        dtype: Dtype of the tokens.
        num_documents, num_sequences, num_tokens: Counts.
        num_bytes: Size of both files.
        has_modes: Whether the dataset is multimodal.
        lengths: Sequence lengths in tokens: min, quantiles, mean, max; empty without sequences.
        document_lengths: Document lengths, likewise.
        histogram: (from, to, count): number of sequences with a length in [from, to].
        special_tokens: Occurrences of each special token of the tokenizer; None without tokenizer.
        document: Number, counts, head and tail of one document; None without documents. `head` and
            `tail` have `tokens` and, with a tokenizer, `text`; `tail` is None if the head is the
            whole document. `origin` has `source`, `line`, `byte_offset` and `id`, or is None if the
            pair has no sidecar of origins; `origin_error` says why it cannot be read, or is None.
        provenance: Origin of the tokens, from the sidecar; None without one.
        has_checksums: Whether `verify` can check every byte.
        has_origins: Whether there is a sidecar of the documents' origins.
        is_same_tokenizer: Whether the tokenizer wrote these tokens; None: not known.
        tokenizer_warning: A sentence about a tokenizer that did not write them, else None.
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

    With a tokenizer, all tokens are read to count the special ones; without, only the index.

    Args:
        dataset: The token file.
        tokenizer: Tokenizer that decodes the document.
        document: Number of the document.

    Raises:
        ConfigError: A document number out of range.
        DataError: A damaged sidecar.
    """
    lengths, info = dataset.sequence_lengths, dataset.info()
    is_same = warning = special_tokens = None
    if tokenizer is not None:
        special_tokens = _count_special(dataset, tokenizer)
        if (written_by := read_tokenizer(dataset.prefix)) is not None:
            is_same = written_by.is_same(tokenizer.fingerprints)
        if is_same is False:
            warning = (
                f"another tokenizer wrote these tokens: {written_by}, not {tokenizer.path} "
                f"({tokenizer.fingerprint[:12]}). Texts and special tokens below are wrong"
            )
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
        document=describe_document(dataset, tokenizer, document) if dataset.num_documents else None,
        provenance=None if info is None else info.provenance,
        has_checksums=info is not None and info.bin is not None,
        has_origins=has_origins(dataset.prefix),
        is_same_tokenizer=is_same,
        tokenizer_warning=warning,
    )


def _spread(lengths: NDArray[Any]) -> dict[str, float]:
    if len(lengths) == 0:
        return {}
    quantiles = np.quantile(lengths, list(_QUANTILES.values())).tolist()
    return {
        "min": int(lengths.min()),
        **dict(zip(_QUANTILES, quantiles, strict=True)),
        "mean": float(lengths.mean()),
        "max": int(lengths.max()),
    }


def _histogram(lengths: NDArray[Any]) -> list[tuple[int, int, int]]:
    """The bins from the first to the last that is not empty."""
    counts, _ = np.histogram(lengths, bins=_BINS)
    rows = [(low, end - 1, int(n)) for (low, end), n in zip(pairwise(_BINS), counts, strict=True)]
    occupied = np.flatnonzero(counts)
    return rows[occupied[0] : occupied[-1] + 1] if len(occupied) else []


def _count_special(dataset: IndexedDataset, tokenizer: Tokenizer) -> dict[str, int]:
    special_tokens = tokenizer.special_tokens()
    counts = dict.fromkeys(special_tokens, 0)
    for start in range(0, dataset.num_tokens, _CHUNK):
        part = dataset.tokens[start : start + _CHUNK]
        for text, number in special_tokens.items():
            counts[text] += int(np.count_nonzero(part == number))
    return counts


def describe_document(
    dataset: IndexedDataset, tokenizer: Tokenizer | None, number: int
) -> dict[str, Any]:
    """One document; see `Description.document`."""
    if not 0 <= number < dataset.num_documents:
        raise ConfigError(
            f"there is no document {number}; {dataset.prefix} has 0 to {dataset.num_documents - 1}"
        )
    first, last = dataset.document_indices[number : number + 2].tolist()
    tokens = dataset.document(number)
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
        "num_tokens": len(tokens),
        **excerpts_of(tokens, tokenizer),
    }


def excerpts_of(tokens: NDArray[Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Head and tail of a document; see `Description.document`."""

    def excerpt(part: NDArray[Any]) -> dict[str, Any]:
        text = None if tokenizer is None else tokenizer.decode(part)
        return {"tokens": part.tolist(), "text": text}

    rest = tokens[_EXCERPT:][-_EXCERPT:]
    return {"head": excerpt(tokens[:_EXCERPT]), "tail": excerpt(rest) if len(rest) else None}


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
    lines = [f"{description.prefix}.bin/.idx", *labelled_lines(rows)]
    lines += labelled_lines({name: str(v) for name, v in (description.provenance or {}).items()})
    if description.lengths:
        lines += ["", "  tokens in a sequence", f"  {_one_line(description.lengths)}"]
        most = max(count for _, _, count in description.histogram)
        lines += bar_lines(
            (f"{low:,}" if low == high else f"{low:,} to {high:,}", count / most, f"{count:,}")
            for low, high, count in description.histogram
        )
    if description.document_lengths and description.document_lengths != description.lengths:
        lines += ["", "  tokens in a document", f"  {_one_line(description.document_lengths)}"]
    if description.special_tokens:
        lines += ["", "  special tokens"]
        lines += [f"  {name:>20}  {n:,}" for name, n in description.special_tokens.items()]
    if description.document:
        lines += document_lines(description.document)
    return "\n".join(lines)


def labelled_lines(rows: Mapping[str, Any]) -> list[str]:
    """Lines of labels and values; values that are None are left out."""
    return [f"  {name:<10} {value}" for name, value in rows.items() if value is not None]


def bar_lines(rows: Iterable[tuple[str, float, str]]) -> list[str]:
    """Lines of labels, bars (a share of 1 is the longest) and values."""
    rows = list(rows)
    width = max((len(label) for label, _, _ in rows), default=0)
    return [
        f"  {label:>{width}}  {'#' * round(share * _BAR_WIDTH):<{_BAR_WIDTH}}  {value}"
        for label, share, value in rows
    ]


def document_lines(document: dict[str, Any], name: str = "document", place: str = "") -> list[str]:
    """Number, origin, head and tail of a document as lines of text."""
    number, num_tokens = document["number"], document["num_tokens"]
    head, tail = document["head"], document["tail"]
    lines = ["", f"  {name} {number}{place}, {num_tokens:,} tokens:"]
    if document["origin_error"] is not None:
        lines.append(f"  its origin cannot be read: {document['origin_error']}")
    elif document["origin"] is not None:
        lines.append(f"  from {_origin_line(**document['origin'])}")
    lines += _excerpt_lines(head)
    if tail is not None:
        omitted = num_tokens - len(head["tokens"]) - len(tail["tokens"])
        lines.append(f"  ... {omitted:,} tokens ..." if omitted else "  ...")
        lines += _excerpt_lines(tail)
    if head["text"] is None:
        lines.append("  (--tokenizer FILE decodes it)")
    return lines


def _origin_line(source: str, line: int, byte_offset: int, id: str | None) -> str:  # noqa: A002
    place = f"row {line}" if byte_offset < 0 else f"line {line}, byte {byte_offset}"
    return f"{source}, {place}" + ("" if id is None else f", id {id}")


def _one_line(spread: dict[str, float]) -> str:
    return "   ".join(f"{name} {value:,.10g}" for name, value in spread.items())


def _excerpt_lines(excerpt: dict[str, Any]) -> list[str]:
    if excerpt["text"] is None:
        return [f"  {excerpt['tokens']}"]
    return [f"  | {line}" for line in excerpt["text"].splitlines()]
