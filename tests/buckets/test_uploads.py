"""Uploads of jobs: whole or not at all, also after kills."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from millrace import IndexedDataset
from millrace.files import sum_of
from millrace.storage import SequentialStream, storage_of
from tests.buckets.conftest import Bucket
from tests.conftest import make_texts, write_jsonl

KILLED = """
import os, sys
from millrace.cli import main
from millrace.engine import uploading
uploading._put_last = lambda *_: os._exit(9)  # before the index
main(sys.argv[1:])
"""


def test_two_jobs_never_mix(tmp_path: Path, bucket: Bucket, verb: Callable[..., str]) -> None:
    target = f"{bucket.prefix}/v1/data"

    def job(name: str, *options: str) -> list[str]:
        write_jsonl(tmp_path / f"{name}.jsonl", make_texts(200, len(name)))
        words = f"tokenize --input {tmp_path}/{name}.jsonl --output-prefix {tmp_path}/{name}"
        return [*words.split(), "--tokenizer", "bytes", "--workers", "1", *options]

    def fails(command: list[str], text: str) -> None:
        assert text in verb(*command, "--upload-to", target, status=1)

    ours, other = job("ours"), job("other", "--no-checksums", "--provenance", "none")
    command = [sys.executable, "-c", KILLED, *ours, "--upload-to", target]
    assert subprocess.run(command).returncode == 9
    fails(other, "another upload to this target is at work, has died")
    write_jsonl(tmp_path / "ours.jsonl", make_texts(300))
    fails(ours, "inputs of the job have changed since its output began to go up")
    verb(*other, "--upload-to", target, "--restart")
    fails(ours, "or has ended")
    fails(job("third"), "is there already: give a new name")
    start = f"{target}_text_document"  # without the sidecars of the first job, and without a claim
    assert sorted(storage_of(target).list(target)) == [f"{start}.bin", f"{start}.idx"]
    verb(*job("other")[:-2], "--output-prefix", f"{tmp_path}/local")
    local = IndexedDataset(tmp_path / "local_text_document")
    assert IndexedDataset(start).fingerprint == local.fingerprint


def job_of(verb: str, folder: Path, megabytes: int) -> list[str]:
    """Writes the input of a job; its command, but for the output."""
    random, num_bytes = np.random.default_rng(0), megabytes * 10**6
    if verb == "tokenize":
        data = write_jsonl(folder / "in.jsonl", make_texts(10_000)).read_bytes()
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
    results = {"out.job.info.json", "shuffle.job.info.json"}
    local = [path for path in (tmp_path / "local").rglob("*.*") if path.name not in results]
    paths = {f"{target}/{path.relative_to(tmp_path / 'local')}": path for path in local}
    folder = min(paths).rpartition("/")[0] + "/"
    command += [f"{tmp_path}/work/out", "--upload-to", f"{target}/out"]
    bucket.add_fault("503", "POST|PUT .*idx", 0.3)
    num_kills = 4 if megabytes == 4 else 10
    for _ in range(num_kills):
        job = subprocess.Popen(command)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(np.random.uniform(0, 0.6 * seconds))
        job.kill()
        job.wait()
        there = {*storage_of(folder).list(folder)} - {f"{target}/out.uploading"}
        if any(path.endswith(("document.idx", "metadata.json")) for path in there):
            assert there == {*paths}  # readers see all, or nothing
    subprocess.run(command, check=True)
    if verb == "shuffle" and megabytes == 4:  # a kill costs the files of the workers
        assert bucket.count("PUT .*shard.*bin") <= 20 + 2 * num_kills
    kept = {path.name for path in (tmp_path / "work").rglob("*") if path.is_file()}
    assert len(kept & results) == len(kept) == 1
    assert {*storage_of(folder).list(folder)} == {*paths}
    for path, ours in paths.items():
        there = SequentialStream(storage_of(path).open(path, "file"))
        assert sum_of(path, opened=there) == sum_of(str(ours))
