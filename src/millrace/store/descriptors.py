"""Open files under a limit: a blend of thousands of files is read with a few descriptors."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import weakref
from collections.abc import Callable
from typing import BinaryIO

from millrace.checks import absolute_path
from millrace.errors import DataError
from millrace.files import file_identity
from millrace.forks import ForkLock
from millrace.store.publish import NEW

MAX_OPEN = 64
"""Files of a process that keep a descriptor; a thread may use one more while it opens a file.

They take a quarter of the process's limit at most.
"""


class Descriptor:
    """An open descriptor. It is closed when the last reference to it is gone."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.number)  # at the end of Python, `os` may be gone before the last dataset


class PooledFile:
    """A file that is read at any time, although its descriptor may be closed in between.

    The `MAX_OPEN` files that were used last are open. Another one is opened again at its next use,
    if it is still the same file.

    Args:
        file: The open file, which may be closed afterwards. Its name must be its path.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.path = absolute_path(file.name)
        self.identity = file_identity(file)
        self.last_use = next(_clock)
        self._descriptor: Descriptor | None = None
        self._keep(Descriptor(os.dup(file.fileno())))

    def descriptor(self) -> Descriptor:
        """An open descriptor, for as long as the caller holds it.

        Raises:
            DataError: The file was closed, and has been removed, replaced or changed since.
        """
        self.last_use = next(_clock)
        return self._descriptor or self._keep(self._open_again())

    def close(self) -> None:
        """Closes the descriptor, as soon as no thread uses it. The next use opens the file."""
        self._descriptor = None

    def _keep(self, descriptor: Descriptor) -> Descriptor:
        with _lock:
            self._descriptor = descriptor
            _open_files.add(self)
            while len(_open_files) > max(min(MAX_OPEN, _descriptor_limit() // 4), 1):
                _close_oldest()
        return descriptor

    def _open_again(self) -> Descriptor:
        """Opens the file without the lock: on a network file system it may take milliseconds."""
        # A file that was opened in the middle of its publication has lost its ".new" since.
        for path in dict.fromkeys((self.path, self.path.removesuffix(NEW))):
            try:
                descriptor = _open(path)
            except FileNotFoundError:
                continue
            if file_identity(descriptor.number) == self.identity:
                return descriptor
        raise DataError(
            f"{self.path} was removed, replaced or changed after it was opened, and cannot be "
            f"opened again: of all files that are read with access='file', at most {MAX_OPEN} stay "
            "open. Restore the file or open the dataset again; files of a run must not change"
        )


def _open(path: str) -> Descriptor:
    """Opens a file; if the process has no free descriptor, the pool closes some of its files."""
    while True:
        try:
            return Descriptor(os.open(path, os.O_RDONLY))
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            with _lock:
                if not _close_oldest():
                    raise


def _descriptor_limit() -> int:
    """The largest number of descriptors of the process, at least 4 * MAX_OPEN if there is none."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 4 * MAX_OPEN if limit == resource.RLIM_INFINITY else limit


def _close_oldest() -> bool:
    """Closes the file whose last use is the longest ago, if there is one; the lock must be held."""
    oldest = min(_open_files, key=_last_use, default=None)
    if oldest is None:
        return False
    oldest.close()
    _open_files.discard(oldest)
    return True


def _last_use(file: PooledFile) -> int:
    return file.last_use


_clock = itertools.count()
_open_files: weakref.WeakSet[PooledFile] = weakref.WeakSet()
_lock = ForkLock()
