"""The token files of the input: checked when they are found, then read by pieces."""

import contextlib
import os
import stat
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.errors import ConfigError, DataError
from millrace.files import is_of_the_process
from millrace.ragged import Numbers, equal_runs
from millrace.store import IndexedDataset
from millrace.store.publish import paths_to_read

DTYPES = np.dtype("<u2"), np.dtype("<u4"), np.dtype("<i4")
"""The dtypes of tokens that can be shuffled."""


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """A file that holds one array of tokens, as it was when it was found."""

    path: str  # of an indexed dataset, the `.bin`
    prefix: str | None = None  # of an indexed dataset
    dtype: np.dtype[Any]
    byte_offset: int = 0  # of the first token
    num_tokens: int
    num_documents: int = 0  # of an indexed dataset, like the next three
    num_sequences: int = 0
    has_modes: bool = False
    index_mtime_ns: int | None = None
    size: int  # in bytes
    mtime_ns: int
    sidecars: dict[str, list[int]] = field(default_factory=dict)  # size and time by kind


def open_token_file(path: str, raw_dtype: np.dtype[Any], has_documents: bool) -> TokenFile:
    """Opens and checks a `.bin` or `.npy` file; see `find_domains`."""
    with read_errors_of(path):
        status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path} is not a regular file; write it to one, or remove it")
    if path.endswith(".bin") and os.path.exists(paths_to_read(path[:-4]).idx):
        return _open_indexed(path[:-4])
    if has_documents:
        raise ConfigError(
            f"{path} has no .idx, so millrace cannot tell where its documents end. --documents "
            "needs that: give indexed datasets (.bin and .idx), or leave --documents out"
        )
    # It is opened so that an error comes now, not in the middle of the job.
    with read_errors_of(path), open(path, "rb"):
        place = _place(path, status.st_size, raw_dtype)
    return TokenFile(path=path, size=status.st_size, mtime_ns=status.st_mtime_ns, **place)


@contextlib.contextmanager
def read_errors_of(path: str) -> Iterator[None]:
    """Makes an OSError about a file a DataError that names it."""
    try:
        yield
    except OSError as error:
        if is_of_the_process(error):
            raise
        raise DataError(
            f"{error.filename or path} cannot be read: {error.strerror or error}"
        ) from None


def _place(path: str, size: int, raw_dtype: np.dtype[Any]) -> dict[str, Any]:
    """Place and dtype of the tokens in a raw or NumPy file."""
    if not path.endswith(".npy"):
        if size % raw_dtype.itemsize == 0:
            return {"dtype": raw_dtype, "num_tokens": size // raw_dtype.itemsize}
        raise DataError(
            f"{path} has {size} bytes, which is not a multiple of {raw_dtype.itemsize}, the size "
            f"of {raw_dtype}: it is truncated, or has another dtype. Write it again, or correct "
            "--dtype"
        )
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
    if size != end:
        raise DataError(
            f"{path} has {size} bytes, but its array ends at byte {end}: other data follow, or the "
            "file has just changed. Save each array in a file"
        )
    return {"dtype": array.dtype, "num_tokens": array.size, "byte_offset": array.offset}


def _open_indexed(prefix: str) -> TokenFile:
    paths, sidecars = paths_to_read(prefix), {}
    with read_errors_of(prefix), IndexedDataset(prefix) as dataset:
        for name, path in zip(("info", "origins"), paths[2:], strict=True):
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(path)
                sidecars[name] = [status.st_size, status.st_mtime_ns]
        _check_dtype(prefix, dataset.dtype)
        data, index = dataset.files
        return TokenFile(
            path=paths.bin,
            prefix=prefix,
            dtype=dataset.dtype,
            num_tokens=dataset.num_tokens,
            num_documents=dataset.num_documents,
            num_sequences=len(dataset),
            has_modes=dataset.sequence_modes is not None,
            index_mtime_ns=index.time,
            size=data.size,
            mtime_ns=data.time,
            sidecars=sidecars,
        )


def _check_dtype(path: str, dtype: np.dtype[Any]) -> None:
    if dtype in DTYPES:
        return
    if (little := dtype.newbyteorder("<")) in DTYPES:
        raise DataError(
            f"{path} holds big-endian {dtype.newbyteorder('=')}; save it again as little-endian: "
            f"array.astype('{little.str}')"
        )
    ending = ".npy" if path.endswith(".npy") else ""
    raise DataError(
        f"{path} holds {dtype}; a shuffle takes uint16, uint32 and int32. Convert it, if its ids "
        f"fit: millrace convert {path} NEW{ending} --dtype int32"
    )


def read_files(
    files: Sequence[TokenFile],
    file_numbers: Numbers,
    byte_offsets: Numbers,
    sizes: Numbers,
    buffer: NDArray[np.uint8],
    targets: Numbers,
    *,
    or_words: bool = False,
) -> int:
    """Reads pieces of files, whose numbers ascend, by `_native.read_pieces`.

    A DataError is about a file that is gone, has changed, or cannot be read.
    """
    bits = 0
    for run in equal_runs(file_numbers):
        with _unchanged(files[file_numbers[run.start]]) as descriptor:
            bits |= _native.read_pieces(
                descriptor, byte_offsets[run], sizes[run], buffer, targets[run], or_words=or_words
            )
    return bits


@contextlib.contextmanager
def _unchanged(file: TokenFile) -> Iterator[int]:
    """Opens a file; a DataError if it has changed before or after the block."""
    with read_errors_of(file.path):
        # A named pipe in place of the file would wait for a writer.
        descriptor = os.open(file.path, os.O_RDONLY | os.O_NONBLOCK)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, descriptor)
            _check_unchanged(file, descriptor)
            stack.callback(_check_unchanged, file, descriptor)
            yield descriptor


def _check_unchanged(file: TokenFile, descriptor: int) -> None:
    status = os.fstat(descriptor)
    if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
        raise DataError(
            f"{file.path} changed while the job ran: it has {status.st_size} bytes of time "
            f"{status.st_mtime_ns} ns, not {file.size} of {file.mtime_ns}. Leave the input as it "
            "is until the job has ended; begin anew with --restart"
        )
