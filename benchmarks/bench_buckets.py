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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from common import HIGHER, LOWER, Report, Row, alternate, finish, number_of_runs, parser

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.buckets import servers  # noqa: E402

from millrace import BlendedDataset, GPTDataset, IndexedDataset, IndexedDatasetBuilder, Loader  # noqa: E402
from millrace.storage.objects import ObjectStorage  # noqa: E402

BAR = 0.9
REQUESTS, LENGTH = 64, 4096
NOTES = [
    "Samples of 4,096 uint16 tokens in a random order, in documents of 1 M tokens, 64 requests in "
    "flight. SeaweedFS: 32 objects of 62 MB behind a proxy that adds 200 ms. The range server has "
    "one object of 512 MB and adds 20 ms. Both are processes of their own on the same cores.",
    "The start: 64 sources with indices of 1 MB in SeaweedFS, 20 ms; the manifest of the run is "
    "there, and nothing else on the node. Timed from after the imports to the first batch of 32, "
    "the slowest of all processes; the other side is the bar in seconds.",
]

SERVER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.buckets.servers import Proxy, RangeServer, serving
kind, place, latency = sys.argv[2], sys.argv[3], float(sys.argv[4])
if kind == "proxy":
    context = Proxy(place, latency).running()
else:
    objects = {f"/train/{path.name}": path.read_bytes() for path in Path(place).glob("d*")}
    context = serving(RangeServer.of(objects, latency=latency))
with context as address:
    print(address, flush=True)
    sys.stdin.read()
"""

START = """
import json, sys, time
from millrace import DatasetConfig, Loader, SequentialSampler, build_datasets
from millrace.storage.objects import ObjectStorage
import obstore.store
rank, ranks, prefixes, cache, folder = json.loads(sys.argv[1])
sys.stdin.readline()
start = time.perf_counter()
config = DatasetConfig(
    sequence_length=20, add_extra_token=False, seed=1, num_samples=(32 * 64, 0, 0), split="1,0,0",
    cache=cache, blend=(prefixes, [1.0] * len(prefixes)), storage=ObjectStorage(folder=folder),
)
dataset = build_datasets(config).train
sampler = SequentialSampler(
    32 * ranks, micro_batch_size=32, data_parallel_rank=rank, data_parallel_size=ranks
)
with Loader(dataset, sampler=sampler) as loader:
    next(loader)
print(time.perf_counter() - start)
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
                report.rows.append(throughput(name, address, shape, runs))
        data = Path(folder) / "start"
        data.mkdir()
        for number in range(64):
            write(data / f"d{number}", [20] * (5_000 if quick else 50_000 + number), number)
        with serving(data, 0.02, is_store=True) as address:
            for processes, bar in ((1, 1.0), (64, 3.0)):
                seconds = [start(address, Path(folder), processes) for _ in range(runs)]
                name = f"first batch of 64 sources, {processes} processes"
                row = Row.compare(name, seconds, [bar] * runs, "s", better=LOWER, bar=1)
                report.rows.append(row)
    finish(report, options)


def write(prefix: Path, lengths: list[int], seed: int = 0) -> None:
    random = np.random.default_rng(seed)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_documents(random.integers(0, 50_000, sum(lengths), np.uint16), lengths)


@contextlib.contextmanager
def serving(data: Path, latency: float, *, is_store: bool) -> Iterator[str]:
    """The address of a server of a folder's files, as the bucket `train`."""
    with contextlib.ExitStack() as stack:
        place = str(data)
        if is_store:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            (folder / "server").mkdir()
            place = stack.enter_context(servers.seaweedfs(folder / "server"))
            store = servers.store_of(place)
            for path in data.iterdir():
                store.put(path.name, path)
        kind = "proxy" if is_store else "ranges"
        command = [sys.executable, "-c", SERVER, str(ROOT), kind, place, str(latency)]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        server = stack.enter_context(subprocess.Popen(command, **pipes))
        yield server.stdout.readline().strip()
        server.stdin.close()


def throughput(name: str, address: str, shape: tuple[int, int], runs: int) -> Row:
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
    return Row.compare(name, sides["ours"], sides["obstore"], "samples/s", better=HIGHER, bar=BAR)


def start(address: str, folder: Path, processes: int) -> float:
    """Seconds from the imports to the first batch of the slowest process, with a cold node."""
    prefixes, cache = [f"s3://train/d{number}" for number in range(64)], folder / "cache"
    environment = {**os.environ, **servers.environment_for(address), "PYTHONWARNINGS": "ignore"}
    times = []
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
            for process in ranks:
                process.stdin.write("\n")
                process.stdin.flush()
            times = [float(process.communicate()[0]) for process in ranks]
    return max(times)


if __name__ == "__main__":
    main()
