"""The plan of a tokenise job: its workers, and what each task reads."""

import itertools
import os
from collections.abc import Container, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from millrace.checks import absolute_path
from millrace.cores import available_cores, available_memory
from millrace.engine import Run, Task
from millrace.errors import ConfigError
from millrace.files import xxh3
from millrace.text import InputFile, Part, parts_of, pieces_of
from millrace.text.streams import STDIN
from millrace.tokenizing.chunk import Work, is_of
from millrace.tokenizing.tokenize_options import TokenizeOptions

MB = 1_000_000
_UNPACKED = 4  # bytes of text in a byte of a compressed file, about

# ---- workers ----

_WORTH_A_WORKER = 32 * MB  # bytes of text that take as long as the start of a worker

# Private memory in bytes, measured with GPT-2 and a vocabulary of 100 k and rounded up.
_JOB_MEMORY = 120 * MB  # NumPy, Arrow, the sidecar's rows
# Two libraries with a tokenizer each, the encoder's cache of words, three batches of text and ids.
_WORKER_MEMORY = 280 * MB
# Copies of a document while it is encoded, in bytes per byte of its line: the line, a str of up to
# 4 bytes a character, its UTF-8, and up to one id of 4 bytes for each byte, in three copies.
_BYTES_PER_BYTE = 20
# Of the reference libraries, which keep more than ids, for the worst tried texts: many tokens of
# one byte.
_REFERENCE_BYTES_PER_BYTE = {"tokenizers": 330, "sentencepiece": 75, "tiktoken": 60}


def choose_workers(options: TokenizeOptions, files: Sequence[InputFile]) -> int:
    """The number of worker processes; a ConfigError for too little memory.

    Without `options.workers` it is one per core, or fewer if memory is short or the input is small.
    """
    encoder, memory = options.tokenizer.encoder_name, options.memory
    longest = 0 if memory is None else options.max_document_size  # which hardly any input has
    num_copies = _REFERENCE_BYTES_PER_BYTE.get(encoder, _BYTES_PER_BYTE)
    per_worker = _WORKER_MEMORY + longest * num_copies
    unpacking = max((file.format.unpacking_memory for file in files), default=0)
    job_memory, least = _JOB_MEMORY + longest * unpacking, options.workers or 1
    needed = job_memory + least * per_worker
    if memory is None:
        memory = max(available_memory(), needed)
    if memory < needed:
        raise ConfigError(
            f"memory must be at least {needed / MB:,.0f} MB for {least} worker{'s' * (least > 1)} "
            f"with {encoder} and documents of up to {longest / MB:,.0f} MB, not "
            f"{memory / MB:,.0f} MB. Give more memory, fewer workers, or a lower "
            "--max-document-size (max_document_size=...)"
        )
    most = min(available_cores(), (memory - job_memory) // per_worker)
    if options.engine == "local" and not any(file.is_pipe for file in files):
        size = sum((file.size or 0) * (_UNPACKED if file.compression else 1) for file in files)
        most = min(most, max(size // _WORTH_A_WORKER, 1))
    return options.workers or most


# ---- steps ----

# Bytes of input. A kill costs at most one task per worker: half a second of a core.
_DEFAULT_TASK = 64 * MB
_SMALLEST_TASK = MB
_TASKS_PER_WORKER = 8  # of a short job: workers end within an eighth of each other
_MOST_TASKS = 20_000  # of a long job: each is a few files in one folder
_MOST_PARTS = 1_000  # of a task that reads many small files
_UNPACKED_PER_WORKER = 4
_PARTS_PER_SHARD = 64  # shards differ by at most one part, 2 % of their size
_LARGEST_PIECE = 32 * MB  # of an unpacked file: two copies are in memory


class _Cut(NamedTuple):
    """A part of a file: the number of the file in the job, and fields of `Part`."""

    file: int
    start: int = 0
    stop: int | None = None
    size: int = 0
    first_line: int | None = None


_Step = list[_Cut]
"""What one task reads; or a whole file that is unpacked into tasks."""


def _files_to_unpack(files: Sequence[InputFile], task_size: int, workers: int) -> list[int]:
    """Numbers of the files that cannot be cut (compressed lines, CSV) and are worth several tasks.

    None if there are many: all workers are busy with a file each.
    """
    numbers = [
        number
        for number, file in enumerate(files)
        if file.format.has_pieces(file) and _UNPACKED * (file.size or 0) > task_size
    ]
    return numbers if len(numbers) <= _UNPACKED_PER_WORKER * workers else []


def _cuts_of(
    files: Sequence[InputFile],
    unpacked: Container[int],
    task_size: int,
    shard: tuple[int, int] | None,
) -> list[_Cut]:
    """Parts of about `task_size` bytes of all files, in their order; or those of a shard, which is
    one of several independent jobs whose outputs follow each other."""
    part_size, cuts = task_size, list[_Cut]()
    if shard is not None:
        # Not by the size of its tasks, as the other shards may have another.
        total = sum(file.size or 0 for file in files)
        part_size = min(max(total // (_PARTS_PER_SHARD * shard[1]), 1), _DEFAULT_TASK)
    for place, file in enumerate(files):
        for part in [file.part()] if place in unpacked else parts_of(file, part_size):
            cuts.append(_Cut(place, part.start, part.stop, part.size, part.first_line))
    if shard is None:
        return cuts
    for file in files:
        if file.is_pipe:
            raise ConfigError(f"{file.path} is a pipe, which shards cannot share; give files")
    # All bytes are divided evenly; a part belongs to the shard in which it begins, and empty ones
    # at the very end to the last shard.
    number, num_shards = shard
    *begins, total = itertools.accumulate((cut.size for cut in cuts), initial=0)
    first, end = (one * total // num_shards for one in (number, number + 1))
    return [
        cut
        for cut, begin in zip(cuts, begins, strict=True)
        if first <= begin and (begin < end or number == num_shards - 1)
    ]


def _steps_of(
    cuts: Sequence[_Cut],
    unpacked: Container[int],
    task_size: int,
    begins: Container[tuple[int, int]],
) -> list[_Step]:
    """Steps of about `task_size` bytes that read the cuts; one begins at each of `begins`."""
    steps: list[_Step] = []
    is_full = True  # the last step takes no more cuts
    for cut in cuts:
        if is_full or cut.file in unpacked or cut[:2] in begins:
            steps.append([])
        taken = steps[-1]
        taken.append(cut)
        is_full = cut.file in unpacked or len(taken) >= _MOST_PARTS
        is_full = is_full or sum(one.size for one in taken) >= task_size
    return steps


# ---- tasks ----


def identities_of(files: Sequence[InputFile]) -> list[list[int | None]]:
    """Size and time of the last change of each file."""
    return [[file.size, file.mtime_ns] for file in files]


def absolute(path: str) -> str:
    """A path of the same file from any folder, and for workers of a Ray cluster."""
    return path if path == STDIN else absolute_path(path)


def _task_size(files: Sequence[InputFile], workers: int) -> int:
    """Bytes of input for a task: many tasks for each worker, but not too many in all."""
    total = sum(file.size or 0 for file in files)
    size = max(total // (_TASKS_PER_WORKER * workers), _SMALLEST_TASK)
    return max(min(_DEFAULT_TASK, size), total // _MOST_TASKS)


class InputTasks:
    """The tasks of a job, by the plan of an interrupted run as far as its files are the same.

    With that plan, a task begins wherever one began there: its number is the place, and `keep`
    tells whether it reads the same. `size` is the bytes of input, without pipes; `notices` are
    sentences that the user should read. A ConfigError for a shard of a pipe, a TextError for a file
    that cannot be read.
    """

    def __init__(
        self, run: Run, options: TokenizeOptions, files: Sequence[InputFile], workers: int
    ) -> None:
        self._run, self._options, self._files = run, options, files
        self.notices: list[str] = []
        if options.shard is not None:  # all shards of a job have the same plan
            workers = options.shard[1]
        identities, plan = identities_of(files), run.stored("plan")
        if plan is None:
            size = options.chunk_size or _task_size(files, workers)
            unpacked = _files_to_unpack(files, size, workers)
            plan = {"task_size": size, "unpacked": unpacked, "steps": [], "files": identities}
        pairs = zip(files, identities, plan["files"], strict=True)
        if changed := [file.path for file, new, old in pairs if new != old]:
            more = f" and {len(changed) - 1:,} more files" if len(changed) > 1 else ""
            kept = "the chunks that do not depend on the change are kept"
            self.notices.append(f"{changed[0]}{more} changed after the interrupted run: {kept}")
            run.note(self.notices[0])
        task_size = plan["task_size"]
        self._piece_size = min(task_size, _LARGEST_PIECE)
        self._unpacked = {n for n in plan["unpacked"] if files[n].format.has_pieces(files[n])}
        self._unpacked |= {number for number, file in enumerate(files) if file.is_pipe}
        if changed or not plan["steps"]:
            with run.phase("plan"):
                cuts = _cuts_of(files, self._unpacked, task_size, options.shard)
                begins = {tuple(step[0][:2]) for step in plan["steps"]}
                steps = _steps_of(cuts, self._unpacked, task_size, begins)
            plan = {**plan, "steps": steps, "files": identities}
            run.store("plan", plan)
        self._steps = [[_Cut(*cut) for cut in step] for step in plan["steps"]]
        self.size = sum(cut.size for step in self._steps for cut in step)

    def draw(self) -> Generator[Task, None, None]:
        """The tasks, in the order of the output."""
        for step in self._steps:
            first = step[0]
            if first.file in self._unpacked:
                yield from self._pieces(first.file)
            else:
                yield _task((first.file, first.start), [self._part(cut) for cut in step], None)

    def keep(self, task: Task, record: dict[str, Any]) -> bool:
        """Whether a task has read this, and would not end otherwise with today's `on_error`.

        So a job that stopped at a bad line can go on without such lines.
        """
        has_bad_lines = record["rejects"] or record["empty"]
        if has_bad_lines and record["on_error"] != self._options.on_error:
            return False
        if is_kept := is_of(record, task.payload):
            remove_piece(task)
        return is_kept

    def _part(self, cut: _Cut) -> Part:
        file = self._files[cut.file]
        place = {"size": cut.size, "first_line": cut.first_line, "source": file.path}
        return replace(file, path=absolute(file.path)).part(cut.start, cut.stop, **place)

    def _pieces(self, number: int) -> Iterator[Task]:
        """The tasks of a file that cannot be cut; each piece is written to a file."""
        whole, limit = self._part(_Cut(number)), self._options.max_document_size
        pieces = pieces_of(whole.file, self._piece_size, max_document_size=limit)
        for count, piece in enumerate(pieces):
            path = os.path.join(self._run.scratch, f"{number}-{count}.piece")
            digest = xxh3()
            with open(path, "wb") as target:
                for data in piece.chunks:
                    digest.update(data)
                    target.write(data)
            digest.update(str(piece.part.byte_offset).encode())
            unpacked = replace(piece.part.file, path=path)
            part = replace(piece.part, file=unpacked, source=whole.source)
            yield _task((number, count), [part], digest.hexdigest())


def _task(number: tuple[int, int], parts: Sequence[Part], checksum: str | None) -> Task:
    part = parts[0]
    stop = "the end" if part.stop is None else f"{part.stop:,}"
    more = f" and {len(parts) - 1:,} more" if len(parts) > 1 else ""
    name = f"{part.source} from {part.start:,} to {stop}{more}"
    return Task(number, Work(tuple(parts), checksum), name)


def remove_piece(task: Task) -> None:
    """Removes the file that was unpacked for a task, if there is one."""
    work: Work = task.payload
    if work.checksum is not None and os.path.exists(work.parts[0].file.path):
        os.unlink(work.parts[0].file.path)
