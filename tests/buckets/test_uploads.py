"""Uploads: whole or not at all, also after kills."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from millrace import IndexedDataset
from millrace.cli import main
from millrace.errors import ConfigError, DataError
from millrace.files import sum_of, xxh3
from millrace.jobs import upload
from millrace.shards import Shards, verify_shards
from millrace.storage import exists, storage_of
from millrace.store import verify
from tests.buckets.conftest import Bucket
from tests.buckets.servers import Proxy
from tests.buckets.test_prefixes import write_pair
from tests.conftest import make_texts
from tests.shard_folders import make_sequences, write_sequences


def test_a_pair_goes_up_and_is_new(tmp_path: Path, bucket: Bucket, proxy: Proxy) -> None:
    local, target = write_pair(tmp_path), f"{bucket.prefix}/v1/data"
    before = sorted(path.name for path in tmp_path.iterdir())
    proxy.add_fault("503", "PUT|POST", 0.3)
    paths = upload(local, target)
    assert paths[-1] == f"{target}.idx"
    assert sorted(path.rpartition("/")[2] for path in paths) == before
    assert sorted(storage_of(target).list(target)) == sorted(paths)  # and no claim
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert IndexedDataset(target).fingerprint == IndexedDataset(local).fingerprint
    assert verify([target])[0].problems == []
    with pytest.raises(ConfigError, match="there already: give a new name"):
        upload(local, target)


@pytest.mark.parametrize("target", ["", "a/b", "s3://", "s3://a/", "s3://a/b//c", "msc://a/b"])
def test_wrong_targets(tmp_path: Path, target: str) -> None:
    local = write_pair(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"s3://BUCKET/KEY|double slash"):
        upload(local, target)
    assert sorted(tmp_path.iterdir()) == before


def test_sources_that_are_not_whole_leave_nothing(tmp_path: Path, bucket: Bucket) -> None:
    target = f"{bucket.prefix}/v1/data"
    write_sequences(tmp_path / "shards", make_sequences(60, 64, np.uint16), 3)
    (tmp_path / "shards/shard_0001.bin").unlink()
    write_pair(tmp_path, "half").with_suffix(".bin").unlink()
    before = sorted(tmp_path.iterdir())
    for name, missing in (("data", r"data\.bin"), ("half", r"half\.bin"), ("shards", "_0001.bin")):
        with pytest.raises(DataError, match=f"{missing} is not there"):
            upload(tmp_path / name, target)
    assert sorted(tmp_path.iterdir()) == before
    upload(write_pair(tmp_path), target, storage=bucket.storage())
    assert verify([target])[0].problems == []


KILLED = """
import os, sys
from millrace.engine import uploading
uploading.Upload._put_last = lambda *_: os._exit(9)
uploading.upload(*sys.argv[1:])
"""


def start_upload(local: Path, target: str) -> None:
    """An upload that is killed before the index."""
    assert subprocess.run([sys.executable, "-c", KILLED, str(local), target]).returncode == 9


def test_a_source_that_was_made_anew(tmp_path: Path, bucket: Bucket) -> None:
    local, target = write_pair(tmp_path, documents=50), f"{bucket.prefix}/v1/data"
    start_upload(local, target)
    write_pair(tmp_path, documents=50, seed=1)
    with pytest.raises(DataError, match=r"changed since its upload began.*--restart"):
        upload(local, target)
    for name in (".info.json", ".origins.parquet"):
        local.with_suffix(name).unlink()
    upload(local, target, restart=True)
    assert sorted(storage_of(target).list(target)) == [f"{target}.bin", f"{target}.idx"]
    assert IndexedDataset(target).fingerprint == IndexedDataset(local).fingerprint


def test_a_target_that_was_taken_over(tmp_path: Path, bucket: Bucket) -> None:
    target, other = f"{bucket.prefix}/v1/data", write_pair(tmp_path, "other", seed=1)
    start_upload(write_pair(tmp_path), target)
    upload(other, target, restart=True)
    with pytest.raises(ConfigError, match="has ended"):
        upload(tmp_path / "data", target)
    assert IndexedDataset(target).fingerprint == IndexedDataset(other).fingerprint


def test_one_upload_at_a_time(tmp_path: Path, bucket: Bucket) -> None:
    local, target = write_pair(tmp_path), f"{bucket.prefix}/v1/data"
    bucket.put("v1/data.uploading", b"of another")
    with pytest.raises(ConfigError, match=r"another upload.*--restart"):
        upload(local, target)
    assert main(["upload", str(local), target, "--restart", "--move"]) == 0
    assert list(tmp_path.iterdir()) == []
    assert verify([target])[0].problems == []


def test_killed_uploads_go_on(tmp_path: Path, bucket: Bucket, proxy: Proxy) -> None:
    rows = make_sequences(600, 1 << 10, np.uint16)
    write_sequences(tmp_path / "shards", rows, 6)
    target = f"{bucket.prefix}/shards"
    command = [sys.executable, "-m", "millrace", "upload", f"{tmp_path}/shards/", target + "/"]
    proxy.latency = 0.05
    is_done, kills = False, 0
    while not is_done:
        process = subprocess.Popen([*command, "--move"])
        if kills < 4:
            time.sleep(np.random.uniform(0.3, 1.0))
            os.kill(process.pid, signal.SIGKILL)
        kills += 1
        is_done = process.wait() == 0 or not any(tmp_path.glob("*/metadata.json"))
        is_done &= not any(tmp_path.glob("*.journal"))
        puts = proxy.count("PUT .*/metadata.json")
        assert puts or not exists(storage_of(target), f"{target}/metadata.json")
    assert verify_shards(target).problems == []
    assert (Shards(target)[599] == rows[599]).all()
    assert [path.name for path in (tmp_path / "shards").iterdir()] == []
    assert proxy.count("PUT .*(bin|idx)") <= 12 + kills - 1  # a kill costs one file


def job_of(verb: str, folder: Path, megabytes: int) -> list[str]:
    """Writes the input of a job; its command, but for the output."""
    random, num_bytes = np.random.default_rng(0), megabytes * 10**6
    if verb == "tokenize":
        lines = [json.dumps({"text": text}) for text in make_texts(10_000)]
        data = ("\n".join(lines) + "\n").encode()
        (folder / "in.jsonl").write_bytes(data * max(num_bytes // len(data), 1))
        words = f"--input {folder}/in.jsonl --tokenizer bytes --chunk-size {num_bytes // 9 + 1}"
        return f"tokenize {words} --workers 2 --output-prefix".split()
    for domain in "ab":
        (folder / "in" / domain).mkdir(parents=True)
        random.integers(0, 50_000, num_bytes // 4, np.uint16).tofile(folder / f"in/{domain}/x.bin")
    words = f"--input-dir {folder}/in --dtype uint16 --seq-len 512 --plan gather --num-shards 20"
    memory = max(num_bytes // 8, 110 * 10**6)
    return f"shuffle {words} --num-workers 2 --memory {memory} --output-dir".split()


@pytest.mark.parametrize("megabytes", [4, pytest.param(2000, marks=pytest.mark.long)])
@pytest.mark.parametrize("verb", ["tokenize", "shuffle"])
def test_killed_jobs_write_what_local_ones_do(
    tmp_path: Path, bucket: Bucket, verb: str, megabytes: int
) -> None:
    command = [sys.executable, "-m", "millrace", *job_of(verb, tmp_path, megabytes)]
    for name in ("local", "work"):
        (tmp_path / name).mkdir()
    start = time.monotonic()
    subprocess.run([*command, f"{tmp_path}/local/out"], check=True)
    seconds, target = time.monotonic() - start, f"{bucket.prefix}/v1"
    command += [f"{tmp_path}/work/out", "--upload-to", f"{target}/out"]
    for _ in range(4 if megabytes == 4 else 10):
        job = subprocess.Popen(command)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(np.random.uniform(0, 0.6 * seconds))
        job.kill()
        job.wait()
    subprocess.run(command, check=True)
    kept = {path.name for path in (tmp_path / "work").rglob("*") if path.is_file()}
    assert kept in ({"out.job.info.json"}, {"shuffle.job.info.json"})
    local = [path for path in (tmp_path / "local").rglob("*.*") if path.name not in kept]
    paths = [f"{target}/{path.relative_to(tmp_path / 'local')}" for path in local]
    assert sorted(storage_of(target).list(paths[0].rpartition("/")[0] + "/")) == sorted(paths)
    for path, ours in zip(paths, local, strict=True):
        assert sum_in_bucket(path) == sum_of(str(ours))


def sum_in_bucket(path: str) -> tuple[int, str]:
    file, digest = storage_of(path).open(path, "file"), xxh3()
    for start in range(0, file.size, 1 << 26):
        digest.update(file.read(start, min(1 << 26, file.size - start)))
    return file.size, digest.hexdigest()
