"""What goes into a tokenise job: files, pipes, keys, arguments; and the pairs that come out."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace import ConfigError, IndexedDataset, TextError
from millrace.encoding import Tokenizer
from millrace.jobs import tokenize
from tests.conftest import make_texts, train_tokenizer, write_jsonl


@pytest.fixture
def tokenizer(tokenizer_file: Path) -> Tokenizer:
    return Tokenizer(tokenizer_file)


def run(folder: Path, inputs: list[Path], tokenizer: Tokenizer, **options: Any) -> IndexedDataset:
    options = {"workers": 1, "provenance": "none", "checksums": False, "restart": True, **options}
    tokenize([str(path) for path in inputs], str(folder / "out"), tokenizer, **options)
    return IndexedDataset(folder / "out_text_document")


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
        (["<eos>", "</s>"], None, "has </s> and <eos> of"),
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
        ({"json_keys": "text"}, "json_keys are 'text'; give a list"),
        ({"json_keys": []}, r"json_keys .*\[\]"),
        ({"json_keys": ["text", 1]}, r"json_keys .*\['text', 1\]"),
        ({"json_keys": ["text", "text"]}, r"json_keys .*\['text', 'text'\]"),
        ({"json_keys": ["a\0"]}, "can be part of a file name"),
        ({"json_keys": ["\ud800"]}, "can be part of a file name"),
        ({"workers": -1}, "workers .*1.*-1"),
        ({"tokenizer": "t.json"}, r"tokenizer .*millrace.encoding.Tokenizer\('t.json'\)"),
        ({"shard": (2, 2)}, "shard .*0 .*1.*2"),
        ({"shard": 1}, r"shard .*\(number, count\)"),
        ({"partitions": 300}, "partitions .*300.*256"),
        ({"partitions": 2, "shard": (0, 2)}, "partitions .*shards"),
        ({"separator": "\udcff"}, "separator must be a text in Unicode"),
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
