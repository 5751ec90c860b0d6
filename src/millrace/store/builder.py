"""Writing an indexed dataset."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from millrace import _native
from millrace.checks import flag, one_path, shown, whole, whole_numbers
from millrace.errors import ConfigError, DataError
from millrace.files import flush_to_disk, naming
from millrace.interrupts import interrupts_held
from millrace.store import entries
from millrace.store.checking import check_documents, check_sequences
from millrace.store.info import BlockHasher, Info
from millrace.store.layout import Header, dtype_code
from millrace.store.publish import bin_path, building, idx_path, info_path, publish
from millrace.store.reader import IndexedDataset

_MAX_LENGTH = 2**31 - 1  # lengths are int32
_BUFFER_SIZE = 1 << 20  # bytes of tokens that are gathered before they are written
_ENTRIES = 1 << 16  # documents that are noted at a time: they stay in a core's cache
_CHUNK = 1 << 19  # tokens of an array that are checked at a time
_COPY_SIZE = 64 << 20  # bytes that a merge lets the kernel copy at a time
_READ_SIZE = 2 << 20  # bytes that it reads at a time where it must see them
_LAST_WAIT = 5.0  # seconds that the end of a process waits for a thread that adds something

# What the core raises for arguments that it does not take as they are.
_NOT_PLAIN = (TypeError, ValueError, OverflowError, AttributeError)


class IndexedDatasetBuilder:
    """Writes a `.bin`/`.idx` pair that is byte-identical to Megatron-LM's.

    The pair appears at `prefix` when it is finalised, whole or not at all; until then an old pair
    stays as it was. Index entries spill to disk, so that memory stays bounded.

    Each call adds all that it is given, or nothing. A call that fails in the middle of its work (a
    full disk, Ctrl-C, a token that does not fit after half a million others were written) closes
    the builder and discards what it wrote. Threads may share a builder: their calls take turns. A
    forked process cannot use it, and leaves its files alone. A builder that is dropped without
    `finalize` or `abort` aborts.

    Args:
        prefix: the path of the pair, without `.bin` or `.idx`; its folder must exist.
        dtype: of the tokens in the file, one of `DTYPES`.
        multimodal: store a mode (int8) for each sequence.
        checksums: write a sidecar with checksums of both files, for `verify`.
        provenance: where the tokens come from, for the sidecar: plain JSON values.

    Attributes:
        num_documents, num_sequences, num_tokens: what was added so far.

    Raises:
        ConfigError: a dtype that the format does not have, no such folder, a prefix that ends in
            `.bin` or `.idx`, or provenance that is not plain JSON.
        MillraceError: another process is building this prefix.

    Example:
        >>> with IndexedDatasetBuilder("data/web_text_document", np.uint16) as builder:
        ...     builder.add_document([5, 6, 7])            # doctest: +SKIP

    Leaving the block finalises; leaving it by an error discards what was written.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        dtype: DTypeLike = np.int32,
        *,
        multimodal: bool = False,
        checksums: bool = False,
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        self.prefix = one_path("prefix", prefix)
        folder = os.path.dirname(self.prefix) or "."
        if not os.path.isdir(folder):
            raise ConfigError(f"{folder} is no folder; create it, or give another prefix")
        if self.prefix.endswith((".bin", ".idx")):
            raise ConfigError(
                f"the prefix is {self.prefix}; give it without {self.prefix[-4:]}, which is added"
            )
        for path in (bin_path(self.prefix), idx_path(self.prefix), info_path(self.prefix)):
            if os.path.isdir(path):
                raise ConfigError(f"{path} is a folder; remove it, or give another prefix")
        dtype_code(dtype)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.multimodal = flag("multimodal", multimodal)
        self._num_bytes = 0  # that were written, not those in the buffer
        self._provenance = _plain_json(provenance)
        self._hasher = BlockHasher() if flag("checksums", checksums) else None
        self._lengths = entries.Entries("<i4", folder)
        self._documents = entries.Entries("<i8", folder)
        self._modes = entries.Entries("<i1", folder)
        self._documents.extend(np.zeros(1, np.int64))
        self._lock = threading.Lock()
        self._lock_holder: int | None = None
        resources = contextlib.ExitStack()
        try:
            with interrupts_held():
                # Wherever the program goes meanwhile, the files stay in this folder.
                self._place = os.path.join(os.path.realpath(folder), os.path.basename(self.prefix))
                self._temporaries = resources.enter_context(building(self._place))
                self._data: Any = resources.enter_context(
                    open(self._temporaries.bin, "wb", buffering=0)  # noqa: SIM115
                )
                for column in (self._lengths, self._documents, self._modes):
                    resources.callback(column.close)
                self._buffer = _native.TokenBuffer(
                    self.dtype.name, _BUFFER_SIZE, self._data.fileno(), self.multimodal
                )
                resources.callback(self._buffer.close)
                self._drop = weakref.finalize(self, _drop, self._lock, self._buffer, resources)
        except BaseException:
            with interrupts_held():
                resources.close()
            raise
        self._closed_because: str | None = None
        self._resources = resources
        _OPEN.add(self)

    @property
    def num_documents(self) -> int:
        return self._buffer.num_documents

    @property
    def num_sequences(self) -> int:
        return self._buffer.num_sequences

    @property
    def num_tokens(self) -> int:
        return self._buffer.num_tokens

    def columns(self) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int8]]:
        """The index so far, read back: costs memory, and time that grows with it.

        Returns:
            lengths int32 [sequences], document entries int64 [documents + 1] and modes int8
            [sequences] (empty in a file without modes).
        """
        with self._alone():
            self._flush_entries()
            lengths, documents, modes = (
                np.concatenate([np.empty(0, column.dtype), *column.chunks()])
                for column in (self._lengths, self._documents, self._modes)
            )
        return lengths, documents, modes

    def add_sequence(self, tokens: ArrayLike, mode: int = 0) -> None:
        """Appends a sequence to the document that is being written; `end_document` ends it.

        Args:
            tokens: [length], numbers that fit the dtype.
            mode: of the sequence, in a multimodal file.

        Raises:
            ConfigError: a number that does not fit the dtype, or too long a sequence.
        """
        if not self.multimodal:
            try:  # not contextlib.suppress: it would take as long as the addition
                is_full = self._buffer.add_sequences(tokens, None, None, False)
            except _NOT_PLAIN:
                pass  # the general way takes more kinds of arguments, and says what is wrong
            else:
                if is_full:
                    self._flush()
                return
        self._add(tokens, None, [mode], ends_document=False)

    def end_document(self) -> None:
        """Ends a document, which has the sequences since the last one ended (none, perhaps)."""
        try:
            is_full = self._buffer.end_document()
        except ValueError:  # another thread is in the middle of something, or it is closed
            with self._alone():
                is_full = self._buffer.end_document(is_alone=True)
        if is_full:
            self._flush()

    def add_document(
        self,
        tokens: ArrayLike,
        lengths: ArrayLike | None = None,
        modes: ArrayLike | None = None,
    ) -> None:
        """Appends a whole document.

        Args:
            tokens: [tokens], of all its sequences, one after the other.
            lengths: of its sequences, in tokens; their sum is the number of tokens. None: one
                sequence. Empty: a document without sequences.
            modes: of its sequences, in a multimodal file; None: 0.

        Raises:
            ConfigError: a number that does not fit the dtype, or lengths that do not add up.
        """
        if not self.multimodal:
            try:
                is_full = self._buffer.add_document(tokens, lengths)
            except _NOT_PLAIN:
                pass
            else:
                if is_full:
                    self._flush()
                return
        self._add(tokens, lengths, modes, ends_document=True)

    def add_documents(self, tokens: ArrayLike, lengths: ArrayLike) -> None:
        """Appends many documents of one sequence each; one without tokens gets no sequence.

        Args:
            tokens: [tokens], of all documents, one after the other.
            lengths: integers [documents], in tokens; their sum is the number of tokens.

        Raises:
            ConfigError: a number that does not fit the dtype, or lengths that do not add up.
        """
        values = self._as_tokens(tokens)
        counts = _as_lengths(lengths, len(values))
        with self._alone():
            self._append(values)
            for start in range(0, len(counts), _ENTRIES):
                self._buffer.add_documents(None, counts[start : start + _ENTRIES])
                self._flush_entries()
            self._flush_now()

    def add_index(
        self,
        source: str | os.PathLike[str] | IndexedDataset,
        documents: tuple[int, int] | None = None,
        *,
        change_dtype: bool = False,
    ) -> None:
        """Appends the documents of another indexed dataset (a merge), or some of them.

        The bytes are copied in the kernel, or shared where the file system can.

        Args:
            source: the other dataset, or the path prefix of its pair. A dataset gives what it
                opened, also when another pair is at its prefix by now.
            documents: (start, stop), the documents to take; None: all.
            change_dtype: take another dtype too; each token is checked.

        Raises:
            ConfigError: another dtype, only one of the two has modes, a token does not fit, there
                are no such documents, or a document is still open here.
            DataError: the other one is damaged.
        """
        self._check_open()
        other = source if isinstance(source, IndexedDataset) else IndexedDataset(source)
        start, stop = _checked_range(documents, other)
        if other.dtype != self.dtype and not flag("change_dtype", change_dtype):
            raise ConfigError(
                f"{other.prefix} holds {other.dtype}, the new file {self.dtype}; "
                "`millrace convert --dtype` changes one of them"
            )
        if len(other) > 0 and (other.sequence_modes is not None) != self.multimodal:
            raise ConfigError(
                f"{other.prefix} has {'' if other.sequence_modes is not None else 'no '}modes, the "
                f"new file has {'' if self.multimodal else 'no '}modes: only like can be merged"
            )
        first, last = check_documents(other, start, stop)
        first_byte, last_byte = check_sequences(other, first, last)
        with self._alone():
            if self._buffer.has_open_document:
                raise ConfigError(
                    "a document is still open; call end_document() before add_index()"
                )
            self._flush_now()
            try:
                self._copy_tokens(other, first_byte, last_byte)
                self._copy_entries(other, (first, last), (start, stop))
            except ConfigError as error:  # a token that does not fit, or `other` was closed
                self._close(f"an addition failed: {error}")
                raise
            self._buffer.count(
                num_sequences=last - first,
                num_documents=stop - start,
                num_tokens=(last_byte - first_byte) // other.dtype.itemsize,
            )

    def finalize(self) -> None:
        """Writes the index and publishes the pair.

        Raises:
            ConfigError: sequences after the last document's end.
            DataError: what was written is not what was added; nothing is published.
        """
        finalize_together([self])

    def abort(self) -> None:
        """Discards what was written; an old pair at the prefix stays. May be called twice."""
        if self._lock_holder == threading.get_ident():  # in a signal handler: the call ends first
            self._closed_because = self._closed_because or "it was aborted"
            return
        with self._lock:
            self._close("it was aborted")

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None and self._closed_because is None:
                self.finalize()
        finally:
            self.abort()

    def _check_open(self) -> None:
        if self._closed_because is not None:
            raise ConfigError(
                f"the builder of {self.prefix} is closed ({self._closed_because}); make another one"
            )

    def _close(self, reason: str) -> None:
        """Discards what is not published yet, and gives everything back."""
        if self._closed_because is None:
            self._closed_because = reason
        with interrupts_held():  # a second Ctrl-C leaves nothing behind
            self._buffer.is_busy = True  # for good: the core adds nothing any more
            self._drop.detach()
            self._resources.close()

    def _disown(self) -> None:
        """In a forked process: the files and the lock are its parent's."""
        self._lock, self._lock_holder = threading.Lock(), None
        if self._closed_because is None:
            self._closed_because = "it belongs to the process that this one was forked from"
            self._buffer.is_busy = True
            self._drop.detach()
            self._data.close()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Work of several steps, which no other thread may see half-done.

        An error in it closes the builder: something is half-done now. A ConfigError does not, as
        it comes before the first step.
        """
        if self._lock_holder == threading.get_ident():
            raise ConfigError(
                f"the builder of {self.prefix} was called from within one of its own calls, by a "
                "signal handler perhaps: let the call end first"
            )
        with self._lock:
            try:
                self._lock_holder = threading.get_ident()
                self._check_open()
                self._buffer.is_busy = True
                with naming(bin_path(self.prefix)):
                    yield
            except BaseException as error:
                if not isinstance(error, ConfigError):
                    self._close(f"an addition failed: {error!r}")
                raise
            finally:
                self._lock_holder = None
                if self._closed_because is None:
                    self._buffer.is_busy = False
                else:  # perhaps by `abort` in a signal handler
                    self._close(self._closed_because)

    # ---- what is added ----

    def _add(
        self,
        tokens: ArrayLike,
        lengths: ArrayLike | None,
        modes: ArrayLike | None,
        *,
        ends_document: bool,
    ) -> None:
        self._check_open()
        values = self._as_tokens(tokens)
        counts = _as_lengths([len(values)] if lengths is None else lengths, len(values))
        kinds = None
        if self.multimodal and modes is not None:
            kinds = _as_modes(modes, len(counts))
        with self._alone():
            self._append(values)
            if self._buffer.add_sequences(None, counts, kinds, ends_document):
                self._flush_now()

    def _as_tokens(self, tokens: ArrayLike) -> NDArray[Any]:
        """Tokens as an array that the core takes: one run of native numbers."""
        try:
            values = np.asarray(tokens)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"tokens are no numbers in one dimension: {error}") from None
        is_float = self.dtype.kind == "f"
        if values.ndim == 1 and (values.dtype == object or values.size == 0) and not is_float:
            return whole_numbers("tokens", values.tolist())
        if values.ndim != 1 or values.dtype.kind not in ("iuf" if is_float else "iu"):
            raise ConfigError(
                f"tokens have shape {values.shape} and dtype {values.dtype}; "
                f"{'numbers' if is_float else 'integers'} are needed, in one dimension"
            )
        dtype = self.dtype if is_float else values.dtype
        return np.require(values, dtype.newbyteorder("="), ["C", "A"])

    def _append(self, values: NDArray[Any]) -> None:
        """Buffers tokens: a chunk is checked while the one before is written."""
        for start in range(0, len(values), _CHUNK):
            try:
                self._buffer.append(values[start : start + _CHUNK])
            except ValueError as error:
                if start > 0:  # the tokens before it are written: nothing can follow them
                    self._close(f"an addition failed: {error}")
                raise ConfigError(f"{error}; or write another dtype") from None
            if start + _CHUNK < len(values):
                self._flush_now()

    # ---- what is written ----

    def _flush(self) -> None:
        with self._alone():
            self._flush_now()

    def _flush_now(self) -> None:
        """Starts to write what is buffered, while more can be added."""
        self._flush_entries()
        if self._hasher is not None:
            self._hasher.update(self._buffer.view())
        self._num_bytes += self._buffer.num_bytes
        self._buffer.flush()

    def _flush_entries(self) -> None:
        lengths, modes, documents = self._buffer.take_entries()
        self._lengths.extend(lengths)
        self._documents.extend(documents)
        self._modes.extend(modes)

    def _copy_tokens(self, other: IndexedDataset, start: int, stop: int) -> None:
        """Appends bytes [start, stop) of another `.bin`."""
        if other.dtype != self.dtype:
            for data in _blocks(other, start, stop):
                self._append(self._as_tokens(data.view(other.dtype)))
                self._flush_now()
            return
        if self._hasher is not None:
            for data in _blocks(other, start, stop):
                self._hasher.update(data)
        self._buffer.wait()
        source = other.reopen_bin()
        if source is not None:
            with source:
                _copy_file(source, self._data, start, stop)
        else:  # no file, or another one is there by now
            for data in _blocks(other, start, stop):
                _write_all(self._data, data)
        self._num_bytes += stop - start

    def _copy_entries(
        self, other: IndexedDataset, sequences: tuple[int, int], documents: tuple[int, int]
    ) -> None:
        """Appends the entries of sequences and documents [start, stop) of another index."""
        for place in range(*sequences, entries.LIMIT):
            part = slice(place, min(place + entries.LIMIT, sequences[1]))
            self._lengths.extend(_copied(other.sequence_lengths[part]))
            if self.multimodal and other.sequence_modes is not None:
                self._modes.extend(_copied(other.sequence_modes[part]))
        for place in range(documents[0] + 1, documents[1] + 1, entries.LIMIT):
            ends = other.document_indices[place : min(place + entries.LIMIT, documents[1] + 1)]
            self._documents.extend(_copied(ends) + (self.num_sequences - sequences[0]))

    def _write_files(self) -> None:
        """Brings all that there is to the disk, under temporary names, and checks it."""
        self._flush_now()
        self._buffer.wait()
        index_hasher = None if self._hasher is None else BlockHasher()
        header = Header(
            dtype=self.dtype,
            num_sequences=self.num_sequences,
            num_document_entries=self.num_documents + 1,
        )
        with open(self._temporaries.idx, "wb", buffering=1 << 20) as index:
            written = 0
            for chunk in self._index_chunks(header):
                index.write(chunk)
                if index_hasher is not None:
                    index_hasher.update(chunk)
                index.flush()
                _native.start_writeback(index.fileno(), written, index.tell() - written)
                written = index.tell()
            flush_to_disk(index)
        if written != header.modes_offset + (self.num_sequences if self.multimodal else 0):
            raise DataError(
                f"{self.prefix}: {written} bytes of index were written for {self.num_sequences} "
                f"sequences and {self.num_documents} documents. Nothing is published"
            )
        if self._hasher is not None or self._provenance is not None:
            info = Info(
                provenance=self._provenance or {},
                bin=None if self._hasher is None else self._hasher.finish(),
                idx=None if index_hasher is None else index_hasher.finish(),
            )
            with open(self._temporaries.info, "wb") as sidecar:
                sidecar.write(info.to_json().encode())
                flush_to_disk(sidecar)
        flush_to_disk(self._data)

    def _index_chunks(self, header: Header) -> Iterator[Any]:
        """The bytes of the index file, in pieces."""
        yield header.pack()
        yield from self._lengths.chunks()
        pointer = 0
        for lengths in self._lengths.chunks():
            starts = np.empty(len(lengths) + 1, "<i8")
            starts[0] = pointer
            # In two steps: a cumsum that also converts is three times slower.
            np.multiply(lengths, self.dtype.itemsize, out=starts[1:], dtype="<i8")
            np.cumsum(starts, out=starts)
            yield starts[:-1]
            pointer = int(starts[-1])
        size = os.fstat(self._data.fileno()).st_size
        counted = self.num_tokens * self.dtype.itemsize
        if not pointer == counted == self._num_bytes == size:
            raise DataError(
                f"{self.prefix}: the sequences' lengths make {pointer} bytes of tokens, {counted} "
                f"were added, {self._num_bytes} were written, and the file has {size}. Something "
                "else writes to it, or an addition was cut off: nothing is published"
            )
        yield from self._documents.chunks()
        yield from self._modes.chunks()


_OPEN: weakref.WeakSet[IndexedDatasetBuilder] = weakref.WeakSet()


def _disown_all() -> None:
    for builder in list(_OPEN):
        builder._disown()


os.register_at_fork(after_in_child=_disown_all)


def finalize_together(builders: Sequence[IndexedDatasetBuilder]) -> None:
    """Finalises several builders: every file is whole and on the disk before the first pair
    appears. If one of them fails, none is published.

    Raises:
        What `IndexedDatasetBuilder.finalize` raises.
    """
    with contextlib.ExitStack() as held:
        for builder in builders:
            held.enter_context(builder._alone())
            if builder._buffer.has_open_document:
                raise ConfigError(
                    f"the last sequences of {builder.prefix} belong to no document yet; "
                    "call end_document() before finalize()"
                )
        try:
            for builder in builders:
                with naming(bin_path(builder.prefix)):
                    builder._write_files()
                builder._check_open()
            with interrupts_held():
                publish([(builder._place, builder._temporaries) for builder in builders])
        finally:
            for builder in builders:
                builder._close("it was finalised")


def _drop(
    lock: threading.Lock, buffer: _native.TokenBuffer, resources: contextlib.ExitStack
) -> None:
    """The end of a builder that nobody ended: it is collected, or the process ends."""
    # A daemon thread may be at work until the very end: its call is let to finish, and no other one
    # begins. One that takes too long leaves its files, as if it had been killed.
    if lock.acquire(timeout=_LAST_WAIT):
        buffer.is_busy = True
        with interrupts_held():
            resources.close()


def _plain_json(provenance: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if provenance is not None and not isinstance(provenance, Mapping):
        raise ConfigError(f"provenance is {shown(provenance)}; a dict is needed")
    try:
        plain: dict[str, Any] | None = json.loads(json.dumps(provenance))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"the provenance cannot be written as JSON ({error}); give texts, numbers, lists and "
            "dicts"
        ) from None
    return plain


def _as_lengths(lengths: ArrayLike, num_tokens: int) -> NDArray[np.int64]:
    """The lengths of sequences, which must add up: int64 [sequences]."""
    counts = whole_numbers("lengths", lengths)
    least, most = int(counts.min(initial=0)), int(counts.max(initial=0))
    if least < 0 or most > _MAX_LENGTH:
        raise ConfigError(
            f"the sequences' lengths {_short(counts)} go from {least} to {most}; 0 to "
            f"{_MAX_LENGTH} is possible. Cut longer ones into several sequences"
        )
    if counts.sum() != num_tokens:
        raise ConfigError(
            f"the sequences' lengths {_short(counts)} sum to {counts.sum()}; there are "
            f"{num_tokens} tokens"
        )
    return counts


def _as_modes(modes: ArrayLike, count: int) -> NDArray[np.int8]:
    values = whole_numbers("modes", modes)
    if values.shape != (count,) or np.any(values != values.astype(np.int8)):
        raise ConfigError(f"the modes {_short(values)} are no {count} numbers from -128 to 127")
    return values.astype(np.int8)


def _checked_range(documents: tuple[int, int] | None, other: IndexedDataset) -> tuple[int, int]:
    if documents is None:
        return 0, other.num_documents
    start, stop = (whole("documents", number) for number in documents)
    if not 0 <= start <= stop <= other.num_documents:
        raise ConfigError(
            f"documents {start} to {stop} of {other.prefix} were asked for; it has "
            f"{other.num_documents}"
        )
    return start, stop


def _blocks(dataset: IndexedDataset, start: int, stop: int) -> Iterator[NDArray[np.uint8]]:
    """Bytes [start, stop) of its `.bin`, some at a time.

    They are gathered, not read: of a mapped file a read is a view, which may be a bus error.
    """
    for at in range(start, stop, _READ_SIZE):
        yield dataset.reader.gather(np.array([at]), np.array([min(_READ_SIZE, stop - at)]))


def _copied(column: NDArray[Any]) -> NDArray[Any]:
    """A part of a mapped column: where the file was cut short, an error and no bus error."""
    data = column.view(np.uint8)
    return _native.copy_pieces(data, np.array([0]), np.array([len(data)])).view(column.dtype)


def _write_all(file: BinaryIO, data: NDArray[np.uint8]) -> None:
    view = memoryview(data.data)
    while len(view) > 0:  # one call writes 2 GiB at most, and less on a full disk
        view = view[file.write(view) :]


def _copy_file(source: BinaryIO, target: BinaryIO, start: int, stop: int) -> None:
    """Copies bytes [start, stop) of a file to the end of another, in the kernel."""
    at = start
    while at < stop:
        size = min(_COPY_SIZE, stop - at)
        try:
            count = os.copy_file_range(source.fileno(), target.fileno(), size, offset_src=at)
        except OSError as error:
            # Across file systems, or where the file system cannot: an ordinary copy.
            if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            count = os.sendfile(target.fileno(), source.fileno(), at, size)
        if count == 0:
            raise DataError(f"{source.name} ends at byte {at}, not {stop}: it was truncated")
        at += count


def _short(lengths: NDArray[Any]) -> str:
    text = ", ".join(map(str, lengths[:6].tolist()))
    return f"[{text}, ...]" if len(lengths) > 6 else f"[{text}]"
