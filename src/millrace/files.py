"""Files that appear whole or not at all, locks that end with their holder, and checksums."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import IO, TYPE_CHECKING, Any, BinaryIO

import numpy as np

if TYPE_CHECKING:
    import hashlib

TMP = ".tmp"  # the ending of a file's name while it is written
SAY_AFTER = 10.0  # seconds of waiting for a lock before a warning
_PAUSES = 0.001, 0.25  # seconds between the attempts to take a lock: the first, and the longest
_DENIED = (
    "a lock of another user, which you cannot open: ask for it to be removed (if no process holds "
    "it), or for `chmod 666`"
)
_PIECE = 1 << 20  # bytes that are read and hashed at a time


def temporary_name(path: str) -> str:
    """A name beside `path` to write it under; each call, process and host gets another one."""
    return f"{path}.{os.urandom(6).hex()}{TMP}"


def temporaries_of(*paths: str) -> list[str]:
    """The existing temporaries of files, also of living writers and older versions (".tmp")."""
    names = {os.path.split(path) for path in paths}
    temporaries = []
    for folder in {folder for folder, _ in names}:
        with contextlib.suppress(FileNotFoundError):
            files = os.listdir(folder or ".")
            of_paths = [file for file in files if (folder, written_name(file)) in names]
            temporaries += [os.path.join(folder, file) for file in of_paths]
    return sorted(temporaries)


def written_name(temporary: str) -> str | None:
    """The name that a temporary gets when it is whole; None for other files."""
    match = re.fullmatch(r"(.*?)(\.[0-9a-f]{12})?" + re.escape(TMP), temporary, re.DOTALL)
    return None if match is None else match[1]


def files_below(
    folder: str, is_skipped: Callable[[str], bool], parents: tuple[tuple[int, int], ...] = ()
) -> Iterator[os.DirEntry[str]]:
    """The files in a folder and in all folders below it, without those whose names are skipped.

    Links are followed, but not to one of the folder's own parents (device and inode of each).
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

    Writers at the same time have their own temporaries; the last one to end counts. An OSError
    names the file. Only a durable file survives a power cut, which takes two flushes.
    """
    temporary = temporary_name(path)
    with naming(path):
        try:
            with open(temporary, "xb") as file:
                yield file
                if durable:
                    flush_to_disk(file)
            os.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        if durable:
            fsync_folder(path)


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Adds the file's name to an OSError of the block without one (a write to a full disk)."""
    try:
        yield
    except OSError as error:
        if type(error) is not OSError or error.filename is not None:
            raise
        # NumPy's error of a short write only has a text.
        raise OSError(error.errno or errno.EIO, error.strerror or str(error), path) from error


def is_of_the_process(error: OSError) -> bool:
    """Whether an error is not about the file: too many files are open, or memory is full."""
    return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def flush_to_disk(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def fsync_folder(path: str) -> None:
    """Flushes the folder that holds `path`, which brings a rename to the disk.

    Some file systems have no such operation (AFS, CIFS, FUSE): there it does nothing.
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
    """Holds a lock shared by processes: a file that exists only while the lock is held.

    The kernel frees the lock when its holder dies, even if a forked child lives on: a child does
    not hold it. After ten seconds of waiting, the logger "millrace" warns and names the holder.
    Yields False on a file system without locks, where several processes may be at work at once.

    Raises:
        BlockingIOError: If another process holds it, and `limit` seconds are over (None: never).
        PermissionError: If the folder is not writable, or another user's lock cannot be opened.
    """
    descriptor, is_held = _take(path, limit)
    holder = os.getpid()
    _held.add(descriptor)
    try:
        yield is_held
    finally:
        if os.getpid() == holder:
            # A file that cannot be unlinked stays unlocked, and the next process takes it.
            with contextlib.suppress(OSError):
                if _is_at(descriptor, path):
                    os.unlink(path)
            _held.discard(descriptor)
            os.close(descriptor)


@contextlib.contextmanager
def writers_lock(lock: str, *paths: str, limit: float | None = None) -> Iterator[bool]:
    """Holds a lock (see `file_lock`), and removes what dead writers of the files have left."""
    with file_lock(lock, limit=limit) as is_held:
        if is_held:  # else a temporary may be a living writer's
            for temporary in temporaries_of(*paths):
                with contextlib.suppress(OSError):  # another user's file does no harm
                    os.unlink(temporary)
        yield is_held


_held: set[int] = set()  # the descriptors of this process's locks


def _forget_locks() -> None:
    """In a forked child, at once: its parent's lock is held as long as any copy is open."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_locks)


def _take(path: str, limit: float | None) -> tuple[int, bool]:
    """An open lock file, and whether it is locked (False: there are no locks here)."""
    start, (pause, longest), has_warned = time.monotonic(), _PAUSES, False
    while isinstance(lock := _try_to_take(path), str):
        waited = time.monotonic() - start
        if limit is not None and waited >= limit:
            after = f" for longer than {limit:g} s" if limit > 0 else ""
            remedy = "wait for that process, or end it: a lock ends with its holder"
            raise BlockingIOError(errno.EWOULDBLOCK, f"held by {lock}{after}; {remedy}", path)
        if waited >= SAY_AFTER and not has_warned:
            logging.getLogger("millrace").warning("waiting for %s, held by %s", path, lock)
            has_warned = True
        # With jitter: many that began to wait at once must not all come back at once.
        jitter = 0.5 + os.urandom(1)[0] / 512
        time.sleep(min(pause * jitter, longest if limit is None else limit - waited))
        pause = min(2 * pause, longest)
    return lock


def _try_to_take(path: str) -> tuple[int, bool] | str:
    """As `_take`; a text that names the holder if the lock is held."""
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
    """Whether an open file is (still) the file of that name."""
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
            # Whatever the umask: other users can take the lock when this process is dead.
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
    import hashlib  # 4 ms that `import millrace` does without

    return hashlib.blake2b(data, digest_size=16)


def checksum(parts: Iterable[Any]) -> str:
    """The XXH3-64 of contiguous buffers, one after the other: 16 hex digits."""
    digest = xxh3()
    for part in parts:
        digest.update(part)
    return str(digest.hexdigest())


def sum_of(path: str, on_bytes: Callable[[int], Any] | None = None) -> tuple[int, str]:
    """Size and XXH3-64 of a file; `on_bytes` is called with the size of each piece."""
    digest, size, buffer = xxh3(), 0, np.empty(_PIECE, np.uint8).data
    with naming(path), open(path, "rb", buffering=0) as file:
        with contextlib.suppress(OSError):  # a hint, which the kernel may refuse
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
            if on_bytes is not None:
                on_bytes(count)
    return size, str(digest.hexdigest())
