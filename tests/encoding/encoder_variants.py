"""Compares fast encoders with the tokenizers library on many variants of tokenizer.json.

    python -m tests.encoding.encoder_variants --cases 2000 --seed 1

A fast encoder may refuse a variant, or differ on the built-in edge cases: it is then not used. It
must not agree on the edge cases and differ on other texts: that is a miss, and the exit code is 1.
"""

import argparse
import copy
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

from millrace.encoding import edge_cases as built_in, tiktoken_file as tiktoken
from millrace.encoding.encoder_check import choose_encoder, difference, results_of
from millrace.encoding.hugging_face import JsonVocabulary
from millrace.encoding.vocabulary import Options
from millrace.errors import TextError

_CL100K = tiktoken._FASTOKENS_PATTERNS["cl100k_base"]
PATTERNS = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": _CL100K,
    "cl100k possessive": tiktoken.TIKTOKEN_PATTERNS["cl100k_base"][0],
    "qwen2": _CL100K.replace("{1,3}", ""),
    "qwen3.5": _CL100K.replace("{1,3}", "")
    .replace(r"?\p{L}+", r"?[\p{L}\p{M}]+")
    .replace(r"\s\p{L}\p{N}", r"\s\p{L}\p{M}\p{N}"),
    "o200k": tiktoken.TIKTOKEN_PATTERNS["o200k_base"][0],
    "tekken": tiktoken._MEGATRON_PATTERNS["v2"],
    "deepseek": r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?"
    r"[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "bloom": r" ?[^(\s|[.,!?…。，、।۔،])]+",
}
UNUSUAL = r"""
\p{N}{1,3} [一-龥぀-ゟ゠-ヿ]+ \d{1,3}(?=(?:\d{3})*\b) \w+|[^\w\s]+ \s+ . \d (?=[A-Z]) [A-Z][a-z]*
[[:alpha:]]+|[[:digit:]]+|[[:space:]]+|[[:punct:]]+ \p{P} [\p{S}\p{P}]+ \p{Han}+
\p{Hiragana}+|\p{Katakana}+|\p{Latin}+ \b\w \W+ (?s). (?<=\s)\S+ a.*?b (?i)the|mill|ss
(?i:k|s|ß) [0-9a-fA-F]{2} ^.*$ \A\s+|\s+\z \X \R \h+ \P{L}+ x* \p{Emoji}+ \p{M}+ \p{C} a|ab|abc
[ \u00a0]+ \s+$ (?>\s+)(?!\S) \s++(?!\S)|\S++ \p{Lu}\p{Ll}*|\p{Ll}+ [\w']+ \p{Nd}+|\p{Nl}|\p{No}
\S [^\S\n]+ \w (\S)\1+ \D+
"""
PATTERNS.update((pattern, pattern) for pattern in UNUSUAL.split())

BEHAVIORS = ("Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous")


def split(pattern: dict[str, str], behavior: str = "Isolated", invert: bool = False) -> Any:
    return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert}


def byte_level(add_prefix_space: bool = False, use_regex: bool = False) -> Any:
    flags = {"add_prefix_space": add_prefix_space, "use_regex": use_regex, "trim_offsets": True}
    return {"type": "ByteLevel", **flags}


def sequence(*parts: Any, name: str = "pretokenizers") -> Any:
    return {"type": "Sequence", name: list(parts)}


SPLITTERS = [
    *(
        {"type": name}
        for name in "Whitespace WhitespaceSplit BertPreTokenizer UnicodeScripts".split()
    ),
    *({"type": "Punctuation", "behavior": behavior} for behavior in BEHAVIORS),
    *({"type": "Digits", "individual_digits": flag} for flag in (True, False)),
    {"type": "CharDelimiterSplit", "delimiter": "a"},
    {"type": "FixedLength", "length": 5},
    *(
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": flag}
        for scheme in ("always", "first", "never")
        for flag in (True, False)
    ),
]
_PREPEND = {"type": "Prepend", "prepend": "▁"}
_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_OF_ACCENTS = ("NFD", "Lowercase", "StripAccents")
_BERT = ("clean_text", "handle_chinese_chars", "lowercase")
NORMALIZERS = [
    *({"type": name} for name in "NFC NFD NFKC NFKD Lowercase StripAccents Nmt ByteLevel".split()),
    *(
        {"type": "Strip", "strip_left": left, "strip_right": right}
        for left, right in ((True, True), (True, False), (False, True))
    ),
    *(_PREPEND, _SPACES, sequence(_PREPEND, _SPACES, name="normalizers")),
    *(
        {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}
        for pattern, content in ((" {2,}", " "), (r"\s+", " "), (r"\d", "0"), (r"\p{P}", ""))
    ),
    *(
        {"type": "BertNormalizer", **dict.fromkeys(_BERT, clean), "strip_accents": accents}
        for clean, accents in ((True, None), (False, True), (True, False))
    ),
    sequence(*({"type": name} for name in _OF_ACCENTS), name="normalizers"),
]
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
TOKENS = ("<tok>", "ab", "<TOK>x", "  ", "é", "<t", "the", "1", "\n", "'s")


@cache
def models() -> dict[str, dict[str, Any]]:
    """Small vocabularies of every kind, trained on the edge cases."""
    from tokenizers import Tokenizer, models as m, pre_tokenizers as pre, trainers as t

    texts = [*built_in.in_surroundings(built_in.UNITS), *built_in.combinations()]
    kinds: dict[str, tuple[Any, ...]] = {
        "byte_level": (m.BPE, pre.ByteLevel(add_prefix_space=False), t.BpeTrainer, 900),
        "bpe": (m.BPE, pre.Metaspace(), t.BpeTrainer, 1800),
        "unigram": (m.Unigram, pre.Metaspace(), t.UnigramTrainer, 1800),
        "wordpiece": (m.WordPiece, pre.BertPreTokenizer(), t.WordPieceTrainer, 1500),
        "wordlevel": (m.WordLevel, pre.Whitespace(), t.WordLevelTrainer, 800),
    }
    unknown = {"unk_token": "<unk>"}
    of_trainers: dict[str, dict[str, Any]] = {
        "byte_level": {"initial_alphabet": pre.ByteLevel.alphabet()},
        "unigram": unknown,
    }
    result = {}
    for name, (model, splitter, trainer, size) in kinds.items():
        tokenizer = Tokenizer(model(**({} if name in of_trainers else unknown)))
        tokenizer.pre_tokenizer = splitter
        special = "<|endoftext|>" if name == "byte_level" else "<unk>"
        options = {"vocab_size": size, "special_tokens": [special], "show_progress": False}
        tokenizer.train_from_iterator(texts, trainer(**options, **of_trainers.get(name, {})))
        result[name] = json.loads(tokenizer.to_str())

    def variant(name: str, **changes: Any) -> dict[str, Any]:
        config = copy.deepcopy(result[name])
        config["model"].update(changes)
        return config

    result["fused"] = variant("bpe", fuse_unk=True)
    result["no_unknown"] = variant("bpe", unk_token=None)
    fallback = variant("bpe", byte_fallback=True)
    for byte in range(256):
        fallback["model"]["vocab"][f"<0x{byte:02X}>"] = len(fallback["model"]["vocab"])
    result["fallback"] = fallback
    result["fused_fallback"] = variant("fallback", fuse_unk=True)
    ignoring = variant("byte_level", ignore_merges=True)
    for word in ("ĠxĠ", "123", "don't", "'s", "ĠmillĠ", "zqzq", "中文"):
        ignoring["model"]["vocab"].setdefault(word, len(ignoring["model"]["vocab"]))
    result["ignore_merges"] = ignoring
    return result


def variants(cases: int, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    draw = random.Random(seed)
    for _ in range(cases):
        name = draw.choice(["byte_level"] * 6 + list(models()))
        config = copy.deepcopy(models()[name])
        is_byte_level = name in ("byte_level", "ignore_merges")
        kind = draw.randrange(6)
        if is_byte_level and kind < 4:
            pattern = {"Regex": PATTERNS[draw.choice(list(PATTERNS))]}
            if kind == 3 and draw.random() < 0.3:
                pattern = {"String": draw.choice([" ", "a", "\n", "ab", "'", "  "])}
            parts = [split(pattern)]
            if draw.random() < 0.4:
                parts = [split(pattern, draw.choice(BEHAVIORS), draw.random() < 0.4)]
            if draw.random() < 0.2:
                parts.insert(draw.randrange(2), draw.choice(SPLITTERS))
            config["pre_tokenizer"] = sequence(*parts, byte_level(use_regex=draw.random() < 0.1))
        elif is_byte_level and kind == 4:
            config["pre_tokenizer"] = byte_level(draw.random() < 0.5, draw.random() < 0.5)
        elif kind < 4:
            splitter = draw.choice([*SPLITTERS, None])
            if splitter and is_byte_level:
                splitter = sequence(splitter, byte_level(use_regex=draw.random() < 0.5))
            config["pre_tokenizer"] = splitter
        if draw.random() < 0.4:
            config["normalizer"] = draw.choice(NORMALIZERS)
        if draw.random() < 0.4:
            flags = [{flag: draw.random() < 0.25 for flag in FLAGS} for _ in range(4)]
            add_tokens(config, draw.sample(TOKENS, 4), flags)
        yield name, config


def add_tokens(config: dict[str, Any], tokens: list[str], flags: list[dict[str, bool]]) -> None:
    """Adds tokens; those of the model keep their ids, others get the next ones."""
    vocabulary = config["model"]["vocab"]
    if isinstance(vocabulary, list):
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    number = 1 + max(vocabulary.values())
    for token, values in zip(tokens, flags, strict=True):
        identifier = vocabulary.get(token, number)
        number += identifier == number
        config["added_tokens"].append({"id": identifier, "content": token, **values})
    config["added_tokens"].sort(key=lambda token: token["id"])


def random_texts(tokens: list[str], count: int, seed: int) -> list[str]:
    """Other texts than the built-in ones."""
    draw = random.Random(seed)
    texts = []
    starts = {32: 127, 9: 14, 160: 0x600, 0x900: 0xD000, 0xE000: 0x11000, 0x1F000: 0x1FB00}
    ranges = list(starts.items())
    for _ in range(count // 2):
        numbers = [draw.randrange(*draw.choice(ranges)) for _ in range(draw.randint(1, 12))]
        texts.append("".join(map(chr, numbers)))
    cases = built_in.edge_cases(tokens)
    for _ in range(count // 2):
        text = draw.choice(cases)[:40] + draw.choice(["", " ", "\n", "x"]) + draw.choice(cases)[:40]
        texts.append(text)
    return texts


def run(cases: int, seed: int, encoder: str = "fastokens", texts: int = 4000) -> Counter[str]:
    """Counts how the encoder fared: refused, caught, equal, missed."""
    counts: Counter[str] = Counter()
    for name, config in variants(cases, seed):
        parts = [config[key] for key in ("pre_tokenizer", "normalizer", "added_tokens")]
        try:
            content = json.dumps(config).encode()
            vocabulary = JsonVocabulary.load("variant", content, Options())
        except TextError:
            counts["invalid"] += 1
            continue
        chosen, encode, problem = choose_encoder(vocabulary, encoder)
        if chosen == encoder:
            more = random_texts(vocabulary.added_tokens(), texts, seed)
            problem = difference(encode, results_of(vocabulary.encode_batch, more)) or ""
            outcome = "missed" if problem else "equal"
        else:
            outcome = "refused" if "is not used" in problem else "caught"
        counts[outcome] += 1
        if problem:
            print(f"{outcome}: {json.dumps([name, *parts])}\n   {problem}", flush=True)
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--encoder", default="fastokens")
    totals = run(**vars(parser.parse_args()))
    print(dict(totals))
    sys.exit(1 if totals["missed"] else 0)
