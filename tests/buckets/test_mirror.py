"""The partial mirror: how many bytes it saves, and what kills, full disks and damage do to it."""

import contextlib
import heapq
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace import GPTDataset, IndexedDataset, IndexedDatasetBuilder, ShardedDataset
from millrace.errors import ConfigError
from millrace.run import build_datasets, config_from
from millrace.storage import mirror
from tests.buckets.conftest import Bucket
from tests.buckets.servers import Proxy
from tests.buckets.test_prefixes import write_pair
from tests.shard_folders import write_sequences

BLOCK, SAMPLE, NUM_BLOCKS, GRAIN = 1 << 17, 1 << 11, 20, 1 << 5
DATA = np.random.default_rng(0).integers(0, 256, NUM_BLOCKS * BLOCK).astype(np.uint8)
METADATA = 1 << 16  # that a file system may count as a part of the files


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "BLOCK", BLOCK)
    monkeypatch.setattr(mirror, "FIRST", 0)


def opened(bucket: Bucket, path: str, folder: Path, limit: int = 1 << 30) -> Any:
    return bucket.storage(mirror=folder, limit=limit).open(path, "file")


def read_all(file: Any) -> None:
    """Reads all in batches, each of which is announced while the one before it is read."""
    batches, counts = np.arange(0, len(DATA), SAMPLE).reshape(-1, 32), np.full(32, SAMPLE)
    for number, offsets in enumerate(batches):
        for ahead in batches[number : number + 2]:
            file.prefetch(ahead, counts)
        expected = DATA[offsets[0] : offsets[-1] + SAMPLE]
        assert file.gather(offsets, counts).tobytes() == expected.tobytes()


def bytes_of_the_best_cache(pieces: list[tuple[int, int]], capacity: int) -> int:
    """Belady's: of all grains of 32 bytes, it keeps those that are used again the soonest."""
    uses = [
        (grain, min(start + count, grain + GRAIN) - max(start, grain))
        for start, count in pieces
        for grain in range(start // GRAIN * GRAIN, start + count, GRAIN)
    ]
    next_use, later = [0] * len(uses), dict[int, int]()
    for place in reversed(range(len(uses))):
        next_use[place] = later.get(uses[place][0], len(uses))
        later[uses[place][0]] = place
    kept, heap, num_bytes = dict[int, int](), list[tuple[int, int]](), 0
    for place, (grain, used) in enumerate(uses):
        num_bytes += used * (grain not in kept)
        kept[grain] = next_use[place]
        heapq.heappush(heap, (-next_use[place], grain))
        while len(kept) * GRAIN > capacity:
            use, last = heapq.heappop(heap)
            if kept.get(last) == -use:
                del kept[last]
    return num_bytes


def taken(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.glob("*.data"))


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("order", ["megatron", "shards"])
def test_it_saves_what_the_best_cache_would(
    tmp_path: Path, bucket: Bucket, proxy: Proxy, order: str, share: float
) -> None:
    """Of three epochs, each shuffled anew; the next run finds what is there."""
    limit, tokens, folder = int(share * len(DATA)), DATA.view(np.uint16), tmp_path / "mirror"
    if order == "megatron":
        with IndexedDatasetBuilder(tmp_path / "in", np.uint16) as builder:
            builder.add_documents(tokens, [len(tokens) // 128] * 128)
    else:
        write_sequences(tmp_path / "in", tokens.reshape(-1, SAMPLE // 2), 4)
    prefix, rng, there = f"{bucket.upload(tmp_path)}/in", np.random.default_rng(1), 0
    for num_epochs in (3, 1):
        storage = bucket.storage(mirror=folder, limit=limit + METADATA)
        if order == "megatron":
            pair = IndexedDataset(prefix, storage=storage)
            dataset: Any = GPTDataset(pair, sequence_length=SAMPLE // 2, seed=1)
        else:
            dataset = ShardedDataset(prefix, storage=storage)
        numbers = np.concatenate([rng.permutation(len(dataset)) for _ in range(num_epochs)])
        pieces = list(zip(*(one.tolist() for one in dataset.source.ranges(numbers)), strict=True))
        proxy.reset()
        for step in np.array_split(numbers, 20):
            dataset.prefetch(step)
            dataset.batch(step)
        best = bytes_of_the_best_cache(pieces, limit)
        assert proxy.bodies <= max(best - there, 0) + 0.02 * best * (there < len(DATA))
        there = taken(folder) // BLOCK * BLOCK
    assert limit - BLOCK < taken(folder) <= limit + METADATA
    assert folder.stat().st_mode & 0o777 == 0o700


def test_shards_that_are_read_on_come_before_they_are_needed(
    tmp_path: Path, bucket: Bucket, proxy: Proxy
) -> None:
    write_sequences(tmp_path / "in", DATA.view(np.uint16).reshape(-1, SAMPLE // 2), 8)
    storage = bucket.storage(mirror=tmp_path / "mirror", limit=1 << 30)
    dataset = ShardedDataset(f"{bucket.upload(tmp_path)}/in", storage=storage)
    for step in ([0, 1], [2, 3]):
        dataset.prefetch(step)
    proxy.reset()
    deadline = time.monotonic() + 60
    while (copy := taken(tmp_path / "mirror") // BLOCK) < mirror._AHEAD:
        assert time.monotonic() < deadline, f"only {copy} blocks came"
        time.sleep(0.01)


def test_a_run_may_have_one(tmp_path: Path, bucket: Bucket) -> None:
    prefix = f"{bucket.upload(write_pair(tmp_path / 'in').parent)}/data"
    run = {"data_path": [prefix], "split": "1,0,0", "seq_length": 32, "num_samples": [8, 0, 0]}
    for order in ("gpt", "instant"):
        mirror = {"mirror": str(tmp_path / order), "mirror_limit": "1M"}
        build_datasets(config_from({**run, **mirror, "order": order})).train.batch([0, 7])
        assert taken(tmp_path / order) > 0
    with pytest.raises(ConfigError, match="give mirror and limit"):
        config_from({**run, "mirror": str(tmp_path)})


def test_objects_that_nobody_uses_make_room(tmp_path: Path, bucket: Bucket, proxy: Proxy) -> None:
    paths = [bucket.put(name, DATA.tobytes()) for name in "abc"]

    def read(path: str) -> tuple[Any, int]:
        file = opened(bucket, path, tmp_path / "mirror", 2 * len(DATA) + METADATA)
        proxy.reset()
        read_all(file)
        return file, proxy.bodies

    first = [read(paths[0])[0], read(paths[1])[0]]
    read(paths[2])
    assert read(paths[2])[1] == len(DATA)  # the others are in use
    first.clear()
    read(paths[1])  # so the oldest use is of the first object
    read(paths[2])
    assert [read(path)[1] for path in (paths[2], paths[1])] == [0, 0]
    assert taken(tmp_path / "mirror") <= 2 * len(DATA) + METADATA


@pytest.mark.parametrize("damage", ["removed", "cut"])
def test_copies_that_were_removed(tmp_path: Path, bucket: Bucket, damage: str) -> None:
    path = bucket.put("a", DATA.tobytes())
    for _ in range(2):
        file = opened(bucket, path, tmp_path)
        read_all(pickle.loads(pickle.dumps(file)))
        (copy,) = tmp_path.iterdir()
        os.truncate(copy, len(DATA) // 2) if damage == "cut" else copy.unlink()
        read_all(file)  # which has it open


def test_too_few_open_files(
    tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """What cannot be opened is read from afar, and said once."""
    monkeypatch.setattr("resource.getrlimit", lambda _: (100, 100))
    storage, path = bucket.storage(mirror=tmp_path, limit=1 << 30), bucket.put("a", DATA.tobytes())
    for _ in range(2):
        read_all(storage.open(path, "file"))
    assert ["ulimit -n" in record.message for record in caplog.records].count(True) == 1
    assert taken(tmp_path) == 0


def test_a_full_disk(
    disk: Path, bucket: Bucket, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    """It stops growing, and says so; a file system in memory is named as well."""
    path, other = (bucket.put(name, DATA.tobytes()) for name in "ab")
    file = opened(bucket, path, disk / "mirror")
    read_all(file)
    messages = " ".join(record.message for record in caplog.records)
    assert "is on tmpfs" in messages
    assert "does not grow any more: [Errno 28]" in messages
    assert 0 < taken(disk / "mirror") <= 1 << 20
    with contextlib.suppress(OSError):
        (disk / "all").write_bytes(bytes(1 << 21))
    for one in (path, other):
        read_all(opened(bucket, one, disk / "mirror"))


def test_blocks_are_compared_with_the_sidecar(
    tmp_path: Path, bucket: Bucket, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "BLOCK", 4 << 20)
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
mirror.BLOCK, mirror.FIRST = 1 << 17, 0
path, folder, limit = sys.argv[1:]
file = ObjectStorage(mirror=folder, limit=int(limit)).open(path, "file")
print("open", flush=True)
while True:
    offsets = np.random.randint(0, file.size - 5000, 50)
    file.gather(offsets, np.full(50, 5000))
"""


@pytest.mark.parametrize("num_rounds", [4, pytest.param(50, marks=pytest.mark.long)])
def test_kills_leave_no_wrong_byte(
    tmp_path: Path, bucket: Bucket, proxy: Proxy, num_rounds: int
) -> None:
    path, folder, limit = bucket.put("a", DATA.tobytes()), tmp_path / "mirror", len(DATA) // 2
    proxy.latency = 0.002
    for _ in range(num_rounds):
        command = [sys.executable, "-c", READER, path, str(folder), str(limit)]
        readers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
        for reader in readers:
            reader.stdout.readline()  # type: ignore[union-attr]
        time.sleep(random.uniform(0, 0.2))
        for reader in readers:
            os.kill(reader.pid, signal.SIGKILL)
            reader.communicate()
        read_all(opened(bucket, path, folder, limit))
        assert taken(folder) <= limit
    assert {one.suffix for one in folder.iterdir()} == {".data"}
