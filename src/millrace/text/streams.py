"""Bytes of one file or pipe, plain or compressed."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple, Protocol

from millrace.errors import TextError

BLOCK_SIZE = 1 << 18
"""Number of bytes that are read and decompressed at a time: blocks of 1 MB do not fit a core's
cache, and short documents in them are parsed at 0.7 of the speed."""

STDIN = "-"
"""The path that means standard input."""

_OF_A_PROCESS = re.compile(r"/dev/(stdin|fd/)|/proc/(self|thread-self)/")

NUM_MAGIC_BYTES = 10
"""Number of bytes that tell every compression."""

_INPUT_SIZE = 1 << 17  # compressed bytes that are read at a time


class FileIdentity(NamedTuple):
    """Size and time of a regular file; both None for a pipe."""

    size: int | None
    mtime_ns: int | None


ANY_FILE = FileIdentity(None, None)


class ByteStream(Protocol):
    """Decompressed bytes.

    Attributes:
        position: Number of bytes on disk that have been read, of the range if there is one.
        size: Number of bytes on disk to read; None for a pipe.
        first_byte: Position of the first byte in the decompressed file.
    """

    @property
    def position(self) -> int: ...

    @property
    def size(self) -> int | None: ...

    @property
    def first_byte(self) -> int: ...

    def read(self, size: int, /) -> bytes:
        """At least one byte and at most `size`; no bytes only at the end."""
        ...


def compression_of(first_bytes: bytes) -> str:
    """The compression of a file that begins with `first_bytes`; empty for none.

    >>> compression_of(bytes.fromhex("1f8b08000000")), compression_of(b'{"text": "a"}')
    ('gzip', '')
    """
    if first_bytes.startswith(b"\x1f\x8b"):
        return "gzip"
    if first_bytes.startswith(b"\x28\xb5\x2f\xfd"):
        return "zstd"
    if first_bytes[1:4] == b"\x2a\x4d\x18" and first_bytes[0] & 0xF0 == 0x50:
        return "zstd"  # a skippable frame, which has no text
    if first_bytes.startswith(b"\xfd7zXZ\x00"):
        return "xz"
    if first_bytes.startswith(b"BZh") and first_bytes[4:10] in (
        b"\x31\x41\x59\x26\x53\x59",  # a block
        b"\x17\x72\x45\x38\x50\x90",  # the end of an empty stream
    ):
        return "bz2"
    return ""


@contextlib.contextmanager
def open_stream(
    path: str,
    *,
    source: str,
    compression: str = "",
    start: int = 0,
    stop: int | None = None,
    identity: FileIdentity = ANY_FILE,
) -> Iterator[ByteStream]:
    """The decompressed bytes of a file.

    A pipe is read once and never sought; its first bytes tell its compression.

    Args:
        path: Path of the file; "-" for standard input.
        source: Name of the file in messages.
        compression: Compression of a regular file: "gzip", "zstd", "bz2", "xz" or empty.
        start: First byte of a range of a plain file: the lines that begin in the range are read.
        stop: Last byte of that range, exclusive. None: the end of the file.
        identity: Size and time that the file must have. Fields that are None are not compared.

    Raises:
        TextError: A file that cannot be read, is damaged or truncated, or was changed.
    """
    with contextlib.ExitStack() as stack:
        with readable(source):
            file = stack.enter_context(_open_binary(path))
            status = os.fstat(file.fileno())
        check_unchanged(source, status, identity)
        regular = stat.S_ISREG(status.st_mode) and path != STDIN and not is_of_a_process(path)
        raw = _File(file, source, status.st_size if regular else None)
        if not regular:
            compression = compression_of(raw.peek(NUM_MAGIC_BYTES))
        stream: ByteStream = raw
        if compression:
            stream = _Decompressed(raw, compression, source)
        elif start or stop is not None:
            stream = _LineRange(raw, start, stop)
        yield stream
        if regular:
            identity = FileIdentity(status.st_size, status.st_mtime_ns)
            check_unchanged(source, os.fstat(file.fileno()), identity)


@contextlib.contextmanager
def readable(source: str) -> Iterator[None]:
    """Turns an OSError of the block into a TextError that names the file."""
    try:
        yield
    except OSError as error:
        raise TextError(f"{source} cannot be read: {error.strerror or error}") from None


def is_of_a_process(path: str) -> bool:
    """Whether a name means another file in another process, even if it is a regular file here."""
    return _OF_A_PROCESS.match(path) is not None


def check_unchanged(source: str, status: os.stat_result, identity: FileIdentity) -> None:
    """TextError if a file has another size or time than it had."""
    size, mtime_ns = identity
    if size is not None and status.st_size != size:
        raise TextError(
            f"{source} has {status.st_size} bytes, and had {size} before: it was changed while "
            "the job was running. Run again when the file is complete"
        )
    if mtime_ns is not None and status.st_mtime_ns != mtime_ns:
        raise TextError(
            f"{source} was written to while the job was running. Run again when the file is "
            "complete"
        )


def _open_binary(path: str) -> BinaryIO:
    if path == STDIN:
        return open(0, "rb", buffering=0, closefd=False)
    return open(path, "rb", buffering=0)


class _File:
    """Bytes of a file or pipe as they are."""

    first_byte = 0

    def __init__(self, file: BinaryIO, source: str, size: int | None = None) -> None:
        self._file = file
        self._source = source
        self.size = size
        self._ahead = b""
        self.position = 0

    def peek(self, size: int) -> bytes:
        """The first `size` bytes, or all of a shorter file, which the next `read` gives again."""
        with readable(self._source):
            while len(self._ahead) < size and (data := self._file.read(size - len(self._ahead))):
                self._ahead += data
        return self._ahead

    def seek(self, position: int) -> None:
        self._file.seek(position)
        self.position = position

    def read(self, size: int) -> bytes:
        if self._ahead:
            data, self._ahead = self._ahead[:size], self._ahead[size:]
        else:
            with readable(self._source):
                data = self._file.read(size)
        self.position += len(data)
        if not data and self.size is not None and self.position < self.size:
            raise TextError(
                f"{self._source} had {self.size} bytes when it was opened, and ended after "
                f"{self.position}: it was truncated in between. Run again with the whole file"
            )
        return data


class _LineRange:
    """The lines of a plain file that begin in [start, stop)."""

    def __init__(self, raw: _File, start: int, stop: int | None) -> None:
        self._raw = raw
        self._start = start
        self._stop = sys.maxsize if stop is None else stop
        self._ahead = b""
        self.size = max(min(self._stop, raw.size or 0) - start, 0)
        self.first_byte = start
        self._has_ended = start >= self._stop
        if start and not self._has_ended:
            self._skip_to_line()

    def _skip_to_line(self) -> None:
        """Skips the line that began before the range; a line break before it is its end."""
        raw = self._raw
        raw.seek(self._start - 1)
        while raw.position < self._stop:
            data = raw.read(min(BLOCK_SIZE, self._stop - raw.position))
            if not data:
                break
            end = data.find(b"\n") + 1
            if end:
                self._ahead = data[end:]
                self.first_byte = raw.position - len(self._ahead)
                self._has_ended = self.first_byte >= self._stop
                return
        self._has_ended = True

    @property
    def position(self) -> int:
        return min(self._raw.position, self._stop) - self._start

    def read(self, size: int) -> bytes:
        if self._has_ended:
            return b""
        if self._ahead:
            data, self._ahead = self._ahead, b""
        elif self._raw.position < self._stop:
            data = self._raw.read(min(size, self._stop - self._raw.position))
        else:  # the rest of the last line
            data = self._raw.read(size)
            end = data.find(b"\n") + 1
            if end:
                self._has_ended = True
            return data[: end or None]
        if self._raw.position >= self._stop and data.endswith(b"\n"):
            self._has_ended = True
        return data


class _Decompressed:
    """Bytes of a compressed file, which may be several streams one after the other.

    The file classes of Python's modules are not used: they take a damaged beginning of a second
    stream for the end of the file.
    """

    first_byte = 0

    def __init__(self, raw: _File, compression: str, source: str) -> None:
        self._raw = raw
        self._source = source
        self._new, self._errors = _decompressors(compression, source)
        self._has_padding = compression in ("gzip", "xz")  # zeros after a stream
        self._current: _Decompressor | None = None

    @property
    def position(self) -> int:
        return self._raw.position

    @property
    def size(self) -> int | None:
        return self._raw.size

    def read(self, size: int) -> bytes:
        try:
            return self._read(size)
        except self._errors as error:
            raise TextError(
                f"{self._source}: the compressed data are damaged ({error}). "
                "Copy or write the file again"
            ) from None

    def _read(self, size: int) -> bytes:
        while True:
            current = self._current
            if current is None or current.eof:
                compressed = self._start_of_stream()
                if not compressed:
                    return b""
                current = self._current = self._new()
            elif current.needs_input:
                compressed = self._raw.read(_INPUT_SIZE)
                if not compressed:
                    data = current.decompress(b"", size)  # what zlib still has inside
                    if not data and not current.eof:
                        raise TextError(
                            f"{self._source}: the compressed data end too early. "
                            "Copy or write the file again"
                        )
                    if data:
                        return data
                    continue
            else:
                compressed = b""
            data = current.decompress(compressed, size)
            if data:
                return data

    def _start_of_stream(self) -> bytes:
        """The first bytes of the next stream; no bytes at the end of the file."""
        if self._current is None:
            return self._raw.read(_INPUT_SIZE)
        compressed = self._current.unused_data
        while True:
            if self._has_padding:
                compressed = compressed.lstrip(b"\0")
            if compressed:
                return compressed
            compressed = self._raw.read(_INPUT_SIZE)
            if not compressed:
                return b""


class _Decompressor(Protocol):
    """One compressed stream, by the interface of `bz2.BZ2Decompressor`."""

    @property
    def eof(self) -> bool: ...

    @property
    def needs_input(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, size: int, /) -> bytes: ...


def _decompressors(compression: str, source: str) -> tuple[Callable[[], _Decompressor], Any]:
    """A function that makes a decompressor, and the class, or classes, of its errors."""
    if compression == "gzip":
        return _gzip_decompressors()
    if compression == "bz2":
        import bz2

        return bz2.BZ2Decompressor, OSError
    if compression == "xz":
        import lzma

        return lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), lzma.LZMAError
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError:
        raise TextError(
            f"{source} is zstd-compressed, which needs the backports.zstd package: "
            "pip install 'millrace[tokenizers]'"
        ) from None
    window: dict[Any, int] = {zstd.DecompressionParameter.window_log_max: 31}  # --long=31
    return lambda: zstd.ZstdDecompressor(options=window), zstd.ZstdError


def _gzip_decompressors() -> tuple[Callable[[], _Decompressor], Any]:
    import zlib

    module: Any = zlib
    with contextlib.suppress(ImportError):
        # 2.5 times as fast as zlib.
        module = importlib.import_module("isal.isal_zlib")

    class Gzip:
        """A gzip member."""

        def __init__(self) -> None:
            self._decompressor = module.decompressobj(wbits=31)

        @property
        def eof(self) -> bool:
            return bool(self._decompressor.eof)

        @property
        def needs_input(self) -> bool:
            return not self._decompressor.unconsumed_tail

        @property
        def unused_data(self) -> bytes:
            return bytes(self._decompressor.unused_data)

        def decompress(self, data: bytes, size: int, /) -> bytes:
            data = self._decompressor.unconsumed_tail + data
            return bytes(self._decompressor.decompress(data, size))

    return Gzip, (zlib.error, module.error)
