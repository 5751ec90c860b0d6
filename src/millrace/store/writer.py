"""The files of a pair while a builder writes them, and the checks at the end."""

from __future__ import annotations

import contextlib
import os
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
from millrace.storage.protocol import Bytes, gather_range
from millrace.store.columns import IndexColumns
from millrace.store.info import BlockHasher, Checksums, Info
from millrace.store.layout import Header
from millrace.store.publish import bin_path, building
from millrace.store.reader import IndexedDataset
from millrace.store.turns import Turns

_BUFFER_SIZE = 1 << 20  # bytes of tokens that are gathered before they are written
CHUNK = 1 << 19  # tokens of an array that are checked at a time
_COPY_SIZE = 64 << 20  # bytes that a merge lets the kernel copy at a time
_READ_SIZE = 2 << 20  # bytes that a merge reads at a time if it must see them
_LAST_WAIT = 5.0  # seconds that the end of a process waits for a thread that adds something


class NotIntegersError(ConfigError):
    """Tokens that only a conversion, which may run any code, can tell from integers."""


class BinWriter:
    """The `.bin` while it is written.

    Args:
        path: Path of the file.
        dtype: Dtype of the tokens.
        has_modes: Whether the sequences have modes.
        checksums: Whether to make the checksums of the file.

    Attributes:
        buffer: The core's buffer of tokens and entries, and their numbers.
        dtype, has_modes: As given.
    """

    def __init__(
        self, path: str, dtype: np.dtype[Any], *, has_modes: bool, checksums: bool
    ) -> None:
        self.dtype, self.has_modes = dtype, has_modes
        self._hasher = BlockHasher() if checksums else None
        self._num_bytes = 0  # bytes of tokens that were written, without those in the buffer
        self._file: Any = open(path, "wb", buffering=0)  # noqa: SIM115
        try:
            self.buffer = _native.TokenBuffer(
                dtype.name, _BUFFER_SIZE, self._file.fileno(), has_modes
            )
        except BaseException:
            self._file.close()
            raise

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
        if self._hasher is not None:
            self._hasher.update(self.buffer.view())
        self._num_bytes += self.buffer.num_bytes
        self.buffer.flush()

    def copy(
        self, other: IndexedDataset, source: BinaryIO, start: int, stop: int, *, durable: bool
    ) -> None:
        """Appends bytes [start, stop) of another `.bin` of the same dtype, open as `source`."""
        self.buffer.wait()
        with source:
            if self._hasher is not None:
                for data in blocks(other, start, stop):
                    self._hasher.update(data)
            _copy_file(source, self._file, start, stop)
        if durable:  # the flush at the end then has less to wait for
            _native.start_writeback(self._file.fileno(), self._num_bytes, stop - start)
        self._num_bytes += stop - start

    def finish(self, num_tokens: int, *, durable: bool) -> tuple[Checksums | None, int]:
        """Ends the file; returns its checksums, and the time of its last change.

        Args:
            num_tokens: Sum of the lengths of all sequences.
            durable: Whether to bring the file to the disk.

        Raises:
            DataError: The file does not hold what was added.
        """
        self.flush()
        self.buffer.wait()
        if durable:
            flush_to_disk(self._file)
        status, width = os.fstat(self._file.fileno()), self.dtype.itemsize
        counted = self.buffer.num_tokens * width
        if not num_tokens * width == counted == self._num_bytes == status.st_size:
            raise DataError(
                f"{self._file.name}: the lengths of the sequences make {num_tokens * width} bytes "
                f"of tokens, {counted} were added, {self._num_bytes} were written, and the file "
                f"has {status.st_size}. Another program writes to it, or an addition was cut off: "
                "nothing is published"
            )
        return None if self._hasher is None else self._hasher.finish(), status.st_mtime_ns

    def close(self) -> None:
        self.buffer.close()
        self._file.close()

    def leave_to_parent(self) -> None:
        """In a forked child: lets go of the file without writing to it."""
        self._file.close()


class PairWriter:
    """The temporaries of one pair, and the data on their way to them.

    `turn` gives one thread the right to call the other methods.

    Attributes:
        prefix: The prefix as it was given.
        absolute_prefix: The absolute prefix: the files stay there if the working directory changes.
        temporaries: Paths of the files until they are published.
        bin: The `.bin`.
        columns: The columns of the `.idx`.
        turns: Who may write.
        provenance: Origin of the tokens, for the sidecar, or None.
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
        self.prefix = prefix
        self.absolute_prefix = os.path.join(folder, os.path.basename(prefix))
        self.provenance, self.durable, self._checksums = provenance, durable, checksums
        resources = contextlib.ExitStack()
        self.turns = Turns(f"the builder of {prefix}", resources.close)
        try:
            with interrupts_held():
                self.columns = IndexColumns(folder, multimodal)
                resources.callback(self.columns.close)
                self.temporaries = resources.enter_context(building(self.absolute_prefix))
                self.bin = BinWriter(
                    self.temporaries.bin, dtype, has_modes=multimodal, checksums=checksums
                )
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
            self.bin.leave_to_parent()
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
        buffer = self.bin.buffer
        self.columns.take(buffer)
        sums, written = self.bin.finish(self.columns.num_tokens(), durable=self.durable)
        header = Header(
            dtype=self.bin.dtype,
            num_sequences=buffer.num_sequences,
            num_document_entries=buffer.num_documents + 1,
            has_modes=self.bin.has_modes,
        )
        index_sums = self._write_index(header, written)
        if self._checksums or self.provenance is not None:
            info = Info(provenance=dict(self.provenance or {}), bin=sums, idx=index_sums)
            with open(self.temporaries.info, "wb") as sidecar:
                sidecar.write(info.to_json().encode())
                self._flush_to_disk(sidecar)

    def _write_index(self, header: Header, written: int) -> Checksums | None:
        hasher, size = BlockHasher() if self._checksums else None, 0
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
            self._flush_to_disk(index)
        if size != header.size:
            raise DataError(
                f"{self.prefix}: {size} bytes of index were written for {header.num_sequences} "
                f"sequences and {self.bin.buffer.num_documents} documents. Nothing is published"
            )
        return None if hasher is None else hasher.finish()

    def _flush_to_disk(self, file: BinaryIO) -> None:
        if self.durable:
            flush_to_disk(file)


def blocks(dataset: IndexedDataset, start: int, stop: int) -> Iterator[Bytes]:
    """Bytes [start, stop) of a dataset's `.bin`, some at a time.

    They are gathered, not read: a read of a mapped file is a view, which may be a bus error.
    """
    for at in range(start, stop, _READ_SIZE):
        yield gather_range(dataset.reader, at, min(at + _READ_SIZE, stop))


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
    # File systems and containers refuse the first by many numbers, also for a full disk: the second
    # raises its true error.
    with contextlib.suppress(OSError):
        if count := os.copy_file_range(source, target, size, offset_src=start):
            return count
    return os.write(target, os.pread(source, min(size, _READ_SIZE), start))
