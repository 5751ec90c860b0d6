"""Files that tasks write past the page cache."""

import errno
import fcntl
import os
from pathlib import Path

import numpy as np
import pytest

from millrace.files import checksum
from millrace.shuffling.shard_work import _BLOCK, write_hashed

SIZES: list[list[int]] = [
    [],
    [0],
    [1],
    [4096],
    [4095, 2, 4096],
    [_BLOCK],
    [_BLOCK - 1, 1, 5],
    [3 * _BLOCK + 17],
    [10, _BLOCK, _BLOCK + 4086],
]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("case", ["direct", "no direct files", "no direct writes", "short writes"])
def test_what_is_written_is_in_the_file(
    case: str, sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on file systems that refuse direct writes, at once or later, or write less."""
    set_flags, write_file = fcntl.fcntl, os.write
    calls: list[int] = []

    def refuse(descriptor: int, command: int, flags: int = 0) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return set_flags(descriptor, command, flags)

    def refuse_first(descriptor: int, data: memoryview) -> int:
        calls.append(len(data))
        if len(calls) == 1 and len(data) % 4096 == 0:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write_file(descriptor, data)

    def write_half(descriptor: int, data: memoryview) -> int:
        # Direct writes end at a multiple of the disk's block, others anywhere.
        return write_file(descriptor, data[: max(len(data) // 2, 1)])

    if case == "no direct files":
        monkeypatch.setattr(fcntl, "fcntl", refuse)
    elif case != "direct":
        monkeypatch.setattr(os, "write", refuse_first if "direct" in case else write_half)
    generator = np.random.default_rng(sum(sizes))
    parts = [generator.integers(0, 256, size, np.uint8) for size in sizes]
    path = tmp_path / "file"
    expected = b"".join(part.tobytes() for part in parts)
    sums = write_hashed(str(path), (part for part in parts if not path.exists()))
    assert sums == (len(expected), checksum([expected]))
    assert path.read_bytes() == expected
    assert os.listdir(tmp_path) == ["file"]
