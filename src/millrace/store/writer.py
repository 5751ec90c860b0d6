"""The files of a pair while a builder writes them: turns, buffers, and the checks at the end."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.errors import ConfigError, DataError
from millrace.files import flush_to_disk, naming
from millrace.forks import watch_forks
from millrace.interrupts import interrupts_held
from millrace.storage.protocol import copied
from millrace.store.info import BlockHasher, Info
from millrace.store.layout import Header
from millrace.store.publish import bin_path, building
from millrace.store.reader import IndexedDataset

_BUFFER_SIZE = 1 << 20  # bytes of tokens that are gathered before they are written
_CHUNK = 1 << 19  # tokens of an array that are checked at a time
_COPY_SIZE = 64 << 20  # bytes that a merge lets the kernel copy at a time
_READ_SIZE = 2 << 20  # bytes that a merge reads at a time if it must see them
LIMIT = 1 << 20  # entries of a column that are kept in memory
_PIECE = 1 << 17  # entries that are read back at a time: they stay in a core's cache
_LAST_WAIT = 5.0  # seconds that the end of a process waits for a thread that adds something


class PairWriter:
    """The temporaries of one pair, and the data on their way to them.

    `alone` gives one thread the right to call the other methods.

    Attributes:
        place: The absolute prefix: the files stay there if the working directory changes.
        temporaries: Paths of the files until they are published.
        buffer: The core's buffer of tokens and entries, and their numbers.
        provenance: Origin of the tokens, for the sidecar, or None.
        closed_because: Why the writer is closed; None: it is open.
        durable: Whether to bring the files to the disk before they appear.
    """

    def __init__(
        self,
        prefix: str,
        dtype: np.dtype[Any],
        *,
        multimodal: bool,
        checksums: bool,
        provenance: Mapping[str, Any] | None,
        durable: bool,
    ) -> None:
        folder = os.path.realpath(os.path.dirname(prefix) or ".")
        self.prefix, self.place = prefix, os.path.join(folder, os.path.basename(prefix))
        self.closed_because: str | None = None
        self._dtype, self._multimodal, self.provenance = dtype, multimodal, provenance
        self._num_bytes = 0  # bytes of tokens that were written, without those in the buffer
        self._hasher = BlockHasher() if checksums else None
        self.durable = durable
        self._columns = [_Entries(column, folder) for column in ("<i4", "<i8", "<i1")]
        self._lengths, self._documents, self._modes = self._columns
        self._documents.extend(np.zeros(1, np.int64))
        self._lock = threading.Lock()
        self._lock_holder: int | None = None
        self._resources = contextlib.ExitStack()
        try:
            with interrupts_held():
                for column in self._columns:
                    self._resources.callback(column.close)
                self.temporaries = self._resources.enter_context(building(self.place))
                self._data: Any = self._resources.enter_context(
                    open(self.temporaries.bin, "wb", buffering=0)  # noqa: SIM115
                )
                self.buffer = _native.TokenBuffer(
                    dtype.name, _BUFFER_SIZE, self._data.fileno(), multimodal
                )
                self._resources.callback(self.buffer.close)
                self._drop = weakref.finalize(self, _drop, self._lock, self.buffer, self._resources)
        except BaseException:
            with interrupts_held():
                self._resources.close()
            raise
        watch_forks(self)

    # ---- turns, and the end ----

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Holds the lock for work of several steps, which no other thread may see half-done.

        An error in the block closes the writer, as the work may be half-done. A ConfigError does
        not: it is raised before the first step.
        """
        if self._lock_holder == threading.get_ident():
            raise ConfigError(
                f"the builder of {self.prefix} was called from within one of its own calls, "
                "perhaps by a signal handler: let the call end first"
            )
        with self._lock:
            try:
                self._lock_holder = threading.get_ident()
                self.check_open()
                self.buffer.is_busy = True
                with naming(bin_path(self.prefix)):
                    yield
            except BaseException as error:
                if not isinstance(error, ConfigError):
                    self.close(f"an addition failed: {error!r}")
                raise
            finally:
                self._lock_holder = None
                if self.closed_because is None:
                    self.buffer.is_busy = False
                else:  # perhaps by `abort` in a signal handler
                    self.close(self.closed_because)

    def check_open(self) -> None:
        if self.closed_because is not None:
            raise ConfigError(
                f"the builder of {self.prefix} is closed ({self.closed_because}); make another one"
            )

    def abort(self) -> None:
        if self._lock_holder == threading.get_ident():  # in a signal handler: the call ends first
            self.closed_because = self.closed_because or "it was aborted"
            return
        with self._lock:
            self.close("it was aborted")

    def close(self, reason: str) -> None:
        """Discards what is not published yet, and frees all resources."""
        if self.closed_because is None:
            self.closed_because = reason
        with interrupts_held():  # a second Ctrl-C leaves nothing behind
            self.buffer.is_busy = True  # for good: the core adds nothing any more
            self._drop.detach()
            self._resources.close()

    def after_fork(self) -> None:
        """In a forked process: the files and the lock are its parent's."""
        self._lock, self._lock_holder = threading.Lock(), None
        if self.closed_because is None:
            self.closed_because = "it belongs to the process that this one was forked from"
            self.buffer.is_busy = True
            self._drop.detach()
            self._data.close()

    # ---- tokens and entries ----

    def append(self, values: NDArray[Any]) -> None:
        """Buffers tokens that fit the dtype; a chunk is checked while the last one is written."""
        for start in range(0, len(values), _CHUNK):
            try:
                self.buffer.append(values[start : start + _CHUNK])
            except ValueError as error:
                if start > 0:  # tokens before it are written: nothing can follow them
                    self.close(f"an addition failed: {error}")
                raise ConfigError(f"{error}; or write another dtype") from None
            if start + _CHUNK < len(values):
                self.flush()

    def flush(self) -> None:
        """Starts to write the buffer, while more can be added."""
        self.flush_entries()
        if self._hasher is not None:
            self._hasher.update(self.buffer.view())
        self._num_bytes += self.buffer.num_bytes
        self.buffer.flush()

    def flush_entries(self) -> None:
        lengths, modes, documents = self.buffer.take_entries()
        self._lengths.extend(lengths)
        self._documents.extend(documents)
        self._modes.extend(modes)

    def columns(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Lengths, document entries and modes so far."""
        self.flush_entries()
        lengths, documents, modes = (
            np.concatenate([np.empty(0, column.dtype), *column.chunks()])
            for column in self._columns
        )
        return lengths, documents, modes

    def copy_tokens(self, other: IndexedDataset, source: BinaryIO, start: int, stop: int) -> None:
        """Appends bytes [start, stop) of another `.bin` of the same dtype, open as `source`."""
        self.buffer.wait()
        with source:
            if self._hasher is not None:
                for data in blocks(other, start, stop):
                    self._hasher.update(data)
            _copy_file(source, self._data, start, stop)
        if self.durable:  # the flush at the end then has less to wait for
            _native.start_writeback(self._data.fileno(), self._num_bytes, stop - start)
        self._num_bytes += stop - start

    def copy_entries(
        self, other: IndexedDataset, sequences: tuple[int, int], documents: tuple[int, int]
    ) -> None:
        """Appends the entries of sequences and documents [start, stop) of another index."""
        for start in range(*sequences, LIMIT):
            part = slice(start, min(start + LIMIT, sequences[1]))
            self._lengths.extend(copied(other.sequence_lengths[part]))
            if self._multimodal and other.sequence_modes is not None:
                self._modes.extend(copied(other.sequence_modes[part]))
        for start in range(documents[0] + 1, documents[1] + 1, LIMIT):
            ends = other.document_indices[start : min(start + LIMIT, documents[1] + 1)]
            self._documents.extend(copied(ends) + (self.buffer.num_sequences - sequences[0]))

    # ---- the end ----

    def write_files(self) -> None:
        """Brings all files to the disk, and raises DataError if they are not what was added."""
        self.flush()
        self.buffer.wait()
        self._flush_to_disk(self._data)
        index_hasher = None if self._hasher is None else BlockHasher()
        header = Header(
            dtype=self._dtype,
            num_sequences=self.buffer.num_sequences,
            num_document_entries=self.buffer.num_documents + 1,
            has_modes=self._multimodal,
        )
        with open(self.temporaries.idx, "wb", buffering=1 << 20) as index:
            size = 0
            for chunk in self._index_chunks(header):
                index.write(chunk)
                if index_hasher is not None:
                    index_hasher.update(chunk)
                index.flush()
                _native.start_writeback(index.fileno(), size, index.tell() - size)
                size = index.tell()
            # On NFS a file's time is that of its flush, and clocks step back: see `publish`.
            files = self._data.fileno(), index.fileno()
            written = max(os.fstat(file).st_mtime_ns for file in files)
            os.utime(index.fileno(), ns=(written, written))
            self._flush_to_disk(index)
        if size != header.size:
            raise DataError(
                f"{self.prefix}: {size} bytes of index were written for {header.num_sequences} "
                f"sequences and {self.buffer.num_documents} documents. Nothing is published"
            )
        if self._hasher is not None or self.provenance is not None:
            info = Info(
                provenance=dict(self.provenance or {}),
                bin=None if self._hasher is None else self._hasher.finish(),
                idx=None if index_hasher is None else index_hasher.finish(),
            )
            with open(self.temporaries.info, "wb") as sidecar:
                sidecar.write(info.to_json().encode())
                self._flush_to_disk(sidecar)

    def _flush_to_disk(self, file: BinaryIO) -> None:
        if self.durable:
            flush_to_disk(file)

    def _index_chunks(self, header: Header) -> Iterator[Any]:
        """The bytes of the index file, in pieces."""
        yield header.pack()
        yield from self._lengths.chunks()
        end = 0
        for lengths in self._lengths.chunks():
            pointers = np.empty(len(lengths) + 1, "<i8")
            pointers[0] = end
            # In two steps: a cumsum that also converts is three times slower.
            np.multiply(lengths, self._dtype.itemsize, out=pointers[1:], dtype="<i8")
            np.cumsum(pointers, out=pointers)
            yield pointers[:-1]
            end = int(pointers[-1])
        size = os.fstat(self._data.fileno()).st_size
        counted = self.buffer.num_tokens * self._dtype.itemsize
        if not end == counted == self._num_bytes == size:
            raise DataError(
                f"{self.prefix}: the lengths of the sequences make {end} bytes of tokens, "
                f"{counted} were added, {self._num_bytes} were written, and the file has {size}. "
                "Another program writes to it, or an addition was cut off: nothing is published"
            )
        yield from self._documents.chunks()
        yield from self._modes.chunks()


class _Entries:
    """A column of an index, appended to at its end and read back from its start.

    A short column is kept in memory; a longer one goes to a nameless temporary file in `folder`,
    which disappears with the process.
    """

    def __init__(self, dtype: str, folder: str) -> None:
        import tempfile  # 3 ms that `import millrace` does without

        self.dtype = np.dtype(dtype)
        size = LIMIT * self.dtype.itemsize
        self._file = tempfile.SpooledTemporaryFile(size, dir=folder)  # noqa: SIM115

    def extend(self, values: NDArray[Any]) -> None:
        self._file.seek(0, os.SEEK_END)
        self._file.write(np.ascontiguousarray(values, self.dtype).data)
        self._file.flush()  # else a forked child, too, would write what is buffered

    def chunks(self) -> Iterator[NDArray[Any]]:
        """The entries from the first to the last, in pieces."""
        self._file.seek(0)
        while data := self._file.read(_PIECE * self.dtype.itemsize):
            yield np.frombuffer(data, self.dtype)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of entries for which the disk had no room
            self._file.close()


def _drop(
    lock: threading.Lock, buffer: _native.TokenBuffer, resources: contextlib.ExitStack
) -> None:
    """Ends a writer that was neither published nor aborted, as it is collected or at exit."""
    # A daemon thread may be at work until the very end: its call may finish, and no other begins.
    # If it takes too long, its files stay, as after a kill.
    if lock.acquire(timeout=_LAST_WAIT):
        buffer.is_busy = True
        with interrupts_held():
            resources.close()


def blocks(dataset: IndexedDataset, start: int, stop: int) -> Iterator[NDArray[np.uint8]]:
    """Bytes [start, stop) of a dataset's `.bin`, some at a time.

    They are gathered, not read: a read of a mapped file is a view, which may be a bus error.
    """
    for at in range(start, stop, _READ_SIZE):
        yield dataset.reader.gather(np.array([at]), np.array([min(_READ_SIZE, stop - at)]))


def _copy_file(source: BinaryIO, target: BinaryIO, start: int, stop: int) -> None:
    """Copies bytes [start, stop) of a file to the end of another, in the kernel if it can."""
    at = start
    while at < stop:
        count = _copy_piece(source.fileno(), target.fileno(), at, min(_COPY_SIZE, stop - at))
        if count == 0:
            raise DataError(f"{source.name} ends at byte {at}, not {stop}: it was truncated")
        at += count


def _copy_piece(source: int, target: int, start: int, size: int) -> int:
    """Copies up to `size` bytes between two descriptors; the number of bytes, 0 at the end."""
    # File systems and containers refuse the first two by many numbers, also for a full disk: the
    # last one raises its true error.
    with contextlib.suppress(OSError):
        if count := os.copy_file_range(source, target, size, offset_src=start):
            return count
    with contextlib.suppress(OSError):
        if count := os.sendfile(target, source, start, size):
            return count
    return os.write(target, os.pread(source, min(size, _READ_SIZE), start))
