"""kill -9 at any moment of a write: `python -m tests.store.kill --kills 200 --seed 1`.

A writer writes generations of one pair, or of several at once, each with other sizes and tokens,
and reports when it starts and when it is done. It builds them, merges, converts or splits other
pairs, or builds the pairs of several keys. It is killed at a random moment, or just before its n-th
step in the file system, for every n. Readers (millrace's, and a plain one of the format) look while
it works and after its death, and must find all of one generation in each pair, to the byte: the one
that was done last, or the one that was under way.
"""

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
from millrace.jobs import convert, split
from millrace.provenance import OriginsWriter
from millrace.store import finalize_together, verify
from tests.jobs.kills import KILLED, run_and_die

PAIRS = {
    "build": ("data",),
    "merge": ("data",),
    "convert": ("data",),
    "split": ("data_00000", "data_00001", "data_00002"),
    "keys": ("data_title", "data_text"),
}
KINDS = tuple(PAIRS)
HEADER = struct.Struct("<9sQBQQ")
NAME = re.compile(r"(data\w*)\.(bin|idx|info\.json|origins\.parquet)")
LEFTOVER = re.compile(
    r"data\w*\.((bin|idx|info\.json|origins\.parquet)(\.[0-9a-f]{12}\.tmp|\.new)|tmp\.lock)"
)

os.fsync = os.fstat  # a kill loses nothing that waits to be flushed


class MixtureError(AssertionError):
    """A reader saw a mixture of generations, or a wrong generation."""


# ---- generations ----


def documents_of(kind: str, generation: int, place: int) -> list[NDArray[np.int32]]:
    """The documents of a generation's pair: its number comes first, and the sizes differ.

    All shards of a split have the same number of documents.
    """
    draw = np.random.default_rng([KINDS.index(kind), generation])
    count, most = draw.integers(1, 40), draw.choice([5, 300, 20_000])
    lengths = np.random.default_rng([generation, place]).integers(0, most, count)
    head = np.array([generation], np.int32)
    return [head, *(np.full(length, generation, np.int32) for length in lengths)]


def sources_of(kind: str, generation: int) -> list[list[NDArray[np.int32]]]:
    """The documents of the pairs that a generation is made from."""
    if kind == "merge":
        documents = documents_of(kind, generation, 0)
        middle = len(documents) // 2
        return [documents[1:middle], documents[middle:]]
    if kind == "convert":
        return [documents_of(kind, generation, 0)]
    if kind == "split":
        places = range(len(PAIRS[kind]))
        return [[one for place in places for one in documents_of(kind, generation, place)]]
    return []


def expected_of(kind: str, generation: int, place: int) -> tuple[bytes, bytes]:
    """The bytes of both files, by the format."""
    documents = documents_of(kind, generation, place)
    lengths = np.array([len(document) for document in documents])
    pointers, numbers = (np.cumsum(lengths) - lengths) * 4, np.arange(len(documents) + 1)
    return np.concatenate(documents).astype("<i4").tobytes(), index_of(lengths, pointers, numbers)


def index_of(lengths: NDArray[Any], pointers: NDArray[Any], documents: NDArray[Any]) -> bytes:
    """The bytes of an index file."""
    header = HEADER.pack(b"MMIDIDX\0\0", 1, 4, len(lengths), len(documents))
    columns = lengths.astype("<i4"), pointers.astype("<i8"), documents.astype("<i8")
    return header + b"".join(column.tobytes() for column in columns)


def write(folder: Path, kind: str, generation: int) -> None:
    """Writes a generation at `folder/data...`; every other one has checksums."""
    checksums = generation % 2 == 0
    sources = [
        folder / "sources" / f"{generation}-{number}"
        for number in range(len(sources_of(kind, generation)))
    ]
    if kind == "convert":
        convert(sources[0], folder / "data", dtype=np.int32, checksums=checksums)
    elif kind == "split":
        size = len(documents_of(kind, generation, 0))
        split(sources[0], folder / "data", documents=size, checksums=checksums)
    else:
        builders = [
            millrace.IndexedDatasetBuilder(folder / name, np.int32, checksums=checksums)
            for name in PAIRS[kind]
        ]
        for place, builder in enumerate(builders):
            documents = documents_of(kind, generation, place)
            for document in documents[:1] if kind == "merge" else documents:
                builder.add_document(document)
        for source in sources:
            builders[0].add_index(source)
        finalize_together(builders)
        for place, name in enumerate(PAIRS[kind] if has_origins(kind, generation) else []):
            numbers = np.arange(len(documents_of(kind, generation, place)))
            with OriginsWriter(folder / name) as origins:
                origins.add([f"{kind}-{generation}"], 0 * numbers, numbers, numbers)


def has_origins(kind: str, generation: int) -> bool:
    """Whether a generation has a sidecar of origins."""
    return kind in ("build", "keys") and generation % 3 == 0


def write_sources(folder: Path, kind: str, generation: int) -> None:
    """Writes the pairs that the generation is made from, before anything is killed."""
    (folder / "sources").mkdir(exist_ok=True)
    dtype = np.int64 if kind == "convert" else np.int32
    for number, documents in enumerate(sources_of(kind, generation)):
        with millrace.IndexedDatasetBuilder(
            folder / "sources" / f"{generation}-{number}", dtype
        ) as builder:
            for document in documents:
                builder.add_document(document)


# ---- readers ----


def read_ours(folder: Path, kind: str, place: int, allowed: range) -> int:
    """The generation that millrace reads."""
    dataset = millrace.IndexedDataset(
        folder / PAIRS[kind][place], access=random.choice(["mmap", "file"])
    )
    data = dataset.reader.read(0, dataset.reader.size).tobytes()
    columns = dataset.sequence_lengths, dataset.sequence_pointers, dataset.document_indices
    return generation_of(data, index_of(*columns), kind, place, allowed, "millrace")


def read_plainly(folder: Path, kind: str, place: int, allowed: range) -> int | None:
    """The generation in PAIR.bin and PAIR.idx; None if there is no PAIR.idx now.

    While a writer works, two files cannot be opened at one instant: the index must be the same
    file before and after the tokens are opened.
    """
    prefix = folder / PAIRS[kind][place]
    bin_path, idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    with (
        contextlib.suppress(FileNotFoundError),
        open(idx_path, "rb") as index,
        open(bin_path, "rb") as data,
    ):
        if os.fstat(index.fileno()).st_ino != os.stat(idx_path).st_ino:
            return None
        return generation_of(data.read(), index.read(), kind, place, allowed, "a plain reader")
    return None


def generation_of(
    data: bytes, index: bytes, kind: str, place: int, allowed: range, reader: str
) -> int:
    generation = int.from_bytes(data[:4], "little")
    if generation not in allowed:
        raise MixtureError(f"{reader} found generation {generation}, not one of {allowed}")
    expected = expected_of(kind, generation, place)
    for name, actual, wanted in zip(("bin", "idx"), (data, index), expected, strict=True):
        if actual != wanted:
            raise MixtureError(
                f"{reader} found {len(actual)} bytes of {PAIRS[kind][place]}.{name} that are not "
                f"generation {generation}'s {len(wanted)}"
            )
    return generation


def check_after_death(folder: Path, kind: str, done: list[int], started: int) -> list[int]:
    """Checks the files after the writer's death; returns the generations of the pairs."""
    names = names_in(folder) - {"data_split.unfinished"}
    is_unfinished = names != names_in(folder)
    unknown = {name for name in names if not (NAME.fullmatch(name) or LEFTOVER.fullmatch(name))}
    if unknown:
        raise MixtureError(f"unknown names are left: {unknown}")
    there = []
    for place, name in enumerate(PAIRS[kind]):
        allowed = range(done[place], started + 1)
        generation = read_ours(folder, kind, place, allowed)
        if f"{name}.idx" in names and read_plainly(folder, kind, place, allowed) != generation:
            raise MixtureError("the two readers found different generations")
        problems = verify([folder / name], threads=1)[0].problems
        if problems and not (is_unfinished and "a split that did not end" in problems[0]):
            raise MixtureError(f"verify, after a death with {sorted(names)}: {problems}")
        there.append(generation)
    if kind == "split" and len({*there}) > 1 and not is_unfinished:
        raise MixtureError(f"nothing tells that the shards are of {there}")
    return there


def check_next_run(folder: Path, kind: str, generation: int) -> list[int]:
    """Checks that the next run succeeds over any leftovers, and only leaves its pairs."""
    write_sources(folder, kind, generation)
    write(folder, kind, generation)
    suffixes = ["bin", "idx", *["info.json"] * (generation % 2 == 0)]
    if has_origins(kind, generation):
        suffixes.append("origins.parquet")
    if names_in(folder) != {f"{name}.{suffix}" for name in PAIRS[kind] for suffix in suffixes}:
        raise MixtureError(f"a finished run left {sorted(names_in(folder))}")
    return check_after_death(folder, kind, [generation] * len(PAIRS[kind]), generation)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name != "sources"}


# ---- writers, and their deaths ----


@contextlib.contextmanager
def forked(work: Callable[[int], None]) -> Iterator[tuple[int, int]]:
    """A process that runs `work(pipe)`: (its id, the end of the pipe to read from)."""
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
) -> None:
    """Kills `kills` writers, and reads while they work and when they are dead."""
    there = check_next_run(folder, kind, 1)
    places = range(len(there))
    for _ in range(kills):
        work = range(max(there) + 1, max(there) + ahead)
        for number in work:
            write_sources(folder, kind, number)
        with forked(lambda pipe, work=work: run_generations(folder, kind, work, pipe)) as (
            process,
            pipe,
        ):
            # Long enough for some generations, short enough never to meet the last.
            deadline = time.monotonic() + draw.random() ** 2 * 0.06 * len(there)
            last = list(there)
            while time.monotonic() < deadline:
                for place in places:  # what is seen never goes back
                    last[place] = read_ours(folder, kind, place, range(last[place], work.stop))
                    allowed = range(last[place], work.stop)
                    last[place] = read_plainly(folder, kind, place, allowed) or last[place]
            os.kill(process, signal.SIGKILL)
            _, status = os.waitpid(process, 0)
            said = struct.iter_unpack("<i", b"".join(iter(lambda: os.read(pipe, 4096), b"")))
        states = [value for (value,) in said]
        if not os.WIFSIGNALED(status) and states[-1:] != [1 - work.stop]:
            raise MixtureError(f"a writer failed (status {status}) in generation {states[-1:]}")
        done = max([-value for value in states if value < 0], default=0)
        started = max([value for value in states if value > 0], default=max(there))
        least = [max(done, last[place]) for place in places]
        there = check_after_death(folder, kind, least, started)
        if draw.random() < 0.5:  # else the next writer meets what this one left, and dies as well
            there = check_next_run(folder, kind, max(there) + 1)
        for path in (folder / "sources").glob("*"):
            path.unlink()
    check_next_run(folder, kind, max(there) + 1)


def kill_before_step(folder: Path, kind: str, generation: int, step: int) -> bool:
    """Writes a generation, and kills the writer before a step; returns whether it was killed."""
    if (child := os.fork()) == 0:
        run_and_die(lambda: write(folder, kind, generation), step)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status not in (0, KILLED):
        raise MixtureError(f"a writer failed at step {step} of generation {generation}")
    return status == KILLED


def kill_before_every_step(
    folder: Path, kind: str, old: int, new: int, successors: int = 60
) -> int:
    """Replaces `old` by `new` and dies before each step in turn, as do up to `successors` others.

    Returns how many writers died.
    """
    kills, step, was_killed = 0, 0, True
    while was_killed:
        there = check_next_run(folder, kind, old)
        write_sources(folder, kind, new)
        write_sources(folder, kind, new + 1)
        was_killed = kill_before_step(folder, kind, new, step)
        there = check_after_death(folder, kind, there if was_killed else [new] * len(there), new)
        # The next writer dies as well, a step later each time: while it cleans up, at first.
        second = 0
        while was_killed and second < successors:
            is_dead = kill_before_step(folder, kind, new + 1, second)
            least = there if is_dead else [new + 1] * len(there)
            there = check_after_death(folder, kind, least, new + 1)
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
    started = time.monotonic()
    for place, kind in enumerate(KINDS):
        share = options.kills * (place + 1) // len(KINDS) - options.kills * place // len(KINDS)
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            draw = random.Random(f"{options.seed} {kind}")
            kill_at_random_moments(Path(name), kind, share, draw)
        print(f"{kind}: {share} kills at random moments", flush=True)
        for old, new in ((1, 2), (2, 3), (2, 4), (3, 4)):  # sidecars come, go, and are replaced
            with tempfile.TemporaryDirectory(dir=options.folder) as name:
                kills = kill_before_every_step(Path(name), kind, old, new, options.successors)
            print(f"{kind}: {kills} kills before steps, generation {old} to {new}", flush=True)
    print(f"{time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
