"""Token ids from texts: a vocabulary, and the encoder that reads it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version as version_of
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from millrace.checks import check_bool, check_choice, check_int, check_path, shown
from millrace.deferred import cached_property
from millrace.encoding.encoder_check import choose_encoder, difference, results_of
from millrace.encoding.flat_ids import EncodeBatch, split_ids
from millrace.encoding.tokenizer_files import FunctionVocabulary, load_vocabulary
from millrace.encoding.vocabulary import EOD_TOKENS, MUST_PASS, Options
from millrace.errors import ConfigError, TextError
from millrace.store.layout import optimal_dtype

UNSEEN = "not seen: give from_function a version"


class Tokenizer:
    """Ids from texts, equal to those of the library that defines the vocabulary.

    No text is truncated or padded. A pickle holds the file's content: workers have the same
    tokenizer even if the file changes.

    Args:
        path: Path of a Hugging Face `tokenizer.json`, a transformers folder, a sentencepiece
            `.model` or a `.tiktoken` file; or "bytes" for the bytes of UTF-8 (EOD: 256).
        eod_token: Text of the end-of-document token. None: the one that the files name, or the one
            of `EOD_TOKENS` that the vocabulary has.
        encoder: Library that encodes: one of `ENCODERS`, or "auto" for the fastest one that
            agrees with the vocabulary's own on a set of edge cases.
        add_special_tokens: Whether to add the special tokens of the post-processor, or the BOS
            and EOS of a sentencepiece model, to each text.
        bos_token: Text of the beginning-of-document token. None: the one that the files name.
        tiktoken_pattern: Pattern of a tiktoken file: a name ("gpt2", "r50k_base", "p50k_base",
            "cl100k_base", "o200k_base") or a regular expression. None: the file's name tells it.
        special_tokens_in_text: Whether the text of a special token, such as "<|endoftext|>",
            becomes that token. Sentencepiece always encodes it as plain text.

    Attributes:
        path: Path of the file or folder.
        vocabulary: The vocabulary, with its reference library.

    Raises:
        TextError: A file that is not a tokenizer, or has no such token; a package that is not
            installed.
        ConfigError: An argument of a wrong type, or one that does not fit the vocabulary.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        eod_token: str | None = None,
        *,
        encoder: str = "auto",
        add_special_tokens: bool = False,
        bos_token: str | None = None,
        tiktoken_pattern: str | None = None,
        special_tokens_in_text: bool = True,
    ) -> None:
        self.path = check_path("path", path)
        tokens = {"eod_token": eod_token, "bos_token": bos_token}
        for name, value in {**tokens, "tiktoken_pattern": tiktoken_pattern}.items():
            if not isinstance(value, str | None):
                raise ConfigError(f"{name} must be a text, not {shown(value)}")
        options = Options(
            add_special_tokens=check_bool("add_special_tokens", add_special_tokens),
            special_tokens_in_text=check_bool("special_tokens_in_text", special_tokens_in_text),
            tiktoken_pattern=tiktoken_pattern,
        )
        self.vocabulary = load_vocabulary(self.path, options)
        self._eod_token, self._bos_token = eod_token, bos_token
        for name, token in tokens.items():
            if token is not None:
                self._id_of(token, name)  # fails here if there is no such token
        self._use(encoder)

    @classmethod
    def from_function(
        cls,
        function: Callable[[str], Any],
        *,
        vocabulary_size: int,
        eod: int | None = None,
        name: str | None = None,
        version: str | None = None,
    ) -> Tokenizer:
        """A tokenizer that calls a function.

        An interrupted job continues only with the same function. The source file that defines it
        tells that: after any edit of the file, the job must begin again. Other modules that the
        function calls, files that it reads, values that are computed when its module is imported,
        and versions of packages are not looked at: if they decide the ids, give a `version`. Give
        one, too, for an object that can be called, a function that uses variables of an outer one,
        and one of an interactive session: without it, an interrupted job cannot continue.

        Args:
            function: Function from a text to a list or array of ids, defined in a module: worker
                processes need to pickle it.
            vocabulary_size: Number of ids; the largest id is one less.
            eod: Id of the end-of-document token.
            name: Name of the function in messages, and part of the fingerprint; None: its own.
            version: Text that changes when the function gives other ids, and counts instead of the
                file. None: the file's content tells.

        >>> tokenizer = Tokenizer.from_function(lambda text: [len(text)], vocabulary_size=100)
        >>> ids, lengths = tokenizer.encode_batch(["mill", "race!"])
        >>> ids.tolist(), lengths.tolist()
        ([4, 5], [1, 1])
        """
        if not callable(function):
            raise ConfigError(f"function is {shown(function)}; give a function from text to ids")
        size = check_int("vocabulary_size", vocabulary_size, 1, 2**31)
        eod = None if eod is None else check_int("eod", eod, 0, size - 1)
        if version is not None and not (isinstance(version, str) and version):
            raise ConfigError(f"version is {shown(version)}; give a text, or None")
        self = cls.__new__(cls)
        self.path = str(name or getattr(function, "__qualname__", type(function).__qualname__))
        self.vocabulary = FunctionVocabulary(function, self.path, size, eod, version)
        self._eod_token = self._bos_token = None
        self._use("auto")
        return self

    def _use(self, encoder: str, encode_batch: EncodeBatch | None = None) -> None:
        choices = ("auto", *self.vocabulary.encoder_names)
        self._encoder = check_choice(f"encoder of {self.path}", encoder, choices)
        self._encode_batch = encode_batch

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of what decides the ids: equal for a `tokenizer.json` with other line breaks, key
        order, truncation or padding settings."""
        return self.vocabulary.fingerprint

    @property
    def options(self) -> dict[str, bool]:
        """The options that decide the ids beside the fingerprint, if the file has them."""
        names = set(self.vocabulary.option_names) - {"tiktoken_pattern"}
        return {name: getattr(self.vocabulary.options, name) for name in sorted(names)}

    @property
    def versions(self) -> dict[str, str]:
        """What decides the ids beside the fingerprint: versions of the libraries, or of a function.

        A function without a version that cannot be seen has another one at each call.
        """
        if isinstance(self.vocabulary, FunctionVocabulary):
            version = self.vocabulary.version or self.vocabulary.source_sha256
            return {"function": version or f"{UNSEEN} ({os.urandom(4).hex()})"}
        names = sorted({self.encoder_name, self.reference_name} - {"bytes"})
        return {name: version_of(name) for name in names}

    @cached_property
    def vocabulary_size(self) -> int:
        """Number of tokens, including added ones."""
        return self.vocabulary.size

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of stored ids: by the vocabulary's size, or by the largest id if ids have gaps."""
        return optimal_dtype(max(self.vocabulary_size, self.vocabulary.largest_id + 1))

    @property
    def named_eod_token(self) -> str | None:
        """Text of the end-of-document token that was given, or that the files name."""
        return self._eod_token or self.vocabulary.eod_token

    @cached_property
    def eod_token(self) -> str | None:
        """Text of the end-of-document token; None if the vocabulary has none or several."""
        usual = [] if self.named_eod_token else self._usual_tokens()
        return usual[0] if len(usual) == 1 else self.named_eod_token

    def _usual_tokens(self) -> list[str]:
        return [text for text in EOD_TOKENS if self.vocabulary.id_of(text) is not None]

    @cached_property
    def eod(self) -> int:
        """The id of the end-of-document token.

        Raises:
            TextError: No `eod_token`, and a vocabulary with none or several of `EOD_TOKENS`.
        """
        if self.eod_token is None:
            names = " and ".join(self._usual_tokens()) or "none"
            raise TextError(f"{self.path} has {names} of {EOD_TOKENS}: give --eod-token one")
        return self._id_of(self.eod_token, "eod_token")

    @property
    def bos_token(self) -> str | None:
        """Text of the beginning-of-document token that was given, or that the files name."""
        return self._bos_token or self.vocabulary.bos_token

    @cached_property
    def bos(self) -> int | None:
        """The id of the beginning-of-document token, or None."""
        return None if self.bos_token is None else self._id_of(self.bos_token, "bos_token")

    def edge_tokens(self, prepend_bos: bool, append_eod: bool) -> tuple[int | None, int | None]:
        """The tokens before and after each document.

        Raises:
            ConfigError: No beginning-of-document token.
            TextError: No end-of-document token.
        """
        if prepend_bos and self.bos is None:
            raise ConfigError(
                f"{self.path} does not say which token starts a document: give bos_token "
                "(--bos-token)"
            )
        return self.bos if prepend_bos else None, self.eod if append_eod else None

    def _id_of(self, token: str, option: str) -> int:
        number = self.vocabulary.id_of(token)
        if number is None:
            flag = option.replace("_", "-")
            raise TextError(f"{self.path} has no token {token!r}; give --{flag} one of its tokens")
        return number

    def special_tokens(self) -> dict[str, int]:
        """The ids of the special tokens, by name."""
        return self.vocabulary.special_tokens()

    @property
    def reference_name(self) -> str:
        """Name of the library that defines the vocabulary's ids."""
        return self.vocabulary.reference_name

    @property
    def encoder_name(self) -> str:
        """Name of the library that encodes; with "auto", this checks the encoders."""
        if self._encoder == "auto":
            self.load()
        return self._encoder

    def load(self) -> EncodeBatch:
        """Chooses and loads the encoder, as the first call of `encode_batch` does."""
        if self._encode_batch is None:
            if self._encoder == "auto":
                self._encoder, self._encode_batch, _ = choose_encoder(self.vocabulary)
            else:
                self._encode_batch = self.vocabulary.encoder(self._encoder)
        return self._encode_batch

    def with_encoder(self, name: str, encode_batch: EncodeBatch | None = None) -> Tokenizer:
        """The same tokenizer with another encoder.

        Args:
            name: Name of the encoder, or "auto".
            encode_batch: That encoder, if it is loaded already.

        Raises:
            ConfigError: An encoder that cannot read the vocabulary.
        """
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._use(name, encode_batch)
        return other

    def encode_batch(self, texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """The ids of some texts.

        Args:
            texts: Texts, such as those of about 1 MB of documents.

        Returns:
            The ids of all texts in one array (uint32), and the number of ids of each (int64).

        Raises:
            ConfigError: Texts that are not a list of strings.
            TextError: A text that is not valid Unicode, or that the library cannot encode.
        """
        is_list = isinstance(texts, Sequence) and not isinstance(texts, str)
        if not is_list or not all(issubclass(kind, str) for kind in {*map(type, texts)}):
            raise ConfigError(f"texts are {shown(texts)}; give a list of texts")
        encode = self.load()
        try:
            return encode(list(texts))
        except (*MUST_PASS, TextError, ConfigError):
            raise
        except BaseException as error:
            for text in texts:
                if lone := re.search(r"[\ud800-\udfff]", text):
                    what = f"the lone surrogate U+{ord(lone[0]):04X}: repair the text"
                    raise TextError(f"character {lone.start() + 1} is {what}") from None
            which = "the text" if len(texts) == 1 else f"one of {len(texts)} texts (try each alone)"
            name = self.path if self.encoder_name == "function" else self.encoder_name
            reason = f"{type(error).__name__}: {error}"
            raise TextError(f"{name} cannot encode {which}: {reason}") from error

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, as lists; `encode_batch` is faster."""
        return [ids.tolist() for ids in split_ids(*self.encode_batch(texts))]

    def decode(self, ids: ArrayLike) -> str:
        """The text of some ids, including special tokens.

        Raises:
            ConfigError: Ids that the vocabulary cannot decode.
        """
        numbers = np.asarray(ids).tolist()
        try:
            return self.vocabulary.decode(numbers)
        except (*MUST_PASS, ConfigError):
            raise
        except BaseException as error:
            raise ConfigError(
                f"ids are {shown(numbers)}, which {self.path} cannot decode ({error}); its ids go "
                f"from 0 to {self.vocabulary.largest_id}"
            ) from None

    def __getstate__(self) -> dict[str, Any]:
        # Workers need these, but not the reference library that knows them.
        _ = self.dtype, self.encoder_name, self.fingerprint
        for name in ("bos", "eod"):
            with contextlib.suppress(TextError):  # there may be none
                getattr(self, name)
        return {**self.__dict__, "_encode_batch": None}


def compare_encoders(
    tokenizer: Tokenizer, reference: Tokenizer, texts: Sequence[str]
) -> str | None:
    """How two tokenizers differ on the first such text, or None.

    A text that the reference cannot encode is left out.
    """
    return difference(tokenizer.encode_batch, results_of(reference.encode_batch, texts))


def checked_tokenizer(tokenizer: Tokenizer, texts: Iterable[str] = ()) -> tuple[Tokenizer, str]:
    """The tokenizer to use: the given one if its encoder agrees with the reference library.

    Both encode a built-in set of edge cases and `texts`.

    Args:
        tokenizer: Tokenizer to check.
        texts: Texts of the data, such as its first documents; a thread iterates over them.

    Returns:
        A tokenizer whose encoder agrees, and the reason if `tokenizer` asks for another encoder
        ("" otherwise).
    """
    own = tokenizer._encoder, texts, tokenizer._encode_batch
    name, encode, message = choose_encoder(tokenizer.vocabulary, *own)
    return tokenizer.with_encoder(name, encode), message
