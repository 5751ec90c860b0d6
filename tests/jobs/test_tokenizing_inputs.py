"""What goes into a tokenise job: files, pipes, keys, arguments; and the pairs that come out."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace import ConfigError, IndexedDataset, TextError
from millrace.encoding import Tokenizer
from millrace.jobs import tokenize
from millrace.store import IndexedDatasetBuilder
from tests.conftest import make_texts, train_tokenizer, write_jsonl


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


def test_a_long_line_is_read_to_the_limit_alone(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """One line may be a file of 100 GB, as of a JSON list: to refuse it must not take minutes."""

    def num_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    with open(tmp_path / "a.jsonl", "wb") as file:
        file.truncate(200_000_000)
    before = num_read()
    with pytest.raises(TextError, match=r"line 1: the line is longer than 1000 bytes"):
        run(tmp_path, [tmp_path / "a.jsonl"], tokenizer, max_document_size=1000)
    assert num_read() - before < 50_000_000


def test_a_long_csv_row_is_read_to_the_limit_alone(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Also by the comparison of encoders, which reads 1 MB of documents before."""
    source = tmp_path / "a.csv"
    source.write_text(f"text\n{'mill ' * 400_000}\n")
    assert len(run(tmp_path, [source], tokenizer)) == 1
    with pytest.raises(TextError, match=r"row 2: the row is longer than 1500000 bytes"):
        run(tmp_path, [source], tokenizer, max_document_size=1_500_000, restart=True)


def test_each_key_becomes_a_pair(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"title": "the mill", "body": "water"}\n{"title": "", "body": "wheel"}\n')
    result = tokenize([str(path)], str(tmp_path / "out"), tokenizer, json_keys=["title", "body"])
    title, body = (IndexedDataset(result.prefixes[key]) for key in ("title", "body"))
    assert (title.num_documents, len(title)) == (2, 1)
    assert (body.num_documents, len(body)) == (2, 2)
    assert [tokenizer.decode(sequence) for sequence in body] == ["water", "wheel"]


def test_ids_beyond_the_vocabularys_size_widen_the_dtype(tmp_path: Path) -> None:
    """A vocabulary with a gap: 300 tokens, one of them with the id 70,000."""
    settings = json.loads(train_tokenizer(tmp_path / "tokenizer.json").read_text())
    settings["model"]["vocab"]["水"] = 70_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    assert Tokenizer(tmp_path / "tokenizer.json").dtype == np.int32


@pytest.mark.parametrize(
    ("special", "named", "expected"),
    [
        (["<eos>"], None, "<eos>"),
        (["</s>", "<pad>"], None, "</s>"),
        (["<eos>", "</s>"], "</s>", "</s>"),
        (["<pad>"], "<pad>", "<pad>"),
        (["<pad>"], None, "has none of "),
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
            file.write(data[5:])

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
        ({"inputs": "a.jsonl"}, "inputs must be a list of paths, not 'a.jsonl'"),
        ({"inputs": Path("a.jsonl")}, "inputs must be a list of paths, not PosixPath"),
        ({"inputs": [3]}, r"inputs\[0\] must be a path, not 3"),
        ({"inputs": []}, "no inputs"),
        ({"inputs": None}, "inputs .*None"),
        ({"json_keys": "text"}, r"json_keys .*'text'.*\['text'\]"),
        ({"json_keys": []}, r"json_keys .*\[\]"),
        ({"json_keys": ["text", 1]}, r"json_keys .*\['text', 1\]"),
        ({"json_keys": ["text", "text"]}, r"json_keys .*\['text', 'text'\]"),
        ({"json_keys": ["a\0"]}, "cannot be part of a file name"),
        ({"json_keys": ["\ud800"]}, "cannot be part of a file name"),
        ({"workers": True}, "workers .*True"),
        ({"workers": -1}, "workers .*1.*-1"),
        ({"append_eod": 1}, "append_eod .*1"),
        ({"tokenizer": "t.json"}, r"tokenizer .*millrace.encoding.Tokenizer\('t.json'\)"),
        ({"on_error": "ignore"}, "on_error .*stop, skip, quarantine.*'ignore'"),
        ({"provenance": "csv"}, "provenance .*'csv'"),
        ({"engine": "slurm"}, "engine .*'slurm'"),
        ({"shard": (2, 2)}, "shard .*0 .*1.*2"),
        ({"shard": 1}, r"shard .*\(number, count\)"),
        ({"partitions": 0}, "partitions .*0"),
        ({"partitions": 300}, "partitions .*300.*256"),
        ({"partitions": 2, "shard": (0, 2)}, "partitions .*shards"),
        ({"chunk_size": 0}, "chunk_size .*0"),
        ({"memory": 1.5}, "memory .*1.5"),
        ({"check_rate": 2}, "check_rate .*1.*2.0"),
        ({"separator": "\udcff"}, "separator is .* not valid Unicode"),
        ({"splitter": "english"}, "splitter .*SentenceSplitter.*'english'"),
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


def test_inputs_that_would_be_overwritten_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = write_jsonl(tmp_path / "out_text_document.bin", ["a"])
    content = source.read_bytes()
    with pytest.raises(ConfigError, match="is an input and would be overwritten"):
        run(tmp_path, [source], tokenizer)
    assert source.read_bytes() == content
    with pytest.raises(ConfigError, match="is not a folder"):
        run(tmp_path / "none", [source], tokenizer)


def test_the_pairs_of_several_keys_are_published_together(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, keys = tmp_path / "a.jsonl", ("title", "text")

    def texts_after(word: str) -> list[str]:
        source.write_text(json.dumps(dict.fromkeys(keys, f"the {word}")) + "\n")
        options: dict[str, Any] = {"workers": 1, "restart": True, "provenance": "none"}
        options |= {"json_keys": keys, "checksums": False}
        with contextlib.suppress(IsADirectoryError):
            tokenize([source], tmp_path / "out", tokenizer, **options)
        datasets = [IndexedDataset(tmp_path / f"out_{key}_document") for key in keys]
        return [tokenizer.decode(dataset[0]) for dataset in datasets]

    assert texts_after("mill") == ["the mill"] * 2
    write_files = IndexedDatasetBuilder._write_files
    for key in keys:

        def write_or_fail(self: Any, key: str = key) -> None:
            if key in os.path.basename(self.prefix):
                os.mkdir(self._pair[1].idx)  # so that the index cannot be written
            write_files(self)

        with monkeypatch.context() as patch:
            patch.setattr(IndexedDatasetBuilder, "_write_files", write_or_fail)
            assert texts_after("wheel") == ["the mill"] * 2
        for folder in tmp_path.glob("*.tmp"):
            folder.rmdir()
    assert texts_after("race") == ["the race"] * 2
