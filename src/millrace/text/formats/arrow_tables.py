"""Parquet and Arrow: rows of tables, read by pyarrow."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from millrace.errors import TextError
from millrace.text.documents import Batch, Documents, Query
from millrace.text.formats.arrow_columns import Rows, TextColumns
from millrace.text.parts import Format, InputFile, Part
from millrace.text.records import BadDocumentError, Text, check_cell, id_text
from millrace.text.streams import FileIdentity, check_unchanged, readable

_BATCH_SIZE = 1 << 20  # bytes of text
_MOST_ROWS = 1 << 11  # in a batch: texts that are stored once may be repeated in each row
_ARROW_FILE_MAGIC = b"ARROW1"


class Parquet(Format):
    """Rows of Parquet files; a part is a range of row groups."""

    name = "parquet"
    endings = (".parquet", ".pq")
    unit = "row"
    first_line = 0
    needs_file = True

    def matches(self, first_bytes: bytes) -> bool:
        return first_bytes.startswith(b"PAR1")

    def cut(self, file: InputFile, size: int) -> Iterator[Part]:
        with _table_errors(file.path), _parquet_file(file.path) as table:
            metadata = table.metadata
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        if len(groups) < 2:
            return iter([file.part()])
        weights = [int(group.total_byte_size) for group in groups]
        rows = itertools.accumulate((int(group.num_rows) for group in groups), initial=0)
        return _ranges(file, size, weights, [*rows])

    def read(self, part: Part, query: Query) -> Iterator[Documents]:
        return _table_documents(part, query, self._rows(part, query))

    def _rows(self, part: Part, query: Query) -> Iterator[Rows]:
        with _table_errors(part.source), _parquet_file(part.path) as file:
            columns = TextColumns(file.schema_arrow, query, part.source)
            metadata = file.metadata
            groups = range(metadata.num_row_groups)[part.start : part.stop]
            num_rows = sum(metadata.row_group(group).num_rows for group in groups)
            num_bytes = sum(
                _text_size(metadata.row_group(group), columns.names) for group in groups
            )
            batch_size = num_rows * _BATCH_SIZE // max(num_bytes, 1)
            row = 0
            for batch in file.iter_batches(
                batch_size=min(max(batch_size, 1), _MOST_ROWS),
                row_groups=list(groups),
                columns=columns.names,
                use_threads=False,
            ):
                before, row = row, row + batch.num_rows
                yield from _slices(batch, columns, before / num_rows, row / num_rows)


class Arrow(Format):
    """Rows of Arrow files and streams; a part of a file is a range of record batches."""

    name = "arrow"
    endings = (".arrow", ".arrows", ".feather", ".ipc")
    unit = "row"
    first_line = 0
    needs_file = True

    def matches(self, first_bytes: bytes) -> bool:
        return first_bytes.startswith(_ARROW_FILE_MAGIC)

    def cut(self, file: InputFile, size: int) -> Iterator[Part]:
        with _table_errors(file.path):
            import pyarrow

            with pyarrow.OSFile(file.path) as data:
                if not _is_arrow_file(data):
                    return iter([file.part()])
                with _arrow_reader(data, True) as reader:
                    weights = [1] * reader.num_record_batches  # their sizes are not known
        return _ranges(file, size, weights, [0])

    def first_line_of(self, part: Part) -> int:
        import pyarrow

        with (
            _table_errors(part.path),
            pyarrow.memory_map(part.path) as source,
            pyarrow.ipc.open_file(source) as file,
        ):
            return sum(file.get_batch(number).num_rows for number in range(part.start))

    def read(self, part: Part, query: Query) -> Iterator[Documents]:
        return _table_documents(part, query, self._rows(part, query))

    def _rows(self, part: Part, query: Query) -> Iterator[Rows]:
        import pyarrow

        with _table_errors(part.source), pyarrow.OSFile(part.path) as file:
            size = max(file.size(), 1)
            is_file = _is_arrow_file(file)
            with _arrow_reader(file, is_file) as reader:
                schema = reader.schema
            columns = TextColumns(schema, query, part.source)
            roots = {name if name in schema.names else name.split(".")[0] for name in columns.names}
            fields = [number for number, name in enumerate(schema.names) if name in roots]
            file.seek(0)
            with _arrow_reader(file, is_file, fields) as reader:
                if is_file:
                    numbers = range(reader.num_record_batches)[part.start : part.stop]
                    bounds = np.linspace(0, 1, len(numbers) + 1).tolist()
                    batches = map(reader.get_batch, numbers)
                    for batch, before, after in zip(batches, bounds, bounds[1:], strict=False):
                        yield from _slices(_checked(batch), columns, before, after)
                    return
                position = 0
                for batch in reader:
                    before, position = position, file.tell()
                    yield from _slices(_checked(batch), columns, before / size, position / size)


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


def _is_arrow_file(data: Any) -> bool:
    """Whether data, which are at their start, are a file: a stream has no index of its batches."""
    first_bytes = data.read(len(_ARROW_FILE_MAGIC))
    data.seek(0)
    return bool(first_bytes == _ARROW_FILE_MAGIC)


def _arrow_reader(source: Any, is_file: bool, fields: Sequence[int] | None = None) -> Any:
    """A reader of the file or stream, or of some of its columns."""
    import pyarrow

    options = pyarrow.ipc.IpcReadOptions(use_threads=False, included_fields=fields)
    return (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(source, options=options)


def _ranges(
    file: InputFile, size: int, weights: Sequence[int], rows: Sequence[int]
) -> Iterator[Part]:
    """Parts of about `size` bytes, made of consecutive groups of rows.

    Args:
        weights: Share of each group in the file's bytes; what else is in it is shared out.
        rows: Number of rows before each group, as far as it is known.
    """
    with readable(file.path):
        file_size = os.path.getsize(file.path)
    total = max(sum(weights), 1)
    ends = [file_size * weight // total for weight in itertools.accumulate(weights)]
    start = position = 0
    while start < len(ends):
        stop = start + 1
        while stop < len(ends) and ends[stop] - position <= size:
            stop += 1
        first_line = rows[start] if start < len(rows) else None
        yield file.part(start, stop, size=ends[stop - 1] - position, first_line=first_line)
        start, position = stop, ends[stop - 1]


def _text_size(group: Any, names: Sequence[str]) -> int:
    """Bytes of some columns in a row group of Parquet."""
    columns = [group.column(number) for number in range(group.num_columns)]
    return sum(
        int(column.total_uncompressed_size)
        for column in columns
        if any(f"{column.path_in_schema}.".startswith(f"{name}.") for name in names)
    )


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


def _slices(batch: Any, columns: TextColumns, before: float, after: float) -> Iterator[Rows]:
    """The rows of a record batch, in slices of about 1 MB."""
    count = batch.num_rows
    step = min(max(count * _BATCH_SIZE // max(batch.nbytes, 1), 1), _MOST_ROWS)
    for row in range(0, count, step):
        part = batch.slice(row, step)
        yield columns.rows(part, before + (after - before) * (row + part.num_rows) / count)


# ---- documents of rows ----


def _table_documents(part: Part, query: Query, slices: Iterator[Rows]) -> Iterator[Documents]:
    with readable(part.source):
        status = os.stat(part.path)
    check_unchanged(part.source, status, part.identity)
    batch, row = Batch(query, part.size), 0
    for rows in slices:
        _add_rows(rows, row, query, batch)
        row += len(rows.columns[0])
        yield batch.take(row, int(rows.share * (1 << 32)), 1 << 32)
    with readable(part.source):
        after = os.stat(part.path)
    check_unchanged(part.source, after, FileIdentity(status.st_size, status.st_mtime_ns))


def _add_rows(rows: Rows, first: int, query: Query, batch: Batch) -> None:
    """Adds the documents of some rows, of which the first is number `first` of the part."""
    count = len(rows.columns[0])
    ids: list[str | None] = [None] * count if rows.ids is None else [*map(id_text, rows.ids)]
    if not query.skip_empty and _are_short_texts(rows.columns, query.max_size):
        numbers = np.arange(first, first + count, dtype=np.int64)
        batch.add_all(rows.columns, numbers, np.full(count, -1, np.int64), ids)
        return
    for row, values in enumerate(zip(*rows.columns, strict=True)):
        try:
            texts = [check_cell(value, key) for value, key in zip(values, query.keys, strict=True)]
            if any(_is_too_long(text, query.max_size) for text in texts):
                query.reject_long(first + row, -1, "text")
            else:
                batch.add(texts, first + row, id_=ids[row])
        except BadDocumentError as error:
            # Bytes that are not UTF-8 become halves of surrogate pairs.
            row_as_json = json.dumps(dict(zip(query.keys, values, strict=True)), default=_as_text)
            query.reject(first + row, -1, str(error), row_as_json.encode())


def _are_short_texts(columns: list[list[Any]], max_size: int) -> bool:
    """Whether all values are strings that are not too long; a character has at most 4 bytes."""
    return all({*map(type, column)} == {str} for column in columns) and all(
        4 * max(map(len, column)) <= max_size for column in columns
    )


def _is_too_long(text: Text, max_size: int) -> bool:
    """Whether texts have more bytes of UTF-8; a character has 1 to 4."""
    texts = [text] if isinstance(text, str) else text
    num_characters = sum(map(len, texts))
    if num_characters > max_size or 4 * num_characters <= max_size:
        return num_characters > max_size
    return sum(len(text.encode()) for text in texts) > max_size


def _as_text(value: Any) -> str:
    return value.decode(errors="surrogateescape") if isinstance(value, bytes) else str(value)
