"""The token files of the input: their dtype, counts, size and time, when they are found."""

from __future__ import annotations

import contextlib
import os
import stat
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from millrace.errors import ConfigError, DataError
from millrace.files import is_of_the_process
from millrace.store import IndexedDataset
from millrace.store.publish import paths_to_read

DTYPES = np.dtype("<u2"), np.dtype("<u4"), np.dtype("<i4")
"""The dtypes of tokens that can be shuffled."""


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """A file that holds one array of tokens.

    Attributes:
        path: Absolute path; of an indexed dataset, of the `.bin`.
        prefix: Path prefix of the indexed dataset; None: a raw or a NumPy file.
        dtype: Dtype of the tokens.
        byte_offset: Where the first token starts.
        num_tokens: Number of tokens.
        num_documents, num_sequences: Numbers of an indexed dataset; 0 for other files.
        has_modes: Whether the sequences of an indexed dataset have modes.
        size: Size of the file in bytes.
        mtime_ns: Time of its last change, in nanoseconds.
        index_mtime_ns: Time of the last change of the `.idx`; None: there is none.
        sidecars: Size and time of the last change of each sidecar that there is: "info", "origins".
    """

    path: str
    prefix: str | None = None
    dtype: np.dtype[Any]
    byte_offset: int = 0
    num_tokens: int
    num_documents: int = 0
    num_sequences: int = 0
    has_modes: bool = False
    size: int
    mtime_ns: int
    index_mtime_ns: int | None = None
    sidecars: dict[str, list[int]] = field(default_factory=dict)


def open_token_file(
    path: str, status: os.stat_result, *, raw_dtype: np.dtype[Any], has_documents: bool
) -> TokenFile:
    """Opens a `.bin` or `.npy` file, and checks it.

    Args:
        path: Absolute path of the file.
        status: Its status.
        raw_dtype: Dtype of the tokens if it is a raw file.
        has_documents: Whether it must be an indexed dataset, whose documents are known.

    Raises:
        ConfigError: A file that is not an indexed dataset.
        DataError: A file that is damaged, cannot be read, or has a dtype outside `DTYPES`.
    """
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path} is not a regular file; write it to one, or remove it")
    if path.endswith(".bin") and os.path.exists(paths_to_read(path[:-4]).idx):
        return _open_indexed(path[:-4])
    if has_documents:
        raise ConfigError(
            f"{path} has no .idx, so millrace cannot tell where its documents end. --documents "
            "needs that: give indexed datasets (.bin and .idx), or leave --documents out"
        )
    if path.endswith(".npy"):
        return _open_array(path, status)
    return _open_raw(path, status, raw_dtype)


@contextlib.contextmanager
def read_errors_of(path: str) -> Iterator[None]:
    """Makes an OSError about a file a DataError that names it."""
    try:
        yield
    except OSError as error:
        if is_of_the_process(error):
            raise
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def _open_raw(path: str, status: os.stat_result, dtype: np.dtype[Any]) -> TokenFile:
    with read_errors_of(path), open(path, "rb"):
        pass  # a file that cannot be read is an error now, not in the middle of the job
    if status.st_size % dtype.itemsize:
        raise DataError(
            f"{path} has {status.st_size} bytes, which is not a multiple of {dtype.itemsize}, the "
            f"size of {dtype}: it is truncated, or has another dtype. Write it again, or correct "
            "--dtype"
        )
    return TokenFile(
        path=path,
        dtype=dtype,
        num_tokens=status.st_size // dtype.itemsize,
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
    )


def _open_array(path: str, status: os.stat_result) -> TokenFile:
    with read_errors_of(path):
        try:
            array: Any = np.lib.format.open_memmap(path, mode="r")
        except (ValueError, TypeError, OverflowError, SyntaxError, tokenize.TokenError) as error:
            raise DataError(
                f"{path} is not an array that can be read: {error}. Give a file that `numpy.save` "
                "wrote from integers; it may be truncated"
            ) from None
    if array.ndim not in (1, 2) or not array.flags.c_contiguous:
        order = "" if array.flags.c_contiguous else ", in Fortran order"
        raise DataError(
            f"{path} has the shape {list(array.shape)}{order}; it must have one dimension, or two "
            "in C order. Save numpy.ascontiguousarray(array) again"
        )
    _check_dtype(path, array.dtype)
    end = array.offset + array.nbytes
    if status.st_size != end:
        raise DataError(
            f"{path} has {status.st_size} bytes, but its array ends at byte {end}: other data "
            "follow, or the file has just changed. Save each array in a file"
        )
    return TokenFile(
        path=path,
        dtype=array.dtype,
        byte_offset=array.offset,
        num_tokens=array.size,
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
    )


def _open_indexed(prefix: str) -> TokenFile:
    paths = paths_to_read(prefix)
    with read_errors_of(prefix):
        # Before it is opened: if it is replaced meanwhile, reading it notices.
        data, index = os.stat(paths.bin), os.stat(paths.idx)
        sidecars = {}
        for name, path in zip(("info", "origins"), paths[2:], strict=True):
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(path)
                sidecars[name] = [status.st_size, status.st_mtime_ns]
        with IndexedDataset(prefix) as dataset:
            _check_dtype(prefix, dataset.dtype)
            return TokenFile(
                path=paths.bin,
                prefix=prefix,
                dtype=dataset.dtype,
                num_tokens=dataset.num_tokens,
                num_documents=dataset.num_documents,
                num_sequences=len(dataset),
                has_modes=dataset.sequence_modes is not None,
                size=data.st_size,
                mtime_ns=data.st_mtime_ns,
                index_mtime_ns=index.st_mtime_ns,
                sidecars=sidecars,
            )


def _check_dtype(path: str, dtype: np.dtype[Any]) -> None:
    if dtype in DTYPES:
        return
    if dtype.newbyteorder("<") in DTYPES:
        raise DataError(
            f"{path} holds big-endian {dtype.newbyteorder('=')}; save it again as little-endian: "
            f"array.astype('{dtype.newbyteorder('<').str}')"
        )
    ending = ".npy" if path.endswith(".npy") else ""
    raise DataError(
        f"{path} holds {dtype}; a shuffle takes uint16, uint32 and int32. Convert it, if its ids "
        f"fit: millrace convert {path} NEW{ending} --dtype int32"
    )
