"""The command line: verbs, each a few lines over the API."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from millrace.errors import MillraceError

EXIT_FAILED = 1  # the job failed; argparse exits with 2 for usage


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns 0, or 1 if the job failed; wrong usage exits with 2."""
    options = _parser().parse_args(_with_dashes(sys.argv[1:] if arguments is None else arguments))
    try:
        options.run(options)
        sys.stdout.flush()
    except MillraceError as error:
        return _fail(str(error))
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        return _fail(f"{error.filename or 'the system'}: {error.strerror or error}")
    except KeyboardInterrupt:
        return _fail("interrupted; nothing half-written was left behind")
    return 0


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
        description="Shows a token file's counts, dtype, length histogram and one document.",
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


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
