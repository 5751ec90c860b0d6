"""The kinds of tokenizers' files: a class for each, and a line in `KINDS`."""

from __future__ import annotations

import os

from millrace.encoding.byte_vocabulary import BYTES, ByteVocabulary
from millrace.encoding.hugging_face import JsonVocabulary, load_folder
from millrace.encoding.sentencepiece_file import SentencePieceVocabulary
from millrace.encoding.tiktoken_file import MegatronRanks, TiktokenVocabulary
from millrace.encoding.vocabulary import (
    Vocabulary,
    VocabularyFile,
    VocabularyOptions,
    read_file,
)
from millrace.errors import ConfigError, TextError

KINDS: tuple[VocabularyFile, ...] = (
    MegatronRanks,
    JsonVocabulary,
    TiktokenVocabulary,
    SentencePieceVocabulary,
)
"""The kinds of files, of which the first that matches reads a file."""


def load_vocabulary(path: str, options: VocabularyOptions) -> Vocabulary:
    """Reads a vocabulary; the content of the file, not its name, tells its kind.

    Args:
        path: Path of a file, or of a folder of transformers; or "bytes".
        options: Options of the tokenizer.

    Raises:
        TextError: A missing or damaged file, or one of another kind; a missing package.
        ConfigError: An option that the vocabulary does not have.
    """
    vocabulary = _load(path, options)
    if options.tiktoken_pattern is not None and "tiktoken_pattern" not in vocabulary.option_names:
        raise ConfigError(
            f"tiktoken_pattern is {options.tiktoken_pattern!r}, but {path} is not a tiktoken file; "
            "leave the pattern out"
        )
    if options.add_special_tokens and "add_special_tokens" not in vocabulary.option_names:
        raise ConfigError(
            f"{path} does not say which special tokens to add to a text; leave out "
            "add_special_tokens (--add-special-tokens)"
        )
    return vocabulary


def _load(path: str, options: VocabularyOptions) -> Vocabulary:
    if path == BYTES:
        return ByteVocabulary()
    if os.path.isdir(path):
        return _load_from_folder(path, options)
    content = read_file(path)
    for kind in KINDS:
        if kind.matches(path, content):
            return kind.load(path, content, options)
    raise TextError(
        f"{path} is not a tokenizer file. Give a Hugging Face tokenizer.json, a transformers "
        "folder, a sentencepiece .model or a .tiktoken file"
    )


def _load_from_folder(folder: str, options: VocabularyOptions) -> Vocabulary:
    path = os.path.join(folder, "tokenizer.json")
    if os.path.isfile(path):
        return load_folder(folder, path, options)
    path = os.path.join(folder, "tokenizer.model")
    if os.path.isfile(path):
        return _load(path, options)
    raise TextError(
        f"{folder} has neither a tokenizer.json nor a tokenizer.model. Save it with "
        "`transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)`, "
        "or give the path of a tokenizer file"
    )
