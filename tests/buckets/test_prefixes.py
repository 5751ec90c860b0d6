"""Whatever takes a prefix reads or writes one in a bucket: the results are those of local files."""

import multiprocessing
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millrace
from millrace import GPTDataset, IndexedDataset, IndexedDatasetBuilder, Loader, StorageError
from millrace.encoding import Tokenizer
from millrace.errors import ConfigError
from millrace.files import sum_of
from millrace.jobs.bucket_budget import BucketOptions, budget_of
from millrace.online import open_rows
from millrace.run import build_datasets, config_from
from millrace.storage import SequentialStream, storage_of
from millrace.store import RawTokens
from millrace.tokenizing import tokenize
from tests.buckets.conftest import Bucket
from tests.conftest import make_texts, results_of_processes, write_documents, write_jsonl
from tests.feed.helpers import wait_for
from tests.online.test_numbered_rows import write_tables
from tests.shard_folders import make_sequences
from tests.store.pairs import flip

SERVERS, KINDS = ["s3", "gs", "az", "file"], ["pair", "shards", "gpt", "instant"]
CASES = [  # 30: shards in a mirror
    pytest.param(SERVERS[seed % 4], seed, marks=[pytest.mark.long] * (seed >= 12 and seed != 30))
    for seed in range(200)
]


def write_inputs(folder: Path, documents: int = 100, seed: int = 0) -> str:
    """Token files, one of them with a mask, raw tokens and shards; returns the folder."""
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(seed)
    for name in ("data0", "data1", "data2", "masked"):
        with IndexedDatasetBuilder(folder / name, np.uint16, checksums=True) as builder:
            for length in random.integers(1, 200, documents).tolist():
                builder.add_document(random.integers(0, 100, length))
        with millrace.provenance.OriginsWriter(folder / name) as origins:
            origins.add(["web.jsonl"], [0] * documents, range(1, documents + 1), [-1] * documents)
    millrace.write_loss_ranges(folder / "masked", [(number, 0, 1) for number in range(documents)])
    np.save(folder / "raw.npy", make_sequences(50, 16, np.uint16, seed).reshape(-1))
    inputs, own = [(1.0, str(folder / "raw.npy"))], {"seq_len": 16, "num_shards": 10, "workers": 1}
    millrace.jobs.shuffle(None, folder / "shards", input_list=inputs, **own)
    return str(folder)


def run_of(folder: str, order: str = "gpt", length: int = 32, **options: Any) -> Any:
    """A run over the first three token files, in an instant order with two sequence lengths."""
    blend = [word for number in "012" for word in ("1", f"{folder}/data{number}")]
    run: Any = {"data_path": blend, "seq_length": length, "num_samples": [200, 10, 0]}
    phases = {"phases": [{"until": 80}, {"sequence_length": 16}]} if order == "instant" else {}
    return replace(config_from({**run, "split": "90,10,0", "order": order, **phases}), **options)


def dataset_of(kind: str, folder: str, length: int = 32, storage: Any = None) -> Any:
    if kind == "pair":
        pair, own = IndexedDataset(f"{folder}/masked", storage=storage), {"eod_token": 0}
        return GPTDataset(pair, sequence_length=length, seed=1, loss_ranges="apply", **own)
    if kind == "shards":
        return millrace.ShardedDataset(f"{folder}/shards", storage=storage)
    return build_datasets(run_of(folder, kind, length, storage=storage)).train


def batches_of(dataset: Any, **options: Any) -> list[dict[str, Any]]:
    with Loader(dataset, micro_batch_size=4, **options) as loader:
        return [{name: np.asarray(one).tolist() for name, one in batch.items()} for batch in loader]


@pytest.mark.parametrize(("bucket", "seed"), CASES, indirect=["bucket"])
def test_random_cases_under_faults(
    tmp_path: Path, bucket: Bucket, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults that are shorter than the limit change no batch, and are not seen."""
    for name in ("storage.mirror.BLOCK", "storage.transfers.BLOCK", "store.info.BLOCK_SIZE"):
        monkeypatch.setattr(f"millrace.{name}", 4096)
    monkeypatch.setattr("millrace.storage.mirror.FIRST", 0)  # pieces that no sidecar can check
    random = np.random.default_rng(seed)
    kind, limit = KINDS[(seed + seed // 4) % 4], [1 << 30, None, 1 << 15][seed % 3]
    local = write_inputs(tmp_path / "in", int(random.integers(40, 200)), seed)
    folders = local, bucket.upload(tmp_path / "in")
    bucket.latency = float(random.choice([0, 0.003]))
    # Each block is compared with the sidecar, if all are in the mirror.
    is_checked = kind in ("pair", "instant", "shards") and limit == 1 << 30
    bucket.add_fault("flip", "GET .*(data.|masked|shard_.*).bin", 0.5 * is_checked)
    for fault, share in {"503": 0.05, "cut": 0.03, "expired": 0.02, "stall": 0.003}.items():
        bucket.add_fault(fault, "GET|HEAD", share)
    mirror: Any = {} if limit is None else {"mirror": tmp_path / "mirror", "limit": limit}
    storage = bucket.storage(stall_limit=2.0, time_limit=120.0, **mirror)
    length, threads, ahead = random.integers(1, 100), random.integers(1, 4), random.integers(1, 9)
    results = []
    for folder, one in zip(folders, (None, storage), strict=True):
        dataset = pickle.loads(pickle.dumps(dataset_of(kind, folder, int(length), one)))
        assert dataset.is_remote == (one is not None)
        results.append(batches_of(dataset, threads=int(threads), prefetch=int(ahead)))
    assert results[0] == results[1]


def test_a_run_reads_ahead(tmp_path: Path, bucket: Bucket) -> None:
    """Also from one sequence length to the next, which the samples of a step do not mix."""
    write_inputs(tmp_path)
    remote = dataset_of("instant", bucket.upload(tmp_path))
    remote.prefetch(range(76, 84))
    bucket.reset()
    with Loader(remote, micro_batch_size=4, prefetch=1) as loader:
        next(loader)  # other processes may still wait for their first step
        assert bucket.count("GET .*bin") < 20
        next(loader)
        wait_for(lambda: bucket.count("GET .*bin") > 99)  # of 200 samples


def test_verify_and_inspect(tmp_path: Path, bucket: Bucket, verb: Callable[..., str]) -> None:
    places = write_inputs(tmp_path), bucket.upload(tmp_path)
    for name, path in (("inspect", "data0"), ("verify", "data0"), ("inspect", "shards")):
        local, remote = (verb(name, f"{place}/{path}") for place in places)
        assert remote.replace(places[1], places[0]) == local
    pairs = [IndexedDataset(f"{place}/data0") for place in places]
    raw = [RawTokens(f"{place}/raw.npy").reader.read(0, 1600).tolist() for place in places]
    facts = [(one.origin(7), one.fingerprint, some) for one, some in zip(pairs, raw, strict=True)]
    assert facts[0] == facts[1]
    with pytest.raises(ConfigError, match="in a file system"):
        millrace.write_loss_ranges(pairs[1].prefix, [])
    flip(tmp_path / "data0.bin", 1000)
    bucket.put("data0.bin", (tmp_path / "data0.bin").read_bytes())
    assert "block 0" in verb("verify", f"{bucket.prefix}/data0", status=1)
    bucket.put("shards/shard_0017.bin", b"12")
    assert "shard_0017.bin is not one" in verb("verify", f"{bucket.prefix}/shards", status=1)


def first_batch(config: Any, barrier: Any, out: Any) -> None:
    barrier.wait()
    out.put(next(Loader(build_datasets(config).train, micro_batch_size=64))["tokens"].shape)


def test_a_start_without_a_herd(tmp_path: Path, bucket: Bucket, monkeypatch: Any) -> None:
    """A listing of all, and each index once on a node; nothing if the manifest is trusted."""
    write_inputs(tmp_path / "in")
    config = run_of(bucket.upload(tmp_path / "in"), cache=tmp_path / "cache")
    bucket.reset()
    for _ in range(2):
        IndexedDataset(f"{bucket.prefix}/masked")
    assert (bucket.count("HEAD"), bucket.count("GET")) == (4, 1)
    bucket.reset()
    millrace.ShardedDataset(f"{bucket.prefix}/shards")
    assert (bucket.count("HEAD"), bucket.count("list-type")) == (2, 1)  # none for a shard
    expected = batches_of(build_datasets(config).train)  # plans
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    barrier = multiprocessing.get_context("spawn").Barrier(6)
    for num_indices in (3, 0):
        bucket.reset()
        results_of_processes("spawn", first_batch, [(config, barrier)] * 6)
        assert bucket.count("list-type") <= 1
        assert bucket.count("HEAD") == bucket.count("info.json") == 0
        assert bucket.count("idx") == num_indices
    trusted = replace(config, trust_cache=True)
    bucket.reset()
    assert batches_of(build_datasets(trusted).train) == expected
    assert bucket.count("HEAD|list-type") == 0
    bucket.put("data1.bin", (tmp_path / "in/data1.bin").read_bytes()[::-1])
    with pytest.raises(StorageError, match="changed"):
        batches_of(build_datasets(trusted).train)


def test_texts_and_rows(tmp_path: Path, bucket: Bucket, tokenizer_file: Path) -> None:
    """Of Parquet, Arrow, JSONL and CSV, as a folder and as patterns, and of a compressed file."""
    (tmp_path / "in").mkdir()
    num_files = len(write_tables(tmp_path / "in"))
    write_jsonl(tmp_path / "a[1].jsonl.gz", make_texts(400))
    (local, remote), outputs = (tmp_path, bucket.upload(tmp_path)), []
    for place, files in ((local, ["in"]), (remote, ["in"]), (remote, ["in/*.*"])):
        inputs = [f"{place}/{name}" for name in (*files, "a[1].jsonl.gz")]
        tokenizer, out = Tokenizer(tokenizer_file), tmp_path / f"out{len(outputs)}"
        tokenize(inputs, out, tokenizer=tokenizer, workers=2, chunk_size=500)
        outputs.append(Path(f"{out}_text_document.bin").read_bytes())
    assert outputs[0] == outputs[1] == outputs[2] != b""
    numbers = np.random.default_rng(0).permutation(25 * num_files)
    expected = open_rows(f"{local}/in").rows(numbers)
    for _ in range(2):
        opened = open_rows(f"{remote}/in", cache=tmp_path / "cache")
        assert pickle.loads(pickle.dumps(opened)).rows(numbers) == expected
    bucket.put("in/c.jsonl", b"\n" + (tmp_path / "in/c.jsonl").read_bytes())
    with pytest.raises(StorageError, match="changed"):
        opened.rows(numbers)
    assert open_rows(f"{remote}/in", cache=tmp_path / "cache").rows(numbers) == expected


def test_tables_of_several_blocks(tmp_path: Path, bucket: Bucket) -> None:
    """A stream is read by blocks of 1 MiB, which batches and columns of tables do not end with."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "in").mkdir()
    texts = [np.random.default_rng(seed).bytes(5000).hex() for seed in range(400)]
    table, start = pa.table({"text": texts}), tmp_path / "in/a"
    for opened, end, size in ((pa.ipc.new_file, "arrow", 33), (pa.ipc.new_stream, "arrows", 250)):
        with opened(f"{start}.{end}", table.schema) as writer:
            writer.write_table(table, max_chunksize=size)
    pq.write_table(table, f"{start}.parquet", compression="none", use_dictionary=False)
    prefixes, outputs = (tmp_path / "in", bucket.upload(tmp_path / "in")), []
    for path in (
        f"{folder}/a.{end}" for end in ("arrow", "arrows", "parquet") for folder in prefixes
    ):
        out = tmp_path / f"out{len(outputs)}"
        tokenize([path], out, tokenizer=Tokenizer("bytes"), workers=1)
        outputs.append(Path(f"{out}_text_document.bin").read_bytes())
        assert outputs[-1] == outputs[0], path
    numbers = np.random.default_rng(0).permutation(400)
    assert open_rows(f"{prefixes[1]}/a.arrow").rows(numbers)[0] == {"text": texts[numbers[0]]}


def test_the_budget_of_a_run(tmp_path: Path, bucket: Bucket, verb: Any) -> None:
    """Its requests and bytes are those that the proxy counts."""
    write_documents(tmp_path / "data", np.zeros((4, 1 << 16), int))
    prefix = f"{bucket.upload(tmp_path)}/data"
    dataset = GPTDataset(IndexedDataset(prefix), sequence_length=255, seed=1234)
    bucket.reset()
    for start in range(0, len(dataset), 8):
        dataset.batch(np.arange(start, min(start + 8, len(dataset))))
    expected = pytest.approx(bucket.count("data.bin"), rel=0.1)
    source = f"order: instant\nsources: {{a: {{prefix: {prefix}, weight: 1}}}}\n"
    counts = f"seq-length: 255\nglobal-batch-size: 8\nnum-samples: [{len(dataset)}, 0, 0]\n"
    mirror = f"mirror: {tmp_path}/mirror\nmirror-limit: 1M\n"
    (tmp_path / "run.yaml").write_text(source + counts + mirror)
    half = counts.replace(str(len(dataset)), str(len(dataset) // 2))
    for name, text in (("whole", counts), ("half", half)):
        (tmp_path / f"{name}.yaml").write_text(f"data-path: [{prefix}]\nsplit: 1,0,0\n{text}")
    bench = f"bench {tmp_path}/whole.yaml --seconds=0.1 --micro-batch-size=8 --mirror=100M"
    of_half = bench.replace("whole", "half")
    for command in (bench, of_half, f"plan {tmp_path}/run.yaml"):
        text = verb(*command.split(), "--get-price=1000")
        (requests, price), *_ = re.findall(r"the run +([\d,]+) requests, .* ([\d,]+)\.00", text)
        assert int(requests.replace(",", "")) * (1 + (command == of_half)) == expected
        assert price == requests
        assert "mirrors      save 0." in text or command != bench  # one epoch
    assert [*(tmp_path / "mirror").glob("*.data")]  # of the plan
    write_documents(tmp_path / "other", np.ones((4, 1 << 16), int))
    paths = ["1", prefix, "1", f"{tmp_path}/other"]
    own = {"data_path": paths, "seq_length": 255, "num_samples": [99, 0, 0], "split": "1,0,0"}
    mixed = config_from(own)  # half of it is not in a bucket
    train, whole = build_datasets(mixed).train, BucketOptions()
    budget, third = (budget_of(train, whole, 8, 1.0, count) or {} for count in (99, 33))
    assert budget["requests_per_step"] == pytest.approx(4, abs=1)
    assert third["total_requests"] == pytest.approx(budget["total_requests"] / 3, abs=1)


def test_a_mirror_saves_what_each_source_draws_again(tmp_path: Path, bucket: Bucket) -> None:
    for name in "ab":  # 512 samples each
        write_documents(tmp_path / name, np.zeros((32, 1 << 10), int))
    folder, whole = bucket.upload(tmp_path), 1 << 30
    web, code = ({"prefix": f"{folder}/{name}", "weight": 1.0} for name in "ab")
    quarter, rare = web | {"part": [0, 0.25]}, code | {"weight": 1e-4}
    phases = [{"until": 512}, {"sequence_length": 32}]
    for mirror, nodes, count, run, expected in [
        (whole, 1, 512, {"sources": {"web": quarter}}, 3 / 4),
        (1 << 13, 1, 512, {"sources": {"web": quarter}}, 3 / 8),
        (whole, 2, 512, {"sources": {"web": quarter}}, 1 / 2),
        (whole, 1, 2048, {"sources": {"web": web, "code": rare}}, 3 / 4),
        (whole, 1, 2048, {"sources": {"web": quarter, "code": code}}, (7 / 8 + 1 / 2) / 2),
        (whole, 1, 1536, {"sources": {"web": web}, "phases": phases}, 1 / 2),
        (whole, 1, 1024, {"data_path": [f"{folder}/a"], "order": None}, 1 / 2),
        (whole, 1, 300, {"data_path": [f"{folder}/a"], "order": None}, 0),  # of an epoch
    ]:
        rest = {"split": "1,0,0", "seq_length": 64, "num_samples": [count, 0, 0]}
        train = build_datasets(config_from({"order": "instant", **run, **rest})).train
        budget = budget_of(train, BucketOptions(mirror=mirror, nodes=nodes), 16, 1.0, count) or {}
        assert budget["mirror_saving"] == pytest.approx(expected, abs=0.02), (run, mirror)


def test_the_drop_in_reads_buckets(tmp_path: Path, bucket: Bucket) -> None:
    """The arrays are those of Megatron-LM's own names over the local files."""
    from millrace import megatron as drop_in
    from tests.oracle import oracle_megatron as oracle

    local, remote = (f"{one}/data0" for one in (write_inputs(tmp_path), bucket.upload(tmp_path)))
    assert [drop_in.IndexedDataset.exists(one) for one in (remote, f"{remote}2")] == [True, False]
    folder, samples = str(tmp_path / "copies"), []
    is_remote = {"object_storage_cache_path": folder, "mmap_bin_files": False}
    own: Any = {"random_seed": 1, "sequence_length": 8, "path_to_cache": str(tmp_path / "cache")}
    for prefix, options in ((local, {}), (remote, is_remote)):
        config = oracle.config_of(None, drop_in.GPTDatasetConfig, **own, **options)
        low = drop_in.GPTDataset.build_low_level_dataset(prefix, config)
        indices = np.arange(60, dtype=np.int32)
        dataset = drop_in.GPTDataset(low, prefix, indices, 20, drop_in.Split.train, config)
        samples.append([dataset[number]["tokens"].tolist() for number in range(20)])
    assert samples[0] == samples[1]
    options = {"mmap": False, "object_storage_config": drop_in.ObjectStorageConfig(folder)}
    by_client = drop_in.IndexedDataset(f"msc://__filesystem__{local}", **options)
    for one, kind in ((low, "_S3BinReader"), (by_client, "_MultiStorageClientBinReader")):
        assert type(one.bin_reader) is getattr(drop_in, kind)
        assert pickle.loads(pickle.dumps(one))[7].tolist() == IndexedDataset(local)[7].tolist()
    Path(f"{local}.bin").write_bytes(Path(f"{local}.bin").read_bytes())
    with pytest.raises(StorageError, match="changed"):
        by_client[0]
    assert {path.suffix for path in Path(folder).iterdir()} == {".idx"}


def kill_at(command: list[str], bucket: Bucket, pattern: str) -> None:
    bucket.add_fault("503", pattern)
    with subprocess.Popen([sys.executable, "-m", "millrace", *command]) as process:
        wait_for(lambda: bucket.count(pattern))
        process.kill()
    bucket.reset()


def test_two_jobs_never_mix(tmp_path: Path, bucket: Bucket, verb: Callable[..., str]) -> None:
    target = f"{bucket.prefix}/v1/data"

    def job(name: str, *options: str) -> list[str]:
        write_jsonl(tmp_path / f"{name}.jsonl", make_texts(200, len(name)))
        words = f"tokenize --input {tmp_path}/{name}.jsonl --output-prefix {tmp_path}/{name}"
        return [*words.split(), "--tokenizer", "bytes", "--workers", "1", *options]

    def fails(command: list[str], text: str) -> None:
        assert text in verb(*command, "--upload-to", target, status=1)

    ours, other = job("ours"), job("other", "--no-checksums", "--provenance", "none")
    kill_at([*ours, "--upload-to", target], bucket, "PUT .*idx")
    for command in (other, [*other, "--restart"]):  # ours may be stopped, and go on
        fails(command, "another upload to this target is at work, has died")
    write_jsonl(tmp_path / "ours.jsonl", make_texts(300))
    fails(ours, "inputs of the job have changed since its output began to go up")
    bucket.storage().ask(f"{target}.uploading", lambda store, key: store.delete(key))
    verb(*other, "--upload-to", target)
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


@pytest.mark.parametrize("bucket", SERVERS[:3], indirect=True)
def test_a_restart_removes_what_is_up(tmp_path: Path, bucket: Bucket, verb: Any) -> None:
    target = f"{bucket.prefix}/v1"
    command = [*job_of("shuffle", tmp_path, 4), f"{tmp_path}/out", "--upload-to", target]
    kill_at(command, bucket, "PUT .*0011.*bin")
    verb(*command, "--restart", "--num-shards=3")
    assert "ok, structure" in verb("verify", target)


@pytest.mark.parametrize("megabytes", [4, pytest.param(2000, marks=pytest.mark.long)])
@pytest.mark.parametrize("verb", ["tokenize", "shuffle"])
def test_kills_change_no_upload(tmp_path: Path, bucket: Bucket, verb: str, megabytes: int) -> None:
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
    bucket.add_fault("409", r"PUT .*(idx|metadata\.json|uploading)$", 0.3)  # not for parts
    num_kills = 4 if megabytes == 4 else 10
    for _ in range(num_kills):
        job = subprocess.Popen(command)
        time.sleep(np.random.uniform(0, 0.6 * seconds))
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
