"""The tokenise job: checks its arguments, plans, runs tasks, and publishes what they made."""

from __future__ import annotations

import contextlib
import glob
import itertools
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from millrace.encoding import UNSEEN, Tokenizer, checked_tokenizer
from millrace.files import checksum, flush_to_disk, temporary_name
from millrace.interrupts import interruptible, interrupts_held
from millrace.jobs.engine import Journal, run_local
from millrace.jobs.progress import Progress
from millrace.jobs.tokenizing import plan
from millrace.jobs.tokenizing.arguments import (
    Arguments,
    checked_arguments,
    identity,
    identity_of,
    provenance_of,
)
from millrace.jobs.tokenizing.output import Output
from millrace.jobs.tokenizing.run import TaskRun
from millrace.jobs.tokenizing.task import Settings
from millrace.provenance.origins import has_pyarrow
from millrace.store import IndexedDatasetBuilder, finalize_together
from millrace.store.publish import LOCK, idx_path, remove_leftovers
from millrace.text import (
    Format,
    InputFile,
    Query,
    SentenceSplitter,
    parts_of,
    read_documents,
)

CHECK_RATE = 0.0002
"""Share of documents that are compared with the reference library, which is up to 80 times slower
than a fast encoder: 1.6 % of the time."""

_FIRST_FILES = 8  # that are looked into for the first documents
_FIRST_SIZE = 200_000  # characters of them, which the reference encodes in 50 ms
_MOST_SKIPPED = plan.MB  # bytes of lines that are not documents, before them
_MOST_BATCHES = 8  # of 256 KB each, which may be blank lines


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
    format: Format | None = None,  # noqa: A002
    append_eod: bool = False,
    prepend_bos: bool = False,
    on_unknown: str = "keep",
    splitter: SentenceSplitter | None = None,
    partitions: int = 1,
    keep_sequential_samples: bool = False,
    on_error: str = "stop",
    check_rate: float = CHECK_RATE,
    checksums: bool = True,
    provenance: str = "parquet",
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
        format: Format of all inputs; None: their names and first bytes tell it.
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
        provenance: Sidecar with the origin of each document: "parquet" or "none".
        shard: (number, count): this job is one of several, each with a prefix of its own;
            merging their outputs in order gives the output of one job.
        engine: Where tasks run: "local" in worker processes, "ray" on a Ray cluster.
        workers: Number of worker processes; None: one per core, or fewer for a small input; on Ray
            one per CPU of the cluster.
        memory: Bytes of memory for all processes of the job, which limits the number of workers:
            280 MB and 20 times `max_document_size` each, and for CSV 12 times more, once; None: no
            limit but the machine's.
        chunk_size: Bytes of input of a chunk; None: by the size of the input.
        max_document_size: Longest line, or text, in bytes: a longer one is not a document; None:
            100 MB.
        restart: Whether to discard what an interrupted job with this prefix has done.
        show_progress: Whether to show progress on stderr.

    Raises:
        TextError: An input that cannot be read, a line that is not a document, or an encoder that
            differs from the reference; the message names file and line.
        ConfigError: An argument that cannot work, or an interrupted job with other arguments.
        MillraceError: A worker process that died repeatedly, or another process that is building a
            pair.
    """
    start, arguments = time.monotonic(), checked_arguments(**locals())
    tokenizer, notice = checked_tokenizer(
        tokenizer, _first_texts(arguments.files, arguments.settings)
    )
    settings = replace(arguments.settings, tokenizer=tokenizer)
    resources = arguments.resources
    if memory is not None:
        size, encoder = settings.max_document_size, tokenizer.encoder_name
        unpacking = max(file.format.unpacking_memory for file in arguments.files)
        most = plan.resources_for(
            workers, memory, size, encoder, unpacking_memory=unpacking
        ).workers
        resources = replace(resources, workers=min(resources.workers, most))
    arguments = replace(arguments, settings=settings, resources=resources)
    job = identity(arguments)
    notices = [*filter(None, [notice, arguments.notice, _unseen(job)])]
    with interrupts_held(), contextlib.ExitStack() as stack:
        builders = [
            stack.enter_context(
                IndexedDatasetBuilder(prefix, tokenizer.dtype, checksums=arguments.checksums)
            )
            for prefix in arguments.prefixes.values()
        ]
        journal = stack.enter_context(Journal(arguments.journal, job, restart=arguments.restart))
        if _is_published(journal, arguments):
            for builder in builders:
                builder.abort()  # else it would publish an empty pair
            return _finished(journal)
        journal.discard_result()  # or it would speak of what this job publishes in its place
        steps, changes, task_size = _prepare(journal, arguments)
        output = Output(
            builders,
            num_partitions=settings.num_partitions,
            has_origins=arguments.provenance != "none",
            quarantine=_open_quarantine(stack, journal) if on_error == "quarantine" else None,
        )
        run = TaskRun(journal, settings, output, arguments.files, steps, task_size, changes)
        _run_tasks(run, arguments, notices)
        output.finish()
        with interruptible():  # the last time before the files are published
            pass
        _publish(builders, output, arguments)
        result = TokenizeResult(
            prefixes=arguments.prefixes,
            num_documents=output.num_documents,
            num_tokens=dict(zip(settings.keys, output.num_tokens, strict=True)),
            num_bytes=output.num_bytes,
            seconds=time.monotonic() - start,
            num_skipped=output.num_rejects,
            skipped=output.rejects,
            num_chunks_done=run.num_done,
            num_chunks_kept=run.num_kept,
            num_bytes_done=run.num_bytes_done,
            encoder=tokenizer.encoder_name,
            notices=[*notices, *run.notices],
        )
        journal.finish({"files": _files_to_write(arguments), "result": asdict(result)})
    return result


def _files_to_write(arguments: Arguments) -> list[Any]:
    """What the identity of a job leaves open."""
    inputs = json.dumps([identity_of(file) for file in arguments.files]).encode()
    settings = arguments.settings
    return [settings.on_error, arguments.provenance, arguments.checksums, checksum([inputs])]


def _unseen(job: dict[str, Any]) -> str:
    """What is said of a function that another run of the job could not compare."""
    if not job["versions"].get("function", "").startswith(UNSEEN):
        return ""
    return (
        "the code of the tokenizer's function cannot be seen, so this job cannot continue after an "
        "interruption: give Tokenizer.from_function a version"
    )


def _is_published(journal: Journal, arguments: Arguments) -> bool:
    """Whether the output is whole: the job was killed while it removed its journal."""
    return (
        journal.result is not None
        and journal.result["files"] == _files_to_write(arguments)
        and all(map(os.path.exists, map(idx_path, arguments.prefixes.values())))
    )


def _finished(journal: Journal) -> TokenizeResult:
    """The result of a job whose output is whole."""
    result = TokenizeResult(**journal.result["result"])
    journal.remove()
    return replace(
        result,
        num_chunks_done=0,
        num_chunks_kept=result.num_chunks_kept + result.num_chunks_done,
        num_bytes_done=0,
    )


def _prepare(journal: Journal, arguments: Arguments) -> tuple[list[plan.Step], str, int]:
    """The steps, what is said of inputs that changed since then, and the size of a task."""
    if arguments.restart:  # the job before may have had other keys
        stem = arguments.journal.removesuffix(".journal")
        for lock in glob.glob(f"{glob.escape(stem)}_*_*{LOCK}"):
            remove_leftovers(lock.removesuffix(LOCK))
    earlier, task_size, changes = None, arguments.task_size, ""
    identities = [identity_of(file) for file in arguments.files]
    if journal.plan is not None:
        earlier, task_size = plan.from_json(journal.plan["steps"]), journal.plan["task_size"]
        pairs = zip(arguments.files, identities, journal.plan["files"], strict=True)
        changed = [file.path for file, new, old in pairs if new != old]
        if changed:
            more = f" and {len(changed) - 1:,} more files" if len(changed) > 1 else ""
            changes = f"{changed[0]}{more} changed after the interrupted run"
    if earlier is None or changes:
        with interruptible():
            steps = plan.plan_steps(
                arguments.files,
                task_size=task_size,
                workers=arguments.planned_workers,
                shard=arguments.shard,
                earlier=earlier,
            )
        journal.set_plan({"steps": steps, "files": identities, "task_size": task_size})
    else:
        steps = earlier
    if arguments.provenance != "none":
        # Arrow takes 0.3 s to import: time that it has while the first chunk is encoded.
        threading.Thread(target=has_pyarrow, daemon=True).start()
    journal.plan = None  # 20 MB of 60,000 files
    return steps, changes, task_size


def _open_quarantine(stack: contextlib.ExitStack, journal: Journal) -> Any:
    # A name that no other process has, on a file system without locks.
    path = temporary_name(f"{journal.folder}/quarantine.jsonl")
    return stack.enter_context(open(path, "wb"))


def _run_tasks(run: TaskRun, arguments: Arguments, notices: Sequence[str]) -> None:
    total = run.size
    with Progress("tokenize", total or None, enabled=arguments.show_progress) as progress:
        for notice in notices:
            progress.note(f"millrace: {notice}")
        if arguments.engine == "local":
            run.work(run_local, arguments.resources.workers, progress)
        else:
            from millrace.jobs.engine.ray import run_ray

            run.work(partial(run_ray, note=progress.note), arguments.workers, progress)


def _publish(
    builders: Sequence[IndexedDatasetBuilder], output: Output, arguments: Arguments
) -> None:
    """Gives all files their names, and removes those of an earlier job that this one lacks."""
    if arguments.checksums:
        for builder, key in zip(builders, arguments.prefixes, strict=True):
            builder.add_provenance(provenance_of(arguments, key, output))
    if output.quarantine is not None and output.num_rejects:
        flush_to_disk(output.quarantine)
        os.replace(output.quarantine.name, arguments.quarantine)
    else:
        _remove(arguments.quarantine)
    finalize_together(builders)
    for writer in output.origins:
        writer.publish()


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


class _TooManyLinesError(Exception):
    """A file begins with many lines that are not documents."""


def _first_texts(files: Sequence[InputFile], settings: Settings) -> Iterator[str]:
    """Texts of the first documents, about 200 kB; none of a pipe, which can be read only once."""
    size = skipped = 0

    def skip(line: int, byte_offset: int, reason: str, data: Iterable[bytes]) -> None:
        """Leaves a line out, which the job itself meets again; ends a file of such lines."""
        nonlocal skipped
        for chunk in data:
            skipped += len(chunk)
            if skipped > _MOST_SKIPPED:
                raise _TooManyLinesError

    for file in files[:_FIRST_FILES]:
        part = next(iter(parts_of(file, plan.MB)), None) if file.size is not None else None
        if part is None:  # a pipe, or an Arrow file without batches
            continue
        query = Query(keys=settings.keys, reject=skip, id_key=settings.id_key, max_size=plan.MB)
        batches = read_documents(part, query)
        with contextlib.suppress(_TooManyLinesError):
            for documents in itertools.islice(batches, _MOST_BATCHES):
                for text in itertools.chain.from_iterable(documents.texts):
                    for item in [text] if isinstance(text, str) else text:
                        yield item[:_FIRST_SIZE]
                        size += len(item)
                        if size >= _FIRST_SIZE:
                            return
