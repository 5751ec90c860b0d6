"""The protocols of a place for bytes, and what holds for each of them."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.checks import shown
from millrace.errors import ConfigError

Bytes = NDArray[np.uint8]
Access = Literal["mmap", "file"]

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

    A reader must not change once it is made, and may be used by several threads at once.
    `gather_in_turn` is a `gather` for readers that have nothing better.

    A reader with the whole file in memory (mapped, or local pages of an object store) may also
    have an attribute `bytes`: uint8 [size], one contiguous array that starts at a multiple of 8.
    Reads of sequences are then views of it, and samples are gathered straight from it.

    A reader of slow storage may also have a method `prefetch(byte_offsets, byte_counts)`, with the
    arguments of `gather`. It is a hint that these pieces will be read soon: it starts the transfers
    and returns nothing, without waiting for them. One thread may call it while others read, and
    announced pieces may never be read. Loaders announce everything that they will read, but for
    readers with `is_local = True` only while reads go to the disk.

    Attributes:
        size: Size in bytes.
    """

    size: int

    def read(self, byte_offset: int, num_bytes: int) -> Bytes:
        """Bytes [byte_offset, byte_offset + num_bytes): uint8 [num_bytes], perhaps read-only."""
        ...

    def gather(self, byte_offsets: NDArray[np.int64], byte_counts: NDArray[np.int64]) -> Bytes:
        """Many pieces, one after the other: uint8 [sum of byte_counts]; the arrays are [pieces]."""
        ...


class StoredFile(BinReader, Protocol):
    """A file of a storage, as it was when it was opened: a `BinReader` that knows its identity.

    If another file takes the path, an open one gives its own bytes or raises DataError; it never
    mixes the two. It is closed when the last reference to it is gone.

    Attributes:
        identity: Identity of the file that was opened.
    """

    identity: Identity


class Storage(Protocol):
    """A place for files, read by path. This is where object stores plug in.

    Paths are texts; what they mean is the storage's own affair, but the files of a pair are its
    prefix and an ending, and the files of a folder are the folder, a slash and a name. A storage
    must be picklable if datasets are, and may be used by several threads at once.
    """

    def stat(self, path: str) -> Identity:
        """The identity of the file that is at a path now; FileNotFoundError: none is."""
        ...

    def open(self, path: str, access: Access) -> StoredFile:
        """Opens a file.

        Args:
            path: Path of the file.
            access: "mmap" asks for the whole file in memory (an attribute `bytes`), if the storage
                can map; "file" asks for reads into new arrays.

        Raises:
            FileNotFoundError: There is no such file.
        """
        ...

    def list(self, prefix: str) -> Iterator[str]:
        """The paths that begin with a prefix and have no slash after it, in any order."""
        ...


def exists(storage: Storage, path: str) -> bool:
    """Whether there is a file at a path."""
    try:
        storage.stat(path)
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return False
    return True


def read_file(storage: Storage, path: str) -> bytes:
    """The content of a small file."""
    file = storage.open(path, "file")
    return file.read(0, file.size).tobytes()


class FileStream(io.RawIOBase):
    """A reader as a file object, for libraries that take one.

    Args:
        reader: The bytes of the file.
    """

    def __init__(self, reader: BinReader) -> None:
        self._reader, self._place = reader, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + (0, self._place, self._reader.size)[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(min(len(view), self._reader.size - self._place), 0)
        view[:count] = self._reader.read(self._place, count).data
        self._place += count
        return count


def bytes_in_memory(reader: BinReader) -> Bytes | None:
    """The whole file, read-only, if the reader has it in memory."""
    data = getattr(reader, "bytes", None)
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
    if data.flags.writeable:
        data = data.view()
        data.flags.writeable = False
    view: Bytes = data
    return view


def gather_in_turn(
    read: Callable[[int, int], Bytes],
    byte_offsets: NDArray[np.int64],
    byte_counts: NDArray[np.int64],
) -> Bytes:
    """The pieces, read one by one."""
    spans = zip(byte_offsets.tolist(), byte_counts.tolist(), strict=True)
    pieces = [read(offset, count) for offset, count in spans]
    return np.concatenate([np.empty(0, np.uint8), *pieces])


def gather_range(reader: BinReader, start: int, stop: int) -> Bytes:
    """Bytes [start, stop): of a map that was cut short an error, where a view is a bus error."""
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
