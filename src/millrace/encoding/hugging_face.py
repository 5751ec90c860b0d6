"""Hugging Face's `tokenizer.json`, and the folders of `transformers` that hold one."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from millrace.checks import package
from millrace.deferred import cached_property
from millrace.encoding.flat_ids import EncodeBatch, FlatIds, flat_ids
from millrace.encoding.vocabulary import MUST_PASS, Options, Vocabulary, read_file, sha256
from millrace.errors import TextError


@dataclass(frozen=True)
class JsonVocabulary(Vocabulary):
    """A Hugging Face `tokenizer.json`, whose reference is the `tokenizers` library.

    Truncation and padding settings are ignored: documents stay whole.
    """

    content: str
    options: Options
    eod_token: str | None = None
    bos_token: str | None = None

    reference_name = "tokenizers"
    encoder_names = ("fastokens", "tokenizers")
    option_names = ("add_special_tokens", "special_tokens_in_text")

    @classmethod
    def matches(cls, path: str, content: bytes) -> bool:
        return content[:4096].lstrip()[:1] == b"{" or path.endswith(".json")

    @classmethod
    def load(cls, path: str, content: bytes, options: Options, **tokens: Any) -> JsonVocabulary:
        """`tokens` are the `eod_token` and `bos_token` that other files name."""
        try:
            vocabulary = cls(content.decode(), options, **tokens)
            _ = vocabulary.library  # fails here if the file is damaged
            dropout = json.loads(vocabulary.content)["model"].get("dropout")
        except (*MUST_PASS, TextError):
            raise
        except BaseException as error:  # such as panics of Rust
            raise TextError(f"{path} is not a tokenizer file ({error}). Save it again") from None
        if dropout:
            raise TextError(f'{path} has a dropout of {dropout}: set "dropout" to null in a copy')
        return vocabulary

    @cached_property
    def library(self) -> Any:
        """The `tokenizers.Tokenizer`."""
        tokenizers = package("tokenizers")
        # from_str panics more often.
        tokenizer = _whole(tokenizers.Tokenizer.from_buffer(self.content.encode()))
        tokenizer.encode_special_tokens = not self.options.special_tokens_in_text
        return tokenizer

    @cached_property
    def size(self) -> int:
        return int(self.library.get_vocab_size(with_added_tokens=True))

    @cached_property
    def largest_id(self) -> int:
        numbers = self.library.get_vocab(with_added_tokens=True).values()
        # The post-processor may add tokens that are not in the vocabulary.
        added = self.library.encode("", add_special_tokens=self.options.add_special_tokens).ids
        return max(itertools.chain(numbers, added), default=-1)

    @cached_property
    def fingerprint(self) -> str:
        config = {**json.loads(self.content), "truncation": None, "padding": None}
        text = json.dumps(config, sort_keys=True, separators=(",", ":"))
        return sha256(text.encode())

    def id_of(self, token: str) -> int | None:
        return self.library.token_to_id(token)  # type: ignore[no-any-return]

    def special_tokens(self) -> dict[str, int]:
        tokens = self.library.get_added_tokens_decoder()
        return {token.content: number for number, token in tokens.items() if token.special}

    def added_tokens(self) -> list[str]:
        return [token.content for token in self.library.get_added_tokens_decoder().values()]

    def decode(self, ids: list[int]) -> str:
        return str(self.library.decode(ids, skip_special_tokens=False))

    def encode_batch(self, texts: list[str]) -> FlatIds:
        encode = self.library.encode_batch_fast
        batch = encode(texts, add_special_tokens=self.options.add_special_tokens)
        return flat_ids([encoding.ids for encoding in batch])

    def fast_encoder(self) -> EncodeBatch:
        return self.fastokens(lambda library: _whole(library.from_json_str(self.content)))


def _whole(tokenizer: Any) -> Any:
    """The tokenizer without its file's settings for models."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def load_folder(folder: str, path: str, options: Options) -> JsonVocabulary:
    """The tokenizer of a folder of transformers, which that package makes if the tokenizer.json at
    `path` lacks a token that other files name."""
    settings, named = read_object(folder, "tokenizer_config.json"), []
    if "added_tokens_decoder" not in settings:  # only then transformers reads the older files
        settings.update(read_object(folder, "special_tokens_map.json"))
        named = list(read_object(folder, "added_tokens.json"))
    kinds = ("_token", "_tokens", "_tokens_decoder")
    named += [value for name, value in settings.items() if name.endswith(kinds)]
    eod, bos = (next(texts_in(settings.get(name)), None) for name in ("eos_token", "bos_token"))
    ends = {"eod_token": eod, "bos_token": bos}
    vocabulary = JsonVocabulary.load(path, read_file(path), options, **ends)
    for token in filter(None, texts_in(named)):
        if vocabulary.id_of(token) is None:
            return JsonVocabulary.load(path, _made_by_transformers(folder, token), options, **ends)
    return vocabulary


def read_object(folder: str, name: str) -> dict[str, Any]:
    """The JSON object of a file; empty without the file."""
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        return {}
    try:
        return {**json.loads(read_file(path))}
    except (ValueError, TypeError, RecursionError) as error:
        raise TextError(f"{path} is no JSON object ({error}). Save the tokenizer again") from None


def texts_in(value: Any) -> Iterator[str]:
    """The tokens in a value: texts, objects with "content", or lists of them."""
    if isinstance(value, dict):
        value = value.get("content", [*value.values()])
    if isinstance(value, list):
        yield from itertools.chain.from_iterable(map(texts_in, value))
    elif isinstance(value, str):
        yield value


def _made_by_transformers(folder: str, token: str) -> bytes:
    """A folder's tokenizer.json, with the tokens that its own lacks, such as `token`."""
    transformers = package("transformers", f"{folder}, whose tokenizer.json lacks {token!r},")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return str(tokenizer.backend_tokenizer.to_str()).encode()
    except Exception as error:
        raise TextError(f"transformers cannot read {folder} ({error}). Save it again") from error
