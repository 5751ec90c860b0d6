"""Plain text: a file is a document, or each text between two separators."""

from collections.abc import Iterator

from millrace.checks import shown
from millrace.errors import ConfigError
from millrace.text.documents import Batch, Documents, Query, read_records
from millrace.text.json_values import NOT_UNICODE, decode_text, is_unicode
from millrace.text.parts import Format, InputFile, Part, open_part


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
        if query.keys != ("text",):
            raise ConfigError(
                f'{part.source} is plain text, which has only the key "text"; the keys are: '
                f"{', '.join(query.keys)}"
            )
        batch = Batch(query, part.size)

        def add(record: bytes, line: int, offset: int) -> None:
            batch.add([decode_text(record)], line, offset)

        with open_part(part) as stream:
            offset = part.byte_offset + stream.first_byte
            yield from read_records(stream, self._separator, query, batch, offset, "text", add)
