"""The files of a pair while a builder writes them, who may write, and the checks at the end."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.errors import ConfigError, DataError
from millrace.files import flush_to_disk, naming
from millrace.forks import watch_forks
from millrace.interrupts import interrupts_held
from millrace.storage import Bytes, gather_range
from millrace.store.columns import IndexColumns
from millrace.store.info import BlockHasher, Checksums, Info
from millrace.store.layout import Header
from millrace.store.publish import bin_path, building
from millrace.store.reader import IndexedDataset

_BUFFER_SIZE = 1 << 20  # bytes of tokens that are gathered before they are written
CHUNK = 1 << 19  # tokens of an array that are checked at a time
_COPY_SIZE = 64 << 20  # bytes that a merge lets the kernel copy at a time
_READ_SIZE = 2 << 20  # bytes that a merge reads at a time if it must see them
_LAST_WAIT = 5.0  # seconds that the end of a process waits for a thread that adds something


class NotIntegersError(ConfigError):
    """Tokens that only a conversion, which may run any code, can tell from integers."""


class Turns:
    """Gives one thread at a time the right to change something of several parts.

    Args:
        name: What is changed, for messages.
        free: Function that discards it. It is called at least once after the last turn, and with
            Ctrl-C held back.

    Attributes:
        closed_because: Why there are no more turns; None: there are.
    """

    def __init__(self, name: str, free: Callable[[], None]) -> None:
        self._name, self._free = name, free
        self.closed_because: str | None = None
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


class BinWriter:
    """The `.bin` while it is written.

    Attributes:
        buffer: The core's buffer of tokens and entries, and their numbers.
        durable: Whether to bring the files to the disk before they appear.
        hasher: What makes the checksums of the file, or None.
    """

    def __init__(
        self, path: str, dtype: np.dtype[Any], *, has_modes: bool, checksums: bool, durable: bool
    ) -> None:
        self.dtype, self.durable = dtype, durable
        self.hasher = BlockHasher() if checksums else None
        self._num_bytes = 0  # bytes of tokens that were written, without those in the buffer
        self.file: Any = open(path, "wb", buffering=0)  # noqa: SIM115
        descriptor = self.file.fileno()
        self.buffer = _native.TokenBuffer(dtype.name, _BUFFER_SIZE, descriptor, has_modes)

    def append(self, tokens: list[int] | NDArray[Any]) -> None:
        """Buffers tokens; a ConfigError, and none are, if one of them does not fit the dtype.

        Raises:
            NotIntegersError: A list that holds other objects than ints of 64 bits.
        """
        try:
            self.buffer.append(tokens)
        except (TypeError, OverflowError) as error:
            raise NotIntegersError(f"tokens are not integers: {error}") from None
        except ValueError as error:
            raise ConfigError(f"{error}; or write another dtype") from None

    def flush(self) -> None:
        """Starts to write the buffer, while more can be added."""
        if self.hasher is not None:
            self.hasher.update(self.buffer.view())
        self._num_bytes += self.buffer.num_bytes
        self.buffer.flush()

    def copy(self, other: IndexedDataset, source: BinaryIO, start: int, stop: int) -> None:
        """Appends bytes [start, stop) of another `.bin` of the same dtype, open as `source`."""
        self.buffer.wait()
        with source:
            if self.hasher is not None:
                for data in blocks(other, start, stop):
                    self.hasher.update(data)
            _copy_file(source, self.file, start, stop)
        if self.durable:  # the flush at the end then has less to wait for
            _native.start_writeback(self.file.fileno(), self._num_bytes, stop - start)
        self._num_bytes += stop - start

    def finish(self, num_tokens: int) -> int:
        """Ends a file with the sequences of so many tokens; returns the time of its last change.

        Raises:
            DataError: The file does not hold what was added.
        """
        self.flush()
        self.buffer.wait()
        if self.durable:
            flush_to_disk(self.file)
        status, width = os.fstat(self.file.fileno()), self.dtype.itemsize
        counted = self.buffer.num_tokens * width
        if not num_tokens * width == counted == self._num_bytes == status.st_size:
            raise DataError(
                f"{self.file.name}: the lengths of the sequences make {num_tokens * width} bytes "
                f"of tokens, {counted} were added, {self._num_bytes} were written, and the file "
                f"has {status.st_size}. Another program writes to it, or an addition was cut off: "
                "nothing is published"
            )
        return status.st_mtime_ns

    def close(self) -> None:
        self.buffer.close()
        self.file.close()


class PairWriter:
    """The temporaries of one pair, and the data on their way to them.

    `turn` gives one thread the right to call the other methods.

    Attributes:
        prefix: The prefix as it was given.
        absolute_prefix: The absolute prefix: the files stay there if the working directory changes.
        temporaries: Paths of the files until they are published.
        bin, columns: The `.bin`, and the columns of the `.idx`.
        turns: Who may write.
        provenance: Origin of the tokens, for the sidecar, or None.
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
        self.prefix, self.provenance = prefix, provenance
        self.absolute_prefix = os.path.join(folder, os.path.basename(prefix))
        resources = contextlib.ExitStack()
        self.turns = Turns(f"the builder of {prefix}", resources.close)
        try:
            with interrupts_held():
                self.columns = IndexColumns(folder, has_modes=multimodal)
                resources.callback(self.columns.close)
                self.temporaries = resources.enter_context(building(self.absolute_prefix))
                options = {"has_modes": multimodal, "checksums": checksums, "durable": durable}
                self.bin = BinWriter(self.temporaries.bin, dtype, **options)
                resources.callback(self.bin.close)
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
            self.bin.file.close()
        self.turns.leave_to_parent()

    def append(self, values: list[int] | NDArray[Any]) -> None:
        """Buffers tokens that fit the dtype; a chunk is checked while the last one is written."""
        for start in range(0, len(values), CHUNK):
            try:
                self.bin.append(values[start : start + CHUNK])
            except ConfigError as error:
                if start > 0:  # tokens before it are written: nothing can follow them
                    self.turns.end(f"an addition failed: {error}")
                raise
            if start + CHUNK < len(values):
                self.flush()

    def flush(self) -> None:
        """Starts to write the buffer, while more can be added."""
        self.columns.take(self.bin.buffer)
        self.bin.flush()

    def write_files(self) -> None:
        """Brings all files to the disk, and raises DataError if they are not what was added."""
        self.columns.take(self.bin.buffer)
        written = self.bin.finish(self.columns.num_tokens())
        index_sums = self._write_index(written)
        if self.bin.hasher is not None or self.provenance is not None:
            sums = None if self.bin.hasher is None else self.bin.hasher.finish()
            info = Info(provenance=dict(self.provenance or {}), bin=sums, idx=index_sums)
            with open(self.temporaries.info, "wb") as sidecar:
                sidecar.write(info.to_json().encode())
                if self.bin.durable:
                    flush_to_disk(sidecar)

    def _write_index(self, written: int) -> Checksums | None:
        """Writes the index; `written` is the time of the last change of the `.bin`."""
        hasher, size = None if self.bin.hasher is None else BlockHasher(), 0
        counts = self.bin.buffer.num_sequences, self.bin.buffer.num_documents + 1
        header = Header(self.bin.dtype, *counts, has_modes=self.columns.has_modes)
        with open(self.temporaries.idx, "wb", buffering=1 << 20) as index:
            for chunk in self.columns.chunks(header):
                index.write(chunk)
                if hasher is not None:
                    hasher.update(chunk)
                index.flush()
                _native.start_writeback(index.fileno(), size, index.tell() - size)
                size = index.tell()
            # On NFS a file's time is that of its flush, and clocks step back: see `publish`.
            written = max(written, os.fstat(index.fileno()).st_mtime_ns)
            os.utime(index.fileno(), ns=(written, written))
            if self.bin.durable:
                flush_to_disk(index)
        if size != header.size:
            raise DataError(
                f"{self.prefix}: {size} bytes of index were written for {header.num_sequences} "
                f"sequences and {self.bin.buffer.num_documents} documents. Nothing is published"
            )
        return None if hasher is None else hasher.finish()


def blocks(dataset: IndexedDataset, start: int, stop: int) -> Iterator[Bytes]:
    """Bytes [start, stop) of a dataset's `.bin`, some at a time.

    They are gathered, not read: a read of a mapped file is a view, which may be a bus error.
    """
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
