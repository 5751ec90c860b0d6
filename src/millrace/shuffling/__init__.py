"""The global shuffle: the sequences or documents of many domains, permuted and written as shards.

1. `domains` finds the input. `shuffle_items` and `whole_documents` number its items and read them.
2. `permutations` gives each item its place, and checks the result.
3. `plans` are the ways to move the items.
4. `shard_work` is what a worker does; `shard_publication` gives the files their names.
"""

from millrace.shuffling.shuffle_job import ShuffleResult, shuffle

__all__ = ["ShuffleResult", "shuffle"]
