"""Tokenise JSONL files into indexed datasets, as Megatron-LM's `preprocess_data.py` does."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.cores import available_cores
from millrace.errors import ConfigError, TextError
from millrace.jobs.executor import ordered_map
from millrace.jobs.progress import Progress
from millrace.store import IndexedDatasetBuilder
from millrace.text.documents import LineBlock, document_texts, file_size, read_blocks
from millrace.text.tokenizer import InvalidUnicodeError, Tokenizer, flatten


@dataclass(frozen=True, kw_only=True)
class TokenizeResult:
    """What a tokenise job did.

    Attributes:
        prefixes: path prefix of the indexed dataset of each key.
        num_documents: in each of them.
        num_tokens: of each key.
        num_bytes: of UTF-8 text, all keys together.
        seconds: that it took.
    """

    prefixes: dict[str, str]
    num_documents: int
    num_tokens: dict[str, int]
    num_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class _Encoded:
    """A block's documents as ids: for each key, all tokens and each document's length."""

    num_documents: int
    num_bytes: int
    position: int
    keys: list[tuple[NDArray[Any], NDArray[np.int32]]]


@dataclass(frozen=True, kw_only=True)
class _Recipe:
    """What a worker needs to know."""

    tokenizer: Tokenizer
    keys: tuple[str, ...]
    append_eod: bool


def tokenize(
    inputs: Sequence[str],
    output_prefix: str,
    tokenizer: Tokenizer,
    *,
    json_keys: Sequence[str] = ("text",),
    append_eod: bool = False,
    workers: int | None = None,
    checksums: bool = False,
    show_progress: bool = False,
) -> TokenizeResult:
    """Writes `{output_prefix}_{key}_document.bin/.idx` for each key.

    Documents keep the order of the files and lines. A document is one sequence; a document without
    tokens has none, and gets no EOD. The output does not depend on the number of workers. All
    pairs appear when all is done; a job that fails leaves nothing behind.

    Args:
        inputs: JSONL files, plain, gzip or zstd.
        output_prefix: its folder must exist.
        tokenizer: whose vocabulary decides the dtype: uint16 below 65,500 ids, else int32.
        json_keys: whose values are texts.
        append_eod: end each document with the tokenizer's EOD.
        workers: processes; None: as many as there are cores.
        checksums: write a sidecar with checksums and provenance for each pair.
        show_progress: on stderr.

    Raises:
        TextError: an input that cannot be read; the message names file and line.
        ConfigError: no input, no key, or fewer than one worker.
    """
    keys = tuple(json_keys)
    workers = available_cores() if workers is None else workers
    if not inputs or not keys or len(set(keys)) < len(keys):
        raise ConfigError(
            f"inputs are {list(inputs)} and keys {keys}: give at least one, each once"
        )
    if workers < 1:
        raise ConfigError(f"workers is {workers}; at least 1 is needed")
    if append_eod:
        _ = tokenizer.eod  # an error before any work
    recipe = _Recipe(tokenizer=tokenizer, keys=keys, append_eod=append_eod)
    sizes = [file_size(path) for path in inputs]
    start = time.monotonic()
    num_documents = num_bytes = 0
    with contextlib.ExitStack() as stack:
        builders = [
            stack.enter_context(
                IndexedDatasetBuilder(
                    f"{output_prefix}_{key}_document",
                    tokenizer.dtype,
                    checksums=checksums,
                    provenance=_provenance(recipe, inputs, key) if checksums else None,
                )
            )
            for key in keys
        ]
        progress = stack.enter_context(Progress("tokenize", sum(sizes))) if show_progress else None
        blocks = _blocks(inputs, sizes)
        for encoded in ordered_map(_encode, blocks, context=recipe, workers=workers):
            for builder, (tokens, lengths) in zip(builders, encoded.keys, strict=True):
                builder.add_documents(tokens, lengths)
            num_documents += encoded.num_documents
            num_bytes += encoded.num_bytes
            if progress:
                rate = num_bytes / 1e6 / max(time.monotonic() - start, 1e-9)
                progress.update(encoded.position, f"{num_documents:,} documents  {rate:.1f} MB/s")
    return TokenizeResult(
        prefixes={key: builder.prefix for key, builder in zip(keys, builders, strict=True)},
        num_documents=num_documents,
        num_tokens={key: builder.num_tokens for key, builder in zip(keys, builders, strict=True)},
        num_bytes=num_bytes,
        seconds=time.monotonic() - start,
    )


def _provenance(recipe: _Recipe, inputs: Sequence[str], key: str) -> dict[str, Any]:
    """What a sidecar says of where the tokens come from."""
    return {
        "tool": f"millrace {version('millrace')} tokenize",
        "tokenizer": {
            "path": recipe.tokenizer.path,
            "sha256": recipe.tokenizer.fingerprint,
            "vocabulary_size": recipe.tokenizer.vocabulary_size,
        },
        "inputs": list(inputs),
        "json_key": key,
        "append_eod": recipe.append_eod,
        "eod_token": recipe.tokenizer.eod_token,
    }


def _blocks(inputs: Sequence[str], sizes: Sequence[int]) -> Iterator[tuple[int, LineBlock]]:
    """Each block with the bytes of input that are read once it is done."""
    before = 0
    for path, size in zip(inputs, sizes, strict=True):
        for block in read_blocks(path):
            yield before + block.position, block
        before += size


def _encode(recipe: _Recipe, item: tuple[int, LineBlock]) -> _Encoded:
    position, block = item
    documents = document_texts(block, recipe.keys)
    encode = partial(_encode_key, recipe, block.path, [line for line, _ in documents])
    return _Encoded(
        num_documents=len(documents),
        num_bytes=sum(
            len(text.encode(errors="replace")) for _, texts in documents for text in texts
        ),
        position=position,
        keys=[encode([texts[i] for _, texts in documents]) for i in range(len(recipe.keys))],
    )


def _encode_key(
    recipe: _Recipe, path: str, lines: Sequence[int], texts: Sequence[str]
) -> tuple[NDArray[Any], NDArray[np.int32]]:
    tokenizer = recipe.tokenizer
    try:
        ids = tokenizer.encode(texts)
    except InvalidUnicodeError as error:
        raise TextError(f"{path}, line {lines[error.text_number]}: {error}") from None
    if recipe.append_eod:
        for part in ids:
            if part:
                part.append(tokenizer.eod)
    return flatten(ids, tokenizer.dtype)
