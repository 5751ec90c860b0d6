"""Ranks of byte strings: tiktoken's files, and Megatron-LM's form of them."""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
from dataclasses import dataclass, replace
from typing import Any

from millrace.checks import check_choice, package, shown
from millrace.deferred import cached_property
from millrace.encoding.flat_ids import EncodeBatch, FlatIds, joined_ids
from millrace.encoding.vocabulary import Options, Vocabulary, sha256
from millrace.errors import ConfigError, TextError

_GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_CL100K_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LOWER_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_UPPER_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_O200K_PATTERN = rf"{_LOWER_WORD}{_SUFFIX}|{_UPPER_WORD}{_SUFFIX}|\p{{N}}{{1,3}}{_OTHERS}"
_MEGATRON_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": rf"{_LOWER_WORD}|{_UPPER_WORD}|\p{{N}}{_OTHERS}",
}

# An older form, which matches the same: fastokens knows it by heart.
_FASTOKENS_PATTERNS = {
    "cl100k_base": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
}

TIKTOKEN_PATTERNS: dict[str, tuple[str, dict[str, int]]] = {
    **dict.fromkeys(("gpt2", "r50k_base", "p50k_base"), (_GPT2_PATTERN, {"<|endoftext|>": 50256})),
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
class TiktokenVocabulary(Vocabulary):
    """Ranks of byte strings with special tokens and a pattern, which `TIKTOKEN_PATTERNS` may name.
    The reference is `tiktoken`."""

    path: str
    ranks: dict[bytes, int]
    pattern: str
    pattern_name: str
    special_ids: dict[str, int]
    options: Options
    eod_token: str | None = None
    bos_token: str | None = None

    reference_name = "tiktoken"
    encoder_names = ("fastokens", "tiktoken")
    option_names = ("special_tokens_in_text", "tiktoken_pattern")

    def __post_init__(self) -> None:
        missing = [byte for byte in range(256) if bytes([byte]) not in self.ranks]
        if missing:
            raise TextError(f"{self.path} lacks {len(missing)} of the 256 bytes. Copy it again")
        ids = set(self.ranks.values())
        if len(ids) < len(self.ranks) or min(ids) < 0:
            raise TextError(f"{self.path} has ranks that are negative or used twice. Copy it again")
        for token, number in self.special_ids.items():
            if number in ids:
                what = f"a token of rank {number}, which {self.pattern_name} uses for {token!r}"
                raise ConfigError(f"{self.path} has {what}: give the tiktoken_pattern of this file")
        _ = self.library  # fails here if the pattern is not a regular expression

    @classmethod
    def matches(cls, path: str, content: bytes) -> bool:
        is_line = re.match(rb"[A-Za-z0-9+/]+=* \d+\s", content[:4096].lstrip())
        return is_line is not None or path.endswith(".tiktoken")

    @classmethod
    def load(cls, path: str, content: bytes, options: Options) -> TiktokenVocabulary:
        name = options.tiktoken_pattern
        if name is None:
            name = os.path.basename(path).removesuffix(".tiktoken")
            if name not in TIKTOKEN_PATTERNS:
                names = ", ".join(TIKTOKEN_PATTERNS)
                raise ConfigError(f"{path} holds ranks only: give --tiktoken-pattern, as {names}")
        options = replace(options, tiktoken_pattern=name)
        ranks = {}
        for number, line in enumerate(content.splitlines(), start=1):
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except ValueError as error:
                raise TextError(
                    f"{path} is not a tiktoken file: line {number} is {shown(line)}: {error}"
                ) from None
        pattern, special_ids = TIKTOKEN_PATTERNS.get(name, (name, {}))
        return cls(path, ranks, pattern, name, dict(special_ids), options)

    @cached_property
    def library(self) -> Any:
        """The `tiktoken.Encoding`."""
        tiktoken = package("tiktoken")
        try:
            return tiktoken.Encoding(
                os.path.basename(self.path),
                pat_str=self.pattern,
                mergeable_ranks=self.ranks,
                special_tokens=self.special_ids,
            )
        except ValueError as error:
            raise ConfigError(f"pattern {shown(self.pattern)} cannot be used: {error}") from None

    @cached_property
    def size(self) -> int:
        return 1 + max(itertools.chain(self.ranks.values(), self.special_ids.values()))

    @cached_property
    def fingerprint(self) -> str:
        settings = json.dumps([self.pattern, self.special_ids], sort_keys=True)
        return sha256(_rank_lines(self.ranks), settings.encode())

    def id_of(self, token: str) -> int | None:
        number = self.special_ids.get(token)
        return self.ranks.get(token.encode(errors="replace")) if number is None else number

    def special_tokens(self) -> dict[str, int]:
        return dict(self.special_ids)

    def decode(self, ids: list[int]) -> str:
        return str(self.library.decode(ids))

    def encode_batch(self, texts: list[str]) -> FlatIds:
        special = set(self.special_ids) if self.options.special_tokens_in_text else set[str]()
        options = {"allowed_special": special, "disallowed_special": ()}
        return joined_ids([self.library.encode_to_numpy(text, **options) for text in texts])

    def fast_encoder(self) -> EncodeBatch:
        pattern = _FASTOKENS_PATTERNS.get(self.pattern_name, self.pattern)
        number = os.memfd_create("ranks.tiktoken")  # fastokens reads only files
        with os.fdopen(number, "wb") as file:
            file.write(_rank_lines(self.ranks))
            file.flush()
            path, options = f"/proc/self/fd/{number}", {"special_tokens": self.special_ids}
            return self.fastokens(lambda kind: kind.from_tiktoken(path, pattern=pattern, **options))


class MegatronRanks(TiktokenVocabulary):
    """Megatron-LM's own form of tiktoken ranks: a JSON list, and 1,000 special tokens before it."""

    @classmethod
    def matches(cls, path: str, content: bytes) -> bool:
        return content[:4096].lstrip()[:1] == b"["

    @classmethod
    def load(cls, path: str, content: bytes, options: Options) -> TiktokenVocabulary:
        names, given = tuple(_MEGATRON_PATTERNS), options.tiktoken_pattern or "v2"
        name = check_choice("tiktoken_pattern of a tiktoken file in JSON", given, names)
        first = _NUM_MEGATRON_SPECIAL
        try:
            entries = json.loads(content)[: _MEGATRON_SIZE - first]
            ranks = {base64.b64decode(one["token_bytes"]): one["rank"] + first for one in entries}
            if [rank - first for rank in ranks.values()] != list(range(len(entries))):
                raise ValueError("the ranks are not 0, 1, 2, ...")
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise TextError(f"{path} is not a tokenizer file of Megatron-LM ({error})") from None
        others = (f"<SPECIAL_{number}>" for number in range(len(_MEGATRON_SPECIAL), first))
        special = {token: number for number, token in enumerate((*_MEGATRON_SPECIAL, *others))}
        return cls(path, ranks, _MEGATRON_PATTERNS[name], "", special, options, "</s>", "<s>")


def _rank_lines(ranks: dict[bytes, int]) -> bytes:
    """Ranks as the lines of a .tiktoken file."""
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())
