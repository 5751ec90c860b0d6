"""Input files, their formats, and the parts and pieces of files that tasks read."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from millrace import checks
from millrace.errors import TextError
from millrace.files import readable
from millrace.text import streams
from millrace.text.documents import MAX_DOCUMENT_SIZE, Documents, Query


@runtime_checkable
class Format(Protocol):
    """A format of input files, which says how to read a part of one.

    A format of your own is a subclass with a name and a method `read`. Its files can be compressed
    and pipes; each is one part, unless `cut` or `pieces_of` divides it. Instances must be
    picklable: they go to worker processes.

    Attributes:
        name: Name of the format in messages.
        endings: Endings of file names that tell the format, such as ".jsonl".
        unit: What is counted, "line" or "row".
        first_line: Number of a file's first line or row.
        needs_file: Whether only regular files without a compression can be read.
        is_cut_at_lines: Whether the parts of a plain file hold the lines that begin in their range.
        unpacking_memory: Bytes of memory that `pieces_of` takes per byte of the longest document.
    """

    name: str
    endings: tuple[str, ...] = ()
    unit: str = "line"
    first_line: int = 1
    needs_file: bool = False
    is_cut_at_lines: bool = False
    unpacking_memory: int = 0
    _separator: bytes = b""  # after a document; `pieces_of` cuts there

    def matches(self, first_bytes: bytes) -> bool:
        """Whether a file that begins with these bytes has the format, whatever its name."""
        return False

    def read(self, part: Part, query: Query) -> Iterator[Documents]:
        """The documents of a part, in order, in batches.

        The last batch may have no documents: it counts the lines after the last document.
        """

    def cut(self, file: InputFile, size: int) -> Iterator[Part]:
        """Consecutive parts of about `size` bytes on disk; by default the whole file."""
        yield file.part()

    def first_line_of(self, part: Part) -> int:
        """The number of a part's first line or row, where `cut` did not know it."""
        return self.first_line

    def has_pieces(self, file: InputFile) -> bool:
        """Whether `pieces_of` divides a file that `cut` does not."""
        return False

    def spans(
        self, stream: streams.ByteStream, file: InputFile, max_size: int, block_size: int
    ) -> tuple[Iterator[Span], int, bytes]:
        """The bytes of a file that pieces have, the number of the first line or row in them, and
        bytes at the start of each piece."""
        return _spans(stream, self._separator, block_size), self.first_line, b""


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """A file that holds documents.

    Attributes:
        path: Path of the file; "-" for standard input.
        format: Format of the decompressed file.
        compression: "gzip", "zstd", "bz2", "xz", or empty, as the first bytes tell. Empty for a
            pipe, whose compression shows when it is read.
        size: Size on disk in bytes; None for a pipe.
        mtime_ns: Time of the last change; None for a pipe.
    """

    path: str
    format: Format
    compression: str = ""
    size: int | None
    mtime_ns: int | None

    @property
    def is_pipe(self) -> bool:
        return self.size is None

    def part(self, start: int = 0, stop: int | None = None, **fields: Any) -> Part:
        """A part of the file with some fields of `Part`; by default the whole file."""
        whole = {"size": self.size or 0, "first_line": self.format.first_line, "source": self.path}
        return Part(file=self, start=start, stop=stop, **{**whole, **fields})


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What a task reads of one file.

    Attributes:
        file: The file, with its size and time when the job was planned; None: not compared.
        start: Start of the range: a byte of plain JSONL (the lines that begin in [start, stop)
            belong to the part), a row group of Parquet, or a record batch of an Arrow file.
        stop: End of the range, exclusive. None: the end of the file.
        size: Number of bytes on disk, about, for progress; 0 if not known.
        source: Path in messages and provenance, which is not the file's for an unpacked piece.
        byte_offset: Position of the file's byte 0 in the decompressed source.
        first_line: Number of the part's first line or row, as its format counts; None: unknown.
    """

    file: InputFile
    start: int = 0
    stop: int | None = None
    size: int = 0
    source: str
    byte_offset: int = 0
    first_line: int | None


Span = tuple[bytes, int, bool]
"""Some bytes of a stream, how many lines or rows end in them, and whether a piece may end there."""


@dataclass
class Piece:
    """Decompressed documents of a file that cannot be cut, to be written to a file.

    Attributes:
        part: Part of a file without a path. Its `size`, the bytes that were read of the source, is
            known when `chunks` are exhausted.
        chunks: Bytes of the piece, which must be read before the next piece.
    """

    part: Part
    chunks: Iterator[bytes]


def parts_of(file: InputFile, size: int) -> list[Part]:
    """Consecutive parts of about `size` bytes on disk; one part of a file that cannot be cut."""
    return list(file.format.cut(file, checks.check_int("size", size, 1)))


def pieces_of(
    file: InputFile, size: int, *, max_document_size: int = MAX_DOCUMENT_SIZE
) -> Iterator[Piece]:
    """The decompressed data of a file in pieces of about `size` bytes, cut between documents.

    A plain text file without a separator is one piece. A file without documents has no piece.

    Args:
        file: File to read, once and from start to end.
        size: Size of a piece. The last is smaller; others are longer by up to 256 kB, or their last
            document.
        max_document_size: Size of the longest CSV row in bytes.

    Raises:
        TextError: A file that cannot be read, or a longer CSV row.
    """
    block_size = min(streams.BLOCK_SIZE, checks.check_int("size", size, 1))
    unpacked = InputFile(path="", format=file.format, size=None, mtime_ns=None)
    with open_part(file.part()) as stream:
        spans, line, header = file.format.spans(stream, file, max_document_size, block_size)
        span, byte_offset, position = next(spans, None), 0, 0

        def chunks(piece: Piece) -> Iterator[bytes]:
            nonlocal span, byte_offset, line
            yield header
            num_bytes, is_end = 0, False
            while span is not None and not (is_end and num_bytes >= size):
                data, num_lines, is_end = span
                yield data
                line, num_bytes = line + num_lines, num_bytes + len(data)
                span = next(spans, None)
            byte_offset += 0 if header else num_bytes
            piece.part = replace(piece.part, size=stream.position - position)

        while span is not None:
            part = unpacked.part(first_line=line, byte_offset=byte_offset, source=file.path)
            piece = Piece(part, iter(()))
            piece.chunks = chunks(piece)
            yield piece
            position = stream.position


def read_documents(part: Part, query: Query) -> Iterator[Documents]:
    """The documents of a part, in order.

    A line that cannot be used is not JSON in UTF-8, has no text under a key, has half of a
    surrogate pair, or is longer than the limit. It goes to the query's `reject`, and reading goes
    on: but not after a CSV row beyond the limit.

    Raises:
        ConfigError: A key that the format does not have.
        TextError: A file that cannot be read, is damaged or truncated, or was changed; a table
            without a column for a key; a CSV row beyond the limit.
    """
    batches = part.file.format.read(part, query)
    return (batch for batch in batches if batch.ids or batch.num_lines or batch.num_bytes)


def first_line_of(part: Part) -> int:
    """The number of a part's first line or row; those before it are counted if need be."""
    return part.file.format.first_line_of(part) if part.first_line is None else part.first_line


@contextlib.contextmanager
def open_part(part: Part) -> Iterator[streams.ByteStream]:
    """The decompressed bytes of a part; TextError if the file is damaged or was changed."""
    with readable(part.source):
        file = streams.open_path(part.file.path)
    with file, unchanged(part, file) as size:
        raw, compression = streams.RawFile(file, part.source, size), part.file.compression
        if size is None:  # a pipe is never sought: its first bytes tell
            compression = streams.compression_of(raw.peek(streams.NUM_MAGIC_BYTES))
        if not compression and (part.start or part.stop is not None):
            raw.seek_lines(part.start, sys.maxsize if part.stop is None else part.stop)
        yield streams.Decompressed(raw, compression) if compression else raw


@contextlib.contextmanager
def unchanged(part: Part, file: Any = None) -> Iterator[int | None]:
    """Checks that a part's file is as planned, and stays so until the block ends. Gives the size of
    a regular file; None of others, whose size and time say nothing."""

    def check(size: int | None, mtime_ns: int | None) -> Any:
        with readable(part.source):
            status = streams.status_of(part.file.path, file)
        if size is not None and status.st_size != size:
            change = f"has {status.st_size} bytes, and had {size} before: it was changed"
        elif mtime_ns is not None and status.st_mtime_ns != mtime_ns:
            change = "was written to"
        else:
            return status
        raise TextError(
            f"{part.source} {change} while the job was running. Run again when the file is complete"
        )

    status = check(part.file.size, part.file.mtime_ns)
    is_regular = streams.is_regular(part.file.path, status)
    yield status.st_size if is_regular else None
    if is_regular:
        check(status.st_size, status.st_mtime_ns)


def _spans(stream: streams.ByteStream, separator: bytes, block_size: int) -> Iterator[Span]:
    """The bytes of a stream up to the last separator of each block, and after it."""
    tail = b""  # may be the start of a separator
    if not separator:
        yield b"", 0, False  # a file that is one record may be empty
    while data := stream.read(block_size):
        window = tail + data
        # From left to right: separators such as "\n\n" may overlap themselves.
        rest = window.split(separator)[-1] if separator else window
        end = len(data) - len(rest) if len(rest) < len(window) else 0
        for chunk, is_end in ((data[:end], True), (data[end:], False)):
            if chunk:
                yield chunk, chunk.count(b"\n"), is_end
        tail = rest[max(len(rest) - len(separator) + 1, 0) :]
