"""Rows into documents of tokens: what an encoder of rows is, and that of plain texts."""

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeGuard, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from millrace.checks import check_bool, shown
from millrace.encoding.flat_ids import starts_and_ends, with_tokens
from millrace.encoding.tokenizer import Tokenizer, checked_tokenizer
from millrace.errors import ConfigError, TextError
from millrace.ragged import sizes_of
from millrace.text.json_values import BadDocumentError, text_at, texts_of

_LONGEST_CHECK = 20_000  # characters of a text that `checked` compares: the reference is slow


class EncodedRows(NamedTuple):
    """Documents made of rows: token ids, and which of them are trained on.

    Attributes:
        tokens: Tokens of all documents, one after the other: [n] of the encoder's dtype.
        ends: Where each document ends among the tokens: int64 [documents].
        trained: Whether each token is trained on: bool [n]. None: all are.
        counts: Number of documents of each row, 0 for a bad one: int64 [rows].
        problems: Reason of each bad row, by its place among the rows. The others are whole.
        report: Counts for people, which add up over batches.
    """

    tokens: NDArray[Any]
    ends: NDArray[np.int64]
    trained: NDArray[np.bool_] | None
    counts: NDArray[np.int64]
    problems: dict[int, str]
    report: Mapping[str, int] = {}


@runtime_checkable
class RowEncoder(Protocol):
    """Rows (dictionaries) into documents of tokens. Picklable: it goes to worker processes."""

    @property
    def dtype(self) -> np.dtype[Any]: ...  # of the tokens

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> EncodedRows:
        """The documents of some rows; each row's depend on that row alone."""

    def fingerprint(self) -> dict[str, Any]:
        """All that decides the tokens, as plain values."""


def check_encoder(name: str, encoder: Any, pad_token: int | None = None) -> RowEncoder:
    """An encoder of rows, which ends nothing with the padding token; else a ConfigError."""
    if not isinstance(encoder, RowEncoder) or not callable(encoder.fingerprint):
        remedy = "give TextRows(tokenizer), or another RowEncoder"
        raise ConfigError(f"{name} is a {type(encoder).__name__}: {remedy}")
    if pad_token is not None and pad_token in getattr(encoder, "edge_tokens", ()):
        raise ConfigError(
            f"pad_token is {pad_token}, with which documents or turns begin or end: it would "
            "become token 0 and not be trained on. Leave pad_token out: rows need none"
        )
    return encoder


def encode_rows(encoder: RowEncoder, rows: Sequence[Mapping[str, Any]]) -> EncodedRows:
    """The documents of some rows; ConfigError if an encoder's arrays do not fit each other."""
    encoded = encoder.encode(rows)
    with contextlib.suppress(AttributeError, IndexError, TypeError, ValueError):
        tokens, ends, trained, counts, problems, report = encoded
        sizes, bad = sizes_of(ends), set(np.flatnonzero(counts == 0).tolist())
        if (
            len(counts) == len(rows)
            and counts.sum() == len(ends)
            and sizes.sum() == len(tokens)
            and tokens.dtype == encoder.dtype
            and (trained is None or (trained.dtype == np.bool_ and len(trained) == len(tokens)))
            and min(sizes.min(initial=0), counts.min(initial=0)) >= 0
            and bad == problems.keys()
            and all(type(count) is int for count in report.values())
        ):
            return encoded
    raise ConfigError(
        f"{type(encoder).__name__}.encode returned {shown(encoded, 400)} for {len(rows)} rows, "
        "which does not fit them or itself: see EncodedRows"
    )


class EncodedTexts(NamedTuple):
    """The tokens of documents, each of any number of sequences."""

    tokens: NDArray[Any]  # of all sequences, one after the other: [tokens]
    lengths: NDArray[np.int64]  # of each sequence in tokens, at least 1: int64 [sequences]
    counts: NDArray[np.int64]  # of the sequences of each document: int64 [documents]


def encode_texts(
    tokenizer: Tokenizer,
    documents: Sequence[Sequence[str]],
    first_token: int | None,
    last_token: int | None,
) -> EncodedTexts:
    """The tokens of documents, as Megatron-LM's script makes them.

    Each text is a sequence; those without tokens are dropped. In each document with tokens, the
    first sequence begins with the first token, and the last one ends with the last token.
    """
    ids, lengths = tokenizer.encode_batch(list(itertools.chain.from_iterable(documents)))
    counts = np.fromiter(map(len, documents), np.int64, len(documents))
    numbers = np.repeat(np.arange(len(documents)), counts)[lengths > 0]
    lengths = lengths[lengths > 0]
    starts, ends = starts_and_ends(lengths)
    first = np.diff(numbers, prepend=-1) > 0  # sequence of a document
    last = np.diff(numbers, append=len(documents)) > 0
    tokens = with_tokens(ids, starts[first], ends[last], first_token, last_token, tokenizer.dtype)
    lengths[first] += first_token is not None
    lengths[last] += last_token is not None
    return EncodedTexts(tokens, lengths, np.bincount(numbers, minlength=len(documents)))


class TextRows:
    """The encoder of plain texts: a row's text is a document, as `tokenize` makes it.

    A text is encoded as it is, and a list of texts one by one. A document without tokens gets
    neither BOS nor EOD.

    Args:
        tokenizer: The tokenizer.
        key: Key of the text; if a row has none of that name, dots reach into objects.
        append_eod: Whether documents end with the end-of-document token.
        prepend_bos: Whether documents start with the beginning-of-document token.

    Raises:
        ConfigError: An argument of a wrong type, or a tokenizer without BOS.
        TextError: A tokenizer without an end-of-document token.

    Example:
        >>> rows = TextRows(Tokenizer("bytes"))
        >>> encoded = rows.encode([{"text": "mill"}, {"text": ""}, {"name": "race"}])
        >>> encoded.tokens.tolist(), encoded.ends.tolist(), encoded.counts.tolist()
        ([109, 105, 108, 108, 256], [5, 5], [1, 1, 0])
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        key: str = "text",
        append_eod: bool = True,
        prepend_bos: bool = False,
    ) -> None:
        if not isinstance(tokenizer, Tokenizer) or not isinstance(key, str):
            what = f"tokenizer {shown(tokenizer)} and key {shown(key)}"
            raise ConfigError(f"{what} must be a millrace.encoding.Tokenizer and a text")
        self.tokenizer, self.key, self.dtype = tokenizer, key, tokenizer.dtype
        self.append_eod = check_bool("append_eod", append_eod)
        self.prepend_bos = check_bool("prepend_bos", prepend_bos)
        self.edge_tokens = tokenizer.edge_tokens(self.prepend_bos, self.append_eod)

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> EncodedRows:
        """See `RowEncoder.encode`; a document for each row that has a text."""
        problems: dict[int, str] = {}
        texts: list[list[str]] = []
        for place, row in enumerate(rows):
            try:
                texts.append(self._texts(row))
            except BadDocumentError as error:
                problems[place] = str(error)
                texts.append([])
        try:
            encoded = self._encode(texts)
        except TextError:
            for place, parts in enumerate(texts):
                try:
                    self._encode([parts])
                except TextError as error:
                    problems[place], texts[place] = str(error), []
            encoded = self._encode(texts)
        counts = np.ones(len(texts), np.int64)
        counts[list(problems)] = 0
        ends = np.append(0, np.cumsum(encoded.lengths))[np.cumsum(encoded.counts)[counts > 0]]
        return EncodedRows(encoded.tokens, ends, None, counts, problems)

    def _texts(self, row: Any) -> list[str]:
        return list(texts_of([text_at(row, self.key)]))

    def _encode(self, texts: Sequence[list[str]]) -> EncodedTexts:
        return encode_texts(self.tokenizer, texts, *self.edge_tokens)

    def checked(self, rows: Sequence[Mapping[str, Any]]) -> "TextRows":
        """The same with an encoder that agrees with the reference library on some rows' texts."""
        texts: list[str] = []
        for row in rows:
            with contextlib.suppress(BadDocumentError):
                texts += self._texts(row)
        tokenizer, _ = checked_tokenizer(self.tokenizer, (one[:_LONGEST_CHECK] for one in texts))
        return TextRows(tokenizer, self.key, self.append_eod, self.prepend_bos)

    def fingerprint(self) -> dict[str, Any]:
        """See `RowEncoder.fingerprint`."""
        tokenizer = self.tokenizer
        entries: dict[str, Any] = {"kind": "texts", "key": self.key, "edges": [*self.edge_tokens]}
        if type(self) is not TextRows:  # which encodes in its own way
            entries["class"] = type(self).__qualname__
        entries |= {"tokenizer": tokenizer.fingerprint, "versions": tokenizer.versions}
        return {**entries, **tokenizer.options}


def is_plain(encoder: RowEncoder) -> TypeGuard[TextRows]:
    """Whether the documents are those that `tokenize` makes of the rows' texts: one for each row,
    without a mask. A derived class may make others."""
    return type(encoder) is TextRows
