"""The index of an indexed dataset, read from its start to its end in bounded memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace.errors import DataError
from millrace.shuffling.token_files import TokenFile
from millrace.storage import StoredFile
from millrace.store import layout
from millrace.store.publish import open_pair

_ENTRIES = 1 << 18  # entries that are read at a time


class Documents(NamedTuple):
    """Some documents of an index, one after the other.

    Attributes:
        sequences: The first sequence of each document, and the end of the last one's:
            int64 [documents + 1].
        tokens: The first token of each document, and the end of the last one's:
            int64 [documents + 1].
    """

    sequences: NDArray[np.int64]
    tokens: NDArray[np.int64]


@contextlib.contextmanager
def open_index(file: TokenFile) -> Iterator[Index]:
    """Opens the index of an indexed dataset.

    Raises:
        DataError: A pair that is damaged, or has changed since it was found.
    """
    assert file.prefix is not None
    data, index = open_pair(file.prefix)
    assert data is not None
    times = index.identity.time, data.identity.time
    if times != (file.index_mtime_ns, file.mtime_ns) or data.size != file.size:
        raise DataError(
            f"{file.prefix}.bin/.idx changed while the job began; leave the input as it is until "
            "the job has ended, and run the same command again"
        )
    yield Index(file.prefix, index)


class Index:
    """The open index of an indexed dataset; see `open_index`."""

    def __init__(self, prefix: str, file: StoredFile) -> None:
        self._prefix = prefix
        self._index = layout.IndexFile(prefix, file)

    def column(self, name: str) -> Iterator[NDArray[Any]]:
        """The entries of a column, some at a time."""
        for start in range(0, self._index.header.columns[name].length, _ENTRIES):
            yield self._index.read(name, start, _ENTRIES)

    def documents(self) -> Iterator[Documents]:
        """All documents, some at a time; a DataError if their entries are out of order."""
        header, byte = self._index.header, 0
        for start in range(0, header.num_document_entries - 1, _ENTRIES):
            sequences = self._index.read("documents", start, _ENTRIES + 1)
            if problem := layout.document_problem(sequences, header.num_sequences, start):
                raise layout.index_damage(self._prefix, problem)
            tokens = np.full(len(sequences), byte // header.dtype.itemsize)
            last = int(sequences[-1])
            for first in range(int(sequences[0]), last, _ENTRIES):
                ends, byte = self._ends(first, min(first + _ENTRIES, last), byte)
                low, high = np.searchsorted(sequences, [first, first + len(ends)], side="right")
                tokens[low:high] = ends[sequences[low:high] - first - 1]
                tokens[high:] = ends[-1]
            yield Documents(sequences, tokens)

    def _ends(self, start: int, stop: int, byte: int) -> tuple[NDArray[np.int64], int]:
        """The ends of sequences [start, stop) in tokens; the first one starts at `byte`."""
        lengths = self._index.read("lengths", start, stop - start)
        pointers = self._index.read("pointers", start, stop - start)
        size = self._index.header.dtype.itemsize
        problem, end = layout.sequence_problem(lengths, pointers, size, byte, start)
        if problem:
            raise layout.index_damage(self._prefix, problem)
        return byte // size + np.cumsum(lengths, dtype=np.int64), end
