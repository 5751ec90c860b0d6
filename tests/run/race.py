"""Many simultaneous starts: `python -m tests.run.race 64 3 1` (processes, kills, seed).

The processes build the same datasets into one empty cache folder. Each reports when it begins a
set, when it has built the set, and at the end the digest of all arrays and of the first samples.
Builders are killed with SIGKILL while they hold the lock: at a random moment of the build, before
one of the renames that publish the set, or when the set is published and the lock is still held.
The other processes must finish. The race then checks that

    a process began a set only if no process had built it, and no living process was building it,
    each set was built completely once,
    all surviving processes have the same arrays and samples, equal to those built in memory,
    only complete sets and one manifest are left in the folder.

On a file system without locks all build at once: several build the same set, and leftovers of
killed processes stay. The other checks must hold.
"""

import dataclasses
import hashlib
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from millrace import DatasetConfig, Datasets, build_datasets
from millrace.cache import arrays
from millrace.files import TMP, file_lock
from tests.run.test_build import contents, write

FORK = multiprocessing.get_context("fork")
PATIENCE = 300.0  # seconds of silence after which a process counts as hanging


# ---- data ----


def write_data(folder: Path, seed: int, num_files: int, num_documents: int) -> DatasetConfig:
    draw = np.random.default_rng(seed)
    files = enumerate(draw.integers(0, 60, (num_files, num_documents)))
    prefixes = [write(folder / f"data-{number}", lengths, number) for number, lengths in files]
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
    """A digest of all arrays and of the first samples."""
    return hashlib.sha256(repr(contents(datasets)).encode()).hexdigest()


# ---- one process ----

# The stage at which a builder waits to be killed: 0 is after the build, 1 to 6 are before the
# renames of a blend's five arrays and of its record, 7 is after all renames.
STAGES = range(8)
PUBLISHED = STAGES[-1]


class Builder:
    """A process that builds when the gate opens, and reports what it does.

    `stages` are those of all deaths; `deaths` counts the deaths already assigned to processes.
    """

    def __init__(self, number: int, gate: Any, pipe: Any, stages: list[int], deaths: Any) -> None:
        self.number, self.gate, self.pipe, self.stages = number, gate, pipe, stages
        self.deaths = deaths
        self.place, self.is_publishing = 0, False
        self.publish = arrays._publish

    def run(self, config: DatasetConfig) -> None:
        sys.addaudithook(self.hook)
        self.gate.wait()
        try:
            with mock.patch.object(arrays, "_publish", self.watch):
                self.report("done", digest_of(build_datasets(config)))
        except BaseException as error:
            self.report("failed", f"{type(error).__name__}: {error}")
        os._exit(0)

    def report(self, kind: str, value: str) -> None:
        self.pipe.send((kind, self.number, value))

    def watch(self, folder: str, name: str, key: Any, layout: Any, build: Any) -> Any:
        """Replaces `_publish`: calls it, and reports."""

        def build_and_wait(writers: Mapping[str, arrays.ArrayWriter]) -> None:
            self.report("begins", name)
            self.place = 0
            is_doomed = self.takes_death()
            if is_doomed:
                self.report("doomed", name)
            build(writers)
            self.is_publishing = True
            self.wait_if(is_doomed)

        result = self.publish(folder, name, key, layout, build_and_wait)
        self.is_publishing = False
        self.report("built", name)
        self.place = PUBLISHED
        self.wait_if(self.takes_death())
        return result

    def hook(self, event: str, arguments: Any) -> None:
        if event == "os.rename" and self.is_publishing:
            self.place += 1
            self.wait_if(self.takes_death())

    def takes_death(self) -> bool:
        """Whether the next death happens at this stage; this process then takes it."""
        with self.deaths.get_lock():
            number = self.deaths.value
            is_here = number < len(self.stages) and self.place == self.stages[number]
            self.deaths.value += is_here
        return is_here

    def wait_if(self, is_doomed: bool) -> None:
        if is_doomed:
            self.report("waits", str(self.place))
            while True:
                signal.pause()


# ---- the race ----


@dataclasses.dataclass
class Referee:
    """Collects the reports of the processes and checks them: which process began which set, how
    often each set was built, the digests of those that survive, and who was killed."""

    has_locks: bool
    begun: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    built: Counter[str] = dataclasses.field(default_factory=Counter)
    digests: dict[int, str] = dataclasses.field(default_factory=dict)
    dead: set[int] = dataclasses.field(default_factory=set)

    def take(self, kind: str, number: int, value: str) -> None:
        assert kind != "failed", f"process {number} failed: {value}"
        if kind == "begins":
            others = [n for n, name in self.begun if name == value and n not in self.dead]
            assert not self.has_locks or (self.built[value] == 0 and not others), (
                f"process {number} begins the set {value}, which is built {self.built[value]} "
                f"times, and is being built by {others}"
            )
            self.begun.append((number, value))
        elif kind == "built":
            self.built[value] += 1
        elif kind == "done":
            self.digests[number] = value

    def check_folder(self, cache: Path, stages: list[int]) -> None:
        """Checks for three complete sets, each built once, and a manifest."""
        names = {path.stem for path in cache.glob("*.json") if not path.name.startswith("run-")}
        assert len(names) == 3, names
        assert set(self.built) == names, f"the sets are {names}, and the builds {self.built}"
        in_vain = sum(stage != PUBLISHED for stage in stages)
        assert len(self.dead) == len(stages)
        if self.has_locks:
            assert set(self.built.values()) == {1}, self.built
            assert len(self.begun) == len(names) + in_vain, f"{self.begun}, deaths at {stages}"
        for name in names:
            array_set = arrays.load(str(cache), name)
            assert array_set is not None, name
            assert array_set.damage(contents=True) == []
        # A builder killed after the last rename leaves a lock file that no process may need again.
        known = {".json", ".npy"} | ({".lock"} if PUBLISHED in stages else set())
        if stages and not self.has_locks:
            known |= {TMP, ".lock"}
        assert [path for path in cache.iterdir() if path.suffix not in known] == []
        assert len(list(cache.glob("run-*.json"))) == 1


def race(
    folder: Path, processes: int, kills: int, seed: int, documents: int = 2000
) -> tuple[list[int], Referee]:
    """Runs a race and checks what the top of this module promises; the stages of the kills."""
    config = write_data(folder, seed, num_files=3, num_documents=documents)
    expected = digest_of(build_datasets(dataclasses.replace(config, cache=None)))
    draw = random.Random(seed)
    stages: list[int] = []
    for stage in (draw.choice(STAGES) for _ in range(kills)):
        # Killed builders publish at most two of the three sets.
        stages.append(0 if stage == PUBLISHED and stages.count(PUBLISHED) == 2 else stage)
    deaths = FORK.Value("i", 0)
    with file_lock(str(folder / "lock")) as has_locks:
        referee = Referee(has_locks)
    gate, children, pipes = FORK.Event(), dict[int, Any](), dict[int, Any]()
    for number in range(processes):
        pipes[number], sender = FORK.Pipe(duplex=False)
        builder = Builder(number, gate, sender, stages, deaths)
        children[number] = FORK.Process(target=builder.run, args=(config,), daemon=True)
        children[number].start()
        sender.close()
    gate.set()
    for kind, number, value in listen(pipes):
        referee.take(kind, number, value)
        if kind == "doomed":
            time.sleep(draw.random() * 0.05)
        if kind in ("doomed", "waits") and number not in referee.dead:
            referee.dead.add(number)
            children[number].kill()
            children[number].join()
    assert {*referee.digests} == {*range(processes)} - referee.dead, "some ended without a report"
    assert {*referee.digests.values()} == {expected}
    referee.check_folder(Path(str(config.cache)), stages)
    return stages, referee


def listen(pipes: Mapping[int, Any]) -> Iterator[tuple[str, int, str]]:
    """Yields the reports of the processes until all have ended."""
    open_pipes = dict(pipes)
    while open_pipes:
        ready = multiprocessing.connection.wait(list(open_pipes.values()), PATIENCE)
        assert ready, f"a hang: {sorted(open_pipes)} were silent for {PATIENCE} s"
        for number in [number for number, pipe in open_pipes.items() if pipe in ready]:
            try:
                yield open_pipes[number].recv()
            except EOFError:
                open_pipes.pop(number).close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:  # TMPDIR selects the file system
        stages, referee = race(Path(name), *map(int, sys.argv[1:]))
    print(
        f"{len(referee.digests)} processes agree on 3 sets, built {sum(referee.built.values())} "
        f"times; builders were killed at the stages {stages}"
    )
