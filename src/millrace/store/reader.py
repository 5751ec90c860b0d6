"""Reading an indexed dataset."""

from __future__ import annotations

import hashlib
import mmap
import operator
import os
from functools import cached_property
from typing import Any, BinaryIO, SupportsIndex, overload

import numpy as np
from numpy.typing import NDArray

from millrace.errors import ConfigError, DataError
from millrace.store.layout import HEADER, parse_header
from millrace.store.publish import open_pair


class IndexedDataset:
    """The sequences of a `.bin`/`.idx` pair, by number, without copying.

    Args:
        prefix: the path of the pair, without `.bin` or `.idx`.

    Attributes:
        prefix: str.
        dtype: of the tokens.
        sequence_lengths: int32 [sequences], in tokens.
        sequence_pointers: int64 [sequences], byte offsets into the `.bin`.
        document_indices: int64 [documents + 1]: document j has the sequences
            document_indices[j] up to document_indices[j + 1].
        sequence_modes: int8 [sequences] in a multimodal file, else None.
        tokens: [tokens] of `dtype`: the whole `.bin`.

    All arrays are read-only views of the mapped files. Opening looks at the header, the sizes and
    the first and last entries alone, whatever the size. An open dataset goes on showing the files
    that it opened when another pair is published at its prefix.

    Raises:
        DataError: a missing, truncated, damaged or foreign file.

    Example:
        >>> dataset = IndexedDataset("data/web_text_document")   # doctest: +SKIP
        >>> dataset[0], dataset[-1], dataset[2:5]                # doctest: +SKIP
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        bin_file, idx_file = open_pair(self.prefix)
        with bin_file, idx_file:
            index = _map(idx_file)
            self._data = _map(bin_file)
        self.header, has_modes = parse_header(
            bytes(index[: HEADER.size]), len(index), self.prefix + ".idx"
        )
        header = self.header
        count = header.num_sequences
        self.dtype = header.dtype
        self.sequence_lengths: NDArray[np.int32] = np.frombuffer(
            index, "<i4", count, header.lengths_offset
        )
        self.sequence_pointers: NDArray[np.int64] = np.frombuffer(
            index, "<i8", count, header.pointers_offset
        )
        self.document_indices: NDArray[np.int64] = np.frombuffer(
            index, "<i8", header.num_document_entries, header.documents_offset
        )
        self.sequence_modes: NDArray[np.int8] | None = (
            np.frombuffer(index, "<i1", count, header.modes_offset)
            if has_modes and count > 0
            else None
        )
        self._index = index
        self._check_ends()
        self.tokens: NDArray[Any] = np.frombuffer(self._data, self.dtype)

    def _check_ends(self) -> None:
        """The checks that look at the first and last entries alone."""
        idx, size = self.prefix + ".idx", len(self._data)
        remedy = "The files do not belong together or are damaged: write them again"
        first, last = int(self.document_indices[0]), int(self.document_indices[-1])
        if first != 0 or last != len(self):
            raise DataError(
                f"{idx}: the document indices go from {first} to {last}, "
                f"not from 0 to {len(self)}, the number of sequences. {remedy}"
            )
        expected = 0
        if len(self) > 0:
            start = int(self.sequence_pointers[0])
            length = int(self.sequence_lengths[-1])
            expected = int(self.sequence_pointers[-1]) + length * self.dtype.itemsize
            if start != 0 or length < 0:
                raise DataError(
                    f"{idx}: the first sequence starts at byte {start}, not 0, or the last has a "
                    f"negative length ({length}). {remedy}"
                )
        if expected != size:
            raise DataError(
                f"{self.prefix}.bin has {size} bytes, but its index ends at byte {expected}. "
                f"{'It is truncated or empty' if size < expected else 'It is too long'}. {remedy}"
            )

    def __len__(self) -> int:
        """The number of sequences."""
        return self.header.num_sequences

    @property
    def num_documents(self) -> int:
        return self.header.num_document_entries - 1

    @property
    def num_tokens(self) -> int:
        return len(self._data) // self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """The size of both files."""
        return len(self._data) + len(self._index)

    @overload
    def __getitem__(self, index: SupportsIndex) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[NDArray[Any]]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> NDArray[Any] | list[NDArray[Any]]:
        """A sequence's tokens, [length] of `dtype`; for a slice, a list of them.

        Raises:
            IndexError: no such sequence.
            DataError: the index points outside the token file.
        """
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = operator.index(index)
        return self._read(
            number, int(self.sequence_pointers[number]), int(self.sequence_lengths[number])
        )

    def get(self, index: SupportsIndex, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Tokens [offset, offset + length) of a sequence; without a length, all from `offset` on.

        Raises:
            IndexError: no such sequence.
            ConfigError: the span lies outside the sequence.
        """
        number = operator.index(index)
        available = int(self.sequence_lengths[number])
        count = available - offset if length is None else length
        if offset < 0 or count < 0 or offset + count > available:
            raise ConfigError(
                f"tokens [{offset}, {offset + count}) of sequence {number} were asked for; "
                f"it has {available} tokens"
            )
        byte_offset = int(self.sequence_pointers[number]) + offset * self.dtype.itemsize
        return self._read(number, byte_offset, count)

    def _read(self, number: int, byte_offset: int, count: int) -> NDArray[Any]:
        if count < 0 or not 0 <= byte_offset <= len(self._data) - count * self.dtype.itemsize:
            raise DataError(
                f"{self.prefix}.idx: sequence {number} has {count} tokens from byte {byte_offset} "
                f"on, outside the .bin of {len(self._data)} bytes. "
                "The index is damaged: write the pair again"
            )
        return np.frombuffer(self._data, self.dtype, count, byte_offset)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the content that stays the same wherever the files lie (32 hex digits).

        It covers both sizes, the header and evenly spaced 4 KiB blocks of both files, so that it
        costs the same for any size; it tells datasets apart, and is no proof against damage.
        """
        digest = hashlib.blake2b(digest_size=16)
        for data in (self._index, self._data):
            digest.update(len(data).to_bytes(8, "little"))
            for piece in range(_FINGERPRINT_BLOCKS):
                start = (len(data) - _BLOCK) * piece // (_FINGERPRINT_BLOCKS - 1)
                digest.update(data[max(start, 0) : max(start, 0) + _BLOCK])
        return digest.hexdigest()

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str]]:
        return type(self), (self.prefix,)

    def __repr__(self) -> str:
        return (
            f"IndexedDataset({self.prefix!r}: {self.num_documents:,} documents, "
            f"{len(self):,} sequences, {self.num_tokens:,} tokens, {self.dtype})"
        )


_BLOCK = 4096
_FINGERPRINT_BLOCKS = 16


def _map(file: BinaryIO) -> mmap.mmap | bytes:
    """The file's bytes, mapped; an empty file cannot be."""
    if os.fstat(file.fileno()).st_size == 0:
        return b""
    return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
