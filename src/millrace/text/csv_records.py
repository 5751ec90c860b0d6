"""CSV and TSV: blocks of whole records, and their fields.

The rules are those of Python's `csv` module: a field is quoted if it begins with a quote, quotes
inside are doubled, and a quoted field may have line breaks.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

from millrace.errors import TextError
from millrace.text.splitting import Block, LongRecord

DELIMITERS = {"csv": b",", "tsv": b"\t"}

_DELIMITERS = frozenset(DELIMITERS.values())
_NO_QUOTE = "a quoted field has no closing quote. Close it, or double a quote that is text"

_Blocks = Iterator[Block | LongRecord]


class CsvRecord(NamedTuple):
    """A record.

    Attributes:
        fields: Values of its columns.
        line: Number of its first line in the block, from 0.
        byte_offset: Position of its first byte in the block.
        end: Position after its last byte in the block.
        problem: What is wrong with it; empty if nothing is.
    """

    fields: list[bytes]
    line: int
    byte_offset: int
    end: int
    problem: str = ""


def split_header(
    blocks: _Blocks, source: str, format_: str
) -> tuple[tuple[str, ...], int, _Blocks]:
    """The names of the columns, the number of the next line, from 1, and the blocks after them.

    Raises:
        TextError: A header line that is not UTF-8, or too long.
    """
    line = 1
    for block in blocks:
        if isinstance(block, LongRecord):
            raise TextError(
                f"{source}, line {line}: the header line is too long. Is it a CSV file?"
            )
        for record in csv_records(block.data, format_):
            if record.problem:
                raise TextError(f"{source}, line {line + record.line}: {record.problem}")
            try:
                columns = tuple(field.decode() for field in record.fields)
            except UnicodeDecodeError:
                raise TextError(
                    f"{source}, line {line + record.line}: the header line is not UTF-8. Convert "
                    "the file to UTF-8"
                ) from None
            line += num_lines(block.data[: record.end])
            rest = Block(block.byte_offset + record.end, block.data[record.end :])
            return columns, line, itertools.chain([rest] if rest.data else [], blocks)
        line += num_lines(block.data)
    return (), line, blocks


def csv_records(data: bytes, format_: str) -> Iterator[CsvRecord]:
    """The records of a block that are not blank."""
    fields: list[bytes] = []
    line = start = num_breaks = 0
    for match in _field_pattern(format_).finditer(data):
        quoted, quote, rest, end = match.groups()
        if quoted is None:
            field = rest
        else:
            field = quoted.replace(b'""', b'"') + rest
            num_breaks += num_lines(quoted)
        if end in _DELIMITERS:
            fields.append(field)
            continue
        if fields or field or quoted is not None:  # else a blank line, or the end of the data
            fields.append(field)
            problem = _NO_QUOTE if quoted is not None and not quote else ""
            yield CsvRecord(fields, line, start, match.end(), problem)
            fields = []
        line += 1 + num_breaks
        start, num_breaks = match.end(), 0


def column_index(columns: tuple[str, ...], key: str, source: str) -> int:
    """The place of a column; TextError unless there is one of that name."""
    if columns.count(key) != 1:
        names = ", ".join(columns[:10]) or "none"
        raise TextError(
            f'{source} has {columns.count(key)} columns "{key}"; its columns are: {names}. '
            "Name the text's column with --json-keys"
        )
    return columns.index(key)


def num_lines(data: bytes) -> int:
    """The number of line breaks: "\\n", "\\r\\n" and "\\r"."""
    count = data.count(b"\n")
    if b"\r" in data:
        count += data.count(b"\r") - data.count(b"\r\n")
    return count


@functools.cache
def _field_pattern(format_: str) -> re.Pattern[bytes]:
    """A field: quoted text, its closing quote, what follows or stands without quotes, the end."""
    unquoted = rb"[^\r\n%s]*" % DELIMITERS[format_]
    return re.compile(
        rb'(?:"([^"]*(?:""[^"]*)*)("?))?(%s)(%s|\r\n|\r|\n|\Z)' % (unquoted, DELIMITERS[format_])
    )


class CsvBoundary:
    """CSV records end at a line break outside quotes."""

    def __init__(self, format_: str) -> None:
        delimiter = DELIMITERS[format_]
        # A quoted field, or its beginning: then the last group is empty.
        self._quoted = re.compile(rb'(?<![^\r\n%s])"[^"]*(?:""[^"]*)*("?)' % delimiter)

    def last_end(self, data: bytes) -> int:
        stop = len(data)
        for field in reversed(self._fields(data)):
            # A quote at the very end may be the first of two.
            if field[1] and field.end() < len(data):
                newline = data.rfind(b"\n", field.end(), stop)
                if newline >= 0:
                    return newline + 1
            stop = field.start()
        return data.rfind(b"\n", 0, stop) + 1

    def first_end(self, data: bytes) -> tuple[int, int] | None:
        start = 0
        for field in self._fields(data):
            newline = data.find(b"\n", start, field.start())
            if newline >= 0:
                return newline + 1, newline + 1
            start = field.end()
            if not field[1] or start == len(data):
                return None
        newline = data.find(b"\n", start)
        return None if newline < 0 else (newline + 1, newline + 1)

    def keep(self, data: bytes) -> tuple[int, bytes]:
        fields = self._fields(data)
        if not fields or (fields[-1][1] and fields[-1].end() < len(data)):
            return len(data) - 1, b"x"  # outside quotes; the last byte may be a delimiter
        after_quote = fields[-1].start() + 1
        return max(after_quote, len(data.rstrip(b'"'))), b'"'

    def _fields(self, data: bytes) -> list[re.Match[bytes]]:
        return list(self._quoted.finditer(data)) if b'"' in data else []
