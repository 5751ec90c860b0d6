"""The file system: files that are mapped, or read by position with few descriptors."""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.checks import absolute_path
from millrace.errors import ConfigError, DataError
from millrace.storage.protocol import Access, Bytes, Identity, StoredFile

MAX_OPEN = 64
"""Files of a process that keep a descriptor; each thread may use one more."""


class LocalStorage:
    """The files of this machine, and of the file systems that are mounted on it."""

    def stat(self, path: str) -> Identity:
        return _identity(os.stat(path))

    def open(self, path: str, access: Access) -> StoredFile:
        if access == "mmap":
            return MappedFile(path)
        if access == "file":
            return PositionedFile(path)
        raise ConfigError(f"access is {access!r}; it is one of mmap, file")

    def list(self, prefix: str) -> Iterator[str]:
        folder, start = os.path.split(prefix)
        for name in os.listdir(folder or "."):
            if name.startswith(start):
                yield os.path.join(folder, name)

    def __repr__(self) -> str:
        return "LocalStorage()"


LOCAL = LocalStorage()
"""The storage of paths without a scheme such as `s3://`."""


class MappedFile:
    """A file's pages in the page cache, mapped: reads are views. No descriptor stays open."""

    is_local = True

    def __init__(self, path: str) -> None:
        with open(path, "rb", buffering=0) as file:
            self.identity = identity_of(file)
            self.size = self.identity.size
            self.bytes: Bytes = _native.map_file(file.fileno(), self.size)

    def read(self, byte_offset: int, num_bytes: int) -> Bytes:
        return self.bytes[byte_offset : byte_offset + num_bytes]

    def gather(self, byte_offsets: NDArray[np.int64], byte_counts: NDArray[np.int64]) -> Bytes:
        return _native.copy_pieces(self.bytes, byte_offsets, byte_counts)

    def prefetch(self, byte_offsets: NDArray[np.int64], byte_counts: NDArray[np.int64]) -> None:
        _native.prefetch_mapped(self.bytes, byte_offsets, byte_counts)


class PositionedFile:
    """Positioned reads into new arrays, for file systems where mapping hurts.

    Memory is bounded by the size of a read. Threads share the descriptor without a lock. Of all
    such files of a process, those that were used last have an open descriptor; another one is
    opened again at its next use, if it is still the same file.
    """

    is_local = True

    def __init__(self, path: str) -> None:
        self._path, self._slot = absolute_path(path), _Slot()
        descriptor, self.identity = _open(self._path)
        self.size = self.identity.size
        self._slot.fill(descriptor)

    def read(self, byte_offset: int, num_bytes: int) -> Bytes:
        data = np.empty(num_bytes, np.uint8)
        view, count = memoryview(data.data), 0
        descriptor = self._open()  # open as long as this name refers to it
        while count < num_bytes:
            step = os.preadv(descriptor.number, [view[count:]], byte_offset + count)
            if step == 0:
                raise self._cut_short(byte_offset + count)
            count += step
        return data

    def gather(self, byte_offsets: NDArray[np.int64], byte_counts: NDArray[np.int64]) -> Bytes:
        descriptor = self._open()
        try:
            return _native.read_packed(descriptor.number, self.size, byte_offsets, byte_counts)
        except ValueError:
            size = os.fstat(descriptor.number).st_size
            if size < self.size:
                raise self._cut_short(size) from None
            raise

    def prefetch(self, byte_offsets: NDArray[np.int64], byte_counts: NDArray[np.int64]) -> None:
        _native.prefetch_file(self._open().number, self.size, byte_offsets, byte_counts)

    def _open(self) -> _Descriptor:
        """An open descriptor, for as long as the caller holds it."""
        descriptor = self._slot.descriptor
        with contextlib.suppress(FileNotFoundError):
            identity = self.identity
            if descriptor is None:
                descriptor, identity = _open(self._path)
            if identity == self.identity:
                self._slot.fill(descriptor)
                return descriptor
        raise DataError(
            f"{self._path} was removed, replaced or changed after it was opened, and cannot be "
            "opened again: of all files that are read with access='file', at most "
            f"{MAX_OPEN} stay open. Restore the file or open the dataset again; files of a run "
            "must not change"
        )

    def _cut_short(self, size: int) -> DataError:
        return DataError(
            f"{self._path} ends at byte {size}; it had {self.size} bytes when it was opened, and "
            "was cut short since. Restore it: files in use are replaced by renames"
        )

    def __del__(self) -> None:
        _recent.pop(self._slot, None)


class _Descriptor:
    """An open descriptor. It is closed when the last reference to it is gone."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.number)  # at the end of Python, `os` may be gone before the last dataset


class _Slot:
    """The place of a file's descriptor; None: it is closed."""

    __slots__ = ("descriptor",)

    def __init__(self) -> None:
        self.descriptor: _Descriptor | None = None

    def fill(self, descriptor: _Descriptor) -> None:
        """Keeps a descriptor, and closes those whose last use is the longest ago."""
        self.descriptor = descriptor
        _recent.pop(self, None)
        _recent[self] = None
        while len(_recent) > MAX_OPEN:
            _recent.popitem(last=False)[0].descriptor = None


# The slots that were used last. Each step is one operation of the dict, so that threads need no
# lock, which a forked child could inherit locked.
_recent: OrderedDict[_Slot, None] = OrderedDict()


def _open(path: str) -> tuple[_Descriptor, Identity]:
    with open(path, "rb", buffering=0) as file:  # which refuses folders
        return _Descriptor(os.dup(file.fileno())), identity_of(file)


def identity_of(file: BinaryIO) -> Identity:
    """The identity of an open file."""
    return _identity(os.fstat(file.fileno()))


def _identity(status: os.stat_result) -> Identity:
    return Identity(status.st_size, status.st_mtime_ns, (status.st_dev, status.st_ino))
