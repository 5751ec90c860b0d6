"""The folder that a global shuffle has written: its metadata, its shards as one file, and `verify`.

`metadata` reads and writes `metadata.json`, `reader` reads shards of fixed-length sequences without
an index, and `checking` verifies a folder.
"""

from millrace.shards.checking import verify_shards
from millrace.shards.metadata import (
    ShardsMetadata,
    is_shards_folder,
    read_metadata,
    shard_prefix,
    write_metadata,
)
from millrace.shards.reader import Shards

__all__ = [
    "Shards",
    "ShardsMetadata",
    "is_shards_folder",
    "read_metadata",
    "shard_prefix",
    "verify_shards",
    "write_metadata",
]
