"""Writing an indexed dataset."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from millrace import _core, _native
from millrace.errors import ConfigError, DataError
from millrace.files import TMP, flush_to_disk
from millrace.store import entries
from millrace.store.info import BlockHasher, Info
from millrace.store.layout import Header, dtype_code
from millrace.store.publish import (
    bin_path,
    building,
    idx_path,
    info_path,
    open_pair,
    publish_pair,
)
from millrace.store.reader import IndexedDataset

_MAX_LENGTH = 2**31 - 1  # lengths are int32
_BUFFER_SIZE = 1 << 20  # bytes of tokens that are gathered before they are written
_CHUNK = 1 << 19  # tokens of an array that are checked at a time
_COPY_SIZE = 64 << 20  # bytes that a merge copies at a time


class IndexedDatasetBuilder:
    """Writes a `.bin`/`.idx` pair that is byte-identical to Megatron-LM's.

    The pair appears at `prefix` when it is finalised, whole or not at all; until then an old pair
    stays as it was. Index entries spill to disk, so that memory stays bounded.

    Args:
        prefix: the path of the pair, without `.bin` or `.idx`; its folder must exist.
        dtype: of the tokens in the file, one of `DTYPES`.
        multimodal: store a mode (int8) for each sequence.
        checksums: write a sidecar with checksums of both files, for `verify`.
        provenance: where the tokens come from, for the sidecar: plain JSON values.

    Attributes:
        num_documents, num_sequences, num_tokens: what was added so far.

    Raises:
        ConfigError: a dtype that the format does not have, or no such folder.
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
        self.prefix = os.fspath(prefix)
        dtype_code(dtype)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.multimodal = multimodal
        self._num_bytes = 0  # that were written, not those in the buffer
        self._has_open_document = False
        self._provenance = provenance
        self._checksums = checksums
        self._hasher = BlockHasher() if checksums else None
        # Token ids are checked and narrowed by the core; for it, floats are bytes.
        self._is_float = self.dtype.kind == "f"
        folder = os.path.dirname(self.prefix) or "."
        if not os.path.isdir(folder):
            raise ConfigError(f"{folder} is no folder; create it, or give another prefix")
        self._lengths = entries.Entries("<i4", folder)
        self._documents = entries.Entries("<i8", folder)
        self._modes = entries.Entries("<i1", folder)
        self._documents.extend(np.zeros(1, np.int64))
        self._is_open = True
        self._resources = contextlib.ExitStack()
        try:
            self._resources.enter_context(building(self.prefix))
            self._resources.callback(self._remove_temporaries)
            self._data: Any = self._resources.enter_context(
                open(bin_path(self.prefix) + TMP, "wb", buffering=0)  # noqa: SIM115
            )
            self._buffer = _core.TokenBuffer(
                "uint8" if self._is_float else self.dtype.name, _BUFFER_SIZE, self._data.fileno()
            )
            for column in (self._lengths, self._documents, self._modes):
                self._resources.callback(column.close)
        except BaseException:
            self._resources.close()
            raise

    @property
    def num_documents(self) -> int:
        return self._buffer.num_documents

    @property
    def num_sequences(self) -> int:
        return self._buffer.num_sequences

    def columns(self) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int8]]:
        """The index so far, read back: costs memory, and time that grows with it.

        Returns:
            lengths int32 [sequences], document entries int64 [documents + 1] and modes int8
            [sequences] (empty in a file without modes).
        """
        self._check_open()
        self._flush_entries()
        lengths, documents, modes = (
            np.concatenate([np.empty(0, column.dtype), *column.chunks()])
            for column in (self._lengths, self._documents, self._modes)
        )
        return lengths, documents, modes

    @property
    def num_tokens(self) -> int:
        num_bytes = self._num_bytes + self._buffer.num_bytes
        return num_bytes // int(self.dtype.itemsize)

    def add_sequence(self, tokens: ArrayLike, mode: int = 0) -> None:
        """Appends a sequence to the document that is being written; `end_document` ends it.

        Args:
            tokens: [length], numbers that fit the dtype.
            mode: of the sequence, in a multimodal file.

        Raises:
            ConfigError: a number that does not fit the dtype, or too long a sequence.
        """
        self._add_sequences(self._append(tokens), None, [mode])
        self._has_open_document = True
        if self._buffer.is_full:
            self._flush()

    def end_document(self) -> None:
        """Ends a document, which has the sequences since the last one ended (none, perhaps)."""
        self._check_open()
        self._buffer.end_document()
        self._has_open_document = False
        if self._buffer.is_full:
            self._flush()

    def add_document(
        self,
        tokens: ArrayLike,
        lengths: Sequence[int] | None = None,
        modes: Sequence[int] | None = None,
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
        if modes is None and self._is_open and not (self._is_float or self.multimodal):
            try:
                is_full = self._buffer.add_document(tokens, lengths)  # type: ignore[arg-type]
            except (TypeError, ValueError, OverflowError, AttributeError):
                pass  # the general way takes more kinds of arguments, and says what is wrong
            else:
                self._has_open_document = False
                if is_full:
                    self._flush()
                return
        self._add_sequences(self._append(tokens), lengths, modes)
        self.end_document()

    def add_documents(self, tokens: ArrayLike, lengths: ArrayLike) -> None:
        """Appends many documents of one sequence each; one without tokens gets no sequence.

        Args:
            tokens: [tokens], of all documents, one after the other.
            lengths: integers [documents], in tokens; their sum is the number of tokens.

        Raises:
            ConfigError: a number that does not fit the dtype, or lengths that do not add up.
        """
        values = np.asarray(tokens)
        counts = np.asarray(lengths, dtype=np.int64)
        least, most = int(counts.min(initial=0)), int(counts.max(initial=0))
        if counts.ndim != 1 or least < 0 or most > _MAX_LENGTH or counts.sum() != len(values):
            raise ConfigError(
                f"the documents' lengths go from {least} to {most} and sum to {counts.sum()}; "
                f"there are {len(values)} tokens, and a document has 0 to {_MAX_LENGTH}"
            )
        self._check_open()
        self._append_array(values)
        present = counts > 0
        with self._or_abort():
            self._flush_entries()
            self._lengths.extend(counts[present])
            self._documents.extend(self.num_sequences + np.cumsum(present))
            if self.multimodal:
                self._modes.extend(np.zeros(np.count_nonzero(present), np.int8))
        self._buffer.num_documents += len(counts)
        self._buffer.num_sequences += int(np.count_nonzero(present))
        self._has_open_document = False

    def add_index(
        self,
        prefix: str | os.PathLike[str],
        documents: tuple[int, int] | None = None,
        *,
        change_dtype: bool = False,
    ) -> None:
        """Appends the documents of another indexed dataset (a merge), or some of them.

        The bytes are copied in the kernel, or shared where the file system can.

        Args:
            prefix: of the other pair.
            documents: (start, stop), the documents to take; None: all.
            change_dtype: take another dtype too; each token is checked.

        Raises:
            ConfigError: another dtype, only one of the two has modes, a token does not fit, there
                are no such documents, or a document is still open here.
            DataError: the other one is damaged.
        """
        self._check_open()
        other = IndexedDataset(prefix)
        start, stop = (0, other.num_documents) if documents is None else documents
        if not 0 <= start <= stop <= other.num_documents:
            raise ConfigError(
                f"documents {start} to {stop} of {other.prefix} were asked for; it has "
                f"{other.num_documents}"
            )
        if other.dtype != self.dtype and not change_dtype:
            raise ConfigError(
                f"{other.prefix} holds {other.dtype}, the new file {self.dtype}; "
                "`millrace convert --dtype` changes one of them"
            )
        if len(other) > 0 and (other.sequence_modes is not None) != self.multimodal:
            raise ConfigError(
                f"{other.prefix} has {'' if other.sequence_modes is not None else 'no '}modes, the "
                f"new file has {'' if self.multimodal else 'no '}modes: only like can be merged"
            )
        if self._has_open_document:
            raise ConfigError("a document is still open; call end_document() before add_index()")
        first, last = (int(entry) for entry in other.document_indices[[start, stop]])
        if not 0 <= first <= last <= len(other):
            raise DataError(
                f"{other.prefix}.idx: documents {start} to {stop} have the sequences {first} to "
                f"{last} of {len(other)}. The index is damaged: write the pair again"
            )
        with self._or_abort():
            self._flush()
            self._copy_tokens(other, first, last)
            for place in range(first, last, entries.LIMIT):
                part = slice(place, min(place + entries.LIMIT, last))
                self._lengths.extend(other.sequence_lengths[part])
                if other.sequence_modes is not None:
                    self._modes.extend(other.sequence_modes[part])
            for place in range(start + 1, stop + 1, entries.LIMIT):
                ends = other.document_indices[place : min(place + entries.LIMIT, stop + 1)]
                self._documents.extend(ends + (self.num_sequences - first))
        self._buffer.num_sequences += last - first
        self._buffer.num_documents += stop - start

    def finalize(self) -> None:
        """Writes the index and publishes the pair.

        Raises:
            ConfigError: sequences after the last document's end.
        """
        self._check_open()
        if self._has_open_document:
            raise ConfigError(
                "the last sequences belong to no document yet; "
                "call end_document() before finalize()"
            )
        with self._closing():
            self._flush()
            self._buffer.wait()
            with open(idx_path(self.prefix) + TMP, "wb", buffering=1 << 20) as index:
                index_hasher = BlockHasher() if self._checksums else None
                written = 0
                for chunk in self._index_chunks():
                    index.write(chunk)
                    if index_hasher is not None:
                        index_hasher.update(chunk)
                    index.flush()
                    _core.start_writeback(index.fileno(), written, index.tell() - written)
                    written = index.tell()
                flush_to_disk(index)
            if self._checksums or self._provenance is not None:
                info = Info(
                    provenance=dict(self._provenance or {}),
                    bin=None if self._hasher is None else self._hasher.finish(),
                    idx=None if index_hasher is None else index_hasher.finish(),
                )
                with open(info_path(self.prefix) + TMP, "wb") as sidecar:
                    sidecar.write(info.to_json().encode())
                    flush_to_disk(sidecar)
            flush_to_disk(self._data)
            publish_pair(self.prefix)

    def abort(self) -> None:
        """Discards what was written; an old pair at the prefix stays. May be called twice."""
        if self._is_open:
            with self._closing():
                pass

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.abort()
        elif self._is_open:
            try:
                self.finalize()
            except BaseException:
                self.abort()
                raise

    @contextlib.contextmanager
    def _closing(self) -> Iterator[None]:
        self._is_open = False
        with self._resources:
            yield

    def _check_open(self) -> None:
        if not self._is_open:
            raise ConfigError(f"the builder of {self.prefix} is closed; make another one")

    def _remove_temporaries(self) -> None:
        for path in (bin_path(self.prefix), idx_path(self.prefix), info_path(self.prefix)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path + TMP)

    # ---- what is added ----

    def _append(self, tokens: ArrayLike) -> int:
        """Checks and buffers tokens, and returns how many there are."""
        if self._is_open and not self._is_float:
            try:  # not contextlib.suppress: it would take as long as the append
                return self._buffer.append(tokens)
            except (TypeError, ValueError, OverflowError, AttributeError):
                pass
        self._check_open()
        # No plain array or list of integers: NumPy makes one of it, or we say why not.
        values = np.asarray(tokens)
        if values.ndim != 1 or (self._is_float and values.dtype.kind not in "iuf"):
            raise ConfigError(
                f"tokens have shape {values.shape} and dtype {values.dtype}; "
                "numbers in one dimension are needed"
            )
        if self._is_float:
            self._buffer.append(np.ascontiguousarray(values, self.dtype).view(np.uint8))
        elif values.size > 0:
            try:
                self._buffer.append(np.ascontiguousarray(values))
            except ValueError as error:
                raise ConfigError(f"{error}; or write another dtype") from None
        return len(values)

    def _append_array(self, values: NDArray[Any]) -> None:
        """The same for an array of any size: a chunk is checked while the one before is written."""
        self._flush()
        for start in range(0, len(values), _CHUNK):
            try:
                self._append(values[start : start + _CHUNK])
            except ConfigError:
                if start > 0:  # the tokens before it are written: nothing can follow them
                    self.abort()
                raise
            self._flush()

    def _add_sequences(
        self, count: int, lengths: Sequence[int] | None, modes: Sequence[int] | None
    ) -> None:
        """Takes the lengths of sequences whose `count` tokens were appended, or drops those."""
        try:
            if lengths is None:
                lengths = (count,)
            if sum(lengths) != count or (len(lengths) > 1 and min(lengths) < 0):
                raise ConfigError(
                    f"the sequences' lengths {_short(lengths)} sum to {sum(lengths)}; "
                    f"the document has {count} tokens"
                )
            if count > _MAX_LENGTH and max(lengths) > _MAX_LENGTH:
                raise ConfigError(
                    f"a sequence has {max(lengths)} tokens; the format allows {_MAX_LENGTH}. "
                    "Cut the document into several sequences"
                )
            if self.multimodal:
                self._add_modes(len(lengths), modes)
        except BaseException:
            self._buffer.drop(count * (self.dtype.itemsize if self._is_float else 1))
            raise
        for length in lengths:
            self._buffer.end_sequence(int(length))

    def _add_modes(self, count: int, modes: Sequence[int] | None) -> None:
        values = np.zeros(count, np.int8) if modes is None else np.asarray(modes)
        if values.shape != (count,) or np.any(values != values.astype(np.int8)):
            raise ConfigError(f"the modes {modes} are no {count} numbers from -128 to 127")
        self._modes.extend(values)

    # ---- what is written ----

    @contextlib.contextmanager
    def _or_abort(self) -> Iterator[None]:
        """What fails in the middle of writing has left half of something: nothing can follow it."""
        try:
            yield
        except BaseException:
            self.abort()
            raise

    def _flush(self) -> None:
        """Starts to write what is buffered, while more can be added."""
        with self._or_abort():
            self._flush_entries()
            if self._hasher is not None:
                self._hasher.update(self._buffer.view())
            self._num_bytes += self._buffer.num_bytes
            self._buffer.flush()

    def _flush_entries(self) -> None:
        lengths, documents = self._buffer.take_entries()
        self._lengths.extend(lengths)
        self._documents.extend(documents)

    def _copy_tokens(self, other: IndexedDataset, first: int, last: int) -> None:
        """Appends the tokens of sequences [first, last), which lie one after the other."""
        start = _start_of(other, first)
        stop = _start_of(other, last)
        for place in range(first, last, entries.LIMIT):
            part = slice(place, min(place + entries.LIMIT, last))
            lengths, pointers = other.sequence_lengths[part], other.sequence_pointers[part]
            offset = _start_of(other, place)
            bad, offset = _native.first_bad_sequence(
                lengths, pointers, other.dtype.itemsize, offset
            )
            if bad < len(lengths) or offset != _start_of(other, part.stop):
                raise DataError(
                    f"{other.prefix}.idx: sequence {place + bad} does not start where the one "
                    "before it ends. The index is damaged: write the pair again"
                )
        if other.dtype != self.dtype:
            for at in range(start, stop, _COPY_SIZE):
                data = other.reader.read(at, min(_COPY_SIZE, stop - at))
                self._append_array(data.view(other.dtype))
            return
        if self._hasher is not None:
            for at in range(start, stop, _COPY_SIZE):
                self._hasher.update(other.reader.read(at, min(_COPY_SIZE, stop - at)))
        self._buffer.wait()
        bin_file, idx_file = open_pair(other.prefix)
        assert bin_file is not None
        with bin_file, idx_file:
            _copy_file(bin_file, self._data, start, stop)
        self._num_bytes += stop - start

    def _index_chunks(self) -> Iterator[Any]:
        """The bytes of the index file, in pieces."""
        header = Header(
            dtype=self.dtype,
            num_sequences=self.num_sequences,
            num_document_entries=self.num_documents + 1,
        )
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
        yield from self._documents.chunks()
        yield from self._modes.chunks()


def _start_of(dataset: IndexedDataset, sequence: int) -> int:
    """The byte at which a sequence starts; for the number after the last one, the end."""
    return (
        int(dataset.sequence_pointers[sequence]) if sequence < len(dataset) else dataset.reader.size
    )


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


def _short(lengths: Sequence[int]) -> str:
    text = ", ".join(str(length) for length in list(lengths)[:6])
    return f"[{text}, ...]" if len(lengths) > 6 else f"[{text}]"
