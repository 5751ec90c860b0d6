"""The shards of a folder as one token file, whose sequences all have one length."""

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.checks import check_path
from millrace.deferred import cached_property
from millrace.errors import ConfigError, DataError
from millrace.files import blake2b, checksum
from millrace.ragged import Numbers
from millrace.shards.metadata import check_sizes, parse_metadata, shard_prefix
from millrace.storage import Access, Bytes, Storage, StoredFile, storage_of
from millrace.store.opened import JoinedFiles, OpenTokens

_FINGERPRINT_SEQUENCES = 256
_FINGERPRINT_BYTES = 4096  # of each of them, at most


class Shards(OpenTokens):
    """The sequences of a folder of shards, by number. No index is read.

    An open folder keeps showing the files that it opened if others take their places. It can be
    forked, shared by threads, and pickled; a pickle opens only where the folder has the same data.

    Args:
        folder: Folder of the shards, with `metadata.json`.
        access: How the shards are read: "mmap", or "file" (positioned reads).
        dtype: Dtype of the tokens, for metadata that do not say it; None: uint32.
        storage: Where the folder is; None: in the file system.

    Attributes:
        prefix: The folder, str.
        metadata: The metadata of the folder.
        dtype: Dtype of the tokens as read: int32 for uint32.
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
        self.metadata = parse_metadata(self.prefix, dtype, storage)
        if self.metadata.has_documents:
            raise ConfigError(
                f"{self.prefix} holds {self.metadata.num_items} documents of different lengths "
                f"(shuffle_type {self.metadata.shuffle_type}). Open its shards as indexed "
                f"datasets: IndexedDataset({shard_prefix(self.prefix, 0)!r}), ..., for example as "
                "a blend of GPT datasets"
            )
        self._options = {"access": access, "dtype": dtype, "storage": storage}
        self.dtype = self.metadata.token_dtype
        readers: list[StoredFile] = []

        def size_of(path: str) -> int:
            readers.append(storage.open(path, access))
            return readers[-1].size

        check_sizes(self.prefix, self.metadata, size_of)
        self.reader: JoinedFiles = JoinedFiles(readers)
        self.is_mapped = self.reader.is_mapped
        identities = [reader.identity for reader in readers]
        self.files = (identities, self.metadata.shard_sizes, self.sequence_length, str(self.dtype))

    def __len__(self) -> int:
        """The number of sequences."""
        return self.metadata.num_items

    @property
    def sequence_length(self) -> int:
        return self.metadata.seq_len or 0

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """The lengths in tokens: int32 [sequences], one number in memory."""
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

    def token_source(self) -> _native.TokenSource:
        return self.reader.source(self.dtype, self.metadata.shard_sizes, self.sequence_length)

    def documents_of(self, sequences: Numbers) -> Numbers:
        """The documents of sequences: each sequence is one."""
        return sequences

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the content, wherever the files are (32 hex digits).

        It covers the number of sequences, their length, their dtype and the first 4 KiB of 256 of
        them, evenly spaced; the number of shards does not matter.
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
        """A checksum (16 hex digits) of the number of sequences, and their length."""
        return checksum([np.array([len(self), self.sequence_length], np.int64).data])
