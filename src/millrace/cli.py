"""The command line: each verb is a few lines over the API."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import functools
import inspect
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from types import FrameType
from typing import Any

import numpy as np

from millrace.errors import DataError, MillraceError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns 0, or 1 if the job failed; wrong usage exits with 2.

    Args:
        arguments: Command-line arguments; None: those of the process, which ends with the command.
    """
    if arguments is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _InterruptOnce())
    try:
        status = _run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        status = _fail("interrupted; nothing half-written was left behind")
    if arguments is None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # do not interrupt the exit of Python
    return status


class _InterruptOnce:
    """A signal handler: only the first Ctrl-C counts, so none disturbs the cleanup."""

    def __init__(self) -> None:
        self._is_over = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self._is_over:
            self._is_over = True
            raise KeyboardInterrupt


def _run(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(_with_dashes(arguments))
    try:
        options.run(options)
    except MillraceError as error:
        return _fail(str(error))
    except BrokenPipeError:  # the reader of the output has closed it
        _discard_output()
        return 0
    except OSError as error:
        return _fail(_describe_error(error, options))
    try:
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
    errno.ENOSPC: "Make room on that disk",
    errno.EDQUOT: "Make room in your quota",
    errno.EFBIG: "Raise the limit on file sizes (`ulimit -f`)",
}


def _describe_error(error: OSError, options: argparse.Namespace) -> str:
    """A message for an OSError; the verb's output stands for a file name that it lacks."""
    outputs = (getattr(options, name, None) for name in ("output_prefix", "target", "folder"))
    place = error.filename or next(filter(None, outputs), "the system")
    if isinstance(place, bytes):
        place = os.fsdecode(place)
    message = f"{place}: {error.strerror or error}"
    if error.errno in _REMEDIES:
        message += (
            f". {_REMEDIES[error.errno]}, or write elsewhere, and run again: nothing half-written "
            "was left behind, and an old file is as it was"
        )
    return message


def _fail(message: str) -> int:
    print(f"millrace: error: {message}", file=sys.stderr)
    return 1


def _with_dashes(arguments: Sequence[str]) -> list[str]:
    """Accepts --output_prefix for --output-prefix: users of Megatron-LM write both."""
    changed: list[str] = []
    for place, argument in enumerate(arguments):
        if argument == "--":
            return [*changed, *arguments[place:]]
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            argument = name.replace("_", "-") + equals + value
        changed.append(argument)
    return changed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="millrace",
        description="The data plane for LLM pre-training: from text to batches, with Megatron-LM's "
        "token files and sample order.",
        epilog="`millrace VERB --help` describes a verb. Options may be written with - or _.",
    )
    parser.add_argument("--version", action="version", version=f"millrace {version('millrace')}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    _add_file_verbs(verbs)
    _add_index(verbs)
    _add_cache(verbs)
    demo = _add_verb(verbs, _demo)
    text = "output folder (default: millrace-demo)"
    demo.add_argument("--folder", default="millrace-demo", metavar="DIR", help=text)
    return parser


_SHARED_OPTIONS: dict[str, dict[str, Any]] = {
    "prefix": {"metavar": "PREFIX", "help": "path prefix of the input, without .bin or .idx"},
    "prefixes": {
        "nargs": "+",
        "metavar": "PREFIX",
        "help": "path prefixes of the inputs, without .bin or .idx",
    },
    "--output-prefix": {"required": True, "metavar": "PREFIX", "help": "path prefix of the output"},
    "--no-checksums": {
        "dest": "checksums",
        "action": "store_false",
        "help": "write no sidecar PREFIX.info.json; `verify` then checks the structure only",
    },
    "--json": {"dest": "as_json", "action": "store_true", "help": "print JSON"},
}


def _add_verb(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser],
    run: Callable[..., None],
    *shared_options: str,
) -> argparse.ArgumentParser:
    """Adds the verb of `run`, whose arguments are the options and whose docstring is the help."""
    text = inspect.getdoc(run) or ""  # there is none under python -OO
    summary = text.partition(".\n")[0].removesuffix(".")
    parser = verbs.add_parser(run.__name__.lstrip("_"), help=summary, description=text)
    parser.set_defaults(run=functools.partial(_run_with, run))
    for option in shared_options:
        parser.add_argument(option, **_SHARED_OPTIONS[option])
    return parser


def _run_with(run: Callable[..., None], options: argparse.Namespace) -> None:
    run(**{name: value for name, value in vars(options).items() if name != "run"})


def _add_file_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    add = _add_verb(verbs, _tokenize, "--output-prefix", "--no-checksums").add_argument
    text = "JSONL files"
    add("--input", dest="inputs", nargs="+", required=True, metavar="FILE", help=text)
    add("--tokenizer", required=True, metavar="FILE", help="Hugging Face tokenizer.json")
    text = "keys of the texts in each object (default: text)"
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help=text)
    text = "end each document with the end-of-document token"
    add("--append-eod", action="store_true", help=text)
    text = (
        "end-of-document token (default: the one of <|endoftext|>, <|end_of_text|>, </s>, <eos> "
        "that the tokenizer has)"
    )
    add("--eod-token", metavar="TEXT", help=text)
    add("--workers", type=_positive, metavar="N", help="worker processes (default: one per core)")

    add = _add_verb(verbs, _inspect, "prefix", "--json").add_argument
    add("--tokenizer", metavar="FILE", help="tokenizer.json to decode with")
    add("--document", type=int, default=0, metavar="N", help="document number (default: 0)")

    add = _add_verb(verbs, _verify, "prefixes", "--json").add_argument
    add("--threads", type=_positive, metavar="N", help="worker threads (default: one per core)")

    _add_verb(verbs, _merge, "prefixes", "--output-prefix", "--no-checksums")

    parser = _add_verb(verbs, _split, "prefix", "--output-prefix", "--no-checksums")
    add = parser.add_mutually_exclusive_group(required=True).add_argument
    add("--documents", type=_positive, metavar="N", help="documents per shard")
    text = "maximum size of a shard's tokens: 500M, 20G"
    add("--size", dest="num_bytes", type=_size, metavar="BYTES", help=text)

    add = _add_verb(verbs, _convert, "--no-checksums").add_argument
    add("source", metavar="SOURCE", help="input array or path prefix")
    add("target", metavar="TARGET", help="output array or path prefix")
    add("--dtype", type=_dtype, metavar="DTYPE", help="dtype of the target")
    add("--source-dtype", type=_dtype, metavar="DTYPE", help="dtype of raw tokens")
    text = "token that ends each document of a stream"
    add("--document-end", type=int, metavar="ID", help=text)


def _print_json(value: Any, *, ensure_ascii: bool = True) -> None:
    """Prints a dataclass, or a list of them."""
    print(json.dumps(value, default=dataclasses.asdict, ensure_ascii=ensure_ascii, indent=2))


def _tokenize(tokenizer: str, eod_token: str | None, **options: Any) -> None:
    """Converts JSONL files to token files.

    Reads plain, gzip and zstd files with one JSON object per line. Writes Megatron-LM's token files
    PREFIX_KEY_document.bin/.idx, one pair per key.
    """
    from millrace.jobs import tokenize
    from millrace.text import Tokenizer

    result = tokenize(tokenizer=Tokenizer(tokenizer, eod_token), show_progress=True, **options)
    for key, prefix in result.prefixes.items():
        counts = f"{result.num_documents:,} documents, {result.num_tokens[key]:,} tokens"
        print(f"{prefix}.bin/.idx: {counts}")
    megabytes = result.num_bytes / 1e6
    rate = megabytes / max(result.seconds, 1e-9)
    print(f"{megabytes:,.1f} MB of text in {result.seconds:.1f} s, {rate:.1f} MB/s")


def _inspect(prefix: str, tokenizer: str | None, document: int, as_json: bool) -> None:
    """Describes a token file.

    Prints counts, dtype and lengths, and the head and tail of a document. With a tokenizer, the
    document is decoded, and the occurrences of each special token are counted.
    """
    from millrace.inspect import describe, format_description
    from millrace.store import IndexedDataset
    from millrace.text import Tokenizer

    decoder = Tokenizer(tokenizer) if tokenizer else None
    description = describe(IndexedDataset(prefix), tokenizer=decoder, document=document)
    if as_json:
        _print_json(description, ensure_ascii=False)
    else:
        print(format_description(description))


def _verify(prefixes: list[str], threads: int | None, as_json: bool) -> None:
    """Checks token files.

    Checks the structure of each pair, and every byte if the pair has a sidecar with checksums.
    Names the damaged blocks, sequences and documents. Exits with 1 if a pair is damaged.
    """
    from millrace.store import verify

    reports = verify(prefixes, threads=threads)
    if as_json:
        _print_json(reports)
    else:
        for report in reports:
            what = "structure and checksums" if report.has_checksums else "structure (no checksums)"
            print(f"{report.prefix}: {'DAMAGED' if report.problems else 'ok'}, {what}")
            for problem in report.problems:
                print(f"  {problem}")
    damaged = sum(1 for report in reports if report.problems)
    if damaged:
        raise DataError(f"{damaged} of {len(reports)} datasets are damaged")


def _merge(**options: Any) -> None:
    """Concatenates token files.

    Documents keep their order.
    """
    from millrace.jobs import merge

    print(merge(**options))


def _split(**options: Any) -> None:
    """Cuts a token file into shards.

    The shards PREFIX_00000, PREFIX_00001, ... hold whole documents. `merge` restores the file.
    """
    from millrace.jobs import split
    from millrace.store import IndexedDataset

    for prefix in split(**options):
        print(IndexedDataset(prefix))


def _convert(target: str, **options: Any) -> None:
    """Converts token arrays to token files and back, or changes the dtype.

    NAME.npy is a NumPy array (one dimension: a stream of tokens; two: each row a document),
    NAME.bin without NAME.idx holds raw tokens, and any other name is a path prefix.
    """
    from millrace.jobs import convert

    convert(target=target, **options)
    print(f"{target} is written")


def _add_index(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser(
        "index",
        help="Builds the indices of a training run ahead of time",
        description="Builds every index of a training run, so that the run starts without building "
        "any. The arguments are Megatron-LM's, in a YAML or TOML file, as options, or both (an "
        "option overrides the file).",
    )
    parser.add_argument("config", nargs="?", metavar="FILE", help="YAML or TOML file of arguments")
    parser.add_argument(
        "--megatron-cache",
        metavar="DIR",
        help="write Megatron-LM's cache files to this folder (its --data-cache-path)",
    )
    parser.add_argument(
        "--tokenizer-identifiers",
        metavar="JSON",
        help="identifiers of Megatron-LM's tokenizer, part of those files' names: JSON, a JSON "
        "file, or a *-description.txt written by Megatron-LM",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    data = parser.add_argument_group("data", "a list has prefixes, or a weight before each prefix")
    data.add_argument("--data-path", nargs="+", metavar="ITEM", help="list divided by --split")
    for name in ("train", "valid", "test"):
        data.add_argument(
            f"--{name}-data-path", nargs="+", metavar="ITEM", help=f"list for {name} only"
        )
    data.add_argument("--data-args-path", metavar="FILE", help="file with the --data-path list")
    data.add_argument(
        "--per-split-data-args-path", metavar="FILE", help="JSON file with a list per split"
    )
    data.add_argument("--split", metavar="SHARES", help='train, valid, test: "969,30,1"')
    parser.add_argument(
        "--wait-limit",
        type=float,
        metavar="SECONDS",
        help="maximum wait for another process that builds the same indices (default: no limit)",
    )
    order = parser.add_argument_group("order")
    for name in ("seq-length", "seed", "train-samples", "train-iters", "global-batch-size"):
        order.add_argument(f"--{name}", metavar="N")
    for name in ("eval-iters", "eval-interval", "num-dataset-builder-threads"):
        order.add_argument(f"--{name}", metavar="N")
    order.add_argument(
        "--num-samples",
        nargs=3,
        metavar=("TRAIN", "VALID", "TEST"),
        help="instead of iterations and batch sizes: whole numbers, or none for one epoch",
    )
    order.add_argument("--mid-level-dataset-surplus", metavar="SHARE")
    for name in ("skip-train", "full-validation", "multiple-validation-sets"):
        order.add_argument(f"--{name}", action="store_true", default=None)
    order.add_argument(
        "--data-cache-path", "--cache", metavar="DIR", help="cache folder of millrace's indices"
    )
    parser.set_defaults(run=_index)


def _index(options: argparse.Namespace) -> None:
    from millrace.jobs import index
    from millrace.jobs.indexing import format_result
    from millrace.run import arguments

    given = arguments.read_arguments(options.config) if options.config else {}
    tokenizer = given.pop("tokenizer_identifiers", None)
    left_out = arguments.unknown_arguments(given)
    chosen = {name: value for name, value in vars(options).items() if name in arguments.NAMES}
    given.update({name: value for name, value in chosen.items() if value is not None})
    if options.tokenizer_identifiers:
        tokenizer = arguments.read_identifiers(options.tokenizer_identifiers)
    result = index(
        arguments.config_from(given),
        megatron_cache_folder=options.megatron_cache,
        tokenizer=tokenizer,
        wait_limit=options.wait_limit,
        show_progress=True,
    )
    if options.json:
        print(json.dumps(dataclasses.asdict(result), indent=2))
        return
    print(format_result(result))
    if left_out:
        print(f"arguments that do not concern the data were left out: {', '.join(left_out)}")


def _add_cache(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser(
        "cache",
        help="Lists, checks and prunes cached indices",
        description="Lists what millrace keeps in a cache folder, and removes what no run can use.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, text in (
        ("list", "list the entries"),
        ("check", "read every array and compare its checksum; exit with 1 if one is damaged"),
        (
            "prune",
            "remove leftovers, damaged sets, runs whose token files are missing or changed, and "
            "sets that no run needs; keep entries that are being built or cannot be judged here",
        ),
    ):
        action = actions.add_parser(name, help=text, description=f"{text.capitalize()}.")
        action.add_argument("folder", metavar="DIR", help="cache folder")
        action.add_argument("--json", action="store_true", help="print JSON")
        action.set_defaults(run=_cache, action=name)
        if name == "prune":
            action.add_argument(
                "--older-than",
                type=float,
                metavar="DAYS",
                help="also remove older runs, and older entries that cannot be judged",
            )
            action.add_argument("--dry-run", action="store_true", help="remove nothing, only list")


def _cache(options: argparse.Namespace) -> None:
    from millrace.jobs import list_cache, prune_cache

    if options.action == "prune":
        entries = prune_cache(
            options.folder, older_than_days=options.older_than, dry_run=options.dry_run
        )
        what = "to remove" if options.dry_run else "removed"
    else:
        entries = list_cache(options.folder, check_contents=options.action == "check")
        what = "there" if options.action == "list" else "checked"
    if options.json:
        print(json.dumps([dataclasses.asdict(entry) for entry in entries], indent=2))
    else:
        for entry in entries:
            data = f", of {len(entry.prefixes)} token files" if entry.prefixes else ""
            sets = f", needs {', '.join(entry.sets)}" if entry.sets else ""
            print(
                f"{entry.kind:8} {entry.name}  {entry.num_bytes / 1e6:,.1f} MB, "
                f"{entry.age / (24 * 60 * 60):.1f} days old{data}{sets}"
            )
            for line in [entry.reason] if entry.reason else [*entry.problems, *entry.doubts]:
                print(f"  {line}")
        total = sum(entry.num_bytes for entry in entries) / 1e6
        print(f"{len(entries)} entries {what}, {total:,.1f} MB")
    damaged = sum(1 for entry in entries if entry.problems and entry.kind == "set")
    if options.action == "check" and damaged:
        raise DataError(
            f"{damaged} sets of arrays are damaged; `millrace cache prune` removes them"
        )


def _demo(folder: str) -> None:
    """Runs the whole pipeline on the text of Python's standard library.

    Makes a corpus of source files and docstrings, trains a small tokenizer, tokenises both domains,
    blends them, draws batches for 2 ranks, stops, resumes with 4, and checks that no sample was
    lost or repeated. Needs no network.
    """
    from millrace.demo import run_demo

    run_demo(folder)


def _dtype(text: str) -> np.dtype[Any]:
    try:
        return np.dtype(text)
    except TypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a dtype; write uint16 or int32"
        ) from None


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def _size(text: str) -> int:
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if not number.isdecimal() or int(number) < 1 or unit not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 500M or 20G")
    return int(number) * _UNITS[unit]


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)
