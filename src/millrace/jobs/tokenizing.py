"""Tokenise JSONL files into indexed datasets, as Megatron-LM's `preprocess_data.py` does."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace import checks
from millrace.cores import available_cores
from millrace.errors import ConfigError, TextError
from millrace.interrupts import interruptible, interrupts_held
from millrace.jobs.executor import ordered_map
from millrace.jobs.progress import Progress
from millrace.store import IndexedDatasetBuilder, finalize_together
from millrace.store.publish import bin_path, idx_path, info_path
from millrace.text.documents import LineBlock, check_keys, document_texts, input_size, read_blocks
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
    inputs: Sequence[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
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
    pairs appear when all is done; a job that fails, or is ended by Ctrl-C, leaves nothing behind.

    Args:
        inputs: JSONL files, plain, gzip or zstd; each is read once, so that it may be a pipe.
        output_prefix: its folder must exist.
        tokenizer: whose vocabulary decides the dtype: uint16 below 65,500 ids, else int32.
        json_keys: whose values are texts.
        append_eod: end each document with the tokenizer's EOD.
        workers: processes; None: as many as there are cores.
        checksums: write a sidecar with checksums and provenance for each pair.
        show_progress: on stderr.

    Raises:
        TextError: an input that cannot be read; the message names file and line.
        ConfigError: no input, no key, fewer than one worker, or arguments of another kind.
        MillraceError: a worker process died, or another process is building a pair.
    """
    paths = checks.paths("inputs", inputs)
    if not paths:
        raise ConfigError("there are no inputs; give at least one file")
    keys = check_keys(json_keys)
    output_prefix = checks.one_path("output_prefix", output_prefix)
    if isinstance(tokenizer, (str, os.PathLike)):
        raise ConfigError(
            f"tokenizer is {tokenizer!r}; give millrace.text.Tokenizer({tokenizer!r})"
        )
    workers = checks.whole("workers", available_cores() if workers is None else workers, 1)
    append_eod = checks.flag("append_eod", append_eod)
    checksums = checks.flag("checksums", checksums)
    show_progress = checks.flag("show_progress", show_progress)
    if append_eod:
        _ = tokenizer.eod  # an error before any work
    recipe = _Recipe(tokenizer=tokenizer, keys=keys, append_eod=append_eod)
    sizes = [input_size(path) for path in paths]
    prefixes = [f"{output_prefix}_{key}_document" for key in keys]
    _check_inputs(paths, sizes, prefixes)
    total = None if None in sizes else sum(size for size in sizes if size)
    start = time.monotonic()
    num_documents = num_bytes = 0
    with interrupts_held(), contextlib.ExitStack() as stack:
        builders = [
            stack.enter_context(
                IndexedDatasetBuilder(
                    prefix,
                    tokenizer.dtype,
                    checksums=checksums,
                    provenance=_provenance(recipe, paths, key) if checksums else None,
                )
            )
            for key, prefix in zip(keys, prefixes, strict=True)
        ]
        progress = stack.enter_context(Progress("tokenize", total)) if show_progress else None
        blocks = _blocks(paths, sizes)
        results = ordered_map(_encode, blocks, context=recipe, workers=workers)
        for encoded in stack.enter_context(contextlib.closing(results)):
            for builder, (tokens, lengths) in zip(builders, encoded.keys, strict=True):
                builder.add_documents(tokens, lengths)
            num_documents += encoded.num_documents
            num_bytes += encoded.num_bytes
            if progress:
                rate = num_bytes / 1e6 / max(time.monotonic() - start, 1e-9)
                progress.update(encoded.position, f"{num_documents:,} documents  {rate:.1f} MB/s")
        with interruptible():  # for the last time: the pairs are published now
            pass
        finalize_together(builders)
    return TokenizeResult(
        prefixes={key: builder.prefix for key, builder in zip(keys, builders, strict=True)},
        num_documents=num_documents,
        num_tokens={key: builder.num_tokens for key, builder in zip(keys, builders, strict=True)},
        num_bytes=num_bytes,
        seconds=time.monotonic() - start,
    )


def _check_inputs(
    paths: Sequence[str], sizes: Sequence[int | None], prefixes: Sequence[str]
) -> None:
    outputs = {
        os.path.realpath(name(prefix))
        for prefix in prefixes
        for name in (bin_path, idx_path, info_path)
    }
    for place, (path, size) in enumerate(zip(paths, sizes, strict=True)):
        if os.path.realpath(path) in outputs:
            raise ConfigError(f"{path} is an input, and would be written; give another prefix")
        if size is None and path in paths[:place]:
            raise ConfigError(f"{path} is given twice, but a pipe can be read once alone")


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


def _blocks(inputs: Sequence[str], sizes: Sequence[int | None]) -> Iterator[tuple[int, LineBlock]]:
    """Each block with the bytes of input that are read once it is done."""
    before = 0
    for path, size in zip(inputs, sizes, strict=True):
        for block in read_blocks(path):
            yield before + block.position, block
        before += size or 0


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
