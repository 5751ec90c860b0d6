"""Objects as files of a storage: identities, ranges, errors, faults and forks."""

import multiprocessing
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace import IndexedDataset, MillraceError
from millrace.errors import ConfigError, StorageError
from millrace.storage.objects import ObjectStorage
from millrace.storage.transfers import start_pieces
from tests.buckets.conftest import Bucket, on_each_server
from tests.buckets.servers import READER_KEYS, Proxy, RangeServer, options_for, serving

BYTES = np.random.default_rng(0).integers(0, 256, 20 << 20).astype(np.uint8)


@on_each_server
def test_an_object_is_a_file(bucket: Bucket) -> None:
    path, storage = bucket.put("folder/a b%2F+é.bin", BYTES.tobytes()), bucket.storage()
    empty = bucket.put("folder/below/b.bin", b"")
    assert storage.open(empty, "file").read(0, 0).tobytes() == b""
    file: Any = pickle.loads(pickle.dumps(storage)).open(path, "file")
    assert file.identity == storage.stat(path)
    assert file.read(0, file.size).tobytes() == BYTES.tobytes()
    random = np.random.default_rng(1)
    for count in (0, 1, 3, 40):
        pieces, others = (
            (random.integers(0, 1 << 20, count), random.integers(0, 3000, count)) for _ in "ab"
        )
        parts = [BYTES[at : at + size].tobytes() for at, size in zip(*pieces, strict=True)]
        for announced in ((), (pieces,), (others,), (pieces, pieces, others)):
            for some in announced:
                file.prefetch(*some)
            for _ in range(2):
                assert file.gather(*pieces).tobytes() == b"".join(parts)
    assert list(storage.list(f"{bucket.prefix}/folder/a")) == [path]
    assert list(storage.list(f"{bucket.prefix}/folder/")) == [path]
    assert list(storage.list(f"{bucket.prefix}/folder/b")) == []
    with pytest.raises(ValueError, match=r"the file has"):
        file.read(file.size - 1, 2)


def test_what_is_announced_is_asked_for_once(bucket: Bucket, proxy: Proxy) -> None:
    file: Any = bucket.storage().open(bucket.put("a", BYTES.tobytes()), "file")
    proxy.reset()
    offsets = np.arange(0, 1 << 20, 1 << 16)
    counts = np.full(len(offsets), 1000)
    file.prefetch(offsets, counts)
    file.gather(offsets[::-1], counts)
    assert proxy.count("GET") == len(offsets)
    file.prefetch(np.arange(0, 8000, 1000), np.full(8, 1000))  # neighbours
    file.gather(np.arange(0, 8000, 1000), np.full(8, 1000))
    assert proxy.count("GET") == len(offsets) + 1
    assert proxy.bodies == 1000 * (len(offsets) + 8)
    file.gather(np.array([0, 1040]), np.array([1000, 1000]))  # a gap of 1/25
    assert proxy.count("GET") == len(offsets) + 2
    file.read(0, file.size)
    assert proxy.count("GET") == len(offsets) + 5  # of 8 MiB at most
    asked: list[int] = []
    start_pieces(lambda start, _: asked.append(start), [(500, 9), (0, 9), (509, 9), (70, 9)])
    assert asked == [500, 0, 70]  # first what is needed first


@on_each_server
def test_errors_say_what_is_wrong(bucket: Bucket) -> None:
    storage, path = bucket.storage(), bucket.put("a", b"12345")
    file = storage.open(path, "file")
    with pytest.raises(FileNotFoundError, match=r"no such object.*nothing"):
        storage.stat(f"{bucket.prefix}/nothing")
    bucket.put("a", b"543210")
    with pytest.raises(StorageError, match=r"changed after it was opened.*under a new name"):
        file.read(0, 5)
    bucket.delete(path)
    with pytest.raises(StorageError, match=r"it is (gone|another object) now"):
        file.read(0, 5)


def test_denied_and_wrong(bucket: Bucket) -> None:
    path = bucket.put("a", b"12345")
    with pytest.raises(StorageError, match=r"denied.*Check the credentials"):
        bucket.storage(READER_KEYS).open(path, "file")
    for bad in ("s3://", "s3:///a", "file://a/b", "ftp://a/b", "a/b"):
        with pytest.raises(ConfigError, match=r"s3://BUCKET/KEY"):
            bucket.storage().stat(bad)
    for bad in ("s3://a/b//c", "s3://a//b", "s3://a/./b", "file:///tmp/../a", "s3://train/a\1"):
        with pytest.raises(ConfigError, match=r"double slash|cannot be the path"):
            bucket.storage().stat(bad)
    for options, place in (({"endpont": "x"}, path), ({}, "msc://nothing/a")):
        with pytest.raises(ConfigError, match="cannot be opened with its options"):
            bucket.storage(options).stat(place)
    for endpoint in ("", "localhost:1"):
        with pytest.raises(ConfigError, match="must begin with http"):
            bucket.storage({"endpoint": endpoint}).stat(path)
    with pytest.raises(ConfigError, match="time_limit must be between"):
        bucket.storage(time_limit=np.inf)


@pytest.mark.parametrize("bucket", ["s3", "az"], indirect=True)
def test_a_bucket_that_is_not_there(bucket: Bucket) -> None:
    prefix = bucket.prefix.replace("train", "nobucket")
    with pytest.raises(StorageError, match="nobucket does not exist"):
        IndexedDataset(prefix, storage=bucket.storage())


def test_what_failed_ahead_is_asked_for_again(bucket: Bucket, proxy: Proxy) -> None:
    path, piece = bucket.put("a", b"12345"), (np.array([1]), np.array([3]))
    file: Any = bucket.storage(time_limit=0.1).open(path, "file")
    proxy.add_fault("503", "GET")
    file.prefetch(*piece)
    while not file._parts[1, 3][0].body.done():
        time.sleep(0.01)
    proxy.reset()
    assert file.gather(*piece).tobytes() == b"234"


FAULTS = {
    "503": "SlowDown",
    "cut": "cannot be read",
    "expired": "credentials or the signature expired",
    "stall": "too slow",
}


@pytest.mark.parametrize("bucket", ["s3", "gs", "az"], indirect=True)
@pytest.mark.parametrize("kind", FAULTS)
def test_faults_end_in_time_or_are_not_seen(bucket: Bucket, proxy: Proxy, kind: str) -> None:
    path = bucket.put("a", BYTES[:5000].tobytes())
    proxy.add_fault(kind, "GET", times=3)
    file = bucket.storage(stall_limit=1.0).open(path, "file")
    assert file.read(7, 4000).tobytes() == BYTES[7:4007].tobytes()
    assert proxy.count("GET") == 4
    storage = bucket.storage(stall_limit=0.2 if kind == "stall" else 10, time_limit=0.8)
    file = storage.open(path, "file", file.identity)
    proxy.add_fault(kind, "GET")
    with pytest.raises(StorageError, match=rf"{FAULTS[kind]}.*requests in .*time_limit is 0.8 s"):
        file.read(7, 4000)


@pytest.mark.parametrize("has_ranges", [True, False])
def test_servers_without_conditions_or_ranges(has_ranges: bool) -> None:
    objects = {"/train/a": b"12345"}
    with serving(RangeServer.of(objects, has_ranges=has_ranges)) as address:
        file = ObjectStorage(options_for(address), time_limit=0.3).open("s3://train/a", "file")
        if has_ranges:
            assert file.read(1, 3).tobytes() == b"234"
            objects["/train/a"] = b"54321"
        message = r"changed .* an object of 5 bytes" if has_ranges else "cannot be read"
        with pytest.raises(StorageError, match=message):
            file.read(0, 4)


def read_in_child(storage: Any, path: str, out: Any) -> None:
    try:
        out.put(storage.open(path, "file").read(0, 5).tobytes())
    except MillraceError as error:
        out.put(str(error))


def test_a_fork_is_an_error_that_says_what_to_do(bucket: Bucket) -> None:
    path, storage = bucket.put("a", b"12345"), bucket.storage()
    storage.open(path, "file").read(0, 5)
    for method, answer in (("fork", "forkserver or spawn"), ("spawn", "12345")):
        context: Any = multiprocessing.get_context(method)
        out = context.Queue()
        child = context.Process(target=read_in_child, args=(storage, path, out))
        child.start()
        result = out.get(timeout=60)
        child.join(60)
        assert answer in (result if isinstance(result, str) else result.decode())


def test_the_end_of_python_does_not_wait(bucket: Bucket, proxy: Proxy) -> None:
    """Requests that are tried again in threads end with the program."""
    path = bucket.put("a", b"12345")
    proxy.add_fault("503", "GET")
    code = (
        "import numpy, sys; from millrace.storage import storage_of\n"
        f"file = storage_of({path!r}).open({path!r}, 'file')\n"
        "file.prefetch(numpy.arange(5), numpy.ones(5, int))"
    )
    start = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert time.monotonic() - start < 60  # the limit is 300 s


def test_files_of_the_system_and_folders_of_others(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    file = ObjectStorage().open(f"file://{tmp_path}/a", "file")
    assert file.read(1, 3).tobytes() == b"234"
    (tmp_path / "a").write_bytes(b"123456")
    with pytest.raises(StorageError, match=r"changed"):
        file.read(1, 3)
    (tmp_path / "open").mkdir()
    os.chmod(tmp_path / "open", 0o777)
    (tmp_path / "a.idx").write_bytes(b"12345")
    path = f"file://{tmp_path}/a.idx"
    with pytest.raises(ConfigError, match=r"its mode 0777"):
        ObjectStorage(folder=tmp_path / "open").open(path, "mmap")
    for folder in ("a/b", "node"):  # below a file, as in a folder that is only read
        assert ObjectStorage(folder=tmp_path / folder).open(path, "mmap").size == 5
    (copy,) = (tmp_path / "node").glob("*.idx")
    for damage in (b"12354" + copy.read_bytes()[5:], bytes(13), b"12345"):
        copy.write_bytes(damage)
        file = ObjectStorage(folder=tmp_path / "node").open(path, "mmap")
        assert file.read(0, 5).tobytes() == b"12345"
    assert copy.stat().st_size == 13
