"""Tokenise JSONL files into indexed datasets, as Megatron-LM's `preprocess_data.py` does."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace import checks
from millrace.cores import available_cores
from millrace.errors import ConfigError
from millrace.interrupts import interruptible, interrupts_held
from millrace.jobs.executor import ordered_map
from millrace.jobs.progress import Progress
from millrace.store import IndexedDatasetBuilder, finalize_together
from millrace.store.publish import bin_path, idx_path, info_path
from millrace.text.documents import LineBlock, check_keys, document_texts, input_size, read_blocks
from millrace.text.tokenizer import Tokenizer, encoded_size


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


_Context = tuple[Tokenizer, tuple[str, ...], bool]
"""What a worker needs: the tokenizer, the keys, and whether documents end with its EOD."""


_EncodedBlock = tuple[int, int, int, list[tuple[NDArray[Any], NDArray[np.int32]]]]
"""Number of documents, bytes of UTF-8 text, position of the end in all inputs, and for each key the
tokens of all documents and the length of each document."""


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
    sizes = [input_size(path) for path in paths]
    prefixes = {key: f"{output_prefix}_{key}_document" for key in keys}
    _check_inputs(paths, sizes, prefixes.values())
    total = None if None in sizes else sum(size for size in sizes if size)
    start = time.monotonic()
    num_documents = num_bytes = 0
    with interrupts_held(), contextlib.ExitStack() as stack:
        builders = []
        for key, prefix in prefixes.items():
            builder = IndexedDatasetBuilder(
                prefix,
                tokenizer.dtype,
                checksums=checksums,
                provenance=_provenance(tokenizer, paths, key, append_eod) if checksums else None,
            )
            builders.append(stack.enter_context(builder))
        progress = stack.enter_context(Progress("tokenize", total, enabled=show_progress))
        context = tokenizer, keys, append_eod
        blocks = ordered_map(_encode, _blocks(paths, sizes), context=context, workers=workers)
        encoded_blocks = stack.enter_context(contextlib.closing(blocks))
        for count, size, position, columns in encoded_blocks:
            for builder, (tokens, lengths) in zip(builders, columns, strict=True):
                builder.add_documents(tokens, lengths)
            num_documents += count
            num_bytes += size
            rate = num_bytes / 1e6 / max(time.monotonic() - start, 1e-9)
            progress.update(position, f"{num_documents:,} documents  {rate:.1f} MB/s")
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


def _provenance(
    tokenizer: Tokenizer, inputs: list[str], key: str, append_eod: bool
) -> dict[str, Any]:
    """The origin of the tokens, for the sidecar."""
    return {
        "tool": f"millrace {version('millrace')} tokenize",
        "tokenizer": {
            "path": tokenizer.path,
            "sha256": tokenizer.fingerprint,
            "vocabulary_size": tokenizer.vocabulary_size,
        },
        "inputs": inputs,
        "json_key": key,
        "append_eod": append_eod,
        "eod_token": tokenizer.eod_token,
    }


def _blocks(inputs: Sequence[str], sizes: Sequence[int | None]) -> Iterator[LineBlock]:
    """The blocks of all inputs; their positions count from the start of the first input."""
    start = 0
    for path, size in zip(inputs, sizes, strict=True):
        for block in read_blocks(path):
            yield replace(block, position=start + block.position)
        start += size or 0


def _encode(context: _Context, block: LineBlock) -> _EncodedBlock:
    tokenizer, keys, append_eod = context
    documents = document_texts(block, keys)
    num_bytes, columns = 0, []
    for column in range(len(keys)):
        texts = []
        for line, line_texts in documents:
            texts.append(line_texts[column])
            num_bytes += encoded_size(texts[-1], f"{block.path}, line {line}: ")
        ids = tokenizer.encode(texts)
        for document in ids if append_eod else ():
            if document:
                document.append(tokenizer.eod)
        lengths = np.fromiter(map(len, ids), np.int32, len(ids))
        num_tokens = int(lengths.sum(dtype=np.int64))
        tokens = np.fromiter(itertools.chain.from_iterable(ids), tokenizer.dtype, num_tokens)
        columns.append((tokens, lengths))
    return len(documents), num_bytes, block.position, columns
