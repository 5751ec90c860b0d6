"""The columns of an index: while they grow, and as they are written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from millrace import _native
from millrace.errors import DataError
from millrace.files import atomic_file
from millrace.storage import copied
from millrace.store.layout import Header
from millrace.store.publish import bin_path, idx_path
from millrace.store.reader import IndexedDataset

LIMIT = 1 << 20  # entries of a column that are kept in memory
_PIECE = 1 << 17  # entries that are read back at a time: they stay in a core's cache


class IndexColumns:
    """Lengths, document entries and modes; `folder` takes what does not stay in memory."""

    def __init__(self, folder: str, *, has_modes: bool) -> None:
        self.has_modes = has_modes
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

    def append(self, entries: Entries) -> None:
        self._documents.extend(self._lengths.count + np.cumsum(entries.counts))
        self._lengths.extend(entries.lengths)
        if entries.modes is not None:
            self._modes.extend(entries.modes)

    def copy(
        self, other: IndexedDataset, sequences: tuple[int, int], documents: tuple[int, int]
    ) -> None:
        """Appends sequences and documents [start, stop) of another index."""
        shift = self._lengths.count - sequences[0]
        for lengths in _pieces(other.sequence_lengths, *sequences):
            self._lengths.extend(lengths)
        for ends in _pieces(other.document_indices, documents[0] + 1, documents[1] + 1):
            self._documents.extend(ends + shift)
        if self.has_modes and other.sequence_modes is not None:
            for modes in _pieces(other.sequence_modes, *sequences):
                self._modes.extend(modes)

    def arrays(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Lengths, document entries and modes so far."""
        lengths, documents, modes = (
            np.concatenate([np.empty(0, column.dtype), *column.chunks()])
            for column in (self._lengths, self._documents, self._modes)
        )
        return lengths, documents, modes

    def header(self, dtype: DTypeLike) -> Header:
        counts = self._lengths.count, self._documents.count
        return Header(np.dtype(dtype), *counts, has_modes=self.has_modes)

    def chunks(self, header: Header) -> Iterator[Any]:
        """The bytes of the index file, in pieces."""
        yield header.pack()
        yield from self._lengths.chunks()
        end = 0
        for lengths in self._lengths.chunks():
            sizes = np.multiply(lengths, header.dtype.itemsize, dtype="<i8")
            ends = end + np.cumsum(sizes)
            yield ends - sizes
            end = int(ends[-1])
        yield from self._documents.chunks()
        yield from self._modes.chunks()

    def num_tokens(self) -> int:
        """The sum of all lengths."""
        return sum(int(lengths.sum(dtype=np.int64)) for lengths in self._lengths.chunks())

    def close(self) -> None:
        for column in (self._lengths, self._documents, self._modes):
            column.close()


def _pieces(column: NDArray[Any], start: int, stop: int) -> Iterator[NDArray[Any]]:
    """Entries [start, stop) of a mapped column, copied in pieces."""
    for first in range(start, stop, LIMIT):
        yield copied(column[first : min(first + LIMIT, stop)])


class _Entries:
    """A column, appended to at its end and read back from its start.

    A short one is kept in memory; a longer one goes to a nameless temporary file in `folder`, which
    disappears with the process.
    """

    def __init__(self, dtype: str, folder: str) -> None:
        import tempfile  # 3 ms that `import millrace` does without

        self.dtype, self.count = np.dtype(dtype), 0
        size = LIMIT * self.dtype.itemsize
        self._file = tempfile.SpooledTemporaryFile(size, dir=folder)  # noqa: SIM115

    def extend(self, values: NDArray[Any]) -> None:
        self._file.seek(0, os.SEEK_END)
        self._file.write(np.ascontiguousarray(values, self.dtype).data)
        self._file.flush()  # else a forked child, too, would write what is buffered
        self.count += len(values)

    def chunks(self) -> Iterator[NDArray[Any]]:
        self._file.seek(0)
        while data := self._file.read(_PIECE * self.dtype.itemsize):
            yield np.frombuffer(data, self.dtype)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of entries for which the disk had no room
            self._file.close()


# ---- the index of a `.bin` that is there already ----


class Entries(NamedTuple):
    """The entries of some sequences, and of the documents that end with one of them.

    Attributes:
        lengths: Length of each sequence in tokens: integers [sequences].
        counts: Number of these sequences that each document has: integers [documents]. Sequences of
            a document that ends later are at the end of `lengths`, and not counted.
        modes: Mode of each sequence, int8 [sequences]; None in a file without modes.
    """

    lengths: NDArray[Any]
    counts: NDArray[Any]
    modes: NDArray[np.int8] | None = None


def write_index(
    prefix: str, dtype: DTypeLike, documents: Iterable[Entries], *, has_modes: bool = False
) -> None:
    """Writes `PREFIX.idx` for the `.bin` that is there, whole or not at all; it is not flushed.

    Raises:
        DataError: The tokens of the entries are not as many as those of the `.bin`.
    """
    columns = IndexColumns(os.path.dirname(prefix) or ".", has_modes=has_modes)
    with contextlib.closing(columns), atomic_file(idx_path(prefix), durable=False) as file:
        for entries in documents:
            columns.append(entries)
        header, size = columns.header(dtype), os.path.getsize(bin_path(prefix))
        num_bytes = columns.num_tokens() * header.dtype.itemsize
        if num_bytes != size:
            raise DataError(
                f"{prefix}: the entries are of {header.num_sequences} sequences, "
                f"{header.num_document_entries - 1} documents and {num_bytes} bytes; the .bin has "
                f"{size}. No index is written"
            )
        file.writelines(columns.chunks(header))
