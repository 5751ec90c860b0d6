"""Where the bytes of a `.bin` are: mapped, read from a file, or anywhere that fits the protocol."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, BinaryIO, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.checks import shown
from millrace.errors import ConfigError, DataError
from millrace.store.descriptors import PooledFile

Bytes = NDArray[np.uint8]
Access = Literal["mmap", "file"]


class BinReader(Protocol):
    """The bytes of one `.bin`. This is where object stores plug in.

    A reader must not change once it is made, and may be used by several threads at once.
    `gather_in_turn` is a `gather` for readers that have nothing better.

    A reader with the whole `.bin` in memory (mapped, or local pages of an object store) may also
    have an attribute `bytes`: uint8 [size], one contiguous array that starts at a multiple of 8.
    Reads of sequences are then views of it, and samples are gathered straight from it.

    A reader of slow storage may also have a method `prefetch(byte_offsets, byte_counts)`, with the
    arguments of `gather`: a hint that these pieces will be read soon. It starts the transfers and
    returns nothing, without waiting for them. It may be called by one thread while others read,
    and a piece that was announced need not be read. Loaders call it for all that they will read; of
    a reader with a true attribute `is_local` only while its reads go to the disk.

    Attributes:
        size: Size of the `.bin` in bytes.
    """

    size: int

    def read(self, byte_offset: int, num_bytes: int) -> Bytes:
        """Bytes [byte_offset, byte_offset + num_bytes): uint8 [num_bytes], perhaps read-only."""
        ...

    def gather(self, byte_offsets: NDArray[np.int64], byte_counts: NDArray[np.int64]) -> Bytes:
        """Many pieces, one after the other: uint8 [sum of byte_counts]; the arrays are [pieces]."""
        ...


def bytes_in_memory(reader: BinReader) -> Bytes | None:
    """The whole `.bin`, read-only, if the reader has it in memory."""
    data = getattr(reader, "bytes", None)
    if data is None:
        return None
    if not (
        isinstance(data, np.ndarray)
        and (data.dtype, data.shape) == (np.uint8, (reader.size,))
        and data.flags.c_contiguous
        and data.__array_interface__["data"][0] % 8 == 0
    ):
        raise ConfigError(
            f"the reader's bytes are {shown(data)}; a contiguous uint8 [{reader.size}] is needed, "
            "at an address that is a multiple of 8"
        )
    if data.flags.writeable:
        data = data.view()
        data.flags.writeable = False
    view: Bytes = data
    return view


def gather_in_turn(
    read: Callable[[int, int], Bytes],
    byte_offsets: NDArray[np.int64],
    byte_counts: NDArray[np.int64],
) -> Bytes:
    """The pieces, read one by one."""
    spans = zip(byte_offsets.tolist(), byte_counts.tolist(), strict=True)
    pieces = [read(offset, count) for offset, count in spans]
    return np.concatenate([np.empty(0, np.uint8), *pieces])


class MMapReader:
    """The file's pages in the page cache, mapped: reads are views."""

    is_local = True

    def __init__(self, file: BinaryIO) -> None:
        self.size = os.fstat(file.fileno()).st_size
        self.bytes: Bytes = _native.map_file(file.fileno(), self.size)

    def read(self, byte_offset: int, num_bytes: int) -> Bytes:
        return self.bytes[byte_offset : byte_offset + num_bytes]

    def gather(self, byte_offsets: NDArray[np.int64], byte_counts: NDArray[np.int64]) -> Bytes:
        return _native.copy_pieces(self.bytes, byte_offsets, byte_counts)

    def prefetch(self, byte_offsets: NDArray[np.int64], byte_counts: NDArray[np.int64]) -> None:
        _native.prefetch_mapped(self.bytes, byte_offsets, byte_counts)


class FileReader:
    """Positioned reads into new arrays, for file systems where mapping hurts.

    Memory is bounded by the size of a read. Threads share the descriptor without a lock; of all
    readers, those that were used last have an open one (see `descriptors`).
    """

    is_local = True

    def __init__(self, file: BinaryIO) -> None:
        self.size = os.fstat(file.fileno()).st_size
        self._file = PooledFile(file)

    def read(self, byte_offset: int, num_bytes: int) -> Bytes:
        data = np.empty(num_bytes, np.uint8)
        descriptor = self._file.descriptor()  # open as long as this name refers to it
        count = read_at(descriptor.number, byte_offset, data)
        if count < num_bytes:
            raise self._cut_short(byte_offset + count)
        return data

    def gather(self, byte_offsets: NDArray[np.int64], byte_counts: NDArray[np.int64]) -> Bytes:
        descriptor = self._file.descriptor()
        try:
            return _native.read_packed(descriptor.number, self.size, byte_offsets, byte_counts)
        except ValueError:
            size = os.fstat(descriptor.number).st_size
            if size < self.size:
                raise self._cut_short(size) from None
            raise

    def prefetch(self, byte_offsets: NDArray[np.int64], byte_counts: NDArray[np.int64]) -> None:
        descriptor = self._file.descriptor()
        _native.prefetch_file(descriptor.number, self.size, byte_offsets, byte_counts)

    def _cut_short(self, size: int) -> DataError:
        return DataError(
            f"{self._file.path} ends at byte {size}; it had {self.size} bytes when it was opened, "
            "and was cut short since. Restore it: files in use are replaced by renames"
        )


def copied(column: NDArray[Any]) -> NDArray[Any]:
    """A copy of a part of a mapped column: an error if the file was cut short, not a bus error."""
    data = column.view(np.uint8)
    return _native.copy_pieces(data, np.array([0]), np.array([len(data)])).view(column.dtype)


def read_at(descriptor: int, offset: int, buffer: Bytes) -> int:
    """Fills a buffer from a place in a file; returns the number of bytes, fewer at its end."""
    view, count = memoryview(buffer.data), 0
    while count < len(view):
        step = os.preadv(descriptor, [view[count:]], offset + count)
        if step == 0:
            break
        count += step
    return count


def open_bin(file: BinaryIO, access: Access) -> BinReader:
    """A reader of an open file, which may be closed afterwards."""
    if access == "mmap":
        return MMapReader(file)
    if access == "file":
        return FileReader(file)
    raise ConfigError(f"access is {access!r}; it is one of mmap, file")
