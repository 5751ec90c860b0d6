"""Convert token files from and to arrays, and from one dtype to another."""

import contextlib
import itertools
import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from millrace.cache.loss_files import has_ranges
from millrace.checks import MAX_INT64, shown
from millrace.errors import ConfigError, DataError
from millrace.files import atomic_file
from millrace.jobs.reshape import PairOptions, bounds_by_size, pair_builder
from millrace.names import BIN, IDX, LOSS
from millrace.option_class import StrPath, option
from millrace.store import IndexedDataset, IndexedDatasetBuilder
from millrace.store.layout import count_tokens

_CHUNK = 4 << 20  # tokens converted at a time
_MAX_LENGTH = 2**31 - 1  # tokens in a sequence

_token = partial(option, default=None, least=-(2**63), most=MAX_INT64, metavar="ID")


def number_dtype(name: str, value: DTypeLike | None) -> np.dtype[Any] | None:
    """A dtype of numbers, or None; ConfigError for anything else."""
    if value is None:
        return None
    with contextlib.suppress(TypeError, ValueError):
        dtype = np.dtype(value)
        if dtype.kind in "iuf":
            return dtype
    raise ConfigError(f"{name} is {shown(value)}; give a dtype of numbers: uint16 or int32")


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(PairOptions):
    source: StrPath = option("input array or path prefix", flags="source", metavar="SOURCE")
    target: StrPath = option("output array or path prefix", flags="target", metavar="TARGET")
    dtype: Any = option("dtype of the target", None, metavar="DTYPE", check=number_dtype)
    source_dtype: Any = option("dtype of raw tokens", None, metavar="DTYPE", check=number_dtype)
    document_end: int | None = _token("last token of each document of a stream")
    append_eod: int | None = _token(
        "token to put after each document of a pair that does not end with it"
    )


def convert(source: StrPath, target: StrPath, **options: Any) -> None:
    """Converts token arrays to indexed datasets and back, and from one dtype to another.

    The names tell the formats: `.npy` is a NumPy array, `.bin` raw tokens (if there is no `.idx`
    beside it), anything else the path prefix of an indexed dataset.

    Args:
        source: An array of one dimension (a stream of tokens) or two (each row a document), raw
            tokens, or an indexed dataset.
        target: An array or raw tokens of one dimension (document boundaries are lost), or an
            indexed dataset.
        options: The other fields of `ConvertOptions`. By default the dtype is the source's, or
            int32 for an indexed dataset if the format has no code for the source's.

    Raises:
        ConfigError: A token that does not fit the dtype; an option that is missing or not for these
            formats; ranges of tokens that the target cannot have.
        DataError: A missing or damaged source, or one of another format.
    """
    own = ConvertOptions(source=source, target=target, **options)
    source, target = os.fspath(own.source), os.fspath(own.target)
    is_array = target.endswith((".npy", BIN))
    try:
        array = _open_array(source, own.source_dtype)
    except OSError as error:
        raise DataError(f"{source} cannot be read: {error}") from None
    if own.append_eod is not None and (is_array or array is not None):
        raise ConfigError("append_eod needs documents: source and target must be path prefixes")
    if array is None:
        if own.document_end is not None:
            raise ConfigError(
                "document_end divides a stream of tokens; an indexed dataset already has documents"
            )
        dataset = IndexedDataset(source)
        if own.loss_ranges and (is_array or own.append_eod is not None) and has_ranges(source):
            what = "an array" if is_array else "append_eod, whose tokens would be trained on,"
            raise ConfigError(
                f"{source}{LOSS} says which tokens are not trained on, and {what} cannot keep it: "
                "give --no-loss-ranges (loss_ranges=False) to leave it out"
            )
        if not is_array:
            _convert_pair(dataset, target, own)
            return
        dataset.check()
        array = dataset.tokens
    if is_array:
        _write_array(target, array.reshape(-1), own.dtype)
    else:
        _write_dataset(target, array, own)


def _convert_pair(dataset: IndexedDataset, target: str, options: ConvertOptions) -> None:
    provenance: dict[str, Any] = {"converted": os.fspath(options.source)}
    if (eod := options.append_eod) is not None:
        dataset.check()
        if dataset.dtype.kind not in "iu":
            raise ConfigError(f"append_eod needs integers; {dataset.prefix} holds {dataset.dtype}")
        provenance["append_eod"] = eod
    with pair_builder(options, target, [dataset], provenance, dtype=options.dtype) as builder:
        if eod is None:
            builder.add_index(dataset, change_dtype=options.dtype is not None)
            return
        bounds = bounds_by_size(dataset, _CHUNK * dataset.dtype.itemsize)
        for start, stop in itertools.pairwise(bounds):
            _add_with_eod(builder, dataset, start, stop, eod)


def _add_with_eod(
    builder: IndexedDatasetBuilder, dataset: IndexedDataset, start: int, stop: int, eod: int
) -> None:
    """Adds documents, each with a last token `eod`; one that is empty, or has it, stays."""
    entries = dataset.document_indices[start : stop + 1]
    first, last = int(entries[0]), int(entries[-1])
    tokens = dataset.read(np.arange(first, last))[0].astype(np.int64)  # `eod` may be any int64
    lengths = dataset.document_lengths[start:stop]
    ends = np.cumsum(lengths)
    is_open = lengths > 0
    is_open[is_open] = tokens[ends[is_open] - 1] != eod
    tokens = np.insert(tokens, ends[is_open], eod)
    lengths = lengths + is_open
    modes = dataset.sequence_modes
    if modes is None and (np.diff(entries) <= 1).all():
        builder.add_documents(tokens, lengths)
        return
    sequence_lengths = dataset.sequence_lengths[first:last].astype(np.int64)
    sequence_lengths[entries[1:][is_open] - first - 1] += 1
    starts = np.cumsum(lengths) - lengths
    for number, (begin, end) in enumerate(itertools.pairwise((entries - first).tolist())):
        place = int(starts[number])
        builder.add_document(
            tokens[place : place + int(lengths[number])],
            sequence_lengths[begin:end],
            None if modes is None else modes[first + begin : first + end],
        )


def _open_array(source: str, dtype: np.dtype[Any] | None) -> NDArray[Any] | None:
    """The source as a mapped array; None: it is an indexed dataset."""
    array: NDArray[Any]
    if source.endswith(".npy"):
        try:
            array = np.lib.format.open_memmap(source, mode="r")
        except ValueError as error:
            raise DataError(
                f"{source} is not an array of tokens: {error}. Give a file that `numpy.save` "
                "wrote; of a zip archive (.npz), save one array"
            ) from None
    elif source.endswith(BIN) and not os.path.exists(source.removesuffix(BIN) + IDX):
        if dtype is None:
            raise ConfigError(f"{source} holds raw tokens: give their dtype with --source-dtype")
        num_tokens = count_tokens(source, os.path.getsize(source), dtype)
        # An empty file cannot be mapped.
        array = np.memmap(source, dtype, "r") if num_tokens else np.empty(0, dtype)
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


def _write_dataset(target: str, array: NDArray[Any], options: ConvertOptions) -> None:
    dtype = options.dtype
    if dtype is None:
        is_wide = array.dtype.kind == "u" and array.dtype.itemsize > 2  # the format lacks uint32
        dtype = np.dtype(np.int32) if is_wide else array.dtype
    with IndexedDatasetBuilder(target, dtype, checksums=options.checksums) as builder:
        if array.ndim == 1:
            _add_stream(builder, array, options.document_end)
            return
        num_rows = max(_CHUNK // max(array.shape[1], 1), 1)
        for start in range(0, len(array), num_rows):
            rows = array[start : start + num_rows]
            builder.add_documents(rows.reshape(-1), np.full(len(rows), rows.shape[1]))


def _add_stream(builder: IndexedDatasetBuilder, tokens: NDArray[Any], end: int | None) -> None:
    """Adds the documents of a stream, each up to a token `end`; the last one may lack it."""
    begin = 0
    if end is not None:
        for start in range(0, len(tokens), _CHUNK):
            ends = start + 1 + np.flatnonzero(tokens[start : start + _CHUNK] == end)
            if len(ends):
                stop = int(ends[-1])
                builder.add_documents(tokens[begin:stop], np.diff(ends, prepend=begin))
                begin = stop
        if begin == len(tokens):
            return
    for start in range(begin, len(tokens), _MAX_LENGTH):
        builder.add_sequence(np.ascontiguousarray(tokens[start : start + _MAX_LENGTH]))
    builder.end_document()
