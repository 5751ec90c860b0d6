"""The global shuffle: items of many domains, permuted as a whole, become shards."""
