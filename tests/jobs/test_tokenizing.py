"""The tokenise job: chunks, the journal, bad lines, shards, partitions, provenance."""

from __future__ import annotations

import base64
import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
import types
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace import ConfigError, IndexedDataset, TextError
from millrace.encoding import UNSEEN, Tokenizer
from millrace.engine import Task
from millrace.files import file_lock
from millrace.jobs import TokenizeResult, merge, tokenize
from millrace.text import Documents, SentenceSplitter
from millrace.tokenizing import TokenizeOptions, text_job
from millrace.tokenizing.chunk import Comparison
from millrace.tokenizing.plan import choose_workers
from tests.conftest import make_texts, write_jsonl
from tests.jobs.kills import finished_tasks

BARE: dict[str, Any] = {"provenance": "none", "checksums": False}  # no files but the pairs
CHUNK = 4_000  # bytes: many chunks in a small test
BAD_LINES = {
    b'{"id": 1, "text": 5}': "number",
    b'{"id": 2, "text": "a"': "JSON",
    b'{"id": 3, "text": "\\ud800"}': "Unicode",
    b'{"id": 4, "text": "\xff"}': "UTF-8",
    b'{"id": 5, "title": "a"}': "text",
    b"[1, 2]": "list",
    b'{"id": 6, "text": "' + b"x" * 5_000 + b'"}': "4000 bytes",
}


@pytest.fixture
def tokenizer(tokenizer_file: Path) -> Tokenizer:
    return Tokenizer(tokenizer_file)


def run(
    inputs: Sequence[Path], prefix: Path, tokenizer: Tokenizer, **options: Any
) -> TokenizeResult:
    options = {"workers": 1, "chunk_size": CHUNK, **BARE, **options}
    return tokenize([str(path) for path in inputs], str(prefix), tokenizer, **options)


def contents(prefix: Path, key: str = "text", level: str = "document") -> tuple[bytes, bytes]:
    stem = f"{prefix}_{key}_{level}"
    return Path(stem + ".bin").read_bytes(), Path(stem + ".idx").read_bytes()


def files_beside(prefix: Path) -> list[str]:
    """The names of what a job has left, but for its result."""
    names = sorted(name for name in os.listdir(prefix.parent) if name.startswith(prefix.name))
    return [name for name in names if name != f"{prefix.name}.job.info.json"]


def interrupt_after(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Makes the job fail after a number of tasks."""
    real, calls = text_job.run_task, iter(range(count))

    def run_some(options: Any, task: Any) -> Any:
        if next(calls, None) is None:
            raise OSError(5, "the disk went away")
        return real(options, task)

    monkeypatch.setattr(text_job, "run_task", run_some)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_an_interrupted_job_continues(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = write_jsonl(tmp_path / name, make_texts(400))
    whole = run([path], tmp_path / "whole", tokenizer)
    assert whole.num_chunks_kept == 0
    assert whole.num_chunks_done > 4
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3)
        with pytest.raises(OSError, match="the disk went away"):
            run([path], tmp_path / "out", tokenizer)
    assert files_beside(tmp_path / "out") == ["out.journal"]
    result = run([path], tmp_path / "out", tokenizer)
    assert result.num_chunks_kept == 3
    assert result.num_chunks_done == whole.num_chunks_done - 3
    assert result.num_tokens == whole.num_tokens
    assert 0 < result.num_bytes_done < result.num_bytes == whole.num_bytes
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert files_beside(tmp_path / "out") == ["out_text_document.bin", "out_text_document.idx"]


def test_another_job_on_the_prefix_is_refused_or_starts_over(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(300))
    with monkeypatch.context() as patch:
        interrupt_after(patch, 2)
        with pytest.raises(OSError, match="the disk went away"):
            run([path], tmp_path / "out", tokenizer)
    with pytest.raises(ConfigError, match=r"last_token was None, and is \d+ now.*--restart"):
        run([path], tmp_path / "out", tokenizer, append_eod=True)
    # Workers and the size of chunks do not change what the job is.
    result = run([path], tmp_path / "out", tokenizer, append_eod=True, restart=True)
    assert result.num_chunks_kept == 0
    run([path], tmp_path / "whole", tokenizer, append_eod=True, chunk_size=None)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_job_continues_from_another_folder(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, seed in ((first, 0), (second, 1)):  # the same name in both folders
        folder.mkdir()
        write_jsonl(folder / name, make_texts(300, seed=seed))
    with monkeypatch.context() as patch:
        patch.chdir(first)
        interrupt_after(patch, 2)
        with pytest.raises(OSError, match="the disk went away"):
            run([Path(name)], Path("out"), tokenizer)
    monkeypatch.chdir(second)
    path = Path("..", "first", name)
    result = run([path], Path("../first/out"), tokenizer, provenance="parquet")
    assert result.num_chunks_kept == 2
    run([path], Path("whole"), tokenizer, provenance="parquet")
    assert contents(first / "out") == contents(second / "whole")
    suffix = "_text_document.origins.parquet"
    assert Path(f"{first}/out{suffix}").read_bytes() == Path(f"whole{suffix}").read_bytes()


def test_a_restart_with_other_keys_removes_what_a_killed_job_has_left(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(20))
    for name in ("title_document", "title_sentence"):
        for suffix in (".bin.0123456789ab.tmp", ".tmp.lock"):
            (tmp_path / f"out_{name}{suffix}").touch()
    with file_lock(str(tmp_path / "out_title_sentence.tmp.lock")):
        run([path], tmp_path / "out", tokenizer, restart=True)
        assert files_beside(tmp_path / "out") == [
            "out_text_document.bin",
            "out_text_document.idx",
            "out_title_sentence.bin.0123456789ab.tmp",  # of a living job
            "out_title_sentence.tmp.lock",
        ]


def test_a_finished_command_returns_its_result_and_another_one_is_refused(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [*make_texts(50), ""])
    first = run([path], tmp_path / "out", tokenizer)
    whole = contents(tmp_path / "out")
    again = run([path], tmp_path / "out", tokenizer, workers=2)
    assert (again.num_chunks_done, again.num_chunks_kept) == (0, first.num_chunks_done)
    assert again.num_tokens == first.num_tokens
    assert "there already" in again.notices[-1]
    for options in ({"append_eod": True}, {"on_error": "skip"}, {"provenance": "parquet"}):
        (name,) = options
        with pytest.raises(ConfigError, match=rf"out_text_document.*{name}.*--restart"):
            run([path], tmp_path / "out", tokenizer, **options)
    write_jsonl(path, make_texts(40, seed=1))
    with pytest.raises(ConfigError, match=r"sizes and times.*--restart"):
        run([path], tmp_path / "out", tokenizer)
    assert contents(tmp_path / "out") == whole
    assert run([path], tmp_path / "out", tokenizer, restart=True).num_documents == 40
    os.unlink(tmp_path / "out.job.info.json")  # as where another tool has written the pair
    with pytest.raises(ConfigError, match=r"out_text_document\.idx is there already\. Give"):
        run([path], tmp_path / "out", tokenizer)


def test_an_earlier_result_has_the_paths_of_this_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["the mill"])
    run([path], tmp_path / "out", Tokenizer("bytes"))
    monkeypatch.chdir(tmp_path)
    result = run([path], Path("out"), Tokenizer("bytes"))
    assert result.num_chunks_done == 0
    assert result.prefixes == {"text": "out_text_document"}


def test_the_content_of_a_pipe_is_never_the_same(tmp_path: Path, tokenizer: Tokenizer) -> None:
    os.mkfifo(tmp_path / "pipe")
    for is_first in (True, False):
        writer = threading.Thread(target=write_jsonl, args=(tmp_path / "pipe", ["the mill"]))
        writer.start()
        if is_first:
            run([tmp_path / "pipe"], tmp_path / "out", tokenizer)
        else:
            with pytest.raises(ConfigError, match=r"pipes.*--restart"):
                run([tmp_path / "pipe"], tmp_path / "out", tokenizer)
            (tmp_path / "pipe").read_bytes()
        writer.join()


def run_or_stop(
    monkeypatch: pytest.MonkeyPatch, count: int, *arguments: Any, **options: Any
) -> TokenizeResult | None:
    """Runs a job of which a number of tasks succeed; None if there were more."""
    with monkeypatch.context() as patch:
        interrupt_after(patch, count)
        try:
            return run(*arguments, **options)
        except OSError:
            return None


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv"])
def test_when_a_bad_line_is_mended_what_was_done_before_it_is_kept(
    tmp_path: Path, tokenizer: Tokenizer, workers: int, name: str
) -> None:
    def write(bad: str) -> None:
        texts = [f"the mill {number**9}" for number in range(400)]
        lines = [json.dumps({"text": text}) for text in texts]
        lines.insert(300, bad)
        if name == "a.csv":
            lines = ["text", *texts]
            lines.insert(300, "a,b" if bad == "{" else "mended")
        data = "\n".join(lines).encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)

    inputs, options = [tmp_path / name], {"workers": workers, "chunk_size": 1_000}
    write("{")
    with pytest.raises(
        TextError, match=r"(line|row) 301: .* keeps .* (\d+) chunks, 0\.0 MB"
    ) as error:
        run(inputs, tmp_path / "out", tokenizer, **options)
    num_kept = int(re.findall(r"(\d+) chunks", str(error.value))[0])
    write('{"text": "a much longer line"}')
    result = run(inputs, tmp_path / "out", tokenizer, provenance="parquet", **options)
    whole = run(inputs, tmp_path / "whole", tokenizer, provenance="parquet", **options)
    if workers == 1:  # a second one may have done chunks that were after the line
        assert result.num_chunks_kept >= num_kept - workers
    assert result.num_chunks_kept > 0.5 * whole.num_chunks_done
    assert f"{result.num_chunks_kept} chunks" in result.notices[0]
    assert f"{tmp_path / name} changed" in result.notices[0]
    suffixes = (".bin", ".idx", ".origins.parquet")
    for suffix in suffixes:
        files = [Path(f"{tmp_path / job}_text_document{suffix}") for job in ("out", "whole")]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_what_was_done_for_files_that_did_not_change_is_kept(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = make_texts(400)
    (tmp_path / "in").mkdir()
    for number in range(80):  # about 20 tasks of 4 files each, and 40 of large ones
        write_jsonl(tmp_path / "in" / f"{number:02}.jsonl", texts[5 * number :][:5])
    for name in ("98.jsonl.gz", "99.jsonl"):
        write_jsonl(tmp_path / "in" / name, texts)
    whole = run([tmp_path / "in"], tmp_path / "whole", tokenizer)
    last = whole.num_chunks_done - 1
    assert run_or_stop(monkeypatch, last, [tmp_path / "in"], tmp_path / "out", tokenizer) is None
    write_jsonl(tmp_path / "in" / "07.jsonl", ["shorter"])
    result = run([tmp_path / "in"], tmp_path / "out", tokenizer)
    assert last - 2 <= result.num_chunks_kept < last
    run([tmp_path / "in"], tmp_path / "whole", tokenizer, restart=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


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
def test_edits_between_interrupted_runs_give_what_a_new_run_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    choices = random.Random(seed)
    tokenizer = Tokenizer("bytes")
    inputs = [tmp_path / name for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl", "d.jsonl", "e.txt")]
    for number, path in enumerate(inputs):
        texts = make_texts(choices.choice([0, 3, 30, 60]), seed=number)
        # Lines that are longer than a task, and a last line without a line break.
        write_jsonl(path, [text * choices.choice([1, 1, 1, 9]) for text in texts])
        if choices.random() < 0.4 and not path.name.endswith("gz"):
            path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    inputs += choices.sample(inputs, 1)  # a file twice
    options: dict[str, Any] = {"chunk_size": choices.choice([400, 1_000, 3_000])}
    options |= {"provenance": "parquet", "partitions": choices.choice([1, 1, 3])}
    options |= {"separator": "\n"}
    for _ in range(4):
        count = choices.randrange(1, 30)
        result = run_or_stop(monkeypatch, count, inputs, tmp_path / "out", tokenizer, **options)
        if result is not None:
            break
        for _ in range(choices.randrange(3)):
            edit(choices.choice(inputs), choices)
    else:
        result = run(inputs, tmp_path / "out", tokenizer, **options)
    run(inputs, tmp_path / "whole", tokenizer, **(options | {"chunk_size": 10**6}))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    ours, theirs = (IndexedDataset(f"{tmp_path / job}_text_document") for job in ("out", "whole"))
    for number in range(ours.num_documents):
        assert ours.origin(number) == theirs.origin(number)


def test_a_changed_input_of_a_shard_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other shards were cut by the sizes before."""
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(300))
    assert run_or_stop(monkeypatch, 2, [path], tmp_path / "out", tokenizer, shard=(0, 2)) is None
    write_jsonl(path, make_texts(300, seed=1))
    with pytest.raises(ConfigError, match=r"bytes and times\[0\]\[0\] was \d+, and is \d+ now"):
        run([path], tmp_path / "out", tokenizer, shard=(0, 2))


def test_a_result_does_not_speak_of_later_output(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that was all but done; then another input, published; then the old input again."""
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(30))

    def fail(*_: Any) -> None:
        raise OSError(5, "the disk went away")

    def run_until(place: str) -> tuple[bytes, bytes]:
        with monkeypatch.context() as patch:
            patch.setattr(place, fail)
            with pytest.raises(OSError, match="the disk went away"):
                run([path], tmp_path / "out", tokenizer, restart=True)
        return contents(tmp_path / "out")

    expected = run_until("millrace.engine.journal.Journal.remove")
    path.rename(tmp_path / "kept")
    write_jsonl(path, make_texts(30, seed=1))
    assert run_until("millrace.engine.run.atomic_file") != expected
    (tmp_path / "kept").rename(path)
    run([path], tmp_path / "out", tokenizer)
    assert contents(tmp_path / "out") == expected


def test_standard_input_continues_where_it_is_the_same(
    tmp_path: Path, tokenizer_file: Path
) -> None:
    good = write_jsonl(tmp_path / "a.jsonl", make_texts(300)).read_bytes()
    options = ["--tokenizer", str(tokenizer_file), "--chunk-size", str(CHUNK), "--workers", "1"]

    def run_command(data: bytes, prefix: str, *more: str) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-m", "millrace", "tokenize", "--input", "-", "--json"]
        command += ["--output-prefix", str(tmp_path / prefix), *options, *more]
        return subprocess.run(command, input=data, capture_output=True, timeout=60)

    assert run_command(good, "whole").returncode == 0
    stopped = run_command(good[: len(good) // 2] + b"\nbad\n" + good, "out")
    assert b"--on-error skip" in stopped.stderr
    again = run_command(good, "out")
    report = json.loads(again.stdout)
    assert report["chunks_kept"] > 2
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def write_bad(path: Path) -> tuple[list[str], list[int]]:
    """Writes good lines with a bad one after every fourth; returns the good texts, bad numbers."""
    texts = [text for text in make_texts(len(BAD_LINES) * 4 + 4) if text][: len(BAD_LINES) * 3]
    lines: list[bytes] = []
    bad = []
    remaining = iter(BAD_LINES)
    for number, text in enumerate(texts):
        lines.append(json.dumps({"id": number, "text": text}).encode())
        if number % 3 == 2:
            lines.append(next(remaining))
            bad.append(len(lines))
    path.write_bytes(b"\n".join(lines) + b"\n")
    return texts, bad


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("mode", ["skip", "quarantine"])
def test_bad_lines_are_skipped_counted_and_kept(
    tmp_path: Path, tokenizer: Tokenizer, mode: str, workers: int
) -> None:
    texts, bad = write_bad(tmp_path / "a.jsonl")
    options: dict[str, Any] = {"max_document_size": 4_000, "on_error": mode, "workers": workers}
    result = run([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer, chunk_size=1_000, **options)
    assert result.num_skipped == len(bad)
    assert [row["line"] for row in result.skipped] == bad
    assert {row["file"] for row in result.skipped} == {str(tmp_path / "a.jsonl")}
    for row, word in zip(result.skipped, BAD_LINES.values(), strict=True):
        assert word in row["reason"]
    write_jsonl(tmp_path / "good.jsonl", texts)
    run([tmp_path / "good.jsonl"], tmp_path / "good", tokenizer)
    assert contents(tmp_path / "out") == contents(tmp_path / "good")
    path = tmp_path / "out.quarantine.jsonl"
    assert path.exists() == (mode == "quarantine")
    if mode == "quarantine":
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [base64.b64decode(row["bytes"]) for row in rows] == [
            b"" if len(line) > 4_000 else line for line in BAD_LINES
        ]
        assert [row["line"] for row in rows] == bad
        assert all(row["reason"] for row in rows)
    run([tmp_path / "good.jsonl"], tmp_path / "out", tokenizer, on_error=mode, restart=True)
    assert not path.exists()  # its lines are not of these files


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("line", list(BAD_LINES))
def test_stop_names_the_line_and_the_job_continues_when_it_is_repaired(
    tmp_path: Path, tokenizer: Tokenizer, line: bytes, workers: int
) -> None:
    good = write_jsonl(tmp_path / "good.jsonl", make_texts(60)).read_bytes()
    path = tmp_path / "a.jsonl"
    path.write_bytes(good + line + b"\n" + good)
    options: dict[str, Any] = {"max_document_size": 4_000, "workers": workers, "chunk_size": 1_500}
    number = good.count(b"\n") + 1
    with pytest.raises(TextError, match=rf"a\.jsonl, line {number}: .*--on-error skip") as error:
        run([path], tmp_path / "out", tokenizer, **options)
    assert BAD_LINES[line] in str(error.value)


def test_an_empty_text_is_an_empty_document_or_is_skipped(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["", "the mill", "", "water"])
    assert run([path], tmp_path / "a", tokenizer).num_documents == 4
    result = run([path], tmp_path / "b", tokenizer, on_error="skip")
    assert (result.num_documents, result.num_skipped) == (2, 2)


@pytest.mark.parametrize("options", [{}, {"append_eod": True}, {"partitions": 3}])
def test_the_output_depends_on_neither_chunks_nor_workers(
    tmp_path: Path, tokenizer: Tokenizer, options: dict[str, Any]
) -> None:
    inputs = [
        write_jsonl(tmp_path / "a.jsonl", make_texts(200)),
        write_jsonl(tmp_path / "b.jsonl.gz", make_texts(100, seed=1)),
        write_jsonl(tmp_path / "c.jsonl", make_texts(3, seed=2)),
    ]
    run(inputs, tmp_path / "one", tokenizer, chunk_size=10**6, provenance="parquet", **options)
    expected = contents(tmp_path / "one")
    places = IndexedDataset(tmp_path / "one_text_document")
    for workers, chunk_size in ((1, 700), (2, 3_000), (3, None)):
        prefix = tmp_path / f"{workers}"
        run(
            inputs,
            prefix,
            tokenizer,
            workers=workers,
            chunk_size=chunk_size,
            provenance="parquet",
            **options,
        )
        assert contents(prefix) == expected
        data = IndexedDataset(f"{prefix}_text_document")
        for number in range(0, data.num_documents, 37):
            assert data.origin(number) == places.origin(number)


def test_partitions_do_not_depend_on_how_files_are_cut(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """A header is a line, whether the file is unpacked or read as a whole."""
    paths = [tmp_path / name for name in ("a.csv", "b.csv", "c.jsonl")]
    paths[0].write_text("text,id\n" + "".join(f'"mill{i}\nrace",{i}\n' for i in range(30)))
    paths[1].write_text('text,"i\nd"\n')
    write_jsonl(paths[2], make_texts(20))
    for size in (100, 10_000):
        prefix = tmp_path / f"out{size}"
        run(paths, prefix, tokenizer, partitions=3, chunk_size=size, provenance="parquet")
    assert contents(tmp_path / "out100") == contents(tmp_path / "out10000")
    first, second = (
        IndexedDataset(tmp_path / f"out{size}_text_document") for size in (100, 10_000)
    )
    for number in range(first.num_documents):
        assert first.origin(number) == second.origin(number)


def test_partitions_deal_lines_round_robin(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = make_texts(50)
    inputs = [
        write_jsonl(tmp_path / "a.jsonl", texts[:20]),
        write_jsonl(tmp_path / "b.jsonl", texts[20:]),
    ]
    run(inputs, tmp_path / "out", tokenizer, partitions=3, chunk_size=500)
    dealt = write_jsonl(tmp_path / "dealt.jsonl", texts[::3] + texts[1::3] + texts[2::3])
    run([dealt], tmp_path / "expected", tokenizer)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")
    run(inputs, tmp_path / "same", tokenizer, partitions=3, keep_sequential_samples=True)
    run(inputs, tmp_path / "plain", tokenizer)
    assert contents(tmp_path / "same") == contents(tmp_path / "plain")


@pytest.mark.parametrize("count", [1, 2, 5])
def test_shards_merge_into_the_output_of_one_job(
    tmp_path: Path, tokenizer: Tokenizer, count: int
) -> None:
    inputs = [
        write_jsonl(tmp_path / "a.jsonl", make_texts(200)),
        write_jsonl(tmp_path / "b.jsonl.gz", make_texts(50, seed=1)),
        write_jsonl(tmp_path / "c.jsonl", make_texts(100, seed=2)),
    ]
    run(inputs, tmp_path / "one", tokenizer, provenance="parquet")
    for number in range(count):
        run(inputs, tmp_path / f"s{number}", tokenizer, shard=(number, count), provenance="parquet")
    shards = [tmp_path / f"s{number}_text_document" for number in range(count)]
    merged = merge(shards, tmp_path / "merged_text_document")
    assert contents(tmp_path / "merged") == contents(tmp_path / "one")
    one = IndexedDataset(tmp_path / "one_text_document")
    for number in range(0, one.num_documents, 23):
        assert merged.origin(number) == one.origin(number)


def test_shards_do_not_depend_on_the_size_of_chunks(tmp_path: Path, tokenizer: Tokenizer) -> None:
    paths = [write_jsonl(tmp_path / name, make_texts(300)) for name in ("a.jsonl", "b.jsonl.gz")]
    paths += [paths[0]]
    whole = run(paths, tmp_path / "whole", tokenizer)
    prefixes = []
    for number, size in enumerate((1_000, 5_000, 100_000)):
        run(paths, tmp_path / f"{number}", tokenizer, chunk_size=size, shard=(number, 3))
        prefixes.append(f"{tmp_path}/{number}_text_document")
    merge(prefixes, f"{tmp_path}/merged_text_document")
    assert contents(tmp_path / "merged") == contents(tmp_path / "whole")
    assert whole.num_documents == 900


def test_rows_of_arrow_are_counted_from_the_start_of_the_file(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """A part begins at a record batch, and nothing in the file says how many rows are before."""
    pyarrow = pytest.importorskip("pyarrow")
    path = tmp_path / "a.arrow"
    table = pyarrow.table({"text": ["a", "b", "c", None, "e", None, "g"]})
    with pyarrow.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    with pytest.raises(TextError, match="row 3: "):
        run([path], tmp_path / "out", tokenizer, chunk_size=1)
    rows = []
    for number in range(3):
        prefix = tmp_path / f"s{number}"
        options: dict[str, Any] = {"shard": (number, 3), "on_error": "skip", "chunk_size": 1}
        result = run([path], prefix, tokenizer, provenance="parquet", **options)
        data = IndexedDataset(f"{prefix}_text_document")
        rows += [data.origin(i).line for i in range(data.num_documents)]  # type: ignore[union-attr]
        rows += [-row["line"] for row in result.skipped]
    assert sorted(rows) == [-5, -3, 0, 1, 2, 4, 6]


def code_points(text: str) -> list[int]:
    return [ord(character) for character in text]


def test_any_function_tokenizes(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["ab", "", "c"])
    tokenizer = Tokenizer.from_function(code_points, vocabulary_size=300, eod=299)
    run([path], tmp_path / "out", tokenizer, append_eod=True)
    data = IndexedDataset(tmp_path / "out_text_document")
    assert [data[i].tolist() for i in range(len(data))] == [[97, 98, 299], [99, 299]]


def small_code_points(text: str) -> list[int]:
    if any(number > 255 for number in code_points(text)):
        raise ValueError("too large")
    return code_points(text)


def test_a_text_that_the_encoder_refuses_is_a_bad_line(tmp_path: Path) -> None:
    """Also of a library: WordLevel without the unknown token that it names."""
    path = write_jsonl(tmp_path / "a.jsonl", ["ab", "水", "c", "d水"])
    model = {"type": "WordLevel", "vocab": {"ab": 97, "c": 99}, "unk_token": "[UNK]"}
    words = {"version": "1.0", "model": model, "added_tokens": []}
    (tmp_path / "words.json").write_text(json.dumps(words))
    function = Tokenizer.from_function(small_code_points, vocabulary_size=300)
    for tokenizer, ids in (
        (function, [[97, 98], [99]]),
        (Tokenizer(tmp_path / "words.json", encoder="tokenizers"), [[97], [99]]),
    ):
        with pytest.raises(TextError, match=r"a\.jsonl, line 2: .* cannot encode the text"):
            run([path], tmp_path / "stop", tokenizer, restart=True)
        prefix = tmp_path / "out"
        options: dict[str, Any] = {"on_error": "quarantine", "restart": True}
        result = run([path], prefix, tokenizer, check_rate=1, **options)
        data = IndexedDataset(result.prefixes["text"])
        assert [data[i].tolist() for i in range(len(data))] == ids
        assert result.num_skipped == 2
        lines = Path(f"{prefix}.quarantine.jsonl").read_bytes().splitlines()
        rows = [json.loads(line) for line in lines]
        assert [row["line"] for row in rows] == [2, 4]
        assert json.loads(base64.b64decode(rows[1]["bytes"])) == ["d水"]
        result = run([path], prefix, tokenizer, on_error="skip", restart=True)
        assert result.num_documents == 2


def test_a_shard_does_not_overwrite_another(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(50))
    run([path], tmp_path / "out", tokenizer, shard=(0, 2))
    with pytest.raises(ConfigError, match=r"shard\[0\] was 0, and is 1 now"):
        run([path], tmp_path / "out", tokenizer, shard=(1, 2))


def test_the_origin_of_each_document(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = make_texts(120)
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    second = write_jsonl(tmp_path / "b.jsonl.gz", texts)
    run(
        [path, second], tmp_path / "out", tokenizer, workers=2, provenance="parquet", checksums=True
    )
    data = IndexedDataset(tmp_path / "out_text_document")
    raw = path.read_bytes()
    for number in range(0, 240, 7):
        origin = data.origin(number)
        assert origin is not None
        assert origin.source == str(second if number >= 120 else path)
        assert origin.line == number % 120 + 1
        line = raw[origin.byte_offset :].partition(b"\n")[0]
        assert json.loads(line) == {"id": number % 120, "text": texts[number % 120]}
        assert origin.id == str(number % 120)


def test_the_quarantine_is_of_the_last_job_and_not_its_input(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path, quarantine = tmp_path / "a.jsonl", tmp_path / "out.quarantine.jsonl"
    path.write_text('{"text": "a"}\nbad')
    run([path], tmp_path / "out", tokenizer, on_error="quarantine")
    assert quarantine.exists()
    for on_error in ("quarantine", "skip", "stop"):
        with pytest.raises(ConfigError, match="is an input and would be overwritten"):
            run([quarantine], tmp_path / "out", tokenizer, on_error=on_error)
    path.write_text('{"text": "a"}')
    run([path], tmp_path / "out", tokenizer, on_error="quarantine", restart=True)
    assert not quarantine.exists()
    quarantine.mkdir()
    with pytest.raises(ConfigError, match=r"quarantine\.jsonl is a folder"):
        run([path], tmp_path / "out", tokenizer, on_error="quarantine")


def test_an_error_leaves_no_input_open(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """While somebody holds the error, too, and with it all that its traceback refers to."""
    line = b'{"text": "the mill"}\n'
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line * 1000 + b"{\n" + line * 20_000))
    with pytest.raises(TextError):
        run([tmp_path / "a.jsonl.gz"], tmp_path / "out", tokenizer)
    descriptors = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert str(tmp_path / "a.jsonl.gz") not in map(os.readlink, descriptors)


def test_an_encoder_that_differs_later_stops_the_job(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text after the first documents is encoded wrongly: the sample finds it."""
    path = write_jsonl(tmp_path / "a.jsonl", [*["the mill"] * 20_000, "strange"])
    real = Tokenizer.encode_batch

    def encode_batch(self: Tokenizer, texts: Sequence[str]) -> Any:
        ids, lengths = real(self, texts)
        if self.encoder_name != self.reference_name and "strange" in texts:
            ids = ids.copy()
            ids[-1] ^= 1
        return ids, lengths

    monkeypatch.setattr(Tokenizer, "encode_batch", encode_batch)
    with pytest.raises(TextError, match=r"(?s)strange.*--encoder tokenizers --restart"):
        run([path], tmp_path / "out", tokenizer, check_rate=1.0, chunk_size=None)


@pytest.mark.parametrize(
    "line", [b'{"text": "the mill"}\n', b" " * 500 + b"\n"], ids=["mistyped", "blank"]
)
def test_the_first_documents_are_not_sought_in_the_whole_file(
    tmp_path: Path, tokenizer: Tokenizer, line: bytes
) -> None:
    """Its end is damaged, which nobody may see before the first line is judged."""
    path = tmp_path / "a.jsonl.gz"
    lines = b'{"text": "the mill"}\n' + line * (5_000_000 // len(line))
    path.write_bytes(gzip.compress(lines, 1)[:-1000])
    with pytest.raises(TextError, match=r"a\.jsonl\.gz, line 1: .*txet"):
        run([path], tmp_path / "out", tokenizer, json_keys=["txet"], chunk_size=100_000)


def test_memory_counts_what_the_reference_library_needs(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Its peak for documents of 4 MB was 1.3 GB; by fastokens it is 0.25 GB."""
    path = write_jsonl(tmp_path / "a.jsonl", ["a"])
    options: dict[str, Any] = {"memory": 600_000_000, "max_document_size": 4_000_000}
    run([path], tmp_path / "out", tokenizer, **options)
    reference = tokenizer.with_encoder("tokenizers")
    with pytest.raises(ConfigError, match=r"memory must be at least 1,720 MB .*tokenizers.*600 MB"):
        run([path], tmp_path / "out", reference, **options)
    run([path], tmp_path / "new", reference, **{**options, "memory": 1_800_000_000})


def test_memory_counts_a_csv_row_in_the_jobs_process(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text\na\n")
    options: dict[str, Any] = {"workers": 1, "max_document_size": 10_000_000}
    with pytest.raises(ConfigError, match=r"memory .*720 MB.*600 MB"):
        run([path], tmp_path / "out", tokenizer, memory=600_000_000, **options)
    run([path], tmp_path / "out", tokenizer, memory=720_000_000, **options)


def test_memory_decides_the_number_of_workers_alone(tmp_path: Path) -> None:
    def choose(workers: int | None, memory: int, size: int | None) -> int:
        options = TokenizeOptions(
            inputs=(), output_prefix="", tokenizer=Tokenizer("bytes"), workers=workers,
            memory=memory, max_document_size=size,
        )  # fmt: skip
        return choose_workers(options, ())

    assert choose(None, 3 * 10**9, None) == 1
    for arguments, needed in [
        ((2, 3 * 10**9, None), "4,680 MB .* 2 workers"),
        ((None, 5 * 10**8, 10**8), "2,400 MB .* 100 MB"),
        ((2, 5 * 10**8, 10**6), "720 MB"),
    ]:
        with pytest.raises(ConfigError, match=rf"{needed}.*max_document_size"):
            choose(*arguments)
    # A line that no budget makes a bad one; and another budget continues the job.
    path = write_jsonl(tmp_path / "a.jsonl", [*make_texts(100), "x" * 4_500_000])
    path.write_bytes(path.read_bytes() + b"{")
    for memory in (3 * 10**9, 4 * 10**9):
        with pytest.raises(TextError, match="line 102"):
            run([path], tmp_path / "out", Tokenizer("bytes"), memory=memory, chunk_size=None)


def test_a_killed_command_continues(tmp_path: Path, tokenizer_file: Path) -> None:
    """By the command line, with one JSON object at the end."""
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(20_000))
    command = [sys.executable, "-m", "millrace", "tokenize", "--input", str(path)]
    command += ["--tokenizer", str(tokenizer_file), "--chunk-size", "20K", "--workers", "2"]
    command += ["--json", "--output-prefix"]
    subprocess.run([*command, str(tmp_path / "whole")], check=True, capture_output=True)
    process = subprocess.Popen([*command, str(tmp_path / "out")], stdout=subprocess.PIPE)
    journal = tmp_path / "out.journal"
    while len(finished_tasks(tmp_path)) < 5:
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    done = subprocess.run([*command, str(tmp_path / "out")], check=True, capture_output=True)
    report = json.loads(done.stdout)
    assert report["chunks_kept"] >= 5
    assert report["documents"] == 20_000
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not journal.exists()


# ---- what an earlier job left ----


@pytest.mark.parametrize("on_error", ["quarantine", "skip", "stop"])
def test_files_of_an_earlier_job_do_not_stay(tmp_path: Path, on_error: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "the mill"}\n{}\n')
    inputs, prefix, tokenizer = [tmp_path / "a.jsonl"], tmp_path / "out", Tokenizer("bytes")
    tokenize(inputs, prefix, tokenizer, on_error="quarantine", checksums=True, workers=1)
    assert len(list(tmp_path.iterdir())) == 7
    inputs[0].write_text('{"text": "the water"}\n')
    tokenize(inputs, prefix, tokenizer, on_error=on_error, workers=1, restart=True, **BARE)
    assert files_beside(prefix) == ["out_text_document.bin", "out_text_document.idx"]


@pytest.mark.parametrize(
    "option", ["keep_newlines", "add_special_tokens", "special_tokens_in_text"]
)
def test_another_way_to_make_tokens_is_another_job(
    tmp_path: Path, tokenizer_file: Path, option: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a b. C d."}\n' * 20 + "{\n")

    def run(**options: Any) -> None:
        keep_newlines = options.pop("keep_newlines", False)
        splitter = SentenceSplitter(keep_newlines=keep_newlines, library="sentencex")
        tokenizer = Tokenizer(tokenizer_file, encoder="tokenizers", **options)
        tokenize([path], tmp_path / "out", tokenizer, splitter=splitter, workers=1, chunk_size=100)

    with pytest.raises(TextError, match="line 21"):
        run()
    with pytest.raises(ConfigError, match=f"(?s){option}.*--restart"):
        run(**{option: option != "special_tokens_in_text"})


def test_the_job_says_at_its_start_that_it_uses_the_reference(
    tmp_path: Path, tokenizer_file: Path
) -> None:
    content = json.loads(tokenizer_file.read_text())
    content["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}
    (tmp_path / "t.json").write_text(json.dumps(content))
    (tmp_path / "a.jsonl").write_text('{"text": "the mill"}\n{\n')
    result = subprocess.run(
        [sys.executable, "-m", "millrace", "tokenize", "--input", tmp_path / "a.jsonl", "--workers",
         "1", "--output-prefix", tmp_path / "out", "--tokenizer", tmp_path / "t.json",
         "--encoder", "fastokens"],
        capture_output=True, text=True,
    )  # fmt: skip
    first, last = result.stderr.splitlines()
    assert first.startswith("millrace: fastokens is not used: ")
    assert first.endswith("tokenizers is used instead")
    assert "line 2" in last


# ---- tokenizers ----


FUNCTION = """
import math, re
FACTOR = 2
WORD = re.compile("[a-z]+")
def length(word): return len(word)
def encode(text, offset=0): return [FACTOR * length(word) + offset for word in WORD.findall(text)]
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("FACTOR = 2", "FACTOR = 3"),
        ("offset=0", "offset=1"),
        ("len(word)", "len(word) + 1"),
        ("[a-z]", "[a-y]"),
        ("+ offset", "- offset"),
        ("return len", "return math.floor(1.5) * len"),
    ],
)
def test_another_function_is_another_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(300))

    def tokenizer(text: str, **options: Any) -> Tokenizer:
        module = types.ModuleType("a_users_module")
        exec(text, module.__dict__)
        return Tokenizer.from_function(module.encode, vocabulary_size=500, name="own", **options)

    prefix, others = tmp_path / "out", {"version": "1"}
    first, edited = tokenizer(FUNCTION), tokenizer(FUNCTION.replace(old, new))
    assert run_or_stop(monkeypatch, 2, [path], prefix, first) is None
    with pytest.raises(ConfigError, match=r"versions\.function was .*--restart"):
        run([path], prefix, edited)
    # The same text again, on other lines and in another module, is the same function.
    assert run([path], prefix, tokenizer("\n\n" + FUNCTION)).num_chunks_kept == 2
    # A version of the caller's counts instead.
    first = tokenizer(FUNCTION, **others)
    assert run_or_stop(monkeypatch, 2, [path], prefix, first, restart=True) is None
    assert run([path], prefix, tokenizer(FUNCTION.replace(old, new), **others)).num_chunks_kept == 2


@pytest.mark.parametrize(
    ("source", "old", "new"),
    [
        ("STEPS = (f, g, f)", "g, f)", "g, g)"),
        ("STEPS = {'a': f, 'b': g, 'c': f}", "'c': f", "'c': g"),
        ("def STEPS(): pass\nSTEPS.table = {'a': 1}", "1", "2"),
        ("def STEPS(*x): return x", "*x", "x"),
        ("def STEPS():\n try: f(1); g(1)\n except E: pass", "; g(1)\n except E: pass",
         "\n except E: pass\n else: g(1)"),
        ("from email.utils import quote as STEPS", "utils", "quoprimime"),
        ("import functools, glob\n@functools.wraps(glob.escape)\ndef STEPS(): return 1", "1", "2"),
    ],
)  # fmt: skip
def test_what_tells_functions_apart(source: str, old: str, new: str) -> None:
    def version(text: str) -> str:
        module = types.ModuleType("a_users_module")
        exec(f"def f(x): return x\ndef g(x): return -x\n{text}", module.__dict__)
        exec("def encode(text): return STEPS", module.__dict__)
        tokenizer = Tokenizer.from_function(module.encode, vocabulary_size=500)
        return str(tokenizer.versions["function"])

    assert old in source
    assert version(source) == version(source)
    assert version(source) != version(source.replace(old, new))
    assert not version(source).startswith(UNSEEN)


class Encoder:
    """A function with a state."""

    def __call__(self, text: str) -> list[int]:
        return [len(text)]


an_encoder = Encoder()


def by_an_object(text: str) -> list[int]:
    return an_encoder(text)


class Text(str):
    """A text with methods of its own."""


a_text = Text("a")


def by_a_text(text: str) -> list[int]:
    return [len(a_text) for _ in text]


@pytest.mark.parametrize("function", [an_encoder, by_an_object, an_encoder.__call__, by_a_text])
def test_a_function_that_cannot_be_seen_needs_a_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: Any
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(300))
    settings: dict[str, Any] = {"vocabulary_size": 10_000, "name": "own"}
    tokenizer = Tokenizer.from_function(function, **settings)
    assert run_or_stop(monkeypatch, 2, [path], tmp_path / "out", tokenizer) is None
    with pytest.raises(ConfigError, match=r"versions\.function .* version.*--restart"):
        run([path], tmp_path / "out", tokenizer)
    result = run([path], tmp_path / "out", tokenizer, restart=True)
    assert "version" in result.notices[0]
    tokenizer = Tokenizer.from_function(function, version="1", **settings)
    options = {"restart": True}
    assert run_or_stop(monkeypatch, 2, [path], tmp_path / "out", tokenizer, **options) is None
    result = run([path], tmp_path / "out", tokenizer)
    assert (result.num_chunks_kept, result.notices) == (2, [])


def test_another_version_of_a_library_is_another_job(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(300))
    assert run_or_stop(monkeypatch, 2, [path], tmp_path / "out", tokenizer) is None
    name, real = tokenizer.encoder_name, metadata.distribution

    def distribution(package: str) -> Any:
        return types.SimpleNamespace(version="9.9") if package == name else real(package)

    monkeypatch.setattr(metadata, "distribution", distribution)
    with pytest.raises(ConfigError, match=rf"{name} was '[\d.]+', and is '9\.9' now.*--restart"):
        run([path], tmp_path / "out", tokenizer)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_the_first_bad_line_is_named_whichever_was_met_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The chunk of the first bad line is the slowest: it is met after the lines of a block."""
    lines = [json.dumps({"text": "slow" + "x" * 100_000})] * 12 + ["{"]
    lines += ['{"text": "fast"}'] * 10 + ["["] + ['{"text": "fast"}'] * 150_000
    data = ("\n".join(lines) + "\n").encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(data, 0) if name.endswith("gz") else data)
    if name.endswith("gz"):  # damage behind both, which this process meets before the workers do
        path.write_bytes(path.read_bytes()[:-12])
    tokenizer = Tokenizer.from_function(slow_or_fast, vocabulary_size=100)
    size = data.index(b'{"text": "fast') - 1
    for workers in (1, 2):
        with pytest.raises(TextError, match="line 13: "):
            run([path], tmp_path / "out", tokenizer, workers=workers, chunk_size=size)


def slow_or_fast(text: str) -> list[int]:
    time.sleep(0.1 if text.startswith("slow") else 0)
    return [1]


def test_files_of_a_folder_that_are_left_out_are_told(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    write_jsonl(folder / "a.jsonl", ["a"])
    for other in ("b.dat", "deep/c.warc.gz", "deep/d", "e.jsonl.br"):
        (folder / other).write_text('{"text": "b"}')
    for other in (".hidden", "_SUCCESS", "a.info.json", "README.md"):
        (folder / other).touch()
    result = run([folder], tmp_path / "out", tokenizer)
    assert result.num_documents == 1
    assert len(result.notices) == 1
    for part in ("4 files", *(f"{folder}/{name}" for name in ("b.dat", "deep/c.warc.gz"))):
        assert part in result.notices[0]
    assert run([folder / "a.jsonl"], tmp_path / "one", tokenizer).notices == []
    (folder / "a.jsonl").unlink()
    (folder / "README.md").unlink()
    with pytest.raises(TextError, match="has no documents"):
        run([folder], tmp_path / "out", tokenizer)


def test_tables_of_many_files_are_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file took 3.2 KB while a job was planned, so 60,000 of them more than the job has."""

    class PlannedError(Exception):
        pass

    def stop(*_: Any) -> None:
        raise PlannedError

    monkeypatch.setattr(text_job, "_append_tasks", stop)
    peaks = []
    for count in (1, 3_000):
        folder = tmp_path / str(count)
        folder.mkdir()
        for number in range(count):
            (folder / f"a-file-of-a-web-crawl-{number:06}.jsonl").write_text("{}")
        tracemalloc.start()
        with pytest.raises(PlannedError):
            run([folder], tmp_path / "out", Tokenizer("bytes"))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 2_000 * 3_000


def test_a_difference_in_the_sample_stops_the_job(tokenizer: Tokenizer) -> None:
    def encode(texts: list[str]) -> Any:
        ids, lengths = tokenizer.encode_batch(texts)
        return ids + ["wheel" in text for text in texts].count(True), lengths

    wrong = tokenizer.with_encoder("fastokens", encode)
    options = TokenizeOptions(inputs=(), output_prefix="", tokenizer=wrong, check_rate=1.0)

    def documents(*texts: str | list[str]) -> Documents:
        zeros = np.zeros(len(texts), np.int64)
        return Documents(
            texts=[list(texts)], lines=zeros, byte_offsets=zeros, ids=[None] * len(texts),
            num_lines=len(texts), num_bytes=100,
        )  # fmt: skip

    check = Comparison(options, Task(0, None))
    check(documents("the mill", "", ["a", "b"]))
    with pytest.raises(
        TextError, match=r"fastokens and tokenizers differ.*'a wheel'.*--encoder tokenizers"
    ):
        check(documents(["a wheel"]))
    Comparison(replace(options, check_rate=0.0), Task(0, None))(documents("a wheel"))
