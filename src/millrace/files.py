"""Atomic files, locks that end with their holder, marks of what is unfinished, and checksums."""

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, BinaryIO

import numpy as np

from millrace.checks import check_local
from millrace.errors import DataError, MillraceError, TextError
from millrace.names import SHARD_NUMBER, UNFINISHED

TMP = ".tmp"  # ends the name of a file that is being written
_TEMPORARY = re.compile(r"(.*?)(\.[0-9a-f]{12})?" + re.escape(TMP), re.DOTALL)
SAY_AFTER = 10.0  # seconds of waiting before a warning
_DENIED = (
    "a lock of another user, which you cannot open: ask for it to be removed (if no process holds "
    "it), or for `chmod 666`"
)
_SHARD = re.compile("(.+)" + SHARD_NUMBER, re.DOTALL)
_PIECE = 1 << 20  # bytes that are hashed at a time


def temporary_name(path: str) -> str:
    """A name beside `path` to write it under; no other call, process or host gets it."""
    return f"{path}.{os.urandom(6).hex()}{TMP}"


def temporaries_of(*paths: str) -> list[str]:
    """The temporaries of files, also of living writers and older versions (".tmp")."""
    names = {os.path.split(path) for path in paths}
    return sorted(
        os.path.join(folder, file)
        for folder in {folder for folder, _ in names}
        if os.path.isdir(folder or ".")
        for file in os.listdir(folder or ".")
        if file.endswith(TMP) and (folder, written_name(file)) in names
    )


def written_name(temporary: str) -> str | None:
    """The final name of a temporary; None for other files."""
    match = _TEMPORARY.fullmatch(temporary)
    return None if match is None else match[1]


def files_below(
    folder: str, is_skipped: Callable[[str], bool], parents: tuple[tuple[int, int], ...] = ()
) -> Iterator[os.DirEntry[str]]:
    """The files in and below a folder, without skipped names.

    Links are followed, but not to the folder's own parents (device and inode of each).
    """
    status = os.stat(folder)
    identity = status.st_dev, status.st_ino
    if identity in parents:
        return
    with os.scandir(folder) as scan:
        entries = [entry for entry in scan if not is_skipped(entry.name)]
    for entry in entries:
        if entry.is_dir():
            yield from files_below(entry.path, is_skipped, (*parents, identity))
        else:
            yield entry


@contextlib.contextmanager
def atomic_file(path: str, *, durable: bool = True) -> Iterator[BinaryIO]:
    """A file that appears at `path` whole when the block ends, or not at all if it fails.

    Of several writers the last one to end counts. An OSError names the file. Only a durable file
    survives a power cut; it takes two flushes. ConfigError for a path in a bucket.
    """
    temporary = temporary_name(check_local(path))
    with naming(path):
        try:
            with open(temporary, "xb") as file:
                yield file
                flush_to_disk(file, durable=durable)
            os.rename(temporary, path)
        except BaseException as error:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            if isinstance(error, OSError) and error.filename == temporary:
                error.filename = path
            raise
        if durable:
            fsync_folder(path)


def write_file(path: str, data: bytes, *, durable: bool = True) -> None:
    """Writes an `atomic_file`."""
    with atomic_file(path, durable=durable) as file:
        file.write(data)


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Adds the file's name to an OSError without one, as of a write to a full disk."""
    try:
        yield
    except OSError as error:
        if type(error) is not OSError or error.filename is not None:
            raise
        if "requested and" in str(error):  # NumPy's error of a short write has only a text
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path) from error
        raise OSError(error.errno or errno.EIO, error.strerror or str(error), path) from error


def check_split(*prefixes: str) -> None:
    """Raises a DataError for a shard of a split that did not end: others may be missing, or old."""
    for prefix in prefixes:
        shard = _SHARD.fullmatch(prefix)
        if shard and os.path.exists(marker := f"{shard[1]}_{UNFINISHED}"):
            raise DataError(
                f"{prefix} is a shard of a split that did not end, or is at work: others may be "
                f"missing, or of an earlier split. Run the same split again; it removes {marker}"
            )


@contextlib.contextmanager
def readable(source: str, kind: type[MillraceError] = TextError) -> Iterator[None]:
    """Turns an OSError about a file into an error that names it."""
    try:
        yield
    except OSError as error:
        if is_of_the_process(error):
            raise
        reason = error.strerror or error
        raise kind(f"{error.filename or source} cannot be read: {reason}") from None


def is_of_the_process(error: OSError) -> bool:
    """Whether an error is not the file's: too many files are open, or memory is full."""
    return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def flush_to_disk(file: IO[Any], *, durable: bool = True) -> None:
    file.flush()
    if durable:
        os.fsync(file.fileno())


def fsync_folder(path: str) -> None:
    """Flushes the folder that holds `path`, which brings a rename to the disk.

    Does nothing on file systems that cannot (AFS, CIFS, FUSE).
    """
    folder = os.path.dirname(path) or "."
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with naming(folder):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


# ---- locks ----


@contextlib.contextmanager
def file_lock(path: str, *, limit: float | None = None) -> Iterator[bool]:
    """Holds a lock between processes: a file that exists only while the lock is held.

    The kernel frees it when its holder dies; a forked child does not hold it. After ten seconds of
    waiting, the logger "millrace" warns and names the holder. Yields False on a file system without
    locks, where several processes may be at work at once.

    Raises:
        BlockingIOError: Another process holds it, and `limit` seconds are over (None: never).
        PermissionError: The folder is not writable, or another user's lock cannot be opened.
    """
    descriptor, is_held = _take(path, limit)
    holder = os.getpid()
    closed_in_children.add(descriptor)
    try:
        yield is_held
    finally:
        if os.getpid() == holder:
            # A file that cannot be unlinked stays, unlocked: the next process takes it.
            with contextlib.suppress(OSError):
                if _is_at(descriptor, path):
                    os.unlink(path)
            closed_in_children.discard(descriptor)
            os.close(descriptor)


@contextlib.contextmanager
def writers_lock(lock: str, *paths: str, limit: float | None = None) -> Iterator[bool]:
    """A `file_lock` that removes what dead writers of the files have left."""
    with file_lock(lock, limit=limit) as is_held:
        if is_held:  # else a temporary may be a living writer's
            for temporary in temporaries_of(*paths):
                with contextlib.suppress(OSError):  # another user's file does no harm
                    os.unlink(temporary)
        yield is_held


closed_in_children: set[int] = set()
"""Descriptors of this process's locks: one is held as long as a forked child has it open."""


def _forget_locks() -> None:
    for descriptor in closed_in_children:
        os.close(descriptor)
    closed_in_children.clear()


os.register_at_fork(after_in_child=_forget_locks)


def _take(path: str, limit: float | None) -> tuple[int, bool]:
    """An open lock file, and whether it is locked (False: there are no locks here)."""
    start, has_warned = time.monotonic(), False
    pause, longest = 0.001, 0.25  # seconds between attempts
    while isinstance(lock := _try_to_take(path), str):
        waited = time.monotonic() - start
        if limit is not None and waited >= limit:
            after = f" for longer than {limit:g} s" if limit > 0 else ""
            remedy = "wait for that process, or end it: a lock ends with its holder"
            raise BlockingIOError(errno.EWOULDBLOCK, f"held by {lock}{after}; {remedy}", path)
        if waited >= SAY_AFTER and not has_warned:
            logging.getLogger("millrace").warning("waiting for %s, held by %s", path, lock)
            has_warned = True
        # Jitter: those that began to wait at once must not come back at once.
        jitter = 0.5 + os.urandom(1)[0] / 512
        time.sleep(min(pause * jitter, longest if limit is None else limit - waited))
        pause = min(2 * pause, longest)
    return lock


def _try_to_take(path: str) -> tuple[int, bool] | str:
    """As `_take`; if the lock is held, a text that names the holder."""
    while True:
        descriptor, is_held = _open_lock(path), True
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    text = os.pread(descriptor, 200, 0).decode("ascii", "replace")
                    return text if text.isprintable() and text else "another process"
                if error.errno == errno.EBADF:  # NFS only locks writable files
                    raise PermissionError(errno.EACCES, _DENIED, path) from None
                if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                    raise OSError(error.errno, error.strerror, path) from None
                is_held = False
            if not _is_at(descriptor, path):
                continue  # its holder freed and unlinked it before we took it
            if is_held:
                holder = f"process {os.getpid()} on {os.uname().nodename}".encode()
                # Another user's file, or a full disk: only the message lacks the name.
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, holder, 0)
            stack.pop_all()
            return descriptor, is_held


def _is_at(descriptor: int, path: str) -> bool:
    """Whether an open file is still at that path."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _open_lock(path: str) -> int:
    while True:
        with contextlib.suppress(FileNotFoundError):
            for flags in (os.O_RDWR, os.O_RDONLY):  # to read is enough for a lock, but on NFS
                with contextlib.suppress(PermissionError):
                    return os.open(path, flags)
            raise PermissionError(errno.EACCES, _DENIED, path)
        with contextlib.suppress(FileExistsError):
            is_new = 0 if os.path.islink(path) else os.O_EXCL  # to no file: it is made there
            descriptor = os.open(path, os.O_CREAT | is_new | os.O_RDWR, 0o666)
            # Whatever the umask: other users can take the lock of a dead process.
            with contextlib.suppress(PermissionError):
                os.fchmod(descriptor, 0o666)
            return descriptor


# ---- checksums ----


def xxh3() -> Any:
    """A new XXH3-64, with `update` and `hexdigest`: 14 GB/s a core, about as fast as a read."""
    import xxhash  # 2 ms that `import millrace` does without

    return xxhash.xxh3_64()


def blake2b(data: bytes = b"") -> hashlib.blake2b:
    """A BLAKE2b of `data`, with `update` and `hexdigest`: 32 hex digits, for fingerprints."""
    return hashlib.blake2b(data, digest_size=16)


def checksum(parts: Iterable[Any]) -> str:
    """The XXH3-64 of contiguous buffers, one after the other: 16 hex digits."""
    digest = xxh3()
    for part in parts:
        digest.update(part)
    return str(digest.hexdigest())


def sum_of(
    path: str, on_piece: Callable[[Any], Any] | None = None, opened: Any = None
) -> tuple[int, str]:
    """Size and XXH3-64 of a file, perhaps opened; calls `on_piece` with each piece of its bytes."""
    digest, size, buffer = xxh3(), 0, np.empty(_PIECE, np.uint8).data
    with naming(path), opened or open(path, "rb", buffering=0) as file:
        with contextlib.suppress(OSError):  # a hint, which the kernel may refuse
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
            if on_piece is not None:
                on_piece(buffer[:count])
    return size, str(digest.hexdigest())
