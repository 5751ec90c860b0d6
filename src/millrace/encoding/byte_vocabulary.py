"""The bytes of UTF-8 as a vocabulary."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from millrace.encoding.flat_ids import FlatIds
from millrace.encoding.vocabulary import EncodeBatch, VocabularyOptions, sha256

BYTES = "bytes"
"""The name of the vocabulary, in place of a path."""

_EOD = "<|endoftext|>"


@dataclass(frozen=True)
class ByteVocabulary:
    """The bytes of UTF-8, ids 0 to 255, and an end-of-document token, 256."""

    reference_name = BYTES
    encoder_names = (BYTES,)
    option_names: tuple[str, ...] = ()
    options = VocabularyOptions()
    size = 257
    largest_id = 256
    eod_token = _EOD
    bos_token = None
    fingerprint = file_sha256 = sha256(b"millrace bytes")

    def id_of(self, token: str) -> int | None:
        if token == _EOD:
            return 256
        return ord(token) if len(token) == 1 and ord(token) < 128 else None

    def special_tokens(self) -> dict[str, int]:
        return {_EOD: 256}

    def added_tokens(self) -> list[str]:
        return []

    def decode(self, ids: list[int]) -> str:
        parts = []
        for is_eod, numbers in itertools.groupby(ids, lambda number: number == 256):
            run = list(numbers)
            text = _EOD * len(run) if is_eod else bytes(run).decode(errors="replace")
            parts.append(text)
        return "".join(parts)

    def encode_batch(self, texts: list[str]) -> FlatIds:
        encoded = [text.encode() for text in texts]
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        return np.frombuffer(b"".join(encoded), np.uint8).astype(np.uint32), lengths

    def fast_encoder(self) -> EncodeBatch:
        return self.encode_batch
