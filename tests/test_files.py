"""Temporary names, atomic files and locks, by real processes."""

import contextlib
import logging
import os
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace import files
from millrace.files import TMP, atomic_file, file_lock, temporaries_of, temporary_name
from tests.no_flock import no_flock
from tests.store import pairs
from tests.store.pairs import ended

IS_ROOT = os.geteuid() == 0
HANG = 60.0  # seconds
IMPORTS = "import os, pathlib, sys, time; from millrace.files import *\n"


def start(code: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    """A process that runs code with the names of `files`."""
    return pairs.start(IMPORTS + code, *arguments, **options)


def output_of(code: str, *arguments: object, **options: Any) -> str:
    return pairs.output_of(IMPORTS + code, *arguments, **options)


@pytest.mark.parametrize("name", ["x.bin", "a[0-9]*?.bin", "x"])
def test_temporaries_of_one_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = str(tmp_path / name)
    own = [path + TMP, temporary_name(path), temporary_name(path)]
    others = [path + ".bak" + TMP, temporary_name(path + ".bak"), path + TMP + ".lock", path]
    others += [str(tmp_path / "a5.bin") + TMP, temporary_name(path) + TMP, path + ".0123" + TMP]
    for file in own + others:
        Path(file).touch()
    assert temporaries_of(path) == sorted(own)
    assert temporaries_of(name) == sorted(map(os.path.basename, own))
    assert len(temporaries_of(str(tmp_path) + "//" + name, path + ".bak")) == len(own) + 2
    assert temporaries_of(str(tmp_path / "nowhere" / "x")) == []


def test_a_reader_never_sees_a_part_of_many_writers_files(tmp_path: Path) -> None:
    path = tmp_path / "x"
    code = """
for _ in range(60):
    with atomic_file(sys.argv[1]) as file:
        for _ in range(100): file.write(sys.argv[2].encode() * 1000); file.flush()
"""
    path.write_bytes(b"a" * 100_000)
    with ended(start(code, path, letter) for letter in "abc") as writers:
        while any(writer.poll() is None for writer in writers):
            content = path.read_bytes()
            assert content == content[:1] * 100_000
        assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_permissions_follow_the_umask_but_for_locks(mask: int, tmp_path: Path) -> None:
    path = tmp_path / "x"
    before = os.umask(mask)
    try:
        with atomic_file(str(path)) as file, file_lock(f"{path}.lock"):
            file.write(b"x")
            assert stat.S_IMODE(os.stat(f"{path}.lock").st_mode) == 0o666
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


@pytest.mark.parametrize("write", [np.save, lambda file, array: file.write(array)])
def test_a_full_disk_names_the_file(write: Callable[[Any, Any], object], disk: Path) -> None:
    path, array = str(disk / "x"), np.zeros(9 << 20, np.uint8)
    with pytest.raises(OSError, match="No space left on") as caught, atomic_file(path) as file:
        write(file, array)
    assert caught.value.filename == path
    assert os.listdir(disk) == []


def test_errors_about_other_files_keep_their_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, atomic_file(str(tmp_path / "x")):
        open(tmp_path / "nowhere")  # noqa: SIM115
    assert caught.value.filename == str(tmp_path / "nowhere")
    assert os.listdir(tmp_path) == []


# ---- locks ----

HOLD = """
with file_lock(sys.argv[1]) as is_held:
    print(is_held, flush=True)
    sys.stdin.read()
"""
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}


@contextlib.contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a lock until it dies or its input ends."""
    process = start(HOLD, path, **PIPES)
    with ended([process]):
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        yield process


def is_free(path: Path) -> bool:
    code = """
try:
    with file_lock(sys.argv[1], limit=0): print('free')
except BlockingIOError: print('held')
"""
    return output_of(code, path) == "free\n"


@pytest.mark.parametrize("limit", [0.05, 0])
def test_a_limit_names_the_holder(limit: float, tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path) as other:
        with pytest.raises(BlockingIOError, match=f"process {other.pid} on ") as caught:
            file_lock(str(path), limit=limit).__enter__()
        assert caught.value.filename == str(path)
    with file_lock(str(path), limit=limit) as is_held:  # it dies with its holder
        assert is_held


def test_a_lock_at_a_link_to_no_file_is_made_there(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.symlink_to("elsewhere")
    assert is_free(path)
    assert (tmp_path / "elsewhere").exists()
    path.symlink_to("none/elsewhere")
    with pytest.raises(FileNotFoundError):
        file_lock(str(path)).__enter__()


def test_waiting_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "lock"
    monkeypatch.setattr(files, "SAY_AFTER", 0.1)
    with holder(path) as other, caplog.at_level(logging.WARNING):
        with pytest.raises(BlockingIOError):
            file_lock(str(path), limit=1.0).__enter__()
        messages = [record.getMessage() for record in caplog.records]
        assert len(messages) == 1
        assert f"waiting for {path}, held by process {other.pid} on " in messages[0]


def test_waiting_ends_with_ctrl_c(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        waiting = start("print(flush=True)\n" + HOLD, path, stdin=subprocess.DEVNULL, **pipes)
        with ended([waiting]):
            assert waiting.stdout is not None
            waiting.stdout.readline()
            time.sleep(0.5)  # so that it waits by then
            waiting.send_signal(signal.SIGINT)
            _, errors = waiting.communicate(timeout=HANG)
            assert "KeyboardInterrupt" in errors
        assert not is_free(path)


def test_a_lock_taken_after_waiting_excludes_others(tmp_path: Path) -> None:
    """Each process adds to a number in a file under the lock, which is unlinked in between."""
    path, counter = tmp_path / "lock", tmp_path / "count"
    counter.write_text("0")
    code = """
for _ in range(100):
    with file_lock(sys.argv[1]):
        file = pathlib.Path(sys.argv[2])
        file.write_text(str(int(file.read_text()) + 1))
"""
    with ended(start(code, path, counter) for _ in range(4)) as processes:
        assert [process.wait(HANG) for process in processes] == [0] * 4
    assert counter.read_text() == "400"
    assert sorted(os.listdir(tmp_path)) == ["count"]


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_forked_child_holds_nothing(is_killed: bool, tmp_path: Path) -> None:
    """It leaves the block without a trace, and keeps nothing locked when its parent dies."""
    path = tmp_path / "lock"
    code = """
with file_lock(sys.argv[1]):
    child = os.fork()
    if child and not int(sys.argv[2]): os.waitpid(child, 0)
    if child: print(child, flush=True); sys.stdin.read()
    elif int(sys.argv[2]): os.close(1); time.sleep(600)
"""
    process = start(code, path, int(is_killed), **PIPES)
    child = 0
    try:
        with ended([process]):
            assert process.stdout is not None
            child = int(process.stdout.readline())
            assert path.exists()
            assert not is_free(path)
        assert is_free(path)
    finally:
        if is_killed:
            os.kill(child, signal.SIGKILL)


def test_two_threads_of_a_process_exclude_each_other(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    with file_lock(path), pytest.raises(BlockingIOError):
        file_lock(path, limit=0).__enter__()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter; pytest closes its own."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


AS_NOBODY = """
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    with file_lock(sys.argv[1]) as is_held: print(is_held)
except OSError as error: print(error)
"""


@pytest.mark.skipif(not IS_ROOT, reason="only root can be another user")
@pytest.mark.parametrize("mode", [0o644, 0o600])
@pytest.mark.parametrize("folder_mode", [0o777, 0o1777])
def test_a_stale_lock_of_another_user(mode: int, folder_mode: int, open_folder: Path) -> None:
    open_folder.chmod(folder_mode)
    path = open_folder / "lock"
    path.touch()
    path.chmod(mode)
    output = output_of(AS_NOBODY, path)
    if mode == 0o644:
        assert output == "True\n"
        assert path.exists() == (folder_mode == 0o1777)  # sticky: who does not own it leaves it
    else:
        assert "chmod 666" in output
        assert str(path) in output


@pytest.mark.skipif(not IS_ROOT, reason="only root can be another user")
def test_a_folder_that_cannot_be_written_is_named(open_folder: Path) -> None:
    assert str(open_folder / "lock") in output_of(AS_NOBODY, open_folder / "lock")


def test_a_file_system_without_locks(tmp_path: Path) -> None:
    code = """
with file_lock(sys.argv[1]) as first, file_lock(sys.argv[1]) as second: print(first, second)
"""
    output = output_of(code, tmp_path / "lock", env=no_flock(tmp_path))
    assert output == "False False\n"
    assert not (tmp_path / "lock").exists()
