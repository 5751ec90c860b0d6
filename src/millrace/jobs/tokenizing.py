"""Tokenise JSONL files into indexed datasets, as Megatron-LM's `preprocess_data.py` does."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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
    """What a tokenise job wrote.

    Attributes:
        prefixes: Path prefix of the indexed dataset of each key.
        num_documents: Number of documents in each dataset.
        num_tokens: Number of tokens of each key.
        num_bytes: Bytes of UTF-8 text, all keys together.
        seconds: Duration of the job.
    """

    prefixes: dict[str, str]
    num_documents: int
    num_tokens: dict[str, int]
    num_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class _Recipe:
    """What a worker needs to know."""

    tokenizer: Tokenizer
    keys: tuple[str, ...]
    append_eod: bool


@dataclass(frozen=True, kw_only=True)
class _EncodedBlock:
    """The documents of a block as ids.

    Attributes:
        num_bytes: Bytes of UTF-8 text.
        position: Bytes of all inputs up to the end of the block.
        columns: For each key, the tokens of all documents, and the length of each document.
    """

    num_documents: int
    num_bytes: int
    position: int
    columns: list[tuple[NDArray[Any], NDArray[np.int32]]]


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
    tokens has no sequence and gets no EOD. The output does not depend on the number of workers. All
    pairs appear together at the end; a job that fails or is ended by Ctrl-C leaves nothing behind.

    Args:
        inputs: JSONL files, plain, gzip or zstd. Each is read once, so it may be a pipe.
        output_prefix: First part of the output paths; the folder must exist.
        tokenizer: The tokenizer. Its vocabulary decides the dtype: uint16 below 65,500 ids, else
            int32.
        json_keys: Keys of the texts in each JSON object.
        append_eod: Whether each document ends with the tokenizer's EOD.
        workers: Number of processes; None: one per core.
        checksums: Whether to write a sidecar with checksums and provenance for each pair.
        show_progress: Whether to show progress on stderr.

    Raises:
        TextError: An input that cannot be read; the message names file and line.
        ConfigError: No input, no key, fewer than one worker, or an argument of a wrong type.
        MillraceError: A worker process that died, or another process that is building a pair.
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
        _ = tokenizer.eod  # fails here if the tokenizer has none, before any work
    recipe = _Recipe(tokenizer=tokenizer, keys=keys, append_eod=append_eod)
    sizes = [input_size(path) for path in paths]
    prefixes = {key: f"{output_prefix}_{key}_document" for key in keys}
    _check_inputs(paths, sizes, prefixes.values())
    total = None if None in sizes else sum(size for size in sizes if size)
    start = time.monotonic()
    num_documents = num_bytes = 0
    with interrupts_held(), contextlib.ExitStack() as stack:
        builders = []
        for key, prefix in prefixes.items():
            provenance = _provenance(recipe, paths, key) if checksums else None
            builder = IndexedDatasetBuilder(
                prefix, tokenizer.dtype, checksums=checksums, provenance=provenance
            )
            builders.append(stack.enter_context(builder))
        progress = stack.enter_context(Progress("tokenize", total, enabled=show_progress))
        blocks = ordered_map(_encode, _blocks(paths, sizes), context=recipe, workers=workers)
        for block in stack.enter_context(contextlib.closing(blocks)):
            for builder, (tokens, lengths) in zip(builders, block.columns, strict=True):
                builder.add_documents(tokens, lengths)
            num_documents += block.num_documents
            num_bytes += block.num_bytes
            rate = num_bytes / 1e6 / max(time.monotonic() - start, 1e-9)
            progress.update(block.position, f"{num_documents:,} documents  {rate:.1f} MB/s")
        with interruptible():  # the last time: after this the pairs are published
            pass
        finalize_together(builders)
    return TokenizeResult(
        prefixes=prefixes,
        num_documents=num_documents,
        num_tokens={key: builder.num_tokens for key, builder in zip(keys, builders, strict=True)},
        num_bytes=num_bytes,
        seconds=time.monotonic() - start,
    )


def _check_inputs(
    paths: Sequence[str], sizes: Sequence[int | None], prefixes: Iterable[str]
) -> None:
    outputs = {
        os.path.realpath(name(prefix))
        for prefix in prefixes
        for name in (bin_path, idx_path, info_path)
    }
    for number, (path, size) in enumerate(zip(paths, sizes, strict=True)):
        if os.path.realpath(path) in outputs:
            raise ConfigError(f"{path} is an input and would be overwritten; give another prefix")
        if size is None and path in paths[:number]:
            raise ConfigError(f"{path} is given twice, but a pipe can be read only once")


def _provenance(recipe: _Recipe, inputs: Sequence[str], key: str) -> dict[str, Any]:
    """The origin of the tokens, for the sidecar."""
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
    """Each block, with its end as a position in all inputs."""
    start = 0
    for path, size in zip(inputs, sizes, strict=True):
        for block in read_blocks(path):
            yield start + block.position, block
        start += size or 0


def _encode(recipe: _Recipe, item: tuple[int, LineBlock]) -> _EncodedBlock:
    position, block = item
    documents = document_texts(block, recipe.keys)
    lines = [line for line, _ in documents]
    columns = [[texts[i] for _, texts in documents] for i in range(len(recipe.keys))]
    return _EncodedBlock(
        num_documents=len(documents),
        num_bytes=sum(len(text.encode(errors="replace")) for texts in columns for text in texts),
        position=position,
        columns=[_encode_texts(recipe, block.path, lines, texts) for texts in columns],
    )


def _encode_texts(
    recipe: _Recipe, path: str, lines: Sequence[int], texts: Sequence[str]
) -> tuple[NDArray[Any], NDArray[np.int32]]:
    try:
        ids = recipe.tokenizer.encode(texts)
    except InvalidUnicodeError as error:
        raise TextError(f"{path}, line {lines[error.text_number]}: {error}") from None
    if recipe.append_eod:
        for document in ids:
            if document:
                document.append(recipe.tokenizer.eod)
    return flatten(ids, recipe.tokenizer.dtype)
