"""Token ids of many documents in flat arrays, from the encoder to the file."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace.encoding.flat_ids import starts_and_ends, with_tokens
from millrace.store import IndexedDatasetBuilder
from millrace.tokenizing.tokenize_options import TokenizeOptions


class Column(NamedTuple):
    """The tokens of one key of a batch of documents.

    Attributes:
        tokens: Tokens of all sequences, one after the other: [tokens].
        lengths: Length of each sequence in tokens, int64 [sequences]. If `counts` is None, each
            document is one sequence, and 0 stands for a document without tokens.
        counts: Number of sequences of each document, int64 [documents], or None.
    """

    tokens: NDArray[Any]
    lengths: NDArray[np.int64]
    counts: NDArray[np.int64] | None = None

    def select(self, mask: NDArray[np.bool_]) -> Column:
        """The documents where `mask`, bool [documents], is True."""
        if mask.all():
            return self
        sequences = mask if self.counts is None else np.repeat(mask, self.counts)
        counts = None if self.counts is None else self.counts[mask]
        tokens = self.tokens[np.repeat(sequences, self.lengths)]
        return Column(tokens, self.lengths[sequences], counts)

    def add_to(self, builder: IndexedDatasetBuilder) -> None:
        """Appends the documents to an indexed dataset."""
        if self.counts is None:
            builder.add_documents(self.tokens, self.lengths)
            return
        sequence = token = 0
        for count in self.counts.tolist():
            lengths = self.lengths[sequence : sequence + count]
            num_tokens = int(lengths.sum())
            builder.add_document(self.tokens[token : token + num_tokens], lengths)
            sequence += count
            token += num_tokens


def encode_column(texts: Sequence[str | list[str]], options: TokenizeOptions) -> Column:
    """The tokens of documents, as Megatron-LM's script makes them.

    A text is one sequence, or one for each sentence if there is a splitter; a list of texts has one
    for each. Sequences without tokens are dropped. The first and the last token of the options
    stand before the first, and after the last sequence of each document with at least one token, as
    part of that sequence.
    """
    tokenizer, splitter = options.tokenizer, options.splitter
    first_token, last_token = options.first_token, options.last_token

    def add_tokens(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[Any]:
        return with_tokens(ids, starts, ends, first_token, last_token, tokenizer.dtype)

    if splitter is None and all(type(text) is str for text in texts):
        ids, lengths = tokenizer.encode_batch(texts)  # type: ignore[arg-type]
        starts, ends = starts_and_ends(lengths)
        is_full = lengths > 0
        lengths = lengths + is_full * ((first_token is not None) + (last_token is not None))
        return Column(add_tokens(starts[is_full], ends[is_full]), lengths)
    parts = [
        text if isinstance(text, list) else splitter.split(text) if splitter else [text]
        for text in texts
    ]
    ids, lengths = tokenizer.encode_batch(list(itertools.chain.from_iterable(parts)))
    sizes = np.fromiter(map(len, parts), np.int64, len(parts))
    documents = np.repeat(np.arange(len(parts)), sizes)[lengths > 0]
    lengths = lengths[lengths > 0]
    counts = np.bincount(documents, minlength=len(parts))
    starts, ends = starts_and_ends(lengths)
    last = np.cumsum(counts)[counts > 0] - 1  # the last sequence of each document
    first = last - counts[counts > 0] + 1
    tokens = add_tokens(starts[first], ends[last])
    lengths[first] += first_token is not None
    lengths[last] += last_token is not None
    return Column(tokens, lengths, counts)
