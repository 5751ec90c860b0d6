"""No option can be forgotten in the keys of manifests and array sets."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from millrace import DatasetConfig, build_datasets
from millrace.order import GPTPlan, OrderInputs, PackPlan
from millrace.run.build import set_key
from millrace.run.config import NOT_IN_KEY
from millrace.run.plan import SplitPlan, plan_run
from millrace.samples.fields import SampleOptions
from millrace.storage import LOCAL
from tests.run.test_build import write

# A configuration, and another value for every field: a new field needs a line here.
BASE: dict[str, Any] = {
    "sequence_length": 8,
    "seed": 3,
    "num_samples": (20, None, 5),
    "blend_per_split": [(["a"], None), (["a", "b"], None), (["b"], None)],
}
OTHERS: dict[str, Any] = {
    "sequence_length": 9,
    "seed": 4,
    "num_samples": (21, None, 5),
    "blend": (["a"], None),
    "split": "1,1,1",
    "blend_per_split": [(["b"], None), (["a", "b"], None), (["b"], None)],
    "multiple_validation_sets": True,
    "full_validation": True,
    "surplus": 0.5,
    "drop_last_partial_validation_sequence": False,
    "add_extra_token": False,
    "eod_token": 7,
    "pad_token": 7,
    "reset_position_ids": True,
    "eod_mask_loss": True,
    "boundaries": "documents",
    "access": "file",
    "storage": LOCAL,
    "cache": "cache",
    "trust_cache": True,
    "num_threads": 2,
    "any_tokenizer": True,
    "loss_ranges": "apply",
    "order": GPTPlan,
    "order_options": {"window_packs": 3},
    "sampler": "millrace.feed:BalancedSampler",
    "sampler_options": {"linear": 3},
}
NEEDED: dict[str, dict[str, Any]] = {
    "blend": {"blend_per_split": None, "split": "1,1,1"},
    "split": {"blend_per_split": None, "blend": (["a"], None)},
    "reset_position_ids": {"eod_token": 7},
    "eod_mask_loss": {"eod_token": 7},
    "trust_cache": {"cache": "cache"},
    "order_options": {"order": PackPlan},
    "sampler_options": {"sampler": "millrace.feed:BalancedSampler"},
}


def test_every_field_of_a_configuration_is_in_its_key_or_a_named_exception() -> None:
    fields = {field.name for field in dataclasses.fields(DatasetConfig)}
    assert fields == set(OTHERS), "give another value for each new field"
    assert fields >= NOT_IN_KEY
    key = DatasetConfig(**BASE).order_key()
    assert json.loads(json.dumps(key)) == key
    for name, value in OTHERS.items():
        changed = DatasetConfig(**{**BASE, **NEEDED.get(name, {}), name: value}).order_key()
        assert (changed != key) == (name not in NOT_IN_KEY), name


def test_every_field_of_a_plan_is_in_the_key_of_its_set(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [100] * 3)
    config = DatasetConfig(
        sequence_length=8, seed=3, num_samples=(20, 5, 5), blend=([prefix], [1.0]), split="1,1,1"
    )
    split = plan_run(config).splits[0]
    assert split is not None

    def is_noticed(config: DatasetConfig = config, **changes: Any) -> bool:
        changed = dataclasses.replace(split, **changes)
        return set_key(config, changed) != set_key(base, split)

    dataset, base = split.datasets[0], config
    for field in dataclasses.fields(GPTPlan):
        order = dataclasses.replace(dataset.order, **{field.name: 999})
        other = [dataclasses.replace(dataset, order=order)]
        assert is_noticed(datasets=other) == field.metadata.get("in_key", True), field.name
    for name in ("sequences", "num_samples", "drop_last_partial_sequence"):
        inputs = dataclasses.replace(dataset.inputs, **{name: (0, 999)})
        other = [dataclasses.replace(dataset, inputs=inputs)]
        base = config
        assert is_noticed(datasets=other) == (name == "sequences"), name
        base = dataclasses.replace(config, order=GPTPlan)  # the plan has what is built of it
        assert is_noticed(base, datasets=other), name
    base = config
    for field in dataclasses.fields(SplitPlan):
        if field.name not in ("name", "datasets"):  # equal splits share a set
            assert is_noticed(**{field.name: [999]}), field.name
    for options in ({"sequence_length": 9}, {"add_extra_token": False}, {"seed": 4}):
        assert is_noticed(dataclasses.replace(config, **options))
    assert is_noticed(dataclasses.replace(config, order=GPTPlan))
    of_all = {"sequence_length", "add_extra_token", "seed"}  # at the top of the key
    of_the_file = {"num_sequences", "num_tokens", "load_lengths"}  # from the lengths' checksum
    asked = {"sequences", "num_samples", "drop_last_partial_sequence"}
    assert {field.name for field in dataclasses.fields(OrderInputs)} == of_all | of_the_file | asked
    assert {field.name for field in dataclasses.fields(SampleOptions)} - NOT_IN_KEY == {
        "sequence_length",
        "add_extra_token",
    }


# The names of this cache's files as the first release of the cache wrote them.
NAMES = {
    "2e10e387ca58f358b25adcf970b2b7ba.json",
    "3d898dc5461a35e3392191a2a4bc9d77.json",
    "920ea4d07917f04ae764e15125d07837.json",
    "c12951d34c6826c44668e74b44e8ec40.json",
    "ee76557f5d97be45d540882b8b7f9980.json",
    "run-9c88dc409001bd2d2b4490d7b90b9364.json",
    "run-ebfad09a38e6df639637c82df37a1c36.json",
}


def test_keys_are_those_of_existing_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed key would leave every cache in use unread; if it must change, say so."""
    monkeypatch.chdir(tmp_path)
    write(Path("a"), [30, 50, 20, 40])
    write(Path("b"), [200, 90, 60, 70, 80])
    common: dict[str, Any] = {"sequence_length": 8, "seed": 3, "cache": "cache"}
    shared = {"num_samples": (20, 5, 3), "blend": (["a", "b"], [1, 2.5]), "split": "5,3,2"}
    separate = {
        "num_samples": (20, 5, None),
        "blend_per_split": [(["a"], [1]), (["a", "b"], None), None],
        "add_extra_token": False,
        "drop_last_partial_validation_sequence": False,
    }
    build_datasets(DatasetConfig(**common, **shared, surplus=2))
    build_datasets(DatasetConfig(**common, **separate))
    assert {path.name for path in Path("cache").glob("*.json")} == NAMES
