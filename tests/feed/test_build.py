"""`build_datasets`: what it refuses, what it warns of, and what it finds in a cache folder."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace import (
    ConfigError,
    DatasetConfig,
    Datasets,
    DuplicateDataWarning,
    IndexedDatasetBuilder,
    build_datasets,
)

S = 8  # the sequence length


def write(prefix: Path, lengths: Sequence[int], seed: int = 0) -> str:
    """A token file of random tokens, in documents of these lengths."""
    random = np.random.default_rng(seed)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for length in lengths:
            builder.add_document(random.integers(0, 100, length))
    return str(prefix)


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    """Three token files, of 30, 60 and 90 documents."""
    return [
        write(tmp_path / f"data-{number}", [12 + place % 7 for place in range(30 * number)], number)
        for number in (1, 2, 3)
    ]


def config_of(**options: Any) -> DatasetConfig:
    everything = {"sequence_length": S, "seed": 11, "num_samples": (200, 20, 20)}
    if "blend_per_split" not in options:
        everything["split"] = "8,1,1"
    return DatasetConfig(**{**everything, **options})


def build(**options: Any) -> Datasets:
    return build_datasets(config_of(**options))


# ---- the same data twice ----


@pytest.mark.parametrize("cache", [False, True])
def test_the_same_prefix_twice_in_a_blend_warns(
    prefixes: list[str], cache: bool, tmp_path: Path
) -> None:
    a, b, _ = prefixes
    options = {"cache": tmp_path / "cache"} if cache else {}
    for _ in range(2):  # with a cache: also when everything is there
        with pytest.warns(DuplicateDataWarning, match=f"blend has the data of {a} twice"):
            build(blend=([a, b, a], [1, 2, 1]), **options)


def test_a_copy_of_the_data_at_another_path_warns(prefixes: list[str], tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        shutil.copy(prefixes[0] + suffix, tmp_path / f"copy{suffix}")
    copy = str(tmp_path / "copy")
    with pytest.warns(DuplicateDataWarning, match=f"{copy} twice \\(also as {prefixes[0]}\\)") as w:
        build(blend=([prefixes[0], prefixes[1], copy], None), num_samples=(None,) * 3)
    assert {warning.filename for warning in w} == {__file__}


def test_the_same_data_in_two_splits_or_apart_does_not_warn(prefixes: list[str]) -> None:
    a = prefixes[0]
    build(blend_per_split=[([a], None), ([a, a], None), ([a], None)], multiple_validation_sets=True)


# ---- what is refused ----

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blend": ("AB", [1.0])}, "1 weights for 2 prefixes"),
        ({"blend": ("AB", [1.0, 2.0, 3.0])}, "3 weights for 2 prefixes"),
        ({"blend": ("AB", [1.0, -1.0])}, r"\[1.0, -1.0\]; they must be finite, not below 0"),
        ({"blend": ("AB", [1.0, NAN])}, r"\[1.0, nan\]; they must be finite"),
        ({"blend": ("AB", [1.0, INF])}, r"\[1.0, inf\]; they must be finite"),
        ({"blend": ("AB", [0.0, 0.0])}, "not all 0"),
        ({"blend": ("AB", [1.0, 0.0])}, "train split: the weight of dataset 1 is 0.0"),
        ({"blend": ("AB", [1e300, 1e-300])}, "train split: the weight of dataset 1 is 0.0"),
        ({"blend": ("AB", ["1", "2"])}, "give numbers"),
        ({"blend": ("AB", None), "num_samples": (1, 2)}, r"\(1, 2\); give an entry for each"),
        ({"blend": ("AB", None), "num_samples": 7}, "is 7; give an entry for each"),
        ({"blend": ("AB", None), "num_samples": (-1, 2, 3)}, r"\(-1, 2, 3\); each is at least 0"),
        ({"blend": ("AB", None), "num_samples": (1.5, 2, 3)}, "1.5; a whole number"),
        ({"blend": ("AB", [1, 2]), "num_samples": (9, None, 9)}, "valid blend has weights, and"),
        ({"blend": ("", None)}, "list of prefixes is needed"),
        ({"blend": ("A",)}, r"it must be \(prefixes, weights\)"),
        ({"blend": ("A", None), "split": None}, "a blend needs one"),
        ({"blend": ("A", None), "split": "a,b"}, 'split "a,b" must be'),
        ({"blend": ("A", None), "split": "1,-1"}, 'split "1,-1" must be'),
        ({"blend": ("A", None), "split": [(0, 0.9), (0.8, 1), None]}, "they overlap"),
        ({"blend": ("A", None), "split": [(0, 0.9), (0.9, 1.1), None]}, "end <= 1"),
        ({"blend": ("A", None), "blend_per_split": [None] * 3}, "one of the two"),
        ({"blend_per_split": [("A", None)]}, "1 entries; give one for each"),
        ({"blend_per_split": [None] * 3}, "no split has a blend"),
        ({"blend": ("A", None), "seed": -1}, "seed is -1"),
        ({"blend": ("A", None), "seed": 2**32}, "seed is 4294967296; 0 to 4294967295"),
        ({"blend": ("A", None), "surplus": -0.1}, "surplus is -0.1"),
        ({"blend": ("A", None), "surplus": NAN}, "surplus is nan"),
        ({"blend": ("A", None), "surplus": INF}, "surplus is inf"),
        ({"blend": ("A", None), "num_threads": 0}, "num_threads is 0; at least 1"),
        ({"blend": ("A", None), "trust_cache": True}, "give cache"),
        ({"blend": ("A", None), "full_validation": True}, "asks for 20 validation samples"),
        ({"blend": ("A", None), "multiple_validation_sets": True}, "needs a blend_per_split"),
        ({"blend": ("A", None), "eod_mask_loss": True}, "give eod_token"),
        ({"blend": ("A", None), "sequence_length": 0}, "sequence_length is 0; at least 1"),
        ({"blend": ("A", None), "access": "carrier pigeon"}, "it is one of mmap, file"),
        (
            {"blend": ("ABC", None), "sequence_length": 150, "num_samples": (None,) * 3},
            "the valid split: .*data-1, sequences 24 to 27: sequence_length 150 .* no sample",
        ),
        ({"blend": ("A", None), "split": "999,1"}, r"the valid split: .*30 to 30: .* 0 tokens"),
        (
            {"blend": ("A", None), "num_samples": (2**62, 1, 1)},
            "4,611,686,018,427,.* bytes of indices; 70,368,744,177,664 is the limit",
        ),
        (
            {"blend": ("AB", [1, 1]), "num_samples": (10**30, 1, 1)},
            "bytes of indices; 70,368,744,177,664 is the limit",
        ),
    ],
)
@pytest.mark.parametrize("cache", [False, True])
def test_what_cannot_work_is_refused(
    prefixes: list[str], options: dict[str, Any], message: str, cache: bool, tmp_path: Path
) -> None:
    names = dict(zip("ABC", prefixes, strict=True))

    def named(blend: Any) -> Any:
        return blend and ([names[letter] for letter in blend[0]], *blend[1:])

    given = dict(options)
    if "blend" in given:
        given["blend"] = named(given["blend"])
    if "blend_per_split" in given:
        given["blend_per_split"] = [named(blend) for blend in given["blend_per_split"]]
    if cache:
        given["cache"] = tmp_path / "cache"
        if "trust_cache" in given:
            message = "no manifest"
    with pytest.raises(ConfigError, match=message):
        build(**given)
    left = list((tmp_path / "cache").glob("*")) if cache else []
    assert left == []  # nothing half made, and no lock


def test_oversampling_is_refused_with_a_table(tmp_path: Path) -> None:
    """The greedy rule may ask a dataset for one sample more than its share: 22 for 21 here."""
    prefixes = [write(tmp_path / f"part-{n}", [S * n + 1]) for n in (21, 4, 2)]
    blend = (prefixes, [0.8243101435519362, 0.12519108493695014, 0.05049877151111362])
    options: dict[str, Any] = {"blend": blend, "split": "1", "num_samples": (25, 1, 1)}
    table = (
        r"(?s)train split: .* 1 of its datasets have:\n"
        r"  dataset 0 \(.*part-21\): has 21, 22 are drawn, 1 short\n.* surplus"
    )
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):
        with pytest.raises(ConfigError, match=table):
            build(**options, surplus=0, cache=cache)
    assert list((tmp_path / "cache").glob("*")) == []
    train = build(**options).train  # with the usual surplus, as Megatron-LM does it
    assert train is not None
    assert len(train) == 27


def test_numbers_of_numpy_are_numbers(prefixes: list[str], tmp_path: Path) -> None:
    plain = {"blend": (prefixes[:2], [1.0, 3.0]), "num_samples": (50, 5, 5)}
    numpys = {
        "blend": (prefixes[:2], np.array([1, 3], np.float32)),
        "num_samples": np.array([50, 5, 5]),
        "seed": np.uint32(11),
        "sequence_length": np.int16(S),
        "surplus": np.float32(0.005),
    }
    build(**numpys, cache=tmp_path / "cache")
    assert config_of(**plain).order_key() == config_of(**{**numpys, "surplus": 0.005}).order_key()


def test_more_indices_than_memory_say_so(
    prefixes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only said here: a machine may hand out memory that it does not have."""

    def build_none(*_: Any) -> None:
        raise MemoryError("std::bad_alloc")

    monkeypatch.setattr("millrace.feed.datasets.build_gpt_indices", build_none)
    with pytest.raises(MemoryError, match=r"data-1: the indices of .* bytes, and there is no"):
        build(blend=(prefixes[:1], None), num_samples=(2**40, 1, 1))
