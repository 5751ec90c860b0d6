"""Megatron-LM's arguments, from files and lists."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from millrace import ConfigError
from millrace.order import GPTPlan
from millrace.run import arguments as run_arguments
from millrace.run.arguments import config_from, parse_blend, read_arguments

REST: dict[str, Any] = {"seq_length": 8, "num_samples": [10, 5, 5]}
ARGUMENTS: dict[str, Any] = {**REST, "data_path": ["a"]}
RAMP = {"num_samples": None, "train_iters": 9, "rampup_batch_size": [2, 2, 8]}


def test_yaml_and_toml_give_the_same_configuration(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "data:\n  data-path: [0.3, a, 0.7, b]\n  split: 9,1,0\nseq-length: 8\ntrain_samples: 100\n"
        "global-batch-size: 4\nreset-position-ids: true\neod-token: 7\n"
        "layers: [[&a {<<: {depth: 1}, depth: 2}], {<<: *a}]\n"  # nothing is given twice
    )
    (tmp_path / "run.toml").write_text(
        'seq-length = 8\ntrain_samples = 100\n"global-batch-size" = 4\nreset-position-ids = true\n'
        "eod-token = 7\n"
        '[data]\ndata-path = ["0.3", "a", "0.7", "b"]\nsplit = "9,1,0"\n'
    )
    configs = [config_from(read_arguments(tmp_path / name)) for name in ("run.yaml", "run.toml")]
    assert configs[0] == configs[1]
    assert configs[0].blend == (["a", "b"], [0.3, 0.7])
    assert (configs[0].reset_position_ids, configs[0].eod_token) == (True, 7)


@pytest.mark.parametrize("order", ["gpt", "instant"])
def test_masks_are_those_of_the_file_in_both_orders(order: str) -> None:
    arguments = {**ARGUMENTS, "order": order, "eod_mask_loss": True}
    config = config_from({**arguments, "eod_token": 3, "pad_token": 4})
    assert (config.eod_mask_loss, config.eod_token, config.pad_token) == (True, 3, 4)
    for more, message in (
        ({}, "give eod_token"),
        ({"eod_token": "x"}, "eod_token must be a whole number"),
        ({"eod_token": 3, "pad_token": "3"}, "pad_token is eod_token"),
        ({"eod_token": 3, "reset_position_ids": 1}, "reset_position_ids"),
    ):
        with pytest.raises(ConfigError, match=message):
            config_from({**arguments, **more})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("nothing.yaml", None, r"nothing\.yaml: No such file"),
        ("a.yaml", "a: [", "cannot be read"),
        ("a.yaml", "a: !!bool x", "cannot be read"),
        ("a.toml", "a = ", "cannot be read"),
        ("a.yaml", "- 1", "holds a list"),
        ("a.json", "{}", "neither .yaml"),
        ("a.yaml", "x: {seed: 1}\nseed: 2", "seed twice"),
        ("a.yaml", "\udcff", "cannot be read"),
        ("a.yaml", "seed: 1\nx: 2\nseed: 3", "seed twice"),
        ("a.yaml", "data:\n  seed: 1\n  seed: 3", "seed twice"),
        ("a.yaml", "a: &x {b: *x}", "nested"),
        ("a.yaml", "x: {seq-lenght: 1}", "did you mean seq_length"),
        ("a.yaml", "sead: 1", "did you mean seed"),
        ("a.yaml", "Skips: []", "did you mean skips"),
        ("a.toml", "[a]\nseed = 1\n[b]\nseed = 2", "seed twice"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=message):
        read_arguments(tmp_path / name)


def test_other_arguments_of_megatron_are_not_taken_for_typos(tmp_path: Path) -> None:
    names = "titles-data-path", "log-interval", "sample-rate", "micro-batch-size", "tokenizer"
    (tmp_path / "a.yaml").write_text("".join(f"{name}: 1\n" for name in names))
    assert len(read_arguments(tmp_path / "a.yaml")) == len(names)


WRONG_TYPES: dict[str, Any] = {
    "data_path train_data_path": [5, True, ["a", None], [["a"]], {"a": 1}],
    "data_args_path per_split_data_args_path data_cache_path": [5, ["a"]],
    "seq_length seed train_samples eval_iters": [1.5, True, "x", [1]],
    "full_validation any_tokenizer mmap_bin_files": ["false", 0, [True]],
    "num_samples rampup_batch_size": [5, "abc", [1, 2], [1, 2, [3]]],
    "mid_level_dataset_surplus": ["x", [0.1], True],
    "split": [True, [[0, 0.9], [0.9, 1]], {"a": 1}],
}


@pytest.mark.parametrize("names", WRONG_TYPES)
def test_a_value_of_the_wrong_type_is_refused_by_file_and_name(tmp_path: Path, names: str) -> None:
    for name, value in itertools.product(names.split(), WRONG_TYPES[names]):
        arguments = {**ARGUMENTS, name: value}
        path = tmp_path / "run.yaml"
        path.write_text(json.dumps(arguments))
        with pytest.raises(ConfigError, match=rf"{path}: {name} "):
            config_from(read_arguments(path))
        with pytest.raises(ConfigError, match=f"{name} "):
            config_from(arguments)


def test_identifiers_in_a_file_are_not_a_section(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("data:\n  tokenizer-identifiers: {class: X, seed: 5}\n")
    arguments = read_arguments(tmp_path / "run.yaml")
    assert arguments == {"tokenizer_identifiers": {"class": "X", "seed": 5}}


def test_wrong_types_in_a_file_of_data(tmp_path: Path) -> None:
    path = tmp_path / "splits"
    for text, place in {
        '{"train": 5}': "train must be .* not 5",
        '{"valid": [true]}': "valid must be ",
        '{"train": ["a"], "train": ["b"]}': "train twice",
        "[" * 100_000: "",
    }.items():
        path.write_text(text)
        with pytest.raises(ConfigError, match=rf"{path}.*{place}"):
            config_from({**REST, "per_split_data_args_path": str(path)})
    path.write_text("a 'b")
    with pytest.raises(ConfigError, match=str(path)):
        config_from({**REST, "data_args_path": str(path)})


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
    with pytest.raises(ConfigError, match="weights for some prefixes only"):
        parse_blend("1 a b c")


def test_a_part_may_stand_for_a_prefix(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "data-path: [0.3, {prefix: a, part: [0.6, 1.0]}, 0.7, b]\nseq-length: 8\n"
        "num-samples: [10, 5, 5]\norder: millrace.order:GPTPlan\n"
    )
    config = config_from(read_arguments(path))
    assert config.blend == ([{"prefix": "a", "part": [0.6, 1.0]}, "b"], [0.3, 0.7])
    assert config.order is GPTPlan


ITERATIONS = {"data_path": "a", "seq_length": 8, "train_iters": 1000, "global_batch_size": 16}
SAMPLES = {"data_path": "a", "seq_length": 8, "train_samples": 16007, "global_batch_size": 16}
INTERVALS = {**ITERATIONS, "eval_interval": 300, "eval_iters": 7}
OWN = {**INTERVALS, "eval_global_batch_size": 5}


@pytest.mark.parametrize(
    ("arguments", "counts"),
    [
        # One evaluation per interval, and one more.
        (INTERVALS, (16000, 4 * 7 * 16, 7 * 16)),
        ({**ITERATIONS, "skip_train": True}, (16000, 100 * 16, 100 * 16)),
        ({**ITERATIONS, "full_validation": True}, (16000, None, 100 * 16)),
        (SAMPLES, (16007, 2 * 100 * 16, 100 * 16)),
        # From core 0.18 on, Megatron-LM's `get_train_valid_test_num_samples` takes both of these.
        (OWN, (16000, 4 * 7 * 5, 7 * 5)),
        ({**OWN, "start_eval_at_iter": 299}, (16000, 4 * 7 * 5, 7 * 5)),
        ({**OWN, "start_eval_at_iter": 300}, (16000, 3 * 7 * 5, 7 * 5)),
        ({**OWN, "start_eval_at_iter": 899}, (16000, 2 * 7 * 5, 7 * 5)),
        ({**OWN, "start_eval_at_iter": 9999}, (16000, 0, 7 * 5)),
        ({**OWN, "start_eval_at_iter": 900, "skip_train": True}, (16000, 7 * 5, 7 * 5)),
    ],
)
def test_numbers_of_samples_follow_from_iterations(arguments: dict[str, Any], counts: Any) -> None:
    config = config_from(arguments)
    assert (config.num_samples, config.split) == (counts, run_arguments.LEGACY_SPLIT)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step_batch_size_schedule", "0:16 1B:32"),
        ("phase_transition_iterations", "10,20"),
        ("rampup_batch_size", [2, 2, 1000]),
    ],
)
def test_schedules_that_decide_the_counts_are_refused_without_num_samples(
    tmp_path: Path, name: str, value: Any
) -> None:
    arguments = {"data_path": ["a"], "seq_length": 8, "train_samples": 3000}
    arguments.update(global_batch_size=16, eval_interval=10, eval_iters=1)
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({**arguments, name: value}))
    values = read_arguments(path)
    with pytest.raises(ConfigError, match=rf"{name} .*num_samples"):
        config_from(values)
    config = config_from({**values, "num_samples": [3000, 5, 7]})
    assert config.num_samples == (3000, 5, 7)


def test_every_way_to_give_data(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("0.5 a\n0.5 b\n")
    (tmp_path / "splits").write_text(json.dumps({"train": ["1", "a", "2", "b"], "valid": ["c"]}))
    config = config_from({**REST, "data_args_path": str(tmp_path / "list")})
    assert config.blend == (["a", "b"], [0.5, 0.5])
    config = config_from({**REST, "per_split_data_args_path": str(tmp_path / "splits")})
    assert config.blend_per_split == [(["a", "b"], [1.0, 2.0]), (["c"], None), None]
    config = config_from({**REST, "train_data_path": ["a"], "test_data_path": ["b", "c"]})
    assert config.blend_per_split == [(["a"], None), None, (["b", "c"], None)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data_path": None}, "no data given"),
        ({"train_data_path": ["b"]}, "data_path and train_data_path given"),
        ({"seq_length": None}, "seq_length is missing"),
        ({"num_samples": None}, "number of samples to train on"),
        ({"num_samples": [1, 2, "x"]}, "num_samples must be .*'x'"),
        ({"num_samples": None, "train_samples": 5}, "give global_batch_size"),
        ({"data_path": None, "order": "instant"}, "give data_path, or sources"),
        (RAMP, "rampup_batch_size is given, and train_iters 9, .* give train_samples"),
        (RAMP | {"order": "instant"}, "rampup_batch_size is given, and train_iters 9"),
        ({"eval_interval": 0}, "eval_interval must be at least 1, not 0"),
        ({"data_path": None, "train_data_path": ["a"], "split": "1,1,1"}, "goes with data_path"),
        ({"data_path": None, "data_args_path": "/nowhere"}, "/nowhere: No such file"),
        ({"data_path": None, "per_split_data_args_path": __file__}, "cannot be read as JSON"),
    ],
)
def test_contradictory_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from({**ARGUMENTS, **change})


def test_identifiers_are_json_a_file_or_a_description(tmp_path: Path) -> None:
    identifiers = {"class": "GPT2BPETokenizer", "vocab_file": "v"}
    dataset = {"class": "GPTDataset", "index_split": "train", "tokenizer": identifiers}
    assert run_arguments.read_identifiers(json.dumps(identifiers)) == identifiers
    for number, content in enumerate((identifiers, dataset, {"datasets": [dataset, {}]})):
        (tmp_path / str(number)).write_text(json.dumps(content))
        assert run_arguments.read_identifiers(str(tmp_path / str(number))) == identifiers
    for text in ("GPT2", '{"model": 1, "added_tokens": []}'):
        with pytest.raises(ConfigError, match=r"nor JSON|is a tokenizer"):
            run_arguments.read_identifiers(text)
