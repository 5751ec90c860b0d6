"""What happens to files under the loader: each kind of dataset, and each fault."""

import dataclasses
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace import DataError, DatasetConfig, IndexedDataset, build_datasets
from millrace.feed import BlendedDataset, GPTDataset, Loader, ShardedDataset
from tests.conftest import write_documents
from tests.shard_folders import make_sequences, write_sequences

Make = Callable[..., IndexedDataset]
ACCESS = ("mmap", "file")
KINDS = ("dataset", "blend", "sharded")


def write_data(folder: Path) -> None:
    """Document i has 1,000 tokens i; and a folder of shards."""
    write_documents(folder / "text", [np.full(1000, number) for number in range(400)])
    write_sequences(folder / "shards", make_sequences(60, 2048), num_shards=4)


def open_source(folder: Path, kind: str, access: Any) -> Any:
    if kind == "sharded":
        return ShardedDataset(folder / "shards", access=access)
    data = IndexedDataset(folder / "text", access=access)
    dataset = GPTDataset(data, sequence_length=512, seed=1)
    return BlendedDataset([dataset]) if kind == "blend" else dataset


def cut_files(folder: Path) -> None:
    """Cuts files short under loaders, and makes them whole again; run in a process of its own."""
    for kind in KINDS:
        path = folder / ("shards/shard_0001.bin" if kind == "sharded" else "text.bin")
        content = path.read_bytes()
        for access in ACCESS:
            for prefetch in (0, 4):
                source = open_source(folder, kind, access)
                with Loader(source, micro_batch_size=2, prefetch=prefetch, threads=3) as loader:
                    next(loader)
                    os.truncate(path, 0 if kind == "sharded" else 8192)
                    errors = []
                    while len(errors) < 2:
                        try:
                            next(loader)
                        except DataError as error:
                            errors.append((loader.consumed_samples, str(error)))
                    os.truncate(path, 0)
                with open(path, "r+b") as file:
                    file.write(content)
                assert errors[0][0] == errors[1][0], errors  # the same step again
                print("\n".join(error for _, error in errors))
                loader = Loader(source, micro_batch_size=2, consumed_samples=errors[0][0])
                assert len(list(loader)) == (len(source) - errors[0][0]) // 2


def test_a_file_cut_short_is_named_and_no_bus_error(tmp_path: Path) -> None:
    """When the file is whole again, so is the dataset."""
    write_data(tmp_path)
    code = f"from tests.feed.test_faults import *; cut_files(Path({str(tmp_path)!r}))"
    command = [sys.executable, "-c", code]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=root)
    assert result.returncode == 0, result.stderr
    errors = result.stdout.splitlines()
    assert len(errors) == 2 * len(KINDS) * len(ACCESS) * 2
    for error in errors:
        assert str(tmp_path) in error
        assert re.search(r"(shorter|cut short).*consumed_samples=.*sample numbers \[", error), error


@pytest.mark.parametrize("access", ACCESS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_vanishes_is_read_on(tmp_path: Path, kind: str, access: str) -> None:
    write_data(tmp_path)
    with Loader(open_source(tmp_path, kind, access), micro_batch_size=2, threads=2) as loader:
        next(loader)
        for path in tmp_path.rglob("*.*"):
            if path.is_file():
                path.unlink()
        assert sum(1 for _ in loader) == len(loader) - 1


# ---- pickles ----


def first_tokens(pickled: bytes) -> list[int]:
    """The tokens of the first two samples; called in this process and in a spawned one."""
    source = pickle.loads(pickled)
    batch = next(source) if isinstance(source, Loader) else source.batch([0, 1])
    return batch["tokens"].tolist()  # type: ignore[no-any-return]


def picklable_sources(prefix: str, cache: Path) -> list[Any]:
    """A dataset, a blend, a loader, and what a run builds, without and with a cache folder."""
    dataset = GPTDataset(IndexedDataset(prefix), sequence_length=8, seed=3)
    config = DatasetConfig(
        sequence_length=8, seed=3, num_samples=(20, None, None), blend=([prefix], None), split="1"
    )
    configs = (config, dataclasses.replace(config, cache=cache))
    built = [build_datasets(one).train for one in configs]
    blend, loader = (
        BlendedDataset([dataset] * 2, [0.5, 0.5], 10),
        Loader(dataset, micro_batch_size=2),
    )
    return [dataset, blend, loader, *built]


@pytest.mark.parametrize("is_same_size", [True, False])
def test_a_pickle_of_replaced_data_is_refused(
    make_dataset: Make, tmp_path: Path, is_same_size: bool
) -> None:
    """A pickle belongs to its token files; the parent keeps the old ones mapped."""
    prefix = make_dataset([100, 200]).prefix
    parents = picklable_sources(prefix, tmp_path / "cache")
    sources = [one.dataset if isinstance(one, Loader) else one for one in parents]
    before = [source.batch([0, 1])["tokens"].tolist() for source in sources]
    pickles = [pickle.dumps(parent) for parent in parents]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(first_tokens, pickles) == before
        make_dataset([200, 100] if is_same_size else [300])  # at the same prefix
        for pickled in pickles:
            with pytest.raises(DataError):
                pool.apply(first_tokens, (pickled,))
            with pytest.raises(DataError):
                first_tokens(pickled)
    assert [source.batch([0, 1])["tokens"].tolist() for source in sources] == before
