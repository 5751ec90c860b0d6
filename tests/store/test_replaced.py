"""Pairs that are replaced, cut short or left half-published while others use them."""

import contextlib
import os
import pickle
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace import ConfigError, DataError, IndexedDataset, IndexedDatasetBuilder
from millrace.jobs import merge, split
from millrace.store import publish, verify
from tests.store.pairs import ended, link_pairs, output_of, run, start, write

# ---- readers while a pair is replaced ----

_PUBLISH = """
import sys, numpy as np
from millrace import IndexedDatasetBuilder
number = 0
while True:
    number += 1
    with IndexedDatasetBuilder(sys.argv[1], np.int32) as builder:
        for _ in range(20):  # always as many tokens: the sizes of the pairs are equal
            builder.add_document(np.full(60 + number % 41, number))
        builder.add_document(np.full(20 * (40 - number % 41), number))
    print(number, flush=True)
"""


@contextlib.contextmanager
def publisher(prefix: Path) -> Iterator[None]:
    """A process that replaces a pair all the time."""
    with ended([start(_PUBLISH, prefix, stdout=subprocess.PIPE)]) as (process,):
        assert process.stdout is not None
        process.stdout.readline()
        yield


def is_one_generation(dataset: IndexedDataset) -> bool:
    number = int(dataset[0][0])
    lengths = [60 + number % 41] * 20 + [20 * (40 - number % 41)]
    return dataset.sequence_lengths.tolist() == lengths and np.all(dataset.tokens == number)


@pytest.mark.parametrize("checksums", [False, True])
def test_a_merge_takes_lengths_and_tokens_of_one_pair(tmp_path: Path, checksums: bool) -> None:
    with publisher(tmp_path / "source"):
        for _ in range(50):
            merged = merge([tmp_path / "source"], tmp_path / "merged", checksums=checksums)
            assert is_one_generation(merged)


def test_a_split_takes_all_shards_of_one_pair(tmp_path: Path) -> None:
    with publisher(tmp_path / "source"):
        for _ in range(8):
            shards = split(tmp_path / "source", tmp_path / "shard", documents=3)
            assert len(shards) == 7
            assert is_one_generation(merge(shards, tmp_path / "merged"))


def test_a_pickle_refuses_other_data(tmp_path: Path) -> None:
    write(tmp_path / "data", 1)
    dataset = IndexedDataset(tmp_path / "data")
    pickled = pickle.dumps(dataset)
    assert pickle.loads(pickled)[0].tolist() == [1] * 100
    os.utime(tmp_path / "data.idx")  # other times, the same data
    assert pickle.loads(pickled)[0].tolist() == [1] * 100
    for suffix in (".bin", ".idx"):  # another place with the same content, as on another machine
        shutil.copy(tmp_path / f"data{suffix}", tmp_path / f"copy{suffix}")
        os.replace(tmp_path / f"copy{suffix}", tmp_path / f"data{suffix}")
    assert pickle.loads(pickled)[0].tolist() == [1] * 100
    pickled = pickle.dumps(dataset)
    write(tmp_path / "data", 2)
    with pytest.raises(DataError, match="holds other data than the dataset that was pickled"):
        pickle.loads(pickled)
    assert dataset[0].tolist() == [1] * 100  # the parent goes on with what it opened
    with pytest.raises(DataError, match="other data"):
        pickle.loads(pickle.dumps(dataset))


def test_a_pickle_refuses_a_change_of_lengths_only(tmp_path: Path) -> None:
    """In an index so large that its fingerprint skips most of it."""

    def write_lengths(first: int) -> None:
        lengths = np.full(200_000, 2)
        lengths[[70_001, 70_002]] = first, 4 - first
        with IndexedDatasetBuilder(tmp_path / "data", np.uint8) as builder:
            builder.add_documents(np.zeros(400_000, np.uint8), lengths)

    write_lengths(2)
    dataset = IndexedDataset(tmp_path / "data")
    pickled = pickle.dumps(dataset)
    write_lengths(1)
    assert IndexedDataset(tmp_path / "data").fingerprint == dataset.fingerprint
    with pytest.raises(DataError, match="other data"):
        pickle.loads(pickled)


# ---- files that are cut short under a reader ----

_CUT_SHORT = """
import os, pickle, sys, numpy as np
import millrace
prefix, kind, suffix = sys.argv[1:]
dataset = millrace.IndexedDataset(prefix)
gpt = millrace.GPTDataset(dataset, sequence_length=64, seed=1)
if kind == "loader":
    loader = millrace.Loader(gpt, micro_batch_size=4)
    next(loader)
os.truncate(prefix + suffix, 4096 if suffix == ".bin" else 34)
try:
    if kind == "loader":
        for batch in loader:
            pass
    elif kind == "batch":
        gpt.batch(np.arange(len(gpt)))
    elif kind == "read":
        dataset.read(np.arange(len(dataset)))
    elif kind == "pickle":
        pickle.dumps(dataset)
    elif kind in ("checksums", "dtype"):
        dtype = np.int64 if kind == "dtype" else np.int32
        with millrace.IndexedDatasetBuilder(prefix + "-2", dtype, checksums=True) as builder:
            builder.add_index(dataset, change_dtype=True)
except millrace.DataError as error:
    print(error)
"""


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize("kind", ["loader", "batch", "read", "pickle", "checksums", "dtype"])
def test_a_mapped_file_that_is_cut_short_is_an_error(
    tmp_path: Path, kind: str, suffix: str
) -> None:
    """Not a bus error, which would end the process."""
    write(tmp_path / "data", 7, length=1000, count=2000)
    output = output_of(_CUT_SHORT, tmp_path / "data", kind, suffix)
    assert re.search("become shorter|cut short|outside", output)


_REWRITE = """
import sys
prefix = sys.argv[1]
contents = {name: open(prefix + name, "rb").read() for name in (".bin", ".idx")}
while True:
    for name, data in contents.items():
        with open(prefix + name, "wb") as file:
            file.write(data)
"""

_OPEN = """
import sys, time
import millrace
for _ in range(10_000):
    try:
        millrace.IndexedDataset(sys.argv[1]).lengths_checksum
    except millrace.DataError:
        pass
"""


def test_a_pair_that_is_written_in_place_is_opened_or_an_error(tmp_path: Path) -> None:
    """Like Megatron-LM's builder: the files are empty for a moment."""
    write(tmp_path / "data", 7, length=10, count=5000)
    with ended([start(_REWRITE, tmp_path / "data")]):
        output_of(_OPEN, tmp_path / "data")


_HANDLERS = """
import faulthandler, os, sys, time
from millrace import IndexedDataset
dataset = IndexedDataset(sys.argv[1])
view = dataset[len(dataset) - 1]
for step in sys.argv[2:]:
    time.sleep(0.02)  # a read looks for other handlers once a tick
    dataset.read([0]) if step == "read" else getattr(faulthandler, step)()
os.truncate(sys.argv[1] + ".bin", 0)
view.sum()
"""


@pytest.mark.parametrize(
    "steps",
    [
        ("read", "enable"),
        ("enable", "read"),
        ("read", "enable", "read"),
        ("read", "enable", "read", "disable"),
        ("enable", "read", "disable", "enable", "read"),
    ],
)
def test_handlers_that_come_and_go_pass_a_bus_error_on_once(
    tmp_path: Path, steps: tuple[str, ...]
) -> None:
    """Two handlers that have each replaced the other would call each other for ever."""
    write(tmp_path / "data", 7, length=1000, count=2000)
    result = run(_HANDLERS, tmp_path / "data", *steps)
    assert result.returncode == -signal.SIGBUS
    assert result.stderr.count("Bus error") == (steps[-1] != "disable")


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize("checksums", [False, True])
def test_verify_reports_problems_while_files_are_cut_short(
    tmp_path: Path, suffix: str, checksums: bool
) -> None:
    """A bus error would end this process."""
    with IndexedDatasetBuilder(tmp_path / "data", np.uint8, checksums=checksums) as builder:
        builder.add_documents(np.zeros(3_000_000, np.uint8), np.ones(3_000_000, np.int64))
    path, cut = tmp_path / f"data{suffix}", threading.Event()

    def check() -> None:
        while not cut.is_set():
            verify([tmp_path / "data"], threads=1)

    with ThreadPoolExecutor() as pool:
        checking = pool.submit(check)
        for size in range(path.stat().st_size, 0, -400_000):
            os.truncate(path, size)
        cut.set()
        checking.result()
    assert verify([tmp_path / "data"], threads=1)[0].problems


# ---- descriptors ----

_AT_1024 = """
import resource, sys, numpy as np
import millrace
from millrace.jobs import merge
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
prefixes = [f"{sys.argv[1]}-{number}" for number in range(int(sys.argv[2]))]
merged = merge(prefixes, sys.argv[1] + "-merged")
print(merged.num_documents, len(merged.tokens))
"""


def test_merging_5000_pairs_needs_few_descriptors(tmp_path: Path) -> None:
    write(tmp_path / "data-0", 3, length=5, count=2)
    link_pairs(tmp_path / "data", 5000)
    assert output_of(_AT_1024, tmp_path / "data", 5000) == "10000 50000\n"


def test_too_many_open_files_are_not_taken_for_damage(tmp_path: Path) -> None:
    write(tmp_path / "data", 1)
    code = """
import errno, os, resource, sys, millrace
from millrace.store import verify
millrace.IndexedDataset(sys.argv[1])
verify([sys.argv[1]])
resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
files = []
try:
    while True:
        files.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
try:
    millrace.IndexedDataset(sys.argv[1])
except OSError as error:
    print(error.errno == errno.EMFILE, isinstance(error, millrace.MillraceError))
print(verify([sys.argv[1]])[0].problems)
"""
    result = run(code, tmp_path / "data")
    assert result.stdout.startswith("True False\n"), result.stdout + result.stderr
    assert "Too many open files" in result.stdout.splitlines()[1]


# ---- closing ----


def test_a_closed_dataset_raises_and_its_arrays_stay(tmp_path: Path) -> None:
    write(tmp_path / "data", 1)
    with IndexedDataset(tmp_path / "data") as dataset:
        view, lengths = dataset[0], dataset.sequence_lengths
    for use in (
        lambda: dataset[0],
        lambda: dataset[:2],
        lambda: dataset.document(0),
        lambda: dataset.read([0]),
        lambda: dataset.fingerprint,
        lambda: pickle.dumps(dataset),
        lambda: IndexedDatasetBuilder(tmp_path / "other").add_index(dataset),
    ):
        with pytest.raises(ConfigError, match="is closed; open it again"):
            use()
    dataset.close()
    assert view.tolist() == [1] * 100
    assert lengths.tolist() == [100] * 20
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = IndexedDataset(tmp_path / "data").nonsense


# ---- publications that were cut off ----


class DiedError(Exception):
    """Simulates the death of the process."""


def half_publish(prefix: Path, token: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A builder that dies after some renames and unlinks of its publication."""
    left = [steps]

    def dying(function: Any) -> Any:
        def wrapped(*arguments: Any) -> Any:
            if left[0] == 0:
                raise DiedError
            left[0] -= 1
            return function(*arguments)

        return wrapped

    builder = IndexedDatasetBuilder(prefix)
    builder.add_document([token])
    builder._write_files()
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", dying(os.rename))
        patch.setattr(os, "unlink", dying(os.unlink))
        with pytest.raises(DiedError):
            publish.publish([builder._pair])
    builder.abort()


@pytest.mark.parametrize("steps", [2, 3, 7])
def test_a_later_pair_of_another_tool_is_not_replaced(
    tmp_path: Path, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of a dead builder count only until another tool writes the prefix."""
    prefix = tmp_path / "data"
    write(prefix, 1)
    half_publish(prefix, 2, steps, monkeypatch)
    assert (tmp_path / "data.idx.new").exists()
    write(tmp_path / "other", 3, length=1, count=1)
    for suffix in (".bin", ".idx"):  # written in place, as Megatron-LM does
        (tmp_path / f"data{suffix}").write_bytes((tmp_path / f"other{suffix}").read_bytes())
        if suffix == ".bin" and steps == 7:
            with pytest.raises(DataError):  # no index yet, and the waiting one is another's
                IndexedDataset(prefix)
    assert IndexedDataset(prefix)[0].tolist() == [3]
    IndexedDatasetBuilder(prefix).abort()  # cleans up
    assert IndexedDataset(prefix)[0].tolist() == [3]
    assert not (tmp_path / "data.idx.new").exists()


def test_the_folder_is_flushed_between_all_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may bring renames to the disk in another order."""
    steps: list[str] = []

    def noted(name: str) -> Any:
        function = getattr(os, name)

        def wrapped(*arguments: Any) -> Any:
            if name != "fsync":
                steps.append(os.path.basename(arguments[-1]))
            elif os.path.isdir(f"/proc/self/fd/{arguments[0]}"):
                steps.append("flush")
            return function(*arguments)

        return wrapped

    for prefix in (tmp_path / "data", tmp_path / "data"):
        with IndexedDatasetBuilder(prefix, checksums=True) as builder:
            builder.add_document([1])
            for name in ("rename", "unlink", "fsync"):
                monkeypatch.setattr(os, name, noted(name))
        monkeypatch.undo()
    expected = [
        *("data.bin.new", "data.info.json.new", "flush", "data.idx.new", "flush"),
        *("data.loss.json", "data.idx", "data.info.json", "data.origins.parquet", "flush"),
        *("data.bin", "data.info.json", "flush", "data.idx", "flush"),
    ]
    shown = [step for step in steps if not step.endswith((".tmp", ".lock"))]
    assert shown == 2 * expected


_CUT_WHILE_MERGED = """
import os, sys
import numpy as np
from millrace import DataError, IndexedDataset, IndexedDatasetBuilder
prefix = sys.argv[1]

class Reader:
    size = os.path.getsize(prefix + ".bin")
    def gather(self, byte_offsets, byte_counts):
        os.truncate(prefix + ".idx", 34)
        return np.zeros(byte_counts.sum(), np.uint8)

with IndexedDatasetBuilder(prefix + "-merged", np.int32) as builder:
    try:
        builder.add_index(IndexedDataset(prefix, bin_reader=Reader()))
    except DataError as error:
        print(error)
"""


def test_an_index_that_is_cut_short_while_it_is_merged_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "data", 7, length=10, count=5000)
    assert "become shorter" in output_of(_CUT_WHILE_MERGED, tmp_path / "data")
