"""Megatron-LM's cache files: their names, their contents, and whether a set of them fits.

A set belongs to one dataset and split, or to one blend. Its files lie in one folder and share a
stem, `{md5}-{class}-{split}`:

    {stem}-description.txt             JSON: what decides the indices; the stem has its MD5
    {stem}-document_index.npy          int32
    {stem}-sample_index.npy            int32 or int64      a GPT dataset
    {stem}-shuffle_index.npy           uint32 or int64

    {stem}-dataset_index.npy           int16               a blend, with a description, too
    {stem}-dataset_sample_index.npy    int64

The bytes are Megatron-LM's. Each file is written atomically, the description last. A set is used
only if it fits its dataset: the MD5 does not cover the extra token, a kept partial sample and the
tokens, which also decide the indices.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.checks import absolute_path, check_local
from millrace.errors import DataError
from millrace.files import atomic_file, fsync_folder, write_file, writers_lock
from millrace.order import BlendIndices, GPTIndices, GPTPlan
from millrace.order.gpt import sample_index_dtype, shuffle_index_dtype
from millrace.store.opened import read_npy_header

GPT_ARRAYS = GPTIndices._fields
BLEND_ARRAYS = BlendIndices._fields

Arrays = dict[str, NDArray[Any]]
Check = Callable[[Arrays], None]
"""Function that raises DataError for arrays that do not fit."""

_UNUSABLE = (FileNotFoundError, NotADirectoryError, DataError)
_ENDS = slice(None, 4096), slice(-4096, None)  # of an index: a few pages, whatever its size


def describe(identifiers: Mapping[str, Any]) -> tuple[str, str]:
    """The description text, and its MD5 in hexadecimal digits.

    Args:
        identifiers: What identifies a dataset or blend, by Megatron-LM's names and in its order,
            on which the MD5 depends. A value that is not JSON, such as a tokenizer, is described by
            its `unique_identifiers`.
    """
    text = json.dumps(identifiers, indent=4, default=lambda value: value.unique_identifiers)
    return text, hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


@dataclass(frozen=True, kw_only=True)
class CacheSet:
    """Files of GPT_ARRAYS or BLEND_ARRAYS, and their description. The folder may lack."""

    folder: str
    stem: str
    description: str
    arrays: tuple[str, ...]

    @classmethod
    def of(
        cls, folder: str, identifiers: Mapping[str, Any], split: str, arrays: tuple[str, ...]
    ) -> CacheSet:
        """The set of a dataset or blend in a split: "train", "valid" or "test"."""
        text, digest = describe(identifiers)
        stem = f"{digest}-{identifiers['class']}-{split}"
        return cls(folder=folder, stem=stem, description=text, arrays=arrays)

    def path(self, name: str) -> str:
        """The path of an array, of the "description", or of the "lock"."""
        ending = {"description": ".txt", "lock": ""}.get(name, ".npy")
        return os.path.join(self.folder, f"{self.stem}-{name}{ending}")


def load(files: CacheSet, check: Check) -> Arrays:
    """The arrays of a set, mapped and read-only.

    FileNotFoundError if one is missing; DataError if one is truncated, not an array, or not this
    dataset's, by `check`.
    """
    with open(files.path("description"), encoding="utf-8", errors="replace") as file:
        if file.read() != files.description:
            raise DataError(f"{file.name} is not the description of this dataset")
    arrays = {name: load_array(files.path(name)) for name in files.arrays}
    check(arrays)
    return arrays


def load_array(path: str) -> NDArray[Any]:
    """One array of a set, mapped and read-only; for the errors, see `load`."""
    try:
        with open(path, "rb") as file:
            shape, is_fortran, dtype = read_npy_header(file)
            offset, size = file.tell(), os.fstat(file.fileno()).st_size
            expected = offset + dtype.itemsize * math.prod(shape)
            if dtype.hasobject or expected != size:
                raise ValueError(f"it has {size} bytes; {expected} of {dtype} are expected")
            content = _native.map_file(file.fileno(), size)
    except ValueError as error:
        raise DataError(f"{path} is not an array of numbers, or is truncated: {error}") from None
    array = np.ndarray(shape, dtype, content, offset, order="F" if is_fortran else "C")
    # As `np.load` returns it, but no descriptor stays open.
    mapped: NDArray[Any] = array.view(np.memmap)
    vars(mapped).update(filename=absolute_path(path), offset=offset, mode="r")
    return mapped


def save(files: CacheSet, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Writes a set, each file atomically and the description last: a set without it is not used."""
    os.makedirs(files.folder, exist_ok=True)
    description = files.path("description")
    # An old description must not stand beside new arrays, not even after a power cut.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(description)
        fsync_folder(description)
    for name in files.arrays:
        with atomic_file(files.path(name)) as file:
            np.save(file, arrays[name], allow_pickle=False)
    write_file(description, files.description.encode())


def load_or_build(
    files: CacheSet,
    check: Check,
    build: Callable[[str], Mapping[str, Any]],
    *,
    limit: float | None = None,
) -> tuple[Arrays, bool]:
    """The arrays of a set, and whether they were built here as it was missing or did not fit.

    Of several processes one builds, and the others wait; without locks, several build the same. The
    argument of `build` says why a present set does not fit. Errors: see `arrays.load_or_build`.
    """
    with contextlib.suppress(*_UNUSABLE):
        return load(files, check), False
    os.makedirs(check_local(files.folder), exist_ok=True)
    paths = [*map(files.path, ("description", *files.arrays))]
    with writers_lock(files.path("lock"), *paths, limit=limit):
        try:
            return load(files, check), False
        except _UNUSABLE as error:
            built = dict(build(str(error) if isinstance(error, DataError) else ""))
            save(files, built)
    with contextlib.suppress(*_UNUSABLE):  # without locks, another process may be replacing them
        return load(files, check), True
    check(built)
    return built, True


def check_gpt_forms(
    arrays: Arrays, num_entries: int | None = None, num_samples: int | None = None
) -> None:
    """Checks dtypes, shapes and last row of a GPT dataset's arrays. None: the arrays' number."""
    documents, samples, shuffle = (arrays[name] for name in GPT_ARRAYS)
    entries = documents.size if num_entries is None else num_entries
    size = shuffle.size if num_samples is None else num_samples
    _check_form("document_index", documents, np.int32, (entries,))
    _check_form("sample_index", samples, sample_index_dtype(entries), (size + 1, 2))
    _check_form("shuffle_index", shuffle, shuffle_index_dtype(size), (size,))
    if entries > 0:
        _check_below("sample_index", samples[-1:, 0], entries)


def check_gpt_arrays(
    arrays: Arrays, plan: GPTPlan, num_sequences: int, sequence_lengths: NDArray[np.int32]
) -> None:
    """Checks dtypes, shapes, rows at both ends and the last row of a GPT dataset's arrays.

    DataError if they belong to other data or options. An epoch has `num_sequences` sequences.
    """
    num_entries = plan.num_epochs * num_sequences
    check_gpt_forms(arrays, num_entries, plan.num_samples)
    if num_entries == 0:
        return
    documents, samples, shuffle = (np.asarray(arrays[name]) for name in GPT_ARRAYS)
    for part in _ENDS:
        _check_rows(documents, samples[part], sequence_lengths, plan.add_extra_token)
        _check_below("shuffle_index", shuffle[part], plan.num_samples)
    last, expected = tuple(samples[-1].tolist()), _last_row(documents, sequence_lengths, plan)
    if last != expected:
        raise DataError(f"the sample_index ends at {last}, not {expected}: it is of other data")


def check_blend_arrays(arrays: Arrays, size: int, num_datasets: int) -> None:
    """Checks dtypes, shapes and entries at both ends; DataError for the arrays of another blend."""
    numbers, in_dataset = (arrays[name] for name in BLEND_ARRAYS)
    _check_form("dataset_index", numbers, np.int16, (size,))
    _check_form("dataset_sample_index", in_dataset, np.int64, (size,))
    for part in _ENDS:
        _check_below("dataset_index", numbers[part], num_datasets)
        _check_below("dataset_sample_index", in_dataset[part], size)


def _check_form(name: str, array: NDArray[Any], dtype: Any, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise DataError(f"the {name} is {array.dtype} {array.shape}, not {np.dtype(dtype)} {shape}")


def _check_below(name: str, values: NDArray[Any], limit: int) -> None:
    if values.size > 0 and not (values.min() >= 0 and values.max() < limit):
        raise DataError(f"the {name} has entries from {values.min()} to {values.max()} of {limit}")


def _check_rows(
    documents: NDArray[Any], rows: NDArray[Any], lengths: NDArray[np.int32], add_extra_token: bool
) -> None:
    places, offsets = rows.T
    _check_below("sample_index", places, len(documents))
    sequences = documents[places]
    _check_below("document_index", sequences, len(lengths))
    limits = lengths[sequences] - add_extra_token
    # Row 0 is (0, 0), also where the first sequence is empty.
    is_start = (places == 0) & (offsets == 0)
    if np.any((offsets < 0) | ((offsets > limits) & ~is_start)):
        raise DataError("the sample_index has offsets outside the sequences: of other options")


def _last_row(documents: NDArray[Any], lengths: NDArray[Any], plan: GPTPlan) -> tuple[int, int]:
    """Where the last sample ends, by counting tokens from the end."""
    if plan.num_samples == 0:
        return 0, 0
    extra = int(plan.add_extra_token)
    behind = plan.num_epochs * plan.num_tokens_per_epoch
    behind -= plan.num_samples * plan.sequence_length + extra
    passed = 0
    for place in reversed(range(len(documents))):
        length = int(lengths[documents[place]])
        if behind < 0 and length >= extra:  # a partial sample, up to the last token there is
            return place, length - extra
        if 0 <= behind < passed + length:
            return place, length - extra - (behind - passed)
        passed += length
    raise DataError("the document_index holds fewer tokens than its epochs have")
