"""Samples from a bucket, against obstore's own threads; and the start of a run of remote sources.

Ours is a `Loader` over datasets at `s3://` prefixes; theirs reads as many samples at random places
by `obstore.get_range` in 64 threads.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from bucket_work import servers, serving, write
from common import HIGHER, LOWER, Report, Row, alternate, finish, number_of_runs, parser

from millrace import BlendedDataset, GPTDataset, IndexedDataset, Loader, SequentialSampler
from millrace.storage.objects import ObjectFile, ObjectStorage

BAR = 0.9
REQUESTS, LENGTH = 64, 4096
NOTES = [
    "Samples of 4,096 uint16 tokens in a random order, in documents of 1 M tokens, 64 requests in "
    "flight. SeaweedFS: 32 objects of 62 MB behind a proxy that adds 200 ms. The range server has "
    "one object of 512 MB and adds 20 ms. Both are processes of their own on the same cores.",
    "Megatron-LM 0.16.1: its `IndexedDataset` with `ObjectStorageConfig`, at the default block of "
    "256 MiB and at that of one sample, at random places of the same object.",
    "The start: 64 sources with indices of 1 MB on the range server, 20 ms; the manifest of the "
    "run is there, and nothing else on the node. Timed from after the imports to the first of "
    "ten batches of 32, the slowest of all processes: those that have theirs read ahead. The other "
    "side is the bar.",
]

START = """
import json, sys, time
from millrace import DatasetConfig, Loader, SequentialSampler, build_datasets
from millrace.storage.objects import ObjectStorage
import obstore.store
rank, ranks, prefixes, cache, folder = json.loads(sys.argv[1])
sys.stdin.readline()
start = time.perf_counter()
config = DatasetConfig(
    sequence_length=20, add_extra_token=False, seed=1, num_samples=(320 * 64, 0, 0), split="1,0,0",
    cache=cache, blend=(prefixes, [1.0] * len(prefixes)), storage=ObjectStorage(folder=folder),
)
dataset = build_datasets(config).train
sampler = SequentialSampler(
    320 * ranks, micro_batch_size=32, data_parallel_rank=rank, data_parallel_size=ranks
)
with Loader(dataset, sampler=sampler) as loader:
    next(loader)
    print(time.perf_counter() - start, flush=True)
    sys.stdin.read()  # until all have theirs: it reads ahead
"""


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    runs, quick = number_of_runs(options), options.quick
    report = Report("Samples from a bucket", NOTES, runs, peer="obstore, or the bar")
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        for name, count, size, latency, num_samples in (
            ("SeaweedFS, 200 ms", 32, 62 << 20, 0.2, 1500),
            ("range server, 20 ms", 1, 512 << 20, 0.02, 4000),
        ):
            data = Path(folder) / name[:5]
            data.mkdir()
            for number in range(count):
                write(data / f"d{number}", [1 << 20] * ((size >> 21) // (8 if quick else 1)))
            with serving(data, latency, is_store=count > 1) as address:
                shape = count, num_samples // (8 if quick else 1)
                report.rows += throughput(name, address, shape, runs)
        data = Path(folder) / "start"
        data.mkdir()
        for number in range(64):
            write(data / f"d{number}", [20] * (5_000 if quick else 50_000 + number), number)
        with serving(data, 0.02, is_store=False) as address:
            for processes, bar in ((1, 1.0), (64, 3.0)):
                seconds, counts = zip(
                    *(start(address, Path(folder), processes) for _ in range(runs)), strict=True
                )
                name = f"first batch of 64 sources, {processes} processes"
                row = Row.compare(name, seconds, [bar] * runs, "s", better=LOWER, bar=1)
                label = f"{name}: requests for metadata"
                requests = Row.compare(label, counts, [65] * runs, "requests", better=LOWER, bar=1)
                report.rows += [row, requests]
    finish(report, options)


def throughput(name: str, address: str, shape: tuple[int, int], runs: int) -> list[Row]:
    count, num_samples = shape
    storage = ObjectStorage(servers.options_for(address), requests=REQUESTS)
    store = servers.store_of(address)
    datasets = [
        GPTDataset(
            IndexedDataset(f"s3://train/d{number}", storage=storage),
            sequence_length=LENGTH,
            seed=number,
        )
        for number in range(count)
    ]
    dataset: Any = datasets[0]
    if count > 1:
        dataset = BlendedDataset(datasets, [1.0] * count, size=num_samples * 2)
    size = datasets[0].dataset.reader.size
    random, pool = np.random.default_rng(0), ThreadPoolExecutor(REQUESTS)

    def ours() -> float:
        begin, seen = time.perf_counter(), 0
        with Loader(dataset, micro_batch_size=16, threads=4) as loader:
            while seen < num_samples:
                seen += len(next(loader)["tokens"])
        return seen / (time.perf_counter() - begin)

    def theirs() -> float:
        from obstore import get_range

        places = random.integers(0, [[count], [size - 2 * LENGTH - 2]], (2, num_samples)).T.tolist()
        begin = time.perf_counter()
        read = lambda at: get_range(store, f"d{at[0]}.bin", start=at[1], length=2 * LENGTH + 2)  # noqa: E731
        for body in pool.map(read, places):
            np.frombuffer(body, np.uint16)
        return num_samples / (time.perf_counter() - begin)

    ours()  # opens datasets and connections
    theirs()
    sides = alternate(runs, {"ours": ours, "obstore": theirs})
    rows = [Row.compare(name, sides["ours"], sides["obstore"], "samples/s", better=HIGHER, bar=BAR)]
    if count > 1:
        return rows
    for chunk, num_reads in ((256 << 20, 3), (2 * (LENGTH + 1), 60)):
        rates = [megatron(address, chunk, num_reads) for _ in range(runs)]
        label = f"{name}: Megatron-LM's reader, blocks of {chunk:,} bytes"
        rows.append(Row.compare(label, sides["ours"], rates, "samples/s", better=HIGHER, bar=20))
    rows.append(extra_bytes(name, dataset, num_samples))
    return rows


def extra_bytes(name: str, dataset: Any, num_samples: int) -> Row:
    """Bytes fetched over bytes used, of all samples of a dataset's first ones."""
    num_fetched, fetch = 0, ObjectFile.fetch

    def counted(self: ObjectFile, begin: float, start: int, stop: int, *check: Any) -> Any:
        nonlocal num_fetched
        num_fetched += stop - start
        return fetch(self, begin, start, stop, *check)

    numbers = np.arange(min(num_samples, len(dataset)))
    sampler = SequentialSampler(len(numbers), micro_batch_size=16, drop_last=False)
    counting = mock.patch.object(ObjectFile, "fetch", counted)
    with counting, Loader(dataset, sampler=sampler, threads=4) as loader:
        num_used = sum(len(batch["tokens"]) for batch in loader) * 2 * (LENGTH + 1)
    label = f"{name}: bytes fetched, beside those used"
    return Row.compare(label, [num_fetched], [num_used], "bytes", better=LOWER, bar=1 / 1.05)


def megatron(address: str, chunk: int, num_reads: int) -> float:
    """Samples a second of Megatron-LM's own reader, one after the other."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset as Peer
    from megatron.core.datasets.object_storage_utils import ObjectStorageConfig

    environment = {**servers.environment_for(address), "AWS_ENDPOINT_URL": address}
    environment["AWS_DEFAULT_REGION"] = "us-east-1"
    with mock.patch.dict(os.environ, environment), tempfile.TemporaryDirectory() as folder:
        config = ObjectStorageConfig(path_to_idx_cache=folder, bin_chunk_nbytes=chunk)
        peer = Peer("s3://train/d0", mmap=False, object_storage_config=config)
        random = np.random.default_rng(0)
        begin = time.perf_counter()
        for _ in range(num_reads):
            offset = int(random.integers(0, peer.sequence_lengths[0] - LENGTH))
            peer.get(int(random.integers(0, len(peer))), offset, LENGTH)
        return num_reads / (time.perf_counter() - begin)


def start(address: str, folder: Path, processes: int) -> tuple[float, float]:
    """Seconds from the imports to the first batch of the slowest process, with a cold node, and the
    requests for lists and indices that the server has counted."""
    prefixes, cache = [f"s3://train/d{number}" for number in range(64)], folder / "cache"
    environment = {**os.environ, **servers.environment_for(address), "PYTHONWARNINGS": "ignore"}
    times, metadata = [0.0], 0.0
    for count in (1, processes) if not cache.exists() else (processes,):  # the first one plans
        node = tempfile.mkdtemp(dir=folder)
        with contextlib.ExitStack() as stack:
            ranks = []
            for rank in range(count):
                task = json.dumps([rank, count, prefixes, str(cache), node])
                pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
                command = [sys.executable, "-c", START, task]
                ranks.append(
                    stack.enter_context(subprocess.Popen(command, env=environment, **pipes))
                )
            time.sleep(2 + 0.5 * count)  # their imports
            before = num_metadata(address)
            for process in ranks:
                process.stdin.write("\n")
                process.stdin.flush()
            times = [float(process.stdout.readline()) for process in ranks]
            metadata = num_metadata(address) - before
            for process in ranks:
                process.communicate()
    return max(times), metadata


def num_metadata(address: str) -> int:
    with urllib.request.urlopen(f"{address}/counts") as reply:
        counts = json.load(reply)
    return int(counts["lists"] + counts["indices"])


if __name__ == "__main__":
    main()
