"""Where bytes are: a file system, buckets, or anything that fits a protocol of three methods.

Token files, their sidecars and the metadata of shards are read through a `Storage`. Files are
written, locked and cached on a file system alone.
"""

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.checks import SCHEME, absolute_path, check_choice, shown
from millrace.errors import ConfigError, DataError

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]
Access = Literal["mmap", "file"]

BUCKET_SCHEMES = ("s3", "gs", "az", "file", "msc")
MAX_OPEN = 64  # files of a process that keep a descriptor; each thread may use one more
_STREAM_BLOCK, _BLOCKS_AHEAD = 1 << 20, 8  # of a stream that is read on
_NUM_BLOCKS, _BLOCK = 16, 4096  # of a file that a fingerprint covers


class Identity(NamedTuple):
    """What tells a file from others, and from itself before it was changed.

    Attributes:
        size: Size in bytes.
        time: Time of the last change in nanoseconds since 1970; 0: unknown.
        version: Plain values that no other file has had at this path: device and inode, an ETag.
    """

    size: int
    time: int
    version: Any


class BinReader(Protocol):
    """The bytes of one file.

    A reader must not change, and several threads may use it at once. `gather_in_turn` is a `gather`
    for readers that have nothing better.

    A reader with the whole file in memory (mapped, or local pages of an object store) may also
    have an attribute `bytes`: uint8 [size], one contiguous array that starts at a multiple of 8.
    Sequences are then views of it, and samples are gathered straight from it.

    A reader of slow storage may also have a method `prefetch(byte_offsets, byte_counts)`, with the
    arguments of `gather`: a hint that these pieces will be read soon. It starts the transfers and
    returns nothing, without waiting. One thread may call it while others read, and announced pieces
    may never be read. Loaders announce all that they will read, but for readers with
    `is_local = True` only while reads go to the disk.

    Attributes:
        size: Size in bytes.
    """

    size: int

    def read(self, byte_offset: int, num_bytes: int) -> Bytes:
        """Bytes [byte_offset, byte_offset + num_bytes): uint8 [num_bytes], perhaps read-only."""
        ...

    def gather(self, byte_offsets: Numbers, byte_counts: Numbers) -> Bytes:
        """Many pieces, one after the other: uint8 [sum of byte_counts]; the arrays are [pieces]."""
        ...


class StoredFile(BinReader, Protocol):
    """A file of a storage, as it was when it was opened: a `BinReader` that knows its identity.

    If another file takes the path, an open one gives its own bytes or raises DataError, and never
    mixes the two. It is closed when its last reference is gone.
    """

    identity: Identity


class Storage(Protocol):
    """A place for files, read by path. This is where object stores plug in.

    Paths are texts, whose meaning is the storage's affair; but a file of a pair is the prefix and
    an ending, and a file of a folder is the folder, a slash and a name. A storage must be picklable
    if datasets are, and several threads may use it at once.
    """

    def stat(self, path: str) -> Identity:
        """The identity of the file at a path now; FileNotFoundError: there is none."""
        ...

    def open(self, path: str, access: Access) -> StoredFile:
        """Opens a file; FileNotFoundError: there is none.

        "mmap" asks for the whole file in memory (an attribute `bytes`), if the storage can map;
        "file" asks for reads into new arrays.
        """
        ...

    def list(self, prefix: str) -> Iterator[str]:
        """The paths that begin with a prefix, without a slash after it, in any order."""
        ...


def storage_of(path: str, storage: Storage | None = None) -> Storage:
    """The storage of a path or path prefix: the user's, buckets, or the file system.

    Raises:
        ConfigError: A path such as `ftp://host/name` without a storage.
    """
    if storage is not None:
        return storage
    scheme = SCHEME.match(path)
    if scheme is None:
        return LOCAL
    if scheme[1] in BUCKET_SCHEMES:
        from millrace.storage.objects import by_environment  # the others need no obstore

        return by_environment()
    raise ConfigError(
        f"{path} is in a storage of the kind {scheme[0]}, which millrace has no reader for: "
        "copy it to a file system, or read it with IndexedDataset(prefix, storage=...) and "
        "your own storage"
    )


def exists(storage: Storage, path: str) -> bool:
    try:
        storage.stat(path)
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return False
    return True


def read_file(storage: Storage, path: str) -> bytes:
    file = storage.open(path, "file")
    return file.read(0, file.size).tobytes()


class FileStream(io.RawIOBase):
    """A reader as a file object, for libraries that take one; see `SequentialStream`."""

    def __init__(self, reader: BinReader, *, is_read_on: bool = False) -> None:
        self.reader, self._place, self._is_read_on = reader, 0, is_read_on

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + (0, self._place, self.reader.size)[whence]
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Fills the buffer, or takes all that is left: pyarrow takes fewer bytes for the end."""
        view = memoryview(buffer).cast("B")
        if self._is_read_on:
            view = view[:_STREAM_BLOCK]
            if hasattr(self.reader, "prefetch"):
                starts = self._place + _STREAM_BLOCK * np.arange(_BLOCKS_AHEAD)
                starts = starts[starts < self.reader.size]
                self.reader.prefetch(starts, np.minimum(_STREAM_BLOCK, self.reader.size - starts))
        count = max(min(len(view), self.reader.size - self._place), 0)
        # Other bytes than were asked for are a ValueError.
        view[:count] = self.reader.read(self._place, count).data
        self._place += count
        return count


class SequentialStream(io.BufferedReader):
    """A file object that is read on from any place, by blocks; the next ones are announced."""

    def __init__(self, reader: BinReader) -> None:
        super().__init__(FileStream(reader, is_read_on=True), _STREAM_BLOCK)
        self.reader = reader


def bytes_in_memory(reader: BinReader) -> Bytes | None:
    """The whole file, read-only, if the reader has it in memory."""
    data: Any = getattr(reader, "bytes", None)
    if data is None:
        return None
    if not (
        isinstance(data, np.ndarray)
        and (data.dtype, data.shape) == (np.uint8, (reader.size,))
        and data.flags.c_contiguous
        and data.__array_interface__["data"][0] % 8 == 0
    ):
        raise ConfigError(
            f"the reader's bytes are {shown(data)}; a contiguous uint8 [{reader.size}] is needed, "
            "at an address that is a multiple of 8"
        )
    view: Bytes = data.view()
    view.flags.writeable = False
    return view


def gather_in_turn(
    read: Callable[[int, int], Bytes], byte_offsets: Numbers, byte_counts: Numbers
) -> Bytes:
    """The pieces, read one by one: a `gather` for any reader."""
    spans = zip(byte_offsets.tolist(), byte_counts.tolist(), strict=True)
    pieces = [read(offset, count) for offset, count in spans]
    return np.concatenate([np.empty(0, np.uint8), *pieces])


def gather_range(reader: BinReader, start: int, stop: int) -> Bytes:
    """Bytes [start, stop): a map that was cut short is an error, where a view is a bus error."""
    return reader.gather(np.array([start]), np.array([stop - start]))


def sample_of(reader: BinReader) -> Bytes:
    """16 evenly spaced blocks of up to 4 KiB, for fingerprints."""
    last = max(reader.size - _BLOCK, 0)
    starts = np.array([last * piece // (_NUM_BLOCKS - 1) for piece in range(_NUM_BLOCKS)])
    return reader.gather(starts, np.minimum(_BLOCK, reader.size - starts))


def copied(column: NDArray[Any]) -> NDArray[Any]:
    """A copy of a part of a mapped column: an error if the file was cut short, not a bus error."""
    data = column.view(np.uint8)
    return _native.copy_pieces(data, np.array([0]), np.array([len(data)])).view(column.dtype)


# ---- the file system ----


class LocalStorage:
    """The files of this machine, also on mounted file systems."""

    def stat(self, path: str) -> Identity:
        return identity_of(os.stat(path))

    def open(self, path: str, access: Access) -> StoredFile:
        check_choice("access", access, ("mmap", "file"))
        return map_file(path) if access == "mmap" else PositionedFile(path)

    def list(self, prefix: str) -> Iterator[str]:
        folder, start = os.path.split(prefix)
        names = os.listdir(folder or ".")
        return (os.path.join(folder, name) for name in names if name.startswith(start))


LOCAL = LocalStorage()


class MappedFile:
    """A file in memory, as mapped from the page cache: reads are views."""

    is_local = True

    def __init__(self, data: Bytes, identity: Identity) -> None:
        self.bytes, self.identity, self.size = data, identity, identity.size

    def read(self, byte_offset: int, num_bytes: int) -> Bytes:
        return self.bytes[byte_offset : byte_offset + num_bytes]

    def gather(self, byte_offsets: Numbers, byte_counts: Numbers) -> Bytes:
        return _native.copy_pieces(self.bytes, byte_offsets, byte_counts)

    def prefetch(self, byte_offsets: Numbers, byte_counts: Numbers) -> None:
        _native.prefetch_mapped(self.bytes, byte_offsets, byte_counts)


def map_file(path: str) -> MappedFile:
    """Maps a file from the page cache. No descriptor stays open."""
    with open(path, "rb", buffering=0) as file:
        identity = identity_of(os.fstat(file.fileno()))
        return MappedFile(_native.map_file(file.fileno(), identity.size), identity)


class PositionedFile:
    """Positioned reads into new arrays, for file systems where mapping hurts.

    The files of a process that were used last keep an open descriptor, which threads share without
    a lock; another is opened again at its next use, if it is still the same file.
    """

    is_local = True

    def __init__(self, path: str) -> None:
        self._path = absolute_path(path)
        descriptor, self.identity = _open(self._path)
        self.size = self.identity.size
        self._keep(descriptor)

    def read(self, byte_offset: int, num_bytes: int) -> Bytes:
        return gather_range(self, byte_offset, byte_offset + num_bytes)

    def gather(self, byte_offsets: Numbers, byte_counts: Numbers) -> Bytes:
        descriptor = self._open()
        try:
            return _native.read_packed(descriptor, self.size, byte_offsets, byte_counts)
        except ValueError:
            size = os.fstat(descriptor).st_size
            if size >= self.size:
                raise
            raise DataError(
                f"{self._path} ends at byte {size}; it had {self.size} bytes when it was opened, "
                "and was cut short since. Restore it: files in use are replaced by renames"
            ) from None

    def prefetch(self, byte_offsets: Numbers, byte_counts: Numbers) -> None:
        _native.prefetch_file(self._open(), self.size, byte_offsets, byte_counts)

    def _open(self) -> "_Descriptor":
        """A descriptor, open as long as the caller holds it."""
        descriptor, identity = _recent.get(id(self)), self.identity
        with contextlib.suppress(FileNotFoundError):
            if descriptor is None:
                descriptor, identity = _open(self._path)
            if identity == self.identity:
                return self._keep(descriptor)
        raise DataError(
            f"{self._path} was removed, replaced or changed after it was opened (of files that are "
            f"read with access='file', {MAX_OPEN} stay open). Restore it, or open the dataset "
            "again; files of a run must not change"
        )

    def _keep(self, descriptor: "_Descriptor") -> "_Descriptor":
        """Keeps a descriptor, and closes the least recently used."""
        _recent.pop(id(self), None)
        _recent[id(self)] = descriptor  # the last one
        while len(_recent) > MAX_OPEN:
            with contextlib.suppress(RuntimeError, StopIteration):  # another thread was faster
                _recent.pop(next(iter(_recent)), None)
        return descriptor

    def __del__(self) -> None:
        _recent.pop(id(self), None)


class _Descriptor(int):
    """The number of an open file, which closes with its last reference."""

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self)  # at the end of Python, `os` may be gone before the last dataset


# The descriptors that were used last, by the `id` of their `PositionedFile`. Each step is one
# operation of the dict: threads need no lock, which a forked child could inherit locked. (An
# OrderedDict crashes where another thread changes it while it closes a descriptor.)
_recent: dict[int, _Descriptor] = {}


def _open(path: str) -> tuple[_Descriptor, Identity]:
    with open(path, "rb", buffering=0) as file:  # which refuses folders
        return _Descriptor(os.dup(file.fileno())), identity_of(os.fstat(file.fileno()))


def identity_of(status: os.stat_result) -> Identity:
    return Identity(status.st_size, status.st_mtime_ns, (status.st_dev, status.st_ino))
