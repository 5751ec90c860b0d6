"""Uploads: whole or not at all, also after kills."""

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
from millrace.errors import ConfigError
from millrace.jobs import upload
from millrace.shards import Shards, verify_shards
from millrace.storage import exists, storage_of
from millrace.store import verify
from tests.buckets.conftest import Bucket
from tests.buckets.servers import Proxy
from tests.buckets.test_prefixes import write_pair
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
    command = [sys.executable, "-m", "millrace", "upload", str(tmp_path / "shards"), target]
    proxy.latency = 0.05
    is_done, kills = False, 0
    while not is_done:
        process = subprocess.Popen([*command, "--move"])
        if kills < 4:
            time.sleep(np.random.uniform(0.3, 1.0))
            os.kill(process.pid, signal.SIGKILL)
        kills += 1
        is_done = process.wait() == 0 or not any(tmp_path.glob("*/metadata.json"))
        is_done &= not any(tmp_path.glob("*.upload.json"))
        puts = proxy.count("PUT .*/metadata.json")
        assert puts or not exists(storage_of(target), f"{target}/metadata.json")
    assert verify_shards(target).problems == []
    assert (Shards(target)[599] == rows[599]).all()
    assert [path.name for path in (tmp_path / "shards").iterdir()] == []
    assert proxy.count("PUT .*shard_0000.bin") <= 2
