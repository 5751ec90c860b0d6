"""Writing an indexed dataset."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from millrace.checks import MAX_INT32, check_bool, check_ints, check_path, plain_json, shown
from millrace.errors import ConfigError
from millrace.files import naming, temporary_name
from millrace.interrupts import interrupts_held
from millrace.storage import storage_of
from millrace.store.layout import dtype_code
from millrace.store.publish import bin_path, files_of, origins_path, publish
from millrace.store.reader import IndexedDataset
from millrace.store.writer import PairWriter, blocks

_ENTRIES = 1 << 16  # documents whose entries are made at a time: they stay in a core's cache


class IndexedDatasetBuilder:
    """Writes a `.bin`/`.idx` pair that is byte-identical to Megatron-LM's.

    The pair appears at `prefix` when it is finalised, whole or not at all; until then an old pair
    stays as it was. Index entries spill to disk, so that memory stays bounded.

    Each call adds all of its arguments, or nothing. A call that fails in the middle of its work (a
    full disk, Ctrl-C, a token that does not fit after half a million others were written) closes
    the builder and discards what it wrote. Leaving a `with` block finalises; leaving it by an
    error, or dropping the builder, discards. Threads may share a builder: their calls take turns. A
    forked process cannot use it, and leaves its files alone.

    Args:
        prefix: Path of the pair, without `.bin` or `.idx`; its folder must exist.
        dtype: The dtype of the tokens in the file, one of `DTYPES`.
        multimodal: Whether to store a mode (int8) for each sequence.
        checksums: Whether to write a sidecar with checksums of both files, for `verify`.
        provenance: Origin of the tokens, for the sidecar: plain JSON values.
        durable: Whether to bring the files to the disk before they appear. Without it, they may be
            empty or cut short after a power cut: for data that can be made again.

    Attributes:
        num_documents, num_sequences, num_tokens: Numbers of what was added so far.

    Raises:
        ConfigError: If the format does not have the dtype, the folder does not exist, the prefix
            ends in `.bin` or `.idx`, or the provenance is not plain JSON; in all additions, if a
            number does not fit the dtype or lengths do not add up.
        MillraceError: If another process is building this prefix.

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
        _check_prefix(self.prefix)
        dtype_code(dtype)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.multimodal = check_bool("multimodal", multimodal)
        self._writer = PairWriter(
            self.prefix,
            self.dtype,
            multimodal=self.multimodal,
            checksums=check_bool("checksums", checksums),
            provenance=_plain_json(provenance),
            durable=check_bool("durable", durable),
        )
        self._buffer = self._writer.buffer

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
        """Appends a sequence, [length], to the current document, which `end_document` ends.

        Its mode counts in a multimodal file.
        """
        self._add(tokens, None, [mode], ends_document=False)

    def end_document(self) -> None:
        """Ends the current document: the sequences, if any, since the last one ended."""
        with self._writer.turn():
            self._buffer.end_document()
            if self._buffer.is_full:
                self._writer.flush()

    def add_document(
        self, tokens: ArrayLike, lengths: ArrayLike | None = None, modes: ArrayLike | None = None
    ) -> None:
        """Appends a whole document.

        Args:
            tokens: Tokens of all its sequences, one after the other: [tokens].
            lengths: Lengths of its sequences in tokens; their sum is the number of tokens. None:
                one sequence. Empty: a document without sequences.
            modes: Modes of its sequences, in a multimodal file; None: 0.
        """
        self._add(tokens, lengths, modes, ends_document=True)

    def add_documents(self, tokens: ArrayLike, lengths: ArrayLike) -> None:
        """Appends many documents of one sequence each; one without tokens gets no sequence.

        Args:
            tokens: Tokens of all documents, one after the other: [tokens].
            lengths: Tokens in each document, integers [documents], whose sum is that of all.
        """
        values = _as_tokens(tokens, self.dtype)
        counts = _as_lengths(lengths, len(values))
        with self._writer.turn():
            self._writer.append(values)
            for start in range(0, len(counts), _ENTRIES):
                self._buffer.add_documents(counts[start : start + _ENTRIES])
                self._writer.columns.append(*self._buffer.take_entries())
            self._writer.flush()

    def add_provenance(self, entries: Mapping[str, Any]) -> None:
        """Adds plain JSON values to the sidecar's provenance; they replace those of their names."""
        plain = _plain_json(entries)
        with self._writer.turn():
            self._writer.provenance = {**(self._writer.provenance or {}), **(plain or {})}

    def add_index(
        self,
        source: str | os.PathLike[str] | IndexedDataset,
        documents: tuple[int, int] | None = None,
        *,
        change_dtype: bool = False,
    ) -> None:
        """Appends the documents of another indexed dataset (a merge), or some of them.

        The bytes are copied in the kernel, or shared if the file system can. Origins of documents
        are not copied: `millrace.jobs.merge` does that, by `millrace.provenance.copied_origins`.

        Args:
            source: The path prefix of the other pair, or a dataset, which gives the files that it
                opened, even if another pair is at its prefix by now.
            documents: (start, stop), the range of documents to take; None: all.
            change_dtype: Whether another dtype is converted; each token is checked.

        Raises:
            ConfigError: If the dtypes differ, only one of the two has modes, a token does not fit,
                there are no such documents, or a document is still open here.
            DataError: If the other dataset is damaged.
        """
        self._writer.turns.check_open()
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
            raise ConfigError(
                f"{other.prefix} has {'' if has_modes else 'no '}modes, the new file has "
                f"{'' if self.multimodal else 'no '}modes: both must have them, or neither"
            )
        sequences = other.check_documents(start, stop)
        byte_span = other.check_sequences(*sequences)
        writer = self._writer
        with writer.turn():
            if self._buffer.has_open_document:
                raise ConfigError(
                    "a document is still open; call end_document() before add_index()"
                )
            writer.flush()
            try:
                file = other.reopen_bin() if other.dtype == self.dtype else None
                if file is not None:
                    writer.copy(other, file, *byte_span)
                else:
                    for data in blocks(other, *byte_span):
                        writer.append(_as_tokens(data.view(other.dtype), self.dtype))
                        writer.flush()
                writer.columns.copy(other, sequences, (start, stop))
            except ConfigError as error:  # a token that does not fit, or `other` was closed
                writer.turns.end(f"an addition failed: {error}")
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
            DataError: If the files are not what was added; nothing is published.
        """
        finalize_together([self])

    def abort(self) -> None:
        """Discards what was written; an old pair at the prefix stays. May be called twice."""
        self._writer.turns.close("it was aborted")

    def __enter__(self) -> "IndexedDatasetBuilder":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None and self._writer.turns.closed_because is None:
                self.finalize()
        finally:
            self.abort()

    def _add(self, tokens: Any, lengths: Any, modes: Any, *, ends_document: bool) -> None:
        self._writer.turns.check_open()
        values = _as_tokens(tokens, self.dtype)  # outside a turn: a token may be any object
        counts = _as_lengths([len(values)] if lengths is None else lengths, len(values))
        has_modes = self.multimodal and modes is not None
        mode_array = _as_modes(modes, len(counts)) if has_modes else None
        with self._writer.turn():
            self._writer.append(values)
            self._buffer.add_sequences(counts, mode_array, ends_document)
            if self._buffer.is_full:
                self._writer.flush()


def finalize_together(builders: Sequence[IndexedDatasetBuilder]) -> None:
    """Finalises several builders: all files are on the disk before the first pair appears.

    If one of them fails, none is published. For errors see `IndexedDatasetBuilder.finalize`.
    """
    writers = [builder._writer for builder in builders]
    with contextlib.ExitStack() as stack:
        for writer in writers:
            stack.enter_context(writer.turn())
            if writer.buffer.has_open_document:
                raise ConfigError(
                    f"the last sequences of {writer.prefix} do not belong to a document yet; "
                    "call end_document() before finalize()"
                )
        try:
            for writer in writers:
                with naming(bin_path(writer.prefix)):
                    writer.write_files()
                writer.turns.check_open()
            pairs = [(writer.place, writer.temporaries) for writer in writers]
            with interrupts_held():
                publish(pairs, durable=any(writer.durable for writer in writers))
        finally:
            for writer in writers:
                writer.turns.end("it was finalised")


# ---- arguments ----


def _check_prefix(prefix: str) -> None:
    """Raises ConfigError before any work for a pair whose files could not be published."""
    storage_of(prefix)  # a path such as s3://bucket/name is refused
    folder = os.path.dirname(prefix) or "."
    if not os.path.isdir(folder):
        raise ConfigError(f"{folder} is not a folder; create it, or give another prefix")
    if prefix.endswith((".bin", ".idx")):
        raise ConfigError(f"the prefix is {prefix}; give it without {prefix[-4:]}, which is added")
    name = os.path.basename(prefix)
    size, most = len(os.fsencode(name)), os.pathconf(folder, "PC_NAME_MAX")
    added = len(os.fsencode(temporary_name(origins_path(name)))) - size
    if size + added > most:
        raise ConfigError(
            f"the name {shown(name, 80)} of the prefix has {size} bytes; at most {most - added} "
            f"are possible, because names of files have up to {most} bytes in {folder}. Give a "
            "shorter prefix"
        )
    for path in files_of(prefix):
        if os.path.isdir(path):
            raise ConfigError(f"{path} is a folder; remove it, or give another prefix")


def _plain_json(provenance: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if provenance is not None and not isinstance(provenance, Mapping):
        raise ConfigError(f"provenance is {shown(provenance)}; a dict is needed")
    plain: dict[str, Any] | None = plain_json(provenance)
    return plain


def _as_tokens(tokens: ArrayLike, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Tokens as an array that the core takes: contiguous, in native byte order."""
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
    """The lengths of sequences, int64 [sequences], whose sum is the number of tokens."""
    counts = check_ints("lengths", lengths)
    least, most = int(counts.min(initial=0)), int(counts.max(initial=0))
    if least < 0 or most > MAX_INT32:
        limits = f"0 to {MAX_INT32} is possible. Cut longer sequences into several"
        raise ConfigError(f"the lengths go from {least} to {most}; {limits}")
    if (total := counts.sum()) != num_tokens:
        values = shown(counts.tolist())
        raise ConfigError(f"the lengths {values} sum to {total}; there are {num_tokens} tokens")
    return counts


def _as_modes(modes: ArrayLike, count: int) -> NDArray[np.int8]:
    values = check_ints("modes", modes)
    if values.shape != (count,) or np.any(values != values.astype(np.int8)):
        raise ConfigError(f"modes are {shown(modes)}; give {count} numbers from -128 to 127")
    return values.astype(np.int8)
