"""What the tests of pairs share."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from millrace import IndexedDatasetBuilder

ROOT = Path(__file__).parent.parent.parent


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


def open_in(folder: Path) -> set[str]:
    """The files in a folder that this process has open."""
    names = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing
            path = Path(os.readlink(f"/proc/self/fd/{number}"))
            if path.parent == folder:
                names.add(path.name)
    return names


def start(code: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    """A process that runs code, in the root of the project."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, text=True, **options)


def run(code: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs code in a process of its own."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with ended([start(code, *arguments, **pipes, **options)]) as (process,):
        output, errors = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


@contextlib.contextmanager
def ended(processes: Iterable[subprocess.Popen[str]]) -> Iterator[list[subprocess.Popen[str]]]:
    """Kills the processes at the end of the block."""
    running = list(processes)
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.communicate()


def output_of(code: str, *arguments: object, **options: Any) -> str:
    """What code prints that ends well and has nothing to complain of."""
    result = run(code, *arguments, **options)
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    return result.stdout
