"""Rows by number: of files of each format, of memory; indices that are kept; what is refused."""

import gzip
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from millrace import ConfigError, TextError
from millrace.online import open_rows
from millrace.text import BadDocumentError, Query, find_inputs, parts_of, read_documents
from tests.jobs.kills import deaths_of
from tests.online.encoders import write_rows

LINES = [b"[1]", b"", b" \t", b"\r", b"{", b'{"text": "a"}', b'{"a": NaN}', b'{"a": "\xff"}']
SEVERAL = st.lists(st.sampled_from(LINES), max_size=12)


@settings(max_examples=300, deadline=None)
@given(SEVERAL, st.sampled_from([b"", b"\n"]), st.sampled_from([b"", b"\xef\xbb\xbf"]))
def test_the_rows_of_jsonl_are_those_of_the_reader(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], end: bytes, start: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    path.write_bytes(start + b"\n".join(lines) + end)
    expected: dict[int, Any] = {}
    query = Query(keys=("text",), whole=True, reject=lambda line, *_: expected.update({line: None}))
    if b"".join(lines).lstrip().startswith(b"["):
        with pytest.raises(TextError, match="is a JSON array; `jq"):
            open_rows(path)
        with pytest.raises(TextError, match="is a JSON array; `jq"):
            list(read_documents(find_inputs([path])[0].part(), query))
        return
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

    at, more = {"b": b"\xc3\xa9"}, [{"x": "x"}]
    rows = [{"text": f"row {n}\n", "more": more * (n % 3), "at": at} for n in range(25)]
    ends = np.cumsum([0, *(n % 3 for n in range(25))])
    values = pa.StructArray.from_arrays([pa.array(['"x"'] * int(ends[-1]), pa.json_())], ["x"])
    is_null = pa.array([7 <= n < 14 for n in range(25)])  # in whole groups
    lists = pa.ListArray.from_arrays(ends, values, mask=is_null)
    table = pa.Table.from_pylist(rows).set_column(1, "more", lists)
    pq.write_table(table, folder / "a.parquet", row_group_size=7)
    with pa.ipc.new_file(folder / "b.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    write_rows(folder / "c.jsonl", [{**row, "at": {"b": "é"}} for row in rows])
    text = "text\n" + "".join(f'"{row["text"]}"\n' for row in rows)
    (folder / "d.csv").write_text(text)
    return sorted(folder.iterdir())


def test_tables_and_lines_are_one_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    paths = write_tables(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    rows = open_rows("data/*", cache="cache")
    monkeypatch.chdir("/")
    assert len(rows) == 100
    numbers = np.random.default_rng(0).permutation(100)
    found = pickle.loads(pickle.dumps(rows)).rows(numbers)
    assert [row["text"] for row in found] == [f"row {n % 25}\n" for n in numbers.tolist()]
    row = {"text": "row 1\n", "more": [{"x": "x"}], "at": {"b": "é"}}
    assert rows.rows([1, 26, 51]) == [row] * 3
    assert [row["more"] for row in rows.rows([7, 33])] == [None, None]
    assert (rows.place(24), rows.place(99)) == (f"{paths[0]}, row 24", f"{paths[3]}, row 26")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    again = open_rows(tmp_path / "data", cache=tmp_path / "cache")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == before
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    for other in (again, open_rows(tmp_path / "copy")):
        assert other.fingerprint() == rows.fingerprint()
    _, valid, test = rows.split("9,1,0")
    assert (len(valid), valid.rows([3]), test) == (10, rows.rows([93]), None)
    assert valid.place(9) == rows.place(99)
    assert valid.split("1,1")[1].rows([0]) == rows.rows([95])
    for number in (-1, 10):
        with pytest.raises(IndexError):
            valid.rows([number])


def test_bad_rows_keep_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'text,n\nx\n\n"a\nb",1\n\xff,2\nc,3\n')
    rows = open_rows(path)
    assert rows.rows([3, 1]) == [{"text": "c", "n": "3"}, {"text": "a\nb", "n": "1"}]
    lines = write_rows(tmp_path / "a.jsonl", [{"text": "a" * 8}, {"text": "a" * 9}])
    long = open_rows(lines, max_document_size=20)
    assert (len(rows), len(long), long.rows([0])) == (4, 2, [{"text": "a" * 8}])
    for bad, number, reason in (
        (rows, 0, "row 2: the row has 1 fields"),
        (rows, 2, "row 5: byte 1"),
        (long, 1, "line 2: the line is longer than 20 bytes"),
    ):
        with pytest.raises(TextError, match=reason):
            bad.rows([number])


@pytest.mark.parametrize("kind", ["append", "rewrite", "replace", "remove"])
def test_a_file_that_changes_is_an_error(tmp_path: Path, kind: str) -> None:
    path, cache = write_rows(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "b"}]), tmp_path / "c"
    rows = open_rows(path, cache=cache)
    identity, text = rows.fingerprint(), path.read_text()
    path.rename(tmp_path / "old") if kind in ("replace", "remove") else None
    if kind != "remove":
        changed = {"append": text + '{"text": "c"}\n'}.get(kind, text.replace("b", "c"))
        path.write_text(changed)
        os.utime(path, ns=(0, 5))
    with pytest.raises(TextError, match=r"cannot be read|was changed|written to"):
        rows.rows([0])
    if kind != "remove":
        again = open_rows(path, cache=cache)
        assert again.fingerprint() != identity
        assert again.rows([len(again) - 1]) == [{"text": "c"}]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_what_is_learnt_survives_death_and_damage(tmp_path: Path, name: str) -> None:
    path, cache, copy = tmp_path / name, tmp_path / "cache", tmp_path / "copy"
    form = '{{"text": "{}"}}' if name == "a.jsonl" else "{}"
    lines = ["text"] * (name == "a.csv") + [form.format(n) for n in range(2000)]
    path.write_text("".join(f"{line}\n" for line in lines))
    for _ in deaths_of(lambda: open_rows(path, cache=cache)):
        if cache.exists():
            shutil.copytree(cache, copy)
        assert open_rows(path, cache=copy).rows([1999]) == [{"text": "1999"}]
        shutil.rmtree(copy)
    assert len([*cache.iterdir()]) < 9  # what the dead have left is removed
    for damaged in [*cache.glob("*.npy"), *cache.glob("*.json")]:
        damaged.write_bytes(damaged.read_bytes()[:-1])
        assert open_rows(path, cache=cache).rows([1999]) == [{"text": "1999"}]


def test_rows_of_memory() -> None:
    rows = [{"text": str(n), "more": [n]} for n in range(300)]
    dataset = datasets.Dataset.from_list(rows)
    changed = (dataset.filter(lambda row: True), dataset.select(range(300)))
    formats = (dataset.with_format("torch"), dataset.with_format("pandas"))
    for source in (dataset, *changed, *formats, dataset.with_transform(dict)):
        found = pickle.loads(pickle.dumps(open_rows(source)))
        assert found.rows([299, 0]) == [rows[299], rows[0]]
        assert found.fingerprint()["parts"] == [["memory", 300, source._fingerprint]]
        assert found.place(7) == "Dataset, row 7"
    mixed = open_rows(({"text": "a"}, 5, {"n": np.int64(1)}))
    assert mixed.rows([0, 2]) == [{"text": "a"}, {"n": 1}]
    with pytest.raises(TextError, match="tuple, row 1: the row is 5; a dictionary"):
        mixed.rows([1])
    assert mixed.fingerprint() != open_rows(({"text": "b"}, 5, {"n": 1})).fingerprint()
    arrays = np.arange(2000), np.where(np.arange(2000) == 900, 0, np.arange(2000))
    one, other = (open_rows([{"ids": array}]).fingerprint() for array in arrays)
    assert one != other  # though `str` shows the same ends of both
    assert len(open_rows([])) == 0


def test_what_has_no_numbers_is_refused_with_the_remedy(tmp_path: Path) -> None:
    import pyarrow as pa

    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    (tmp_path / "a.txt").write_text("a")
    os.mkfifo(tmp_path / "pipe.jsonl")
    table = pa.table({"text": ["a"]})
    with pa.ipc.new_stream(tmp_path / "stream.arrow", table.schema) as writer:
        writer.write_table(table)
    for name, problem in {
        "a.jsonl.gz": r"\(gzip\).*decompress it.*StreamDataset",
        "a.txt": r"\(text\) has no row numbers",
        "pipe.jsonl": "a pipe",
        "stream.arrow": "an Arrow stream.*new_file",
        "missing.jsonl": "cannot be read",
    }.items():
        with pytest.raises(TextError, match=problem):
            open_rows(tmp_path / name)
    for source in (iter([{}]), {"text": "a"}, 5, None, {1, 2}, list):
        with pytest.raises(ConfigError, match="cannot be read by number"):
            open_rows(source)
    with pytest.raises(ConfigError, match=r"one of its values \(\['train', 'test'\]\)"):
        open_rows({"train": [], "test": []})  # as `load_dataset` returns
    for number, error in ((1, IndexError), (0.5, ConfigError)):
        with pytest.raises(error, match="row numbers"):
            open_rows([{}]).rows([number])
