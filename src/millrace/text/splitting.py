"""The records of a stream of bytes: lines, or texts between separators."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from millrace.text.streams import BLOCK_SIZE, ByteStream

UTF8_BOM = b"\xef\xbb\xbf"


class Records(NamedTuple):
    """Whole records.

    Attributes:
        byte_offset: Position of the first byte in the decompressed data.
        records: Records, each with the separator after it; only the last of a file may lack it.
    """

    byte_offset: int
    records: list[bytes]


@dataclass
class LongRecord:
    """A record that is longer than the limit; it is skipped when the next records are asked for.

    Attributes:
        byte_offset: Position of its first byte in the decompressed data.
        num_newlines: Number of line breaks in the record and its separator, once it is skipped.
    """

    byte_offset: int
    num_newlines: int = 0


def last_end(data: bytes, separator: bytes) -> int:
    """The position after the last whole record of data that begin with a record; or 0."""
    if not separator:
        return 0
    if len(separator) == 1:
        return data.rfind(separator) + 1
    # From left to right: separators such as "\n\n" may overlap themselves.
    return len(data) - len(data.split(separator)[-1])


def records_of(
    stream: ByteStream,
    separator: bytes,
    max_size: int,
    block_size: int = BLOCK_SIZE,
    byte_offset: int = 0,
) -> Iterator[Records | LongRecord]:
    """The records of a stream, in blocks of about `block_size` bytes.

    A byte order mark at the beginning of a source is left out, and counts in the offsets.

    Args:
        stream: The bytes.
        separator: Bytes after each record. Empty: all data are one record.
        max_size: Size from which a record is a `LongRecord`, unless a block holds all of it.
        block_size: Number of bytes to read at a time.
        byte_offset: Position of the stream's first byte in the source.
    """
    offset, data = _start(stream, block_size, byte_offset)
    while True:
        records, rest = _split(data, separator)
        if records:
            yield Records(offset, records)
            offset += len(data) - len(rest)
        if _num_inside(rest, separator) > max_size:
            record = LongRecord(offset)
            yield record
            size, record.num_newlines, data = _skip_record(stream, rest, separator, block_size)
            offset += size
            if data:
                continue
            rest = b""
        more = stream.read(read_size(len(rest), max_size, block_size))
        if not more:
            break
        data = rest + more
    if rest:
        yield Records(offset, [rest])


def _start(stream: ByteStream, block_size: int, byte_offset: int) -> tuple[int, bytes]:
    """The position of the first bytes, and these without a byte order mark."""
    data = b""
    if byte_offset == 0:
        while len(data) < len(UTF8_BOM) and (more := stream.read(block_size)):
            data += more
        if data.startswith(UTF8_BOM):
            return len(UTF8_BOM), data[len(UTF8_BOM) :]
    return byte_offset, data


def _split(data: bytes, separator: bytes) -> tuple[list[bytes], bytes]:
    """The whole records that data begin with, and the bytes after them."""
    if not separator:
        return [], data
    if separator == b"\n":
        records = io.BytesIO(data).readlines()  # three times as fast as `split`
        rest = b"" if not records or records[-1].endswith(b"\n") else records.pop()
        return records, rest
    *records, rest = data.split(separator)
    return [record + separator for record in records], rest


def _skip_record(
    stream: ByteStream, data: bytes, separator: bytes, block_size: int
) -> tuple[int, int, bytes]:
    """Reads to the end of a record that begins with `data`.

    Returns:
        The size of the record and its separator, the number of line breaks in them, and the bytes
        that were read after them.
    """
    size = num_newlines = 0
    while True:
        found = data.find(separator) if separator else -1
        more = b"" if found >= 0 else stream.read(block_size)
        end = found + len(separator) if found >= 0 else len(data)
        if more:
            end = _num_inside(data, separator)
        size += end
        num_newlines += data.count(b"\n", 0, end)
        data = data[end:] + more
        if not more:
            return size, num_newlines, data


def _num_inside(data: bytes, separator: bytes) -> int:
    """The number of bytes that are of a record for certain: the last may be of a separator."""
    return max(len(data) - max(len(separator) - 1, 0), 0)


def read_size(num_bytes: int, max_size: int, block_size: int) -> int:
    """Reads grow with a long record, so that its bytes are copied and searched few times."""
    return max(block_size, min(num_bytes, max_size - num_bytes + 1))
