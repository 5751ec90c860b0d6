"""The sidecar `PREFIX.origins.parquet`: where each document came from.

A Parquet file with one row for each document, in their order. Its columns are those of `Origin`:
source (string), line (int64), byte_offset (int64) and id (string or null).

It is written when its pair is there; its metadata hold the pair's fingerprint, so that it is never
taken for another pair's. Row groups have a fixed number of rows: the bytes do not depend on how the
rows were added, and reading one row takes one row group. pyarrow is imported when origins are added
or read.
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace.errors import ConfigError, DataError
from millrace.storage import LOCAL, FileStream, Storage, exists
from millrace.store.publish import paths_to_read
from millrace.store.reader import IndexedDataset

VERSION = b"1"
VERSION_KEY, PAIR_KEY = b"millrace.origins", b"millrace.pair"
_REMEDY = "The tokens are not affected: restore the file, remove it, or write the pair again"


class Origin(NamedTuple):
    """Where one document came from.

    Attributes:
        source: Path of the source file.
        line: Line (from 1) or row (from 0) in the source.
        byte_offset: Position of the line in the decompressed source; -1: not known.
        id: The document's id, or None.
    """

    source: str
    line: int
    byte_offset: int
    id: str | None


class Origins(NamedTuple):
    """Where some documents came from: the arguments of `OriginsWriter.add`.

    Attributes:
        sources: Paths of source files.
        source_numbers: Place of each document's source in `sources`: int32 [documents].
        lines, byte_offsets: As in `Origin`, of each document: int64 [documents].
        ids: Id of each document, or None.
    """

    sources: list[str]
    source_numbers: NDArray[np.int32]
    lines: NDArray[np.int64]
    byte_offsets: NDArray[np.int64]
    ids: list[str | None]


def has_origins(prefix: str, storage: Storage = LOCAL) -> bool:
    """Whether a pair has a sidecar."""
    return exists(storage, paths_to_read(prefix, storage).origins)


def origins_file(dataset: IndexedDataset) -> OriginsFile | None:
    """The sidecar of an open pair, or None."""
    # The file is looked for first, as the fingerprint costs reads.
    return OriginsFile(dataset) if has_origins(dataset.prefix, dataset.storage) else None


class OriginsFile:
    """The sidecar of a pair; DataError if it is damaged, or of another pair."""

    def __init__(self, dataset: IndexedDataset) -> None:
        self.path = paths_to_read(dataset.prefix, dataset.storage).origins
        self._file = dataset.storage.open(self.path, "file")
        self._metadata: Any = None
        with self._as_data_error():
            parquet = self._parquet()
            self._metadata = parquet.metadata
            pair = _check_format(parquet, self.path)
        num_rows = self._metadata.num_rows
        if pair != dataset.fingerprint.encode() or num_rows != dataset.num_documents:
            raise DataError(
                f"{self.path} has {num_rows} rows and is not the sidecar of these "
                f"{dataset.num_documents} documents: other token files were put in their place. "
                f"Remove it: {dataset.prefix} has no other record of its origins"
            )
        counts = [self._metadata.row_group(n).num_rows for n in range(parquet.num_row_groups)]
        self._ends = np.cumsum([0, *counts])

    def tables(self, start: int, stop: int) -> Iterator[Any]:
        """The rows of documents [start, stop) as pyarrow tables, one for each row group."""
        parquet = self._parquet()
        group = int(np.searchsorted(self._ends, start, side="right")) - 1
        while start < stop:
            first, end = self._ends[group : group + 2].tolist()
            with self._as_data_error():
                table = parquet.read_row_group(group, use_threads=False)
                table.validate(full=True)
            if len(table) != end - first:
                raise DataError(f"{self.path} is damaged in row group {group}. {_REMEDY}")
            yield table.slice(start - first, min(stop, end) - start)
            start, group = end, group + 1

    def origin(self, document: int) -> Origin:
        sources, _, lines, byte_offsets, ids = self.read(document, document + 1)
        return Origin(sources[0], int(lines[0]), int(byte_offsets[0]), ids[0])

    def read(self, start: int, stop: int) -> Origins:
        """The origins of documents [start, stop)."""
        tables = [schema().empty_table(), *self.tables(start, stop)]
        table = with_own_sources(import_pyarrow().concat_tables(tables))
        source = table.column("source").combine_chunks()
        return Origins(
            source.dictionary.to_pylist(),
            source.indices.to_numpy(),
            table.column("line").to_numpy(),
            table.column("byte_offset").to_numpy(),
            table.column("id").to_pylist(),
        )

    def _parquet(self) -> Any:
        """A reader of its own for each use: threads may share the sidecar."""
        import_pyarrow()
        import pyarrow.parquet

        return pyarrow.parquet.ParquetFile(
            io.BufferedReader(FileStream(self._file)),
            metadata=self._metadata,
            read_dictionary=["source"],
            pre_buffer=False,
        )

    @contextlib.contextmanager
    def _as_data_error(self) -> Iterator[None]:
        """Turns errors of Parquet's reader into DataErrors."""
        pa = import_pyarrow()
        try:
            yield
        except (pa.ArrowException, OSError, ValueError, KeyError, UnicodeError) as error:
            if isinstance(error, DataError) or getattr(error, "errno", None) is not None:
                raise
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise DataError(f"{self.path} is damaged ({reason}). {_REMEDY}") from None


def _check_format(parquet: Any, path: str) -> bytes:
    """The fingerprint of the pair; DataError if the file is not a sidecar."""
    metadata, columns = parquet.metadata.metadata or {}, parquet.schema_arrow.remove_metadata()
    version = metadata.get(VERSION_KEY)
    if version != VERSION or PAIR_KEY not in metadata or not columns.equals(schema()):
        raise DataError(
            f"{path} is not a sidecar of version {VERSION.decode()}: it has the version "
            f"{version and version.decode(errors='replace')} and the columns "
            f"{', '.join(columns.names)}. Give it another name, or use a later version of millrace"
        )
    return bytes(metadata[PAIR_KEY])


def import_pyarrow() -> Any:
    """The pyarrow package, which is optional."""
    try:
        import pyarrow
    except ImportError:
        raise ConfigError(
            "the origins of documents are kept in Parquet files, which need the pyarrow package: "
            "pip install 'millrace[tokenizers]'"
        ) from None
    return pyarrow


def has_pyarrow() -> bool:
    with contextlib.suppress(ConfigError):
        return import_pyarrow() is not None
    return False


@functools.cache
def schema() -> Any:
    """The columns of a sidecar."""
    pa = import_pyarrow()
    sources = pa.dictionary(pa.int32(), pa.string())
    types = {"source": sources, "line": pa.int64(), "byte_offset": pa.int64(), "id": pa.string()}
    return pa.schema([pa.field(name, type_, name == "id") for name, type_ in types.items()])


def with_own_sources(table: Any) -> Any:
    """The table with a dictionary of exactly its sources, in order of appearance."""
    if len(table) == 0:
        return table
    column = table.unify_dictionaries().combine_chunks().column("source").chunk(0)
    numbers = column.indices.dictionary_encode()
    sources = import_pyarrow().DictionaryArray.from_arrays(
        numbers.indices, column.dictionary.take(numbers.dictionary)
    )
    return table.set_column(0, table.schema.field(0), sources)
