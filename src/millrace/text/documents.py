"""Documents in batches, and what a reader asks of a part of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millrace import checks
from millrace.errors import ConfigError
from millrace.text.records import BadDocumentError, Text, is_unicode
from millrace.text.streams import BLOCK_SIZE

MAX_DOCUMENT_SIZE = 1 << 28
"""Size of the longest line, record or text that is read by default, in bytes."""

Reject = Callable[[int, int, str, bytes], None]
"""What is called for each line that cannot be used: with the number of the line within the part,
the byte offset in the decompressed source (-1 for rows), the reason, and the bytes of the line,
which a line longer than the limit has not."""


@dataclass(frozen=True, kw_only=True)
class Query:
    """What a reader asks of a part.

    Attributes:
        keys: Keys of the texts: JSON keys or columns. If there is none of that name, dots reach
            into objects and struct columns. Plain text has only the key "text".
        reject: Function that is called for each line that cannot be used; it raises or takes note.
        id_key: Key of a document's id.
        skip_empty: Whether a document without text under all keys is rejected.
        max_size: Size of the longest line, record or text, in bytes. A longer one is never in
            memory, except of Parquet and Arrow.
        block_size: Number of bytes to read at a time.
    """

    keys: tuple[str, ...]
    reject: Reject
    id_key: str = "id"
    skip_empty: bool = False
    max_size: int = MAX_DOCUMENT_SIZE
    block_size: int = BLOCK_SIZE

    def reject_long(self, line: int, byte_offset: int, name: str) -> None:
        """Rejects a line, row or text of more than `max_size` bytes; none of them is kept."""
        reason = f"the {name} is longer than {self.max_size} bytes. Raise max_document_size, or "
        self.reject(line, byte_offset, reason + "remove it", b"")


@dataclass
class Documents:
    """A batch of documents, about 256 KB: larger batches of short ones leave a core's cache.

    Attributes:
        texts: For each key, the text (or the list of texts) of each document.
        lines: Line or row of each document, counted from the part's first, from 0: int64 [n].
        byte_offsets: Position of each document's line in the decompressed source; -1 for rows:
            int64 [n].
        ids: Value of each document's id as text, or None.
        num_lines: Number of lines or rows since the last batch, with blank and rejected ones.
        num_bytes: Number of bytes since the last batch, as `Part.size` counts them.
    """

    texts: list[list[Text]]
    lines: NDArray[np.int64]
    byte_offsets: NDArray[np.int64]
    ids: list[str | None]
    num_lines: int
    num_bytes: int


class Batch:
    """Collects the documents of a part, and counts its lines and bytes between two batches.

    Args:
        query: What is asked of the part.
        size: Bytes of the part on disk, `Part.size`.
    """

    def __init__(self, query: Query, size: int) -> None:
        self._query, self._size = query, size
        self._num_lines = self._num_bytes = 0
        self._texts: list[list[Text]] = [[] for _ in query.keys]
        self._lines: Sequence[int] | NDArray[np.int64] = []
        self._byte_offsets: Sequence[int] | NDArray[np.int64] = []
        self._ids: list[str | None] = []

    def add(
        self, texts: Sequence[Text], line: int, byte_offset: int = -1, id_: str | None = None
    ) -> None:
        """Adds a document, with its text under each key.

        Raises:
            BadDocumentError: An empty document, if such are rejected.
        """
        if self._query.skip_empty and not any(
            text if isinstance(text, str) else any(text) for text in texts
        ):
            raise BadDocumentError("the document is empty")
        for column, text in zip(self._texts, texts, strict=True):
            column.append(text)
        self._lines.append(line)  # type: ignore[union-attr]
        self._byte_offsets.append(byte_offset)  # type: ignore[union-attr]
        self._ids.append(id_)

    def add_all(
        self,
        texts: list[list[Text]],
        lines: NDArray[np.int64],
        byte_offsets: NDArray[np.int64],
        ids: list[str | None],
    ) -> None:
        """Adds all documents of a batch at once, unchecked; there must be no other."""
        self._texts, self._ids = texts, ids
        self._lines, self._byte_offsets = lines, byte_offsets

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
            np.asarray(self._lines, np.int64),
            np.asarray(self._byte_offsets, np.int64),
            self._ids,
            num_lines - self._num_lines,
            position - self._num_bytes,
        )
        self._num_lines, self._num_bytes = num_lines, position
        self._texts = [[] for _ in self._query.keys]
        self._lines, self._byte_offsets, self._ids = [], [], []
        return documents


def check_keys(keys: Sequence[str]) -> tuple[str, ...]:
    """The JSON keys as a tuple; ConfigError unless they are a list of strings, each once."""
    if isinstance(keys, str):
        raise ConfigError(f"json_keys is {keys!r}, one key alone; give a list: [{keys!r}]")
    names = tuple(keys) if isinstance(keys, Iterable) else ()
    if not names or not all(isinstance(key, str) for key in names) or len({*names}) < len(names):
        raise ConfigError(
            f"json_keys are {checks.shown(keys)}; give a list of at least one key, each once"
        )
    for name in names:
        if "\0" in name or not is_unicode(name):
            raise ConfigError(f"the key {name!r} cannot be part of a file name; rename it")
    return names
