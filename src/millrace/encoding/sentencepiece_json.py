"""A sentencepiece BPE model as a tokenizer.json, for the encoders that read only that."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from typing import Any

from millrace.errors import TextError

_BPE = 2  # TrainerSpec.model_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6  # SentencePiece.type
_UNMATCHED = (_UNKNOWN, _CONTROL, _USER_DEFINED)
_SPACE = "\u2581"  # sentencepiece writes a space as this character


def user_defined_symbols(model: bytes) -> list[str]:
    """The pieces that sentencepiece matches in texts as a whole."""
    pieces = [_piece(value) for number, value in _fields(model) if number == 1]
    return [piece for piece, _, kind in pieces if kind == _USER_DEFINED]


def tokenizer_json(model: bytes, path: str) -> str:
    """The tokenizer.json of a sentencepiece model, for texts without user-defined symbols.

    It has no added tokens: sentencepiece does not match control symbols in texts, and
    a tokenizer.json cannot express how user-defined ones are matched.

    Raises:
        TextError: A model that a tokenizer.json cannot express.
    """
    fields = list(_fields(model))
    pieces = [_piece(value) for number, value in fields if number == 1]
    trainer = dict(_fields(_last(fields, 2)))
    normalizer = dict(_fields(_last(fields, 3)))
    symbols = "".join(piece for piece, _, kind in pieces if kind == _USER_DEFINED)
    known = {_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE}
    problem = ""
    if trainer.get(3, 1) != _BPE:
        problem = "is not a BPE model"
    elif not {kind for _, _, kind in pieces} <= known or not pieces:
        problem = "has unused pieces"
    elif symbols and (normalizer.get(2) or " " in symbols or _SPACE in symbols):
        problem = "has user-defined symbols with spaces or with a normalization"
    elif trainer.get(24, 0) or not normalizer.get(5, 1):
        problem = "writes spaces in another way than before a word"
    elif normalizer.get(6) or _last(fields, 5):
        problem = "has rules for the normalization of decoded text"
    if problem:
        raise TextError(f"{path} {problem}, which only sentencepiece itself can encode")
    # A name with a space never matches: the normalizer replaces all spaces.
    names = [f"{piece} " if kind in _UNMATCHED else piece for piece, _, kind in pieces]
    vocabulary = {name: number for number, name in enumerate(names)}
    scores = {piece: score for piece, score, kind in pieces if kind == _NORMAL}
    kinds = [kind for _, _, kind in pieces]
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": {"type": "Sequence", "normalizers": _normalizers(normalizer)},
            "pre_tokenizer": None,
            "post_processor": None,
            "decoder": None,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": names[kinds.index(_UNKNOWN)],
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": True,
                "byte_fallback": bool(trainer.get(35, 0)),
                "ignore_merges": False,
                "vocab": vocabulary,
                "merges": _merges(scores, path),
            },
        }
    )


def _merges(scores: dict[str, float], path: str) -> list[tuple[str, str]]:
    """All pairs of pieces that form a piece, by its score; sentencepiece merges in this order.

    Of the pairs that form one piece, the one with the longer left part comes first: in a run of one
    character, sentencepiece merges from the left.
    """
    for piece in scores:
        for character in piece:
            if character not in scores:
                raise TextError(
                    f"{path} has the piece {piece!r}, but not its character {character!r}, which "
                    "only sentencepiece itself can encode"
                )
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
        parts.append({"type": "Precompiled", "precompiled_charsmap": characters})
    if spec.get(4, 1):
        parts.append({"type": "Strip", "strip_left": True, "strip_right": True})
        parts.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if spec.get(3, 1):
        parts.append({"type": "Prepend", "prepend": _SPACE})
    parts.append({"type": "Replace", "pattern": {"String": " "}, "content": _SPACE})
    return parts


def _piece(message: bytes) -> tuple[str, float, int]:
    """The text, score and type of a piece."""
    values = dict(_fields(message))
    (score,) = struct.unpack("<f", values.get(2, bytes(4)))
    return values.get(1, b"").decode(), score, values.get(3, _NORMAL)


def _last(fields: list[tuple[int, Any]], number: int) -> bytes:
    values = [value for field, value in fields if field == number]
    return values[-1] if values else b""


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message: whole numbers, or bytes for any other type."""
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while place < len(message):
        key = varint()
        wire_type = key & 7
        if wire_type == 0:
            yield key >> 3, varint()
        else:
            size = varint() if wire_type == 2 else {1: 8, 5: 4}[wire_type]
            yield key >> 3, message[place : place + size]
            place += size
