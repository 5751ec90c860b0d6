"""Reading an indexed dataset."""

from __future__ import annotations

import contextlib
import itertools
import operator
import os
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any, BinaryIO, SupportsIndex, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from millrace import _native
from millrace.checks import absolute_path, one_path, whole, whole_numbers
from millrace.errors import ConfigError, DataError
from millrace.files import blake2b, checksum, file_identity
from millrace.store import layout
from millrace.store.bytes import (
    Access,
    BinReader,
    bytes_in_memory,
    copied,
    gather_in_turn,
    open_bin,
)
from millrace.store.info import Info, read_info
from millrace.store.origins import Origin, Origins, OriginsFile, has_origins
from millrace.store.publish import bin_path, open_pair

_CHUNK = 1024  # sequences that iteration reads at a time
_BLOCK = 4096
_FINGERPRINT_BLOCKS = 16
_PIECE = 1 << 19  # lengths that are copied at a time: they stay in a core's cache


class IndexedDataset:
    """The sequences of a `.bin`/`.idx` pair, by number.

    Args:
        prefix: Path of the pair, without `.bin` or `.idx`.
        access: How the `.bin` is read: "mmap" (reads are views, without copying) or "file"
            (positioned reads, for file systems where mapping hurts).
        bin_reader: Source of the bytes of the `.bin`, if it is not a file. The index always is one.

    Attributes:
        prefix: The path prefix, str.
        dtype: The dtype of the tokens.
        sequence_lengths: int32 [sequences], in tokens.
        sequence_pointers: int64 [sequences], byte offsets into the `.bin`.
        document_indices: int64 [documents + 1]: document j has the sequences
            document_indices[j] up to document_indices[j + 1].
        sequence_modes: int8 [sequences] in a multimodal file, else None.
        reader: The bytes of the `.bin`, a `BinReader`.

    The arrays are read-only views of the mapped index. Opening takes the same time for any size: it
    checks the header, the sizes, and the first and last entries. No descriptor stays open behind a
    map. An open dataset keeps showing the files that it opened when another pair is published at
    its prefix; with access="file" and more than 64 such datasets, reading may be a DataError then.
    It can be forked, shared by threads, and pickled; a pickle can only be opened where the same
    data are at the prefix.

    If another program cuts a mapped file short, touching a view of the lost part is a bus error,
    which ends the process; `read`, `GPTDataset.batch` and the `Loader` raise DataError instead.

    Raises:
        DataError: If a file is missing, truncated, damaged or foreign; in all methods, if the index
            points outside the token file or its entries are out of order.
        IndexError: In all methods, if there is no such sequence or document.
        ConfigError: In all methods, if the dataset is closed.

    Example:
        >>> import tempfile, millrace
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with millrace.IndexedDatasetBuilder(f"{folder}/text_document") as builder:
        ...         builder.add_document([1, 2, 3, 4, 5], lengths=[3, 2])
        ...     dataset = IndexedDataset(f"{folder}/text_document")
        >>> dataset[0].tolist(), dataset[-1].tolist(), dataset.document(0).tolist()
        ([1, 2, 3], [4, 5], [1, 2, 3, 4, 5])
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
        files = open_pair(self.prefix, has_bin=bin_reader is None)
        with files[0], files[-1]:  # one file twice, if there is no .bin to open
            index = layout.IndexFile(self.prefix, files[-1])
            self.header = index.header
            self._index = _native.map_file(files[-1].fileno(), self.header.size)
            self._files = [file_identity(file) for file in files]
            self._absolute_prefix = absolute_path(self.prefix)
            self.reader = open_bin(files[0], access) if bin_reader is None else bin_reader
            self._check_ends(index)
        self.dtype = self.header.dtype
        self.sequence_lengths: NDArray[np.int32] = self._column("lengths")
        self.sequence_pointers: NDArray[np.int64] = self._column("pointers")
        self.document_indices: NDArray[np.int64] = self._column("documents")
        self.sequence_modes: NDArray[np.int8] | None = (
            self._column("modes") if self.header.has_modes else None
        )
        # All tokens as one array, if they are in memory, and its sequences as views.
        self._bytes = bytes_in_memory(self.reader)
        self._tokens: NDArray[Any] | None = None
        self._views: _native.SequenceViews | None = None
        if self._bytes is not None:
            size = len(self._bytes) - len(self._bytes) % self.dtype.itemsize
            self._tokens = self._bytes[:size].view(self.dtype)
            self._views = _native.SequenceViews(
                self._tokens, self.sequence_pointers, self.sequence_lengths
            )

    def _column(self, name: str) -> NDArray[Any]:
        column = self.header.columns[name]
        return np.frombuffer(self._index, column.dtype, column.length, column.offset)

    def _check_ends(self, index: layout.IndexFile) -> None:
        """Checks the first and last entries: read, as the map may be cut short at this moment."""
        if problem := index.document_ends_problem():
            raise DataError(f"{problem}. {layout.WRITE_AGAIN}")
        end, last = 0, len(self) - 1
        if last >= 0:
            start, length = index.entry("pointers", 0), index.entry("lengths", last)
            end = index.entry("pointers", last) + length * self.header.dtype.itemsize
            problem = f"the first sequence starts at byte {start}, not at 0" if start != 0 else ""
            if length < 0:
                problem = f"the last sequence has the negative length {length}"
            if problem:
                raise DataError(f"{index.path}: {problem}. {layout.WRITE_AGAIN}")
        if problem := layout.size_problem(self.reader.size, end):
            raise DataError(f"{bin_path(self.prefix)} {problem}")

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
        """Tokens in each document: int64 [documents]."""
        self.check_documents(0, self.num_documents)
        ends = np.concatenate(([0], np.cumsum(self.sequence_lengths, dtype=np.int64)))
        return np.diff(ends[self.document_indices])

    def check_documents(self, start: int, stop: int) -> tuple[int, int]:
        """Checks documents [start, stop), and returns their sequences: (first, end)."""
        entries = self.document_indices[start : stop + 1]
        if problem := layout.document_problem(entries, len(self), start):
            raise layout.index_damage(self.prefix, problem)
        return int(entries[0]), int(entries[-1])

    def check_sequences(self, start: int, stop: int) -> tuple[int, int]:
        """Checks that sequences [start, stop) lie one after the other, and returns their bytes."""
        first, expected = (
            int(self.sequence_pointers[number]) if number < len(self) else self.reader.size
            for number in (start, stop)
        )
        lengths, pointers = self.sequence_lengths[start:stop], self.sequence_pointers[start:stop]
        problem, end = layout.sequence_problem(lengths, pointers, self.dtype.itemsize, first, start)
        if not problem and (end != expected or not 0 <= first <= end <= self.reader.size):
            problem = (
                f"sequences {start} to {stop - 1} lie at bytes {first} to {end}; they should end "
                f"at byte {expected} of {self.reader.size}"
            )
        if problem:
            raise layout.index_damage(self.prefix, problem)
        return first, end

    # ---- tokens ----

    @property
    def is_mapped(self) -> bool:
        """Whether all tokens are one array in memory, `tokens`; else each read copies."""
        return self._tokens is not None

    @property
    def tokens(self) -> NDArray[Any]:
        """The whole `.bin`, [tokens] of `dtype`: a view.

        Raises:
            ConfigError: If the `.bin` is not mapped.
        """
        if self._tokens is None:
            raise ConfigError(f"{self.prefix}.bin is not mapped; open it with access='mmap'")
        return self._tokens

    def token_source(self) -> _native.TokenSource:
        """The tokens for the core."""
        return _native.token_source(
            np.empty(0, self.dtype) if self._tokens is None else self._tokens,
            self.sequence_pointers,
            self.sequence_lengths,
            self.reader.size,
        )

    def documents_of(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """The documents that sequences belong to: int64 [sequences]."""
        return _native.find_documents(self.document_indices, sequences)

    @overload
    def __getitem__(self, index: int | np.integer[Any]) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, index: slice | NDArray[Any] | list[int]) -> list[NDArray[Any]]: ...
    def __getitem__(self, index: Any) -> NDArray[Any] | list[NDArray[Any]]:
        """A sequence's tokens, [length] of `dtype`; a list of them for a slice, list or array."""
        if self._views is not None:
            try:  # not contextlib.suppress: it would take longer than the read
                return self._views.one(index)
            except (TypeError, ValueError):
                pass
        # Not a number, a file that is not mapped, or a damaged index: the rest names the damage.
        if isinstance(index, slice):
            return self._slice(*index.indices(len(self)))
        if isinstance(index, (np.ndarray, list)) and np.ndim(index) == 1:
            flat, offsets = self.read(index)
            return _cut(flat, offsets)
        number = self._number("sequence", index, len(self))
        return self._read(number, 0, self.sequence_lengths.item(number))

    def _slice(self, start: int, stop: int, step: int) -> list[NDArray[Any]]:
        # Not in `__getitem__`: variables shared with a comprehension make it slower by a quarter.
        if self._views is not None:
            with contextlib.suppress(ValueError):
                return self._views.many(start, stop, step)
            return [self[number] for number in range(start, stop, step)]  # one of them raises
        return self[np.arange(start, stop, step)]

    def __iter__(self) -> Iterator[NDArray[Any]]:
        for start in range(0, len(self), _CHUNK):
            yield from self[start : start + _CHUNK]

    def get(self, index: SupportsIndex, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Tokens [offset, offset + length) of a sequence; without a length, all from `offset` on.

        Raises:
            ConfigError: If the span lies outside the sequence.
        """
        number = self._number("sequence", index, len(self))
        available = self.sequence_lengths.item(number)
        start = whole("offset", offset)
        count = available - start if length is None else whole("length", length)
        if start < 0 or count < 0 or start + count > available:
            raise ConfigError(
                f"tokens [{start}, {start + count}) are not in sequence {number}, which has "
                f"{available} tokens"
            )
        return self._read(number, start, count)

    def read(self, sequence_ids: ArrayLike) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Many sequences at once, anywhere in the file, in one call of the core.

        Args:
            sequence_ids: Sequence numbers, integers [n]; negative ones count from the end.

        Returns:
            The tokens of all of them, [tokens] of `dtype`, and their offsets, int64 [n + 1]:
            sequence i is tokens[offsets[i]:offsets[i + 1]].
        """
        ids = whole_numbers("sequence_ids", sequence_ids)
        data, pointers, lengths = self._bytes, self.sequence_pointers, self.sequence_lengths
        try:
            if data is not None:
                flat, offsets = _native.copy_sequences(
                    data, pointers, lengths, ids, self.dtype.itemsize
                )
                return flat.view(self.dtype), offsets
            counts = lengths[ids].astype(np.int64)
            flat = self.reader.gather(pointers[ids], counts * self.dtype.itemsize)
        except DataError as error:
            raise DataError(f"{self.prefix}.bin/.idx: {error}") from None
        except ValueError as error:
            raise layout.index_damage(self.prefix, f"{error} (of those to be read)") from None
        return flat.view(self.dtype), np.concatenate(([0], np.cumsum(counts)))

    def document(self, number: SupportsIndex) -> NDArray[Any]:
        """A document's tokens, all its sequences one after the other: [length] of `dtype`."""
        place = self._number("document", number, self.num_documents)
        first, last = self.check_documents(place, place + 1)
        return self.read(np.arange(first, last))[0] if last != first + 1 else self[first]

    def _number(self, kind: str, index: SupportsIndex, count: int) -> int:
        number = operator.index(index)
        if not -count <= number < count:
            raise IndexError(f"there is no {kind} {number}; {self.prefix} has 0 to {count - 1}")
        return number % count

    def _read(self, number: int, start: int, count: int) -> NDArray[Any]:
        byte_offset = self.sequence_pointers.item(number) + start * self.dtype.itemsize
        num_bytes = count * self.dtype.itemsize
        if count < 0 or not 0 <= byte_offset <= self.reader.size - num_bytes:
            problem = (
                f"sequence {number} has {count} tokens from byte {byte_offset} on, outside the "
                f".bin of {self.reader.size} bytes"
            )
            raise layout.index_damage(self.prefix, problem)
        return self.reader.read(byte_offset, num_bytes).view(self.dtype)

    # ---- identity ----

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the content, wherever the files are (32 hex digits).

        It covers both sizes, the header and evenly spaced 4 KiB blocks of both files, so that it
        costs the same for any size. It tells datasets apart, but does not prove them undamaged.
        """
        return _fingerprint(
            (len(self._index), partial(_native.copy_pieces, self._index)),
            (self.reader.size, self.reader.gather),
        )

    @cached_property
    def lengths_checksum(self) -> str:
        """A checksum (XXH3-64, 16 hex digits) of all sequence lengths, which decide the order."""
        lengths = self.sequence_lengths
        return checksum(copied(lengths[at : at + _PIECE]) for at in range(0, len(self), _PIECE))

    def info(self) -> Info | None:
        """The sidecar's checksums and provenance; None if there is no sidecar."""
        return read_info(self.prefix)

    @cached_property
    def origins_file(self) -> OriginsFile | None:
        """The sidecar of origins; None if there is none."""
        if not has_origins(self.prefix):  # else the fingerprint would cost reads for nothing
            return None
        return OriginsFile(self.prefix, self.fingerprint, self.num_documents)

    def origin(self, document: SupportsIndex) -> Origin | None:
        """Where a document came from; None if the pair has no sidecar of origins.

        Raises:
            DataError: If the sidecar is damaged, or of other token files.
            ConfigError: If there is a sidecar, and pyarrow is not installed.
        """
        number = self._number("document", document, self.num_documents)
        origins = self.origins(number, number + 1)
        if origins is None:
            return None
        sources, _, lines, byte_offsets, ids = origins
        return Origin(sources[0], int(lines[0]), int(byte_offsets[0]), ids[0])

    def origins(self, start: int = 0, stop: int | None = None) -> Origins | None:
        """Where documents [start, stop) came from; None if the pair has no sidecar of origins.

        Args:
            stop: End of the range; None: the number of documents.

        Raises:
            DataError, ConfigError: See `origin`.
        """
        first = whole("start", start)
        end = self.num_documents if stop is None else whole("stop", stop)
        if not 0 <= first <= end <= self.num_documents:
            raise ConfigError(
                f"documents are {first} to {end}; {self.prefix} has {self.num_documents}"
            )
        return None if self.origins_file is None else self.origins_file.read(first, end)

    def reopen_bin(self) -> BinaryIO | None:
        """The `.bin` as a file; None if it is not a file, or was replaced."""
        if self._options["bin_reader"] is not None:
            return None
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            file = stack.enter_context(open(bin_path(self.prefix), "rb", buffering=0))
            if file_identity(file) == self._files[0]:
                stack.pop_all()
                return file
        return None

    # ---- closing, and other processes ----

    def close(self) -> None:
        """Lets go of the files. Arrays that were taken from the dataset stay valid.

        Without it, that happens when the dataset and its last array are gone.
        """
        names = "prefix", "dtype", "header", "_files", "_absolute_prefix"
        kept = {name: vars(self)[name] for name in names}
        # Only closed datasets have a `__getattr__`: it makes each access slower by a third.
        members = {"__getattr__": _raise_closed, "close": lambda self: None}
        self.__class__ = type(type(self).__name__, (type(self),), members)
        self.__dict__ = kept

    def __enter__(self) -> IndexedDataset:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_same, (type(self), self.prefix, self._options, self.identity())

    def identity(self) -> tuple[Any, ...]:
        """Plain values that tell these data from others, for `check_identity`."""
        return self._files, self.fingerprint, self.lengths_checksum

    def check_identity(self, pickled: tuple[Any, ...]) -> None:
        """Raises DataError if these data have another identity than a pickled dataset."""
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


def fingerprint_of(idx: BinaryIO, bin_: BinaryIO) -> str:
    """The fingerprint of a pair (see `IndexedDataset.fingerprint`), by its open files."""
    index, data = (
        (os.fstat(file.fileno()).st_size, partial(gather_in_turn, partial(_read_bytes, file)))
        for file in (idx, bin_)
    )
    return _fingerprint(index, data)


def _read_bytes(file: BinaryIO, byte_offset: int, num_bytes: int) -> NDArray[np.uint8]:
    return np.frombuffer(os.pread(file.fileno(), num_bytes, byte_offset), np.uint8)


def _fingerprint(*files: tuple[int, Callable[..., NDArray[np.uint8]]]) -> str:
    """The fingerprint of files, each given by its size and a function that gathers pieces."""
    digest = blake2b()
    for size, gather in files:
        digest.update(size.to_bytes(8, "little"))
        last = max(size - _BLOCK, 0)
        pieces = range(_FINGERPRINT_BLOCKS)
        starts = np.array([last * piece // (_FINGERPRINT_BLOCKS - 1) for piece in pieces])
        digest.update(gather(starts, np.minimum(_BLOCK, size - starts)).data)
    return digest.hexdigest()


def _cut(flat: NDArray[Any], offsets: NDArray[np.int64]) -> list[NDArray[Any]]:
    return [flat[start:stop] for start, stop in itertools.pairwise(offsets.tolist())]


def _open_same(
    kind: type[IndexedDataset], prefix: str, options: dict[str, Any], pickled: tuple[Any, ...]
) -> IndexedDataset:
    """Opens a pickled dataset, if its data are still there."""
    dataset = kind(prefix, **options)
    dataset.check_identity(pickled)
    return dataset


def _raise_closed(dataset: IndexedDataset, name: str) -> Any:
    raise ConfigError(f"{dataset.prefix} is closed; open it again")
