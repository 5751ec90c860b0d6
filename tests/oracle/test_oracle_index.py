"""`millrace index --megatron-cache`: Megatron-LM finds every index there, and the reverse."""

import importlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import oracle_megatron as megatron
import pytest
from tests.test_cli import millrace as run_millrace

import millrace
from millrace import DatasetConfig
from millrace.jobs import index

TOKENIZER = megatron.Tokenizer()
IDENTIFIERS = dict(TOKENIZER.unique_identifiers)
DATASETS = 5


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    random = np.random.default_rng(3)
    folder = tmp_path_factory.mktemp("data")
    for number in range(DATASETS):
        with millrace.IndexedDatasetBuilder(folder / f"d{number}", np.uint16) as builder:
            for _ in range(int(random.integers(50, 200))):
                builder.add_document(random.integers(1, 1000, random.integers(1, 80)))
    return [str(folder / f"d{number}") for number in range(DATASETS)]


def cases(data: list[str]) -> dict[str, dict[str, Any]]:
    """The options of both sides, and the sizes."""
    weights = [0.1, 3.0, 0.7]
    return {
        "one": {"blend": (data[:1], None), "split": "8,1,1", "sizes": (700, 20, None)},
        "weights": {"blend": (data[:3], weights), "split": "8, 1, 1", "sizes": (900, 10, 0)},
        "lengths": {"blend": (data[:3], None), "split": "1,1,0", "sizes": (50, None, None)},
        "apart": {
            "blend_per_split": [(data[:3], weights), (data[3:4], [1.0]), None],
            "sizes": (400, 30, 0),
        },
        "validation sets": {
            "blend_per_split": [(data[:2], None), (data[2:], None), (data[:1], None)],
            "multiple_validation_sets": True,
            "full_validation": True,
            "sizes": (None, None, 20),
        },
    }


NAMES = list(cases(["a"] * DATASETS))


def ours_of(case: dict[str, Any], **options: Any) -> DatasetConfig:
    given = {name: value for name, value in case.items() if name != "sizes"}
    return DatasetConfig(
        sequence_length=16, seed=99, num_samples=case["sizes"], **{**given, **options}
    )


def build_theirs(case: dict[str, Any], cache: Path) -> list[Any]:
    given = {name: value for name, value in case.items() if name != "sizes"}
    config = megatron.config_of(cache, random_seed=99, tokenizer=TOKENIZER, **given)
    return megatron.build(config, case["sizes"])


def state_of(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        entry.name: (entry.stat().st_ino, entry.stat().st_mtime_ns) for entry in os.scandir(folder)
    }


@pytest.mark.parametrize("name", NAMES)
def test_each_side_starts_on_what_the_other_wrote_and_builds_none(
    data: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    case = cases(data)[name]
    folders = tmp_path / "ours", tmp_path / "theirs"
    result = index(ours_of(case), megatron_cache_folder=folders[0], tokenizer=IDENTIFIERS)
    assert result.num_found == 0
    with megatron.process_group():
        build_theirs(case, folders[1])
    written = [*map(state_of, folders)]
    files = [file for file in written[0] if file.endswith("description.txt")]
    assert len(files) == result.num_built
    caplog.set_level(logging.INFO)
    with megatron.process_group():
        theirs = build_theirs(case, folders[0])
    messages = [record.getMessage() for record in caplog.records]
    assert not [message for message in messages if "Build and save" in message]
    loads = [m for m in messages if m.startswith("Load the") and m.endswith("indices")]
    assert len(loads) == result.num_built
    again = index(ours_of(case), megatron_cache_folder=folders[1], tokenizer=IDENTIFIERS)
    assert again.num_built == 0
    assert [*map(state_of, folders)] == written
    ours = millrace.build_datasets(ours_of(case))
    megatron.assert_same_datasets(list(ours), theirs)


@pytest.mark.parametrize("name", NAMES)
def test_both_caches_take_one_build(
    data: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The second is written from the first."""
    case = cases(data)[name]
    index(ours_of(case), megatron_cache_folder=tmp_path / "alone", tokenizer=IDENTIFIERS)
    module = importlib.import_module("millrace.jobs.indexing")
    for function in ("build_arrays", "build_blend"):  # it must not be called
        monkeypatch.setattr(module, function, None)
    config = ours_of(case, cache=tmp_path / "ours")
    index(config, megatron_cache_folder=tmp_path / "both", tokenizer=IDENTIFIERS)
    alone, both = (
        {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()}
        for folder in ("alone", "both")
    )
    assert alone == both


def test_the_command_line_writes_the_same_files(data: list[str], tmp_path: Path) -> None:
    """Twice from a configuration file; the second time builds nothing."""
    config = tmp_path / "run.yaml"
    config.write_text(
        f"data-path: [0.1, {data[0]}, 3.0, {data[1]}, 0.7, {data[2]}]\nsplit: 8, 1, 1\n"
        "seq-length: 16\nseed: 99\nnum-samples: [900, 10, 0]\nhidden-size: 8\n"
    )
    folders = "--megatron-cache", tmp_path / "theirs", "--cache", tmp_path / "ours"
    arguments = "index", config, *folders, "--tokenizer_identifiers", json.dumps(IDENTIFIERS)
    first, second = run_millrace(*arguments), run_millrace(*arguments, "--json")
    assert first.returncode == 0, first.stderr
    assert "train" in first.stdout
    assert "indices: 21 built, 0 were there" in first.stdout  # 3 splits: 2 x 3 datasets, 1 blend
    assert "left out: hidden_size" in first.stdout
    assert json.loads(second.stdout)["num_built"] == 0
    case = cases(data)["weights"]
    index(ours_of(case), megatron_cache_folder=tmp_path / "api", tokenizer=IDENTIFIERS)
    names = sorted(os.listdir(tmp_path / "api"))
    assert names == sorted(os.listdir(tmp_path / "theirs"))
    for file in names:
        assert (tmp_path / "api" / file).read_bytes() == (tmp_path / "theirs" / file).read_bytes()
    listed = run_millrace("cache", "list", tmp_path / "ours")
    assert listed.stdout.count("set ") == 3
    assert listed.stdout.count("run ") == 1


def test_missing_arguments_for_megatrons_names_are_errors(data: list[str], tmp_path: Path) -> None:
    case = cases(data)["one"]
    with pytest.raises(millrace.ConfigError, match="nowhere to put"):
        index(ours_of(case))
    with pytest.raises(millrace.ConfigError, match="tokenizer's identifiers"):
        index(ours_of(case), megatron_cache_folder=tmp_path)
    fractions = ours_of(case, split=[(0, 0.5), (0.5, 1.0), None])
    with pytest.raises(millrace.ConfigError, match="hold a split as a string"):
        index(fractions, megatron_cache_folder=tmp_path, tokenizer={})
