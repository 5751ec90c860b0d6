"""Reading an indexed dataset."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import operator
import os
from collections.abc import Iterator
from functools import cached_property, partial
from types import TracebackType
from typing import Any, BinaryIO, SupportsIndex, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from millrace import _core, _native
from millrace.checks import one_path, whole, whole_numbers
from millrace.errors import ConfigError, DataError
from millrace.files import cut_short, xxh3
from millrace.store.bytes import Access, BinReader, Bytes, bytes_in_memory, open_bin
from millrace.store.info import Info, read_info
from millrace.store.layout import HEADER, parse_header
from millrace.store.publish import bin_path, idx_path, open_pair


class IndexedDataset:
    """The sequences of a `.bin`/`.idx` pair, by number.

    Args:
        prefix: the path of the pair, without `.bin` or `.idx`.
        access: how to read the `.bin`: "mmap" (reads are views, without copying) or "file"
            (positioned reads, for file systems where mapping hurts).
        bin_reader: where the bytes of the `.bin` are, if not in a file; the index is always one.

    Attributes:
        prefix: str.
        dtype: of the tokens.
        sequence_lengths: int32 [sequences], in tokens.
        sequence_pointers: int64 [sequences], byte offsets into the `.bin`.
        document_indices: int64 [documents + 1]: document j has the sequences
            document_indices[j] up to document_indices[j + 1].
        sequence_modes: int8 [sequences] in a multimodal file, else None.
        reader: the bytes of the `.bin`.

    The arrays are read-only views of the mapped index. Opening looks at the header, the sizes and
    the first and last entries alone, whatever the size. No descriptor stays open behind a map. An
    open dataset goes on showing the files that it opened when another pair is published at its
    prefix. It can be forked and used by several threads, and pickled: where the pickle is opened,
    the same data must be at the prefix.

    A mapped file that another program cuts short is a bus error, which ends the process, for
    whoever touches a view of what is gone; `read`, `GPTDataset.batch` and the `Loader` raise
    DataError instead.

    Raises:
        DataError: a missing, truncated, damaged or foreign file; in a pickle that is opened, other
            data than were pickled.

    Example:
        >>> dataset = IndexedDataset("data/web_text_document")   # doctest: +SKIP
        >>> dataset[0], dataset[-1], dataset[2:5], dataset.document(7)   # doctest: +SKIP
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        *,
        access: Access = "mmap",
        bin_reader: BinReader | None = None,
    ) -> None:
        self.prefix = one_path("prefix", prefix)
        self._options = {"access": access, "bin_reader": bin_reader}
        bin_file, idx_file = open_pair(self.prefix, has_bin=bin_reader is None)
        with idx_file, bin_file or contextlib.nullcontext():
            size = os.fstat(idx_file.fileno()).st_size
            self.header, has_modes = parse_header(
                idx_file.read(HEADER.size), size, self.prefix + ".idx"
            )
            self._index = _core.map_file(idx_file.fileno(), size)
            ends = self._read_ends(idx_file)
            self._files = [_identity(file) for file in (bin_file, idx_file) if file is not None]
            if bin_file is not None:
                bin_reader = open_bin(bin_file, access)
        assert bin_reader is not None
        self.reader: BinReader = bin_reader
        self.dtype = self.header.dtype
        header, count = self.header, self.header.num_sequences
        self.sequence_lengths: NDArray[np.int32] = np.frombuffer(
            self._index, "<i4", count, header.lengths_offset
        )
        self.sequence_pointers: NDArray[np.int64] = np.frombuffer(
            self._index, "<i8", count, header.pointers_offset
        )
        self.document_indices: NDArray[np.int64] = np.frombuffer(
            self._index, "<i8", header.num_document_entries, header.documents_offset
        )
        self.sequence_modes: NDArray[np.int8] | None = (
            np.frombuffer(self._index, "<i1", count, header.modes_offset) if has_modes else None
        )
        self._check_ends(*ends)
        # All tokens as one array, if they are in memory, and its sequences as views.
        self._bytes: Bytes | None = bytes_in_memory(bin_reader)
        self._tokens: NDArray[Any] | None = None
        self._views: _core.SequenceViews | None = None
        if self._bytes is not None:
            size = len(self._bytes) - len(self._bytes) % self.dtype.itemsize
            self._tokens = self._bytes[:size].view(self.dtype)
            self._views = _core.SequenceViews(
                self._tokens, self.sequence_pointers, self.sequence_lengths
            )
        self._shift = self.dtype.itemsize.bit_length() - 1

    def _read_ends(self, idx_file: BinaryIO) -> list[int]:
        """The first and last document index, the first and last pointer, and the last length.

        They are read, not looked up in the map: the file may be cut short at this moment.
        """
        header = self.header
        places = (
            (header.documents_offset, 8),
            (header.modes_offset - 8, 8),
            (header.pointers_offset, 8),
            (header.documents_offset - 8, 8),
            (header.pointers_offset - 4, 4),
        )
        entries = (os.pread(idx_file.fileno(), width, place) for place, width in places)
        return [int.from_bytes(entry, "little", signed=True) for entry in entries]

    def _check_ends(self, first: int, last: int, start: int, pointer: int, length: int) -> None:
        """The checks that look at the first and last entries alone."""
        idx, size = self.prefix + ".idx", self.reader.size
        remedy = "The files do not belong together or are damaged: write them again"
        if first != 0 or last != len(self):
            raise DataError(
                f"{idx}: the document indices go from {first} to {last}, "
                f"not from 0 to {len(self)}, the number of sequences. {remedy}"
            )
        expected = 0
        if len(self) > 0:
            expected = pointer + length * self.dtype.itemsize
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

    # ---- counts ----

    def __len__(self) -> int:
        """The number of sequences."""
        return self.header.num_sequences

    @property
    def num_documents(self) -> int:
        return self.header.num_document_entries - 1

    @property
    def num_tokens(self) -> int:
        return self.reader.size // self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """The size of both files."""
        return self.reader.size + len(self._index)

    @property
    def document_lengths(self) -> NDArray[np.int64]:
        """Tokens in each document: int64 [documents].

        Raises:
            DataError: document entries that are out of order.
        """
        bad = _native.first_bad_document(self.document_indices, len(self))
        if bad < len(self.document_indices):
            raise DataError(
                f"{self.prefix}.idx: document entry {bad} is {self.document_indices[bad]}, out of "
                "order. The index is damaged: write the pair again"
            )
        ends = np.concatenate(([0], np.cumsum(self.sequence_lengths, dtype=np.int64)))
        return np.diff(ends[self.document_indices])

    # ---- tokens ----

    @property
    def is_mapped(self) -> bool:
        """Whether all tokens are one array in memory (`tokens`); else each read copies."""
        self._check_open()
        return self._tokens is not None

    @property
    def tokens(self) -> NDArray[Any]:
        """The whole `.bin`, [tokens] of `dtype`: a view.

        Raises:
            ConfigError: the `.bin` is not mapped.
        """
        if self._tokens is None:
            self._check_open()
            raise ConfigError(f"{self.prefix}.bin is not mapped; open it with access='mmap'")
        return self._tokens

    @overload
    def __getitem__(self, index: int | np.integer[Any]) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, index: slice | NDArray[Any] | list[int]) -> list[NDArray[Any]]: ...
    def __getitem__(self, index: Any) -> NDArray[Any] | list[NDArray[Any]]:
        """A sequence's tokens, [length] of `dtype`; a list of them for a slice, list or array.

        Raises:
            IndexError: no such sequence.
            DataError: the index points outside the token file.
        """
        if self._views is not None:
            try:  # not contextlib.suppress: it would take longer than the read
                return self._views.one(index)
            except (TypeError, ValueError):
                pass
        # No number, a file that is not mapped, or a damaged index, and then the rest says how.
        if isinstance(index, slice):
            return self._slice(*index.indices(len(self)))
        if isinstance(index, (np.ndarray, list)) and np.ndim(index) == 1:
            flat, offsets = self.read(index)
            return _cut(flat, offsets)
        number = self._sequence(index)
        return self._read(
            number, self.sequence_pointers.item(number), self.sequence_lengths.item(number)
        )

    def __iter__(self) -> Iterator[NDArray[Any]]:
        for start in range(0, len(self), _CHUNK):
            yield from self[start : start + _CHUNK]

    def get(self, index: SupportsIndex, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Tokens [offset, offset + length) of a sequence; without a length, all from `offset` on.

        Raises:
            IndexError: no such sequence.
            ConfigError: the span lies outside the sequence.
            DataError: the index points outside the token file.
        """
        number = self._sequence(index)
        available = self.sequence_lengths.item(number)
        start = whole("offset", offset)
        count = available - start if length is None else whole("length", length)
        if start < 0 or count < 0 or start + count > available:
            raise ConfigError(
                f"tokens [{start}, {start + count}) of sequence {number} were asked for; "
                f"it has {available} tokens"
            )
        pointer = self.sequence_pointers.item(number)
        return self._read(number, pointer + start * self.dtype.itemsize, count)

    def read(self, sequence_ids: ArrayLike) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Many sequences at once, anywhere in the file, in one call of the core.

        Args:
            sequence_ids: integers [n]; negative ones count from the end.

        Returns:
            their tokens, one after the other, [tokens] of `dtype`, and where each starts: offsets
            int64 [n + 1]; sequence i is tokens[offsets[i]:offsets[i + 1]].

        Raises:
            IndexError: no such sequence.
            DataError: the index points outside the token file.
        """
        ids = whole_numbers("sequence_ids", sequence_ids)
        self._check_open()
        try:
            if (data := self._bytes) is not None:
                flat, offsets = _native.copy_sequences(
                    data,
                    self.sequence_pointers,
                    self.sequence_lengths,
                    ids,
                    self.dtype.itemsize,
                )
                return flat.view(self.dtype), offsets
            counts = self.sequence_lengths[ids].astype(np.int64)
            counts <<= self._shift
            flat = self.reader.gather(self.sequence_pointers[ids], counts)
        except ValueError as error:
            if isinstance(error, DataError):  # it says itself what is wrong
                raise DataError(f"{self.prefix}.bin/.idx: {error}") from None
            raise DataError(
                f"{self.prefix}.idx: {error} (of the sequences that were asked for). "
                "The index is damaged: write the pair again"
            ) from None
        offsets = np.zeros(len(ids) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        offsets >>= self._shift
        return flat.view(self.dtype), offsets

    def document(self, number: SupportsIndex) -> NDArray[Any]:
        """A document's tokens, all its sequences one after the other: [length] of `dtype`.

        Raises:
            IndexError: no such document.
            DataError: the index points outside the token file.
        """
        place = operator.index(number)
        place += self.num_documents if place < 0 else 0
        if not 0 <= place < self.num_documents:
            raise IndexError(
                f"there is no document {place}; {self.prefix} has 0 to {self.num_documents - 1}"
            )
        first, last = self.document_indices[place : place + 2].tolist()
        if not 0 <= first <= last <= len(self):
            raise DataError(
                f"{self.prefix}.idx: document {place} has the sequences {first} to {last} of "
                f"{len(self)}. The index is damaged: write the pair again"
            )
        return self.read(np.arange(first, last))[0] if last != first + 1 else self[first]

    def _sequence(self, index: SupportsIndex) -> int:
        """A sequence's number, which the dataset has."""
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(
                f"there is no sequence {number}; {self.prefix} has 0 to {len(self) - 1}"
            )
        return number

    def _slice(self, start: int, stop: int, step: int) -> list[NDArray[Any]]:
        if self._views is not None:
            with contextlib.suppress(ValueError):
                return self._views.many(start, stop, step)
            return [self[number] for number in range(start, stop, step)]  # one of them raises
        flat, offsets = self.read(np.arange(start, stop, step))
        return _cut(flat, offsets)

    def _read(self, number: int, byte_offset: int, count: int) -> NDArray[Any]:
        if count < 0 or not 0 <= byte_offset <= self.reader.size - (count << self._shift):
            raise DataError(
                f"{self.prefix}.idx: sequence {number} has {count} tokens from byte {byte_offset} "
                f"on, outside the .bin of {self.reader.size} bytes. "
                "The index is damaged: write the pair again"
            )
        return self.reader.read(byte_offset, count << self._shift).view(self.dtype)

    # ---- identity ----

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the content that stays the same wherever the files lie (32 hex digits).

        It covers both sizes, the header and evenly spaced 4 KiB blocks of both files, so that it
        costs the same for any size; it tells datasets apart, and is no proof against damage.
        """
        digest = hashlib.blake2b(digest_size=16)
        for size, gather in (
            (len(self._index), partial(_native.copy_pieces, self._index)),
            (self.reader.size, self.reader.gather),
        ):
            digest.update(size.to_bytes(8, "little"))
            last = max(size - _BLOCK, 0)
            pieces = range(_FINGERPRINT_BLOCKS)
            starts = np.array([last * piece // (_FINGERPRINT_BLOCKS - 1) for piece in pieces])
            digest.update(gather(starts, np.minimum(_BLOCK, size - starts)).data)
        return digest.hexdigest()

    @cached_property
    def lengths_checksum(self) -> str:
        """A checksum (XXH3-64, 16 hex digits) of all sequence lengths, which decide the order."""
        digest = xxh3()
        start, stop = self.header.lengths_offset, self.header.pointers_offset
        for at in range(start, stop, _PIECE):
            piece = np.array([at]), np.array([min(_PIECE, stop - at)])
            digest.update(_native.copy_pieces(self._index, *piece).data)
        return str(digest.hexdigest())

    def info(self) -> Info | None:
        """The sidecar's checksums and provenance; None where there is no sidecar."""
        return read_info(self.prefix)

    def reopen_bin(self) -> BinaryIO | None:
        """The `.bin` as a file; None if it is none, or another one is at its name by now."""
        options = self._options
        if not options or options["bin_reader"] is not None:  # closed by another thread, perhaps
            return None
        with contextlib.ExitStack() as opened:
            try:
                file = opened.enter_context(open(bin_path(self.prefix), "rb", buffering=0))
            except OSError:
                return None
            if _identity(file) != self._files[0]:
                return None
            opened.pop_all()
            return file

    def check_sizes(self) -> None:
        """Looks whether the files, if they are still at the prefix, have become shorter.

        Raises:
            DataError: one has.
        """
        paths = [idx_path(self.prefix), bin_path(self.prefix)]
        for path, opened in zip(paths, reversed(self._files), strict=False):
            if problem := cut_short(path, opened):
                raise DataError(problem)

    # ---- an end, and other processes ----

    def close(self) -> None:
        """Lets go of the files. Arrays that were taken from the dataset stay as they are.

        Without it, that happens when the dataset and its last array are gone.
        """
        if not self._options:
            return
        for name in ("_index", "reader", *_COLUMNS):
            self.__dict__.pop(name, None)
        self.sequence_modes = self._bytes = self._tokens = self._views = None
        self._options = {}
        self.__class__ = _closed(type(self))

    def _check_open(self) -> None:
        if not self._options:
            raise ConfigError(f"{self.prefix} is closed; open it again")

    def __enter__(self) -> IndexedDataset:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_same, (type(self), self.prefix, self._options, self.identity())

    def identity(self) -> tuple[Any, ...]:
        """What tells these data from others, for `check_identity`: plain values."""
        self._check_open()
        return self._files, self.fingerprint, self.lengths_checksum

    def check_identity(self, pickled: tuple[Any, ...]) -> None:
        """Checks that these are the data of a dataset that had this identity.

        Raises:
            DataError: they are others.
        """
        # The same files, or (on another machine, or after a copy) the same content.
        if self._files != pickled[0] and self.identity()[1:] != pickled[1:]:
            raise DataError(
                f"{self.prefix}.bin/.idx hold other data than the dataset that was pickled: they "
                "were replaced since. Open the dataset anew, and pickle that one"
            )

    def __repr__(self) -> str:
        return (
            f"IndexedDataset({self.prefix!r}: {self.num_documents:,} documents, "
            f"{len(self):,} sequences, {self.num_tokens:,} tokens, {self.dtype})"
        )


_COLUMNS = ("sequence_lengths", "sequence_pointers", "document_indices")
_CHUNK = 1024  # sequences that iteration reads at a time
_BLOCK = 4096
_FINGERPRINT_BLOCKS = 16
_PIECE = 2 << 20  # bytes of an index that are copied at a time: they stay in a core's cache


def _open_same(
    kind: type[IndexedDataset], prefix: str, options: dict[str, Any], pickled: tuple[Any, ...]
) -> IndexedDataset:
    """Opens a pickled dataset, if the very data are there that it had."""
    dataset = kind(prefix, **options)
    dataset.check_identity(pickled)
    return dataset


def _closed(kind: type[IndexedDataset]) -> type[IndexedDataset]:
    """The class of closed datasets, which say so where they lack what `close` has taken.

    A `__getattr__` of the open ones' class would make every access to them slower by a third.
    """

    def getattr_of_closed(self: IndexedDataset, name: str) -> Any:
        self._check_open()

    return type(kind.__name__, (kind,), {"__getattr__": getattr_of_closed})


def _identity(file: BinaryIO) -> tuple[int, ...]:
    """Which file it is, and in which state."""
    stat = os.fstat(file.fileno())
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _cut(flat: NDArray[Any], offsets: NDArray[np.int64]) -> list[NDArray[Any]]:
    bounds = offsets.tolist()
    return [flat[a:b] for a, b in itertools.pairwise(bounds)]
