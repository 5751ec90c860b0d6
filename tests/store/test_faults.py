"""A full disk, a limit on file sizes, kill -9: the old pair stays, and the next run succeeds."""

import contextlib
import errno
import os
import random
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import millrace
from millrace.store import verify, writer
from tests.store import kill
from tests.store.pairs import names, output_of

PAGE = 4096  # bytes; a tmpfs gives out pages
NUM_DOCUMENTS = 3000
SOURCE = "source"  # the pair that a merge takes


def build(folder: Path) -> None:
    """3,000 documents of 1 to 7 tokens: 24 KB of tokens and 60 KB of index, and a sidecar."""
    with millrace.IndexedDatasetBuilder(folder / "data", np.uint16, checksums=True) as builder:
        for number in range(NUM_DOCUMENTS):
            builder.add_document(np.full(1 + number % 7, number))


def merge(folder: Path) -> None:
    """The same, copied in the kernel, twice over."""
    with millrace.IndexedDatasetBuilder(folder / "data", np.uint16) as builder:
        for _ in range(2):
            builder.add_index(folder / SOURCE)


def build_old(folder: Path) -> dict[str, bytes]:
    """Writes the old pair and the merge's source; returns the old pair's files."""
    build(folder)
    for path in folder.glob("data.*"):
        path.rename(folder / path.name.replace("data", SOURCE))
    with millrace.IndexedDatasetBuilder(folder / "data", np.int32, checksums=True) as builder:
        builder.add_document([1, 2, 3])
    return pair_in(folder)


def pair_in(folder: Path) -> dict[str, bytes]:
    """All files except the merge's source and the ballast."""
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if not path.name.startswith((SOURCE, "ballast"))
    }


def check_new(folder: Path) -> None:
    """Checks that the new pair is whole, and nothing else is left."""
    names = set(pair_in(folder))
    assert {"data.bin", "data.idx"} <= names <= {"data.bin", "data.idx", "data.info.json"}
    assert verify([folder / "data"])[0].problems == []
    assert len(millrace.IndexedDataset(folder / "data")) % NUM_DOCUMENTS == 0


@contextlib.contextmanager
def size_limit(num_bytes: int) -> Iterator[None]:
    """Limits the size of files; Python ignores the signal, so that a write raises OSError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def try_to_write(folder: Path, write: Callable[[Path], None], refusal: int) -> bool:
    """Whether a write succeeds: then the new pair is whole, else the old one is what it was."""
    old = pair_in(folder)
    try:
        write(folder)
    except OSError as error:
        if error.errno != refusal or not error.filename.startswith(f"{folder}/data"):
            raise
        assert pair_in(folder) == old
        return False
    check_new(folder)
    return True


def sweep_file_sizes(folder: Path, write: Callable[[Path], None]) -> tuple[int, int]:
    """Writes under many limits on a file's size; returns (refusals, successes)."""
    build_old(folder)
    outcomes = []
    for limit in [0, 1, 100, *range(2000, 140_000, 6000)]:
        with size_limit(limit):
            outcomes.append(try_to_write(folder, write, errno.EFBIG))
    assert try_to_write(folder, write, errno.EFBIG)
    return outcomes.count(False), outcomes.count(True)


# ---- a full disk ----


def fill(folder: Path, left: int) -> None:
    """Fills the disk except for `left` bytes."""
    with open(folder / "ballast", "wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(PAGE))
        file.truncate(max(0, file.tell() - left))


@pytest.mark.parametrize("limit", [writer.LIMIT, 64], ids=["in memory", "spilled"])
@pytest.mark.parametrize("write", [build, merge])
def test_a_full_disk_leaves_the_old_pair(
    disk: Path, write: Callable[[Path], None], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for more and more pages, it fails in the tokens, the index, the sidecar."""
    build_old(disk)
    monkeypatch.setattr(writer, "LIMIT", limit)
    outcomes = []
    for pages in [*range(0, 60, 3), *range(60, 90, 10)]:
        fill(disk, pages * PAGE)
        outcomes.append(try_to_write(disk, write, errno.ENOSPC))
        (disk / "ballast").unlink()
        assert try_to_write(disk, write, errno.ENOSPC)  # with room again
    assert outcomes.count(False) >= 3
    assert any(outcomes)


def test_a_builder_whose_write_failed_publishes_nothing_wrong(disk: Path) -> None:
    """A caller that catches the error and goes on, with room again, gets no pair with a hole."""
    old = build_old(disk)
    builder = millrace.IndexedDatasetBuilder(disk / "data", np.int64)
    tokens = np.arange(1000, dtype=np.int64)
    builder.add_document(tokens)
    fill(disk, 2 * PAGE)
    with pytest.raises(OSError, match="No space left"):  # noqa: PT012
        while True:
            builder.add_documents(tokens, [500, 500])  # written at once
    (disk / "ballast").unlink()
    for use in (partial(builder.add_documents, tokens, [999, 1]), builder.finalize):
        with pytest.raises(millrace.ConfigError, match="is closed"):
            use()
    assert pair_in(disk) == old
    build(disk)
    check_new(disk)


# ---- a limit on the size of files ----


@pytest.mark.parametrize("kind", ["build", "merge"])
def test_a_limit_on_file_sizes_leaves_the_old_pair(kind: str, tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, warnings; from tests.store import test_faults as t; "
        "warnings.simplefilter('error'); "  # such as of a file that nobody closes
        "print(*t.sweep_file_sizes(pathlib.Path(sys.argv[1]), getattr(t, sys.argv[2])))"
    )
    refusals, successes = map(int, output_of(code, tmp_path, kind).split())
    assert refusals >= 3
    assert successes >= 1


# ---- kill -9 ----


@pytest.mark.parametrize("kind", kill.KINDS)
def test_kill_9_at_random_moments(kind: str, tmp_path: Path) -> None:
    """In another process, as it forks and this one has threads."""
    output_of(
        "import sys, pathlib, random; from tests.store import kill; "
        "print(kill.kill_at_random_moments(pathlib.Path(sys.argv[1]), sys.argv[2], 6, "
        f"random.Random({random.getrandbits(32)})))",
        tmp_path,
        kind,
    )


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [("build", 1, 2), ("merge", 2, 3), ("build", 2, 4), ("keys", 1, 2), ("convert", 2, 4)],
)
def test_kill_9_before_every_step(kind: str, old: int, new: int, tmp_path: Path) -> None:
    """Old and new pairs with and without a sidecar."""
    output_of(
        "import sys, pathlib; from tests.store import kill; "
        f"print(kill.kill_before_every_step(pathlib.Path(sys.argv[1]), sys.argv[2], {old}, {new}, "
        "successors=1))",
        tmp_path,
        kind,
    )


def test_kill_9_where_files_get_their_times_when_they_are_flushed(tmp_path: Path) -> None:
    """As on NFS, whose server sets the time of a file when its data arrive."""
    output_of(
        """
import os, pathlib, sys, time
from tests.store import kill
flush = os.fsync
def flush_to_server(descriptor):
    flush(descriptor)
    os.utime(descriptor, ns=(time.time_ns(),) * 2)
os.fsync = flush_to_server
print(kill.kill_before_every_step(pathlib.Path(sys.argv[1]), "build", 1, 2, successors=1))
""",
        tmp_path,
    )


def test_a_kill_in_a_first_publication_leaves_no_tokens_without_an_index(tmp_path: Path) -> None:
    """Another tool would take them for a file of raw tokens."""
    output_of(
        """
import pathlib, sys
from tests.store import kill
folder, step = pathlib.Path(sys.argv[1]), 0
while kill.kill_before_step(folder, "build", 1, step):
    names = {path.name for path in folder.iterdir()}
    assert "data.bin" not in names or names & {"data.idx", "data.idx.new"}, (step, names)
    for path in folder.iterdir():
        path.unlink()
    step += 1
assert step > 10
""",
        tmp_path,
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_files_of_another_user_stay() -> None:
    """In a folder where users may only remove their own files."""
    folder = Path(tempfile.mkdtemp())
    code = """
import os, sys
from millrace import IndexedDatasetBuilder
folder = sys.argv[1]
with IndexedDatasetBuilder(folder + "/old") as builder:
    builder.add_document([1, 2, 3])
open(folder + "/new.bin.0123456789ab.tmp", "w").close()
os.chmod(folder, 0o1777)
os.setresuid(65534, 65534, 65534)
with IndexedDatasetBuilder(folder + "/new") as builder:
    builder.add_document([4])
try:
    with IndexedDatasetBuilder(folder + "/old") as builder:
        builder.add_document([4])
except PermissionError as error:
    print(error.filename)
"""
    try:
        assert output_of(code, folder) == f"{folder}/old.idx\n"
        left = "new.bin.0123456789ab.tmp"
        assert names(folder) == ["new.bin", left, "new.idx", "old.bin", "old.idx"]
        assert millrace.IndexedDataset(folder / "old")[0].tolist() == [1, 2, 3]
    finally:
        shutil.rmtree(folder)
