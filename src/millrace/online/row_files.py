"""Files of rows by number: lines of JSON, and groups of rows of tables.

What is learnt of a file in one pass stands in the cache folder, under the file's path, size and
time: the XXH3-64 of its content, and where its rows are.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.cache import arrays
from millrace.errors import TextError
from millrace.files import atomic_file, file_lock, sum_of, xxh3
from millrace.samples.tokens import Numbers
from millrace.text import BadDocumentError, InputFile, Query, open_part
from millrace.text.documents import UTF8_BOM
from millrace.text.formats import Arrow
from millrace.text.formats.arrow_tables import records_of
from millrace.text.formats.separated_records import parse_line
from millrace.text.json_values import check_object
from millrace.text.parts import unchanged
from millrace.text.streams import readable

Row = dict[str, Any] | BadDocumentError
"""A row, or why it cannot be used."""

_BLOCK = 1 << 20  # bytes of lines that are read at a time
_GROUP_MEMORY = 1 << 28  # bytes of decoded groups of rows of a file that are kept
_IS_SPACE = np.isin(np.arange(256), list(b" \t\n\r\v\f"))  # what `bytes.strip` takes away
_NUMBER, _PROBLEM = "\0number", "\0problem"  # columns of a converted file


class JsonLinesFile:
    """The lines of a JSONL file that are not blank, read by position."""

    def __init__(self, file: InputFile, folder: str, max_size: int) -> None:
        self.file, self._max_size = file, max_size
        self._notes = _notes_of(file, folder, "lines", functools.partial(_read_lines, file))
        self.digest: str = self._notes.key["xxh3"]

    def __len__(self) -> int:
        return len(self._notes["starts"])

    def read(self, numbers: Numbers) -> list[Row]:
        starts = self._notes["starts"]
        firsts, is_last = starts[numbers], numbers == len(starts) - 1
        stops = np.where(is_last, self.file.size or 0, starts[numbers + ~is_last])
        # Blank lines may follow; two bytes more than the limit tell a line that is too long.
        sizes = np.minimum(stops - firsts, self._max_size + 2).tolist()
        with _opened(self.file) as descriptor:
            lines = list(map(os.pread, [descriptor] * len(sizes), sizes, firsts.tolist()))
        return list(map(self._parsed, lines))

    def _parsed(self, data: bytes) -> Row:
        line = data.partition(b"\n")[0]
        try:
            if len(line) > self._max_size:
                limit = f"{self._max_size} bytes. Raise max_document_size, or remove it"
                raise BadDocumentError(f"the line is longer than {limit}")
            return check_object(parse_line(line))
        except BadDocumentError as error:
            return error

    def place(self, number: int) -> str:
        lines = self._notes["lines"]
        line = int(lines[number]) if len(lines) else number + 1
        return f"{self.file.path}, line {line}"


class TableFile:
    """The rows of a Parquet, Arrow or CSV file, a group at a time; the last groups are kept."""

    def __init__(self, file: InputFile, folder: str, max_size: int) -> None:
        self.file = self._table = file
        if file.format.needs_file:
            make = functools.partial(_count_groups, file)
            self._notes = _notes_of(file, folder, "groups", make)
        else:
            self._table, self._notes = _converted(file, folder, max_size)
        self.digest: str = self._notes.key["xxh3"]
        self._ends = np.cumsum(self._notes["counts"])
        self._groups: dict[int, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_groups": {}}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, numbers: Numbers) -> list[Row]:
        rows: list[Any] = [None] * len(numbers)
        groups = np.searchsorted(self._ends, numbers, side="right")
        firsts = (self._ends - self._notes["counts"])[groups]
        with _opened(self.file):
            for place in np.argsort(groups, kind="stable").tolist():
                # Arrow's `take` does not know all types; a slice does.
                group, number = int(groups[place]), int(numbers[place] - firsts[place])
                [row] = records_of(self._group(group).slice(number, 1), self.file.path)
                row.pop(_NUMBER, None)
                problem = row.pop(_PROBLEM, None)
                rows[place] = BadDocumentError(problem) if problem else row
        return rows

    def _group(self, number: int) -> Any:
        # Threads may read a group twice, and no harm is done: there is no lock that a fork keeps.
        table = self._groups.pop(number, None)
        if table is None:
            format_: Any = self._table.format
            table = format_.read_group(self._table.path, number)
        self._groups[number] = table
        size = 0
        for key, other in reversed(list(self._groups.items())):
            size += other.nbytes
            if size > _GROUP_MEMORY and key != number:
                self._groups.pop(key, None)
        return table

    def place(self, number: int) -> str:
        if self._table is not self.file:
            group = int(np.searchsorted(self._ends, number, side="right"))
            first = int(self._ends[group] - self._notes["counts"][group])
            return f"{self.file.path}, row {self._group(group).column(_NUMBER)[number - first]}"
        return f"{self.file.path}, row {number}"


@contextlib.contextmanager
def _opened(file: InputFile) -> Iterator[int]:
    """The descriptor of a file; TextError if it is not, or does not stay, what was indexed."""
    with readable(file.path):
        source = open(file.path, "rb", buffering=0)  # noqa: SIM115
    with source, unchanged(file.part(), lambda: os.fstat(source.fileno())):
        yield source.fileno()


# ---- what is learnt in one pass ----

Notes = tuple[dict[str, Any], dict[str, NDArray[np.int64]]]
"""Plain values and arrays."""


def _notes_of(
    file: InputFile, folder: str, kind: str, make: Callable[[], Notes], beside: str = ""
) -> arrays.ArraySet:
    """What `make` has noted of the file as it is, in this process or an earlier one.

    `beside`: path of a file that `make` writes, too; it notes its size as `beside`.
    """
    path = os.path.realpath(file.path)
    identity = {"kind": kind, "path": path, "size": file.size, "mtime_ns": file.mtime_ns}
    name = f"{kind}-{arrays.fingerprint(path)[:16]}"

    def find() -> arrays.ArraySet | None:
        notes = arrays.load(folder, name)
        if notes is None or not isinstance(notes.key, dict) or notes.damage():
            return None
        if beside and not _has_size(beside, notes.key.get("beside")):
            return None
        is_same = all(notes.key.get(key) == value for key, value in identity.items())
        return notes if is_same else None

    if (notes := find()) is None:
        os.makedirs(folder, exist_ok=True)
        with file_lock(os.path.join(folder, f"{name}.pass.lock")):
            if (notes := find()) is None:
                with _opened(file):
                    values, made = make()
                layout = {key: (array.dtype, array.shape) for key, array in made.items()}
                key = {**identity, **values}
                build = functools.partial(_write_all, made)
                notes, _ = arrays.load_or_build(folder, name, key, layout, build)
    return notes


def _has_size(path: str, size: Any) -> bool:
    return os.path.exists(path) and os.path.getsize(path) == size


def _write_all(made: dict[str, NDArray[np.int64]], writers: Any) -> None:
    for name, array in made.items():
        writers[name].write(0, array)


def _read_lines(file: InputFile) -> Notes:
    """Where the lines that are not blank start; their numbers, if others are blank."""
    digest = xxh3()
    starts: list[Numbers] = []
    suspects: list[NDArray[np.bool_]] = []  # whether each line begins with white space
    offset, pending = 0, np.zeros(1, np.int64)  # the start of a line in the next block
    with open_part(file.part()) as stream:
        while data := stream.read(_BLOCK):
            digest.update(data)
            if offset == 0 and data.startswith(UTF8_BOM):
                pending += len(UTF8_BOM)
            block = np.frombuffer(data, np.uint8)
            places = np.append(pending, np.flatnonzero(block == ord("\n")) + (offset + 1))
            end = offset + len(data)
            pending, places = places[places >= end], places[places < end]
            starts.append(places)
            suspects.append(_IS_SPACE[block[places - offset]])
            offset = end
    flat = np.concatenate([*starts, pending])  # the last one is no line, but where the lines end
    if len(flat) == 0 or flat[-1] < offset:
        flat = np.append(flat, offset)
    is_blank = np.concatenate([*suspects, np.empty(0, np.bool_)])
    with _opened(file) as descriptor:
        for place in np.flatnonzero(is_blank).tolist():
            is_blank[place] = _is_blank(descriptor, *flat[place : place + 2].tolist())
    lines = np.flatnonzero(~is_blank)
    some = lines + 1 if is_blank.any() else np.empty(0, np.int64)
    return {"xxh3": digest.hexdigest()}, {"starts": flat[lines], "lines": some}


def _is_blank(descriptor: int, start: int, stop: int) -> bool:
    pieces = range(start, stop, _BLOCK)
    return not any(os.pread(descriptor, min(_BLOCK, stop - at), at).strip() for at in pieces)


def _count_groups(file: InputFile) -> Notes:
    format_: Any = file.format
    counts = format_.group_counts(file.path)
    if counts is None:
        raise TextError(
            f"{file.path} is an Arrow stream, which has no index of its rows. Write an Arrow file "
            "(pyarrow.ipc.new_file), or give the `datasets.Dataset` that it belongs to"
        )
    return {"xxh3": sum_of(file.path)[1]}, {"counts": np.array(counts, np.int64)}


# ---- CSV ----


def _converted(file: InputFile, folder: str, max_size: int) -> tuple[InputFile, arrays.ArraySet]:
    """The rows of a CSV file as an Arrow file in the cache folder, and its groups."""
    name = f"csv-{arrays.fingerprint(os.path.realpath(file.path))[:16]}.arrow"
    path = os.path.join(folder, name)

    def convert() -> Notes:
        with atomic_file(path) as target:
            counts = _write_arrow(_csv_groups(file, max_size), target)
        values = {"xxh3": sum_of(file.path)[1], "beside": os.path.getsize(path)}
        return values, {"counts": np.array(counts, np.int64)}

    notes = _notes_of(file, folder, "csv", convert, path)
    status = os.stat(path)
    table = InputFile(path=path, format=Arrow(), size=status.st_size, mtime_ns=status.st_mtime_ns)
    return table, notes


def _csv_groups(file: InputFile, max_size: int) -> Iterator[tuple[list[str], list[Any]]]:
    """The names of the columns, and rows with their number in the file and their problem."""
    problems: list[tuple[int, str]] = []
    query = Query(
        keys=("text",),
        reject=lambda row, _, reason, data: problems.append((row, reason)),
        whole=True,
        max_size=max_size,
    )
    names: list[str] | None = None
    waiting: list[Any] = []  # rows before the first one that is whole
    first = file.format.first_line
    for documents in file.format.read(file.part(), query):
        records: list[Any] = documents.texts[0]
        if records and names is None:
            names = list(records[0])
        for record, row in zip(records, documents.lines.tolist(), strict=True):
            waiting.append({**record, _NUMBER: first + row})
        waiting += [{_NUMBER: first + row, _PROBLEM: reason} for row, reason in problems]
        problems.clear()
        if names is not None and waiting:
            yield names, sorted(waiting, key=lambda row: row[_NUMBER])
            waiting = []
    if waiting:
        yield [], waiting


def _write_arrow(groups: Iterable[tuple[list[str], list[Any]]], target: Any) -> list[int]:
    """Writes a record batch for each group; returns their numbers of rows."""
    import pyarrow as pa

    counts: list[int] = []
    with contextlib.ExitStack() as stack:
        writer: Any = None
        for names, rows in groups:
            types = {**dict.fromkeys((*names, _PROBLEM), pa.string()), _NUMBER: pa.int64()}
            schema = pa.schema(list(types.items()))
            columns = [pa.array([row.get(name) for row in rows], types[name]) for name in types]
            writer = writer or stack.enter_context(pa.ipc.new_file(target, schema))
            writer.write_batch(pa.record_batch(columns, schema=schema))
            counts.append(len(rows))
    return counts
