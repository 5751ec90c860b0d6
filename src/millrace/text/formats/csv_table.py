"""CSV and TSV: rows as Python's `csv` reads them; the first names the columns."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from millrace.errors import TextError
from millrace.text.documents import Batch, Documents, Query
from millrace.text.parts import Format, InputFile, Part, Piece, open_part
from millrace.text.records import BadDocumentError, decode_text
from millrace.text.splitting import UTF8_BOM, read_size
from millrace.text.streams import BLOCK_SIZE, ByteStream

_NO_QUOTE = "a quoted field has no closing quote. Close it, or double a quote that is text"


class Csv(Format):
    """Rows of fields between delimiters; CR, LF and CRLF end a line.

    A piece of a file begins with the header. A row that is too long has none of its bytes there,
    but as many others, so that it is too long there, too.

    Args:
        name: Name of the format.
        delimiter: Character between two fields.
        endings: Endings of file names that tell the format.
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
            rows = self._rows(stream, query.max_size, query.block_size)
            columns, number, _ = _read_header(rows, part.source)
            if columns:  # an empty file needs none
                places = [_place_of(columns, key, part.source) for key in query.keys]
                id_place = columns.index(query.id_key) if query.id_key in columns else None
            for row in rows:
                try:
                    if row.is_long:
                        query.reject_long(number, -1, "row")
                    elif row.is_document(len(columns)):
                        texts = [decode_text(row.field(place)) for place in places]
                        id_ = None if id_place is None else row.field(id_place)
                        name = None if id_ is None else id_.decode(errors="replace")
                        batch.add(texts, number, id_=name)
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
        with open_part(file.part()) as stream:
            rows = self._rows(stream, max_size, block_size)
            _, number, header = _read_header(rows, file.path)
            row, position = next(rows, None), 0

            def chunks(piece: Piece) -> Iterator[bytes]:
                nonlocal row, number, position
                # Of two byte order marks, the second is a part of the header.
                yield UTF8_BOM + header
                num_bytes = 0
                while row is not None and num_bytes < size:
                    if row.is_long:
                        yield from (b"x" * BLOCK_SIZE for _ in range(max_size // BLOCK_SIZE + 1))
                        yield b"\n"
                    yield row.data
                    number += 1
                    num_bytes += max_size if row.is_long else len(row.data)
                    row = next(rows, None)
                piece.part = replace(piece.part, size=stream.position - position)
                position = stream.position

            while row is not None:
                # The header is the row before the first.
                yield Piece.of(file, chunks, first_line=number)

    def _rows(self, stream: ByteStream, max_size: int, block_size: int) -> Iterator[CsvRow]:
        """The rows of a stream, with blank ones.

        Args:
            stream: The bytes.
            max_size: Size of the longest row in bytes. A longer one is read to its end, but is
                never in memory.
            block_size: Number of bytes to read at a time.
        """
        csv.field_size_limit(sys.maxsize)  # of the whole process: 128 kB by default
        lines = _Lines(stream, max_size, block_size)
        reader = csv.reader(lines, delimiter=self._delimiter)
        while True:
            lines.data, lines.size = bytearray(), 0
            problem = ""
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:  # before Python 3.11, of a zero byte
                fields, problem = [], f"the row cannot be read ({error})"
            if lines.has_ended:
                problem = _NO_QUOTE
            yield CsvRow(fields, bytes(lines.data), lines.size > max_size, problem)


class CsvRow(NamedTuple):
    """A row; without fields if it is blank.

    Attributes:
        fields: Values of its columns; a character stands for each byte (Latin-1).
        data: Bytes of the row with its line break; none of a row that is too long.
        is_long: Whether the row is longer than the limit.
        problem: What else is wrong with it; empty if nothing is.
    """

    fields: list[str]
    data: bytes
    is_long: bool
    problem: str

    def is_document(self, num_columns: int) -> bool:
        """False for a blank line; BadDocumentError for a row that cannot be used."""
        if self.problem:
            raise BadDocumentError(self.problem)
        if self.fields and len(self.fields) != num_columns:
            raise BadDocumentError(
                f"the row has {len(self.fields)} fields, and the header has {num_columns}. "
                "Quote fields with separators or line breaks in them"
            )
        return bool(self.fields)

    def field(self, place: int) -> bytes:
        """The bytes of a field."""
        return self.fields[place].encode("latin-1")


def _read_header(rows: Iterator[CsvRow], source: str) -> tuple[tuple[str, ...], int, bytes]:
    """The names of the columns, the number of rows that were read, and the bytes of the header.

    Raises:
        TextError: A header that is not UTF-8, or too long, or has an open quote.
    """
    number = 0
    for number, row in enumerate(rows, start=1):
        problem = "it is too long. Is it a CSV file?" if row.is_long else row.problem
        if problem:
            raise TextError(f"{source}, row {number}, the header: {problem}")
        try:
            columns = tuple(field.encode("latin-1").decode() for field in row.fields)
        except UnicodeDecodeError:
            raise TextError(
                f"{source}, row {number}: the header is not UTF-8. Convert the file to UTF-8"
            ) from None
        if columns:
            return columns, number, row.data
    return (), number, b""


def _place_of(columns: tuple[str, ...], key: str, source: str) -> int:
    """The place of a column; TextError unless there is one of that name."""
    if columns.count(key) != 1:
        names = ", ".join(columns[:10]) or "none"
        raise TextError(
            f'{source} has {columns.count(key)} columns "{key}"; its columns are: {names}. '
            "Name the text's column with --json-keys"
        )
    return columns.index(key)


class _Lines:
    """Lines for `csv.reader`, which asks for more of them while a quoted field is open.

    Attributes:
        data, size: Lines of the row, as far as it is not too long, and their size in bytes. A list
            of short lines would take 50 times their size.
        has_ended: Whether the reader has asked for a line after the last.
    """

    def __init__(self, stream: ByteStream, max_size: int, block_size: int) -> None:
        self._max_size = max_size
        self._lines = self._split(stream, block_size)
        self.data = bytearray()
        self.size = 0
        self.has_ended = False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines, None)
        if line is None:
            self.has_ended = True
            raise StopIteration
        self.size += len(line)
        if self.size <= self._max_size:
            self.data += line
        else:
            self.data.clear()
            line = _outline(line) if b'"' in line else b""
        return line.decode("latin-1")

    def _split(self, stream: ByteStream, block_size: int) -> Iterator[bytes]:
        rest, mark = b"", UTF8_BOM
        while data := stream.read(read_size(len(rest), self._max_size, block_size)):
            lines = (rest + data).splitlines(keepends=True)
            # A CR at the end may be the first half of a CRLF.
            rest = b"" if lines[-1].endswith(b"\n") else lines.pop()
            if lines:
                lines[0] = lines[0].removeprefix(mark)
                mark = b""
                yield from lines
            if len(rest) > self._max_size:  # of the row that the reader is in
                self.size += len(rest)
                rest = _outline(rest)
        if rest:
            yield rest.removeprefix(mark)


def _outline(line: bytes) -> bytes:
    """A shorter line, after which `csv.reader` is inside quotes if it were after the line: all
    quotes and line breaks, and the last byte before each, which may be a delimiter."""
    return re.sub(rb'[^"\r\n]+(?=[^"\r\n])', b"", line)
