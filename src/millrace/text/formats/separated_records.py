"""Records between separators: JSON lines, each an object and a document, and plain text, of which a
file is a document, or each text between two separators."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from millrace.checks import shown
from millrace.errors import ConfigError, TextError
from millrace.text.documents import Batch, Documents, Query, read_records
from millrace.text.json_values import (
    NOT_UNICODE,
    check_object,
    check_unicode,
    decode_text,
    id_of,
    is_unicode,
    parse_json,
    text_at,
)
from millrace.text.parts import Format, InputFile, Part, open_part

try:
    from orjson import loads as loads
except ImportError:  # Python's own is used

    def loads(line: Any, /) -> Any:  # type: ignore[misc]
        raise ValueError


_READ_SIZE = 1 << 20


def parse_line(line: bytes) -> Any:
    """The value of a line of JSON; BadDocumentError if it is not JSON."""
    try:
        return loads(line)
    except ValueError:
        return parse_json(line)


def check_lines(source: str, start: bytes) -> None:
    """TextError if a source that should be lines of JSON starts as an array: most of it would be
    lines that are not documents, which a job may skip."""
    if start.lstrip().startswith(b"["):
        raise TextError(f"{source} is a JSON array; `jq -c '.[]'` makes JSONL of it")


class JsonLines(Format):
    """Lines of JSON, as Python's `json` reads them; a part of a plain file is a range of bytes."""

    name = "jsonl"
    endings = (".jsonl", ".ndjson", ".json")
    is_cut_at_lines = True
    _separator = b"\n"

    def cut(self, file: InputFile, size: int) -> Iterator[Part]:
        end = file.size
        if self.has_pieces(file) or not end:
            yield file.part()
            return
        for start in range(0, end, size):
            stop = min(start + size, end)
            yield file.part(start, stop, size=stop - start, first_line=None if start else 1)

    def first_line_of(self, part: Part) -> int:
        with open_part(replace(part, start=0, stop=part.start)) as stream:
            blocks = iter(functools.partial(stream.read, _READ_SIZE), b"")
            return self.first_line + sum(block.count(b"\n") for block in blocks)

    def has_pieces(self, file: InputFile) -> bool:
        return file.is_pipe or bool(file.compression)

    def read(self, part: Part, query: Query) -> Iterator[Documents]:
        keys, batch = query.keys, Batch(query, part.size)

        def add(line: bytes, number: int, offset: int) -> None:
            try:
                record = loads(line)
            except ValueError:
                if not line.strip():
                    return
                record = parse_json(line)
                # orjson takes no half of a surrogate pair; an encoder of rows looks for itself.
                check_unicode([] if query.whole else [text_at(record, key) for key in keys])
            texts = (
                [check_object(record)] if query.whole else [text_at(record, key) for key in keys]
            )
            batch.add(texts, number, offset, id_of(record, query.id_key, line))

        def add_all(lines: list[bytes], first: int, offset: int) -> bool:
            if query.whole:
                return False
            try:
                records = list(map(loads, lines))
                texts = [[record[key] for record in records] for key in keys]
            except (ValueError, KeyError, TypeError):
                return False
            if query.skip_empty or any({*map(type, column)} != {str} for column in texts):
                return False
            ids = [record.get(query.id_key) for record in records]
            if "." in query.id_key or {*map(type, ids)} - {str, type(None)}:
                ids = list(map(id_of, records, itertools.repeat(query.id_key), lines))
            sizes = 1 + np.fromiter(map(len, lines), np.int64, len(lines))
            batch.add_all(texts, first, offset + np.cumsum(sizes) - sizes, ids)
            return True

        with open_part(part) as stream:
            offset = part.byte_offset + stream.first_byte
            check = functools.partial(check_lines, part.source)
            yield from read_records(
                stream, b"\n", query, batch, offset, "line", add, add_all, check
            )


class PlainText(Format):
    """Plain text, of which the only key is "text".

    Args:
        separator: Text between two documents; None: the file is a document.
    """

    name = "text"
    endings = (".txt", ".text", ".md", ".rst", ".tex")

    def __init__(self, separator: str | None = None) -> None:
        if separator is not None and not (isinstance(separator, str) and separator):
            raise ConfigError(f"separator must be a text that is not empty, not {shown(separator)}")
        if not is_unicode(separator or ""):
            raise ConfigError(f"separator is {separator!r}, which is {NOT_UNICODE}")
        self._separator = (separator or "").encode()

    def has_pieces(self, file: InputFile) -> bool:
        return bool(self._separator)

    def read(self, part: Part, query: Query) -> Iterator[Documents]:
        if query.keys != ("text",) and not query.whole:
            raise ConfigError(
                f'{part.source} is plain text, which has only the key "text"; the keys are: '
                f"{', '.join(query.keys)}"
            )
        batch = Batch(query, part.size)

        def add(record: bytes, line: int, offset: int) -> None:
            text = decode_text(record)
            batch.add([{"text": text} if query.whole else text], line, offset)

        with open_part(part) as stream:
            offset = part.byte_offset + stream.first_byte
            yield from read_records(stream, self._separator, query, batch, offset, "text", add)
