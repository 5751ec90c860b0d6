"""Rows that are tokenised once: token files in the cache folder, found again by their content."""

import base64
import contextlib
import glob
import json
import logging
import os
import re
import time
from typing import Any

import numpy as np

from millrace.cache import arrays
from millrace.checks import plain_json
from millrace.encoding import Tokenizer
from millrace.encoding.row_encoders import RowEncoder, TextRows, encode_rows
from millrace.engine import Progress
from millrace.errors import CacheError, ConfigError, DataError, MillraceError, TextError
from millrace.files import SAY_AFTER, atomic_file, writers_lock
from millrace.names import IDX, JOURNAL, QUARANTINE
from millrace.online.numbered_rows import BLOCK, MemoryPart, Rows
from millrace.store import IndexedDataset
from millrace.text import BadDocumentError
from millrace.text.json_values import text_at
from millrace.tokenizing import tokenize

LINES = ".rows.jsonl"
"""Ending of the file of rows that are in memory, or part of all, while the job reads it."""

OWNER = f"{JOURNAL}/owner"
"""Ending of the file that names the process of a job, on a file system without locks."""

_PAUSE = 0.25  # seconds between two looks for that file


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
    options |= {"json_keys": [json_key], "show_progress": show_progress}
    # Without progress, the wait for the lock itself warns and names the holder.
    limit = 1 if show_progress else None
    with Progress("wait for tokens", enabled=show_progress) as progress:
        while (store := _finished(place, prefix)) is None:
            try:
                with writers_lock(f"{place}.lock", place + LINES, limit=limit):
                    if (store := _finished(place, prefix)) is None:
                        _make(rows, encoder, place, prefix, **options)
                        store = IndexedDataset(prefix)
                        break
            except BlockingIOError:
                done = glob.glob(f"{glob.escape(place + JOURNAL)}/*/done.jsonl")
                size = f"{sum(map(os.path.getsize, done)):,} bytes of journal"
                progress.update(0, f"another process tokenises the rows ({size})")
            except (MillraceError, OSError) as error:
                if not _wait_for_owner(place, error) and _finished(place, prefix) is None:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(place + LINES)
                    if isinstance(error, MillraceError):
                        raise
                    remedy = "Free space there, or give another cache; the next run continues"
                    raise CacheError(f"{place} cannot be written: {error}. {remedy}") from error
    info = store.info()
    provenance: dict[str, Any] = {} if info is None else info.provenance
    report = {**provenance.get("report", {}), "rows": len(rows), "tokens": store.num_tokens}
    if "skipped" in provenance:
        report["skipped rows"] = provenance["skipped"]["number"]
    return store, report


def _finished(place: str, prefix: str) -> IndexedDataset | None:
    """The token files of a job that is done: it has removed its journal."""
    if not os.path.exists(place + JOURNAL):
        with contextlib.suppress(DataError):
            return IndexedDataset(prefix)
    return None


def _wait_for_owner(place: str, error: Exception) -> bool:
    """Waits for the job of another process on a file system without locks.

    Returns:
        Whether there was such a job.
    """
    num_waits = 0
    while os.path.exists(place + OWNER):
        time.sleep(_PAUSE)
        num_waits += 1
        if num_waits * _PAUSE == SAY_AFTER:
            logging.getLogger("millrace").warning("waiting for the token files: %s", error)
    return num_waits > 0


def _make(rows: Rows, encoder: RowEncoder, place: str, prefix: str, **options: Any) -> None:
    """Runs the job; TextError if the files of the rows have changed meanwhile."""
    lines = place + LINES
    has_lines = isinstance(rows.parts[0], MemoryPart) or len(rows) < len(rows.range())
    if has_lines:
        inputs = [lines]
        if not os.path.exists(lines):  # else of a run that was killed, or of another process
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
        try:
            tokenize(inputs, place, tokenizer, **options)
        except ConfigError:  # of files that were moved or touched since a run that was killed
            tokenize(inputs, place, tokenizer, restart=True, **options)
    except TextError as error:
        line = re.compile(re.escape(lines) + r", line (\d+)")
        raise TextError(line.sub(lambda one: rows.place(int(one[1]) - 1), str(error))) from None
    try:
        for part in rows.parts:
            part.read(np.empty(0, np.int64))  # an error if its file has changed
    except TextError:  # the tokens may be of other rows than the name of their files says
        os.unlink(prefix + IDX)
        raise
    if has_lines:
        with contextlib.suppress(FileNotFoundError):
            _name_rows(rows, place + QUARANTINE)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(lines)


def _write_lines(rows: Rows, encoder: RowEncoder, path: str, on_error: str) -> None:
    """Writes rows in memory, or a part of all rows, as JSON lines, for a job that reads files."""
    with atomic_file(path, durable=False) as file:
        for start in range(0, len(rows), BLOCK):
            numbers = np.arange(start, min(start + BLOCK, len(rows)))
            for number, row in zip(numbers.tolist(), rows.read(numbers), strict=True):
                try:
                    line = _line_of(row, encoder)
                except BadDocumentError as error:
                    if on_error == "stop":
                        raise TextError(f"{rows.place(number)}: {error}") from None
                    # A list, which the job rejects: `_name_rows` takes the reason out.
                    line = json.dumps([str(error), repr(row)])
                except ConfigError as error:
                    raise ConfigError(f"{rows.place(number)} {error}") from None
                file.write(line.encode() + b"\n")
        file.flush()
        os.utime(file.fileno(), ns=(0, 0))  # without locks, several processes may write the same


def _line_of(row: Any, encoder: RowEncoder) -> str:
    """What an encoder reads of a row, as JSON; BadDocumentError for a bad row."""
    if isinstance(row, BadDocumentError):
        raise row
    if isinstance(encoder, TextRows):  # JSON would make lists of tuples, which are bad texts
        return json.dumps({encoder.key: text_at(row, encoder.key)})
    if (columns := getattr(encoder, "columns", None)) is not None:
        # The names of others stay, for messages.
        row = {str(name): value if name in columns else None for name, value in row.items()}
    try:
        return json.dumps(plain_json(row, "the row"))
    except (TypeError, ValueError, RecursionError) as error:
        for problem in encode_rows(encoder, [row]).problems.values():
            raise BadDocumentError(problem) from None
        raise ConfigError(
            f"cannot be written as JSON ({error}): give texts, numbers, lists, dicts, or an "
            "encoder that names the `columns` it reads"
        ) from None


def _name_rows(rows: Rows, path: str) -> None:
    """Writes the places of rows into a quarantine file, in place of lines of the job's file."""
    with open(path, "rb") as file:
        entries = list(map(json.loads, file))
    with atomic_file(path) as file:
        for entry in entries:
            entry["file"], entry["line"] = rows.locate(entry["line"] - 1)
            entry["byte_offset"] = -1
            row = json.loads(base64.b64decode(entry["bytes"]))
            if isinstance(row, list):
                entry["reason"], text = row
                entry["bytes"] = base64.b64encode(text.encode()).decode()
            file.write(json.dumps(entry).encode() + b"\n")
