"""The files of a pair while a builder writes them, who may write, and the checks at the end.

The columns of an index grow beyond memory, and `write_index` writes one for a `.bin` that is there.
"""

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from millrace import _native
from millrace.errors import ConfigError, DataError
from millrace.files import atomic_file, flush_to_disk, naming
from millrace.forks import watch_forks
from millrace.interrupts import interrupts_held
from millrace.storage import Bytes, copied, gather_range
from millrace.store.info import BlockHasher, Checksums, Info
from millrace.store.layout import Header
from millrace.store.publish import bin_path, building, idx_path
from millrace.store.reader import IndexedDataset

_BUFFER_SIZE = 1 << 20  # bytes of tokens that are gathered before they are written
_CHUNK = 1 << 19  # tokens of an array that are checked at a time
LIMIT = 1 << 20  # entries of a column that are kept in memory
_PIECE = 1 << 17  # entries that are read back at a time: they stay in a core's cache
_COPY_SIZE = 64 << 20  # bytes that a merge lets the kernel copy at a time
_READ_SIZE = 2 << 20  # bytes that a merge reads at a time if it must see them
_LAST_WAIT = 5.0  # seconds that the end of a process waits for a thread that adds something


class Turns:
    """Gives one thread at a time the right to change something of several parts.

    `free` discards it. It is called at least once after the last turn, with Ctrl-C held back.
    """

    def __init__(self, name: str, free: Callable[[], None]) -> None:
        self._name, self._free = name, free
        self.closed_because: str | None = None  # None: there are more turns
        self._lock = threading.Lock()
        self._holder: int | None = None

    @contextlib.contextmanager
    def take(self) -> Iterator[None]:
        """Holds the lock for work of several steps, which no other thread may see half-done.

        An error in the block closes the turns, as the work may be half-done. A ConfigError does
        not: it is raised before the first step.
        """
        if self._holder == threading.get_ident():
            raise ConfigError(
                f"{self._name} was called from within one of its own calls, perhaps by a signal "
                "handler: let the call end first"
            )
        with self._lock:
            try:
                self._holder = threading.get_ident()
                self.check_open()
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
            raise ConfigError(f"{self._name} is closed ({self.closed_because}); make another one")

    def close(self, reason: str) -> None:
        """Waits for the turn of another thread, and closes."""
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
        """In a forked child: closes without freeing, and forgets the turns of other threads."""
        self._lock, self._holder = threading.Lock(), None
        self.closed_because = (
            self.closed_because or "it belongs to the process that this one was forked from"
        )

    def end_at_exit(self, limit: float) -> None:
        """Frees what is changed, if the turn of another thread ends within `limit` seconds.

        The lock stays taken: a daemon thread that comes later waits for the end of the process.
        """
        if self._lock.acquire(timeout=limit):
            with interrupts_held():
                self._free()


class PairWriter:
    """The temporaries of one pair, and the data on their way to them.

    `turn` gives one thread the right to call the other methods. `buffer` is the core's, of tokens
    and entries, and has their numbers. `place` is the prefix, wherever the working directory is.
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
        self.provenance, self.durable = provenance, durable
        self._hasher = BlockHasher() if checksums else None
        self._num_bytes = 0  # bytes of tokens that were written, without those in the buffer
        resources = contextlib.ExitStack()
        self.turns = Turns(f"the builder of {prefix}", resources.close)
        try:
            with interrupts_held():
                self.columns = IndexColumns(folder, dtype, has_modes=multimodal)
                resources.callback(self.columns.close)
                self.temporaries = resources.enter_context(building(self.place))
                file = open(self.temporaries.bin, "wb", buffering=0)  # noqa: SIM115
                self._file: Any = resources.enter_context(file)
                self.buffer = _native.TokenBuffer(
                    dtype.name, _BUFFER_SIZE, file.fileno(), multimodal
                )
                resources.callback(self.buffer.close)
                self._drop = weakref.finalize(self, self.turns.end_at_exit, _LAST_WAIT)
        except BaseException:
            with interrupts_held():
                resources.close()
            raise
        watch_forks(self)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Holds the turn of this writer; see `Turns.take`."""
        with self.turns.take(), naming(bin_path(self.prefix)):
            yield

    def after_fork(self) -> None:
        """In a forked process: the files and the lock are its parent's."""
        if self.turns.closed_because is None:
            self._drop.detach()
            self._file.close()
        self.turns.leave_to_parent()

    def append(self, values: NDArray[Any]) -> None:
        """Buffers tokens; a chunk is checked while the last one is written.

        A ConfigError for a token that does not fit the dtype: none of its chunk is buffered.
        """
        for start in range(0, len(values), _CHUNK):
            try:
                self.buffer.append(values[start : start + _CHUNK])
            except ValueError as error:
                problem = ConfigError(f"{error}; or write another dtype")
                if start > 0:  # tokens before it are written: nothing can follow them
                    self.turns.end(f"an addition failed: {problem}")
                raise problem from None
            if start + _CHUNK < len(values):
                self.flush()

    def flush(self) -> None:
        """Starts to write the buffer, while more can be added."""
        self.columns.append(*self.buffer.take_entries())
        if self._hasher is not None:
            self._hasher.update(self.buffer.view())
        self._num_bytes += self.buffer.num_bytes
        self.buffer.flush()

    def copy(self, other: IndexedDataset, source: BinaryIO, start: int, stop: int) -> None:
        """Appends bytes [start, stop) of another `.bin` of the same dtype, open as `source`."""
        self.buffer.wait()
        with source:
            if self._hasher is not None:
                for data in blocks(other, start, stop):
                    self._hasher.update(data)
            _copy_file(source, self._file, start, stop)
        if self.durable:  # the flush at the end then has less to wait for
            _native.start_writeback(self._file.fileno(), self._num_bytes, stop - start)
        self._num_bytes += stop - start

    def write_files(self) -> None:
        """Brings all files to the disk, and raises DataError if they are not what was added."""
        written = self._finish_bin()
        sums = None if self._hasher is None else self._hasher.finish()
        index_sums = self._write_index(written)
        if sums is not None or self.provenance is not None:
            info = Info(provenance=dict(self.provenance or {}), bin=sums, idx=index_sums)
            with open(self.temporaries.info, "wb") as sidecar:
                sidecar.write(info.to_json().encode())
                self._flush_to_disk(sidecar)

    def _flush_to_disk(self, file: BinaryIO) -> None:
        if self.durable:
            flush_to_disk(file)

    def _finish_bin(self) -> int:
        """Ends the `.bin`; returns the time of its last change."""
        self.flush()
        self.buffer.wait()
        self._flush_to_disk(self._file)
        status, width = os.fstat(self._file.fileno()), self.columns.dtype.itemsize
        expected, counted = self.columns.num_tokens() * width, self.buffer.num_tokens * width
        if not expected == counted == self._num_bytes == status.st_size:
            raise DataError(
                f"{self._file.name}: the lengths of the sequences make {expected} bytes of tokens, "
                f"{counted} were added, {self._num_bytes} were written, and the file has "
                f"{status.st_size}. Another program writes to it, or an addition was cut off: "
                "nothing is published"
            )
        return status.st_mtime_ns

    def _write_index(self, written: int) -> Checksums | None:
        """Writes the index; `written` is the time of the last change of the `.bin`."""
        hasher = None if self._hasher is None else BlockHasher()
        header = self.columns.header
        with open(self.temporaries.idx, "wb", buffering=1 << 20) as index:
            for chunk in self.columns.chunks():
                index.write(chunk)
                if hasher is not None:
                    hasher.update(chunk)
            index.flush()
            # On NFS a file's time is that of its flush, and clocks step back: see `publish`.
            size, written = index.tell(), max(written, os.fstat(index.fileno()).st_mtime_ns)
            os.utime(index.fileno(), ns=(written, written))
            self._flush_to_disk(index)
        counts = self.buffer.num_sequences, self.buffer.num_documents + 1
        if (header.num_sequences, header.num_document_entries, header.size) != (*counts, size):
            raise DataError(
                f"{self.prefix}: {size} bytes of index were written for {counts[0]} sequences and "
                f"{counts[1]} document entries. Nothing is published"
            )
        return None if hasher is None else hasher.finish()


def blocks(dataset: IndexedDataset, start: int, stop: int) -> Iterator[Bytes]:
    """Bytes [start, stop) of a dataset's `.bin`, some at a time, without bus errors."""
    for at in range(start, stop, _READ_SIZE):
        yield gather_range(dataset.reader, at, min(at + _READ_SIZE, stop))


def _copy_file(source: BinaryIO, target: BinaryIO, start: int, stop: int) -> None:
    """Copies bytes [start, stop) of a file to the end of another, in the kernel if it can."""
    reading, writing, at = source.fileno(), target.fileno(), start
    while at < stop:
        count = 0
        # File systems and containers refuse it by many numbers, also for a full disk: `os.write`
        # raises its true error.
        with contextlib.suppress(OSError):
            count = os.copy_file_range(reading, writing, min(_COPY_SIZE, stop - at), offset_src=at)
        if count == 0:
            count = os.write(writing, os.pread(reading, min(_READ_SIZE, stop - at), at))
        if count == 0:
            raise DataError(f"{source.name} ends at byte {at}, not {stop}: it was truncated")
        at += count


# ---- the columns of an index: while they grow, and as they are written ----


class IndexColumns:
    """Lengths, modes and document entries; `folder` takes what does not stay in memory."""

    def __init__(self, folder: str, dtype: DTypeLike, *, has_modes: bool) -> None:
        self.dtype, self.has_modes = np.dtype(dtype), has_modes
        self._all = [_Entries(dtype, folder) for dtype in ("<i4", "<i1", "<i8")]
        self._lengths, self._modes, self._documents = self._all
        self._documents.extend(np.zeros(1, np.int64))

    def append(self, *entries: NDArray[Any] | None) -> None:
        """Appends lengths, modes, and document entries: the ends of documents, in sequences."""
        for column, values in zip(self._all, entries, strict=True):
            if values is not None:
                column.extend(values)

    def copy(
        self, other: IndexedDataset, sequences: tuple[int, int], documents: tuple[int, int]
    ) -> None:
        """Appends sequences and documents [start, stop) of another index."""
        shift = self._lengths.count - sequences[0]
        for lengths in _pieces(other.sequence_lengths, *sequences):
            self._lengths.extend(lengths)
        for ends in _pieces(other.document_indices, documents[0] + 1, documents[1] + 1):
            self._documents.extend(ends + shift)
        if self.has_modes and other.sequence_modes is not None:
            for modes in _pieces(other.sequence_modes, *sequences):
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

    def num_tokens(self) -> int:
        """The sum of all lengths."""
        return sum(int(lengths.sum(dtype=np.int64)) for lengths in self._lengths.chunks())

    def close(self) -> None:
        for column in self._all:
            column.close()


def _pieces(column: NDArray[Any], start: int, stop: int) -> Iterator[NDArray[Any]]:
    """Entries [start, stop) of a mapped column, copied in pieces."""
    for first in range(start, stop, LIMIT):
        yield copied(column[first : min(first + LIMIT, stop)])


class _Entries:
    """A column, appended to at its end and read back from its start.

    A short one is kept in memory; a longer one goes to a nameless temporary file in `folder`, which
    disappears with the process.
    """

    def __init__(self, dtype: str, folder: str) -> None:
        import tempfile  # 3 ms that `import millrace` does without

        self.dtype, self.count = np.dtype(dtype), 0
        size = LIMIT * self.dtype.itemsize
        self._file = tempfile.SpooledTemporaryFile(size, dir=folder)  # noqa: SIM115

    def extend(self, values: NDArray[Any]) -> None:
        self._file.seek(0, os.SEEK_END)
        self._file.write(np.ascontiguousarray(values, self.dtype).data)
        self._file.flush()  # else a forked child, too, would write what is buffered
        self.count += len(values)

    def chunks(self) -> Iterator[NDArray[Any]]:
        self._file.seek(0)
        while data := self._file.read(_PIECE * self.dtype.itemsize):
            yield np.frombuffer(data, self.dtype)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of entries for which the disk had no room
            self._file.close()


# ---- the index of a `.bin` that is there already ----


class Entries(NamedTuple):
    """The entries of some sequences, and of the documents that end with one of them.

    Attributes:
        lengths: Length of each sequence in tokens: integers [sequences].
        counts: Number of these sequences that each document has: integers [documents]. Sequences of
            a document that ends later are at the end of `lengths`, and not counted.
        modes: Mode of each sequence, int8 [sequences]; None in a file without modes.
    """

    lengths: NDArray[Any]
    counts: NDArray[Any]
    modes: NDArray[np.int8] | None = None


def write_index(
    prefix: str, dtype: DTypeLike, documents: Iterable[Entries], *, has_modes: bool = False
) -> None:
    """Writes `PREFIX.idx` for the `.bin` that is there, whole or not at all; it is not flushed.

    Raises:
        DataError: The tokens of the entries are not as many as those of the `.bin`.
    """
    columns = IndexColumns(os.path.dirname(prefix) or ".", dtype, has_modes=has_modes)
    with contextlib.closing(columns), atomic_file(idx_path(prefix), durable=False) as file:
        num_sequences = 0
        for lengths, counts, modes in documents:
            columns.append(lengths, modes, num_sequences + np.cumsum(counts))
            num_sequences += len(lengths)
        header, size = columns.header, os.path.getsize(bin_path(prefix))
        num_bytes = columns.num_tokens() * header.dtype.itemsize
        if num_bytes != size:
            raise DataError(
                f"{prefix}: the entries are of {header.num_sequences} sequences, "
                f"{header.num_document_entries - 1} documents and {num_bytes} bytes; the .bin has "
                f"{size}. No index is written"
            )
        file.writelines(columns.chunks())
