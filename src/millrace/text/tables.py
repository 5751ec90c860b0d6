"""Rows of Parquet and Arrow files, read by pyarrow."""

from __future__ import annotations

import contextlib
import itertools
import os
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from millrace.errors import TextError
from millrace.text.streams import readable

_BATCH_SIZE = 1 << 20  # bytes of text
_MOST_ROWS = 1 << 11  # in a batch: texts that are stored once may be repeated in each row


class Rows(NamedTuple):
    """Rows of a table.

    Attributes:
        columns: Values of each key: strings, lists of strings, or anything else that pyarrow
            holds, which is not a text.
        ids: Values of the id column: strings, numbers or None; None without one.
        share: Share of the range that has been read, 0 to 1.
    """

    columns: list[list[Any]]
    ids: list[Any] | None
    share: float


def num_row_groups(path: str) -> int:
    """The number of row groups of a Parquet file."""
    with _table_errors(path), _parquet_file(path) as file:
        return int(file.num_row_groups)


def ranges(path: str, format_: str, size: int) -> Iterator[tuple[int, int, int, int | None]]:
    """A file in ranges of about `size` bytes: (start, stop, bytes, first row, if it is known)."""
    with _table_errors(path):
        if format_ == "parquet":
            with _parquet_file(path) as file:
                metadata = file.metadata
                groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
                weights = [int(group.total_byte_size) for group in groups]
                rows = [int(group.num_rows) for group in groups]
        else:
            with _arrow_file(path) as file:
                weights = [1] * file.num_record_batches  # their sizes are not known
                rows = []
        file_size = os.path.getsize(path)
    # Position in the file of the end of each group, about: what else is in it is shared out.
    total = max(sum(weights), 1)
    ends = [file_size * weight // total for weight in itertools.accumulate(weights)]
    start = position = row = 0
    while start < len(ends):
        stop = start + 1
        while stop < len(ends) and ends[stop] - position <= size:
            stop += 1
        yield start, stop, ends[stop - 1] - position, row if rows or not start else None
        row += sum(rows[start:stop])
        start, position = stop, ends[stop - 1]


def num_rows_before(path: str, batch: int) -> int:
    """The number of rows before a record batch of an Arrow file."""
    import pyarrow

    with (
        _table_errors(path),
        pyarrow.memory_map(path) as source,
        pyarrow.ipc.open_file(source) as file,
    ):
        return sum(file.get_batch(number).num_rows for number in range(batch))


def read_rows(
    path: str,
    format_: str,
    start: int,
    stop: int | None,
    keys: Sequence[str],
    id_key: str,
    source: str,
) -> Iterator[Rows]:
    """The rows of a range of row groups (Parquet) or record batches (Arrow).

    Raises:
        TextError: A file that cannot be read or is damaged, or has no column for a key.
    """
    with _table_errors(source):
        if format_ == "parquet":
            yield from _parquet_rows(path, start, stop, keys, id_key, source)
        else:
            yield from _arrow_rows(path, start, stop, keys, id_key, source)


@contextlib.contextmanager
def _table_errors(source: str) -> Iterator[None]:
    try:
        import pyarrow
    except ImportError:
        raise TextError(
            f"{source} needs the pyarrow package: pip install 'millrace[tokenizers]'"
        ) from None
    try:
        with readable(source):
            yield
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:  # also of damaged names
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TextError(
            f"{source} is damaged, truncated or of another format ({reason}). "
            "Copy or write the file again"
        ) from None


@contextlib.contextmanager
def _parquet_file(path: str) -> Iterator[Any]:
    from pyarrow import parquet

    # A buffer: a column of a large row group is read bit by bit.
    with parquet.ParquetFile(path, buffer_size=_BATCH_SIZE, pre_buffer=False) as file:
        yield file


def _parquet_rows(
    path: str, start: int, stop: int | None, keys: Sequence[str], id_key: str, source: str
) -> Iterator[Rows]:
    with _parquet_file(path) as file:
        schema = file.schema_arrow
        names = [_column_name(schema, key, source) for key in keys]
        id_name = _find_column(schema, id_key)
        columns = [*dict.fromkeys([*names, *([id_name] if id_name else [])])]
        metadata = file.metadata
        groups = range(metadata.num_row_groups)[start:stop]
        num_rows = sum(metadata.row_group(group).num_rows for group in groups)
        num_bytes = sum(_text_size(metadata.row_group(group), columns) for group in groups)
        batch_size = num_rows * _BATCH_SIZE // max(num_bytes, 1)
        row = 0
        for batch in file.iter_batches(
            batch_size=min(max(batch_size, 1), _MOST_ROWS),
            row_groups=list(groups),
            columns=columns,
            use_threads=False,
        ):
            before, row = row, row + batch.num_rows
            yield from _slices(batch, names, id_name, before / num_rows, row / num_rows)


def _text_size(group: Any, columns: Sequence[str]) -> int:
    size = 0
    for i in range(group.num_columns):
        column = group.column(i)
        path = column.path_in_schema
        if any(path == name or path.startswith(name + ".") for name in columns):
            size += column.total_uncompressed_size
    return size


@contextlib.contextmanager
def _arrow_file(path: str) -> Iterator[Any]:
    import pyarrow

    with pyarrow.OSFile(path) as source, pyarrow.ipc.open_file(source) as file:
        yield file


def _arrow_rows(
    path: str, start: int, stop: int | None, keys: Sequence[str], id_key: str, source: str
) -> Iterator[Rows]:
    import pyarrow

    with pyarrow.OSFile(path) as file:
        size = max(file.size(), 1)
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        open_ = pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream
        with open_(file) as reader:
            schema = reader.schema
        names = [_column_name(schema, key, source) for key in keys]
        id_name = _find_column(schema, id_key)
        columns = {name if name in schema.names else name.split(".")[0] for name in names}
        if id_name:
            columns.add(id_name if id_name in schema.names else id_name.split(".")[0])
        fields = [i for i, name in enumerate(schema.names) if name in columns]
        options = pyarrow.ipc.IpcReadOptions(use_threads=False, included_fields=fields)
        file.seek(0)
        with open_(file, options=options) as reader:
            if is_file:
                numbers = range(reader.num_record_batches)[start:stop]
                for done, number in enumerate(numbers, start=1):
                    yield from _slices(
                        _checked(reader.get_batch(number)),
                        names,
                        id_name,
                        (done - 1) / len(numbers),
                        done / len(numbers),
                    )
            else:
                position = 0
                for batch in reader:
                    before, position = position, file.tell()
                    share = before / size, position / size
                    yield from _slices(_checked(batch), names, id_name, *share)


def _checked(batch: Any) -> Any:
    """The record batch, if its offsets are valid: others would lead to any place in memory."""
    import pyarrow

    for column in batch.columns:
        try:
            column.validate(full=True)
        except pyarrow.ArrowInvalid as error:
            if "UTF8" not in str(error):  # rows that are not UTF-8 are rejected one by one
                raise
    return batch


def _slices(
    batch: Any, names: Sequence[str], id_name: str | None, before: float, after: float
) -> Iterator[Rows]:
    """A record batch in slices of about 1 MB."""
    count = batch.num_rows
    step = min(max(count * _BATCH_SIZE // max(batch.nbytes, 1), 1), _MOST_ROWS)
    for row in range(0, count, step):
        part = batch.slice(row, step)
        share = before + (after - before) * (row + part.num_rows) / count
        yield _rows(part, names, id_name, share)


def _find_column(schema: Any, key: str) -> str | None:
    """The key, if it is a column, or dots in it reach into struct columns."""
    import pyarrow

    if schema.names.count(key) == 1:
        return key
    first, *rest = key.split(".")
    if schema.names.count(first) != 1:
        return None
    type_ = schema.field(first).type
    for name in rest:
        if not pyarrow.types.is_struct(type_) or type_.get_field_index(name) < 0:
            return None
        type_ = type_.field(name).type
    return key


def _column_name(schema: Any, key: str, source: str) -> str:
    name = _find_column(schema, key)
    if name is None:
        if schema.names.count(key) > 1:
            raise TextError(f'{source} has {schema.names.count(key)} columns "{key}"')
        names = ", ".join(schema.names[:10]) or "none"
        raise TextError(
            f'{source} has no column "{key}"; its columns are: {names}. '
            "Name the text's column with --json-keys"
        )
    type_ = _column_type(schema, key)
    if not _is_text(type_):
        raise TextError(
            f'{source}: column "{key}" is {type_}, not a text or a list of texts. '
            "Name the text's column with --json-keys"
        )
    return name


def _column_type(schema: Any, key: str) -> Any:
    if key in schema.names:
        return schema.field(key).type
    first, *rest = key.split(".")
    type_ = schema.field(first).type
    for name in rest:
        type_ = type_.field(name).type
    return type_


def _is_text(type_: Any, is_list: bool = False) -> bool:
    import pyarrow
    from pyarrow import types

    if isinstance(type_, pyarrow.BaseExtensionType):
        type_ = type_.storage_type
    if types.is_dictionary(type_):
        type_ = type_.value_type
    lists = types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_)
    if lists and not is_list:
        return _is_text(type_.value_type, True)
    return bool(
        types.is_string(type_)
        or types.is_large_string(type_)
        or types.is_binary(type_)
        or types.is_large_binary(type_)
        or types.is_null(type_)
        or "view" in str(type_)
    )


def _rows(batch: Any, names: Sequence[str], id_name: str | None, share: float) -> Rows:
    columns = [_values(_column(batch, name)) for name in names]
    ids = _id_values(_column(batch, id_name)) if id_name else None
    return Rows(columns, ids, share)


def _column(batch: Any, name: str) -> Any:
    if name in batch.schema.names:
        return batch.column(name)
    first, *rest = name.split(".")
    column = batch.column(first)
    for part in rest:
        # `flatten` gives the children null where their parent is null.
        column = column.flatten()[column.type.get_field_index(part)]
    return column


def _id_values(column: Any) -> list[Any]:
    """Values of an id column: times and decimals as Arrow's text for them, UUIDs in their usual
    form, other bytes as text or in hexadecimal, None of lists and structs."""
    import pyarrow
    from pyarrow import types

    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if isinstance(column.type, pyarrow.BaseExtensionType):
        column = column.storage
    if types.is_nested(column.type) or types.is_interval(column.type):
        return [None] * len(column)
    if types.is_temporal(column.type) or types.is_decimal(column.type):
        column = column.cast(pyarrow.string())  # Python's types have no nanoseconds
    if types.is_fixed_size_binary(column.type) and column.type.byte_width == 16:
        return [None if id_ is None else str(uuid.UUID(bytes=id_)) for id_ in column.to_pylist()]
    return [id_.hex() if isinstance(id_, bytes) else id_ for id_ in _values(column)]


def _values(column: Any) -> list[Any]:
    """The values of a column as Python's: str, or bytes where they are not UTF-8."""
    import pyarrow
    from pyarrow import types

    if isinstance(column.type, pyarrow.BaseExtensionType):
        column = column.storage
    try:
        column.validate(full=True)  # damaged offsets would lead anywhere in memory
    except pyarrow.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    with contextlib.suppress(pyarrow.ArrowException, UnicodeDecodeError):
        if types.is_string(column.type) or types.is_large_string(column.type):
            return column.to_numpy(zero_copy_only=False).tolist()  # type: ignore[no-any-return]
        return [_as_text(value) for value in column.to_pylist()]
    is_list = types.is_nested(column.type)
    binary = pyarrow.large_list(pyarrow.large_binary()) if is_list else pyarrow.large_binary()
    column = column.cast(binary)
    column.validate(full=True)  # of nested columns, only the first problem is known so far
    return [_as_text(value) for value in column.to_pylist()]


def _as_text(value: Any) -> Any:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    if isinstance(value, list):
        return [_as_text(item) for item in value]
    return value
