"""The partial mirror: how many bytes it saves, and what kills, full disks and damage do to it."""

import contextlib
import multiprocessing
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace import GPTDataset, IndexedDataset, ShardedDataset, StorageError
from millrace.storage import mirror
from millrace.storage.objects import ObjectStorage
from tests.buckets.conftest import Bucket
from tests.conftest import results_of_processes
from tests.feed.helpers import wait_for
from tests.shard_folders import write_sequences

BLOCK, SAMPLE, NUM_BLOCKS = 1 << 17, 1 << 11, 20
DATA = np.random.default_rng(0).integers(0, 256, NUM_BLOCKS * BLOCK).astype(np.uint8)
METADATA = 1 << 16  # that a file system may count as a part of the files


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "BLOCK", BLOCK)
    monkeypatch.setattr(mirror, "FIRST", 0)


def read_all(file: Any) -> None:
    """Reads all in batches, each of which is announced while the one before it is read."""
    batches, counts = np.arange(0, len(DATA), SAMPLE).reshape(-1, 32), np.full(32, SAMPLE)
    for number, offsets in enumerate(batches):
        for ahead in batches[number : number + 2]:
            file.prefetch(ahead, counts)
        expected = DATA[offsets[0] : offsets[-1] + SAMPLE]
        assert file.gather(offsets, counts).tobytes() == expected.tobytes()


def misses_of_the_best_cache(samples: list[int], capacity: int) -> int:
    """Belady's: it keeps the samples that are used again the soonest."""
    uses = {sample: [len(samples)] for sample in samples}
    for place in reversed(range(len(samples))):
        uses[samples[place]].append(place)
    kept, num_misses = set[int](), 0
    for sample in samples:
        uses[sample].pop()
        num_misses += sample not in kept
        kept.add(sample)
        if len(kept) > capacity:
            kept.remove(max(kept, key=lambda one: uses[one][-1]))
    return num_misses


def taken(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.glob("*.data"))


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("order", ["megatron", "shards"])
def test_it_saves_the_most_bytes(tmp_path: Path, bucket: Bucket, order: str, share: float) -> None:
    """What the best cache would of three epochs, each shuffled anew; the next run finds them."""
    limit, tokens, folder = int(share * len(DATA)), DATA.view(np.uint16), tmp_path / "mirror"
    length, num_shards = (len(tokens) // 128, 1) if order == "megatron" else (SAMPLE // 2, 4)
    write_sequences(tmp_path / "in", tokens.reshape(-1, length), num_shards)
    prefix, rng, there = f"{bucket.upload(tmp_path)}/in", np.random.default_rng(1), 0
    for num_epochs in (3, 1):
        storage = bucket.storage(mirror=folder, limit=limit + METADATA)
        if order == "megatron":
            pair = IndexedDataset(f"{prefix}/shard_0000", storage=storage)
            dataset: Any = GPTDataset(pair, sequence_length=SAMPLE // 2, seed=1)
        else:
            dataset = ShardedDataset(prefix, storage=storage)
        numbers = np.concatenate([rng.permutation(len(dataset)) for _ in range(num_epochs)])
        bucket.reset()
        for step in np.array_split(numbers, 20):
            dataset.prefetch(step)
            dataset.batch(step)
        best = SAMPLE * misses_of_the_best_cache(numbers.tolist(), limit // SAMPLE)
        assert bucket.bodies <= max(best - there, 0) + 0.02 * best * (there < len(DATA))
        there = taken(folder) // BLOCK * BLOCK
    assert limit - BLOCK < taken(folder) <= limit + METADATA
    assert folder.stat().st_mode & 0o777 == 0o700


def test_shards_come_before_they_are_needed(tmp_path: Path, bucket: Bucket) -> None:
    """Where an order reads on; a forked child reads what is there, and is told of what is not."""
    tokens = DATA.view(np.uint16).reshape(-1, SAMPLE // 2)
    write_sequences(tmp_path / "in", tokens, 2)
    storage = bucket.storage(mirror=tmp_path / "mirror", limit=1 << 30)
    dataset = ShardedDataset(f"{bucket.upload(tmp_path)}/in", storage=storage)
    for sample in range(2):
        dataset.prefetch([sample])
    copy, second = dataset.dataset.reader._files[1]._copy, NUM_BLOCKS // 2
    wait_for(lambda: copy.read(0, (mirror._AHEAD - second + 1) * BLOCK) is not None)
    samples = range(len(tokens) // 2, len(tokens) // 2 + 3)

    def read(out: Any) -> None:
        out.put([dataset.batch([sample])["tokens"][0].tolist() for sample in samples])
        with pytest.raises(StorageError, match="forkserver"):
            dataset.batch([len(tokens) - 1])

    with copy._loading:  # as a thread may that is filling a block during the fork
        assert results_of_processes("fork", read, [()]) == [tokens[samples].tolist()]


def test_a_pair_brings_what_is_read_alone(tmp_path: Path, bucket: Bucket) -> None:
    """As a source's part may end there."""
    storage = bucket.storage(mirror=tmp_path / "mirror", limit=1 << 30)
    file: Any = storage.open(bucket.put("a", DATA.tobytes()), "file")
    for place in range(0, 3 * BLOCK, SAMPLE):
        file.prefetch(np.array([place]), np.array([SAMPLE]))
    storage.pool.shutdown()
    assert 3 * BLOCK <= taken(tmp_path / "mirror") <= 3 * BLOCK + METADATA


def test_a_process_that_is_stopped_stops_no_other(tmp_path: Path, bucket: Bucket) -> None:
    storage = bucket.storage(mirror=tmp_path / "mirror", limit=1 << 30, time_limit=0.3)
    path = bucket.put("a", b"123")
    stopped, file = (storage.open(path, "file") for _ in range(2))
    with stopped._copy._lock(0, 0.0):
        assert (file.read(0, 3).tobytes(), file._copy._late) == (b"123", {0})


def test_a_forked_child_keeps_no_lock(tmp_path: Path, bucket: Bucket) -> None:
    storage = bucket.storage(mirror=tmp_path / "mirror", limit=1 << 30)
    file = storage.open(bucket.put("a", DATA.tobytes()), "file")
    bucket.latency = 1.0
    with ThreadPoolExecutor(2) as threads:  # one of them waits for the block of the other
        pieces = [threads.submit(file.read, place, 9) for place in (0, 9)]
        wait_for(lambda: bucket.count("GET"))
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
        child.start()
        assert b"".join(one.result(20) for one in pieces) == DATA[:18].tobytes()
        child.kill()


def test_objects_that_nobody_uses_make_room(tmp_path: Path, bucket: Bucket) -> None:
    paths, limit = [bucket.put(name, DATA.tobytes()) for name in "abc"], 2 * len(DATA) + METADATA

    def read(path: str) -> tuple[Any, int]:
        file = bucket.storage(mirror=tmp_path / "mirror", limit=limit).open(path, "file")
        bucket.reset()
        read_all(file)
        return file, bucket.bodies

    first = [read(paths[0])[0], read(paths[1])[0]]
    read(paths[2])
    assert read(paths[2])[1] == len(DATA)  # the others are in use
    first.clear()
    read(paths[1])  # so the oldest use is of the first object
    read(paths[2])
    assert [read(path)[1] for path in (paths[2], paths[1])] == [0, 0]
    assert taken(tmp_path / "mirror") <= limit


@pytest.mark.parametrize("shortage", ["[Errno 28]", "ulimit -n"])
def test_a_full_disk_and_too_few_open_files(
    disk: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, caplog: Any, shortage: str
) -> None:
    """It stops growing, and says so once; a file system in memory is named as well."""
    paths, folder = [bucket.put(name, DATA.tobytes()) for name in "ab"], disk / "mirror"
    if shortage == "ulimit -n":
        monkeypatch.setattr("resource.getrlimit", lambda _: (100, 100))
    storage = bucket.storage(mirror=folder, limit=1 << 30)
    for _ in range(2):
        read_all(storage.open(paths[0], "file"))
    messages = [record.message for record in caplog.records]
    assert "is on tmpfs" in messages[0]
    assert [shortage in message for message in messages] == [False, True]
    assert (taken(folder) > 0) == (shortage == "[Errno 28]")
    assert taken(folder) <= 1 << 20
    with contextlib.suppress(OSError):
        (disk / "all").write_bytes(bytes(1 << 21))
    for path in paths:
        read_all(bucket.storage(mirror=folder, limit=1 << 30).open(path, "file"))


def read_for_ever(path: str, folder: Path, limit: int, has_begun: Any) -> None:
    mirror.BLOCK, mirror.FIRST = BLOCK, 0
    file = ObjectStorage(mirror=folder, limit=limit).open(path, "file")
    has_begun.wait()
    while True:
        file.gather(np.random.randint(0, file.size - 5000, 50), np.full(50, 5000))


@pytest.mark.parametrize("num_rounds", [4, pytest.param(50, marks=pytest.mark.long)])
def test_kills_leave_no_wrong_byte(tmp_path: Path, bucket: Bucket, num_rounds: int) -> None:
    path, folder, limit = bucket.put("a", DATA.tobytes()), tmp_path / "mirror", len(DATA) // 2
    context, bucket.latency = multiprocessing.get_context("spawn"), 0.002
    for _ in range(num_rounds):
        has_begun = context.Barrier(3)
        arguments = path, folder, limit, has_begun
        readers = [context.Process(target=read_for_ever, args=arguments) for _ in range(2)]
        for reader in readers:
            reader.start()
        has_begun.wait()
        time.sleep(random.uniform(0, 0.2))
        for reader in readers:
            reader.kill()
            reader.join()
        file = bucket.storage(mirror=folder, limit=limit).open(path, "file")
        read_all(file)
        assert taken(folder) <= limit
        (copy,) = folder.iterdir()  # which is damaged while it is open
        os.truncate(copy, len(DATA) // 2) if random.random() < 0.5 else copy.unlink()
        read_all(file)
