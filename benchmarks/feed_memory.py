"""Private memory of a training loop beyond the interpreter and torch, in MB, for `bench_feed.py`.

    feed_memory.py '["PREFIX", "CACHE", NUM_SAMPLES]' [build]

With `build`, it only builds the indices into the cache folder.
"""

import json
import sys

import torch
from common import file_field

import millrace
from millrace.torch import to_tensors

SEQUENCE_LENGTH, MICRO_BATCH_SIZE, NUM_BATCHES = 2048, 8, 2000


def main() -> None:
    prefix, cache, num_samples = json.loads(sys.argv[1])
    config = millrace.DatasetConfig(
        sequence_length=SEQUENCE_LENGTH,
        seed=1,
        num_samples=(num_samples, 0, 0),
        blend=([prefix], None),
        split="1,0,0",
        cache=cache,
    )
    if sys.argv[2:] == ["build"]:
        millrace.build_datasets(config)
        return
    train(lambda _: {"tokens": torch.zeros(MICRO_BATCH_SIZE, SEQUENCE_LENGTH, dtype=torch.int64)})
    before = private_megabytes()
    loader = millrace.Loader(
        millrace.build_datasets(config).train,
        micro_batch_size=MICRO_BATCH_SIZE,
        consumed_samples=num_samples // 2,
        transform=to_tensors,
    )
    train(lambda _: next(loader))
    print(private_megabytes() - before)


def train(batch_of) -> None:
    """A loop that reads every token of its batches, as a training step does."""
    total = torch.zeros((), dtype=torch.int64)
    for step in range(NUM_BATCHES):
        total += batch_of(step)["tokens"].sum()


def private_megabytes() -> float:
    return int(file_field("/proc/self/smaps_rollup", "Private_Dirty").split()[0]) / 1000


if __name__ == "__main__":
    main()
