"""CSV and TSV: rows as Python's `csv` reads them; the first names the columns."""

import csv
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

from millrace.errors import TextError
from millrace.text.documents import UTF8_BOM, Batch, Documents, Query, no_column, read_size
from millrace.text.json_values import BadDocumentError, decode_text
from millrace.text.parts import Format, InputFile, Part, Piece, Span, cut_pieces, open_part
from millrace.text.streams import BLOCK_SIZE, ByteStream

_NO_QUOTE = "a quoted field has no closing quote. Close it, or double a quote that is text"


class Csv(Format):
    """Rows of fields between delimiters; CR, LF and CRLF end a line.

    A piece of a file begins with the header. A row that is too long has none of its bytes there,
    but as many others, so that it is too long there, too.
    """

    unit = "row"
    # Up to 8 in the field that `csv` grows, two copies of the row, and the field as a str.
    unpacking_memory = 12

    def __init__(self, name: str, delimiter: str, endings: tuple[str, ...]) -> None:
        self.name, self._delimiter, self.endings = name, delimiter, endings

    def has_pieces(self, file: InputFile) -> bool:
        return True

    def read(self, part: Part, query: Query) -> Iterator[Documents]:
        batch, size = Batch(query, part.size), 0
        with open_part(part) as stream:
            rows = _rows(stream, self._delimiter, query.max_size, query.block_size)
            columns, number, _ = _read_header(rows, part.source)
            if columns:  # an empty file needs none
                for key in query.keys:
                    if columns.count(key) != 1:
                        raise no_column(part.source, key, columns)
                places = [*map(columns.index, query.keys)]
                id_place = columns.index(query.id_key) if query.id_key in columns else -1
            for row in rows:
                try:
                    if row.is_long:
                        query.reject_long(number, -1, "row")
                    elif row.problem or len(row.fields) not in (0, len(columns)):
                        raise BadDocumentError(
                            row.problem
                            or f"the row has {len(row.fields)} fields, and the header has "
                            f"{len(columns)}. Quote fields with separators or line breaks in them"
                        )
                    elif row.fields:
                        texts = [decode_text(row.fields[place]) for place in places]
                        id_ = row.fields[id_place].decode(errors="replace")
                        batch.add(texts, number, id_=id_ if id_place >= 0 else None)
                except BadDocumentError as error:
                    query.reject(number, -1, str(error), row.data)
                number += 1
                size += len(row.data)
                if size >= query.block_size:
                    yield batch.take(number, stream.position, stream.size)
                    size = 0
            yield batch.take(number, stream.position, stream.size)

    def unpack(
        self, file: InputFile, size: int, *, max_size: int, block_size: int
    ) -> Iterator[Piece]:
        def contents(stream: ByteStream) -> tuple[Iterator[Span], int, bytes]:
            rows = _rows(stream, self._delimiter, max_size, block_size)
            _, number, header = _read_header(rows, file.path)
            # Of two byte order marks, the second is a part of the header.
            return _spans(rows, max_size), number, UTF8_BOM + header

        return cut_pieces(file, size, contents)


class _Row(NamedTuple):
    """A row; without fields if it is blank."""

    fields: list[bytes]
    data: bytes  # with the line break; none of a row that is too long
    is_long: bool
    problem: str  # what else is wrong with it


def _spans(rows: Iterator[_Row], max_size: int) -> Iterator[Span]:
    """Rows, of which those that are too long have other bytes."""
    for row in rows:
        if row.is_long:
            for _ in range(max_size // BLOCK_SIZE + 1):
                yield Span(b"x" * BLOCK_SIZE, 0, 0, False)
            yield Span(b"\n", max_size, 1, True)
        else:
            yield Span(row.data, len(row.data), 1, True)


def _read_header(rows: Iterator[_Row], source: str) -> tuple[list[str], int, bytes]:
    """The names of the columns, the number of rows that were read, and the bytes of the header."""
    number = 0
    for number, row in enumerate(rows, start=1):
        problem = "it is too long. Is it a CSV file?" if row.is_long else row.problem
        if problem:
            raise TextError(f"{source}, row {number}, the header: {problem}")
        try:
            columns = [field.decode() for field in row.fields]
        except UnicodeDecodeError:
            raise TextError(
                f"{source}, row {number}: the header is not UTF-8. Convert the file to UTF-8"
            ) from None
        if columns:
            return columns, number, row.data
    return [], number, b""


def _rows(stream: ByteStream, delimiter: str, max_size: int, block_size: int) -> Iterator[_Row]:
    """The rows of a stream, with blank ones. A longer one than `max_size` bytes is read to its end,
    but is never in memory."""
    csv.field_size_limit(sys.maxsize)  # of the whole process: 128 kB by default
    data, size, has_ended = bytearray(), 0, False  # of the row, as far as it is not too long

    def lines() -> Iterator[str]:
        """Lines, of which `csv` asks for more while a quoted field is open."""
        nonlocal size, has_ended
        rest, mark = b"", UTF8_BOM
        while block := stream.read(read_size(len(rest), max_size, block_size)):
            pieces = (rest + block).splitlines(keepends=True)
            # A CR at the end may be the first half of a CRLF.
            rest = b"" if pieces[-1].endswith(b"\n") else pieces.pop()
            if pieces:
                pieces[0] = pieces[0].removeprefix(mark)
                mark = b""
                yield from map(taken, pieces)
            if len(rest) > max_size:  # of the row that the reader is in
                size += len(rest)
                rest = _outline(rest)
        if rest:
            yield taken(rest.removeprefix(mark))
        has_ended = True

    def taken(line: bytes) -> str:
        nonlocal size, data
        size += len(line)
        if size <= max_size:
            data += line
        else:
            data.clear()
            line = _outline(line) if b'"' in line else b""
        return line.decode("latin-1")

    reader = csv.reader(lines(), delimiter=delimiter)
    while True:
        data, size, problem = bytearray(), 0, ""
        try:
            fields = [field.encode("latin-1") for field in next(reader)]
        except StopIteration:
            return
        except csv.Error as error:  # before Python 3.11, of a zero byte
            fields, problem = [], f"the row cannot be read ({error})"
        yield _Row(fields, bytes(data), size > max_size, _NO_QUOTE if has_ended else problem)


def _outline(line: bytes) -> bytes:
    """A shorter line, after which `csv.reader` is inside quotes if it were after the line: all
    quotes and line breaks, and the last byte before each, which may be a delimiter."""
    return re.sub(rb'[^"\r\n]+(?=[^"\r\n])', b"", line)
