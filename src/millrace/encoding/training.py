"""Train a tokenizer on the texts of files, so that a new project needs no hub."""

import functools
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from millrace import checks, text
from millrace.checks import package
from millrace.encoding.tokenizer import Tokenizer
from millrace.errors import ConfigError, TextError
from millrace.files import write_file
from millrace.option_class import Options, StrPath, option, parse_escapes, parse_size
from millrace.text.json_values import texts_of

_NUM_BYTES = 256
_PART_SIZE, _MOST_PARTS = 1 << 24, 1000


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Options):
    """The options of a training; a ConfigError for one that cannot work."""

    # fmt: off
    inputs: Sequence[StrPath] = option(
        "files, folders and patterns; - is standard input", flags="--input",
        check=lambda name, value: value)
    output: StrPath = option("the tokenizer.json to write", metavar="FILE")
    vocabulary_size: int = option(
        "number of tokens: the special ones, the 256 bytes, and merges", flags="--vocab-size")
    json_keys: Sequence[str] = option(
        "text keys", ("text",), metavar="KEY", check=lambda name, value: text.check_keys(value))
    special_tokens: Sequence[str] = option(
        "special tokens, with the first ids", ("<|endoftext|>",), metavar="TOKEN", nargs="*")
    max_bytes: int | None = option(
        "text to train on, taken evenly from all inputs: 500M, 2G", None, least=1,
        default_text="all", parse=parse_size, metavar="SIZE")
    separator: str | None = option(
        r"text between the documents of a plain text file: '\n\n'", None,
        default_text="a file is a document", parse=parse_escapes)
    replace: bool = option("replace an old file", False)
    show_progress: bool = option("show progress on stderr", False, flags=None)
    # fmt: on

    def __post_init__(self) -> None:
        super().__post_init__()
        output = checks.check_local(os.fspath(self.output))
        least = _NUM_BYTES + len(self.special_tokens)
        checks.check_int("vocabulary_size (--vocab-size)", self.vocabulary_size, least)
        if not all(tokens := self.special_tokens) or len({*tokens}) < len(tokens):
            raise ConfigError(f"special_tokens are {tokens}; give some texts, each once")
        if os.path.isdir(output) or not os.path.isdir(os.path.dirname(output) or "."):
            raise ConfigError(f"output must be a file in a folder that exists, not {output}")
        if os.path.exists(output) and not self.replace:
            raise ConfigError(
                f"{output} is there already, and what it has encoded cannot be decoded without it: "
                "give --replace (replace=True), or another output"
            )


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """A trained tokenizer, and how many texts and bytes of UTF-8 it was trained on."""

    tokenizer: Tokenizer
    num_texts: int
    num_bytes: int
    seconds: float


def train_tokenizer(inputs: Sequence[StrPath], output: StrPath, **options: Any) -> TrainingResult:
    """Trains a byte-level BPE tokenizer and writes it as a Hugging Face `tokenizer.json`.

    The same files and arguments give the same tokenizer.

    Args:
        inputs: Files, folders and patterns, as for `millrace tokenize`.
        output: Path of the `tokenizer.json`; `replace=True` replaces an old file.
        options: The other fields of `TrainOptions`, of which `vocabulary_size` is required. Fewer
            tokens are written if the texts have no more pairs to merge.

    Raises:
        TextError: An input that cannot be read, a document without text under a key, or no text.
        ConfigError: An argument of a wrong type, a vocabulary that is too small, or an old file.
    """
    own = TrainOptions(inputs=inputs, output=output, **options)
    start = time.monotonic()
    files = text.find_inputs(own.inputs, separator=own.separator)
    part_size = max(_PART_SIZE, sum(file.size or 0 for file in files) // _MOST_PARTS)
    parts = [part for file in files for part in text.parts_of(file, part_size)]
    counts = Counter[str]()

    tokenizers = package("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=own.vocabulary_size,
        special_tokens=list(own.special_tokens),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=own.show_progress,
    )
    model.train_from_iterator(_texts(parts, own, counts), trainer)
    if counts["bytes"] == 0:
        raise TextError("the inputs have no text to train on; give files with documents")
    write_file(os.fspath(own.output), model.to_str(pretty=True).encode())
    return TrainingResult(
        tokenizer=Tokenizer(own.output),
        num_texts=counts["texts"],
        num_bytes=counts["bytes"],
        seconds=time.monotonic() - start,
    )


def _texts(
    parts: Sequence[text.Part], options: TrainOptions, counts: Counter[str]
) -> Iterator[list[str]]:
    """Batches of texts, of each part in proportion to its size; counts "texts" and "bytes"."""
    weight, most = sum(part.size for part in parts), sys.maxsize
    for number, part in enumerate(parts):
        if options.max_bytes is not None:
            # A part without a known size, such as a pipe, gets an equal share of the rest.
            share = part.size / weight if weight else 1 / (len(parts) - number)
            most = int((options.max_bytes - counts["bytes"]) * share)
        weight -= part.size
        keys, reject = tuple(options.json_keys), functools.partial(_refuse, part)
        query = text.Query(keys=keys, reject=reject)
        for documents in text.read_documents(part, query) if most > 0 else ():
            texts = list(texts_of(itertools.chain(*documents.texts)))
            size = sum(len(one.encode()) for one in texts)
            if size >= most:
                texts, size = list(_first_bytes(texts, most)), most
            counts.update(texts=len(texts), bytes=size)
            yield texts
            most -= size
            if most == 0:
                break


def _refuse(part: text.Part, line: int, byte_offset: int, reason: str, data: bytes) -> None:
    place = f"{part.file.format.unit} {text.first_line_of(part) + line}"
    raise TextError(f"{part.source}, {place}: {reason}")


def _first_bytes(texts: Iterable[str], most: int) -> Iterator[str]:
    """Texts of `most` bytes in all; the last is cut between characters."""
    for one in texts:
        data = one.encode()
        yield data[:most].decode(errors="ignore")
        most -= len(data)
        if most < 0:
            return
