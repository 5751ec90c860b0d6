"""Many starts at one instant: `python -m tests.run.race --processes 64 --kills 3 --seed 1`.

So many processes build the same datasets into one empty cache folder. Each says when it begins a
set, when it has built it, and at last the digest of all arrays and of the first samples. Builders
are killed with SIGKILL while they hold the lock: at a random moment of the build, before one of the
renames that publish the set, or when it is published and the lock still held. The others must
finish without them. Then

    a process began only what nobody had built, and what nobody alive was building,
    each set was built to its end once,
    all processes that live found the same arrays and samples, which are those built in memory,
    nothing is left in the folder but whole sets and a manifest.

With --no-flock the processes find no locks, so that they all build at once; then a set is built by
several, and what the dead have left stays. The rest must hold.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from millrace import DatasetConfig, Datasets, IndexedDatasetBuilder, build_datasets
from millrace.cache import arrays
from millrace.files import TMP, file_lock
from tests.no_flock import no_flock

FORK = multiprocessing.get_context("fork")
PATIENCE = 300.0  # seconds until a process that says nothing hangs


class RaceError(AssertionError):
    """Processes that do not agree, a set that was built twice, or a hang."""


@dataclasses.dataclass
class Report:
    """What happened.

    Attributes:
        kills: builders that were killed, each while it held a lock.
        finished: the processes that lived.
        sets: of arrays in the folder.
        builds: of sets, to their end: without locks, more than there are sets.
        stages: where the builders were killed.
    """

    kills: int
    finished: int
    sets: int
    builds: int
    stages: list[int]


# ---- data ----


def write_data(folder: Path, seed: int, num_files: int, num_documents: int) -> DatasetConfig:
    draw = np.random.default_rng(seed)
    prefixes = []
    for number in range(num_files):
        prefixes.append(str(folder / f"data-{number}"))
        with IndexedDatasetBuilder(prefixes[-1], np.uint16) as builder:
            for length in draw.integers(0, 60, num_documents):
                builder.add_document(draw.integers(0, 1000, length))
    return DatasetConfig(
        sequence_length=32,
        seed=seed,
        num_samples=(num_files * num_documents * 2, num_documents, num_documents),
        blend=(prefixes, draw.uniform(0.5, 1, num_files).tolist()),
        split="8,1,1",
        num_threads=2,
        cache=folder / "cache",
    )


def digest_of(datasets: Datasets) -> str:
    """Of all arrays, and of the first samples."""
    digest = hashlib.sha256()
    for blend in datasets:
        assert blend is not None
        assert not isinstance(blend, list)
        for array in (blend.dataset_index, blend.dataset_sample_index):
            digest.update(array.tobytes())
        for part in blend.datasets:
            for field in dataclasses.fields(part.indices):
                digest.update(getattr(part.indices, field.name).tobytes())
        for array in blend.batch(np.arange(16)).values():
            digest.update(array.tobytes())
    return digest.hexdigest()


# ---- one process ----

# Where a builder waits for its death: 0 is behind the build, 1 to 6 before the renames of a blend's
# five arrays and of its record, 7 behind them all.
STAGES = range(8)
PUBLISHED = STAGES[-1]


class Builder:
    """A process that builds when the gate opens, and says what it does.

    Args:
        number: of the process.
        gate: an event.
        said: the end of a pipe.
        stages: where each death happens.
        deaths: how many are taken.
    """

    def __init__(self, number: int, gate: Any, said: Any, stages: list[int], deaths: Any) -> None:
        self.number, self.gate, self.said = number, gate, said
        self.stages, self.deaths = stages, deaths
        self.place = 0
        self.is_doomed = False
        self.is_publishing = False
        self.publish = arrays._publish

    def run(self, config: DatasetConfig) -> None:
        sys.addaudithook(self.hook)
        self.gate.wait()
        try:
            with mock.patch.object(arrays, "_publish", self.watch):
                self.say("done", digest_of(build_datasets(config)))
        except BaseException as error:
            self.say("failed", f"{type(error).__name__}: {error}")
        os._exit(0)

    def say(self, kind: str, value: str) -> None:
        self.said.send((kind, self.number, value))

    def watch(self, folder: str, name: str, key: Any, layout: Any, build: Any) -> Any:
        """In place of `_publish`."""

        def build_and_wait(writers: Mapping[str, arrays.ArrayWriter]) -> None:
            self.say("begins", name)
            self.place = 0
            self.is_doomed = self.takes_death()
            if self.is_doomed:
                self.say("doomed", name)
            build(writers)
            self.is_publishing = True
            self.wait_if(self.is_doomed)

        result = self.publish(folder, name, key, layout, build_and_wait)
        self.is_publishing = False
        self.say("built", name)
        self.place = PUBLISHED
        self.wait_if(self.takes_death())
        return result

    def hook(self, event: str, arguments: Any) -> None:
        if event == "os.rename" and self.is_publishing:
            self.place += 1
            self.wait_if(self.takes_death())

    def takes_death(self) -> bool:
        """Whether this is where the next death happens; it is then this process's."""
        with self.deaths.get_lock():
            number = self.deaths.value
            is_here = number < len(self.stages) and self.place == self.stages[number]
            self.deaths.value += is_here
        return is_here

    def wait_if(self, is_doomed: bool) -> None:
        if is_doomed:
            self.say("waits", str(self.place))
            while True:
                signal.pause()


@contextlib.contextmanager
def started(
    count: int, config: DatasetConfig, stages: list[int], deaths: Any
) -> Iterator[tuple[dict[int, Any], dict[int, Any]]]:
    """Processes that start at one instant: (themselves by number, the ends of their pipes)."""
    gate = FORK.Event()
    made: dict[int, Any] = {}
    pipes: dict[int, Any] = {}
    try:
        for number in range(count):
            pipes[number], theirs = FORK.Pipe(duplex=False)
            builder = Builder(number, gate, theirs, stages, deaths)
            made[number] = FORK.Process(target=builder.run, args=(config,))
            made[number].start()
            theirs.close()
        gate.set()
        yield made, pipes
    finally:
        for process in made.values():
            process.kill()
            process.join()


# ---- the race ----


@dataclasses.dataclass
class Referee:
    """What has been said so far.

    Attributes:
        has_locks: so that one process alone builds a set.
    """

    has_locks: bool
    begun: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    built: Counter[str] = dataclasses.field(default_factory=Counter)
    digests: dict[int, str] = dataclasses.field(default_factory=dict)
    dead: set[int] = dataclasses.field(default_factory=set)

    def hear(self, kind: str, number: int, value: str) -> None:
        if kind == "begins":
            others = [n for n, name in self.begun if name == value and n not in self.dead]
            if self.has_locks and (self.built[value] > 0 or others):
                raise RaceError(
                    f"process {number} begins the set {value}, which is built "
                    f"{self.built[value]} times, and is being built by {others}"
                )
            self.begun.append((number, value))
        elif kind == "built":
            self.built[value] += 1
        elif kind == "done":
            self.digests[number] = value
        elif kind == "failed":
            raise RaceError(f"process {number} failed: {value}")


def race(folder: Path, processes: int, kills: int, seed: int, documents: int = 2000) -> Report:
    """Runs it, and checks the top's promises."""
    config = write_data(folder, seed, num_files=3, num_documents=documents)
    expected = digest_of(build_datasets(dataclasses.replace(config, cache=None)))
    draw = random.Random(seed)
    stages = draw_stages(draw, kills)
    deaths = FORK.Value("i", 0)
    with file_lock(str(folder / "lock")) as has_locks:
        referee = Referee(has_locks)
    with started(processes, config, stages, deaths) as (made, pipes):
        for kind, number, value in listen(pipes):
            referee.hear(kind, number, value)
            if kind == "doomed":
                time.sleep(draw.random() * 0.05)
            if kind in ("doomed", "waits") and number not in referee.dead:
                referee.dead.add(number)
                made[number].kill()
                made[number].join()
    check_end(processes, referee, expected)
    sets = check_folder(Path(str(config.cache)), referee, stages)
    builds = sum(referee.built.values())
    return Report(len(referee.dead), len(referee.digests), sets, builds, stages)


def draw_stages(draw: random.Random, kills: int) -> list[int]:
    """Where the deaths happen; of the three sets, one at least is not published by the dead."""
    stages: list[int] = []
    for _ in range(kills):
        stage = draw.choice(STAGES)
        stages.append(0 if stage == PUBLISHED and stages.count(PUBLISHED) == 2 else stage)
    return stages


def listen(pipes: Mapping[int, Any]) -> Iterator[tuple[str, int, str]]:
    """What the processes say, until each has ended."""
    open_pipes = dict(pipes)
    while open_pipes:
        ready = multiprocessing.connection.wait(list(open_pipes.values()), PATIENCE)
        if not ready:
            raise RaceError(f"a hang: {sorted(open_pipes)} have said nothing for {PATIENCE} s")
        for number in [number for number, pipe in open_pipes.items() if pipe in ready]:
            try:
                yield open_pipes[number].recv()
            except EOFError:
                open_pipes.pop(number).close()


def check_end(processes: int, referee: Referee, expected: str) -> None:
    missing = set(range(processes)) - referee.dead - set(referee.digests)
    if missing:
        raise RaceError(f"the processes {sorted(missing)} ended without a word")
    wrong = [number for number, digest in referee.digests.items() if digest != expected]
    if wrong:
        raise RaceError(f"the processes {wrong} found other arrays or samples than in memory")


def check_folder(cache: Path, referee: Referee, stages: list[int]) -> int:
    """Whole sets and a manifest, each set built once; returns the number of sets."""
    names = {path.stem for path in cache.glob("*.json") if not path.name.startswith("run-")}
    is_once = dict(referee.built) == dict.fromkeys(names, 1) or not referee.has_locks
    if set(referee.built) != names or not is_once or len(names) != 3:
        raise RaceError(f"there are the sets {sorted(names)}; built were {dict(referee.built)}")
    in_vain = sum(stage != PUBLISHED for stage in stages)
    is_once = len(referee.begun) == len(names) + in_vain or not referee.has_locks
    if len(referee.dead) != len(stages) or not is_once:
        raise RaceError(f"{referee.begun} were begun for {len(names)} sets and {stages} deaths")
    for name in names:
        found = arrays.load(str(cache), name)
        if found is None or found.damage(contents=True):
            raise RaceError(f"the set {name} is damaged: {found and found.damage(contents=True)}")
    # Who dies behind the last rename leaves a lock that nobody may need any more.
    known = {".json", ".npy"} | ({".lock"} if PUBLISHED in stages else set())
    if stages and not referee.has_locks:
        known |= {TMP, ".lock"}
    left = sorted(path.name for path in cache.iterdir() if path.suffix not in known)
    if left or len(list(cache.glob("run-*.json"))) != 1:
        raise RaceError(f"these files are left: {left}, or there is not one manifest")
    return len(names)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, default=64)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--documents", type=int, default=2000, help="in each of three files")
    parser.add_argument("--folder", help="where to work (its file system matters); else /tmp")
    parser.add_argument("--no-flock", action="store_true", help="as on a file system without locks")
    options = parser.parse_args()
    if options.no_flock:
        with tempfile.TemporaryDirectory() as name:
            again = [sys.executable, "-m", "tests.run.race", *sys.argv[1:]]
            again.remove("--no-flock")
            return subprocess.run(again, env=no_flock(Path(name))).returncode
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        report = race(Path(name), options.processes, options.kills, options.seed, options.documents)
    print(
        f"{report.finished} of {options.processes} processes agree on {report.sets} sets, built "
        f"{report.builds} times; {report.kills} builders were killed, at the stages "
        f"{report.stages}; {time.monotonic() - began:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
