"""The sidecar of origins: rows, copies of them, damage, and its publication."""

import contextlib
import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from millrace import ConfigError, DataError, IndexedDataset, IndexedDatasetBuilder, MillraceError
from millrace.files import written_name
from millrace.provenance import Origin, OriginsWriter, copied_origins, origins as module
from millrace.store import verify
from tests.store.pairs import names, output_of

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


def add(writer: OriginsWriter, rows: Sequence[Row]) -> None:
    sources = [*sorted({row[0] for row in rows}), "unused"]
    writer.add(
        sources,
        [sources.index(row[0]) for row in rows],
        np.array([row[1] for row in rows], np.int64),
        np.array([row[2] for row in rows], np.int64),
        [row[3] for row in rows],
    )


def write_pair(prefix: Path, count: int, **options: Any) -> IndexedDataset:
    """A pair of documents of one token."""
    with IndexedDatasetBuilder(prefix, **options) as builder:
        builder.add_documents(np.ones(count, int), np.ones(count, int))
    return IndexedDataset(prefix)


def write(prefix: Path, rows: Sequence[Row], **options: Any) -> IndexedDataset:
    dataset = write_pair(prefix, len(rows), **options)
    with OriginsWriter(prefix, durable=options.get("durable", True)) as writer:
        add(writer, rows)
    return dataset


def merge(prefix: Path, parts: Sequence[tuple[IndexedDataset, Any]]) -> list[Row] | None:
    """The origins of a pair made of these documents."""
    writer = copied_origins(prefix, parts)
    with IndexedDatasetBuilder(prefix, checksums=True) as builder:
        for part in parts:
            builder.add_index(*part)
    if writer is not None:
        writer.publish()
    assert verify([prefix])[0].problems == []
    return rows_in(IndexedDataset(prefix))


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


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GROUP_ROWS", 7)


# ---- rows ----


@settings(max_examples=30, deadline=None)
@given(rows=rows_of_origins, data=st.data())
def test_the_rows_are_what_was_added(rows: list[Row], data: st.DataObject) -> None:
    """The bytes of the file do not depend on how they were added."""
    import tempfile

    rows_per_group = data.draw(st.sampled_from([1, 3, 1000]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_GROUP_ROWS", rows_per_group)
        dataset = write(Path(folder) / "a", rows, durable=False)
        assert rows_in(dataset) == rows
        start = data.draw(st.integers(0, len(rows)))
        stop = data.draw(st.integers(start, len(rows)))
        assert rows_in(dataset, start, stop) == rows[start:stop]
        for number, row in list(enumerate(rows))[:5]:
            assert dataset.origin(number) == Origin(*row)
            assert dataset.origin(number - len(rows)) == Origin(*row)
        spans = list(zip([0, *cuts], [*cuts, len(rows)], strict=True))
        write_pair(Path(folder) / "b", len(rows), durable=False)
        with OriginsWriter(Path(folder) / "b", durable=False) as writer:
            for first, end in spans:
                add(writer, rows[first:end])
        write_pair(Path(folder) / "d", len(rows), durable=False)
        with OriginsWriter(Path(folder) / "d", durable=False) as writer:
            writer.add(*dataset.origins())  # type: ignore[misc]
        copied = merge(Path(folder) / "c", [(dataset, span) for span in spans])
        assert copied == (rows or None)
        if not rows:
            return
        contents = {(Path(folder) / f"{name}.origins.parquet").read_bytes() for name in "abcd"}
        assert len(contents) == 1
        assert not any(report.problems for report in verify([f"{folder}/{n}" for n in "abcd"]))


def test_other_tools_can_read_the_file(tmp_path: Path) -> None:
    import pyarrow.parquet

    source = os.fsdecode(b"caf\xe9.jsonl")  # not Unicode: it is escaped
    write(tmp_path / "data", [(source, 1, 0, "\ud800"), ("b.jsonl", 2, -1, None)])
    table = pyarrow.parquet.read_table(tmp_path / "data.origins.parquet")
    assert table.to_pydict() == {
        "source": ["caf\\udce9.jsonl", "b.jsonl"],
        "line": [1, 2],
        "byte_offset": [0, -1],
        "id": ["\\ud800", None],
    }


def test_a_compact_file(tmp_path: Path) -> None:
    """Lines one after the other, and byte offsets of documents of some kilobytes."""
    random = np.random.default_rng(0)
    count = 100_000
    offsets = np.cumsum(random.integers(100, 8000, count))
    write_pair(tmp_path / "data", count, dtype=np.uint8)
    with OriginsWriter(tmp_path / "data") as writer:
        writer.add(["web.jsonl"], np.zeros(count, int), np.arange(1, count + 1), offsets)
    assert os.path.getsize(tmp_path / "data.origins.parquet") < 2 * count


# ---- all documents have an origin, or none ----


def test_a_pair_without_origins_has_no_sidecar(tmp_path: Path) -> None:
    dataset = write_pair(tmp_path / "data", 1)
    assert dataset.origins() is None
    assert dataset.origin(0) is None
    assert names(tmp_path) == ["data.bin", "data.idx"]
    with pytest.raises(IndexError, match="no document 1"):
        dataset.origin(1)
    with pytest.raises(ConfigError, match="documents are 0 to 2"):
        dataset.origins(0, 2)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_origins_of_some_documents_are_refused(tmp_path: Path, count: int) -> None:
    write_pair(tmp_path / "data", 2)
    writer = OriginsWriter(tmp_path / "data")
    add(writer, some_rows(count))
    with pytest.raises(ConfigError, match=f"has 2 documents, and the origins of {count} were"):
        writer.publish()
    assert names(tmp_path) == ["data.bin", "data.idx"]


def test_a_writer_goes_on_after_bad_origins(tmp_path: Path) -> None:
    dataset = write_pair(tmp_path / "data", 1)
    with OriginsWriter(tmp_path / "data") as writer:
        for arguments, message in [
            ((["a"], [1], [0], [0]), "of 1 sources, do not agree .Index 1 out"),
            ((["a"], [0], [0, 1], [0]), "line expected length 1 but got length 2"),
            ((["a"], [0], [0], [0], []), "id expected length 1 but got length 0"),
            ((["a"], [0], [0], [0], [7]), "ids are"),
            ((7, [0], [0], [0]), "sources are 7"),
            (("a", [0], [0], [0]), "sources are 'a'"),
            ((["a"], [0.5], [0], [0]), "source_numbers"),
            ((["a"], [0], [2**63], [0]), "lines"),
        ]:
            with pytest.raises(ConfigError, match=message):
                writer.add(*arguments)  # type: ignore[arg-type]
        add(writer, some_rows(1))
    assert rows_in(dataset) == some_rows(1)


def test_documents_without_origins_leave_none(tmp_path: Path) -> None:
    rows = some_rows(20)
    known, unknown = write(tmp_path / "known", rows), write_pair(tmp_path / "unknown", 1)
    assert merge(tmp_path / "data", [(known, None), (unknown, None)]) is None
    # An empty range says nothing, and a source may be at the prefix.
    assert merge(tmp_path / "data", [(unknown, (0, 0)), (known, None)]) == rows
    source = IndexedDataset(tmp_path / "data")
    assert merge(tmp_path / "data", [(source, None), (source, (1, 2))]) == [*rows, rows[1]]


# ---- another pair's sidecar, and damage ----


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
    with pytest.raises(DataError, match=message):
        copied_origins(tmp_path / "merged", [(dataset, None)])
    (problem,) = verify([tmp_path / "data"])[0].problems
    assert message in problem


def test_an_open_sidecar_is_that_of_its_pair(tmp_path: Path) -> None:
    """As is the sidecar of a copy."""
    old = write(tmp_path / "data", some_rows(3))
    for suffix in ("bin", "idx", "origins.parquet"):
        shutil.copy(tmp_path / f"data.{suffix}", tmp_path / f"copy.{suffix}")
    for dataset in (old, IndexedDataset(tmp_path / "copy", access="file")):
        assert rows_in(dataset) == some_rows(3)
    write(tmp_path / "data", some_rows(4))
    assert rows_in(old) == some_rows(3)


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
    for version, message in [
        (None, "has the version None and the columns source"),
        (b"1", "not a sidecar of version 1: it has the version 1 and the columns source"),
        (b"2", "not a sidecar of version 1: it has the version 2"),
    ]:
        entries = {**metadata, b"millrace.origins": version} if version else None
        pyarrow.parquet.write_table(table.replace_schema_metadata(entries), path)
        with pytest.raises(DataError, match=message):
            IndexedDataset(tmp_path / "data").origin(0)


# ---- without pyarrow ----

_WITHOUT_PYARROW = """
import sys
sys.modules["pyarrow"] = None
from millrace import ConfigError, IndexedDataset
from millrace.jobs import merge
from millrace.provenance import OriginsWriter
from millrace.store import verify
prefix, output = sys.argv[1:]
dataset = IndexedDataset(prefix)
for call in (
    lambda: OriginsWriter(output).add(["a"], [0], [0], [0]),
    lambda: dataset.origin(0),
    lambda: merge([prefix], output),
):
    try:
        call()
    except ConfigError as error:
        print(error)
merge([prefix, prefix], output, origins=False)
assert IndexedDataset(output).num_documents == 6
assert verify([prefix, output])[0].problems == []
"""


def test_without_pyarrow_origins_are_a_clear_error(tmp_path: Path) -> None:
    write(tmp_path / "data", some_rows(3), checksums=True)
    output = output_of(_WITHOUT_PYARROW, tmp_path / "data", tmp_path / "out")
    assert output.count("need the pyarrow package: pip install 'millrace[tokenizers]'") == 3


# ---- files: publication, faults, forks ----


def test_errors_and_a_full_disk_leave_no_sidecar(
    tmp_path: Path, small_groups: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pair(tmp_path / "data", 50, checksums=True)
    files = names(tmp_path)
    with contextlib.suppress(ZeroDivisionError), OriginsWriter(tmp_path / "data") as writer:
        add(writer, some_rows(50))
        raise ZeroDivisionError

    def fail(file: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("millrace.files.flush_to_disk", fail)
    with pytest.raises(OSError, match="No space left"), OriginsWriter(tmp_path / "data") as writer:
        add(writer, some_rows(50))
    assert names(tmp_path) == files
    assert verify([tmp_path / "data"])[0].problems == []


def test_a_pair_that_is_being_built_gets_no_sidecar(tmp_path: Path) -> None:
    write_pair(tmp_path / "data", 1)
    writer = OriginsWriter(tmp_path / "data")
    add(writer, some_rows(1))
    builder = IndexedDatasetBuilder(tmp_path / "data")
    with pytest.raises(MillraceError, match="being built by another process"):
        writer.publish()
    builder.abort()
    writer.publish()
    assert rows_in(IndexedDataset(tmp_path / "data")) == some_rows(1)


def test_a_forked_child_leaves_the_sidecar_alone(tmp_path: Path, small_groups: None) -> None:
    write_pair(tmp_path / "data", 40)
    writer = OriginsWriter(tmp_path / "data")
    add(writer, some_rows(20))
    process = os.fork()
    if process == 0:
        try:
            del writer  # a Parquet writer that is dropped writes the end of its file
        finally:
            os._exit(0)
    os.waitpid(process, 0)
    add(writer, some_rows(20))
    writer.publish()
    assert rows_in(IndexedDataset(tmp_path / "data")) == some_rows(20) * 2


@pytest.mark.parametrize("durable", [False, True])
def test_a_pair_that_can_be_made_again_needs_no_fsync(
    tmp_path: Path, durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: set[str] = set()

    def fsync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        flushed.add("" if os.path.isdir(path) else written_name(os.path.basename(path)) or path)

    monkeypatch.setattr(os, "fsync", fsync)
    for _ in range(2):  # the second replaces the first
        write(tmp_path / "data", some_rows(5), checksums=True, durable=durable)
    files = [f"data.{suffix}" for suffix in ("bin", "idx", "info.json", "origins.parquet")]
    assert flushed == ({"", *files} if durable else set())
    assert names(tmp_path) == files
    assert verify([tmp_path / "data"])[0].problems == []
