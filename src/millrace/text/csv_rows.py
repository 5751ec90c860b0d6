"""Rows of CSV and TSV files, read by Python's `csv`."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

from millrace.errors import TextError
from millrace.text.splitting import UTF8_BOM, read_size
from millrace.text.streams import ByteStream

_DELIMITERS = {"csv": ",", "tsv": "\t"}
_NO_QUOTE = "a quoted field has no closing quote. Close it, or double a quote that is text"


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


def csv_rows(
    stream: ByteStream, format_: str, max_size: int, block_size: int, *, has_header: bool
) -> Iterator[CsvRow]:
    """The rows of a stream, as `csv.reader` reads them; CR, LF and CRLF end a line.

    Args:
        stream: The bytes.
        format_: "csv" or "tsv".
        max_size: Size of the longest row in bytes. A longer one is read to its end, but is never
            in memory.
        block_size: Number of bytes to read at a time.
        has_header: Whether the stream begins with the source, so with a byte order mark perhaps.
    """
    csv.field_size_limit(sys.maxsize)  # of the whole process: 128 kB by default
    lines = _Lines(stream, max_size, block_size, UTF8_BOM if has_header else b"")
    reader = csv.reader(lines, delimiter=_DELIMITERS[format_])
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


def blocks_of(rows: Iterator[CsvRow], block_size: int) -> Iterator[list[CsvRow]]:
    """The rows in lists of about `block_size` bytes."""
    block: list[CsvRow] = []
    size = 0
    for row in rows:
        block.append(row)
        size += len(row.data)
        if size >= block_size:
            yield block
            block, size = [], 0
    if block:
        yield block


def read_header(rows: Iterator[CsvRow], source: str) -> tuple[tuple[str, ...], int]:
    """The names of the columns, and the number of rows that were read.

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
            return columns, number
    return (), number


def column_index(columns: tuple[str, ...], key: str, source: str) -> int:
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

    def __init__(self, stream: ByteStream, max_size: int, block_size: int, bom: bytes) -> None:
        self._max_size = max_size
        self._lines = self._split(stream, block_size, bom)
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

    def _split(self, stream: ByteStream, block_size: int, bom: bytes) -> Iterator[bytes]:
        rest = b""
        while data := stream.read(read_size(len(rest), self._max_size, block_size)):
            lines = (rest + data).splitlines(keepends=True)
            # A CR at the end may be the first half of a CRLF.
            rest = b"" if lines[-1].endswith(b"\n") else lines.pop()
            if lines:
                lines[0] = lines[0].removeprefix(bom)
                bom = b""
                yield from lines
            if len(rest) > self._max_size:  # of the row that the reader is in
                self.size += len(rest)
                rest = _outline(rest)
        if rest:
            yield rest.removeprefix(bom)


def _outline(line: bytes) -> bytes:
    """A shorter line, after which `csv.reader` is inside quotes if it were after the line: all
    quotes and line breaks, and the last byte before each, which may be a delimiter."""
    return re.sub(rb'[^"\r\n]+(?=[^"\r\n])', b"", line)
