"""Rows by number: of files, of a sequence of dictionaries, of a `datasets.Dataset`."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from millrace.checks import check_int, check_ints, check_path, shown
from millrace.deferred import cached_property
from millrace.errors import ConfigError, TextError
from millrace.files import atomic_file, xxh3
from millrace.online.row_files import JsonLinesFile, Row, TableFile
from millrace.order import split_ranges
from millrace.order.splits import Bookends
from millrace.ragged import starts_of
from millrace.samples.tokens import Numbers
from millrace.text import BadDocumentError, InputFile, find_inputs
from millrace.text.formats import PlainText

_LONGEST_DOCUMENT = 100_000_000  # bytes, as of `millrace tokenize`
_BLOCK = 256  # rows that are read at a time from the first to the last


def folder_of(cache: str | os.PathLike[str] | None) -> str:
    """The cache folder; for None, a new one that is removed when the process ends."""
    if cache is not None:
        return check_path("cache", cache)
    folder = tempfile.mkdtemp(prefix="millrace-")
    atexit.register(_remove, folder, os.getpid())
    return folder


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # not a forked child
        shutil.rmtree(folder, ignore_errors=True)


class Rows:
    """Rows, which are dictionaries, by their number. `open_rows` makes them.

    Attributes:
        folder: Folder of what is made of the rows.
        files: The files that hold them; empty for rows in memory.
    """

    folder: str
    files: Sequence[InputFile] = ()

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, numbers: Numbers) -> list[Row]:
        """The rows of some numbers, int64 [n] in [0, len); in place of a bad one, its reason."""
        raise NotImplementedError

    def place(self, number: int) -> str:
        """Where a row stands, for messages: "web.jsonl, line 7"."""
        raise NotImplementedError

    def fingerprint(self) -> dict[str, Any]:
        """What decides the rows, as plain values: their content, not where it stands."""
        raise NotImplementedError

    def rows(self, numbers: ArrayLike) -> list[dict[str, Any]]:
        """The rows of some numbers.

        Args:
            numbers: Integers [n], each in [0, len).

        Raises:
            IndexError: No such row.
            TextError: A row that cannot be used, with its place; a file that has changed.
        """
        checked = check_ints("the row numbers", numbers)
        if checked.size > 0 and not 0 <= checked.min() <= checked.max() < len(self):
            raise IndexError(
                f"row numbers {shown(checked.tolist())} are not in 0 to {len(self) - 1}"
            )
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
        base, first, _ = base_of(self)
        return [
            None if share is None else _Range(base, first + share[0], first + share[1])
            for share in split_ranges(len(self), split)
        ]

    def blocks(self) -> Iterator[Numbers]:
        """All row numbers, some at a time."""
        for start in range(0, len(self), _BLOCK):
            yield np.arange(start, min(start + _BLOCK, len(self)))


class _Range(Rows):
    """Consecutive rows of others."""

    def __init__(self, base: Rows, start: int, stop: int) -> None:
        self.base, self.start, self.stop, self.folder = base, start, stop, base.folder

    def __len__(self) -> int:
        return self.stop - self.start

    def read(self, numbers: Numbers) -> list[Row]:
        return self.base.read(numbers + self.start)

    def place(self, number: int) -> str:
        return self.base.place(number + self.start)

    def fingerprint(self) -> dict[str, Any]:
        return {**self.base.fingerprint(), "range": [self.start, self.stop]}


def base_of(rows: Rows) -> tuple[Rows, int, int]:
    """All rows that some rows are a range of, and that range."""
    return (rows.base, rows.start, rows.stop) if isinstance(rows, _Range) else (rows, 0, len(rows))


class _FileRows(Rows):
    """The rows of files, one after the other."""

    def __init__(self, files: Sequence[InputFile], folder: str, max_size: int) -> None:
        self.files, self.folder, self.max_size = files, folder, max_size
        self._parts = [
            (TableFile if file.format.unit == "row" else JsonLinesFile)(file, folder, max_size)
            for file in files
        ]
        self._starts = starts_of(map(len, self._parts))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _of(self, numbers: Any) -> Any:
        return np.searchsorted(self._starts, numbers, side="right") - 1

    def read(self, numbers: Numbers) -> list[Row]:
        if len(self._parts) == 1:
            return self._parts[0].read(numbers)
        rows: list[Any] = [None] * len(numbers)
        parts = self._of(numbers)
        for part in np.unique(parts).tolist():
            places = np.flatnonzero(parts == part)
            found = self._parts[part].read(numbers[places] - self._starts[part])
            for place, row in zip(places.tolist(), found, strict=True):
                rows[place] = row
        return rows

    def place(self, number: int) -> str:
        part = int(self._of(number))
        return self._parts[part].place(int(number - self._starts[part]))

    def fingerprint(self) -> dict[str, Any]:
        entries = [[part.file.format.name, part.file.size, part.digest] for part in self._parts]
        return {"kind": "files", "files": entries, "max_document_size": self.max_size}


class _MemoryRows(Rows):
    """The rows of a sequence of dictionaries, or of a `datasets.Dataset`."""

    def __init__(self, source: Any, folder: str) -> None:
        self.source, self.folder = source, folder
        self._is_dataset = _is_dataset(source)

    def __len__(self) -> int:
        return len(self.source)

    def read(self, numbers: Numbers) -> list[Row]:
        if self._is_dataset:
            columns = self.source[numbers.tolist()]  # one call, which reads few pages
            values = zip(*columns.values(), strict=True)
            return [dict(zip(columns, row, strict=True)) for row in values]
        return [_checked(self.source[number]) for number in numbers.tolist()]

    def place(self, number: int) -> str:
        return f"row {number} of the {type(self.source).__name__}"

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "memory", "rows": len(self), "content": self._content}

    @cached_property
    def _content(self) -> str:
        if self._is_dataset:
            return str(self.source._fingerprint)
        digest = xxh3()
        for numbers in self.blocks():
            digest.update(json.dumps(self.read(numbers), default=str).encode())
        return str(digest.hexdigest())

    def write_lines(self, path: str) -> None:
        """Writes the rows as JSON lines, for a job that reads files."""
        with atomic_file(path, durable=False) as file:
            for numbers in self.blocks():
                for number, row in zip(numbers.tolist(), self.rows(numbers), strict=True):
                    try:
                        file.write(json.dumps(row).encode() + b"\n")
                    except (TypeError, ValueError, RecursionError) as error:
                        problem = f"{self.place(number)} cannot be written as JSON ({error})"
                        raise ConfigError(f"{problem}: give texts, numbers, lists, dicts") from None


def _checked(row: Any) -> Row:
    if isinstance(row, Mapping):
        return dict(row)
    return BadDocumentError(f"the row is {shown(row, 60)}; a dictionary is needed")


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
        max_document_size: Largest line of JSON or CSV in bytes.

    Raises:
        TextError: A file that cannot be read, or not by number: a compressed one, a pipe, an Arrow
            stream, plain text.
        ConfigError: A source of another type.

    Example:
        >>> rows = open_rows([{"text": "mill"}, {"text": "race"}])
        >>> len(rows), rows.rows([1]), rows.place(1)
        (2, [{'text': 'race'}], 'row 1 of the list')
    """
    folder = folder_of(cache)
    max_size = check_int("max_document_size", max_document_size, 1)
    is_list = isinstance(source, (list, tuple)) and len(source) > 0
    if is_list and all(isinstance(entry, (str, bytes, os.PathLike)) for entry in source):
        return _FileRows(list(map(_numbered, find_inputs(source))), folder, max_size)
    if isinstance(source, (str, bytes, os.PathLike)):
        return _FileRows(list(map(_numbered, find_inputs([source]))), folder, max_size)  # type: ignore[list-item]
    if _is_dataset(source) or (isinstance(source, Sequence) and not isinstance(source, bytearray)):
        return _MemoryRows(source, folder)
    remedy = "give files, a datasets.Dataset or a sequence of dictionaries"
    if hasattr(source, "__iter__"):
        remedy = "what can only be read in turn belongs in a StreamDataset; else " + remedy
    raise ConfigError(f"rows cannot be read by number from a {type(source).__name__}: {remedy}")


def _numbered(file: InputFile) -> InputFile:
    """A file whose rows can be read by number; else a TextError with the remedy."""
    problem = ""
    if file.is_pipe:
        problem, remedy = "a pipe", "write it to a file"
    elif file.compression:
        problem, remedy = f"compressed ({file.compression})", "decompress it"
    elif isinstance(file.format, PlainText):
        problem, remedy = "plain text", 'write a line {"text": ...} for each document'
    elif type(file.format).__name__ not in ("JsonLines", "Parquet", "Arrow", "Csv"):
        problem, remedy = f"of the format {file.format.name}", "convert it to JSONL"
    if not problem:
        return file
    raise TextError(
        f"{file.path} is {problem}, so its rows have no numbers: {remedy}, tokenise it once "
        "(`millrace tokenize`), or read it in turn with StreamDataset"
    )
