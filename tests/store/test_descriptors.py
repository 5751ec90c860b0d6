"""Many files read with few descriptors: the pool, its limit, and files that change meanwhile."""

import gc
import mmap
import os
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from millrace import DataError, IndexedDataset, storage
from millrace.jobs.benchmarking import drop_from_page_cache, resident_pages
from tests.store.pairs import link_pairs, open_in, output_of, write


def open_many(folder: Path, count: int) -> list[IndexedDataset]:
    """Datasets whose tokens are their numbers."""
    for number in range(count):
        write(folder / f"data-{number}", number, length=10, count=3)
    return [IndexedDataset(folder / f"data-{number}", access="file") for number in range(count)]


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> int:
    gc.collect()  # files of other tests
    monkeypatch.setattr(storage, "MAX_OPEN", 4)
    return 4


# ---- the bar: 5,000 datasets, 100 descriptors ----

_BLEND = """
import os, resource, sys, threading, numpy as np
from millrace import BlendedDataset, GPTDataset, IndexedDataset
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
prefix, access, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
def private_bytes():
    with open("/proc/self/smaps_rollup") as file:
        lines = dict(line.split(":", 1) for line in list(file)[1:])
    return 1024 * int(lines["Anonymous"].split()[0])
most, memory = 0, private_bytes()
def look():
    global most
    most = max(most, len(os.listdir("/proc/self/fd")))
files = [IndexedDataset(f"{prefix}-{number}", access=access) for number in range(count)]
order = GPTDataset(files[0], sequence_length=4, seed=1).order  # building 5,000 takes seconds
datasets = [GPTDataset(file, sequence_length=4, order=order) for file in files]
look()
blend = BlendedDataset(datasets)
numbers = np.random.default_rng(0).permutation(len(blend))
problems = []
def read(part):
    try:
        for at in range(0, len(part), 500):
            tokens = blend.batch(part[at : at + 500])["tokens"]
            if not np.all(tokens == 3):
                problems.append(tokens)
            look()
    except Exception as error:
        problems.append(error)
threads = [threading.Thread(target=read, args=(part,)) for part in np.array_split(numbers, 8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(most <= 100, private_bytes() - memory < 100_000_000, problems)
"""


@pytest.mark.parametrize("access", ["mmap", "file"])
def test_a_blend_of_5000_datasets_holds_100_descriptors(tmp_path: Path, access: str) -> None:
    """And less than 100 MB of private memory, mapped pages aside."""
    write(tmp_path / "data-0", 3, length=9, count=2)
    link_pairs(tmp_path / "data", 5000)
    assert output_of(_BLEND, tmp_path / "data", access, 5000) == "True True []\n"


# ---- the pool ----


def test_the_files_used_last_stay_open(tmp_path: Path, limit: int) -> None:
    datasets = open_many(tmp_path, 6)
    assert len(open_in(tmp_path)) == limit
    assert [dataset[0][0] for dataset in datasets] == list(range(6))
    assert open_in(tmp_path) == {f"data-{number}.bin" for number in range(2, 6)}
    datasets[2].get(0)
    datasets[0].get(0)  # closes 3, which was used before 2
    assert open_in(tmp_path) == {f"data-{number}.bin" for number in (0, 2, 4, 5)}


def test_a_dataset_that_is_gone_keeps_no_descriptor(tmp_path: Path, limit: int) -> None:
    datasets = open_many(tmp_path, 3)
    datasets.pop()
    assert len(open_in(tmp_path)) == 2
    datasets.pop().close()
    assert len(open_in(tmp_path)) == 1


def test_threads_share_the_pool(tmp_path: Path, limit: int) -> None:
    datasets = open_many(tmp_path, 12)
    problems: list[object] = []
    most = 0

    def read(seed: int) -> None:
        nonlocal most
        try:
            for number in np.random.default_rng(seed).integers(0, 12, 500).tolist():
                tokens, _ = datasets[number].read([0, 2])
                if not np.all(tokens == number):
                    problems.append((number, tokens))
                most = max(most, len(open_in(tmp_path)) if seed == 0 else 0)
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert most <= limit + len(threads)
    assert len(open_in(tmp_path)) == limit


def test_a_dataset_in_a_cycle_ends_with_python(tmp_path: Path) -> None:
    write(tmp_path / "data", 1)
    code = """
import sys, millrace
class Holder: pass
sys.holder = Holder()
sys.holder.cycle, sys.holder.data = sys.holder, millrace.IndexedDataset(sys.argv[1], access="file")
"""
    assert output_of(code, tmp_path / "data") == ""


# ---- files that change ----


def test_an_open_file_that_is_replaced_is_still_read(tmp_path: Path, limit: int) -> None:
    datasets = open_many(tmp_path, 3)
    write(tmp_path / "data-0", 77)
    assert datasets[0][0][0] == 0


@pytest.mark.parametrize("change", ["replace", "remove", "shorten", "touch"])
def test_a_closed_file_that_changed_is_refused(tmp_path: Path, limit: int, change: str) -> None:
    datasets = open_many(tmp_path, 6)  # 0 and 1 are closed again
    path = tmp_path / "data-0.bin"
    if change == "replace":
        write(tmp_path / "data-0", 77, length=10, count=3)
    elif change == "remove":
        path.unlink()
    elif change == "shorten":
        os.truncate(path, 8)
    else:
        os.utime(path)
    problem = "removed, replaced or changed"
    for _ in range(2):
        with pytest.raises(DataError, match=f"{re.escape(str(path))} .*{problem}"):
            datasets[0].get(0)
        with pytest.raises(DataError, match=problem):
            datasets[0].read([0, 1])
    assert datasets[1][0][0] == 1


def test_a_relative_prefix_keeps_its_folder(
    tmp_path: Path, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "text", 5)
    monkeypatch.chdir(tmp_path)
    dataset = IndexedDataset("text", access="file")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert len(open_many(tmp_path / "other", 5)) == 5
    assert dataset[0][0] == 5


@pytest.mark.parametrize("size", [0, 1, 4001])
def test_an_open_file_that_is_cut_short_is_refused(tmp_path: Path, size: int) -> None:
    write(tmp_path / "data", 5)
    dataset = IndexedDataset(tmp_path / "data", access="file")
    os.truncate(tmp_path / "data.bin", size)
    problem = rf"data\.bin ends at byte {size}; it had 8000 bytes"
    with pytest.raises(DataError, match=problem):
        dataset.get(size // 400)
    with pytest.raises(DataError, match=problem):
        dataset.read([0, 19])
    if size == 4001:
        assert dataset.read([0, 9])[0].tolist() == [5] * 200


# ---- prefetching ----


def is_cached(path: Path, offset: int) -> bool:
    """Whether a byte of a file is in memory. Not asked by a read: even one that must not wait
    starts the kernel's own reading ahead."""
    with open(path, "rb") as file:
        start = offset - offset % mmap.PAGESIZE
        return bool(resident_pages(file.fileno(), start, 1)[0])


@pytest.mark.parametrize("access", ["mmap", "file"])
def test_prefetching_brings_pieces_into_memory(tmp_path: Path, access: str) -> None:
    write(tmp_path / "data", 5, length=1 << 18, count=16)  # 16 MiB
    offsets, counts = np.array([1 << 23, 1 << 20]), np.array([1 << 16, 0])
    path = tmp_path / "data.bin"
    drop_from_page_cache([str(path)])
    if is_cached(path, 1 << 23):
        pytest.skip("this file system keeps its files in memory")
    reader = IndexedDataset(tmp_path / "data", access=access).reader  # type: ignore[arg-type]
    reader.prefetch(offsets, counts)  # type: ignore[attr-defined]
    last = (1 << 23) + (1 << 16) - 1
    deadline = time.monotonic() + 30
    while not is_cached(path, last) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_cached(path, 1 << 23)
    assert is_cached(path, last)
    assert not is_cached(path, 1 << 22)
    with pytest.raises(ValueError, match="outside"):
        reader.prefetch(np.array([1 << 24]), np.array([1]))  # type: ignore[attr-defined]
