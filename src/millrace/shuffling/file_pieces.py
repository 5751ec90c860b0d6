"""Reads pieces of many files to any places of a buffer; a file that has changed is an error."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.errors import DataError
from millrace.files import is_of_the_process
from millrace.ragged import Numbers, equal_runs
from millrace.shuffling.token_files import TokenFile


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
    """Reads pieces of files to any places of a buffer. At most one file is open at a time.

    Args:
        files: The files.
        file_numbers: Number of each piece's file, ascending: int64 [n].
        byte_offsets: Where each piece starts in its file: int64 [n].
        sizes: Size of each piece in bytes: int64 [n].
        buffer: uint8 [m].
        targets: Where each piece starts in the buffer: int64 [n].
        or_words: Whether to return the bitwise OR of all 32-bit words that were read, and not 0.

    Raises:
        DataError: A file that is gone, has changed, or cannot be read.
    """
    bits = 0
    for run in equal_runs(file_numbers):
        file = files[file_numbers[run.start]]
        bits |= _read_file(file, byte_offsets[run], sizes[run], buffer, targets[run], or_words)
    return bits


def _read_file(
    file: TokenFile,
    byte_offsets: Numbers,
    sizes: Numbers,
    buffer: NDArray[np.uint8],
    targets: Numbers,
    or_words: bool,
) -> int:
    try:
        # A named pipe in place of the file would wait for a writer.
        descriptor = os.open(file.path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            _check_unchanged(file, descriptor)
            try:
                bits = _native.read_pieces(
                    descriptor, byte_offsets, sizes, buffer, targets, or_words=or_words
                )
            except ValueError:
                _check_unchanged(file, descriptor)  # cut short meanwhile
                raise
            _check_unchanged(file, descriptor)
            return bits
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise DataError(
            f"{file.path} was removed while the job ran. Restore it and run the same command again"
        ) from None
    except OSError as error:
        if is_of_the_process(error):
            raise
        raise DataError(f"{file.path} cannot be read: {error.strerror or error}") from None


def _check_unchanged(file: TokenFile, descriptor: int) -> None:
    status = os.fstat(descriptor)
    if (status.st_size, status.st_mtime_ns) == (file.size, file.mtime_ns):
        return
    raise DataError(
        f"{file.path} changed while the job ran: it has {status.st_size} bytes, last changed at "
        f"{status.st_mtime_ns} ns; it had {file.size} bytes, last changed at {file.mtime_ns} ns. "
        "Leave the input as it is until the job has ended; begin anew with --restart"
    )
