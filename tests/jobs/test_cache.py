"""What `millrace cache` shows, checks and removes."""

import json
import os
import pickle
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

import millrace
from millrace import CacheError, ConfigError, DatasetConfig, build_datasets
from millrace.cache import arrays
from millrace.files import file_lock
from millrace.jobs import list_cache, prune_cache
from tests.no_flock import no_flock
from tests.run.test_build import write
from tests.store import pairs
from tests.test_cli import millrace as run_millrace

ALL = ["run", "run", "set", "set", "set"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two token files, and a cache of two runs that share their training split."""
    (tmp_path / "data").mkdir()
    for name, count in (("a", 46), ("b", 40)):
        write(tmp_path / "data" / name, range(1, count))
    for size in (10, 20):
        build_datasets(config_of(tmp_path, num_samples=(100, size, None)))
    return tmp_path


def config_of(folder: Path, **options: Any) -> DatasetConfig:
    both = ([str(folder / "data" / name) for name in "ab"], [1.0, 2.0])
    given: dict[str, Any] = {"seed": 1, "num_samples": (100, 10, None), **options}
    blends: Any = {} if "blend" in given else {"blend_per_split": [both, both, None]}
    return DatasetConfig(sequence_length=8, cache=str(folder / "cache"), **blends, **given)


def kinds(entries: list[Any]) -> list[str]:
    return sorted(entry.kind for entry in entries)


def test_it_lists_runs_and_the_sets_that_they_share(folder: Path) -> None:
    entries = list_cache(folder / "cache")
    assert kinds(entries) == ALL
    runs = [entry for entry in entries if entry.kind == "run"]
    assert runs[0].sets[0] == runs[1].sets[0]
    assert runs[0].prefixes == [str(folder / "data" / name) for name in "ab"]
    paths = sorted(path for entry in entries for path in entry.paths)
    assert paths == sorted(map(str, (folder / "cache").iterdir()))
    assert sum(entry.num_bytes for entry in entries) == sum(map(os.path.getsize, paths))
    assert prune_cache(folder / "cache") == []


def files_in(folder: Path) -> set[str]:
    return set(map(str, (folder / "cache").iterdir()))


OTHERS = ["notes.txt", f"{'5' * 32}-GPTDataset-train-document_index.npy", f"{'5' * 31}.json"]
HALVES = f"touch {'0' * 32}-sample_index.npy.tmp; echo {{}} > run-{'1' * 32}.json"


@pytest.mark.parametrize(
    ("command", "gone", "reason"),
    [
        ("for file in *; do touch $file.0123456789ab.tmp; done", ["leftover"] * 5, "a leftover"),
        (HALVES, ["leftover"] * 2, "a leftover"),
        ("set -- *-document_index.npy; truncate -s 100 $1", ["set"], "_index.npy is not the array"),
        ("for end in bin idx; do cp ../data/a.$end ../data/b.$end; done", ALL, "/b is not what it"),
        ("rm ../data/b.*", ALL, "/data/b is gone or damaged"),
        ("mv ../data ../elsewhere", [], ""),  # a disk that is not mounted
        ("mv ../data ../elsewhere; mkdir ../data", [], ""),
        ("set -- [0-9a-f]*.json; rm ${1%.json}*", [], ""),  # as a build that died leaves it
        ("touch " + " ".join(OTHERS), [], ""),
        ("another version", [], ""),
    ],
)
def test_only_what_is_certainly_useless_goes(
    command: str, gone: list[str], reason: str, folder: Path
) -> None:
    cache = folder / "cache"
    if command == "another version":
        for path in cache.glob("*.json"):
            record = arrays.unseal(path.read_bytes())
            others = {"logic": 99, "splits": "in another form", "sets": 3}
            path.write_bytes(arrays.seal({**record, **others}))
    else:
        subprocess.run(command, shell=True, check=True, cwd=cache)
    before = files_in(folder)
    planned = prune_cache(cache, dry_run=True)
    assert files_in(folder) == before
    removed = prune_cache(cache)
    for one, other in zip(removed, planned, strict=True):
        assert (one.paths, one.reason) == (other.paths, other.reason)
        assert reason in one.reason or one.reason == "no run needs it"
    assert kinds(removed) == gone
    left = before - {path for one in removed for path in one.paths}
    assert files_in(folder) == left
    prune_cache(cache, older_than_days=1)
    assert files_in(folder) == left
    prune_cache(cache, older_than_days=-1)
    assert {path.name for path in cache.iterdir()} <= set(OTHERS)


@pytest.mark.parametrize(
    ("name", "value"),
    [("dry_run", "false"), ("dry_run", None), ("older_than_days", "1"), ("folder", 3)],
)
def test_wrong_options_remove_nothing(name: str, value: Any, folder: Path) -> None:
    options: Any = {"folder": os.fsencode(folder / "cache"), "older_than_days": -1}
    assert kinds(prune_cache(**options, dry_run=True)) == ALL
    with pytest.raises(ConfigError, match=name):
        prune_cache(**{**options, name: value})
    assert kinds(list_cache(folder / "cache")) == ALL


def test_old_runs_go_with_the_sets_that_they_alone_need(folder: Path) -> None:
    runs = [entry for entry in list_cache(folder / "cache") if entry.kind == "run"]
    long_ago = time.time() - 10 * 24 * 60 * 60
    os.utime(runs[0].paths[0], (long_ago, long_ago))
    assert prune_cache(folder / "cache", older_than_days=11) == []
    removed = prune_cache(folder / "cache", older_than_days=9)
    own = set(runs[0].sets) - set(runs[1].sets)
    assert {entry.name for entry in removed} == {runs[0].name} | own
    assert kinds(list_cache(folder / "cache")) == ["run", "set", "set"]


def test_relative_prefixes_are_judged_where_they_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    write(Path("data"), [40] * 9)
    build_datasets(config_of(tmp_path, blend=(["data"], None), split="8,2,0"))
    monkeypatch.chdir(tmp_path / "there")
    assert prune_cache(tmp_path / "cache") == []
    write(Path("data"), [30] * 9)  # as little as another "data" here
    assert prune_cache(tmp_path / "cache") == []
    write(tmp_path / "here" / "data", [30] * 9)
    assert kinds(prune_cache(tmp_path / "cache")) == ["run", "set", "set"]


def test_the_command(folder: Path) -> None:
    cache = folder / "cache"
    listed = json.loads(run_millrace("cache", "list", cache, "--json").stdout)
    assert sorted(entry["kind"] for entry in listed) == ALL
    assert run_millrace("cache", "check", cache).returncode == 0
    path = next(cache.glob("*-sample_index.npy"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    result = run_millrace("cache", "check", cache)
    assert result.returncode == 1
    assert f"{path}" in result.stdout
    assert "1 sets of arrays are damaged" in result.stderr
    for end in ("bin", "idx"):
        (folder / f"data/b.{end}").unlink()
    for options, state in (["--dry-run"], "to remove"), (["--older-than=-1"], "removed"):
        shown = run_millrace("cache", "prune", cache, *options).stdout
        assert f"  {folder}/data/b is gone or damaged" in shown
        assert shown.count("  no run needs it\n") >= 2
        assert f"5 entries {state}" in shown
    assert list(cache.iterdir()) == []
    cache.rmdir()
    assert run_millrace("cache", "list", cache).returncode == 1
    with pytest.raises(ConfigError, match="is not a folder"):
        list_cache(cache)


def test_a_set_that_went_after_the_start_is_an_error_with_a_remedy(folder: Path) -> None:
    made = build_datasets(config_of(folder))
    copy = pickle.loads(pickle.dumps(made.train))
    shutil.rmtree(folder / "cache")
    assert made.train is not None
    made.train.batch([0])  # it is mapped here
    with pytest.raises(millrace.DataError, match=r"is missing.*start it again, or run `millrace i"):
        copy.batch([0])


# ---- other users, and processes that build ----


AS_NOBODY = """
import os, sys; from pathlib import Path
from millrace.jobs import list_cache, prune_cache; from millrace.cli import main
os.setgroups([]); os.setgid(65534); os.setuid(65534); folder = sys.argv[1]
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("closed", ["data", "cache"])
def test_what_may_not_be_read_stays(closed: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "data").mkdir()
        write(folder / "data" / "x", [40] * 9)
        blend = ([str(folder / "data" / "x")], None)
        build_datasets(config_of(folder, blend=blend, split="8,2,0"))
        (folder / "cache").chmod(0o777)
        for path in (folder / closed).iterdir():
            path.chmod(0o600)
        (folder / "data").chmod(0o700 if closed == "data" else 0o755)
        code = "print([entry.reason for entry in prune_cache(folder)])"
        assert pairs.output_of(AS_NOBODY + code, folder / "cache") == "[]\n"
        if closed == "cache":
            code = "sys.stderr = sys.stdout; print(main(['cache', 'check', folder]))"
            said = pairs.output_of(AS_NOBODY + code, folder / "cache")
            assert said.endswith("entries could not be checked\n1\n")
            assert "cannot be read: Permission denied" in said


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
        said = pairs.output_of(AS_NOBODY + code, name)
        assert said.startswith("1 entries are removed; 2 could not be: ")
        assert f"{name}/0000" in said


def test_what_a_process_builds_is_left_alone(folder: Path) -> None:
    subprocess.run(HALVES, shell=True, check=True, cwd=folder / "cache")
    name = "0" * 32
    held = file_lock(str(folder / "cache" / f"{name}.lock"))
    with held, pytest.raises(CacheError, match=f"another process is building {name}"):
        prune_cache(folder / "cache")
    assert kinds(prune_cache(folder / "cache")) == ["leftover"] * 2


BUILD = """
import pickle, sys
from pathlib import Path
import numpy as np
from millrace import build_datasets
from tests.jobs.test_cache import config_of
folder, number = Path(sys.argv[1]), int(sys.argv[2])
for seed in range(number * 1000, number * 1000 + 8):
    made = build_datasets(config_of(folder, blend=([folder / "x"], None), split="8,2,0", seed=seed))
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
    write(tmp_path / "x", range(1, 40))
    (tmp_path / "cache").mkdir()
    environment = dict(os.environ) if has_locks else no_flock(tmp_path)
    options: Any = {"env": environment, "stderr": subprocess.PIPE}
    commands = [[PRUNE, tmp_path / "cache"]]
    commands += [[BUILD, tmp_path, number] for number in range(3)]
    with pairs.ended(pairs.start(*one, **options) for one in commands) as (pruner, *builders):
        for builder in builders:
            _, errors = builder.communicate(timeout=120)
            assert builder.returncode == 0, errors
        assert pruner.poll() is None, pruner.communicate()[1]
    assert kinds(list_cache(tmp_path / "cache")) == ["run"] * 24 + ["set"] * 48
