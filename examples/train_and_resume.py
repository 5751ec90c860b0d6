"""Train on a blend of two domains with two ranks, stop, and resume with one."""

import tempfile

import numpy as np

from millrace import (
    BlendedDataset,
    GPTDataset,
    IndexedDataset,
    IndexedDatasetBuilder,
    Loader,
    normalize,
    samples_per_dataset,
)

NUM_SAMPLES = 64


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        weights = normalize([3, 1])
        datasets = []
        for domain, (_, num_samples) in enumerate(samples_per_dataset(weights, NUM_SAMPLES)):
            prefix = f"{folder}/domain{domain}"
            with IndexedDatasetBuilder(prefix, np.uint16) as builder:
                builder.add_documents(np.full(10_000, domain + 1), [4_000, 1_000, 5_000])
            datasets.append(
                GPTDataset(
                    IndexedDataset(prefix), sequence_length=256, seed=1, num_samples=num_samples
                )
            )
        blend = BlendedDataset(datasets, weights, NUM_SAMPLES)

        ranks = [
            Loader(blend, micro_batch_size=4, data_parallel_rank=rank, data_parallel_size=2)
            for rank in range(2)
        ]
        for _ in range(3):
            batches = [next(rank) for rank in ranks]
        print("a batch of rank 0:", {name: array.shape for name, array in batches[0].items()})
        state = ranks[0].state_dict()

        resumed = Loader(blend, micro_batch_size=8)
        resumed.load_state_dict(state)
        print("resumed at sample", resumed.consumed_samples, "with one rank; steps left:", end=" ")
        print(sum(1 for _ in resumed))


if __name__ == "__main__":
    main()
