"""Names around object stores, for code that imports them: paths there cannot be read yet."""

# ruff: noqa: N803 - the arguments of `S3Client` are named by boto3

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

S3_PREFIX = "s3://"
MSC_PREFIX = "msc://"


@dataclass
class ObjectStorageConfig:
    """Megatron-LM's options for token files in an object store.

    Attributes:
        path_to_idx_cache: Folder for copies of the indices.
        bin_chunk_nbytes: Bytes of a `.bin` to request at a time.
    """

    path_to_idx_cache: str
    bin_chunk_nbytes: int = 256 * 1024 * 1024


S3Config = ObjectStorageConfig


class S3Client(Protocol):
    """The methods of boto3's client that Megatron-LM calls."""

    def download_file(self, Bucket: str, Key: str, Filename: str) -> None: ...
    def upload_file(self, Filename: str, Bucket: str, Key: str) -> None: ...
    def head_object(self, Bucket: str, Key: str) -> dict[str, Any]: ...
    def get_object(self, Bucket: str, Key: str, Range: str) -> dict[str, Any]: ...
    def close(self) -> None: ...


def is_object_storage_path(path: str | None) -> bool:
    """Whether a path starts as one of an object store."""
    return path is not None and path.startswith((S3_PREFIX, MSC_PREFIX))
