"""What a reader asks of a part of a file, and documents in batches."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.checks import shown
from millrace.errors import ConfigError, TextError
from millrace.text.json_values import BadDocumentError, Text, is_unicode
from millrace.text.streams import BLOCK_SIZE

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
        self._clear()

    def _clear(self) -> None:
        self._texts: list[list[Text]] = [[] for _ in self._query.keys]
        self._lines: Any = []
        self._byte_offsets: Any = []
        self._ids: list[str | None] = []

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
        for column, text in zip(self._texts, texts, strict=True):
            column.append(text)
        self._lines.append(line)
        self._byte_offsets.append(byte_offset)
        self._ids.append(id_)

    def add_all(
        self, texts: list[list[Text]], first: int, byte_offsets: Any, ids: list[str | None]
    ) -> None:
        """Adds the documents, maybe empty, of consecutive lines from number `first` on.

        The batch has no others until they are taken. `texts` has a list for each key.
        """
        self._texts, self._ids = texts, ids
        self._lines, self._byte_offsets = np.arange(first, first + len(ids)), byte_offsets

    def take(self, num_lines: int, position: int, total: int | None) -> Documents:
        """The documents since the last call.

        Args:
            num_lines: Number of lines of the part that have been read.
            position: Number of bytes on disk that have been read.
            total: Number of bytes to read, of which `position` is a share; None: of a pipe.
        """
        if total is not None:
            position = self._size * min(position, total) // max(total, 1)
        documents = Documents(
            self._texts,
            np.array(self._lines, np.int64),
            np.array(self._byte_offsets, np.int64),
            self._ids,
            num_lines - self._num_lines,
            position - self._num_bytes,
        )
        self._num_lines, self._num_bytes = num_lines, position
        self._clear()
        return documents


def check_keys(keys: Sequence[str]) -> tuple[str, ...]:
    """The JSON keys as a tuple; ConfigError unless they are a list of strings, each once."""
    names = tuple(keys) if isinstance(keys, Iterable) and not isinstance(keys, str) else ()
    are_names = all(isinstance(key, str) and "\0" not in key and is_unicode(key) for key in names)
    if not names or not are_names or len({*names}) < len(names):
        problem = f"json_keys are {shown(keys)}; give a list of one key or more, each once"
        raise ConfigError(f"{problem}, which can be part of a file name")
    return names


def no_column(source: str, key: str, columns: list[str], kind: str = "") -> TextError:
    """The error of a table without a single column of texts, or lists of them, under a key."""
    names = ", ".join(columns[:10]) or "none"
    return TextError(
        f'{source} has no single column "{key}" of texts{kind}; its columns are: {names}. '
        "Name the text's column with --json-keys"
    )


def read_size(num_bytes: int, max_size: int, block_size: int) -> int:
    """Reads grow with a record, so that its bytes are copied and searched few times."""
    return max(block_size, min(num_bytes, max_size - num_bytes + 1))
