"""The partial mirror: how many bytes it saves, and what kills, full disks and damage do to it."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace import IndexedDataset, IndexedDatasetBuilder
from millrace.storage import mirror
from tests.buckets.conftest import Bucket
from tests.buckets.servers import Proxy

BLOCK, SAMPLE, NUM_BLOCKS = 1 << 16, 1 << 12, 40
DATA = np.random.default_rng(0).integers(0, 256, NUM_BLOCKS * BLOCK).astype(np.uint8)
COUNTS = np.full(32, SAMPLE)
METADATA = 1 << 14  # that a file system may count as a part of the files


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "BLOCK", BLOCK)


def read_all(file: Any, samples: np.ndarray) -> None:
    """Reads samples in batches, the next four of which are announced."""
    batches = [samples[place : place + 32] * SAMPLE for place in range(0, len(samples), 32)]
    for ahead in batches[:4]:
        file.prefetch(ahead, COUNTS[: len(ahead)])
    for number, offsets in enumerate(batches):
        for ahead in batches[number + 4 : number + 5]:
            file.prefetch(ahead, COUNTS[: len(ahead)])
        expected = DATA.reshape(-1, SAMPLE)[offsets // SAMPLE]
        assert file.gather(offsets, COUNTS[: len(offsets)]).tobytes() == expected.tobytes()


def misses_of_the_best_cache(samples: np.ndarray, capacity: int) -> int:
    """Belady's: of all samples, it keeps those that are used again the soonest."""
    next_use, later = np.full(len(samples), len(samples)), {}
    for place in range(len(samples) - 1, -1, -1):
        next_use[place] = later.get(samples[place], len(samples))
        later[samples[place]] = place
    kept: dict[int, int] = {}
    misses = 0
    for place, sample in enumerate(samples.tolist()):
        misses += sample not in kept
        kept[sample] = int(next_use[place])
        if len(kept) > capacity:
            del kept[max(kept, key=kept.__getitem__)]
    return misses


def taken(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.glob("*.data"))


@pytest.mark.parametrize("share", [0.0, 0.025, 0.1, 0.5, 0.9, 1.0])
def test_it_saves_what_the_best_cache_would(
    tmp_path: Path, bucket: Bucket, proxy: Proxy, share: float
) -> None:
    rng = np.random.default_rng(1)
    epochs = np.concatenate([rng.permutation(len(DATA) // SAMPLE) for _ in range(3)])
    limit = int(share * len(DATA))
    storage = bucket.storage(mirror=tmp_path / "mirror", limit=limit + METADATA)
    file = storage.open(bucket.put("a", DATA.tobytes()), "file")
    proxy.reset()
    read_all(file, epochs)
    best = misses_of_the_best_cache(epochs, limit // SAMPLE) * SAMPLE
    assert proxy.bodies <= 1.02 * best
    assert limit - BLOCK < taken(tmp_path / "mirror") <= limit + METADATA
    assert (tmp_path / "mirror").stat().st_mode & 0o777 == 0o700


def test_the_next_run_finds_it(tmp_path: Path, bucket: Bucket, proxy: Proxy) -> None:
    path = bucket.put("a", DATA.tobytes())
    order = np.arange(len(DATA) // SAMPLE)
    for _ in range(2):
        storage = bucket.storage(mirror=tmp_path / "mirror", limit=len(DATA) + METADATA)
        file = storage.open(path, "file")
        proxy.reset()
        read_all(file, order)
        del file
    assert proxy.requests == []


def test_objects_that_nobody_uses_make_room(tmp_path: Path, bucket: Bucket, proxy: Proxy) -> None:
    order, paths = np.arange(len(DATA) // SAMPLE), [bucket.put(n, DATA.tobytes()) for n in "abc"]

    def read(path: str) -> tuple[Any, int]:
        storage = bucket.storage(mirror=tmp_path / "mirror", limit=2 * len(DATA) + METADATA)
        file = storage.open(path, "file")
        proxy.reset()
        read_all(file, order)
        return file, proxy.bodies

    first = [read(paths[0])[0], read(paths[1])[0]]
    read(paths[2])
    assert read(paths[2])[1] == len(DATA)  # the others are in use
    first.clear()
    read(paths[2])
    assert [read(path)[1] == 0 for path in (paths[2], paths[1])] == [True, True]
    assert taken(tmp_path / "mirror") <= 2 * len(DATA) + METADATA


def test_a_full_disk(
    disk: Path, bucket: Bucket, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    """It stops growing, and says so; a file system in memory is named as well."""
    storage = bucket.storage(mirror=disk / "mirror", limit=1 << 30)
    file = storage.open(bucket.put("a", DATA.tobytes()), "file")
    read_all(file, np.random.default_rng(0).permutation(len(DATA) // SAMPLE))
    messages = " ".join(record.message for record in caplog.records)
    assert "is on tmpfs" in messages
    assert "does not grow any more: [Errno 28]" in messages
    assert 0 < taken(disk / "mirror") <= 1 << 20


def test_blocks_are_compared_with_the_sidecar(
    tmp_path: Path, bucket: Bucket, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    tokens = np.random.default_rng(0).integers(0, 60000, 5 << 20).astype(np.uint16)
    with IndexedDatasetBuilder(tmp_path / "data", np.uint16, checksums=True) as builder:
        builder.add_document(tokens)
    prefix = f"{bucket.upload(tmp_path)}/data"
    dataset = IndexedDataset(prefix, storage=bucket.storage(mirror=tmp_path / "m", limit=1 << 30))
    proxy.reset()
    proxy.add_fault("flip", "data.bin", times=2)
    assert dataset.get(0, 3000000, 5).tolist() == tokens[3000000:3000005].tolist()
    assert dataset.get(0, 0, 5).tolist() == tokens[:5].tolist()
    assert proxy.count("data.bin") == 4


READER = """
import sys, numpy as np
from millrace.storage import mirror
from millrace.storage.objects import ObjectStorage
mirror.BLOCK = 1 << 16
path, folder, limit = sys.argv[1:]
file = ObjectStorage(mirror=folder, limit=int(limit)).open(path, "file")
print("open", flush=True)
while True:
    offsets = np.random.randint(0, file.size - 5000, 50)
    file.gather(offsets, np.full(50, 5000))
"""


def test_kills_leave_no_wrong_byte(tmp_path: Path, bucket: Bucket, proxy: Proxy) -> None:
    path, folder, limit = bucket.put("a", DATA.tobytes()), tmp_path / "mirror", len(DATA) // 2
    proxy.latency = 0.002
    for _ in range(4):
        command = [sys.executable, "-c", READER, path, str(folder), str(limit)]
        readers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
        for reader in readers:
            reader.stdout.readline()  # type: ignore[union-attr]
        time.sleep(random.uniform(0, 0.2))
        for reader in readers:
            os.kill(reader.pid, signal.SIGKILL)
            reader.communicate()
        storage = bucket.storage(mirror=folder, limit=limit)
        file = storage.open(path, "file")
        pieces = np.arange(0, len(DATA), 1000), np.full(-(-len(DATA) // 1000), 1000)
        pieces[1][-1] = len(DATA) - pieces[0][-1]
        assert file.gather(*pieces).tobytes() == DATA.tobytes()
        assert taken(folder) <= limit
    assert {one.suffix for one in folder.iterdir()} == {".data", ".blocks"}
