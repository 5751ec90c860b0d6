"""Token files: Megatron-LM's indexed datasets, read, written and published.

An indexed dataset lies at one *path prefix*: `PREFIX.bin` holds the tokens of all sequences, one
after the other; `PREFIX.idx` says how long each sequence is, where it starts and which sequences
make a document. `layout` describes the bytes of the index, `publish` how a pair appears whole or
not at all, `bytes` where the tokens are read from, `info` the sidecar with checksums, and `writer`
the files while they are built. The public names are in `reader`, `builder` and `checking`.
"""

from millrace.dtypes import optimal_dtype
from millrace.store.builder import IndexedDatasetBuilder, finalize_together
from millrace.store.bytes import BinReader, gather_in_turn
from millrace.store.checking import Report, verify
from millrace.store.info import Checksums, Info
from millrace.store.layout import DTYPES
from millrace.store.reader import IndexedDataset

__all__ = [
    "DTYPES",
    "BinReader",
    "Checksums",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "Info",
    "Report",
    "finalize_together",
    "gather_in_turn",
    "optimal_dtype",
    "verify",
]
