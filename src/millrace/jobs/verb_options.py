"""Option classes of verbs whose work is done by lower rooms, or that only the command line has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.encoding import ENCODERS
from millrace.option_class import StrPath, check_options, option, parse_escapes, parse_size


@dataclass(frozen=True, kw_only=True)
class TokenizerOptions:
    """What `tokenize` says about the tokenizer, as arguments of `Tokenizer`."""

    encoder: str = option(
        "tokenizing library; auto: the fastest that agrees with the reference",
        "auto",
        choices=("auto", *ENCODERS),
        group="tokenizer",
    )
    tiktoken_pattern: str | None = option(
        "for a .tiktoken file: gpt2, cl100k_base, o200k_base, ..., or a regular expression",
        None,
        metavar="PATTERN",
        group="tokenizer",
    )
    add_special_tokens: bool = option(
        "add the special tokens of the tokenizer's post-processor to each text",
        False,
        group="tokenizer",
    )
    special_tokens_in_text: bool = option(
        'encode "<|endoftext|>" in a text as plain text, not as that token',
        True,
        flags="--plain-special-tokens",
        group="tokenizer",
    )
    eod_token: str | None = option(
        "end-of-document token",
        None,
        default_text="the one of <|endoftext|>, <|end_of_text|>, </s>, <eos> there is",
        group="tokenizer",
    )
    bos_token: str | None = option("token of --prepend-bos", None, group="tokenizer")


@dataclass(frozen=True, kw_only=True)
class SentenceOptions:
    """What `tokenize` says about sentences, as arguments of `SentenceSplitter`."""

    library: str | None = option(
        "make each sentence a sequence, split by this library (without a name: punkt, as in "
        "Megatron-LM's script); writes PREFIX_KEY_sentence",
        None,
        choices=("punkt", "sentencex"),
        flags="--split-sentences",
        nargs="?",
        const="punkt",
        group="documents",
    )
    lang: str = option("language of the sentences", "english", metavar="NAME", group="documents")
    keep_newlines: bool = option("keep the space between sentences", False, group="documents")


@dataclass(frozen=True, kw_only=True)
class InputListOption:
    """The list of inputs of `tokenize`, which its function takes as inputs."""

    input_list: str | None = option(
        "file with an input per line", None, group="input", metavar="FILE"
    )


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The options of `train_tokenizer`."""

    inputs: Sequence[StrPath] = option(
        "files, folders and patterns; - is standard input", flags="--input"
    )
    output: StrPath = option("the tokenizer.json to write", metavar="FILE")
    vocabulary_size: int = option(
        "number of tokens: the special ones, the 256 bytes, and merges",
        flags="--vocab-size",
        least=1,
    )
    json_keys: Sequence[str] = option("text keys", ("text",), metavar="KEY")
    special_tokens: Sequence[str] = option(
        "special tokens, with the first ids", ("<|endoftext|>",), metavar="TOKEN", nargs="*"
    )
    max_bytes: int | None = option(
        "text to train on, taken evenly from all inputs: 500M, 2G",
        None,
        default_text="all",
        parse=parse_size,
        metavar="SIZE",
    )
    separator: str | None = option(
        r"text between the documents of a plain text file: '\n\n'",
        None,
        default_text="a file is a document",
        parse=parse_escapes,
    )


@dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """The option of verbs that read folders of shards."""

    dtype: str | None = option(
        "dtype of a folder whose metadata.json does not say it",
        None,
        default_text="uint32",
        choices=("uint16", "uint32", "int32"),
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class InspectOptions(ShardOptions):
    """The options of `inspect`."""

    prefix: str = option(
        "path prefix of a token file, or folder of a shuffle", flags="prefix", metavar="PREFIX"
    )
    tokenizer: str | None = option("tokenizer file or folder to decode with", None, metavar="FILE")
    tiktoken_pattern: str | None = option(
        "for a .tiktoken file, as in `tokenize`", None, metavar="PATTERN"
    )
    document: int = option("document number", 0)
    svg: str | None = option(
        "write a picture of the domains' shares along the output of a shuffle", None, metavar="FILE"
    )


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(ShardOptions):
    """The options of `verify`."""

    prefixes: Sequence[str] = option(
        "path prefixes of token files, and folders of shuffles", flags="prefixes", metavar="PREFIX"
    )
    threads: int | None = option("worker threads", None, default_text="one per core", least=1)


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The options of `demo`."""

    folder: str = option("output folder", "millrace-demo", metavar="DIR")


@dataclass(frozen=True, kw_only=True)
class JsonOption:
    """The option of verbs that report numbers."""

    as_json: bool = option("print JSON", False, flags="--json")
