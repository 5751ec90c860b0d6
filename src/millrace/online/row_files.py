"""Files of rows by number: lines of JSON, and groups of rows of tables.

What is learnt of a file in one pass stands in the cache folder, under the file's path, size and
time: the XXH3-64 of its content, and where its rows are.
"""

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.cache import arrays
from millrace.errors import TextError
from millrace.files import atomic_file, readable, sum_of, writers_lock, xxh3
from millrace.ragged import equal_runs
from millrace.samples.tokens import Numbers
from millrace.storage import FileStream, StoredFile, storage_of
from millrace.text import BadDocumentError, InputFile, Query, find_inputs, open_part
from millrace.text.documents import UTF8_BOM, too_long
from millrace.text.formats.arrow_tables import records_of
from millrace.text.formats.separated_records import check_lines, loads, parse_line
from millrace.text.json_values import check_object
from millrace.text.parts import unchanged
from millrace.text.streams import is_remote, open_path

Row = dict[str, Any] | BadDocumentError
"""A row, or why it cannot be used."""

_BLOCK = 1 << 20  # bytes of lines that are read at a time
_LONGEST_BLANK = 100_000_000  # bytes of white space that are read to tell a blank line
_GROUP_MEMORY = 1 << 28  # bytes of decoded groups of rows of a file that are kept
_IS_SPACE = np.isin(np.arange(256), list(b" \t\n\r\v\f"))  # what `bytes.strip` takes away
_PROBLEM = "\0problem"  # column of a converted file


class _RowFile:
    """A file of rows, and what was learnt of it. `unit` is what a row is called, "line" or "row";
    `identity` tells the rows from others, whatever the file's path."""

    def __init__(self, file: InputFile, folder: str, kind: str, make: Any, *tables: str) -> None:
        self.file, self.unit = file, file.format.unit
        self._notes = _notes_of(file, folder, kind, make, *tables)
        self.identity = [file.format.name, file.size, f"{self._notes['xxh3'][0]:016x}"]

    def locate(self, number: int) -> tuple[str, int]:
        """The path of the file, and the line or row in it."""
        lines = self._notes["lines"]
        line = lines[number] if len(lines) else number + self.file.format.first_line
        return self.file.path, int(line)


class JsonLinesFile(_RowFile):
    """The lines of a JSONL file that are not blank, read by position."""

    def __init__(self, file: InputFile, folder: str, max_size: int) -> None:
        super().__init__(file, folder, "rows", _read_lines)
        self._max_size = max_size

    def __len__(self) -> int:
        return len(self._notes["bounds"]) - 1

    def read(self, numbers: Numbers) -> list[Row]:
        bounds, limit, path = self._notes["bounds"], self._max_size, self.file.path
        firsts = bounds[numbers]
        # Blank lines may follow; two bytes more than the limit tell a line that is too long.
        sizes = np.minimum(bounds[numbers + 1] - firsts, limit + 2)
        with _opened(self.file) as gather:
            try:
                data: Any = gather(firsts, sizes)
            except ValueError as error:
                raise TextError(f"{path} was changed while it was read: {error}") from None
        block, ends = memoryview(data), np.cumsum(sizes)
        lines = list(map(block.__getitem__, map(slice, (ends - sizes).tolist(), ends.tolist())))
        with contextlib.suppress(ValueError):  # not JSON, or such as orjson does not read
            # The line break and blank lines behind a row are white space of JSON, too.
            rows = list(map(loads, lines))
            if {*map(type, rows)} == {dict} and sizes.max() <= limit:
                return rows
        return [self._parsed(bytes(line).partition(b"\n")[0]) for line in lines]

    def _parsed(self, line: bytes) -> Row:
        try:
            if len(line) > self._max_size:
                raise BadDocumentError(too_long("line", self._max_size))
            return check_object(parse_line(line))
        except BadDocumentError as error:
            return error


class TableFile(_RowFile):
    """The rows of a Parquet, Arrow or CSV file, a group at a time; the last groups are kept."""

    def __init__(self, file: InputFile, folder: str, max_size: int) -> None:
        self._table = file
        if file.format.needs_file:
            super().__init__(file, folder, "groups", _count_groups)
        else:
            kind = f"csv{max_size}"  # rows that are longer are bad ones
            path = os.path.join(folder, _name(kind, file.path) + ".arrow")
            super().__init__(file, folder, kind, partial(_convert, max_size, path), path)
            [self._table] = find_inputs([path])
        self._ends = np.cumsum(self._notes["counts"])
        self._groups: dict[int, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_groups": {}}

    def __len__(self) -> int:
        return int(self._notes["counts"].sum())

    def read(self, numbers: Numbers) -> list[Row]:
        rows: list[Any] = [None] * len(numbers)
        order = np.argsort(numbers, kind="stable")
        firsts = numbers[order]
        groups = np.searchsorted(self._ends, firsts, side="right")
        with _opened(self.file):
            # Runs of consecutive rows in a group: `take` does not know all types of Arrow.
            for run in equal_runs(firsts - np.arange(len(firsts)) + groups):
                table = self._group(int(groups[run.start]))
                start = int(firsts[run.start] - self._ends[groups[run.start]]) + len(table)
                some = records_of(table.slice(start, run.stop - run.start), self.file.path)
                for place, row in zip(order[run].tolist(), some, strict=True):
                    problem = row.pop(_PROBLEM, None)
                    rows[place] = BadDocumentError(problem) if problem else row
        return rows

    def _group(self, number: int) -> Any:
        """A group of rows as Arrow's table."""
        # Threads may read a group twice, and no harm is done: there is no lock that a fork keeps.
        if (group := self._groups.get(number)) is None:
            format_: Any = self._table.format
            group = format_.table(self._table.part(number, number + 1))
            if sum(table.nbytes for table in [group, *self._groups.values()]) > _GROUP_MEMORY:
                self._groups = {}
            self._groups[number] = group
        return group


@contextlib.contextmanager
def _opened(file: InputFile) -> Iterator[Callable[[Numbers, Numbers], Any]]:
    """Reads pieces of a file; TextError if it is not, or does not stay, what was indexed."""
    source: Any
    with readable(file.path):
        if is_remote(file.path):
            source = FileStream(_object(file.path, file.size, file.mtime_ns))
            gather = source.reader.gather
        else:
            source = open(file.path, "rb", buffering=0)  # noqa: SIM115
            gather = partial(_native.read_packed, source.fileno(), int(file.size or 0))
    with source, unchanged(file.part(), source):
        yield gather


@cache
def _object(path: str, size: int, mtime_ns: int) -> StoredFile:
    """An object, which a process opens once: what is read later is of this object, or an error."""
    return storage_of(path).open(path, "file")


# ---- what is learnt in one pass ----

Notes = dict[str, NDArray[Any]]
"""Arrays by name. `lines` are the lines or rows of the file's rows: int64 [n]; empty, or not there,
if they are consecutive. `xxh3` is the XXH3-64 of its content, where it is known already."""


def _notes_of(
    file: InputFile, folder: str, kind: str, make: Callable[[InputFile], Notes], *tables: str
) -> arrays.ArraySet:
    """What `make`, which may write `tables`, has noted of the file as it is, perhaps earlier."""
    name = _name(kind, file.path)
    key = {"path": _real(file.path), "size": file.size, "mtime_ns": file.mtime_ns}
    if is_remote(file.path):
        key["version"] = _object(file.path, file.size, file.mtime_ns).identity.version

    def find() -> arrays.ArraySet | None:
        return arrays.usable(folder, name, key) if all(map(os.path.exists, tables)) else None

    if (notes := find()) is None:
        with writers_lock(os.path.join(folder, f"{name}.pass.lock"), *tables):
            if (notes := find()) is None:
                with _opened(file):
                    contents = {"lines": np.empty(0, np.int64), **make(file)}
                    if "xxh3" not in contents:
                        with readable(file.path):
                            _, digest = sum_of(file.path, opened=open_path(file.path))
                        contents["xxh3"] = np.array([int(digest, 16)], np.uint64)
                notes = arrays.store(folder, name, key, contents)
    return notes


def _name(kind: str, path: str) -> str:
    return f"{kind}-{arrays.fingerprint(_real(path))[:16]}"


def _real(path: str) -> str:
    return path if is_remote(path) else os.path.realpath(path)


def _read_lines(file: InputFile) -> Notes:
    """Where the lines that are not blank start; their numbers, if others are blank."""
    digest, offset, mark = xxh3(), 0, 0
    starts, suspects = [np.zeros(1, np.int64)], [np.ones(1, np.bool_)]
    # A thread reads while this one searches: both leave the interpreter to the other.
    with open_part(file.part()) as stream, ThreadPoolExecutor(1) as reader:
        following = reader.submit(stream.read, _BLOCK)
        while data := following.result():
            following = reader.submit(stream.read, _BLOCK)
            digest.update(data)
            if offset == 0:
                mark = len(UTF8_BOM) * data.startswith(UTF8_BOM)
                check_lines(file.path, data[mark:])
            block = np.frombuffer(data, np.uint8)
            places = np.flatnonzero(block == ord("\n")) + 1  # a line begins there
            starts.append(places + offset)
            # What a line in the next block begins with is not known here: it is a suspect, too.
            suspects.append(_IS_SPACE[block.take(places, mode="clip")])
            offset += len(data)
    flat = np.concatenate(starts)
    flat[0] = mark
    is_blank = np.concatenate(suspects)[flat < offset]
    flat = flat[flat < offset]
    with io.BufferedReader(open_path(file.path)) as source:
        for place in np.flatnonzero(is_blank).tolist():
            source.seek(int(flat[place]))
            line = source.readline(_LONGEST_BLANK)
            is_blank[place] = not line.strip() and len(line) < _LONGEST_BLANK
    rows = np.flatnonzero(~is_blank)
    lines = rows + 1 if is_blank.any() else rows[:0]
    digests = np.array([digest.intdigest()], np.uint64)
    return {"bounds": np.append(flat[rows], offset), "lines": lines, "xxh3": digests}


def _count_groups(file: InputFile) -> Notes:
    format_: Any = file.format
    counts = format_.group_counts(file.path)
    if counts is None:
        raise TextError(
            f"{file.path} is an Arrow stream, which has no index of its rows. Write an Arrow file "
            "(pyarrow.ipc.new_file), or give the `datasets.Dataset` that it belongs to"
        )
    return {"counts": np.array(counts, np.int64)}


def _convert(max_size: int, path: str, file: InputFile) -> Notes:
    """Writes the rows of a CSV file as an Arrow file, with the problems of bad ones."""
    import pyarrow as pa

    rows: list[tuple[int, dict[str, Any]]] = []  # of a batch, with their places

    def reject(row: int, _: int, reason: str, data: bytes) -> None:
        rows.append((row, {_PROBLEM: reason}))

    format_: Any = file.format
    places: list[NDArray[np.int64]] = []
    query = Query(keys=("text",), reject=reject, whole=True, max_size=max_size)
    schema = pa.schema(dict.fromkeys([*format_.columns(file.part(), query), _PROBLEM], pa.string()))
    with atomic_file(path) as target, pa.ipc.new_file(target, schema) as writer:
        for documents in format_.read(file.part(), query):
            rows += zip(documents.lines.tolist(), documents.texts[0], strict=True)
            rows.sort(key=itemgetter(0))
            writer.write_batch(pa.RecordBatch.from_pylist([row for _, row in rows], schema))
            places.append(np.array([place for place, _ in rows], np.int64))
            rows.clear()
    counts = np.array([*map(len, places)], np.int64)
    lines = np.concatenate(places) + format_.first_line
    return {"counts": counts, "lines": lines}
