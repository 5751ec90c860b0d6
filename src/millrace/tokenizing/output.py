"""The output of a tokenise job: finished tasks become the final files."""

import contextlib
import io
import itertools
import json
import operator
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from millrace.cache.loss_files import write_loss_ranges
from millrace.engine import Done
from millrace.files import flush_to_disk
from millrace.interrupts import interruptible
from millrace.provenance import OriginsWriter
from millrace.store import IndexedDatasetBuilder, finalize_together
from millrace.text import Part, first_line_of
from millrace.tokenizing.chunk import ORIGINS, REJECTS, UNTRAINED, prefix_of
from millrace.tokenizing.tokenize_options import TokenizeOptions

_SHOWN_REJECTS = 20


class _Task(NamedTuple):
    """A finished task: folder, source and first line of each part, documents before it."""

    folder: str
    sources: list[str]
    first_lines: list[int]
    documents_before: int

    def open(self, name: str) -> io.BufferedReader:
        return open(os.path.join(self.folder, name), "rb")


class Output:
    """The final pairs while they are built, one for each key.

    Tasks are appended in their order; with partitions, which change the order, at the end. The
    counts are of what was appended: `num_tokens` for each key, `num_bytes_done` of this run's
    tasks. `rejects` are the first rejected lines: file, line, byte offset and reason. `report` has
    the counts of a row encoder, `loss_ranges` the tokens that it does not train on, of each task.
    """

    def __init__(self, options: TokenizeOptions, stack: contextlib.ExitStack, scratch: str) -> None:
        self._options, dtype = options, options.dtype
        self.builders = [
            stack.enter_context(IndexedDatasetBuilder(prefix, dtype, checksums=options.checksums))
            for prefix in options.prefixes.values()
        ]
        with_origins = self.builders if options.provenance != "none" else []
        self._origins = [OriginsWriter(builder.prefix) for builder in with_origins]
        self._quarantine: Any = None
        if options.on_error == "quarantine":
            path = os.path.join(scratch, "quarantine.jsonl")
            self._quarantine = stack.enter_context(open(path, "wb"))  # noqa: SIM115
        self.loss_ranges = [np.empty((0, 3), np.int32)]
        self._next_line = "", 0  # source of the last part, and the line after it
        self._tasks: list[_Task] = []
        self.num_documents = self.num_bytes = self.num_bytes_done = self.num_rejects = 0
        self.num_tokens = [0] * len(self.builders)
        self.rejects: list[dict[str, Any]] = []
        self.report: Counter[str] = Counter()

    def append(self, done: Done) -> None:
        record, parts = done.record, done.task.payload.parts
        first_lines = list(map(self._first_line, parts, record["lines"]))
        task = _Task(done.folder, [p.source for p in parts], first_lines, self.num_documents)
        self.num_documents += record["documents"]
        self.num_bytes += record["bytes"]
        self.num_bytes_done += record["bytes"] * (not done.is_kept)
        self.num_tokens = list(map(operator.add, self.num_tokens, record["tokens"]))
        self.num_rejects += record["rejects"]
        self._append_rejects(task)
        self.report.update(record["report"])
        if self._options.num_partitions == 1:
            self._copy(task, 0)
        else:
            self._tasks.append(task)

    def finish(self) -> None:
        """Appends what waited for the last task, which takes hours for terabytes."""
        count = self._options.num_partitions
        for partition in range(count):
            for task in self._tasks:
                with interruptible():
                    pass  # Ctrl-C may end the job here, not in a copy
                self._copy(task, (partition - task.documents_before) % count)

    def publish(self) -> None:
        """Gives all files their names, and removes the quarantine of an earlier job."""
        if self._quarantine is not None and self.num_rejects:
            flush_to_disk(self._quarantine)
            os.replace(self._quarantine.name, quarantine_path(self._options))
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(quarantine_path(self._options))
        finalize_together(self.builders)
        if self._options.row_encoder is not None:
            write_loss_ranges(self.builders[0].prefix, np.concatenate(self.loss_ranges))
        for writer in self._origins:
            writer.publish()

    def _first_line(self, part: Part, num_lines: int) -> int:
        """The number of the first line of the next part, which has that many lines."""
        source, first = self._next_line
        if part.first_line is not None or source != part.source:
            first = first_line_of(part)  # counts lines if a shard begins in the middle of a file
        self._next_line = part.source, first + num_lines
        return first

    def _copy(self, task: _Task, group: int) -> None:
        """Appends the documents whose number in the task is `group` modulo the partitions."""
        if self._options.row_encoder is not None:
            path = os.path.join(task.folder, UNTRAINED)
            ranges = np.fromfile(path, np.int32).reshape(-1, 3)
            ranges[:, 0] += self.builders[0].num_sequences
            self.loss_ranges.append(ranges)
        for key, builder in enumerate(self.builders):
            builder.add_index(prefix_of(task.folder, key, group))
        if self._origins:
            for origins in _read_origins(task, group):
                for writer in self._origins:
                    writer.add(*origins)

    def _append_rejects(self, task: _Task) -> None:
        with task.open(REJECTS) as file:
            for row in map(json.loads, file):
                part, data = row.pop("part"), row.pop("data")
                row["line"] += task.first_lines[part]
                place = {"file": task.sources[part], **row}
                if len(self.rejects) < _SHOWN_REJECTS:
                    self.rejects.append(place)
                if self._quarantine is not None:
                    self._quarantine.write(json.dumps({**place, "bytes": data}).encode() + b"\n")


def quarantine_path(options: TokenizeOptions) -> str:
    return f"{options.output_prefix}.quarantine.jsonl"


def _read_origins(task: _Task, group: int) -> Iterator[tuple[Any, ...]]:
    """The arguments of `OriginsWriter.add` for a group."""
    first_lines = np.array(task.first_lines, np.int64)
    with task.open(ORIGINS) as file:
        while file.peek():
            rows, ids = np.load(file), json.loads(file.readline())
            members = rows["partition"] == group
            rows = rows[members]
            lines = rows["line"] + first_lines[rows["part"]]
            kept = list(itertools.compress(ids, members))
            yield task.sources, rows["part"], lines, rows["byte_offset"], kept
