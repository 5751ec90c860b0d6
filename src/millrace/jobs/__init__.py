"""Long work over many files: bounded memory, every core, the same output for any number of them."""

from millrace.jobs.benchmark_report import BenchResult
from millrace.jobs.benchmarking import bench
from millrace.jobs.cache import CacheEntry, list_cache, prune_cache
from millrace.jobs.converting import convert
from millrace.jobs.indexing import IndexResult, index
from millrace.jobs.reshape import merge, split
from millrace.shuffling import ShuffleResult, shuffle
from millrace.tokenizing import TokenizeResult, tokenize

__all__ = [
    "BenchResult",
    "CacheEntry",
    "IndexResult",
    "ShuffleResult",
    "TokenizeResult",
    "bench",
    "convert",
    "index",
    "list_cache",
    "merge",
    "prune_cache",
    "shuffle",
    "split",
    "tokenize",
]
