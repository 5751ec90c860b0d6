"""The columns of an index while they grow: in memory, and on the disk beyond a limit."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.storage.protocol import copied
from millrace.store.layout import Header
from millrace.store.reader import IndexedDataset

LIMIT = 1 << 20  # entries of a column that are kept in memory
_PIECE = 1 << 17  # entries that are read back at a time: they stay in a core's cache


class IndexColumns:
    """Lengths, document entries and modes.

    Args:
        folder: Folder for what does not stay in memory.
        has_modes: Whether the sequences have modes.
    """

    def __init__(self, folder: str, has_modes: bool) -> None:
        self._has_modes = has_modes
        self._lengths, self._documents, self._modes = (
            _Entries(dtype, folder) for dtype in ("<i4", "<i8", "<i1")
        )
        self._documents.extend(np.zeros(1, np.int64))

    def take(self, buffer: _native.TokenBuffer) -> None:
        """Appends the entries that a buffer of tokens has gathered."""
        lengths, modes, documents = buffer.take_entries()
        self._lengths.extend(lengths)
        self._documents.extend(documents)
        self._modes.extend(modes)

    def copy(
        self,
        other: IndexedDataset,
        sequences: tuple[int, int],
        documents: tuple[int, int],
        num_sequences: int,
    ) -> None:
        """Appends sequences and documents [start, stop) of another index.

        Args:
            num_sequences: Number of sequences before them.
        """
        for start in range(*sequences, LIMIT):
            part = slice(start, min(start + LIMIT, sequences[1]))
            self._lengths.extend(copied(other.sequence_lengths[part]))
            if self._has_modes and other.sequence_modes is not None:
                self._modes.extend(copied(other.sequence_modes[part]))
        for start in range(documents[0] + 1, documents[1] + 1, LIMIT):
            ends = other.document_indices[start : min(start + LIMIT, documents[1] + 1)]
            self._documents.extend(copied(ends) + (num_sequences - sequences[0]))

    def arrays(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Lengths, document entries and modes so far."""
        lengths, documents, modes = (
            np.concatenate([np.empty(0, column.dtype), *column.chunks()])
            for column in (self._lengths, self._documents, self._modes)
        )
        return lengths, documents, modes

    def chunks(self, header: Header) -> Iterator[Any]:
        """The bytes of the index file, in pieces."""
        yield header.pack()
        yield from self._lengths.chunks()
        end = 0
        for lengths in self._lengths.chunks():
            pointers = np.empty(len(lengths) + 1, "<i8")
            pointers[0] = end
            # In two steps: a cumsum that also converts is three times slower.
            np.multiply(lengths, header.dtype.itemsize, out=pointers[1:], dtype="<i8")
            np.cumsum(pointers, out=pointers)
            yield pointers[:-1]
            end = int(pointers[-1])
        yield from self._documents.chunks()
        yield from self._modes.chunks()

    def num_tokens(self) -> int:
        """The sum of all lengths."""
        return sum(int(lengths.sum(dtype=np.int64)) for lengths in self._lengths.chunks())

    def close(self) -> None:
        for column in (self._lengths, self._documents, self._modes):
            column.close()


class _Entries:
    """A column of an index, appended to at its end and read back from its start.

    A short column is kept in memory; a longer one goes to a nameless temporary file in `folder`,
    which disappears with the process.
    """

    def __init__(self, dtype: str, folder: str) -> None:
        import tempfile  # 3 ms that `import millrace` does without

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
