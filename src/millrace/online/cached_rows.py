"""Rows that are tokenised once: token files in the cache folder, found again by their content."""

import contextlib
import glob
import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from millrace.cache import arrays
from millrace.encoding import Tokenizer
from millrace.encoding.row_encoders import RowEncoder, TextRows
from millrace.engine import Progress
from millrace.errors import ConfigError, DataError, TextError
from millrace.files import atomic_file, writers_lock
from millrace.names import JOURNAL, LOSS
from millrace.online.numbered_rows import BLOCK, MemoryPart, Rows
from millrace.store import IndexedDataset
from millrace.text import BadDocumentError
from millrace.text.json_values import text_at
from millrace.tokenizing import tokenize

LINES = ".rows.jsonl"
"""Ending of the file of rows that are in memory, or part of all, while the job reads it."""


def tokenized(
    rows: Rows, encoder: RowEncoder, folder: str, *, show_progress: bool, **options: Any
) -> tuple[IndexedDataset, dict[str, int]]:
    """The token files of all rows, made by a tokenise job unless they are there, and its report.

    Of several processes one makes them, and the others wait; after a kill the next one continues.

    Args:
        options: `on_error` and `workers` of the job.
    """
    key = [rows.fingerprint(), encoder.fingerprint(), options["on_error"]]
    os.makedirs(folder, exist_ok=True)
    place = os.path.join(folder, f"rows-{arrays.fingerprint(key)[:16]}")
    json_key = encoder.key if isinstance(encoder, TextRows) else "rows"
    prefix = f"{place}_{json_key}_document"
    needed = [] if isinstance(encoder, TextRows) else [prefix + LOSS]
    if (store := _finished(place, prefix, needed)) is None:
        with _turn(place, show_progress):
            if (store := _finished(place, prefix, needed)) is None:
                options |= {"json_keys": [json_key], "show_progress": show_progress}
                _make(rows, encoder, place, **options)
                store = IndexedDataset(prefix)
    info = store.info()
    provenance: dict[str, Any] = {} if info is None else info.provenance
    report = {"rows": store.num_documents, **provenance.get("report", {})}
    report["tokens"] = store.num_tokens
    if "skipped" in provenance:
        report["skipped rows"] = provenance["skipped"]["number"]
    return store, report


def _finished(place: str, prefix: str, needed: list[str]) -> IndexedDataset | None:
    """The token files of a job that is done: it has removed its journal."""
    if not os.path.exists(place + JOURNAL) and all(map(os.path.exists, needed)):
        with contextlib.suppress(DataError):
            return IndexedDataset(prefix)
    return None


@contextlib.contextmanager
def _turn(place: str, show_progress: bool) -> Iterator[None]:
    """Waits until no other process makes the files, and shows how far it is."""
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(Progress("wait for tokens", enabled=show_progress))
        while True:
            with contextlib.suppress(BlockingIOError):
                # Without progress, the wait for the lock itself warns and names the holder.
                limit = 1 if show_progress else None
                stack.enter_context(writers_lock(f"{place}.lock", place + LINES, limit=limit))
                break
            done = glob.glob(f"{glob.escape(place + JOURNAL)}/*/done.jsonl")
            size = sum(map(os.path.getsize, done))
            progress.update(0, f"another process tokenises the rows ({size:,} bytes of journal)")
        yield


def _make(rows: Rows, encoder: RowEncoder, place: str, **options: Any) -> None:
    """Runs the job."""
    lines = place + LINES
    if isinstance(rows.parts[0], MemoryPart) or len(rows) < len(rows.range()):
        inputs = [lines]
        _write_lines(rows, encoder, lines, options["on_error"])
        # The limit was that of the lines which were read; these have escapes.
        options["max_document_size"] = max(os.path.getsize(lines), 1)
    else:
        inputs = [part.file.path for part in rows.parts]
        options["max_document_size"] = rows.max_size
    if isinstance(encoder, TextRows):
        options |= {"append_eod": encoder.append_eod, "prepend_bos": encoder.prepend_bos}
    else:
        options["row_encoder"] = encoder
    # The job notes a tokenizer: the encoder's, or one that stands for the encoder.
    tokenizer = getattr(encoder, "tokenizer", None) or Tokenizer.from_function(
        list,
        vocabulary_size=int(np.iinfo(encoder.dtype).max),
        name=type(encoder).__name__,
        version=arrays.fingerprint(encoder.fingerprint()),
    )
    try:
        tokenize(inputs, place, tokenizer, **options)
    except ConfigError:  # of files that were moved or touched since a run that was killed
        tokenize(inputs, place, tokenizer, restart=True, **options)
    rows.read(np.arange(min(len(rows), 1)))  # an error if the files have changed meanwhile
    with contextlib.suppress(FileNotFoundError):
        os.unlink(lines)


def _write_lines(rows: Rows, encoder: RowEncoder, path: str, on_error: str) -> None:
    """Writes rows in memory, or a part of all rows, as JSON lines, for a job that reads files."""
    key = encoder.key if isinstance(encoder, TextRows) else None
    # Bad rows of a part were met when all rows were read.
    read = rows.read if len(rows) < len(rows.range()) else rows.rows
    with atomic_file(path, durable=False) as file:
        for start in range(0, len(rows), BLOCK):
            numbers = np.arange(start, min(start + BLOCK, len(rows)))
            for number, row in zip(numbers.tolist(), read(numbers), strict=True):
                try:
                    if isinstance(row, dict):
                        # JSON would make lists of tuples, which are bad texts.
                        kept = row if key is None else {key: text_at(row, key)}
                        file.write(json.dumps(kept).encode() + b"\n")
                except BadDocumentError as error:
                    if on_error == "stop":
                        raise TextError(f"{rows.place(number)}: {error}") from None
                    file.write(b"{}\n")
                except (TypeError, ValueError, RecursionError) as error:
                    problem = f"{rows.place(number)} cannot be written as JSON ({error})"
                    raise ConfigError(f"{problem}: give texts, numbers, lists, dicts") from None
