"""Tables in NumPy files that are read by positions: only the rows that are needed take memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike, NDArray

from millrace import _native
from millrace.errors import MillraceError
from millrace.files import atomic_file, naming
from millrace.ragged import Numbers, spread

_RANGES = 1 << 13  # ranges that are read at a time
_FEW = 64  # rows per range that may be read without need, so that one call reads all ranges


@contextlib.contextmanager
def new_table(path: str, dtype: DTypeLike) -> Iterator[Callable[[NDArray[Any]], None]]:
    """Writes a table: yields a function that appends rows. The file appears whole or not at all."""
    dtype, count = np.dtype(dtype), 0
    with atomic_file(path) as file:
        _write_header(file, dtype, 0)
        byte_offset = file.tell()

        def append(rows: NDArray[Any]) -> None:
            nonlocal count
            file.write(np.ascontiguousarray(rows, dtype).view(np.uint8).data)
            count += len(rows)

        yield append
        file.seek(0)
        _write_header(file, dtype, count)
        if file.tell() != byte_offset:  # NumPy leaves room for the digits of the number of rows
            raise MillraceError(f"{path}: the header for {count} rows is longer than that for none")


class Table:
    """A table that `new_table` has written.

    Attributes:
        path: Path of the file.
        dtype: Dtype of a row.
        num_rows: Number of rows.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with open(path, "rb") as file:
            np.lib.format.read_magic(file)
            shape, _, self.dtype = np.lib.format.read_array_header_1_0(file)
            self._byte_offset = file.tell()
        self.num_rows: int = shape[0]

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Rows [start, stop), or fewer if the file has become shorter."""
        offset = self._byte_offset + start * self.dtype.itemsize
        return np.fromfile(self.path, self.dtype, stop - start, offset=offset)

    def ranges(self, starts: Numbers, counts: Numbers) -> NDArray[Any]:
        """Rows [starts[i], starts[i] + counts[i]) for each i, one after the other."""
        targets = np.concatenate(([0], np.cumsum(counts)))
        rows = np.empty(int(targets[-1]), self.dtype)
        with naming(self.path):
            descriptor = os.open(self.path, os.O_RDONLY)
            try:
                for start in range(0, len(starts), _RANGES):
                    part = slice(start, start + _RANGES)
                    low, high = targets[start], targets[min(start + _RANGES, len(starts))]
                    self._read(descriptor, starts[part], counts[part], rows[low:high])
            finally:
                os.close(descriptor)
        return rows

    def windows(self, numbers: Numbers, width: int) -> NDArray[Any]:
        """Rows [numbers[i], numbers[i] + width) for each i: [n, width]."""
        return self.ranges(numbers, np.full(len(numbers), width)).reshape(-1, width)

    def _read(self, descriptor: int, starts: Numbers, counts: Numbers, rows: NDArray[Any]) -> None:
        if len(rows) == 0:
            return
        first, end = int(starts.min()), int((starts + counts).max())
        if end - first <= len(rows) + _FEW * len(starts):
            span = np.empty(end - first, self.dtype)
            self._read_pieces(descriptor, np.array([first]), np.array([len(span)]), span)
            rows_of, steps = spread(counts)
            np.take(span, starts[rows_of] - first + steps, out=rows, mode="clip")
        else:
            self._read_pieces(descriptor, starts, counts, rows)

    def _read_pieces(
        self, descriptor: int, starts: Numbers, counts: Numbers, rows: NDArray[Any]
    ) -> None:
        size = self.dtype.itemsize
        _native.read_pieces(
            descriptor,
            self._byte_offset + starts * size,
            counts * size,
            rows.view(np.uint8),
            (np.cumsum(counts) - counts) * size,
        )


def _write_header(file: BinaryIO, dtype: np.dtype[Any], num_rows: int) -> None:
    descr = np.lib.format.dtype_to_descr(dtype)
    header = {"descr": descr, "fortran_order": False, "shape": (num_rows,)}
    np.lib.format.write_array_header_1_0(file, header)
