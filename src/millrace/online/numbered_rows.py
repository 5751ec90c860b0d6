"""Rows by number: of files, of a sequence of dictionaries, of a `datasets.Dataset`."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from millrace.checks import check_folder, check_int, shown
from millrace.deferred import cached_property
from millrace.errors import CacheError, ConfigError, TextError
from millrace.files import checksum
from millrace.online.row_files import JsonLinesFile, Row, TableFile
from millrace.order import split_ranges
from millrace.order.splits import Bookends
from millrace.ragged import starts_of
from millrace.samples.dataset import check_numbers
from millrace.samples.tokens import Numbers
from millrace.text import BadDocumentError, find_inputs
from millrace.text.formats.arrow_tables import records_of
from millrace.tokenizing.input_tasks import absolute

_LONGEST_DOCUMENT = 100_000_000  # bytes, as of `millrace tokenize`
BLOCK = 256
"""Rows that are read, and encoded, at a time: what a call costs is then a fiftieth of its work."""


def folder_of(cache: str | os.PathLike[str] | None) -> str:
    """The cache folder; for None, a new one that is removed when the process ends.

    CacheError for one that cannot be made.
    """
    if cache is not None:
        folder = check_folder("cache", cache)
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise CacheError(f"cache {folder}: {error.strerror}. Give another folder") from None
        return folder
    folder, owner = tempfile.mkdtemp(prefix="millrace-"), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not a forked child
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


class MemoryPart:
    """The rows of a sequence of dictionaries, or of a `datasets.Dataset`."""

    file, unit = None, "row"

    def __init__(self, source: Any) -> None:
        self._source, self._is_dataset = source, _is_dataset(source)
        self._fingerprint = str(getattr(source, "_fingerprint", None))
        if self._is_dataset and source.format["type"] != "custom":  # which is the caller's
            # Other formats decode images, and give tensors or data frames.
            self._source = source.with_format("arrow", columns=source.format["columns"])

    def __len__(self) -> int:
        return len(self._source)

    def read(self, numbers: Numbers) -> list[Row]:
        if self._is_dataset:
            columns = self._source[numbers.tolist()]  # one call, which reads few pages
            if not isinstance(columns, Mapping):
                return list[Row](records_of(columns, "the dataset"))
            values = zip(*columns.values(), strict=True)
            return [dict(zip(columns, row, strict=True)) for row in values]
        return [_checked(self._source[number]) for number in numbers.tolist()]

    def locate(self, number: int) -> tuple[str, int]:
        return type(self._source).__name__, number

    @cached_property
    def identity(self) -> list[Any]:
        if self._is_dataset:
            return ["memory", len(self), self._fingerprint]
        lines = (json.dumps(row, default=_whole).encode() + b"\n" for row in self._source)
        return ["memory", len(self), checksum(lines)]


def _whole(value: Any) -> Any:
    """A value of no type of JSON as one; `str` leaves out the middle of a long array."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _checked(row: Any) -> Row:
    if isinstance(row, Mapping | BadDocumentError):
        return dict(row) if isinstance(row, Mapping) else row
    return BadDocumentError(f"the row is {shown(row, 60)}; a dictionary is needed")


class Rows:
    """Rows, which are dictionaries, by their number. `open_rows` makes them.

    Attributes:
        folder: Folder of what is made of the rows.
        parts: What holds the rows, one after the other.
        start, stop: The range of the rows of all parts.
    """

    def __init__(
        self, parts: Sequence[Any], folder: str, max_size: int, start: int = 0, stop: int = -1
    ) -> None:
        self.parts, self.folder, self.max_size = parts, folder, max_size
        self._starts = starts_of(map(len, parts))
        self.start, self.stop = start, int(self._starts[-1]) if stop < 0 else stop

    def __len__(self) -> int:
        return self.stop - self.start

    def read(self, numbers: Numbers) -> list[Row]:
        """The rows of some numbers, int64 [n] in [0, len); in place of a bad one, its reason."""
        numbers = numbers + self.start
        rows: list[Any] = [None] * len(numbers)
        parts = np.searchsorted(self._starts, numbers, side="right") - 1
        for part in np.unique(parts).tolist():
            places = np.flatnonzero(parts == part)
            of_part = self.parts[part].read(numbers[places] - self._starts[part])
            for place, row in zip(places.tolist(), of_part, strict=True):
                rows[place] = row
        return rows

    def place(self, number: int) -> str:
        """Where a row stands, for messages: "web.jsonl, line 7", or "list, row 7"."""
        part = int(np.searchsorted(self._starts, number + self.start, side="right")) - 1
        file, line = self.parts[part].locate(int(number + self.start - self._starts[part]))
        return f"{file}, {self.parts[part].unit} {line}"

    def blocks(self, size: int) -> list[tuple[Any, range]]:
        """The rows in blocks of at most `size`: a part, and numbers in it. At least one block."""
        blocks = []
        for part, first, last in zip(self.parts, self._starts, self._starts[1:], strict=False):
            numbers = range(max(self.start - first, 0), min(self.stop, last) - first)
            blocks += [(part, numbers[one : one + size]) for one in range(0, len(numbers), size)]
        return blocks or [(self.parts[0], range(0))]

    def fingerprint(self) -> dict[str, Any]:
        """What decides the rows, as plain values: their content, not where it stands."""
        return {
            "parts": [part.identity for part in self.parts],
            "max_document_size": self.max_size,
            "range": [self.start, self.stop],
        }

    def rows(self, numbers: ArrayLike) -> list[dict[str, Any]]:
        """The rows of some numbers.

        Args:
            numbers: Integers [n], each in [0, len).

        Raises:
            IndexError: No such row.
            TextError: A row that cannot be used, with its place; a file that has changed.
        """
        checked = check_numbers(numbers, len(self), "row numbers")
        rows = self.read(checked)
        for number, row in zip(checked.tolist(), rows, strict=True):
            if isinstance(row, BadDocumentError):
                raise TextError(f"{self.place(number)}: {row}")
        return rows  # type: ignore[return-value]

    def split(self, split: str | Sequence[Bookends | None]) -> list[Rows | None]:
        """The rows of train, valid and test; None for a split without a share.

        Args:
            split: Shares such as "969,30,1", by the arithmetic of token files (`split_ranges`).
        """
        return [
            None if share is None else self.range(self.start + share[0], self.start + share[1])
            for share in split_ranges(len(self), split)
        ]

    def range(self, start: int = 0, stop: int = -1) -> Rows:
        """The rows from `start` up to `stop` of all parts; without ends, all."""
        return Rows(self.parts, self.folder, self.max_size, start, stop)


def _is_dataset(source: Any) -> bool:
    return all(hasattr(source, name) for name in ("column_names", "_fingerprint", "__getitem__"))


def open_rows(
    source: Any,
    *,
    cache: str | os.PathLike[str] | None = None,
    max_document_size: int = _LONGEST_DOCUMENT,
) -> Rows:
    """Rows by number.

    A JSONL file is read once, from start to end, which gives its checksum and the positions of its
    lines; later starts find both in the cache folder. Of Parquet and Arrow files one group of rows
    is read at a time, so small groups are best where rows are shuffled. CSV is converted to Arrow
    in the cache folder.

    Args:
        source: Files, folders or patterns (one, or a list), which `millrace.text.find_inputs` puts
            in order; a `datasets.Dataset`; or a sequence of dictionaries.
        cache: Folder for what is made of the rows. None: a temporary one that is removed with the
            process, so that each process of a run makes its own.
        max_document_size: Largest line of JSON or CSV in bytes; where texts are tokenised once,
            into token files, also largest text of a table.

    Raises:
        TextError: A file that cannot be read, or not by number: a compressed one, a pipe, an Arrow
            stream, plain text.
        ConfigError: A source of another type.

    Example:
        >>> rows = open_rows([{"text": "mill"}, {"text": "race"}])
        >>> len(rows), rows.rows([1]), rows.place(1)
        (2, [{'text': 'race'}], 'list, row 1')
    """
    folder = folder_of(cache)
    max_size = check_int("max_document_size", max_document_size, 1)
    names: Any = [source] if isinstance(source, (str, bytes, os.PathLike)) else source
    is_list = isinstance(names, (list, tuple)) and len(names) > 0
    if is_list and all(isinstance(entry, (str, bytes, os.PathLike)) for entry in names):
        # Another working directory does not change them.
        files = find_inputs([absolute(os.fsdecode(name)) for name in names])
        for file in files:
            kind = "a pipe" if file.is_pipe else file.compression or file.format.name
            if kind not in ("jsonl", "parquet", "arrow", "csv", "tsv"):
                raise TextError(
                    f"{file.path} ({kind}) has no row numbers: decompress it, write it as a file "
                    "of JSON lines, tokenise it once (`millrace tokenize`), or give StreamDataset "
                    "a function that reads it in turn"
                )
        parts = [
            (TableFile if file.format.unit == "row" else JsonLinesFile)(file, folder, max_size)
            for file in files
        ]
        return Rows(parts, folder, max_size)
    if _is_dataset(source) or (isinstance(source, Sequence) and not isinstance(source, bytearray)):
        return Rows([MemoryPart(source)], folder, max_size)
    values = f": one of its values ({shown([*source], 60)})" if isinstance(source, Mapping) else ""
    raise ConfigError(
        f"rows cannot be read by number from a {type(source).__name__}: give files, a "
        f"datasets.Dataset or a collections.abc.Sequence of dictionaries{values}; what can only be "
        "read in turn belongs in a StreamDataset"
    )
