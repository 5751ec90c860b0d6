"""Array sets in a folder: published atomically, loaded again, never used for other inputs."""

import functools
import json
import multiprocessing
import os
import pickle
import signal
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.cache import arrays
from millrace.errors import DataError
from millrace.files import temporary_name

FORMS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "rows": (np.int32, (3000, 2)),
    "numbers": (np.uint32, (5000,)),
    "nothing": (np.int64, (0,)),
}
NAME = arrays.fingerprint(1)
FORK = multiprocessing.get_context("fork")


def content(key: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(key)
    return {
        name: random.integers(0, 2**31, shape).astype(dtype)
        for name, (dtype, shape) in FORMS.items()
    }


def build(key: int, writers: Mapping[str, arrays.ArrayWriter]) -> None:
    for name, array in content(key).items():
        half = len(array) // 2
        writers[name].write(half, array[half:])
        writers[name].write(0, array[:half])


def load_or_build(folder: Path, key: int = 1) -> tuple[arrays.ArraySet, bool]:
    name = arrays.fingerprint(key)
    return arrays.load_or_build(str(folder), name, key, FORMS, functools.partial(build, key))


def loaded(folder: Path, name: str = NAME) -> arrays.ArraySet:
    array_set = arrays.load(str(folder), name)
    assert array_set is not None
    return array_set


def assert_holds(array_set: arrays.ArraySet, key: int = 1) -> None:
    assert array_set.damage(contents=True) == []
    for name, array in content(key).items():
        np.testing.assert_array_equal(array_set[name], array, strict=True)


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and modification time of every file."""
    stats = {path.name: path.stat() for path in folder.iterdir()}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}


def files_of(folder: Path, key: int = 1) -> list[Path]:
    name = arrays.fingerprint(key)
    paths = [arrays.array_path(str(folder), name, array) for array in FORMS]
    return [folder / f"{name}.json", *map(Path, paths)]


# ---- building and loading ----


def test_a_set_is_built_once_and_then_loaded(tmp_path: Path) -> None:
    array_set, is_built = load_or_build(tmp_path / "deep" / "cache")
    assert is_built
    assert_holds(array_set)
    before = stamps(tmp_path / "deep" / "cache")
    array_set, is_built = load_or_build(tmp_path / "deep" / "cache")
    assert not is_built
    assert_holds(array_set)
    assert stamps(tmp_path / "deep" / "cache") == before
    assert set(before) == {path.name for path in files_of(tmp_path)}  # no lock or temporary


def test_arrays_are_plain_npy_files_and_read_only(tmp_path: Path) -> None:
    array_set, _ = load_or_build(tmp_path)
    for name, array in content(1).items():
        np.save(tmp_path / "numpys", array)
        assert (tmp_path / "numpys.npy").read_bytes() == Path(array_set.path(name)).read_bytes()
    with pytest.raises(ValueError, match="read-only"):
        array_set["rows"][0] = 1


def test_a_set_survives_pickling(tmp_path: Path) -> None:
    array_set, _ = load_or_build(tmp_path)
    assert len(pickle.dumps(array_set)) < 2000
    assert_holds(pickle.loads(pickle.dumps(array_set)))


def test_an_error_of_the_builder_leaves_nothing(tmp_path: Path) -> None:
    def write_too_much(writers: Mapping[str, arrays.ArrayWriter]) -> None:
        writers["rows"].write(0, content(1)["rows"])
        writers["numbers"].write(4999, np.zeros(2, np.uint32))

    for _ in range(2):
        with pytest.raises(ValueError, match=r"\(2,\) from row 4999 on do not fit \(5000,\)"):
            arrays.load_or_build(str(tmp_path), NAME, 1, FORMS, write_too_much)
        assert list(tmp_path.iterdir()) == []


# ---- damage and foreign files ----


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :]


def test_any_damaged_byte_of_a_record_is_detected(tmp_path: Path) -> None:
    load_or_build(tmp_path)
    record = files_of(tmp_path)[0]
    data = record.read_bytes()
    for at in range(len(data)):
        for damaged in (flip(data, at), data[:at]):
            record.write_bytes(damaged)
            assert arrays.load(str(tmp_path), NAME) is None, at


def test_any_damaged_byte_of_a_small_array_is_detected(tmp_path: Path) -> None:
    def build_one(writers: Mapping[str, arrays.ArrayWriter]) -> None:
        writers["numbers"].write(0, np.arange(40))

    layout = {"numbers": (np.int64, (40,))}
    array_set, _ = arrays.load_or_build(str(tmp_path), "name", 1, layout, build_one)
    path = Path(array_set.path("numbers"))
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(flip(data, at))
        assert len(loaded(tmp_path, "name").damage()) == 1, at


def test_the_checksum_detects_damage_in_the_middle_of_a_large_array(tmp_path: Path) -> None:
    """A start reads only the ends of a file; `millrace cache check` reads everything."""
    path = Path(load_or_build(tmp_path)[0].path("rows"))
    path.write_bytes(flip(path.read_bytes(), path.stat().st_size // 2))
    damaged_set = loaded(tmp_path)
    assert damaged_set.damage() == []
    assert damaged_set.damage(contents=True) == [f"{path} is damaged: its checksum has changed"]


def test_another_sets_files_are_not_used(tmp_path: Path) -> None:
    """Each file is intact, with the expected dtype and shape: one array, then all files."""
    for places in (slice(1, 2), slice(None)):
        for key in (1, 2):
            load_or_build(tmp_path, key)
        pairs = [*zip(files_of(tmp_path, 1), files_of(tmp_path, 2), strict=True)]
        for one, two in pairs[places]:
            one.rename(tmp_path / "saved")
            two.rename(one)
            (tmp_path / "saved").rename(two)
        for key in (1, 2):
            array_set, is_built = load_or_build(tmp_path, key)
            assert is_built
            assert_holds(array_set, key)


def test_a_set_of_other_forms_is_built_again(tmp_path: Path) -> None:
    """As after a change of the order that the key names."""
    load_or_build(tmp_path)
    layout = {"numbers": (np.int64, (7,))}

    def write(writers: Mapping[str, arrays.ArrayWriter]) -> None:
        writers["numbers"].write(0, np.arange(7))

    for is_first in (True, False):
        array_set, is_built = arrays.load_or_build(str(tmp_path), NAME, 1, layout, write)
        assert (array_set.layout, is_built) == (layout, is_first)


def test_sets_of_another_logic_version_are_not_used(tmp_path: Path, monkeypatch: Any) -> None:
    load_or_build(tmp_path)
    monkeypatch.setattr(arrays, "RULES_VERSION", arrays.RULES_VERSION + 1)
    assert arrays.fingerprint(1) != NAME
    assert load_or_build(tmp_path)[1]
    # Nor is the old set loaded under its old name.
    assert arrays.load(str(tmp_path), NAME) is None


def test_damage_after_loading_is_a_clear_error(tmp_path: Path) -> None:
    load_or_build(tmp_path)
    array_set = loaded(tmp_path)
    path = Path(array_set.path("numbers"))
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(DataError, match=r"numbers.npy is not the array uint32 \[5000\]"):
        array_set["numbers"]
    path.unlink()
    with pytest.raises(DataError, match=r"numbers.npy is missing"):
        array_set["numbers"]


def test_half_written_files_of_dead_processes_are_replaced(tmp_path: Path) -> None:
    for path in files_of(tmp_path):
        Path(f"{path}.tmp").write_bytes(b"half")
        Path(temporary_name(str(path))).touch()
    (tmp_path / f"{NAME}.lock").write_bytes(b"")  # no process holds it
    other = Path(temporary_name(str(files_of(tmp_path, 2)[0])))
    other.touch()
    array_set, is_built = load_or_build(tmp_path)
    assert is_built
    assert_holds(array_set)
    assert set(tmp_path.iterdir()) == {*files_of(tmp_path), other}


# ---- several processes ----


def test_one_of_many_threads_builds(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        built = pool.map(lambda _: load_or_build(tmp_path)[1], range(8))
    assert sorted(built) == [False] * 7 + [True]


def _load_and_report(folder: Path, out: Any) -> None:
    array_set, is_built = load_or_build(folder)
    assert_holds(array_set)
    out.put(is_built)


def _build_and_stop(folder: Path, out: Any) -> None:
    def write(writers: Mapping[str, arrays.ArrayWriter]) -> None:
        writers["rows"].write(0, content(1)["rows"])
        out.put("stopped")
        signal.pause()

    arrays.load_or_build(str(folder), NAME, 1, FORMS, write)


def test_a_killed_builder_releases_its_lock(tmp_path: Path) -> None:
    out = FORK.Queue()
    targets = [_build_and_stop] + [_load_and_report] * 3
    options: Any = {"args": (tmp_path, out), "daemon": True}
    builder, *loaders = [FORK.Process(target=target, **options) for target in targets]
    builder.start()
    assert out.get(timeout=60) == "stopped"
    for process in loaders:
        process.start()
    assert arrays.load(str(tmp_path), NAME) is None
    assert out.empty()
    builder.kill()
    assert sorted(out.get(timeout=60) for _ in loaders) == [False, False, True]
    for process in loaders:
        process.join()
    assert set(stamps(tmp_path)) == {path.name for path in files_of(tmp_path)}


def test_files_are_flushed_before_they_are_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of fsync and rename calls; the real calls are made, too."""
    steps: list[tuple[str, str]] = []
    flush, rename = os.fsync, os.rename

    def flush_and_note(descriptor: int) -> None:
        steps.append(("flush", os.readlink(f"/proc/self/fd/{descriptor}")))
        flush(descriptor)

    def rename_and_note(source: str, target: str) -> None:
        assert ("flush", source) in steps
        steps.append(("rename", target))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", flush_and_note)
    monkeypatch.setattr(os, "rename", rename_and_note)
    assert load_or_build(tmp_path)[1]
    record, *paths = map(str, files_of(tmp_path))
    folder = ("flush", str(tmp_path))
    publication = [step for step in steps if step[0] == "rename" or step == folder]
    renames = [("rename", path) for path in (*reversed(paths), record)]
    assert publication == [step for rename in renames for step in (rename, folder)]


def test_different_keys_have_different_names() -> None:
    keys = [{"a": [1, None]}, {"a": [1.0, None]}, {"a": ["1"]}, {"a": [2, None]}, {"b": [1, None]}]
    keys += [[], [[]], None, {}, 0, ""]
    assert len({arrays.fingerprint(key) for key in keys}) == len(keys)
    read_again = json.loads(json.dumps(keys))
    assert [*map(arrays.fingerprint, read_again)] == [*map(arrays.fingerprint, keys)]
