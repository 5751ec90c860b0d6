"""A soak of the loader: many samples, with stops, resumes, changes of ranks and failing reads.

    python -m tests.feed.soak --samples 10000000 --seed 1

Samples come from a blend of 100 files, whose indices are mapped from a cache folder. The run is cut
into sessions. In each, all ranks of some number draw global batches in lock step, with some micro
batch, threads and prefetch, from files that are mapped, read with descriptors, or read by a
`BinReader` that fails now and then. A read that fails is an error of the step; then the rank
tries again, or all ranks start again from the state before the step. A session ends with the state
of one rank, which the next one loads through JSON.

It checks that every sample number comes exactly once, that batches of random steps hold the tokens
of their sample numbers, and that private memory and descriptors do not grow.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import os
import random
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace import (
    BlendedDataset,
    DatasetConfig,
    GPTDataset,
    IndexedDataset,
    IndexedDatasetBuilder,
    Loader,
    build_datasets,
)

NUM_FILES = 100
SEQUENCE_LENGTH = 16
MAX_BATCH = 1024  # samples of a rank's batch
CHECKED_SHARE = 0.02  # of the steps, whose tokens are compared
QUARTERS = 4
MAX_GROWTH = 8_000_000  # bytes from the first quarter to the last


class FlakyReader:
    """A `.bin` whose reads fail now and then, as those of a network file system may."""

    def __init__(self, path: Path, failures: Failures) -> None:
        self._data = np.fromfile(path, np.uint8)
        self.size = len(self._data)
        self._failures = failures

    def read(self, byte_offset: int, num_bytes: int) -> NDArray[np.uint8]:
        self._failures.perhaps()
        return self._data[byte_offset : byte_offset + num_bytes]

    def gather(
        self, byte_offsets: NDArray[np.int64], byte_counts: NDArray[np.int64]
    ) -> NDArray[np.uint8]:
        pieces = zip(byte_offsets.tolist(), byte_counts.tolist(), strict=True)
        return np.concatenate([self.read(offset, count) for offset, count in pieces])


class Failures:
    """Raises an OSError at random; threads share it."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.share = 0.0
        self.count = 0

    def perhaps(self) -> None:
        with self._lock:
            if self._random.random() >= self.share:
                return
            self.count += 1
        raise OSError(5, "the storage does not answer")


@dataclass
class Result:
    """What a soak has seen."""

    num_samples: int = 0
    sessions: int = 0
    steps: int = 0
    errors: int = 0
    restarts: int = 0
    checked: int = 0
    memory: list[int] = field(default_factory=list)  # private bytes at each quarter
    descriptors: int = 0  # the largest number


def write_files(folder: Path) -> list[str]:
    """Token files of some thousand tokens, of lengths that all differ."""
    prefixes = []
    for number in range(NUM_FILES):
        generator = np.random.default_rng(number)
        with IndexedDatasetBuilder(folder / f"data-{number}", np.uint16) as builder:
            for length in generator.integers(1, 60, 100 + number):
                builder.add_document(generator.integers(0, 60000, length).astype(np.uint16))
        prefixes.append(str(folder / f"data-{number}"))
    return prefixes


def build(folder: Path, prefixes: list[str], num_samples: int) -> BlendedDataset:
    """The blend, with its indices in a cache folder, as a run has them."""
    weights = [1.0 + number % 7 for number in range(NUM_FILES)]
    config = DatasetConfig(
        sequence_length=SEQUENCE_LENGTH,
        seed=1,
        num_samples=(num_samples, 0, 0),
        blend=(prefixes, weights),
        split="1,0,0",
        cache=folder / "cache",
    )
    build_datasets(config)
    blend = build_datasets(config).train  # mapped
    assert isinstance(blend, BlendedDataset)
    return blend


def variants(blend: BlendedDataset, failures: Failures) -> dict[str, BlendedDataset]:
    """The same blend over other readers: mapped, by descriptors, and by readers that may fail."""
    datasets: dict[str, list[Any]] = {"mapped": list(blend.datasets), "file": [], "flaky": []}
    for number, dataset in enumerate(blend.datasets):
        by_file = IndexedDataset(dataset.prefix, access="file")
        reader = FlakyReader(Path(f"{dataset.prefix}.bin"), failures)
        flaky = IndexedDataset(dataset.prefix, bin_reader=reader) if number % 10 == 0 else by_file
        for name, data in (("file", by_file), ("flaky", flaky)):
            datasets[name].append(GPTDataset(data, order=dataset.order, options=dataset.options))
    return {name: BlendedDataset(parts, order=blend.order) for name, parts in datasets.items()}


def soak(num_samples: int, seed: int, folder: Path, *, num_sessions: int) -> Result:
    """Runs sessions up to the end of the samples; AssertionError if a sample is lost or doubled."""
    random_ = random.Random(seed)
    failures = Failures(seed)
    blend = build(folder, write_files(folder), num_samples)
    blends = variants(blend, failures)
    num_samples = len(blend)
    seen = np.full(num_samples, 255, np.uint8)  # all pages are written now, not as the run goes on
    seen[:] = 0
    quarters = [num_samples * quarter // QUARTERS for quarter in range(1, QUARTERS + 1)]
    result = Result(num_samples)
    state: Any = None
    consumed = 0
    while consumed < num_samples:
        name = random_.choices([*blends], [8, 1, 1])[0]  # the last two are slower
        failures.share = 0.001 if name == "flaky" else 0.0
        ranks = random_.randint(1, 8)
        options = {
            "micro_batch_size": random_.randint(1, MAX_BATCH if name == "mapped" else 256),
            "data_parallel_size": ranks,
            "drop_last": False,
            "threads": random_.randint(1, 4),
            "prefetch": random_.choice([None, 0, 1, 2, 3, 4]),
            "fields": ("tokens", "sample_numbers"),
        }
        stop = consumed + random_.randint(1, 2 * num_samples // num_sessions)
        result.sessions += 1
        loaders = open_loaders(blends[name], ranks, options, state)
        while consumed < min(stop, num_samples):
            before = loaders[0].state_dict()
            batches = draw_step(loaders, random_, result)
            if batches is None:  # start again from the state before the step
                close(loaders)
                loaders = open_loaders(blends[name], ranks, options, before)
                result.restarts += 1
                continue
            consumed = take(batches, loaders, consumed, seen, blend, random_, result)
        state = json.loads(json.dumps(random_.choice(loaders).state_dict()))
        assert state["consumed_samples"] == consumed
        result.descriptors = max(result.descriptors, len(os.listdir("/proc/self/fd")))
        close(loaders)
        del loaders, batches
        if consumed >= quarters[0]:
            quarters.pop(0)
            result.memory.append(private_bytes())
    assert np.all(seen == 1), f"{np.count_nonzero(seen != 1)} samples are lost or doubled"
    assert [next(loader, None) for loader in loaders_at_end(blend, state)] == [None]
    result.errors = failures.count
    return result


def open_loaders(blend: BlendedDataset, ranks: int, options: Any, state: Any) -> list[Loader]:
    loaders = [Loader(blend, data_parallel_rank=rank, **options) for rank in range(ranks)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    return loaders


def loaders_at_end(blend: BlendedDataset, state: Any) -> list[Loader]:
    return open_loaders(blend, 1, {"micro_batch_size": 1, "prefetch": 0}, state)


def close(loaders: list[Loader]) -> None:
    for loader in loaders:
        loader.close()


def draw_step(loaders: list[Loader], random_: random.Random, result: Result) -> list[Any] | None:
    """The batches of all ranks; None if one failed and all of them are to start again."""
    batches = []
    for loader in loaders:
        while True:
            position = loader.consumed_samples
            try:
                batches.append(next(loader))
                break
            except OSError:
                assert loader.consumed_samples == position
                if random_.random() < 0.3:
                    return None
    result.steps += 1
    return batches


def take(
    batches: list[Any],
    loaders: list[Loader],
    consumed: int,
    seen: NDArray[np.uint8],
    blend: BlendedDataset,
    random_: random.Random,
    result: Result,
) -> int:
    """Counts the samples of a step; returns the position after it."""
    positions = {loader.consumed_samples for loader in loaders}
    assert len(positions) == 1, f"the ranks are at {positions}"
    is_checked = random_.random() < CHECKED_SHARE
    for batch in batches:
        numbers = batch["sample_numbers"]
        seen[numbers] += 1
        if is_checked:
            assert np.array_equal(batch["tokens"], blend.batch(numbers)["tokens"])
            result.checked += 1
    end = positions.pop()
    assert np.all(seen[consumed:end] == 1), f"step at {consumed}: not its samples"
    return end


def private_bytes() -> int:
    """Private memory of this process, without pages of mapped files and without free memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/smaps_rollup") as file:
        lines = dict(line.split(":", 1) for line in itertools.islice(file, 1, None))
    return int(lines["Anonymous"].split()[0]) * 1024


def use_one_arena() -> None:
    """Has the allocator give all free memory back when asked to.

    It keeps the free end of the arena of each thread, several MB each, which would hide a leak.
    """
    arena_max, mmap_threshold, trim_threshold = -8, -3, -1  # as <malloc.h> numbers them
    libc = ctypes.CDLL(None)
    for option, value in (
        (arena_max, 1),
        (mmap_threshold, 1 << 17),  # a threshold that is set does not grow
        (trim_threshold, 1 << 17),
    ):
        libc.mallopt(option, value)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--sessions", type=int, default=200, help="about how many there are")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    use_one_arena()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result = soak(options.samples, options.seed, Path(folder), num_sessions=options.sessions)
    memory = ", ".join(f"{size / 1e6:.1f}" for size in result.memory)
    print(
        f"{result.num_samples:,} samples, each exactly once, in {time.monotonic() - start:.0f} s: "
        f"{result.sessions} sessions, {result.steps:,} steps, {result.errors:,} failed reads, "
        f"{result.restarts} restarts, {result.checked:,} batches compared; private memory at the "
        f"quarters {memory} MB; at most {result.descriptors} descriptors"
    )
    growth = max(result.memory) - result.memory[0]
    if growth > MAX_GROWTH:
        sys.exit(f"memory has grown by {growth / 1e6:.1f} MB; {MAX_GROWTH / 1e6:.0f} is the limit")


if __name__ == "__main__":
    main()
