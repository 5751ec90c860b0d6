"""Sets of arrays in a folder: published together, built once, mapped by all processes.

A set `NAME` is a file `NAME.json`, which describes the arrays and what they were built from, and a
`NAME-ARRAY.npy` for each array. The JSON file is written last: a set without it, or with that of
another key, is not used. `NAME.lock` is held while the set is built. Without locks, several
processes may build a set at once, each in its own temporary files. The bytes are equal, so that a
reader finds a whole set or none, whatever the order of the renames.
"""

import contextlib
import io
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from millrace import _native, files
from millrace.errors import DataError
from millrace.order import RULES_VERSION
from millrace.order.order_plans import Layout
from millrace.records import record_from

T = TypeVar("T")

JSON = ".json"
LOCK = ".lock"

_END = 4096  # bytes at each end of a file that are compared when it is mapped
_SEAL_SIZE = len('{"xxh3": "0123456789abcdef", ')

NO_RECORD = (OSError, ValueError, KeyError, TypeError, AttributeError)
"""What reading a missing or damaged record, or another program's, raises."""


def fingerprint(key: Any) -> str:
    """32 hexadecimal digits that name plain JSON values."""
    text = json.dumps([RULES_VERSION, key], sort_keys=True)
    return files.blake2b(text.encode()).hexdigest()


def seal(record: Mapping[str, Any]) -> bytes:
    """A record as JSON that starts with a checksum of the rest."""
    return _sealed(json.dumps(record).encode()[1:])


def unseal(text: bytes) -> dict[str, Any]:
    """The record in a text of `seal`; ValueError for a damaged text, or another one."""
    rest = text[_SEAL_SIZE:]
    if text != _sealed(rest):
        raise ValueError("not a record, or a damaged one")
    record: dict[str, Any] = json.loads(b"{" + rest)
    return record


def _sealed(rest: bytes) -> bytes:
    return b'{"xxh3": "%s", ' % files.checksum([rest]).encode() + rest


class ArrayWriter:
    """Writes the rows of one array into its file, in any order and from any thread."""

    def __init__(self, file: BinaryIO, dtype: Any, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape, self._file = np.dtype(dtype), shape, file
        self._row_size = self.dtype.itemsize * math.prod(shape[1:])
        self._offset = file.write(_npy_header(self.dtype, shape))
        file.truncate(self._offset + self._row_size * shape[0])

    def write(self, first_row: int, rows: NDArray[Any]) -> None:
        """Writes rows from `first_row` on, converted to the array's dtype."""
        if rows.shape[1:] != self.shape[1:] or not 0 <= first_row <= self.shape[0] - len(rows):
            raise ValueError(f"rows {rows.shape} from row {first_row} on do not fit {self.shape}")
        data = memoryview(np.ascontiguousarray(rows, self.dtype).reshape(-1).view(np.uint8).data)
        at = self._offset + first_row * self._row_size
        while data:  # one call writes 2 GiB at most
            count = os.pwrite(self._file.fileno(), data, at)
            data, at = data[count:], at + count


@dataclass(frozen=True)
class ArrayRecord:
    """What a set records of an array.

    Attributes:
        xxh3: XXH3-64 of its file, as hexadecimal digits.
        ends: XXH3-64 of the file's first and last 4 KiB, checked when the array is mapped: it
            tells apart files of one dtype and shape.
    """

    dtype: str
    shape: tuple[int, ...]
    xxh3: str
    ends: str


@dataclass(frozen=True)
class ArraySet:
    """A published set, and what it was built from. Its arrays are mapped at their first use."""

    folder: str
    name: str
    key: Any
    arrays: Mapping[str, ArrayRecord]
    _mapped: dict[str, NDArray[Any]] = field(default_factory=dict, repr=False, compare=False)

    def __getitem__(self, array: str) -> NDArray[Any]:
        """An array, read-only; DataError if its file is missing, truncated, or another array."""
        if array not in self._mapped:
            self._mapped[array] = _map_array(self.path(array), self.arrays[array])
        return self._mapped[array]

    def __reduce__(self) -> tuple[Any, ...]:
        return ArraySet, (self.folder, self.name, self.key, self.arrays)

    @property
    def layout(self) -> Layout:
        return {name: (np.dtype(one.dtype), one.shape) for name, one in self.arrays.items()}

    def path(self, array: str) -> str:
        return array_path(self.folder, self.name, array)

    def damage(self, *, contents: bool = False) -> list[str]:
        """What is wrong with the files' sizes, headers and ends, or all contents."""
        problems = []
        for array, record in self.arrays.items():
            try:
                self[array]
                if contents and files.sum_of(self.path(array))[1] != record.xxh3:
                    problems.append(f"{self.path(array)} is damaged: its checksum has changed")
            except DataError as error:
                problems.append(str(error))
        return problems


def array_path(folder: str, name: str, array: str) -> str:
    return os.path.join(folder, f"{name}-{array}.npy")


def read_record(path: str) -> dict[str, Any] | None:
    """The record in a file; None for a missing file, or another program's."""
    try:
        with open(path, "rb") as file:
            return unseal(file.read())
    except NO_RECORD as error:
        if isinstance(error, OSError) and files.is_of_the_process(error):
            raise
        return None


def read_as(path: str, parse: Callable[[dict[str, Any]], T]) -> T | None:
    """What `parse` makes of a record of this version; None if there is none that it takes."""
    record = read_record(path)
    try:
        return None if record is None or record["logic"] != RULES_VERSION else parse(record)
    except NO_RECORD:
        return None


def load(folder: str, name: str) -> ArraySet | None:
    """The set of that name; None if there is none of this version."""

    def parse(record: dict[str, Any]) -> ArraySet:
        entries = record["arrays"].items()
        records = {array: record_from(ArrayRecord, entry) for array, entry in entries}
        return ArraySet(folder, name, record["key"], records)

    return read_as(os.path.join(folder, name + JSON), parse)


Build = Callable[[Mapping[str, ArrayWriter]], None]


def load_or_build(
    folder: str, name: str, key: Any, layout: Layout, build: Build, *, limit: float | None = None
) -> tuple[ArraySet, bool]:
    """The set of that name, and whether it was built here as it was missing or did not fit.

    Of several processes one builds it, and the others wait; if that one dies, another builds it.

    Args:
        key: What decides the arrays: plain JSON values, compared with the record.
        limit: Seconds to wait for another process; None: no limit.

    Raises:
        BlockingIOError: Another process still builds it after the limit.
        OSError: It must be built, and the folder cannot be written.
    """
    if (array_set := usable(folder, name, key, layout)) is not None:
        return array_set, False
    os.makedirs(folder, exist_ok=True)
    place = os.path.join(folder, name)
    paths = [array_path(folder, name, array) for array in layout]
    with files.writers_lock(place + LOCK, place + JSON, *paths, limit=limit):
        if (array_set := usable(folder, name, key, layout)) is not None:
            return array_set, False
        return _publish(folder, name, key, layout, build), True


def store(folder: str, name: str, key: Any, contents: Mapping[str, NDArray[Any]]) -> ArraySet:
    """Publishes arrays in memory as the set of that name."""

    def build(writers: Mapping[str, ArrayWriter]) -> None:
        for array, rows in contents.items():
            writers[array].write(0, rows)

    layout = {array: (rows.dtype, rows.shape) for array, rows in contents.items()}
    return load_or_build(folder, name, key, layout, build)[0]


def usable(folder: str, name: str, key: Any, layout: Layout | None = None) -> ArraySet | None:
    """The set of that name, if it has that key, these arrays (None: any) and no damage."""
    array_set = load(folder, name)
    if array_set is None or array_set.key != key or array_set.damage():
        return None
    return array_set if layout is None or array_set.layout == layout else None


def _publish(folder: str, name: str, key: Any, layout: Layout, build: Build) -> ArraySet:
    records = {}
    with contextlib.ExitStack() as stack:
        out = {
            array: stack.enter_context(files.atomic_file(array_path(folder, name, array)))
            for array in layout
        }
        build({array: ArrayWriter(out[array], *form) for array, form in layout.items()})
        for array, (dtype, shape) in layout.items():
            with open(out[array].name, "rb") as file:
                ends = files.checksum(_ends(file))
            whole = files.sum_of(out[array].name)[1]
            records[array] = ArrayRecord(np.dtype(dtype).str, shape, whole, ends)
    entries = {array: vars(record) for array, record in records.items()}
    text = seal({"logic": RULES_VERSION, "key": key, "arrays": entries})
    files.write_file(os.path.join(folder, name + JSON), text)
    return ArraySet(folder, name, key, records)


def _npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    buffer = io.BytesIO()
    description = {"descr": np.lib.format.dtype_to_descr(dtype), "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, {**description, "fortran_order": False})
    return buffer.getvalue()


def _map_array(path: str, record: ArrayRecord) -> NDArray[Any]:
    dtype, shape = np.dtype(record.dtype), record.shape
    offset = len(_npy_header(dtype, shape))
    size = offset + dtype.itemsize * math.prod(shape)
    try:
        with open(path, "rb", buffering=0) as file:
            is_whole = os.fstat(file.fileno()).st_size == size
            if not is_whole or files.checksum(_ends(file)) != record.ends:
                raise DataError(f"{path} is not the array {dtype} {list(shape)}, or is damaged")
            content = _native.map_file(file.fileno(), size)
    except OSError as error:
        if files.is_of_the_process(error):
            raise
        raise DataError(f"{path} is missing, or cannot be read: {error.strerror}") from None
    return np.frombuffer(content, dtype, offset=offset).reshape(shape)


def _ends(file: BinaryIO) -> tuple[bytes, bytes]:
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), _END, 0), os.pread(file.fileno(), _END, max(size - _END, 0))
