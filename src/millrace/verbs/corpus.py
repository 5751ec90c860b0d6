"""`tokenize`, `train-tokenizer` and `shuffle`: from text to shards of token files."""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from millrace.chats import ChatEncoder, ChatOptions
from millrace.encoding import ENCODERS, Tokenizer
from millrace.encoding.training import TrainOptions, train_tokenizer
from millrace.engine import ALREADY, ENVIRONMENT
from millrace.errors import ConfigError
from millrace.inspect import format_report
from millrace.option_class import option, take_options
from millrace.shuffling import shuffle
from millrace.shuffling.shuffle_job import ShuffleOptions
from millrace.text import SentenceSplitter, read_input_list
from millrace.tokenizing import TokenizeOptions, TokenizeResult, tokenize
from millrace.verbs import JsonOption, Verb

_tokenizer = partial(option, group="tokenizer")
_sentences = partial(option, group="sentences")


@dataclass(frozen=True, kw_only=True)
class TokenizerOptions:
    """The options of `tokenize` that are arguments of `Tokenizer`."""

    # fmt: off
    encoder: str = _tokenizer(
        "tokenizing library; auto: the fastest that agrees with the reference", "auto",
        choices=("auto", *ENCODERS))
    tiktoken_pattern: str | None = _tokenizer(
        "for a .tiktoken file: gpt2, cl100k_base, o200k_base, ..., or a regular expression", None,
        metavar="PATTERN")
    add_special_tokens: bool = _tokenizer(
        "add the special tokens of the tokenizer's post-processor to each text", False)
    special_tokens_in_text: bool = _tokenizer(
        'encode "<|endoftext|>" in a text as plain text, not as that token', True,
        flags="--plain-special-tokens")
    eod_token: str | None = _tokenizer(
        "end-of-document token", None,
        default_text="the one of <|endoftext|>, <|end_of_text|>, </s>, <eos> there is")
    bos_token: str | None = _tokenizer("token of --prepend-bos and of chat templates", None)
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class SentenceOptions:
    """The options of `tokenize` that are arguments of `SentenceSplitter`."""

    # fmt: off
    library: str | None = _sentences(
        "make each sentence a sequence, split by this library (without a name: punkt, as in "
        "Megatron-LM's script); writes PREFIX_KEY_sentence", None,
        choices=("punkt", "sentencex"), flags="--split-sentences", nargs="?", const="punkt")
    lang: str = _sentences("language of the sentences", "english", metavar="NAME")
    keep_newlines: bool = _sentences("keep the space between sentences", False)
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    # fmt: off
    input_list: str | None = option(
        "file with an input per line", None, group="input", metavar="FILE")
    chat: bool = option(
        "encode conversations by a chat template, and write which tokens are trained on; writes "
        "PREFIX_chat_document", False, group="input")
    # fmt: on


def _tokenize(
    tokenizer: str,
    inputs: Sequence[str] = (),
    input_list: str | None = None,
    as_json: bool = False,
    **options: Any,
) -> str:
    for name, value in ENVIRONMENT.items():  # one worker does its work in this process
        os.environ.setdefault(name, value)
    if input_list is not None:
        inputs = [*inputs, *read_input_list(input_list)]
    elif not inputs:
        raise ConfigError("there is no input; give --input or --input-list")
    _check_effects(options)
    settings = take_options(TokenizerOptions, options)
    sentences = take_options(SentenceOptions, options)
    if "library" in sentences:
        options["splitter"] = SentenceSplitter(**sentences)
    chats, is_chat = take_options(ChatOptions, options), options.pop("chat", False)
    if is_chat and "json_keys" in options:
        raise ConfigError("--chat reads whole rows, and writes PREFIX_chat: leave out json_keys")
    # Ray writes about lost nodes to stdout, which is the report's.
    with contextlib.redirect_stdout(sys.stderr):
        options["tokenizer"] = Tokenizer(tokenizer, **settings)
        if is_chat:
            options["row_encoder"] = ChatEncoder(options["tokenizer"], **chats)
            options["json_keys"] = ("chat",)
        result = tokenize(inputs, show_progress=True, **options)
    return _tokenize_report(result, as_json)


def _check_effects(options: dict[str, Any]) -> None:
    """Raises a ConfigError for options that change nothing without another one."""
    for names, needed, flags in _WITHOUT_EFFECT:
        # Scripts for Megatron-LM pass the default language.
        idle = [name for name in names if options.get(name) not in (None, SentenceOptions.lang)]
        if idle and options.keys().isdisjoint(needed):
            raise ConfigError(f"{', '.join(idle)}: add {flags}, or leave this out")


_WITHOUT_EFFECT: Sequence[tuple[Sequence[str], Sequence[str], str]] = (
    (["eod_token"], ["append_eod", "chat"], "--append-eod or --chat"),
    (["bos_token"], ["prepend_bos", "chat"], "--prepend-bos or --chat"),
    (["lang", "keep_newlines"], ["library"], "--split-sentences"),
    (["keep_sequential_samples"], ["partitions"], "--partitions"),
    ([field.name for field in dataclasses.fields(ChatOptions)], ["chat"], "--chat"),
)
"""Options that change nothing unless one of others is given, and the flags of those."""


def _tokenize_report(result: TokenizeResult, as_json: bool) -> str:
    rate = result.num_bytes_done / 1e6 / max(result.seconds, 1e-9)
    if as_json:
        report = {
            "documents": result.num_documents,
            "tokens": sum(result.num_tokens.values()),
            "tokens_by_key": result.num_tokens,
            "bytes": result.num_bytes,
            "seconds": round(result.seconds, 3),
            "skipped": result.num_skipped,
            "first_skipped": result.skipped,
            "chunks_done": result.num_chunks_done,
            "chunks_kept": result.num_chunks_kept,
            "megabytes_per_second": round(rate, 1),
            "encoder": result.encoder,
            "notices": result.notices,
            "prefixes": result.prefixes,
            "report": result.report,
        }
        return json.dumps(report)
    lines = [
        f"{prefix}.bin/.idx: {result.num_documents:,} documents, {result.num_tokens[key]:,} tokens"
        for key, prefix in result.prefixes.items()
    ]
    lines.append(
        f"{result.num_bytes / 1e6:,.1f} MB of text in {result.seconds:.1f} s, {rate:.1f} MB/s, "
        f"by {result.encoder}"
    )
    lines += _kept_lines("chunks", result.num_chunks_kept, result.num_chunks_done)
    if result.num_skipped:
        lines.append(f"{result.num_skipped:,} lines or rows were skipped:")
        lines += ["  {file}:{line}: {reason}".format_map(row) for row in result.skipped]
        if result.num_skipped > len(result.skipped):
            lines.append(f"  and {result.num_skipped - len(result.skipped):,} more")
    if result.report:
        lines.append(format_report({**result.report, "skipped rows": result.num_skipped}))
    return "\n".join(lines)


def _train_tokenizer(**options: Any) -> str:
    has_terminal = sys.stderr is not None and sys.stderr.isatty()
    result = train_tokenizer(show_progress=has_terminal, **options)
    return (
        f"{result.tokenizer.path}: {result.tokenizer.vocabulary_size:,} tokens, trained on "
        f"{result.num_texts:,} texts of {result.num_bytes / 1e6:,.1f} MB in {result.seconds:.1f} s"
    )


def _shuffle(input_dir: str | None = None, as_json: bool = False, **options: Any) -> str:
    with contextlib.redirect_stdout(sys.stderr):  # as in `_tokenize`
        result = shuffle(input_dir, show_progress=True, **options)
    if as_json:
        return json.dumps(dataclasses.asdict(result))
    lines = [
        f"{result.output_dir}: {result.num_items:,} {result.unit} of {len(result.domain_stats):,} "
        f"domains in {len(result.shard_sizes):,} shards, {result.num_tokens:,} tokens"
    ]
    if ALREADY in result.notices:
        return "\n".join([*lines, ALREADY])
    rate = result.num_bytes / 1e6 / max(result.seconds, 1e-9)
    lines.append(
        f"{result.num_bytes / 1e6:,.1f} MB in {result.seconds:.1f} s, {rate:,.1f} MB/s, by the "
        f"plan {result.plan}"
    )
    return "\n".join(lines + _kept_lines("tasks", result.num_tasks_kept, result.num_tasks_done))


def _kept_lines(unit: str, num_kept: int, num_done: int) -> list[str]:
    total = num_kept + num_done
    return [f"{num_kept:,} of {total:,} {unit} were kept from an earlier run"] if num_kept else []


VERBS = (
    Verb(
        "tokenize",
        _tokenize,
        (TokenizeOptions, InputOptions, TokenizerOptions, SentenceOptions, ChatOptions, JsonOption),
        "Converts text to token files. Reads JSONL, Parquet, Arrow, CSV and plain text, also "
        "compressed, and writes Megatron-LM's token files PREFIX_KEY_document.bin/.idx, one pair "
        "per key. A job that was killed continues when the same command runs again.",
    ),
    Verb(
        "train-tokenizer",
        _train_tokenizer,
        (TrainOptions,),
        "Trains a tokenizer. Reads the same files as `tokenize`, and writes a byte-level BPE "
        "tokenizer as a Hugging Face tokenizer.json.",
    ),
    Verb(
        "shuffle",
        _shuffle,
        (ShuffleOptions, JsonOption),
        "Shuffles token files globally. Cuts the token files of many domains into sequences "
        "of a fixed length, permutes all of them, and writes shards that are token files "
        "themselves. A job that was killed continues when the same command runs again.",
    ),
)
