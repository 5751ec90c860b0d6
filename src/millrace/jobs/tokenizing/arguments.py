"""The arguments of a tokenise job: checked, and what they say about the job."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

from millrace import checks
from millrace.encoding import Tokenizer
from millrace.errors import ConfigError
from millrace.jobs.tokenizing import plan
from millrace.jobs.tokenizing.output import Output
from millrace.jobs.tokenizing.task import Settings
from millrace.store.info import read_info
from millrace.store.publish import files_of
from millrace.text import InputFile, SentenceSplitter, check_keys, find_inputs

ON_ERROR = "stop", "skip", "quarantine"
ON_UNKNOWN = "keep", "reject"
PROVENANCE = "parquet", "none"
ENGINES = "local", "ray"

_LISTED_INPUTS = 1_000  # in the sidecar
_SHOWN_OTHERS = 3
_MOST_PAIRS = 256  # that a task writes at once: each has open files


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The checked arguments of a job.

    Attributes:
        files: The input files.
        notice: Which files of folders are left out, or empty.
        settings: What each task needs to know.
        prefixes: Path prefix of the indexed dataset of each key.
        quarantine: Path of the file of rejected lines.
        journal: Path of the journal.
        workers: Number of worker processes as given, or None.
        resources: Number of workers, and longest document.
        task_size: Bytes of input of a task.
        shard: (number, count), or None.
        engine, provenance, checksums, restart, show_progress: As given.
    """

    files: list[InputFile]
    notice: str
    settings: Settings
    prefixes: dict[str, str]
    quarantine: str
    journal: str
    workers: int | None
    resources: plan.Resources
    task_size: int
    shard: tuple[int, int] | None
    engine: str
    provenance: str
    checksums: bool
    restart: bool
    show_progress: bool

    @property
    def planned_workers(self) -> int:
        """The number that decides the plan; all shards of a job have the same plan."""
        return self.resources.workers if self.shard is None else self.shard[1]


def checked_arguments(
    *,
    inputs: Any,
    output_prefix: Any,
    tokenizer: Any,
    json_keys: Any,
    id_key: Any,
    separator: Any,
    format: Any,  # noqa: A002
    append_eod: Any,
    prepend_bos: Any,
    on_unknown: Any,
    splitter: Any,
    partitions: Any,
    keep_sequential_samples: Any,
    on_error: Any,
    check_rate: Any,
    checksums: Any,
    provenance: Any,
    shard: Any,
    engine: Any,
    workers: Any,
    memory: Any,
    chunk_size: Any,
    max_document_size: Any,
    restart: Any,
    show_progress: Any,
) -> Arguments:
    """The arguments of `tokenize`; a ConfigError or TextError for one that cannot work."""
    output_prefix = checks.one_path("output_prefix", output_prefix)
    keys = check_keys(json_keys)
    _check_choice("on_error", on_error, ON_ERROR)
    _check_choice("provenance", provenance, PROVENANCE)
    _check_choice("engine", engine, ENGINES)
    if not isinstance(tokenizer, Tokenizer):
        raise ConfigError(
            f"tokenizer is {checks.shown(tokenizer)}; give "
            f"millrace.encoding.Tokenizer({checks.shown(tokenizer)})"
        )
    if not isinstance(id_key, str):
        raise ConfigError(f"id_key is {checks.shown(id_key)}; give a key")
    if splitter is not None and not isinstance(splitter, SentenceSplitter):
        raise ConfigError(
            f"splitter is {checks.shown(splitter)}; give a millrace.text.SentenceSplitter"
        )
    check_rate = checks.real("check_rate", check_rate)
    if not 0 <= check_rate <= 1:
        raise ConfigError(f"check_rate is {check_rate}; a share from 0 to 1 is possible")
    first_token, last_token, unknown = _checked_tokens(
        tokenizer, append_eod, prepend_bos, on_unknown
    )
    workers = _optional("workers", workers)
    resources = plan.resources_for(
        workers,
        _optional("memory", memory),
        _optional("max_document_size", max_document_size),
    )
    shard = None if shard is None else _checked_shard(shard)
    settings = Settings(
        tokenizer=tokenizer,
        keys=keys,
        id_key=id_key,
        separator=separator,
        format=format,
        splitter=splitter,
        first_token=first_token,
        last_token=last_token,
        unknown=unknown,
        num_partitions=_checked_partitions(
            partitions, keep_sequential_samples, shard, num_keys=len(keys)
        ),
        on_error=on_error,
        max_document_size=resources.max_document_size,
        check_rate=check_rate,
    )
    others: list[str] = []
    files = find_inputs(
        checks.paths("inputs", inputs), separator=separator, format=format, others=others
    )
    if workers is None and engine == "local":
        count = min(resources.workers, plan.workers_worth(files))
        resources = replace(resources, workers=count)
    level = "document" if splitter is None else "sentence"
    prefixes = {key: f"{output_prefix}_{key}_{level}" for key in keys}
    quarantine = f"{output_prefix}.quarantine.jsonl"
    _check_outputs(files, prefixes.values(), quarantine, shard)
    return Arguments(
        files=files,
        notice=_notice_of(others),
        settings=settings,
        prefixes=prefixes,
        quarantine=quarantine,
        journal=f"{output_prefix}.journal",
        workers=workers,
        resources=resources,
        task_size=_checked_task_size(
            chunk_size, files, resources.workers if shard is None else shard[1]
        ),
        shard=shard,
        engine=engine,
        provenance=provenance,
        checksums=checks.flag("checksums", checksums),
        restart=checks.flag("restart", restart),
        show_progress=checks.flag("show_progress", show_progress),
    )


def identity(arguments: Arguments) -> dict[str, Any]:
    """What decides the output: another job cannot continue with this one's journal.

    Inputs may change, as what a task has read is compared with what it would read now.
    """
    settings = arguments.settings
    tokenizer, splitter = settings.tokenizer, settings.splitter
    entries: dict[str, Any] = {
        "job": "tokenize 1",
        "tokenizer": tokenizer.fingerprint,
        "encoder": tokenizer.encoder_name,
        "versions": tokenizer.versions,
        "json_keys": list(settings.keys),
        "id_key": settings.id_key,
        "separator": settings.separator,
        **tokenizer.options,
        "sentences": None if splitter is None else splitter.name,
        "keep_newlines": splitter is not None and splitter.keep_newlines,
        "first_token": settings.first_token,
        "last_token": settings.last_token,
        "unknown": settings.unknown,
        "partitions": settings.num_partitions,
        "max_document_size": settings.max_document_size,
        "shard": None if arguments.shard is None else list(arguments.shard),
        "inputs": [plan.absolute(file.path) for file in arguments.files],
    }
    if settings.format is not None:
        entries["format"] = f"{type(settings.format).__module__} {settings.format.name}"
    if arguments.shard is not None:  # the sizes decide where the other shards begin, too
        entries["bytes and times"] = [identity_of(file) for file in arguments.files]
    return entries


def identity_of(file: InputFile) -> list[int | None]:
    """What changes if the file does: size, and time of the last change."""
    return [file.size, file.mtime_ns]


def provenance_of(arguments: Arguments, key: str, output: Output) -> dict[str, Any]:
    """The origin of a key's tokens, for the sidecar."""
    settings, files = arguments.settings, arguments.files
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
    if arguments.shard is not None:
        entries["shard"] = list(arguments.shard)
    if output.num_rejects:
        entries["skipped"] = {"number": output.num_rejects, "first": output.rejects}
    return entries


def _notice_of(others: Sequence[str]) -> str:
    if not others:
        return ""
    names = ", ".join(others[:_SHOWN_OTHERS]) + (", ..." if len(others) > _SHOWN_OTHERS else "")
    count = "1 file" if len(others) == 1 else f"{len(others):,} files"
    return f"{count} in folders left out, as no known ending tells the format: {names}"


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {checks.shown(value)}; one of {', '.join(choices)} is needed")


def _optional(name: str, value: Any) -> int | None:
    return None if value is None else checks.whole(name, value, 1)


def _checked_shard(shard: Any) -> tuple[int, int]:
    if not isinstance(shard, (tuple, list)) or len(shard) != 2:
        raise ConfigError(f"shard is {checks.shown(shard)}; give (number, count)")
    count = checks.whole("the number of shards", shard[1], 1)
    return checks.whole("shard", shard[0], 0, count - 1), count


def _checked_partitions(
    partitions: Any,
    keep_sequential_samples: Any,
    shard: tuple[int, int] | None,
    *,
    num_keys: int,
) -> int:
    """The number of groups among which documents are dealt; 1 keeps their order."""
    count = checks.whole("partitions", partitions, 1)
    if checks.flag("keep_sequential_samples", keep_sequential_samples):
        count = 1  # runs of documents, one after the other: the order of the input
    if shard is not None and count > 1:
        raise ConfigError(
            f"partitions is {count}, which deals the documents of the whole input: shards cannot "
            "do it, as each reads a part. Leave one of the two out"
        )
    if count * num_keys > _MOST_PAIRS:
        raise ConfigError(
            f"partitions is {count} and there are {num_keys} keys, so each task would write "
            f"{count * num_keys} pairs at once; at most {_MOST_PAIRS} are possible"
        )
    return count


def _checked_tokens(
    tokenizer: Tokenizer, append_eod: Any, prepend_bos: Any, on_unknown: Any
) -> tuple[int | None, int | None, int | None]:
    """The tokens that start and end documents, and the one that makes them unfit, or None."""
    _check_choice("on_unknown", on_unknown, ON_UNKNOWN)
    last_token = tokenizer.eod if checks.flag("append_eod", append_eod) else None
    first_token = tokenizer.bos if checks.flag("prepend_bos", prepend_bos) else None
    if prepend_bos and first_token is None:
        raise ConfigError(
            f"{tokenizer.path} does not say which token starts a document: name it with --bos-token"
        )
    if on_unknown == "keep":
        return first_token, last_token, None
    if tokenizer.unknown is None:
        raise ConfigError(
            f"on_unknown is 'reject', but {tokenizer.path} has no unknown token: it encodes every "
            "text. Leave the option out"
        )
    if tokenizer.unknown in (first_token, last_token):
        raise ConfigError(
            f"on_unknown is 'reject', but the unknown token of {tokenizer.path} also starts or "
            "ends documents, so every document has it. Leave the option out, or name another token "
            "with --eod-token or --bos-token"
        )
    return first_token, last_token, tokenizer.unknown


def _checked_task_size(chunk_size: Any, files: Sequence[InputFile], workers: int) -> int:
    """The size of a task; by the size of the input if none is given."""
    if chunk_size is None:
        return plan.task_size_for(files, workers)
    size = checks.whole("chunk_size", chunk_size, 1)
    num_bytes = sum(file.size or 0 for file in files)
    if num_bytes // size >= plan.PIECES:
        raise ConfigError(
            f"chunk_size is {size}, and the input has {num_bytes:,} bytes: at most "
            f"{plan.PIECES:,} chunks are possible. Give at least {num_bytes // plan.PIECES + 1}"
        )
    return size


def _check_outputs(
    files: Sequence[InputFile],
    prefixes: Iterable[str],
    quarantine: str,
    shard: tuple[int, int] | None,
) -> None:
    prefixes = list(prefixes)
    outputs = {os.path.realpath(path) for prefix in prefixes for path in files_of(prefix)}
    outputs.add(os.path.realpath(quarantine))
    if os.path.isdir(quarantine):
        raise ConfigError(f"{quarantine} is a folder; remove it, or give another prefix")
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
