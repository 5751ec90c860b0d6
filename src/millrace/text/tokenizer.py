"""Token ids from texts, by a Hugging Face `tokenizer.json`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from millrace.checks import shown
from millrace.dtypes import optimal_dtype
from millrace.errors import ConfigError, TextError

EOD_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""The usual end-of-document tokens; a tokenizer with exactly one of them needs no `eod_token`."""


class Tokenizer:
    """A Hugging Face fast tokenizer that encodes as `transformers` does: no truncation, no padding,
    special tokens as the file's post-processor adds them.

    Args:
        path: Path of a `tokenizer.json`.
        eod_token: Text of the end-of-document token; None: the one of `EOD_TOKENS` that the
            tokenizer has.

    Raises:
        TextError: A file that is not a tokenizer, or has no such token.
        ConfigError: An `eod_token` that is not a string.
    """

    def __init__(self, path: str | os.PathLike[str], eod_token: str | None = None) -> None:
        self.path = os.fsdecode(path)
        if eod_token is not None and not isinstance(eod_token, str):
            raise ConfigError(f"eod_token is {eod_token!r}; give the token's text")
        try:
            with open(self.path, "rb") as file:
                content = file.read()
        except OSError as error:
            raise TextError(f"{self.path} cannot be read: {error.strerror}") from None
        self.fingerprint = hashlib.sha256(content).hexdigest()
        self._tokenizer = _load(content, self.path)
        self.eod_token = eod_token
        if eod_token is not None and self._tokenizer.token_to_id(eod_token) is None:
            raise TextError(
                f"{self.path} has no token {eod_token!r}; give --eod-token one of its tokens"
            )

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens, including added ones."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of stored ids: by the vocabulary's size, or by the largest id if ids have gaps."""
        largest = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        return optimal_dtype(max(self.vocabulary_size, largest + 1))

    @cached_property
    def eod(self) -> int:
        """The id of the end-of-document token.

        Raises:
            TextError: No `eod_token`, and a tokenizer with none or several of `EOD_TOKENS`.
        """
        if self.eod_token is None:
            usual = [text for text in EOD_TOKENS if self._tokenizer.token_to_id(text) is not None]
            if len(usual) != 1:
                what = f"several ({', '.join(usual)})" if usual else "none"
                raise TextError(
                    f"{self.path} has {what} of the usual end-of-document tokens "
                    f"({', '.join(EOD_TOKENS)}). Name the token with --eod-token"
                )
            self.eod_token = usual[0]
        return int(self._tokenizer.token_to_id(self.eod_token))

    def special_tokens(self) -> dict[str, int]:
        """The ids of the special tokens, by name."""
        tokens = self._tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in tokens.items() if token.special}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text.

        Raises:
            ConfigError: Texts that are not a list of strings.
            TextError: A text that is not valid Unicode.
        """
        try:
            return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts)]
        except TypeError:
            if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
                raise ConfigError(f"texts are {shown(texts)}; give a list of texts") from None
            for text in texts:
                encoded_size(text)
            raise

    def decode(self, ids: ArrayLike) -> str:
        """The text of some ids, including special tokens."""
        return str(self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False))

    def __getstate__(self) -> dict[str, Any]:
        # The content, not only the path: workers must have the same tokenizer as the job, even if
        # the file changes meanwhile.
        return {
            "path": self.path,
            "fingerprint": self.fingerprint,
            "eod_token": self.eod_token,
            "content": self._tokenizer.to_str(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._tokenizer = _load(state.pop("content").encode(), state["path"])
        self.__dict__.update(state)


def encoded_size(text: str, place: str = "") -> int:
    """The size of a text in UTF-8, in bytes; TextError, after `place`, if it has none."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise TextError(
            f"{place}character {error.start + 1} is the lone surrogate "
            f"U+{ord(text[error.start]):04X}, which is not valid Unicode. Repair or remove the text"
        ) from None


def import_tokenizers() -> Any:
    """The tokenizers package, which is optional."""
    try:
        import tokenizers
    except ImportError:
        raise TextError(
            "tokenizing needs the tokenizers package: pip install 'millrace[tokenizers]'"
        ) from None
    return tokenizers


def _load(content: bytes, path: str) -> Any:
    tokenizers = import_tokenizers()
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exception and ValueError
        raise TextError(
            f"{path} is not a tokenizer file ({error}). Give a Hugging Face tokenizer.json"
        ) from None
    # A file may carry settings for training batches; documents must stay whole.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
