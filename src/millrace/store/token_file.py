"""Token files by their records."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from millrace.deferred import Deferred
from millrace.errors import DataError
from millrace.names import BIN, IDX
from millrace.storage import Access, storage_of
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

    def has_same_times(self) -> bool:
        """Whether the files have the sizes and times of the record."""
        return _sizes_and_times(self.prefix) == (self.sizes, self.times)

    def change(self) -> str | None:
        """What is not as the record says, by sizes and times, else content."""
        if self.has_same_times():
            return None
        try:
            present = TokenFile.open(self.prefix).record
        except DataError as error:
            return f"{self.prefix} is gone or damaged: {error}"
        if replace(present, times=self.times) == self:
            return None
        return f"{self.prefix} is not what it was: other tokens or documents are there now"


class TokenFile:
    """A token file of a run, opened at its first use, once for all datasets of the run.

    Args:
        record: What is known of the file.
        access: How to read the `.bin`: "mmap" or "file".
    """

    def __init__(self, record: TokenFileRecord, access: Access = "mmap") -> None:
        self.record, self.prefix = record, record.prefix
        self.fingerprint, self.lengths_checksum = record.content, record.lengths
        self._access: Access = access
        self.close()

    @classmethod
    def open(cls, prefix: str, access: Access = "mmap") -> "TokenFile":
        # First: if the file is replaced before it is opened, the next comparison notices.
        _, times = _sizes_and_times(prefix)
        dataset = IndexedDataset(prefix, access=access)
        record = TokenFileRecord(
            prefix=prefix,
            sizes=(dataset.reader.size, dataset.num_bytes - dataset.reader.size),
            times=times,
            content=dataset.fingerprint,
            lengths=dataset.lengths_checksum,
            num_sequences=len(dataset),
            num_documents=dataset.num_documents,
            num_tokens=dataset.num_tokens,
            has_mask=has_mask(prefix),
        )
        file = cls(record, access)
        file._dataset = Deferred.of(dataset)
        return file

    @property
    def dataset(self) -> IndexedDataset:
        """The open file; a DataError if it is not what the record says."""
        return self._dataset.value

    def close(self) -> None:
        """Closes the file until its next use."""
        self._dataset = Deferred(partial(_open_unchanged, self.record, self._access))

    def sequence_lengths(self) -> NDArray[np.int32]:
        return self.dataset.sequence_lengths


def _open_unchanged(record: TokenFileRecord, access: Access) -> IndexedDataset:
    is_same = record.has_same_times()  # first: see `TokenFile.open`
    dataset = IndexedDataset(record.prefix, access=access)
    now = (len(dataset), dataset.num_documents, dataset.num_tokens)
    then = (record.num_sequences, record.num_documents, record.num_tokens)
    has_content = is_same or dataset.fingerprint == record.content
    if now != then or not has_content or dataset.lengths_checksum != record.lengths:
        raise DataError(
            f"{record.prefix} has {now} sequences, documents and tokens; its indices were built "
            f"for {then}{', but for other ones' if now == then else ''}. Build them again with "
            "`millrace index`, and do not change data of a run"
        )
    return dataset


def _sizes_and_times(prefix: str) -> tuple[tuple[int, int], tuple[int, int]]:
    storage = storage_of(prefix)
    try:
        data, index = storage.stat(prefix + BIN), storage.stat(prefix + IDX)
    except FileNotFoundError:
        return (0, 0), (0, 0)  # missing, or published halfway: opening it tells
    return (data.size, index.size), (data.time, index.time)
