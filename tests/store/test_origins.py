"""The sidecar of origins: rows, reshaping, damage, and its publication with the pair."""

from __future__ import annotations

import csv
import errno
import gzip
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace import ConfigError, DataError, IndexedDataset, IndexedDatasetBuilder
from millrace.store import Origin, Origins, finalize_together, origins, verify, write_dolma

Row = tuple[str, int, int, "str | None"]

rows_of_origins = st.lists(
    st.tuples(
        st.sampled_from(["a.jsonl", "b/ü.parquet", "-", ""]),
        st.integers(-(2**63), 2**63 - 1),
        st.integers(-1, 2**40),
        st.none() | st.text(max_size=5),
    ),
    max_size=40,
)


def add(builder: IndexedDatasetBuilder, rows: Sequence[Row], *, has_documents: bool = True) -> None:
    """Adds documents of one token with these origins."""
    if has_documents:
        builder.add_documents(np.ones(len(rows), int), np.ones(len(rows), int))
    sources = [*sorted({row[0] for row in rows}), "unused"]
    builder.add_origins(
        sources,
        [sources.index(row[0]) for row in rows],
        np.array([row[1] for row in rows], np.int64),
        np.array([row[2] for row in rows], np.int64),
        [row[3] for row in rows],
    )


def write(prefix: Path, rows: Sequence[Row], **options: Any) -> IndexedDataset:
    with IndexedDatasetBuilder(prefix, **options) as builder:
        add(builder, rows)
    return IndexedDataset(prefix)


def rows_in(dataset: IndexedDataset, *span: int) -> list[Row] | None:
    span_origins = dataset.origins(*span)
    if span_origins is None:
        return None
    sources, numbers, lines, offsets, ids = span_origins
    return [
        (sources[n], line, offset, id_)
        for n, line, offset, id_ in zip(numbers, lines.tolist(), offsets.tolist(), ids, strict=True)
    ]


def some_rows(count: int, source: str = "a.jsonl") -> list[Row]:
    return [(source, number, 100 * number, f"id-{number}") for number in range(count)]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origins, "_GROUP_ROWS", 7)
    monkeypatch.setattr(origins, "_GROUP_ID_BYTES", 40)


# ---- rows ----


@settings(max_examples=30, deadline=None)
@given(rows=rows_of_origins, data=st.data())
def test_the_rows_are_what_was_added(rows: list[Row], data: st.DataObject) -> None:
    """The bytes of the file do not depend on how they were added."""
    import tempfile

    rows_per_group = data.draw(st.sampled_from([1, 3, 1000]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(origins, "_GROUP_ROWS", rows_per_group)
        patch.setattr(origins, "_GROUP_ID_BYTES", 10)
        dataset = write(Path(folder) / "a", rows, durable=False)
        assert rows_in(dataset) == rows
        start = data.draw(st.integers(0, len(rows)))
        stop = data.draw(st.integers(start, len(rows)))
        assert rows_in(dataset, start, stop) == rows[start:stop]
        for number, row in list(enumerate(rows))[:5]:
            assert dataset.origin(number) == Origin(*row)
            assert dataset.origin(number - len(rows)) == Origin(*row)
        with IndexedDatasetBuilder(Path(folder) / "b", durable=False) as builder:
            for first, end in zip([0, *cuts], [*cuts, len(rows)], strict=True):
                add(builder, rows[first:end])
        with IndexedDatasetBuilder(Path(folder) / "c", durable=False) as builder:
            for first, end in zip([0, *cuts], [*cuts, len(rows)], strict=True):
                builder.add_index(dataset, (first, end))
            add(builder, [])
        contents = [(Path(folder) / f"{name}.origins.parquet").read_bytes() for name in "abc"]
        assert contents[0] == contents[1] == contents[2]
        assert verify([f"{folder}/{name}" for name in "abc"])[2].problems == []


def test_other_tools_can_read_the_file(tmp_path: Path) -> None:
    import pyarrow.parquet

    write(tmp_path / "data", [("a.jsonl", 1, 0, "x"), ("b.jsonl", 2, -1, None)])
    table = pyarrow.parquet.read_table(tmp_path / "data.origins.parquet")
    assert table.to_pydict() == {
        "source": ["a.jsonl", "b.jsonl"],
        "line": [1, 2],
        "byte_offset": [0, -1],
        "id": ["x", None],
    }


def test_one_row_takes_one_row_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origins, "_GROUP_ROWS", 100)
    dataset = write(tmp_path / "data", some_rows(1000))
    assert dataset.origin(999) == Origin("a.jsonl", 999, 99_900, "id-999")
    import pyarrow.parquet

    groups: list[int] = []
    read = pyarrow.parquet.ParquetFile.read_row_group

    def noted(self: Any, group: int, **options: Any) -> Any:
        groups.append(group)
        return read(self, group, **options)

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "read_row_group", noted)
    assert dataset.origin(250) == Origin("a.jsonl", 250, 25_000, "id-250")
    assert rows_in(dataset, 299, 301) == some_rows(301)[299:]
    assert groups == [2, 2, 3]


def test_long_ids_end_a_row_group(tmp_path: Path, small_groups: None) -> None:
    rows: list[Row] = [("a", number, -1, "x" * 30 * (number % 3)) for number in range(50)]
    dataset = write(tmp_path / "data", rows)
    assert rows_in(dataset) == rows
    import pyarrow.parquet

    metadata = pyarrow.parquet.read_metadata(tmp_path / "data.origins.parquet")
    sizes = [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)]
    assert max(sizes) <= 7
    assert 3 in sizes


def test_a_compact_file(tmp_path: Path) -> None:
    """Lines one after the other, and byte offsets of documents of some kilobytes."""
    random = np.random.default_rng(0)
    count = 100_000
    offsets = np.cumsum(random.integers(100, 8000, count))
    with IndexedDatasetBuilder(tmp_path / "data", np.uint8) as builder:
        builder.add_documents(np.zeros(count, np.uint8), np.ones(count, int))
        builder.add_origins(["web.jsonl"], np.zeros(count, int), np.arange(1, count + 1), offsets)
    assert os.path.getsize(tmp_path / "data.origins.parquet") < 2 * count


def test_texts_that_are_not_unicode_are_escaped(tmp_path: Path) -> None:
    dataset = write(tmp_path / "data", [(os.fsdecode(b"caf\xe9.jsonl"), 1, 0, "\ud800")])
    assert dataset.origin(0) == Origin("caf\\udce9.jsonl", 1, 0, "\\ud800")


# ---- all documents have an origin, or none ----


def test_a_pair_without_origins_has_no_sidecar(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "data") as builder:
        builder.add_document([1])
    dataset = IndexedDataset(tmp_path / "data")
    assert dataset.origins() is None
    assert dataset.origin(0) is None
    assert files(tmp_path) == ["data.bin", "data.idx"]
    with pytest.raises(IndexError, match="no document 1"):
        dataset.origin(1)
    with pytest.raises(ConfigError, match="documents are 0 to 2"):
        dataset.origins(0, 2)


@pytest.mark.parametrize("count", [1, 3])
def test_origins_of_some_documents_are_refused(tmp_path: Path, count: int) -> None:
    message = f"has 2 documents, and the origins of {count} were added"
    builder = IndexedDatasetBuilder(tmp_path / "data")
    builder.add_documents([1, 2], [1, 1])
    add(builder, some_rows(count), has_documents=False)
    with pytest.raises(ConfigError, match=message):
        builder.finalize()
    builder.abort()
    assert files(tmp_path) == []


def test_a_builder_goes_on_after_bad_origins(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "data") as builder:
        builder.add_document([1])
        for arguments, message in [
            ((["a"], [1], [0], [0]), "source_numbers go from 0 to 1; there are 1 sources"),
            ((["a"], [-1], [0], [0]), "source_numbers go from -1"),
            (([], [0], [0], [0]), "there are 0 sources"),
            ((["a"], [0], [0, 1], [0]), "2 lines for 1 source_numbers"),
            ((["a"], [0], [0], []), "0 byte_offsets for 1 source_numbers"),
            ((["a"], [0], [0], [0], []), "0 ids for 1 source_numbers"),
            ((["a"], [0], [0], [0], [7]), "ids are"),
            ((["a"], [0], [0], [0], "x"), "ids are"),
            (("a", [0], [0], [0]), "sources are 'a'"),
            (([b"a"], [0], [0], [0]), "sources are"),
            ((["a"], [0.5], [0], [0]), "source_numbers"),
            ((["a"], [0], [2**63], [0]), "lines"),
        ]:
            with pytest.raises(ConfigError, match=message):
                builder.add_origins(*arguments)  # type: ignore[arg-type]
        add(builder, some_rows(1), has_documents=False)
    assert rows_in(IndexedDataset(tmp_path / "data")) == some_rows(1)


def test_an_index_without_origins_leaves_none(tmp_path: Path, small_groups: None) -> None:
    with_origins = write(tmp_path / "with", some_rows(20))
    with IndexedDatasetBuilder(tmp_path / "without") as builder:
        builder.add_document([1])
    for order in (["with", "without"], ["without", "with"], ["with", "without", "with"]):
        with IndexedDatasetBuilder(tmp_path / "data", checksums=True) as builder:
            for name in order:
                builder.add_index(tmp_path / name)
        assert IndexedDataset(tmp_path / "data").origins() is None
        assert not (tmp_path / "data.origins.parquet").exists()
        assert verify([tmp_path / "data"])[0].problems == []
    with IndexedDatasetBuilder(tmp_path / "data") as builder:  # an empty range says nothing
        builder.add_index(tmp_path / "without", (0, 0))
        builder.add_index(with_origins)
    assert rows_in(IndexedDataset(tmp_path / "data")) == some_rows(20)


def test_origins_may_be_given_instead_of_carried(tmp_path: Path) -> None:
    write(tmp_path / "a", some_rows(3))
    with IndexedDatasetBuilder(tmp_path / "data") as builder:
        builder.add_index(tmp_path / "a", origins=False)
        add(builder, some_rows(3, "other"), has_documents=False)
        builder.add_index(tmp_path / "a", first_lines={"a.jsonl": 1000})
    lines = [row[:2] for row in rows_in(IndexedDataset(tmp_path / "data")) or []]
    assert lines == [*(("other", n) for n in range(3)), *(("a.jsonl", 1000 + n) for n in range(3))]
    with IndexedDatasetBuilder(tmp_path / "data") as builder:
        builder.add_index(tmp_path / "a", origins=False)
    assert IndexedDataset(tmp_path / "data").origins() is None
    with (
        pytest.raises(ConfigError, match=r"first_lines has no entry for a\.jsonl"),
        IndexedDatasetBuilder(tmp_path / "data") as builder,
    ):
        builder.add_index(tmp_path / "a", first_lines={})


def test_an_index_cannot_follow_documents_that_wait_for_their_origins(tmp_path: Path) -> None:
    write(tmp_path / "a", some_rows(3))
    with IndexedDatasetBuilder(tmp_path / "data") as builder:
        add(builder, some_rows(2))
        builder.add_document([1])
        with pytest.raises(ConfigError, match="has 3 documents, and the origins of 2 were added"):
            builder.add_index(tmp_path / "a")
        add(builder, some_rows(1), has_documents=False)
        builder.add_index(tmp_path / "a")
    assert rows_in(IndexedDataset(tmp_path / "data")) == [
        *some_rows(2),
        *some_rows(1),
        *some_rows(3),
    ]


# ---- another pair's sidecar, and damage ----


def test_a_pair_without_origins_removes_the_sidecar(tmp_path: Path) -> None:
    old = write(tmp_path / "data", some_rows(1))
    with IndexedDatasetBuilder(tmp_path / "data") as builder:
        builder.add_document([1])
    assert files(tmp_path) == ["data.bin", "data.idx"]
    assert old.origins() is None  # of a pair that was replaced before its sidecar was read


def test_a_sidecar_of_another_pair_is_refused(tmp_path: Path) -> None:
    """Another tool, which knows no sidecar, replaces a pair by one with as many documents."""
    write(tmp_path / "data", some_rows(3))
    with IndexedDatasetBuilder(tmp_path / "other") as builder:
        builder.add_documents([7, 8, 9], [1, 1, 1])
    for suffix in ("bin", "idx"):
        shutil.copy(tmp_path / f"other.{suffix}", tmp_path / f"data.{suffix}")
    dataset = IndexedDataset(tmp_path / "data")
    message = "not the sidecar of these 3 documents"
    with pytest.raises(DataError, match=message):
        dataset.origin(0)
    with IndexedDatasetBuilder(tmp_path / "merged") as builder:
        with pytest.raises(DataError, match=message):
            builder.add_index(dataset)
        builder.add_index(dataset, origins=False)
    (problem,) = verify([tmp_path / "data"])[0].problems
    assert message in problem


def test_a_sidecar_that_is_replaced_meanwhile_is_refused(tmp_path: Path) -> None:
    old = write(tmp_path / "data", some_rows(3))
    assert rows_in(old) == some_rows(3)
    write(tmp_path / "data", some_rows(4))
    with pytest.raises(DataError, match="replaced since its pair was opened"):
        old.origin(0)


def test_a_copied_pair_keeps_its_origins(tmp_path: Path) -> None:
    write(tmp_path / "data", some_rows(3))
    for suffix in ("bin", "idx", "origins.parquet"):
        shutil.copy(tmp_path / f"data.{suffix}", tmp_path / f"copy.{suffix}")
    assert rows_in(IndexedDataset(tmp_path / "copy", access="file")) == some_rows(3)


@pytest.mark.parametrize("checksums", [False, True])
def test_damage_is_an_error_and_never_another_row(
    tmp_path: Path, checksums: bool, small_groups: None
) -> None:
    """Truncations, garbage and flipped bytes: an error, or (without checksums) the right rows."""
    rows = some_rows(30)
    write(tmp_path / "data", rows, checksums=checksums)
    path = tmp_path / "data.origins.parquet"
    whole = path.read_bytes()
    random = np.random.default_rng(1)
    contents = [whole[:size] for size in (0, 3, 8, len(whole) // 2, len(whole) - 1)]
    contents += [b"garbage" * 20, whole + b"x"]
    for _ in range(60):
        flipped = bytearray(whole)
        flipped[random.integers(len(whole))] ^= 1 << random.integers(8)
        contents.append(bytes(flipped))
    refused = 0
    for content in contents:
        path.write_bytes(content)
        dataset = IndexedDataset(tmp_path / "data")
        try:
            number_of_rows = len(rows_in(dataset) or [])
            assert number_of_rows == 30
        except DataError as error:
            assert str(path) in str(error)  # noqa: PT017
            refused += 1
        report = verify([tmp_path / "data"], threads=1)[0]
        if checksums:
            assert report.problems, "a flipped byte passed unnoticed"
    assert refused >= 20
    path.write_bytes(whole)
    assert verify([tmp_path / "data"])[0].problems == []
    path.unlink()  # a sidecar may be removed: the pair is whole without
    assert verify([tmp_path / "data"])[0].problems == []


def test_another_parquet_file_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    write(tmp_path / "data", some_rows(2))
    path = tmp_path / "data.origins.parquet"
    metadata = pyarrow.parquet.read_metadata(path).metadata
    table = pa.table({"source": ["a", "b"]})
    pyarrow.parquet.write_table(table, path)
    with pytest.raises(DataError, match="not a sidecar that millrace wrote"):
        IndexedDataset(tmp_path / "data").origin(0)
    for key, value, message in [
        (b"millrace.origins", b"1", "has the columns source"),
        (b"millrace.origins", b"2", "has version 2; 1 can be read"),
    ]:
        pyarrow.parquet.write_table(table.replace_schema_metadata({**metadata, key: value}), path)
        with pytest.raises(DataError, match=message):
            IndexedDataset(tmp_path / "data").origin(0)


# ---- without pyarrow ----

_WITHOUT_PYARROW = """
import sys
sys.modules["pyarrow"] = None
from millrace import ConfigError, IndexedDataset, IndexedDatasetBuilder
from millrace.store import verify
prefix, output = sys.argv[1:]
dataset = IndexedDataset(prefix)
with IndexedDatasetBuilder(output) as builder:
    builder.add_document([1])
    for call in (
        lambda: builder.add_origins(["a"], [0], [0], [0]),
        lambda: dataset.origin(0),
        lambda: builder.add_index(dataset),
    ):
        try:
            call()
        except ConfigError as error:
            print(error)
    builder.add_index(dataset, origins=False)
assert IndexedDataset(output).num_documents == 4
assert verify([prefix, output])[0].problems == []
"""


def test_without_pyarrow_origins_are_a_clear_error(tmp_path: Path) -> None:
    write(tmp_path / "data", some_rows(3), checksums=True)
    result = subprocess.run(
        [sys.executable, "-c", _WITHOUT_PYARROW, str(tmp_path / "data"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("need the pyarrow package: pip install 'millrace[tokenizers]'") == 3


# ---- files: publication, faults, forks ----


def test_an_error_or_an_abort_leaves_no_sidecar(tmp_path: Path, small_groups: None) -> None:
    builder = IndexedDatasetBuilder(tmp_path / "data")
    add(builder, some_rows(50))
    assert any(name.startswith("data.origins.parquet.") for name in files(tmp_path))
    builder.abort()
    assert files(tmp_path) == []


def test_a_full_disk_discards_the_pair(
    tmp_path: Path, small_groups: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullFile:
        def __init__(self, file: Any) -> None:
            self._file = file

        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def close(self) -> None:
            self._file.close()

    builder = IndexedDatasetBuilder(tmp_path / "data")
    add(builder, some_rows(3))
    sink = builder._writer._origins._sink  # type: ignore[union-attr]
    sink._file = FullFile(sink._file)
    with pytest.raises(OSError, match="No space left"):
        add(builder, some_rows(50))
    with pytest.raises(ConfigError, match="is closed"):
        builder.finalize()
    assert files(tmp_path) == []


def test_a_forked_child_leaves_the_sidecar_alone(tmp_path: Path, small_groups: None) -> None:
    builder = IndexedDatasetBuilder(tmp_path / "data")
    add(builder, some_rows(20))
    process = os.fork()
    if process == 0:
        try:
            del builder  # a Parquet writer that is dropped writes the end of its file
        finally:
            os._exit(0)
    os.waitpid(process, 0)
    add(builder, some_rows(20))
    builder.finalize()
    assert rows_in(IndexedDataset(tmp_path / "data")) == some_rows(20) * 2


def test_pairs_are_published_with_their_sidecars_or_not_at_all(tmp_path: Path) -> None:
    builders = [IndexedDatasetBuilder(tmp_path / name) for name in ("a", "b")]
    for builder in builders:
        add(builder, some_rows(2))
    builders[1].add_document([1])
    with pytest.raises(ConfigError, match="the origins of 2 were added"):
        finalize_together(builders)
    for builder in builders:
        builder.abort()
    assert files(tmp_path) == []


@pytest.mark.parametrize("durable", [False, True])
def test_a_pair_that_can_be_made_again_needs_no_fsync(
    tmp_path: Path, durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(os, "fsync", calls.append)
    for _ in range(2):  # the second replaces the first
        with IndexedDatasetBuilder(tmp_path / "data", checksums=True, durable=durable) as builder:
            add(builder, some_rows(5))
    assert bool(calls) == durable
    assert files(tmp_path) == [
        f"data.{suffix}" for suffix in ("bin", "idx", "info.json", "origins.parquet")
    ]
    assert verify([tmp_path / "data"])[0].problems == []


# ---- dolma's form ----


def test_dolmas_rows(tmp_path: Path, small_groups: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origins, "_CSV_DOCUMENTS", 4)
    lengths = [[3, 2], [], [1], [4], [], [2, 2, 2], [5]]
    with IndexedDatasetBuilder(tmp_path / "data", np.uint16) as builder:
        for document in lengths:
            builder.add_document(np.zeros(sum(document), int), document)
        sources, ids = ["a, b.jsonl", "ü.jsonl"], ["x", None, 'quote "', "5", "6", "7", "8"]
        builder.add_origins(sources, [0, 0, 0, 1, 1, 1, 1], range(1, 8), [-1] * 7, ids)
    path = write_dolma(tmp_path / "data")
    assert path == str(tmp_path / "data.csv.gz")
    with gzip.open(path, "rt", newline="") as file:
        rows = list(csv.reader(file))
    assert [row[:2] for row in rows] == [
        list(map(str, span))
        for span in [(0, 5), (5, 5), (5, 6), (6, 10), (10, 10), (10, 16), (16, 21)]
    ]
    assert [row[2] for row in rows] == ["x", "", 'quote "', "5", "6", "7", "8"]
    assert [row[3] for row in rows] == ["a, b.jsonl"] * 3 + ["ü.jsonl"] * 4
    assert [row[4] for row in rows] == list("1234567")
    content = Path(path).read_bytes()
    assert Path(write_dolma(tmp_path / "data")).read_bytes() == content
    (tmp_path / "data.origins.parquet").unlink()
    with pytest.raises(ConfigError, match="has no origins"):
        write_dolma(tmp_path / "data")
    assert Path(path).read_bytes() == content


def test_origins_are_the_arguments_of_add_origins(tmp_path: Path) -> None:
    dataset = write(tmp_path / "data", some_rows(3))
    all_origins = dataset.origins()
    assert isinstance(all_origins, Origins)
    with IndexedDatasetBuilder(tmp_path / "copy") as builder:
        builder.add_documents(dataset.tokens, dataset.sequence_lengths)
        builder.add_origins(*all_origins)
    contents = [(tmp_path / f"{n}.origins.parquet").read_bytes() for n in ("data", "copy")]
    assert contents[0] == contents[1]
