"""The records of a stream of bytes: lines, or texts between separators."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from millrace.text.streams import ByteStream

UTF8_BOM = b"\xef\xbb\xbf"


class Records(NamedTuple):
    """Whole records from a byte of the decompressed data on, each with the separator after it;
    only the last of a file may lack it."""

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
    stream: ByteStream, separator: bytes, max_size: int, block_size: int, byte_offset: int
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
    data, offset = b"", byte_offset
    if byte_offset == 0:
        while len(data) < len(UTF8_BOM) and (more := stream.read(block_size)):
            data += more
        offset = len(UTF8_BOM) * data.startswith(UTF8_BOM)
        data = data[offset:]
    long: LongRecord | None = None
    while True:
        records, rest = _split(data, separator)
        end = offset + len(data) - len(rest)
        if records and long is not None:
            long.num_newlines += records[0].count(b"\n")
            offset += len(records.pop(0))
            long = None
        if records:
            yield Records(offset, records)
        offset = end
        # The last bytes may be the start of a separator.
        inside = max(len(rest) - max(len(separator) - 1, 0), 0)
        if long is None and inside > max_size:
            long = LongRecord(offset)
            yield long
        if long is not None:
            long.num_newlines += rest.count(b"\n", 0, inside)
            offset, rest = offset + inside, rest[inside:]
        more = stream.read(read_size(len(rest), max_size, block_size))
        if not more:
            break
        data = rest + more
    if long is not None:
        long.num_newlines += rest.count(b"\n")
    elif rest:
        yield Records(offset, [rest])


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


def read_size(num_bytes: int, max_size: int, block_size: int) -> int:
    """Reads grow with a long record, so that its bytes are copied and searched few times."""
    return max(block_size, min(num_bytes, max_size - num_bytes + 1))
