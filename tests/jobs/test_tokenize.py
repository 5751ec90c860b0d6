"""Text to token files: all kinds of input files, and all errors."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace import (
    ConfigError,
    IndexedDataset,
    TextError,
)
from millrace.encoding import Tokenizer
from millrace.engine import progress
from millrace.jobs import tokenize
from millrace.store.writer import PairWriter
from tests.conftest import make_texts, train_tokenizer, write_jsonl
from tests.jobs.kills import wait_for_end, workers_of


@pytest.fixture
def tokenizer(tokenizer_file: Path) -> Tokenizer:
    return Tokenizer(tokenizer_file)


def run(folder: Path, inputs: list[Path], tokenizer: Tokenizer, **options: Any) -> IndexedDataset:
    options = {"workers": 1, "provenance": "none", "checksums": False, "restart": True, **options}
    tokenize([str(path) for path in inputs], str(folder / "out"), tokenizer, **options)
    return IndexedDataset(folder / "out_text_document")


def test_the_ids_equal_the_tokenizers_ids(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """As preprocess_data.py: one sequence per document; EOD only after tokens."""
    import tokenizers

    texts = ["the water", "", "turns\nthe mill <|endoftext|> again", " ", "水車 🌊"]
    data = run(tmp_path, [write_jsonl(tmp_path / "a.jsonl", texts)], tokenizer, append_eod=True)
    plain = tokenizers.Tokenizer.from_file(tokenizer.path)
    expected = [[*plain.encode(text).ids, tokenizer.eod] for text in texts if text]
    assert [sequence.tolist() for sequence in data] == expected
    assert data.num_documents == len(texts)
    assert data.document_indices.tolist() == [0, 1, 1, 2, 3, 4]
    assert data.dtype == np.uint16


def test_plain_gzip_and_zstd_in_order(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = make_texts(90)
    names = ["c.jsonl", "b.jsonl.gz", "a.jsonl.zst"]
    inputs = [
        write_jsonl(tmp_path / name, texts[30 * i : 30 * i + 30]) for i, name in enumerate(names)
    ]
    data = run(tmp_path, inputs, tokenizer)
    expected = run(tmp_path, [write_jsonl(tmp_path / "all.jsonl", texts)], tokenizer)
    assert np.array_equal(data.tokens, expected.tokens)
    assert np.array_equal(data.sequence_lengths, expected.sequence_lengths)


def test_the_output_does_not_depend_on_workers_or_chunks(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(400))
    outputs = []
    for workers, size in [(1, 1 << 20), (1, 700), (1, 1000), (2, 500), (3, 2000)]:
        run(tmp_path, [source], tokenizer, workers=workers, chunk_size=size, append_eod=True)
        outputs.append(
            [(tmp_path / f"out_text_document{s}").read_bytes() for s in (".bin", ".idx")]
        )
    assert all(output == outputs[0] for output in outputs)


def test_each_key_becomes_a_pair(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"title": "the mill", "body": "water"}\n{"title": "", "body": "wheel"}\n')
    result = tokenize([str(path)], str(tmp_path / "out"), tokenizer, json_keys=["title", "body"])
    title, body = (IndexedDataset(result.prefixes[key]) for key in ("title", "body"))
    assert (title.num_documents, len(title)) == (2, 1)
    assert (body.num_documents, len(body)) == (2, 2)
    assert [tokenizer.decode(sequence) for sequence in body] == ["water", "wheel"]


def test_blank_lines_and_a_byte_order_mark_are_skipped(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": "b"}')
    data = run(tmp_path, [path], tokenizer)
    assert [tokenizer.decode(sequence) for sequence in data] == ["a", "b"]


def test_a_file_with_truncation_and_padding_settings_still_gives_whole_documents(
    tmp_path: Path, tokenizer_file: Path
) -> None:
    settings = json.loads(tokenizer_file.read_text())
    settings["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    settings["padding"] = {
        "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>",
    }  # fmt: skip
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(settings))
    texts = ["the water that turns", "a"]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    data = run(tmp_path, [source], Tokenizer(path))
    expected = run(tmp_path, [source], Tokenizer(tokenizer_file))
    assert np.array_equal(data.tokens, expected.tokens)


def test_ids_beyond_the_vocabularys_size_widen_the_dtype(tmp_path: Path) -> None:
    """A vocabulary with a gap: 300 tokens, one of them with the id 70,000."""
    settings = json.loads(train_tokenizer(tmp_path / "tokenizer.json").read_text())
    settings["model"]["vocab"]["水"] = 70_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    assert Tokenizer(tmp_path / "tokenizer.json").dtype == np.int32


# ---- end-of-document tokens ----


@pytest.mark.parametrize(
    ("special", "named", "expected"),
    [
        (["<eos>"], None, "<eos>"),
        (["</s>", "<pad>"], None, "</s>"),
        (["<eos>", "</s>"], "</s>", "</s>"),
        (["<pad>"], "<pad>", "<pad>"),
        (["<pad>"], None, "has none of the usual"),
        (["<eos>", "</s>"], None, r"has several \(</s>, <eos>\)"),
        (["<eos>"], "<end>", "no token '<end>'"),
    ],
)
def test_the_end_of_document_token(
    tmp_path: Path, special: list[str], named: str | None, expected: str
) -> None:
    path = train_tokenizer(tmp_path / "tokenizer.json", special)
    if expected in special:
        tokenizer = Tokenizer(path, named)
        assert tokenizer.decode([tokenizer.eod]) == expected
    else:
        with pytest.raises(TextError, match=rf"{expected}.*--eod-token|--eod-token.*{expected}"):
            _ = Tokenizer(path, named).eod


# ---- errors name file, line, value and remedy, and leave no files ----


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"text": \n', r"a.jsonl, line 2: column \d+: not valid JSON"),
        (b'\n\n{"text": "a"', "line 3: column"),
        (b'{"text": "a"}\n[1]\n', "line 2: a JSON list, not an object"),
        (b'{"text": "a"}\n{"body": "b", "id": 1}', 'line 2: there is no key "text".*: body, id'),
        (b'{"text": null}', 'line 1: the value of "text" is a JSON null'),
        (b'{"text": "\xff"}', "line 1: byte 11 is not UTF-8"),
        (b'{"text": "a\\ud800"}', "line 1: the text is not valid Unicode"),
        (b"[" * 200_000, "line 1: the JSON cannot be read"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_the_error_names_the_bad_line(
    tmp_path: Path, tokenizer: Tokenizer, content: bytes, message: str, workers: int
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(TextError, match=message):
        run(folder, [path], tokenizer, workers=workers)
    assert list(folder.iterdir()) == []


def test_damaged_compressed_files_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for name in ("a.jsonl.gz", "a.jsonl.zst"):
        whole = write_jsonl(tmp_path / name, make_texts(50)).read_bytes()
        middle = len(whole) // 2
        flipped = whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :]
        for data in (whole[:-5], whole[:middle], flipped):
            (tmp_path / name).write_bytes(data)
            # A flipped bit may also show as bad JSON, where the format has no checksum before it.
            with pytest.raises(TextError, match=name):
                run(tmp_path, [tmp_path / name], tokenizer)
        assert not (tmp_path / "out_text_document.idx").exists()


def test_several_compressed_members_are_one_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = make_texts(20)
    expected = run(tmp_path, [write_jsonl(tmp_path / "a.jsonl", texts)], tokenizer).tokens.copy()
    for name in ("b.jsonl.gz", "b.jsonl.zst"):
        parts = [write_jsonl(tmp_path / name, half).read_bytes() for half in (texts[:9], texts[9:])]
        (tmp_path / name).write_bytes(b"".join(parts))
        assert np.array_equal(run(tmp_path, [tmp_path / name], tokenizer).tokens, expected)


def skippable(number: int, content: bytes) -> bytes:
    """A zstd frame without text, as pzstd and seekable zstd write them."""
    return struct.pack("<II", 0x184D2A50 + number, len(content)) + content


def test_zstd_frames_without_text_are_skipped(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = make_texts(20)
    expected = run(tmp_path, [write_jsonl(tmp_path / "a.jsonl", texts)], tokenizer).tokens.copy()
    path = tmp_path / "b.jsonl.zst"
    first, second = (write_jsonl(path, half).read_bytes() for half in (texts[:9], texts[9:]))
    for before, between, after in [
        (skippable(0, b"size"), b"", b""),
        (skippable(15, b""), skippable(3, bytes(200_000)), skippable(9, b"end")),
    ]:
        path.write_bytes(before + first + between + second + after)
        assert np.array_equal(run(tmp_path, [path], tokenizer).tokens, expected)
    path.write_bytes(skippable(5, b"nothing else"))
    assert run(tmp_path, [path], tokenizer).num_documents == 0
    path.write_bytes(skippable(5, b"cut off")[:-1])
    with pytest.raises(TextError, match=r"damaged|end too early"):
        run(tmp_path, [path], tokenizer)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("workers", [1, 2])
def test_named_pipes(tmp_path: Path, tokenizer: Tokenizer, name: str, workers: int) -> None:
    """Written byte by byte at first, as a slow program may."""
    path = write_jsonl(tmp_path / name, make_texts(300))
    expected = run(tmp_path, [path, path], tokenizer).tokens.copy()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def write() -> None:
        data = path.read_bytes()
        with open(pipe, "wb", buffering=0) as file:
            for place in range(5):
                file.write(data[place : place + 1])
                time.sleep(0.01)
            for place in range(5, len(data), 1000):
                file.write(data[place : place + 1000])

    writer = threading.Thread(target=write)
    writer.start()
    data = run(tmp_path, [path, pipe], tokenizer, workers=workers)
    writer.join()
    assert np.array_equal(data.tokens, expected)


@pytest.mark.parametrize(
    "line",
    [
        "cat {input} | {tokenize} --input /dev/stdin",
        "{tokenize} --input /dev/stdin < {input}",
        "{tokenize} --input /dev/stdin < {plain}",
        "{tokenize} --input <(cat {input})",
    ],
)
def test_shell_pipes(tmp_path: Path, tokenizer: Tokenizer, line: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl.zst", make_texts(300))
    plain = write_jsonl(tmp_path / "a.jsonl", make_texts(300))
    expected = run(tmp_path, [path], tokenizer).tokens.copy()
    tokenize_it = (
        f"{sys.executable} -m millrace tokenize --tokenizer {tokenizer.path} "
        f"--output-prefix {tmp_path}/shell --workers 2"
    )
    result = subprocess.run(
        ["bash", "-c", line.format(input=path, plain=plain, tokenize=tokenize_it)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert np.array_equal(IndexedDataset(tmp_path / "shell_text_document").tokens, expected)


def test_the_progress_of_a_pipe_has_no_share() -> None:
    stream = io.StringIO()
    progress.Progress("tokenize", stream=stream)._show(10, "5 documents", time.monotonic())
    assert stream.getvalue() == "tokenize 5 documents  0:00\n"


def test_progress_counts_items_and_can_be_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_LOG_INTERVAL", 0.0)
    for enabled, text in [(True, "indices 100%  4,000 of 4,000  0:00 left\n"), (False, "")]:
        stream = io.StringIO()
        with progress.Progress("indices", enabled=enabled, stream=stream) as bar:
            bar.count(4000, 4000)
        assert stream.getvalue() == text


def test_progress_leaves_out_what_an_earlier_run_has_done() -> None:
    stream = io.StringIO()
    bar = progress.Progress("tokenize", 100, stream=stream)
    bar.skip(60)
    bar._show(20, "5 documents", time.monotonic())
    assert stream.getvalue().startswith("tokenize  50%  5 documents")


def test_an_empty_file_has_no_documents(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst"):
        assert run(tmp_path, [write_jsonl(tmp_path / name, [])], tokenizer).num_documents == 0


def test_missing_inputs_and_options_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(TextError, match=r"none.jsonl cannot be read: No such file"):
        run(tmp_path, [tmp_path / "none.jsonl"], tokenizer)
    with pytest.raises(TextError, match="has no documents"):
        run(tmp_path, [tmp_path], tokenizer)
    source = write_jsonl(tmp_path / "a.jsonl", ["a"])
    with pytest.raises(ConfigError, match="is not a folder"):
        run(tmp_path / "none", [source], tokenizer)


def test_paths_of_any_kind_and_numpys_numbers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(5))
    plain = run(tmp_path, [source], tokenizer).tokens.copy()
    result = tokenize(
        [source, str(source)],
        tmp_path / "paths",
        Tokenizer(str(tokenizer.path)),
        append_eod=np.bool_(False),
        workers=np.int64(2),
        checksums=np.bool_(True),
    )
    assert result.prefixes == {"text": f"{tmp_path}/paths_text_document"}
    data = IndexedDataset(result.prefixes["text"])
    assert np.array_equal(data.tokens, np.tile(plain, 2))
    info = json.loads((tmp_path / "paths_text_document.info.json").read_text())
    assert info["provenance"]["inputs"] == [str(source), str(source)]
    assert info["provenance"]["append_eod"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs": "a.jsonl"}, r"inputs .*\['a.jsonl'\]"),
        ({"inputs": Path("a.jsonl")}, r"inputs .*\[PosixPath"),
        ({"inputs": b"a.jsonl"}, r"inputs .*\[b'a.jsonl'\]"),
        ({"inputs": []}, "no inputs"),
        ({"inputs": [3]}, r"inputs .*\[3\]"),
        ({"inputs": None}, "inputs .*None"),
        ({"json_keys": "text"}, r"json_keys .*'text'.*\['text'\]"),
        ({"json_keys": []}, r"json_keys .*\[\]"),
        ({"json_keys": 3}, "json_keys .*3"),
        ({"json_keys": ["text", 1]}, r"json_keys .*\['text', 1\]"),
        ({"json_keys": ["text", "text"]}, r"json_keys .*\['text', 'text'\]"),
        ({"workers": 2.0}, "workers .*2.0"),
        ({"workers": True}, "workers .*True"),
        ({"workers": -1}, "workers .*1.*-1"),
        ({"append_eod": 1}, "append_eod .*1"),
        ({"checksums": "no"}, "checksums .*'no'"),
        ({"tokenizer": "t.json"}, r"tokenizer .*millrace.encoding.Tokenizer\('t.json'\)"),
    ],
)
def test_wrong_arguments_are_refused_before_any_work(
    tmp_path: Path, tokenizer: Tokenizer, arguments: dict[str, Any], message: str
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["a"])
    folder = tmp_path / "out"
    folder.mkdir()
    options = {"inputs": [source], "tokenizer": tokenizer, "workers": 1, **arguments}
    with pytest.raises(ConfigError, match=message):
        tokenize(output_prefix=folder / "out", **options)
    assert list(folder.iterdir()) == []


def test_inputs_that_would_be_overwritten_or_read_twice_are_refused(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    source = write_jsonl(tmp_path / "out_text_document.bin", ["a"])
    content = source.read_bytes()
    with pytest.raises(ConfigError, match="is an input and would be overwritten"):
        run(tmp_path, [source], tokenizer)
    assert source.read_bytes() == content
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is given twice, but a pipe can be read only once"):
        run(tmp_path / "other", [tmp_path / "pipe", source, tmp_path / "pipe"], tokenizer)


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b"\xff\xfe\x00"])
def test_a_file_that_is_not_a_tokenizer_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(TextError, match=r"tokenizer.json is not a tokenizer file"):
        Tokenizer(path)
    with pytest.raises(TextError, match="cannot be read"):
        Tokenizer(tmp_path / "none.json")


# ---- lines, memory and deaths ----


SCRIPT = """
import sys
from millrace.jobs import tokenize
from millrace.encoding import Tokenizer
print("runs")
source, output, tokenizer = sys.argv[1:]
print(tokenize([source], output, Tokenizer(tokenizer), workers=2).num_documents)
"""


def test_a_script_needs_no_main_guard(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Workers do not run the script that starts them."""
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(100))
    (tmp_path / "script.py").write_text(SCRIPT)
    for script in (["script.py"], ["-c", SCRIPT]):
        result = subprocess.run(
            [sys.executable, *script, source, tmp_path / "out", tokenizer.path],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
        )
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout == "runs\n100\n"


OWN_TOKENIZER = SCRIPT.replace("print(", "class Own(Tokenizer): pass\nTokenizer = Own\nprint(", 1)


def test_a_class_that_only_the_script_defines_is_refused_by_name(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(100))
    result = subprocess.run(
        [sys.executable, "-c", OWN_TOKENIZER, source, tmp_path / "out", tokenizer.path],
        capture_output=True,
        text=True,
        timeout=120,
    )
    last = result.stderr.splitlines()[-1]
    assert last.startswith("millrace.errors.ConfigError: a worker process cannot load")
    assert "Own" in last
    assert "into a module" in last
    assert result.stderr.count("Traceback") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_killed_job_leaves_no_pair_no_worker_and_the_next_run_succeeds(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(100_000))
    command = [
        sys.executable, "-m", "millrace", "tokenize", "--input", str(source), "--output-prefix",
        str(tmp_path / "out"), "--tokenizer", tokenizer.path, "--workers", "2",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(workers := workers_of(process.pid)) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not (tmp_path / "out_text_document.idx").exists()
    wait_for_end(workers)
    source.write_bytes(source.read_bytes()[:0])
    run(tmp_path, [write_jsonl(tmp_path / "b.jsonl", ["a"])], tokenizer, restart=True)
    assert sorted(path.name for path in tmp_path.glob("out*")) == [
        "out.job.info.json",
        "out_text_document.bin",
        "out_text_document.idx",
    ]


def test_gzip_is_recognised_by_its_bytes(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(gzip.compress(b'{"text": "mill"}\n'))
    assert tokenizer.decode(run(tmp_path, [path], tokenizer)[0]) == "mill"


def test_the_pairs_of_several_keys_are_published_together(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "a.jsonl"
    keys = ("title", "text")

    def job(word: str) -> None:
        source.write_text(json.dumps(dict.fromkeys(keys, f"the {word}")) + "\n")
        options: dict[str, Any] = {"workers": 1, "restart": True, "provenance": "none"}
        tokenize([source], tmp_path / "out", tokenizer, json_keys=keys, checksums=False, **options)

    def texts() -> list[str]:
        datasets = [IndexedDataset(tmp_path / f"out_{key}_document") for key in keys]
        return [tokenizer.decode(dataset[0]) for dataset in datasets]

    job("mill")
    assert texts() == ["the mill"] * 2
    for place in range(2):
        write_files = PairWriter.write_files

        def write_or_fail(self: Any, place: int = place, write: Any = write_files) -> None:
            if keys[place] in os.path.basename(self.prefix):
                os.mkdir(self.temporaries.idx)  # so that the index cannot be written
            write(self)

        with monkeypatch.context() as patch:
            patch.setattr(PairWriter, "write_files", write_or_fail)
            with pytest.raises(IsADirectoryError):
                job("wheel")
        for folder in tmp_path.glob("*.tmp"):
            folder.rmdir()
        assert texts() == ["the mill"] * 2
    job("race")
    assert texts() == ["the race"] * 2
