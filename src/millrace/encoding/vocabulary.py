"""What a tokenizer needs of its file, and what the kinds of files have in common."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from millrace.checks import package
from millrace.encoding.flat_ids import EncodeBatch, FlatIds
from millrace.errors import TextError

ENCODERS = ("fastokens", "tokenizers", "tiktoken", "sentencepiece", "bytes")
"""The names of the encoders. The first is fast, and never makes a Python object per id; the others
are references."""

MUST_PASS = (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError)
"""Exceptions that are not errors of a library. Rust's panics are, though not an `Exception`."""

EOD_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""The usual end-of-document tokens; a tokenizer with exactly one of them needs no `eod_token`."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a `Tokenizer` that not all kinds of files have."""

    add_special_tokens: bool = False
    special_tokens_in_text: bool = True
    tiktoken_pattern: str | None = None


class Vocabulary(Protocol):
    """A tokenizer's file, read by the library that defines its ids, the reference.

    It is pickled without its `library`, which is loaded when needed.

    Attributes:
        reference_name: Name of the reference.
        encoder_names: Names of the encoders that can read the file; the first that agrees with the
            reference is used.
        option_names: Names of the options that the file has.
        options: Values of all options.
    """

    reference_name: str
    encoder_names: tuple[str, ...]
    option_names: tuple[str, ...] = ()
    options: Options = Options()

    @property
    def size(self) -> int:
        """Number of tokens."""

    @property
    def largest_id(self) -> int:
        return self.size - 1

    @property
    def eod_token(self) -> str | None:
        """The end-of-document token that the file names."""
        return None

    @property
    def bos_token(self) -> str | None:
        """The beginning-of-document token that the file names."""
        return None

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what decides the ids."""

    def id_of(self, token: str) -> int | None:
        return self.special_tokens().get(token)

    def special_tokens(self) -> dict[str, int]:
        """The ids of the special tokens, by text."""

    def added_tokens(self) -> list[str]:
        """All tokens that are matched as a whole, special or not."""
        return list(self.special_tokens())

    def decode(self, ids: list[int]) -> str:
        """The text of some ids, including special tokens."""

    def encode_batch(self, texts: list[str]) -> FlatIds:
        """The ids of some texts, by the reference."""

    def fast_encoder(self) -> EncodeBatch:
        """The encoder that is not the reference, if `encoder_names` has one."""
        return self.encode_batch

    def encoder(self, name: str) -> EncodeBatch:
        """One of `encoder_names`; TextError without its package, or if it refuses the file."""
        return self.encode_batch if name == self.reference_name else self.fast_encoder()

    def fastokens(self, load: Callable[[Any], Any]) -> EncodeBatch:
        """The encoder of fastokens, for a function from its class to a tokenizer."""
        library = package("fastokens")
        try:
            tokenizer = load(library.Tokenizer)
        except MUST_PASS:
            raise
        except BaseException as error:
            raise TextError(f"fastokens cannot read this vocabulary: {error}") from None
        options = {
            "add_special_tokens": self.options.add_special_tokens,
            "split_special_tokens": not self.options.special_tokens_in_text,
        }

        def encode_batch(texts: list[str]) -> FlatIds:
            ids, offsets = tokenizer.encode_batch_flat(texts, **options)
            places = np.frombuffer(offsets, np.int64)
            return np.frombuffer(ids, np.uint32), places[1:] - places[:-1]

        return encode_batch

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "library"}


def read_file(path: str) -> bytes:
    """The content of a file; TextError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        remedy = "Give a file or folder of this machine: nothing is downloaded"
        raise TextError(f"{path} cannot be read: {error.strerror}. {remedy}") from None


def sha256(*parts: bytes) -> str:
    """SHA-256 of the parts, one after the other, in hexadecimal."""
    return hashlib.sha256(b"".join(parts)).hexdigest()
