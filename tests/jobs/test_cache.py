"""What `millrace cache` shows, checks and removes."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millrace
from millrace import CacheError, ConfigError, DatasetConfig, build_datasets
from millrace.cache import arrays
from millrace.files import file_lock, temporary_name
from millrace.jobs import list_cache, prune_cache
from tests.no_flock import no_flock
from tests.test_cli import millrace as run_millrace

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two token files, and a cache of two runs that share their training split."""
    for name in ("a", "b"):
        write_data(tmp_path / name, 40 + ord(name) % 7)
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


def test_old_runs_go_with_the_sets_that_they_alone_need(folder: Path) -> None:
    runs = [entry for entry in list_cache(folder / "cache") if entry.kind == "run"]
    long_ago = time.time() - 10 * 24 * 60 * 60
    os.utime(runs[0].paths[0], (long_ago, long_ago))
    assert prune_cache(folder / "cache", older_than_days=11) == []
    removed = prune_cache(folder / "cache", older_than_days=9)
    own = set(runs[0].sets) - set(runs[1].sets) - {None}
    assert {entry.name for entry in removed} == {runs[0].name} | own
    assert kinds(folder) == ["run", "set", "set"]


def test_leftovers_beside_a_whole_set_go_alone(folder: Path) -> None:
    cache = folder / "cache"
    entries = list_cache(cache)
    for entry in entries:
        Path(temporary_name(entry.paths[0])).touch()
    assert [entry.kind for entry in prune_cache(cache)] == ["leftover"] * 5
    assert list_cache(cache)[0].paths == entries[0].paths
    assert kinds(folder) == ["run", "run", "set", "set", "set"]


def test_what_a_process_builds_is_left_alone(folder: Path) -> None:
    cache = folder / "cache"
    name = "0" * 32
    (cache / f"{name}-sample_index.npy.tmp").write_bytes(b"half")
    with (
        file_lock(str(cache / f"{name}.lock")),
        pytest.raises(CacheError, match=f"another process is building {name}"),
    ):
        prune_cache(cache)
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
    with pytest.raises(ConfigError, match="is not a folder"):
        list_cache(folder / "cache")


# ---- what prune must leave ----


def write_data(prefix: Path, count: int = 40) -> None:
    with millrace.IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for length in range(1, count):
            builder.add_document(np.arange(length))


def index_data(prefix: str, cache: Path, **options: Any) -> millrace.Datasets:
    given: dict[str, Any] = {"seed": 1, "num_samples": (100, 10, None), "split": "8,2,0", **options}
    return build_datasets(
        DatasetConfig(sequence_length=8, blend=([prefix], None), cache=cache, **given)
    )


def test_relative_prefixes_are_judged_where_they_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    write_data(tmp_path / "here" / "data")
    index_data("data", tmp_path / "cache")
    monkeypatch.chdir(tmp_path / "there")
    assert prune_cache(tmp_path / "cache") == []
    write_data(tmp_path / "there" / "data", 30)  # as little as another "data" here
    assert prune_cache(tmp_path / "cache") == []
    write_data(tmp_path / "here" / "data", 30)
    removed = prune_cache(tmp_path / "cache")
    assert sorted(entry.kind for entry in removed) == ["run", "set", "set"]
    assert f"{tmp_path}/here/data is not what it was" in removed[0].reason
    assert {entry.reason for entry in removed[1:]} == {"no run needs it"}


@pytest.mark.parametrize("is_empty", [False, True])
def test_data_that_are_not_mounted_are_not_judged(is_empty: bool, tmp_path: Path) -> None:
    disk, cache = tmp_path / "disk", tmp_path / "cache"
    disk.mkdir()
    write_data(disk / "data")
    index_data(str(disk / "data"), cache)
    disk.rename(tmp_path / "elsewhere")
    if is_empty:  # as a mount point is
        disk.mkdir()
    assert prune_cache(cache) == []
    entry = next(entry for entry in list_cache(cache) if entry.kind == "run")
    assert "not mounted" in entry.doubts[0]
    assert "not mounted" in run_millrace("cache", "list", cache).stdout
    assert len(prune_cache(cache, older_than_days=1)) == 0
    assert len(prune_cache(cache, older_than_days=-1)) == 3


def as_another_user(code: str, folder: object) -> str:
    """What a program prints that root has started as another user, with a folder."""
    start = (
        "import os, sys; from pathlib import Path\n"
        "from millrace.jobs import list_cache, prune_cache\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534); folder = sys.argv[1]\n"
    )
    return subprocess.check_output([sys.executable, "-c", start + code, str(folder)], text=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("closed", ["data", "cache"])
def test_what_may_not_be_read_is_not_judged(closed: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "data").mkdir()
        write_data(folder / "data" / "x")
        index_data(str(folder / "data" / "x"), folder / "cache")
        (folder / "cache").chmod(0o777)
        for path in (folder / closed).iterdir():
            path.chmod(0o600)
        (folder / "data").chmod(0o700 if closed == "data" else 0o755)
        code = (
            "print([entry.reason for entry in prune_cache(folder)])\n"
            "print(sum(len(entry.doubts) for entry in list_cache(folder)) > 0)"
        )
        assert as_another_user(code, folder / "cache") == "[]\nTrue\n"


def test_records_of_another_version_are_not_judged(folder: Path) -> None:
    cache = folder / "cache"
    for path in cache.glob("*.json"):
        record = arrays.unseal(path.read_bytes())
        path.write_bytes(arrays.seal({**record, "logic": 99, "splits": "in another form"}))
    assert prune_cache(cache) == []
    assert all("another version" in entry.doubts[0] for entry in list_cache(cache))
    assert len(prune_cache(cache, older_than_days=-1)) == 5


def test_manifests_of_the_version_before_are_read(folder: Path) -> None:
    cache = folder / "cache"
    for path in cache.glob("run-*.json"):
        record = arrays.unseal(path.read_bytes())
        del record["paths"]
        path.write_bytes(arrays.seal(record))
    assert prune_cache(cache) == []
    build_datasets(config_of(folder, 10, trust_cache=True))
    write_data(folder / "b", 30)
    assert len(prune_cache(cache)) == 5


BUILD = """
import pickle, sys
from pathlib import Path
import numpy as np
from tests.jobs.test_cache import index_data
folder, number = Path(sys.argv[1]), int(sys.argv[2])
for seed in range(number * 1000, number * 1000 + 25):
    made = index_data(str(folder / "data"), folder / "cache", seed=seed)
    for dataset in pickle.loads(pickle.dumps(made[:2])):  # whose arrays are not mapped yet
        dataset.batch(np.arange(5))
"""


PRUNE = """
import contextlib, sys, time
from millrace import CacheError
from millrace.jobs import prune_cache
while True:
    with contextlib.suppress(CacheError):  # another process is building
        prune_cache(sys.argv[1])
    time.sleep(0.02)  # a prune that holds the lock at every moment lets nobody begin
"""


@pytest.mark.parametrize("has_locks", [True, False])
def test_what_is_built_meanwhile_is_left_alone(has_locks: bool, tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    (tmp_path / "cache").mkdir()
    environment = dict(os.environ) if has_locks else no_flock(tmp_path)
    pruner = subprocess.Popen(
        [sys.executable, "-c", PRUNE, tmp_path / "cache"], env=environment, stderr=subprocess.PIPE
    )
    builders = [
        subprocess.Popen(
            [sys.executable, "-c", BUILD, tmp_path, str(number)],
            env=environment,
            cwd=ROOT,
            stderr=subprocess.PIPE,
        )
        for number in range(3)
    ]
    try:
        for builder in builders:
            _, errors = builder.communicate(timeout=120)
            assert builder.returncode == 0, errors.decode()
        assert pruner.poll() is None, pruner.communicate()[1]
    finally:
        for process in (pruner, *builders):
            process.kill()
            process.communicate()
    assert kinds(tmp_path) == ["run"] * 75 + ["set"] * 150


def test_a_build_that_died_keeps_what_it_finished(folder: Path) -> None:
    cache = folder / "cache"
    run = next(entry for entry in list_cache(cache) if entry.kind == "run")
    for path in cache.glob(f"{run.sets[1]}*"):
        path.unlink()
    assert prune_cache(cache) == []


def test_a_set_that_went_after_the_start_is_an_error_with_a_remedy(folder: Path) -> None:
    made = build_datasets(config_of(folder, 10))
    copy = pickle.loads(pickle.dumps(made.train))
    shutil.rmtree(folder / "cache")
    assert made.train is not None
    made.train.batch([0])  # it is mapped here
    with pytest.raises(millrace.DataError, match=r"is missing.*start it again, or run `millrace i"):
        copy.batch([0])


def test_the_command_says_why(folder: Path) -> None:
    for suffix in (".bin", ".idx"):
        (folder / f"b{suffix}").unlink()
    for options in (["--dry-run"], []):
        shown = run_millrace("cache", "prune", folder / "cache", *options).stdout
        assert f"  {folder}/b is gone or damaged" in shown
        assert shown.count("  no run needs it\n") == 3
    assert list((folder / "cache").iterdir()) == []
    write_data(folder / "b")
    index_data(str(folder / "b"), folder / "cache")
    listed = run_millrace("cache", "prune", folder / "cache", "--older-than=-1", "--json").stdout
    reasons = sorted(entry["reason"][-8:] for entry in json.loads(listed))
    assert reasons == ["days old", "needs it", "needs it"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_what_cannot_be_removed_is_named() -> None:
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o1777)  # in such a folder each removes what is his
        for digit in "01":
            Path(name, f"{digit * 32}-sample_index.npy.tmp").touch()
        code = (
            "Path(folder, '2' * 32 + '-sample_index.npy.tmp').touch()\n"
            "try: prune_cache(folder)\n"
            "except Exception as error: print(error)"
        )
        said = as_another_user(code, name)
        assert said.startswith(f"1 entries are removed; 2 could not be: {name}/0000")
