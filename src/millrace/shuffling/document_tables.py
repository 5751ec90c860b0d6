"""The documents of indexed datasets, with their sequences and modes, as tables in a folder.

Documents, sequences and tokens are numbered over all files:

    tokens.npy      first token of each document, and the end of the last one
    sequences.npy   first sequence of each document, and the end of the last one; it and lengths.npy
                    are left out if each document is one sequence
    lengths.npy     length of each sequence
    modes.npy       mode of each sequence, if the files have modes
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.errors import ConfigError
from millrace.ragged import Numbers
from millrace.shuffling.index_stream import open_index
from millrace.shuffling.row_tables import Table, new_table
from millrace.shuffling.token_files import TokenFile
from millrace.store.columns import Entries

_MOST_SEQUENCES = 1 << 17  # sequences whose entries are written at a time


class DocumentTables:
    """The documents of files, by number; a pickle holds the paths of the tables.

    Args:
        files: Indexed datasets.
        folder: Folder for the tables.

    Attributes:
        has_modes: Whether the sequences have modes.

    Raises:
        ConfigError: Files of which some have modes and others have not.
        DataError: An index that is damaged.
    """

    def __init__(self, files: Sequence[TokenFile], folder: str) -> None:
        self.has_modes = _have_modes(files)
        self._tokens, self._sequences = _copy_documents(files, folder)
        self._lengths = self._modes = None
        if self._sequences is not None:
            self._lengths = _copy_column("lengths", np.int32, files, folder)
        if self.has_modes:
            self._modes = _copy_column("modes", np.int8, files, folder)

    def token_ranges(self, documents: Numbers) -> tuple[Numbers, Numbers]:
        """The first token of each document, and the end of its tokens: int64 [n] each."""
        first, end = self._tokens.windows(documents, 2).T
        return first, end

    def entries(self, documents: Numbers) -> Iterator[Entries]:
        """The entries of an index with these documents, some at a time."""
        if self._sequences is None or self._lengths is None:  # each document is one sequence
            first, end = self.token_ranges(documents)
            counts = np.ones(len(documents), np.int64)
            yield Entries(end - first, counts, self._modes_of(documents, counts))
            return
        first, end = self._sequences.windows(documents, 2).T
        ends = np.cumsum(end - first)
        starts = ends - (end - first)
        document = 0
        for low in range(0, max(int(ends[-1]), 1), _MOST_SEQUENCES):
            high = low + _MOST_SEQUENCES
            skipped = np.maximum(low - starts, 0)
            counts = np.maximum(np.minimum(ends, high) - starts - skipped, 0)
            ranges = first[counts > 0] + skipped[counts > 0], counts[counts > 0]
            stop = int(np.searchsorted(ends, high, side="right"))
            yield Entries(
                self._lengths.ranges(*ranges),
                np.diff(ends[document:stop], prepend=low),
                self._modes_of(*ranges),
            )
            document = stop

    def _modes_of(self, first: Numbers, counts: Numbers) -> NDArray[Any] | None:
        return None if self._modes is None else self._modes.ranges(first, counts)


def _copy_documents(files: Sequence[TokenFile], folder: str) -> tuple[Table, Table | None]:
    """The tables of first tokens and first sequences; None if each document is one sequence."""
    token_path, sequence_path = (os.path.join(folder, f"{n}.npy") for n in ("tokens", "sequences"))
    is_single, token, sequence = True, 0, 0
    with (
        new_table(token_path, np.int64) as append_tokens,
        new_table(sequence_path, np.int64) as append_sequences,
    ):
        for file in files:
            with open_index(file) as index:
                for documents in index.documents():
                    append_tokens(token + documents.tokens[:-1])
                    append_sequences(sequence + documents.sequences[:-1])
                    is_single = is_single and bool(np.all(np.diff(documents.sequences) == 1))
            token, sequence = token + file.num_tokens, sequence + file.num_sequences
        append_tokens(np.array([token]))
        append_sequences(np.array([sequence]))
    if is_single:
        os.unlink(sequence_path)
        return Table(token_path), None
    return Table(token_path), Table(sequence_path)


def _copy_column(name: str, dtype: Any, files: Sequence[TokenFile], folder: str) -> Table:
    """The table of a column of all indices."""
    path = os.path.join(folder, f"{name}.npy")
    with new_table(path, dtype) as append:
        for file in files:
            with open_index(file) as index:
                for entries in index.column(name):
                    append(entries)
    return Table(path)


def _have_modes(files: Sequence[TokenFile]) -> bool:
    """Whether the files have modes; a ConfigError if some have them and others do not."""
    with_modes = [file for file in files if file.has_modes]
    without = [file for file in files if file.num_sequences > 0 and not file.has_modes]
    if with_modes and without:
        raise ConfigError(
            f"{with_modes[0].path} has modes, and {without[0].path} has none: all files must have "
            "modes, or none. Shuffle them in two jobs"
        )
    return bool(with_modes)
