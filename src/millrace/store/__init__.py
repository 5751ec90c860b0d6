"""Token files: Megatron-LM's indexed datasets, read, written and published.

An indexed dataset lies at one *path prefix*: `PREFIX.bin` holds the tokens of all sequences, one
after the other; `PREFIX.idx` says how long each sequence is, where it starts and which sequences
make a document. `layout` describes the bytes of the index, `publish` how a pair appears whole or
not at all, `bytes` where the tokens are read from, `info` the sidecar with checksums, `origins` the
one that says where documents came from, `writer` the files while they are built, and `index_writer`
the index of a `.bin` that is there already. The public names are in `reader`, `builder`, `checking`
and `origins`. A folder of *shards*, which a global shuffle has written, is described by its
metadata (`shards`), read as one (`shard_files`) and verified (`shard_checking`).
"""

from millrace.dtypes import optimal_dtype
from millrace.store.builder import IndexedDatasetBuilder, finalize_together
from millrace.store.bytes import BinReader, gather_in_turn
from millrace.store.checking import Report, verify
from millrace.store.info import Checksums, Info
from millrace.store.layout import DTYPES
from millrace.store.origins import Origin, Origins, write_dolma
from millrace.store.reader import IndexedDataset
from millrace.store.shard_checking import verify_shards
from millrace.store.shards import ShardsMetadata, read_metadata, shard_prefix

__all__ = [
    "DTYPES",
    "BinReader",
    "Checksums",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "Info",
    "Origin",
    "Origins",
    "Report",
    "ShardsMetadata",
    "finalize_together",
    "gather_in_turn",
    "optimal_dtype",
    "read_metadata",
    "shard_prefix",
    "verify",
    "verify_shards",
    "write_dolma",
]
