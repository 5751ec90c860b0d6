"""Files that tasks write past the page cache."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from millrace.files import checksum
from millrace.shuffling import hashed_file
from millrace.shuffling.hashed_file import HashedFile

SIZES = [
    [],
    [0],
    [1],
    [4096],
    [4095, 2, 4096],
    [hashed_file._BLOCK],
    [hashed_file._BLOCK - 1, 1, 5],
    [3 * hashed_file._BLOCK + 17],
    [10, hashed_file._BLOCK, hashed_file._BLOCK + 4086],
]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("case", ["direct", "no direct files", "no direct writes", "short writes"])
def test_what_is_written_is_in_the_file(
    case: str, sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on file systems that refuse direct writes, at once or later, or write less."""
    open_file, write_file = os.open, os.write
    if case == "no direct files":

        def refuse(path: str, flags: int, mode: int = 0o777) -> int:
            if flags & os.O_DIRECT:
                os.close(open_file(path, flags & ~os.O_DIRECT, mode))  # as some file systems do
                raise OSError(errno.EINVAL, "Invalid argument", path)
            return open_file(path, flags, mode)

        monkeypatch.setattr(os, "open", refuse)
    elif case == "no direct writes":
        calls = []

        def refuse_first(descriptor: int, data: memoryview) -> int:
            calls.append(len(data))
            if len(calls) == 1 and len(data) % 4096 == 0:
                raise OSError(errno.EINVAL, "Invalid argument")
            return write_file(descriptor, data)

        monkeypatch.setattr(os, "write", refuse_first)
    elif case == "short writes":
        # Direct writes end at a multiple of the disk's block, others anywhere.
        monkeypatch.setattr(
            os, "write", lambda fd, data: write_file(fd, data[: max(len(data) // 2, 1)])
        )
    generator = np.random.default_rng(sum(sizes))
    parts = [generator.integers(0, 256, size, np.uint8) for size in sizes]
    path = tmp_path / "file"
    with HashedFile(str(path)) as file:
        for part in parts:
            file.write(part)
        assert not path.exists()
    expected = b"".join(part.tobytes() for part in parts)
    assert path.read_bytes() == expected
    assert file.sum == (len(expected), checksum([expected]))
    assert os.listdir(tmp_path) == ["file"]


def write(path: Path, num_bytes: int, error: Exception | None = None) -> None:
    with HashedFile(str(path)) as file:
        file.write(np.ones(num_bytes, np.uint8))
        if error is not None:
            raise error


def test_a_file_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        write(tmp_path / "file", hashed_file._BLOCK + 1, ZeroDivisionError())
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", refuse)
    path = tmp_path / "file"
    with pytest.raises(OSError, match="No space left on device") as raised:
        write(path, 1)
    assert raised.value.filename == str(path)
    assert os.listdir(tmp_path) == []
