"""Token files: Megatron-LM's indexed datasets, read, written and published.

An indexed dataset lies at one *path prefix*: `PREFIX.bin` holds the tokens of all sequences, in
order; `PREFIX.idx` says how long each sequence is, where it starts and which sequences make a
document (see `layout`). `publish` says how a pair appears whole or not at all.
"""

from millrace.storage import BinReader, gather_in_turn
from millrace.store.builder import IndexedDatasetBuilder, finalize_together
from millrace.store.checking import Report, verify
from millrace.store.info import Checksums, Info, PairChecksums
from millrace.store.layout import DTYPES, optimal_dtype
from millrace.store.opened import RawTokens
from millrace.store.reader import IndexedDataset

__all__ = [
    "DTYPES",
    "BinReader",
    "Checksums",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "Info",
    "PairChecksums",
    "RawTokens",
    "Report",
    "finalize_together",
    "gather_in_turn",
    "optimal_dtype",
    "verify",
]
