"""The command line: each verb is a few lines over the API."""

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
from collections.abc import Callable, Sequence
from importlib.metadata import version
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from millrace.checks import printable_lines
from millrace.errors import ConfigError, DataError, MillraceError

if TYPE_CHECKING:
    from millrace.jobs import CacheEntry
    from millrace.run import DatasetConfig

    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns 0, or 1 if the job failed; wrong usage exits with 2.

    Args:
        arguments: Command-line arguments; None: those of the process, which ends with the command.
    """
    if arguments is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        handler = _InterruptOnce()
        signal.signal(signal.SIGINT, handler)
        sys.unraisablehook = handler.on_unraisable
    stdout = sys.stdout
    if arguments is None and isinstance(stdout, io.TextIOWrapper) and stdout.errors == "strict":
        stdout.reconfigure(errors="backslashreplace")  # names may not fit the encoding
    try:
        status = _run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        status = _fail("interrupted; nothing half-written was left behind")
    if arguments is None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # do not interrupt the exit of Python
    return status


class _InterruptOnce:
    """A signal handler: only the first Ctrl-C counts, so none disturbs the cleanup."""

    _is_over = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self._is_over:
            self._is_over = True
            raise KeyboardInterrupt

    def on_unraisable(self, dropped: sys.UnraisableHookArgs) -> None:
        """Python drops what is raised while it runs a finalizer: then the next Ctrl-C counts."""
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            self._is_over = False
        else:
            sys.__unraisablehook__(dropped)


def _run(arguments: Sequence[str]) -> int:
    options = vars(_parser().parse_args(_with_dashes(arguments)))
    run = options.pop("run")
    is_done = False
    try:
        run(**options)
        is_done = True
        if sys.stdout is not None:  # None in a process without stdout
            sys.stdout.flush()
    except MillraceError as error:
        return _fail(str(error))
    except BrokenPipeError:  # the reader of the output has closed it
        _discard_output()
    except OSError as error:
        if not is_done:
            return _fail(_describe_error(error, options))
        _discard_output()
        return _fail(_report_failure(error))
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
    place = error.filename or next(filter(None, outputs), "the system")
    if isinstance(place, bytes):
        place = os.fsdecode(place)
    message = f"{place}: {error.strerror or error}"
    if error.errno in _REMEDIES:
        message += f". {_REMEDIES[error.errno]}, and run {_what_remains(options)}"
    return message


def _what_remains(options: dict[str, Any]) -> str:
    """What a verb that failed has left, after the words "and run"."""
    from millrace.shards.metadata import JOURNAL

    prefix, folder = options.get("output_prefix"), options.get("output_dir")
    journal = f"{prefix}.journal" if prefix else os.path.join(folder or "", JOURNAL)
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


def _report_failure(error: OSError) -> str:
    return f"the job is done, but its report cannot be written: {error.strerror}"


def _fail(message: str) -> int:
    print(f"millrace: error: {printable_lines(message)}", file=sys.stderr)
    return 1


def _with_dashes(arguments: Sequence[str]) -> list[str]:
    """Accepts --output_prefix for --output-prefix: users of Megatron-LM write both."""
    stop = [*arguments, "--"].index("--")
    options = (re.sub("^--[^=]*", lambda m: m[0].replace("_", "-"), a) for a in arguments[:stop])
    return [*options, *arguments[stop:]]


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
    _add_bench(verbs)
    text = """Runs the whole pipeline on the text of Python's standard library. Makes a corpus of
        source files and docstrings, trains a small tokenizer, tokenises both domains, blends them,
        draws batches for 2 ranks, stops, resumes with 4, and checks that no sample was lost or
        repeated. Needs no network."""
    add = _add_verb(verbs, _demo, text).add_argument
    add("--folder", default="millrace-demo", metavar="DIR", help="output folder (millrace-demo)")
    return parser


ENCODERS = (
    "auto",
    "fastokens",
    "tokenizers",
    "tiktoken",
    "sentencepiece",
    "bytes",
)

_SHARED_OPTIONS: dict[str, dict[str, Any]] = {
    "prefix": {"metavar": "PREFIX", "help": "path prefix of the input, without .bin or .idx"},
    "prefixes": {"nargs": "+", "metavar": "PREFIX", "help": "path prefixes of the inputs"},
    "folder": {"metavar": "DIR", "help": "cache folder"},
    "--output-prefix": {"required": True, "metavar": "PREFIX", "help": "path prefix of the output"},
    "--no-checksums": {
        "dest": "checksums",
        "action": "store_false",
        "help": "write no sidecar PREFIX.info.json; `verify` then checks the structure only",
    },
    "--no-origins": {
        "dest": "origins",
        "action": "store_false",
        "help": "leave out the origins of the documents, PREFIX.origins.parquet",
    },
    "--json": {"dest": "as_json", "action": "store_true", "help": "print JSON"},
}


_SHUFFLE_DTYPES = "uint16", "uint32", "int32"
_SHARD_DTYPE: dict[str, Any] = {
    "choices": _SHUFFLE_DTYPES,
    "help": "dtype of a folder whose metadata.json does not say it (default: uint32)",
}


def _add_verb(
    verbs: Verbs, run: Callable[..., None], text: str, *shared_options: str
) -> argparse.ArgumentParser:
    """Adds the verb of `run`, whose arguments are the options; its summary is a sentence."""
    summary = text.partition(". ")[0].removesuffix(".")
    name = run.__name__.lstrip("_").replace("_", "-")
    parser = verbs.add_parser(name, help=summary, description=text)
    parser.set_defaults(run=run)
    for option in shared_options:
        parser.add_argument(option, **_SHARED_OPTIONS[option])
    return parser


def _add_file_verbs(verbs: Verbs) -> None:
    _add_tokenize(verbs)
    _add_shuffle(verbs)

    text = """Trains a tokenizer. Reads the same files as `tokenize`, and writes a byte-level BPE
        tokenizer as a Hugging Face tokenizer.json."""
    add = _add_verb(verbs, _train_tokenizer, text).add_argument
    text = "files, folders and patterns; - is standard input"
    add("--input", dest="inputs", nargs="+", required=True, metavar="PATH", help=text)
    add("--output", required=True, metavar="FILE", help="the tokenizer.json to write")
    text = "number of tokens: the special ones, the 256 bytes, and merges"
    add(
        "--vocab-size",
        dest="vocabulary_size",
        type=_positive,
        required=True,
        metavar="N",
        help=text,
    )
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="text keys (default: text)")
    text = "special tokens, with the first ids (default: <|endoftext|>)"
    default = ["<|endoftext|>"]
    add("--special-tokens", nargs="*", default=default, metavar="TOKEN", help=text)
    text = "text to train on, taken evenly from all inputs: 500M, 2G (default: all)"
    add("--max-bytes", type=_size, metavar="SIZE", help=text)
    text = r"text between the documents of a plain text file: '\n\n'"
    add("--separator", type=_escaped, metavar="TEXT", help=text)

    text = """Describes a token file, or the output folder of a shuffle. Prints counts, dtype and
        lengths, and the head and tail of a document, and where it came from. With a tokenizer, the
        document is decoded, and the occurrences of each special token are counted. Of a shuffle,
        prints the shards, the domains and how evenly they are spread."""
    add = _add_verb(verbs, _inspect, text, "--json").add_argument
    add("prefix", metavar="PREFIX", help="path prefix of a token file, or folder of a shuffle")
    add("--tokenizer", metavar="FILE", help="tokenizer file or folder to decode with")
    add("--tiktoken-pattern", metavar="PATTERN", help="for a .tiktoken file, as in `tokenize`")
    add("--document", type=int, default=0, metavar="N", help="document number (default: 0)")
    text = "write a picture of the domains' shares along the output of a shuffle"
    add("--svg", metavar="FILE", help=text)
    add("--dtype", **_SHARD_DTYPE)

    text = """Checks token files and output folders of shuffles. Checks the structure of each, and
        every byte if it has checksums. Names the damaged blocks, sequences and documents of a pair,
        and the damaged and stray files of a folder. Exits with 1 if anything is damaged."""
    add = _add_verb(verbs, _verify, text, "--json").add_argument
    text = "path prefixes of token files, and folders of shuffles"
    add("prefixes", nargs="+", metavar="PREFIX", help=text)
    add("--dtype", **_SHARD_DTYPE)
    add("--threads", type=_positive, metavar="N", help="worker threads (default: one per core)")

    text = """Concatenates token files. Documents keep their order and their origins. Data of
        different tokenizers are refused."""
    options = "--output-prefix", "--no-checksums", "--no-origins"
    add = _add_verb(verbs, _merge, text, "prefixes", *options).add_argument
    text = "merge data of different tokenizers or splitters of sentences, too"
    add("--any-tokenizer", action="store_true", help=text)

    text = """Cuts a token file into shards. The shards PREFIX_00000, PREFIX_00001, ... hold whole
        documents. `merge` restores the file."""
    parser = _add_verb(verbs, _split, text, "prefix", *options)
    add = parser.add_mutually_exclusive_group(required=True).add_argument
    add("--documents", type=_positive, metavar="N", help="documents per shard")
    add("--size", dest="num_bytes", type=_size, metavar="BYTES", help="bytes per shard: 500M, 20G")

    text = """Converts token arrays to token files and back, or changes the dtype. NAME.npy is a
        NumPy array (one dimension: a stream of tokens; two: each row a document), NAME.bin without
        NAME.idx holds raw tokens, and any other name is a path prefix."""
    add = _add_verb(verbs, _convert, text, *options[1:]).add_argument
    add("source", metavar="SOURCE", help="input array or path prefix")
    add("target", metavar="TARGET", help="output array or path prefix")
    add("--dtype", type=_dtype, metavar="DTYPE", help="dtype of the target")
    add("--source-dtype", type=_dtype, metavar="DTYPE", help="dtype of raw tokens")
    add("--document-end", type=int, metavar="ID", help="last token of each document of a stream")


def _add_tokenize(verbs: Verbs) -> None:
    text = """Converts text to token files. Reads JSONL, Parquet, Arrow, CSV and plain text, also
        compressed, and writes Megatron-LM's token files PREFIX_KEY_document.bin/.idx, one pair per
        key. A job that was killed continues when the same command runs again."""
    parser = _add_verb(verbs, _tokenize, text, "--output-prefix", "--no-checksums")
    add = parser.add_argument_group("input").add_argument
    text = "files, folders, patterns, or - for standard input"
    add("--input", dest="inputs", nargs="+", default=[], metavar="FILE", help=text)
    add("--input-list", metavar="FILE", help="file with an input per line")
    text = "text keys or columns; dots reach into objects (default: text)"
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help=text)
    text = (
        r"text between the documents of a plain text file: '\n\n' (default: a file is a document)"
    )
    add("--separator", type=_escaped, metavar="TEXT", help=text)
    text = "key of a document's id, for the provenance (default: id)"
    add("--id-key", default="id", metavar="KEY", help=text)
    add("--shard", type=_shard, metavar="I/N", help="do part I (from 0) of N; `merge` joins them")

    add = parser.add_argument_group("tokenizer").add_argument
    text = "tokenizer.json, transformers folder, sentencepiece .model, .tiktoken file, or `bytes`"
    add("--tokenizer", required=True, metavar="FILE", help=text)
    text = "tokenizing library (default: the fastest that agrees with the reference)"
    add("--encoder", choices=ENCODERS, default="auto", help=text)
    text = "for a .tiktoken file: gpt2, cl100k_base, o200k_base, ..., or a regular expression"
    add("--tiktoken-pattern", metavar="PATTERN", help=text)
    text = "add the special tokens of the tokenizer's post-processor to each text"
    add("--add-special-tokens", action="store_true", help=text)
    text = 'encode "<|endoftext|>" in a text as plain text, not as that token'
    add("--plain-special-tokens", dest="special_tokens_in_text", action="store_false", help=text)
    add("--append-eod", action="store_true", help="end documents with the end-of-document token")
    text = "that token (default: the one of <|endoftext|>, <|end_of_text|>, </s>, <eos> there is)"
    add("--eod-token", metavar="TEXT", help=text)
    add("--prepend-bos", action="store_true", help="start documents with the tokenizer's BOS token")
    add("--bos-token", metavar="TEXT", help="that token")
    text = "share of documents that are compared with the reference library (default: 0.0002)"
    add("--check", dest="check_rate", type=float, metavar="RATE", help=text)

    add = parser.add_argument_group("documents").add_argument
    text = """make each sentence a sequence, split by this library; writes PREFIX_KEY_sentence
        (default without a name: punkt, as in Megatron-LM's script)"""
    names = ("punkt", "sentencex")
    add("--split-sentences", nargs="?", const="punkt", choices=names, help=text)
    add("--lang", default="english", metavar="NAME", help="language of the sentences (english)")
    add("--keep-newlines", action="store_true", help="keep the space between sentences")
    text = (
        "deal documents round robin to N groups, and write one group after the other (default: 1)"
    )
    add("--partitions", type=_positive, default=1, metavar="N", help=text)
    text = "make the groups runs of documents, which keeps the order"
    add("--keep-sequential-samples", action="store_true", help=text)
    text = """at lines that are not documents: stop; skip them; or also keep them in
        PREFIX.quarantine.jsonl (default: stop)"""
    add("--on-error", choices=("stop", "skip", "quarantine"), default="stop", help=text)
    text = "longest line or text (default: 100M)"
    add("--max-document-size", type=_size, metavar="SIZE", help=text)
    text = "sidecar with the origin of each document (default: parquet)"
    choices = ("parquet", "none")
    add("--provenance", choices=choices, default="parquet", help=text)

    add = parser.add_argument_group("job").add_argument
    text = "where it runs: here, or on the Ray cluster of RAY_ADDRESS, or one of its own (local)"
    add("--engine", choices=("local", "ray"), default="local", help=text)
    text = "worker processes (default: one per core, fewer for a small input)"
    add("--workers", type=_positive, metavar="N", help=text)
    text = "limit for all processes, which may mean fewer workers: 4G, 20G"
    add("--memory", type=_size, metavar="SIZE", help=text)
    text = "input that a worker takes at a time, and a kill may cost (default: by the input's size)"
    add("--chunk-size", type=_size, metavar="SIZE", help=text)
    text = "discard what an interrupted job with this prefix has done"
    add("--restart", action="store_true", help=text)
    add("--json", dest="as_json", action="store_true", help="print one JSON object at the end")


def _add_shuffle(verbs: Verbs) -> None:
    text = """Shuffles token files globally. Cuts the token files of many domains into sequences of
        a fixed length, permutes all of them, and writes shards that are token files themselves. A
        job that was killed continues when the same command runs again."""
    parser = _add_verb(verbs, _shuffle, text)
    add = parser.add_argument_group("input").add_argument
    text = "folder with a folder for each domain: .bin, .npy, or .bin with .idx"
    add("--input-dir", metavar="DIR", help=text)
    text = "file with a weight and a path on each line: 2.5 data/web (instead of --input-dir)"
    add("--input-list", metavar="FILE", help=text)
    text = "dtype of .bin files without .idx (default: uint32)"
    add("--dtype", choices=_SHUFFLE_DTYPES, default="uint32", help=text)
    text = "tokens of a sequence (default: 4096)"
    add("--seq-len", type=_positive, default=4096, metavar="N", help=text)
    text = "continue the remainder of a file in the next file of its domain"
    add("--carry", action="store_true", help=text)
    text = "shuffle whole documents of indexed datasets instead of sequences"
    add("--documents", action="store_true", help=text)

    add = parser.add_argument_group("output").add_argument
    text = "folder for the shards: a new one, or an empty one"
    add("--output-dir", required=True, metavar="DIR", help=text)
    add("--num-shards", type=_positive, default=64, metavar="N", help="number of shards (64)")
    add("--seed", type=_count, default=42, metavar="N", help="seed of the permutation (42)")
    text = """numpy: numpy.random.default_rng(SEED).permutation(n); keyed: for any n without memory
        (default: numpy if it fits half of --memory)"""
    add("--permutation", choices=("auto", "numpy", "keyed"), default="auto", help=text)

    add = parser.add_argument_group("job").add_argument
    text = """gather: read each shard's sequences wherever they are; scatter: sort runs of the
        input, then read each shard from them (default: the faster one)"""
    add("--plan", choices=("auto", "gather", "scatter"), default="auto", help=text)
    text = "where it runs: here, or on the Ray cluster of RAY_ADDRESS, or one of its own (local)"
    add("--engine", choices=("local", "ray"), default="local", help=text)
    text = "largest number of worker processes (default: 4)"
    add("--num-workers", dest="workers", type=_positive, default=4, metavar="N", help=text)
    text = "limit for all processes: 300M, 4G (default: half of what is available)"
    add("--memory", type=_size, metavar="SIZE", help=text)
    text = "discard what an interrupted job has done in the output folder"
    add("--restart", action="store_true", help=text)
    add("--json", dest="as_json", action="store_true", help="print one JSON object at the end")


def _add_index(verbs: Verbs) -> None:
    text = """Builds the indices of a training run ahead of time. The run then starts without
        building any. The arguments are Megatron-LM's, in a YAML or TOML file, as options, or both
        (an option overrides the file)."""
    parser = _add_verb(verbs, _index, text, "--json")
    add = parser.add_argument
    add("config", nargs="?", metavar="FILE", help="YAML or TOML file of arguments")
    text = "output folder: Megatron-LM's --data-cache-path"
    add("--megatron-cache", dest="megatron_cache_folder", metavar="DIR", help=text)
    text = """identifiers of Megatron-LM's tokenizer, part of those files' names: JSON, a JSON file,
        or a *-description.txt written by Megatron-LM"""
    add("--tokenizer-identifiers", metavar="JSON", help=text)
    text = "maximum wait for another process that builds the same indices (default: no limit)"
    add("--wait-limit", type=float, metavar="SECONDS", help=text)

    data = parser.add_argument_group("data", "a list has prefixes, or a weight before each prefix")
    add = data.add_argument
    add("--data-path", nargs="+", metavar="ITEM", help="list divided by --split")
    for name in ("train", "valid", "test"):
        add(f"--{name}-data-path", nargs="+", metavar="ITEM", help=f"list for {name} only")
    add("--data-args-path", metavar="FILE", help="file with the --data-path list")
    add("--per-split-data-args-path", metavar="FILE", help="JSON file with a list per split")
    add("--split", metavar="SHARES", help='train, valid, test: "969,30,1"')

    add = parser.add_argument_group("order").add_argument
    names = """seq-length seed train-samples train-iters global-batch-size eval-iters eval-interval
        eval-global-batch-size start-eval-at-iter num-dataset-builder-threads"""
    for name in names.split():
        add(f"--{name}", metavar="N")
    text = "instead of iterations and batch sizes: whole numbers, or none for one epoch"
    add("--num-samples", nargs=3, metavar=("TRAIN", "VALID", "TEST"), help=text)
    add("--mid-level-dataset-surplus", metavar="SHARE")
    for name in ("skip-train", "full-validation", "multiple-validation-sets"):
        add(f"--{name}", action="store_true", default=None)
    text = "mix data of different tokenizers, too (millrace's own option)"
    add("--any-tokenizer", action="store_true", default=None, help=text)
    add("--data-cache-path", "--cache", metavar="DIR", help="output folder: millrace's cache")


def _add_bench(verbs: Verbs) -> None:
    text = """Measures how fast this machine feeds a run. Draws batches of the training data, cold
        and warm, and says how long training steps would wait, what bounds the rate, and how many
        accelerators it could feed."""
    parser = _add_verb(verbs, _bench, text, "--json")
    add = parser.add_argument
    text = "arguments of a run, as for `millrace index` (.yaml, .toml), or a path prefix"
    add("source", metavar="RUN", help=text)
    add("--sequence-length", type=_positive, metavar="N", help="tokens in a sample, for a prefix")
    add("--seed", type=int, metavar="N", help="seed of the order (default: 1234), for a prefix")

    add = parser.add_argument_group("loader").add_argument
    add("--micro-batch-size", type=_positive, default=1, metavar="N", help="samples in a batch (1)")
    add("--ranks", type=_positive, default=1, metavar="N", help="ranks to feed, each a process (1)")
    add("--threads", type=_positive, default=1, metavar="N", help="threads of each rank (1)")
    text = "ready batches of each rank (default: by their size); 0: each is made on demand"
    add("--prefetch", type=_count, metavar="N", help=text)
    text = "arrays of a batch: tokens labels loss_mask position_ids (default: these four), ..."
    add("--fields", nargs="+", metavar="NAME", help=text)
    text = "dtype of tokens and labels (int64); file: as in the token files"
    add("--token-dtype", choices=("int64", "int32", "file"), default="int64", help=text)

    add = parser.add_argument_group("measurement").add_argument
    add("--seconds", type=float, default=5.0, metavar="S", help="of each measurement (5)")
    text = "simulated training step (0.01)"
    add("--step-time", type=float, default=0.01, metavar="S", help=text)
    text = "leave the page cache as it is, and make no cold measurement"
    add("--keep-cache", dest="drop_cache", action="store_false", help=text)
    add("--replay", action="store_true", help="also measure a perfect loader, with one ready batch")
    text = """tokens that one accelerator trains on in a second (10000: about an H100 with a model
        of 8 billion parameters)"""
    add("--accelerator-tokens-per-second", type=float, default=10_000, metavar="N", help=text)
    add("--svg", metavar="FILE", help="write a picture of the waits")


def _add_cache(verbs: Verbs) -> None:
    text = "Lists what millrace keeps in a cache folder, and removes what no run can use."
    summary = "Lists, checks and prunes cached indices"
    parser = verbs.add_parser("cache", help=summary, description=text)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    _add_verb(actions, _list, "Lists the entries.", "folder", "--json")
    text = "Reads every array and compares its checksum. Exits with 1 if one is damaged."
    _add_verb(actions, _check, text, "folder", "--json")
    text = """Removes what no run can use: leftovers, damaged sets, runs whose token files are
        missing or changed, and sets that no run needs. Keeps entries that are being built or cannot
        be judged here."""
    add = _add_verb(actions, _prune, text, "folder", "--json").add_argument
    text = "also remove older runs, and older entries that cannot be judged"
    add("--older-than", type=float, metavar="DAYS", help=text)
    add("--dry-run", action="store_true", help="remove nothing, only list")


_TOKENIZER_OPTIONS = (
    "eod_token",
    "bos_token",
    "encoder",
    "tiktoken_pattern",
    "add_special_tokens",
    "special_tokens_in_text",
)


def _tokenize(
    tokenizer: str,
    input_list: str | None,
    split_sentences: str | None,
    lang: str,
    keep_newlines: bool,
    check_rate: float | None,
    as_json: bool,
    **options: Any,
) -> None:
    from millrace.engine import ENVIRONMENT

    for name, value in ENVIRONMENT.items():  # one worker does its work in this process
        os.environ.setdefault(name, value)
    from millrace.encoding import Tokenizer
    from millrace.jobs import tokenize
    from millrace.text import SentenceSplitter

    options["inputs"] = _all_inputs(options["inputs"], input_list)
    if check_rate is not None:
        options["check_rate"] = check_rate
    settings = {name: options.pop(name) for name in _TOKENIZER_OPTIONS}
    splitter = None
    if split_sentences is not None:
        splitter = SentenceSplitter(lang, keep_newlines=keep_newlines, library=split_sentences)
    # Ray writes about lost nodes to stdout, which is the report's.
    with contextlib.redirect_stdout(sys.stderr):
        result = tokenize(
            tokenizer=Tokenizer(tokenizer, **settings),
            splitter=splitter,
            show_progress=True,
            **options,
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
        print(json.dumps(report))
        return
    for key, prefix in result.prefixes.items():
        counts = f"{result.num_documents:,} documents, {result.num_tokens[key]:,} tokens"
        print(f"{prefix}.bin/.idx: {counts}")
    print(
        f"{result.num_bytes / 1e6:,.1f} MB of text in {result.seconds:.1f} s, {rate:.1f} MB/s, "
        f"by {result.encoder}"
    )
    if result.num_chunks_kept:
        num_chunks = result.num_chunks_kept + result.num_chunks_done
        print(f"{result.num_chunks_kept:,} of {num_chunks:,} chunks were kept from an earlier run")
    if result.num_skipped:
        print(f"{result.num_skipped:,} lines were skipped:")
        for row in result.skipped:
            print(f"  {row['file']}, line {row['line']}: {row['reason']}")
        if result.num_skipped > len(result.skipped):
            print(f"  and {result.num_skipped - len(result.skipped):,} more")


def _shuffle(input_list: str | None, as_json: bool, **options: Any) -> None:
    from millrace.jobs import shuffle
    from millrace.shuffling.domains import read_input_list

    entries = None if input_list is None else read_input_list(input_list)
    # Ray writes about lost nodes to stdout, which is the report's.
    with contextlib.redirect_stdout(sys.stderr):
        result = shuffle(input_list=entries, show_progress=True, **options)
    if as_json:
        print(json.dumps(dataclasses.asdict(result)))
        return
    print(
        f"{result.output_dir}: {result.num_items:,} {result.unit} of {len(result.domain_stats):,} "
        f"domains in {len(result.shard_sizes):,} shards, {result.num_tokens:,} tokens"
    )
    if result.plan == "none":
        print(result.reason)
        return
    rate = result.num_bytes / 1e6 / max(result.seconds, 1e-9)
    print(
        f"{result.num_bytes / 1e6:,.1f} MB in {result.seconds:.1f} s, {rate:,.1f} MB/s, by the "
        f"plan {result.plan}"
    )
    if result.num_tasks_kept:
        num_tasks = result.num_tasks_kept + result.num_tasks_done
        print(f"{result.num_tasks_kept:,} of {num_tasks:,} tasks were kept from an earlier run")


def _all_inputs(inputs: list[str], input_list: str | None) -> list[str]:
    from millrace.text import read_input_list

    if not inputs and input_list is None:
        raise ConfigError("there is no input; give --input or --input-list")
    if input_list == "-" and "-" in inputs:
        raise ConfigError(
            "standard input is both --input and --input-list. Write one of them to a file"
        )
    return inputs + (read_input_list(input_list) if input_list is not None else [])


def _train_tokenizer(**options: Any) -> None:
    from millrace.encoding.training import train_tokenizer

    has_terminal = sys.stderr is not None and sys.stderr.isatty()
    result = train_tokenizer(show_progress=has_terminal, **options)
    print(
        f"{result.tokenizer.path}: {result.tokenizer.vocabulary_size:,} tokens, trained on "
        f"{result.num_texts:,} texts of {result.num_bytes / 1e6:,.1f} MB in {result.seconds:.1f} s"
    )


def _inspect(
    prefix: str,
    tokenizer: str | None,
    tiktoken_pattern: str | None,
    document: int,
    svg: str | None,
    dtype: str | None,
    as_json: bool,
) -> None:
    from millrace.encoding import Tokenizer
    from millrace.inspect import describe, describe_shards, format_description, format_shards
    from millrace.shards.metadata import is_shards_folder
    from millrace.store import IndexedDataset

    decoder = Tokenizer(tokenizer, tiktoken_pattern=tiktoken_pattern) if tokenizer else None
    if is_shards_folder(prefix):
        shards = describe_shards(prefix, dtype=dtype, tokenizer=decoder, document=document)
        if svg is not None:
            _write_shares(prefix, dtype, svg)
        if as_json:
            _print_json(shards, ensure_ascii=False)
        else:
            print(format_shards(shards))
        return
    if (svg, dtype) != (None, None):
        raise ConfigError(
            f"--svg and --dtype are for the output folder of a shuffle, and {prefix} is not a "
            "folder: leave them out"
        )
    description = describe(IndexedDataset(prefix), tokenizer=decoder, document=document)
    if as_json:
        _print_json(description, ensure_ascii=False)
    else:
        print(format_description(description))


def _write_shares(folder: str, dtype: str | None, svg: str) -> None:
    from millrace.files import atomic_file
    from millrace.inspect import shares_svg
    from millrace.store import read_metadata

    _check_picture(svg)
    picture = shares_svg(read_metadata(folder, dtype=dtype), folder=folder)
    with atomic_file(svg) as file:
        file.write(picture.encode())


def _check_picture(svg: str) -> None:
    """Raises ConfigError for a file that cannot be written."""
    folder = os.path.dirname(svg) or "."
    if not os.path.isdir(folder):
        raise ConfigError(f"the folder of {svg} does not exist: make it first")
    if not svg or os.path.isdir(svg) or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"the picture cannot be written to {svg!r}: give another --svg")


def _verify(prefixes: list[str], threads: int | None, dtype: str | None, as_json: bool) -> None:
    import threading

    from millrace.engine.progress import Progress
    from millrace.shards.metadata import is_shards_folder
    from millrace.store import verify, verify_shards

    num_bytes, lock = 0, threading.Lock()
    with Progress("verify") as progress:

        def on_bytes(count: int) -> None:
            nonlocal num_bytes
            with lock:  # several threads call this
                num_bytes += count
                progress.update(num_bytes, f"{num_bytes / 1e9:,.1f} GB")

        reports = [
            verify_shards(prefix, dtype=dtype, threads=threads, on_bytes=on_bytes)
            if is_shards_folder(prefix)
            else verify([prefix], threads=threads, on_bytes=on_bytes)[0]
            for prefix in prefixes
        ]
    if as_json:
        _print_json(reports)
    else:
        for report in reports:
            what = "structure and checksums" if report.has_checksums else "structure (no checksums)"
            print(f"{report.prefix}: {'DAMAGED' if report.problems else 'ok'}, {what}")
            for line in [*report.problems, *report.notices]:
                print(f"  {printable_lines(line)}")
    damaged = sum(1 for report in reports if report.problems)
    if damaged:
        raise DataError(f"{damaged} of {len(reports)} datasets are damaged")


def _merge(**options: Any) -> None:
    from millrace.jobs import merge

    print(merge(**options))


def _split(**options: Any) -> None:
    from millrace.jobs import split
    from millrace.store import IndexedDataset

    for prefix in split(**options):
        print(IndexedDataset(prefix))


def _convert(target: str, **options: Any) -> None:
    from millrace.jobs import convert

    convert(target=target, **options)
    print(f"{target} is written")


def _index(
    config: str | None, tokenizer_identifiers: str | None, as_json: bool, **options: Any
) -> None:
    from millrace.jobs import index
    from millrace.jobs.indexing import format_result
    from millrace.run import arguments

    values = arguments.read_arguments(config) if config else {}
    tokenizer = values.pop("tokenizer_identifiers", None)
    unknown = arguments.unknown_arguments(values)
    overrides = {name: options.pop(name) for name in arguments.NAMES if name in options}
    values.update({name: value for name, value in overrides.items() if value is not None})
    tokenizer = tokenizer_identifiers or tokenizer
    if isinstance(tokenizer, str):
        tokenizer = arguments.read_identifiers(tokenizer)
    run = arguments.config_from(values)
    result = index(run, tokenizer=tokenizer, show_progress=True, **options)
    if as_json:
        _print_json(result)
        return
    print(format_result(result))
    if unknown:
        print(f"arguments that do not concern the data were left out: {', '.join(unknown)}")


def _bench(
    source: str,
    sequence_length: int | None,
    seed: int | None,
    svg: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    from millrace.files import atomic_file
    from millrace.jobs import bench
    from millrace.jobs.benchmark_report import format_result, waits_picture

    if svg is not None:
        _check_picture(svg)
    result = bench(_run_of(source, sequence_length, seed), **options)
    if svg is not None:
        with atomic_file(svg) as file:
            file.write(waits_picture(result).encode())
    if as_json:
        _print_json(result)
    else:
        print(format_result(result))


def _run_of(source: str, sequence_length: int | None, seed: int | None) -> DatasetConfig:
    """The configuration in a file, or one that takes all samples of a token file once."""
    from millrace.run import DatasetConfig, arguments

    if source.endswith((".yaml", ".yml", ".toml")):
        if (sequence_length, seed) != (None, None):
            raise ConfigError(
                f"{source} gives the sequence length and the seed: leave out --sequence-length and "
                "--seed"
            )
        values = arguments.read_arguments(source)
        values.pop("tokenizer_identifiers", None)
        arguments.unknown_arguments(values)
        return arguments.config_from(values)
    if sequence_length is None:
        raise ConfigError(
            f"{source} is taken as the path prefix of a token file, as it does not end with .yaml, "
            ".yml or .toml: give --sequence-length too"
        )
    return DatasetConfig(
        sequence_length=sequence_length,
        seed=arguments.DEFAULT_SEED if seed is None else seed,
        num_samples=(None, 0, 0),
        blend=([source], None),
        split="1,0,0",
    )


def _list(folder: str, as_json: bool) -> None:
    from millrace.jobs import list_cache

    _print_entries(list_cache(folder), "there", as_json)


def _check(folder: str, as_json: bool) -> None:
    from millrace.jobs import list_cache

    entries = list_cache(folder, check_contents=True)
    _print_entries(entries, "checked", as_json)
    damaged = sum(1 for entry in entries if entry.problems and entry.kind == "set")
    if damaged:
        raise DataError(
            f"{damaged} sets of arrays are damaged; `millrace cache prune` removes them"
        )


def _prune(folder: str, older_than: float | None, dry_run: bool, as_json: bool) -> None:
    from millrace.jobs import prune_cache

    entries = prune_cache(folder, older_than_days=older_than, dry_run=dry_run)
    _print_entries(entries, "to remove" if dry_run else "removed", as_json)


def _print_entries(entries: list[CacheEntry], what: str, as_json: bool) -> None:
    if as_json:
        _print_json(entries)
        return
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


def _demo(folder: str) -> None:
    from millrace.demo import run_demo

    run_demo(folder)


def _print_json(value: Any, *, ensure_ascii: bool = True) -> None:
    """Prints a dataclass, or a list of them.

    What stdout cannot encode is written as JSON's escapes: those of Python would not be JSON.
    """
    text = json.dumps(value, default=dataclasses.asdict, ensure_ascii=ensure_ascii, indent=2)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value, default=dataclasses.asdict, indent=2)
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:  # not of the job's files
        _discard_output()
        raise MillraceError(_report_failure(error)) from None


def _dtype(text: str) -> np.dtype[Any] | None:
    from millrace.jobs.reshape import number_dtype

    try:
        return number_dtype("the dtype", text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def _size(text: str) -> int:
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if not number.isdecimal() or int(number) < 1 or unit not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 500M or 20G")
    return int(number) * _UNITS[unit]


def _escaped(text: str) -> str:
    """The text of an option with its \\n, \\t, \\r and \\\\ replaced."""
    characters = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
    return re.sub(r"\\([ntr\\])", lambda match: characters[match[1]], text)


def _shard(text: str) -> tuple[int, int]:
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a shard; write I/N with I from 0 to N - 1: 0/8, 1/8, ... 7/8"
        )
    return int(number), int(count)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)
