"""Encoders: libraries that turn texts into ids, each behind one function.

An encoder takes a list of texts and returns the ids of all of them in one array, and the number of
ids of each text. The fast ones never make a Python object per id. All of them run on the threads
that the environment of their library allows, which the workers of a job set to one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from millrace.checks import shown
from millrace.encoding.flat_ids import FlatIds, joined_ids, starts_and_ends, with_tokens
from millrace.encoding.sentencepiece_json import tokenizer_json, user_defined_symbols
from millrace.encoding.vocabularies import (
    SentencePieceVocabulary,
    TiktokenVocabulary,
    Vocabulary,
    import_package,
    is_of_the_process,
    rank_lines,
)
from millrace.errors import ConfigError, TextError

ENCODERS = ("fastokens", "tokenizers", "tiktoken", "sentencepiece", "bytes")
"""The names of the encoders; "auto" chooses among them."""

EncodeBatch = Callable[[list[str]], FlatIds]

# An older form of the pattern, which fastokens knows by heart: it matches the same.
_FASTOKENS_PATTERNS = {
    "cl100k_base": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def make_encoder(name: str, vocabulary: Vocabulary) -> EncodeBatch:
    """The encoder of a library for a vocabulary.

    Raises:
        ConfigError: A library that cannot read vocabularies of this kind, or lacks an option.
        TextError: A package that is not installed, or a vocabulary that the library refuses.
    """
    if name not in vocabulary.encoder_names:
        raise ConfigError(
            f"encoder is {shown(name)}; a vocabulary of {vocabulary.reference_name} has the "
            f"encoders auto, {', '.join(vocabulary.encoder_names)}"
        )
    if name == vocabulary.reference_name:
        return vocabulary.encode_batch
    try:
        return _fastokens(vocabulary)
    except (ConfigError, TextError):
        raise
    except BaseException as error:
        if is_of_the_process(error):
            raise
        raise TextError(f"{name} cannot read this vocabulary: {error}") from None


def _fastokens(vocabulary: Any) -> EncodeBatch:
    package = import_package("fastokens", "the encoder fastokens", "tokenizers")
    options = {"add_special_tokens": False, "split_special_tokens": False}
    if isinstance(vocabulary, TiktokenVocabulary):
        with _rank_file(vocabulary) as path:
            pattern = _FASTOKENS_PATTERNS.get(vocabulary.pattern_name, vocabulary.pattern)
            tokenizer = package.Tokenizer.from_tiktoken(
                path, pattern=pattern, special_tokens=vocabulary.special_ids
            )
        options["split_special_tokens"] = not vocabulary.special_tokens_in_text
    elif isinstance(vocabulary, SentencePieceVocabulary):
        content = tokenizer_json(vocabulary.content, vocabulary.path)
        tokenizer = package.Tokenizer.from_json_str(content)
    else:
        tokenizer = package.Tokenizer.from_json_str(vocabulary.content)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        options["add_special_tokens"] = vocabulary.add_special_tokens
        options["split_special_tokens"] = not vocabulary.special_tokens_in_text

    def encode_batch(texts: list[str]) -> FlatIds:
        ids, offsets = tokenizer.encode_batch_flat(texts, **options)
        bounds = np.frombuffer(offsets, np.uint64).astype(np.int64)
        return np.frombuffer(ids, np.uint32), np.diff(bounds)

    if isinstance(vocabulary, SentencePieceVocabulary):
        return _as_sentencepiece(encode_batch, vocabulary)
    return encode_batch


def _as_sentencepiece(
    encode_batch: EncodeBatch, vocabulary: SentencePieceVocabulary
) -> EncodeBatch:
    """Adds BOS, EOS and user-defined symbols to an encoder that knows none of them.

    Texts with user-defined symbols, or the names of bytes, are rare and left to sentencepiece.
    """
    library = vocabulary.library
    tokens = (library.bos_id(), library.eos_id()) if vocabulary.add_special_tokens else (-1, -1)
    # sentencepiece names a token that the model lacks -1.
    first, last = (None if token < 0 else token for token in tokens)
    symbols = user_defined_symbols(vocabulary.content)
    marks = symbols
    if symbols:  # one search for what all of them begin with takes less time than many
        pairs = zip(min(symbols), max(symbols), strict=False)
        prefix = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
        mark = "".join(character for character, _ in prefix)
        marks = [mark] if len(mark) > 1 else symbols
    marks = [*marks, "<0x"]  # fastokens takes "<0x0A>" for the byte if no merges form it

    def encode_plain(texts: list[str]) -> FlatIds:
        ids, lengths = encode_batch(texts)
        ids = with_tokens(ids, *starts_and_ends(lengths), first, last, ids.dtype)
        return ids, lengths + (first is not None) + (last is not None)

    def encode(texts: list[str]) -> FlatIds:
        others = [i for i, text in enumerate(texts) if any(mark in text for mark in marks)]
        if not others:
            return encode_plain(texts)
        plain_texts = list(texts)
        for i in others:
            plain_texts[i] = ""
        ids, lengths = encode_plain(plain_texts)
        parts = np.split(ids, np.cumsum(lengths)[:-1])
        for i in others:
            parts[i] = vocabulary.encode_batch([texts[i]])[0]
        return joined_ids(parts)

    return encode


@contextlib.contextmanager
def _rank_file(vocabulary: TiktokenVocabulary) -> Iterator[str]:
    """A file of the ranks in memory: fastokens reads only files."""
    number = os.memfd_create("ranks.tiktoken")
    try:
        with os.fdopen(os.dup(number), "wb") as file:
            file.write(rank_lines(vocabulary.ranks))
        yield f"/proc/self/fd/{number}"
    finally:
        os.close(number)
