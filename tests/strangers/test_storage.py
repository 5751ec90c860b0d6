"""A storage of a stranger: a dictionary of bytes, by public names alone."""

import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import millrace
from millrace.shards import Shards
from millrace.storage import Identity, gather_in_turn
from millrace.store import RawTokens


class MemoryFile:
    def __init__(self, data: bytes) -> None:
        self.data, self.size = data, len(data)
        self.identity = Identity(self.size, 0, hash(data))

    def read(self, byte_offset: int, num_bytes: int) -> np.ndarray:
        return np.frombuffer(self.data, np.uint8, num_bytes, byte_offset)

    def gather(self, byte_offsets: np.ndarray, byte_counts: np.ndarray) -> np.ndarray:
        return gather_in_turn(self.read, byte_offsets, byte_counts)


class Memory:
    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    def open(self, path: str, access: str) -> MemoryFile:
        if path not in self.files:
            raise FileNotFoundError(path)
        return MemoryFile(self.files[path])

    def stat(self, path: str) -> Identity:
        return self.open(path, "file").identity

    def list(self, prefix: str) -> Iterator[str]:
        return (path for path in self.files if path.startswith(prefix))


def memory_of(folder: Path) -> Memory:
    return Memory({f"mem://{path.name}": path.read_bytes() for path in folder.iterdir()})


def test_a_loader_reads_from_a_dictionary(tmp_path: Path) -> None:
    prefix = tmp_path / "data"
    with millrace.IndexedDatasetBuilder(prefix, np.uint16, checksums=True) as builder:
        for number in range(100):
            builder.add_document(np.full(7, number), [3, 4])
    with millrace.provenance.OriginsWriter(prefix) as origins:
        origins.add(["web.jsonl"], [0] * 100, range(1, 101), [-1] * 100)
    memory, local = memory_of(tmp_path), millrace.IndexedDataset(prefix)
    dataset = millrace.IndexedDataset("mem://data", storage=memory)  # type: ignore[arg-type]
    assert not dataset.is_mapped
    assert dataset.fingerprint == local.fingerprint
    assert dataset[5].tolist() == local[5].tolist()
    assert dataset.origin(7) == local.origin(7)
    assert dataset.info() == local.info()
    batches = [
        [batch["tokens"].tolist() for batch in millrace.Loader(samples, micro_batch_size=4)]
        for samples in (
            millrace.GPTDataset(file, sequence_length=16, seed=1) for file in (dataset, local)
        )
    ]
    assert batches[0] == batches[1]
    again = pickle.loads(pickle.dumps(dataset))
    assert again[199].tolist() == [99] * 4
    memory.files["mem://data.bin"] = bytes(1400)
    with pytest.raises(millrace.DataError, match="pickled"):
        pickle.loads(pickle.dumps(dataset))


def test_a_path_of_another_storage_needs_one() -> None:
    for open_one in (millrace.IndexedDataset, RawTokens, Shards):
        with pytest.raises(millrace.ConfigError, match=r"ftp://.*storage="):
            open_one("ftp://host/data")
    with pytest.raises(millrace.ConfigError, match="s3://"):
        millrace.IndexedDatasetBuilder("s3://bucket/data")
    with pytest.raises(millrace.DataError, match="not found"):
        millrace.IndexedDataset("mem://data", storage=Memory({}))  # type: ignore[arg-type]
