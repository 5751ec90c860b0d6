"""The shards of a folder: as one token file, whose sequences all have one length, and `verify`.

Is a folder of shards whole and unchanged? The metadata are compared with the sizes of the shards,
each index file with what it must hold, and every byte with the checksums, if there are any. Files
that do not belong to the folder are named.
"""

import os
import re
from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.checks import check_path
from millrace.deferred import cached_property
from millrace.errors import ConfigError, DataError
from millrace.files import blake2b, checksum, sum_of
from millrace.names import SHUFFLE_RESULT
from millrace.ragged import Numbers
from millrace.shards.metadata import (
    JOURNAL,
    METADATA,
    ShardsMetadata,
    check_shard,
    metadata_problem,
    output_files,
    parse_metadata,
    shard_prefix,
)
from millrace.storage import (
    LOCAL,
    Access,
    Bytes,
    SequentialStream,
    Storage,
    StoredFile,
    copied,
    exists,
    storage_of,
)
from millrace.store.checking import Checks, Report, make_pool
from millrace.store.layout import WRITE_AGAIN
from millrace.store.opened import JoinedFiles, OpenTokens
from millrace.store.reader import IndexedDataset

_FINGERPRINT_SEQUENCES = 256
_FINGERPRINT_BYTES = 4096  # of each of them, at most
_SHARD_FILE = re.compile(r"shard_\d+\.(bin|idx)")


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
        self.storage = storage = storage_of(self.prefix, storage)
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
        place: Any = storage
        if hasattr(place, "listed"):  # by one request, not one for each shard
            storage = place.pinned(place.listed([shard_prefix(self.prefix, 0)]).identities)
        readers: list[StoredFile] = []

        def size_of(path: str) -> int:
            readers.append(storage.open(path, access))
            return readers[-1].size

        for number in range(self.metadata.num_shards):
            check_shard(self.prefix, self.metadata, number, size_of)
        for reader, following in zip_longest(readers, readers[1:], fillvalue=False):
            if hasattr(reader, "following"):
                reader.following = following
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

    def __getitem__(self, index: SupportsIndex) -> NDArray[Any]:
        """A sequence's tokens, [sequence_length] of `dtype`."""
        number, size = self._number("sequence", index, len(self)), self.metadata.sequence_bytes
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


# ---- verify ----


def verify_shards(
    folder: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    threads: int | None = None,
    on_bytes: Callable[[int], Any] | None = None,
) -> Report:
    """Checks the output folder of a global shuffle.

    Args:
        folder: Folder of the shards.
        dtype: Dtype of the tokens, for metadata that do not say it; None: uint32.
        threads: Number of threads, which read and hash one file each; None: one for each core.
        on_bytes: Called now and then with the number of bytes read since the last call, from any
            thread.

    Returns:
        The report; damage is reported, not raised.

    Raises:
        ConfigError: Less than one thread, or a dtype that token files cannot have.
    """
    folder = check_path("folder", folder)
    with make_pool(threads) as pool:
        checks = Checks(folder, pool, on_bytes)
        with checks.errors_of():
            metadata = parse_metadata(folder, dtype)
            checks.report.has_checksums = bool(metadata.checksums)
            checks.add(metadata_problem(folder, metadata))
            checks.map(partial(_check_shard, folder, metadata), range(metadata.num_shards))
            checks.map(partial(_check_sum, folder), metadata.checksums.items())
            _check_strays(folder, metadata, checks.report)
    return checks.report


def _check_shard(folder: str, metadata: ShardsMetadata, checks: Checks, number: int) -> None:
    """Checks the size of a shard, and its index file against what it must hold."""
    prefix, size = shard_prefix(folder, number), metadata.shard_sizes[number]
    path, storage = f"{prefix}.idx", storage_of(folder)
    with checks.errors_of(prefix):
        check_shard(folder, metadata, number, lambda path: storage.stat(path).size)
        if not exists(storage, path):
            if not metadata.is_of_another_tool:
                checks.add(f"{path} is missing: restore it, or shuffle again")
        else:
            dataset = IndexedDataset(prefix, access="file")
            dataset.check()
            found, expected = (dataset.num_documents, dataset.dtype), (size, metadata.token_dtype)
            lengths = copied(dataset.sequence_lengths)
            is_fixed = not metadata.has_documents
            if found != expected or (is_fixed and (lengths != metadata.seq_len).any()):
                each = f", each of {metadata.seq_len} tokens" if is_fixed else ""
                checks.add(
                    f"{path} has {found[0]} documents of {found[1]}; by {METADATA} it should have "
                    f"{expected[0]} of {expected[1]}{each}. {WRITE_AGAIN}"
                )


def _check_sum(folder: str, checks: Checks, file: tuple[str, str]) -> None:
    """Compares the checksum of a file, given as name and checksum."""
    name, expected = file
    path = os.path.join(folder, name)
    if os.path.basename(name) != name:
        checks.add(f"{METADATA} has the checksum of {name!r}, which is not a name of a file")
        return
    with checks.errors_of(path):
        try:
            storage = storage_of(path)
            stream = None if storage is LOCAL else SequentialStream(storage.open(path, "file"))
            _, digest = sum_of(path, lambda piece: checks.count(len(piece)), stream)
        except FileNotFoundError:
            if not _SHARD_FILE.fullmatch(name):  # else `_check_shard` has named it
                checks.add(f"{path} is missing, although {METADATA} has its checksum: restore it")
            return
        if digest != expected:
            checks.add(
                f"{path} is damaged: its checksum is {digest}; when it was written it was "
                f"{expected}. Restore it, or shuffle again"
            )


def _check_strays(folder: str, metadata: ShardsMetadata, report: Report) -> None:
    """Names files that do not belong to the folder; another shuffle's shards do harm."""
    own = output_files("", metadata.num_shards)
    paths = storage_of(folder).list(os.path.join(folder, ""))
    names = {os.path.basename(path) for path in paths}
    for name in sorted(names - {SHUFFLE_RESULT, *own, *metadata.checksums}):
        path = os.path.join(folder, name)
        if _SHARD_FILE.fullmatch(name):
            report.problems.append(
                f"{path} is not one of the {metadata.num_shards} shards of this folder: another "
                "shuffle has left it. Remove it"
            )
        elif name.startswith(JOURNAL):
            report.notices.append(
                f"{path} is the journal of a shuffle that has not ended: run its command again"
            )
        else:
            report.notices.append(f"{path} does not belong to the shuffle")
