"""The shuffle job: items of many domains are permuted globally and written as shards."""
