"""The folder that a global shuffle has written: its metadata, its shards as one file, `verify`."""

from millrace.shards.metadata import ShardsMetadata, read_metadata, shard_prefix
from millrace.shards.shard_reader import Shards, verify_shards

__all__ = ["Shards", "ShardsMetadata", "read_metadata", "shard_prefix", "verify_shards"]
