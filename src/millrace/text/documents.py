"""What a reader asks of a part of a file, the records of its bytes, and documents in batches."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.checks import shown
from millrace.errors import ConfigError, TextError
from millrace.text.json_values import BadDocumentError, Text, is_unicode
from millrace.text.streams import BLOCK_SIZE, ByteStream

UTF8_BOM = b"\xef\xbb\xbf"

MAX_DOCUMENT_SIZE = 1 << 28
"""Size of the longest line, record or text that is read by default, in bytes."""

Reject = Callable[[int, int, str, bytes], None]
"""Function called for each line that cannot be used: with its number in the part, its byte offset
in the decompressed source (-1 for rows), the reason, and its bytes (none if it is too long)."""


def too_long(name: str, max_size: int) -> str:
    """Why a line, row or text beyond the limit cannot be used."""
    return f"the {name} is longer than {max_size} bytes. Raise max_document_size, or remove it"


@dataclass(frozen=True, kw_only=True)
class Query:
    """What a reader asks of a part.

    Attributes:
        keys: JSON keys or columns of the texts. If there is none of that name, dots reach into
            objects and struct columns. Plain text has only the key "text".
        reject: Function called for each line that cannot be used; it raises or takes note.
        id_key: Key of a document's id.
        skip_empty: Whether a document without text under all keys is rejected.
        whole: Whether a document is a whole record, a dictionary, in place of its texts.
        max_size: Size of the longest line, record or text in bytes. A longer one is never in
            memory, but for Parquet and Arrow.
        block_size: Number of bytes to read at a time.
    """

    keys: tuple[str, ...]
    reject: Reject
    id_key: str = "id"
    skip_empty: bool = False
    whole: bool = False
    max_size: int = MAX_DOCUMENT_SIZE
    block_size: int = BLOCK_SIZE

    def reject_long(self, line: int, byte_offset: int, name: str) -> None:
        """Rejects a line, row or text of more than `max_size` bytes, and keeps none of them."""
        self.reject(line, byte_offset, too_long(name, self.max_size), b"")


@dataclass
class Documents:
    """A batch of documents, about 256 KB: larger batches of short ones leave a core's cache.

    Attributes:
        texts: For each key, the text (or the list of texts) of each document; or the records of
            all documents.
        lines: Line or row of each document, counted from the part's first, from 0: int64 [n].
        byte_offsets: Position of each line in the decompressed source; -1 for rows: int64 [n].
        ids: Id of each document as text, or None.
        num_lines: Number of lines or rows since the last batch, with blank and rejected ones.
        num_bytes: Number of bytes since the last batch, as `Part.size` counts them.
    """

    texts: list[list[Text]]
    lines: NDArray[np.int64]
    byte_offsets: NDArray[np.int64]
    ids: list[str | None]
    num_lines: int
    num_bytes: int

    def select(self, places: Sequence[int]) -> "Documents":
        """The documents at these places, with all lines and bytes."""
        return replace(
            self,
            texts=[[column[place] for place in places] for column in self.texts],
            lines=self.lines[places],
            byte_offsets=self.byte_offsets[places],
            ids=[self.ids[place] for place in places],
        )


class Batch:
    """Collects the documents of a part, and counts its lines and bytes between two batches.

    Args:
        query: What is asked of the part.
        size: Bytes of the part on disk, `Part.size`.
    """

    def __init__(self, query: Query, size: int) -> None:
        self._query, self._size = query, size
        self._num_lines = self._num_bytes = 0
        self._documents: list[tuple[Sequence[Text], int, int, str | None]] = []
        self._columns: Any = None  # of documents that were added together

    def add(
        self, texts: Sequence[Any], line: int, byte_offset: int = -1, id_: str | None = None
    ) -> None:
        """Adds a document with its text under each key.

        Args:
            texts: For each key, the text or the list of texts; or the record alone.
            line: Line or row, counted from the part's first, from 0.
            byte_offset: Position of the line in the decompressed source; -1: not known.
            id_: The document's id as text, if any.

        Raises:
            BadDocumentError: The document is empty, and the query rejects such.
        """
        if self._query.skip_empty and not any(
            text if isinstance(text, str) else any(text) for text in texts
        ):
            raise BadDocumentError("the document is empty")
        self._documents.append((texts, line, byte_offset, id_))

    def add_all(
        self, texts: list[list[Text]], first: int, byte_offsets: Any, ids: list[str | None]
    ) -> None:
        """Adds the documents, maybe empty, of consecutive lines from number `first` on.

        The batch has no others until they are taken. `texts` has a list for each key.
        """
        self._columns = texts, np.arange(first, first + len(ids)), byte_offsets, ids

    def take(self, num_lines: int, position: int, total: int | None) -> Documents:
        """The documents since the last call.

        Args:
            num_lines: Number of lines of the part that have been read.
            position: Number of bytes on disk that have been read.
            total: Number of bytes to read, of which `position` is a share; None: of a pipe.
        """
        if total is not None:
            position = self._size * min(position, total) // max(total, 1)
        if self._columns is None:
            rows = self._documents
            values, *columns = zip(*rows, strict=True) if rows else [()] * 4
            texts = [[one[place] for one in values] for place in range(len(self._query.keys))]
            self._columns = texts, *columns
        texts, lines, byte_offsets, ids = self._columns
        documents = Documents(
            texts,
            np.array(lines, np.int64),
            np.array(byte_offsets, np.int64),
            list(ids),
            num_lines - self._num_lines,
            position - self._num_bytes,
        )
        self._num_lines, self._num_bytes = num_lines, position
        self._documents, self._columns = [], None
        return documents


def check_keys(keys: Sequence[str]) -> tuple[str, ...]:
    """The JSON keys as a tuple; ConfigError unless they are a list of strings, each once."""
    if isinstance(keys, str):
        raise ConfigError(f"json_keys is {keys!r}, one key alone; give a list: [{keys!r}]")
    names = tuple(keys) if isinstance(keys, Iterable) else ()
    if not names or not all(isinstance(key, str) for key in names) or len({*names}) < len(names):
        raise ConfigError(f"json_keys are {shown(keys)}; give a list of one key or more, each once")
    for name in names:
        if "\0" in name or not is_unicode(name):
            raise ConfigError(f"the key {name!r} cannot be part of a file name; rename it")
    return names


def no_column(source: str, key: str, columns: list[str], kind: str = "") -> TextError:
    """The error of a table without a single column of texts, or lists of them, under a key."""
    names = ", ".join(columns[:10]) or "none"
    return TextError(
        f'{source} has no single column "{key}" of texts{kind}; its columns are: {names}. '
        "Name the text's column with --json-keys"
    )


def read_records(
    stream: ByteStream,
    separator: bytes,
    query: Query,
    batch: Batch,
    byte_offset: int,
    name: str,
    add: Callable[[bytes, int, int], None],
    add_all: Callable[[list[bytes], int, int], bool] = lambda *records: False,
    check_start: Callable[[bytes], None] = lambda start: None,
) -> Iterator[Documents]:
    """The documents of a stream of records, in blocks of about `query.block_size` bytes.

    A byte order mark at the beginning of a source is left out, and counts in the offsets. A record
    beyond the limit is rejected, and skipped as soon as it is known to be.

    Args:
        separator: Bytes between two records. If empty, all data are one record.
        byte_offset: Position of the stream's first byte in the source.
        name: What a record is called, "line" or "text".
        add: Function that adds a record, on a line and at a byte offset, to the batch; it may
            raise a BadDocumentError.
        add_all: Function that adds all records of a block faster, from the line and byte offset of
            the first on; or adds none and returns False.
        check_start: Function of the first bytes of a source, without the mark, which may raise.
    """
    data, line, offset = b"", 0, byte_offset
    if byte_offset == 0:
        while len(data) < len(UTF8_BOM) and (more := stream.read(query.block_size)):
            data += more
        offset = len(UTF8_BOM) * data.startswith(UTF8_BOM)
        data = data[offset:]
        check_start(data)
    breaks, is_inside, is_last = separator.count(b"\n"), False, False
    *records, rest = data.split(separator) if separator else [data]
    while True:
        is_short = not is_inside and max(map(len, records), default=0) <= query.max_size
        if is_short and add_all(records, line, offset):
            line += len(records)
            offset += sum(map(len, records)) + len(records) * len(separator)
            records = []
        for record in records:
            try:
                if is_inside:
                    is_inside = False
                elif len(record) > query.max_size:
                    query.reject_long(line, offset, name)
                else:
                    add(record, line, offset)
            except BadDocumentError as error:
                query.reject(line, offset, str(error), record)
            line += 1 if name == "line" else record.count(b"\n") + breaks
            offset += len(record) + len(separator)
        yield batch.take(line, stream.position, stream.size)
        if is_last:
            return
        # The last bytes may be the start of a separator.
        inside = max(len(rest) - max(len(separator) - 1, 0), 0)
        if inside > query.max_size and not is_inside:
            query.reject_long(line, offset, name)
            is_inside = True
        if is_inside:
            line, offset = line + rest.count(b"\n", 0, inside), offset + inside
            rest = rest[inside:]
        more = stream.read(read_size(len(rest), query.max_size, query.block_size))
        if more:
            data = rest + more
            *records, rest = data.split(separator) if separator else [data]
        else:
            is_last, breaks = True, 0
            # A file that is one record may be empty.
            records = [rest] if rest or is_inside or not separator else []
            offset = offset if rest else byte_offset


def read_size(num_bytes: int, max_size: int, block_size: int) -> int:
    """Reads grow with a record, so that its bytes are copied and searched few times."""
    return max(block_size, min(num_bytes, max_size - num_bytes + 1))
