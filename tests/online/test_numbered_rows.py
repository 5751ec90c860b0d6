"""Rows by number: of files of each format, of memory; indices that are kept; what is refused."""

import gzip
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from millrace import ConfigError, TextError
from millrace.online import open_rows
from millrace.text import BadDocumentError, Query, find_inputs, parts_of, read_documents
from tests.jobs.kills import deaths_of
from tests.online.encoders import write_rows

LINES = [
    b'{"text": "a"}',
    b"",
    b" \t",
    b"\r",
    b"[1]",
    b'{"a": NaN}',
    b"{",
    b'{"a": "\xff"}',
    b'"x"',
]


@settings(max_examples=300, deadline=None)
@given(
    lines=st.lists(st.sampled_from(LINES), max_size=12),
    end=st.sampled_from([b"", b"\n"]),
    start=st.sampled_from([b"", b"\xef\xbb\xbf"]),
)
def test_the_rows_of_jsonl_are_those_of_the_reader(
    lines: list[bytes], end: bytes, start: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    path.write_bytes(start + b"\n".join(lines) + end)
    expected: dict[int, Any] = {}
    query = Query(keys=("text",), whole=True, reject=lambda line, *_: expected.update({line: None}))
    for part in parts_of(find_inputs([path])[0], 1 << 30):
        for documents in read_documents(part, query):
            expected |= dict(zip(documents.lines.tolist(), documents.texts[0], strict=True))
    rows = open_rows(path)
    assert len(rows) == len(expected)
    for number, (line, row) in enumerate(sorted(expected.items())):
        assert rows.place(number) == f"{path}, line {line + 1}"
        [found] = rows.read(np.array([number]))
        if row is None:
            assert isinstance(found, BadDocumentError)
            with pytest.raises(TextError, match=f"line {line + 1}: "):
                rows.rows([number])
        else:
            assert json.dumps(found) == json.dumps(row)


def write_tables(folder: Path) -> list[Path]:
    """The same 25 rows in four formats."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    at = {"b": b"\xc3\xa9"}
    rows = [{"text": f"row {n}\n", "more": ["x"] * (n % 3), "at": at} for n in range(25)]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, folder / "a.parquet", row_group_size=7)
    with pa.ipc.new_file(folder / "b.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    write_rows(folder / "c.jsonl", [{**row, "at": {"b": "é"}} for row in rows])
    with open(folder / "d.csv", "w") as file:
        file.write("text\n" + "".join(f'"{row["text"]}"\n' for row in rows))
    return sorted(folder.iterdir())


def test_tables_and_lines_are_one_sequence(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "data").mkdir()
    paths = write_tables(tmp_path / "data")
    rows = open_rows(tmp_path / "data", cache=tmp_path / "cache")
    assert len(rows) == 100
    numbers = np.random.default_rng(0).permutation(100)
    found = pickle.loads(pickle.dumps(rows)).rows(numbers)
    assert [row["text"] for row in found] == [f"row {n % 25}\n" for n in numbers.tolist()]
    assert rows.rows([1, 26, 51]) == [{"text": "row 1\n", "more": ["x"], "at": {"b": "é"}}] * 3
    assert rows.place(24) == f"{paths[0]}, row 24"
    assert rows.place(99) == f"{paths[3]}, row 26"
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    again = open_rows(tmp_path / "data", cache=tmp_path / "cache")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == before
    assert again.fingerprint() == rows.fingerprint()
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    assert open_rows(tmp_path / "copy").fingerprint() == rows.fingerprint()
    train, valid, test = rows.split("9,1,0")
    assert train is not None
    assert valid is not None
    assert test is None
    assert (len(train), len(valid), valid.rows([3])) == (90, 10, rows.rows([93]))
    assert valid.place(9) == rows.place(99)
    [_, half, _] = valid.split("1,1")
    assert half is not None
    assert half.rows([0]) == rows.rows([95])
    for number in (-1, 10):
        with pytest.raises(IndexError):
            valid.rows([number])


def test_bad_rows_of_csv_keep_their_numbers(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "a.csv"
    path.write_bytes(b'text,n\nx\n\n"a\nb",1\n\xff,2\nc,3\n')
    rows = open_rows(path)
    assert len(rows) == 4
    assert rows.rows([3, 1]) == [{"text": "c", "n": "3"}, {"text": "a\nb", "n": "1"}]
    for number, reason in ((0, "row 2: the row has 1 fields"), (2, "row 5: byte 1")):
        with pytest.raises(TextError, match=reason):
            rows.rows([number])


@pytest.mark.parametrize("kind", ["append", "rewrite", "replace", "remove"])
def test_a_file_that_changes_is_an_error(tmp_path: Path, kind: str) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "b"}])
    cache = tmp_path / "cache"
    rows = open_rows(path, cache=cache)
    identity = rows.fingerprint()
    if kind == "append":
        with path.open("a") as file:
            file.write('{"text": "c"}\n')
    elif kind == "remove":
        path.unlink()
    else:
        text = path.read_text().replace('"b"', '"c"')
        (path if kind == "rewrite" else tmp_path / "new").write_text(text)
        if kind == "replace":
            os.replace(tmp_path / "new", path)
        os.utime(path, ns=(0, 5))
    with pytest.raises(TextError, match=r"cannot be read|was changed|written to"):
        rows.rows([0])
    if kind != "remove":
        again = open_rows(path, cache=cache)
        assert again.fingerprint() != identity
        assert again.rows([len(again) - 1]) == [{"text": "c"}]


def test_another_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "a.jsonl", [{"text": "a"}])
    monkeypatch.chdir(tmp_path)
    rows = open_rows("*.jsonl", cache="cache")
    monkeypatch.chdir("/")
    assert rows.rows([0]) == [{"text": "a"}]


def test_a_damaged_index_is_made_again(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": str(n)} for n in range(2000)])
    open_rows(path, cache=tmp_path / "cache")
    for damaged in (tmp_path / "cache").iterdir():
        damaged.write_bytes(damaged.read_bytes()[:-1])
        assert open_rows(path, cache=tmp_path / "cache").rows([1999]) == [{"text": "1999"}]


def test_an_index_survives_death_at_every_step(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": str(n)} for n in range(50)])
    for _ in deaths_of(lambda: open_rows(path, cache=tmp_path / "cache")):
        if (tmp_path / "cache").exists():
            shutil.copytree(tmp_path / "cache", tmp_path / "copy")
        assert open_rows(path, cache=tmp_path / "copy").rows([49]) == [{"text": "49"}]
        shutil.rmtree(tmp_path / "copy")
    assert len([*(tmp_path / "cache").iterdir()]) < 9  # what the dead have left is removed


def test_long_lines(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": "a" * 8}, {"text": "a" * 9}])
    rows = open_rows(path, max_document_size=20)
    assert rows.rows([0]) == [{"text": "a" * 8}]
    with pytest.raises(TextError, match="line 2: the line is longer than 20 bytes"):
        rows.rows([1])


class Columns:
    """What is used of a `datasets.Dataset`."""

    column_names = ("text",)
    _fingerprint = "f00d"

    def __len__(self) -> int:
        return 9

    def __getitem__(self, numbers: list[int]) -> dict[str, list[str]]:
        assert isinstance(numbers, list)
        return {"text": [str(number) for number in numbers]}


def test_rows_of_memory() -> None:
    rows = open_rows(Columns())
    assert rows.rows([8, 0]) == [{"text": "8"}, {"text": "0"}]
    assert rows.fingerprint()["parts"] == [["memory", 9, "f00d"]]
    rows = open_rows(({"text": "a"}, 5, {"n": np.int64(1)}))
    assert rows.rows([0, 2]) == [{"text": "a"}, {"n": 1}]
    with pytest.raises(TextError, match="row 1 of the tuple: the row is 5; a dictionary"):
        rows.rows([1])
    assert rows.fingerprint() != open_rows(({"text": "b"}, 5, {"n": 1})).fingerprint()
    assert len(open_rows([])) == 0


def test_what_has_no_numbers_is_refused_with_the_remedy(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    (tmp_path / "a.txt").write_text("a")
    os.mkfifo(tmp_path / "pipe.jsonl")
    table = pa.table({"text": ["a"]})
    with pa.ipc.new_stream(tmp_path / "stream.arrow", table.schema) as writer:
        writer.write_table(table)
    for name, problem in {
        "a.jsonl.gz": r"compressed \(gzip\).*decompress it.*StreamDataset",
        "a.txt": "of the format text",
        "pipe.jsonl": "a pipe",
        "stream.arrow": "an Arrow stream.*new_file",
        "missing.jsonl": "cannot be read",
    }.items():
        with pytest.raises(TextError, match=problem):
            open_rows(tmp_path / name)
    for source in (iter([{}]), {"text": "a"}, 5, None, {1, 2}, list):
        with pytest.raises(ConfigError, match="cannot be read by number"):
            open_rows(source)
    with pytest.raises(IndexError):
        open_rows([{}]).rows([1])
    with pytest.raises(ConfigError, match="row numbers"):
        open_rows([{}]).rows([0.5])
