"""`inspect`, `verify`, `merge`, `split` and `convert`."""

import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from millrace import inspect
from millrace.cache.loss_files import joined_ranges
from millrace.chats import ChatEncoder, ChatOptions
from millrace.checks import printable_lines
from millrace.encoding import Tokenizer
from millrace.engine.progress import Progress
from millrace.errors import ConfigError, DataError, TextError
from millrace.files import write_file
from millrace.jobs.converting import ConvertOptions, convert
from millrace.jobs.reshape import MergeOptions, SplitOptions, merge, split
from millrace.names import BIN, IDX
from millrace.online import open_rows
from millrace.option_class import Options, option, take_options
from millrace.run.arguments import built_config_from, read_arguments
from millrace.shards import read_metadata, verify_shards
from millrace.shards.metadata import is_shards_folder
from millrace.storage import exists, storage_of
from millrace.store import IndexedDataset, Report, verify
from millrace.verbs import DamageError, JsonOption, UsageError, Verb, json_text

# Compressed ones, too: reading them tells why they have no rows by number.
_ROW_FILES = re.compile(
    r"\.(jsonl|ndjson|json|parquet|pq|arrows?|feather|ipc|csv|tsv|tab)"
    r"(\.(gz|gzip|zst|zstd|bz2|xz))?$"
)


@dataclass(frozen=True, kw_only=True)
class ShardOptions(Options):
    """The options of verbs that also take the output folder of a shuffle."""

    # fmt: off
    dtype: str | None = option(
        "dtype of a folder whose metadata.json does not say it", None, default_text="uint32",
        choices=("uint16", "uint32", "int32"))
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class InspectOptions(ShardOptions):
    # fmt: off
    prefix: str = option(
        "path prefix of a token file, folder of a shuffle, YAML or TOML file of a run that packs "
        "documents, or file of conversations (JSONL, Parquet, Arrow, CSV)",
        flags="prefix", metavar="PREFIX")
    tokenizer: str | None = option("tokenizer file or folder to decode with", None, metavar="FILE")
    tiktoken_pattern: str | None = option(
        "for a .tiktoken file, as in `tokenize`", None, metavar="PATTERN")
    document: int = option("document number", 0)
    svg: str | None = option(
        "write a picture: of a shuffle the domains' shares along the output, of a run the work of "
        "its ranks", None, metavar="FILE")
    ranks: int = option("of a run: data-parallel ranks that share a global batch", 8, least=1)
    micro_batches: int = option("of a run: packs of a rank in a global batch", 4, least=1)
    row: int = option("of conversations: number of the row, from 0", 0, least=0)
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(ShardOptions):
    prefixes: Sequence[str] = option(
        "path prefixes of token files, and folders of shuffles", flags="prefixes", metavar="PREFIX"
    )
    threads: int | None = option("worker threads", None, default_text="one per core", least=1)


def _inspect(as_json: bool = False, **values: Any) -> str:
    chats = take_options(ChatOptions, values)
    options = InspectOptions(**values)
    folder, decoder, number = options.prefix, None, options.document
    if options.tokenizer is not None:
        decoder = Tokenizer(options.tokenizer, tiktoken_pattern=options.tiktoken_pattern)
    if _ROW_FILES.search(folder):
        if decoder is None:
            raise ConfigError("--tokenizer is missing: conversations are shown as its tokens")
        encoder, rows = ChatEncoder(decoder, **chats), open_rows(folder)
        try:
            (row,) = rows.rows([options.row])
        except IndexError as error:
            raise ConfigError(f"{folder}: {error}") from None
        try:
            documents = encoder.explain(row)
        except TextError as error:
            raise TextError(f"{rows.place(options.row)}: {error}") from None
        if as_json:
            return json_text(documents)
        has_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        return inspect.format_chat(documents, has_colour=has_colour)
    if folder.endswith((".yaml", ".yml", ".toml")):
        config = built_config_from(read_arguments(folder))
        packs = inspect.describe_packs(
            config, ranks=options.ranks, micro_batches=options.micro_batches
        )
        if options.svg is not None:
            write_file(options.svg, inspect.packs_svg(packs, folder).encode())
        return json_text(packs) if as_json else inspect.format_packs(packs)
    if is_shards_folder(folder):
        shards = inspect.describe_shards(
            folder, dtype=options.dtype, tokenizer=decoder, document=number
        )
        if options.svg is not None:
            metadata = read_metadata(folder, dtype=options.dtype)
            write_file(options.svg, inspect.shares_svg(metadata, folder=folder).encode())
        return json_text(shards) if as_json else inspect.format_shards(shards)
    if (options.svg, options.dtype) != (None, None):
        raise ConfigError(
            f"--svg and --dtype are for the output folder of a shuffle, and {folder} is not a "
            "folder: leave them out"
        )
    description = inspect.describe(IndexedDataset(folder), tokenizer=decoder, document=number)
    return json_text(description) if as_json else inspect.format_description(description)


def _verify(as_json: bool = False, **values: Any) -> str:
    options = VerifyOptions(**values)
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
    lines, verdicts = [], list[str]()
    for report in reports:
        if not report.problems and not is_shards_folder(report.prefix):
            try:
                ranges = joined_ranges([(IndexedDataset(report.prefix), None)])
                if ranges is not None:
                    report.notices.append(f"{len(ranges):,} ranges of tokens are not trained on")
            except DataError as error:
                report.problems.append(str(error))
        verdicts.append(_verdict(report))
        what = "structure and checksums" if report.has_checksums else "structure (no checksums)"
        lines.append(f"{report.prefix}: {verdicts[-1]}{'' if report.num_unread else ', ' + what}")
        lines += [f"  {printable_lines(line)}" for line in [*report.problems, *report.notices]]
    text = json_text(reports) if as_json else "\n".join(lines)
    if problems := [problem for report in reports for problem in report.problems]:
        counts = Counter(verdict.lower() for verdict in verdicts if verdict != "ok").items()
        parts = [f"{count} of {len(reports)} datasets are {verdict}" for verdict, count in counts]
        raise DamageError(f"{', '.join(parts)}: {problems[0]}", text)
    return text


def _verdict(report: Report) -> str:
    """What `verify` says of a pair or folder."""
    if not report.problems:
        return "ok"
    paths = [report.prefix, report.prefix + BIN, report.prefix + IDX]
    if not (is_shards_folder(report.prefix) or any(exists(storage_of(p), p) for p in paths)):
        return "MISSING"
    return "UNREADABLE" if report.num_unread == len(report.problems) else "DAMAGED"


def _merge(**options: Any) -> str:
    return str(merge(**options))


def _split(**options: Any) -> str:
    try:
        SplitOptions(**options)
    except ConfigError as error:  # options that cannot work together are wrong usage
        raise UsageError(str(error)) from None
    return "\n".join(str(IndexedDataset(prefix)) for prefix in split(**options))


def _convert(**options: Any) -> str:
    convert(**options)
    return f"{options['target']} is written"


VERBS = (
    Verb(
        "inspect",
        _inspect,
        (InspectOptions, ChatOptions, JsonOption),
        "Describes a token file, or the output folder of a shuffle. Prints counts, dtype and "
        "lengths, and the head and tail of a document, and where it came from. With a tokenizer, "
        "the document is decoded. Of a shuffle, prints the shards, the domains and how evenly "
        "they are spread. Of a run that packs documents, prints how full the packs are, and how "
        "even the work of the ranks is. Of a file of conversations, prints the tokens of a "
        "row, and marks those that are trained on.",
    ),
    Verb(
        "verify",
        _verify,
        (VerifyOptions, JsonOption),
        "Checks token files and output folders of shuffles. Checks the structure of each, and "
        "every byte if it has checksums. Names the damaged blocks, sequences and documents of a "
        "pair, and the damaged and stray files of a folder. Exits with 1 if anything is not ok.",
    ),
    Verb(
        "merge",
        _merge,
        (MergeOptions,),
        "Concatenates token files. Documents keep their order and their origins. Data of "
        "different tokenizers are refused. An output that is there is replaced.",
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
        "without NAME.idx holds raw tokens, and any other name is a path prefix. A target that is "
        "there is replaced.",
    ),
)
