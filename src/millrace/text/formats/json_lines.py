"""JSON lines: each is an object, and a document."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from millrace.text.documents import Batch, Documents, Query, records_of
from millrace.text.json_values import (
    BadDocumentError,
    Text,
    check_unicode,
    id_of,
    parse_json,
    text_at,
)
from millrace.text.parts import Format, InputFile, Part, open_part

try:
    from orjson import loads
except ImportError:  # lines are parsed one by one

    def loads(line: Any, /) -> Any:  # type: ignore[misc]
        raise ValueError


_READ_SIZE = 1 << 20


class JsonLines(Format):
    """Lines of JSON, as Python's `json` reads them; a part of a plain file is a range of bytes."""

    name = "jsonl"
    endings = (".jsonl", ".ndjson", ".json")
    is_cut_at_lines = True
    _separator = b"\n"

    def cut(self, file: InputFile, size: int) -> Iterator[Part]:
        end = file.size if file.is_plain else None
        if not end:
            yield file.part()
            return
        for start in range(0, end, size):
            stop = min(start + size, end)
            yield file.part(start, stop, size=stop - start, first_line=None if start else 1)

    def first_line_of(self, part: Part) -> int:
        with open(part.path, "rb") as file:
            count, rest = 0, part.start - 1
            while rest > 0 and (data := file.read(min(rest, _READ_SIZE))):
                count += data.count(b"\n")
                rest -= len(data)
        # The part's first line begins after the newline at or after the byte before its start.
        return count + 2

    def has_pieces(self, file: InputFile) -> bool:
        return not file.is_plain

    def read(self, part: Part, query: Query) -> Iterator[Documents]:
        batch = Batch(query, part.size)
        with open_part(part) as stream:
            offset = part.byte_offset + stream.first_byte
            for block in records_of(stream, b"\n", query, offset, "line"):
                if block.records:
                    _add_lines(block.records, block.line, block.byte_offset, query, batch)
                yield batch.take(block.stop, stream.position, stream.size)


def _add_lines(
    lines: list[bytes], first: int, byte_offset: int, query: Query, batch: Batch
) -> None:
    """Adds the documents of lines, of which the first is number `first` of the part."""
    sizes = np.fromiter(map(len, lines), np.int64, len(lines))
    offsets = byte_offset + np.cumsum(sizes) - sizes
    records: list[Any] | None = None
    if sizes.max() <= query.max_size:
        with contextlib.suppress(ValueError):
            records = list(map(loads, lines))
    if records is not None and not query.skip_empty:
        texts = _plain_texts(records, query.keys)
        if texts is not None:
            batch.add_all(texts, first, offsets, _ids(records, lines, query.id_key))
            return
    for number, (line, offset) in enumerate(zip(lines, offsets.tolist(), strict=True)):
        content = line.removesuffix(b"\n")
        if len(content) > query.max_size:
            query.reject_long(first + number, offset, "line")
            continue
        if not content.strip():
            continue
        try:
            record = _parse(content, query.keys) if records is None else records[number]
            texts_of_record = [text_at(record, key) for key in query.keys]
            batch.add(texts_of_record, first + number, offset, id_of(record, query.id_key, line))
        except BadDocumentError as error:
            query.reject(first + number, offset, str(error), content)


def _parse(line: bytes, keys: tuple[str, ...]) -> Any:
    """The value of a line; BadDocumentError if it is not valid JSON with texts in UTF-8."""
    try:
        return loads(line)
    except ValueError:
        record = parse_json(line)
        check_unicode([text_at(record, key) for key in keys])  # orjson takes no half of a pair
        return record


def _plain_texts(records: list[Any], keys: tuple[str, ...]) -> list[list[Text]] | None:
    """The texts of each key, if every record is an object with a string under all keys."""
    try:
        columns = [[record[key] for record in records] for key in keys]
    except (KeyError, TypeError):
        return None
    return columns if all({*map(type, column)} == {str} for column in columns) else None


def _ids(records: list[Any], lines: list[bytes], key: str) -> list[str | None]:
    if "." not in key:
        values = [record.get(key) for record in records]
        if {*map(type, values)} <= {str, type(None)}:
            return values
    return [id_of(record, key, line) for record, line in zip(records, lines, strict=True)]
