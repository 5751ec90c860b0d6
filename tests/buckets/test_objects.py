"""Objects as files of a storage: identities, ranges, errors, faults and forks."""

import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.errors import ConfigError, StorageError
from millrace.shuffling.shuffle_job import ShuffleOptions
from millrace.storage import bytes_in_memory
from millrace.storage.objects import ObjectStorage
from millrace.storage.transfers import start_pieces
from tests.buckets.conftest import Bucket, on_each_server
from tests.buckets.servers import KEYS
from tests.conftest import results_of_processes

FAULTS = {"503": "SlowDown", "cut": "cannot be read", "expired": "expired: ", "stall": "too slow"}
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
        pieces, others = random.integers(0, [[1 << 20], [3000]], (2, 2, count))
        parts = [BYTES[at : at + size].tobytes() for at, size in zip(*pieces, strict=True)]
        for announced in ((), (pieces,), (others,), (pieces, pieces, others)):
            for some in announced:
                file.prefetch(*some)
            for _ in range(2):
                assert file.gather(*pieces).tobytes() == b"".join(parts)
    in_memory: Any = bucket.storage(folder="/dev/null/a").open(bucket.put("a.idx", b"5"), "mmap")
    assert bytes_in_memory(in_memory) == ord("5")  # at an address for numbers
    for name, paths in (("a", [path]), ("", [path]), ("b", [])):
        assert list(storage.list(f"{bucket.prefix}/folder/{name}")) == paths
    with pytest.raises(ValueError, match=r"the file has"):
        file.read(file.size - 1, 2)


def test_what_is_announced_is_asked_for_once(bucket: Bucket) -> None:
    file: Any = bucket.storage().open(bucket.put("a", BYTES.tobytes()), "file")
    for step, num_requests in ((1 << 16, 8), (1000, 1)):  # apart, and neighbours
        offsets, counts = np.arange(0, 8 * step, step), np.full(8, 1000)
        bucket.reset()
        file.prefetch(offsets, counts)
        file.gather(offsets[::-1], counts)
        assert (bucket.count("GET"), bucket.bodies) == (num_requests, 8000)
    file.gather(np.array([0, 1040]), np.array([1000, 1000]))  # a gap of 1/25
    assert bucket.count("GET") == 2
    file.read(0, file.size)
    assert bucket.count("GET") == 5  # of 8 MiB at most
    asked: list[int] = []
    start_pieces(lambda start, _: asked.append(start), [(500, 9), (0, 9), (509, 9), (70, 9)])
    assert asked == [500, 0, 70]  # first what is needed first


@on_each_server
def test_errors_say_what_is_wrong(bucket: Bucket) -> None:
    storage, path = bucket.storage(), bucket.put("a", b"12345")
    file = storage.open(path, "file")
    for prefix in (bucket.prefix, bucket.prefix.replace("train", "nobucket")):
        with pytest.raises(FileNotFoundError, match=r"no such object or bucket.*nothing"):
            storage.stat(f"{prefix}/nothing")
    bucket.put("a", b"543210")
    with pytest.raises(StorageError, match=r"changed after it was opened.*under a new name"):
        file.read(0, 5)
    storage.ask(path, lambda store, key: store.delete(key))
    with pytest.raises(StorageError, match=r"it is (gone|another object) now"):
        file.read(0, 5)


def test_denied_and_wrong(bucket: Bucket) -> None:
    with pytest.raises(StorageError, match=r"denied.*Check the credentials"):
        bucket.storage({"access_key_id": "nobody"}).open(bucket.put("a", b"12345"), "file")
    bucket.add_fault("301", "region")
    wrong: list[Any] = [
        *[(bad, {}, "s3://BUCKET/KEY") for bad in ("s3://", "s3:///a", "file://a/b", "ftp://a/b")],
        *[(f"s3://{bad}", {}, "double slash") for bad in ("a/b//c", "a//b", "a/./b", "a/../b")],
        ("s3://a/a\1", {}, "cannot be the path"),
        ("s3://a/region", {}, "give the region"),
        ("msc://nothing/a", {}, "cannot be opened with its options"),
        ("s3://a/a", {"options": {"endpont": "x"}}, r"its options: [^{]*'S3'\.$"),
        *[("s3://a/a", {"options": {"endpoint": bad}}, "must begin with") for bad in ("", "a:1")],
        ("s3://a/a", {"time_limit": np.inf}, "time_limit must be between"),
        ("s3://a/a", {"mirror": "a"}, "give mirror and limit"),
        ("s3://a/a", {"mirror": "", "limit": 1}, "must be the path of a folder"),
        ("s3://a/a", {"mirror": "s3://a/b", "limit": 1}, "in a file system"),
        ("s3://a/a", {"mirror": "/proc/x", "limit": 1}, "the mirror /proc/x: No such file"),
        ("s3://a/a", {"mirror": __file__, "limit": 1}, "the mirror .*: File exists"),
    ]
    for path, arguments, message in wrong:
        with pytest.raises(ConfigError, match=message):
            bucket.storage(**arguments).stat(path)
    with pytest.raises(StorageError, match="cannot be read"):  # of a file system
        bucket.storage().stat("file:///a#1")
    for target in ("", "a/b", "s3://", "s3://a/", "msc://a/b"):
        with pytest.raises(ConfigError, match=r"s3://BUCKET/KEY"):
            ShuffleOptions(output_dir="out", upload_to=target)


def test_credentials_that_come_late(bucket: Bucket) -> None:
    calls: list[int] = []

    def provider() -> Any:
        calls.append(1)
        if len(calls) < 3:
            raise RuntimeError("not yet")
        return {**KEYS, "token": None, "expires_at": None}

    path = bucket.put("a", b"12345")
    assert bucket.storage({"credential_provider": provider}).stat(path).size == 5


@pytest.mark.parametrize("bucket", ["s3", "gs", "az"], indirect=True)
@pytest.mark.parametrize("kind", FAULTS)
def test_faults_end_in_time_or_are_not_seen(bucket: Bucket, kind: str) -> None:
    path = bucket.put("a", BYTES[:5000].tobytes())
    bucket.add_fault(kind, "GET", times=3)
    file = bucket.storage(stall_limit=1.0).open(path, "file")
    assert file.read(7, 4000).tobytes() == BYTES[7:4007].tobytes()
    assert bucket.count("GET") == 4
    storage = bucket.storage(time_limit=0.8, requests=1)
    file = storage.open(path, "file", file.identity)
    bucket.add_fault(kind, "GET")
    pieces = np.arange(7, 4000, 400), np.full(10, 9)
    bucket.requests.clear()
    file.prefetch(*pieces)
    with pytest.raises(StorageError, match=rf"{FAULTS[kind]}.*requests in .*time_limit is 0.8 s"):
        file.read(0, 5000)
    assert bucket.count("GET") < 25  # the limits of those that wait do not add up
    bucket.reset()  # what has failed ahead is asked for again
    assert file.gather(*pieces).tobytes() == BYTES[7:4007].reshape(-1, 400)[:, :9].tobytes()


def test_the_limit_of_a_long_put_counts_from_its_failure(bucket: Bucket) -> None:
    failures = [OSError("cut")]

    def put(*_: Any) -> None:
        time.sleep(0.5)
        if failures:
            raise failures.pop()

    bucket.storage(time_limit=0.4).ask(f"{bucket.prefix}/a", put, part_retries=10)


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_servers_without_ranges_or_conditions(bucket: Bucket) -> None:
    file = bucket.storage(time_limit=0.3).open(bucket.put("a", b"12345"), "file")
    bucket.add_fault("range", "GET")
    with pytest.raises(StorageError, match="cannot be read"):
        file.read(0, 4)
    bucket.put("a", b"54321")
    bucket.faults = [["if-match", "GET", 1, 1]]
    with pytest.raises(StorageError, match=r"changed .* an object of 5 bytes"):
        file.read(0, 4)


def read_in_child(storage: Any, path: str, out: Any) -> None:
    try:
        out.put(storage.open(path, "file").read(0, 5).tobytes().decode())
        storage.open(f"{path}b", "file").prefetch(np.arange(50) * 3000, np.ones(50, int))
    except StorageError as error:
        out.put(str(error))


def test_other_processes(bucket: Bucket) -> None:
    """A forked one is told what to do; the end of Python waits for no retries and no queue."""
    path, storage = bucket.put("a", b"12345"), bucket.storage(time_limit=300.0, requests=1)
    bucket.put("ab", BYTES[:150_000].tobytes())
    storage.open(path, "file").read(0, 5)
    bucket.add_fault("503", "GET .*/ab")
    for method, answer in (("fork", "set_start_method"), ("spawn", "12345")):
        assert answer in results_of_processes(method, read_in_child, [(storage, path)])[0]
    assert bucket.count("GET .*/ab") < 25
    index, storages = bucket.put("ab.idx", b"5"), [bucket.storage(time_limit=0.8) for _ in range(8)]
    with ThreadPoolExecutor(8) as threads:  # which wait for one another as processes do
        results = [threads.submit(storage.open, index, "mmap") for storage in storages]
    assert any("the last of 1 requests" in str(one.exception()) for one in results)


def test_copies_of_indices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.idx").write_bytes(b"12345")
    path = f"file://{tmp_path}/a.idx"
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match=r"its mode 0777"):
        ObjectStorage(folder=tmp_path / "open").open(path, "mmap")
    monkeypatch.chdir(tmp_path)
    storages = [ObjectStorage(folder=folder) for folder in ("a.idx/b", "node")]
    monkeypatch.chdir("/")
    for storage in storages:  # below a file, as in a folder that is only read
        assert storage.open(path, "mmap").size == 5
    (copy,) = (tmp_path / "node").glob("*.idx")
    for damage in (b"12354" + copy.read_bytes()[5:], bytes(13), b"12345"):
        copy.write_bytes(damage)
        file = ObjectStorage(folder=tmp_path / "node").open(path, "mmap")
        assert file.read(0, 5).tobytes() == b"12345"
    assert copy.stat().st_size == 13
