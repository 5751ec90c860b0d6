"""Train a tokenizer on the texts of files, so that a new project needs no hub."""

import itertools
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from millrace import checks, text
from millrace.checks import package
from millrace.encoding.tokenizer import Tokenizer
from millrace.errors import ConfigError, TextError
from millrace.files import atomic_file

_NUM_BYTES = 256
_PART_SIZE, _MOST_PARTS = 1 << 24, 1000


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """A trained tokenizer, and how many texts and bytes of UTF-8 it was trained on."""

    tokenizer: Tokenizer
    num_texts: int
    num_bytes: int
    seconds: float


def train_tokenizer(
    inputs: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    vocabulary_size: int,
    json_keys: Sequence[str] = ("text",),
    special_tokens: Sequence[str] = ("<|endoftext|>",),
    max_bytes: int | None = None,
    separator: str | None = None,
    show_progress: bool = False,
) -> TrainingResult:
    """Trains a byte-level BPE tokenizer and writes it as a Hugging Face `tokenizer.json`.

    The same files and arguments give the same tokenizer.

    Args:
        inputs: Files, folders and patterns, as for `millrace tokenize`.
        output: Path of the `tokenizer.json`; an old file is replaced.
        vocabulary_size: Number of tokens: at least the special ones and the 256 bytes. Fewer are
            written if the texts have no more pairs to merge.
        json_keys: Keys of the texts in each document.
        special_tokens: Special tokens, which get the first ids.
        max_bytes: Bytes of text to train on, taken evenly from all the inputs. None: all.
        separator: Text between the documents of a plain text file; None: the file is a document.
        show_progress: Whether to show progress on stderr.

    Raises:
        TextError: An input that cannot be read, a document without text under a key, or no text.
        ConfigError: An argument of a wrong type, or a vocabulary that is too small.
    """
    output = checks.check_path("output", output)
    keys = text.check_keys(json_keys)
    special = _special_tokens(special_tokens)
    size = checks.check_int("vocabulary_size", vocabulary_size, _NUM_BYTES + len(special))
    if max_bytes is not None:
        max_bytes = checks.check_int("max_bytes", max_bytes, 1)
    show_progress = checks.check_bool("show_progress", show_progress)
    if os.path.isdir(output) or not os.path.isdir(os.path.dirname(output) or "."):
        raise ConfigError(f"output must be a file in a folder that exists, not {output}")
    start = time.monotonic()
    files = text.find_inputs(inputs, separator=separator)
    part_size = max(_PART_SIZE, sum(file.size or 0 for file in files) // _MOST_PARTS)
    parts = [part for file in files for part in text.parts_of(file, part_size)]
    texts = _Texts(parts, keys, max_bytes)

    tokenizers = package("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=show_progress,
    )
    model.train_from_iterator(texts, trainer)
    if texts.num_bytes == 0:
        raise TextError("the inputs have no text to train on; give files with documents")
    with atomic_file(output) as file:
        file.write(model.to_str(pretty=True).encode())
    return TrainingResult(
        tokenizer=Tokenizer(output),
        num_texts=texts.num_texts,
        num_bytes=texts.num_bytes,
        seconds=time.monotonic() - start,
    )


def _special_tokens(tokens: Any) -> list[str]:
    is_list = isinstance(tokens, Iterable) and not isinstance(tokens, str)
    names: list[Any] = list(tokens) if is_list else [None]
    if not all(isinstance(name, str) and name for name in names) or len({*names}) < len(names):
        raise ConfigError(f"special_tokens are {checks.shown(tokens)}; give some texts, each once")
    return names


@dataclass
class _Texts:
    """Batches of texts, of each part in proportion to its size, and their counts."""

    parts: list[text.Part]
    keys: tuple[str, ...]
    max_bytes: int | None
    num_texts: int = 0
    num_bytes: int = 0

    def __iter__(self) -> Iterator[list[str]]:
        weight, most = sum(part.size for part in self.parts), None
        for number, part in enumerate(self.parts):
            if self.max_bytes is not None:
                # A part without a known size, such as a pipe, gets an equal share of the rest.
                share = part.size / weight if weight else 1 / (len(self.parts) - number)
                most = int((self.max_bytes - self.num_bytes) * share)
            yield from self._texts_of(part, most)
            weight -= part.size

    def _texts_of(self, part: text.Part, most: int | None) -> Iterator[list[str]]:
        def refuse(line: int, byte_offset: int, reason: str, data: bytes) -> None:
            place = f"{part.file.format.unit} {text.first_line_of(part) + line}"
            raise TextError(f"{part.source}, {place}: {reason}")

        query = text.Query(keys=self.keys, reject=refuse)
        for documents in text.read_documents(part, query) if most != 0 else ():
            texts: list[str] = []
            for document in itertools.chain.from_iterable(documents.texts):
                texts += [document] if isinstance(document, str) else document
            size = sum(len(one.encode()) for one in texts)
            if most is not None and size >= most:
                texts, size = list(_first_bytes(texts, most)), most
            self.num_bytes += size
            self.num_texts += len(texts)
            yield texts
            if most is not None:
                most -= size
                if most == 0:
                    return


def _first_bytes(texts: Iterable[str], most: int) -> Iterator[str]:
    """Texts of `most` bytes in all; the last is cut between characters."""
    for one in texts:
        data = one.encode()
        yield data[:most].decode(errors="ignore")
        most -= len(data)
        if most < 0:
            return
