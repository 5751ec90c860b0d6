"""Plain text: a file is a document, or each text between two separators."""

from collections.abc import Iterator

from millrace import checks
from millrace.errors import ConfigError
from millrace.text.documents import Batch, Documents, Query, records_of
from millrace.text.json_values import NOT_UNICODE, BadDocumentError, decode_text, is_unicode
from millrace.text.parts import Format, InputFile, Part, open_part


class PlainText(Format):
    """Plain text, of which the only key is "text".

    Args:
        separator: Text between two documents; None: the file is a document.
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
        batch = Batch(query, part.size)
        with open_part(part) as stream:
            for block in records_of(stream, self._separator, query, part.byte_offset, "text"):
                line, offset = block.line, block.byte_offset
                for record in block.records:
                    content = record.removesuffix(self._separator)
                    try:
                        if len(content) > query.max_size:
                            query.reject_long(line, offset, "text")
                        else:
                            batch.add([decode_text(content)], line, offset)
                    except BadDocumentError as error:
                        query.reject(line, offset, str(error), content)
                    line += record.count(b"\n")
                    offset += len(record)
                yield batch.take(block.stop, stream.position, stream.size)
