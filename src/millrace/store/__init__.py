"""Token files: Megatron-LM's indexed datasets, read, written and published.

An indexed dataset lies at one *path prefix*: `PREFIX.bin` holds the tokens of all sequences, in
order; `PREFIX.idx` says how long each sequence is, where it starts and which sequences make a
document (see `layout`). `publish` says how a pair appears whole or not at all.
"""

import importlib
from typing import Any

from millrace.storage import BinReader, gather_in_turn
from millrace.store.builder import IndexedDatasetBuilder, finalize_together
from millrace.store.checking import Report, verify
from millrace.store.info import Checksums, Info
from millrace.store.layout import DTYPES, optimal_dtype
from millrace.store.opened import RawTokens
from millrace.store.reader import IndexedDataset

_ABOVE = {  # public names that once were here: loaded from rooms above at their use
    **dict.fromkeys(("Origin", "Origins", "OriginsWriter"), "millrace.provenance"),
    **dict.fromkeys(("ShardsMetadata", "read_metadata", "shard_prefix"), "millrace.shards"),
    "verify_shards": "millrace.shards",
}


def __getattr__(name: str) -> Any:
    if name in _ABOVE:
        return getattr(importlib.import_module(_ABOVE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "DTYPES",
    "BinReader",
    "Checksums",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "Info",
    "Origin",
    "Origins",
    "OriginsWriter",
    "RawTokens",
    "Report",
    "ShardsMetadata",
    "finalize_together",
    "gather_in_turn",
    "optimal_dtype",
    "read_metadata",
    "shard_prefix",
    "verify",
    "verify_shards",
]
