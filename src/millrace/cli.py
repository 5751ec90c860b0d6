"""The command line: runs a verb with its options, and prints its report or error."""

import argparse
import errno
import io
import os
import re
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from millrace.checks import printable_lines
from millrace.errors import MillraceError
from millrace.interrupts import interrupt_once
from millrace.names import JOURNAL, SHUFFLE_JOURNAL, UNFINISHED
from millrace.option_class import add_options
from millrace.verbs import DamageError, UsageError, corpus, pairs, runs

VERBS = (*corpus.VERBS, *pairs.VERBS, *runs.VERBS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns 0, 1 after an error, or 130 after Ctrl-C; wrong usage exits with 2.

    Args:
        arguments: Command-line arguments; None: those of the process, which ends with the command.
    """
    is_process = arguments is None
    if is_process:
        interrupt_once()
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="backslashreplace")  # names may not fit the encoding
    try:
        status = _run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        status = _fail("interrupted", 130)
    if is_process:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # do not interrupt the exit of Python
    return status


def _run(arguments: Sequence[str]) -> int:
    values, rest = _make_parser().parse_known_args(_with_dashes(arguments))
    options = vars(values)
    run, parser = options.pop("run"), options.pop("parser")
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")  # with the usage of the verb
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
    except (KeyboardInterrupt, SystemError) as error:
        # A call in C that Ctrl-C interrupts may have a result too, which is a SystemError.
        if isinstance(error, SystemError) and not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        return _fail(f"interrupted; run {_what_remains(options)}", 130)


def _print(report: str) -> int:
    """Prints what a verb returns. Returns 0, or 1 if it cannot be written."""
    try:
        print(report, end="\n" if report else "", flush=True)
    except BrokenPipeError:
        _discard_output()
    except OSError as error:
        _discard_output()
        return _fail(f"the job is done, but its report cannot be written: {error.strerror}")
    return 0


def _discard_output() -> None:
    """Sends buffered output to the null device: else Python writes it at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_REMEDIES = {
    errno.ENOSPC: "Make room on that disk, or write elsewhere",
    errno.EDQUOT: "Make room in your quota, or write elsewhere",
    errno.EFBIG: "Raise the limit on file sizes (`ulimit -f`), or write elsewhere",
    errno.EMFILE: "Raise the limit on open files (`ulimit -n`)",
    errno.EACCES: "Grant access to it, or write elsewhere",
    errno.EROFS: "Let that disk be written, or write elsewhere",
}


def _describe_error(error: OSError, options: dict[str, Any]) -> str:
    """A message for an OSError, with the verb's output if it lacks a file name."""
    outputs = (options.get(name) for name in ("output_prefix", "output_dir", "target", "folder"))
    place = os.fsdecode(error.filename or next(filter(None, outputs), "the system"))
    message = f"{place}: {error.strerror or error}"
    if error.errno in _REMEDIES:
        message += f". {_REMEDIES[error.errno]}, and run {_what_remains(options)}"
    return message


def _what_remains(options: dict[str, Any]) -> str:
    """What a failed verb has left, after the words "and run"."""
    prefix, folder = options.get("output_prefix"), options.get("output_dir")
    journal = f"{prefix}{JOURNAL}" if prefix else os.path.join(folder or "", SHUFFLE_JOURNAL)
    if (prefix or folder) and os.path.isdir(journal):
        continues = f"it continues with what is done, in {journal}"
        command = f"the same command{' without --restart' * bool(options.get('restart'))}"
        return f"{command} again: {continues}. An old file is as it was"
    if prefix and os.path.exists(marker := f"{prefix}_{UNFINISHED}"):
        return f"the same split again: till then its shards are not a whole set, as {marker} says"
    return "again: nothing half-written was left behind, and an old file is as it was"


def _fail(message: str, status: int = 1) -> int:
    print(f"millrace: error: {printable_lines(message)}", file=sys.stderr)
    return status


def _with_dashes(arguments: Sequence[str]) -> list[str]:
    """Accepts --output_prefix for --output-prefix: users of Megatron-LM write both."""
    stop = [*arguments, "--"].index("--")
    options = (re.sub("^--[^=]*", lambda m: m[0].replace("_", "-"), a) for a in arguments[:stop])
    return [*options, *arguments[stop:]]


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="millrace",
        description="The data plane for LLM pre-training: from text to batches, with Megatron-LM's "
        "token files and sample order.",
        epilog="`millrace VERB --help` describes a verb. Options may be written with - or _.",
    )
    parser.add_argument("--version", action="version", version=f"millrace {version('millrace')}")
    groups = {"": parser.add_subparsers(title="verbs", metavar="VERB", required=True)}
    for verb in VERBS:
        group, _, name = verb.name.rpartition(" ")
        if group not in groups:
            text = "Lists what millrace keeps in a cache folder, and removes what no run can use."
            summary = "Lists, checks and prunes cached indices"
            actions = groups[""].add_parser(group, help=summary, description=text)
            groups[group] = actions.add_subparsers(title="actions", metavar="ACTION", required=True)
        summary = verb.text.partition(". ")[0].removesuffix(".")
        own = groups[group].add_parser(name, help=summary, description=verb.text)
        own.set_defaults(run=verb.run, parser=own)
        add_options(own, *verb.option_classes)
    return parser
