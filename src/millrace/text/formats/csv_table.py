"""CSV and TSV: rows as Python's `csv` reads them; the first names the columns."""

import csv
import sys
from collections.abc import Iterator
from typing import Any

from millrace.errors import TextError
from millrace.text.documents import UTF8_BOM, Batch, Documents, Query, no_column, read_size
from millrace.text.json_values import BadDocumentError, decode_text
from millrace.text.parts import Format, InputFile, Part, Span, open_part
from millrace.text.streams import ByteStream

_NO_QUOTE = "a quoted field has no closing quote. Close it, or double a quote that is text"


_Row = tuple[list[bytes], bytes, str]
"""The fields of a row, none if it is blank; its bytes with the line break; and its problem."""


class Csv(Format):
    """Rows of fields between delimiters; CR, LF and CRLF end a line.

    A piece of a file begins with the header. A row beyond the limit is an error, and not skipped:
    after an open quote, it has the rest of the file in it.
    """

    unit = "row"
    # Up to 8 in the field that `csv` grows, two copies of the row, and the field as a str.
    unpacking_memory = 12

    def __init__(self, name: str, delimiter: str, endings: tuple[str, ...]) -> None:
        self.name, self._delimiter, self.endings = name, delimiter, endings

    def has_pieces(self, file: InputFile) -> bool:
        return True

    def read(self, part: Part, query: Query) -> Iterator[Documents]:
        batch, size = Batch(query, part.size), 0
        with open_part(part) as stream:
            rows = self._rows(stream, part, query.max_size, query.block_size)
            columns, number, _ = _read_header(rows, part.source)
            keys = columns if query.whole else query.keys
            for key in keys if columns else ():  # an empty file needs none
                if columns.count(key) != 1:
                    raise no_column(part.source, key, columns)
            places = [columns.index(key) for key in keys if columns]
            id_place = columns.index(query.id_key) if query.id_key in columns else -1
            for fields, data, problem in rows:
                try:
                    if problem or len(fields) not in (0, len(columns)):
                        raise BadDocumentError(
                            problem
                            or f"the row has {len(fields)} fields, and the header has "
                            f"{len(columns)}. Quote fields with separators or line breaks in them"
                        )
                    if fields:
                        texts: list[Any] = [decode_text(fields[place]) for place in places]
                        if query.whole:
                            texts = [dict(zip(columns, texts, strict=True))]
                        id_ = fields[id_place].decode(errors="replace")
                        batch.add(texts, number, id_=id_ if id_place >= 0 else None)
                except BadDocumentError as error:
                    query.reject(number, -1, str(error), data)
                number += 1
                size += len(data)
                if size >= query.block_size:
                    yield batch.take(number, stream.position, stream.size)
                    size = 0
            yield batch.take(number, stream.position, stream.size)

    def columns(self, part: Part, query: Query) -> list[str]:
        """The names of the columns."""
        with open_part(part) as stream:
            rows = self._rows(stream, part, query.max_size, query.block_size)
            return _read_header(rows, part.source)[0]

    def spans(
        self, stream: ByteStream, file: InputFile, max_size: int, block_size: int
    ) -> tuple[Iterator[Span], int, bytes]:
        rows = self._rows(stream, file.part(), max_size, block_size)
        _, number, header = _read_header(rows, file.path)
        # Of two byte order marks, the second is a part of the header.
        return ((data, 1, True) for _, data, _ in rows), number, UTF8_BOM + header

    def _rows(
        self, stream: ByteStream, part: Part, max_size: int, block_size: int
    ) -> Iterator[_Row]:
        """The rows of a stream, with blank ones; TextError at one beyond `max_size` bytes."""
        csv.field_size_limit(sys.maxsize)  # of the whole process: 128 kB by default
        data, number, has_ended = bytearray(), part.first_line or self.first_line, False

        def check(size: int) -> None:
            if size > max_size:
                raise TextError(
                    f"{part.source}, row {number}: the row is longer than {max_size} bytes. Close "
                    "its quotes, or raise max_document_size"
                )

        def lines() -> Iterator[str]:
            """Lines, of which `csv` asks for more while a quoted field is open."""
            nonlocal has_ended
            rest, mark, block = b"", UTF8_BOM, b" "
            while block:
                check(len(data) + len(rest))
                block = stream.read(read_size(len(rest), max_size, block_size))
                pieces = (rest + block).splitlines(keepends=True)
                # A CR at the end may be the first half of a CRLF.
                rest = pieces.pop() if block and not pieces[-1].endswith(b"\n") else b""
                for line in pieces:
                    data.extend(line.removeprefix(mark))
                    yield line.removeprefix(mark).decode("latin-1")
                    mark = b""
            has_ended = True

        reader = csv.reader(lines(), delimiter=self._delimiter)
        while True:
            problem = ""
            try:
                fields = [field.encode("latin-1") for field in next(reader)]
            except StopIteration:
                return
            except csv.Error as error:  # before Python 3.11, of a zero byte
                fields, problem = [], f"the row cannot be read ({error})"
            check(len(data))
            yield fields, bytes(data), _NO_QUOTE if has_ended else problem
            data.clear()
            number += 1


def _read_header(rows: Iterator[_Row], source: str) -> tuple[list[str], int, bytes]:
    """The names of the columns, the number of rows read, and the bytes of the header."""
    number = 0
    for number, (fields, data, problem) in enumerate(rows, start=1):
        if problem:
            raise TextError(f"{source}, row {number}, the header: {problem}")
        try:
            columns = [field.decode() for field in fields]
        except UnicodeDecodeError:
            raise TextError(
                f"{source}, row {number}: the header is not UTF-8. Convert the file to UTF-8"
            ) from None
        if columns:
            return columns, number, data
    return [], number, b""
