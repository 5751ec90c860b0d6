"""Whole documents in any order: their tokens, and all that belongs to them."""

import filecmp
import pickle
import tempfile
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from millrace.errors import ConfigError, DataError
from millrace.provenance import OriginsWriter
from millrace.shuffling import whole_documents
from millrace.shuffling.domains import find_domains
from millrace.shuffling.whole_documents import DocumentItems, Table
from millrace.store import IndexedDataset, IndexedDatasetBuilder, verify
from tests.jobs.shuffle_cases import document_items


class Document(NamedTuple):
    sequences: list[list[int]]
    modes: list[int]
    source: str
    line: int
    id: str | None


def build(
    prefix: Path,
    documents: Sequence[Document],
    *,
    multimodal: bool = False,
    has_origins: bool = False,
    dtype: str = "int32",
    **options: Any,
) -> None:
    """Writes documents as the library's builder does."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with IndexedDatasetBuilder(prefix, dtype, multimodal=multimodal, **options) as builder:
        for document in documents:
            builder.add_document(
                [token for sequence in document.sequences for token in sequence],
                [len(sequence) for sequence in document.sequences],
                document.modes[: len(document.sequences)],
            )
    if has_origins:
        with OriginsWriter(prefix) as origins:
            for document in documents:
                origins.add([document.source], [0], [document.line], [-1], [document.id])


def write_shard(
    items: DocumentItems, prefix: Path, sources: NDArray[np.int64], start: int, stop: int
) -> list[str]:
    """Writes a shard as the job does."""
    numbers = sources[start:stop]
    ends = np.cumsum(items.sizes(numbers))
    buffer = np.empty(int(ends[-1]) if len(ends) else 0, items.dtype)
    order = np.argsort(numbers)
    items.read(numbers[order], buffer, (ends - items.sizes(numbers))[order])
    buffer.tofile(f"{prefix}.bin")
    return items.write_index(str(prefix), lambda low, high: sources[low:high], start, stop)


single = st.lists(st.lists(st.integers(0, 60000), max_size=6), min_size=1, max_size=1)
several = st.lists(st.lists(st.integers(0, 60000), max_size=4), max_size=4)


def documents_of(sequences: st.SearchStrategy[list[list[int]]]) -> st.SearchStrategy[Document]:
    return st.builds(
        Document,
        sequences,
        st.lists(st.integers(-128, 127), min_size=4, max_size=4),
        st.sampled_from(["a.jsonl", "b/ä.jsonl", "c"]),
        st.integers(0, 2**40),
        st.one_of(st.none(), st.text(max_size=5)),
    )


files_of = st.lists(
    st.one_of(
        st.lists(documents_of(single), max_size=6), st.lists(documents_of(several), max_size=6)
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(
    files=files_of,
    multimodal=st.booleans(),
    has_origins=st.booleans(),
    dtype=st.sampled_from(["uint16", "int32"]),
    block=st.sampled_from([1, 3, 1000]),
    data=st.data(),
)
def test_a_shard_is_what_the_builder_makes_of_its_documents(
    files: list[list[Document]],
    multimodal: bool,
    has_origins: bool,
    dtype: str,
    block: int,
    data: st.DataObject,
) -> None:
    documents = [document for file in files for document in file]
    options: Any = {"multimodal": multimodal, "has_origins": has_origins, "dtype": dtype}
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_documents, "_BLOCK", block)
        patch.setattr(whole_documents, "_ENTRIES", block)
        patch.setattr(whole_documents, "_MOST_SEQUENCES", block)
        folder = Path(name)
        for number, file in enumerate(files):
            build(folder / "in" / f"domain{number // 2}" / f"{number}", file, **options)
        if not any(sum(map(len, document.sequences)) for document in documents):
            with pytest.raises(ConfigError, match="the input has no tokens"):
                document_items(folder / "in", folder=folder)
            return
        items = pickle.loads(pickle.dumps(document_items(folder / "in", folder=folder)))
        assert items.num_items == len(documents)
        sources = np.array(data.draw(st.permutations(range(len(documents)))), np.int64)
        start = data.draw(st.integers(0, len(documents)))
        expected = [documents[number] for number in sources[start:].tolist()]
        paths = write_shard(items, folder / "shard", sources, start, len(documents))
        build(folder / "expected", expected, **options)
        # An index without documents cannot show origins or modes; the builder writes none.
        suffixes = [".idx"] + [".origins.parquet"] * (has_origins and bool(documents))
        assert paths == [f"{folder}/shard{suffix}" for suffix in suffixes]
        for suffix in (".bin", ".idx", *([".origins.parquet"] if expected else [])[:has_origins]):
            shard, other = folder / f"shard{suffix}", folder / f"expected{suffix}"
            assert filecmp.cmp(shard, other, shallow=False), suffix
        assert verify([folder / "shard"])[0].problems == []
        assert sum(row["num_items"] for row in items.inputs) == items.num_items


def some_documents(count: int, source: str = "a") -> list[Document]:
    return [Document([[n, n + 1]], [0], source, n, None) for n in range(count)]


def test_weights_take_documents_several_times(tmp_path: Path) -> None:
    build(tmp_path / "web", some_documents(4))
    build(tmp_path / "rare", some_documents(3))
    build(tmp_path / "unused", some_documents(1))
    entries = [(2.5, tmp_path / "web"), (1, tmp_path / "rare"), (0.5, tmp_path / "unused")]
    items = document_items(entries, folder=tmp_path)
    counts = {domain.name: domain.num_items for domain in items.domains}
    assert counts == {"rare": 3, "unused": 0, "web": 10}
    notice = items.notices[0]
    assert "and 1 whole ones, of which the weight 0.5 takes none" in notice
    sources = np.arange(13)
    write_shard(items, tmp_path / "shard", sources, 0, 13)
    tokens = [int(sequence[0]) for sequence in IndexedDataset(tmp_path / "shard")]
    assert tokens == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 0, 2]


def test_origins_of_some_files_are_dropped_with_a_notice(tmp_path: Path) -> None:
    build(tmp_path / "in" / "a", some_documents(2), has_origins=True)
    build(tmp_path / "in" / "b", some_documents(2))
    build(tmp_path / "in" / "c", [])
    items = document_items(tmp_path / "in", folder=tmp_path)
    assert "1 of 3 files have no origins" in items.notices[0]
    assert "b.bin is the first" in items.notices[0]
    assert write_shard(items, tmp_path / "shard", np.arange(4), 0, 4) == [f"{tmp_path}/shard.idx"]


def test_the_common_tokenizer_is_in_the_sidecar(tmp_path: Path) -> None:
    provenance = {"tokenizer": {"name": "gpt2", "sha256": "a" * 64}}
    build(tmp_path / "in" / "a", some_documents(2), provenance=provenance)
    build(tmp_path / "in" / "b", some_documents(2), provenance=provenance, checksums=True)
    items = document_items(tmp_path / "in", folder=tmp_path)
    paths = write_shard(items, tmp_path / "shard", np.arange(4), 0, 4)
    assert paths == [f"{tmp_path}/shard.idx", f"{tmp_path}/shard.info.json"]
    info = IndexedDataset(tmp_path / "shard").info()
    assert info is not None
    assert info.provenance == provenance
    build(tmp_path / "in" / "c", some_documents(2))
    items = document_items(tmp_path / "in", folder=tmp_path)
    assert write_shard(items, tmp_path / "shard", np.arange(4), 0, 4) == paths[:1]
    provenance = {"tokenizer": {"name": "other", "sha256": "b" * 64}}
    build(tmp_path / "in" / "d", some_documents(2), provenance=provenance)
    with pytest.raises(ConfigError, match="the same ids mean different texts"):
        document_items(tmp_path / "in", folder=tmp_path)


def test_bad_inputs_are_refused(tmp_path: Path) -> None:
    np.arange(4, dtype=np.int32).tofile(tmp_path / "x.bin")
    with pytest.raises(ConfigError, match=r"x\.bin has no \.idx.*leave --documents out"):
        document_items(tmp_path, folder=tmp_path)
    build(tmp_path / "in" / "a", some_documents(2), multimodal=True)
    build(tmp_path / "in" / "b", some_documents(2))
    with pytest.raises(ConfigError, match=r"a\.bin has modes, and .*b\.bin has none"):
        document_items(tmp_path / "in", folder=tmp_path)
    build(tmp_path / "in" / "b", some_documents(2), multimodal=True, dtype="uint16")
    with pytest.raises(ConfigError, match=r"a\.bin holds int32, and .*b\.bin holds uint16"):
        document_items(tmp_path / "in", folder=tmp_path)
    with pytest.raises(ConfigError, match="of which the weights take none"):
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


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(0, 300),
    ranges=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 9)), max_size=20),
)
def test_tables_give_rows_in_any_order(num_rows: int, ranges: list[tuple[int, int]]) -> None:
    values = np.random.default_rng(num_rows).integers(0, 2**60, num_rows)
    bounds = np.array(ranges, np.int64).reshape(-1, 2)
    starts, stops = np.minimum(bounds[:, 0], num_rows), np.minimum(bounds.sum(axis=1), num_rows)
    with tempfile.TemporaryDirectory() as folder:
        table = Table(f"{folder}/table", np.int64)
        with table.writing() as append:
            for start in range(0, num_rows, 50):
                append(values[start : start + 50])
        numbers = np.concatenate([np.empty(0, np.int64), *map(np.arange, starts, stops)])
        assert np.array_equal(table.ranges(starts, stops - starts), values[numbers])
        assert np.array_equal(table.rows(numbers.reshape(-1, 1))[:, 0], values[numbers])


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
