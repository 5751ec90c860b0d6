"""Files that a task writes once, from start to end."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os

import numpy as np
from numpy.typing import NDArray

from millrace.files import naming, temporary_name, xxh3

_BLOCK = 4 << 20  # bytes that are hashed and written at a time
_ALIGNMENT = 4096  # of memory, offsets and sizes of direct writes: the largest that disks ask for


class HashedFile:
    """A file of a task: hashed while it is written, and renamed to its path when it is whole.

    Data go past the page cache where the file system can. A job writes more than the memory that it
    may use, and reads none of it soon: pages of it would drive others out, and the memory for them
    would have to be cleared first, which takes longer than the write.

    Attributes:
        path: Path of the file.
        sum: Size and XXH3-64, after the `with` block.
    """

    def __init__(self, path: str) -> None:
        self.path, self.sum = path, (0, "")
        self._temporary = temporary_name(path)
        self._digest, self._size = xxh3(), 0
        self._filled = 0  # bytes of the block

    def __enter__(self) -> HashedFile:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        self._is_direct = True
        with naming(self.path):
            try:
                self._descriptor = os.open(self._temporary, flags | os.O_DIRECT, 0o666)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._is_direct = False  # a file system without direct writes
                self._descriptor = os.open(self._temporary, flags, 0o666)
        # A map and not a NumPy array: it begins at a page.
        self._block = np.frombuffer(mmap.mmap(-1, _BLOCK, mmap.MAP_PRIVATE), np.uint8)
        return self

    def write(self, data: NDArray[np.uint8]) -> None:
        """Appends bytes."""
        while len(data):
            count = min(len(data), _BLOCK - self._filled)
            self._block[self._filled : self._filled + count] = data[:count]
            self._filled += count
            data = data[count:]
            if self._filled == _BLOCK:
                self._write_block()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self._write_block()
                os.rename(self._temporary, self.path)
                self.sum = self._size, str(self._digest.hexdigest())
        finally:
            os.close(self._descriptor)
            del self._block
            with contextlib.suppress(OSError):  # it has its name, or is not whole
                os.unlink(self._temporary)

    def _write_block(self) -> None:
        block = self._block[: self._filled]
        self._digest.update(block)
        self._size += self._filled
        self._filled = 0
        with naming(self.path):
            while len(block):
                if len(block) % _ALIGNMENT:  # the end of the file, or of a disk that is nearly full
                    self._leave_direct_mode()
                try:
                    block = block[os.write(self._descriptor, block.data) :]
                except OSError as error:
                    if not (self._is_direct and error.errno == errno.EINVAL):
                        raise
                    self._leave_direct_mode()  # a file system with rules of its own

    def _leave_direct_mode(self) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._is_direct = False
