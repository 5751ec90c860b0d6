"""How a pair of files appears whole or not at all.

A builder writes `PREFIX.bin.tmp` and `PREFIX.idx.tmp` under a lock, and publishes them in steps of
which each is one rename or unlink:

    1. PREFIX.bin.tmp -> PREFIX.bin.new      (all were flushed to disk before; so does the
                                             sidecar, PREFIX.info.json, if there is one)
    2. PREFIX.idx.tmp -> PREFIX.idx.new      from here on the new pair is the one that counts
    3. an old PREFIX.idx goes, then an old sidecar
    4. PREFIX.bin.new -> PREFIX.bin, then the sidecar
    5. PREFIX.idx.new -> PREFIX.idx

Between 3 and 5 there is no PREFIX.idx, so that no reader, Megatron-LM included, pairs an old index
with new tokens. `open_pair` finds a whole pair after every step: the old one until 3, then the new
one. A builder that dies leaves names that the next builder of the same prefix cleans up: it
finishes a publication that reached step 2 and drops everything that did not.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from typing import IO, BinaryIO

from millrace.errors import DataError, MillraceError

TMP = ".tmp"
NEW = ".new"
LOCK = ".tmp.lock"

_ATTEMPTS = 20  # to open a pair; an attempt fails only where it meets a publication
_PAUSE = 0.001  # seconds; a publication's renames take less


def bin_path(prefix: str) -> str:
    return prefix + ".bin"


def idx_path(prefix: str) -> str:
    return prefix + ".idx"


def info_path(prefix: str) -> str:
    """The sidecar, which a pair may have (see `info`)."""
    return prefix + ".info.json"


def open_pair(prefix: str, *, has_bin: bool = True) -> tuple[BinaryIO | None, BinaryIO]:
    """Opens a whole pair for reading: (`.bin`, `.idx`), also while a builder replaces it.

    Args:
        prefix: the path of the pair.
        has_bin: whether the `.bin` is a file beside the index; if not, it is None.

    Raises:
        DataError: one or both files are missing.
    """
    for _ in range(_ATTEMPTS):
        names = _pair_to_read(prefix)
        with contextlib.ExitStack() as opened:
            try:
                index = opened.enter_context(open(names[1], "rb"))
                data = opened.enter_context(open(names[0], "rb")) if has_bin else None
            except FileNotFoundError:
                # A publication may just have renamed it; if not, the next attempts show that too.
                time.sleep(_PAUSE)
                continue
            if (
                names == _pair_to_read(prefix)
                and _is_at(index, names[1])
                and (data is None or _is_at(data, names[0]))
            ):
                opened.pop_all()
                return data, index
    wanted = [bin_path(prefix), idx_path(prefix)] if has_bin else [idx_path(prefix)]
    missing = [path for path in wanted if not os.path.exists(path)]
    if not missing:
        raise DataError(f"{prefix}.bin/.idx were replaced at every attempt to open them; try again")
    hint = (
        "A prefix is given without .bin or .idx"
        if prefix.endswith((".bin", ".idx"))
        else "Both files of a pair are needed: write them again, or give another prefix"
    )
    raise DataError(f"{' and '.join(missing)} not found. {hint}")


def _pair_to_read(prefix: str) -> tuple[str, str]:
    data, index = bin_path(prefix), idx_path(prefix)
    if not os.path.exists(index) and os.path.exists(index + NEW):
        return (data + NEW if os.path.exists(data + NEW) else data), index + NEW
    return data, index


def info_to_read(prefix: str) -> str:
    """The path of the sidecar of the pair that counts; there may be no such file."""
    data, info, index = bin_path(prefix), info_path(prefix), idx_path(prefix)
    if os.path.exists(index) or not os.path.exists(index + NEW):
        return info
    # Between steps 3 and 5. While PREFIX.bin.new is there, PREFIX.info.json is the old pair's.
    if os.path.exists(info + NEW) or os.path.exists(data + NEW):
        return info + NEW
    return info


def _is_at(file: IO[bytes], path: str) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    here = os.fstat(file.fileno())
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


@contextlib.contextmanager
def building(prefix: str) -> Iterator[None]:
    """Holds the lock of a prefix, and cleans up after a builder that died.

    Raises:
        MillraceError: another process is building this prefix.
    """
    lock = prefix + LOCK
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(file_lock(lock, wait=False))
        except BlockingIOError:
            raise MillraceError(
                f"{prefix} is being built by another process (it holds {lock}). "
                "Wait for it, or give another prefix"
            ) from None
        _clean_up(prefix)
        yield


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
            if not _is_at(held, path):
                continue  # its holder let go of it, and unlinked it, while we waited
            try:
                yield
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
            return


def _clean_up(prefix: str) -> None:
    if os.path.exists(idx_path(prefix) + NEW):
        _finish(prefix)
    for path in (bin_path(prefix), info_path(prefix), idx_path(prefix)):
        for leftover in (path + TMP, path + NEW):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(leftover)


def publish_pair(prefix: str) -> None:
    """Publishes PREFIX.bin.tmp, PREFIX.idx.tmp and, if there is one, the sidecar's temporary.

    All are whole and flushed (see the top).
    """
    for path in (bin_path(prefix), info_path(prefix), idx_path(prefix)):
        if path != info_path(prefix) or os.path.exists(path + TMP):
            os.rename(path + TMP, path + NEW)
    fsync_folder(prefix)
    _finish(prefix)


def _finish(prefix: str) -> None:
    """Steps 3 to 5, also of a publication that was cut off among them."""
    data, info, index = bin_path(prefix), info_path(prefix), idx_path(prefix)
    if os.path.exists(data + NEW):  # else the old sidecar went before, and the new one may be here
        for old in (index, info):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(old)
        fsync_folder(prefix)
        os.rename(data + NEW, data)
    with contextlib.suppress(FileNotFoundError):
        os.rename(info + NEW, info)
    os.rename(index + NEW, index)
    fsync_folder(prefix)


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
