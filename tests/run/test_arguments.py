"""Megatron-LM's arguments, from files and lists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millrace import ConfigError
from millrace.run.arguments import (
    LEGACY_SPLIT,
    config_from,
    parse_blend,
    read_arguments,
    read_identifiers,
    unknown_arguments,
)

ARGUMENTS: dict[str, Any] = {"data_path": ["a"], "seq_length": 8, "num_samples": [10, 5, 5]}


def test_yaml_and_toml_give_the_same_configuration(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "data:\n  data-path: [0.3, a, 0.7, b]\n  split: 9,1,0\nseq-length: 8\ntrain_samples: 100\n"
        "global-batch-size: 4\nreset-position-ids: true\n"
    )
    (tmp_path / "run.toml").write_text(
        'seq-length = 8\ntrain_samples = 100\n"global-batch-size" = 4\nreset-position-ids = true\n'
        '[data]\ndata-path = ["0.3", "a", "0.7", "b"]\nsplit = "9,1,0"\n'
    )
    configs = [config_from(read_arguments(tmp_path / name)) for name in ("run.yaml", "run.toml")]
    assert configs[0] == configs[1]
    assert configs[0].blend == (["a", "b"], [0.3, 0.7])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "a: [", "cannot be read"),
        ("a.toml", "a = ", "cannot be read"),
        ("a.yaml", "- 1", "holds a list"),
        ("a.json", "{}", "neither .yaml"),
        ("a.yaml", "x: {seed: 1}\nseed: 2", "seed twice"),
        ("a.yaml", "\udcff", "cannot be read"),
    ],
)
def test_files_without_arguments_are_refused(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=message):
        read_arguments(tmp_path / name)


def test_the_error_names_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml: No such file"):
        read_arguments(tmp_path / "nothing.yaml")


def test_model_arguments_are_listed_and_misspelt_names_are_refused() -> None:
    assert unknown_arguments({"seed": 1, "num_layers": 2}) == ["num_layers"]
    with pytest.raises(ConfigError, match="did you mean seq_length"):
        unknown_arguments({"seq_lenght": 1})


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ("a", (["a"], None)),
        ("a b", (["a", "b"], None)),
        ("a b c", (["a", "b", "c"], None)),
        ("30 a 70 b", (["a", "b"], [30.0, 70.0])),
        (["1", " a "], (["a"], [1.0])),
        (["1", "2", "3"], (["1", "2", "3"], None)),
    ],
)
def test_a_list_is_prefixes_or_weights_and_prefixes(items: Any, expected: Any) -> None:
    assert parse_blend(items) == expected


def test_weights_for_only_some_prefixes_are_refused() -> None:
    with pytest.raises(ConfigError, match="weights for some prefixes only"):
        parse_blend("1 a b c")


def test_numbers_of_samples_follow_from_iterations() -> None:
    """Megatron-LM counts one evaluation per interval, and one more."""
    arguments = {"data_path": "a", "seq_length": 8, "train_iters": 1000, "global_batch_size": 16}
    config = config_from({**arguments, "eval_interval": 300, "eval_iters": 7})
    assert config.num_samples == (16000, 4 * 7 * 16, 7 * 16)
    assert config.split == LEGACY_SPLIT
    assert config_from({**arguments, "skip_train": True}).num_samples[1] == 100 * 16
    assert config_from({**arguments, "full_validation": True}).num_samples[1] is None
    by_samples = config_from(
        {"data_path": "a", "seq_length": 8, "train_samples": 16007, "global_batch_size": 16}
    )
    assert by_samples.num_samples == (16007, 2 * 100 * 16, 100 * 16)


def test_every_way_to_give_data(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("0.5 a\n0.5 b\n")
    (tmp_path / "splits").write_text(json.dumps({"train": ["1", "a", "2", "b"], "valid": ["c"]}))
    rest = {name: value for name, value in ARGUMENTS.items() if name != "data_path"}
    assert config_from({**rest, "data_args_path": str(tmp_path / "list")}).blend == (
        ["a", "b"],
        [0.5, 0.5],
    )
    config = config_from({**rest, "per_split_data_args_path": str(tmp_path / "splits")})
    assert config.blend_per_split == [(["a", "b"], [1.0, 2.0]), (["c"], None), None]
    config = config_from({**rest, "train_data_path": ["a"], "test_data_path": ["b", "c"]})
    assert config.blend_per_split == [(["a"], None), None, (["b", "c"], None)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data_path": None}, "no data given"),
        ({"train_data_path": ["b"]}, "data_path and train_data_path given"),
        ({"seq_length": None}, "seq_length is missing"),
        ({"seq_length": "x"}, "seq_length is 'x'"),
        ({"num_samples": None}, "number of samples to train on"),
        ({"num_samples": [1, 2]}, "three are needed"),
        ({"num_samples": [1, 2, "x"]}, "holds 'x'"),
        ({"num_samples": None, "train_samples": 5}, "give global_batch_size"),
        (
            {"num_samples": None, "train_samples": 5, "global_batch_size": 1, "eval_interval": 0},
            "eval_interval is 0",
        ),
        ({"data_path": None, "train_data_path": ["a"], "split": "1,1,1"}, "goes with data_path"),
        ({"data_path": None, "data_args_path": "/nowhere"}, "/nowhere: No such file"),
        ({"data_path": None, "per_split_data_args_path": __file__}, "is not a JSON object"),
    ],
)
def test_contradictory_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from({**ARGUMENTS, **change})


def test_identifiers_are_json_a_file_or_a_description(tmp_path: Path) -> None:
    identifiers = {"class": "GPT2BPETokenizer", "vocab_file": "v"}
    dataset = {"class": "GPTDataset", "index_split": "train", "tokenizer": identifiers}
    assert read_identifiers(json.dumps(identifiers)) == identifiers
    for number, content in enumerate((identifiers, dataset, {"datasets": [dataset, {}]})):
        (tmp_path / str(number)).write_text(json.dumps(content))
        assert read_identifiers(str(tmp_path / str(number))) == identifiers
    with pytest.raises(ConfigError, match="neither a file nor JSON"):
        read_identifiers("GPT2")
