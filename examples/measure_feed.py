"""What `millrace bench` does, in a few lines: how fast this machine feeds a run."""

import tempfile

import numpy as np

from millrace import DatasetConfig, IndexedDatasetBuilder
from millrace.jobs import bench
from millrace.jobs.benchmark_report import format_result

with tempfile.TemporaryDirectory() as folder:
    prefix = f"{folder}/web_text_document"
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for length in (700, 1300, 2048):
            builder.add_document(np.arange(length))

    config = DatasetConfig(
        sequence_length=128,
        seed=1234,
        num_samples=(10_000, 0, 0),
        blend=([prefix], None),
        split="1,0,0",
    )
    result = bench(config, micro_batch_size=4, seconds=0.1, step_time=0.001)
    print(format_result(result))
