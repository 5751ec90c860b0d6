"""kill -9 at any moment of a build or a merge: `python -m tests.store.kill --kills 200 --seed 1`.

A writer writes generations of one pair, each with other sizes and tokens, and says when it starts
and when it is done. It is killed at a random moment, or just before its n-th step in the file
system, for every n. Readers (millrace's, and a plain one that knows the format alone) look while it
works and after its death, and must find all of one generation, to the byte: the one that was done
last, or the one that was under way.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import millrace
from millrace.store import verify

KINDS = ("build", "merge")
HEADER = struct.Struct("<9sQBQQ")
PAIR = {"data.bin", "data.idx", "data.info.json"}
LEFTOVER = re.compile(r"data\.(bin|idx|info\.json)(\.[0-9a-f]{12}\.tmp|\.new)|data\.tmp\.lock")
# What a step is: events that Python reports of itself, before they happen.
STEPS = {"open", "os.rename", "os.remove", "fcntl.flock", "os.truncate", "os.link"}


class MixtureError(AssertionError):
    """A reader saw what is no one generation, or not one that may be there."""


# ---- generations ----


def documents_of(kind: str, generation: int) -> list[NDArray[np.int32]]:
    """The documents of a generation: its number comes first, and the sizes differ."""
    draw = np.random.default_rng([KINDS.index(kind), generation])
    lengths = draw.integers(0, draw.choice([5, 300, 20_000]), draw.integers(1, 40))
    head = np.array([generation], np.int32)
    return [head, *(np.full(length, generation, np.int32) for length in lengths)]


def parts_of(kind: str, generation: int) -> list[list[NDArray[np.int32]]]:
    """The documents in parts: a merge takes each but the first from a pair of its own."""
    documents = documents_of(kind, generation)
    if kind == "build":
        return [documents]
    middle = len(documents) // 2
    return [documents[:1], documents[1:middle], documents[middle:]]


def expected_of(kind: str, generation: int) -> tuple[bytes, bytes]:
    """The bytes of both files, by the format."""
    documents = documents_of(kind, generation)
    lengths = np.array([len(document) for document in documents])
    ends = np.cumsum(lengths) * 4
    index = [
        HEADER.pack(b"MMIDIDX\0\0", 1, 4, len(documents), len(documents) + 1),
        lengths.astype("<i4").tobytes(),
        (ends - lengths * 4).astype("<i8").tobytes(),
        np.arange(len(documents) + 1, dtype="<i8").tobytes(),
    ]
    return np.concatenate(documents).astype("<i4").tobytes(), b"".join(index)


def write(folder: Path, kind: str, generation: int) -> None:
    """Writes a generation at `folder/data`; every other one has checksums."""
    own, *others = parts_of(kind, generation)
    with millrace.IndexedDatasetBuilder(
        folder / "data", np.int32, checksums=generation % 2 == 0
    ) as builder:
        for document in own:
            builder.add_document(document)
        for number in range(len(others)):
            builder.add_index(folder / "sources" / f"{generation}-{number}")


def write_sources(folder: Path, kind: str, generation: int) -> None:
    """The pairs that the generation merges, made before anything is killed."""
    (folder / "sources").mkdir(exist_ok=True)
    for number, documents in enumerate(parts_of(kind, generation)[1:]):
        with millrace.IndexedDatasetBuilder(
            folder / "sources" / f"{generation}-{number}", np.int32
        ) as builder:
            for document in documents:
                builder.add_document(document)


# ---- readers ----


def read_ours(folder: Path, kind: str, allowed: range) -> int:
    """The generation that millrace reads."""
    dataset = millrace.IndexedDataset(folder / "data", access=random.choice(["mmap", "file"]))
    data = dataset.reader.read(0, dataset.reader.size).tobytes()
    index = [
        HEADER.pack(b"MMIDIDX\0\0", 1, 4, len(dataset), dataset.num_documents + 1),
        dataset.sequence_lengths.tobytes(),
        dataset.sequence_pointers.tobytes(),
        dataset.document_indices.tobytes(),
    ]
    return generation_of(data, b"".join(index), kind, allowed, "millrace")


def read_plainly(folder: Path, kind: str, allowed: range) -> int | None:
    """The generation in data.bin and data.idx; None where there is no data.idx just now.

    While a writer works, two files cannot be opened at one instant: the index must be the same
    file before and after the tokens are opened.
    """
    bin_path, idx_path = folder / "data.bin", folder / "data.idx"
    with (
        contextlib.suppress(FileNotFoundError),
        open(idx_path, "rb") as index,
        open(bin_path, "rb") as data,
    ):
        if os.fstat(index.fileno()).st_ino != os.stat(idx_path).st_ino:
            return None
        return generation_of(data.read(), index.read(), kind, allowed, "a plain reader")
    return None


def generation_of(data: bytes, index: bytes, kind: str, allowed: range, reader: str) -> int:
    generation = int.from_bytes(data[:4], "little")
    if generation not in allowed:
        raise MixtureError(f"{reader} found generation {generation}, not one of {allowed}")
    expected = expected_of(kind, generation)
    for name, actual, wanted in zip(("data.bin", "data.idx"), (data, index), expected, strict=True):
        if actual != wanted:
            raise MixtureError(
                f"{reader} found {len(actual)} bytes of {name} that are not generation "
                f"{generation}'s {len(wanted)}"
            )
    return generation


def check_after_death(folder: Path, kind: str, done: int, started: int) -> int:
    """What may lie there when the writer is dead; returns the generation that is there."""
    allowed = range(done, started + 1)
    names = names_in(folder)
    unknown = {name for name in names - PAIR if not LEFTOVER.fullmatch(name)}
    if unknown:
        raise MixtureError(f"unknown names are left: {unknown}")
    generation = read_ours(folder, kind, allowed)
    if "data.idx" in names and read_plainly(folder, kind, allowed) != generation:
        raise MixtureError("the two readers found different generations")
    problems = verify([folder / "data"], threads=1)[0].problems
    if problems:
        raise MixtureError(f"verify, after a death with {sorted(names)}: {problems}")
    return generation


def check_next_run(folder: Path, kind: str, generation: int) -> None:
    """The next run succeeds, over whatever is left, and leaves nothing but the pair."""
    write_sources(folder, kind, generation)
    write(folder, kind, generation)
    wanted = {"data.bin", "data.idx"} | ({"data.info.json"} if generation % 2 == 0 else set())
    if names_in(folder) != wanted:
        raise MixtureError(f"a finished run left {sorted(names_in(folder))}")
    check_after_death(folder, kind, generation, generation)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name != "sources"}


# ---- writers, and their deaths ----


@contextlib.contextmanager
def forked(work: Callable[[int], None]) -> Iterator[tuple[int, int]]:
    """A process that runs `work(pipe)`: (its id, where it writes what it does). It dies here."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        status = 1
        try:
            work(writing)
            status = 0
        except BaseException as error:
            print(f"the writer failed: {type(error).__name__}: {error}", file=sys.stderr)
        finally:
            os._exit(status)
    os.close(writing)
    try:
        yield process, reading
    finally:
        os.close(reading)


def run_generations(folder: Path, kind: str, generations: range, pipe: int) -> None:
    for generation in generations:
        os.write(pipe, struct.pack("<i", generation))
        write(folder, kind, generation)
        os.write(pipe, struct.pack("<i", -generation))


def kill_at_random_moments(
    folder: Path, kind: str, kills: int, draw: random.Random, ahead: int = 24
) -> dict[str, int]:
    """Kills writers of one pair, `kills` times; returns how often readers saw what."""
    seen = {"old": 0, "new": 0, "reads": 0, "without .idx": 0}
    generation = 1
    check_next_run(folder, kind, generation)
    for _ in range(kills):
        for number in range(generation + 1, generation + ahead):
            write_sources(folder, kind, number)
        work = range(generation + 1, generation + ahead)
        with forked(lambda pipe, work=work: run_generations(folder, kind, work, pipe)) as (
            process,
            pipe,
        ):
            # Long enough for some generations, short enough never to meet the last.
            deadline = time.monotonic() + draw.random() ** 2 * 0.06
            last = generation
            while time.monotonic() < deadline:
                # What is seen never goes back.
                last = read_ours(folder, kind, range(last, work.stop))
                last = read_plainly(folder, kind, range(last, work.stop)) or last
                seen["reads"] += 1
            os.kill(process, signal.SIGKILL)
            _, status = os.waitpid(process, 0)
            said = struct.iter_unpack("<i", b"".join(iter(lambda: os.read(pipe, 4096), b"")))
        states = [value for (value,) in said]
        if not os.WIFSIGNALED(status) and states[-1:] != [1 - work.stop]:
            raise MixtureError(f"a writer failed (status {status}) in generation {states[-1:]}")
        done = max([-value for value in states if value < 0], default=generation)
        started = max([value for value in states if value > 0], default=generation)
        seen["without .idx"] += not (folder / "data.idx").exists()
        found = check_after_death(folder, kind, max(done, last), started)
        if started > done:
            seen["new" if found == started else "old"] += 1
        generation = found
        if draw.random() < 0.5:  # else the next writer meets what this one left, and dies as well
            generation += 1
            check_next_run(folder, kind, generation)
        for path in (folder / "sources").glob("*"):
            path.unlink()
    check_next_run(folder, kind, generation + 1)
    return seen


def kill_before_step(folder: Path, kind: str, generation: int, step: int) -> bool:
    """Writes a generation, and kills the writer before its n-th step; whether it was killed."""

    def work(pipe: int) -> None:
        left = [step]

        def hook(event: str, arguments: Any) -> None:
            if event in STEPS:
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        write(folder, kind, generation)

    with forked(work) as (process, _):
        _, status = os.waitpid(process, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0:
        raise MixtureError(f"a writer failed at step {step} of generation {generation}")
    return os.WIFSIGNALED(status)


def kill_before_every_step(
    folder: Path, kind: str, old: int, new: int, successors: int = 60
) -> int:
    """Replaces `old` by `new` and dies before each step in turn, and up to so many successors too.

    Returns how many writers died.
    """
    kills, step, was_killed = 0, 0, True
    while was_killed:
        check_next_run(folder, kind, old)
        write_sources(folder, kind, new)
        write_sources(folder, kind, new + 1)
        was_killed = kill_before_step(folder, kind, new, step)
        found = check_after_death(folder, kind, old if was_killed else new, new)
        # The next writer dies as well, a step later each time: while it cleans up, at first.
        second = 0
        while was_killed and second < successors:
            is_dead = kill_before_step(folder, kind, new + 1, second)
            found = check_after_death(folder, kind, found if is_dead else new + 1, new + 1)
            kills += is_dead
            if not is_dead:
                break
            second += 1 if second < 8 else 3
        kills += was_killed
        step += 1
        # Numbers only grow in a pair's life; here it starts again.
        for path in folder.iterdir():
            if path.is_file():
                path.unlink()
    return kills


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--successors", type=int, default=12, help="deaths after one before a step")
    parser.add_argument("--folder", help="where to work (its file system matters); else /tmp")
    options = parser.parse_args()
    import xxhash  # noqa: F401  # the writers' import would count as their steps

    started = time.monotonic()
    for place, kind in enumerate(KINDS):
        share = options.kills * (place + 1) // len(KINDS) - options.kills * place // len(KINDS)
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            draw = random.Random(f"{options.seed} {kind}")
            seen = kill_at_random_moments(Path(name), kind, share, draw)
        print(f"{kind}: {share} kills at random moments; {seen}", flush=True)
        for old, new in ((1, 2), (2, 3), (2, 4)):  # a sidecar comes, goes, and is replaced
            with tempfile.TemporaryDirectory(dir=options.folder) as name:
                kills = kill_before_every_step(Path(name), kind, old, new, options.successors)
            print(f"{kind}: {kills} kills before steps, generation {old} to {new}", flush=True)
    print(f"{time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
