"""What `millrace cache` shows, checks and removes."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millrace
from millrace import ConfigError, DatasetConfig, build_datasets
from millrace.files import file_lock
from millrace.jobs import list_cache, prune_cache
from tests.test_cli import millrace as run_millrace


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two token files, and a cache of two runs that share their training split."""
    for name in ("a", "b"):
        with millrace.IndexedDatasetBuilder(tmp_path / name, np.uint16) as builder:
            for length in range(1, 40 + ord(name) % 7):
                builder.add_document(np.arange(length))
    for size in (10, 20):
        build_datasets(config_of(tmp_path, size))
    return tmp_path


def config_of(folder: Path, size: int, **options: Any) -> DatasetConfig:
    both = ([str(folder / "a"), str(folder / "b")], [1.0, 2.0])
    return DatasetConfig(
        sequence_length=8,
        seed=1,
        num_samples=(100, size, None),
        blend_per_split=[both, both, None],
        cache=str(folder / "cache"),
        **options,
    )


def kinds(folder: Path) -> list[str]:
    return sorted(entry.kind for entry in list_cache(folder / "cache"))


def test_it_lists_runs_and_the_sets_that_they_share(folder: Path) -> None:
    entries = list_cache(folder / "cache")
    assert kinds(folder) == ["run", "run", "set", "set", "set"]
    runs = [entry for entry in entries if entry.kind == "run"]
    assert runs[0].sets[0] == runs[1].sets[0]
    assert runs[0].prefixes == [str(folder / "a"), str(folder / "b")]
    paths = sorted(path for entry in entries for path in entry.paths)
    assert paths == sorted(map(str, (folder / "cache").iterdir()))
    assert sum(entry.num_bytes for entry in entries) == sum(map(os.path.getsize, paths))
    assert prune_cache(folder / "cache") == []


def test_files_of_others_are_left_alone(folder: Path) -> None:
    digest = "0123456789abcdef" * 2
    others = ["notes.txt", f"{digest}-GPTDataset-train-document_index.npy", f"{digest[1:]}.json"]
    for name in others:
        (folder / "cache" / name).touch()
    assert kinds(folder) == ["run", "run", "set", "set", "set"]
    prune_cache(folder / "cache", older_than_days=-1)
    assert sorted(path.name for path in (folder / "cache").iterdir()) == sorted(others)


def test_leftovers_and_damage_go(folder: Path) -> None:
    cache = folder / "cache"
    (cache / f"{'0' * 32}-sample_index.npy.tmp").write_bytes(b"half")
    (cache / f"run-{'1' * 32}.json").write_text("{}")
    entry = next(entry for entry in list_cache(cache) if entry.kind == "set")
    damaged = next(path for path in entry.paths if path.endswith("-document_index.npy"))
    os.truncate(damaged, 100)
    planned = prune_cache(cache, dry_run=True)
    assert [e.kind for e in list_cache(cache)].count("leftover") == 2
    removed = prune_cache(cache)
    assert [entry.paths for entry in removed] == [entry.paths for entry in planned]
    assert sorted(entry.kind for entry in removed) == ["leftover", "leftover", "set"]
    assert not any(os.path.exists(path) for entry in removed for path in entry.paths)
    build_datasets(config_of(folder, 10))
    build_datasets(config_of(folder, 20))
    assert kinds(folder) == ["run", "run", "set", "set", "set"]


def test_runs_whose_data_are_gone_go_with_their_sets(folder: Path) -> None:
    for suffix in (".bin", ".idx"):
        (folder / f"b{suffix}").unlink()
    removed = prune_cache(folder / "cache")
    assert sorted(entry.kind for entry in removed) == ["run", "run", "set", "set", "set"]
    assert all("b is gone" in problem for entry in removed for problem in entry.problems)
    assert list((folder / "cache").iterdir()) == []


def test_old_runs_go_with_the_sets_that_they_alone_need(folder: Path) -> None:
    runs = [entry for entry in list_cache(folder / "cache") if entry.kind == "run"]
    long_ago = time.time() - 10 * 24 * 60 * 60
    os.utime(runs[0].paths[0], (long_ago, long_ago))
    assert prune_cache(folder / "cache", older_than_days=11) == []
    removed = prune_cache(folder / "cache", older_than_days=9)
    own = set(runs[0].sets) - set(runs[1].sets) - {None}
    assert {entry.name for entry in removed} == {runs[0].name} | own
    assert kinds(folder) == ["run", "set", "set"]


def test_what_a_process_builds_is_left_alone(folder: Path) -> None:
    cache = folder / "cache"
    name = "0" * 32
    (cache / f"{name}-sample_index.npy.tmp").write_bytes(b"half")
    with file_lock(str(cache / f"{name}.lock")):
        assert prune_cache(cache) == []
    assert [entry.name for entry in prune_cache(cache)] == [name]


def test_a_flipped_bit_is_found_by_check(folder: Path) -> None:
    cache = folder / "cache"
    result = run_millrace("cache", "check", cache)
    assert result.returncode == 0, result.stderr
    entry = next(entry for entry in list_cache(cache) if entry.kind == "set")
    path = Path(next(path for path in entry.paths if path.endswith("-sample_index.npy")))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    result = run_millrace("cache", "check", cache)
    assert result.returncode == 1
    assert f"{path}" in result.stdout
    assert "1 sets of arrays are damaged" in result.stderr


def test_the_command_lists_and_prunes(folder: Path) -> None:
    listed = json.loads(run_millrace("cache", "list", folder / "cache", "--json").stdout)
    assert sorted(entry["kind"] for entry in listed) == ["run", "run", "set", "set", "set"]
    result = run_millrace("cache", "prune", folder / "cache", "--older-than", "-1", "--dry-run")
    assert "5 entries to remove" in result.stdout
    assert kinds(folder) == ["run", "run", "set", "set", "set"]
    result = run_millrace("cache", "prune", folder / "cache", "--older-than=-1")
    assert "5 entries removed" in result.stdout
    assert list((folder / "cache").iterdir()) == []
    shutil.rmtree(folder / "cache")
    assert run_millrace("cache", "list", folder / "cache").returncode == 1
    with pytest.raises(ConfigError, match="is no folder"):
        list_cache(folder / "cache")
