"""What a tokenizer needs to know of its file, and what the kinds of files have in common.

Each kind of file is a class in a module of its own, and a line in `tokenizer_files`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np

from millrace.encoding.flat_ids import FlatIds
from millrace.errors import TextError

ENCODERS = ("fastokens", "tokenizers", "tiktoken", "sentencepiece", "bytes")
"""The names of the encoders; "auto" chooses among them. The first is fast, and never makes a Python
object per id; the others are references."""

EncodeBatch = Callable[[list[str]], FlatIds]
"""A function from texts to the ids of all of them, and the number of ids of each. It runs on the
threads that the environment of its library allows, which the workers of a job set to one."""


@dataclass(frozen=True, kw_only=True)
class VocabularyOptions:
    """Options of a tokenizer that not all kinds of files have.

    Attributes:
        add_special_tokens: Whether the special tokens that the file names are added to each text.
        special_tokens_in_text: Whether the text of a special token becomes that token.
        tiktoken_pattern: Pattern of a tiktoken file: a name or a regular expression.
    """

    add_special_tokens: bool = False
    special_tokens_in_text: bool = True
    tiktoken_pattern: str | None = None


class Vocabulary(Protocol):
    """A tokenizer's file, read by the library that defines its ids.

    A vocabulary is pickled by its content; its library is loaded when it is needed.

    Attributes:
        reference_name: Name of the library that defines the ids.
        encoder_names: Names of the encoders that can read the file; the first that agrees with
            the reference is used.
        option_names: Names of the `VocabularyOptions` that the file has.
        options: The options.
        size: Number of tokens.
        largest_id: Largest id.
        eod_token: End-of-document token that the file names, or None.
        bos_token: Beginning-of-document token that the file names, or None.
        fingerprint: SHA-256 of what decides the ids.
        file_sha256: SHA-256 of the file's bytes.
    """

    @property
    def reference_name(self) -> str: ...
    @property
    def encoder_names(self) -> tuple[str, ...]: ...
    @property
    def option_names(self) -> tuple[str, ...]: ...
    @property
    def options(self) -> VocabularyOptions: ...
    @property
    def size(self) -> int: ...
    @property
    def largest_id(self) -> int: ...
    @property
    def eod_token(self) -> str | None: ...
    @property
    def bos_token(self) -> str | None: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def file_sha256(self) -> str: ...

    def id_of(self, token: str) -> int | None:
        """The id of a token, or None if there is no such token."""

    def special_tokens(self) -> dict[str, int]:
        """The ids of the special tokens, by text."""

    def added_tokens(self) -> list[str]:
        """All tokens that are matched in texts as a whole, special or not."""

    def decode(self, ids: list[int]) -> str:
        """The text of some ids, including special tokens."""

    def encode_batch(self, texts: list[str]) -> FlatIds:
        """The ids of some texts, by the reference library, to which others are compared."""

    def fast_encoder(self) -> EncodeBatch:
        """The encoder of fastokens, if it is among `encoder_names`."""


class VocabularyFile(Protocol):
    """A kind of tokenizer's file: a class of vocabularies."""

    def matches(self, path: str, content: bytes) -> bool:
        """Whether a file is of this kind: by its content, or else by the ending of its name."""

    def load(self, path: str, content: bytes, options: VocabularyOptions) -> Vocabulary:
        """Reads a file of this kind; TextError if it is damaged."""


def make_encoder(name: str, vocabulary: Vocabulary) -> EncodeBatch:
    """The encoder of a library, one of the vocabulary's `encoder_names`.

    Raises:
        TextError: A package that is not installed, or a vocabulary that the library refuses.
    """
    is_reference = name == vocabulary.reference_name
    return vocabulary.encode_batch if is_reference else vocabulary.fast_encoder()


def fastokens_encoder(
    load: Callable[[Any], Any],
    *,
    add_special_tokens: bool = False,
    split_special_tokens: bool = False,
) -> EncodeBatch:
    """The encoder of fastokens, for a function from its class of tokenizers to one of them."""
    package = import_package("fastokens", "the encoder fastokens", "tokenizers")
    try:
        tokenizer = load(package.Tokenizer)
    except BaseException as error:
        if must_pass(error):
            raise
        raise TextError(f"fastokens cannot read this vocabulary: {error}") from None

    def encode_batch(texts: list[str]) -> FlatIds:
        ids, offsets = tokenizer.encode_batch_flat(
            texts,
            add_special_tokens=add_special_tokens,
            split_special_tokens=split_special_tokens,
        )
        bounds = np.frombuffer(offsets, np.uint64).astype(np.int64)
        return np.frombuffer(ids, np.uint32), np.diff(bounds)

    return encode_batch


def read_file(path: str) -> bytes:
    """The content of a file; TextError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise TextError(f"{path} cannot be read: {error.strerror}") from None


def import_package(name: str, purpose: str, extra: str) -> Any:
    """An optional package; TextError with the remedy if it is not installed."""
    try:
        return __import__(name)
    except ImportError:
        raise TextError(
            f"{purpose} needs the {name} package: pip install 'millrace[{extra}]'"
        ) from None


def import_tokenizers() -> Any:
    """The tokenizers package, which is optional."""
    return import_package("tokenizers", "tokenizing", "tokenizers")


def must_pass(error: BaseException) -> bool:
    """Whether an exception must pass through: Ctrl-C, exit, out of memory.

    Panics of Rust are no Exceptions either, but errors of a library.
    """
    return isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError))


def sha256(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


def content_of(vocabulary: Any) -> dict[str, Any]:
    """The state to pickle: the fields of a dataclass, without the library's objects."""
    return {field.name: getattr(vocabulary, field.name) for field in fields(vocabulary)}
