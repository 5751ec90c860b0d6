"""The tasks of a shuffle: those to do, those done before, and their records."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from millrace.engine import Executor, Journal, Task, run_local
from millrace.engine.progress import Progress
from millrace.interrupts import interruptible
from millrace.jobs.shuffling.shard_work import Phase, Work
from millrace.shuffling.memory_budget import in_units

Records = dict[int, dict[str, Any]]


class Movement:
    """Writes the shards of a job into its journal.

    Args:
        journal: The journal.
        work: What every task knows.
        workers: Number of workers.
        engine: "local" or "ray".
        show_progress: Whether to show the phases on stderr.

    Attributes:
        num_done, num_kept: Number of tasks that ran now, and in an earlier run.
    """

    def __init__(
        self, journal: Journal, work: Work, *, workers: int, engine: str, show_progress: bool
    ) -> None:
        self._journal, self._work, self._workers = journal, work, workers
        self._engine, self._show_progress = engine, show_progress
        self.num_done = self.num_kept = 0

    def move(self) -> list[dict[str, Any]]:
        """Runs all tasks that are not done; the record of each shard."""
        *first, last = self._work.phases()
        records = self._earlier_records(last)
        if len(records) < last.num_tasks:
            for number, phase in enumerate(first, 3):
                self._run(phase, self._earlier_records(phase), f"phase {number}")
            records.update(self._run(last, records, "phase 4"))
        else:
            self.num_kept += sum(phase.num_tasks for phase in first)
        return [records[shard] for shard in range(last.num_tasks)]

    def _run(self, phase: Phase, earlier: Records, label: str) -> Records:
        """Runs the tasks of a phase that are not done; the record of each."""
        numbers = [number for number in range(phase.num_tasks) if number not in earlier]

        def tasks() -> Iterator[Task]:
            for number in numbers:
                self._journal.new_folder_of(phase.first_task + number)
                yield Task(phase.first_task + number, number, f"{phase.unit} {number}")

        records: Records = {}
        with contextlib.ExitStack() as stack:
            progress = stack.enter_context(self._progress(f"{label}: {phase.label}", len(numbers)))
            run = _executor(self._engine, progress)
            results = run(phase.function, self._work, tasks(), workers=self._workers)
            stack.enter_context(contextlib.closing(results))
            num_bytes = 0
            try:
                for task, record in results:
                    records[task.payload] = record
                    num_bytes += record["bytes"]
                    self.num_done += 1
                    progress.update(
                        len(records),
                        f"{len(records):,} of {len(numbers):,} {phase.unit}s  "
                        f"{in_units(num_bytes)}",
                    )
            finally:
                self._work.buffer.drop()
        return records

    def _progress(self, label: str, total: int) -> Progress:
        return Progress(label, total, enabled=self._show_progress)

    def _earlier_records(self, phase: Phase) -> Records:
        """The records of tasks that an earlier run has done; reads their files."""
        numbers = range(phase.first_task, phase.first_task + phase.num_tasks)
        earlier = sorted(self._journal.numbers().intersection(numbers))
        records: Records = {}
        with self._progress("check what is done", len(earlier)) as progress:
            for count, number in enumerate(earlier):
                with interruptible():
                    record = self._journal.record(number)
                if record is not None:
                    records[number - phase.first_task] = record
                progress.update(count)
        self.num_kept += len(records)
        return records


def _executor(engine: str, progress: Progress) -> Executor:
    if engine == "local":
        return run_local
    from millrace.engine.ray import run_ray

    return functools.partial(run_ray, note=progress.note)
