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
from millrace.text.documents import UTF8_BOM, Batch, Documents, Query, read_size
from millrace.text.json_values import (
    BadDocumentError,
    check_object,
    decode_text,
    id_of,
    is_unicode,
    parse_json,
    text_at,
    texts_of,
)
from millrace.text.parts import Format, InputFile, Part, open_part
from millrace.text.streams import ByteStream

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


class _Records(Format):
    """Records between separators; without a separator, a file is one record.

    A byte order mark at the beginning of a source is left out, and counts in the offsets. A record
    beyond the limit is rejected, and skipped as soon as it is known to be.
    """

    _record_name: str

    def _check_start(self, source: str, start: bytes) -> None:
        """Checks the first bytes of a source, without the mark."""

    def _add(self, record: bytes, line: int, offset: int, query: Query, batch: Batch) -> None:
        """Adds a record to the batch; it may raise a BadDocumentError."""

    def _add_all(
        self, records: list[bytes], line: int, offset: int, query: Query, batch: Batch
    ) -> bool:
        """Adds all records of a block faster, from the line and offset of the first on; or none."""
        return False

    def read(self, part: Part, query: Query) -> Iterator[Documents]:
        with open_part(part) as stream:
            yield from self._read(stream, part, query)

    def _read(self, stream: ByteStream, part: Part, query: Query) -> Iterator[Documents]:
        separator, is_inside, is_last = self._separator, False, False
        batch, breaks = Batch(query, part.size), separator.count(b"\n")
        data, line, start = b"", 0, part.byte_offset + stream.first_byte
        offset = start
        if start == 0:
            while len(data) < len(UTF8_BOM) and (more := stream.read(query.block_size)):
                data += more
            offset = len(UTF8_BOM) * data.startswith(UTF8_BOM)
            data = data[offset:]
            self._check_start(part.source, data)
        *records, rest = data.split(separator) if separator else [data]
        while True:
            is_short = not is_inside and max(map(len, records), default=0) <= query.max_size
            if is_short and self._add_all(records, line, offset, query, batch):
                line += len(records)
                offset += sum(map(len, records)) + len(records) * len(separator)
                records = []
            for record in records:
                try:
                    if is_inside:
                        is_inside = False
                    elif len(record) > query.max_size:
                        query.reject_long(line, offset, self._record_name)
                    else:
                        self._add(record, line, offset, query, batch)
                except BadDocumentError as error:
                    query.reject(line, offset, str(error), record)
                line += record.count(b"\n") + breaks
                offset += len(record) + len(separator)
            yield batch.take(line, stream.position, stream.size)
            if is_last:
                return
            # The last bytes may be the start of a separator.
            inside = max(len(rest) - max(len(separator) - 1, 0), 0)
            if inside > query.max_size and not is_inside:
                query.reject_long(line, offset, self._record_name)
                is_inside = True
            if is_inside:
                line, offset = line + rest.count(b"\n", 0, inside), offset + inside
                rest = rest[inside:]
            more = stream.read(read_size(len(rest), query.max_size, query.block_size))
            if more:
                data = rest + more
                *records, rest = data.split(separator) if separator else [data]
            else:
                is_last = True
                # A file that is one record may be empty.
                records = [rest] if rest or is_inside or not separator else []
                offset = offset if rest else start


class JsonLines(_Records):
    """Lines of JSON, as Python's `json` reads them; a part of a plain file is a range of bytes."""

    name = "jsonl"
    endings = (".jsonl", ".ndjson", ".json")
    is_cut_at_lines = True
    _separator = b"\n"
    _record_name = "line"

    def cut(self, file: InputFile, size: int) -> Iterator[Part]:
        if self.has_pieces(file) or not file.size:
            yield file.part()
            return
        for start in range(0, file.size, size):
            stop = min(start + size, file.size)
            yield file.part(start, stop, size=stop - start, first_line=None if start else 1)

    def first_line_of(self, part: Part) -> int:
        with open_part(replace(part, start=0, stop=part.start)) as stream:
            blocks = iter(functools.partial(stream.read, _READ_SIZE), b"")
            return self.first_line + sum(block.count(b"\n") for block in blocks)

    def has_pieces(self, file: InputFile) -> bool:
        return file.is_pipe or bool(file.compression)

    _check_start = staticmethod(check_lines)

    def _add(self, record: bytes, line: int, offset: int, query: Query, batch: Batch) -> None:
        try:
            value = loads(record)
        except ValueError:
            if not record.strip():
                return
            value = parse_json(record)
        if query.whole:
            texts: list[Any] = [check_object(value)]
        else:
            texts = [text_at(value, key) for key in query.keys]
            for text in itertools.filterfalse(is_unicode, texts_of(texts)):
                start = shown(text, 60)
                raise BadDocumentError(f"not Unicode: half of a surrogate pair is in {start}")
        batch.add(texts, line, offset, id_of(value, query.id_key, record))

    def _add_all(
        self, records: list[bytes], line: int, offset: int, query: Query, batch: Batch
    ) -> bool:
        if query.whole or query.skip_empty:
            return False
        try:
            values = list(map(loads, records))
            texts = [[value[key] for value in values] for key in query.keys]
        except (ValueError, KeyError, TypeError):
            return False
        if any({*map(type, column)} != {str} for column in texts):
            return False
        ids = [value.get(query.id_key) for value in values]
        if "." in query.id_key or {*map(type, ids)} - {str, type(None)}:
            ids = list(map(id_of, values, itertools.repeat(query.id_key), records))
        sizes = 1 + np.fromiter(map(len, records), np.int64, len(records))
        batch.add_all(texts, line, offset + np.cumsum(sizes) - sizes, ids)
        return True


class PlainText(_Records):
    """Plain text, of which the only key is "text".

    Args:
        separator: Text between two documents; None: the file is a document.
    """

    name = "text"
    endings = (".txt", ".text", ".md", ".rst", ".tex")
    _record_name = "text"

    def __init__(self, separator: str | None = None) -> None:
        is_text = isinstance(separator, str) and separator and is_unicode(separator)
        if separator is not None and not is_text:
            raise ConfigError(f"separator must be a text in Unicode, not {shown(separator)}")
        self._separator = (separator or "").encode()

    def has_pieces(self, file: InputFile) -> bool:
        return bool(self._separator)

    def read(self, part: Part, query: Query) -> Iterator[Documents]:
        if query.keys != ("text",) and not query.whole:
            raise ConfigError(
                f'{part.source} is plain text, which has only the key "text"; the keys are: '
                f"{', '.join(query.keys)}"
            )
        return super().read(part, query)

    def _add(self, record: bytes, line: int, offset: int, query: Query, batch: Batch) -> None:
        text = decode_text(record)
        batch.add([{"text": text} if query.whole else text], line, offset)
