"""Parquet and Arrow: rows of tables, read by pyarrow."""

import bisect
import contextlib
import itertools
import json
import re
import uuid
from collections.abc import Iterator
from typing import Any

from millrace.checks import package
from millrace.errors import TextError
from millrace.files import readable
from millrace.text.documents import Batch, Documents, Query, no_column
from millrace.text.formats.separated_records import parse_line
from millrace.text.json_values import BadDocumentError, Text, check_text, id_text, texts_of
from millrace.text.parts import Format, InputFile, Part, unchanged
from millrace.text.streams import is_remote, open_path, status_of

_BATCH_SIZE = 1 << 20  # bytes of text
_MOST_ROWS = 1 << 11  # in a batch: texts that are stored once may be repeated in each row
_JSON = "extension<arrow.json>"
_NEEDS_CARE = re.compile(f"time|date|duration|{_JSON}")  # in the name of a type
_TEXT_TYPES = ("string", "large_string", "binary", "large_binary", "null")


class _Table(Format):
    """Rows of tables; a part is a range of groups of rows, as the file holds them."""

    unit = "row"
    first_line = 0
    needs_file = True
    _magic: bytes

    def matches(self, first_bytes: bytes) -> bool:
        return first_bytes.startswith(self._magic)

    def group_counts(self, path: str) -> list[int] | None:
        """The number of rows of each group; None if the file has no index of groups."""
        raise NotImplementedError

    def _sizes(self, path: str) -> list[int]:
        """The share of each group of rows in the file; none of a file without an index."""
        raise NotImplementedError

    def _groups(self, part: Part, query: Query) -> Iterator[tuple[Any, float]]:
        """Record batches of a part, with the share of it that ends with each."""
        raise NotImplementedError

    def table(self, part: Part) -> Any:
        """A part that has rows as Arrow's table, with all columns."""
        query = Query(keys=(), reject=lambda *_: None, whole=True)
        with _table_errors(part.source):
            import pyarrow as pa

            return pa.Table.from_batches([batch for batch, _ in self._groups(part, query)])

    def cut(self, file: InputFile, size: int) -> Iterator[Part]:
        with _table_errors(file.path):
            sizes, file_size = self._sizes(file.path), status_of(file.path).st_size
        if len(sizes) < 2:
            yield file.part()
            return
        total = max(sum(sizes), 1)
        ends = [file_size * end // total for end in itertools.accumulate(sizes)]
        start = position = 0
        while start < len(ends):
            stop = max(bisect.bisect_right(ends, position + size), start + 1)
            first_line = None if start else self.first_line
            yield file.part(start, stop, size=ends[stop - 1] - position, first_line=first_line)
            start, position = stop, ends[stop - 1]

    def first_line_of(self, part: Part) -> int:
        return sum((self.group_counts(part.file.path) or [])[: part.start])

    def read(self, part: Part, query: Query) -> Iterator[Documents]:
        batch, row = Batch(query, part.size), 0
        with unchanged(part), _table_errors(part.source):
            for group, share in self._groups(part, query):
                step = _num_rows(group.num_rows, group.nbytes)
                for start in range(0, group.num_rows, step):
                    columns, ids = _columns(group.slice(start, step), query, part.source)
                    if not query.skip_empty and _are_short_texts(columns, query.max_size):
                        batch.add_all(columns, row, [-1] * len(ids), list(map(id_text, ids)))
                        row += len(ids)
                    else:
                        for *values, id_ in zip(*columns, ids, strict=True):
                            _add_row(values, id_, row, query, batch)
                            row += 1
                    yield batch.take(row, int(share * (1 << 32)), 1 << 32)


class Parquet(_Table):
    """Rows of Parquet files; a part is a range of row groups."""

    name = "parquet"
    endings = (".parquet", ".pq")
    _magic = b"PAR1"

    def group_counts(self, path: str) -> list[int] | None:
        with _table_errors(path), _parquet_file(path) as (_, groups):
            return [group.num_rows for group in groups]

    def _sizes(self, path: str) -> list[int]:
        with _parquet_file(path) as (_, groups):
            return [group.total_byte_size for group in groups]

    def _groups(self, part: Part, query: Query) -> Iterator[tuple[Any, float]]:
        with _parquet_file(part.file.path) as (file, groups):
            numbers = [*range(len(groups))[part.start : part.stop]]
            num_rows, row = sum(groups[number].num_rows for number in numbers), 0
            num_bytes = sum(groups[number].total_byte_size for number in numbers)
            for batch in file.iter_batches(
                batch_size=_num_rows(num_rows, num_bytes),
                row_groups=numbers,
                columns=_text_columns(file.schema_arrow, query, part.source),
                use_threads=False,
            ):
                row += batch.num_rows
                yield batch, row / num_rows


class Arrow(_Table):
    """Rows of Arrow files and streams; a part of a file is a range of record batches."""

    name = "arrow"
    endings = (".arrow", ".arrows", ".feather", ".ipc")
    _magic = b"ARROW1"  # of a file with an index of its batches, which a stream lacks

    def group_counts(self, path: str) -> list[int] | None:
        with _table_errors(path):
            with open_path(path) as start:
                if not self.matches(start.read(len(self._magic))):
                    return None
            import pyarrow as pa

            source = open_path(path) if is_remote(path) else pa.memory_map(path)
            file = pa.ipc.open_file(source)  # reads no column
            return [file.get_batch(number).num_rows for number in range(file.num_record_batches)]

    def _sizes(self, path: str) -> list[int]:
        with _arrow_reader(path) as (_, reader, is_file):
            return [1] * reader.num_record_batches if is_file else []  # their sizes are not known

    def _groups(self, part: Part, query: Query) -> Iterator[tuple[Any, float]]:
        with _arrow_reader(part.file.path) as (_, reader, _):
            schema = reader.schema
        names = _text_columns(schema, query, part.source)
        roots = {name if name in schema.names else name.split(".")[0] for name in names}
        fields = [number for number, name in enumerate(schema.names) if name in roots]
        with _arrow_reader(part.file.path, fields) as (file, reader, is_file):
            if is_file:
                numbers = range(reader.num_record_batches)[part.start : part.stop]
                batches = map(reader.get_batch, numbers)
            else:
                batches, size = iter(reader), max(file.size(), 1)
            for count, batch in enumerate(batches, start=1):
                for column in batch.columns:
                    _check_offsets(column)
                yield batch, count / len(numbers) if is_file else file.tell() / size


@contextlib.contextmanager
def _table_errors(source: str) -> Iterator[None]:
    pyarrow = package("pyarrow", source)
    try:
        with readable(source):
            yield
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:  # also of damaged names
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TextError(
            f"{source} is damaged, truncated or of another format ({reason}). "
            "Copy or write the file again"
        ) from None


def _num_rows(num_rows: int, num_bytes: int) -> int:
    """The number of rows in about 1 MB."""
    return min(max(num_rows * _BATCH_SIZE // max(num_bytes, 1), 1), _MOST_ROWS)


@contextlib.contextmanager
def _parquet_file(path: str) -> Iterator[tuple[Any, list[Any]]]:
    """A file, and the metadata of its row groups."""
    import pyarrow.parquet

    # A buffer: a column of a large row group is read bit by bit.
    source = open_path(path) if is_remote(path) else path
    with pyarrow.parquet.ParquetFile(source, buffer_size=_BATCH_SIZE, pre_buffer=False) as file:
        yield file, [*map(file.metadata.row_group, range(file.num_row_groups))]


@contextlib.contextmanager
def _arrow_reader(path: str, fields: list[int] | None = None) -> Iterator[tuple[Any, Any, bool]]:
    """A file, a reader of all or some columns, and whether it is not a stream."""
    import pyarrow as pa

    options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=fields)
    with pa.PythonFile(open_path(path)) if is_remote(path) else pa.OSFile(path) as file:
        is_file = file.read(len(Arrow._magic)) == Arrow._magic
        file.seek(0)
        open_ = pa.ipc.open_file if is_file else pa.ipc.open_stream
        with open_(file, options=options) as reader:
            yield file, reader, is_file


# ---- documents of rows ----


def _columns(rows: Any, query: Query, source: str) -> tuple[list[list[Any]], list[Any]]:
    """Values of each key, or whole rows, and the ids."""
    has_ids = _type_of(rows.schema, query.id_key) is not None
    ids = _id_values(_column(rows, query.id_key)) if has_ids else [None] * rows.num_rows
    if query.whole:
        return [records_of(rows, source)], ids
    return [_values(_column(rows, key)) for key in query.keys], ids


def _are_short_texts(columns: list[list[Any]], max_size: int) -> bool:
    """Whether all values are strings of at most `max_size` bytes: a character has at most 4."""
    return all(
        {*map(type, column)} == {str} and 4 * max(map(len, column)) <= max_size
        for column in columns
    )


def _add_row(values: list[Any], id_: Any, row: int, query: Query, batch: Batch) -> None:
    try:
        texts = values if query.whole else list(map(check_text, values, query.keys))
        if not query.whole and [text for text in texts if _is_long(text, query.max_size)]:
            query.reject_long(row, -1, "text")
        else:
            batch.add(texts, row, id_=id_text(id_))
    except BadDocumentError as error:
        # Bytes that are not UTF-8 become halves of surrogate pairs.
        record = dict(zip(query.keys, values, strict=True))
        query.reject(row, -1, str(error), json.dumps(record, default=_escaped).encode())


def _is_long(text: Text, size: int) -> bool:
    texts = list(texts_of([text]))
    return 4 * sum(map(len, texts)) > size and sum(len(text.encode()) for text in texts) > size


def _escaped(value: Any) -> str:
    return value.decode(errors="surrogateescape") if isinstance(value, bytes) else str(value)


# ---- columns ----


def _text_columns(schema: Any, query: Query, source: str) -> list[str]:
    """The names and paths of the columns of texts and ids, each once; all columns of records."""
    if query.whole:
        return list(schema.names)
    for key in query.keys:
        type_ = _type_of(schema, key)
        if type_ is None or not _is_text(type_):
            raise no_column(source, key, schema.names, "" if type_ is None else f", but of {type_}")
    has_ids = _type_of(schema, query.id_key) is not None
    return [*dict.fromkeys([*query.keys, *[query.id_key] * has_ids])]


def _type_of(schema: Any, key: str) -> Any:
    """The type of a column, or of what dots reach in a struct; None if there is no single one."""
    if schema.names.count(key) == 1:
        return schema.field(key).type
    first, *rest = key.split(".")
    if schema.names.count(first) != 1:
        return None
    from pyarrow.types import is_struct

    type_ = schema.field(first).type
    for name in rest:
        if not is_struct(type_) or type_.get_field_index(name) < 0:
            return None
        type_ = type_.field(name).type
    return type_


def _is_text(type_: Any, is_list: bool = False) -> bool:
    from pyarrow import types

    type_ = getattr(type_, "storage_type", type_)  # of an extension type
    if types.is_dictionary(type_):
        type_ = type_.value_type
    lists = types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_)
    if lists and not is_list:
        return _is_text(type_.value_type, True)
    return str(type_) in _TEXT_TYPES or "view" in str(type_)


def _column(batch: Any, name: str) -> Any:
    if name in batch.schema.names:
        return batch.column(name)
    from pyarrow import compute

    first, *rest = name.split(".")
    return compute.struct_field(batch.column(first), rest)  # null where a parent is null


def _id_values(column: Any) -> list[Any]:
    """Values of an id column: decimals as Arrow's text, UUIDs in their usual form, other bytes as
    text or in hexadecimal."""
    from pyarrow import string, types

    column = _plain(column)
    if types.is_decimal(column.type):
        column = column.cast(string())
    if types.is_fixed_size_binary(column.type) and column.type.byte_width == 16:
        return [None if id_ is None else str(uuid.UUID(bytes=id_)) for id_ in column.to_pylist()]
    return [id_.hex() if isinstance(id_, bytes) else id_ for id_ in _values(column)]


def _values(column: Any) -> list[Any]:
    """The values of a column as Python's: str, or bytes where they are not UTF-8; times as Arrow's
    text, as Python has no nanoseconds, no year 10,000, and not every time zone; JSON is parsed."""
    if str(column.type) == _JSON:
        return list(map(_parsed, column.to_pylist()))
    column = _plain(column)
    import pyarrow as pa
    from pyarrow import compute, types

    if types.is_temporal(column.type) and not types.is_interval(column.type):
        with contextlib.suppress(ValueError):
            return column.cast(pa.string()).to_pylist()  # type: ignore[no-any-return]
        column = column.cast(pa.timestamp(column.type.unit))  # its time zone is not known
        return column.cast(pa.string()).to_pylist()  # type: ignore[no-any-return]
    if not _NEEDS_CARE.search(str(column.type)) or types.is_map(column.type):
        with contextlib.suppress(ValueError, OverflowError, KeyError):  # of times in a map, too
            return list(map(_as_text, column.to_pylist()))
    if types.is_struct(column.type):
        names = [field.name for field in column.type]
        parts = [_values(compute.struct_field(column, [place])) for place in range(len(names))]
        rows = [dict(zip(names, values, strict=True)) for values in zip(*parts, strict=True)]
        is_valid = compute.is_valid(column).to_pylist()
        return [row if valid else None for row, valid in zip(rows, is_valid, strict=True)]
    if types.is_nested(column.type) and not types.is_map(column.type):
        if isinstance(column, pa.ChunkedArray):
            return [value for chunk in column.chunks for value in _values(chunk)]
        if column.null_count == len(column):  # Arrow flattens no such lists of extension types
            return [None] * len(column)
        values = iter(_values(compute.list_flatten(column)))
        sizes = compute.list_value_length(column).to_pylist()
        return [None if size is None else [*itertools.islice(values, size)] for size in sizes]
    column = column.cast(pa.large_binary())
    column.validate(full=True)  # only the first problem is known so far
    return list(map(_as_text, column.to_pylist()))


def _parsed(text: str | None) -> Any:
    """The value of some JSON; a text that is not JSON as it is."""
    with contextlib.suppress(BadDocumentError):
        return parse_line(("null" if text is None else text).encode())
    return text


def records_of(batch: Any, source: str) -> list[dict[str, Any]]:
    """The rows of a record batch or table as dictionaries, with Python's values."""
    names = batch.schema.names
    if len({*names}) < len(names):
        raise TextError(f"{source} has two columns of one name: give each its own name ({names})")
    columns = map(_values, batch.columns)
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _check_offsets(column: Any) -> None:
    """ArrowInvalid unless all offsets are valid: others would lead to any place in memory."""
    try:
        getattr(column, "storage", column).validate(full=True)
    except ValueError as error:
        if "UTF8" not in str(error):  # rows that are not UTF-8 are rejected one by one
            raise


def _plain(column: Any) -> Any:
    """The column without a dictionary or an extension type."""
    column = getattr(column, "storage", column)
    if hasattr(column, "dictionary_decode"):
        column = column.dictionary_decode()
    return getattr(column, "storage", column)


def _as_text(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(_as_text, value))
    if isinstance(value, dict):
        return {name: _as_text(part) for name, part in value.items()}
    if isinstance(value, bytes):
        with contextlib.suppress(UnicodeDecodeError):
            return value.decode()
    return value
