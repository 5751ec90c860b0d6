"""Training a tokenizer on files."""

import json
from pathlib import Path
from typing import Any

import pytest

from millrace import ConfigError, TextError
from millrace.cli import main
from millrace.encoding import Tokenizer
from millrace.encoding.training import _first_bytes, train_tokenizer
from tests.conftest import make_texts, write_jsonl


def test_a_tokenizer_is_trained_on_files(tmp_path: Path) -> None:
    texts = make_texts(200)
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", texts[:100])
    write_jsonl(folder / "b.jsonl.gz", texts[100:])
    result = train_tokenizer([folder], tmp_path / "t.json", vocabulary_size=330)
    tokenizer = result.tokenizer
    assert tokenizer.vocabulary_size == 330
    assert tokenizer.special_tokens() == {"<|endoftext|>": 0}
    assert tokenizer.encoder_name == "fastokens"
    assert result.num_texts == 200
    assert result.num_bytes == sum(len(text.encode()) for text in texts)
    assert len(tokenizer.encode(["the water"])[0]) < 4
    for text in [*texts, "日本 \ue000 <|endoftext|>"]:
        assert tokenizer.decode(tokenizer.encode([text])[0]) == text
    again = train_tokenizer([folder], tmp_path / "u.json", vocabulary_size=330).tokenizer
    assert again.fingerprint == tokenizer.fingerprint


def test_several_keys_lists_and_special_tokens(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    records = [{"a": "xyxyxy", "b": {"c": ["zwzw", "zwzwzw"]}}] * 5
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    result = train_tokenizer(
        [path],
        tmp_path / "t.json",
        vocabulary_size=266,
        json_keys=["a", "b.c"],
        special_tokens=["<s>", "</s>"],
    )
    assert result.tokenizer.special_tokens() == {"<s>": 0, "</s>": 1}
    assert result.num_texts == 15
    assert [len(ids) for ids in result.tokenizer.encode(["xyxy", "zwzw"])] == [1, 1]
    assert result.tokenizer.eod == 1


def test_the_text_to_train_on_is_taken_evenly(tmp_path: Path) -> None:
    paths = [write_jsonl(tmp_path / f"{name}.jsonl", [name * 100] * 1000) for name in "ab"]
    result = train_tokenizer(paths, tmp_path / "t.json", vocabulary_size=270, max_bytes=10_000)
    assert result.num_bytes == 10_000
    assert [len(ids) for ids in result.tokenizer.encode(["aaaa", "bbbb"])] == [1, 1]
    options = {"vocabulary_size": 270, "max_bytes": 10**9}
    with pytest.raises(ConfigError, match=r"t\.json is there already.* give --replace"):
        train_tokenizer(paths, tmp_path / "t.json", **options)
    assert Tokenizer(tmp_path / "t.json").fingerprint == result.tokenizer.fingerprint
    more = train_tokenizer(paths, tmp_path / "t.json", **options, replace=True)
    assert more.num_bytes == 200_000


def test_a_text_is_cut_between_characters() -> None:
    assert list(_first_bytes(["ab", "é水x", "y"], 7)) == ["ab", "é水"]
    assert list(_first_bytes(["ab", "é水x", "y"], 6)) == ["ab", "é"]
    assert list(_first_bytes(["ab"], 2)) == ["ab"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocabulary_size": 256}, r"\(--vocab-size\) must be at least 257, not 256"),
        ({"vocabulary_size": 3.5}, "vocabulary_size must be a whole number, not 3.5"),
        ({"special_tokens": "<s>"}, "special_tokens must be a list of texts, not '<s>'"),
        ({"special_tokens": ["a", "a"]}, "each once"),
        ({"max_bytes": 0}, "max_bytes must be at least 1, not 0"),
        ({"json_keys": "text"}, "json_keys are 'text'; give a list"),
        (
            {"output": "none/t.json"},
            "output must be a file in a folder that exists, not none/t.json",
        ),
        ({"output": "."}, "output must be a file .* not ."),
        ({"inputs": []}, "there are no inputs"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["a"])
    arguments = {"inputs": [path], "output": tmp_path / "t.json", "vocabulary_size": 300, **options}
    with pytest.raises(ConfigError, match=message):
        train_tokenizer(**arguments)
    assert not (tmp_path / "t.json").exists()


def test_a_bad_line_is_an_error_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": 3}\n')
    (tmp_path / "t.json").write_text("old")
    with pytest.raises(TextError, match=r"a\.jsonl, line 2: "):
        train_tokenizer([path], tmp_path / "t.json", vocabulary_size=300, replace=True)
    path.write_text("")
    with pytest.raises(TextError, match="have no text to train on"):
        train_tokenizer([path], tmp_path / "t.json", vocabulary_size=300, replace=True)
    assert (tmp_path / "t.json").read_text() == "old"


def test_the_command_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(50))
    output = tmp_path / "t.json"
    command = ["train-tokenizer", "--input", str(path), "--output", str(output)]
    more = ["--vocab-size", "280", "--special_tokens", "<eos>", "<pad>", "--max-bytes", "1M"]
    assert main([*command, *more]) == 0
    assert capsys.readouterr().out.startswith(f"{output}: 280 tokens, trained on 50 texts of 0.0")
    assert Tokenizer(output).special_tokens() == {"<eos>": 0, "<pad>": 1}
    assert main([*command, *more[2:], "--vocab-size", "10"]) == 1
    assert "--vocab-size) must be at least 258, not 10" in capsys.readouterr().err
