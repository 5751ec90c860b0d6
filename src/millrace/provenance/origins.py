"""The sidecar `PREFIX.origins.parquet`: where each document came from.

A Parquet file with one row per document, in their order, which any Parquet reader can query:

    source       string           path of the source file
    line         int64            line (from 1) or row (from 0) in it
    byte_offset  int64            where the line starts in the decompressed file; -1: not known
    id           string or null   the document's id

A sidecar has a row for every document. It is written when its pair is there; its metadata hold the
pair's fingerprint, so that it is never taken for another pair's. Row groups are cut after a fixed
number of rows (or bytes of ids): the bytes do not depend on how the rows were added, and reading
one row takes one row group. pyarrow is imported when origins are added or read.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from millrace.checks import absolute_path, one_path, shown, whole_numbers
from millrace.errors import ConfigError, DataError
from millrace.files import atomic_file
from millrace.storage import LOCAL, Storage
from millrace.storage.protocol import FileStream, exists
from millrace.store.info import BlockHasher, read_info, write_info
from millrace.store.publish import origins_path, paths_to_read, prefix_lock
from millrace.store.reader import IndexedDataset

_GROUP_ROWS = 1 << 16  # rows of a row group: 1 to 3 ms to read
_GROUP_ID_BYTES = 16 << 20  # bytes of ids after which a row group ends, too
_VERSION = b"1"
_VERSION_KEY, _PAIR_KEY = b"millrace.origins", b"millrace.pair"
_COPY_SIZE = 1 << 20
_REMEDY = "The tokens are not affected: restore the file, remove it, or write the pair again"


class Origin(NamedTuple):
    """Where one document came from.

    Attributes:
        source: Path of the source file.
        line: Its line (from 1) or row (from 0) in the source.
        byte_offset: Position of the line in the decompressed source; -1: not known.
        id: The document's id; None: it has none.
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
        lines: Line or row of each document: int64 [documents].
        byte_offsets: Position of each line, or -1: int64 [documents].
        ids: Id of each document, or None.
    """

    sources: list[str]
    source_numbers: NDArray[np.int32]
    lines: NDArray[np.int64]
    byte_offsets: NDArray[np.int64]
    ids: list[str | None]


# ---- reading ----


def has_origins(prefix: str, storage: Storage = LOCAL) -> bool:
    """Whether a pair has a sidecar."""
    return exists(storage, paths_to_read(prefix, storage).origins)


def origins_file(dataset: IndexedDataset) -> OriginsFile | None:
    """The sidecar of an open pair; None if it has none."""
    # Asked first: the fingerprint would cost reads for nothing.
    return OriginsFile(dataset) if has_origins(dataset.prefix, dataset.storage) else None


class OriginsFile:
    """The sidecar of a pair.

    Args:
        dataset: The pair.

    Raises:
        FileNotFoundError: A pair without a sidecar.
        DataError: A sidecar that is damaged, or of another pair.
        ConfigError: pyarrow is not installed.
    """

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
        groups = range(
            int(np.searchsorted(self._ends, start, side="right")) - 1,
            int(np.searchsorted(self._ends, stop)) if start < stop else 0,
        )
        for group in groups:
            first = int(self._ends[group])
            with self._as_data_error():
                table = parquet.read_row_group(group, use_threads=False)
                table.validate(full=True)
            if len(table) != self._ends[group + 1] - first:
                raise DataError(f"{self.path} is damaged in row group {group}. {_REMEDY}")
            low, high = max(start - first, 0), min(stop - first, len(table))
            yield table.slice(low, high - low)

    def origin(self, document: int) -> Origin:
        """The origin of one document."""
        sources, _, lines, byte_offsets, ids = self.read(document, document + 1)
        return Origin(sources[0], int(lines[0]), int(byte_offsets[0]), ids[0])

    def read(self, start: int, stop: int) -> Origins:
        """The origins of documents [start, stop)."""
        pa = import_pyarrow()
        table = pa.concat_tables([_schema().empty_table(), *self.tables(start, stop)])
        table = _with_own_sources(table)
        source, ids = table.column("source"), table.column("id").to_pylist()
        columns = (table.column(name).to_numpy() for name in ("line", "byte_offset"))
        lines, byte_offsets = columns
        return Origins(
            source.chunk(0).dictionary.to_pylist() if len(table) else [],
            source.chunk(0).indices.to_numpy() if len(table) else np.empty(0, np.int32),
            lines,
            byte_offsets,
            ids,
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
        """Makes errors of Parquet's reader DataErrors."""
        pa = import_pyarrow()
        try:
            yield
        except (pa.ArrowException, OSError, ValueError, KeyError, UnicodeError) as error:
            if isinstance(error, DataError) or getattr(error, "errno", None) is not None:
                raise
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise DataError(f"{self.path} is damaged ({reason}). {_REMEDY}") from None


def _check_format(parquet: Any, path: str) -> bytes:
    """The fingerprint of the sidecar's pair; a DataError if the file is not a sidecar."""
    metadata = parquet.metadata.metadata or {}
    version = metadata.get(_VERSION_KEY)
    if version is None or _PAIR_KEY not in metadata:
        raise DataError(f"{path} is not a sidecar that millrace wrote. Give it another name")
    if version != _VERSION:
        raise DataError(
            f"{path} has version {version.decode(errors='replace')}; {_VERSION.decode()} can be "
            "read. Use a later version of millrace, or write the pair again"
        )
    if not parquet.schema_arrow.remove_metadata().equals(_schema()):
        raise DataError(
            f"{path} has the columns {', '.join(parquet.schema_arrow.names)}, or they have other "
            f"types than a sidecar's. {_REMEDY}"
        )
    pair: bytes = metadata[_PAIR_KEY]
    return pair


# ---- writing ----


class OriginsWriter:
    """Writes the sidecar of a pair, which must be there when the sidecar is published.

    Leaving a `with` block publishes the sidecar; leaving it by an error does not. The rows wait in
    a nameless temporary file; at most one row group and one addition are in memory.

    Args:
        prefix: Path prefix of the pair.
        durable: Whether to bring the file to the disk before it appears.

    Attributes:
        num_rows: Number of rows that were added.

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
        self._prefix, self._durable = absolute_path(one_path("prefix", prefix)), durable
        self._pending: list[Any] = []  # tables that do not fill a row group yet
        self._num_pending = self._pending_id_bytes = 0
        self._sink = _Sink(os.path.dirname(self._prefix))

    @functools.cached_property
    def _writer(self) -> Any:
        import_pyarrow()
        import pyarrow.parquet

        return pyarrow.parquet.ParquetWriter(
            self._sink,
            _schema(),
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
            byte_offsets: Where the lines start in the decompressed source: int64 [n]; -1: not
                known.
            ids: Id of each document, or None: [n]; None: no document has one.

        Raises:
            ConfigError: If the numbers do not agree with each other.
        """
        self.add_table(_make_table(sources, source_numbers, lines, byte_offsets, ids))

    def add_table(self, table: Any) -> None:
        """Appends the rows of a pyarrow table with the columns of the sidecar."""
        if len(table) == 0:
            return
        self.num_rows += len(table)
        self._pending.append(table)
        self._num_pending += len(table)
        self._pending_id_bytes += _num_id_bytes(table)
        if self._num_pending >= _GROUP_ROWS or self._pending_id_bytes >= _GROUP_ID_BYTES:
            self._write_groups()

    def publish(self) -> None:
        """Writes the sidecar beside its pair, and its checksums where the pair has some.

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
            pair = {_VERSION_KEY: _VERSION, _PAIR_KEY: dataset.fingerprint}
            self._writer.add_key_value_metadata(pair)
            self._writer.close()
            hasher = BlockHasher()
            with atomic_file(origins_path(self._prefix), durable=self._durable) as file:
                for data in self._sink.pieces():
                    hasher.update(data)
                    file.write(data)
            info = read_info(self._prefix)
            if info is not None and info.bin is not None:
                info = replace(info, origins=hasher.finish())
                write_info(self._prefix, info, durable=self._durable)
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
        if not self._pending:
            return
        pa = import_pyarrow()
        rows = pa.concat_tables(self._pending).unify_dictionaries().combine_chunks()
        self._pending.clear()
        while len(rows):
            count, is_full = _group_size(rows)
            if not is_full and not is_last:
                break
            group = _with_own_sources(rows.slice(0, count))
            self._writer.write_table(group, row_group_size=count)
            rows = rows.slice(count)
        self._num_pending = self._pending_id_bytes = 0
        if len(rows):
            # Only the sources of these rows, or the list would grow with the number of files.
            self._pending.append(_with_own_sources(rows))
            self._num_pending = len(rows)
            self._pending_id_bytes = _num_id_bytes(rows)


class _Sink:
    """A nameless file for a ParquetWriter, which writes the end of its file when it is dropped:
    nothing is written then, nor in a forked child."""

    closed = False

    def __init__(self, folder: str) -> None:
        import tempfile  # 3 ms that `import millrace` does without

        self.file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self._owner, self._size = os.getpid(), 0

    def write(self, data: Any) -> int:
        if os.getpid() == self._owner and not self.file.closed:
            view = memoryview(data)
            while len(view):
                view = view[self.file.write(view) :]
        self._size += len(data)
        return len(data)

    def __del__(self) -> None:
        self.file.close()

    def pieces(self) -> Iterator[bytes]:
        """What was written, some at a time."""
        self.file.seek(0)
        while data := self.file.read(_COPY_SIZE):
            yield data

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        pass

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        pass  # `OriginsWriter.close` does it


def copied_origins(
    prefix: str,
    parts: Iterable[tuple[IndexedDataset, tuple[int, int] | None]],
) -> OriginsWriter | None:
    """The origins of documents of other pairs, one after the other, ready to be published.

    Args:
        prefix: Path prefix of the pair that has these documents.
        parts: The pairs, and which documents (start, stop) of each; None: all.

    Returns:
        The writer; None if documents without an origin are among them, as half a sidecar would
        invite wrong conclusions, or if there are no documents.
    """
    spans = [(data, (0, data.num_documents) if span is None else span) for data, span in parts]
    files = [(data.origins_file, start, stop) for data, (start, stop) in spans if start < stop]
    if not files or any(file is None for file, _, _ in files):
        return None
    writer = OriginsWriter(prefix)
    for file, start, stop in files:
        for table in file.tables(start, stop):
            writer.add_table(table)
    return writer


def _make_table(
    sources: Sequence[str],
    source_numbers: ArrayLike,
    lines: ArrayLike,
    byte_offsets: ArrayLike,
    ids: Sequence[str | None] | None,
) -> Any:
    """The rows of origins as a pyarrow table; see `OriginsWriter.add`."""
    pa = import_pyarrow()
    if isinstance(sources, str) or not all(isinstance(source, str) for source in sources):
        raise ConfigError(f"sources are {shown(sources)}; give a list of texts")
    numbers = whole_numbers("source_numbers", source_numbers)
    columns = {
        "lines": whole_numbers("lines", lines),
        "byte_offsets": whole_numbers("byte_offsets", byte_offsets),
    }
    counts = {name: len(column) for name, column in columns.items()}
    if isinstance(ids, str):
        raise ConfigError(f"ids are {shown(ids)}; give a list of texts")
    if ids is not None:
        counts["ids"] = len(ids)
    for name, count in counts.items():
        if count != len(numbers):
            raise ConfigError(
                f"there are {count} {name} for {len(numbers)} source_numbers; give one of each for "
                "every document"
            )
    low, high = int(numbers.min(initial=0)), int(numbers.max(initial=-1))
    if low < 0 or high >= len(sources):
        raise ConfigError(
            f"source_numbers go from {low} to {high}; there are {len(sources)} sources"
        )
    return pa.Table.from_arrays(
        [
            pa.DictionaryArray.from_arrays(numbers.astype(np.int32), _texts("sources", sources)),
            pa.array(columns["lines"]),
            pa.array(columns["byte_offsets"]),
            pa.nulls(len(numbers), pa.string()) if ids is None else _texts("ids", ids),
        ],
        schema=_schema(),
    )


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
    try:
        import_pyarrow()
    except ConfigError:
        return False
    return True


@functools.cache
def _schema() -> Any:
    pa = import_pyarrow()
    return pa.schema(
        [
            pa.field("source", pa.dictionary(pa.int32(), pa.string()), nullable=False),
            pa.field("line", pa.int64(), nullable=False),
            pa.field("byte_offset", pa.int64(), nullable=False),
            pa.field("id", pa.string()),
        ]
    )


def _texts(name: str, values: Sequence[str | None]) -> Any:
    """Texts as an array; a lone surrogate (of a file name that is not UTF-8) is written \\udc80."""
    pa = import_pyarrow()
    try:
        try:
            return pa.array(values, pa.string())
        except UnicodeEncodeError:
            safe = [
                value if value is None else value.encode("utf-8", "backslashreplace").decode()
                for value in values
            ]
            return pa.array(safe, pa.string())
    except (pa.ArrowException, TypeError, AttributeError) as error:
        raise ConfigError(f"{name} are {shown(values)}; give texts ({error})") from None


def _with_own_sources(table: Any) -> Any:
    """The table, with a dictionary of exactly its sources, in the order of their appearance."""
    if len(table) == 0:
        return table
    pa = import_pyarrow()
    table = table.unify_dictionaries().combine_chunks()
    column = table.column("source").chunk(0)
    numbers, first, inverse = np.unique(
        column.indices.to_numpy(), return_index=True, return_inverse=True
    )
    order = np.argsort(first)
    places = np.empty(len(order), np.int32)
    places[order] = np.arange(len(order), dtype=np.int32)
    sources = column.dictionary.take(pa.array(numbers[order]))
    compact = pa.DictionaryArray.from_arrays(places[inverse], sources)
    return table.set_column(0, table.schema.field(0), compact)


def _id_lengths(table: Any) -> NDArray[np.int64]:
    import pyarrow.compute

    lengths = pyarrow.compute.fill_null(pyarrow.compute.binary_length(table.column("id")), 0)
    array: NDArray[np.int64] = lengths.to_numpy().astype(np.int64)
    return array


def _num_id_bytes(table: Any) -> int:
    if table.column("id").null_count == len(table):
        return 0
    return int(_id_lengths(table).sum())


def _group_size(table: Any) -> tuple[int, bool]:
    """The number of rows of the next row group, and whether it is full."""
    head = table.slice(0, _GROUP_ROWS)
    if _num_id_bytes(head) >= _GROUP_ID_BYTES:
        ends = np.cumsum(_id_lengths(head))
        return int(np.searchsorted(ends, _GROUP_ID_BYTES)) + 1, True
    return len(head), len(head) == _GROUP_ROWS
