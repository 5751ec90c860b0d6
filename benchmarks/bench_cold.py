"""Cold storage: samples per second with look-ahead, against reading on demand.

Sequence length 2,048, micro batch 8, tokens and labels. Two kinds of storage: a file of 4 GB whose
pages are dropped from the page cache before each run, and a reader that takes 5 ms for each read.
"""

import gc
import itertools
import mmap
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import HIGHER, Report, Row, alternate, finish, number_of_runs, parser
from numpy.typing import NDArray

import millrace
from millrace.jobs.benchmarking import drop_from_page_cache
from millrace.storage import gather_in_turn

SEED = 1234
SEQUENCE_LENGTH, MICRO_BATCH_SIZE = 2048, 8
MAX_LENGTH = 1200  # of documents: uniform in [2, 1200), 600 on average
BLOCK = 16_000_000  # tokens that are written at a time
NUM_BLOCKS, QUICK_BLOCKS = 128, 2
SECONDS, QUICK_SECONDS = 3.0, 0.5
DELAY = 0.005  # seconds
THREADS, PREFETCH = 2, 32  # of the look-ahead on a disk
SLOW_THREADS, SLOW_PREFETCH = 64, 128  # and with the slow reader
BAR = 10
NAMES = ("tokens", "labels")
QUEUE_DEPTHS = (1, 8, 32)

NOTES = [
    "Sequence length 2,048, micro batch 8, documents of 600 tokens on average in random order, so "
    "that a sample is 4 or 5 reads of about 1.2 kB (uint16). Each run opens the data again, builds "
    "the indices, and draws batches of tokens and labels for 3 seconds from the first one on.",
    "Page cache dropped: a file of 4 GB, `posix_fadvise(DONTNEED)` before each run. 'read when "
    "touched' maps the file and copies each sequence of the same samples in turn, as np.memmap and "
    "megatron-core do: each waits for the disk, which brings in everything around it (the disk's "
    "read-ahead). 'on demand' is our loader with prefetch=0, which prefetches the pages of a whole "
    f"batch. With look-ahead: threads={THREADS}, prefetch={PREFETCH}.",
    "5 ms a read: a `BinReader` that sleeps for 5 ms at each read, as an object store answers. "
    "'on demand' is prefetch=0, one read after the other; with look-ahead: "
    f"threads={SLOW_THREADS}, prefetch={SLOW_PREFETCH}.",
    "The first batches of all sides were compared: equal.",
]


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    runs = number_of_runs(options)
    report = Report("Cold storage: samples per second", NOTES, runs, peer="on demand")
    seconds = QUICK_SECONDS if options.quick else SECONDS
    data = Path(__file__).parent / "data"  # not in /tmp, which may be in memory
    data.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="cold-", dir=data) as folder:
        prefix = str(Path(folder) / "text_document")
        write_documents(prefix, QUICK_BLOCKS if options.quick else NUM_BLOCKS)
        report.notes.append(disk_note(f"{prefix}.bin", seconds / 3))
        print(report.notes[-1])
        check_equal(prefix)
        report.rows += rows(prefix, seconds, runs)
    finish(report, options)


def write_documents(prefix: str, num_blocks: int) -> None:
    """Writes the same random tokens again and again, in documents of other lengths."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 50_000, BLOCK, dtype=np.uint16)
    with millrace.IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(num_blocks):
            lengths = generator.integers(2, MAX_LENGTH, BLOCK * 2 // MAX_LENGTH)
            lengths = lengths[: np.searchsorted(np.cumsum(lengths), BLOCK)]
            builder.add_documents(tokens[: lengths.sum()], lengths)


# ---- the sides ----


class SlowReader:
    """A file whose reads take 5 ms each, as those of an object store."""

    def __init__(self, path: str) -> None:
        self.size = os.path.getsize(path)
        self._descriptor = os.open(path, os.O_RDONLY)

    def read(self, byte_offset: int, num_bytes: int) -> NDArray[np.uint8]:
        time.sleep(DELAY)
        return np.frombuffer(os.pread(self._descriptor, num_bytes, byte_offset), np.uint8)

    def gather(
        self, byte_offsets: NDArray[np.int64], byte_counts: NDArray[np.int64]
    ) -> NDArray[np.uint8]:
        return gather_in_turn(self.read, byte_offsets, byte_counts)

    def __del__(self) -> None:
        os.close(self._descriptor)


def open_dataset(prefix: str, **options: Any) -> millrace.GPTDataset:
    dataset = millrace.IndexedDataset(prefix, **options)
    return millrace.GPTDataset(dataset, sequence_length=SEQUENCE_LENGTH, seed=SEED)


def loader(dataset: millrace.GPTDataset, threads: int, prefetch: int) -> millrace.Loader:
    return millrace.Loader(
        dataset, micro_batch_size=MICRO_BATCH_SIZE, fields=NAMES, threads=threads, prefetch=prefetch
    )


def touched_batches(dataset: millrace.GPTDataset) -> Iterator[dict[str, NDArray[Any]]]:
    """The same batches, each sequence copied from the mapped file in turn."""
    file = dataset.dataset
    for first in itertools.count(0, MICRO_BATCH_SIZE):
        rows = []
        for number in range(first, first + MICRO_BATCH_SIZE):
            spans = dataset.spans([number])
            columns = (spans.sequences.tolist(), spans.offsets.tolist(), spans.counts.tolist())
            parts = [file.get(*span) for span in zip(*columns, strict=True)]
            rows.append(np.concatenate(parts).astype(np.int64))
        samples = np.stack(rows)
        yield {"tokens": samples[:, :-1], "labels": samples[:, 1:]}


# ---- the comparison ----


def check_equal(prefix: str) -> None:
    """Compares the first batches of all sides; raises RuntimeError if they differ."""
    dataset, slow = open_dataset(prefix), open_dataset(prefix, bin_reader=reader(prefix))
    sides: list[Iterator[Any]] = [
        touched_batches(dataset),
        loader(dataset, 1, 0),
        loader(dataset, THREADS, PREFETCH),
        loader(slow, 1, 0),
        loader(slow, SLOW_THREADS, SLOW_PREFETCH),
    ]
    for expected, *others in itertools.islice(zip(*sides, strict=False), 3):
        for batch, name in itertools.product(others, NAMES):
            if not np.array_equal(batch[name], expected[name]):
                raise RuntimeError(f"{name} differ")
    for side in sides:
        if isinstance(side, millrace.Loader):
            side.close()


def reader(prefix: str) -> SlowReader:
    return SlowReader(f"{prefix}.bin")


def rows(prefix: str, seconds: float, runs: int) -> list[Row]:
    def cold_rate(batches_of: Any) -> float:
        gc.collect()  # maps of the last run
        outcome = drop_from_page_cache([f"{prefix}.bin"])
        if not outcome.startswith("dropped"):
            raise RuntimeError(outcome)
        return rate(batches_of(open_dataset(prefix)), seconds)

    def slow_rate(threads: int, prefetch: int) -> float:
        dataset = open_dataset(prefix, bin_reader=reader(prefix))
        return rate(loader(dataset, threads, prefetch), seconds)

    results = alternate(
        runs,
        {
            "disk, read when touched": lambda: cold_rate(touched_batches),
            "disk, on demand": lambda: cold_rate(lambda dataset: loader(dataset, 1, 0)),
            "disk, ahead": lambda: cold_rate(lambda dataset: loader(dataset, THREADS, PREFETCH)),
            "slow reader, on demand": lambda: slow_rate(1, 0),
            "slow reader, ahead": lambda: slow_rate(SLOW_THREADS, SLOW_PREFETCH),
        },
    )
    ahead = results["disk, ahead"]
    pairs = [
        ("page cache dropped, read when touched", ahead, "disk, read when touched", BAR),
        ("page cache dropped, on demand", ahead, "disk, on demand", None),
        ("5 ms a read, on demand", results["slow reader, ahead"], "slow reader, on demand", BAR),
    ]
    return [
        Row.compare(label, ours, results[other], "samples/s", better=HIGHER, bar=bar)
        for label, ours, other, bar in pairs
    ]


def rate(batches: Iterator[Any], seconds: float) -> float:
    """Samples per second from the first batch on, until the time or the data are over."""
    num_batches, start = 0, time.perf_counter()
    while (now := time.perf_counter()) - start < seconds and next(batches, None) is not None:
        num_batches += 1
    if isinstance(batches, millrace.Loader):
        batches.close()
    return num_batches * MICRO_BATCH_SIZE / (now - start)


# ---- the disk ----


def disk_note(path: str, seconds: float) -> str:
    """What the disk can do: random reads of 4 KiB past the page cache, at several queue depths."""
    try:
        rates = [
            f"{random_reads(path, depth, seconds):,.0f} with {depth}" for depth in QUEUE_DEPTHS
        ]
    except OSError as error:
        return f"The disk was not measured: {error.strerror}."
    return (
        "This disk, random reads of 4 KiB past the page cache per second, by the number of reads "
        f"at once: {', '.join(rates)}. Its read-ahead is {read_ahead(path)}."
    )


def random_reads(path: str, depth: int, seconds: float) -> float:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    num_pages = os.path.getsize(path) // mmap.PAGESIZE
    end = time.perf_counter() + seconds
    counts = [0] * depth

    def work(number: int) -> None:
        draws, buffer = random.Random(number), mmap.mmap(-1, mmap.PAGESIZE)
        while time.perf_counter() < end:
            os.preadv(descriptor, [buffer], draws.randrange(num_pages) * mmap.PAGESIZE)
            counts[number] += 1

    threads = [threading.Thread(target=work, args=[number]) for number in range(depth)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(descriptor)
    return sum(counts) / seconds


def read_ahead(path: str) -> str:
    device = os.stat(path).st_dev
    base = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for place in (base / "queue", base / ".." / "queue"):
        if (place / "read_ahead_kb").exists():
            return f"{int((place / 'read_ahead_kb').read_text()) // 1024} MiB"
    return "unknown"


if __name__ == "__main__":
    main()
