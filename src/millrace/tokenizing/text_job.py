"""The tokenise job: checks, plans, runs tasks, and publishes what they made."""

import contextlib
import glob
import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from typing import Any

from millrace.encoding import UNSEEN, Tokenizer, checked_tokenizer
from millrace.engine import ALREADY, Done, Run
from millrace.engine.uploading import Upload
from millrace.errors import ConfigError, MillraceError, TextError
from millrace.files import checksum
from millrace.names import IDX, LOSS
from millrace.option_class import StrPath, identity_of
from millrace.store.publish import LOCK, files_of, prefix_lock
from millrace.text import InputFile, Query, find_inputs, parts_of
from millrace.text.json_values import texts_of
from millrace.tokenizing import input_tasks
from millrace.tokenizing.chunk import run_task
from millrace.tokenizing.output import Output, quarantine_path
from millrace.tokenizing.tokenize_options import TokenizeOptions

_FIRST_FILES = 8  # files that are searched for the first documents
_FIRST_SIZE = 200_000  # characters, which the reference encodes in 50 ms
_MOST_BATCHES = 8  # of 256 KB each, which may be lines without documents
_LISTED_INPUTS = 1_000  # in the sidecar
_SHOWN_OTHERS = 3


@dataclass(frozen=True, kw_only=True)
class TokenizeResult:
    """What a tokenise job wrote.

    Attributes:
        prefixes: Path prefix of the indexed dataset of each key.
        num_documents: Number of documents in each dataset.
        num_tokens: Number of tokens of each key.
        num_bytes: Bytes of UTF-8 text, all keys together.
        seconds: Duration of this run.
        num_skipped: Number of skipped lines, which were not documents.
        skipped: The first 20 of them: file, line, byte_offset and reason.
        num_chunks_done, num_chunks_kept: Number of tasks of this run, and of earlier runs.
        num_bytes_done: Bytes of text of the tasks of this run.
        encoder: Name of the tokenizing library.
        notices: Sentences that the user should read, such as why another library was used.
        report: Counts of a row encoder, such as the tokens that are trained on.
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
    report: dict[str, int] = field(default_factory=dict)


def tokenize(
    inputs: Sequence[StrPath | InputFile],
    output_prefix: StrPath,
    tokenizer: Tokenizer,
    **options: Any,
) -> TokenizeResult:
    """Writes `{output_prefix}_{key}_document.bin/.idx` for each key.

    Documents keep the order of the files and lines. A document is one sequence, or one per sentence
    or list element; one without tokens has no sequence and gets no EOD. The output does not depend
    on the number of workers, the engine, or interruptions.

    The job divides its input into chunks, and keeps finished ones in the folder
    `{output_prefix}.journal` until all pairs are published together. A job that fails or is killed
    leaves the folder; the same call continues there. A finished job that is called again with the
    same inputs and options returns its earlier result.

    Args:
        inputs: Files, folders, patterns, "-" for standard input, or `InputFile`s.
        output_prefix: First part of the output paths; the folder must exist.
        tokenizer: The tokenizer. Its vocabulary decides the dtype: uint16 below 65,500 ids, else
            int32. If its encoder differs from the reference library on test cases or the first
            documents, the reference is used.
        options: The fields of `TokenizeOptions`.

    Raises:
        TextError: An input that cannot be read, a line that is not a document (the message names
            file and line), or an encoder that differs from the reference.
        ConfigError: An option that cannot work, an interrupted job with other options, or output
            that another command wrote.
        MillraceError: A worker process that died repeatedly, or another process that is building a
            pair.
        OSError: Output or a journal that cannot be written.
    """
    start = time.monotonic()
    checked = TokenizeOptions(
        inputs=inputs, output_prefix=output_prefix, tokenizer=tokenizer, **options
    )
    others: list[str] = []
    files = find_inputs(
        checked.inputs, separator=checked.separator, format=checked.format, others=others
    )
    _check_outputs(checked, files)
    tokenizer, notice = checked.tokenizer, ""
    if checked.row_encoder is None:
        tokenizer, notice = checked_tokenizer(tokenizer, _first_texts(files, checked))
        checked = replace(checked, tokenizer=tokenizer)
    workers = input_tasks.choose_workers(checked, files)
    endings = (IDX,) if checked.row_encoder is None else (IDX, LOSS)
    notices = [*filter(None, [notice]), *_notices(tokenizer, others)]
    with Run(
        checked.output_prefix,
        _identity(checked, files),
        inputs=_details(checked, files),
        outputs=[path + end for path in checked.final_prefixes.values() for end in endings],
        engine=checked.engine,
        restart=checked.restart,
        show_progress=checked.show_progress,
    ) as run:
        for notice in notices:
            run.note(notice)
        if run.result is None:
            result = _write(run, checked, files, workers)
            notices += result.notices
            return replace(result, seconds=time.monotonic() - start, notices=notices)
        run.note(ALREADY)
        result = TokenizeResult(**run.result)
        return replace(
            result,
            prefixes=checked.final_prefixes,  # from another folder, the output has another path
            num_chunks_done=0,
            num_chunks_kept=result.num_chunks_kept + result.num_chunks_done,
            num_bytes_done=0,
            seconds=0.0,
            notices=[*result.notices, ALREADY],
        )


def _identity(options: TokenizeOptions, files: Sequence[InputFile]) -> dict[str, Any]:
    """What decides the tasks: a job that differs cannot continue with the journal.

    Inputs may change: what a task has read is compared with what it would read now.
    """
    tokenizer, splitter, encoder = options.tokenizer, options.splitter, options.row_encoder
    name = None if options.format is None else options.format.name
    return {
        "job": "tokenize 4",
        **identity_of(options),
        "tokenizer": tokenizer.fingerprint,
        "encoder": tokenizer.encoder_name,
        "versions": tokenizer.versions,
        **tokenizer.options,
        "sentences": splitter and splitter.name,
        "keep_newlines": splitter and splitter.keep_newlines,
        **dict(zip(("first_token", "last_token"), options.edge_tokens, strict=True)),
        "partitions": options.num_partitions,
        "max_document_size": options.max_document_size,
        "inputs": [input_tasks.absolute(file.path) for file in files],
        "row_encoder": None if encoder is None else encoder.fingerprint(),
        "format": name and f"{type(options.format).__module__} {name}",
        # Sizes decide where the other shards begin.
        "bytes and times": options.shard and input_tasks.identities_of(files),
    }


def _details(options: TokenizeOptions, files: Sequence[InputFile]) -> dict[str, Any]:
    """What else decides the output: a result with other details is not of this job."""
    identities = json.dumps(input_tasks.identities_of(files)).encode()
    entries = {
        "on_error": options.on_error,
        "provenance": options.provenance,
        "checksums": options.checksums,
        "checksum of the inputs' sizes and times": checksum([identities]),
    }
    if any(file.is_pipe for file in files):
        entries["content of pipes"] = f"unknown, {os.urandom(6).hex()}"
    return entries


def _write(
    run: Run, options: TokenizeOptions, files: Sequence[InputFile], workers: int
) -> TokenizeResult:
    if options.upload_to is not None:
        last = {f"{name}.": name + IDX for name in options.prefixes_from("").values()}
        upload = Upload(run, options.upload_to, last)
    if options.restart:  # the job before may have had other keys
        prefix = glob.escape(os.fspath(options.output_prefix))
        for lock in glob.glob(f"{prefix}_*_*{LOCK}"):
            with contextlib.suppress(OSError, MillraceError), prefix_lock(lock.removesuffix(LOCK)):
                pass  # a dead builder's temporaries are gone now
    with contextlib.ExitStack() as stack:
        output = Output(options, stack, run.scratch)
        tasks = input_tasks.InputTasks(run, options, files, workers)
        _append_tasks(run, options, tasks, output, workers)
        output.finish()
        result = TokenizeResult(
            prefixes=options.final_prefixes,
            num_documents=output.num_documents,
            num_tokens=dict(zip(options.json_keys, output.num_tokens, strict=True)),
            num_bytes=output.num_bytes,
            seconds=0.0,
            num_skipped=output.num_rejects,
            skipped=output.rejects,
            num_chunks_done=run.num_done,
            num_chunks_kept=run.num_kept,
            num_bytes_done=output.num_bytes_done,
            encoder=options.tokenizer.encoder_name,
            notices=tasks.notices,
            report=dict(output.report),
        )
        if options.checksums:
            for builder, key in zip(output.builders, options.json_keys, strict=True):
                builder.add_provenance(_provenance_of(options, files, key, output))
        if options.row_encoder is not None:  # noted before there is a pair, even without checksums
            mask = {"loss_ranges": sum(map(len, output.loss_ranges)), "report": result.report}
            output.builders[0].add_provenance(mask)

        def make_public() -> None:
            output.publish()
            if options.upload_to is not None:
                upload.send_pairs(os.fspath(options.output_prefix), options.prefixes.values())

        run.publish(make_public, asdict(result))
    return result


def _append_tasks(
    run: Run, options: TokenizeOptions, tasks: input_tasks.InputTasks, output: Output, workers: int
) -> None:
    start = time.monotonic()

    def report(done: Done) -> tuple[int, str]:
        rate = output.num_bytes_done / 1e6 / max(time.monotonic() - start, 1e-9)
        counts = f"{output.num_documents:,} documents  {sum(output.num_tokens):,} tokens"
        return sum(part.size for part in done.task.payload.parts), f"{counts}  {rate:.1f} MB/s"

    try:
        for done in run.map(
            run_task,
            tasks.draw(),
            replace(options, inputs=()),
            phase="tokenize",
            workers=workers if options.engine == "local" else options.workers,
            total=tasks.size or None,
            report=report,
            keep=tasks.keep,
        ):
            output.append(done)
            input_tasks.remove_piece(done.task)
    except TextError as error:
        if num_chunks := run.num_done + run.num_kept:
            error.args = (f"{error}. The journal keeps what is done: {num_chunks:,} chunks",)
        raise


def _provenance_of(
    options: TokenizeOptions, files: Sequence[InputFile], key: str, output: Output
) -> dict[str, Any]:
    """The origin of a key's tokens."""
    tokenizer, splitter = options.tokenizer, options.splitter
    entries: dict[str, Any] = {
        "tool": f"millrace {version('millrace')} tokenize",
        "tokenizer": {
            "path": tokenizer.path,
            "sha256": tokenizer.fingerprint,
            "vocabulary_size": tokenizer.vocabulary_size,
            "encoder": tokenizer.encoder_name,
            **tokenizer.options,
        },
        "inputs": [file.path for file in files[:_LISTED_INPUTS]],
        "json_key": key,
        "append_eod": options.append_eod,
        "eod_token": tokenizer.eod_token,
    }
    skipped = {"number": output.num_rejects, "first": output.rejects}
    others = {
        "num_inputs": len(files) if len(files) > _LISTED_INPUTS else None,
        "row_encoder": None if options.row_encoder is None else options.row_encoder.fingerprint(),
        "bos_token": options.edge_tokens[0],
        "sentences": splitter and splitter.name,
        "keep_newlines": splitter and splitter.keep_newlines,
        "partitions": options.num_partitions if options.num_partitions > 1 else None,
        "shard": options.shard and list(options.shard),
        "skipped": skipped if output.num_rejects else None,
    }
    return entries | {name: value for name, value in others.items() if value is not None}


def _notices(tokenizer: Tokenizer, others: Sequence[str]) -> Iterator[str]:
    if others:
        names = ", ".join([*others[:_SHOWN_OTHERS], "..."][: len(others)])
        count = f"{len(others):,} file{'s' * (len(others) > 1)}"
        yield f"{count} in folders left out, as no known ending tells the format: {names}"
    if tokenizer.versions.get("function", "").startswith(UNSEEN):
        yield (
            "the code of the tokenizer's function cannot be seen, so this job cannot continue "
            "after an interruption: give Tokenizer.from_function a version"
        )


def _check_outputs(options: TokenizeOptions, files: Sequence[InputFile]) -> None:
    pairs = map(files_of, options.prefixes.values())
    outputs = itertools.chain([quarantine_path(options)], *pairs)
    real_paths = set(map(os.path.realpath, outputs))
    for file in files:
        if os.path.realpath(file.path) in real_paths:
            raise ConfigError(
                f"{file.path} is an input and would be overwritten; give another prefix"
            )


def _first_texts(files: Sequence[InputFile], options: TokenizeOptions) -> Iterator[str]:
    """Texts of the first documents, about 200 kB; none of a pipe, which is read once."""
    size = 0
    query = Query(
        keys=tuple(options.json_keys),
        reject=lambda *line: None,  # the job itself meets the line again
        id_key=options.id_key,
        max_size=options.max_document_size,
    )
    for file in files[:_FIRST_FILES]:
        # An Arrow file without batches has no part.
        for part in [] if file.is_pipe else parts_of(file, input_tasks.MB)[:1]:
            for documents in itertools.islice(part.file.format.read(part, query), _MOST_BATCHES):
                for text in texts_of(itertools.chain(*documents.texts)):
                    yield text[:_FIRST_SIZE]
                    size += len(text)
                    if size >= _FIRST_SIZE:
                        return
