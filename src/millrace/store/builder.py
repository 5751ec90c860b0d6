"""Writing an indexed dataset."""

import contextlib
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from millrace import _native
from millrace.checks import MAX_INT32, check_bool, check_ints, check_path, plain_json, shown
from millrace.errors import ConfigError
from millrace.files import flush_to_disk, naming
from millrace.forks import watch_forks
from millrace.interrupts import interrupts_held
from millrace.names import BIN
from millrace.store.info import BlockHasher, Info, PairChecksums
from millrace.store.layout import DTYPES, dtype_code
from millrace.store.publish import building, check_prefix, publish
from millrace.store.reader import IndexedDataset
from millrace.store.writer import IndexColumns, Turns, blocks, copy_file

_BUFFER_SIZE = 1 << 20  # bytes of tokens that are gathered for a write
_CHUNK = 1 << 19  # tokens that are checked at a time
_ENTRIES = 1 << 16  # documents whose entries are made at a time: they stay in a core's cache


class IndexedDatasetBuilder:
    """Writes a `.bin`/`.idx` pair that is byte-identical to Megatron-LM's.

    The pair appears at `prefix` when it is finalised, whole or not at all; until then an old pair
    stays. Index entries spill to disk: memory is bounded.

    Each call adds all of its arguments, or nothing. A call that fails halfway (a full disk, Ctrl-C,
    a token that does not fit after half a million others) closes the builder and discards what it
    wrote. Leaving a `with` block finalises; leaving it by an error, or dropping the builder,
    discards. Threads that share a builder take turns. A forked process cannot use it, and leaves
    its files alone.

    Args:
        prefix: Path of the pair, without `.bin` or `.idx`; its folder must exist.
        dtype: Dtype of the tokens in the file, one of `DTYPES`.
        multimodal: Whether to store a mode (int8) for each sequence.
        checksums: Whether to write a sidecar with checksums of both files, for `verify`.
        provenance: Origin of the tokens for the sidecar, plain JSON values.
        durable: Whether to bring the files to the disk before they appear. False is for data that
            can be made again: a power cut may empty or shorten the files.

    Attributes:
        num_documents, num_sequences, num_tokens: Numbers of what was added.

    Raises:
        ConfigError: If the format does not have the dtype, the folder does not exist, the prefix
            ends in `.bin` or `.idx`, or the provenance is not plain JSON; in all additions, if a
            number does not fit the dtype or lengths do not add up.
        MillraceError: If another process is building the pair.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with IndexedDatasetBuilder(f"{folder}/web_text_document", np.uint16) as builder:
        ...         builder.add_document([5, 6, 7])
        ...     IndexedDataset(f"{folder}/web_text_document")[0].tolist()
        [5, 6, 7]
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        dtype: DTypeLike = np.int32,
        *,
        multimodal: bool = False,
        checksums: bool = False,
        provenance: Mapping[str, Any] | None = None,
        durable: bool = True,
    ) -> None:
        self.prefix = check_path("prefix", prefix)
        check_prefix(self.prefix)
        self.dtype = DTYPES[dtype_code(dtype)]
        self.multimodal = check_bool("multimodal", multimodal)
        self._durable = check_bool("durable", durable)
        self._provenance: dict[str, Any] | None = _plain_json(provenance)
        self._hasher = BlockHasher() if check_bool("checksums", checksums) else None
        # The working directory may change.
        folder = os.path.realpath(os.path.dirname(self.prefix) or ".")
        place = os.path.join(folder, os.path.basename(self.prefix))
        with interrupts_held(), contextlib.ExitStack() as stack:
            self._columns = IndexColumns(folder, self.dtype, has_modes=self.multimodal)
            stack.callback(self._columns.close)
            self._pair = place, stack.enter_context(building(place))
            self._file: Any = stack.enter_context(open(self._pair[1].bin, "wb", buffering=0))
            self._buffer = _native.TokenBuffer(
                self.dtype.name, _BUFFER_SIZE, self._file.fileno(), self.multimodal
            )
            stack.callback(self._buffer.close)
            self._turns = Turns(self.prefix, stack.pop_all().close)
            weakref.finalize(self, self._turns.end_at_exit)
        watch_forks(self)

    @property
    def num_documents(self) -> int:
        return self._buffer.num_documents

    @property
    def num_sequences(self) -> int:
        return self._buffer.num_sequences

    @property
    def num_tokens(self) -> int:
        return self._buffer.num_tokens

    def add_sequence(self, tokens: ArrayLike, mode: int = 0) -> None:
        """Appends a sequence to the current document; `end_document` ends it.

        Args:
            tokens: [length], numbers that fit the dtype.
            mode: Mode of the sequence, in a multimodal file.
        """
        self._add(tokens, None, [mode], ends_document=False)

    def end_document(self) -> None:
        """Ends the current document, which may have no sequences."""
        with self._turns.take():
            self._buffer.end_document()
            if self._buffer.is_full:
                self._flush()

    def add_document(
        self, tokens: ArrayLike, lengths: ArrayLike | None = None, modes: ArrayLike | None = None
    ) -> None:
        """Appends a whole document.

        Args:
            tokens: Tokens of all its sequences, in order: [tokens].
            lengths: Length of each sequence: integers [sequences], which sum to the number of
                tokens. None: one sequence; empty: none.
            modes: Modes of its sequences, in a multimodal file; None: 0.
        """
        self._add(tokens, lengths, modes, ends_document=True)

    def add_documents(self, tokens: ArrayLike, lengths: ArrayLike) -> None:
        """Appends many documents of one sequence each; one without tokens gets no sequence.

        Args:
            tokens: Tokens of all documents, in order: [tokens].
            lengths: Lengths of documents: integers [documents], which sum to the number of tokens.
        """
        values = _as_tokens(tokens, self.dtype)
        counts = _as_lengths(lengths, len(values))
        with self._turns.take():
            self._append(values)
            for start in range(0, len(counts), _ENTRIES):
                self._buffer.add_documents(counts[start : start + _ENTRIES])
                self._columns.append(*self._buffer.take_entries())
            self._flush()

    def add_provenance(self, entries: Mapping[str, Any]) -> None:
        """Adds to the origin of the tokens in the sidecar.

        Args:
            entries: Plain JSON values; an entry of the same name is replaced.
        """
        plain = _plain_json(entries) or {}
        with self._turns.take():
            self._provenance = (self._provenance or {}) | plain

    def add_index(
        self,
        source: str | os.PathLike[str] | IndexedDataset,
        documents: tuple[int, int] | None = None,
        *,
        change_dtype: bool = False,
    ) -> None:
        """Appends the documents of another indexed dataset (a merge), or some of them.

        The kernel copies the bytes, or shares them if the file system can. Origins of documents are
        not copied: `millrace.jobs.merge` does that, by `millrace.provenance.copied_origins`.

        Args:
            source: Path prefix of the other pair, or a dataset; the files that it opened count,
                even if another pair is at its prefix by now.
            documents: Range (start, stop) of the documents to take; None: all.
            change_dtype: Whether to convert another dtype; each token is checked.

        Raises:
            ConfigError: If the dtypes differ, only one of the two has modes, a token does not fit,
                there are no such documents, or a document is still open here.
            DataError: If the other dataset is damaged.
        """
        self._turns.check_open()
        other = source if isinstance(source, IndexedDataset) else IndexedDataset(source)
        span = (0, other.num_documents) if documents is None else documents
        start, stop = other.document_range(*span)
        if other.dtype != self.dtype and not check_bool("change_dtype", change_dtype):
            raise ConfigError(
                f"{other.prefix} holds {other.dtype}, the new file {self.dtype}; "
                "`millrace convert --dtype` changes one of them"
            )
        has_modes = other.sequence_modes is not None
        if len(other) > 0 and has_modes != self.multimodal:
            one = other.prefix if has_modes else "the new file"
            raise ConfigError(f"only {one} has modes: both pairs must have them, or neither")
        sequences = other.check_documents(start, stop)
        byte_span = other.check_sequences(*sequences)
        with self._turns.take():
            if self._buffer.has_open_document:
                raise ConfigError(
                    "a document is still open; call end_document() before add_index()"
                )
            self._flush()
            try:
                file = other.reopen_bin() if other.dtype == self.dtype else None
                if file is not None:
                    self._copy(other, file, *byte_span)
                else:
                    for data in blocks(other, *byte_span):
                        self._append(_as_tokens(data.view(other.dtype), self.dtype))
                        self._flush()
                self._columns.copy(other, sequences, (start, stop))
            except ConfigError as error:  # a token that does not fit, or `other` was closed
                self._turns.end(f"an addition failed: {error}")
                raise
            self._buffer.count(
                num_sequences=sequences[1] - sequences[0],
                num_documents=stop - start,
                num_tokens=(byte_span[1] - byte_span[0]) // other.dtype.itemsize,
            )

    def finalize(self) -> None:
        """Writes the index and publishes the pair.

        Raises:
            ConfigError: If there are sequences after the last document's end.
            DataError: If the files are not what was added.
        """
        finalize_together([self])

    def abort(self) -> None:
        """Discards what was written; an old pair stays. May be called twice."""
        self._turns.close("it was aborted")

    def __enter__(self) -> "IndexedDatasetBuilder":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None and self._turns.closed_because is None:
                self.finalize()
        finally:
            self.abort()

    def _add(self, tokens: Any, lengths: Any, modes: Any, *, ends_document: bool) -> None:
        self._turns.check_open()
        values = _as_tokens(tokens, self.dtype)  # outside a turn: a token may be any object
        counts = _as_lengths([len(values)] if lengths is None else lengths, len(values))
        mode_array = None if modes is None or not self.multimodal else _as_modes(modes, len(counts))
        with self._turns.take():
            self._append(values)
            self._buffer.add_sequences(counts, mode_array, ends_document)
            if self._buffer.is_full:
                self._flush()

    def after_fork(self) -> None:
        """In a forked process: files and lock are its parent's."""
        self._file.close()
        self._turns.leave_to_parent()

    def _append(self, values: NDArray[Any]) -> None:
        """Buffers tokens; a chunk is checked while the last one is written.

        If a token does not fit the dtype (ConfigError), none of its chunk is buffered.
        """
        for start in range(0, len(values), _CHUNK):
            try:
                self._buffer.append(values[start : start + _CHUNK])
            except ValueError as error:
                problem = ConfigError(f"{error}; or write another dtype")
                if start > 0:  # earlier tokens are written: nothing can follow them
                    self._turns.end(f"an addition failed: {problem}")
                raise problem from None
            if start + _CHUNK < len(values):
                self._flush()

    def _flush(self) -> None:
        """Starts to write the buffer; more can be added meanwhile."""
        self._columns.append(*self._buffer.take_entries())
        if self._hasher is not None:
            self._hasher.update(self._buffer.view())
        self._buffer.flush()

    def _copy(self, other: IndexedDataset, source: BinaryIO, start: int, stop: int) -> None:
        """Appends bytes [start, stop) of another `.bin` of the same dtype, open as `source`."""
        self._buffer.wait()
        with source:
            if self._hasher is not None:
                for data in blocks(other, start, stop):
                    self._hasher.update(data)
            place = self._file.tell()
            copy_file(source, self._file, start, stop)
        if self._durable:  # the flush at the end then has less to wait for
            _native.start_writeback(self._file.fileno(), place, stop - start)

    def _write_files(self) -> None:
        """Brings all files to the disk; a DataError if they are not what was added."""
        files, hasher = self._pair[1], BlockHasher()
        self._flush()
        self._buffer.wait()
        flush_to_disk(self._file, durable=self._durable)
        self._columns.check_bin(files.bin)
        with open(files.idx, "wb", buffering=1 << 20) as index:
            for chunk in self._columns.chunks():
                index.write(chunk)
                hasher.update(chunk)
            index.flush()
            # On NFS a file's time is that of its flush, and clocks step back: see `publish`.
            written = max(os.fstat(file.fileno()).st_mtime_ns for file in (self._file, index))
            os.utime(index.fileno(), ns=(written, written))
            flush_to_disk(index, durable=self._durable)
        sums = None
        if self._hasher is not None:
            sums = PairChecksums(bin=self._hasher.finish(), idx=hasher.finish())
        if sums is not None or self._provenance is not None:
            info = Info(provenance=self._provenance or {}, checksums=sums)
            with open(files.info, "wb") as sidecar:
                sidecar.write(info.to_json().encode())
                flush_to_disk(sidecar, durable=self._durable)


def finalize_together(builders: Sequence[IndexedDatasetBuilder]) -> None:
    """Finalises several builders: all files are on the disk before the first pair appears.

    If one fails, none is published. The errors are those of `IndexedDatasetBuilder.finalize`.
    """
    with contextlib.ExitStack() as stack:
        for one in builders:
            stack.enter_context(one._turns.take())
            if one._buffer.has_open_document:
                raise ConfigError(
                    f"the last sequences of {one.prefix} do not belong to a document yet; "
                    "call end_document() before finalize()"
                )
        try:
            for one in builders:
                with naming(one.prefix + BIN):
                    one._write_files()
                one._turns.check_open()
            with interrupts_held():
                is_durable = any(one._durable for one in builders)
                publish([one._pair for one in builders], durable=is_durable)
        finally:
            for one in builders:
                one._turns.end("it was finalised")


# ---- arguments ----


def _plain_json(provenance: Any) -> Any:
    if provenance is not None and not isinstance(provenance, Mapping):
        raise ConfigError(f"provenance is {shown(provenance)}; a dict is needed")
    return plain_json(provenance)


def _as_tokens(tokens: ArrayLike, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Tokens as the core takes them: contiguous, in native byte order."""
    try:
        values = np.asarray(tokens)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"tokens are not numbers in one dimension: {error}") from None
    is_float = dtype.kind == "f"
    if values.ndim == 1 and (values.dtype == object or values.size == 0) and not is_float:
        return check_ints("tokens", values.tolist())
    if values.ndim != 1 or values.dtype.kind not in ("iuf" if is_float else "iu"):
        raise ConfigError(
            f"tokens have shape {values.shape} and dtype {values.dtype}; "
            f"{'numbers' if is_float else 'integers'} are needed, in one dimension"
        )
    target = dtype if is_float else values.dtype
    return np.require(values, target.newbyteorder("="), ["C", "A"])


def _as_lengths(lengths: ArrayLike, num_tokens: int) -> NDArray[np.int64]:
    """Lengths of sequences, int64 [sequences], which sum to the number of tokens."""
    counts = check_ints("lengths", lengths)
    if counts.size <= 64:  # Python adds a short list in a fifth of NumPy's time
        few = counts.tolist()
        least, most, total = min(few, default=0), max(few, default=0), sum(few)
    else:
        least, most, total = (int(one) for one in (counts.min(), counts.max(), counts.sum()))
    if least < 0 or most > MAX_INT32:
        limits = f"0 to {MAX_INT32} is possible. Cut longer sequences into several"
        raise ConfigError(f"the lengths go from {least} to {most}; {limits}")
    if total != num_tokens:
        values = shown(counts.tolist())
        raise ConfigError(f"the lengths {values} sum to {total}; there are {num_tokens} tokens")
    return counts


def _as_modes(modes: ArrayLike, count: int) -> NDArray[np.int8]:
    values = check_ints("modes", modes)
    if values.shape != (count,) or np.any(values != values.astype(np.int8)):
        raise ConfigError(f"modes are {shown(modes)}; give {count} numbers from -128 to 127")
    return values.astype(np.int8)
