"""How the bytes of a `.bin` are read, under Megatron-LM's names."""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from millrace import store
from millrace.megatron.errors import DataAssertionError
from millrace.storage import BUCKET_SCHEMES, LOCAL, Access
from millrace.storage.objects import ObjectStorage

BUCKETS = tuple(f"{scheme}://" for scheme in BUCKET_SCHEMES)


@dataclass
class ObjectStorageConfig:
    """How objects in buckets are read.

    Attributes:
        path_to_idx_cache: Folder of this node for copies of indices.
        bin_chunk_nbytes: Ignored: a sequence is one request for its bytes.
    """

    path_to_idx_cache: str
    bin_chunk_nbytes: int = 256 * 1024 * 1024


S3Config = ObjectStorageConfig


@functools.cache
def storage_in(folder: str) -> ObjectStorage:
    """One storage for all pairs: the limit of requests is one for a process."""
    return ObjectStorage(folder=folder)


class _BinReader:
    """The tokens of a token file: `IndexedDataset.bin_reader`; `reader` reads it, if it is open."""

    _ACCESS: ClassVar[Access] = "file"

    def __init__(self, bin_path: str, reader: store.BinReader | None = None) -> None:
        self._bin_path = bin_path
        self.reader = LOCAL.open(bin_path, self._ACCESS) if reader is None else reader

    def read(self, dtype: Any, count: int, offset: int) -> NDArray[Any]:
        """Numbers from a byte on; DataAssertionError beyond the file."""
        num_bytes = int(count) * np.dtype(dtype).itemsize
        if num_bytes < 0 or not 0 <= offset <= self.reader.size - num_bytes:
            raise DataAssertionError(
                f"{self._bin_path} has {self.reader.size} bytes; {num_bytes} from byte {offset} on "
                "were requested. The index is damaged: write the pair again"
            )
        return self.reader.read(int(offset), num_bytes).view(dtype)


class _S3BinReader(_BinReader):
    """A `.bin` in a bucket, read by ranges."""

    def __init__(
        self,
        bin_path: str,
        object_storage_config: ObjectStorageConfig,
        reader: store.BinReader | None = None,
    ) -> None:
        storage = storage_in(object_storage_config.path_to_idx_cache)
        super().__init__(bin_path, reader or storage.open(bin_path, "file"))


class _MultiStorageClientBinReader(_S3BinReader):
    """The same for `msc://PROFILE/KEY`."""


class _MMapBinReader(_BinReader):
    """A mapped `.bin`."""

    _ACCESS = "mmap"


class _FileBinReader(_BinReader):
    """A `.bin` for positioned reads; one that fails is an error, without retries."""

    def __init__(
        self,
        bin_path: str,
        num_max_retries: int = 3,
        sleep_duration_start: int = 10,
        reader: store.BinReader | None = None,
    ) -> None:
        super().__init__(bin_path, reader)
