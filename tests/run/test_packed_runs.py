"""Packs in a run: named in a configuration, kept in its cache, and blended."""

import dataclasses
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace import ConfigError, DatasetConfig, Loader, build_datasets
from millrace.cli import main
from millrace.run.arguments import config_from
from tests.conftest import write_documents

OPTIONS = {"long_documents": "split", "window_documents": 20}


def config(folder: Path, **changes: Any) -> DatasetConfig:
    options: dict[str, Any] = {
        "sequence_length": 16,
        "seed": 7,
        "num_samples": (90, None, None),
        "blend_per_split": [([folder / "a", folder / "b"], [0.7, 0.3]), None, None],
        "add_extra_token": False,
        "boundaries": "documents",
        "order": "millrace.order:PackPlan",
        "order_options": OPTIONS,
        "cache": folder / "cache",
    }
    return DatasetConfig(**{**options, **changes})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random = np.random.default_rng(4)
    for name in ("a", "b"):
        lengths = random.integers(1, 40, 60)
        write_documents(tmp_path / name, [random.integers(1, 99, size) for size in lengths])
    return tmp_path


def test_packs_are_built_once_and_mixed_by_weight(folder: Path) -> None:
    built, found = (build_datasets(config(folder)).train for _ in range(2))
    in_memory = build_datasets(config(folder, cache=None)).train
    assert len(built) == 90
    for number in range(90):
        for other in (found, in_memory):
            for name, array in built[number].items():
                np.testing.assert_array_equal(array, other[number][name])
    assert built.fingerprint() == found.fingerprint()
    names = {path.name for path in (folder / "cache").iterdir() if path.suffix == ".npy"}
    assert {name.split("-")[-1] for name in names} >= {"piece_index.npy", "pack_index.npy"}
    # More samples are more epochs of the same packs.
    more = build_datasets(config(folder, num_samples=(400, None, None))).train
    shares = [len(dataset) for dataset in more.datasets]
    packs = [dataset.order.plan.num_packs for dataset in more.datasets]
    assert packs == [dataset.order.plan.num_packs for dataset in built.datasets]
    assert any(share > count for share, count in zip(shares, packs, strict=True))


def test_an_epoch_has_each_document_once(folder: Path) -> None:
    one = config(
        folder, blend_per_split=[([folder / "a"], None), None, None], num_samples=(None, None, None)
    )
    dataset = build_datasets(one).train
    spans = dataset.spans(range(len(dataset)))
    tokens = sorted(zip(spans.sequences.tolist(), spans.offsets.tolist(), strict=True))
    lengths = dataset.dataset.sequence_lengths
    expected = [(n, at) for n, size in enumerate(lengths) for at in range(0, size, 16)]
    assert tokens == expected
    loader = Loader(dataset, micro_batch_size=2, fields=("tokens", "cu_seqlens", "loss_mask"))
    for batch in loader:
        starts = batch["cu_seqlens"][1:-1]
        assert np.all(batch["loss_mask"].ravel()[starts - 1] == 0)


def arguments_of(folder: Path, **changes: Any) -> dict[str, Any]:
    """The same run without a cache, as a file of arguments."""
    arguments = {
        "train_data_path": [0.5, str(folder / "a"), 0.5, str(folder / "b")],
        "seq_length": 16,
        "num_samples": [90, None, None],
        "order": "millrace.order:PackPlan",
        "order_options": OPTIONS,
        "add_extra_token": False,
    }
    return arguments | changes


def test_a_file_of_arguments_names_a_sampler(folder: Path) -> None:
    def run_of(name: str, **changes: Any) -> DatasetConfig:
        arguments = arguments_of(folder, sampler=f"millrace.feed:{name}", **changes)
        return config_from(arguments)  # type: ignore[return-value]

    share: dict[str, Any] = {"micro_batch_size": 1, "data_parallel_size": 3}
    size = {"global_batch_size": 12}
    options = {**size, "linear": 50.0}
    run = run_of("BalancedSampler", sampler_options=options)
    assert (run.order_options, run.add_extra_token) == (OPTIONS, False)
    blend = build_datasets(run).train
    ranks = [run.make_sampler(blend, **share, data_parallel_rank=rank) for rank in range(3)]
    for start in range(0, 60, 12):
        parts = [sampler.sample_numbers(start) for sampler in ranks]
        assert sorted(np.concatenate(parts).tolist()) == [*range(start, start + 12)]
    for number in range(60):
        lengths = blend.spans([number]).counts
        assert ranks[0].costs(np.array([number])) == (lengths**2 + 50 * lengths).sum()
    # Without a name, or with another one, the sampler is that of a Loader, or the other one.
    kinds = {
        "SequentialSampler": config_from(arguments_of(folder)),
        "GlobalBatchSampler": run_of("GlobalBatchSampler", sampler_options=size),
    }
    for name, other in kinds.items():
        assert type(other.make_sampler(blend, **share)).__name__ == name
        assert other.order_key() == run.order_key()
    for wrong in ("cubic", "data_parallel_rank"):  # each rank would take the same samples
        bad = run_of("BalancedSampler", sampler_options={**options, wrong: 1})
        with pytest.raises(ConfigError, match=rf"sampler_options .*{wrong}"):
            bad.make_sampler(blend, **share, data_parallel_rank=1)
    # Documents are padded as the packs have room for it.
    padded = {"order_options": {**OPTIONS, "multiple": 4}, "sampler_options": size}
    run = run_of("BalancedSampler", **padded)
    assert run.make_sampler(build_datasets(run).train, **share).costs.multiple == 4


def test_wrong_options_of_an_order_are_refused(folder: Path) -> None:
    for changes, message in (
        ({"order_options": {"windows": 3}}, "no option windows"),
        ({"order_options": {"num_packs": 3}}, "no option num_packs"),
        ({"order_options": {"multiple": 5}}, "16 tokens must be a multiple of 5"),
        ({"order_options": {"long_documents": "error"}}, r"a, sequences 0 to 60: .* more than 16"),
        ({"order_options": ["split"]}, "order_options must be keyword arguments"),
        ({"order_options": False}, "order_options must be keyword arguments"),
        ({"order_options": {"window_packs": 2**40}}, "window_packs must be"),
        ({"order_options": {"window_packs": 1e400}}, "order_options.window_packs is inf"),
        ({"order_options": {("a", "b"): 1}}, "order_options has the key"),
        ({"order_options": {"long_documents": np.str_}}, "long_documents is <class"),
        ({"order": None}, "order_options .* name the order"),
        ({"sampler_options": {"linear": 1}}, "sampler_options .* name the sampler"),
        ({"sampler": 3}, "sampler must be a class"),
        ({"sampler": "millrace.feed:Balanced"}, "sampler .* cannot be imported"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_datasets(config(folder, **changes))


def test_a_run_that_packs_is_inspected(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folder / "run.json.yaml"
    arguments = arguments_of(folder)
    run.write_text(json.dumps(arguments))  # which is YAML, too
    picture = folder / "packs.svg"
    options = ["--ranks", "3", "--micro-batches", "2"]
    assert main(["inspect", str(run), *options, "--svg", str(picture)]) == 0
    table = capsys.readouterr().out
    assert ElementTree.fromstring(picture.read_text()).tag.endswith("svg")
    assert main(["inspect", str(run), *options, "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    dataset = build_datasets(config_from(arguments)).train.datasets[0]
    plan = dataset.order.plan
    assert first["fill"] == plan.num_tokens / plan.num_packs / 16
    assert first["plan"] == dataclasses.asdict(plan)
    assert f"{first['fill']:.2%}" in table
    assert f"{plan.num_long} documents longer than 16 tokens (split), 0 tokens lost" in table
    assert len(first["dealt"]) == min(plan.num_packs, len(dataset)) // 6
    for one in (first, second):
        for drawn, dealt, least in zip(one["drawn"], one["dealt"], one["least"], strict=True):
            assert least <= dealt * 1.000001 <= drawn * 1.002
    run.write_text(json.dumps({**arguments, "num_samples": [90, 0, 0], "data_path": None}))
    for verb in ("inspect", "index"):  # splits without samples
        assert main([verb, str(run), *(["--cache", str(folder / "new")] * (verb == "index"))]) == 0
    run.write_text(json.dumps({**arguments, "order-option": {"in_order": True}}))
    assert main(["inspect", str(run)]) == 1
    assert "did you mean order_options" in capsys.readouterr().err
    run.write_text(json.dumps({**arguments, "order": None, "order_options": None}))
    assert main(["inspect", str(run)]) == 1
    assert "packs no documents" in capsys.readouterr().err
    run.write_text(json.dumps(arguments))
    assert main(["inspect", str(run), "--ranks", "90", "--svg", str(picture)]) == 1
    assert "enough packs" in capsys.readouterr().err
