"""`build_datasets`: what it refuses, what it warns of, and what it finds in a cache folder."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace import (
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
