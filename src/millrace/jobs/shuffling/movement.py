"""The tasks of a shuffle: those to do, those done before, and their records."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from millrace.interrupts import interruptible
from millrace.jobs.engine import Executor, Journal, Task, run_local
from millrace.jobs.progress import Progress
from millrace.jobs.shuffling.memory import MemoryShuffle
from millrace.jobs.shuffling.plan import Plan, in_units
from millrace.jobs.shuffling.tasks import Function, Work, write_run, write_shard

Records = dict[int, dict[str, Any]]


class Movement:
    """Writes the shards of a job into its journal.

    Args:
        journal: The journal. The task of a shard has the number of the shard; the tasks of the runs
            follow.
        work: What every task knows.
        plan: The plan.
        engine: "local" or "ray".
        show_progress: Whether to show the phases on stderr.

    Attributes:
        num_done, num_kept: Number of tasks that ran now, and in an earlier run.
    """

    def __init__(
        self, journal: Journal, work: Work, plan: Plan, *, engine: str, show_progress: bool
    ) -> None:
        self._journal, self._work, self._plan = journal, work, plan
        self._engine, self._show_progress = engine, show_progress
        self.num_done = self.num_kept = 0

    def move(self) -> list[dict[str, Any]]:
        """Runs all tasks that are not done; the record of each shard."""
        shards = range(self._work.num_shards)
        records = self._earlier_records(shards)
        missing = [shard for shard in shards if shard not in records]
        if missing and self._plan.name == "memory":
            records.update(self._write_from_memory(missing))
        elif missing:
            if self._work.runs is not None:
                self._write_runs()
            label = "phase 4: write shards"
            records.update(self._run(write_shard, label, missing, first=0, unit="shard"))
        elif self._work.runs is not None:
            self.num_kept += len(self._work.runs) - 1
        return [records[shard] for shard in shards]

    def _write_runs(self) -> None:
        assert self._work.runs is not None
        first, count = self._work.num_shards, len(self._work.runs) - 1
        records = self._earlier_records(range(first, first + count))
        runs = [run for run in range(count) if first + run not in records]
        self._run(write_run, "phase 3: sort runs", runs, first=first, unit="run")

    def _run(
        self, function: Function, label: str, numbers: Sequence[int], *, first: int, unit: str
    ) -> Records:
        """Runs a function on tasks; the record of each.

        Args:
            function: `write_run` or `write_shard`.
            label: What the phase is called.
            numbers: Numbers of the runs or shards.
            first: Number of the task of run or shard 0.
            unit: What a task writes.
        """

        def tasks() -> Iterator[Task]:
            for number in numbers:
                self._journal.new_folder_of(first + number)
                yield Task(first + number, number, f"{unit} {number}")

        records: Records = {}
        with contextlib.ExitStack() as stack:
            progress = stack.enter_context(self._progress(label, len(numbers)))
            run = _executor(self._engine, progress)
            results = run(function, self._work, tasks(), workers=self._plan.workers)
            stack.enter_context(contextlib.closing(results))
            num_bytes = 0
            try:
                for task, record in results:
                    records[task.payload] = record
                    num_bytes += record["bytes"]
                    self.num_done += 1
                    progress.update(
                        len(records),
                        f"{len(records):,} of {len(numbers):,} {unit}s  {in_units(num_bytes)}",
                    )
            finally:
                self._work.buffer.drop()
        return records

    def _write_from_memory(self, shards: Sequence[int]) -> Records:
        for shard in shards:
            self._journal.new_folder_of(shard)
        tasks = [Task(shard, shard, f"shard {shard}") for shard in shards]
        memory = MemoryShuffle(self._work, tasks, threads=self._plan.workers)
        with self._progress("phase 3: read", memory.num_bytes) as progress:
            num_bytes = 0
            for size in memory.read():
                num_bytes += size
                progress.update(num_bytes, in_units(num_bytes))
        records: Records = {}
        with self._progress("phase 4: write shards", len(shards)) as progress:
            for task, record in memory.write():
                records[task.payload] = record
                self.num_done += 1
                progress.update(len(records), f"{len(records):,} of {len(shards):,} shards")
        return records

    def _progress(self, label: str, total: int) -> Progress:
        return Progress(label, total, enabled=self._show_progress)

    def _earlier_records(self, numbers: range) -> Records:
        """The records of tasks that an earlier run has done; reads their files."""
        earlier = sorted(self._journal.numbers().intersection(numbers))
        records: Records = {}
        with self._progress("check what is done", len(earlier)) as progress:
            for count, number in enumerate(earlier):
                with interruptible():
                    record = self._journal.record(number)
                if record is not None:
                    records[number] = record
                progress.update(count)
        self.num_kept += len(records)
        return records


def _executor(engine: str, progress: Progress) -> Executor:
    if engine == "local":
        return run_local
    from millrace.jobs.engine.ray import run_ray

    return functools.partial(run_ray, note=progress.note)
