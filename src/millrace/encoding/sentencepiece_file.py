"""Sentencepiece models, also as a tokenizer.json for the encoder that reads only that."""

from __future__ import annotations

import base64
import itertools
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from millrace.checks import package
from millrace.deferred import cached_property
from millrace.encoding import flat_ids
from millrace.encoding.vocabulary import Options, Vocabulary, sha256
from millrace.errors import TextError

_BPE = 2  # TrainerSpec.model_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6  # SentencePiece.type
_UNMATCHED = (_UNKNOWN, _CONTROL, _USER_DEFINED)
_SPACE = "\u2581"  # sentencepiece writes a space as this character


@dataclass(frozen=True)
class SentencePieceVocabulary(Vocabulary):
    """A sentencepiece model; control symbols in texts are plain text."""

    path: str
    content: bytes
    options: Options

    reference_name = "sentencepiece"
    encoder_names = ("fastokens", "sentencepiece")
    option_names = ("add_special_tokens",)

    @classmethod
    def matches(cls, path: str, content: bytes) -> bool:
        return content[:1] == b"\n" or path.endswith(".model")

    @classmethod
    def load(cls, path: str, content: bytes, options: Options) -> SentencePieceVocabulary:
        vocabulary = cls(path, content, options)
        _ = vocabulary.library  # fails here if the file is damaged
        return vocabulary

    @cached_property
    def library(self) -> Any:
        """The `SentencePieceProcessor`."""
        sentencepiece = package("sentencepiece")
        try:
            processor = sentencepiece.SentencePieceProcessor()
            processor.LoadFromSerializedProto(self.content)
            if processor.get_piece_size() < 1:
                raise ValueError("it has no pieces")
        except (RuntimeError, ValueError, OSError) as error:
            raise TextError(f"{self.path} is not a tokenizer file: {error}. Copy it anew") from None
        return processor

    @cached_property
    def size(self) -> int:
        return int(self.library.get_piece_size())

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

    def id_of(self, token: str) -> int | None:
        number = int(self.library.piece_to_id(token))
        is_other = number == self.library.unk_id() and self._piece(number) != token
        return None if is_other else number

    def special_tokens(self) -> dict[str, int]:
        numbers = filter(self.library.is_control, range(self.size))
        return {self.library.id_to_piece(number): number for number in numbers}

    def added_tokens(self) -> list[str]:
        return [*user_defined_symbols(self.content), *self.special_tokens()]

    def decode(self, ids: list[int]) -> str:
        parts: list[str] = []
        for is_control, numbers in itertools.groupby(ids, self.library.is_control):
            run = list(numbers)
            parts += self.library.id_to_piece(run) if is_control else [self.library.decode(run)]
        return "".join(parts)

    def encode_batch(self, texts: list[str]) -> flat_ids.FlatIds:
        bos, eos = (token is not None for token in self._ends())
        options = {"add_bos": bos, "add_eos": eos, "num_threads": 1, "out_type": "numpy"}
        return flat_ids.joined_ids(self.library.encode(texts, **options))

    def _ends(self) -> tuple[int | None, int | None]:
        """The tokens to add before and after each text."""
        has_ends = self.options.add_special_tokens
        ids = self.library.bos_id(), self.library.eos_id()
        # sentencepiece names a token that the model lacks -1.
        first, last = (token if has_ends and token >= 0 else None for token in ids)
        return first, last

    def fast_encoder(self) -> flat_ids.EncodeBatch:
        """fastokens knows no user-defined symbols and mistakes the names of bytes: sentencepiece
        encodes texts with these, which are rare."""
        content = tokenizer_json(self.content, self.path)
        encode_batch = self.fastokens(lambda library: library.from_json_str(content))
        first, last = self._ends()
        symbols = user_defined_symbols(self.content)
        # One search for the start of all symbols takes less time than many.
        prefix = os.path.commonprefix(symbols)  # noqa: RUF071
        # fastokens takes "<0x0A>" for the byte if no merges form it.
        marks = [*([prefix] if len(prefix) > 1 else symbols), "<0x"]

        def encode(texts: list[str]) -> flat_ids.FlatIds:
            ids, lengths = encode_batch(texts)
            ids = flat_ids.with_tokens(
                ids, *flat_ids.starts_and_ends(lengths), first, last, ids.dtype
            )
            lengths = lengths + (first is not None) + (last is not None)
            others = [i for i, text in enumerate(texts) if any(mark in text for mark in marks)]
            if not others:
                return ids, lengths
            parts = flat_ids.split_ids(ids, lengths)
            for i in others:
                parts[i] = self.encode_batch([texts[i]])[0]
            return flat_ids.joined_ids(parts)

        return encode


def user_defined_symbols(model: bytes) -> list[str]:
    """The pieces that sentencepiece matches in texts as a whole."""
    pieces = [_piece(value) for number, value in _fields(model) if number == 1]
    return [piece for piece, _, kind in pieces if kind == _USER_DEFINED]


def tokenizer_json(model: bytes, path: str) -> str:
    """The tokenizer.json of a sentencepiece model; TextError if it cannot express the model.

    It has no added tokens: sentencepiece does not match control symbols, and a tokenizer.json
    cannot express how user-defined ones are matched.
    """
    fields = list(_fields(model))
    pieces = [_piece(value) for number, value in fields if number == 1]
    last = dict(fields)  # of fields with one number, the last counts
    trainer, normalizer = dict(_fields(last.get(2, b""))), dict(_fields(last.get(3, b"")))
    kinds = [kind for _, _, kind in pieces]
    symbols = "".join(user_defined_symbols(model))
    scores = {piece: score for piece, score, kind in pieces if kind == _NORMAL}
    lonely = next((piece for piece in scores if not scores.keys() >= set(piece)), None)
    known = {_NORMAL, *_UNMATCHED, _BYTE}
    has_such_symbols = symbols and (normalizer.get(2) or " " in symbols or _SPACE in symbols)
    problems = {
        "is not a BPE model": trainer.get(3, 1) != _BPE,
        "has unused pieces": not kinds or not set(kinds) <= known,
        "has user-defined symbols with spaces or with a normalization": has_such_symbols,
        "writes spaces elsewhere than before a word": trainer.get(24) or not normalizer.get(5, 1),
        "has rules for the normalization of decoded text": normalizer.get(6) or last.get(5),
        f"has the piece {lonely!r}, but not all of its characters": lonely is not None,
    }
    for problem in filter(problems.get, problems):
        raise TextError(f"{path} {problem}, which only sentencepiece itself can encode")
    # A name with a space never matches: the normalizer replaces all spaces.
    names = [f"{piece} " if kind in _UNMATCHED else piece for piece, _, kind in pieces]
    bpe = {
        "type": "BPE",
        "unk_token": names[kinds.index(_UNKNOWN)],
        "fuse_unk": True,
        "byte_fallback": bool(trainer.get(35, 0)),
        "ignore_merges": False,
        "vocab": {name: number for number, name in enumerate(names)},
        "merges": _merges(scores),
    }
    steps = {"type": "Sequence", "normalizers": _normalizers(normalizer)}
    return json.dumps({"version": "1.0", "added_tokens": [], "normalizer": steps, "model": bpe})


def _merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """All pairs of pieces that form a piece, by its score; sentencepiece merges in this order.

    Of the pairs that form one piece, that with the longest left part comes first: sentencepiece
    merges a run of one character from the left.
    """
    merges = [
        (-score, -end, piece[:end], piece[end:])
        for piece, score in scores.items()
        for end in range(1, len(piece))
        if piece[:end] in scores and piece[end:] in scores
    ]
    merges.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in merges]


def _normalizers(spec: dict[int, Any]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    if spec.get(2):
        characters = base64.b64encode(spec[2]).decode()
        parts += [{"type": "Precompiled", "precompiled_charsmap": characters}]
    if spec.get(4, 1):
        parts += [{"type": "Strip", "strip_left": True, "strip_right": True}]
        parts += [{"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}]
    if spec.get(3, 1):
        parts += [{"type": "Prepend", "prepend": _SPACE}]
    return [*parts, {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]


def _piece(message: bytes) -> tuple[str, float, int]:
    """The text, score and type of a piece."""
    values = dict(_fields(message))
    (score,) = struct.unpack("<f", values.get(2, bytes(4)))
    return values.get(1, b"").decode(), score, values.get(3, _NORMAL)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message: whole numbers, or bytes for any other type."""
    place = 0

    def varint() -> int:
        nonlocal place
        byte = message[place]
        place += 1
        return byte if byte < 0x80 else byte - 0x80 + 0x80 * varint()

    while place < len(message):
        key = varint()
        wire_type = key & 7
        if wire_type == 0:
            yield key >> 3, varint()
        else:
            size = varint() if wire_type == 2 else {1: 8, 5: 4}[wire_type]
            yield key >> 3, message[place : place + size]
            place += size
