"""Items that are whole documents of indexed datasets, with their sequences, modes and origins.

Documents, sequences and tokens are numbered over all files. What the job needs to know of them is
copied to tables in its folder, with a row for each document or sequence:

    tokens.npy      first token of each document, and the end of the last one
    sequences.npy   first sequence of each document, and the end of the last one; it and lengths.npy
                    are left out if each document is one sequence
    lengths.npy     length of each sequence
    modes.npy       mode of each sequence, if the files have modes
    origins.npy     origin of each document, if all files have origins; with ids.npy, the bytes of
                    all ids, and sources.json, the names of all sources
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.checks import absolute_path, one_path
from millrace.errors import ConfigError, DataError
from millrace.files import atomic_file, temporary_name
from millrace.jobs.shuffling.indices import open_index
from millrace.jobs.shuffling.inputs import (
    InputDomain,
    Inputs,
    TokenArray,
    common_dtype,
    find_domains,
    tokenizer_of,
)
from millrace.jobs.shuffling.items import Sources
from millrace.jobs.shuffling.passes import Passes, describe, starts_of
from millrace.jobs.shuffling.sources import Numbers, read_files
from millrace.jobs.shuffling.tables import Table, new_table
from millrace.store import IndexedDataset
from millrace.store.index_writer import Entries, write_index
from millrace.store.info import Info
from millrace.store.layout import Header
from millrace.store.origins import Origins, OriginsWriter, has_origins, make_table
from millrace.store.publish import bin_path, idx_path, info_path, origins_path
from millrace.store.reader import fingerprint_of

DOCUMENTS_REASON = "whole documents are shuffled: give indexed datasets, or leave --documents out"
"""Why `find_domains` must find documents."""

_BLOCK = 1 << 13  # documents that are read, or whose entries are written, at a time
_MOST_SEQUENCES = 1 << 17  # sequences whose entries are written at a time
_ORIGINS = 1 << 16  # documents whose origins are copied at a time: a row group of the sidecar

_TOKENS, _SEQUENCES = "tokens.npy", "sequences.npy"
_ORIGINS_TABLE, _IDS, _SOURCES = "origins.npy", "ids.npy", "sources.json"

_ORIGIN = np.dtype(
    [
        ("source", "<i4"),  # place in sources.json
        ("id_size", "<i4"),  # bytes; -1: no id
        ("line", "<i8"),
        ("byte_offset", "<i8"),
        ("id_start", "<i8"),  # first byte in ids.npy
    ]
)


def document_items(inputs: Inputs, *, folder: str | os.PathLike[str]) -> DocumentItems:
    """The documents of an input of indexed datasets.

    Args:
        inputs: Folder with a folder for each domain, or a list of weights and paths; see
            `find_domains`.
        folder: Folder for tables of the documents, which all workers can read.

    Raises:
        ConfigError: An input without documents, files with and without modes, or origins where
            pyarrow is not installed; and see `find_domains`.
        DataError: See `find_domains`, and an index that is damaged.

    >>> import tempfile, millrace
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with millrace.IndexedDatasetBuilder(f"{folder}/web") as builder:
    ...         builder.add_documents([1, 2, 3, 4, 5], [3, 2])
    ...     items = document_items([(1.5, f"{folder}/web")], folder=folder)
    ...     buffer = np.zeros(8, np.int32)
    ...     items.read(np.array([0, 1, 2]), buffer, np.array([5, 3, 0]))
    >>> items.num_items, buffer.tolist()
    (3, [1, 2, 3, 4, 5, 1, 2, 3])
    """
    folder = absolute_path(one_path("folder", folder))
    domains, notices = find_domains(inputs, dtype=np.int32, documents_for=DOCUMENTS_REASON)
    return DocumentItems(domains, notices, folder)


class DocumentItems:
    """Whole documents, of domains that `find_domains` has found; see `Items`."""

    def __init__(self, domains: Sequence[InputDomain], notices: Sequence[str], folder: str) -> None:
        arrays = [file for domain in domains for file in domain.files]
        counts = [sum(file.num_documents for file in domain.files) for domain in domains]
        self.dtype = common_dtype(domains)
        self.item_size = None
        self.tokenizer = tokenizer_of(domains)
        self._passes = Passes(counts, [domain.weight for domain in domains])
        self._first_documents = starts_of(file.num_documents for file in arrays)
        self._first_tokens = starts_of(file.num_tokens for file in arrays)
        self.num_items = sum(self._passes.num_items)
        self.domains, self.files = describe(
            domains,
            self._passes,
            bounds=self._first_documents,
            num_tokens=np.diff(self._first_tokens),
            num_left=[0] * len(domains),
        )
        if self.num_items == 0:
            raise ConfigError(
                f"the input has no documents: {len(arrays)} files have "
                f"{int(self._first_documents[-1])} documents, and their weights take none of them"
            )
        has_modes = _have_modes(arrays)
        self._tokens, self._sequences = _copy_documents(arrays, folder)
        self._lengths = self._modes = None
        if self._sequences is not None:
            self._lengths = _copy_column("lengths", np.int32, arrays, folder)
        if has_modes:
            self._modes = _copy_column("modes", np.int8, arrays, folder)
        self._origins = None
        missing = [file.path for file in arrays if file.num_documents and not _has_origins(file)]
        if not missing:
            self._origins = _Origins(arrays, folder)
        elif len(missing) < sum(file.num_documents > 0 for file in arrays):
            notices = [
                *notices,
                f"{len(missing)} of {len(arrays)} files have no origins of their documents "
                f"({missing[0]} is the first), so the shards have none",
            ]
        self.notices = (*notices, *_shortages(domains, self._passes))

    @property
    def has_origins(self) -> bool:
        """Whether the shards get sidecars of their documents' origins."""
        return self._origins is not None

    def sizes(self, numbers: Numbers) -> Numbers:
        """Tokens of each item: int64 [n]."""
        first, end = self._tokens.windows(self._passes.units(numbers), 2).T
        sizes: Numbers = end - first
        return sizes

    def read(self, numbers: Numbers, buffer: NDArray[Any], targets: Numbers) -> None:
        """Reads items to any places of a buffer; see `Items`."""
        documents, targets = self._passes.ascending_units(numbers, targets)
        size = self.dtype.itemsize
        for start in range(0, len(documents), _BLOCK):
            part = documents[start : start + _BLOCK]
            files = np.searchsorted(self._first_documents, part, side="right") - 1
            first, end = self._tokens.windows(part, 2).T
            has_tokens = first < end
            read_files(
                self.files,
                files[has_tokens],
                (first - self._first_tokens[files])[has_tokens] * size,
                (end - first)[has_tokens] * size,
                buffer.view(np.uint8),
                targets[start : start + _BLOCK][has_tokens] * size,
            )

    def write_index(self, prefix: str, sources: Sources, start: int, stop: int) -> list[str]:
        """Writes the index, with the sequences and modes of the documents; see `Items`.

        The sidecar of origins is written if all files have one; `.info.json` names the tokenizer,
        if all files name the same one.
        """
        blocks = [(first, min(first + _BLOCK, stop)) for first in range(start, stop, _BLOCK)]

        def documents() -> Iterator[Numbers]:
            return (self._passes.units(sources(*block)) for block in blocks)

        num_sequences = stop - start
        if self._sequences is not None:
            num_sequences = sum(
                int(np.diff(self._sequences.windows(part, 2)).sum()) for part in documents()
            )
        header = Header(
            dtype=self.dtype,
            num_sequences=num_sequences,
            num_document_entries=stop - start + 1,
            has_modes=self._modes is not None,
        )
        entries = itertools.chain.from_iterable(map(self._entries, documents()))
        write_index(prefix, header, entries)
        paths = [idx_path(prefix)]
        if self._origins is not None:
            self._origins.write(prefix, documents())
            paths.append(origins_path(prefix))
        if self.tokenizer is not None:
            info = Info(provenance={"tokenizer": self.tokenizer})
            with atomic_file(info_path(prefix), durable=False) as file:
                file.write(info.to_json().encode())
            paths.append(info_path(prefix))
        return paths

    def _entries(self, documents: Numbers) -> Iterator[Entries]:
        if self._sequences is None or self._lengths is None:  # each document is one sequence
            first, end = self._tokens.windows(documents, 2).T
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


# ---- tables of documents and sequences ----


def _copy_documents(files: Sequence[TokenArray], folder: str) -> tuple[Table, Table | None]:
    """The tables of first tokens and first sequences; None if each document is one sequence."""
    token_path, sequence_path = (os.path.join(folder, name) for name in (_TOKENS, _SEQUENCES))
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


def _copy_column(name: str, dtype: Any, files: Sequence[TokenArray], folder: str) -> Table:
    """The table of a column of all indices."""
    path = os.path.join(folder, f"{name}.npy")
    with new_table(path, dtype) as append:
        for file in files:
            with open_index(file) as index:
                for entries in index.column(name):
                    append(entries)
    return Table(path)


def _have_modes(files: Sequence[TokenArray]) -> bool:
    """Whether the files have modes; a ConfigError if some have them and others do not."""
    with_modes = [file for file in files if file.has_modes]
    without = [file for file in files if file.num_sequences > 0 and not file.has_modes]
    if with_modes and without:
        raise ConfigError(
            f"{with_modes[0].path} has modes, and {without[0].path} has none: all files must have "
            "modes, or none. Shuffle them in two jobs"
        )
    return bool(with_modes)


def _shortages(domains: Sequence[InputDomain], passes: Passes) -> Iterator[str]:
    """Notices about domains without items."""
    for domain, num_items in zip(domains, passes.num_items, strict=True):
        count = sum(file.num_documents for file in domain.files)
        if count > 0 and num_items == 0:
            yield (
                f"domain {domain.name} has the weight {float(domain.weight):g}, which takes none "
                f"of its {count:,} documents"
            )
        elif domain.files and count == 0:
            num_files = len(domain.files)
            yield f"domain {domain.name} has no documents: its {num_files:,} files are empty"


# ---- origins ----


def _has_origins(file: TokenArray) -> bool:
    return file.prefix is not None and has_origins(file.prefix)


class _Origins:
    """Where all documents came from, as tables in a folder.

    Args:
        files: Indexed datasets with origins.
        folder: Folder for the tables.
    """

    def __init__(self, files: Sequence[TokenArray], folder: str) -> None:
        path, ids_path = (os.path.join(folder, name) for name in (_ORIGINS_TABLE, _IDS))
        self._sources_path = os.path.join(folder, _SOURCES)
        sources: dict[str, int] = {}
        id_start = 0
        with new_table(path, _ORIGIN) as append, new_table(ids_path, np.uint8) as append_ids:
            for origins in _origins_of(files):
                numbers = [sources.setdefault(name, len(sources)) for name in origins.sources]
                ids = [None if id_ is None else id_.encode() for id_ in origins.ids]
                id_sizes = np.array([-1 if id_ is None else len(id_) for id_ in ids], np.int32)
                rows = np.empty(len(ids), _ORIGIN)
                rows["source"] = np.array(numbers, np.int32)[origins.source_numbers]
                rows["line"], rows["byte_offset"] = origins.lines, origins.byte_offsets
                rows["id_size"] = id_sizes
                ends = id_start + np.cumsum(np.maximum(id_sizes, 0), dtype=np.int64)
                rows["id_start"] = ends - np.maximum(id_sizes, 0)
                id_start = int(ends[-1])
                append(rows)
                append_ids(np.frombuffer(b"".join(filter(None, ids)), np.uint8))
        with atomic_file(self._sources_path) as file:
            file.write(json.dumps(list(sources)).encode())
        self._table, self._ids = Table(path), Table(ids_path)

    def write(self, prefix: str, documents: Iterable[Numbers]) -> None:
        """Writes the sidecar of a pair, which is there.

        Args:
            prefix: Path prefix of the pair.
            documents: Numbers of the pair's documents, in order, some at a time.
        """
        with open(self._sources_path, "rb") as file:
            sources: list[str] = json.load(file)
        path = origins_path(prefix)
        writer = OriginsWriter(temporary := temporary_name(path))
        try:
            for numbers in documents:
                writer.add(self._read(numbers, sources))
            with open(idx_path(prefix), "rb") as index, open(bin_path(prefix), "rb") as data:
                fingerprint = fingerprint_of(index, data)
            writer.finish(fingerprint, durable=False)
            os.rename(temporary, path)
        except BaseException:
            writer.discard()
            raise

    def _read(self, documents: Numbers, sources: list[str]) -> Any:
        """The origins of some documents, as a table for `OriginsWriter`."""
        rows = self._table.windows(documents, 1)[:, 0]
        sizes = np.maximum(rows["id_size"], 0).astype(np.int64)
        data = self._ids.ranges(rows["id_start"].astype(np.int64), sizes).tobytes()
        ends = np.cumsum(sizes)
        ids = [
            None if size < 0 else data[end - size : end].decode()
            for size, end in zip(rows["id_size"].tolist(), ends.tolist(), strict=True)
        ]
        numbers, places = np.unique(rows["source"], return_inverse=True)
        names = [sources[number] for number in numbers.tolist()]
        return make_table(names, places, rows["line"], rows["byte_offset"], ids)


def _origins_of(files: Sequence[TokenArray]) -> Iterator[Origins]:
    """The origins of all documents, some at a time."""
    for file in files:
        if file.prefix is None or file.num_documents == 0:
            continue
        with IndexedDataset(file.prefix) as dataset:
            for start in range(0, file.num_documents, _ORIGINS):
                origins = dataset.origins(start, min(start + _ORIGINS, file.num_documents))
                if origins is None:
                    raise DataError(
                        f"the origins of {file.path} were removed while the job began; leave the "
                        "input as it is until the job has ended, and run the same command again"
                    )
                yield origins
