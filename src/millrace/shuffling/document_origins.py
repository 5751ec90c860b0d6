"""Where the documents of indexed datasets came from, as tables in a folder.

origins.npy     origin of each document
ids.npy         the bytes of all ids
sources.json    the names of all sources
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from millrace.errors import DataError
from millrace.files import atomic_file
from millrace.provenance import Origins, OriginsWriter
from millrace.ragged import Numbers
from millrace.shuffling.row_tables import Table, new_table
from millrace.shuffling.token_files import TokenFile
from millrace.store import IndexedDataset

_DOCUMENTS = 1 << 16  # documents whose origins are copied at a time: a row group of the sidecar

_ORIGIN = np.dtype(
    [
        ("source", "<i4"),  # place in sources.json
        ("id_size", "<i4"),  # bytes; -1: no id
        ("line", "<i8"),
        ("byte_offset", "<i8"),
        ("id_start", "<i8"),  # first byte in ids.npy
    ]
)


class DocumentOrigins:
    """The origins of the documents of files, by number; a pickle holds the paths of the tables.

    Args:
        files: Indexed datasets with origins.
        folder: Folder for the tables.
    """

    def __init__(self, files: Sequence[TokenFile], folder: str) -> None:
        path, ids_path = (os.path.join(folder, name) for name in ("origins.npy", "ids.npy"))
        self._sources_path = os.path.join(folder, "sources.json")
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
        with OriginsWriter(prefix, durable=False) as writer:
            for numbers in documents:
                writer.add(*self._read(numbers, sources))

    def _read(self, documents: Numbers, sources: list[str]) -> Origins:
        """The origins of some documents."""
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
        return Origins(names, places.astype(np.int32), rows["line"], rows["byte_offset"], ids)


def _origins_of(files: Sequence[TokenFile]) -> Iterator[Origins]:
    """The origins of all documents, some at a time."""
    for file in files:
        if file.prefix is None or file.num_documents == 0:
            continue
        with IndexedDataset(file.prefix) as dataset:
            for start in range(0, file.num_documents, _DOCUMENTS):
                origins = dataset.origins(start, min(start + _DOCUMENTS, file.num_documents))
                if origins is None:
                    raise DataError(
                        f"the origins of {file.path} were removed while the job began; leave the "
                        "input as it is until the job has ended, and run the same command again"
                    )
                yield origins
