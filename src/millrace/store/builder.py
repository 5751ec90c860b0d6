"""Writing an indexed dataset."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from millrace.errors import ConfigError
from millrace.store.layout import Header, dtype_code
from millrace.store.publish import (
    TMP,
    bin_path,
    building,
    flush_to_disk,
    idx_path,
    publish_pair,
)

_MAX_LENGTH = 2**31 - 1  # lengths are int32
_IN_MEMORY = 32 << 20  # bytes of index entries of a kind that stay in memory before they spill
_CHUNK = 1 << 20  # index entries that are handled at a time


class IndexedDatasetBuilder:
    """Writes a `.bin`/`.idx` pair that is byte-identical to Megatron-LM's.

    The pair appears at `prefix` when it is finalised, whole or not at all; until then an old pair
    stays as it was. Index entries spill to disk, so that memory stays bounded.

    Args:
        prefix: the path of the pair, without `.bin` or `.idx`; its folder must exist.
        dtype: of the tokens in the file, one of `DTYPES`.
        multimodal: store a mode (int8) for each sequence.

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
    ) -> None:
        self.prefix = os.fspath(prefix)
        dtype_code(dtype)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.multimodal = multimodal
        self.num_sequences = 0
        self.num_documents = 0
        self.num_tokens = 0
        folder = os.path.dirname(self.prefix) or "."
        if not os.path.isdir(folder):
            raise ConfigError(f"{folder} is no folder; create it, or give another prefix")
        self._resources = contextlib.ExitStack()
        try:
            self._resources.enter_context(building(self.prefix))
            self._resources.callback(self._remove_temporaries)
            self._data = self._resources.enter_context(
                open(bin_path(self.prefix) + TMP, "wb", buffering=1 << 20)  # noqa: SIM115
            )
            self._lengths, self._documents, self._modes = (
                self._resources.enter_context(
                    tempfile.SpooledTemporaryFile(  # noqa: SIM115
                        max_size=_IN_MEMORY, dir=folder
                    )
                )
                for _ in range(3)
            )
        except BaseException:
            self._resources.close()
            raise
        self._documents.write(_int64(0))
        self._is_open = True
        self._documents_end = 0  # the number of sequences when the last document ended

    def add_sequence(self, tokens: ArrayLike, mode: int = 0) -> None:
        """Appends a sequence to the document that is being written; `end_document` ends it.

        Args:
            tokens: [length], numbers that fit the dtype.
            mode: of the sequence, in a multimodal file.

        Raises:
            ConfigError: a number that does not fit the dtype, or too long a sequence.
        """
        values = self._to_dtype(tokens)
        self._append(values, [len(values)], [mode])

    def end_document(self) -> None:
        """Ends a document, which has the sequences since the last one ended (none, perhaps)."""
        self._check_open()
        self.num_documents += 1
        self._documents_end = self.num_sequences
        self._documents.write(_int64(self.num_sequences))

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
            modes: of its sequences, in a multimodal file.

        Raises:
            ConfigError: a number that does not fit the dtype, or lengths that do not add up.
        """
        values = self._to_dtype(tokens)
        lengths = [len(values)] if lengths is None else lengths
        if sum(lengths) != len(values) or (len(lengths) > 0 and min(lengths) < 0):
            raise ConfigError(
                f"the sequences' lengths {_short(lengths)} sum to {sum(lengths)}; "
                f"the document has {len(values)} tokens"
            )
        self._append(values, lengths, modes if modes is not None else [0] * len(lengths))
        self.end_document()

    def add_documents(self, tokens: ArrayLike, lengths: ArrayLike) -> None:
        """Appends many documents of one sequence each; one without tokens gets no sequence.

        Args:
            tokens: [tokens], of all documents, one after the other.
            lengths: integers [documents], in tokens; their sum is the number of tokens.

        Raises:
            ConfigError: a number that does not fit the dtype, or lengths that do not add up.
        """
        values = self._to_dtype(tokens)
        counts = np.asarray(lengths, dtype=np.int64)
        total = int(counts.sum())
        if counts.ndim != 1 or total != len(values) or np.any(counts < 0):
            raise ConfigError(
                f"the documents' lengths sum to {total}, the least is {counts.min(initial=0)}; "
                f"there are {len(values)} tokens"
            )
        present = counts[counts > 0]
        ends = self.num_sequences + np.cumsum(counts > 0, dtype="<i8")
        self._append(values, present, np.zeros(len(present), np.int8))
        self._documents.write(ends.tobytes())
        self.num_documents += len(counts)
        self._documents_end = self.num_sequences

    def finalize(self) -> None:
        """Writes the index and publishes the pair.

        Raises:
            ConfigError: sequences after the last document's end.
        """
        self._check_open()
        if self._documents_end != self.num_sequences:
            raise ConfigError(
                f"{self.num_sequences - self._documents_end} sequences belong to no document yet; "
                "call end_document() before finalize()"
            )
        with self._closing():
            flush_to_disk(self._data)
            with open(idx_path(self.prefix) + TMP, "wb") as index:
                self._write_index(index)
                flush_to_disk(index)
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
            self.finalize()

    @contextlib.contextmanager
    def _closing(self) -> Any:
        self._is_open = False
        with self._resources:
            yield

    def _check_open(self) -> None:
        if not self._is_open:
            raise ConfigError(f"the builder of {self.prefix} is closed; make another one")

    def _remove_temporaries(self) -> None:
        for path in (bin_path(self.prefix), idx_path(self.prefix)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path + TMP)

    def _to_dtype(self, tokens: ArrayLike) -> NDArray[Any]:
        values = np.asarray(tokens)
        if values.ndim != 1:
            raise ConfigError(f"tokens have shape {values.shape}; one dimension is needed")
        if values.dtype == self.dtype or values.size == 0:
            return values.astype(self.dtype, copy=False)
        if self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype)
            if values.dtype.kind not in "iu":
                raise ConfigError(f"tokens are {values.dtype}; integers are needed")
            low, high = int(values.min()), int(values.max())
            if low < limits.min or high > limits.max:
                raise ConfigError(
                    f"token {low if low < limits.min else high} does not fit {self.dtype}, which "
                    f"holds {limits.min} to {limits.max}; write a wider dtype (int32)"
                )
        return values.astype(self.dtype)

    def _append(
        self,
        values: NDArray[Any],
        lengths: Sequence[int] | NDArray[Any],
        modes: Sequence[int] | NDArray[Any],
    ) -> None:
        self._check_open()
        if len(lengths) > 0 and max(lengths) > _MAX_LENGTH:
            raise ConfigError(
                f"a sequence has {max(lengths)} tokens; the format allows {_MAX_LENGTH}. "
                "Cut the document into several sequences"
            )
        self._data.write(np.ascontiguousarray(values).data)
        self._lengths.write(np.asarray(lengths, "<i4").tobytes())
        self.num_sequences += len(lengths)
        self.num_tokens += len(values)
        if self.multimodal:
            if len(modes) != len(lengths):
                raise ConfigError(f"there are {len(modes)} modes for {len(lengths)} sequences")
            self._modes.write(np.asarray(modes, "<i1").tobytes())

    def _write_index(self, index: Any) -> None:
        header = Header(
            dtype=self.dtype,
            num_sequences=self.num_sequences,
            num_document_entries=self.num_documents + 1,
        )
        index.write(header.pack())
        for chunk in _chunks(self._lengths):
            index.write(chunk)
        pointer = np.int64(0)
        for chunk in _chunks(self._lengths):
            ends = np.cumsum(np.frombuffer(chunk, "<i4"), dtype="<i8") * self.dtype.itemsize
            starts = np.empty_like(ends)
            starts[0], starts[1:] = 0, ends[:-1]
            index.write((starts + pointer).data)
            pointer += ends[-1]
        for chunk in _chunks(self._documents):
            index.write(chunk)
        for chunk in _chunks(self._modes):
            index.write(chunk)


def _int64(value: int) -> bytes:
    return value.to_bytes(8, "little")


def _chunks(file: Any) -> Any:
    file.seek(0)
    while chunk := file.read(8 * _CHUNK):
        yield chunk


def _short(lengths: Sequence[int]) -> str:
    text = ", ".join(str(length) for length in list(lengths)[:6])
    return f"[{text}, ...]" if len(lengths) > 6 else f"[{text}]"
