"""The kinds of tokenizers' files: a class for each, and a line in `KINDS`."""

import itertools
import os
from dataclasses import dataclass

import numpy as np

from millrace.encoding.flat_ids import FlatIds
from millrace.encoding.hugging_face import JsonVocabulary, load_folder
from millrace.encoding.sentencepiece_file import SentencePieceVocabulary
from millrace.encoding.tiktoken_file import MegatronRanks, TiktokenVocabulary
from millrace.encoding.vocabulary import Options, Vocabulary, read_file, sha256
from millrace.errors import ConfigError, TextError

KINDS = MegatronRanks, JsonVocabulary, TiktokenVocabulary, SentencePieceVocabulary
"""The kinds of files: the first that `matches`, by content or else by ending, will `load` one."""

_EOD = "<|endoftext|>"


@dataclass(frozen=True)
class ByteVocabulary(Vocabulary):
    """The bytes of UTF-8, ids 0 to 255, and an end-of-document token, 256."""

    reference_name = "bytes"
    encoder_names = ("bytes",)
    size = 257
    eod_token = _EOD
    fingerprint = sha256(b"millrace bytes")

    def id_of(self, token: str) -> int | None:
        if token == _EOD:
            return 256
        return ord(token) if len(token) == 1 and ord(token) < 128 else None

    def special_tokens(self) -> dict[str, int]:
        return {_EOD: 256}

    def decode(self, ids: list[int]) -> str:
        text = ""
        for is_eod, run in itertools.groupby(ids, lambda one: one == 256):
            numbers = [*run]
            text += _EOD * len(numbers) if is_eod else bytes(numbers).decode(errors="replace")
        return text

    def encode_batch(self, texts: list[str]) -> FlatIds:
        encoded = [text.encode() for text in texts]
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        return np.frombuffer(b"".join(encoded), np.uint8).astype(np.uint32), lengths


def load_vocabulary(path: str, options: Options) -> Vocabulary:
    """Reads a file, a folder of transformers, or "bytes"."""
    vocabulary = _load(path, options)
    for name in ("tiktoken_pattern", "add_special_tokens"):
        value = getattr(options, name)
        if value not in (None, False) and name not in vocabulary.option_names:
            raise ConfigError(f"{name} is {value!r}, which {path} does not take: leave it out")
    return vocabulary


def _load(path: str, options: Options) -> Vocabulary:
    if path == "bytes":
        return ByteVocabulary()
    if os.path.isdir(path):
        if os.path.isfile(file := os.path.join(path, "tokenizer.json")):
            return load_folder(path, file, options)
        if os.path.isfile(file := os.path.join(path, "tokenizer.model")):
            return _load(file, options)
        raise TextError(f"{path} lacks tokenizer.json and tokenizer.model: use `save_pretrained`")
    content = read_file(path)
    for kind in KINDS:
        if kind.matches(path, content):
            return kind.load(path, content, options)
    raise TextError(f"{path} is not a tokenizer file (.json, a folder, .model, .tiktoken)")
