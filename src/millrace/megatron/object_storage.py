"""The names around object stores, for code that asks for them: no path there can be read yet."""

# ruff: noqa: N803 - the arguments of `S3Client` are named by boto3

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

S3_PREFIX = "s3://"
MSC_PREFIX = "msc://"


@dataclass
class ObjectStorageConfig:
    """How token files in an object store would be read.

    Attributes:
        path_to_idx_cache: the folder that their indices are copied to.
        bin_chunk_nbytes: bytes of a `.bin` to ask for at a time.
    """

    path_to_idx_cache: str
    bin_chunk_nbytes: int = 256 * 1024 * 1024


S3Config = ObjectStorageConfig


class S3Client(Protocol):
    """As much of boto3's client as Megatron-LM calls."""

    def download_file(self, Bucket: str, Key: str, Filename: str) -> None:
        """Copies an object to a file."""

    def upload_file(self, Filename: str, Bucket: str, Key: str) -> None:
        """Copies a file to an object."""

    def head_object(self, Bucket: str, Key: str) -> dict[str, Any]:
        """What is known of an object."""

    def get_object(self, Bucket: str, Key: str, Range: str) -> dict[str, Any]:
        """Some bytes of an object."""

    def close(self) -> None:
        """Ends the connection."""


def is_object_storage_path(path: str | None) -> bool:
    """Whether a path names an object in a store, by its start."""
    return path is not None and path.startswith((S3_PREFIX, MSC_PREFIX))
