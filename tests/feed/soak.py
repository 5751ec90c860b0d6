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

import argparse
import ctypes
import gc
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from millrace import DatasetConfig, IndexedDataset, build_datasets
from millrace.feed import BlendedDataset, GPTDataset, Loader
from tests.conftest import write_documents
from tests.feed.helpers import MemoryReader

NUM_FILES = 100
SEQUENCE_LENGTH = 16
MAX_BATCH = 1024  # samples of a rank's batch
CHECKED_SHARE = 0.02  # of the steps, whose tokens are compared
QUARTERS = 4
MAX_GROWTH = 8_000_000  # bytes from the first quarter to the last


class FlakyReader(MemoryReader):
    """A `.bin` whose reads fail now and then, as those of a network file system may."""

    random = random.Random(0)
    failing_share = 0.0
    num_failures = 0  # by all readers

    def read(self, byte_offset: int, num_bytes: int) -> np.ndarray:
        if self.random.random() < self.failing_share:
            FlakyReader.num_failures += 1
            raise OSError(5, "the storage does not answer")
        return super().read(byte_offset, num_bytes)


def write_files(folder: Path) -> list[str]:
    """Token files of some thousand tokens, of lengths that all differ."""
    prefixes = [str(folder / f"data-{number}") for number in range(NUM_FILES)]
    for number, prefix in enumerate(prefixes):
        generator = np.random.default_rng(number)
        lengths = generator.integers(1, 60, 100 + number)
        write_documents(Path(prefix), [generator.integers(0, 60000, size) for size in lengths])
    return prefixes


def build(folder: Path, num_samples: int) -> BlendedDataset:
    """The blend, with its indices in a cache folder, as a run has them."""
    config = DatasetConfig(
        sequence_length=SEQUENCE_LENGTH,
        seed=1,
        num_samples=(num_samples, 0, 0),
        blend=(write_files(folder), [1.0 + number % 7 for number in range(NUM_FILES)]),
        split="1,0,0",
        cache=folder / "cache",
    )
    build_datasets(config)
    blend = build_datasets(config).train  # mapped
    assert isinstance(blend, BlendedDataset)
    return blend


def variants(blend: BlendedDataset) -> dict[str, BlendedDataset]:
    """The same blend over other readers: mapped, by descriptors, and by readers that may fail."""
    datasets: dict[str, list[Any]] = {"mapped": list(blend.datasets), "file": [], "flaky": []}
    for number, dataset in enumerate(blend.datasets):
        by_file = IndexedDataset(dataset.prefix, access="file")
        reader = FlakyReader(f"{dataset.prefix}.bin")
        flaky = IndexedDataset(dataset.prefix, bin_reader=reader) if number % 10 == 0 else by_file
        for name, data in (("file", by_file), ("flaky", flaky)):
            datasets[name].append(GPTDataset(data, order=dataset.order, options=dataset.options))
    return {name: BlendedDataset(parts, order=blend.order) for name, parts in datasets.items()}


class Soak:
    """Sessions up to the end of the samples."""

    def __init__(self, num_samples: int, seed: int, folder: Path, num_sessions: int) -> None:
        self.random, FlakyReader.random = random.Random(seed), random.Random(seed)
        FlakyReader.failing_share = 0.0
        self.blend = build(folder, num_samples)
        self.num_samples = len(self.blend)
        self.longest = 2 * self.num_samples // num_sessions
        self.seen = np.full(self.num_samples, 0, np.uint8)  # all pages are written now
        self.counts: Counter[str] = Counter()  # of sessions, steps, restarts, compared batches
        self.memory: list[int] = []  # private bytes at each quarter
        self.descriptors = 0  # at most

    def run(self) -> None:
        """AssertionError if a sample is lost or doubled."""
        blends = variants(self.blend)
        for blend in blends.values():
            blend.fingerprint()  # by reads that do not fail yet
        state: Any = None
        consumed = 0
        while consumed < self.num_samples:
            name = self.random.choices([*blends], [8, 1, 1])[0]  # the last two are slower
            FlakyReader.failing_share = 0.001 if name == "flaky" else 0.0
            state = self.session(blends[name], state, MAX_BATCH if name == "mapped" else 256)
            consumed = state["consumed_samples"]
            if consumed * QUARTERS >= self.num_samples * (len(self.memory) + 1):
                self.memory.append(private_bytes())
        assert np.all(self.seen == 1), f"{np.sum(self.seen != 1)} samples are lost or doubled"
        end = Loader(self.blend, micro_batch_size=1, prefetch=0)
        end.load_state_dict(state)
        assert next(end, None) is None

    def session(self, blend: BlendedDataset, state: Any, max_batch: int) -> Any:
        """Draws up to some position, by some number of ranks; returns the state there."""
        options = {
            "micro_batch_size": self.random.randint(1, max_batch),
            "data_parallel_size": self.random.randint(1, 8),
            "drop_last": False,
            "threads": self.random.randint(1, 4),
            "prefetch": self.random.choice([None, 0, 1, 2, 3, 4]),
            "fields": ("tokens", "sample_numbers"),
        }
        consumed = 0 if state is None else state["consumed_samples"]
        stop = min(consumed + self.random.randint(1, self.longest), self.num_samples)
        self.counts["sessions"] += 1
        loaders = open_loaders(blend, options, state)
        while consumed < stop:
            state = loaders[0].state_dict()
            batches = self.draw_step(loaders)
            if batches is None:  # start again from the state before the step
                close(loaders)
                loaders = open_loaders(blend, options, state)
                self.counts["restarts"] += 1
            else:
                consumed = self.take(batches, loaders, consumed)
        state = json.loads(json.dumps(self.random.choice(loaders).state_dict()))
        assert state["consumed_samples"] == consumed
        self.descriptors = max(self.descriptors, len(os.listdir("/proc/self/fd")))
        close(loaders)
        return state

    def draw_step(self, loaders: list[Loader]) -> list[Any] | None:
        """The batches of all ranks; None if one failed and all of them are to start again."""
        batches: list[Any] = []
        while len(batches) < len(loaders):
            loader = loaders[len(batches)]
            position = loader.consumed_samples
            try:
                batches.append(next(loader))
            except OSError:
                assert loader.consumed_samples == position
                if self.random.random() < 0.3:
                    return None
        return batches

    def take(self, batches: list[Any], loaders: list[Loader], consumed: int) -> int:
        """Counts the samples of a step; returns the position after it."""
        self.counts["steps"] += 1
        end, *others = {loader.consumed_samples for loader in loaders}
        assert not others, f"the ranks are at {[end, *others]}"
        is_checked = self.random.random() < CHECKED_SHARE
        for batch in batches:
            numbers = batch["sample_numbers"]
            self.seen[numbers] += 1
            if is_checked:
                assert np.array_equal(batch["tokens"], self.blend.batch(numbers)["tokens"])
                self.counts["checked"] += 1
        assert np.all(self.seen[consumed:end] == 1), f"step at {consumed}: not its samples"
        return end


def open_loaders(blend: BlendedDataset, options: Any, state: Any) -> list[Loader]:
    ranks = range(options["data_parallel_size"])
    loaders = [Loader(blend, data_parallel_rank=rank, **options) for rank in ranks]
    for loader in loaders if state is not None else ():
        loader.load_state_dict(state)
    return loaders


def close(loaders: list[Loader]) -> None:
    for loader in loaders:
        loader.close()


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
    thresholds = {-8: 1, -3: 1 << 17, -1: 1 << 17}  # arena_max, mmap and trim, as in <malloc.h>
    for option, value in thresholds.items():  # one that is set does not grow
        ctypes.CDLL(None).mallopt(option, value)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--sessions", type=int, default=200, help="about how many there are")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    use_one_arena()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(options.samples, options.seed, Path(folder), options.sessions)
        soak.run()
    print(
        f"{soak.num_samples:,} samples, each exactly once, in {time.monotonic() - start:.0f} s: "
        f"{dict(soak.counts)}, {FlakyReader.num_failures:,} failed reads; private memory at the "
        f"quarters {soak.memory}; at most {soak.descriptors} descriptors"
    )
    growth = max(soak.memory) - soak.memory[0]
    if growth > MAX_GROWTH:
        sys.exit(f"memory has grown by {growth / 1e6:.1f} MB; {MAX_GROWTH / 1e6:.0f} is the limit")


if __name__ == "__main__":
    main()
