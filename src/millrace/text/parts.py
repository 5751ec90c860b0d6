"""Files cut into parts that tasks read: ranges of divisible files, unpacked pieces of others."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from millrace import checks
from millrace.errors import ConfigError
from millrace.text.inputs import TABLE_FORMATS, InputFile
from millrace.text.splitting import Block, record_blocks
from millrace.text.streams import BLOCK_SIZE, ByteStream, FileIdentity, open_stream

if TYPE_CHECKING:
    from millrace.text.csv_rows import CsvRow

CSV_FORMATS = ("csv", "tsv")

MAX_DOCUMENT_SIZE = 1 << 28
"""Size of the longest line, record or text that is read by default, in bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What a task reads of one file. All fields are plain JSON values.

    Attributes:
        path: Path of the file; "-" for standard input.
        format: Format, one of `millrace.text.inputs.FORMATS`.
        compression: Compression of the file.
        start: Start of the range: a byte of plain JSONL (the lines that begin in [start, stop)
            belong to the part), a row group of Parquet, or a record batch of an Arrow file.
        stop: End of the range, exclusive. None: the end of the file.
        size: Number of bytes on disk, about, for progress; 0 if it is not known.
        source: Path of the source in messages and provenance, which differs from `path` for an
            unpacked piece.
        byte_offset: Position of the file's byte 0 in the decompressed source.
        first_line: Number of the part's first line or CSV row, from 1, or other row, from 0. None:
            unknown.
        columns: Names of the columns of a CSV piece, which has no header.
        long_rows: Rows of a CSV piece, from 0, that were too long, and are not in it.
        file_size: Size of the file when the job was planned; None: not compared.
        mtime_ns: Time of the file's last change when the job was planned; None: not compared.
    """

    path: str
    format: str
    compression: str = ""
    start: int = 0
    stop: int | None = None
    size: int = 0
    source: str
    byte_offset: int = 0
    first_line: int | None
    columns: tuple[str, ...] | None = None
    long_rows: tuple[int, ...] = ()
    file_size: int | None = None
    mtime_ns: int | None = None

    def __post_init__(self) -> None:
        if self.columns is not None:  # a list, if it comes from JSON
            object.__setattr__(self, "columns", tuple(self.columns))
        object.__setattr__(self, "long_rows", tuple(self.long_rows))

    @property
    def unit(self) -> str:
        """What is counted: "row" or "line"."""
        return "row" if self.format in (*TABLE_FORMATS, *CSV_FORMATS) else "line"

    @property
    def identity(self) -> FileIdentity:
        """Size and time that the file must have."""
        return FileIdentity(self.file_size, self.mtime_ns)


@dataclass
class Piece:
    """Decompressed documents of a file that cannot be cut, to be written to a file.

    Attributes:
        part: How to read them: a part without a path. Its `size`, the bytes that were read of the
            source, is known when `chunks` are exhausted.
        chunks: Bytes of the piece. Those that are not taken before the next piece are skipped.
    """

    part: Part
    chunks: Iterator[bytes]


def parts_of(file: InputFile, size: int) -> list[Part]:
    """Consecutive parts of about `size` bytes on disk; one part of a file that cannot be cut.

    Raises:
        ConfigError: A size that is not a whole number above 0.
        TextError: A file that cannot be read or is damaged.
    """
    size = checks.whole("size", size, 1)
    if file.is_divisible and file.format == "jsonl":
        end = file.size or 0
        return [
            _part(
                file,
                start=start,
                stop=min(start + size, end),
                size=min(size, end - start),
                first_line=None if start else 1,
            )
            for start in range(0, end, size)
        ] or [_part(file)]
    if file.is_divisible:
        from millrace.text import tables

        return [
            _part(file, start=start, stop=stop, size=num_bytes, first_line=row)
            for start, stop, num_bytes, row in tables.ranges(file.path, file.format, size)
        ]
    return [_part(file)]


def _part(
    file: InputFile,
    *,
    start: int = 0,
    stop: int | None = None,
    size: int | None = None,
    first_line: int | None = -1,
) -> Part:
    if first_line == -1:
        first_line = 0 if file.format in TABLE_FORMATS else 1
    return Part(
        path=file.path,
        format=file.format,
        compression=file.compression,
        start=start,
        stop=stop,
        size=(file.size or 0) if size is None else size,
        source=file.path,
        first_line=first_line,
        file_size=file.size,
        mtime_ns=file.mtime_ns,
    )


def pieces_of(
    file: InputFile,
    size: int,
    *,
    separator: str | None = None,
    block_size: int = BLOCK_SIZE,
    max_document_size: int = MAX_DOCUMENT_SIZE,
) -> Iterator[Piece]:
    """The decompressed data of a file in pieces of about `size` bytes, cut between documents.

    Each piece holds whole lines, CSV rows, or texts with the separator after them; a plain text
    file without a separator is one piece. A file without documents has no piece.

    Args:
        file: JSONL, CSV, TSV or plain text. A pipe is read once.
        size: Size of a piece. The last is smaller; others are longer by up to `block_size`, or
            the length of their last document.
        separator: Text between the documents of a plain text file.
        block_size: Number of bytes to read and decompress at a time.
        max_document_size: Size of the longest CSV row in bytes; a longer one is left out.

    Raises:
        ConfigError: A file of another format, or a size that is not a whole number above 0.
        TextError: A file that cannot be read, is damaged or truncated, or was changed.
    """
    size = checks.whole("size", size, 1)
    if file.format in TABLE_FORMATS:
        raise ConfigError(f"{file.path} is a {file.format} file, which is read without unpacking")
    block_size = min(block_size, size)
    if file.format in CSV_FORMATS:
        return _csv_pieces(file, size, max_document_size, block_size)
    return _pieces_of(file, size, separator, block_size)


def _csv_pieces(
    file: InputFile, size: int, max_document_size: int, block_size: int
) -> Iterator[Piece]:
    from millrace.text.csv_rows import csv_rows, read_header

    with _open(file) as stream:
        rows = csv_rows(stream, file.format, max_document_size, block_size, has_header=True)
        columns, num_rows = read_header(rows, file.path)
        position = 0

        def chunks(piece: Piece, row: CsvRow | None) -> Iterator[bytes]:
            nonlocal num_rows, position
            first_row, num_bytes = num_rows, 0
            long_rows = []
            while row is not None:
                if row.is_long:
                    long_rows.append(num_rows - first_row)
                yield b"x\n" if row.is_long else row.data
                num_rows += 1
                num_bytes += len(row.data)
                row = next(rows, None) if num_bytes < size else None
            read, position = stream.position - position, stream.position
            piece.part = replace(piece.part, size=read, long_rows=tuple(long_rows))

        for row in rows:
            part = Part(
                path="",
                format=file.format,
                source=file.path,
                first_line=num_rows + 1,
                columns=columns,
            )
            yield from _whole_piece(part, functools.partial(chunks, row=row))


def _whole_piece(part: Part, chunks_of: Callable[[Piece], Iterator[bytes]]) -> Iterator[Piece]:
    piece = Piece(part, iter(()))
    rest = chunks_of(piece)
    # The consumer may close what it gets; the rest is skipped all the same.
    piece.chunks = (chunk for chunk in rest)
    yield piece
    for _ in rest:
        pass


def _open(file: InputFile) -> contextlib.AbstractContextManager[ByteStream]:
    identity = FileIdentity(file.size, file.mtime_ns)
    return open_stream(file.path, source=file.path, compression=file.compression, identity=identity)


def _pieces_of(
    file: InputFile, size: int, separator: str | None, block_size: int
) -> Iterator[Piece]:
    with _open(file) as stream:
        line = 1
        end_mark = b"\n" if file.format == "jsonl" else (separator or "").encode()
        blocks = record_blocks(stream, end_mark, BLOCK_SIZE, block_size)
        block = next(blocks, None)
        if block is None and file.format == "text" and not separator:
            block = Block(0, b"")  # an empty document
        position = 0

        def chunks(piece: Piece) -> Iterator[bytes]:
            nonlocal block, line, position
            num_bytes = 0
            while block is not None and num_bytes < size:
                if isinstance(block, Block):
                    yield block.data
                    num_bytes += len(block.data)
                    line += block.data.count(b"\n")
                else:
                    num_in_record = 0
                    for chunk in block.chunks:
                        yield chunk
                        num_in_record += len(chunk)
                    if block.size > num_in_record:
                        yield end_mark
                    num_bytes += block.size
                    line += block.num_newlines
                block = next(blocks, None)
            piece.part = replace(piece.part, size=stream.position - position)
            position = stream.position

        while block is not None:
            part = Part(
                path="",
                format=file.format,
                source=file.path,
                byte_offset=block.byte_offset,
                first_line=line,
            )
            yield from _whole_piece(part, chunks)
