"""Whatever takes a prefix reads `s3://` prefixes: the results are those of the local files."""

import itertools
import pickle
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

import millrace
from millrace import IndexedDataset, IndexedDatasetBuilder, Loader
from millrace.cli import main
from millrace.encoding import Tokenizer
from millrace.errors import ConfigError, StorageError
from millrace.online import open_rows
from millrace.run import DatasetConfig, InstantConfig, build_datasets
from millrace.shards import Shards
from millrace.store import RawTokens
from millrace.tokenizing import tokenize
from tests.buckets.conftest import Bucket
from tests.buckets.servers import Proxy
from tests.conftest import make_texts, write_jsonl
from tests.shard_folders import write_sequences


def write_pair(folder: Path, name: str = "data", documents: int = 300, seed: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(seed)
    with IndexedDatasetBuilder(folder / name, np.uint16, checksums=True) as builder:
        for length in random.integers(1, 200, documents).tolist():
            builder.add_document(random.integers(0, 100, length))
    with millrace.provenance.OriginsWriter(folder / name) as origins:
        origins.add(["web.jsonl"], [0] * documents, range(1, documents + 1), [-1] * documents)
    return folder / name


def batches_of(dataset: Any, **options: Any) -> list[list[Any]]:
    with Loader(dataset, micro_batch_size=4, **options) as loader:
        return [batch["tokens"].tolist() for batch in loader]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_a_dataset_is_that_of_the_files(tmp_path: Path, bucket: Bucket, proxy: Proxy) -> None:
    local = IndexedDataset(write_pair(tmp_path))
    millrace.write_loss_ranges(local.prefix, [(number, 0, 1) for number in range(300)])
    prefix = f"{bucket.upload(tmp_path)}/data"
    proxy.reset()
    remote = IndexedDataset(prefix)
    assert (proxy.count("HEAD"), proxy.count("GET")) == (2, 1)  # the identities, and the index
    assert remote.fingerprint == local.fingerprint
    assert [tokens.tolist() for tokens in remote[:9]] == [tokens.tolist() for tokens in local[:9]]
    assert (remote.origin(7), remote.info()) == (local.origin(7), local.info())
    assert pickle.loads(pickle.dumps(remote))[5].tolist() == local[5].tolist()
    own: Any = {"sequence_length": 64, "seed": 1, "eod_token": 0, "loss_ranges": "apply"}
    masks = [
        millrace.GPTDataset(one, **own).batch([0, 5, 9])["loss_mask"] for one in (local, remote)
    ]
    assert (masks[0] == masks[1]).all()
    assert masks[0].min() == 0
    proxy.reset()
    assert IndexedDataset(prefix).lengths_checksum == local.lengths_checksum
    assert proxy.count("GET") == 0  # the index is on the node


def test_an_instant_run_reads_ahead(tmp_path: Path, bucket: Bucket, proxy: Proxy) -> None:
    """Also from one sequence length to the next, which the samples of a step do not mix."""
    write_pair(tmp_path)
    own: Any = {"sequence_length": 32, "seed": 1, "num_samples": (200, 0, 0)}
    phases = [{"until": 80}, {"sequence_length": 16}]
    local, remote = (
        build_datasets(
            InstantConfig(sources={"data": {"prefix": prefix, "weight": 1}}, phases=phases, **own)
        ).train
        for prefix in (tmp_path / "data", f"{bucket.upload(tmp_path)}/data")
    )
    assert local is not None
    assert remote is not None
    assert (local.is_remote, remote.is_remote) == (False, True)
    assert batches_of(remote) == batches_of(local)
    remote.prefetch(range(76, 84))
    proxy.reset()
    with Loader(remote, micro_batch_size=4, prefetch=1) as loader:
        next(loader)
        for _ in range(1000):
            if proxy.count("GET .*bin") > 99:
                break
            time.sleep(0.01)
    assert proxy.count("GET .*bin") > 99  # of 200 samples


CASES: list[Any] = [*itertools.product(["s3", "gs", "az", "file"], [1, 2, 4])]  # all three mirrors
SERVERS = ["s3", "gs", "az"]
CASES += [pytest.param(SERVERS[seed % 3], seed, marks=pytest.mark.long) for seed in range(200)]


@pytest.mark.parametrize(("bucket", "seed"), CASES, indirect=["bucket"])
def test_random_cases_under_faults(
    tmp_path: Path, bucket: Bucket, proxy: Proxy, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults that are shorter than the limit change no batch, and are not seen."""
    monkeypatch.setattr("millrace.storage.mirror.FIRST", 0)  # pieces that no sidecar can check
    random = np.random.default_rng(seed)
    write_pair(tmp_path / "in", documents=int(random.integers(40, 200)), seed=seed)
    folders = tmp_path / "in", bucket.upload(tmp_path / "in")
    mirrors: list[Any] = [{}, {"limit": 1 << 13}, {"limit": 1 << 30}]
    mirror = mirrors[random.integers(3)]
    faults = {"503": 0.05, "cut": 0.03, "expired": 0.02, "stall": 0.003}
    if mirror.get("limit") == 1 << 30:  # each block is compared with the sidecar
        faults["flip"] = 0.3
    proxy.latency = float(random.choice([0, 0.003]))
    for kind, share in faults.items():
        proxy.add_fault(kind, "GET .*bin" if kind == "flip" else "GET|HEAD", share)
    if mirror:
        mirror = {**mirror, "mirror": tmp_path / "mirror"}
    storage = bucket.storage(stall_limit=2.0, time_limit=120.0, **mirror)
    length, threads, ahead = random.integers(1, 100), random.integers(1, 4), random.integers(1, 9)
    batches = []
    for folder, one in zip(folders, (None, storage), strict=True):
        pair = IndexedDataset(f"{folder}/data", storage=one)
        dataset = millrace.GPTDataset(pair, sequence_length=int(length), seed=seed)
        batches.append(batches_of(dataset, threads=int(threads), prefetch=int(ahead)))
    assert batches[0] == batches[1]


def test_shards_and_raw_tokens(
    tmp_path: Path, bucket: Bucket, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = np.random.default_rng(0).integers(0, 100, (50, 16)).astype(np.uint16)
    write_sequences(tmp_path / "shards", rows)
    np.save(tmp_path / "raw.npy", rows.reshape(-1))
    prefix = bucket.upload(tmp_path)
    remote = Shards(f"{prefix}/shards")
    assert [remote[number].tolist() for number in range(50)] == rows.tolist()
    assert remote.fingerprint == Shards(tmp_path / "shards").fingerprint
    raw = RawTokens(f"{prefix}/raw.npy")
    assert raw.reader.read(0, raw.reader.size).tobytes() == rows.tobytes()
    texts = [printed(capsys, "inspect", place) for place in (f"{prefix}/shards", remote.prefix)]
    assert texts[0] == texts[1]
    bucket.put("shards/shard_0007.bin", b"12")
    assert main(["verify", f"{prefix}/shards"]) == 1
    assert "shard_0007.bin is not one of the 3 shards" in capsys.readouterr().out


def test_verify_and_inspect(
    tmp_path: Path, bucket: Bucket, capsys: pytest.CaptureFixture[str]
) -> None:
    local = write_pair(tmp_path)
    prefix = f"{bucket.upload(tmp_path)}/data"
    texts = [printed(capsys, "inspect", str(place)) for place in (local, prefix)]
    assert texts[1].replace(prefix, str(local)) == texts[0]
    assert "checksums" in printed(capsys, "verify", prefix)
    data = bytearray((tmp_path / "data.bin").read_bytes())
    data[1000] ^= 1
    bucket.put("data.bin", bytes(data))
    assert main(["verify", prefix]) == 1
    assert "block 0" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="file system"):
        IndexedDatasetBuilder(prefix)


def test_a_run(tmp_path: Path, bucket: Bucket, proxy: Proxy) -> None:
    for number in range(3):
        write_pair(tmp_path, f"data{number}", 100, number)
    remote = bucket.upload(tmp_path)

    def config(folder: str, **options: Any) -> DatasetConfig:
        prefixes = [f"{folder}/data{number}" for number in range(3)]
        return DatasetConfig(
            sequence_length=32,
            seed=1,
            num_samples=(100, 10, 0),
            blend=(prefixes, [1, 2, 1]),
            split="90,10,0",
            cache=tmp_path / "cache",
            **options,
        )

    expected = batches_of(build_datasets(config(str(tmp_path))).train)
    storage = bucket.storage()
    assert batches_of(build_datasets(config(remote)).train) == expected
    assert batches_of(build_datasets(config(remote, storage=storage)).train) == expected
    proxy.reset()
    datasets = build_datasets(config(remote, trust_cache=True))
    assert batches_of(datasets.train) == expected
    assert proxy.count("HEAD|list-type") == 0  # the manifest knows the identities
    bucket.put("data1.bin", (tmp_path / "data1.bin").read_bytes()[::-1])
    with pytest.raises(StorageError, match="changed"):
        batches_of(build_datasets(config(remote, trust_cache=True)).train)


START = """
import sys
from millrace import DatasetConfig, Loader, build_datasets
prefixes, cache = sys.argv[1:-1], sys.argv[-1]
sys.stdin.readline()
config = DatasetConfig(
    sequence_length=32, seed=1, num_samples=(400, 0, 0), cache=cache, split="1,0,0",
    blend=(prefixes, [1.0] * len(prefixes)),
)
next(Loader(build_datasets(config).train, micro_batch_size=64))
"""


def start_at_once(prefixes: list[str], cache: Path, num_processes: int) -> None:
    command = [sys.executable, "-c", START, *prefixes, str(cache)]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(num_processes)]
    time.sleep(0.1 * num_processes)
    for process in processes:
        process.stdin.write(b"\n")  # type: ignore[union-attr]
        process.stdin.close()  # type: ignore[union-attr]
    assert [process.wait(120) for process in processes] == [0] * num_processes


def test_a_start_without_a_herd(
    tmp_path: Path, bucket: Bucket, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing of all, and each index once on a node."""
    for number in range(6):
        write_pair(tmp_path / "in", f"data{number}", 100, number)
    remote = bucket.upload(tmp_path / "in")
    prefixes = [f"{remote}/data{number}" for number in range(6)]
    start_at_once(prefixes, tmp_path / "cache", 1)  # plans
    for node, has_copies in (("new", False), ("new", True)):
        folder = tmp_path / node
        folder.mkdir(exist_ok=True)
        monkeypatch.setenv("TMPDIR", str(folder))
        proxy.reset()
        start_at_once(prefixes, tmp_path / "cache", 6)
        assert proxy.count("list-type") <= 1
        assert proxy.count("HEAD") == proxy.count("info.json") == 0
        assert proxy.count("idx") == (0 if has_copies else 6)


def write_texts(path: Path, texts: list[str]) -> None:
    table = pa.table({"text": texts})
    if path.suffix == ".parquet":
        pa.parquet.write_table(table, path, row_group_size=70)
    elif path.suffix == ".csv":
        pa.csv.write_csv(table, path)
    elif path.suffix == ".arrow":
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table, max_chunksize=70)
    else:
        write_jsonl(path, texts)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "arrow"])
def test_texts(tmp_path: Path, bucket: Bucket, tokenizer_file: Path, kind: str) -> None:
    (tmp_path / "in").mkdir()
    for number in range(2):
        write_texts(tmp_path / f"in/{number}.{kind}", make_texts(400)[number::2])
    remote, options = bucket.upload(tmp_path), {"workers": 2, "chunk_size": 4096}
    for number, place in enumerate([tmp_path / "in", f"{remote}/in", f"{remote}/in/*.{kind}"]):
        tokenizer = Tokenizer(tokenizer_file)
        tokenize([place], tmp_path / f"out{number}", tokenizer=tokenizer, **options)
    outputs = [next(tmp_path.glob(f"out{number}*.bin")).read_bytes() for number in range(3)]
    assert outputs[0] == outputs[1] == outputs[2] != b""


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_rows_by_number(tmp_path: Path, bucket: Bucket, kind: str) -> None:
    path, numbers = tmp_path / f"in.{kind}", np.random.default_rng(0).permutation(300)
    write_texts(path, make_texts(300))
    remote, expected = f"{bucket.upload(tmp_path)}/in.{kind}", open_rows(path).rows(numbers)
    for _ in range(2):
        opened = open_rows(remote, cache=tmp_path / "cache")
        assert pickle.loads(pickle.dumps(opened)).rows(numbers) == expected
    if kind == "jsonl":
        bucket.put(f"in.{kind}", path.read_bytes()[::-1])
        with pytest.raises(StorageError, match="changed"):
            opened.rows(numbers)


def test_the_budget_of_a_run(
    tmp_path: Path, bucket: Bucket, proxy: Proxy, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its requests and bytes are those that the proxy counts."""
    with IndexedDatasetBuilder(tmp_path / "data", np.uint16) as builder:
        for _ in range(4):
            builder.add_document(np.zeros(1 << 16, np.uint16))
    prefix = f"{bucket.upload(tmp_path)}/data"
    arguments = ["bench", prefix, "--sequence-length=255", "--seconds=0.1", "--micro-batch-size=8"]
    bench = printed(capsys, *arguments, "--mirror=100M", "--get-price=1000")
    dataset = millrace.GPTDataset(IndexedDataset(prefix), sequence_length=255, seed=1234)
    proxy.reset()
    for start in range(0, len(dataset), 8):
        dataset.batch(np.arange(start, min(start + 8, len(dataset))))
    expected = pytest.approx(proxy.count("data.bin"), rel=0.1)
    source = f"order: instant\nsources: {{a: {{prefix: {prefix}, weight: 1}}}}\n"
    counts = f"seq-length: 255\nglobal-batch-size: 8\nnum-samples: [{len(dataset)}, 0, 0]\n"
    (tmp_path / "run.yaml").write_text(source + counts)
    plan = printed(capsys, "plan", f"{tmp_path}/run.yaml", "--get-price=1000")
    for text in (bench, plan):
        found = re.search(r"the run +(\d[\d,]*) requests, .* price (\d[\d,]*)\.00", text)
        assert found
        assert int(found[1].replace(",", "")) == expected
        assert found[1] == found[2]
    assert re.search(r"mirrors +save 0\.\d% of the bytes", bench)  # one epoch


def test_the_drop_in_reads_buckets(tmp_path: Path, bucket: Bucket) -> None:
    """The arrays are those of Megatron-LM's own names over the local files."""
    from millrace import megatron as drop_in
    from tests.oracle import oracle_megatron as oracle

    write_pair(tmp_path, documents=60)
    remote = f"{bucket.upload(tmp_path)}/data"
    assert drop_in.IndexedDataset.exists(remote)
    assert not drop_in.IndexedDataset.exists(f"{remote}2")
    folder, samples = str(tmp_path / "copies"), []
    is_remote = {"object_storage_cache_path": folder, "mmap_bin_files": False}
    own: Any = {"random_seed": 1, "sequence_length": 8, "path_to_cache": str(tmp_path / "cache")}
    for prefix, options in ((str(tmp_path / "data"), {}), (remote, is_remote)):
        config = oracle.config_of(None, drop_in.GPTDatasetConfig, **own, **options)
        low = drop_in.GPTDataset.build_low_level_dataset(prefix, config)
        indices = np.arange(60, dtype=np.int32)
        dataset = drop_in.GPTDataset(low, prefix, indices, 20, drop_in.Split.train, config)
        samples.append([dataset[number]["tokens"].tolist() for number in range(20)])
        assert low[7].tolist() == IndexedDataset(tmp_path / "data")[7].tolist()
    assert samples[0] == samples[1]
    assert isinstance(low.bin_reader, drop_in._S3BinReader)
    options = {"mmap": False, "object_storage_config": drop_in.ObjectStorageConfig(folder)}
    by_client = drop_in.IndexedDataset(f"msc://__filesystem__{tmp_path}/data", **options)
    assert isinstance(by_client.bin_reader, drop_in._MultiStorageClientBinReader)
    assert [by_client[number].tolist() for number in (0, 7)] == [low[0].tolist(), low[7].tolist()]
    (tmp_path / "data.bin").write_bytes((tmp_path / "data.bin").read_bytes())
    with pytest.raises(StorageError, match="changed"):
        by_client[0]
    assert pickle.loads(pickle.dumps(low))[3].tolist() == low[3].tolist()
    assert {path.suffix for path in Path(folder).iterdir()} == {".idx"}
