"""The command line: each verb is an option class, a function of the API, and its report."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import io
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple, TypeVar

from millrace import inspect, jobs
from millrace.checks import printable_lines
from millrace.demo import run_demo
from millrace.encoding import Tokenizer
from millrace.encoding.training import train_tokenizer
from millrace.engine import ALREADY, ENVIRONMENT
from millrace.engine.progress import Progress
from millrace.errors import ConfigError, DataError, MillraceError
from millrace.files import atomic_file
from millrace.interrupts import interrupt_once
from millrace.jobs import benchmark_report, indexing
from millrace.jobs.benchmark_ranks import BenchOptions
from millrace.jobs.benchmarking import RunOptions, run_of
from millrace.jobs.cache import CacheOptions, PruneOptions, format_entries
from millrace.jobs.converting import ConvertOptions
from millrace.jobs.indexing import IndexOptions
from millrace.jobs.reshape import MergeOptions, SplitOptions
from millrace.jobs.verb_options import (
    DemoOptions,
    InputListOption,
    InspectOptions,
    JsonOption,
    SentenceOptions,
    TokenizerOptions,
    TrainOptions,
    VerifyOptions,
)
from millrace.names import JOURNAL, SHUFFLE_JOURNAL
from millrace.option_class import add_options, take_options
from millrace.run import arguments as run_arguments
from millrace.shards import read_metadata, verify_shards
from millrace.shards.metadata import is_shards_folder
from millrace.shuffling.shuffle_options import ShuffleOptions
from millrace.store import IndexedDataset, verify
from millrace.text import SentenceSplitter, read_input_list
from millrace.tokenizing import TokenizeOptions

T = TypeVar("T")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns 0, or 1 if the job failed; wrong usage exits with 2.

    Args:
        arguments: Command-line arguments; None: those of the process, which ends with the command.
    """
    if arguments is not None:
        return _run_interruptibly(arguments)
    interrupt_once()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # names may not fit the encoding
    status = _run_interruptibly(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # do not interrupt the exit of Python
    return status


def _run_interruptibly(arguments: Sequence[str]) -> int:
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        return _fail("interrupted; nothing half-written was left behind")


def _run(arguments: Sequence[str]) -> int:
    arguments = _with_dashes(arguments)
    options = vars(make_parser().parse_args(arguments))
    run, parser = options.pop("run"), options.pop("parser")
    try:
        return _print(run(**options))
    except UsageError as error:
        parser.error(str(error))
        raise  # it has ended the process
    except DamageError as error:
        return _print(error.report) or _fail(str(error))
    except MillraceError as error:
        return _fail(str(error))
    except BrokenPipeError:  # the reader of the output has closed it
        _discard_output()
        return 0
    except OSError as error:
        return _fail(_describe_error(error, options))


def _print(report: str) -> int:
    """Prints what a verb returns. Returns 0, or 1 if that is not possible."""
    try:
        print(report, end="\n" if report else "")
        if sys.stdout is not None:  # None in a process without stdout
            sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
    except OSError as error:
        _discard_output()
        return _fail(f"the job is done, but its report cannot be written: {error.strerror}")
    return 0


def _discard_output() -> None:
    """Sends buffered output to the null device, so that Python does not write it at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_REMEDIES = {
    errno.ENOSPC: "Make room on that disk, or write elsewhere",
    errno.EDQUOT: "Make room in your quota, or write elsewhere",
    errno.EFBIG: "Raise the limit on file sizes (`ulimit -f`), or write elsewhere",
    errno.EMFILE: "Raise the limit on open files (`ulimit -n`)",
}


def _describe_error(error: OSError, options: dict[str, Any]) -> str:
    """A message for an OSError; the verb's output stands for a file name that it lacks."""
    outputs = (options.get(name) for name in ("output_prefix", "output_dir", "target", "folder"))
    place = os.fsdecode(error.filename or next(filter(None, outputs), "the system"))
    message = f"{place}: {error.strerror or error}"
    if error.errno in _REMEDIES:
        message += f". {_REMEDIES[error.errno]}, and run {_what_remains(options)}"
    return message


def _what_remains(options: dict[str, Any]) -> str:
    """What a verb that failed has left, after the words "and run"."""
    prefix, folder = options.get("output_prefix"), options.get("output_dir")
    journal = f"{prefix}{JOURNAL}" if prefix else os.path.join(folder or "", SHUFFLE_JOURNAL)
    if (prefix or folder) and os.path.isdir(journal):
        paths = (
            os.path.join(folder, name) for folder, _, names in os.walk(journal) for name in names
        )
        size = sum(map(os.path.getsize, paths)) / 1e6
        return (
            f"the same command again: it continues with what is done, {size:,.1f} MB in {journal}. "
            "An old file is as it was"
        )
    return "again: nothing half-written was left behind, and an old file is as it was"


def _fail(message: str) -> int:
    print(f"millrace: error: {printable_lines(message)}", file=sys.stderr)
    return 1


def _with_dashes(arguments: Sequence[str]) -> list[str]:
    """Accepts --output_prefix for --output-prefix: users of Megatron-LM write both."""
    stop = [*arguments, "--"].index("--")
    options = (re.sub("^--[^=]*", lambda m: m[0].replace("_", "-"), a) for a in arguments[:stop])
    return [*options, *arguments[stop:]]


class UsageError(Exception):
    """Options that cannot work together; the command exits with 2."""


class DamageError(DataError):
    """Damage that a verb has found; its report is printed first.

    Args:
        message: The error.
        report: What the verb prints.
    """

    def __init__(self, message: str, report: str) -> None:
        super().__init__(message)
        self.report = report


class Verb(NamedTuple):
    """A verb: the words that call it, a function of its options that returns the report to print,
    their option classes, and a text whose first sentence is the summary."""

    name: str
    run: Callable[..., str]
    option_classes: Sequence[type]
    text: str


def make_parser() -> argparse.ArgumentParser:
    """The parser of all verbs."""
    parser = argparse.ArgumentParser(
        prog="millrace",
        description="The data plane for LLM pre-training: from text to batches, with Megatron-LM's "
        "token files and sample order.",
        epilog="`millrace VERB --help` describes a verb. Options may be written with - or _.",
    )
    parser.add_argument("--version", action="version", version=f"millrace {version('millrace')}")
    groups = {"": parser.add_subparsers(title="verbs", metavar="VERB", required=True)}
    text = "Lists what millrace keeps in a cache folder, and removes what no run can use."
    cache = groups[""].add_parser(
        "cache", help="Lists, checks and prunes cached indices", description=text
    )
    groups["cache"] = cache.add_subparsers(title="actions", metavar="ACTION", required=True)
    for verb in VERBS:
        group, _, name = verb.name.rpartition(" ")
        summary = verb.text.partition(". ")[0].removesuffix(".")
        own = groups[group].add_parser(name, help=summary, description=verb.text)
        own.set_defaults(run=verb.run, parser=own)
        add_options(own, *verb.option_classes)
        if name == "shuffle":  # withdrawn: `_shuffle` names the remedy
            own.add_argument("--eod", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def checked(option_class: type[T], options: dict[str, Any]) -> T:
    """The options of a command; those that are wrong together are wrong usage."""
    try:
        return option_class(**options)
    except ConfigError as error:
        raise UsageError(str(error)) from None


def json_text(value: Any, *, ensure_ascii: bool = True) -> str:
    """A dataclass, or a list of them, as JSON.

    What stdout cannot encode is written as JSON's escapes: those of Python would not be JSON.
    """
    text = json.dumps(value, default=dataclasses.asdict, ensure_ascii=ensure_ascii, indent=2)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(value, default=dataclasses.asdict, indent=2)
    return text


# ---- tokenize, shuffle ----


def _tokenize(
    tokenizer: str, input_list: str | None = None, as_json: bool = False, **options: Any
) -> str:
    """Converts text to token files."""
    for name, value in ENVIRONMENT.items():  # one worker does its work in this process
        os.environ.setdefault(name, value)
    options["inputs"] = _all_inputs(options.get("inputs", []), input_list)
    settings = take_options(TokenizerOptions, options)
    sentences = take_options(SentenceOptions, options)
    if "library" in sentences:
        options["splitter"] = SentenceSplitter(**sentences)
    # Ray writes about lost nodes to stdout, which is the report's.
    with contextlib.redirect_stdout(sys.stderr):
        result = jobs.tokenize(
            tokenizer=Tokenizer(tokenizer, **settings), show_progress=True, **options
        )
    rate = result.num_bytes_done / 1e6 / max(result.seconds, 1e-9)
    if as_json:
        report = {
            "documents": result.num_documents,
            "tokens": sum(result.num_tokens.values()),
            "tokens_by_key": result.num_tokens,
            "bytes": result.num_bytes,
            "seconds": round(result.seconds, 3),
            "skipped": result.num_skipped,
            "first_skipped": result.skipped,
            "chunks_done": result.num_chunks_done,
            "chunks_kept": result.num_chunks_kept,
            "megabytes_per_second": round(rate, 1),
            "encoder": result.encoder,
            "notices": result.notices,
            "prefixes": result.prefixes,
        }
        return json.dumps(report)
    lines = []
    for key, prefix in result.prefixes.items():
        counts = f"{result.num_documents:,} documents, {result.num_tokens[key]:,} tokens"
        lines.append(f"{prefix}.bin/.idx: {counts}")
    lines.append(
        f"{result.num_bytes / 1e6:,.1f} MB of text in {result.seconds:.1f} s, {rate:.1f} MB/s, "
        f"by {result.encoder}"
    )
    if result.num_chunks_kept:
        num_chunks = result.num_chunks_kept + result.num_chunks_done
        lines.append(
            f"{result.num_chunks_kept:,} of {num_chunks:,} chunks were kept from an earlier run"
        )
    if result.num_skipped:
        lines.append(f"{result.num_skipped:,} lines were skipped:")
        for row in result.skipped:
            lines.append(f"  {row['file']}, line {row['line']}: {row['reason']}")
        if result.num_skipped > len(result.skipped):
            lines.append(f"  and {result.num_skipped - len(result.skipped):,} more")
    return "\n".join(lines)


def _shuffle(as_json: bool = False, eod: str | None = None, **options: Any) -> str:
    """Permutes sequences of many domains globally."""
    if eod is not None:
        raise ConfigError(
            "--eod must be left out: a shuffle adds no tokens. `millrace convert --append-eod` "
            "puts an EOD token after each document, once"
        )
    # Ray writes about lost nodes to stdout, which is the report's.
    with contextlib.redirect_stdout(sys.stderr):
        input_dir = options.pop("input_dir", None)
        result = jobs.shuffle(input_dir, show_progress=True, **options)
    if as_json:
        return json.dumps(dataclasses.asdict(result))
    lines = [
        f"{result.output_dir}: {result.num_items:,} {result.unit} of {len(result.domain_stats):,} "
        f"domains in {len(result.shard_sizes):,} shards, {result.num_tokens:,} tokens"
    ]
    if ALREADY in result.notices:
        return "\n".join([*lines, ALREADY])
    rate = result.num_bytes / 1e6 / max(result.seconds, 1e-9)
    lines.append(
        f"{result.num_bytes / 1e6:,.1f} MB in {result.seconds:.1f} s, {rate:,.1f} MB/s, by the "
        f"plan {result.plan}"
    )
    if result.num_tasks_kept:
        num_tasks = result.num_tasks_kept + result.num_tasks_done
        lines.append(
            f"{result.num_tasks_kept:,} of {num_tasks:,} tasks were kept from an earlier run"
        )
    return "\n".join(lines)


def _all_inputs(inputs: list[str], input_list: str | None) -> list[str]:
    if not inputs and input_list is None:
        raise ConfigError("there is no input; give --input or --input-list")
    if input_list == "-" and "-" in inputs:
        raise ConfigError(
            "standard input is both --input and --input-list. Write one of them to a file"
        )
    return inputs + (read_input_list(input_list) if input_list is not None else [])


# ---- train-tokenizer, inspect, verify ----


def _train_tokenizer(**options: Any) -> str:
    has_terminal = sys.stderr is not None and sys.stderr.isatty()
    result = train_tokenizer(show_progress=has_terminal, **options)
    return (
        f"{result.tokenizer.path}: {result.tokenizer.vocabulary_size:,} tokens, trained on "
        f"{result.num_texts:,} texts of {result.num_bytes / 1e6:,.1f} MB in {result.seconds:.1f} s"
    )


def _inspect(as_json: bool = False, **values: Any) -> str:
    options = checked(InspectOptions, values)
    folder, decoder, number = options.prefix, None, options.document
    if options.tokenizer is not None:
        decoder = Tokenizer(options.tokenizer, tiktoken_pattern=options.tiktoken_pattern)
    if is_shards_folder(folder):
        shards = inspect.describe_shards(
            folder, dtype=options.dtype, tokenizer=decoder, document=number
        )
        if options.svg is not None:
            _write_shares(folder, options.dtype, options.svg)
        return json_text(shards, ensure_ascii=False) if as_json else inspect.format_shards(shards)
    if (options.svg, options.dtype) != (None, None):
        raise ConfigError(
            f"--svg and --dtype are for the output folder of a shuffle, and {folder} is not a "
            "folder: leave them out"
        )
    description = inspect.describe(IndexedDataset(folder), tokenizer=decoder, document=number)
    if as_json:
        return json_text(description, ensure_ascii=False)
    return inspect.format_description(description)


def _write_shares(folder: str, dtype: str | None, svg: str) -> None:
    place = os.path.dirname(svg) or "."
    if not os.path.isdir(place):
        raise ConfigError(f"the folder of {svg} does not exist: make it first")
    if not svg or os.path.isdir(svg) or not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"the picture cannot be written to {svg!r}: give another --svg")
    picture = inspect.shares_svg(read_metadata(folder, dtype=dtype), folder=folder)
    with atomic_file(svg) as file:
        file.write(picture.encode())


def _verify(as_json: bool = False, **values: Any) -> str:
    options = checked(VerifyOptions, values)
    num_bytes, lock = 0, threading.Lock()
    with Progress("verify") as progress:

        def on_bytes(count: int) -> None:
            nonlocal num_bytes
            with lock:  # several threads call this
                num_bytes += count
                progress.update(num_bytes, f"{num_bytes / 1e9:,.1f} GB")

        threads, dtype = options.threads, options.dtype
        reports = [
            verify_shards(prefix, dtype=dtype, threads=threads, on_bytes=on_bytes)
            if is_shards_folder(prefix)
            else verify([prefix], threads=threads, on_bytes=on_bytes)[0]
            for prefix in options.prefixes
        ]
    lines = []
    for report in reports:
        what = "structure and checksums" if report.has_checksums else "structure (no checksums)"
        lines.append(f"{report.prefix}: {'DAMAGED' if report.problems else 'ok'}, {what}")
        lines += [f"  {printable_lines(line)}" for line in [*report.problems, *report.notices]]
    text = json_text(reports) if as_json else "\n".join(lines)
    num_damaged = sum(1 for report in reports if report.problems)
    if num_damaged:
        raise DamageError(f"{num_damaged} of {len(reports)} datasets are damaged", text)
    return text


# ---- merge, split, convert, index, bench ----


def _merge(**options: Any) -> str:
    return f"{jobs.merge(**options)}"


def _split(**options: Any) -> str:
    checked(SplitOptions, options)
    return "\n".join(str(IndexedDataset(prefix)) for prefix in jobs.split(**options))


def _convert(**options: Any) -> str:
    jobs.convert(**options)
    return f"{options['target']} is written"


def _index(
    config: str | None = None,
    tokenizer_identifiers: str | None = None,
    as_json: bool = False,
    **options: Any,
) -> str:
    values = run_arguments.read_arguments(config) if config else {}
    tokenizer = values.pop("tokenizer_identifiers", None)
    unknown = run_arguments.unknown_arguments(values)
    values.update({name: options.pop(name) for name in run_arguments.NAMES if name in options})
    tokenizer = tokenizer_identifiers or tokenizer
    if isinstance(tokenizer, str):
        tokenizer = run_arguments.read_identifiers(tokenizer)
    run = run_arguments.config_from(values)
    result = jobs.index(run, tokenizer=tokenizer, show_progress=True, **options)
    if as_json:
        return json_text(result)
    text = indexing.format_result(result)
    if unknown:
        text += f"\narguments that do not concern the data were left out: {', '.join(unknown)}"
    return text


def _bench(as_json: bool = False, **options: Any) -> str:
    run = run_of(**take_options(RunOptions, options))
    result = jobs.bench(run, **options)
    return json_text(result) if as_json else benchmark_report.format_result(result)


# ---- cache, demo ----


def _list(folder: str, as_json: bool = False) -> str:
    entries = jobs.list_cache(folder)
    return json_text(entries) if as_json else format_entries(entries, "there")


def _check(folder: str, as_json: bool = False) -> str:
    entries = jobs.list_cache(folder, check_contents=True)
    text = json_text(entries) if as_json else format_entries(entries, "checked")
    num_damaged = sum(1 for entry in entries if entry.problems and entry.kind == "set")
    if num_damaged:
        raise DamageError(
            f"{num_damaged} sets of arrays are damaged; `millrace cache prune` removes them", text
        )
    return text


def _prune(folder: str, as_json: bool = False, **options: Any) -> str:
    entries = jobs.prune_cache(folder, **options)
    if as_json:
        return json_text(entries)
    return format_entries(entries, "to remove" if options.get("dry_run") else "removed")


def _demo(**options: Any) -> str:
    run_demo(**dataclasses.asdict(DemoOptions(**options)))
    return ""


# ---- all verbs ----

VERBS = (
    Verb(
        "tokenize",
        _tokenize,
        (TokenizeOptions, InputListOption, TokenizerOptions, SentenceOptions, JsonOption),
        "Converts text to token files. Reads JSONL, Parquet, Arrow, CSV and plain text, also "
        "compressed, and writes Megatron-LM's token files PREFIX_KEY_document.bin/.idx, one pair "
        "per key. A job that was killed continues when the same command runs again.",
    ),
    Verb(
        "shuffle",
        _shuffle,
        (ShuffleOptions, JsonOption),
        "Shuffles token files globally. Cuts the token files of many domains into sequences "
        "of a fixed length, permutes all of them, and writes shards that are token files "
        "themselves. A job that was killed continues when the same command runs again.",
    ),
    Verb(
        "train-tokenizer",
        _train_tokenizer,
        (TrainOptions,),
        "Trains a tokenizer. Reads the same files as `tokenize`, and writes a byte-level BPE "
        "tokenizer as a Hugging Face tokenizer.json.",
    ),
    Verb(
        "inspect",
        _inspect,
        (InspectOptions, JsonOption),
        "Describes a token file, or the output folder of a shuffle. Prints counts, dtype and "
        "lengths, and the head and tail of a document, and where it came from. With a tokenizer, "
        "the document is decoded, and the occurrences of each special token are counted. Of a "
        "shuffle, prints the shards, the domains and how evenly they are spread.",
    ),
    Verb(
        "verify",
        _verify,
        (VerifyOptions, JsonOption),
        "Checks token files and output folders of shuffles. Checks the structure of each, and "
        "every byte if it has checksums. Names the damaged blocks, sequences and documents of a "
        "pair, and the damaged and stray files of a folder. Exits with 1 if anything is damaged.",
    ),
    Verb(
        "merge",
        _merge,
        (MergeOptions,),
        "Concatenates token files. Documents keep their order and their origins. Data of "
        "different tokenizers are refused.",
    ),
    Verb(
        "split",
        _split,
        (SplitOptions,),
        "Cuts a token file into shards. The shards PREFIX_00000, PREFIX_00001, ... hold whole "
        "documents. `merge` restores the file.",
    ),
    Verb(
        "convert",
        _convert,
        (ConvertOptions,),
        "Converts token arrays to token files and back, or changes the dtype. NAME.npy is a "
        "NumPy array (one dimension: a stream of tokens; two: each row a document), NAME.bin "
        "without NAME.idx holds raw tokens, and any other name is a path prefix.",
    ),
    Verb(
        "index",
        _index,
        (IndexOptions, JsonOption),
        "Builds the indices of a training run ahead of time. The run then starts without "
        "building any. The arguments are Megatron-LM's, in a YAML or TOML file, as options, or "
        "both (an option overrides the file).",
    ),
    Verb(
        "bench",
        _bench,
        (RunOptions, BenchOptions, JsonOption),
        "Measures how fast this machine feeds a run. Draws batches of the training data, cold "
        "and warm, and says how long training steps would wait, what bounds the rate, and how many "
        "accelerators it could feed.",
    ),
    Verb(
        "cache list",
        _list,
        (CacheOptions, JsonOption),
        "Lists the entries.",
    ),
    Verb(
        "cache check",
        _check,
        (CacheOptions, JsonOption),
        "Reads every array and compares its checksum. Exits with 1 if one is damaged.",
    ),
    Verb(
        "cache prune",
        _prune,
        (PruneOptions, JsonOption),
        "Removes what no run can use: leftovers, damaged sets, runs whose token files are "
        "missing or changed, and sets that no run needs. Keeps entries that are being built or "
        "cannot be judged here.",
    ),
    Verb(
        "demo",
        _demo,
        (DemoOptions,),
        "Runs the whole pipeline on the text of Python's standard library. Makes a corpus of "
        "source files and docstrings, trains a small tokenizer, tokenises both domains, blends "
        "them, draws batches for 2 ranks, stops, resumes with 4, and checks that no sample was "
        "lost or repeated. Needs no network.",
    ),
)
