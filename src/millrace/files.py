"""Files that appear whole or not at all, locks that die with their holder, and a checksum."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from typing import IO, Any, BinaryIO

TMP = ".tmp"
"""What the name of a file ends with while it is written."""


@contextlib.contextmanager
def atomic_file(path: str) -> Iterator[BinaryIO]:
    """A file that appears at `path` whole when the block ends, or not at all if it fails."""
    try:
        with open(path + TMP, "wb") as file:
            yield file
            flush_to_disk(file)
        os.rename(path + TMP, path)
        fsync_folder(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path + TMP)


def flush_to_disk(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def fsync_folder(path: str) -> None:
    """Flushes the folder that holds `path`: a rename is on disk only then."""
    descriptor = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def file_lock(path: str, *, wait: bool = True) -> Iterator[None]:
    """Holds a lock that processes share by the name of a file, which exists only while it is held.

    The kernel lets go of it when its holder dies. On a file system without locks nothing is held:
    that only one process is at work is then up to the caller.

    Raises:
        BlockingIOError: another process holds it, and `wait` is False.
    """
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
        with os.fdopen(descriptor, "rb") as held:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    raise BlockingIOError(error.errno, "held by another process", path) from None
                if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                    raise
            if not is_at(held, path):
                continue  # its holder let go of it, and unlinked it, while we waited
            try:
                yield
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
            return


def is_at(file: IO[bytes], path: str) -> bool:
    """Whether an open file is (still) the one of that name."""
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    here = os.fstat(file.fileno())
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def xxh3() -> Any:
    """A new XXH3-64, with `update` and `hexdigest`: 14 GB/s a core, where a read gives that."""
    import xxhash  # 2 ms that `import millrace` does without

    return xxhash.xxh3_64()
