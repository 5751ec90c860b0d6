"""The usual script for a global shuffle, which `bench_shuffle.py` compares with ours.

    python benchmarks/shuffle_script.py INPUT_DIR OUTPUT_DIR SEQ_LEN NUM_SHARDS NUM_WORKERS SEED

Threads over files. Each reads a whole file in order, and copies every sequence to its permuted
place in a memory-mapped shard, under the lock of that shard. The places are looked up for a file
at once, and not for each sequence, in the script's favour.
"""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

DTYPE = np.dtype(np.uint32)


def main() -> None:
    input_dir, output_dir = map(Path, sys.argv[1:3])
    seq_len, num_shards, num_workers, seed = map(int, sys.argv[3:])
    files = [path for domain in sorted(input_dir.iterdir()) for path in sorted(domain.iterdir())]
    counts = [path.stat().st_size // DTYPE.itemsize // seq_len for path in files]
    first_numbers = np.cumsum([0, *counts])
    total = int(first_numbers[-1])
    permutation = np.random.default_rng(seed).permutation(total)
    sizes = [total // num_shards + (i < total % num_shards) for i in range(num_shards)]
    starts = np.cumsum([0, *sizes])
    output_dir.mkdir()
    shards = [
        np.memmap(output_dir / f"shard_{i:04d}.bin", DTYPE, "w+", shape=(size, seq_len))
        for i, size in enumerate(sizes)
    ]
    locks = [threading.Lock() for _ in shards]

    def process(number: int) -> None:
        tokens = np.fromfile(files[number], DTYPE)[: counts[number] * seq_len]
        places = permutation[first_numbers[number] : first_numbers[number + 1]]
        numbers = np.searchsorted(starts, places, side="right") - 1
        rows = places - starts[numbers]
        sequences = tokens.reshape(-1, seq_len)
        for sequence, shard, row in zip(sequences, numbers.tolist(), rows.tolist(), strict=True):
            with locks[shard]:
                shards[shard][row] = sequence

    with ThreadPoolExecutor(num_workers) as pool:
        list(pool.map(process, range(len(files))))
    for shard in shards:
        shard.flush()
    metadata = {"version": 2, "seq_len": seq_len, "total_sequences": total, "shard_sizes": sizes}
    (output_dir / "metadata.json").write_text(json.dumps(metadata))


if __name__ == "__main__":
    main()
