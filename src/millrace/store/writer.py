"""Turns to write the files of a pair, and the columns of its index, which may outgrow memory."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike, NDArray

from millrace.errors import ConfigError, DataError
from millrace.files import atomic_file, naming
from millrace.interrupts import interrupts_held
from millrace.names import BIN, IDX
from millrace.storage import Bytes, gather_range
from millrace.store.layout import Header
from millrace.store.reader import IndexedDataset, copied_pieces

LIMIT = 1 << 20  # entries of a column that stay in memory
_PIECE = 1 << 17  # entries that are read back at a time: they stay in a core's cache
_COPY_SIZE = 64 << 20  # bytes that the kernel copies at a time for a merge
_READ_SIZE = 2 << 20  # bytes that a merge reads at a time
_LAST_WAIT = 5.0  # seconds that a process waits at its end for a thread's turn


class Turns:
    """Gives one thread at a time the right to change the files of a pair, and data on their way.

    `free` discards them. It is called at least once after the last turn, with Ctrl-C held back.
    """

    def __init__(self, prefix: str, free: Callable[[], None]) -> None:
        self._prefix, self._free = prefix, free
        self.closed_because: str | None = None  # None: there are more turns
        self._lock = threading.Lock()
        self._holder: int | None = None

    @contextlib.contextmanager
    def take(self) -> Iterator[None]:
        """Holds the lock for work of several steps.

        An error in the block closes the turns, as the work may be half-done. A ConfigError does
        not: it comes before the first step.
        """
        if self._holder == threading.get_ident():
            raise ConfigError(
                f"the builder of {self._prefix} was called from within one of its own calls, "
                "perhaps by a signal handler: let the call end first"
            )
        with self._lock:
            try:
                self._holder = threading.get_ident()
                self.check_open()
                with naming(self._prefix + BIN):
                    yield
            except BaseException as error:
                if not isinstance(error, ConfigError):
                    self.end(f"an addition failed: {error!r}")
                raise
            finally:
                self._holder = None
                if self.closed_because is not None:  # perhaps by `close` in a signal handler
                    self.end(self.closed_because)

    def check_open(self) -> None:
        if self.closed_because is not None:
            why = self.closed_because
            raise ConfigError(f"the builder of {self._prefix} is closed ({why}); make another one")

    def close(self, reason: str) -> None:
        """Closes after the turn of another thread."""
        if self._holder == threading.get_ident():  # in a signal handler: the call ends first
            self.closed_because = self.closed_because or reason
            return
        with self._lock:
            self.end(reason)

    def end(self, reason: str) -> None:
        """Closes inside a turn."""
        self.closed_because = self.closed_because or reason
        with interrupts_held():  # a second Ctrl-C leaves nothing behind
            self._free()

    def leave_to_parent(self) -> None:
        """In a forked child: closes without freeing, and forgets other threads' turns."""
        self._lock, self._holder, self._free = threading.Lock(), None, lambda: None
        self.closed_because = (
            self.closed_because or "it belongs to the process that this one was forked from"
        )

    def end_at_exit(self) -> None:
        """Frees what is changed, but waits only `_LAST_WAIT` for another thread's turn.

        The lock stays taken: later daemon threads wait for the end of the process.
        """
        if self._lock.acquire(timeout=_LAST_WAIT):
            with interrupts_held():
                self._free()


def blocks(dataset: IndexedDataset, start: int, stop: int) -> Iterator[Bytes]:
    """Bytes [start, stop) of a `.bin`, some at a time, without bus errors."""
    for at in range(start, stop, _READ_SIZE):
        yield gather_range(dataset.reader, at, min(at + _READ_SIZE, stop))


def copy_file(source: BinaryIO, target: BinaryIO, start: int, stop: int) -> None:
    """Copies bytes [start, stop) of a file to the end of another, in the kernel if possible."""
    reading, writing, at = source.fileno(), target.fileno(), start
    while at < stop:
        count = 0
        # File systems and containers refuse with many errors; of a full disk, `os.write` raises
        # the true one.
        with contextlib.suppress(OSError):
            count = os.copy_file_range(reading, writing, min(_COPY_SIZE, stop - at), offset_src=at)
        if count == 0:
            count = os.write(writing, os.pread(reading, min(_READ_SIZE, stop - at), at))
        if count == 0:
            raise DataError(f"{source.name} ends at byte {at}, not {stop}: it was truncated")
        at += count


# ---- the columns of an index ----


class IndexColumns:
    """Lengths, modes and document entries; what outgrows memory goes to `folder`."""

    def __init__(self, folder: str, dtype: DTypeLike, *, has_modes: bool) -> None:
        self.dtype, self.has_modes = np.dtype(dtype), has_modes
        self._all = [_Entries(dtype, folder) for dtype in ("<i4", "<i1", "<i8")]
        self._lengths, self._modes, self._documents = self._all
        self._documents.extend(np.zeros(1, np.int64))

    def append(self, *entries: NDArray[Any] | None) -> None:
        """Appends lengths, modes, and document entries (ends of documents, in sequences)."""
        for column, values in zip(self._all, entries, strict=True):
            if values is not None:
                column.extend(values)

    def copy(
        self, other: IndexedDataset, sequences: tuple[int, int], documents: tuple[int, int]
    ) -> None:
        """Appends sequences and documents [start, stop) of another index."""
        shift = self._lengths.count - sequences[0]
        for lengths in copied_pieces(other.sequence_lengths, *sequences):
            self._lengths.extend(lengths)
        for ends in copied_pieces(other.document_indices, documents[0] + 1, documents[1] + 1):
            self._documents.extend(ends + shift)
        if other.sequence_modes is not None:
            for modes in copied_pieces(other.sequence_modes, *sequences):
                self._modes.extend(modes)

    @property
    def header(self) -> Header:
        return Header(self.dtype, self._lengths.count, self._documents.count, self.has_modes)

    def chunks(self) -> Iterator[Any]:
        """The bytes of the index file, in pieces."""
        yield self.header.pack()
        yield from self._lengths.chunks()
        end = 0
        for lengths in self._lengths.chunks():
            sizes = np.multiply(lengths, self.dtype.itemsize, dtype="<i8")
            ends = end + np.cumsum(sizes)
            yield ends - sizes
            end = int(ends[-1])
        yield from self._documents.chunks()
        yield from self._modes.chunks()

    def check_bin(self, path: str) -> None:
        """Raises DataError if a `.bin` has more or fewer bytes than all sequences take."""
        num_tokens = sum(int(lengths.sum(dtype=np.int64)) for lengths in self._lengths.chunks())
        num_bytes, size = num_tokens * self.dtype.itemsize, os.path.getsize(path)
        if num_bytes != size:
            raise DataError(
                f"{path}: its index has {self._lengths.count} sequences, "
                f"{self._documents.count - 1} documents and {num_bytes} bytes; the .bin has "
                f"{size}. Another program writes to it, or an addition was cut off: nothing is "
                "published"
            )

    def close(self) -> None:
        for column in self._all:
            with contextlib.suppress(OSError):  # of a full disk
                column.file.close()


class _Entries:
    """A column; a long one goes to a nameless file in `folder` that ends with the process."""

    def __init__(self, dtype: str, folder: str) -> None:
        import tempfile  # 3 ms that `import millrace` does without

        self.dtype, self.count = np.dtype(dtype), 0
        size = LIMIT * self.dtype.itemsize
        self.file = tempfile.SpooledTemporaryFile(size, dir=folder)  # noqa: SIM115

    def extend(self, values: NDArray[Any]) -> None:
        self.file.seek(0, os.SEEK_END)
        self.file.write(np.ascontiguousarray(values, self.dtype).data)
        self.file.flush()  # else a forked child would also write what is buffered
        self.count += len(values)

    def chunks(self) -> Iterator[NDArray[Any]]:
        self.file.seek(0)
        while data := self.file.read(_PIECE * self.dtype.itemsize):
            yield np.frombuffer(data, self.dtype)


# ---- the index of an existing `.bin` ----

Entries = tuple[NDArray[Any], NDArray[Any], NDArray[np.int8] | None]
"""Some sequences, and the documents that end with one of them: the length of each sequence in
tokens, integers [sequences]; the number of these sequences in each document, integers [documents];
the mode of each sequence, int8 [sequences], or None in a file without modes. Sequences of a
document that ends later are the last ones, and not counted."""


def write_index(
    prefix: str, dtype: DTypeLike, documents: Iterable[Entries], *, has_modes: bool = False
) -> None:
    """Writes `PREFIX.idx` for an existing `.bin`, whole or not at all; it is not flushed.

    Raises:
        DataError: Entries of more or fewer tokens than the `.bin` has.
    """
    columns = IndexColumns(os.path.dirname(prefix) or ".", dtype, has_modes=has_modes)
    with contextlib.closing(columns), atomic_file(prefix + IDX, durable=False) as file:
        for lengths, counts, modes in documents:
            columns.append(lengths, modes, columns.header.num_sequences + np.cumsum(counts))
        columns.check_bin(prefix + BIN)
        file.writelines(columns.chunks())
