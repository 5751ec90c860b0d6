"""Option classes of verbs whose work is done by lower rooms, or that only the command line has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.option_class import StrPath, check_options, option, parse_escapes, parse_size

ENCODERS = ("auto", "fastokens", "tokenizers", "tiktoken", "sentencepiece", "bytes")


@dataclass(frozen=True, kw_only=True)
class TokenizerOptions:
    """What `tokenize` says about the tokenizer, as arguments of `Tokenizer`."""

    encoder: str = option(
        "auto",
        help="tokenizing library; auto: the fastest that agrees with the reference",
        choices=ENCODERS,
        group="tokenizer",
    )
    tiktoken_pattern: str | None = option(
        None,
        help="for a .tiktoken file: gpt2, cl100k_base, o200k_base, ..., or a regular expression",
        metavar="PATTERN",
        group="tokenizer",
    )
    add_special_tokens: bool = option(
        False,
        help="add the special tokens of the tokenizer's post-processor to each text",
        group="tokenizer",
    )
    special_tokens_in_text: bool = option(
        True,
        help='encode "<|endoftext|>" in a text as plain text, not as that token',
        flags="--plain-special-tokens",
        group="tokenizer",
    )
    eod_token: str | None = option(
        None,
        help="end-of-document token",
        default_text="the one of <|endoftext|>, <|end_of_text|>, </s>, <eos> there is",
        group="tokenizer",
    )
    bos_token: str | None = option(None, help="token of --prepend-bos", group="tokenizer")


@dataclass(frozen=True, kw_only=True)
class SentenceOptions:
    """What `tokenize` says about sentences, as arguments of `SentenceSplitter`."""

    library: str | None = option(
        None,
        help="make each sentence a sequence, split by this library (without a name: punkt, as in "
        "Megatron-LM's script); writes PREFIX_KEY_sentence",
        choices=("punkt", "sentencex"),
        flags="--split-sentences",
        nargs="?",
        const="punkt",
        group="documents",
    )
    lang: str = option(
        "english", help="language of the sentences", metavar="NAME", group="documents"
    )
    keep_newlines: bool = option(False, help="keep the space between sentences", group="documents")


@dataclass(frozen=True, kw_only=True)
class InputListOption:
    """The list of inputs of `tokenize`, which its function takes as inputs."""

    input_list: str | None = option(
        None, help="file with an input per line", group="input", metavar="FILE"
    )


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The options of `train_tokenizer`."""

    inputs: Sequence[StrPath] = option(
        help="files, folders and patterns; - is standard input", flags="--input"
    )
    output: StrPath = option(help="the tokenizer.json to write", metavar="FILE")
    vocabulary_size: int = option(
        help="number of tokens: the special ones, the 256 bytes, and merges",
        flags="--vocab-size",
        least=1,
    )
    json_keys: Sequence[str] = option(("text",), help="text keys", metavar="KEY")
    special_tokens: Sequence[str] = option(
        ("<|endoftext|>",),
        help="special tokens, with the first ids",
        metavar="TOKEN",
        nargs="*",
    )
    max_bytes: int | None = option(
        None,
        help="text to train on, taken evenly from all inputs: 500M, 2G",
        default_text="all",
        parse=parse_size,
        metavar="SIZE",
    )
    separator: str | None = option(
        None,
        help=r"text between the documents of a plain text file: '\n\n'",
        default_text="a file is a document",
        parse=parse_escapes,
    )


@dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """The option of verbs that read folders of shards."""

    dtype: str | None = option(
        None,
        help="dtype of a folder whose metadata.json does not say it",
        default_text="uint32",
        choices=("uint16", "uint32", "int32"),
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class InspectOptions(ShardOptions):
    """The options of `inspect`."""

    prefix: str = option(
        help="path prefix of a token file, or folder of a shuffle", flags="prefix", metavar="PREFIX"
    )
    tokenizer: str | None = option(
        None, help="tokenizer file or folder to decode with", metavar="FILE"
    )
    tiktoken_pattern: str | None = option(
        None, help="for a .tiktoken file, as in `tokenize`", metavar="PATTERN"
    )
    document: int = option(0, help="document number")
    svg: str | None = option(
        None,
        help="write a picture of the domains' shares along the output of a shuffle",
        metavar="FILE",
    )


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(ShardOptions):
    """The options of `verify`."""

    prefixes: Sequence[str] = option(
        help="path prefixes of token files, and folders of shuffles",
        flags="prefixes",
        metavar="PREFIX",
    )
    threads: int | None = option(None, help="worker threads", default_text="one per core", least=1)


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The options of `demo`."""

    folder: str = option("millrace-demo", help="output folder", metavar="DIR")


@dataclass(frozen=True, kw_only=True)
class JsonOption:
    """The option of verbs that report numbers."""

    as_json: bool = option(False, help="print JSON", flags="--json")
