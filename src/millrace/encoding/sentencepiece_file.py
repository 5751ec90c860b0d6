"""Sentencepiece models."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from millrace.encoding.flat_ids import FlatIds, joined_ids, starts_and_ends, with_tokens
from millrace.encoding.sentencepiece_json import tokenizer_json, user_defined_symbols
from millrace.encoding.vocabulary import (
    EncodeBatch,
    VocabularyOptions,
    content_of,
    fastokens_encoder,
    import_package,
    sha256,
)
from millrace.errors import TextError


@dataclass(frozen=True)
class SentencePieceVocabulary:
    """A sentencepiece model. As in sentencepiece, control symbols are plain text in a text."""

    path: str
    content: bytes
    options: VocabularyOptions

    reference_name = "sentencepiece"
    encoder_names = ("fastokens", "sentencepiece")
    option_names = ("add_special_tokens",)

    @classmethod
    def matches(cls, path: str, content: bytes) -> bool:
        return content[:1] == b"\n" or path.endswith(".model")

    @classmethod
    def load(cls, path: str, content: bytes, options: VocabularyOptions) -> SentencePieceVocabulary:
        vocabulary = cls(path, content, options)
        _ = vocabulary.library  # fails here if the file is damaged
        return vocabulary

    @cached_property
    def library(self) -> Any:
        """The `SentencePieceProcessor`."""
        sentencepiece = import_package("sentencepiece", f"reading {self.path}", "encoders")
        try:
            processor = sentencepiece.SentencePieceProcessor()
            processor.LoadFromSerializedProto(self.content)
            if processor.get_piece_size() < 1:
                raise ValueError("it has no pieces")
        except (RuntimeError, ValueError, OSError) as error:
            raise TextError(
                f"{self.path} is not a tokenizer file ({error}). Give a sentencepiece model"
            ) from None
        return processor

    @cached_property
    def size(self) -> int:
        return int(self.library.get_piece_size())

    @property
    def largest_id(self) -> int:
        return self.size - 1

    @cached_property
    def eod_token(self) -> str | None:
        return self._piece(self.library.eos_id())

    @cached_property
    def bos_token(self) -> str | None:
        return self._piece(self.library.bos_id())

    def _piece(self, number: int) -> str | None:
        return None if number < 0 else str(self.library.id_to_piece(number))

    @cached_property
    def fingerprint(self) -> str:
        return sha256(self.content)

    @property
    def file_sha256(self) -> str:
        return self.fingerprint

    def id_of(self, token: str) -> int | None:
        number = int(self.library.piece_to_id(token))
        is_other = number == self.library.unk_id() and self._piece(number) != token
        return None if is_other else number

    def special_tokens(self) -> dict[str, int]:
        numbers = filter(self.library.is_control, range(self.size))
        return {str(self.library.id_to_piece(number)): number for number in numbers}

    def added_tokens(self) -> list[str]:
        return [*user_defined_symbols(self.content), *self.special_tokens()]

    def decode(self, ids: list[int]) -> str:
        parts = []
        for is_control, numbers in itertools.groupby(ids, self.library.is_control):
            run = list(numbers)
            if is_control:
                parts += [self.library.id_to_piece(number) for number in run]
            else:
                parts.append(self.library.decode(run))
        return "".join(parts)

    def encode_batch(self, texts: list[str]) -> FlatIds:
        has_ends = self.options.add_special_tokens
        bos = has_ends and self.library.bos_id() >= 0
        eos = has_ends and self.library.eos_id() >= 0
        arrays = self.library.encode(
            texts, add_bos=bos, add_eos=eos, num_threads=1, out_type="numpy"
        )
        return joined_ids(arrays)

    def fast_encoder(self) -> EncodeBatch:
        """The fast encoder, which knows neither BOS, EOS nor user-defined symbols.

        Texts with user-defined symbols, or the names of bytes, are rare and left to sentencepiece.
        """
        content = tokenizer_json(self.content, self.path)
        encode_batch = fastokens_encoder(lambda tokenizers: tokenizers.from_json_str(content))
        ends = (self.library.bos_id(), self.library.eos_id())
        # sentencepiece names a token that the model lacks -1.
        first, last = (
            token if self.options.add_special_tokens and token >= 0 else None for token in ends
        )
        marks = _marks(self.content)

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
                parts[i] = self.encode_batch([texts[i]])[0]
            return joined_ids(parts)

        return encode

    def __getstate__(self) -> dict[str, Any]:
        return content_of(self)


def _marks(model: bytes) -> list[str]:
    """Strings of which a text has one if it has a user-defined symbol, or the name of a byte."""
    # fastokens takes "<0x0A>" for the byte if no merges form it.
    symbols, byte_mark = user_defined_symbols(model), "<0x"
    if not symbols:
        return [byte_mark]
    # One search for what all of them begin with takes less time than many.
    pairs = zip(min(symbols), max(symbols), strict=False)
    prefix = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
    mark = "".join(character for character, _ in prefix)
    return [*([mark] if len(mark) > 1 else symbols), byte_mark]
