"""Whole documents: what belongs to them, and what can be wrong; `shuffle_cases` has their bytes."""

import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.errors import ConfigError, DataError
from millrace.shuffling import ShuffleResult, shuffle
from millrace.shuffling.domains import find_domains
from millrace.shuffling.whole_documents import DocumentItems
from millrace.store import IndexedDatasetBuilder
from millrace.store.info import read_info
from tests.jobs.shuffle_cases import Document, build, document_items


def some_documents(count: int) -> list[Document]:
    return [Document([np.array([number, number + 1])]) for number in range(count)]


def run(folder: Path, **own: Any) -> ShuffleResult:
    """Shuffles the documents of a folder into one shard."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    options: dict[str, Any] = {"num_shards": 1, "workers": 1, **own}
    return shuffle(folder / "in", folder / "out", documents=True, **options)


def test_origins_of_some_files_are_dropped_with_a_notice(tmp_path: Path) -> None:
    build(tmp_path / "in" / "a", some_documents(2), has_origins=True)
    build(tmp_path / "in" / "b", some_documents(2))
    build(tmp_path / "in" / "c", [])
    (notice,) = run(tmp_path).notices
    assert "1 of 3 files have no origins" in notice
    assert "b.bin is the first" in notice
    assert not (tmp_path / "out" / "shard_0000.origins.parquet").exists()


def provenance_of(folder: Path) -> Any:
    info = read_info(f"{folder}/out/shard_0000")
    return info and info.provenance


def test_the_common_tokenizer_is_in_the_sidecar(tmp_path: Path) -> None:
    provenance = {"tokenizer": {"name": "gpt2", "sha256": "a" * 64}}
    build(tmp_path / "in" / "a", some_documents(2), provenance=provenance)
    build(tmp_path / "in" / "b", some_documents(2), provenance=provenance, checksums=True)
    run(tmp_path)
    assert provenance_of(tmp_path) == provenance
    build(tmp_path / "in" / "c", some_documents(2))
    run(tmp_path)
    assert provenance_of(tmp_path) == {}
    provenance = {"tokenizer": {"name": "other", "sha256": "b" * 64}}
    build(tmp_path / "in" / "d", some_documents(2), provenance=provenance)
    with pytest.raises(
        ConfigError, match=r"the same ids mean different texts.*or mix .*--any-tokenizer"
    ):
        run(tmp_path)
    run(tmp_path, any_tokenizer=True)
    assert provenance_of(tmp_path) == {}


def test_bad_inputs_are_refused(tmp_path: Path) -> None:
    np.arange(4, dtype=np.int32).tofile(tmp_path / "x.bin")
    with pytest.raises(ConfigError, match=r"x\.bin has no \.idx.*leave --documents out"):
        document_items(tmp_path, folder=tmp_path)
    build(tmp_path / "in" / "a", some_documents(2), has_modes=True)
    build(tmp_path / "in" / "b", some_documents(2))
    with pytest.raises(ConfigError, match=r"a\.bin has modes, and .*b\.bin has none"):
        document_items(tmp_path / "in", folder=tmp_path)
    build(tmp_path / "in" / "b", some_documents(2), has_modes=True, dtype="uint16")
    with pytest.raises(ConfigError, match=r"a\.bin holds int32, and .*b\.bin holds uint16"):
        document_items(tmp_path / "in", folder=tmp_path)
    with pytest.raises(ConfigError, match=r"weight 0\.1 takes none\. Give .* or larger weights"):
        document_items([(0.1, tmp_path / "in" / "a")], folder=tmp_path)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (34 + 4 * 3 + 8, "sequence 1 has the length 2 and starts at byte 5"),
        (34 + 12 * 3 + 8, "document entry 1 is 5; it should be at least 0 and at most 3"),
    ],
)
def test_damaged_indices_are_refused(tmp_path: Path, place: int, message: str) -> None:
    build(tmp_path / "a", some_documents(3))
    with open(tmp_path / "a.idx", "r+b") as file:
        file.seek(place)
        file.write(np.int64(5).tobytes())
    with pytest.raises(DataError, match=message):
        document_items([(1, tmp_path / "a")], folder=tmp_path)


def test_an_index_that_changes_at_the_start_is_an_error(tmp_path: Path) -> None:
    """Nor does a shard of another size get an index; nor may origins be gone."""
    build(tmp_path / "a", some_documents(3), has_origins=True)
    found = find_domains([(1, tmp_path / "a")], dtype="int32", has_documents=True)
    items = DocumentItems(found, str(tmp_path))
    (tmp_path / "shard.bin").write_bytes(b"1234" * 5)
    with pytest.raises(DataError, match=r"3 documents and 24 bytes; the .bin has 20"):
        items.write_index(str(tmp_path / "shard"), np.arange, 0, 3)
    assert {path.name for path in tmp_path.glob("shard*")} == {"shard.bin"}
    (tmp_path / "a.origins.parquet").unlink()
    with pytest.raises(DataError, match=r"origins of .*a\.bin were removed"):
        DocumentItems(found, str(tmp_path))
    build(tmp_path / "a", some_documents(4))
    with pytest.raises(DataError, match=r"a\.bin/\.idx changed while the job began"):
        DocumentItems(found, str(tmp_path))


def test_documents_of_many_sequences_take_little_memory(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "web", np.uint16) as builder:
        for _ in range(1000):
            builder.add_document(np.ones(2000, np.uint16), np.ones(2000, np.int32))
    items = document_items([(1, str(tmp_path / "web"))], folder=tmp_path)
    np.ones(2_000_000, np.uint16).tofile(tmp_path / "shard.bin")
    tracemalloc.start()
    try:
        items.write_index(str(tmp_path / "shard"), np.arange, 0, 1000)
        assert tracemalloc.get_traced_memory()[1] < 15_000_000
    finally:
        tracemalloc.stop()
