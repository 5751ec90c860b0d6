"""The sidecar `PREFIX.origins.parquet`: where each document came from.

A Parquet file with one row per document, in their order, which any Parquet reader can query:

    source       string           path of the source file
    line         int64            line (from 1) or row (from 0) in it
    byte_offset  int64            where the line starts in the decompressed file; -1: not known
    id           string or null   the document's id

A sidecar has a row for every document, or it is not written. Its metadata hold the fingerprint of
the pair, so that a sidecar is never taken for another pair's. Row groups are cut after a fixed
number of rows (or bytes of ids): the bytes do not depend on how the rows were added, and reading
one row takes one row group. pyarrow is imported when origins are added or read.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from millrace.checks import one_path, shown, whole, whole_numbers
from millrace.errors import ConfigError, DataError
from millrace.files import atomic_file, file_identity, flush_to_disk
from millrace.store.info import BlockHasher, Checksums
from millrace.store.publish import dolma_path, origins_path, paths_to_read

if TYPE_CHECKING:
    from millrace.store.reader import IndexedDataset

_GROUP_ROWS = 1 << 16  # rows of a row group: 1 to 3 ms to read
_GROUP_ID_BYTES = 16 << 20  # bytes of ids after which a row group ends, too
_VERSION = b"1"
_VERSION_KEY, _PAIR_KEY = b"millrace.origins", b"millrace.pair"
_CSV_DOCUMENTS = 1 << 16  # documents whose rows of CSV are made at a time
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
    """Where some documents came from: the arguments of `IndexedDatasetBuilder.add_origins`.

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


def write_dolma(prefix: str | os.PathLike[str]) -> str:
    """Writes `PREFIX.csv.gz` as dolma's tokenizer does, from the origins of a pair.

    It has a row for each document, without a header: first token, end of the tokens, id, source
    and line.

    Returns:
        The path of the file.

    Raises:
        ConfigError: A pair without origins.
        DataError: A damaged pair or sidecar.
    """
    from millrace.store.reader import IndexedDataset

    dataset = IndexedDataset(one_path("prefix", prefix))
    if dataset.origins(0, 0) is None:
        raise ConfigError(
            f"{dataset.prefix} has no origins ({origins_path(dataset.prefix)} is missing), and the "
            "rows are made of them: tokenize the text again"
        )
    import csv  # 6 ms, with gzip, that `import millrace` does without
    import gzip

    path = dolma_path(dataset.prefix)
    with (
        atomic_file(path) as file,
        # Without a name and a time in the header: the same origins give the same bytes.
        gzip.GzipFile("", "wb", 6, file, mtime=0) as packed,
        io.TextIOWrapper(packed, encoding="utf-8", newline="") as text,
    ):
        writer = csv.writer(text)
        for start in range(0, dataset.num_documents, _CSV_DOCUMENTS):
            writer.writerows(_dolma_rows(dataset, start, start + _CSV_DOCUMENTS))
    return path


def _dolma_rows(dataset: IndexedDataset, start: int, stop: int) -> Iterator[tuple[Any, ...]]:
    stop = min(stop, dataset.num_documents)
    first, end = dataset.check_documents(start, stop)
    first_byte, _ = dataset.check_sequences(first, end)
    entries = dataset.document_indices[start : stop + 1] - first
    ends = np.zeros(end - first + 1, np.int64)
    np.cumsum(dataset.sequence_lengths[first:end], out=ends[1:])
    tokens = (first_byte // dataset.dtype.itemsize + ends[entries]).tolist()
    origins = dataset.origins(start, stop)
    assert origins is not None
    sources = [origins.sources[number] for number in origins.source_numbers.tolist()]
    spans = itertools.pairwise(tokens)
    for span, id_, source, line in zip(
        spans, origins.ids, sources, origins.lines.tolist(), strict=True
    ):
        yield *span, id_, source, line


# ---- reading ----


class OriginsFile:
    """The sidecar of a pair. It is open only while rows are read.

    Args:
        prefix: Path prefix of the pair.
        fingerprint: The pair's fingerprint.
        num_documents: Number of documents of the pair.

    Raises:
        FileNotFoundError: A pair without a sidecar.
        DataError: A sidecar that is damaged, or of another pair.
        ConfigError: pyarrow is not installed.
    """

    def __init__(self, prefix: str, fingerprint: str, num_documents: int) -> None:
        self.path = paths_to_read(prefix).origins
        self._metadata: Any = None
        with open(self.path, "rb") as file:
            self._identity = file_identity(file)
            with self._as_data_error():
                parquet = self._parquet(file)
                self._metadata = parquet.metadata
                pair = _check_format(parquet, self.path)
        num_rows = self._metadata.num_rows
        if pair != fingerprint.encode() or num_rows != num_documents:
            raise DataError(
                f"{self.path} has {num_rows} rows and is not the sidecar of these {num_documents} "
                f"documents: other token files were put in their place. Remove it: {prefix} has no "
                "other record of its origins"
            )
        counts = [self._metadata.row_group(n).num_rows for n in range(parquet.num_row_groups)]
        self._ends = np.cumsum([0, *counts])

    def tables(self, start: int, stop: int) -> Iterator[Any]:
        """The rows of documents [start, stop) as pyarrow tables, one for each row group."""
        if start >= stop:
            return
        with open(self.path, "rb") as file:
            if file_identity(file) != self._identity:
                raise DataError(
                    f"{self.path} was replaced since its pair was opened; open the pair again"
                )
            parquet = self._parquet(file)
            group = int(np.searchsorted(self._ends, start, side="right")) - 1
            while group < len(self._ends) - 1 and (first := int(self._ends[group])) < stop:
                with self._as_data_error():
                    table = parquet.read_row_group(group, use_threads=False)
                    table.validate(full=True)
                if len(table) != self._ends[group + 1] - first:
                    raise DataError(f"{self.path} is damaged in row group {group}. {_REMEDY}")
                low, high = max(start - first, 0), min(stop - first, len(table))
                yield table.slice(low, high - low)
                group += 1

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

    def _parquet(self, file: Any) -> Any:
        import_pyarrow()
        import pyarrow.parquet

        return pyarrow.parquet.ParquetFile(
            file, metadata=self._metadata, read_dictionary=["source"], pre_buffer=False
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
    """A sidecar while its pair is built. At most one row group and one addition are in memory.

    Attributes:
        num_rows: Number of rows that were added.
    """

    def __init__(self, path: str) -> None:
        import_pyarrow()
        import pyarrow.parquet

        self.num_rows = 0
        self._path = path
        self._pending: list[Any] = []  # tables that do not fill a row group yet
        self._num_pending = self._pending_id_bytes = 0
        self._sink = _Sink(path)
        self._writer = pyarrow.parquet.ParquetWriter(
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

    def add(self, table: Any) -> None:
        """Appends the rows of a table with the columns of the sidecar."""
        if len(table) == 0:
            return
        self.num_rows += len(table)
        self._pending.append(table)
        self._num_pending += len(table)
        self._pending_id_bytes += _num_id_bytes(table)
        if self._num_pending >= _GROUP_ROWS or self._pending_id_bytes >= _GROUP_ID_BYTES:
            self._write_groups()

    def finish(self, fingerprint: str, *, durable: bool) -> Checksums:
        """Writes the end of the file.

        Args:
            fingerprint: Fingerprint of the pair.
            durable: Whether to bring the file to the disk.
        """
        self._write_groups(is_last=True)
        self._writer.add_key_value_metadata({_VERSION_KEY: _VERSION, _PAIR_KEY: fingerprint})
        self._writer.close()
        return self._sink.finish(durable=durable)

    def close(self) -> None:
        """Lets go of the file, which stays as it is."""
        self._pending.clear()
        self._sink.disconnect()

    def discard(self) -> None:
        """Removes the file."""
        self.close()
        os.unlink(self._path)

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
    """The file that a ParquetWriter writes to. It can be disconnected: a Parquet writer that is
    dropped writes the end of its file, also in a forked child."""

    def __init__(self, path: str) -> None:
        self._file: Any = open(path, "wb", buffering=0)  # noqa: SIM115
        self._hasher = BlockHasher()
        self._size = 0
        self.closed = False

    def write(self, data: Any) -> int:
        size = len(data)
        if self._file is not None:
            view = memoryview(data)
            while len(view):
                view = view[self._file.write(view) :]
            self._hasher.update(data)
        self._size += size
        return size

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        pass

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        pass  # `finish` or `disconnect` does it

    def finish(self, *, durable: bool) -> Checksums:
        if durable:
            flush_to_disk(self._file)
        self.disconnect()
        return self._hasher.finish()

    def disconnect(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def make_table(
    sources: Sequence[str],
    source_numbers: ArrayLike,
    lines: ArrayLike,
    byte_offsets: ArrayLike,
    ids: Sequence[str | None] | None,
) -> Any:
    """The rows of origins as a pyarrow table; see `IndexedDatasetBuilder.add_origins`."""
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


def with_first_lines(table: Any, first_lines: Mapping[str, int]) -> Any:
    """The table, with a number added to the lines of each source."""
    pa = import_pyarrow()
    column = table.column("source").combine_chunks()
    for source in column.dictionary.to_pylist():
        if source not in first_lines:
            raise ConfigError(f"first_lines has no entry for {source}; give one for each source")
    starts = np.array(
        [whole("first_lines", first_lines[source]) for source in column.dictionary.to_pylist()],
        np.int64,
    )
    lines = table.column("line").to_numpy() + starts[column.indices.to_numpy()]
    place = table.schema.get_field_index("line")
    return table.set_column(place, table.schema.field(place), pa.array(lines))


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


def has_origins(prefix: str) -> bool:
    """Whether a pair has a sidecar."""
    return os.path.exists(paths_to_read(prefix).origins)


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
