"""Vocabularies: what a tokenizer's files hold, read by the library that defines their ids.

Each class is one kind of file. Its `encode_batch` is the reference that faster encoders are
compared with. A vocabulary is pickled by its content; its library is loaded when it is needed.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from millrace.checks import shown
from millrace.encoding.flat_ids import FlatIds, flat_ids, joined_ids
from millrace.encoding.sentencepiece_json import user_defined_symbols
from millrace.errors import ConfigError, TextError

BYTES = "bytes"
"""The name of the vocabulary of bytes, in place of a path."""

_BYTES_EOD = "<|endoftext|>"


class Vocabulary(Protocol):
    """What a tokenizer needs to know of its files.

    Attributes:
        reference_name: Name of the library that defines the ids.
        encoder_names: Names of the encoders that can read the files; the first that agrees with
            the reference is used.
        size: Number of tokens.
        largest_id: Largest id.
        eod_token: End-of-document token that the files name, or None.
        bos_token: Beginning-of-document token that the files name, or None.
        unknown: Id of the unknown token, or None if encoding never yields it.
        fingerprints: SHA-256 of what decides the ids, and of the file's bytes.
    """

    @property
    def reference_name(self) -> str: ...
    @property
    def encoder_names(self) -> tuple[str, ...]: ...
    @property
    def size(self) -> int: ...
    @property
    def largest_id(self) -> int: ...
    @property
    def eod_token(self) -> str | None: ...
    @property
    def bos_token(self) -> str | None: ...
    @property
    def unknown(self) -> int | None: ...
    @property
    def fingerprints(self) -> tuple[str, str]: ...

    def id_of(self, token: str) -> int | None:
        """The id of a token, or None if there is no such token."""

    def special_tokens(self) -> dict[str, int]:
        """The ids of the special tokens, by text."""

    def added_tokens(self) -> list[str]:
        """All tokens that are matched in texts as a whole, special or not."""

    def decode(self, ids: list[int]) -> str:
        """The text of some ids, including special tokens."""

    def encode_batch(self, texts: list[str]) -> FlatIds:
        """The ids of some texts, by the reference library."""


def load_vocabulary(
    path: str,
    *,
    add_special_tokens: bool,
    special_tokens_in_text: bool,
    tiktoken_pattern: str | None,
) -> Vocabulary:
    """Reads a vocabulary; the content of the file, not its name, tells its kind.

    Raises:
        TextError: A missing or damaged file, or one of another kind; a missing package.
        ConfigError: An option that the vocabulary does not have.
    """
    if path == BYTES:
        kind, content = BYTES, b""
    else:
        folder = path if os.path.isdir(path) else None
        path = _file_of_folder(path) if folder else path
        content = read_file(path)
        kind = _kind_of(path, content)
    if tiktoken_pattern is not None and kind not in ("tiktoken", "megatron"):
        raise ConfigError(
            f"tiktoken_pattern is {tiktoken_pattern!r}, but {path} is not a tiktoken file; "
            "leave the pattern out"
        )
    if add_special_tokens and kind not in ("json", "sentencepiece"):
        raise ConfigError(
            f"{path} does not say which special tokens to add to a text; leave out "
            "add_special_tokens (--add-special-tokens)"
        )
    if kind == "json":
        return _json_vocabulary(path, content, folder, add_special_tokens, special_tokens_in_text)
    if kind == "sentencepiece":
        model = SentencePieceVocabulary(path, content, add_special_tokens)
        _ = model.library
        return model
    if kind == "tiktoken":
        return _tiktoken_vocabulary(path, content, tiktoken_pattern, special_tokens_in_text)
    if kind == "megatron":
        return _megatron_vocabulary(path, content, tiktoken_pattern, special_tokens_in_text)
    return ByteVocabulary()


def read_file(path: str) -> bytes:
    """The content of a file; TextError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise TextError(f"{path} cannot be read: {error.strerror}") from None


def _file_of_folder(folder: str) -> str:
    for name in ("tokenizer.json", "tokenizer.model"):
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            return path
    raise TextError(
        f"{folder} has neither a tokenizer.json nor a tokenizer.model. Save it with "
        "`transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)`, "
        "or give the path of a tokenizer file"
    )


def _kind_of(path: str, content: bytes) -> str:
    start = content[:4096].lstrip()
    if start[:1] == b"[":
        return "megatron"
    if start[:1] == b"{" or path.endswith(".json"):
        return "json"
    if re.match(rb"[A-Za-z0-9+/]+=* \d+\s", start) or path.endswith(".tiktoken"):
        return "tiktoken"
    if content[:1] == b"\n" or path.endswith(".model"):
        return "sentencepiece"
    raise TextError(
        f"{path} is not a tokenizer file. Give a Hugging Face tokenizer.json, a transformers "
        "folder, a sentencepiece .model or a .tiktoken file"
    )


def import_package(name: str, purpose: str, extra: str) -> Any:
    """An optional package; TextError with the remedy if it is not installed."""
    try:
        return __import__(name)
    except ImportError:
        raise TextError(
            f"{purpose} needs the {name} package: pip install 'millrace[{extra}]'"
        ) from None


def is_of_the_process(error: BaseException) -> bool:
    """Whether an exception is not a library's answer; panics of Rust are BaseExceptions."""
    return isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError))


def import_tokenizers() -> Any:
    """The tokenizers package, which is optional."""
    return import_package("tokenizers", "tokenizing", "tokenizers")


def _sha256(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _content(vocabulary: Any) -> dict[str, Any]:
    """The state to pickle: the fields, without the library's objects."""
    return {field.name: getattr(vocabulary, field.name) for field in fields(vocabulary)}


# ---- Hugging Face tokenizer.json ----


@dataclass(frozen=True)
class JsonVocabulary:
    """A Hugging Face `tokenizer.json`, whose reference is the `tokenizers` library.

    Truncation and padding settings are ignored: documents stay whole.
    """

    path: str
    content: str
    add_special_tokens: bool
    special_tokens_in_text: bool
    file_sha256: str
    eod_token: str | None = None
    bos_token: str | None = None

    reference_name = "tokenizers"
    encoder_names = ("fastokens", "tokenizers")

    @cached_property
    def library(self) -> Any:
        """The `tokenizers.Tokenizer`."""
        from_buffer = import_tokenizers().Tokenizer.from_buffer  # from_str panics more often
        try:
            tokenizer = from_buffer(self.content.encode())
        except BaseException as error:
            if is_of_the_process(error):
                raise
            raise TextError(
                f"{self.path} is not a tokenizer file ({error}). Give a Hugging Face tokenizer.json"
            ) from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = not self.special_tokens_in_text
        return tokenizer

    @cached_property
    def config(self) -> dict[str, Any]:
        """The parsed file."""
        config: dict[str, Any] = json.loads(self.content)
        return config

    @cached_property
    def size(self) -> int:
        return int(self.library.get_vocab_size(with_added_tokens=True))

    @cached_property
    def largest_id(self) -> int:
        numbers = self.library.get_vocab(with_added_tokens=True).values()
        # The post-processor may add tokens that are not in the vocabulary.
        added = self.library.encode("", add_special_tokens=self.add_special_tokens).ids
        return max(itertools.chain(numbers, added), default=-1)

    @cached_property
    def unknown(self) -> int | None:
        model = self.config["model"]
        if model.get("type") == "Unigram":
            number = model.get("unk_id")
        else:
            token = model.get("unk_token")
            number = None if token is None else self.id_of(token)
        return None if number is None or self._has_all_bytes() else int(number)

    def _has_all_bytes(self) -> bool:
        """Whether the model has a token for each byte, so that no text is unknown to it."""
        model = self.config["model"]
        if model.get("byte_fallback"):
            return all(self.id_of(f"<0x{byte:02X}>") is not None for byte in range(256))
        parts = [self.config.get("pre_tokenizer"), self.config.get("normalizer")]
        if model.get("type") not in (None, "BPE") or "ByteLevel" not in _types_of(parts):
            return False
        alphabet = import_tokenizers().pre_tokenizers.ByteLevel.alphabet()
        return all(self.id_of(character) is not None for character in alphabet)

    @cached_property
    def fingerprints(self) -> tuple[str, str]:
        config = {**_with_defaults(self.config), "truncation": None, "padding": None}
        text = json.dumps(config, sort_keys=True, separators=(",", ":"))
        return _sha256(text.encode()), self.file_sha256

    def id_of(self, token: str) -> int | None:
        number: int | None = self.library.token_to_id(token)
        return number

    def special_tokens(self) -> dict[str, int]:
        tokens = self.library.get_added_tokens_decoder()
        return {token.content: number for number, token in tokens.items() if token.special}

    def added_tokens(self) -> list[str]:
        return [token.content for token in self.library.get_added_tokens_decoder().values()]

    def decode(self, ids: list[int]) -> str:
        return str(self.library.decode(ids, skip_special_tokens=False))

    def encode_batch(self, texts: list[str]) -> FlatIds:
        encode = self.library.encode_batch_fast
        batch = encode(texts, add_special_tokens=self.add_special_tokens)
        return flat_ids([encoding.ids for encoding in batch])

    def __getstate__(self) -> dict[str, Any]:
        return _content(self)


_BPE_DEFAULTS = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
    "ignore_merges": False,
}


def _with_defaults(value: Any) -> Any:
    """A part of a tokenizer.json as later versions of the library write it."""
    if isinstance(value, list):
        return [_with_defaults(part) for part in value]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("merges"), list):  # in older files, a merge is a text: "t he"
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in value["merges"]]
        return {**_BPE_DEFAULTS, **value, "merges": pairs}
    parts = {name: _with_defaults(part) for name, part in value.items()}
    return {"use_regex": True, **parts} if value.get("type") == "ByteLevel" else parts


def _types_of(value: Any) -> set[str]:
    """The types of all parts in a tokenizer.json's normalizer or pre-tokenizer."""
    if isinstance(value, list):
        return set().union(*map(_types_of, value))
    if not isinstance(value, dict):
        return set()
    return {str(value.get("type"))}.union(*map(_types_of, value.values()))


def _json_vocabulary(
    path: str,
    content: bytes,
    folder: str | None,
    add_special_tokens: bool,
    special_tokens_in_text: bool,
) -> JsonVocabulary:
    try:
        text = content.decode()
        config = json.loads(text)
        model = config["model"]
        dropout = model.get("dropout")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise TextError(
            f"{path} is not a tokenizer file ({error}). Give a Hugging Face tokenizer.json"
        ) from None
    if dropout:
        raise TextError(
            f"{path} has a BPE dropout of {dropout}, which gives other ids each time. Set "
            '"dropout" to null in a copy of the file'
        )
    names: dict[str, str] = {}
    tokens: list[dict[str, Any]] = []
    if folder is not None:
        try:
            more_tokens, names = _folder_tokens(folder)
            tokens = _add_tokens(config, more_tokens)
        except TextError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise TextError(
                f"{folder} has a damaged list of tokens ({type(error).__name__}: {error}). Save "
                "the tokenizer again"
            ) from None
    if tokens:
        text = json.dumps(config, ensure_ascii=False)
        content = text.encode(errors="surrogatepass")  # another tokenizer than the file's
    vocabulary = JsonVocabulary(
        path=path,
        content=text,
        add_special_tokens=add_special_tokens,
        special_tokens_in_text=special_tokens_in_text,
        file_sha256=_sha256(content),
        eod_token=names.get("eos_token"),
        bos_token=names.get("bos_token"),
    )
    _ = vocabulary.library  # fails here if the file is damaged
    for token in tokens:
        if vocabulary.id_of(token["content"]) != token["id"]:
            raise TextError(
                f"{path}: the token {token['content']!r} should have the id {token['id']}, but "
                f"gets {vocabulary.id_of(token['content'])}. Save the tokenizer again"
            )
    return vocabulary


_NAMED_TOKENS = "bos_token eos_token unk_token sep_token pad_token cls_token mask_token".split()
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def _folder_tokens(folder: str) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The tokens that a transformers folder names outside its tokenizer.json, in the order in which
    transformers adds them, and the texts of the named ones."""
    settings = _read_object(folder, "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:  # only then transformers reads the older files
        settings.update(_read_object(folder, "special_tokens_map.json"))
        numbers = _read_object(folder, "added_tokens.json")
        settings["added_tokens_decoder"] = {
            number: {"content": content, "special": False, "normalized": True}
            for content, number in numbers.items()
        }
    decoder = settings["added_tokens_decoder"] or {}
    tokens = [{**decoder[number], "id": int(number)} for number in sorted(decoder, key=int)]
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    if isinstance(extra, dict):  # tokens that only this model has, by name
        settings.update(extra)
        extra = []
    others = [name for name in settings if name.endswith("_token") and name not in _NAMED_TOKENS]
    names: dict[str, str] = {}
    for name in (*_NAMED_TOKENS, *others):
        token = _special_token(settings.get(name))
        if token is not None:
            names[name] = token["content"]
            tokens.append(token)
    return [*tokens, *filter(None, map(_special_token, extra))], names


def _special_token(value: Any) -> dict[str, Any] | None:
    """A token of a transformers folder: a text, or an object with "content"; None for others."""
    token: dict[str, Any] = value if isinstance(value, dict) else {"content": value}
    return {**token, "special": True} if isinstance(token.get("content"), str) else None


def _read_object(folder: str, name: str) -> dict[str, Any]:
    """The JSON object in a file of a folder; empty if there is no such file."""
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        return {}
    try:
        value = json.loads(read_file(path))
        return dict(value.items())
    except (ValueError, AttributeError, RecursionError) as error:
        raise TextError(
            f"{path} is not a JSON object ({error}). Save the tokenizer again"
        ) from None


def _add_tokens(config: dict[str, Any], tokens: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds the tokens that a tokenizer.json lacks, as transformers does, and returns these."""
    added = config.get("added_tokens") or []
    model = config["model"].get("vocab") or {}
    if isinstance(model, list):  # Unigram: pairs of token and score
        model = {pair[0]: number for number, pair in enumerate(model)}
    contents = {token["content"] for token in added}
    next_id = max([len(model) - 1, *(token["id"] for token in added)]) + 1
    new_tokens = []
    for token in tokens:
        content = token["content"]
        if content in contents:
            continue
        number = model.get(content, next_id)
        next_id += number == next_id
        flags = {flag: bool(token.get(flag, flag == "special")) for flag in _TOKEN_FLAGS}
        new_tokens.append({"id": number, "content": content, **flags})
        contents.add(content)
    config["added_tokens"] = sorted([*added, *new_tokens], key=lambda token: int(token["id"]))
    return new_tokens


# ---- tiktoken ----

_GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_CL100K_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MEGATRON_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}

TIKTOKEN_PATTERNS: dict[str, tuple[str, dict[str, int]]] = {
    "gpt2": (_GPT2_PATTERN, {"<|endoftext|>": 50256}),
    "r50k_base": (_GPT2_PATTERN, {"<|endoftext|>": 50256}),
    "p50k_base": (_GPT2_PATTERN, {"<|endoftext|>": 50256}),
    "cl100k_base": (
        _CL100K_PATTERN,
        {
            "<|endoftext|>": 100257,
            "<|fim_prefix|>": 100258,
            "<|fim_middle|>": 100259,
            "<|fim_suffix|>": 100260,
            "<|endofprompt|>": 100276,
        },
    ),
    "o200k_base": (_O200K_PATTERN, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
}
"""The published pattern and special tokens of each named tiktoken vocabulary."""

_MEGATRON_SIZE = 2**17
_MEGATRON_SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
_NUM_MEGATRON_SPECIAL = 1000


@dataclass(frozen=True)
class TiktokenVocabulary:
    """Ranks of byte strings with a pattern and special tokens; the reference is `tiktoken`.

    Attributes:
        pattern_name: Name of the pattern in `TIKTOKEN_PATTERNS`, or "" for any other.
    """

    path: str
    ranks: dict[bytes, int]
    pattern: str
    pattern_name: str
    special_ids: dict[str, int]
    special_tokens_in_text: bool
    file_sha256: str
    eod_token: str | None = None
    bos_token: str | None = None

    reference_name = "tiktoken"
    encoder_names = ("fastokens", "tiktoken")
    unknown = None

    @cached_property
    def library(self) -> Any:
        """The `tiktoken.Encoding`."""
        tiktoken = import_package("tiktoken", f"reading {self.path}", "encoders")
        try:
            return tiktoken.Encoding(
                os.path.basename(self.path),
                pat_str=self.pattern,
                mergeable_ranks=self.ranks,
                special_tokens=self.special_ids,
            )
        except ValueError as error:
            raise ConfigError(
                f"the tiktoken pattern {shown(self.pattern)} cannot be used: {error}"
            ) from None

    @property
    def size(self) -> int:
        return self.largest_id + 1

    @cached_property
    def largest_id(self) -> int:
        return max(itertools.chain(self.ranks.values(), self.special_ids.values()))

    @cached_property
    def fingerprints(self) -> tuple[str, str]:
        settings = json.dumps([self.pattern, self.special_ids], sort_keys=True)
        return _sha256(rank_lines(self.ranks), settings.encode()), self.file_sha256

    def id_of(self, token: str) -> int | None:
        number = self.special_ids.get(token)
        return self.ranks.get(token.encode(errors="replace")) if number is None else number

    def special_tokens(self) -> dict[str, int]:
        return dict(self.special_ids)

    def added_tokens(self) -> list[str]:
        return list(self.special_ids)

    def decode(self, ids: list[int]) -> str:
        return str(self.library.decode(ids))

    def encode_batch(self, texts: list[str]) -> FlatIds:
        special = set(self.special_ids) if self.special_tokens_in_text else set[str]()
        options = {"allowed_special": special, "disallowed_special": ()}
        if hasattr(self.library, "encode_to_numpy"):  # since tiktoken 0.8
            return joined_ids([self.library.encode_to_numpy(text, **options) for text in texts])
        return flat_ids([self.library.encode(text, **options) for text in texts])

    def __getstate__(self) -> dict[str, Any]:
        return _content(self)


def rank_lines(ranks: dict[bytes, int]) -> bytes:
    """Ranks as the lines of a .tiktoken file."""
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())


def _tiktoken_vocabulary(
    path: str, content: bytes, pattern: str | None, special_tokens_in_text: bool
) -> TiktokenVocabulary:
    if pattern is None:
        pattern = os.path.basename(path).removesuffix(".tiktoken")
        if pattern not in TIKTOKEN_PATTERNS:
            raise ConfigError(
                f"{path} holds ranks only: name its pattern with tiktoken_pattern "
                f"(--tiktoken-pattern), one of {', '.join(TIKTOKEN_PATTERNS)}, or a regular "
                "expression"
            )
    name = pattern if pattern in TIKTOKEN_PATTERNS else ""
    ranks = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise TextError(
                f"{path} is not a tiktoken file: line {number} is {shown(line)} ({error}). "
                "Each line is a token in base64 and its rank"
            ) from None
    pattern, special_ids = TIKTOKEN_PATTERNS[name] if name else (pattern, {})
    return _checked_ranks(
        TiktokenVocabulary(
            path, ranks, pattern, name, dict(special_ids), special_tokens_in_text, _sha256(content)
        )
    )


def _megatron_vocabulary(
    path: str, content: bytes, pattern: str | None, special_tokens_in_text: bool
) -> TiktokenVocabulary:
    """Megatron-LM's own form of tiktoken ranks: a JSON list, and 1,000 special tokens before it."""
    name = "v2" if pattern is None else pattern
    if name not in _MEGATRON_PATTERNS:
        raise ConfigError(
            f"tiktoken_pattern is {name!r}; a tiktoken file in JSON has the pattern v1 or v2"
        )
    first = _NUM_MEGATRON_SPECIAL
    try:
        entries = json.loads(content)[: _MEGATRON_SIZE - first]
        ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] + first for entry in entries}
        if [rank - first for rank in ranks.values()] != list(range(len(entries))):
            raise ValueError("the ranks are not 0, 1, 2, ...")
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise TextError(
            f"{path} is not a tokenizer file ({error}). A JSON list must be Megatron-LM's list of "
            "rank, token_bytes and token_str"
        ) from None
    others = (f"<SPECIAL_{number}>" for number in range(len(_MEGATRON_SPECIAL), first))
    special_ids = {token: number for number, token in enumerate((*_MEGATRON_SPECIAL, *others))}
    return _checked_ranks(
        TiktokenVocabulary(
            path,
            ranks,
            _MEGATRON_PATTERNS[name],
            "",
            special_ids,
            special_tokens_in_text,
            _sha256(content),
            eod_token="</s>",
            bos_token="<s>",
        )
    )


def _checked_ranks(vocabulary: TiktokenVocabulary) -> TiktokenVocabulary:
    path, ranks, special_ids = vocabulary.path, vocabulary.ranks, vocabulary.special_ids
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise TextError(
            f"{path} has no token for {len(missing)} of the 256 bytes (the first is {missing[0]}), "
            "so it cannot encode every text. Copy or train it again"
        )
    ids = set(ranks.values())
    if len(ids) < len(ranks) or min(ids) < 0:
        raise TextError(f"{path} has ranks that are negative or used twice. Copy it again")
    for token, number in special_ids.items():
        if number in ids:
            raise ConfigError(
                f"{path} has a token of rank {number}, which {vocabulary.pattern_name} uses for "
                f"{token!r}; give the tiktoken_pattern (--tiktoken-pattern) of this file"
            )
    _ = vocabulary.library  # fails here if the pattern is not a regular expression
    return vocabulary


# ---- sentencepiece ----


@dataclass(frozen=True)
class SentencePieceVocabulary:
    """A sentencepiece model. As in sentencepiece, control symbols are plain text in a text."""

    path: str
    content: bytes
    add_special_tokens: bool

    reference_name = "sentencepiece"
    encoder_names = ("fastokens", "sentencepiece")

    @cached_property
    def library(self) -> Any:
        """The `SentencePieceProcessor`."""
        sentencepiece = import_package("sentencepiece", f"reading {self.path}", "encoders")
        try:
            processor = sentencepiece.SentencePieceProcessor()
            processor.LoadFromSerializedProto(self.content)
            if processor.get_piece_size() < 1:
                raise ValueError("it has no pieces")
        except (RuntimeError, ValueError, OSError) as error:
            raise TextError(
                f"{self.path} is not a tokenizer file ({error}). Give a sentencepiece model"
            ) from None
        return processor

    @cached_property
    def size(self) -> int:
        return int(self.library.get_piece_size())

    @property
    def largest_id(self) -> int:
        return self.size - 1

    @cached_property
    def eod_token(self) -> str | None:
        return self._piece(self.library.eos_id())

    @cached_property
    def bos_token(self) -> str | None:
        return self._piece(self.library.bos_id())

    def _piece(self, number: int) -> str | None:
        return None if number < 0 else str(self.library.id_to_piece(number))

    @cached_property
    def unknown(self) -> int | None:
        num_bytes = sum(map(self.library.is_byte, range(self.size)))
        return None if num_bytes == 256 else int(self.library.unk_id())

    @cached_property
    def fingerprints(self) -> tuple[str, str]:
        sha256 = _sha256(self.content)
        return sha256, sha256

    def id_of(self, token: str) -> int | None:
        number = int(self.library.piece_to_id(token))
        is_other = number == self.library.unk_id() and self._piece(number) != token
        return None if is_other else number

    def special_tokens(self) -> dict[str, int]:
        numbers = filter(self.library.is_control, range(self.size))
        return {str(self.library.id_to_piece(number)): number for number in numbers}

    def added_tokens(self) -> list[str]:
        return [*user_defined_symbols(self.content), *self.special_tokens()]

    def decode(self, ids: list[int]) -> str:
        parts = []
        for is_control, numbers in itertools.groupby(ids, self.library.is_control):
            run = list(numbers)
            if is_control:
                parts += [self.library.id_to_piece(number) for number in run]
            else:
                parts.append(self.library.decode(run))
        return "".join(parts)

    def encode_batch(self, texts: list[str]) -> FlatIds:
        has_ends = self.add_special_tokens
        bos = has_ends and self.library.bos_id() >= 0
        eos = has_ends and self.library.eos_id() >= 0
        arrays = self.library.encode(
            texts, add_bos=bos, add_eos=eos, num_threads=1, out_type="numpy"
        )
        return joined_ids(arrays)

    def __getstate__(self) -> dict[str, Any]:
        return _content(self)


# ---- bytes and functions ----


@dataclass(frozen=True)
class ByteVocabulary:
    """The bytes of UTF-8, ids 0 to 255, and an end-of-document token, 256."""

    reference_name = BYTES
    encoder_names = (BYTES,)
    size = 257
    largest_id = 256
    eod_token = _BYTES_EOD
    bos_token = None
    unknown = None
    fingerprints = (_sha256(b"millrace bytes"),) * 2

    def id_of(self, token: str) -> int | None:
        if token == _BYTES_EOD:
            return 256
        return ord(token) if len(token) == 1 and ord(token) < 128 else None

    def special_tokens(self) -> dict[str, int]:
        return {_BYTES_EOD: 256}

    def added_tokens(self) -> list[str]:
        return []

    def decode(self, ids: list[int]) -> str:
        parts = []
        for is_eod, numbers in itertools.groupby(ids, lambda number: number == 256):
            run = list(numbers)
            text = _BYTES_EOD * len(run) if is_eod else bytes(run).decode(errors="replace")
            parts.append(text)
        return "".join(parts)

    def encode_batch(self, texts: list[str]) -> FlatIds:
        encoded = [text.encode() for text in texts]
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        return np.frombuffer(b"".join(encoded), np.uint8).astype(np.uint32), lengths


@dataclass(frozen=True)
class FunctionVocabulary:
    """A function from a text to ids."""

    function: Callable[[str], Any]
    name: str
    size: int
    eod: int | None

    reference_name = "function"
    encoder_names = ("function",)
    bos_token = None
    unknown = None

    @property
    def largest_id(self) -> int:
        return self.size - 1

    @property
    def eod_token(self) -> str | None:
        return None if self.eod is None else "eod"

    @property
    def fingerprints(self) -> tuple[str, str]:
        sha256 = _sha256(f"function {self.name} {self.size}".encode())
        return sha256, sha256

    def id_of(self, token: str) -> int | None:
        return self.eod if token == "eod" else None

    def special_tokens(self) -> dict[str, int]:
        return {} if self.eod is None else {"eod": self.eod}

    def added_tokens(self) -> list[str]:
        return []

    def decode(self, ids: list[int]) -> str:
        raise ConfigError(f"{self.name} is a function from texts to ids, and cannot decode ids")

    def encode_batch(self, texts: list[str]) -> FlatIds:
        arrays = []
        for text in texts:
            ids = np.asarray(self.function(text))
            if ids.size == 0:
                ids = np.empty(0, np.uint32)
            if ids.ndim != 1 or ids.dtype.kind not in "iu":
                raise TextError(
                    f"{self.name} returned an array of shape {list(ids.shape)} and dtype "
                    f"{ids.dtype} for the text {shown(text)}; it must return a list of ids"
                )
            if ids.size and not 0 <= ids.min() <= ids.max() < self.size:
                raise TextError(
                    f"{self.name} returned ids from {ids.min()} to {ids.max()} for the text "
                    f"{shown(text)}; its vocabulary_size is {self.size}"
                )
            arrays.append(ids)
        return joined_ids(arrays)
