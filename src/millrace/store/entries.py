"""Index entries on their way to disk: memory stays bounded however many there are."""

from __future__ import annotations

import array
import tempfile
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

_TYPECODES = {"<i4": "i", "<i8": "q", "<i1": "b"}
LIMIT = 1 << 20
"""Entries of a kind that are kept in memory."""
_PIECE = 1 << 17  # entries that are handed out at a time: they stay in a core's cache


class Entries:
    """A column of an index, appended to at its end and read back from its start.

    The first entries stay in memory; what exceeds that is written to a nameless temporary file,
    which is gone with its process.

    Args:
        dtype: "<i4", "<i8" or "<i1".
        folder: where the temporary file goes; it must hold the column.
    """

    def __init__(self, dtype: str, folder: str) -> None:
        self.dtype = np.dtype(dtype)
        self._pending: array.array[int] = array.array(_TYPECODES[dtype])
        self._folder = folder
        self._file: IO[bytes] | None = None

    def extend(self, values: NDArray[Any]) -> None:
        """Appends an array."""
        self._pending.frombytes(np.ascontiguousarray(values, self.dtype).view(np.uint8).data)
        self._spill()

    def _spill(self) -> None:
        """Writes the pending entries to the file, if they are many."""
        if len(self._pending) >= LIMIT:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
            self._file.write(self._pending.tobytes())
            del self._pending[:]

    def chunks(self) -> Iterator[NDArray[Any]]:
        """The entries from the first to the last, in pieces."""
        if self._file is not None:
            self._file.seek(0)
            while data := self._file.read(_PIECE * self.dtype.itemsize):
                yield np.frombuffer(data, self.dtype)
        for start in range(0, len(self._pending), _PIECE):
            yield np.array(self._pending[start : start + _PIECE], self.dtype)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
