"""Plain text: a file is a document, or each text between two separators."""

from __future__ import annotations

from collections.abc import Iterator

from millrace import checks
from millrace.errors import ConfigError
from millrace.text.documents import Batch, Documents, Query
from millrace.text.parts import Format, InputFile, Part, open_part
from millrace.text.records import NOT_UNICODE, BadDocumentError, decode_text, is_unicode
from millrace.text.splitting import LongRecord, Records, records_of


class PlainText(Format):
    """Plain text, of which the only key is "text".

    Args:
        separator: Text between two documents; None: the file is a document.

    Raises:
        ConfigError: A separator that is not a text, or empty.
    """

    name = "text"
    endings = (".txt", ".text", ".md", ".rst", ".tex")

    def __init__(self, separator: str | None = None) -> None:
        if separator is not None and (not isinstance(separator, str) or not separator):
            raise ConfigError(
                f"separator must be a text of at least one character, not {checks.shown(separator)}"
            )
        if not is_unicode(separator or ""):
            raise ConfigError(f"separator is {separator!r}, which is {NOT_UNICODE}")
        self._separator = (separator or "").encode()

    def has_pieces(self, file: InputFile) -> bool:
        return bool(self._separator)

    def read(self, part: Part, query: Query) -> Iterator[Documents]:
        if query.keys != ("text",):
            raise ConfigError(
                f'{part.source} is plain text, which has only the key "text"; the keys are: '
                f"{', '.join(query.keys)}"
            )
        batch, line, block = Batch(query, part.size), 0, None
        limits = query.max_size, query.block_size, part.byte_offset
        with open_part(part) as stream:
            for following in records_of(stream, self._separator, *limits):
                line += block.num_newlines if isinstance(block, LongRecord) else 0
                block = following
                if isinstance(block, LongRecord):
                    query.reject_long(line, block.byte_offset, "text")
                else:
                    line = self._add_texts(block, line, query, batch)
                    yield batch.take(line, stream.position, stream.size)
            if block is None and not self._separator:
                self._add_texts(Records(0, [b""]), 0, query, batch)
            line += block.num_newlines if isinstance(block, LongRecord) else 0
            yield batch.take(line, stream.position, stream.size)

    def _add_texts(self, block: Records, line: int, query: Query, batch: Batch) -> int:
        """Adds the texts of a block that begins at a line; returns the line after it."""
        offset = block.byte_offset
        for record in block.records:
            content = record.removesuffix(self._separator)
            if len(content) > query.max_size:
                query.reject_long(line, offset, "text")
            else:
                try:
                    batch.add([decode_text(content)], line, offset)
                except BadDocumentError as error:
                    query.reject(line, offset, str(error), content)
            line += record.count(b"\n")
            offset += len(record)
        return line
