"""Files that appear whole or not at all, locks that die with their holder, and a checksum."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from typing import IO, Any, BinaryIO

TMP = ".tmp"
"""What the name of a file ends with while it is written."""

SAY_AFTER = 10.0  # seconds of waiting for a lock, until it is said
_PAUSES = 0.001, 0.25  # seconds between the attempts to take a lock: the first one, and the longest
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


def temporary_name(path: str) -> str:
    """A name beside `path` to write it under: another one for each call, process and host."""
    return f"{path}.{os.urandom(6).hex()}{TMP}"


def temporaries_of(*paths: str) -> list[str]:
    """The temporaries of files that are there, those of living writers among them.

    The names of `temporary_name`, and the path + ".tmp", which older versions wrote.
    """
    found = []
    for folder in {os.path.dirname(path) for path in paths}:
        names = {os.path.basename(path) for path in paths if os.path.dirname(path) == folder}
        with contextlib.suppress(FileNotFoundError):
            there = os.listdir(folder or ".")
            found += [os.path.join(folder, file) for file in there if written_name(file) in names]
    return sorted(found)


def written_name(temporary: str) -> str | None:
    """The name that a temporary gets when it is whole; None for other files."""
    match = re.fullmatch(r"(.*?)(\.[0-9a-f]{12})?" + re.escape(TMP), temporary, re.DOTALL)
    return None if match is None else match[1]


@contextlib.contextmanager
def atomic_file(path: str) -> Iterator[BinaryIO]:
    """A file that appears at `path` whole when the block ends, or not at all if it fails.

    Of several writers at one time each has a temporary of its own; the last one to end counts.

    Raises:
        OSError: it cannot be written; it names the file.
    """
    temporary = temporary_name(path)
    with naming(path):
        try:
            with open(temporary, "xb") as file:
                yield file
                flush_to_disk(file)
            os.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        fsync_folder(path)


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Gives an OSError of the block that names no file (as a write's on a full disk) this one's."""
    try:
        yield
    except OSError as error:
        if type(error) is not OSError or error.filename is not None:
            raise
        # NumPy's error of a short write has a text alone.
        raise OSError(error.errno or errno.EIO, error.strerror or str(error), path) from error


def is_of_the_process(error: OSError) -> bool:
    """Whether an error says nothing about the file: there are too many open ones, or no memory."""
    return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def flush_to_disk(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def fsync_folder(path: str) -> None:
    """Flushes the folder that holds `path`: a rename is on disk only then."""
    folder = os.path.dirname(path) or "."
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with naming(folder):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def file_lock(path: str, *, wait: bool = True, limit: float | None = None) -> Iterator[bool]:
    """Holds a lock that processes share by the name of a file, which exists only while it is held.

    The kernel lets go of it when its holder dies, also where a forked child lives on: a child holds
    nothing. After ten seconds of waiting, a warning of the logger "millrace" says for whom.

    Args:
        wait: for another holder.
        limit: Seconds to wait; None: no limit.

    Yields:
        whether it is really held: False on a file system without locks, where it is up to the
        caller that several are at work at once.

    Raises:
        BlockingIOError: another process holds it, and `wait` is False or the limit is over.
        PermissionError: the folder cannot be written, or the file is another user's and closed.
    """
    descriptor, is_held = _take(path, limit if wait else 0.0)
    holder = os.getpid()
    _held.add(descriptor)
    try:
        yield is_held
    finally:
        if os.getpid() == holder:
            # What cannot be unlinked stays there unlocked, and the next one takes it.
            with contextlib.suppress(OSError):
                if is_at(descriptor, path):
                    os.unlink(path)
            _held.discard(descriptor)
            os.close(descriptor)


def cut_short(path: str, opened: tuple[int, ...]) -> str:
    """Says that a file, if it is still at its name, has become shorter since it was opened.

    Args:
        opened: its device, inode and size then.

    Returns:
        empty where it has not.
    """
    try:
        now = os.stat(path)
    except OSError:
        return ""  # gone from its name: what was opened stays
    if (now.st_dev, now.st_ino) != opened[:2] or now.st_size >= opened[2]:
        return ""
    return (
        f"{path} has {now.st_size} bytes; it had {opened[2]} when it was opened, and was cut "
        "short since. Restore it: files in use are replaced by renames"
    )


def is_at(file: IO[bytes] | int, path: str) -> bool:
    """Whether an open file, or descriptor, is (still) the one of that name."""
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    here = os.fstat(file if isinstance(file, int) else file.fileno())
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


_held: set[int] = set()  # the descriptors of this process's locks


def _forget_locks() -> None:
    """In a forked child, at once: a lock is its parent's as long as any copy is open."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_locks)


def _take(path: str, limit: float | None) -> tuple[int, bool]:
    """An open lock file, and whether it is locked (else there are no locks here)."""
    began, (pause, longest), is_said = time.monotonic(), _PAUSES, False
    while True:
        taken = _try_to_take(path)
        if not isinstance(taken, str):
            return taken
        waited = time.monotonic() - began
        if limit is not None and waited >= limit:
            after = f" for longer than {limit:g} s" if limit > 0 else ""
            raise BlockingIOError(
                errno.EWOULDBLOCK,
                f"held by {taken}{after}; wait for that process, or end it: a lock ends with its "
                "holder",
                path,
            )
        if waited >= SAY_AFTER and not is_said:
            import logging  # 5 ms that `import millrace` does without

            logging.getLogger("millrace").warning("waiting for %s, held by %s", path, taken)
            is_said = True
        # Of many that began to wait at once, not all may come back at once.
        jitter = 0.5 + os.urandom(1)[0] / 512
        time.sleep(min(pause * jitter, longest if limit is None else limit - waited))
        pause = min(2 * pause, longest)


def _try_to_take(path: str) -> tuple[int, bool] | str:
    """An open lock file, and whether it is locked (else there are no locks here); or its holder."""
    while True:
        descriptor = _open_lock(path)
        with contextlib.ExitStack() as opened:
            opened.callback(os.close, descriptor)
            is_held = True
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    return _read_holder(descriptor)
                if error.errno == errno.EBADF:  # NFS locks only what may be written
                    raise _not_ours(path) from None
                if error.errno not in _NO_LOCKS:
                    raise OSError(error.errno, error.strerror, path) from None
                is_held = False
            if not is_at(descriptor, path):
                continue  # its holder let go of it, and unlinked it, before we took it
            if is_held:
                _write_holder(descriptor)
            opened.pop_all()
            return descriptor, is_held


def _open_lock(path: str) -> int:
    while True:
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
        except PermissionError as error:
            denied = error
        else:
            # Whatever the umask, so that other users can take it when we are dead.
            with contextlib.suppress(PermissionError):
                if stat.S_IMODE(os.fstat(descriptor).st_mode) != 0o666:
                    os.fchmod(descriptor, 0o666)
            return descriptor
        try:
            return os.open(path, os.O_RDONLY)  # which is enough for a lock
        except FileNotFoundError:
            if not os.access(os.path.dirname(path) or ".", os.W_OK):
                raise denied from None
        except PermissionError:
            raise _not_ours(path) from None


def _not_ours(path: str) -> PermissionError:
    try:
        owner = f"the user with number {os.stat(path).st_uid}"
    except OSError:
        owner = "another user"
    return PermissionError(
        errno.EACCES,
        f"a lock of {owner}, which you may not open: ask for it to be removed (if nobody is at "
        f"work there), or for `chmod 666`; you are the user with number {os.geteuid()}",
        path,
    )


def _write_holder(descriptor: int) -> None:
    text = f"process {os.getpid()} on {os.uname().nodename}".encode()
    with contextlib.suppress(OSError):  # another user's, or a full disk: only a message lacks it
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text, 0)


def _read_holder(descriptor: int) -> str:
    text = os.pread(descriptor, 200, 0).decode("ascii", "replace")
    return text if text.isprintable() and text else "another process"


def xxh3() -> Any:
    """A new XXH3-64, with `update` and `hexdigest`: 14 GB/s a core, about as fast as a read."""
    import xxhash  # 2 ms that `import millrace` does without

    return xxhash.xxh3_64()


def checksum(parts: Iterable[Any]) -> str:
    """The XXH3-64 of contiguous buffers, one after the other: 16 hex digits."""
    digest = xxh3()
    for part in parts:
        digest.update(part)
    return str(digest.hexdigest())
