"""Long work over many files: bounded memory, every core, the same output for any number of them."""

from millrace.jobs.arguments import config_from, read_arguments
from millrace.jobs.cache import CacheEntry, list_cache, prune_cache
from millrace.jobs.index import IndexResult, index
from millrace.jobs.reshape import convert, merge, split
from millrace.jobs.tokenize import TokenizeResult, tokenize

__all__ = [
    "CacheEntry",
    "IndexResult",
    "TokenizeResult",
    "config_from",
    "convert",
    "index",
    "list_cache",
    "merge",
    "prune_cache",
    "read_arguments",
    "split",
    "tokenize",
]
