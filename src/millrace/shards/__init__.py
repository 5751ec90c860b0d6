"""The folder that a global shuffle has written: its metadata, its shards as one file, `verify`."""

from millrace.shards.metadata import (
    ShardsMetadata,
    is_shards_folder,
    read_metadata,
    shard_prefix,
    write_metadata,
)
from millrace.shards.shard_checks import verify_shards
from millrace.shards.shard_reader import Shards

__all__ = [
    "Shards",
    "ShardsMetadata",
    "is_shards_folder",
    "read_metadata",
    "shard_prefix",
    "verify_shards",
    "write_metadata",
]
