"""Token files into other token files: merged, split, converted."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from millrace.checks import one_path, paths, whole
from millrace.errors import ConfigError, DataError
from millrace.files import atomic_file
from millrace.store import IndexedDataset, IndexedDatasetBuilder
from millrace.store.checking import require_sound
from millrace.store.publish import bin_path, building, idx_path, info_path

_CHUNK = 16 << 20  # tokens that are converted at a time
_MAX_LENGTH = 2**31 - 1  # of a sequence


StrPath = str | os.PathLike[str]


def merge(
    prefixes: Sequence[StrPath], output_prefix: StrPath, *, checksums: bool = False
) -> IndexedDataset:
    """Appends indexed datasets to each other; documents keep their order.

    Args:
        prefixes: of the pairs, at least one, of one dtype, all with modes or none.
        output_prefix: of the new pair; it may be one of the old ones.
        checksums: write the sidecar.

    Raises:
        ConfigError: nothing to merge, or pairs that are not alike.
        DataError: a pair that is missing or damaged.
    """
    names = paths("prefixes", prefixes)
    if not names:
        raise ConfigError("there is nothing to merge; give at least one prefix")
    parts = [IndexedDataset(name) for name in names]
    with IndexedDatasetBuilder(
        output_prefix,
        parts[0].dtype,
        # Only a part with sequences shows whether it has modes.
        multimodal=any(part.sequence_modes is not None for part in parts),
        checksums=checksums,
        provenance={"merged": names} if checksums else None,
    ) as builder:
        for part in parts:  # as they were opened, whatever is at their prefixes by now
            builder.add_index(part)
    return IndexedDataset(output_prefix)


def split(
    prefix: StrPath,
    output_prefix: StrPath,
    *,
    documents: int | None = None,
    num_bytes: int | None = None,
    checksums: bool = False,
) -> list[str]:
    """Cuts an indexed dataset into shards of whole documents.

    Shard i gets the path prefix `{output_prefix}_{i:05}`; merging the shards gives the dataset
    back, byte for byte. The shards of an earlier split at the same place are replaced: those that
    the new one does not have are removed, so that a pattern over the names finds no others.

    Args:
        prefix: of the pair.
        output_prefix: of the shards.
        documents: in each shard; the last one may have fewer.
        num_bytes: of tokens in each shard, at most; a longer document is a shard by itself. Give
            one of the two.
        checksums: write the sidecars.

    Returns:
        the shards' prefixes.

    Raises:
        ConfigError: not exactly one of `documents` and `num_bytes`, or less than 1.
        DataError: the pair is missing or damaged.
    """
    size = documents if num_bytes is None else whole("num_bytes", num_bytes)
    if (documents is None) == (num_bytes is None) or size is None or whole("documents", size) < 1:
        raise ConfigError(
            f"documents is {documents} and num_bytes {num_bytes}; give one of them, at least 1"
        )
    dataset = IndexedDataset(prefix)
    require_sound(dataset)
    if documents is not None:
        bounds = [*range(0, dataset.num_documents, size), dataset.num_documents]
    else:
        bounds = _bounds_by_size(dataset, size)
    prefix, output_prefix = dataset.prefix, one_path("output_prefix", output_prefix)
    prefixes = []
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        prefixes.append(f"{output_prefix}_{number:05}")
        with IndexedDatasetBuilder(
            prefixes[-1],
            dataset.dtype,
            multimodal=dataset.sequence_modes is not None,
            checksums=checksums,
            provenance={"split": prefix, "documents": [start, stop]} if checksums else None,
        ) as builder:
            builder.add_index(dataset, (start, stop))
    for shard in _shards_from(output_prefix, len(prefixes)):
        if os.path.abspath(shard) == os.path.abspath(prefix):
            continue
        with building(shard):  # nobody else is at work on it
            # The index first: without it the rest does not count.
            for path in (idx_path(shard), info_path(shard), bin_path(shard)):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
    return prefixes


def _shards_from(output_prefix: str, number: int) -> Iterator[str]:
    """The prefixes of shards that are there, from a number on."""
    folder, name = os.path.split(output_prefix)
    index_name = re.compile(re.escape(name) + r"_(\d{5}|[1-9]\d{5,})\.idx")
    for file in sorted(os.listdir(folder or ".")):
        match = index_name.fullmatch(file)
        if match is not None and int(match[1]) >= number:
            yield os.path.join(folder, file.removesuffix(".idx"))


def _bounds_by_size(dataset: IndexedDataset, num_bytes: int) -> list[int]:
    """The documents at which shards of at most that many bytes start, and the end."""
    ends = np.cumsum(dataset.document_lengths) * dataset.dtype.itemsize
    bounds = [0]
    while bounds[-1] < dataset.num_documents:
        before = int(ends[bounds[-1] - 1]) if bounds[-1] else 0
        stop = int(np.searchsorted(ends, before + num_bytes, side="right"))
        bounds.append(max(stop, bounds[-1] + 1))
    return bounds


def convert(
    source: StrPath,
    target: StrPath,
    *,
    dtype: DTypeLike | None = None,
    source_dtype: DTypeLike | None = None,
    document_end: int | None = None,
    checksums: bool = False,
) -> None:
    """Token arrays to indexed datasets and back, and from one dtype to another.

    What `source` and `target` are is seen by their names: `.npy` is a NumPy array, `.bin` the bare
    tokens (if there is no `.idx` beside it), anything else the path prefix of an indexed dataset.

    Args:
        source: an array of one dimension (a stream of tokens) or two (each row a document), bare
            tokens, or an indexed dataset.
        target: an array or bare tokens of one dimension (document borders are lost), or an indexed
            dataset.
        dtype: of the target; None: the source's, or int32 for an indexed dataset if the format
            has no code for that.
        source_dtype: of bare tokens.
        document_end: the token that ends each document of a stream; without it a stream is one
            document.
        checksums: write the sidecar of an indexed dataset.

    Raises:
        ConfigError: a token that does not fit the dtype, or an option that is missing or of no use.
        DataError: a source that is missing, damaged or of another kind.
    """
    source, target = one_path("source", source), one_path("target", target)
    if document_end is not None:
        document_end = whole("document_end", document_end)
    array = _open_array(source, source_dtype)
    if array is None and document_end is not None:
        raise ConfigError("document_end cuts a stream of tokens; an indexed dataset has documents")
    to_array = target.endswith((".npy", ".bin"))
    if array is None and not to_array:
        _change_dtype(source, target, dtype, checksums)
    elif array is None:
        dataset = IndexedDataset(source)
        require_sound(dataset)
        _write_array(target, dataset.tokens, dataset.dtype if dtype is None else dtype)
    elif to_array:
        flat = array.reshape(-1)
        _write_array(target, flat, array.dtype if dtype is None else dtype)
    else:
        _write_dataset(target, array, dtype, document_end, checksums)


def _open_array(source: str, source_dtype: DTypeLike | None) -> NDArray[Any] | None:
    """The source as a mapped array; None if it is an indexed dataset."""
    array: NDArray[Any]
    try:
        if source.endswith(".npy"):
            array = np.load(source, mmap_mode="r", allow_pickle=False)
        elif source.endswith(".bin") and not os.path.exists(source[:-4] + ".idx"):
            if source_dtype is None:
                raise ConfigError(f"{source} is bare tokens: name their dtype with --source-dtype")
            size, width = os.path.getsize(source), np.dtype(source_dtype).itemsize
            if size % width:
                raise DataError(f"{source} has {size} bytes, no multiple of {width}: truncated?")
            array = (
                np.memmap(source, source_dtype, "r")
                if size
                else np.empty(0, np.dtype(source_dtype))
            )
        else:
            return None
    except (OSError, EOFError) as error:
        raise DataError(f"{source} cannot be read: {error}") from None
    except ValueError as error:
        if isinstance(error, (ConfigError, DataError)):
            raise
        raise DataError(f"{source} is no array of tokens: {error}") from None
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise DataError(
            f"{source} has shape {array.shape} and dtype {array.dtype}; "
            "integers in one or two dimensions are needed"
        )
    return array


def _change_dtype(source: str, target: str, dtype: DTypeLike | None, checksums: bool) -> None:
    dataset = IndexedDataset(source)
    with IndexedDatasetBuilder(
        target,
        dataset.dtype if dtype is None else dtype,
        multimodal=dataset.sequence_modes is not None,
        checksums=checksums,
        provenance={"converted": source} if checksums else None,
    ) as builder:
        builder.add_index(dataset, change_dtype=True)


def _write_array(target: str, tokens: NDArray[Any], dtype: DTypeLike) -> None:
    dtype = np.dtype(dtype)
    with atomic_file(target) as file:
        if target.endswith(".npy"):
            header = {"descr": dtype.str, "fortran_order": False, "shape": tokens.shape}
            np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, len(tokens), _CHUNK):
            part = tokens[start : start + _CHUNK]
            narrowed = part.astype(dtype)
            if not np.array_equal(narrowed, part):
                place = start + int(np.flatnonzero(narrowed != part)[0])
                raise ConfigError(
                    f"token {tokens[place]} at place {place} does not fit {dtype}; "
                    "choose a wider dtype"
                )
            file.write(narrowed.data)


def _write_dataset(
    target: str,
    array: NDArray[Any],
    dtype: DTypeLike | None,
    document_end: int | None,
    checksums: bool,
) -> None:
    if dtype is None:
        dtype = np.int32 if array.dtype.kind == "u" and array.dtype.itemsize > 2 else array.dtype
    with IndexedDatasetBuilder(target, dtype, checksums=checksums) as builder:
        if array.ndim == 2:
            step = max(_CHUNK // max(array.shape[1], 1), 1)
            for start in range(0, len(array), step):
                rows = array[start : start + step]
                builder.add_documents(rows.reshape(-1), np.full(len(rows), rows.shape[1]))
        elif document_end is None:
            _add_stream(builder, array)
            builder.end_document()
        else:
            _add_documents(builder, array, document_end)


def _add_stream(builder: IndexedDatasetBuilder, tokens: NDArray[Any]) -> None:
    """A run of tokens as sequences, several if it is longer than a sequence may be."""
    for start in range(0, len(tokens), _MAX_LENGTH):
        builder.add_sequence(np.ascontiguousarray(tokens[start : start + _MAX_LENGTH]))


def _add_documents(builder: IndexedDatasetBuilder, tokens: NDArray[Any], end: int) -> None:
    """Documents that end with the token `end`; what follows the last of those is one more."""
    begin = 0
    for start in range(0, len(tokens), _CHUNK):
        ends = start + 1 + np.flatnonzero(tokens[start : start + _CHUNK] == end)
        if len(ends):
            lengths = np.diff(ends, prepend=begin)
            builder.add_documents(tokens[begin : int(ends[-1])], lengths)
            begin = int(ends[-1])
    if begin < len(tokens):
        _add_stream(builder, tokens[begin:])
        builder.end_document()
