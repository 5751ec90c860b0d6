"""A partial mirror: sparse local copies of objects, in blocks that stay while a process uses them.

A folder has two files for each object: `NAME.data`, sparse and of the object's size, and
`NAME.blocks`, a byte for each block of 4 MiB: 2 if it has room, 1 if it is there. A process that
has the object open holds a shared lock of `NAME.blocks`. The disk itself says how much is taken: a
block's room is allocated, under the folder's lock, before the block is fetched. So a process that
is killed leaves nothing that is counted wrongly: its block has room, and the next one fills it.
"""

import contextlib
import errno
import fcntl
import glob
import json
import logging
import os
import resource
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

from millrace import _native
from millrace.files import blake2b, checksum, file_lock
from millrace.storage import Bytes, Identity
from millrace.storage.copies import is_whole, own_folder

BLOCK = 4 << 20  # bytes: those of the checksums of a sidecar
FIRST = 64  # pieces that a process reads exactly: the first batch does not wait for blocks
_DATA, _BLOCKS = ".data", ".blocks"
_THERE, _ROOM = b"\1", b"\2"
_SPARE = 128  # descriptors that are left for requests and other files
_EXTENTS = 8 << 10  # bytes that a file system takes to know where a block lies
_UNFIT = ("tmpfs", "ramfs", "nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "9p", "beegfs", "gpfs")
_fetches = threading.Semaphore(16)  # of blocks of a process: those that are needed first
_SET_LOCK = fcntl.F_OFD_SETLKW
_log = logging.getLogger("millrace")


class Mirror:
    """A folder of copies, which grows up to a limit and then stays as it is.

    Args:
        folder: Folder on a local disk, made with mode 0700.
        limit: Most bytes of all copies.
    """

    def __init__(self, folder: str, limit: int) -> None:
        self.folder, self._limit = own_folder(folder), limit
        self.num_first = FIRST  # pieces that are still to be read exactly
        self.is_full = False  # until the end of the process
        if (kind := _file_system_of(self.folder)) in _UNFIT or kind.startswith("fuse"):
            _log.warning("the mirror %s is on %s: a local disk is meant", self.folder, kind)

    def make_room(self, copy: "Copy", block: int) -> bool:
        """Allocates a block; False if the limit is reached, or the disk is full."""
        start, size = block * BLOCK, min(BLOCK, copy.size - block * BLOCK)
        needed = size + _EXTENTS
        with file_lock(os.path.join(self.folder, "mirror.lock")):
            while self._num_bytes() + needed > self._limit:
                if needed > self._limit or not self._remove_unused():
                    self.is_full = True
                    return False
            try:
                os.posix_fallocate(copy.data_file, start, size)
            except OSError as error:
                return self.stop(error)
        return True

    def stop(self, error: OSError) -> bool:
        """Stops the growth, and says so once; returns False."""
        if not self.is_full:
            _log.warning("the mirror %s does not grow any more: %s", self.folder, error)
        self.is_full = True
        return False

    def _paths(self) -> list[str]:
        return glob.glob(f"{glob.escape(self.folder)}/*{_DATA}")

    def _num_bytes(self) -> int:
        return sum(os.stat(path).st_blocks * 512 for path in self._paths())

    def _remove_unused(self) -> bool:
        """Removes the object that no process has open, and whose last use is the longest ago."""
        for path in sorted((path.removesuffix(_DATA) for path in self._paths()), key=_last_use):
            file = os.open(path + _BLOCKS, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path + _BLOCKS)  # first: without it the data are nothing
                os.unlink(path + _DATA)
                return True
            except BlockingIOError:
                pass
            finally:
                os.close(file)
        return False


class Copy:
    """The local copy of one object.

    Attributes:
        size: Size of the object in bytes.
        data_file: Descriptor of the data.
    """

    def __init__(self, mirror: Mirror, path: str, identity: Identity) -> None:
        self._arguments = mirror, path, identity
        self._mirror, self.size = mirror, identity.size
        name = blake2b(repr((path, identity)).encode()).hexdigest()
        place = os.path.join(mirror.folder, name)
        with file_lock(os.path.join(mirror.folder, "mirror.lock")):  # not while it is removed
            if not is_whole(place + _DATA, self.size):  # removed by hand: its marks are wrong
                for ending in (_BLOCKS, _DATA):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(place + ending)
            self._block_file = os.open(place + _BLOCKS, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._block_file, fcntl.LOCK_SH)
            self.data_file = os.open(place + _DATA, os.O_RDWR | os.O_CREAT, 0o600)
            if self.data_file + _SPARE > resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
                raise OSError(errno.EMFILE, "too few open files are allowed (ulimit -n)")
            os.ftruncate(self._block_file, -(-self.size // BLOCK))
            os.ftruncate(self.data_file, self.size)
            os.utime(self._block_file)
        self._data: Bytes = _native.map_file(self.data_file, self.size)
        self._locks = [threading.Lock() for _ in range(64)]
        self._sums: list[str] | None = None

    def __reduce__(self) -> Any:
        return copy_of, self._arguments

    def _marks(self, first: int, end: int) -> bytes:
        return os.pread(self._block_file, end - first, first)

    def read(self, start: int, stop: int) -> Bytes | None:
        """Bytes [start, stop), if all of them are there."""
        first, end = start // BLOCK, -(-stop // BLOCK)
        return self._data[start:stop] if self._marks(first, end) == _THERE * (end - first) else None

    def fill(
        self,
        start: int,
        stop: int,
        fetch: Callable[[int, int, Callable[[Any], bool]], Any],
        load_sums: Callable[[], list[str]],
    ) -> Bytes | None:
        """The same, after its missing blocks were fetched; None if there is no room for them.

        `fetch(start, stop, check)` gives bytes of the object for which `check` is true, and
        `load_sums` the checksums of its blocks, if they are known.
        """
        if self._mirror.num_first > 0:
            self._mirror.num_first -= 1
            return None
        if self._sums is None:
            self._sums = load_sums()
        for block in range(start // BLOCK, -(-stop // BLOCK)):
            if self._mirror.is_full and self._marks(block, block + 1) == b"\0":
                return None
            with self._locks[block % len(self._locks)], self._lock(block):
                if not self._fill(block, fetch):
                    return None
        return self.read(start, stop)

    @contextlib.contextmanager
    def _lock(self, block: int) -> Iterator[None]:
        """One process at a time fetches a block; the kernel frees the lock of a dead one.

        It is a lock of the open file: locks of processes would be refused where two of them wait
        for each other, though in other threads than those that go on.
        """
        byte = os.SEEK_SET, block, 1, 0
        fcntl.fcntl(self._block_file, _SET_LOCK, struct.pack("hhqqi", fcntl.F_WRLCK, *byte))
        try:
            yield
        finally:
            fcntl.fcntl(self._block_file, _SET_LOCK, struct.pack("hhqqi", fcntl.F_UNLCK, *byte))

    def _fill(self, block: int, fetch: Any) -> bool:
        mark = self._marks(block, block + 1)
        if mark == _THERE:
            return True
        if mark != _ROOM and not self._mirror.make_room(self, block):
            return False
        start, stop = block * BLOCK, min((block + 1) * BLOCK, self.size)
        sums = self._sums[block : block + 1] if self._sums else []
        try:
            os.pwrite(self._block_file, _ROOM, block)
            with _fetches:
                body = fetch(start, stop, lambda body: not sums or checksum([body]) == sums[0])
            os.pwrite(self.data_file, body, start)
            os.fdatasync(self.data_file)  # before the mark, also after a power cut
            os.pwrite(self._block_file, _THERE, block)
        except OSError as error:
            return self._mirror.stop(error)
        return True

    def __del__(
        self, close: Callable[[int], None] = os.close, touch: Callable[[int], None] = os.utime
    ) -> None:
        for name in ("_block_file", "data_file"):
            if name in vars(self):
                touch(vars(self)[name])  # its last use
                close(vars(self)[name])


def copy_of(mirror: Mirror, path: str, identity: Identity) -> Copy | None:
    """The local copy of an object; None if its files cannot be opened."""
    try:
        return Copy(mirror, path, identity)
    except OSError as error:
        mirror.stop(error)
        return None


def sums_in(sidecar: bytes, size: int) -> list[str]:
    """The checksums of a `.bin` by its sidecar; none if they are not those of blocks."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        sums = json.loads(sidecar)["checksums"]
        blocks = sums["bin"]["blocks"]
        kind = sums["algorithm"], sums["block_size"], sums["bin"]["size"]
        if kind == ("xxh3_64", BLOCK, size) and len(blocks) == -(-size // BLOCK):
            return list(blocks)
    return []


def _last_use(path: str) -> float:
    with contextlib.suppress(FileNotFoundError):
        return os.stat(path + _BLOCKS).st_mtime
    return 0.0


def _file_system_of(folder: str) -> str:
    """The kind of the file system, by the longest mount point."""
    place, longest = os.path.realpath(folder), ("", "")
    with contextlib.suppress(OSError), open("/proc/mounts") as mounts:
        for line in mounts:
            _, point, kind, *_ = line.split()
            if f"{place}/".startswith(f"{point.rstrip('/')}/"):
                longest = max(longest, (point, kind), key=lambda one: len(one[0]))
    return longest[1]
