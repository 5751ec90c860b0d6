"""Index a run ahead of time, then start it from what is there.

    python examples/index_and_train.py CACHE_FOLDER PREFIX...

The command line does the first half as `millrace index`.
"""

import sys

from millrace import DatasetConfig, Loader, build_datasets
from millrace.jobs import index
from millrace.jobs.index import format_result

cache, *prefixes = sys.argv[1:]
config = DatasetConfig(
    sequence_length=64,
    seed=1234,
    num_samples=(1000, None, None),
    blend_per_split=[(prefixes, None), None, None],
    cache=cache,
)
print(format_result(index(config)))

train = build_datasets(config).train  # opens no token file before the first sample
batch = next(Loader(train, micro_batch_size=4))
print({name: array.shape for name, array in batch.items()})
