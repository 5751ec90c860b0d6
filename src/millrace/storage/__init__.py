"""Where bytes are: a file system, or anything that fits a protocol of three methods.

A `Storage` tells the identity of a file (`stat`), opens it (`open`) and lists names (`list`); an
open file is a `StoredFile`, which keeps showing what it was when it was opened. Token files, their
sidecars and the metadata of shards are read through it; `protocol` has the protocols, `local` the
file system. Files are written, locked and cached on a file system alone.
"""

from __future__ import annotations

import re

from millrace.errors import ConfigError
from millrace.storage.local import LOCAL, LocalStorage
from millrace.storage.protocol import (
    Access,
    BinReader,
    Bytes,
    Identity,
    Storage,
    StoredFile,
    gather_in_turn,
)

_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")


def storage_of(path: str, storage: Storage | None = None) -> Storage:
    """The storage that a path or path prefix leads to.

    Args:
        path: The path.
        storage: The user's choice; None: by the start of the path.

    Raises:
        ConfigError: A path such as `s3://bucket/name` without a storage.
    """
    if storage is not None:
        return storage
    check_local(path)
    return LOCAL


def check_local(path: str) -> None:
    """Raises ConfigError for a path that has the scheme of another storage."""
    if _SCHEME.match(path):
        scheme = path.partition("://")[0]
        raise ConfigError(
            f"{path} is in a storage of the kind {scheme}://, which millrace has no reader for: "
            "copy it to a file system, or read it with IndexedDataset(prefix, storage=...) and "
            "your own storage"
        )


__all__ = [
    "LOCAL",
    "Access",
    "BinReader",
    "Bytes",
    "Identity",
    "LocalStorage",
    "Storage",
    "StoredFile",
    "check_local",
    "gather_in_turn",
    "storage_of",
]
