"""CSV and TSV: blocks of whole records, and their fields.

The rules are those of Python's `csv` module: a field is quoted if it begins with a quote, quotes
inside are doubled, and a quoted field may have line breaks.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from millrace.errors import TextError
from millrace.text.records import is_unicode
from millrace.text.streams import Block, LongRecord

DELIMITERS = {"csv": ",", "tsv": "\t"}

_NOT_UTF8 = "a field is not UTF-8. Convert the file to UTF-8"

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

    fields: list[str]
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
            if record.fields:
                line += num_lines(block.data[: record.end])
                rest = Block(block.byte_offset + record.end, block.data[record.end :])
                rests = [rest] if rest.data else []
                return tuple(record.fields), line, itertools.chain(rests, blocks)
        line += num_lines(block.data)
    return (), line, blocks


def csv_records(data: bytes, format_: str) -> Iterator[CsvRecord]:
    """The records of a block; a blank line is a record without fields."""
    csv.field_size_limit(sys.maxsize)
    try:
        text = data.decode()
        problem = ""
    except UnicodeDecodeError:
        text = data.decode(errors="surrogateescape")
        problem = _NOT_UTF8
    lengths = np.fromiter(map(len, data.splitlines(keepends=True)), np.int64)
    ends = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=DELIMITERS[format_])
    line = 0
    while True:
        try:
            fields = next(reader)
            record_problem = ""
        except StopIteration:
            return
        except csv.Error as error:
            fields, record_problem = [], f"not valid CSV ({error})"
        if problem and not all(map(is_unicode, fields)):
            record_problem = problem
        end = reader.line_num
        if end == len(lengths) and CsvBoundary(format_).is_open(data[ends[line] :]):
            record_problem = "a quoted field has no closing quote"
        yield CsvRecord(fields, line, ends[line], ends[end], record_problem)
        line = end


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
    """The number of lines of whole records; "\\n", "\\r\\n" and "\\r" end a line."""
    return len(data.splitlines())


class CsvBoundary:
    """CSV records end at a line break outside quotes."""

    def __init__(self, format_: str) -> None:
        delimiter = DELIMITERS[format_].encode()
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

    def is_open(self, data: bytes) -> bool:
        """Whether data that begin with a record end inside quotes."""
        fields = self._fields(data)
        if not fields or fields[-1].end() < len(data):
            return False
        return not fields[-1][1]

    def _fields(self, data: bytes) -> list[re.Match[bytes]]:
        return list(self._quoted.finditer(data)) if b'"' in data else []
