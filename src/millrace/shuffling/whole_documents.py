"""Whole documents of indexed datasets as items, with their sequences, modes and origins.

What belongs to a document is looked up in tables, which are files: only the needed rows take
memory.
"""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from millrace import _native
from millrace.errors import ConfigError, DataError
from millrace.files import naming
from millrace.provenance import Origins, OriginsWriter
from millrace.ragged import Numbers, starts_of
from millrace.shuffling.domains import Input, TokenFile
from millrace.shuffling.shuffle_items import Items, ItemsAt
from millrace.storage import copied
from millrace.store import IndexedDataset
from millrace.store.writer import Entries, write_index

_BLOCK = 1 << 13  # documents that are read or written at a time
_ENTRIES = 1 << 18  # entries of an index that are copied at a time
_MOST_SEQUENCES = 1 << 17  # entries of an index that are written at a time, about


@dataclass(frozen=True)
class Table:
    """Rows of one dtype in a file."""

    path: str
    dtype: DTypeLike

    @contextlib.contextmanager
    def writing(self) -> Iterator[Callable[[NDArray[Any]], object]]:
        """Writes the file; yields a function that appends rows."""
        with naming(self.path), open(self.path, "wb") as file:
            yield lambda rows: file.write(np.ascontiguousarray(rows, self.dtype).data)

    def ranges(self, starts: Numbers, counts: Numbers) -> NDArray[Any]:
        """Rows [starts[i], starts[i] + counts[i]) for each i."""
        ends = np.cumsum(counts)
        rows = np.empty(int(counts.sum()), self.dtype)
        size = rows.itemsize
        with naming(self.path), open(self.path, "rb", buffering=0) as file:
            _native.read_pieces(
                file.fileno(), starts * size, counts * size, rows.view("u1"), (ends - counts) * size
            )
        return rows

    def rows(self, numbers: Numbers) -> NDArray[Any]:
        """The rows of these numbers, of any shape."""
        # Ascending and unique: neighbours are read together.
        unique, places = np.unique(numbers, return_inverse=True)
        return self.ranges(unique, np.ones_like(unique))[places.reshape(numbers.shape)]


class DocumentItems(Items):
    """Whole documents; all workers can read the folder, which has their tables.

    Documents, sequences and tokens are numbered over all files:

    starts     first token of each sequence, and the end of the last one
    documents  first sequence of each document, and the end of the last one; not read if each
               document is one sequence
    modes      mode of each sequence, if the files have modes

    A ConfigError for files with and without modes, or origins without pyarrow.
    """

    def __init__(self, found: Input, folder: str) -> None:
        files = found.files
        num_documents = np.array([file.num_documents for file in files], np.int64)
        num_tokens = np.array([file.num_tokens for file in files], np.int64)
        remedy = "datasets with documents"
        super().__init__(found, num_documents, num_tokens, unit="document", remedy=remedy)
        self._has_modes, self._is_single = _have_modes(files), True
        self._starts = Table(os.path.join(folder, "starts"), np.int64)
        self._documents = Table(os.path.join(folder, "documents"), np.int64)
        self._modes = Table(os.path.join(folder, "modes"), np.int8)
        self._write_tables()
        missing = [f.path for f in files if f.num_documents and "origins" not in f.sidecars]
        self.has_origins = not missing
        self._origins = DocumentOrigins(files, folder) if self.has_origins else None
        if 0 < len(missing) < np.count_nonzero(num_documents):
            self.notices.append(
                f"{len(missing)} of {len(files)} files have no origins of their documents "
                f"({missing[0]} is the first), so the shards have none"
            )

    def token_ranges(self, units: Numbers) -> Numbers:
        return self._starts.rows(self._sequence_ranges(units))

    def write_index(self, prefix: str, items_at: ItemsAt, start: int, stop: int) -> None:
        """Writes the index, with the sequences and modes of the documents.

        A sidecar of origins is written if all files have one.
        """

        def documents() -> Iterator[Numbers]:
            for first in range(start, stop, _BLOCK):
                yield self.units.units(items_at(first, min(first + _BLOCK, stop)))

        entries = itertools.chain.from_iterable(map(self._entries, documents()))
        write_index(prefix, self.dtype, entries, has_modes=self._has_modes)
        if self._origins is not None:
            self._origins.write(prefix, documents())

    def _write_tables(self) -> None:
        token = sequence = 0
        with (
            self._starts.writing() as add_starts,
            self._documents.writing() as add_documents,
            self._modes.writing() as add_modes,
        ):
            for file in self.files:
                index = _open_index(file)
                width = index.dtype.itemsize
                for start in range(0, file.num_sequences, _ENTRIES):
                    part = slice(start, start + _ENTRIES)
                    add_starts(token + copied(index.sequence_pointers[part]) // width)
                    if index.sequence_modes is not None:
                        add_modes(copied(index.sequence_modes[part]))
                for start in range(0, file.num_documents, _ENTRIES):
                    entries = copied(index.document_indices[start : start + _ENTRIES + 1])
                    add_documents(sequence + entries[:-1])
                    self._is_single &= bool((np.diff(entries) == 1).all())
                token, sequence = token + file.num_tokens, sequence + file.num_sequences
            add_starts(np.array([token]))
            add_documents(np.array([sequence]))

    def _entries(self, documents: Numbers) -> Iterator[Entries]:
        """The entries of an index with these documents, some at a time."""
        firsts, ends = self._sequence_ranges(documents)
        sizes = ends - firsts
        totals = np.cumsum(sizes)
        cuts = np.searchsorted(totals, np.arange(_MOST_SEQUENCES, totals[-1], _MOST_SEQUENCES))
        for low, high in itertools.pairwise([0, *np.unique(cuts).tolist(), len(documents)]):
            first, counts = firsts[low:high], sizes[low:high]
            steps = np.diff(self._starts.ranges(first, counts + 1))
            lengths = np.delete(steps, np.cumsum(counts + 1)[:-1] - 1)  # not those between ranges
            modes = self._modes.ranges(first, counts) if self._has_modes else None
            yield lengths, counts, modes

    def _sequence_ranges(self, documents: Numbers) -> Numbers:
        """The first sequence of each document, and the end of its sequences: int64 [2, n]."""
        ranges = np.stack([documents, documents + 1])
        return ranges if self._is_single else self._documents.rows(ranges)


def _have_modes(files: Sequence[TokenFile]) -> bool:
    """Whether the files have modes; a ConfigError if only some have."""
    with_modes = [file for file in files if file.has_modes]
    without = [file for file in files if file.num_sequences > 0 and not file.has_modes]
    if with_modes and without:
        raise ConfigError(
            f"{with_modes[0].path} has modes, and {without[0].path} has none: all files must have "
            "modes, or none. Shuffle them in two jobs"
        )
    return bool(with_modes)


def _open_index(file: TokenFile) -> IndexedDataset:
    assert file.prefix is not None
    dataset = IndexedDataset(file.prefix, access="file")
    data, index = dataset.files
    found = file.size, file.mtime_ns, file.index_mtime_ns
    if (data.size, data.time, index.time) != found:
        raise DataError(
            f"{file.prefix}.bin/.idx changed while the job began; leave the input as it is until "
            "the job has ended, and run the same command again"
        )
    dataset.check()
    return dataset


class DocumentOrigins:
    """The origins of all documents, as texts of JSON in a table of bytes."""

    def __init__(self, files: Sequence[TokenFile], folder: str) -> None:
        import orjson  # which comes with pyarrow, and neither is needed without origins

        self._starts = Table(os.path.join(folder, "origin_starts"), np.int64)
        self._texts = Table(os.path.join(folder, "origins"), np.uint8)
        sources: dict[str, int] = {}
        end = 0
        with self._starts.writing() as add_starts, self._texts.writing() as add_texts:
            for origins in _origins_of(files):
                names, numbers, *columns, ids = origins
                places = np.array([sources.setdefault(name, len(sources)) for name in names])
                lists = [column.tolist() for column in (places[numbers], *columns)]
                texts = [orjson.dumps(row) + b"," for row in zip(*lists, ids, strict=True)]
                starts = end + starts_of(map(len, texts))
                add_starts(starts[:-1])
                add_texts(np.frombuffer(b"".join(texts), np.uint8))
                end = int(starts[-1])
            add_starts(np.array([end]))
        self._sources = list(sources)

    def write(self, prefix: str, documents: Iterable[Numbers]) -> None:
        """Writes the sidecar of a pair, which is there; `documents` are its own, in order."""
        import orjson

        with OriginsWriter(prefix, durable=False) as writer:
            for numbers in documents:
                starts, ends = self._starts.rows(np.stack([numbers, numbers + 1]))
                texts = self._texts.ranges(starts, ends - starts).tobytes()
                rows = orjson.loads(b"[%b]" % texts[:-1])
                writer.add(self._sources, *zip(*rows, strict=True))


def _origins_of(files: Sequence[TokenFile]) -> Iterator[Origins]:
    for file in files:
        assert file.prefix is not None
        with IndexedDataset(file.prefix) as dataset:
            for start in range(0, file.num_documents, _BLOCK):
                origins = dataset.origins(start, min(start + _BLOCK, file.num_documents))
                if origins is None:
                    raise DataError(
                        f"the origins of {file.path} were removed while the job began; restore "
                        "them, or begin anew with --restart"
                    )
                yield origins
