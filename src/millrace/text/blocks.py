"""Documents from JSONL files: plain, gzip or zstd, one JSON object per line."""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import stat
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from millrace import checks
from millrace.errors import ConfigError, TextError

BLOCK_SIZE = 1 << 20
"""Bytes of text that are read and sent to a worker at a time; a longer line is not divided."""

_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPABLE = b"\x2a\x4d\x18"  # after one byte from 0x50 to 0x5f: a frame without text
_UTF8_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True)
class LineBlock:
    """Whole lines of one file.

    Attributes:
        path: Path of the file, for messages.
        first_line: Number of the first line, from 1.
        data: Decompressed lines.
        position: Bytes of the (compressed) file that have been read so far.
    """

    path: str
    first_line: int
    data: bytes
    position: int


def read_blocks(path: str | os.PathLike[str], block_size: int = BLOCK_SIZE) -> Iterator[LineBlock]:
    """The lines of a file in blocks of about `block_size` bytes.

    The first bytes of a file, not its name, tell gzip and zstd. The file is opened once and read
    from start to end, so it may be a pipe.

    Raises:
        ConfigError: A block size that is not a whole number above 0.
        TextError: A missing or unreadable file, damaged or truncated compressed data, or a file
            that was truncated while it was read.
    """
    path = os.fsdecode(path)
    return _read_blocks(path, checks.whole("block_size", block_size, 1))


def _read_blocks(path: str, block_size: int) -> Iterator[LineBlock]:
    try:
        with open(path, "rb") as file:
            source = _Source(file)
            with _decompressed(source, path) as stream:
                yield from _whole_lines(stream, source, path, block_size)
            if source.position < source.size:
                raise TextError(
                    f"{path} had {source.size} bytes when it was opened, and ended after "
                    f"{source.position}: it was truncated in between. Run again with the whole file"
                )
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TextError(
            f"{path}: the compressed data are damaged or truncated ({error}). "
            "Copy or write the file again"
        ) from None
    except OSError as error:
        raise TextError(f"{path} cannot be read: {error.strerror or error}") from None


def _whole_lines(stream: Any, source: _Source, path: str, block_size: int) -> Iterator[LineBlock]:
    line = 1
    rest: list[bytes] = []  # parts of a line whose end has not been read yet

    def block(*parts: bytes) -> LineBlock:
        data = b"".join((*rest, *parts))
        if line == 1:
            data = data.removeprefix(_UTF8_BOM)
        return LineBlock(path=path, first_line=line, data=data, position=source.position)

    while chunk := stream.read(block_size):
        lines, newline, tail = chunk.rpartition(b"\n")
        if newline:
            whole = block(lines, newline)
            yield whole
            line += whole.data.count(b"\n")
            rest = []
        rest.append(tail)
    if any(rest):
        yield block()


class _Source:
    """A file whose first bytes are known before it is read, without seeking: it may be a pipe.

    Attributes:
        first_bytes: First four bytes, or all of a shorter file.
        size: Size of the file when it was opened; 0 for a pipe.
        position: Number of bytes read.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = _regular_size(os.fstat(file.fileno())) or 0
        self.first_bytes = self._unread = file.read(4)
        self.position = 0

    def read(self, size: int) -> bytes:
        """At most `size` bytes; no bytes only at the end."""
        data, self._unread = self._unread[:size], self._unread[size:]
        data = data or self._file.read(size)
        self.position += len(data)
        return data


@contextlib.contextmanager
def _decompressed(source: Any, path: str) -> Iterator[Any]:
    magic = source.first_bytes
    if magic.startswith(_GZIP_MAGIC):
        with gzip.GzipFile(fileobj=source) as stream:
            yield stream
    elif magic == _ZSTD_MAGIC or (magic[1:] == _ZSTD_SKIPPABLE and magic[0] & 0xF0 == 0x50):
        try:
            if sys.version_info >= (3, 14):
                from compression import zstd
            else:
                from backports import zstd
        except ImportError:
            raise TextError(
                f"{path} is zstd-compressed, which needs the backports.zstd package: "
                "pip install 'millrace[tokenizers]'"
            ) from None
        # For files of zstd --long=31.
        window: dict[Any, int] = {zstd.DecompressionParameter.window_log_max: 31}
        try:
            with zstd.ZstdFile(source, options=window) as stream:
                yield stream
        except zstd.ZstdError as error:
            raise TextError(
                f"{path}: the zstd data are damaged ({error}). Copy or write the file again"
            ) from None
    else:
        yield source


def document_texts(block: LineBlock, keys: Sequence[str]) -> list[tuple[int, list[str]]]:
    """The texts of a block's documents: (line number, a text for each key); skips blank lines.

    Raises:
        ConfigError: Keys that are not a list of strings.
        TextError: A line that is not a JSON object in UTF-8, or has no text under a key.
    """
    keys = check_keys(keys)
    documents = []
    for number, line in enumerate(block.data.split(b"\n"), start=block.first_line):
        if not line or line.isspace():
            continue
        place = f"{block.path}, line {number}"
        record = _parse(line, place)
        documents.append((number, [_text(record, key, place) for key in keys]))
    return documents


def check_keys(keys: Sequence[str]) -> tuple[str, ...]:
    """The JSON keys as a tuple; ConfigError unless they are a list of strings, each once."""
    if isinstance(keys, str):
        raise ConfigError(f"json_keys is {keys!r}, one key alone; give a list: [{keys!r}]")
    names = tuple(keys) if isinstance(keys, Iterable) else ()
    if not names or not all(isinstance(key, str) for key in names) or len({*names}) < len(names):
        raise ConfigError(
            f"json_keys are {checks.shown(keys)}; give a list of at least one key, each once"
        )
    return names


def _parse(line: bytes, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise TextError(
            f"{place}: byte {error.start + 1} is not UTF-8 ({error.reason}). "
            "Convert the file to UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        raise TextError(
            f"{place}, column {error.colno}: not valid JSON ({error.msg}): {_excerpt(line)}. "
            "Each line must be one JSON object; repair or remove the line"
        ) from None
    except (RecursionError, ValueError) as error:
        raise TextError(f"{place}: the JSON cannot be read ({error}): {_excerpt(line)}") from None
    if not isinstance(record, dict):
        raise TextError(
            f"{place}: a JSON {type(record).__name__}, not an object: {_excerpt(line)}. "
            'Each line must be an object such as {"text": "..."}'
        )
    return record


def _text(record: dict[str, Any], key: str, place: str) -> str:
    text = record.get(key)
    if isinstance(text, str):
        return text
    if key in record:
        problem = f'the value of "{key}" is a JSON {type(text).__name__}, not a string'
    else:
        keys = ", ".join(list(record)[:10]) or "none"
        problem = f'there is no key "{key}"; its keys are: {keys}'
    raise TextError(f"{place}: {problem}. Name the text's key with --json-keys")


def _excerpt(line: bytes) -> str:
    text = line[:60].decode(errors="replace")
    return repr(text + "..." if len(line) > 60 else text)


def input_size(path: str) -> int | None:
    """The size of an input file, in bytes; None for a pipe; TextError if it cannot be read."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise TextError(f"{path} cannot be read: {error.strerror}") from None
    if stat.S_ISDIR(status.st_mode):
        raise TextError(f"{path} is a folder; name its files")
    if not os.access(path, os.R_OK):
        raise TextError(f"{path} cannot be read: {os.strerror(errno.EACCES)}")
    return _regular_size(status)


def _regular_size(status: os.stat_result) -> int | None:
    return status.st_size if stat.S_ISREG(status.st_mode) else None
