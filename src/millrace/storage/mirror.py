"""A partial mirror: sparse local copies of objects, in blocks that stay while a process uses them.

A folder has a file for each object: its bytes, sparse, and then a byte for each block of 4 MiB: 2
if it has room, 1 if it is there. So a file that is cut short has no blocks. A process that has the
object open holds a shared lock of the file. The disk itself says how much is taken: a block's room
is allocated, under the folder's lock, before the block is fetched. So a process that is killed
leaves nothing that is counted wrongly: its block has room, and the next one fills it.
"""

import contextlib
import errno
import fcntl
import glob
import logging
import os
import resource
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from millrace import _native
from millrace.errors import ConfigError
from millrace.files import blake2b, closed_in_children, file_lock
from millrace.forks import closing
from millrace.storage import Bytes, Identity, Numbers
from millrace.storage.copies import own_folder

BLOCK = 4 << 20  # bytes: those of the checksums of a sidecar
FIRST = 3 << 19  # bytes that a process reads exactly: for a fingerprint, and a first batch at once
_THERE, _ROOM = b"\1", b"\2"
_AHEAD = 12  # blocks that are asked for where an order reads on in shards
_SPARE = 256  # descriptors that are left for requests, locks of blocks and other files
_EXTENTS = 8 << 10  # bytes that a file system takes to know where a block lies
_UNFIT = ("tmpfs", "ramfs", "nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "9p", "beegfs", "gpfs")
_PAUSE = 0.005  # seconds between two tries to lock a block
_fetches = threading.Semaphore(16)  # of blocks of a process: those that are needed first
_log = logging.getLogger("millrace")


class Mirror:
    """A folder of copies, which grows up to a limit and then stays as it is.

    Args:
        folder: Folder on a local disk, made with mode 0700.
        limit: Most bytes of all copies.
        time_limit: Seconds after which a reader does not wait any more for another process.
    """

    def __init__(self, folder: str, limit: int, time_limit: float) -> None:
        try:
            self.folder, self._limit, self.time_limit = own_folder(folder), limit, time_limit
        except OSError as error:
            remedy = "Give a folder on a local disk that you can write"
            raise ConfigError(f"the mirror {folder}: {error.strerror}. {remedy}") from None
        self.num_first = FIRST  # bytes that are still to be read exactly
        self.is_full = self._has_told = False  # until the end of the process
        if (kind := _file_system_of(self.folder)) in _UNFIT or kind.startswith("fuse"):
            _log.warning("the mirror %s is on %s: a local disk is meant", self.folder, kind)

    def lock(self) -> contextlib.AbstractContextManager[bool]:
        """Keeps other processes from making room and removing copies."""
        return file_lock(os.path.join(self.folder, "mirror.lock"), limit=self.time_limit)

    def make_room(self, file: int, start: int, size: int) -> bool:
        """Allocates a block of a copy; False if the limit is reached, OSError on a full disk."""
        needed = size + _EXTENTS
        with self.lock():
            while self._num_bytes() + needed > self._limit:
                if needed > self._limit or not self._remove_unused():
                    self.is_full = True
                    return False
            os.posix_fallocate(file, start, size)
        return True

    def stop(self, error: OSError) -> None:
        """Stops the growth, but for too few open files, and says so once: in one step, as threads
        may come together."""
        has_told, self._has_told = self._has_told, True
        self.is_full |= error.errno != errno.EMFILE
        if not has_told:
            _log.warning("the mirror %s will not hold all: %s", self.folder, error)

    def _paths(self) -> list[str]:
        return glob.glob(f"{glob.escape(self.folder)}/*.data")

    def _num_bytes(self) -> int:
        return sum(os.stat(path).st_blocks * 512 for path in self._paths())

    def _remove_unused(self) -> bool:
        """Removes the object that no process has open, and whose last use is the longest ago."""
        for path in sorted(self._paths(), key=os.path.getmtime):
            with open(path, "rb") as file, contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
                return True
        return False


class Copy:
    """The local copy of one object."""

    def __init__(self, mirror: Mirror, path: str, identity: Identity) -> None:
        self._arguments = mirror, path, identity
        self._mirror, self._size = mirror, identity.size
        self.num_blocks = -(-self._size // BLOCK)
        name = f"{blake2b(repr((path, identity)).encode()).hexdigest()}.data"
        with mirror.lock():  # not while it is removed
            place = os.path.join(mirror.folder, name)
            self._file = os.open(place, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_SH)
            if self._file + _SPARE > resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
                raise OSError(errno.EMFILE, "too few open files are allowed (ulimit -n)")
            os.ftruncate(self._file, self._size + self.num_blocks)
            os.utime(self._file)
        self._sums: list[str] | None = None
        self._loading = threading.Lock()
        self._late: set[int] = set()  # blocks that others held until the time limit
        self._last, self._end = -2, 0  # block that was read last; end of those asked for ahead

    def __reduce__(self) -> Any:
        return copy_of, self._arguments

    def _marks(self, first: int, end: int) -> bytes:
        return os.pread(self._file, end - first, self._size + first)

    def read(self, start: int, stop: int) -> Bytes | None:
        """Bytes [start, stop), if all of them are there."""
        first, end = start // BLOCK, -(-stop // BLOCK)
        if self._marks(first, end) != _THERE * (end - first):
            return None
        data = os.pread(self._file, stop - start, start)  # a map that is cut short is a bus error
        return np.frombuffer(data, np.uint8) if len(data) == stop - start else None

    def is_whole(self) -> bool:
        return self._marks(0, self.num_blocks) == _THERE * self.num_blocks

    def gather(self, byte_offsets: Numbers, byte_counts: Numbers) -> Bytes | None:
        """Pieces, one after the other, if all blocks are there: in one call of the core."""
        with contextlib.suppress(ValueError):  # it is cut short just now
            if self.is_whole():
                return _native.read_packed(self._file, self._size, byte_offsets, byte_counts)
        return None

    def blocks_ahead(self, start: int, stop: int) -> tuple[int, int]:
        """The blocks that are needed soon, where bytes [start, stop) read on: first, end."""
        block, last, self._last = start // BLOCK, self._last, stop // BLOCK
        if block not in (last, last + 1) or self._mirror.is_full or self._mirror.num_first > 0:
            return 0, 0
        return self._last + 1, self._last + 1 + _AHEAD

    def new_blocks(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Those of blocks [first, end) that nobody has asked for yet, as bytes."""
        first, self._end = max(first, self._end), max(end, self._end)
        for place in range(first * BLOCK, min(self._end * BLOCK, self._size), BLOCK):
            yield place, min(place + BLOCK, self._size)

    def fill(self, start: int, stop: int, file: Any, begin: float) -> bool:
        """Fetches the missing blocks of bytes [start, stop), which were asked for at `begin`.

        `file` is the `ObjectFile`. False if there is no room for them, or another process holds one
        until the time limit.
        """
        if self._mirror.num_first > 0:
            self._mirror.num_first -= stop - start
            return False
        with self._loading:
            if self._sums is None:
                self._sums = file.sums(begin)
        try:
            blocks = range(start // BLOCK, -(-stop // BLOCK))
            return all(self._fill(block, file, begin) for block in blocks)
        except OSError as error:
            self._mirror.stop(error)
            return False

    def _fill(self, block: int, file: Any, begin: float) -> bool:
        """Fetches a block that is not there; False as `fill`."""
        start, size = block * BLOCK, min(BLOCK, self._size - block * BLOCK)
        sums = self._sums[block : block + 1] if self._sums else []
        if self._mirror.is_full and self._marks(block, block + 1) not in (_THERE, _ROOM):
            return False
        with self._lock(block, begin) as is_held:
            mark = self._marks(block, block + 1)
            if mark == _THERE or not is_held:
                return mark == _THERE
            if mark != _ROOM and not self._mirror.make_room(self._file, start, size):
                return False
            self._write(_ROOM, self._size + block)
            with _fetches:
                body = file.fetch(begin, start, start + size, *sums)
            self._write(body, start)
            os.fdatasync(self._file)  # before the mark, also after a power cut
            self._write(_THERE, self._size + block)
        return True

    @contextlib.contextmanager
    def _lock(self, block: int, begin: float) -> Iterator[bool]:
        """One thread of all processes fetches a block; the kernel frees the lock of a dead one.

        Yields False where a process that is stopped holds it until the time limit. It is a lock of
        the open file: locks of processes would be refused where two of them wait for each other,
        though in other threads than those that go on.
        """
        byte = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, block, 1, 0)
        file = os.open(f"/proc/self/fd/{self._file}", os.O_RDWR)
        closed_in_children.add(file)
        try:
            end = 0.0 if block in self._late else begin + self._mirror.time_limit
            while not (is_held := _try_lock(file, byte)) and time.monotonic() < end:
                if closing.wait(_PAUSE):
                    break
            if not is_held:
                self._late.add(block)  # its next readers do not wait
            yield is_held
        finally:
            closed_in_children.discard(file)
            os.close(file)

    def _write(self, data: Any, place: int) -> None:
        if os.pwrite(self._file, data, place) != len(data):
            raise OSError(errno.ENOSPC, "a block was written in part")

    def __del__(
        self, close: Callable[[int], None] = os.close, touch: Callable[[int], None] = os.utime
    ) -> None:
        if "_file" in vars(self):
            touch(self._file)  # its last use
            close(self._file)


def copy_of(mirror: Mirror, path: str, identity: Identity) -> Copy | None:
    """The local copy of an object; None if its file cannot be opened."""
    try:
        return Copy(mirror, path, identity)
    except OSError as error:
        mirror.stop(error)
        return None


def _try_lock(file: int, byte: bytes) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, byte)
        return True
    return False


def _file_system_of(folder: str) -> str:
    """The kind of the file system, by the longest mount point."""
    place, longest = os.path.realpath(folder), ("", "")
    with contextlib.suppress(OSError), open("/proc/mounts") as mounts:
        for line in mounts:
            _, point, kind, *_ = line.split()
            if f"{place}/".startswith(f"{point.rstrip('/')}/"):
                longest = max(longest, (point, kind), key=lambda one: len(one[0]))
    return longest[1]
