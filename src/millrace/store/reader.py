"""Reading an indexed dataset."""

import contextlib
import importlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, SupportsIndex, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from millrace import _native
from millrace.checks import check_int, check_ints, check_path
from millrace.deferred import cached_property
from millrace.errors import ConfigError, DataError
from millrace.files import blake2b, checksum
from millrace.names import BIN, IDX
from millrace.ragged import Numbers
from millrace.storage import (
    Access,
    BinReader,
    Storage,
    bytes_in_memory,
    copied,
    identity_of,
    sample_of,
    storage_of,
)
from millrace.store import layout
from millrace.store.info import Info, read_info
from millrace.store.opened import OpenTokens
from millrace.store.publish import open_pair

_CHUNK = 1024  # sequences that iteration reads at a time
_PIECE = 1 << 19  # entries that are copied at a time: they stay in a core's cache


class IndexedDataset(OpenTokens):
    """The sequences of a `.bin`/`.idx` pair.

    Args:
        prefix: Path of the pair, without `.bin` or `.idx`.
        access: How the `.bin` is read: "mmap" (reads are views) or "file" (positioned reads, for
            file systems where mapping hurts).
        bin_reader: Source of the bytes of the `.bin`, if not a file of the storage.
        storage: Where the files are; None: in the file system.

    Attributes:
        dtype: Dtype of the tokens.
        sequence_lengths: int32 [sequences], in tokens.
        sequence_pointers: int64 [sequences], byte offsets into the `.bin`.
        document_indices: int64 [documents + 1]: document j has the sequences
            document_indices[j] up to document_indices[j + 1].
        sequence_modes: int8 [sequences] in a multimodal file, else None.
        reader: The bytes of the `.bin`, a `BinReader`.

    The arrays are read-only views of the mapped index. Opening takes the same time for any size: it
    checks the header, the sizes, and the first and last entries. An open dataset keeps showing its
    files when another pair is published at the prefix; with access="file" and more than 64 such
    datasets, reading may be a DataError then. It can be forked, shared by threads, and pickled; a
    pickle can only be opened where the same data are at the prefix.

    If another program cuts a mapped file short, touching a view of the lost part is a bus error,
    which ends the process; `read` and the `Loader` raise DataError instead.

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
        storage: Storage | None = None,
    ) -> None:
        self.prefix = check_path("prefix", prefix)
        self._options = {"access": access, "bin_reader": bin_reader, "storage": storage}
        bin_access = access if bin_reader is None else None
        data, index = open_pair(self.prefix, bin_access, index_access="mmap", storage=self.storage)
        self._index, self.files = index, (data and data.identity, index.identity)
        self.header = layout.read_header(index, self.prefix + IDX)
        self.dtype = self.header.dtype
        reader = data or bin_reader
        assert reader is not None
        self.reader = reader
        mapped = bytes_in_memory(index)
        content = index.read(0, index.size) if mapped is None else mapped
        lengths, pointers, documents, modes = (
            np.frombuffer(content, *column) for column in self.header.columns()
        )
        self.sequence_lengths: NDArray[np.int32] = lengths
        self.sequence_pointers: Numbers = pointers
        self.document_indices: Numbers = documents
        self.sequence_modes: NDArray[np.int8] | None = modes if self.header.has_modes else None
        self._check_ends()
        self._bytes = bytes_in_memory(reader)  # of the `.bin`

    def __len__(self) -> int:
        """The number of sequences."""
        return self.header.num_sequences

    @property
    def storage(self) -> Storage:
        return storage_of(self.prefix, self._options["storage"])

    @property
    def num_documents(self) -> int:
        return self.header.num_document_entries - 1

    @property
    def num_bytes(self) -> int:
        """The size of both files."""
        return self.reader.size + self._index.size

    @property
    def document_lengths(self) -> Numbers:
        """Tokens in each document: int64 [documents]."""
        self.check_documents(0, self.num_documents)
        ends = np.concatenate(([0], np.cumsum(self.sequence_lengths, dtype=np.int64)))
        return np.diff(ends[self.document_indices])

    def document_range(self, start: SupportsIndex, stop: SupportsIndex) -> tuple[int, int]:
        """Two numbers as ints; a ConfigError if they are not a range of documents."""
        first, end = check_int("start", start), check_int("stop", stop)
        if not 0 <= first <= end <= self.num_documents:
            raise ConfigError(
                f"documents are {first} to {end}; {self.prefix} has {self.num_documents}"
            )
        return first, end

    def _check_ends(self) -> None:
        """Checks the first and last entries, and that the last sequence ends with the `.bin`."""
        count, end = len(self), 0
        first, last = (_entry(self.document_indices, place) for place in (0, -1))
        if (first, last) != (0, count):
            raise self._damage(
                f"the document indices go from {first} to {last}, not from 0 to {count}, the "
                "number of sequences"
            )
        if count > 0:
            first, last = (_entry(self.sequence_pointers, place) for place in (0, -1))
            length = _entry(self.sequence_lengths, -1)
            end = last + length * self.dtype.itemsize
            if first != 0:
                raise self._damage(f"the first sequence starts at byte {first}, not at 0")
            if length < 0:
                raise self._damage(f"the last sequence has the negative length {length}")
        if (size := self.reader.size) != end:
            raise DataError(
                f"{self.prefix}.bin has {size} bytes, but its index ends at byte {end}. It is "
                f"{'truncated or empty' if size < end else 'too long'}. {layout.WRITE_AGAIN}"
            )

    def check_documents(self, start: int, stop: int) -> tuple[int, int]:
        """Checks documents [start, stop); returns their sequences: (first, end)."""
        entries = self.document_indices[start : stop + 1]
        bad = _native.first_bad_document(entries, len(self))
        if bad < len(entries):
            least = _entry(entries, bad - 1) if bad else 0
            raise self._damage(
                f"document entry {start + bad} is {_entry(entries, bad)}; it should be at least "
                f"{least} and at most {len(self)}"
            )
        return _entry(entries, 0), _entry(entries, -1)

    def check_sequences(self, start: int, stop: int) -> tuple[int, int]:
        """Checks that sequences [start, stop) follow each other; returns their bytes."""
        first, expected = (
            _entry(self.sequence_pointers, number) if number < len(self) else self.reader.size
            for number in (start, stop)
        )
        lengths, pointers = self.sequence_lengths[start:stop], self.sequence_pointers[start:stop]
        bad, end = _native.first_bad_sequence(lengths, pointers, self.dtype.itemsize, first)
        if bad < len(lengths):
            raise self._damage(
                f"sequence {start + bad} has the length {_entry(lengths, bad)} and starts at byte "
                f"{_entry(pointers, bad)}; it should start at byte {end}, with no negative length"
            )
        if end != expected or not 0 <= first <= end <= self.reader.size:
            raise self._damage(
                f"sequences {start} to {stop - 1} lie at bytes {first} to {end}; they should end "
                f"at byte {expected} of {self.reader.size}"
            )
        return first, end

    def check(self) -> None:
        """Checks the whole index; a DataError if its entries do not agree."""
        self.check_documents(0, self.num_documents)
        self.check_sequences(0, len(self))

    def _damage(self, problem: str) -> DataError:
        return DataError(
            f"{self.prefix}.idx: {problem}. The index is damaged: write the pair again"
        )

    @property
    def is_mapped(self) -> bool:
        """Whether all tokens are in memory, as `tokens`; else each read copies."""
        return self._bytes is not None

    @property
    def tokens(self) -> NDArray[Any]:
        """The whole `.bin`, [tokens] of `dtype`: a view.

        Raises:
            ConfigError: If the `.bin` is not mapped.
        """
        if self._bytes is None:
            raise ConfigError(f"{self.prefix}.bin is not mapped; open it with access='mmap'")
        return self._bytes[: self.num_tokens * self.dtype.itemsize].view(self.dtype)

    def token_source(self) -> _native.TokenSource:
        return _native.TokenSource(
            np.empty(0, self.dtype) if self._bytes is None else self.tokens,
            self.sequence_pointers,
            self.sequence_lengths,
            self.reader.size,
        )

    def documents_of(self, sequences: Numbers) -> Numbers:
        """The document of each sequence: int64 [sequences]."""
        return _native.find_documents(self.document_indices, sequences)

    @overload
    def __getitem__(self, index: int | np.integer[Any]) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, index: slice | NDArray[Any] | list[int]) -> list[NDArray[Any]]: ...
    def __getitem__(self, index: Any) -> NDArray[Any] | list[NDArray[Any]]:
        """A sequence's tokens, [length] of `dtype`; a list of them for a slice, list or array."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            most = len(self) + 1  # a larger step does the same, and may not fit int64
            return self._slice(np.arange(start, stop, min(max(step, -most), most)))
        if isinstance(index, (np.ndarray, list)) and np.ndim(index) == 1:
            flat, offsets = self.read(index)
            return _cut(flat, offsets[:-1], offsets[1:])
        number = self._number("sequence", index, len(self))
        return self._read(number, 0, self.sequence_lengths.item(number))

    def _slice(self, numbers: Numbers) -> list[NDArray[Any]]:
        if self._bytes is None:
            return self[numbers]
        lengths = self.sequence_lengths[numbers]
        first, rest = np.divmod(self.sequence_pointers[numbers], self.dtype.itemsize)
        is_bad = (lengths < 0) | (rest != 0) | (first < 0) | (first > self.num_tokens - lengths)
        if np.any(is_bad):  # one raises, or lies off the grid of tokens
            return [self[number] for number in numbers.tolist()]
        return _cut(self.tokens, first, np.add(first, lengths))

    def __iter__(self) -> Iterator[NDArray[Any]]:
        for start in range(0, len(self), _CHUNK):
            yield from self[start : start + _CHUNK]

    def get(self, index: SupportsIndex, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Tokens [offset, offset + length) of a sequence; without a length, all from `offset` on.

        A ConfigError if the span lies outside the sequence.
        """
        number = self._number("sequence", index, len(self))
        available = self.sequence_lengths.item(number)
        start = check_int("offset", offset)
        count = available - start if length is None else check_int("length", length)
        if start < 0 or count < 0 or start + count > available:
            raise ConfigError(
                f"tokens [{start}, {start + count}) are not in sequence {number}, which has "
                f"{available} tokens"
            )
        return self._read(number, start, count)

    def read(self, sequence_ids: ArrayLike) -> tuple[NDArray[Any], Numbers]:
        """Many sequences, anywhere in the file, in one call of the core.

        Args:
            sequence_ids: Sequence numbers, integers [n]; negative ones count from the end.

        Returns:
            The tokens of all of them, [tokens] of `dtype`, and their offsets, int64 [n + 1]:
            sequence i is tokens[offsets[i]:offsets[i + 1]].
        """
        ids = check_ints("sequence_ids", sequence_ids)
        pointers, lengths = self.sequence_pointers, self.sequence_lengths
        try:
            if self._bytes is not None:
                flat, offsets = _native.copy_sequences(
                    self._bytes, pointers, lengths, ids, self.dtype.itemsize
                )
                return flat.view(self.dtype), offsets
            counts = lengths[ids].astype(np.int64)
            flat = self.reader.gather(pointers[ids], counts * self.dtype.itemsize)
        except DataError as error:
            raise DataError(f"{self.prefix}.bin/.idx: {error}") from None
        except ValueError as error:
            raise self._damage(f"{error} (of those to be read)") from None
        return flat.view(self.dtype), np.concatenate(([0], np.cumsum(counts)))

    def document(self, number: SupportsIndex) -> NDArray[Any]:
        """The tokens of all sequences of a document: [length] of `dtype`."""
        place = self._number("document", number, self.num_documents)
        first, last = self.check_documents(place, place + 1)
        return self.read(np.arange(first, last))[0] if last != first + 1 else self[first]

    def _read(self, number: int, start: int, count: int) -> NDArray[Any]:
        byte_offset = self.sequence_pointers.item(number) + start * self.dtype.itemsize
        num_bytes = count * self.dtype.itemsize
        if count < 0 or not 0 <= byte_offset <= self.reader.size - num_bytes:
            raise self._damage(
                f"sequence {number} has {count} tokens from byte {byte_offset} on, outside the "
                f".bin of {self.reader.size} bytes"
            )
        if self._bytes is not None:
            return self._bytes[byte_offset : byte_offset + num_bytes].view(self.dtype)
        return self.reader.read(byte_offset, num_bytes).view(self.dtype)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the content, wherever the files are (32 hex digits).

        It covers both sizes, the header and 16 blocks of 4 KiB of each file: enough to tell
        datasets apart, not to prove them undamaged.
        """
        digest = blake2b()
        for file in (self._index, self.reader):
            digest.update(file.size.to_bytes(8, "little"))
            digest.update(sample_of(file).data)
        return digest.hexdigest()

    @cached_property
    def lengths_checksum(self) -> str:
        """A checksum (XXH3-64, 16 hex digits) of all sequence lengths, which decide the order."""
        return checksum(copied_pieces(self.sequence_lengths, 0, len(self)))

    def info(self) -> Info | None:
        """The sidecar's checksums and provenance; None without a sidecar."""
        return read_info(self.prefix, self.storage)

    @cached_property
    def origins_file(self) -> Any:
        """The `provenance.OriginsFile` of the pair; None without a sidecar of origins."""
        # That room lies above this one.
        return importlib.import_module("millrace.provenance").origins_file(self)

    def origin(self, document: SupportsIndex) -> Any:
        """Where a document came from, an `Origin`; None without a sidecar of origins.

        Raises:
            DataError: If the sidecar is damaged, or of other token files.
            ConfigError: If there is a sidecar, and pyarrow is not installed.
        """
        number = self._number("document", document, self.num_documents)
        return None if self.origins_file is None else self.origins_file.origin(number)

    def origins(self, start: int = 0, stop: int | None = None) -> Any:
        """Where documents [start, stop) came from, as `Origins`; without a stop, all from `start`.

        None without a sidecar; the errors are those of `origin`.
        """
        span = self.document_range(start, self.num_documents if stop is None else stop)
        return None if self.origins_file is None else self.origins_file.read(*span)

    def reopen_bin(self) -> BinaryIO | None:
        """The `.bin` as a file of the system; None if it is not one, or was replaced."""
        with contextlib.suppress(OSError):
            file = open(self.prefix + BIN, "rb", buffering=0)  # noqa: SIM115
            if identity_of(os.fstat(file.fileno())) == self.files[0]:
                return file
            file.close()
        return None

    def close(self) -> None:
        """Lets go of the files; arrays that were taken from the dataset stay valid.

        Without it, that happens when the dataset and its last array are gone.
        """
        object.__setattr__(self, "__dict__", {"prefix": self.prefix, "header": self.header})

    if not TYPE_CHECKING:  # a type checker would take it for an attribute of any name

        def __getattr__(self, name: str) -> Any:
            if "header" in vars(self) and "_index" not in vars(self):
                raise ConfigError(f"{self.prefix} is closed; open it again")
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def __enter__(self) -> "IndexedDataset":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _cut(flat: NDArray[Any], starts: Numbers, ends: Numbers) -> list[NDArray[Any]]:
    return [flat[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


def copied_pieces(column: NDArray[Any], start: int, stop: int) -> Iterator[NDArray[Any]]:
    """Entries [start, stop) of a mapped column, copied in pieces."""
    for first in range(start, stop, _PIECE):
        yield copied(column[first : min(first + _PIECE, stop)])


def _entry(column: NDArray[Any], place: int) -> int:
    """An entry of a mapped column, without bus errors."""
    return int(copied(column[place:][:1])[0])
