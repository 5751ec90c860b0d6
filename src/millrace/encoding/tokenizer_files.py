"""The kinds of vocabularies: a class for each kind of file, with a line in `KINDS`, and two without
a file, bytes and functions."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np

from millrace.checks import check_int, check_ints, shown
from millrace.encoding.flat_ids import FlatIds, joined_ids
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

    def special_tokens(self) -> dict[str, int]:
        return {_EOD: 256}

    def decode(self, ids: list[int]) -> str:
        parts = [_EOD.encode() if one == 256 else bytes([one]) for one in ids]
        return b"".join(parts).decode(errors="replace")

    def encode_batch(self, texts: list[str]) -> FlatIds:
        encoded = [text.encode() for text in texts]
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        return np.frombuffer(b"".join(encoded), np.uint8).astype(np.uint32), lengths


@dataclass(frozen=True)
class FunctionVocabulary(Vocabulary):
    """A function from a text to ids, of which only the caller knows the number of ids."""

    function: Callable[[str], Any]
    name: str
    size: int = 0
    eod: int | None = None
    version: str | None = None

    reference_name = "function"
    encoder_names = ("function",)

    @property
    def eod_token(self) -> str | None:
        return None if self.eod is None else "eod"

    @property
    def fingerprint(self) -> str:
        return sha256(f"function {self.name} {self.size}".encode())

    @property
    def source_sha256(self) -> str | None:
        """SHA-256 of the source file that defines the function.

        None if no file tells what the function does: it is another kind of object, a closure over
        values of another call, or of an interactive session.
        """
        function = self.function
        if not isinstance(function, FunctionType) or function.__closure__:
            return None
        try:
            return sha256(read_file(function.__code__.co_filename))
        except TextError:
            return None

    def special_tokens(self) -> dict[str, int]:
        return {} if self.eod is None else {"eod": self.eod}

    def decode(self, ids: list[int]) -> str:
        raise ConfigError(f"{self.name} is a function from texts to ids, and cannot decode ids")

    def encode_batch(self, texts: list[str]) -> FlatIds:
        arrays = []
        for text in texts:
            returned = self.function(text)
            try:
                ids = check_ints("ids", returned)
                for number in (ids.min(), ids.max()) if ids.size else ():
                    check_int("an id", number, 0, self.size - 1)
            except ConfigError as error:
                place = f"{self.name} (vocabulary_size {self.size}) on the text {shown(text)}"
                raise TextError(f"{place}: {error}") from None
            arrays.append(ids)
        return joined_ids(arrays)


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
