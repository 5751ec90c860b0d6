"""Documents from JSONL files: plain, gzip or zstd, one JSON object a line."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from millrace.errors import TextError

BLOCK_SIZE = 1 << 20
"""Bytes of text that are read, and handed to a worker, at a time; a longer line stays whole."""

_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_UTF8_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True)
class LineBlock:
    """Whole lines of one file.

    Attributes:
        path: of the file, for messages.
        first_line: the number of the first line, from 1.
        data: the lines, decompressed.
        position: bytes of the (compressed) file that have been read up to here.
    """

    path: str
    first_line: int
    data: bytes
    position: int


def read_blocks(path: str, block_size: int = BLOCK_SIZE) -> Iterator[LineBlock]:
    """The lines of a file in blocks of about `block_size` bytes.

    Gzip and zstd are known by their first bytes, whatever the file's name.

    Raises:
        TextError: a missing or unreadable file, or damaged or truncated compressed data.
    """
    try:
        with open(path, "rb") as file, _decompressed(file, path) as stream:
            line = 1
            rest = b""
            while chunk := stream.read(block_size):
                if line == 1 and not rest and chunk.startswith(_UTF8_BOM):
                    chunk = chunk[len(_UTF8_BOM) :]
                head, newline, tail = chunk.rpartition(b"\n")
                if not newline:
                    rest += chunk
                    continue
                data = rest + head + newline
                yield LineBlock(path=path, first_line=line, data=data, position=file.tell())
                line += data.count(b"\n")
                rest = tail
            if rest:
                yield LineBlock(path=path, first_line=line, data=rest, position=file.tell())
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TextError(
            f"{path}: the compressed data are damaged or truncated ({error}). "
            "Copy or write it again"
        ) from None
    except OSError as error:
        raise TextError(f"{path} cannot be read: {error.strerror or error}") from None


@contextlib.contextmanager
def _decompressed(file: BinaryIO, path: str) -> Iterator[Any]:
    magic = file.read(4)
    file.seek(0)
    if magic.startswith(_GZIP_MAGIC):
        with gzip.GzipFile(fileobj=file) as stream:
            yield stream
    elif magic == _ZSTD_MAGIC:
        zstd = _import_zstd(path)
        window = {zstd.DecompressionParameter.window_log_max: 31}  # files of zstd --long=31 too
        try:
            with zstd.ZstdFile(file, options=window) as stream:
                yield stream
        except zstd.ZstdError as error:
            raise TextError(
                f"{path}: the zstd data are damaged ({error}). Copy or write it again"
            ) from None
    else:
        yield file


def _import_zstd(path: str) -> Any:
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
    return zstd


def document_texts(block: LineBlock, keys: Sequence[str]) -> list[tuple[int, list[str]]]:
    """The texts of a block's documents: (line number, a text for each key).

    Blank lines hold no document and are passed over.

    Raises:
        TextError: a line that is no JSON object in UTF-8, or has no text under a key.
    """
    documents = []
    for number, line in enumerate(block.data.split(b"\n"), start=block.first_line):
        if not line or line.isspace():
            continue
        place = f"{block.path}, line {number}"
        record = _parse(line, place)
        documents.append((number, [_text(record, key, place) for key in keys]))
    return documents


def _parse(line: bytes, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise TextError(
            f"{place}: byte {error.start + 1} is no UTF-8 ({error.reason}). "
            "Convert the file to UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        raise TextError(
            f"{place}, column {error.colno}: no valid JSON ({error.msg}): {_excerpt(line)}. "
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
    if key not in record:
        keys = ", ".join(list(record)[:10]) or "none"
        raise TextError(
            f'{place}: there is no key "{key}"; its keys are: {keys}. '
            "Name the text's key with --json-keys"
        )
    text = record[key]
    if not isinstance(text, str):
        raise TextError(
            f'{place}: the value of "{key}" is a JSON {type(text).__name__}, not a string. '
            "Name the text's key with --json-keys"
        )
    return text


def _excerpt(line: bytes) -> str:
    text = line[:60].decode(errors="replace")
    return repr(text + "..." if len(line) > 60 else text)


def file_size(path: str) -> int:
    """The size of an input file, in bytes.

    Raises:
        TextError: there is no such file.
    """
    try:
        if os.path.isdir(path):
            raise TextError(f"{path} is a folder; name its files")
        return os.stat(path).st_size
    except OSError as error:
        raise TextError(f"{path} cannot be read: {error.strerror}") from None
