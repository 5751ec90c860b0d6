"""Merge, split and convert token files."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from millrace.checks import flag, one_path, paths, shown, token, whole
from millrace.errors import ConfigError, DataError
from millrace.files import atomic_file
from millrace.provenance import (
    common_tokenizer,
    copied_origins,
    read_tokenizer,
    tokenizer_conflict,
)
from millrace.store import IndexedDataset, IndexedDatasetBuilder
from millrace.store.checking import require_sound
from millrace.store.publish import building, files_of

_CHUNK = 16 << 20  # tokens that are converted at a time
_MAX_LENGTH = 2**31 - 1  # tokens in a sequence

StrPath = str | os.PathLike[str]


def merge(
    prefixes: Sequence[StrPath],
    output_prefix: StrPath,
    *,
    checksums: bool = True,
    origins: bool = True,
    any_tokenizer: bool = False,
) -> IndexedDataset:
    """Concatenates indexed datasets; documents keep their order.

    If all inputs have origins of their documents, so has the output; if all name the same
    tokenizer, the output's sidecar names it, too.

    Args:
        prefixes: Path prefixes of the input pairs, at least one; all have the same dtype, and all
            have modes or none has.
        output_prefix: Path prefix of the output pair; it may be one of the inputs.
        checksums: Whether to write the sidecar.
        origins: Whether to copy the origins of the documents.
        any_tokenizer: Whether to merge pairs although their sidecars name different tokenizers, or
            splitters of sentences.

    Raises:
        ConfigError: An empty list, or pairs that differ in dtype, modes, tokenizer or splitter of
            sentences.
        DataError: A missing or damaged pair.
    """
    names = paths("prefixes", prefixes)
    if not names:
        raise ConfigError("there is nothing to merge; give at least one prefix")
    conflict = None
    if not flag("any_tokenizer", any_tokenizer):
        conflict = tokenizer_conflict(map(read_tokenizer, names))
    if conflict:
        raise ConfigError(
            f"{conflict}. Tokenize one of them again, or merge them as they are with "
            "--any-tokenizer (any_tokenizer=True)"
        )
    datasets = [IndexedDataset(name) for name in names]
    _copy(datasets, output_prefix, checksums, {"merged": names}, origins=origins)
    return IndexedDataset(output_prefix)


def split(
    prefix: StrPath,
    output_prefix: StrPath,
    *,
    documents: int | None = None,
    num_bytes: int | None = None,
    checksums: bool = True,
    origins: bool = True,
) -> list[str]:
    """Cuts an indexed dataset into shards of whole documents, with their origins.

    Shard i gets the path prefix `{output_prefix}_{i:05}`; merging the shards restores the dataset,
    byte for byte. The shards of an earlier split with this output prefix are replaced, and those
    beyond the new number of shards are removed, so a glob pattern matches the new shards only.

    Args:
        prefix: Path prefix of the input pair.
        output_prefix: First part of the shards' path prefixes.
        documents: Number of documents per shard; the last shard may have fewer.
        num_bytes: Maximum size of the tokens of a shard; a longer document gets a shard alone. Give
            either `documents` or `num_bytes`.
        checksums: Whether to write the sidecars.
        origins: Whether to copy the origins of the documents.

    Returns:
        The shards' path prefixes.

    Raises:
        ConfigError: Not exactly one of `documents` and `num_bytes`, or a value below 1.
        DataError: A missing or damaged pair.
    """
    name, size = ("num_bytes", num_bytes) if documents is None else ("documents", documents)
    size = 0 if size is None else whole(name, size)
    if size < 1 or None not in (documents, num_bytes):
        raise ConfigError(
            f"documents is {documents} and num_bytes {num_bytes}; give one of them, at least 1"
        )
    dataset = IndexedDataset(prefix)
    require_sound(dataset)
    prefix, output_prefix = dataset.prefix, one_path("output_prefix", output_prefix)
    if documents is not None:
        bounds = [*range(0, dataset.num_documents, size), dataset.num_documents]
    else:
        bounds = _bounds_by_size(dataset, size)
    shards = []
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        shards.append(f"{output_prefix}_{number:05}")
        provenance = {"split": prefix, "documents": [start, stop]}
        span = start, stop
        _copy([dataset], shards[-1], checksums, provenance, documents=span, origins=origins)
    kept = set(map(os.path.realpath, files_of(prefix)))
    for shard in _existing_shards(output_prefix, len(shards)):
        if kept.isdisjoint(map(os.path.realpath, files_of(shard))):
            with building(shard):  # holds the lock: no other process builds this shard
                # The index last: a kill leaves no tokens without one, which would be raw tokens.
                for path in reversed(files_of(shard)):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path)
    return shards


def _copy(
    sources: Sequence[IndexedDataset],
    prefix: StrPath,
    checksums: bool,
    provenance: dict[str, Any],
    dtype: np.dtype[Any] | None = None,
    documents: tuple[int, int] | None = None,
    *,
    origins: bool,
) -> None:
    """Writes documents of `sources`, or some of them, with the dtype of the first by default."""
    tokenizer = common_tokenizer([read_tokenizer(source.prefix) for source in sources])
    if tokenizer is not None:
        provenance = {**provenance, "tokenizer": tokenizer}
    parts = [(source, documents) for source in sources]
    # Read before the pair is replaced: one of the sources may be at its prefix.
    writer = copied_origins(one_path("prefix", prefix), parts) if flag("origins", origins) else None
    with IndexedDatasetBuilder(
        prefix,
        sources[0].dtype if dtype is None else dtype,
        # A dataset without sequences does not show whether it has modes.
        multimodal=any(source.sequence_modes is not None for source in sources),
        checksums=checksums,
        provenance=provenance if checksums else None,
    ) as builder:
        for source in sources:  # the open ones: the files at their prefixes may change meanwhile
            builder.add_index(source, documents, change_dtype=dtype is not None)
    if writer is not None:
        writer.publish()


def _existing_shards(output_prefix: str, first: int) -> Iterator[str]:
    """The path prefixes of the shards on disk whose number is `first` or higher."""
    folder, name = os.path.split(output_prefix)
    index_name = re.compile(re.escape(name) + r"_(\d{5}|[1-9]\d{5,})\.idx")
    for file in sorted(os.listdir(folder or ".")):
        match = index_name.fullmatch(file)
        if match is not None and int(match[1]) >= first:
            yield os.path.join(folder, file.removesuffix(".idx"))


def _bounds_by_size(dataset: IndexedDataset, num_bytes: int) -> list[int]:
    """The first document of each shard of at most `num_bytes`, and the number of documents."""
    ends = np.cumsum(dataset.document_lengths) * dataset.dtype.itemsize
    bounds = [0]
    while bounds[-1] < dataset.num_documents:
        begin = int(ends[bounds[-1] - 1]) if bounds[-1] else 0
        stop = int(np.searchsorted(ends, begin + num_bytes, side="right"))
        bounds.append(max(stop, bounds[-1] + 1))
    return bounds


def convert(
    source: StrPath,
    target: StrPath,
    *,
    dtype: DTypeLike | None = None,
    source_dtype: DTypeLike | None = None,
    document_end: int | None = None,
    checksums: bool = True,
    origins: bool = True,
) -> None:
    """Converts token arrays to indexed datasets and back, and from one dtype to another.

    The names of `source` and `target` tell their formats: `.npy` is a NumPy array, `.bin` raw
    tokens (if there is no `.idx` beside it), anything else the path prefix of an indexed dataset.

    Args:
        source: An array of one dimension (a stream of tokens) or two (each row a document), raw
            tokens, or an indexed dataset.
        target: An array or raw tokens of one dimension (document boundaries are lost), or an
            indexed dataset.
        dtype: Dtype of the target; None: the source's dtype, or int32 for an indexed dataset if
            the format has no code for the source's.
        source_dtype: Dtype of raw tokens.
        document_end: Token that ends each document of a stream; None: the stream is one document.
        checksums: Whether to write the sidecar of an indexed dataset.
        origins: Whether to copy the origins of an indexed dataset's documents to another.

    Raises:
        ConfigError: A token that does not fit the dtype, or an option that is missing or does not
            apply.
        DataError: A missing or damaged source, or one of another format.
    """
    source, target = one_path("source", source), one_path("target", target)
    dtype = number_dtype("dtype", dtype)
    document_end = token("document_end", document_end)
    is_array = target.endswith((".npy", ".bin"))
    try:
        array = _open_array(source, number_dtype("source_dtype", source_dtype))
    except OSError as error:
        raise DataError(f"{source} cannot be read: {error}") from None
    if array is None:
        if document_end is not None:
            raise ConfigError(
                "document_end divides a stream of tokens; an indexed dataset already has documents"
            )
        dataset = IndexedDataset(source)
        if not is_array:
            _copy([dataset], target, checksums, {"converted": source}, dtype, origins=origins)
            return
        require_sound(dataset)
        array = dataset.tokens
    if is_array:
        _write_array(target, array.reshape(-1), dtype)
    else:
        _write_dataset(target, array, dtype, document_end, checksums)


def number_dtype(name: str, value: DTypeLike | None) -> np.dtype[Any] | None:
    """A dtype of numbers, or None for None; anything else is a ConfigError."""
    if value is None:
        return None
    with contextlib.suppress(TypeError, ValueError):
        dtype = np.dtype(value)
        if dtype.kind in "iuf":
            return dtype
    raise ConfigError(f"{name} is {shown(value)}; give a dtype of numbers: uint16 or int32")


def _open_array(source: str, dtype: np.dtype[Any] | None) -> NDArray[Any] | None:
    """The source as a mapped array; None if it is an indexed dataset."""
    array: NDArray[Any]
    if source.endswith(".npy"):
        try:
            array = np.lib.format.open_memmap(source, mode="r")
        except ValueError as error:
            raise DataError(
                f"{source} is not an array of tokens: {error}. Give a file that `numpy.save` "
                "wrote; of a zip archive (.npz), save one array"
            ) from None
    elif source.endswith(".bin") and not os.path.exists(source[:-4] + ".idx"):
        if dtype is None:
            raise ConfigError(f"{source} holds raw tokens: give their dtype with --source-dtype")
        size = os.path.getsize(source)
        if size % dtype.itemsize:
            raise DataError(
                f"{source} has {size} bytes, which is not a multiple of {dtype.itemsize}: it is "
                "truncated, or the dtype is wrong"
            )
        # An empty file cannot be mapped.
        array = np.memmap(source, dtype, "r") if size else np.empty(0, dtype)
    else:
        return None
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise DataError(
            f"{source} has shape {array.shape} and dtype {array.dtype}; "
            "integers in one or two dimensions are needed"
        )
    return array


def _write_array(target: str, tokens: NDArray[Any], dtype: np.dtype[Any] | None) -> None:
    dtype = tokens.dtype if dtype is None else dtype
    with atomic_file(target) as file:
        if target.endswith(".npy"):
            header = {"descr": dtype.str, "fortran_order": False, "shape": tokens.shape}
            np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, len(tokens), _CHUNK):
            part = tokens[start : start + _CHUNK]
            narrowed = part.astype(dtype)
            if not np.array_equal(narrowed, part):
                position = start + int(np.flatnonzero(narrowed != part)[0])
                raise ConfigError(
                    f"token {tokens[position]} at position {position} does not fit {dtype}; "
                    "choose a wider dtype"
                )
            file.write(narrowed.data)


def _write_dataset(
    target: str,
    array: NDArray[Any],
    dtype: np.dtype[Any] | None,
    document_end: int | None,
    checksums: bool,
) -> None:
    if dtype is None:
        is_wide = array.dtype.kind == "u" and array.dtype.itemsize > 2  # the format lacks uint32
        dtype = np.dtype(np.int32) if is_wide else array.dtype
    with IndexedDatasetBuilder(target, dtype, checksums=checksums) as builder:
        if array.ndim == 1:
            _add_stream(builder, array, document_end)
            return
        num_rows = max(_CHUNK // max(array.shape[1], 1), 1)
        for start in range(0, len(array), num_rows):
            rows = array[start : start + num_rows]
            builder.add_documents(rows.reshape(-1), np.full(len(rows), rows.shape[1]))


def _add_stream(builder: IndexedDatasetBuilder, tokens: NDArray[Any], end: int | None) -> None:
    """Adds the documents of a stream: each ends with the token `end`, the last one anywhere."""
    begin = 0
    if end is not None:
        for start in range(0, len(tokens), _CHUNK):
            ends = start + 1 + np.flatnonzero(tokens[start : start + _CHUNK] == end)
            if len(ends):
                lengths = np.diff(ends, prepend=begin)
                builder.add_documents(tokens[begin : int(ends[-1])], lengths)
                begin = int(ends[-1])
        if begin == len(tokens):
            return
    for start in range(begin, len(tokens), _MAX_LENGTH):
        builder.add_sequence(np.ascontiguousarray(tokens[start : start + _MAX_LENGTH]))
    builder.end_document()
