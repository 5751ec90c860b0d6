"""The command line: verbs, each a few lines over the API."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import json
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from types import FrameType
from typing import Any

import numpy as np

from millrace.errors import DataError, MillraceError

EXIT_FAILED = 1  # the job failed; argparse exits with 2 for usage


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns 0, or 1 if the job failed; wrong usage exits with 2.

    Args:
        arguments: None: those of the process, which ends with the command.
    """
    if arguments is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _InterruptOnce())
    try:
        status = _run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        status = _fail("interrupted; nothing half-written was left behind")
    if arguments is None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Python's own end is no place to interrupt
    return status


class _InterruptOnce:
    """A signal handler: the first Ctrl-C ends the command, and none disturbs its cleaning up."""

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
    except BrokenPipeError:  # the reader of our output has seen enough
        _drop_output()
        return 0
    except OSError as error:
        return _fail(_what_failed(error, options))
    try:
        if sys.stdout is not None:  # as it is for a process without one
            sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
    except OSError as error:
        _drop_output()
        return _fail(f"the job is done, but its report cannot be written: {error.strerror}")
    return 0


def _drop_output() -> None:
    """Sends nowhere what is still to be printed, so that Python's end does not try again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _what_failed(error: OSError, options: argparse.Namespace) -> str:
    """An error of the system as a message; if it names no file, with what was to be written."""
    outputs = (getattr(options, name, None) for name in ("output_prefix", "target", "folder"))
    place = error.filename or next(filter(None, outputs), "the system")
    if isinstance(place, bytes):
        place = os.fsdecode(place)
    text = f"{place}: {error.strerror or error}"
    if error.errno in _NO_ROOM:
        text += (
            f". {_NO_ROOM[error.errno]}, or write elsewhere, and run again: nothing half-written "
            "was left behind, and an old file is as it was"
        )
    return text


_NO_ROOM = {
    errno.ENOSPC: "Make room on that disk",
    errno.EDQUOT: "Make room in your quota",
    errno.EFBIG: "Raise the limit on file sizes (`ulimit -f`)",
}


def _fail(message: str) -> int:
    print(f"millrace: error: {message}", file=sys.stderr)
    return EXIT_FAILED


def _with_dashes(arguments: Sequence[str]) -> list[str]:
    """Accepts --output_prefix for --output-prefix: Megatron-LM's users write both."""
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
        description="Carries text to a training loop: Megatron-LM's token files and sample order.",
        epilog="millrace VERB --help says more about a verb. Options may be written with - or _.",
    )
    parser.add_argument("--version", action="version", version=f"millrace {version('millrace')}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    _add_tokenize(verbs)
    _add_inspect(verbs)
    _add_verify(verbs)
    _add_merge(verbs)
    _add_split(verbs)
    _add_convert(verbs)
    _add_index(verbs)
    _add_cache(verbs)
    _add_demo(verbs)
    return parser


def _add_tokenize(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser(
        "tokenize",
        help="turn JSONL files into token files",
        description="Turns JSONL files (plain, gzip or zstd; one object a line) into Megatron-LM "
        "token files PREFIX_KEY_document.bin/.idx, one pair for each key.",
    )
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help="JSONL files")
    parser.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="path and first part of the names"
    )
    parser.add_argument(
        "--tokenizer", required=True, metavar="FILE", help="a Hugging Face tokenizer.json"
    )
    parser.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys whose values are texts (default: text)",
    )
    parser.add_argument(
        "--append-eod", action="store_true", help="end each document with an end-of-document token"
    )
    parser.add_argument(
        "--eod-token",
        metavar="TEXT",
        help="that token (default: the one of <|endoftext|>, <|end_of_text|>, </s>, <eos> that the "
        "tokenizer has)",
    )
    parser.add_argument(
        "--workers", type=_positive, metavar="N", help="worker processes (default: one a core)"
    )
    _add_checksums(parser)
    parser.set_defaults(run=_tokenize)


def _tokenize(options: argparse.Namespace) -> None:
    from millrace.jobs import tokenize
    from millrace.text import Tokenizer

    result = tokenize(
        options.input,
        options.output_prefix,
        Tokenizer(options.tokenizer, options.eod_token),
        json_keys=options.json_keys,
        append_eod=options.append_eod,
        workers=options.workers,
        checksums=options.checksums,
        show_progress=True,
    )
    rate = result.num_bytes / 1e6 / max(result.seconds, 1e-9)
    for key, prefix in result.prefixes.items():
        print(
            f"{prefix}.bin/.idx: {result.num_documents:,} documents, "
            f"{result.num_tokens[key]:,} tokens"
        )
    print(f"{result.num_bytes / 1e6:,.1f} MB of text in {result.seconds:.1f} s, {rate:.1f} MB/s")


def _add_inspect(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser(
        "inspect",
        help="show what is in a token file",
        description="Shows a token file's counts, dtype, lengths, and the head and tail of a "
        "document; with a tokenizer, decoded, and how often each special token occurs.",
    )
    parser.add_argument("prefix", metavar="PREFIX", help="path of the pair, without .bin or .idx")
    parser.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json to decode with")
    parser.add_argument(
        "--document", type=int, default=0, metavar="N", help="the document to show (default: 0)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_inspect)


def _inspect(options: argparse.Namespace) -> None:
    from millrace.inspect import describe, format_description
    from millrace.store import IndexedDataset
    from millrace.text import Tokenizer

    tokenizer = Tokenizer(options.tokenizer) if options.tokenizer else None
    description = describe(
        IndexedDataset(options.prefix), tokenizer=tokenizer, document=options.document
    )
    if options.json:
        print(json.dumps(dataclasses.asdict(description), ensure_ascii=False, indent=2))
    else:
        print(format_description(description))


def _add_checksums(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-checksums",
        dest="checksums",
        action="store_false",
        help="write no sidecar PREFIX.info.json, with which verify finds any changed byte",
    )


def _add_verify(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser(
        "verify",
        help="check token files",
        description="Checks token files: their structure always, and every byte where there is a "
        "sidecar with checksums. Names the damaged blocks, sequences and documents. Exits with 1 "
        "if anything is damaged.",
    )
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help="paths without .bin or .idx")
    parser.add_argument(
        "--threads", type=_positive, metavar="N", help="that read and hash (default: one a core)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_verify)


def _verify(options: argparse.Namespace) -> None:
    from millrace.store import verify

    reports = verify(options.prefixes, threads=options.threads)
    if options.json:
        print(json.dumps([dataclasses.asdict(report) for report in reports], indent=2))
    else:
        for report in reports:
            what = "structure and checksums" if report.has_checksums else "structure (no checksums)"
            print(f"{report.prefix}: {'DAMAGED' if report.problems else 'well'}, {what}")
            for problem in report.problems:
                print(f"  {problem}")
    damaged = sum(1 for report in reports if report.problems)
    if damaged:
        raise DataError(f"{damaged} of {len(reports)} datasets are damaged")


def _add_merge(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser(
        "merge",
        help="append token files to each other",
        description="Appends token files to each other; documents keep their order.",
    )
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help="the files to append")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="the new file")
    _add_checksums(parser)
    parser.set_defaults(run=_merge)


def _merge(options: argparse.Namespace) -> None:
    from millrace.jobs import merge

    print(merge(options.prefixes, options.output_prefix, checksums=options.checksums))


def _add_split(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser(
        "split",
        help="cut a token file into shards",
        description="Cuts a token file into shards PREFIX_00000, PREFIX_00001, ... of whole "
        "documents. Merging them gives the file back.",
    )
    parser.add_argument("prefix", metavar="PREFIX", help="the file to cut")
    parser.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="first part of the shards' names"
    )
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--documents", type=_positive, metavar="N", help="documents in each shard")
    size.add_argument(
        "--size", type=_size, metavar="BYTES", help="of tokens in each shard, at most: 500M, 20G"
    )
    _add_checksums(parser)
    parser.set_defaults(run=_split)


def _split(options: argparse.Namespace) -> None:
    from millrace.jobs import split
    from millrace.store import IndexedDataset

    prefixes = split(
        options.prefix,
        options.output_prefix,
        documents=options.documents,
        num_bytes=options.size,
        checksums=options.checksums,
    )
    for prefix in prefixes:
        print(IndexedDataset(prefix))


def _add_convert(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser(
        "convert",
        help="token arrays to token files and back; other dtypes",
        description="Converts between token files and arrays of tokens, and from one dtype to "
        "another. NAME.npy is a NumPy array (one dimension: a stream of tokens; two: each row a "
        "document), NAME.bin without NAME.idx the bare tokens, anything else a path prefix.",
    )
    parser.add_argument("source", metavar="SOURCE", help="what to read")
    parser.add_argument("target", metavar="TARGET", help="what to write")
    parser.add_argument("--dtype", type=_dtype, metavar="DTYPE", help="of the target")
    parser.add_argument("--source-dtype", type=_dtype, metavar="DTYPE", help="of bare tokens")
    parser.add_argument(
        "--document-end", type=int, metavar="ID", help="the token that ends each document"
    )
    _add_checksums(parser)
    parser.set_defaults(run=_convert)


def _convert(options: argparse.Namespace) -> None:
    from millrace.jobs import convert

    convert(
        options.source,
        options.target,
        dtype=options.dtype,
        source_dtype=options.source_dtype,
        document_end=options.document_end,
        checksums=options.checksums,
    )
    print(f"{options.target} is written")


def _add_index(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser(
        "index",
        help="build the indices of a training run ahead of time",
        description="Builds every index of a training run, so that it starts without building "
        "any. The arguments are Megatron-LM's, in a YAML or TOML file, as options, or both (an "
        "option counts more).",
    )
    parser.add_argument("config", nargs="?", metavar="FILE", help="YAML or TOML with arguments")
    parser.add_argument(
        "--megatron-cache",
        metavar="DIR",
        help="write the files that Megatron-LM itself looks for (its --data-cache-path)",
    )
    parser.add_argument(
        "--tokenizer-identifiers",
        metavar="JSON",
        help="what Megatron-LM's tokenizer calls itself, a part of those files' names: JSON, "
        "a file of it, or a *-description.txt that Megatron-LM wrote",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    data = parser.add_argument_group("data", "a list is prefixes, or a weight before each prefix")
    data.add_argument("--data-path", nargs="+", metavar="ITEM", help="one list, cut by --split")
    for name in ("train", "valid", "test"):
        data.add_argument(
            f"--{name}-data-path", nargs="+", metavar="ITEM", help=f"a list for {name} alone"
        )
    data.add_argument("--data-args-path", metavar="FILE", help="that holds the one list")
    data.add_argument(
        "--per-split-data-args-path", metavar="FILE", help="JSON with train, valid and test lists"
    )
    data.add_argument("--split", metavar="SHARES", help='train, valid, test: "969,30,1"')
    parser.add_argument(
        "--wait-limit",
        type=float,
        metavar="SECONDS",
        help="to wait for another process that builds the same (default: no limit)",
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
        help="in place of iterations and batch sizes: whole numbers, or none for one epoch",
    )
    order.add_argument("--mid-level-dataset-surplus", metavar="SHARE")
    for name in ("skip-train", "full-validation", "multiple-validation-sets"):
        order.add_argument(f"--{name}", action="store_true", default=None)
    order.add_argument(
        "--data-cache-path", "--cache", metavar="DIR", help="where millrace keeps its indices"
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
        print(f"not about data, and left out: {', '.join(left_out)}")


def _add_cache(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser(
        "cache",
        help="list, check and prune cached indices",
        description="Shows what millrace keeps in a cache folder, and removes what no run can use.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, text in (
        ("list", "show what is there"),
        ("check", "read every array and compare its checksum; exits with 1 if one is damaged"),
        (
            "prune",
            "remove leftovers, damaged sets, runs whose token files are gone or changed, and sets "
            "that no run needs; what is being built, or cannot be judged from here, stays",
        ),
    ):
        action = actions.add_parser(name, help=text, description=f"{text.capitalize()}.")
        action.add_argument("folder", metavar="DIR", help="the cache folder")
        action.add_argument("--json", action="store_true", help="print JSON")
        action.set_defaults(run=_cache, action=name)
        if name == "prune":
            action.add_argument(
                "--older-than",
                type=float,
                metavar="DAYS",
                help="remove runs that were indexed longer ago, and what cannot be judged, too",
            )
            action.add_argument("--dry-run", action="store_true", help="remove nothing")


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
        raise DataError(f"{damaged} sets of arrays are damaged; `millrace cache prune` them")


def _add_demo(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser(
        "demo",
        help="do the whole job on the text of Python's standard library",
        description="Makes a corpus of Python's standard library (source files and docstrings), "
        "trains a small tokenizer, tokenises both domains, blends them, draws batches for 2 ranks, "
        "stops, resumes with 4, and checks that nothing was lost or repeated. Needs no network.",
    )
    parser.add_argument(
        "--folder",
        default="millrace-demo",
        metavar="DIR",
        help="where to put the files (default: millrace-demo)",
    )
    parser.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> None:
    from millrace.demo import run_demo

    run_demo(options.folder)


def _dtype(text: str) -> np.dtype[Any]:
    try:
        dtype = np.dtype(text)
    except TypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is no dtype; write uint16 or int32") from None
    return dtype


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def _size(text: str) -> int:
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if not number.isdecimal() or int(number) < 1 or unit not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 500M or 20G")
    return int(number) * _UNITS[unit]


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
