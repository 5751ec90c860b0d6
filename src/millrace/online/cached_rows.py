"""Rows that are tokenised once: token files in the cache folder, found again by their content."""

import contextlib
import glob
import itertools
import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from millrace.cache import arrays
from millrace.encoding import Tokenizer
from millrace.encoding.row_encoders import RowEncoder, TextRows
from millrace.engine import Progress
from millrace.errors import ConfigError
from millrace.files import atomic_file, file_lock
from millrace.names import BIN, IDX
from millrace.online.numbered_rows import MemoryPart, Rows
from millrace.store import IndexedDataset
from millrace.tokenizing import tokenize


def tokenized(
    rows: Rows, encoder: RowEncoder, folder: str, *, show_progress: bool, **options: Any
) -> IndexedDataset:
    """The token files of all rows, made by a tokenise job unless they are there.

    Of several processes one makes them, and the others wait; after a kill the next one continues.

    Args:
        options: `on_error` and `workers` of the job.
    """
    key = [rows.fingerprint(), encoder.fingerprint(), options["on_error"]]
    os.makedirs(folder, exist_ok=True)
    place = os.path.join(folder, f"rows-{arrays.fingerprint(key)[:16]}")
    if (prefix := _find(place, key)) is None:
        with _turn(place, show_progress):
            if (prefix := _find(place, key)) is None:
                prefix = _make(rows, encoder, place, show_progress=show_progress, **options)
                name = os.path.basename(prefix)  # the folder may be moved
                record = {"key": key, "name": name, "sizes": _sizes(prefix)}
                with atomic_file(place + ".tokens.json") as file:
                    file.write(arrays.seal(record))
    return IndexedDataset(prefix)


def _find(place: str, key: Any) -> str | None:
    record = arrays.read_record(place + ".tokens.json")
    with contextlib.suppress(*arrays.NO_RECORD):
        if record is not None and record["key"] == key:
            prefix = os.path.join(os.path.dirname(place), record["name"])
            return prefix if _sizes(prefix) == record["sizes"] else None
    return None


def _sizes(prefix: str) -> list[int]:
    return [os.path.getsize(prefix + ending) for ending in (BIN, IDX)]


@contextlib.contextmanager
def _turn(place: str, show_progress: bool) -> Iterator[None]:
    """Waits until no other process makes the files, and shows how far it is."""
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(Progress("wait for tokens", enabled=show_progress))
        while True:
            with contextlib.suppress(BlockingIOError):
                # Without progress, the wait for the lock itself warns and names the holder.
                stack.enter_context(file_lock(f"{place}.lock", limit=1 if show_progress else None))
                break
            done = glob.glob(f"{glob.escape(place)}.journal/*/done.jsonl")
            size = sum(map(os.path.getsize, done))
            progress.update(0, f"another process tokenises the rows ({size:,} bytes of journal)")
        yield


def _make(rows: Rows, encoder: RowEncoder, place: str, **options: Any) -> str:
    """Runs the job; returns the prefix of the pair."""
    lines = place + ".rows.jsonl"
    if isinstance(rows.parts[0], MemoryPart) or len(rows) < len(rows.range()):
        inputs = [lines]
        _write_lines(rows, lines)
    else:
        inputs = [part.file.path for part in rows.parts]
        options["max_document_size"] = rows.max_size
    tokenizer: Any
    if isinstance(encoder, TextRows):
        tokenizer = encoder.tokenizer
        options |= {"append_eod": encoder.append_eod, "prepend_bos": encoder.prepend_bos}
        options["json_keys"] = [encoder.key]
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
        result = tokenize(inputs, place, tokenizer, **options)
    except ConfigError:  # of files that were moved or touched since a run that was killed
        result = tokenize(inputs, place, tokenizer, restart=True, **options)
    rows.read(np.arange(min(len(rows), 1)))  # an error if the files have changed meanwhile
    with contextlib.suppress(FileNotFoundError):
        os.unlink(lines)
    [prefix] = result.prefixes.values()
    return prefix


def _write_lines(rows: Rows, path: str) -> None:
    """Writes rows in memory, or a part of all rows, as JSON lines, for a job that reads files."""
    with atomic_file(path, durable=False) as file:
        for number, row in enumerate(itertools.chain.from_iterable(rows.blocks())):
            try:
                file.write(json.dumps(row).encode() + b"\n")
            except (TypeError, ValueError, RecursionError) as error:
                problem = f"{rows.place(number)} cannot be written as JSON ({error})"
                raise ConfigError(f"{problem}: give texts, numbers, lists, dicts") from None
