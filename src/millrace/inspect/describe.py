"""Describes an indexed dataset: counts, dtype, lengths, a document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.errors import ConfigError
from millrace.store import IndexedDataset
from millrace.text import Tokenizer

_SHOWN_TOKENS = 256
_BAR_WIDTH = 40
_BINS = np.concatenate(([0, 1], 2 ** np.arange(1, 32, dtype=np.int64)))


@dataclass(frozen=True, kw_only=True)
class Description:
    """An indexed dataset in numbers.

    Attributes:
        prefix: path prefix of the pair.
        dtype: of the tokens.
        num_documents, num_sequences, num_tokens: counts.
        num_bytes: of both files.
        lengths: minimum, median, mean and maximum length of a sequence, in tokens.
        histogram: (from, to, sequences): how many sequences have a length in [from, to].
        document: number, tokens (its first ones) and, with a tokenizer, text of one document.
    """

    prefix: str
    dtype: str
    num_documents: int
    num_sequences: int
    num_tokens: int
    num_bytes: int
    lengths: dict[str, float]
    histogram: list[tuple[int, int, int]]
    document: dict[str, Any] | None


def describe(
    dataset: IndexedDataset, *, tokenizer: Tokenizer | None = None, document: int = 0
) -> Description:
    """Counts, dtype, lengths and one document of an indexed dataset.

    Args:
        dataset: the token file.
        tokenizer: with which to decode the document.
        document: its number.

    Raises:
        ConfigError: no such document.
    """
    lengths = dataset.sequence_lengths
    return Description(
        prefix=dataset.prefix,
        dtype=str(dataset.dtype),
        num_documents=dataset.num_documents,
        num_sequences=len(dataset),
        num_tokens=dataset.num_tokens,
        num_bytes=dataset.num_bytes,
        lengths={
            "min": int(lengths.min()),
            "median": float(np.median(lengths)),
            "mean": float(lengths.mean()),
            "max": int(lengths.max()),
        }
        if len(lengths)
        else {},
        histogram=_histogram(lengths),
        document=_document(dataset, tokenizer, document) if dataset.num_documents else None,
    )


def _histogram(lengths: Any) -> list[tuple[int, int, int]]:
    counts, _ = np.histogram(lengths, bins=_BINS)
    filled = np.flatnonzero(counts)
    if len(filled) == 0:
        return []
    return [
        (int(_BINS[i]), int(_BINS[i + 1]) - 1, int(counts[i]))
        for i in range(filled[0], filled[-1] + 1)
    ]


def _document(dataset: IndexedDataset, tokenizer: Tokenizer | None, number: int) -> dict[str, Any]:
    if not 0 <= number < dataset.num_documents:
        raise ConfigError(
            f"there is no document {number}; {dataset.prefix} has 0 to {dataset.num_documents - 1}"
        )
    first, last = (int(entry) for entry in dataset.document_indices[number : number + 2])
    tokens = np.concatenate([*dataset[first:last], np.empty(0, dataset.dtype)])
    shown = tokens[:_SHOWN_TOKENS]
    return {
        "number": number,
        "num_sequences": last - first,
        "num_tokens": len(tokens),
        "tokens": shown.tolist(),
        "text": None if tokenizer is None else tokenizer.decode(shown),
    }


def format_description(description: Description) -> str:
    """The description as a person reads it."""
    lines = [
        f"{description.prefix}.bin/.idx",
        f"  documents  {description.num_documents:,}",
        f"  sequences  {description.num_sequences:,}",
        f"  tokens     {description.num_tokens:,} ({description.dtype})",
        f"  size       {description.num_bytes / 1e6:,.1f} MB",
    ]
    if description.lengths:
        shown = "   ".join(f"{name} {value:,.10g}" for name, value in description.lengths.items())
        lines += ["", f"  tokens in a sequence: {shown}"]
        most = max(count for _, _, count in description.histogram)
        for low, high, count in description.histogram:
            span = f"{low:,}" if low == high else f"{low:,} to {high:,}"
            bar = "#" * round(count / most * _BAR_WIDTH)
            lines.append(f"  {span:>20}  {bar:<{_BAR_WIDTH}}  {count:,}")
    if description.document:
        document = description.document
        more = "" if document["num_tokens"] <= _SHOWN_TOKENS else f" (the first {_SHOWN_TOKENS})"
        lines += ["", f"  document {document['number']}, {document['num_tokens']:,} tokens{more}:"]
        if document["text"] is None:
            lines.append(f"  {document['tokens']}")
            lines.append("  (--tokenizer FILE decodes it)")
        else:
            lines += [f"  | {line}" for line in document["text"].splitlines()]
    return "\n".join(lines)
