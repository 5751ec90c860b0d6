"""Bytes of one file or pipe, plain or compressed."""

import contextlib
import importlib
import io
import os
import re
import stat
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Protocol

from millrace.checks import package
from millrace.errors import TextError
from millrace.files import readable
from millrace.storage import LOCAL, SequentialStream, storage_of

BLOCK_SIZE = 1 << 18
"""Bytes that are read and decompressed at a time: 1 MB does not fit a core's cache, and short
documents in it are parsed at 0.7 of the speed."""

STDIN = "-"
"""The path that means standard input."""

NUM_MAGIC_BYTES = 10
"""Number of bytes that tell every compression."""

_OF_A_PROCESS = re.compile(r"-\Z|/dev/(stdin|fd/)|/proc/(self|thread-self)/")
_MAGIC = re.compile(
    rb"(?P<gzip>\x1f\x8b)"
    rb"|(?P<zstd>\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18)"  # a frame, or one without text
    rb"|(?P<xz>\xfd7zXZ\x00)"
    rb"|(?P<bz2>BZh.(?:\x31\x41\x59\x26\x53\x59|\x17\x72\x45\x38\x50\x90))",  # a block, or none
    re.DOTALL,
)
_INPUT_SIZE = 1 << 17  # compressed bytes that are read at a time


class ByteStream(Protocol):
    """Decompressed bytes.

    Attributes:
        position: Number of bytes on disk that have been read, of the range if any.
        size: Number of bytes on disk to read; None for a pipe.
        first_byte: Position of the first byte in the decompressed file.
    """

    position: int = 0
    size: int | None
    first_byte: int = 0

    def read(self, size: int, /) -> bytes:
        """At least one byte and about `size`; no bytes only at the end."""


def compression_of(first_bytes: bytes) -> str:
    """The compression of a file that begins with `first_bytes`; empty for none.

    >>> compression_of(bytes.fromhex("1f8b08000000")), compression_of(b'{"text": "a"}')
    ('gzip', '')
    """
    match = _MAGIC.match(first_bytes)
    return (match.lastgroup or "") if match else ""


def is_regular(path: str, status: Any) -> bool:
    """Whether a path with this status is a file, for which its name stands in any process."""
    return stat.S_ISREG(status.st_mode) and not _OF_A_PROCESS.match(path)


def open_path(path: str) -> Any:
    """A file, an object, or standard input, which stays open when this is closed."""
    if is_remote(path):
        return SequentialStream(storage_of(path).open(path, "file"))
    is_stdin = path == STDIN
    return open(0 if is_stdin else path, "rb", buffering=0, closefd=not is_stdin)


def is_remote(path: str) -> bool:
    return path != STDIN and storage_of(path) is not LOCAL


def status_of(path: str, file: Any = None) -> Any:
    """The status of a path or open file, as `os.stat` gives it; of an object, a part of it."""
    if is_remote(path):
        identity = storage_of(path).stat(path) if file is None else file.reader.identity
        size, time = identity.size, identity.time
        return SimpleNamespace(st_mode=stat.S_IFREG, st_size=size, st_mtime_ns=time)
    return os.stat(0 if path == STDIN else path) if file is None else os.fstat(file.fileno())


class RawFile(ByteStream):
    """Bytes of a file or pipe as they are; of a file also the lines that begin in a range."""

    def __init__(self, file: io.RawIOBase, source: str, size: int | None) -> None:
        self._file, self.source, self.size = file, source, size
        self._ahead = b""
        self._file_size, self._place, self._has_ended = size or 0, 0, False
        self._start, self._stop = 0, sys.maxsize

    def peek(self, size: int) -> bytes:
        """The first `size` bytes, or all of a shorter file, which `read` gives again."""
        with readable(self.source):
            while len(self._ahead) < size and (data := self._file.read(size - len(self._ahead))):
                self._ahead += data
        return self._ahead

    def seek_lines(self, start: int, stop: int) -> None:
        """Leaves the lines that begin in [start, stop)."""
        self._start, self._stop = start, stop
        self.size = max(min(stop, self._file_size) - start, 0)
        place, end = max(start - 1, 0), int(start == 0)  # a line break there ends the line before
        with readable(self.source):
            self._file.seek(place)
            while not end and place < stop and (data := self._file.read(BLOCK_SIZE)):
                end = data.find(b"\n") + 1
                place += end or len(data)
            self._file.seek(place)
        self.first_byte = self._place = place
        self._has_ended = place >= stop

    def read(self, size: int, /) -> bytes:
        data, self._ahead = self._ahead[:size], self._ahead[size:]
        if not (data or self._has_ended):
            with readable(self.source):
                data = self._file.read(size)
        # The last line ends with the first line break from the last byte of the range.
        if end := data.find(b"\n", max(self._stop - 1 - self._place, 0)) + 1:
            data, self._has_ended = data[:end], True
        self._place += len(data)
        self.position = min(self._place, self._stop) - self._start
        if not (data or self._has_ended) and self._place < self._file_size:
            raise TextError(
                f"{self.source} had {self._file_size} bytes when it was opened, and ended after "
                f"{self._place}: it was truncated in between. Run again with the whole file"
            )
        return data


class Decompressed(ByteStream):
    """Bytes of a compressed file, which may be several streams one after the other.

    Python's file classes take a damaged start of a second stream for the end of the file.
    """

    def __init__(self, raw: RawFile, compression: str) -> None:
        self._raw, self.size = raw, raw.size
        self._new, self._errors = _decompressors(compression, raw.source)
        self._padding = b"\0" if compression in ("gzip", "xz") else b""  # after a stream
        self._current: Any = None

    def read(self, size: int, /) -> bytes:
        data = b""
        try:
            while not data:
                compressed = b""
                if self._current is None or self._current.eof:
                    compressed = self._start_of_stream()
                    if not compressed:
                        break
                    self._current = self._new()
                elif self._current.needs_input:
                    compressed = self._raw.read(_INPUT_SIZE)
                is_at_end = self._current.needs_input and not compressed
                # At the end, what zlib still has inside.
                data = self._current.decompress(compressed, size)
                if is_at_end and not data and not self._current.eof:
                    raise self._damaged("end too early, or with other bytes")
        except self._errors as error:
            raise self._damaged(f"are damaged ({error})") from None
        self.position = self._raw.position
        return data

    def _start_of_stream(self) -> bytes:
        """The first bytes of the next stream; none at the end of the file."""
        data: bytes = self._current.unused_data if self._current else b""
        while not (data := data.lstrip(self._padding)):
            data = self._raw.read(_INPUT_SIZE)
            if not data:
                break
        return data

    def _damaged(self, problem: str) -> TextError:
        return TextError(
            f"{self._raw.source}: the compressed data {problem}. Copy or write the file again"
        )


def _decompressors(compression: str, source: str) -> tuple[Callable[[], Any], Any]:
    """A function that makes a decompressor like `bz2.BZ2Decompressor`, and its errors."""
    load = importlib.import_module
    if compression == "gzip":
        zlib = module = load("zlib")
        with contextlib.suppress(ImportError):  # 2.5 times as fast as zlib
            module = load("isal.isal_zlib")
        return lambda: _GzipMember(module), (zlib.error, module.error)
    if compression == "bz2":
        return load("bz2").BZ2Decompressor, OSError
    if compression == "xz":
        lzma = load("lzma")
        return lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), lzma.LZMAError
    name = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    zstd = package(name, f"{source}, which is zstd-compressed,")
    window = {zstd.DecompressionParameter.window_log_max: 31}  # --long=31
    return lambda: zstd.ZstdDecompressor(options=window), zstd.ZstdError


class _GzipMember:
    """A gzip member, with the names of `bz2.BZ2Decompressor`."""

    eof, needs_input, unused_data = False, True, b""

    def __init__(self, module: Any) -> None:
        self._member = module.decompressobj(wbits=31)

    def decompress(self, data: bytes, size: int) -> bytes:
        member = self._member
        text: bytes = member.decompress(member.unconsumed_tail + data, size)
        self.eof, self.unused_data = member.eof, member.unused_data
        self.needs_input = not member.unconsumed_tail
        return text
