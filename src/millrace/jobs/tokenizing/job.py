"""The tokenise job: checks its arguments, plans, runs tasks, and publishes what they made."""

from __future__ import annotations

import contextlib
import glob
import itertools
import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any

from millrace import checks
from millrace.errors import ConfigError
from millrace.files import checksum, flush_to_disk, temporary_name, xxh3
from millrace.interrupts import interruptible, interrupts_held
from millrace.jobs.engine import Executor, Journal, Task, run_local
from millrace.jobs.progress import Progress
from millrace.jobs.tokenizing import plan
from millrace.jobs.tokenizing.output import Output
from millrace.jobs.tokenizing.task import Settings, Work, run_task, task_name
from millrace.store import IndexedDatasetBuilder, finalize_together, write_dolma
from millrace.store.info import read_info
from millrace.store.origins import has_pyarrow
from millrace.store.publish import (
    LOCK,
    dolma_path,
    files_of,
    idx_path,
    origins_path,
    remove_leftovers,
)
from millrace.text import (
    InputFile,
    Part,
    Piece,
    SentenceSplitter,
    Tokenizer,
    check_keys,
    checked_tokenizer,
    find_inputs,
    parts_of,
    pieces_of,
    read_documents,
)
from millrace.text.streams import STDIN

ON_ERROR = "stop", "skip", "quarantine"
ON_UNKNOWN = "keep", "reject"
PROVENANCE = "parquet", "csv.gz", "both", "none"
ENGINES = "local", "ray"

CHECK_RATE = 0.0002
"""Share of documents that are compared with the reference library, which is up to 80 times slower
than a fast encoder: 1.6 % of the time."""

_FIRST_FILES = 8  # that are looked into for the first documents
_FIRST_SIZE = 200_000  # characters of them, which the reference encodes in 50 ms
_LISTED_INPUTS = 1_000  # in the sidecar
_MOST_PAIRS = 256  # that a task writes at once: each has open files


@dataclass(frozen=True, kw_only=True)
class TokenizeResult:
    """What a tokenise job wrote.

    Attributes:
        prefixes: Path prefix of the indexed dataset of each key.
        num_documents: Number of documents in each dataset.
        num_tokens: Number of tokens of each key.
        num_bytes: Bytes of UTF-8 text, all keys together.
        seconds: Duration of the job, this time.
        num_skipped: Number of lines that were not documents, and were skipped.
        skipped: The first 20 of them: file, line, byte_offset and reason.
        num_chunks_done, num_chunks_kept: Number of tasks that ran this time, and of those that an
            interrupted run had done before.
        num_bytes_done: Bytes of text of the tasks that ran this time.
        encoder: Name of the tokenizing library.
        notices: What the user should know: why another library was used, for example.
    """

    prefixes: dict[str, str]
    num_documents: int
    num_tokens: dict[str, int]
    num_bytes: int
    seconds: float
    num_skipped: int
    skipped: list[dict[str, Any]]
    num_chunks_done: int
    num_chunks_kept: int
    num_bytes_done: int
    encoder: str
    notices: list[str]


def tokenize(
    inputs: Sequence[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    tokenizer: Tokenizer,
    *,
    json_keys: Sequence[str] = ("text",),
    id_key: str = "id",
    separator: str | None = None,
    append_eod: bool = False,
    prepend_bos: bool = False,
    on_unknown: str = "keep",
    splitter: SentenceSplitter | None = None,
    partitions: int = 1,
    keep_sequential_samples: bool = False,
    on_error: str = "stop",
    check_rate: float = CHECK_RATE,
    checksums: bool = False,
    provenance: str = "none",
    shard: tuple[int, int] | None = None,
    engine: str = "local",
    workers: int | None = None,
    memory: int | None = None,
    chunk_size: int | None = None,
    max_document_size: int | None = None,
    restart: bool = False,
    show_progress: bool = False,
) -> TokenizeResult:
    """Writes `{output_prefix}_{key}_document.bin/.idx` for each key.

    Documents keep the order of the files and lines. A document is one sequence, or one per sentence
    or list element; one without tokens has no sequence and gets no EOD. The output does not depend
    on the number of workers, the engine, or how often the job was interrupted.

    The job divides its input into chunks, and keeps those that are done in the folder
    `{output_prefix}.journal` until all pairs are published together. A job that fails or is killed
    leaves the folder; the same call continues there.

    Args:
        inputs: Files, folders, patterns, or "-" for standard input.
        output_prefix: First part of the output paths; the folder must exist.
        tokenizer: The tokenizer. Its vocabulary decides the dtype: uint16 below 65,500 ids, else
            int32. If its encoder differs from the reference library on test cases or the first
            documents, the reference is used.
        json_keys: Keys of the texts; dots reach into nested objects.
        id_key: Key of a document's id, for the provenance.
        separator: Text between the documents of a plain text file; None: a file is a document.
        append_eod: Whether each document ends with the tokenizer's EOD.
        prepend_bos: Whether each document starts with the tokenizer's BOS.
        on_unknown: Whether documents with the tokenizer's unknown token are kept ("keep") or
            treated as lines that are not documents ("reject").
        splitter: Splitter of texts into sentences: each is a sequence, and the datasets are named
            `{output_prefix}_{key}_sentence`.
        partitions: Number of groups among which documents are dealt in turn; the groups follow each
            other in the output, as with Megatron-LM's option.
        keep_sequential_samples: Whether partitions are runs of documents, which keeps the order.
        on_error: What happens at a line that is not a document: "stop" is an error; "skip" goes on
            without it; "quarantine" also keeps it in `{output_prefix}.quarantine.jsonl`. The last
            two also apply to empty texts, which Megatron-LM makes empty documents.
        check_rate: Share of documents that are compared with the reference library during the job.
        checksums: Whether to write a sidecar with checksums for each pair.
        provenance: Sidecars with the origin of each document: "parquet", "csv.gz" (dolma's
            format), "both" or "none".
        shard: (number, count): this job is one of several, each with a prefix of its own;
            merging their outputs in order gives the output of one job.
        engine: Where tasks run: "local" in worker processes, "ray" on a Ray cluster.
        workers: Number of worker processes; None: one per core, or per CPU of the cluster.
        memory: Bytes of memory for all processes of the job; None: no limit but the machine's.
        chunk_size: Bytes of input of a chunk; None: by the size of the input.
        max_document_size: Longest line, or text, in bytes: a longer one is not a document; None:
            100 MB, or a thousandth of `memory` if that is less (at least 4 MB).
        restart: Whether to discard what an interrupted job with this prefix has done.
        show_progress: Whether to show progress on stderr.

    Raises:
        TextError: An input that cannot be read, a line that is not a document, or an encoder that
            differs from the reference; the message names file and line.
        ConfigError: An argument that cannot work, or an interrupted job with other arguments.
        MillraceError: A worker process that died repeatedly, or another process that is building a
            pair.
    """
    start = time.monotonic()
    output_prefix = checks.one_path("output_prefix", output_prefix)
    keys = check_keys(json_keys)
    _check_choice("on_error", on_error, ON_ERROR)
    _check_choice("on_unknown", on_unknown, ON_UNKNOWN)
    _check_choice("provenance", provenance, PROVENANCE)
    _check_choice("engine", engine, ENGINES)
    if not isinstance(tokenizer, Tokenizer):
        raise ConfigError(
            f"tokenizer is {checks.shown(tokenizer)}; give "
            f"millrace.text.Tokenizer({checks.shown(tokenizer)})"
        )
    if workers is not None:
        workers = checks.whole("workers", workers, 1)
    if memory is not None:
        memory = checks.whole("memory", memory, 1)
    if chunk_size is not None:
        chunk_size = checks.whole("chunk_size", chunk_size, 1)
    if max_document_size is not None:
        max_document_size = checks.whole("max_document_size", max_document_size, 1)
    num_partitions = checks.whole("partitions", partitions, 1)
    if checks.flag("keep_sequential_samples", keep_sequential_samples):
        num_partitions = 1  # runs of documents, one after the other: the order of the input
    check_rate = checks.real("check_rate", check_rate)
    if not 0 <= check_rate <= 1:
        raise ConfigError(f"check_rate is {check_rate}; a share from 0 to 1 is possible")
    last_token = tokenizer.eod if checks.flag("append_eod", append_eod) else None
    first_token = tokenizer.bos if checks.flag("prepend_bos", prepend_bos) else None
    if prepend_bos and first_token is None:
        raise ConfigError(
            f"{tokenizer.path} does not say which token starts a document: name it with --bos-token"
        )
    if on_unknown == "reject" and tokenizer.unknown is None:
        raise ConfigError(
            f"on_unknown is 'reject', but {tokenizer.path} has no unknown token: it encodes every "
            "text. Leave the option out"
        )
    if on_unknown == "reject" and tokenizer.unknown in (first_token, last_token):
        raise ConfigError(
            f"on_unknown is 'reject', but the unknown token of {tokenizer.path} also starts or "
            "ends documents, so every document has it. Leave the option out, or name another token "
            "with --eod-token or --bos-token"
        )
    shard = None if shard is None else _checked_shard(shard)
    if shard is not None and num_partitions > 1:
        raise ConfigError(
            f"partitions is {num_partitions}, which deals the lines of the whole input: shards "
            "cannot do it, as each reads a part. Leave one of the two out"
        )
    if num_partitions * len(keys) > _MOST_PAIRS:
        raise ConfigError(
            f"partitions is {num_partitions} and there are {len(keys)} keys, so each task would "
            f"write {num_partitions * len(keys)} pairs at once; at most {_MOST_PAIRS} are possible"
        )
    if not isinstance(id_key, str):
        raise ConfigError(f"id_key is {checks.shown(id_key)}; give a key")
    if splitter is not None and not isinstance(splitter, SentenceSplitter):
        raise ConfigError(
            f"splitter is {checks.shown(splitter)}; give a millrace.text.SentenceSplitter"
        )
    restart = checks.flag("restart", restart)
    checksums = checks.flag("checksums", checksums)
    resources = plan.resources_for(workers, memory, max_document_size)
    files = find_inputs(checks.paths("inputs", inputs), separator=separator)
    num_bytes = sum(file.size or 0 for file in files)
    if chunk_size is not None and num_bytes // chunk_size >= plan.PIECES:
        raise ConfigError(
            f"chunk_size is {chunk_size}, and the input has {num_bytes:,} bytes: at most "
            f"{plan.PIECES:,} chunks are possible. Give at least {num_bytes // plan.PIECES + 1}"
        )
    level = "document" if splitter is None else "sentence"
    prefixes = {key: f"{output_prefix}_{key}_{level}" for key in keys}
    quarantine_path = f"{output_prefix}.quarantine.jsonl"
    _check_outputs(
        files, prefixes.values(), [quarantine_path] if on_error == "quarantine" else [], shard
    )
    settings = Settings(
        tokenizer=tokenizer,
        keys=keys,
        id_key=id_key,
        separator=separator,
        splitter=splitter,
        first_token=first_token,
        last_token=last_token,
        unknown=tokenizer.unknown if on_unknown == "reject" else None,
        num_partitions=num_partitions,
        on_error=on_error,
        max_document_size=resources.max_document_size,
        check_rate=check_rate,
    )
    tokenizer, notice = checked_tokenizer(tokenizer, _first_texts(files, settings))
    settings = replace(settings, tokenizer=tokenizer)
    identity = _identity(files, settings, shard)
    task_size = chunk_size or plan.task_size_for(files, shard[1] if shard else resources.workers)
    with interrupts_held(), contextlib.ExitStack() as stack:
        builders = [
            stack.enter_context(IndexedDatasetBuilder(prefix, tokenizer.dtype, checksums=checksums))
            for prefix in prefixes.values()
        ]
        journal = stack.enter_context(
            Journal(f"{output_prefix}.journal", identity, restart=restart)
        )
        if restart:  # the job before may have had other keys
            for lock in glob.glob(f"{glob.escape(output_prefix)}_*_*{LOCK}"):
                remove_leftovers(lock.removesuffix(LOCK))
        files_to_write = [on_error, provenance, checksums]  # what the identity leaves open
        if (
            journal.result is not None
            and journal.result["files"] == files_to_write
            and all(map(os.path.exists, map(idx_path, prefixes.values())))
        ):
            return _finished(journal)
        if journal.plan is None:
            with interruptible():
                steps = plan.plan_steps(
                    [replace(file, path=_absolute(file.path)) for file in files],
                    task_size=task_size,
                    workers=shard[1] if shard else resources.workers,
                    separator=separator,
                    shard=shard,
                )
            journal.set_plan({"steps": plan.to_json(steps), "task_size": task_size})
        quarantine = None
        if on_error == "quarantine":
            # A name that no other process has, on a file system without locks.
            path = temporary_name(f"{journal.folder}/quarantine.jsonl")
            quarantine = stack.enter_context(open(path, "wb"))
        if provenance != "none":
            # Arrow takes 0.3 s to import: time that it has while the first chunk is encoded.
            threading.Thread(target=has_pyarrow, daemon=True).start()
        output = Output(
            builders,
            num_partitions=num_partitions,
            has_origins=provenance != "none",
            quarantine=quarantine,
        )
        names = {_absolute(file.path): file.path for file in files}
        run = _Run(journal, settings, output, names)
        total = sum(map(plan.step_size, run.steps))
        progress = stack.enter_context(Progress("tokenize", total or None, enabled=show_progress))
        if notice:
            progress.note(f"millrace: {notice}")
        if engine == "local":
            run.work(run_local, resources.workers, progress)
        else:
            from millrace.jobs.engine.ray import run_ray

            run.work(run_ray, workers, progress)
        output.finish()
        with interruptible():  # the last time before the files are published
            pass
        for builder, key in zip(builders if checksums else (), keys, strict=False):
            builder.add_provenance(_provenance(settings, files, key, output, shard))
        # Files of an earlier job with this prefix, which this one may not write.
        for path in map(dolma_path, prefixes.values()):
            _remove(path)
        if quarantine is not None:
            flush_to_disk(quarantine)
            os.replace(quarantine.name, quarantine_path)
            if output.num_rejects == 0:
                _remove(quarantine_path)
        finalize_together(builders)
        for prefix in prefixes.values() if provenance in ("csv.gz", "both") else ():
            with interruptible():
                write_dolma(prefix)
            if provenance == "csv.gz":
                os.unlink(origins_path(prefix))
        result = TokenizeResult(
            prefixes=prefixes,
            num_documents=output.num_documents,
            num_tokens=dict(zip(keys, output.num_tokens, strict=True)),
            num_bytes=output.num_bytes,
            seconds=time.monotonic() - start,
            num_skipped=output.num_rejects,
            skipped=output.rejects,
            num_chunks_done=run.num_done,
            num_chunks_kept=run.num_kept,
            num_bytes_done=run.num_bytes_done,
            encoder=tokenizer.encoder_name,
            notices=[notice] if notice else [],
        )
        journal.finish({"files": files_to_write, "result": asdict(result)})
    return result


def _finished(journal: Journal) -> TokenizeResult:
    """The result of a job whose output is whole: it was killed while it removed its journal."""
    result = TokenizeResult(**journal.result["result"])
    journal.remove()
    return replace(
        result,
        num_chunks_done=0,
        num_chunks_kept=result.num_chunks_kept + result.num_chunks_done,
        num_bytes_done=0,
    )


class _Run:
    """The tasks of a job: those to do, those done before, and their way to the output.

    Args:
        names: For each path in the plan, the path that the user has given.
    """

    def __init__(
        self, journal: Journal, settings: Settings, output: Output, names: dict[str, str]
    ) -> None:
        self._journal, self._settings, self._output = journal, settings, output
        self._names = names
        self._progress: Progress | None = None
        self._earlier = journal.numbers()  # of an earlier run
        self.steps = plan.from_json(journal.plan["steps"])
        self._plan = checksum([json.dumps(journal.plan).encode()])
        self._piece_size = min(journal.plan["task_size"], plan.LARGEST_PIECE)
        # Tasks in the order of the output, and the records of those that wait for one before them.
        self._order: deque[Task] = deque()
        self._records: dict[int, dict[str, Any]] = {}
        self.num_done = self.num_kept = self.num_bytes_done = 0

    def work(self, executor: Executor, workers: int | None, progress: Progress) -> None:
        start = time.monotonic()
        size = 0
        self._progress = progress
        results = executor(run_task, self._settings, self._tasks(), workers=workers)
        with contextlib.closing(results):
            for task, record in results:
                work: Work = task.payload
                self.num_done += 1
                self.num_bytes_done += record["bytes"]
                self._records[task.number] = record
                if work.checksum is not None:
                    os.unlink(work.parts[0].path)
                self._append()
                size += sum(part.size for part in work.parts)
                rate = self.num_bytes_done / 1e6 / max(time.monotonic() - start, 1e-9)
                tokens = sum(self._output.num_tokens)
                progress.update(
                    size,
                    f"{self._output.num_documents:,} documents  {tokens:,} tokens  {rate:.1f} MB/s",
                )
        self._append()

    def _append(self) -> None:
        """Appends tasks to the output as far as they are done without a gap."""
        while self._order and self._order[0].number in self._records:
            task = self._order.popleft()
            work: Work = task.payload
            self._output.append(work.folder, self._records.pop(task.number), work.parts)

    def _tasks(self) -> Iterator[Task]:
        """The tasks that are not in the journal yet."""
        for number, step in enumerate(self.steps):
            number *= plan.PIECES
            if step.file is None:
                yield from self._unless_done(number, step.parts)
            else:
                end = number + plan.PIECES
                for piece in pieces_of(
                    step.file, self._piece_size, separator=self._settings.separator
                ):
                    if number == end:
                        raise ConfigError(
                            f"{step.file.path} has more than {plan.PIECES:,} chunks of "
                            f"{self._piece_size:,} bytes. Give a larger chunk_size, and restart"
                        )
                    yield from self._piece(number, piece)
                    number += 1
                if any(number <= earlier < end for earlier in self._earlier):
                    raise _other_input(step.file.path)

    def _record(self, number: int) -> dict[str, Any] | None:
        """The record of a task that is done, and would not end otherwise with today's `on_error`.

        So a job that stopped at a bad line can go on without such lines. The record of another
        plan's task (of a process that runs at the same time, on a file system without locks) does
        not count.
        """
        record = self._journal.record(number)
        if record is None or record["plan"] != self._plan:
            return None
        if record["on_error"] == self._settings.on_error:
            return record
        return None if any(record["rejects"]) or record["empty"] else record

    def _unless_done(self, number: int, parts: tuple[Part, ...]) -> Iterator[Task]:
        record = self._record(number)
        if record is not None:
            self._keep(number, parts, record)
            return
        folder = self._journal.new_folder_of(number)
        yield self._task(number, parts, folder)

    def _piece(self, number: int, piece: Piece) -> Iterator[Task]:
        """The task of a piece of a file that cannot be cut: it is written beside its results."""
        record = self._record(number)
        digest = xxh3()
        if record is not None:
            for data in piece.chunks:
                digest.update(data)
            if record["checksum"] != digest.hexdigest():
                raise _other_input(piece.part.source)
            self._keep(number, (piece.part,), record)
            return
        folder = self._journal.new_folder_of(number)
        # Each process has its own names: without locks, two of them may write the same piece.
        path = os.path.join(folder, f"{os.urandom(6).hex()}.piece")
        with open(path, "wb") as file:
            for data in piece.chunks:
                digest.update(data)
                file.write(data)
        yield self._task(number, (replace(piece.part, path=path),), folder, digest.hexdigest())

    def _task(
        self, number: int, parts: tuple[Part, ...], folder: str, digest: str | None = None
    ) -> Task:
        parts = tuple(
            replace(part, source=self._names.get(part.source, part.source)) for part in parts
        )
        work = Work(
            journal=self._journal.folder,
            folder=folder,
            plan=self._plan,
            parts=parts,
            checksum=digest,
        )
        task = Task(number, work, task_name(parts))
        self._order.append(task)
        return task

    def _keep(self, number: int, parts: tuple[Part, ...], record: dict[str, Any]) -> None:
        """Takes over what an earlier run has done."""
        self._task(number, parts, self._journal.folder_of(number))
        self._records[number] = record
        self.num_kept += 1
        if self._progress is not None:
            self._progress.skip(sum(part.size for part in parts))


def _other_input(path: str) -> ConfigError:
    return ConfigError(
        f"{path} is not the input that the interrupted job has read. Give the same input, or start "
        "over: --restart"
    )


# ---- arguments ----


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {checks.shown(value)}; one of {', '.join(choices)} is needed")


def _checked_shard(shard: Any) -> tuple[int, int]:
    if not isinstance(shard, (tuple, list)) or len(shard) != 2:
        raise ConfigError(f"shard is {checks.shown(shard)}; give (number, count)")
    count = checks.whole("the number of shards", shard[1], 1)
    return checks.whole("shard", shard[0], 0, count - 1), count


def _check_outputs(
    files: Sequence[InputFile],
    prefixes: Iterable[str],
    others: Sequence[str],
    shard: tuple[int, int] | None,
) -> None:
    prefixes = list(prefixes)
    outputs = {
        os.path.realpath(path)
        for prefix in prefixes
        for path in (*files_of(prefix), dolma_path(prefix))
    }
    outputs.update(map(os.path.realpath, others))
    for path in others:
        if os.path.isdir(path):
            raise ConfigError(f"{path} is a folder; remove it, or give another prefix")
    for file in files:
        if os.path.realpath(file.path) in outputs:
            raise ConfigError(
                f"{file.path} is an input and would be overwritten; give another prefix"
            )
    for prefix in prefixes:
        info = None if shard is None else read_info(prefix)
        other = None if info is None else info.provenance.get("shard")
        if shard is not None and other is not None and other != list(shard):
            raise ConfigError(
                f"{prefix} holds shard {other[0]} of {other[1]}, which shard {shard[0]} of "
                f"{shard[1]} would overwrite; give each shard a prefix of its own"
            )


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _first_texts(files: Sequence[InputFile], settings: Settings) -> list[str]:
    """Texts of the first documents, about 200 kB; none of a pipe, which can be read only once."""
    texts: list[str] = []
    size = 0

    def ignore(*reject: Any) -> None:
        """The job itself meets the line again."""

    for file in files[:_FIRST_FILES]:
        part = next(iter(parts_of(file, plan.MB)), None) if file.size is not None else None
        if part is None:  # a pipe, or an Arrow file without batches
            continue
        batches = read_documents(
            part,
            settings.keys,
            reject=ignore,
            id_key=settings.id_key,
            separator=settings.separator,
            max_document_size=plan.MB,
        )
        for documents in batches:
            for text in itertools.chain.from_iterable(documents.texts):
                parts = [text] if isinstance(text, str) else text
                texts += [part[:_FIRST_SIZE] for part in parts]
                size += sum(map(len, parts))
                if size >= _FIRST_SIZE:
                    return texts
    return texts


def _absolute(path: str) -> str:
    """A path that is the same file from any folder, and for the workers of a Ray cluster."""
    return path if path == STDIN else os.path.abspath(path)


def _identity(
    files: Sequence[InputFile], settings: Settings, shard: tuple[int, int] | None
) -> dict[str, Any]:
    """What decides the output: another job cannot continue with this one's journal."""
    tokenizer = settings.tokenizer
    entries: dict[str, Any] = {
        "job": "tokenize 1",
        "tokenizer": tokenizer.fingerprint,
        "encoder": tokenizer.encoder_name,
        "json_keys": list(settings.keys),
        "id_key": settings.id_key,
        "separator": settings.separator,
        **tokenizer.options,
        "sentences": None if settings.splitter is None else settings.splitter.name,
        "keep_newlines": settings.splitter is not None and settings.splitter.keep_newlines,
        "first_token": settings.first_token,
        "last_token": settings.last_token,
        "unknown": settings.unknown,
        "partitions": settings.num_partitions,
        "max_document_size": settings.max_document_size,
        "shard": None if shard is None else list(shard),
        "number of inputs": len(files),
    }
    for number, file in enumerate(files, 1):
        path = file.path if file.is_pipe else os.path.abspath(file.path)
        entries[f"input {number}, {path}"] = {"bytes": file.size, "modified_ns": file.mtime_ns}
    return entries


def _provenance(
    settings: Settings,
    files: Sequence[InputFile],
    key: str,
    output: Output,
    shard: tuple[int, int] | None,
) -> dict[str, Any]:
    """The origin of the tokens, for the sidecar."""
    tokenizer = settings.tokenizer
    entries: dict[str, Any] = {
        "tool": f"millrace {version('millrace')} tokenize",
        "tokenizer": {
            "path": tokenizer.path,
            "sha256": tokenizer.fingerprint,
            "fingerprints": list(tokenizer.fingerprints),
            "vocabulary_size": tokenizer.vocabulary_size,
            "encoder": tokenizer.encoder_name,
            **tokenizer.options,
        },
        "inputs": [file.path for file in files[:_LISTED_INPUTS]],
        "json_key": key,
        "append_eod": settings.last_token is not None,
        "eod_token": tokenizer.eod_token,
    }
    if len(files) > _LISTED_INPUTS:
        entries["num_inputs"] = len(files)
    if settings.first_token is not None:
        entries["bos_token"] = settings.first_token
    if settings.splitter is not None:
        entries["sentences"] = settings.splitter.name
        entries["keep_newlines"] = settings.splitter.keep_newlines
    if settings.num_partitions > 1:
        entries["partitions"] = settings.num_partitions
    if shard is not None:
        entries["shard"] = list(shard)
    if output.num_rejects:
        entries["skipped"] = {"number": output.num_rejects, "first": output.rejects}
    return entries
