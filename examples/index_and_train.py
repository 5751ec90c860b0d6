"""Index a run ahead of time (`millrace index`), start it from the cache, list the cache."""

import tempfile

import numpy as np

from millrace import DatasetConfig, IndexedDatasetBuilder, Loader, build_datasets
from millrace.jobs import index, list_cache
from millrace.jobs.indexing import format_result

with tempfile.TemporaryDirectory() as folder:
    prefixes = [f"{folder}/web_text_document", f"{folder}/books_text_document"]
    for number, prefix in enumerate(prefixes):
        with IndexedDatasetBuilder(prefix, np.uint16) as builder:
            for length in range(1, 300 + 100 * number):
                builder.add_document(np.arange(length))

    config = DatasetConfig(
        sequence_length=64,
        seed=1234,
        num_samples=(1000, 50, None),
        blend_per_split=[(prefixes, [0.7, 0.3]), (prefixes, None), None],
        cache=f"{folder}/indices",
    )
    print(format_result(index(config)))

    train = build_datasets(config).train  # opens no token file before the first sample
    batch = next(Loader(train, micro_batch_size=4))
    print({name: array.shape for name, array in batch.items()})

    for entry in list_cache(f"{folder}/indices"):
        print(entry.kind, entry.name, entry.num_bytes)
