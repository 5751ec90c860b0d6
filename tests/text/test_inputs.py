"""Which files a job reads, and files that go away, change or cannot be read."""

import gzip
import os
import subprocess
import sys
import threading
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
    os.makedirs(tmp_path.parent / "other", exist_ok=True)
    expected = ["a/y.JSON", "a/z.jsonl.gz", "b.jsonl", "c.ndjson.zst", "link.jsonl", "notes.md"]
    assert names(tmp_path, [tmp_path]) == expected


def test_a_folder_of_plain_text_has_its_readme(tmp_path: Path) -> None:
    for name in ("README.md", "a.txt"):
        write(tmp_path / name)
    assert names(tmp_path, [tmp_path]) == ["README.md", "a.txt"]
    assert [file.format.name for file in find_inputs([tmp_path])] == ["text", "text"]


def test_patterns(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.txt", "x/d.jsonl", "x/y/e.jsonl", "[1].jsonl", "x.tmp"):
        write(tmp_path / name)
    assert names(tmp_path, [f"{tmp_path}/?.jsonl"]) == ["a.jsonl", "b.jsonl"]
    assert names(tmp_path, [f"{tmp_path}/**/[de].*"]) == ["x/d.jsonl", "x/y/e.jsonl"]
    assert names(tmp_path, [f"{tmp_path}/x/**"]) == ["x/d.jsonl", "x/y/e.jsonl"]
    assert names(tmp_path, [f"{tmp_path}/[a-x]*"]) == [
        "a.jsonl", "b.jsonl", "c.txt", "x/d.jsonl", "x/y/e.jsonl",
    ]  # fmt: skip
    # A file of that name comes before the pattern.
    assert names(tmp_path, [f"{tmp_path}/[1].jsonl"]) == ["[1].jsonl"]
    with pytest.raises(TextError, match="no file matches the pattern"):
        find_inputs([f"{tmp_path}/*.csv"])


def test_patterns_leave_out_what_a_killed_job_has_left(tmp_path: Path) -> None:
    for name in (
        "nature.journal/b.jsonl",
        "nature.journal/out.journal/0123456789ab/files/000000/0123456789ab.rejects.jsonl",
        "nature.journal/out.journal.lock",
        "nature.journal/out_text_document.tmp.lock",
        "nature.journal/out_text_document.bin",
        "nature.journal/out_text_document.idx.new",
        "nature.journal/out_text_document.origins.parquet.new",
    ):
        write(tmp_path / name)
    for pattern in ("*", "**", "**/*"):
        inputs = [f"{tmp_path}/nature.journal/{pattern}"]
        assert names(tmp_path, inputs) == ["nature.journal/b.jsonl"]


def test_the_order_is_the_callers_and_files_may_come_twice(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "x/c.jsonl"):
        write(tmp_path / name)
    inputs = [tmp_path / "b.jsonl", tmp_path / "x", f"{tmp_path}/a*", tmp_path / "b.jsonl"]
    assert names(tmp_path, inputs) == ["b.jsonl", "x/c.jsonl", "a.jsonl", "b.jsonl"]


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
    assert file.has_pieces == (format_ != "text" and (format_ != "jsonl" or file.compression != ""))
    assert read_file(file.path).texts == [["a"]]


def test_missing_and_unreadable_inputs(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    os.symlink(tmp_path / "gone", tmp_path / "broken" / "a.jsonl")
    packed = write(tmp_path / "a.parquet.gz", gzip.compress(b"PAR1"))
    inputs: Any
    for inputs, message in [
        ([], "there are no inputs"),
        ("a.jsonl", "not one path"),
        ([tmp_path / "missing.jsonl"], r"missing.jsonl cannot be read: No such file"),
        ([tmp_path / "empty"], "has no documents: no file in it has a known ending"),
        ([tmp_path / "broken"], r"a.jsonl cannot be read: No such file"),
        ([packed], "gzip-compressed parquet file. Decompress it"),
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
    data = LINE * 1000
    writer = threading.Thread(
        target=pipe.write_bytes, args=[gzip.compress(data) if is_compressed else data]
    )
    [file] = find_inputs([pipe])
    assert (file.size, file.has_pieces, file.is_pipe) == (None, True, True)
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
        ([pipe, pipe], "is given twice, but a pipe can be read only once"),
        (["-", "-"], "- is given twice"),
        ([pipe, other], "is the same pipe as"),
    ]:
        with pytest.raises(ConfigError, match=message):
            find_inputs(inputs)


def test_standard_input(tmp_path: Path) -> None:
    code = (
        "from millrace.text import *\n"
        "[file] = find_inputs(['-'])\n"
        "def reject(*problem): raise SystemExit(problem)\n"
        "[part] = parts_of(file, 1)\n"
        "query = Query(keys=('text',), reject=reject)\n"
        "print([b.texts for b in read_documents(part, query) if b.ids])"
    )
    path = write(tmp_path / "a.gz", gzip.compress(LINE))
    for stdin in (f"cat {path} |", f"<{path}"):
        result = subprocess.run(
            ["bash", "-c", f"{stdin} {sys.executable} -c '{code.replace(chr(39), chr(34))}'"],
            capture_output=True,
            text=True,
        )
        assert result.stdout.strip() == "[[['a']]]", result.stderr


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


def test_pieces_have_whole_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl.gz", gzip.compress(LINE * 100))
    [file] = find_inputs([path])
    pieces = [(piece.part, b"".join(piece.chunks)) for piece in pieces_of(file, 50)]
    assert [part.byte_offset for part, _ in pieces[:2]] == [0, 98]
    assert all(data.endswith(b"}\n") and len(data) <= 100 for _, data in pieces)
    assert b"".join(data for _, data in pieces) == LINE * 100


def test_the_text_room_loads_its_libraries_when_they_are_needed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    code = (
        "import sys\n"
        "from millrace.text import *\n"
        f"parts = parts_of(find_inputs([{str(path)!r}])[0], 10)\n"
        "def reject(*problem): raise SystemExit(problem)\n"
        "list(read_documents(parts[0], Query(keys=('text',), reject=reject)))\n"
        "print([n for n in ('pyarrow', 'csv', 'bz2', 'lzma', 'zlib', 'torch') if n in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "pyarrow" not in result.stdout


def test_the_former_place_of_the_tokenizer_still_works() -> None:
    import millrace.encoding
    import millrace.encoding.training

    with pytest.warns(DeprecationWarning, match="millrace.encoding"):
        from millrace.text import Tokenizer
    with pytest.warns(DeprecationWarning, match="millrace.encoding.training"):
        from millrace.text.training import train_tokenizer
    assert Tokenizer is millrace.encoding.Tokenizer
    assert train_tokenizer is millrace.encoding.training.train_tokenizer
