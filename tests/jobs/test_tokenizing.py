"""The tokenise job: chunks, the journal, bad lines, shards, partitions, provenance."""

import base64
import gzip
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
import tracemalloc
import types
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from millrace import ConfigError, IndexedDataset, TextError
from millrace.encoding import Tokenizer
from millrace.files import file_lock
from millrace.jobs import TokenizeResult, merge, tokenize
from millrace.store import IndexedDatasetBuilder
from millrace.text import SentenceSplitter, find_inputs
from millrace.tokenizing import TokenizeOptions, text_job
from millrace.tokenizing.input_tasks import choose_workers
from tests.conftest import make_texts, write_jsonl

PAIR = ["out_text_document.bin", "out_text_document.idx"]
CHUNK = 4_000  # bytes: many chunks in a small test
BAD_LINES = {
    b'{"id": 1, "text": 5}': "is 5, not a string",
    b'{"id": 2, "text": "a"': "JSON",
    b'{"id": 3, "text": "\\ud800"}': "Unicode",
    b'{"id": 4, "text": "\xff"}': "UTF-8",
    b'{"id": 5, "title": "a"}': "text",
    b"[1, 2]": "list",
    b'{"id": 0, "text": ' + b"[" * 1_000 + b"]" * 1_000 + b"}": "not a string",
    b'{"id": 6, "text": "' + b"x" * 5_000 + b'"}': "4000 bytes",
}


class StoppedError(Exception):
    """A job was interrupted."""


class Jobs:
    """Jobs of one test, in one folder, by one tokenizer unless they name another."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.tokenizer, self.patch = folder, tokenizer, patch

    def write(self, name: str, texts: Sequence[Any]) -> Path:
        return write_jsonl(self.folder / name, texts)

    def run(self, inputs: Any, output: str | Path = "out", **options: Any) -> TokenizeResult:
        """A job that writes no files but the pairs, unless it is told to."""
        usual = {"workers": 1, "chunk_size": CHUNK, "provenance": "none", "checksums": False}
        paths = [inputs] if isinstance(inputs, Path) else inputs
        tokenizer = options.pop("tokenizer", self.tokenizer)
        return tokenize(paths, self.folder / output, tokenizer, **(usual | options))

    def stops(self, count: int, inputs: Any, output: str | Path = "out", **options: Any) -> bool:
        """Runs a job of which a number of tasks succeed; returns whether there were more."""
        real, calls = text_job.run_task, iter(range(count))

        def run_some(options: Any, task: Any) -> Any:
            if next(calls, None) is None:
                raise StoppedError
            return real(options, task)

        with self.patch.context() as patch:
            patch.setattr(text_job, "run_task", run_some)
            try:
                self.run(inputs, output, **options)
            except StoppedError:
                return True
        return False

    def refuses(
        self, message: str, inputs: Any, output: str = "out", *, error: Any = ConfigError, **o: Any
    ) -> str:
        """Checks that a job is refused with a message, which is returned as a whole."""
        with pytest.raises(error, match=message) as caught:
            self.run(inputs, output, **o)
        return str(caught.value)

    def data(self, output: str | Path = "out") -> IndexedDataset:
        return IndexedDataset(f"{self.folder / output}_text_document")

    def origins(self, output: str | Path = "out") -> list[Any]:
        data = self.data(output)
        return [data.origin(number) for number in range(data.num_documents)]

    def contents(self, output: str | Path = "out") -> tuple[bytes, bytes]:
        stem = f"{self.folder / output}_text_document"
        return Path(stem + ".bin").read_bytes(), Path(stem + ".idx").read_bytes()

    def files(self) -> list[str]:
        """The names of what a job has left, but for its result."""
        names = sorted(name for name in os.listdir(self.folder) if name.startswith("out"))
        return [name for name in names if name != "out.job.info.json"]

    def assert_same(self, *outputs: str | Path, origins: bool = False) -> None:
        for output in outputs[1:]:
            assert self.contents(output) == self.contents(outputs[0])
            if origins:
                assert self.origins(output) == self.origins(outputs[0])


@pytest.fixture
def jobs(tmp_path: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    return Jobs(tmp_path, Tokenizer(tokenizer_file), monkeypatch)


# ---- jobs that are interrupted, and repeated ----


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_an_interrupted_job_continues(jobs: Jobs, name: str) -> None:
    path = jobs.write(name, make_texts(400))
    whole = jobs.run(path, "whole")
    assert whole.num_chunks_kept == 0
    assert whole.num_chunks_done > 4
    assert jobs.stops(3, path)
    hidden = path.rename(jobs.folder / "hidden")
    jobs.refuses(str(path), path, error=TextError)
    hidden.rename(path)
    assert jobs.files() == ["out.journal"]
    result = jobs.run(path)
    assert result.num_chunks_kept == 3
    assert result.num_chunks_done == whole.num_chunks_done - 3
    assert result.num_tokens == whole.num_tokens
    assert 0 < result.num_bytes_done < result.num_bytes == whole.num_bytes
    jobs.assert_same("whole", "out")
    assert jobs.files() == PAIR


def test_another_job_on_the_prefix_is_refused_or_starts_over(jobs: Jobs) -> None:
    path = jobs.write("a.jsonl", make_texts(300))
    assert jobs.stops(2, path)
    jobs.refuses(r"last_token was None, and is \d+ now.*--restart", path, append_eod=True)
    name, real = jobs.tokenizer.encoder_name, metadata.distribution
    other = types.SimpleNamespace(version="9.9")
    with jobs.patch.context() as patch:
        patch.setattr(metadata, "distribution", lambda p: other if p == name else real(p))
        jobs.refuses(rf"{name} was '[\d.]+', and is '9\.9' now.*--restart", path)
    # Workers and the size of chunks do not change what the job is.
    assert jobs.run(path, append_eod=True, restart=True).num_chunks_kept == 0
    jobs.run(path, "whole", append_eod=True, chunk_size=None)
    jobs.assert_same("whole", "out")
    # The other shards were cut by the sizes before.
    assert jobs.stops(2, path, "shard", shard=(0, 2))
    jobs.write("a.jsonl", make_texts(300, seed=1))
    message = r"bytes and times\[0\]\[0\] was \d+, and is \d+ now"
    jobs.refuses(message, path, "shard", shard=(0, 2))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_job_continues_from_another_folder(jobs: Jobs, name: str) -> None:
    first, second = jobs.folder / "first", jobs.folder / "second"
    for folder, seed in ((first, 0), (second, 1)):  # the same name in both folders
        folder.mkdir()
        write_jsonl(folder / name, make_texts(300, seed=seed))
    jobs.patch.chdir(first)
    assert jobs.stops(2, Path(name), first / "out")
    jobs.patch.chdir(second)
    path, jobs.folder = Path("..", "first", name), Path()
    assert jobs.run(path, "../first/out", provenance="parquet").num_chunks_kept == 2
    jobs.run(path, "whole", provenance="parquet")
    jobs.assert_same(first / "out", "whole", origins=True)


def test_a_restart_with_other_keys_removes_what_a_killed_job_has_left(jobs: Jobs) -> None:
    path = jobs.write("a.jsonl", make_texts(20))
    for name in ("title_document", "title_sentence"):
        for suffix in (".bin.0123456789ab.tmp", ".tmp.lock"):
            (jobs.folder / f"out_{name}{suffix}").touch()
    with file_lock(str(jobs.folder / "out_title_sentence.tmp.lock")):
        jobs.run(path, restart=True)
        assert jobs.files() == [
            *PAIR,
            "out_title_sentence.bin.0123456789ab.tmp",  # of a living job
            "out_title_sentence.tmp.lock",
        ]


def test_a_finished_command_returns_its_result_and_another_one_is_refused(jobs: Jobs) -> None:
    path = jobs.write("a.jsonl", [*make_texts(50), ""])
    first, whole = jobs.run(path), jobs.contents()
    folder, jobs.folder = jobs.folder, Path()
    jobs.patch.chdir(folder)
    again = jobs.run(path, workers=2)
    assert (again.num_chunks_done, again.num_chunks_kept) == (0, first.num_chunks_done)
    assert again.num_tokens == first.num_tokens
    assert again.prefixes == {"text": "out_text_document"}  # as this call says
    assert "there already" in again.notices[-1]
    others = {"append_eod": True, "on_error": "skip", "provenance": "parquet", "shard": (1, 2)}
    for name, value in others.items():
        jobs.refuses(rf"out_text_document.*{name}.*--restart", path, **{name: value})
    write_jsonl(path, make_texts(40, seed=1))
    jobs.refuses(r"sizes and times.*--restart", path)
    assert jobs.contents() == whole
    assert jobs.run(path, restart=True).num_documents == 40
    os.unlink(folder / "out.job.info.json")  # as where another tool has written the pair
    jobs.refuses(r"out_text_document\.idx is there already\. Give", path)


def test_the_content_of_a_pipe_is_never_the_same(jobs: Jobs) -> None:
    pipe = jobs.folder / "pipe"
    os.mkfifo(pipe)
    for is_first in (True, False):
        writer = threading.Thread(target=write_jsonl, args=(pipe, ["the mill"]))
        writer.start()
        if is_first:
            jobs.run(pipe)
        else:
            jobs.refuses(r"pipes.*--restart", pipe)
            pipe.read_bytes()
        writer.join()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv"])
def test_when_a_bad_line_is_mended_what_was_done_before_it_is_kept(
    jobs: Jobs, workers: int, name: str
) -> None:
    path = jobs.folder / name

    def write(bad: str) -> None:
        texts = [f"the mill {number**9}" for number in range(400)]
        lines = [json.dumps({"text": text}) for text in texts]
        lines.insert(300, bad)
        if name == "a.csv":
            lines = ["text", *texts]
            lines.insert(300, "a,b" if bad == "{" else "mended")
        data = "\n".join(lines).encode()
        path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)

    options: dict[str, Any] = {"workers": workers, "chunk_size": 1_000}
    write("{")
    message = r"(line|row) 301: .* keeps .* (\d+) chunks"
    error = jobs.refuses(message, path, error=TextError, **options)
    num_kept = int(re.findall(r"(\d+) chunks", error)[0])
    write('{"text": "a much longer line"}')
    result = jobs.run(path, provenance="parquet", **options)
    whole = jobs.run(path, "whole", provenance="parquet", **options)
    if workers == 1:  # a second one may have done chunks that were after the line
        assert result.num_chunks_kept >= num_kept - workers
    assert result.num_chunks_kept > 0.5 * whole.num_chunks_done
    assert f"{path} changed" in result.notices[0]
    jobs.assert_same("whole", "out", origins=True)


def test_what_was_done_for_files_that_did_not_change_is_kept(jobs: Jobs) -> None:
    texts, folder = make_texts(400), jobs.folder / "in"
    folder.mkdir()
    for number in range(80):  # about 20 tasks of 4 files each, and 40 of large ones
        write_jsonl(folder / f"{number:02}.jsonl", texts[5 * number :][:5])
    for name in ("98.jsonl.gz", "99.jsonl"):
        write_jsonl(folder / name, texts)
    last = jobs.run(folder, "whole").num_chunks_done - 1
    assert jobs.stops(last, folder)
    write_jsonl(folder / "07.jsonl", ["shorter"])
    assert last - 2 <= jobs.run(folder).num_chunks_kept < last
    jobs.run(folder, "whole", restart=True)
    jobs.assert_same("whole", "out")


def edit(path: Path, choices: random.Random) -> None:
    """Changes some bytes of a file of lines, or of a gzip file; the lines stay documents."""
    compressed = path.name.endswith("gz")
    data = path.read_bytes()
    lines = (gzip.decompress(data) if compressed else data).splitlines(keepends=True)
    place = choices.randrange(max(len(lines), 1))
    line = json.dumps({"text": "y" * choices.randrange(300), "id": choices.random()}).encode()
    kind = choices.choice(["replace", "same", "insert", "delete", "append", "cut", "blank"])
    if kind == "append" or not lines:
        if lines and not lines[-1].endswith(b"\n") and choices.random() < 0.5:
            lines[-1] = lines[-1].rstrip(b"}") + b', "more": "' + b"z" * 50 + b'"}'
        else:
            lines = [*lines, b"\n" * (bool(lines) and not lines[-1].endswith(b"\n")), line]
    elif kind == "same":
        lines[place] = lines[place].replace(b"the", b"tho")
    elif kind == "cut":
        del lines[place:]
    elif kind == "insert":
        lines.insert(place, line + b"\n")
    else:
        lines[place] = {"replace": line + b"\n", "delete": b"", "blank": b" \n"}[kind]
    data = b"".join(lines)
    path.write_bytes(gzip.compress(data) if compressed else data)


@pytest.mark.parametrize("seed", range(10))
def test_edits_between_interrupted_runs_give_what_a_new_run_gives(jobs: Jobs, seed: int) -> None:
    choices, jobs.tokenizer = random.Random(seed), Tokenizer("bytes")
    inputs = []
    for number, name in enumerate(("a.jsonl", "b.jsonl.gz", "c.jsonl", "d.jsonl", "e.txt")):
        texts = make_texts(choices.choice([0, 3, 30, 60]), seed=number)
        # Lines that are longer than a task, and a last line without a line break.
        path = jobs.write(name, [text * choices.choice([1, 1, 1, 9]) for text in texts])
        if choices.random() < 0.4 and not name.endswith("gz"):
            path.write_bytes(path.read_bytes().removesuffix(b"\n"))
        inputs.append(path)
    inputs += choices.sample(inputs, 1)  # a file twice
    options: dict[str, Any] = {"chunk_size": choices.choice([400, 1_000, 3_000])}
    options |= {"provenance": "parquet", "partitions": choices.choice([1, 1, 3])}
    options |= {"separator": "\n"}
    for _ in range(4):
        if not jobs.stops(choices.randrange(1, 30), inputs, **options):
            break
        for _ in range(choices.randrange(3)):
            edit(choices.choice(inputs), choices)
    else:
        jobs.run(inputs, **options)
    jobs.run(inputs, "whole", **(options | {"chunk_size": 10**6}))
    jobs.assert_same("whole", "out", origins=True)


def test_a_result_does_not_speak_of_later_output(jobs: Jobs) -> None:
    """A job that was all but done; then another input, published; then the old input again."""
    path, kept = jobs.write("a.jsonl", make_texts(30)), jobs.folder / "kept"

    def fail(*_: Any) -> None:
        raise OSError(5, "the disk went away")

    def run_until(place: str) -> tuple[bytes, bytes]:
        with jobs.patch.context() as patch:
            patch.setattr(place, fail)
            jobs.refuses("the disk went away", path, error=OSError, restart=True)
        return jobs.contents()

    expected = run_until("millrace.engine.journal.Journal.remove")
    path.rename(kept)
    jobs.write("a.jsonl", make_texts(30, seed=1))
    assert run_until("millrace.engine.run.write_file") != expected
    kept.rename(path)
    jobs.run(path)
    assert jobs.contents() == expected


@pytest.mark.parametrize("on_error", ["quarantine", "skip", "stop"])
def test_files_of_an_earlier_job_do_not_stay(jobs: Jobs, on_error: str) -> None:
    path = jobs.folder / "a.jsonl"
    path.write_text('{"text": "the mill"}\n{}\n')
    jobs.run(path, on_error="quarantine", checksums=True, provenance="parquet")
    assert len(list(jobs.folder.iterdir())) == 7
    path.write_text('{"text": "the water"}\n')
    jobs.run(path, on_error=on_error, restart=True)
    assert jobs.files() == PAIR


# ---- the command line ----


def start_command(jobs: Jobs, output: str, *options: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "millrace", "tokenize", "--json"]
    command += ["--output-prefix", str(jobs.folder / output), *map(str, options)]
    if "--tokenizer" not in options:
        command += ["--tokenizer", str(jobs.tokenizer.path)]
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, **pipes)


def test_standard_input_continues_where_it_is_the_same(jobs: Jobs) -> None:
    good = jobs.write("a.jsonl", make_texts(300)).read_bytes()
    options = ("--input", "-", "--chunk-size", CHUNK, "--workers", 1)

    def run_command(data: bytes, output: str) -> tuple[bytes, bytes]:
        return start_command(jobs, output, *options).communicate(data, timeout=60)

    run_command(good, "whole")
    _, error = run_command(good[: len(good) // 2] + b"\nbad\n" + good, "out")
    assert b"--on-error skip" in error
    report, _ = run_command(good, "out")
    assert json.loads(report)["chunks_kept"] > 2
    jobs.assert_same("whole", "out")


def test_the_job_says_at_its_start_that_it_uses_the_reference(jobs: Jobs) -> None:
    content = json.loads(Path(jobs.tokenizer.path).read_text())
    content["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}
    (jobs.folder / "t.json").write_text(json.dumps(content))
    (jobs.folder / "a.jsonl").write_text('{"text": "the mill"}\n{\n')
    options = ("--workers", 1, "--tokenizer", jobs.folder / "t.json", "--encoder", "fastokens")
    process = start_command(jobs, "out", "--input", jobs.folder / "a.jsonl", *options)
    first, last = process.communicate()[1].decode().splitlines()
    assert first.startswith("millrace: fastokens is not used: ")
    assert first.endswith("tokenizers is used instead")
    assert "line 2" in last


# ---- lines that are not documents ----


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("mode", ["skip", "quarantine"])
def test_bad_lines_are_skipped_counted_and_kept(jobs: Jobs, mode: str, workers: int) -> None:
    texts = [text for text in make_texts(60) if text][:30]
    lines = [json.dumps({"id": number, "text": text}).encode() for number, text in enumerate(texts)]
    bad_lines = BAD_LINES | {b'{"id": 7, "text": ""}': "empty"}
    numbers = [4 * number + 4 for number in range(len(bad_lines))]
    for number, line in zip(numbers, bad_lines, strict=True):
        lines.insert(number - 1, line)
    path, quarantine = jobs.folder / "a.jsonl", jobs.folder / "out.quarantine.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    options: dict[str, Any] = {"max_document_size": 4_000, "on_error": mode, "workers": workers}
    result = jobs.run(path, chunk_size=1_000, **options)
    assert result.num_skipped == len(bad_lines)
    assert [row["line"] for row in result.skipped] == numbers
    assert {row["file"] for row in result.skipped} == {str(path)}
    for row, word in zip(result.skipped, bad_lines.values(), strict=True):
        assert word in row["reason"]
    jobs.run(jobs.write("good.jsonl", texts), "good")
    jobs.assert_same("good", "out")
    assert quarantine.exists() == (mode == "quarantine")
    if mode == "quarantine":
        rows = [json.loads(line) for line in quarantine.read_text().splitlines()]
        assert [base64.b64decode(row["bytes"]) for row in rows] == [
            b"" if len(line) > 4_000 else line for line in bad_lines
        ]
        assert [row["line"] for row in rows] == numbers
        assert all(row["reason"] for row in rows)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("line", list(BAD_LINES))
def test_stop_names_the_line(jobs: Jobs, line: bytes, workers: int) -> None:
    path = jobs.write("a.jsonl", make_texts(60))
    good = path.read_bytes()
    path.write_bytes(good + line + b"\n" + good)
    options: dict[str, Any] = {"max_document_size": 4_000, "workers": workers, "chunk_size": 1_500}
    message = rf"a\.jsonl, line {good.count(10) + 1}: .*--on-error skip"
    assert BAD_LINES[line] in jobs.refuses(message, path, error=TextError, **options)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_the_first_bad_line_is_named_whichever_was_met_first(jobs: Jobs, name: str) -> None:
    """The chunk of the first bad line is the slowest: it is met after the lines of a block."""
    lines = [json.dumps({"text": "slow" + "x" * 100_000})] * 12 + ["{"]
    lines += ['{"text": "fast"}'] * 10 + ["["] + ['{"text": "fast"}'] * 150_000
    data = ("\n".join(lines) + "\n").encode()
    path = jobs.folder / name
    path.write_bytes(gzip.compress(data, 0) if name.endswith("gz") else data)
    if name.endswith("gz"):  # damage behind both, which this process meets before the workers do
        path.write_bytes(path.read_bytes()[:-12])
    jobs.tokenizer = Tokenizer.from_function(slow_or_fast, vocabulary_size=100)
    size = data.index(b'{"text": "fast') - 1
    for workers in (1, 2):
        jobs.refuses("line 13: ", path, error=TextError, workers=workers, chunk_size=size)


def slow_or_fast(text: str) -> list[int]:
    time.sleep(0.1 if text.startswith("slow") else 0)
    return [1]


def test_no_input_is_overwritten(jobs: Jobs) -> None:
    path, quarantine = jobs.folder / "a.jsonl", jobs.folder / "out.quarantine.jsonl"
    path.write_text('{"text": "a"}\nbad')
    jobs.run(path, on_error="quarantine")
    for source in (quarantine, jobs.folder / "out_text_document.bin"):
        content = source.read_bytes()
        for on_error in ("quarantine", "skip", "stop"):
            jobs.refuses("is an input and would be overwritten", source, on_error=on_error)
        assert source.read_bytes() == content


@pytest.mark.parametrize("key", ["title", "text"])
def test_the_pairs_of_several_keys_are_published_together(jobs: Jobs, key: str) -> None:
    """Or none of them, whichever cannot be written."""
    path, keys = jobs.folder / "a.jsonl", ("title", "text")
    write_files = IndexedDatasetBuilder._write_files

    def write_or_fail(self: Any) -> None:
        if self._durable and key in self.prefix:  # not the small one of a task
            raise OSError(5, "the disk went away")
        write_files(self)

    path.write_text('{"title": "the mill", "text": "the mill"}')
    first = jobs.run(path, json_keys=keys)
    with jobs.patch.context() as patch:
        patch.setattr(IndexedDatasetBuilder, "_write_files", write_or_fail)
        path.write_text('{"title": "a wheel", "text": "a wheel"}')
        jobs.refuses("disk went", path, error=OSError, json_keys=keys, restart=True)
    datasets = map(IndexedDataset, first.prefixes.values())
    assert [jobs.tokenizer.decode(dataset[0]) for dataset in datasets] == ["the mill"] * 2


def test_an_error_leaves_no_input_open(jobs: Jobs) -> None:
    """While somebody holds the error, too, and with it all that its traceback refers to."""
    path, line = jobs.folder / "a.jsonl.gz", b'{"text": "the mill"}\n'
    path.write_bytes(gzip.compress(line * 1000 + b"{\n" + line * 20_000))
    with pytest.raises(TextError):
        jobs.run(path)
    descriptors = [entry for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    assert str(path) not in map(os.readlink, descriptors)


@pytest.mark.parametrize(
    "line", [b'{"text": "the mill"}\n', b" " * 500 + b"\n"], ids=["mistyped", "blank"]
)
def test_the_first_documents_are_not_sought_in_the_whole_file(jobs: Jobs, line: bytes) -> None:
    """Its end is damaged, which nobody may see before the first line is judged."""
    path = jobs.folder / "a.jsonl.gz"
    lines = b'{"text": "the mill"}\n' + line * (5_000_000 // len(line))
    path.write_bytes(gzip.compress(lines, 1)[:-1000])
    options: dict[str, Any] = {"error": TextError, "json_keys": ["txet"], "chunk_size": 100_000}
    jobs.refuses(r"a\.jsonl\.gz, line 1: .*txet", path, **options)


# ---- chunks, partitions, shards ----


@pytest.mark.parametrize("options", [{}, {"append_eod": True}, {"partitions": 3}])
def test_the_output_depends_on_neither_chunks_nor_workers(
    jobs: Jobs, options: dict[str, Any]
) -> None:
    inputs = [
        jobs.write("d.jsonl", make_texts(100)),
        jobs.write("c.jsonl.gz", make_texts(50, seed=1)),
        jobs.write("b.jsonl.zst", []),
        jobs.write("a.jsonl", make_texts(3, seed=2)),
        *(jobs.folder / name for name in ("f.csv", "e.csv")),
    ]
    # A header is a line, whether the file is unpacked or read as a whole.
    inputs[4].write_text("text,id\n" + "".join(f'"mill{i}\nrace",{i}\n' for i in range(100)))
    inputs[5].write_text('text,"i\nd"\n')
    for workers, size in ((1, 10**6), (1, 500), (2, 2_000), (3, None)):
        more = {"workers": workers, "chunk_size": size, "provenance": "parquet", **options}
        jobs.run(inputs, f"{size}", **more)
    jobs.assert_same("1000000", "500", "2000", "None", origins=True)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_shards_merge_into_the_output_of_one_job(jobs: Jobs, count: int) -> None:
    """Whatever the size of the chunks of each."""
    inputs = [
        jobs.write("a.jsonl", make_texts(200)),
        jobs.write("b.jsonl.gz", make_texts(50, seed=1)),
        jobs.write("c.jsonl", make_texts(100, seed=2)),
    ]
    inputs.append(inputs[0])
    jobs.run(inputs, "one", provenance="parquet")
    for number, size in zip(range(count), (1_000, CHUNK, 100_000, 5_000, CHUNK), strict=False):
        options: dict[str, Any] = {"shard": (number, count), "chunk_size": size}
        jobs.run(inputs, f"s{number}", provenance="parquet", **options)
    shards = [jobs.folder / f"s{number}_text_document" for number in range(count)]
    merge(shards, jobs.folder / "merged_text_document")
    jobs.assert_same("one", "merged", origins=True)


def test_rows_of_arrow_are_counted_from_the_start_of_the_file(jobs: Jobs) -> None:
    """A part begins at a record batch, and nothing in the file says how many rows are before."""
    pyarrow = pytest.importorskip("pyarrow")
    path = jobs.folder / "a.arrow"
    table = pyarrow.table({"text": ["a", "b", "c", None, "e", None, "g"]})
    with pyarrow.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    jobs.refuses("row 3: ", path, error=TextError, chunk_size=1)
    rows = []
    for number in range(3):
        options: dict[str, Any] = {"on_error": "skip", "chunk_size": 1, "provenance": "parquet"}
        result = jobs.run(path, f"s{number}", shard=(number, 3), **options)
        rows += [origin.line for origin in jobs.origins(f"s{number}")]
        rows += [-row["line"] for row in result.skipped]
    assert sorted(rows) == [-5, -3, 0, 1, 2, 4, 6]


def test_the_origin_of_each_document(jobs: Jobs) -> None:
    texts = make_texts(120)
    path, second = (jobs.write(name, texts) for name in ("b.jsonl", "a.jsonl.zst"))
    jobs.run([path, second], workers=2, provenance="parquet", checksums=True)
    raw = path.read_bytes()
    for number, origin in enumerate(jobs.origins()):
        assert origin.source == str(second if number >= 120 else path)
        assert origin.line == number % 120 + 1
        line = raw[origin.byte_offset :].partition(b"\n")[0]
        assert json.loads(line) == {"id": number % 120, "text": texts[number % 120]}
        assert origin.id == str(number % 120)


def test_files_of_a_folder_that_are_left_out_are_told(jobs: Jobs) -> None:
    folder = jobs.folder / "in"
    (folder / "deep").mkdir(parents=True)
    path = jobs.write("in/a.jsonl", ["a"])
    for other in ("b.dat", "deep/c.warc.gz", "deep/d", "e.jsonl.br"):
        (folder / other).write_text('{"text": "b"}')
    for other in (".hidden", "_SUCCESS", "a.info.json", "README.md"):
        (folder / other).touch()
    result = jobs.run(folder)
    assert result.num_documents == 1
    assert len(result.notices) == 1
    for part in ("4 files", *(f"{folder}/{name}" for name in ("b.dat", "deep/c.warc.gz"))):
        assert part in result.notices[0]
    assert jobs.run(path, "one").notices == []
    path.unlink()
    (folder / "README.md").unlink()
    jobs.refuses("has no documents", folder, error=TextError)


# ---- memory ----


@pytest.mark.parametrize(
    ("workers", "memory", "size", "encoder", "expected"),
    [
        (None, 3000, 100, "bytes", 1),
        (2, 3000, 100, "bytes", "4,680 MB .* 2 workers.*3,000 MB"),
        (None, 500, 100, "bytes", "2,400 MB .* 100 MB"),
        (2, 500, 1, "bytes", "720 MB"),
        # The peak of the reference for documents of 4 MB was 1.3 GB; by fastokens it is 0.25 GB.
        (1, 600, 4, "fastokens", 1),
        (1, 600, 4, "tokenizers", "1,720 MB .*tokenizers.*600 MB"),
        (1, 1800, 4, "tokenizers", 1),
        # A CSV row is in the job's own process, too.
        (1, 600, 10, "csv", "720 MB"),
        (1, 720, 10, "csv", 1),
    ],
)
def test_memory_decides_the_number_of_workers(
    jobs: Jobs, workers: int | None, memory: int, size: int, encoder: str, expected: Any
) -> None:
    is_bytes = encoder in ("bytes", "csv")
    path = jobs.folder / ("a.csv" if encoder == "csv" else "a.jsonl")
    path.write_text("text\na\n")
    options = TokenizeOptions(
        inputs=[path],
        output_prefix="",
        tokenizer=Tokenizer("bytes") if is_bytes else jobs.tokenizer.with_encoder(encoder),
        workers=workers,
        memory=memory * 10**6,
        max_document_size=size * 10**6,
    )
    if isinstance(expected, int):
        assert choose_workers(options, find_inputs(options.inputs)) == expected
    else:
        with pytest.raises(ConfigError, match=rf"at least {expected}.*max_document_size"):
            choose_workers(options, find_inputs(options.inputs))


def test_memory_decides_nothing_else(jobs: Jobs) -> None:
    """A line that no budget makes a bad one; and another budget continues the job."""
    path = jobs.write("a.jsonl", [*make_texts(100), "x" * 4_500_000])
    path.write_bytes(path.read_bytes() + b"{")
    jobs.tokenizer = Tokenizer("bytes")
    jobs.refuses("memory must be at least", path, memory=10**8)
    for memory in (3 * 10**9, 4 * 10**9):
        jobs.refuses("line 102", path, error=TextError, memory=memory, chunk_size=None)


def test_tables_of_many_files_are_small(jobs: Jobs) -> None:
    """A file took 3.2 KB while a job was planned, so 60,000 of them more than the job has."""

    def stop(*_: Any) -> None:
        raise StoppedError

    jobs.patch.setattr(text_job, "_append_tasks", stop)
    jobs.tokenizer, peaks = Tokenizer("bytes"), []
    for count in (1, 3_000):
        folder = jobs.folder / str(count)
        folder.mkdir()
        for number in range(count):
            (folder / f"a-file-of-a-web-crawl-{number:06}.jsonl").write_text("{}")
        tracemalloc.start()
        with pytest.raises(StoppedError):
            jobs.run(folder)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 2_000 * 3_000


# ---- tokenizers ----


@pytest.mark.parametrize("text", ["strange", ["a", "strange"]])
def test_an_encoder_that_differs_later_stops_the_job(jobs: Jobs, text: Any) -> None:
    """A text after the first documents is encoded wrongly: the sample finds it."""
    path = jobs.write("a.jsonl", [*["the mill"] * 20_000, text])
    real = Tokenizer.encode_batch

    def encode_batch(self: Tokenizer, texts: Sequence[str]) -> Any:
        ids, lengths = real(self, texts)
        if self.encoder_name != self.reference_name and "strange" in texts:
            ids = ids.copy()
            ids[-1] ^= 1
        return ids, lengths

    jobs.patch.setattr(Tokenizer, "encode_batch", encode_batch)
    message = r"(?s)fastokens and tokenizers differ.*'strange'.*--encoder tokenizers --restart"
    jobs.refuses(message, path, error=TextError, check_rate=1.0, chunk_size=None)
    jobs.run(path, check_rate=0.0, chunk_size=None)


@pytest.mark.parametrize(
    "option", ["keep_newlines", "add_special_tokens", "special_tokens_in_text"]
)
def test_another_way_to_make_tokens_is_another_job(jobs: Jobs, option: str) -> None:
    path = jobs.folder / "a.jsonl"
    path.write_text('{"text": "a b. C d."}\n' * 20 + "{\n")

    def refuse(message: str, error: Any, **options: Any) -> None:
        keep_newlines = options.pop("keep_newlines", False)
        splitter = SentenceSplitter(keep_newlines=keep_newlines, library="sentencex")
        jobs.tokenizer = Tokenizer(jobs.tokenizer.path, encoder="tokenizers", **options)
        jobs.refuses(message, path, error=error, splitter=splitter, chunk_size=100)

    refuse("line 21", TextError)
    value = option != "special_tokens_in_text"
    refuse(f"(?s){option}.*--restart", ConfigError, **{option: value})


def code_points(text: str) -> list[int]:
    return [ord(character) for character in text]


def small_code_points(text: str) -> list[int]:
    if any(number > 255 for number in code_points(text)):
        raise ValueError("too large")
    return code_points(text)


def test_a_text_that_the_encoder_refuses_is_a_bad_line(jobs: Jobs) -> None:
    """Also of a library: WordLevel without the unknown token that it names."""
    path = jobs.write("a.jsonl", ["ab", "水", "c", "d水"])
    model = {"type": "WordLevel", "vocab": {"ab": 97, "c": 99}, "unk_token": "[UNK]"}
    words = {"version": "1.0", "model": model, "added_tokens": []}
    (jobs.folder / "words.json").write_text(json.dumps(words))
    function = Tokenizer.from_function(small_code_points, vocabulary_size=300)
    for tokenizer, ids in (
        (function, [[97, 98], [99]]),
        (Tokenizer(jobs.folder / "words.json", encoder="tokenizers"), [[97], [99]]),
    ):
        jobs.tokenizer = tokenizer
        message = r"a\.jsonl, line 2: .* cannot encode the text"
        jobs.refuses(message, path, error=TextError, restart=True)
        result = jobs.run(path, on_error="quarantine", restart=True, check_rate=1)
        assert [sequence.tolist() for sequence in jobs.data()] == ids
        assert result.num_skipped == 2
        lines = (jobs.folder / "out.quarantine.jsonl").read_bytes().splitlines()
        rows = [json.loads(line) for line in lines]
        assert [row["line"] for row in rows] == [2, 4]
        assert json.loads(base64.b64decode(rows[1]["bytes"])) == ["d水"]
        assert jobs.run(path, on_error="skip", restart=True).num_documents == 2


FUNCTION = """
FACTOR = 2
def encode(text): return [FACTOR * len(word) for word in text.split()]
"""


def by(path: Path, text: str, **options: Any) -> Tokenizer:
    """A tokenizer by the function of a module of the user, whose file this writes."""
    path.write_text(text)
    module = types.ModuleType("a_users_module")
    exec(compile(text, path, "exec"), module.__dict__)
    return Tokenizer.from_function(module.encode, vocabulary_size=500, name="own", **options)


def test_another_function_is_another_job(jobs: Jobs) -> None:
    path, edited = (
        jobs.write("a.jsonl", make_texts(300)),
        FUNCTION.replace("FACTOR = 2", "FACTOR = 3"),
    )
    file, other_file = jobs.folder / "own.py", jobs.folder / "other.py"
    assert jobs.stops(2, path, tokenizer=by(file, FUNCTION))
    jobs.refuses(r"versions\.function was .*--restart", path, tokenizer=by(file, edited))
    # A copy of the file has the same function.
    assert jobs.run(path, tokenizer=by(other_file, FUNCTION)).num_chunks_kept == 2
    # A version of the caller's counts instead.
    assert jobs.stops(2, path, tokenizer=by(file, FUNCTION, version="1"), restart=True)
    assert jobs.run(path, tokenizer=by(file, edited, version="1")).num_chunks_kept == 2


A_STATE = """
class Encoder:
    def __call__(self, text): return [len(text)]
an_encoder = Encoder()
def of(offset): return lambda text: [len(text) + offset]
"""


@pytest.mark.parametrize(
    "source",
    [
        A_STATE + "encode = an_encoder",
        A_STATE + "encode = an_encoder.__call__",
        A_STATE + "encode = of(1)",
        "encode = eval('lambda text: [len(text)]')",
    ],
)
def test_a_function_that_cannot_be_seen_needs_a_version(jobs: Jobs, source: str) -> None:
    path, file = jobs.write("a.jsonl", make_texts(300)), jobs.folder / "own.py"
    jobs.tokenizer = by(file, source)
    assert jobs.stops(2, path)
    jobs.refuses(r"versions\.function .* version.*--restart", path)
    assert "version" in jobs.run(path, restart=True).notices[0]
    jobs.tokenizer = by(file, source, version="1")
    assert jobs.stops(2, path, restart=True)
    result = jobs.run(path)
    assert (result.num_chunks_kept, result.notices) == (2, [])
