"""A pickle belongs to its token files: opened after they were replaced, it is refused."""

from __future__ import annotations

import dataclasses
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace import (
    BlendedDataset,
    DataError,
    DatasetConfig,
    GPTDataset,
    IndexedDataset,
    Loader,
    build_datasets,
)

Make = Callable[..., IndexedDataset]


def first_tokens(pickled: bytes) -> list[int]:
    """The tokens of the first two samples; called in this process and in a spawned one."""
    source = pickle.loads(pickled)
    batch = next(source) if isinstance(source, Loader) else source.batch([0, 1])
    return batch["tokens"].tolist()  # type: ignore[no-any-return]


def make_source(kind: str, prefix: str, cache: Path) -> Any:
    config = DatasetConfig(
        sequence_length=8, seed=3, num_samples=(20, None, None), blend=([prefix], None), split="1"
    )
    dataset = GPTDataset(IndexedDataset(prefix), sequence_length=8, seed=3)
    if kind == "dataset":
        return dataset
    if kind == "blend":
        return BlendedDataset([dataset, dataset], [0.5, 0.5], 10)
    if kind == "loader":
        return Loader(dataset, micro_batch_size=2)
    if kind == "cached":
        config = dataclasses.replace(config, cache=cache)
    return build_datasets(config).train


@pytest.mark.parametrize("kind", ["dataset", "blend", "loader", "built", "cached"])
@pytest.mark.parametrize("is_same_size", [True, False])
def test_a_pickle_of_replaced_data_is_refused(
    make_dataset: Make, tmp_path: Path, kind: str, is_same_size: bool
) -> None:
    prefix = make_dataset([100, 200]).prefix
    parent = make_source(kind, prefix, tmp_path / "cache")
    source = parent.dataset if kind == "loader" else parent
    before = source.batch([0, 1])["tokens"].tolist()
    pickled = pickle.dumps(parent)
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(1) as pool:
        assert pool.apply(first_tokens, (pickled,)) == before
        make_dataset([200, 100] if is_same_size else [300])  # at the same prefix
        with pytest.raises(DataError):
            pool.apply(first_tokens, (pickled,))
    with pytest.raises(DataError):
        first_tokens(pickled)
    assert np.array_equal(
        source.batch([0, 1])["tokens"].tolist(), before
    )  # the parent keeps the old files mapped
