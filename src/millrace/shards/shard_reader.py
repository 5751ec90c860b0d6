"""The shards of a folder as one token file, whose sequences all have one length."""

import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.checks import check_path
from millrace.errors import ConfigError, DataError
from millrace.files import blake2b, checksum
from millrace.ragged import Numbers, equal_runs, starts_of
from millrace.shards.metadata import bin_paths, read_metadata, shard_prefix, shard_problem
from millrace.storage import (
    Access,
    BinReader,
    Bytes,
    Storage,
    StoredFile,
    bytes_in_memory,
    storage_of,
)

_FINGERPRINT_SEQUENCES = 256
_FINGERPRINT_BYTES = 4096  # of each of them, at most


class Shards:
    """The sequences of a folder of shards, by number. No index is read.

    An open folder keeps showing the files that it opened. It can be forked, shared by threads, and
    pickled; a pickle can only be opened where the same data are in the folder.

    Args:
        folder: Folder of the shards, with `metadata.json`.
        access: How the shards are read: "mmap", or "file" (positioned reads).
        dtype: Dtype of the tokens, for metadata that do not say it; None: uint32.
        storage: Where the folder is; None: in the file system.

    Attributes:
        prefix: The folder, str.
        metadata: The metadata of the folder.
        dtype: Dtype of the tokens as they are read: int32 for uint32.
        reader: The bytes of all shards, one after the other.

    Raises:
        DataError: Metadata or shards that are missing, damaged or do not agree.
        ConfigError: A folder of documents, or a dtype that token files cannot have.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        access: Access = "mmap",
        dtype: str | None = None,
        storage: Storage | None = None,
    ) -> None:
        self.prefix = check_path("folder", folder)
        storage = storage_of(self.prefix, storage)
        self.metadata = read_metadata(self.prefix, dtype=dtype, storage=storage)
        if self.metadata.has_documents:
            raise ConfigError(
                f"{self.prefix} holds {self.metadata.num_items} documents of different lengths "
                f"(shuffle_type {self.metadata.shuffle_type}). Open its shards as indexed "
                f"datasets: IndexedDataset({shard_prefix(self.prefix, 0)!r}), ..., for example as "
                "a blend of GPT datasets"
            )
        self._options: dict[str, Any] = {"access": access, "dtype": dtype, "storage": storage}
        self.dtype = self.metadata.token_dtype
        readers: list[StoredFile] = []
        for number, path in enumerate(bin_paths(self.prefix, self.metadata)):
            try:
                readers.append(storage.open(path, access))
            except FileNotFoundError:
                raise DataError(f"{path} was removed while it was opened: restore it") from None
            size = self.metadata.shard_sizes[number] * self.metadata.sequence_bytes
            if readers[-1].size != size:  # replaced since the metadata were compared
                raise DataError(
                    shard_problem(self.prefix, self.metadata, number, storage)
                    or f"{path} was replaced while it was opened: open the folder again"
                )
        self._identities = [reader.identity for reader in readers]
        self.reader = ShardReader(readers)
        self._tokens = [bytes_in_memory(reader) for reader in readers]

    def __len__(self) -> int:
        """The number of sequences."""
        return self.metadata.num_items

    @property
    def sequence_length(self) -> int:
        return self.metadata.seq_len or 0

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """The lengths of all sequences in tokens: int32 [sequences], one number in memory."""
        return np.broadcast_to(np.int32(self.sequence_length), len(self))

    def __getitem__(self, number: int) -> NDArray[Any]:
        """A sequence's tokens, [sequence_length] of `dtype`."""
        if not 0 <= number < len(self):
            raise IndexError(
                f"there is no sequence {number}; {self.prefix} has 0 to {len(self) - 1}"
            )
        size = self.metadata.sequence_bytes
        return self._gather(np.array([number * size]), np.array([size])).view(self.dtype)

    def _gather(self, byte_offsets: Numbers, byte_counts: Numbers) -> Bytes:
        try:
            return self.reader.gather(byte_offsets, byte_counts)
        except DataError as error:  # of a map, which does not know its file
            raise DataError(f"{self.prefix}: {error}") from None

    @property
    def is_mapped(self) -> bool:
        """Whether all tokens are in memory; else each read copies."""
        return all(tokens is not None for tokens in self._tokens)

    def token_source(self) -> _native.TokenSource:
        nothing = np.empty(0, self.dtype)
        return _native.sharded_source(
            [nothing if tokens is None else tokens.view(self.dtype) for tokens in self._tokens],
            self.metadata.shard_sizes,
            self.sequence_length,
        )

    def documents_of(self, sequences: Numbers) -> Numbers:
        """The documents that sequences belong to: each sequence is a document."""
        return sequences

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the sequences, however many shards they are in (32 hex digits).

        It covers their number, length and dtype, and the first 4 KiB of 256 of them.
        """
        size, last = self.metadata.sequence_bytes, len(self) - 1
        digest = blake2b(f"{len(self)} {self.sequence_length} {self.dtype}".encode())
        count = _FINGERPRINT_SEQUENCES if last >= 0 else 0
        numbers = np.array([last * n // (count - 1) for n in range(count)], np.int64)
        pieces = numbers * size, np.full(count, min(size, _FINGERPRINT_BYTES))
        self.reader.prefetch(*pieces)
        digest.update(self._gather(*pieces).data)
        return digest.hexdigest()

    @property
    def lengths_checksum(self) -> str:
        """A checksum (16 hex digits) of the sequence lengths: their number, and the length."""
        return checksum([np.array([len(self), self.sequence_length], np.int64).data])

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_same, (self.prefix, self._options, self._identity(), self.fingerprint)

    def _identity(self) -> tuple[Any, ...]:
        """Plain values that are equal if the files are the same and are read in the same way."""
        return self._identities, self.metadata.shard_sizes, self.sequence_length, str(self.dtype)

    def __repr__(self) -> str:
        return (
            f"Shards({self.prefix!r}: {self.metadata.num_shards:,} shards, {len(self):,} sequences "
            f"of {self.sequence_length:,} tokens, {self.metadata.dtype})"
        )


def _open_same(
    folder: str, options: dict[str, Any], identity: tuple[Any, ...], fingerprint: str
) -> Shards:
    """Opens pickled shards, if their data are still there."""
    shards = Shards(folder, **options)
    # The same files, or (on another machine, or after a copy) the same content.
    if shards._identity() != identity and shards.fingerprint != fingerprint:
        raise DataError(
            f"{folder} holds other data than the shards that were pickled: they were replaced "
            "since. Open the folder anew, and pickle that dataset"
        )
    return shards


class ShardReader:
    """The bytes of several files, one after the other, as a `BinReader`."""

    is_local = True

    def __init__(self, readers: Sequence[BinReader]) -> None:
        self._readers = readers
        bounds = starts_of(reader.size for reader in readers)
        self._starts, self.size = bounds[:-1], int(bounds[-1])

    def read(self, byte_offset: int, num_bytes: int) -> Bytes:
        return self.gather(np.array([byte_offset]), np.array([num_bytes]))

    def gather(self, byte_offsets: Numbers, byte_counts: Numbers) -> Bytes:
        """The pieces, none of which may lie in two files."""
        runs = self._runs(byte_offsets, byte_counts)
        parts = [reader.gather(*pieces) for reader, *pieces in runs]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint8), *parts])

    def prefetch(self, byte_offsets: Numbers, byte_counts: Numbers) -> None:
        for reader, *pieces in self._runs(byte_offsets, byte_counts):
            if hasattr(reader, "prefetch"):
                reader.prefetch(*pieces)

    def _runs(
        self, byte_offsets: Numbers, byte_counts: Numbers
    ) -> Iterator[tuple[Any, Numbers, Numbers]]:
        """Runs of pieces that lie in one file: its reader, their offsets in it, and their sizes."""
        shards = np.searchsorted(self._starts[1:], byte_offsets, side="right")
        for run in equal_runs(shards):
            shard = int(shards[run.start])
            yield self._readers[shard], byte_offsets[run] - self._starts[shard], byte_counts[run]
