"""Describes an indexed dataset: counts, dtype, lengths, special tokens, a document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.errors import ConfigError
from millrace.store import IndexedDataset
from millrace.text import Tokenizer

_SHOWN_TOKENS = 256  # at a document's head, and at its tail
_BAR_WIDTH = 40
_BINS = np.concatenate(([0, 1], 2 ** np.arange(1, 32, dtype=np.int64)))
_QUANTILES = {"p1": 0.01, "p10": 0.1, "median": 0.5, "p90": 0.9, "p99": 0.99}
_CHUNK = 4 << 20  # tokens that are counted at a time


@dataclass(frozen=True, kw_only=True)
class Description:
    """An indexed dataset in numbers.

    Attributes:
        prefix: path prefix of the pair.
        dtype: of the tokens.
        num_documents, num_sequences, num_tokens: counts.
        num_bytes: of both files.
        has_modes: whether it is multimodal.
        lengths: of sequences, in tokens: min, quantiles, mean, max; empty without sequences.
        document_lengths: the same of documents.
        histogram: (from, to, sequences): how many sequences have a length in [from, to].
        special_tokens: how often each of the tokenizer's special tokens occurs; None without one.
        document: number, counts, head and tail of one document; None without documents. Its
            `head` and `tail` hold `tokens` and, with a tokenizer, `text`; `tail` is None if the
            head is all of it.
        provenance: what the sidecar says of where the files come from; None without one.
        has_checksums: whether `verify` can check every byte.
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


def describe(
    dataset: IndexedDataset, *, tokenizer: Tokenizer | None = None, document: int = 0
) -> Description:
    """Counts, dtype, lengths and one document of an indexed dataset.

    With a tokenizer every token is read, to count the special ones; without, the index alone.

    Args:
        dataset: the token file.
        tokenizer: with which to decode the document.
        document: its number.

    Raises:
        ConfigError: no such document.
        DataError: the sidecar is damaged.
    """
    lengths = dataset.sequence_lengths
    info = dataset.info()
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
        special_tokens=None if tokenizer is None else _special_tokens(dataset, tokenizer),
        document=_document(dataset, tokenizer, document) if dataset.num_documents else None,
        provenance=None if info is None else info.provenance,
        has_checksums=info is not None and info.bin is not None,
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
    counts, _ = np.histogram(lengths, bins=_BINS)
    filled = np.flatnonzero(counts)
    if len(filled) == 0:
        return []
    return [
        (int(_BINS[i]), int(_BINS[i + 1]) - 1, int(counts[i]))
        for i in range(filled[0], filled[-1] + 1)
    ]


def _special_tokens(dataset: IndexedDataset, tokenizer: Tokenizer) -> dict[str, int]:
    special = tokenizer.special_tokens()
    counts = dict.fromkeys(special, 0)
    for start in range(0, dataset.num_tokens, _CHUNK):
        part = dataset.tokens[start : start + _CHUNK]
        for text, number in special.items():
            counts[text] += int(np.count_nonzero(part == number))
    return counts


def _document(dataset: IndexedDataset, tokenizer: Tokenizer | None, number: int) -> dict[str, Any]:
    if not 0 <= number < dataset.num_documents:
        raise ConfigError(
            f"there is no document {number}; {dataset.prefix} has 0 to {dataset.num_documents - 1}"
        )
    first, last = (int(entry) for entry in dataset.document_indices[number : number + 2])
    tokens = dataset.document(number)

    def shown(part: NDArray[Any]) -> dict[str, Any]:
        text = None if tokenizer is None else tokenizer.decode(part)
        return {"tokens": part.tolist(), "text": text}

    has_tail = len(tokens) > _SHOWN_TOKENS
    tail = tokens[max(_SHOWN_TOKENS, len(tokens) - _SHOWN_TOKENS) :]
    return {
        "number": number,
        "num_sequences": last - first,
        "num_tokens": len(tokens),
        "head": shown(tokens[:_SHOWN_TOKENS]),
        "tail": shown(tail) if has_tail else None,
    }


def format_description(description: Description) -> str:
    """The description as a person reads it."""
    lines = [
        f"{description.prefix}.bin/.idx",
        f"  documents  {description.num_documents:,}",
        f"  sequences  {description.num_sequences:,}{' with modes' * description.has_modes}",
        f"  tokens     {description.num_tokens:,} ({description.dtype})",
        f"  size       {description.num_bytes / 1e6:,.1f} MB",
        f"  checksums  {'yes' if description.has_checksums else 'none'}",
    ]
    if description.provenance:
        lines += [f"  {key:<10} {value}" for key, value in description.provenance.items()]
    if description.lengths:
        lines += ["", "  tokens in a sequence"]
        lines.append(f"  {_one_line(description.lengths)}")
        most = max(count for _, _, count in description.histogram)
        for low, high, count in description.histogram:
            span = f"{low:,}" if low == high else f"{low:,} to {high:,}"
            bar = "#" * round(count / most * _BAR_WIDTH)
            lines.append(f"  {span:>20}  {bar:<{_BAR_WIDTH}}  {count:,}")
    if description.document_lengths and description.document_lengths != description.lengths:
        lines += ["", "  tokens in a document", f"  {_one_line(description.document_lengths)}"]
    if description.special_tokens:
        lines += ["", "  special tokens"]
        lines += [f"  {name:>20}  {n:,}" for name, n in description.special_tokens.items()]
    if description.document:
        lines += _document_lines(description.document)
    return "\n".join(lines)


def _one_line(spread: dict[str, float]) -> str:
    return "   ".join(f"{name} {value:,.10g}" for name, value in spread.items())


def _document_lines(document: dict[str, Any]) -> list[str]:
    lines = ["", f"  document {document['number']}, {document['num_tokens']:,} tokens:"]
    for part in ("head", "tail"):
        if document[part] is None:
            continue
        if part == "tail":
            left_out = document["num_tokens"] - sum(
                len(document[name]["tokens"]) for name in ("head", "tail")
            )
            lines.append(f"  ... {left_out:,} tokens ..." if left_out else "  ...")
        if document[part]["text"] is None:
            lines.append(f"  {document[part]['tokens']}")
        else:
            lines += [f"  | {line}" for line in document[part]["text"].splitlines()]
    if document["head"]["text"] is None:
        lines.append("  (--tokenizer FILE decodes it)")
    return lines
