"""Documents: the texts of a part of a file, in batches, whatever the format."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace import checks
from millrace.errors import ConfigError
from millrace.text.inputs import TABLE_FORMATS
from millrace.text.parts import CSV_FORMATS, MAX_DOCUMENT_SIZE, Part
from millrace.text.records import (
    BadDocumentError,
    Text,
    check_cell,
    check_unicode,
    id_of,
    id_text,
    is_unicode,
    orjson_loads,
    parse_json,
    text_at,
)
from millrace.text.splitting import (
    Block,
    Lines,
    LongRecord,
    line_blocks,
    record_blocks,
)
from millrace.text.streams import (
    BLOCK_SIZE,
    ByteStream,
    FileIdentity,
    check_unchanged,
    open_stream,
    readable,
)

Reject = Callable[[int, int, str, Iterable[bytes]], None]
"""What is called for each line that cannot be used: with the number of the line within the part,
the byte offset in the decompressed source (-1 for rows), the reason, and the bytes of the line."""


@dataclass
class Documents:
    """A batch of documents, about 256 KB: short documents of larger ones leave a core's cache.

    Attributes:
        texts: For each key, the text (or the list of texts) of each document.
        lines: Line or row of each document, counted from the part's first, from 0: int64 [n].
        byte_offsets: Position of each document's line in the decompressed source; -1 for rows:
            int64 [n].
        ids: Value of each document's id as text, or None.
        num_lines: Number of lines or rows since the last batch, with blank and rejected ones.
        num_bytes: Number of bytes since the last batch, as `Part.size` counts them.
    """

    texts: list[list[Text]]
    lines: NDArray[np.int64]
    byte_offsets: NDArray[np.int64]
    ids: list[str | None]
    num_lines: int
    num_bytes: int


def read_documents(
    part: Part,
    keys: Sequence[str],
    *,
    reject: Reject,
    id_key: str = "id",
    separator: str | None = None,
    skip_empty: bool = False,
    max_document_size: int = MAX_DOCUMENT_SIZE,
    block_size: int = BLOCK_SIZE,
) -> Iterator[Documents]:
    """The documents of a part, in order.

    A line that cannot be used is not JSON in UTF-8, has no text under a key, has half of a
    surrogate pair in it, or is longer than `max_document_size`. It goes to `reject`, which raises
    or takes note, and reading goes on. The last batch may be without documents: it counts the
    lines after the last document.

    Args:
        part: What to read.
        keys: Keys of the texts: JSON keys or columns. If there is none of that name, dots reach
            into objects and struct columns. Plain text has only the key "text".
        reject: Function of the line within the part, the byte offset, the reason and the bytes of
            a line that cannot be used. It need not take the bytes.
        id_key: Key of the document's id.
        separator: Text between the documents of a plain text file; None: the file is a document.
        skip_empty: Whether a document without text under all keys is rejected.
        max_document_size: Size of the longest line, record or text, in bytes. A longer one is
            never in memory, except of Parquet and Arrow.
        block_size: Number of bytes to read at a time.

    Raises:
        ConfigError: Keys that are not a list of strings.
        TextError: A file that cannot be read, is damaged or truncated, or was changed; a table
            without a column for a key.
    """
    keys = check_keys(keys)
    options = _Options(
        keys=keys,
        reject=reject,
        id_key=id_key,
        separator=separator,
        skip_empty=skip_empty,
        max_size=checks.whole("max_document_size", max_document_size, 1),
    )
    if part.format in TABLE_FORMATS:
        return _table_documents(part, options)
    if part.format == "text" and keys != ("text",):
        raise ConfigError(
            f'{part.source} is plain text, which has only the key "text"; the keys are: '
            f"{', '.join(keys)}"
        )
    return _stream_documents(part, options, block_size)


def check_keys(keys: Sequence[str]) -> tuple[str, ...]:
    """The JSON keys as a tuple; ConfigError unless they are a list of strings, each once."""
    if isinstance(keys, str):
        raise ConfigError(f"json_keys is {keys!r}, one key alone; give a list: [{keys!r}]")
    names = tuple(keys) if isinstance(keys, Iterable) else ()
    if not names or not all(isinstance(key, str) for key in names) or len({*names}) < len(names):
        raise ConfigError(
            f"json_keys are {checks.shown(keys)}; give a list of at least one key, each once"
        )
    for name in names:
        if "\0" in name or not is_unicode(name):
            raise ConfigError(f"the key {name!r} cannot be part of a file name; rename it")
    return names


@dataclass(frozen=True, kw_only=True)
class _Options:
    keys: tuple[str, ...]
    reject: Reject
    id_key: str
    separator: str | None
    skip_empty: bool
    max_size: int


class _Batch(NamedTuple):
    """Documents; their lines, of which `num_lines` are read, count from the part's first."""

    texts: list[list[Text]]
    lines: NDArray[np.int64]
    byte_offsets: NDArray[np.int64]
    ids: list[str | None]
    num_lines: int


class _Progress:
    """Lines and bytes between two batches."""

    def __init__(self, part: Part) -> None:
        self._size = part.size
        self._num_lines = self._num_bytes = 0

    def documents(self, batch: _Batch, position: int, total: int | None) -> Documents:
        """The batch, after `position` of `total` bytes on disk; None: of a pipe."""
        if total is not None:
            position = self._size * min(position, total) // max(total, 1)
        documents = Documents(
            batch.texts,
            batch.lines,
            batch.byte_offsets,
            batch.ids,
            batch.num_lines - self._num_lines,
            position - self._num_bytes,
        )
        self._num_lines, self._num_bytes = batch.num_lines, position
        return documents


def _stream_documents(part: Part, options: _Options, block_size: int) -> Iterator[Documents]:
    with open_stream(
        part.path,
        source=part.source,
        compression=part.compression,
        start=part.start,
        stop=part.stop,
        identity=part.identity,
    ) as stream:
        progress = _Progress(part)
        offset = part.byte_offset + stream.first_byte
        max_size = options.max_size
        if part.format == "jsonl":
            lines = line_blocks(stream, max_size, block_size, offset)
            batches = _json_batches(lines, options)
        elif part.format in CSV_FORMATS:
            batches = _csv_batches(stream, part, options, block_size)
        else:
            separator = (options.separator or "").encode()
            blocks = record_blocks(stream, separator, max_size, block_size, offset)
            batches = _text_batches(blocks, options)
        for batch in batches:
            documents = progress.documents(batch, stream.position, stream.size)
            if documents.ids or documents.num_lines or documents.num_bytes:
                yield documents


def _no_documents(options: _Options, num_lines: int) -> _Batch:
    empty = np.zeros(0, np.int64)
    return _Batch([[] for _ in options.keys], empty, empty, [], num_lines)


def _json_batches(blocks: Iterator[Lines | LongRecord], options: _Options) -> Iterator[_Batch]:
    loads = orjson_loads()
    first = 0
    for block in blocks:
        if isinstance(block, LongRecord):
            _reject_long(block, first, "line", options)
            first += 1
            continue
        lines = block.lines
        ends = np.cumsum(np.fromiter(map(len, lines), np.int64, len(lines)))
        offsets = block.byte_offset + np.concatenate([[0], ends[:-1]])
        texts, ids, unused = _json_documents(lines, int(ends[-1]), options, loads)
        numbers = np.arange(len(lines), dtype=np.int64)
        if unused:
            for number, reason in sorted(unused.items()):
                if reason:
                    line = lines[number].removesuffix(b"\n")
                    options.reject(first + number, int(offsets[number]), reason, (line,))
            numbers = np.delete(numbers, [*unused])
            offsets = offsets[numbers]
        numbers += first
        first += len(lines)
        yield _Batch(texts, numbers, offsets, ids, first)
    yield _no_documents(options, first)


def _json_documents(
    lines: list[bytes], size: int, options: _Options, loads: Callable[[bytes], Any] | None
) -> tuple[list[list[Text]], list[str | None], dict[int, str]]:
    """Texts and ids of lines, and the lines without a document, with the reason; "" if blank."""
    keys = options.keys
    unused: dict[int, str] = {}
    doubtful: set[int] = set()  # may hold halves of surrogate pairs, which orjson refuses
    if size > options.max_size:
        for number, line in enumerate(lines):
            if len(line) - line.endswith(b"\n") > options.max_size:
                unused[number] = _too_long("line", options)
    try:
        if loads is None or unused:
            raise ValueError
        records = list(map(loads, lines))
    except ValueError:
        records = [None] * len(lines)
        for number, line in enumerate(lines):
            if number in unused:
                continue
            if line.isspace():  # first, as an error takes 10 µs
                unused[number] = ""
                continue
            try:
                if loads is None:
                    raise ValueError
                records[number] = loads(line)
            except ValueError:
                try:
                    records[number] = parse_json(line.removesuffix(b"\n"))
                    doubtful.add(number)
                except BadDocumentError as error:
                    unused[number] = str(error)
    columns: list[list[Text]]
    if not unused and not doubtful and not options.skip_empty:
        try:
            columns = [[record[key] for record in records] for key in keys]
        except (KeyError, TypeError):
            pass
        else:
            if all({*map(type, column)} == {str} for column in columns):
                return columns, _json_ids(records, lines, options.id_key), unused
    columns = [[] for _ in keys]
    ids: list[str | None] = []
    for number, record in enumerate(records):
        if number in unused:
            continue
        try:
            texts = [text_at(record, key) for key in keys]
            if number in doubtful:
                check_unicode(texts)
            _check_not_empty(texts, options)
        except BadDocumentError as error:
            unused[number] = str(error)
            continue
        for column, text in zip(columns, texts, strict=True):
            column.append(text)
        ids.append(id_of(record, options.id_key, lines[number]))
    return columns, ids, unused


def _json_ids(records: list[Any], lines: list[bytes], key: str) -> list[str | None]:
    if "." not in key:
        values = [record.get(key) for record in records]
        if {*map(type, values)} <= {str, type(None)}:
            return values
    return [id_of(record, key, line) for record, line in zip(records, lines, strict=True)]


def _text_batches(blocks: Iterator[Block | LongRecord], options: _Options) -> Iterator[_Batch]:
    separator = (options.separator or "").encode()
    line = 0
    is_empty = True
    for block in blocks:
        is_empty = False
        if isinstance(block, LongRecord):
            _reject_long(block, line, "text", options)
            line += block.num_newlines
            continue
        records = block.data.split(separator) if separator else [block.data]
        if len(records) > 1 and not records[-1]:
            records.pop()
        yield _text_batch(records, separator, line, block.byte_offset, options)
        line += block.data.count(b"\n")
    if is_empty and not separator:
        yield _text_batch([b""], separator, 0, 0, options)
    yield _no_documents(options, line)


def _text_batch(
    records: list[bytes], separator: bytes, line: int, offset: int, options: _Options
) -> _Batch:
    texts: list[Text] = []
    lines, offsets = [], []
    for record in records:
        try:
            if len(record) > options.max_size:
                raise BadDocumentError(_too_long("text", options))
            text = _decoded(record)
            _check_not_empty([text], options)
            texts.append(text)
            lines.append(line)
            offsets.append(offset)
        except BadDocumentError as error:
            options.reject(line, offset, str(error), (record,))
        line += record.count(b"\n") + separator.count(b"\n")
        offset += len(record) + len(separator)
    return _Batch(
        [texts], np.array(lines, np.int64), np.array(offsets, np.int64), [None] * len(texts), line
    )


def _csv_batches(
    stream: ByteStream, part: Part, options: _Options, block_size: int
) -> Iterator[_Batch]:
    from millrace.text import csv_rows

    has_header = part.columns is None
    rows = csv_rows.csv_rows(
        stream, part.format, options.max_size, block_size, has_header=has_header
    )
    columns, first = part.columns or (), 0
    if has_header:
        columns, first = csv_rows.read_header(rows, part.source)
    if columns:  # an empty file needs none
        indices = [csv_rows.column_index(columns, key, part.source) for key in options.keys]
        id_index = columns.index(options.id_key) if options.id_key in columns else None
    for block in csv_rows.blocks_of(rows, block_size):
        texts: list[list[Text]] = [[] for _ in options.keys]
        numbers: list[int] = []
        ids: list[str | None] = []
        for number, row in enumerate(block, start=first):
            is_long = row.is_long or number in part.long_rows
            if not (row.fields or row.problem or is_long):  # a blank line
                continue
            try:
                if is_long or row.problem:
                    raise BadDocumentError(_too_long("row", options) if is_long else row.problem)
                if len(row.fields) != len(columns):
                    raise BadDocumentError(
                        f"the row has {len(row.fields)} fields, and the header has {len(columns)}. "
                        "Quote fields with separators or line breaks in them"
                    )
                values = [_decoded(row.fields[index].encode("latin-1")) for index in indices]
                _check_not_empty(values, options)
            except BadDocumentError as error:
                options.reject(number, -1, str(error), (b"" if is_long else row.data,))
                continue
            for column, text in zip(texts, values, strict=True):
                column.append(text)
            numbers.append(number)
            name = None if id_index is None else row.fields[id_index].encode("latin-1")
            ids.append(None if name is None else name.decode(errors="replace"))
        first += len(block)
        offsets = np.full(len(numbers), -1, np.int64)
        yield _Batch(texts, np.array(numbers, np.int64), offsets, ids, first)
    yield _no_documents(options, first)


def _table_documents(part: Part, options: _Options) -> Iterator[Documents]:
    from millrace.text import tables

    with readable(part.source):
        status = os.stat(part.path)
    check_unchanged(part.source, status, part.identity)
    progress = _Progress(part)
    row = 0
    for rows in tables.read_rows(
        part.path, part.format, part.start, part.stop, options.keys, options.id_key, part.source
    ):
        count = len(rows.columns[0])
        texts, unused = _table_texts(rows.columns, options)
        for number, reason in unused.items():
            values = {
                key: column[number] for key, column in zip(options.keys, rows.columns, strict=True)
            }
            options.reject(row + number, -1, reason, _row_chunks(values))
        numbers = np.delete(np.arange(count, dtype=np.int64), [*unused])
        ids = [id_text(rows.ids[i]) if rows.ids else None for i in numbers]
        batch = _Batch(texts, row + numbers, np.full(len(numbers), -1, np.int64), ids, row + count)
        row += count
        yield progress.documents(batch, int(rows.share * (1 << 32)), 1 << 32)
    with readable(part.source):
        after = os.stat(part.path)
    check_unchanged(part.source, after, FileIdentity(status.st_size, status.st_mtime_ns))


def _table_texts(
    columns: list[list[Any]], options: _Options
) -> tuple[list[list[Text]], dict[int, str]]:
    """The texts of the rows, and the rows without a document, with the reason."""
    is_simple = all({*map(type, column)} == {str} for column in columns)
    if is_simple and not options.skip_empty:
        num_characters = max(len(text) for column in columns for text in column)
        if 4 * num_characters <= options.max_size:  # a character has at most 4 bytes
            return columns, {}
    texts: list[list[Text]] = [[] for _ in columns]
    unused = {}
    for number, values in enumerate(zip(*columns, strict=True)):
        try:
            row = [check_cell(value, key) for value, key in zip(values, options.keys, strict=True)]
            if any(_is_too_long(text, options.max_size) for text in row):
                raise BadDocumentError(_too_long("text", options))
            _check_not_empty(row, options)
        except BadDocumentError as error:
            unused[number] = str(error)
            continue
        for column, text in zip(texts, row, strict=True):
            column.append(text)
    return texts, unused


def _decoded(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BadDocumentError(
            f"byte {error.start + 1} of the text is not UTF-8 ({error.reason}). "
            "Convert the file to UTF-8"
        ) from None


def _is_too_long(text: Text, max_size: int) -> bool:
    """Whether texts have more bytes of UTF-8; a character has 1 to 4."""
    texts = [text] if isinstance(text, str) else text
    num_characters = sum(map(len, texts))
    if num_characters > max_size or 4 * num_characters <= max_size:
        return num_characters > max_size
    return sum(len(text.encode()) for text in texts) > max_size


def _row_chunks(values: dict[str, Any]) -> Iterator[bytes]:
    """A row as JSON, in pieces; bytes that are not UTF-8 become halves of surrogate pairs."""
    before = "{"
    for key, value in values.items():
        yield f"{before}{json.dumps(key)}: ".encode()
        before = ", "
        if isinstance(value, bytes):
            value = value.decode(errors="surrogateescape")
        if isinstance(value, str):
            yield b'"'
            for start in range(0, len(value), BLOCK_SIZE):
                yield json.dumps(value[start : start + BLOCK_SIZE])[1:-1].encode()
            yield b'"'
        else:
            yield json.dumps(value, default=_json_value).encode()
    yield b"}"


def _json_value(value: Any) -> str:
    return value.decode(errors="surrogateescape") if isinstance(value, bytes) else str(value)


def _check_not_empty(texts: Sequence[Text], options: _Options) -> None:
    if options.skip_empty and not any(
        text if isinstance(text, str) else any(text) for text in texts
    ):
        raise BadDocumentError("the document is empty")


def _reject_long(record: LongRecord, line: int, name: str, options: _Options) -> None:
    # The consumer may close what it gets; what is left of the record is skipped all the same.
    chunks = (chunk for chunk in record.chunks)
    options.reject(line, record.byte_offset, _too_long(name, options), chunks)


def _too_long(name: str, options: _Options) -> str:
    return (
        f"the {name} is longer than {options.max_size} bytes. Raise max_document_size, or remove it"
    )
