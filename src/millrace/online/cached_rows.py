"""Rows that are tokenised once: token files in the cache folder, found again by their content."""

import contextlib
import glob
import logging
import os
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from millrace.cache import arrays
from millrace.cache.loss_files import read_loss_ranges
from millrace.encoding import Tokenizer
from millrace.encoding.row_encoders import RowEncoder, is_plain
from millrace.engine import ALREADY, Progress
from millrace.errors import CacheError, ConfigError, DataError, MillraceError
from millrace.files import SAY_AFTER, file_lock
from millrace.names import JOURNAL
from millrace.online.numbered_rows import BLOCK, MemoryPart, Rows
from millrace.store import IndexedDataset
from millrace.text import BadDocumentError, Documents, Format, InputFile, Part, Query
from millrace.text.documents import Batch
from millrace.text.json_values import id_text, text_at
from millrace.tokenizing import tokenize

OWNER = f"{JOURNAL}/owner"
"""Ending of the file that names the process of a job, on a file system without locks."""

_PAUSE = 0.25  # seconds between two looks for that file
_INPUT_SIZE = 1 << 23  # bytes of rows, which a worker encodes in a second


def tokenized(
    rows: Rows, encoder: RowEncoder, folder: str, *, show_progress: bool, **options: Any
) -> tuple[IndexedDataset, dict[str, int], int, int]:
    """Token files with the documents of some rows, made by a tokenise job unless they are there;
    the job's report; and where the documents start and stop in them.

    Of several processes one makes them, and the others wait; after a kill the next one continues.

    Args:
        options: `on_error` and `workers` of the job.
    """
    start, stop = rows.start, rows.stop
    # All splits share the files of all rows, where each row is a document: others may skip some.
    is_shared = is_plain(encoder) and options["on_error"] == "stop"
    rows = rows.range() if is_shared else rows
    key = [rows.fingerprint(), encoder.fingerprint(), options["on_error"]]
    place = os.path.join(folder, f"rows-{arrays.fingerprint(key)[:16]}")
    if is_plain(encoder):
        json_key = encoder.key
        options |= {"append_eod": encoder.append_eod, "prepend_bos": encoder.prepend_bos}
    else:
        json_key, options["row_encoder"] = "rows", encoder
    options |= {"json_keys": [json_key], "show_progress": show_progress}
    prefix = f"{place}_{json_key}_document"
    finished = partial(_finished, place, prefix, "row_encoder" in options)
    # Without progress, the wait for the lock itself warns and names the holder.
    limit = 1 if show_progress else None
    with Progress("wait for tokens", enabled=show_progress) as progress:
        while (store := finished()) is None:
            try:
                with file_lock(f"{place}.lock", limit=limit):
                    if (store := finished()) is None:
                        _make(rows, encoder, place, **options)
                        store = IndexedDataset(prefix)
                        break
            except BlockingIOError:
                done = glob.glob(f"{glob.escape(place + JOURNAL)}/*/done.jsonl")
                size = f"{sum(map(os.path.getsize, done)):,} bytes of journal"
                progress.update(0, f"another process tokenises the rows ({size})")
            except (MillraceError, OSError) as error:
                if not _wait_for_owner(place, error) and finished() is None:
                    if isinstance(error, MillraceError):
                        raise
                    remedy = "Free space there, or give another cache; the next run continues"
                    raise CacheError(f"{place} cannot be written: {error}. {remedy}") from error
    info = store.info()
    provenance: dict[str, Any] = {} if info is None else info.provenance
    report = {**provenance.get("report", {}), "rows": len(rows), "tokens": store.num_tokens}
    if "skipped" in provenance:
        report["skipped rows"] = provenance["skipped"]["number"]
    return store, report, *((start, stop) if is_shared else (0, store.num_documents))


def _finished(place: str, prefix: str, has_mask: bool) -> IndexedDataset | None:
    """The token files of a job that is done: it has removed its journal."""
    if not os.path.exists(place + JOURNAL):
        with contextlib.suppress(DataError):
            store = IndexedDataset(prefix)
            if has_mask:
                read_loss_ranges(store)
            return store
    return None


def _wait_for_owner(place: str, error: Exception) -> bool:
    """Waits for the job of another process on a file system without locks; whether it was there."""
    num_waits = 0
    while os.path.exists(place + OWNER):
        time.sleep(_PAUSE)
        num_waits += 1
        if num_waits * _PAUSE == SAY_AFTER:
            logging.getLogger("millrace").warning("waiting for the token files: %s", error)
    return num_waits > 0


def _make(rows: Rows, encoder: RowEncoder, place: str, **options: Any) -> None:
    """Runs the job."""
    inputs = _inputs_of(rows)
    options["max_document_size"] = rows.max_size
    # The job notes a tokenizer: the encoder's, or one that stands for the encoder.
    tokenizer = getattr(encoder, "tokenizer", None) or Tokenizer.from_function(
        list,
        vocabulary_size=int(np.iinfo(encoder.dtype).max),
        name=type(encoder).__name__,
        version=arrays.fingerprint(encoder.fingerprint()),
    )
    with contextlib.suppress(ConfigError):  # of files that were moved or touched since a kill
        if ALREADY not in tokenize(inputs, place, tokenizer, **options).notices:
            return
    # A finished job of which a file is damaged would give its earlier result.
    tokenize(inputs, place, tokenizer, restart=True, **options)


def _inputs_of(rows: Rows) -> list[InputFile]:
    """The files of the rows; or inputs of some rows each, if these are in memory, or not all."""
    files = [part.file for part in rows.parts]
    if None not in files and len(rows) == len(rows.range()):
        return files
    # Rows from all over, as they may be sorted by length; from few places, as groups may be large.
    count = min(len(rows), 16)
    firsts = np.linspace(0, len(rows) - count, 16, dtype=np.int64)
    sizes = [len(str(row)) for row in rows.read(np.unique(firsts[:, None] + np.arange(count)))]
    size = sum(sizes) // max(len(sizes), 1) + 1
    formats = [_RowsFormat(*block) for block in rows.blocks(_INPUT_SIZE // size + 1)]
    return [
        InputFile(path=one.path, format=one, size=size * len(one.numbers), mtime_ns=None)
        for one in formats
    ]


class _RowsFormat(Format):
    """Some rows of a part of `Rows`, as an input of a job."""

    name = "rows"

    def __init__(self, part: Any, numbers: range) -> None:
        self._part, self.numbers, self.unit = part, numbers, part.unit
        self.path, self.first_line = part.locate(numbers.start)

    def __getstate__(self) -> dict[str, Any]:
        """A worker gets its own of the rows in memory."""
        if self._part.file is not None:
            return vars(self)
        rows = self._part.read(np.array(self.numbers, np.int64))
        return {**vars(self), "_part": MemoryPart(rows), "numbers": range(len(rows))}

    def read(self, part: Part, query: Query) -> Iterator[Documents]:
        batch, (_, first) = Batch(query, part.size), self._part.locate(self.numbers.start)
        for start in range(0, len(self.numbers), BLOCK):
            numbers = self.numbers[start : start + BLOCK]
            for number, row in zip(numbers, self._part.read(np.array(numbers)), strict=True):
                line = self._part.locate(number)[1] - first
                try:
                    if isinstance(row, BadDocumentError):
                        raise row
                    texts = [row] if query.whole else [text_at(row, query.keys[0])]
                    batch.add(texts, line, id_=id_text(row.get(query.id_key)))
                except BadDocumentError as error:
                    query.reject(line, -1, str(error), repr(row).encode())
            yield batch.take(line + 1, start + len(numbers), len(self.numbers))
