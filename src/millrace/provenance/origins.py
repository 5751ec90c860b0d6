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
import itertools
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from millrace.checks import absolute_path, check_ints, check_local, check_path, shown
from millrace.errors import ConfigError, DataError
from millrace.files import atomic_file
from millrace.names import ORIGINS
from millrace.storage import FileStream, Storage, exists, storage_of
from millrace.store.info import BlockHasher, read_info, write_info
from millrace.store.publish import paths_to_read, prefix_lock
from millrace.store.reader import IndexedDataset

VERSION = b"1"
VERSION_KEY, PAIR_KEY = b"millrace.origins", b"millrace.pair"
_GROUP_ROWS = 1 << 16  # rows of a row group: 1 to 3 ms to read
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


def has_origins(prefix: str, storage: Storage | None = None) -> bool:
    """Whether a pair has a sidecar."""
    storage = storage_of(prefix, storage)
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
            keys, columns = parquet.metadata.metadata or {}, parquet.schema_arrow.remove_metadata()
            version = keys.get(VERSION_KEY)
            if version != VERSION or PAIR_KEY not in keys or not columns.equals(schema()):
                raise DataError(
                    f"{self.path} is not a sidecar of version {VERSION.decode()}: it has the "
                    f"version {version and version.decode(errors='replace')} and the columns "
                    f"{', '.join(columns.names)}. Give it another name, or use a later version"
                )
        num_rows = self._metadata.num_rows
        if keys[PAIR_KEY] != dataset.fingerprint.encode() or num_rows != dataset.num_documents:
            raise DataError(
                f"{self.path} has {num_rows} rows and is not the sidecar of these "
                f"{dataset.num_documents} documents: other token files were put in their place. "
                f"Remove it: {dataset.prefix} has no other record of its origins"
            )
        counts = [self._metadata.row_group(n).num_rows for n in range(parquet.num_row_groups)]
        self._ends = np.cumsum([0, *counts])
        self._last: tuple[int, Any] = (-1, None)  # row group: the next document is in it, mostly

    def tables(self, start: int, stop: int) -> Iterator[Any]:
        """The rows of documents [start, stop) as pyarrow tables, one for each row group."""
        group = int(np.searchsorted(self._ends, start, side="right")) - 1
        while start < stop:
            first, end = self._ends[group : group + 2].tolist()
            kept, table = self._last
            if kept != group:
                with self._as_data_error():
                    table = self._parquet().read_row_group(group, use_threads=False)
                    table.validate(full=True)
                self._last = group, table
            if len(table) != end - first:
                raise DataError(f"{self.path} is damaged in row group {group}. {_REMEDY}")
            yield table.slice(start - first, min(stop, end) - start)
            start, group = end, group + 1

    def groups_with(self, low: float, high: float) -> Iterator[tuple[int, Any]]:
        """The row groups that may have lines from `low` to `high`: first document, and table."""
        for group, (start, stop) in enumerate(itertools.pairwise(self._ends.tolist())):
            lines = self._metadata.row_group(group).column(1).statistics
            if not (lines and lines.has_min_max) or (lines.min <= high and low <= lines.max):
                yield from ((start, table) for table in self.tables(start, stop))

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
        return import_pyarrow().parquet.ParquetFile(
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


def import_pyarrow() -> Any:
    """The pyarrow package, which is optional."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            "the origins of documents are kept in Parquet files, which need the pyarrow package: "
            "pip install 'millrace[tokenizers]'"
        ) from None
    return pyarrow


@functools.cache
def schema() -> Any:
    """The columns of a sidecar."""
    pa = import_pyarrow()
    sources = pa.dictionary(pa.int32(), pa.string())
    types = {"source": sources, "line": pa.int64(), "byte_offset": pa.int64(), "id": pa.string()}
    return pa.schema([pa.field(name, type_, name == "id") for name, type_ in types.items()])


def with_own_sources(table: Any) -> Any:
    """The table with a dictionary of exactly its sources, in order of appearance."""
    sources = table.column("source").cast(import_pyarrow().string()).combine_chunks()
    return table.set_column(0, table.schema.field(0), sources.dictionary_encode())


class OriginsWriter:
    """Writes the sidecar of a pair, which must be there when it is published.

    Leaving a `with` block publishes the sidecar, except by an error. The rows wait in a nameless
    temporary file; at most one row group and one addition are in memory.

    Args:
        prefix: Path prefix of the pair.
        durable: Whether to bring the file to the disk before it appears.

    Attributes:
        num_rows: Number of rows added.

    Raises:
        ConfigError: In all methods, if pyarrow is not installed.

    Example:
        >>> import tempfile, millrace
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with millrace.IndexedDatasetBuilder(f"{folder}/web") as builder:
        ...         builder.add_documents([1, 2, 3], [2, 1])
        ...     with OriginsWriter(f"{folder}/web") as origins:
        ...         origins.add(["web.jsonl"], [0, 0], [1, 2], [0, 70], ["a", "b"])
        ...     millrace.IndexedDataset(f"{folder}/web").origin(1)
        Origin(source='web.jsonl', line=2, byte_offset=70, id='b')
    """

    def __init__(self, prefix: str | os.PathLike[str], *, durable: bool = True) -> None:
        self.num_rows = 0
        self._prefix = check_local(absolute_path(check_path("prefix", prefix)))
        self._durable = durable
        self._pending: list[Any] = []  # tables that do not fill a row group yet
        self._num_pending = 0  # rows of them
        self._sink = _Sink(os.path.dirname(self._prefix))

    @functools.cached_property
    def _writer(self) -> Any:
        return import_pyarrow().parquet.ParquetWriter(
            self._sink,
            schema(),
            compression="zstd",
            use_dictionary=["source"],
            column_encoding={
                "line": "DELTA_BINARY_PACKED",
                "byte_offset": "DELTA_BINARY_PACKED",
                "id": "DELTA_BYTE_ARRAY",
            },
            write_statistics=["source", "line"],
            store_schema=False,
        )

    def add(
        self,
        sources: Sequence[str],
        source_numbers: ArrayLike,
        lines: ArrayLike,
        byte_offsets: ArrayLike,
        ids: Sequence[str | None] | None = None,
    ) -> None:
        """Says where the next documents came from.

        Args:
            sources: Paths of source files.
            source_numbers: Place of each document's source in `sources`: integers [n].
            lines: Line (from 1) or row (from 0) of each document: int64 [n].
            byte_offsets: Start of each line in the decompressed source (-1: not known): int64 [n].
            ids: Id of each document, or None: [n]; None: no document has one.

        Raises:
            ConfigError: Arguments of the wrong types, or that do not agree.
        """
        pa = import_pyarrow()
        numbers = check_ints("source_numbers", source_numbers)
        names = _texts("sources", sources, (str,))
        try:
            table = pa.Table.from_arrays(
                [
                    pa.DictionaryArray.from_arrays(pa.array(numbers, pa.int32()), names),
                    pa.array(check_ints("lines", lines)),
                    pa.array(check_ints("byte_offsets", byte_offsets)),
                    pa.nulls(len(numbers), pa.string())
                    if ids is None
                    else _texts("ids", ids, (str, type(None))),
                ],
                schema=schema(),
            )
        except pa.ArrowException as error:
            raise ConfigError(
                f"the origins of {len(numbers)} documents, of {len(names)} sources, do not agree "
                f"({error}): give one line, byte offset and id for each source number"
            ) from None
        self.add_table(table)

    def add_table(self, table: Any) -> None:
        """Appends the rows of a pyarrow table with the columns of the sidecar."""
        self.num_rows += len(table)
        self._pending.append(table)
        self._num_pending += len(table)
        if self._num_pending >= _GROUP_ROWS:
            self._write_groups()

    def publish(self) -> None:
        """Writes the sidecar beside its pair, and its checksums if the pair has some.

        Raises:
            ConfigError: Rows that are not as many as the pair's documents.
            MillraceError: Another process is building a pair at the prefix.
        """
        with prefix_lock(self._prefix), IndexedDataset(self._prefix) as dataset:
            if self.num_rows != dataset.num_documents:
                raise ConfigError(
                    f"{self._prefix} has {dataset.num_documents} documents, and the origins of "
                    f"{self.num_rows} were added; add one for each document"
                )
            self._write_groups(is_last=True)
            keys = {VERSION_KEY: VERSION, PAIR_KEY: dataset.fingerprint}
            self._writer.add_key_value_metadata(keys)
            self._writer.close()
            self._sink.file.seek(0)
            with atomic_file(self._prefix + ORIGINS, durable=self._durable) as file:
                shutil.copyfileobj(self._sink.file, file)
            info = read_info(self._prefix)
            if info is not None and info.checksums is not None:
                sums = replace(info.checksums, origins=self._sink.hasher.finish())
                write_info(self._prefix, replace(info, checksums=sums), durable=self._durable)
        self.close()

    def close(self) -> None:
        """Drops what is not published."""
        self._pending.clear()
        self._sink.file.close()

    def __enter__(self) -> OriginsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.publish()
        self.close()

    def _write_groups(self, *, is_last: bool = False) -> None:
        """Writes the row groups that are full, and with `is_last` the rest."""
        rows = import_pyarrow().concat_tables([schema().empty_table(), *self._pending])
        while len(rows) >= (1 if is_last else _GROUP_ROWS):
            group, rows = rows.slice(0, _GROUP_ROWS), rows.slice(_GROUP_ROWS)
            self._writer.write_table(with_own_sources(group), row_group_size=_GROUP_ROWS)
        # Only the sources of these rows: the list would grow with the number of files.
        self._pending = [with_own_sources(rows)] if len(rows) else []
        self._num_pending = len(rows)


class _Sink(io.RawIOBase):
    """A nameless file for a ParquetWriter, which writes the end of its file when it is dropped:
    nothing is written then, nor in a forked child."""

    def __init__(self, folder: str) -> None:
        import tempfile  # 3 ms that `import millrace` does without

        self.file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self.hasher, self._owner = BlockHasher(), os.getpid()

    def __del__(self) -> None:
        if hasattr(self, "file"):  # else the folder is not there
            self.file.close()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if os.getpid() == self._owner and not self.file.closed:
            self.hasher.update(data)
            view = memoryview(data)
            while len(view):
                view = view[self.file.write(view) :]
        return len(data)


def copied_origins(
    prefix: str, parts: Iterable[tuple[IndexedDataset, tuple[int, int] | None]]
) -> OriginsWriter | None:
    """The origins of documents (start, stop; None: all) of other pairs, ready to be published.

    None without documents, or if one has no origin: half a sidecar would mislead.
    """
    spans = [(data, span or (0, data.num_documents)) for data, span in parts]
    files = [(data.origins_file, start, stop) for data, (start, stop) in spans if start < stop]
    if not files or any(file is None for file, _, _ in files):
        return None
    writer = OriginsWriter(prefix)
    for file, start, stop in files:
        for table in file.tables(start, stop):
            writer.add_table(table)
    return writer


def _texts(name: str, values: Sequence[str | None], types: tuple[type, ...]) -> Any:
    """Texts as an array; a lone surrogate (of a file name that is not UTF-8) is written \\udc80."""
    pa = import_pyarrow()
    try:
        # Arrow's and NumPy's values become Python's.
        texts = getattr(values, "tolist", lambda: list(values))()
        if isinstance(values, str) or not all(isinstance(text, types) for text in texts):
            raise TypeError
    except TypeError:
        raise ConfigError(f"{name} are {shown(values)}; give a list of texts") from None
    try:
        return pa.array(texts, pa.string())
    except UnicodeEncodeError:
        safe = [text and text.encode("utf-8", "backslashreplace").decode() for text in texts]
        return pa.array(safe, pa.string())
