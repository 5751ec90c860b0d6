"""The records of a stream of bytes: lines, texts between separators, or by another rule."""

from __future__ import annotations

import io
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Protocol

from millrace.text.streams import BLOCK_SIZE, ByteStream

_UTF8_BOM = b"\xef\xbb\xbf"


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


class Boundary(Protocol):
    """Where records end."""

    def last_end(self, data: bytes) -> int:
        """The position after the last whole record of data that begin with a record; or 0."""
        ...

    def first_end(self, data: bytes) -> tuple[int, int] | None:
        """The end of the first record, without and with its separator; None if it is not there."""
        ...

    def keep(self, data: bytes) -> tuple[int, bytes]:
        """How to look for the end of a record of which `data`, in which it is not, are a part.

        Returns:
            The position from which the data are looked at again, and bytes to put before them.
        """
        ...


class Separator:
    """Records that end with a separator. Without one, all data are one record."""

    def __init__(self, separator: bytes) -> None:
        self._separator = separator

    def last_end(self, data: bytes) -> int:
        separator = self._separator
        if not separator:
            return 0
        if len(separator) == 1:
            return data.rfind(separator) + 1
        # From left to right: separators such as "\n\n" may overlap themselves.
        return len(data) - len(data.split(separator)[-1])

    def first_end(self, data: bytes) -> tuple[int, int] | None:
        end = data.find(self._separator) if self._separator else -1
        return None if end < 0 else (end, end + len(self._separator))

    def keep(self, data: bytes) -> tuple[int, bytes]:
        return max(len(data) - max(len(self._separator) - 1, 0), 0), b""


def record_blocks(
    stream: ByteStream,
    boundary: Boundary,
    max_size: int,
    block_size: int = BLOCK_SIZE,
    byte_offset: int = 0,
) -> Iterator[Block | LongRecord]:
    """The records of a stream, in blocks of about `block_size` bytes.

    A byte order mark at the beginning of a source is left out, and counts in the offsets.

    Args:
        stream: The bytes.
        boundary: Where records end.
        max_size: Size from which a record is a `LongRecord`.
        block_size: Number of bytes to read at a time.
        byte_offset: Position of the stream's first byte in the source.
    """
    offset, data = _start(stream, block_size, byte_offset)
    while True:
        end = boundary.last_end(data)
        if end:
            yield Block(offset, data[:end])
            offset += end
            data = data[end:]
        # The last bytes may be of the separator.
        if len(data) > max_size and boundary.keep(data)[0] > max_size:
            record = LongRecord(offset, iter(()))
            data = yield from _skip_long_record(stream, data, boundary, record, block_size)
            offset += record.size
            if data:
                continue
        more = stream.read(_read_size(len(data), max_size, block_size))
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
            data = yield from _skip_long_record(stream, rest, Separator(b"\n"), record, block_size)
            offset += record.size
            rest = b""
            if data:
                continue
        data = stream.read(_read_size(len(rest), max_size, block_size))
        if not data:
            break
    if rest:
        yield Lines(offset, [rest])


def _start(stream: ByteStream, block_size: int, byte_offset: int) -> tuple[int, bytes]:
    """The first bytes without a byte order mark, and their position."""
    data = b""
    if byte_offset == 0:
        while len(data) < len(_UTF8_BOM) and (more := stream.read(block_size)):
            data += more
        if data.startswith(_UTF8_BOM):
            return len(_UTF8_BOM), data[len(_UTF8_BOM) :]
    return byte_offset, data


def _read_size(num_bytes: int, max_size: int, block_size: int) -> int:
    """Reads grow with a long record, so that its bytes are copied and searched few times."""
    return max(block_size, min(num_bytes, max_size - num_bytes + 1))


def _skip_long_record(
    stream: ByteStream, data: bytes, boundary: Boundary, record: LongRecord, block_size: int
) -> Generator[LongRecord, None, bytes]:
    """Yields the record, of which `data` are the first bytes; returns bytes that follow it."""
    tail: list[bytes] = []
    record.chunks = _long_record(stream, data, boundary, record, tail, block_size)
    yield record
    for _ in record.chunks:
        pass
    return b"".join(tail)


def _long_record(
    stream: ByteStream,
    data: bytes,
    boundary: Boundary,
    record: LongRecord,
    tail: list[bytes],
    block_size: int,
) -> Iterator[bytes]:
    """The bytes of a record; bytes after its separator go to `tail`."""
    num_added = 0  # bytes at the beginning of `data` that are not of the file
    while True:
        ends = boundary.first_end(data)
        if ends:
            end, after = ends
            record.size += after - num_added
            record.num_newlines += data.count(b"\n", num_added, after)
            tail.append(data[after:])
            if end > num_added:
                yield data[num_added:end]
            return
        more = stream.read(block_size)
        position, added = boundary.keep(data) if more else (len(data), b"")
        chunk = data[num_added:position]
        data = added + data[max(position, num_added) :] + more
        num_added = len(added)
        record.size += len(chunk)
        record.num_newlines += chunk.count(b"\n")
        if chunk:
            yield chunk
        if not more:
            return
