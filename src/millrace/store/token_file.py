"""Token files by their records."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.deferred import Deferred
from millrace.errors import DataError
from millrace.names import BIN, IDX
from millrace.storage import LOCAL, Access, Identity, Storage, storage_of
from millrace.store.info import has_mask
from millrace.store.reader import IndexedDataset


@dataclass(frozen=True, kw_only=True)
class TokenFileRecord:
    """What a run notes of a token file.

    Attributes:
        sizes, times: Bytes, and modification times in nanoseconds, of the `.bin` and the `.idx`.
        content: Fingerprint (see `IndexedDataset.fingerprint`).
        lengths: Checksum of all sequence lengths, which decide the indices.
        has_mask: Whether the sidecar names ranges of tokens that are not trained on.
        versions: ETags of objects in a bucket; None: files.
    """

    prefix: str
    sizes: tuple[int, int]
    times: tuple[int, int]
    content: str
    lengths: str
    num_sequences: int
    num_documents: int
    num_tokens: int
    has_mask: bool = False
    versions: tuple[str, str] | None = None

    @property
    def identities(self) -> tuple[Identity, Identity]:
        """Of the `.bin` and the `.idx`."""
        data, index = zip(self.sizes, self.times, self.versions or (None, None), strict=True)
        return Identity(*data), Identity(*index)

    def change(self, storage: Storage | None = None) -> str | None:
        """What is not as the record says, by sizes, times and versions, else content."""
        place = storage_of(self.prefix, storage)
        with contextlib.suppress(FileNotFoundError):  # missing, or published halfway
            present = place.stat(self.prefix + BIN), place.stat(self.prefix + IDX)
            if _without_inodes(present, place) == self.identities:
                return None
        try:
            record = TokenFile.open(self.prefix, storage=storage).record
        except DataError as error:
            return f"{self.prefix} is gone or damaged: {error}"
        if replace(record, times=self.times) == self:  # a new version of an object is a change
            return None
        return f"{self.prefix} is not what it was: other tokens or documents are there now"


class TokenFile:
    """A token file of a run, opened at its first use, once for all datasets of the run.

    Args:
        record: What is known of the file.
        access: How to read the `.bin`: "mmap" or "file".
        storage: Where it is; None: the prefix says it.
    """

    def __init__(
        self, record: TokenFileRecord, access: Access = "mmap", storage: Storage | None = None
    ) -> None:
        self.record, self.prefix = record, record.prefix
        self.fingerprint, self.lengths_checksum = record.content, record.lengths
        self._access: Access = access
        self.storage = storage
        self.close()

    @classmethod
    def open(
        cls, prefix: str, access: Access = "mmap", storage: Storage | None = None
    ) -> "TokenFile":
        dataset = IndexedDataset(prefix, access=access, storage=storage)
        data, index = _without_inodes(dataset.files, dataset.storage)
        record = TokenFileRecord(
            prefix=prefix,
            sizes=(data.size, index.size),
            times=(data.time, index.time),
            versions=None if data.version is None else (data.version, index.version),
            content=dataset.fingerprint,
            lengths=dataset.lengths_checksum,
            num_sequences=len(dataset),
            num_documents=dataset.num_documents,
            num_tokens=dataset.num_tokens,
            has_mask=has_mask(prefix, storage),
        )
        file = cls(record, access, getattr(storage, "base", storage))  # without the listing
        if file.storage is storage:  # a listing has opened it without the mirror
            file._dataset = Deferred.of(dataset)
        return file

    @property
    def is_remote(self) -> bool:
        return storage_of(self.prefix, self.storage) is not LOCAL

    @property
    def dataset(self) -> IndexedDataset:
        """The open file; a DataError if it is not what the record says."""
        return self._dataset.value

    def fetch_index(self) -> None:
        """Brings the index of a pair in a bucket to this node, if it is not there."""
        if self.record.versions is not None:
            storage: Any = storage_of(self.prefix, self.storage)
            storage.fetch_index(self.prefix + IDX, self.record.identities[1])

    def close(self) -> None:
        """Closes the file until its next use."""
        self._dataset = Deferred(partial(_open_unchanged, self.record, self._access, self.storage))

    def sequence_lengths(self) -> NDArray[np.int32]:
        return self.dataset.sequence_lengths


def _open_unchanged(
    record: TokenFileRecord, access: Access, storage: Storage | None
) -> IndexedDataset:
    if record.versions is not None:  # each request names the version
        place: Any = storage_of(record.prefix, storage)
        paths = record.prefix + BIN, record.prefix + IDX
        storage = place.pinned(dict(zip(paths, record.identities, strict=True)))
    dataset = IndexedDataset(record.prefix, access=access, storage=storage)
    now = (len(dataset), dataset.num_documents, dataset.num_tokens)
    then = (record.num_sequences, record.num_documents, record.num_tokens)
    is_same = _without_inodes(dataset.files, dataset.storage) == record.identities
    has_content = is_same or dataset.fingerprint == record.content
    has_lengths = record.versions is not None or dataset.lengths_checksum == record.lengths
    if now != then or not has_content or not has_lengths:
        raise DataError(
            f"{record.prefix} has {now} sequences, documents and tokens; its indices were built "
            f"for {then}{', but for other ones' if now == then else ''}. Build them again with "
            "`millrace index`, and do not change data of a run"
        )
    return dataset


def listed_storages(prefixes: Sequence[str], storage: Storage | None) -> list[Storage | None]:
    """The storage of each pair; buckets know all of their files by one listing of each folder."""
    places: dict[str, Any] = {prefix: storage_of(prefix, storage) for prefix in prefixes}
    remote = [prefix for prefix, place in places.items() if hasattr(place, "listed")]
    listed = places[remote[0]].listed(remote) if remote else None  # they have one storage
    return [listed if hasattr(places[prefix], "listed") else storage for prefix in prefixes]


def _without_inodes(files: Sequence[Identity], storage: Storage) -> Sequence[Identity]:
    """Identities of a pair's files, but for the versions of local ones, which copies lose."""
    if getattr(storage, "has_renames", True):
        return tuple(one._replace(version=None) for one in files)
    return tuple(files)
