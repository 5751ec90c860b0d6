"""What the tests of pairs share."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from millrace import IndexedDatasetBuilder


def write(prefix: Path, token: int, length: int = 100, count: int = 20) -> None:
    """A pair of documents of one length, and one token."""
    with IndexedDatasetBuilder(prefix, np.int32) as builder:
        for _ in range(count):
            builder.add_document(np.full(length, token))


def link_pairs(prefix: Path, count: int) -> None:
    """The same files at PREFIX-0, PREFIX-1, ...; the first pair is there."""
    for number in range(1, count):
        for suffix in (".bin", ".idx"):
            os.link(f"{prefix}-0{suffix}", f"{prefix}-{number}{suffix}")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def flip(path: Path, place: int) -> None:
    """Changes one bit of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs code in a process of its own, in the root of the project."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=Path(__file__).parent.parent.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )


def output_of(code: str, *arguments: object) -> str:
    """What code prints that ends well and has nothing to complain of."""
    result = run(code, *arguments)
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    return result.stdout
