"""`millrace shuffle` and the loader of its output, by the API."""

import tempfile
from pathlib import Path

import numpy as np

from millrace import Loader, ShardedDataset
from millrace.jobs import shuffle


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for domain, first in (("code", 0), ("web", 1000)):
            Path(folder, "data", domain).mkdir(parents=True)
            np.arange(first, first + 800, dtype=np.int32).tofile(f"{folder}/data/{domain}/a.bin")

        result = shuffle(
            f"{folder}/data", f"{folder}/out", seq_len=16, num_shards=4, dtype="int32", seed=1
        )
        print(result.num_items, "sequences:", result.domain_stats)

        dataset = ShardedDataset(f"{folder}/out")
        loader = Loader(dataset, micro_batch_size=8, data_parallel_rank=0, data_parallel_size=1)
        print("first tokens of a batch:", next(loader)["tokens"][:, 0].tolist())


if __name__ == "__main__":
    main()
