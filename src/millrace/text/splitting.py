"""The records of a stream of bytes: lines, or texts between separators."""

from __future__ import annotations

import io
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from millrace.text.streams import BLOCK_SIZE, ByteStream

UTF8_BOM = b"\xef\xbb\xbf"


@dataclass
class Block:
    """Whole records.

    Attributes:
        byte_offset: Position of the first byte in the decompressed data.
        data: Records, each with the separator after it; only the last of a file may lack it.
    """

    byte_offset: int
    data: bytes


@dataclass
class Lines:
    """Whole lines, each with its line break; only the last of a file may lack it.

    Attributes:
        byte_offset: Position of the first byte in the decompressed data.
        lines: The lines.
    """

    byte_offset: int
    lines: list[bytes]


@dataclass
class LongRecord:
    """A record that is longer than the limit, and is not in memory.

    Attributes:
        byte_offset: Position of its first byte in the decompressed data.
        chunks: Its bytes in pieces, without the separator. What is not taken from it before the
            next block is read, is skipped.
        size: Number of bytes with the separator; complete when the next block is read.
        num_newlines: Number of line breaks in those bytes; complete when the next block is read.
    """

    byte_offset: int
    chunks: Iterator[bytes]
    size: int = 0
    num_newlines: int = 0


def last_end(data: bytes, separator: bytes) -> int:
    """The position after the last whole record of data that begin with a record; or 0."""
    if not separator:
        return 0
    if len(separator) == 1:
        return data.rfind(separator) + 1
    # From left to right: separators such as "\n\n" may overlap themselves.
    return len(data) - len(data.split(separator)[-1])


def record_blocks(
    stream: ByteStream,
    separator: bytes,
    max_size: int,
    block_size: int = BLOCK_SIZE,
    byte_offset: int = 0,
) -> Iterator[Block | LongRecord]:
    """The records of a stream, in blocks of about `block_size` bytes.

    A byte order mark at the beginning of a source is left out, and counts in the offsets.

    Args:
        stream: The bytes.
        separator: Bytes after each record. Empty: all data are one record.
        max_size: Size from which a record is a `LongRecord`.
        block_size: Number of bytes to read at a time.
        byte_offset: Position of the stream's first byte in the source.
    """
    offset, data = _start(stream, block_size, byte_offset)
    while True:
        end = last_end(data, separator)
        if end:
            yield Block(offset, data[:end])
            offset += end
            data = data[end:]
        if _num_inside(data, separator) > max_size:
            record = LongRecord(offset, iter(()))
            data = yield from _skip_long_record(stream, data, separator, record, block_size)
            offset += record.size
            if data:
                continue
        more = stream.read(read_size(len(data), max_size, block_size))
        if not more:
            break
        data += more
    if data:
        yield Block(offset, data)


def line_blocks(
    stream: ByteStream, max_size: int, block_size: int = BLOCK_SIZE, byte_offset: int = 0
) -> Iterator[Lines | LongRecord]:
    """The same as `record_blocks` for lines, which are copied only once."""
    offset, data = _start(stream, block_size, byte_offset)
    rest = b""  # of a line
    while True:
        lines = io.BytesIO(data).readlines()  # three times as fast as `split`
        if lines:
            lines[0] = rest + lines[0]
            rest = b"" if lines[-1].endswith(b"\n") else lines.pop()
        if lines:
            yield Lines(offset, lines)
            offset += sum(map(len, lines))
        if len(rest) > max_size:
            record = LongRecord(offset, iter(()))
            data = yield from _skip_long_record(stream, rest, b"\n", record, block_size)
            offset += record.size
            rest = b""
            if data:
                continue
        data = stream.read(read_size(len(rest), max_size, block_size))
        if not data:
            break
    if rest:
        yield Lines(offset, [rest])


def _start(stream: ByteStream, block_size: int, byte_offset: int) -> tuple[int, bytes]:
    """The first bytes without a byte order mark, and their position."""
    data = b""
    if byte_offset == 0:
        while len(data) < len(UTF8_BOM) and (more := stream.read(block_size)):
            data += more
        if data.startswith(UTF8_BOM):
            return len(UTF8_BOM), data[len(UTF8_BOM) :]
    return byte_offset, data


def read_size(num_bytes: int, max_size: int, block_size: int) -> int:
    """Reads grow with a long record, so that its bytes are copied and searched few times."""
    return max(block_size, min(num_bytes, max_size - num_bytes + 1))


def _skip_long_record(
    stream: ByteStream, data: bytes, separator: bytes, record: LongRecord, block_size: int
) -> Generator[LongRecord, None, bytes]:
    """Yields the record, of which `data` are the first bytes; returns bytes that follow it."""
    tail: list[bytes] = []
    record.chunks = _long_record(stream, data, separator, record, tail, block_size)
    yield record
    for _ in record.chunks:
        pass
    return b"".join(tail)


def _long_record(
    stream: ByteStream,
    data: bytes,
    separator: bytes,
    record: LongRecord,
    tail: list[bytes],
    block_size: int,
) -> Iterator[bytes]:
    """The bytes of a record; bytes after its separator go to `tail`."""
    while True:
        end = data.find(separator) if separator else -1
        if end >= 0:
            after = end + len(separator)
            record.size += after
            record.num_newlines += data.count(b"\n", 0, after)
            tail.append(data[after:])
            if end > 0:
                yield data[:end]
            return
        more = stream.read(block_size)
        position = _num_inside(data, separator) if more else len(data)
        chunk, data = data[:position], data[position:] + more
        record.size += len(chunk)
        record.num_newlines += chunk.count(b"\n")
        if chunk:
            yield chunk
        if not more:
            return


def _num_inside(data: bytes, separator: bytes) -> int:
    """The number of bytes that are of a record for certain: the last may be of a separator."""
    return max(len(data) - max(len(separator) - 1, 0), 0)
