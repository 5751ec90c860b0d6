"""Token files: Megatron-LM's indexed datasets, read, written and published.

An indexed dataset lies at one *path prefix*: `PREFIX.bin` holds the tokens of all sequences, one
after the other; `PREFIX.idx` says how long each sequence is, where it starts and which sequences
make a document. `layout` describes the bytes of the index, `publish` how a pair appears whole or
not at all, `info` the sidecar with checksums, `writer` the files while they are built, and
`index_writer` the index of a `.bin` that is there already. The public names are in `reader`,
`raw`, `builder` and `checking`; where the bytes are is a matter of `millrace.storage`.
"""

import importlib
from typing import Any

from millrace.dtypes import optimal_dtype
from millrace.storage import BinReader, gather_in_turn
from millrace.store.builder import IndexedDatasetBuilder, finalize_together
from millrace.store.checking import Report, verify
from millrace.store.info import Checksums, Info
from millrace.store.layout import DTYPES
from millrace.store.raw import RawTokens
from millrace.store.reader import IndexedDataset

# Public names of rooms above this one, which were here once: loaded when they are asked for.
_ABOVE = {
    "Origin": "provenance",
    "Origins": "provenance",
    "OriginsWriter": "provenance",
    "ShardsMetadata": "shards",
    "read_metadata": "shards",
    "shard_prefix": "shards",
    "verify_shards": "shards",
}


def __getattr__(name: str) -> Any:
    if name in _ABOVE:
        return getattr(importlib.import_module(f"millrace.{_ABOVE[name]}"), name)
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
