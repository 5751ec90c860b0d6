"""The output of a tokenise job: committed tasks, in their order, become the final files."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from millrace.jobs.tokenizing.task import ORIGIN_COLUMNS, first_line_of, prefix_of
from millrace.store import IndexedDatasetBuilder
from millrace.text import Part

_SHOWN_REJECTS = 20
_READ_SIZE = 3 << 18  # bytes that become base64 at a time: a multiple of 3


@dataclass(frozen=True, kw_only=True)
class _Task:
    """A committed task.

    Attributes:
        folder: Its folder in the journal.
        record: Its record.
        sources: Source of each part.
        first_lines: Number of the first line of each part.
        documents_before: Number of documents of all tasks before it.
    """

    folder: str
    record: dict[str, Any]
    sources: list[str]
    first_lines: list[int]
    documents_before: int


class Output:
    """The final pairs while they are built, one for each key.

    Tasks are appended in their order, as soon as all before them are done; with partitions, which
    change the order, at the end.

    Attributes:
        num_documents, num_bytes, num_rejects: Counts of what was appended.
        num_tokens: Number of tokens of each key.
        rejects: The first rejected lines: file, line and reason.
    """

    def __init__(
        self,
        builders: Sequence[IndexedDatasetBuilder],
        *,
        num_partitions: int,
        has_origins: bool,
        quarantine: BinaryIO | None,
    ) -> None:
        self._builders = builders
        self._num_partitions, self._has_origins = num_partitions, has_origins
        self._quarantine = quarantine
        self._next_line: dict[str, int] = {}
        self._tasks: list[_Task] = []
        self.num_documents = self.num_bytes = self.num_rejects = 0
        self.num_tokens = [0] * len(builders)
        self.rejects: list[dict[str, Any]] = []

    def append(self, folder: str, record: dict[str, Any], parts: Sequence[Part]) -> None:
        """Appends the next task."""
        first_lines = []
        for part, num_lines in zip(parts, record["lines"], strict=True):
            first = part.first_line
            if first is None:
                first = self._next_line.get(part.source)
            if first is None:  # a shard that begins in the middle of a file
                first = first_line_of(part)
            first_lines.append(first)
            self._next_line[part.source] = first + num_lines
        self.num_bytes += record["bytes"]
        for key, num_tokens in enumerate(record["tokens"]):
            self.num_tokens[key] += num_tokens
        if record["rejects"]:
            self._append_rejects(folder, record, parts, first_lines)
        task = _Task(
            folder=folder,
            record=record,
            sources=[part.source for part in parts],
            first_lines=first_lines,
            documents_before=self.num_documents,
        )
        self.num_documents += record["documents"]
        if self._num_partitions == 1:
            self._copy(task, 0)
        else:
            self._tasks.append(task)

    def finish(self) -> None:
        """Appends what waited for the last task."""
        for partition in range(self._num_partitions):
            for task in self._tasks:
                self._copy(task, (partition - task.documents_before) % self._num_partitions)

    def _copy(self, task: _Task, group: int) -> None:
        """Appends the documents whose number in the task is `group` modulo the partitions."""
        origins = _read_origins(task, group) if self._has_origins else None
        for key, builder in enumerate(self._builders):
            builder.add_index(prefix_of(task.folder, task.record, key, group), origins=False)
            if origins is not None:
                builder.add_origins(**origins)

    def _append_rejects(
        self, folder: str, record: dict[str, Any], parts: Sequence[Part], first_lines: list[int]
    ) -> None:
        stem = os.path.join(folder, record["stem"])
        with open(stem + ".rejects.jsonl", "rb") as rows, open(stem + ".rejects.bin", "rb") as data:
            for text in rows:
                row = json.loads(text)
                self.num_rejects += 1
                place = {
                    "file": parts[row["part"]].source,
                    "line": first_lines[row["part"]] + row["line"],
                    "byte_offset": row["byte_offset"],
                    "reason": row["reason"],
                }
                if len(self.rejects) < _SHOWN_REJECTS:
                    self.rejects.append(place)
                if self._quarantine is not None:
                    self._quarantine.write(json.dumps(place).encode()[:-1] + b', "bytes": "')
                    for piece in _pieces(data, row["size"]):
                        self._quarantine.write(base64.b64encode(piece))
                    self._quarantine.write(b'"}\n')


def _pieces(file: BinaryIO, size: int) -> Iterator[bytes]:
    """The next `size` bytes of a file."""
    while size > 0:
        data = file.read(min(size, _READ_SIZE))
        size -= len(data)
        yield data


def _read_origins(task: _Task, group: int) -> dict[str, Any]:
    """The arguments of `IndexedDatasetBuilder.add_origins` for a group of a task's documents."""
    with np.load(os.path.join(task.folder, task.record["stem"] + ".npz")) as arrays:
        columns = {name: arrays[name] for name in ORIGIN_COLUMNS}
    sizes = np.maximum(columns["id_length"], 0).astype(np.int64)
    ends = np.cumsum(sizes)
    data = columns["ids"].tobytes()
    members = np.flatnonzero(columns["partition"] == group)
    ids = [
        None if length < 0 else data[end - length : end].decode()
        for length, end in zip(
            columns["id_length"][members].tolist(), ends[members].tolist(), strict=True
        )
    ]
    parts = columns["part"][members]
    return {
        "sources": task.sources,
        "source_numbers": parts,
        "lines": columns["line"][members] + np.array(task.first_lines, np.int64)[parts],
        "byte_offsets": columns["byte_offset"][members],
        "ids": ids,
    }
