"""Index entries on their way to the disk: memory stays bounded for any number of them."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

LIMIT = 1 << 20
"""Number of a column's entries that are kept in memory."""
_PIECE = 1 << 17  # entries that are read back at a time: they stay in a core's cache


class Entries:
    """A column of an index, appended to at its end and read back from its start.

    A short column is kept in memory; a longer one goes to a nameless temporary file, which
    disappears with the process.

    Args:
        dtype: "<i4", "<i8" or "<i1".
        folder: Folder for the temporary file, with room for the column.
    """

    def __init__(self, dtype: str, folder: str) -> None:
        self.dtype = np.dtype(dtype)
        size = LIMIT * self.dtype.itemsize
        self._file = tempfile.SpooledTemporaryFile(size, dir=folder)  # noqa: SIM115

    def extend(self, values: NDArray[Any]) -> None:
        self._file.seek(0, os.SEEK_END)
        self._file.write(np.ascontiguousarray(values, self.dtype).data)
        self._file.flush()  # else a forked child, too, would write what is buffered

    def chunks(self) -> Iterator[NDArray[Any]]:
        """The entries from the first to the last, in pieces."""
        self._file.seek(0)
        while data := self._file.read(_PIECE * self.dtype.itemsize):
            yield np.frombuffer(data, self.dtype)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of entries for which the disk had no room
            self._file.close()
