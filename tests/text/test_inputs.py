"""Which files a job reads, and files that go away, change or cannot be read."""

import gzip
import os
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from millrace import ConfigError, TextError
from millrace.text import Query, find_inputs, parts_of, pieces_of, read_documents, read_input_list
from tests.text.reading import read_file, read_part

LINE = b'{"text": "a"}\n'


def write(path: Path, data: bytes = LINE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def names(folder: Path, inputs: list[Any]) -> list[str]:
    return [os.path.relpath(file.path, folder) for file in find_inputs(inputs)]


def test_folders_are_read_with_all_their_documents(tmp_path: Path) -> None:
    files = "b.jsonl a/z.jsonl.gz a/y.JSON c.ndjson.zst image.png noending README.md notes.md"
    hidden = ".hidden.jsonl _SUCCESS _temporary/x.jsonl .git/x.jsonl"
    ours = "out.quarantine.jsonl out_text_document.info.json out_text_document.bin"
    ours += " out_text_document.csv.gz out.journal/job.json x.jsonl.0123456789ab.tmp"
    of_datasets = "state.json dataset_info.json"
    for name in f"{files} {hidden} {ours} {of_datasets}".split():
        write(tmp_path / name)
    write(tmp_path / "out_a\nb_document.info.json")
    os.mkfifo(tmp_path / "pipe.jsonl")
    os.symlink(tmp_path / "b.jsonl", tmp_path / "link.jsonl")
    os.symlink(tmp_path, tmp_path / "a" / "loop")
    expected = ["a/y.JSON", "a/z.jsonl.gz", "b.jsonl", "c.ndjson.zst", "link.jsonl", "notes.md"]
    assert names(tmp_path, [tmp_path]) == expected


FILES = "b.jsonl a.jsonl c.txt x/d.jsonl x/y/e.jsonl [1].jsonl x.tmp t/README.md t/a.txt"
KILLED = """
    k/b.jsonl k/out.journal/0123456789ab/files/000000/0123456789ab.rejects.jsonl k/out.journal.lock
    k/out_text_document.tmp.lock k/out_text_document.bin k/out_text_document.idx.new
    k/out_text_document.origins.parquet.new
"""


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ("?.jsonl", "a.jsonl b.jsonl"),
        ("**/[de].*", "x/d.jsonl x/y/e.jsonl"),
        ("x/**", "x/d.jsonl x/y/e.jsonl"),
        ("[a-c]*", "a.jsonl b.jsonl c.txt"),
        ("[x]*", "x/d.jsonl x/y/e.jsonl"),
        ("[1].jsonl", "[1].jsonl"),  # a file of that name comes before the pattern
        ("t", "t/README.md t/a.txt"),  # notes are documents beside plain text
        # What a killed job has left is none.
        *((f"k/{pattern}", "k/b.jsonl") for pattern in ("*", "**", "**/*")),
        # The order is the caller's, and files may come twice.
        ("b.jsonl x a* b.jsonl", "b.jsonl x/d.jsonl x/y/e.jsonl a.jsonl b.jsonl"),
    ],
)
def test_patterns(tmp_path: Path, inputs: str, expected: str) -> None:
    for name in (FILES + KILLED).split():
        write(tmp_path / name)
    assert names(tmp_path, [f"{tmp_path}/{path}" for path in inputs.split()]) == expected.split()


@pytest.mark.parametrize(
    ("name", "data", "format_"),
    [
        ("a", LINE, "jsonl"),
        ("a.dat", LINE, "jsonl"),
        ("a.json", LINE, "jsonl"),
        ("a.csv.gz", gzip.compress(b"text\na\n"), "csv"),
        ("a.TSV", b"text\na\n", "tsv"),
        ("a.md", b"a", "text"),
        ("a.txt.gz", gzip.compress(b"a"), "text"),
        ("a.gz", gzip.compress(LINE), "jsonl"),
        ("a.jsonl.gz", LINE, "jsonl"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # gzip writes the time
)
def test_formats(tmp_path: Path, name: str, data: bytes, format_: str) -> None:
    [file] = find_inputs([write(tmp_path / name, data)])
    assert file.format.name == format_
    assert file.compression == ("gzip" if data.startswith(b"\x1f\x8b") else "")
    assert file.size == len(data)
    has_pieces = file.format.has_pieces(file)
    assert has_pieces == (format_ != "text" and (format_ != "jsonl" or file.compression != ""))
    assert read_file(file.path).texts == [["a"]]


def test_missing_and_unreadable_inputs(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    os.symlink(tmp_path / "gone", tmp_path / "broken" / "a.jsonl")
    packed = write(tmp_path / "a.parquet.gz", gzip.compress(b"PAR1"))
    inputs: Any
    for inputs, message in [
        ([tmp_path / "missing.jsonl"], r"missing.jsonl cannot be read: No such file"),
        ([tmp_path / "*.csv"], "no file matches the pattern"),
        ([tmp_path / "empty"], "has no documents: no file in it has a known ending"),
        ([tmp_path / "broken"], r"a.jsonl cannot be read: No such file"),
        ([packed], "is gzip-compressed, and parquet is read from a plain file"),
    ]:
        with pytest.raises((ConfigError, TextError), match=message):
            find_inputs(inputs)
    with pytest.raises(ConfigError, match=r"separator .* not ''"):
        find_inputs([tmp_path], separator="")
    [file] = find_inputs([write(tmp_path / "a.parquet", LINE)])
    with pytest.raises(TextError, match=r"a.parquet is damaged, truncated or of another format"):
        parts_of(file, 1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_files_without_permission(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    path.chmod(0)
    with pytest.raises(TextError, match="Permission denied"):
        find_inputs([path])


def test_lists_of_inputs(tmp_path: Path) -> None:
    path = write(tmp_path / "list", b"\xef\xbb\xbf# a comment\n\nb.jsonl\r\n  x/*.csv  \nb.jsonl")
    assert read_input_list(path) == ["b.jsonl", "x/*.csv", "b.jsonl"]
    write(tmp_path / "empty", b"\n# nothing\n")
    write(tmp_path / "packed", gzip.compress(b"a"))
    for name, message in [
        ("empty", "lists no inputs"),
        ("packed", "is not a list of files"),
        ("missing", "cannot be read"),
    ]:
        with pytest.raises(TextError, match=message):
            read_input_list(tmp_path / name)


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """A named pipe without a writer."""
    path = tmp_path / "pipe.jsonl"
    os.mkfifo(path)
    return path


@pytest.mark.parametrize("is_compressed", [False, True])
@pytest.mark.parametrize("in_pieces", [False, True])
def test_pipes_are_read_once(pipe: Path, is_compressed: bool, in_pieces: bool) -> None:
    """Written byte by byte at first, as a slow program may."""
    data = LINE * 1000

    def write() -> None:
        content = gzip.compress(data) if is_compressed else data
        with open(pipe, "wb", buffering=0) as file:
            for place in range(5):
                file.write(content[place : place + 1])
                time.sleep(0.01)
            file.write(content[5:])

    writer = threading.Thread(target=write)
    [file] = find_inputs([pipe])
    assert (file.size, file.format.has_pieces(file), file.is_pipe) == (None, True, True)
    writer.start()
    if in_pieces:
        assert b"".join(b"".join(piece.chunks) for piece in pieces_of(file, 100)) == data
    else:
        [part] = parts_of(file, 10)
        reading = read_part(part)
        assert reading.num_lines == len(reading.texts[0]) == 1000
        assert reading.num_bytes > 0
    writer.join()


def test_pipes_are_refused_twice(pipe: Path) -> None:
    other = pipe.with_name("link")
    other.symlink_to(pipe)
    for inputs, message in [
        ([pipe, pipe], "is the same pipe as .*, which is read only once"),
        (["-", "-"], "- is the same pipe as -"),
        ([pipe, other], f"link is the same pipe as {pipe}"),
    ]:
        with pytest.raises(ConfigError, match=message):
            find_inputs(inputs)


@pytest.mark.parametrize("change", ["grow", "shrink", "rewrite", "remove"])
@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv", "a.parquet"])
def test_files_that_change_are_refused(tmp_path: Path, change: str, when: str, name: str) -> None:
    path = tmp_path / name
    if name == "a.parquet":
        table = pyarrow.table({"text": ["a" * 100] * 10_000})
        parquet.write_table(table, path, row_group_size=1000, use_dictionary=False)
    else:
        data = b"text\n" + b"a\n" * 30_000 if name == "a.csv" else LINE * 10_000
        write(path, gzip.compress(data) if name.endswith("gz") else data)
    [file] = find_inputs([path])
    parts = parts_of(file, 1 << 30)

    def change_it() -> None:
        if change == "grow":
            with open(path, "ab") as output:
                output.write(b"x")
        elif change == "shrink":
            os.truncate(path, path.stat().st_size // 2)
        elif change == "rewrite":
            status = path.stat()
            path.write_bytes(path.read_bytes())
            os.utime(path, ns=(0, status.st_mtime_ns + 1))
        else:
            path.unlink()

    def read() -> None:
        for part in parts:
            query = Query(keys=("text",), reject=lambda *_: None, block_size=1000)
            for _ in read_documents(part, query):
                if when == "during" and not done:
                    done.append(True)
                    change_it()

    done: list[bool] = []
    if when == "before":
        change_it()
    if (when, change) == ("during", "remove") and name != "a.parquet":
        read()  # the open file stays
        return
    with pytest.raises(TextError, match=str(path)):
        read()
