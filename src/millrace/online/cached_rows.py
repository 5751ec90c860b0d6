"""Rows that are tokenised once: token files in the cache folder, found again by their content."""

import contextlib
import glob
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from millrace.cache import arrays
from millrace.encoding import Tokenizer
from millrace.encoding.row_encoders import RowEncoder, TextRows
from millrace.engine import Progress
from millrace.errors import ConfigError
from millrace.files import atomic_file, file_lock
from millrace.names import BIN, IDX
from millrace.online.numbered_rows import Rows, _MemoryRows
from millrace.tokenizing import tokenize


class Pair(NamedTuple):
    """Token files of rows.

    Attributes:
        prefix: Path prefix of the pair.
        has_mask: Whether ranges that are not trained on lie beside it.
        sizes: Bytes of the `.bin` and the `.idx`.
        num_skipped: Number of bad rows, which have no document.
    """

    prefix: str
    has_mask: bool
    sizes: list[int]
    num_skipped: int


def tokenized(
    rows: Rows, encoder: RowEncoder, folder: str, *, show_progress: bool, **options: Any
) -> Pair:
    """The token files of all rows, made by a tokenise job unless they are there.

    Of several processes one makes them, and the others wait; after a kill the next one continues.

    Args:
        options: `on_error` and `workers` of the job.
    """
    key = [rows.fingerprint(), encoder.fingerprint(), options["on_error"]]
    os.makedirs(folder, exist_ok=True)
    place = os.path.join(folder, f"rows-{arrays.fingerprint(key)[:16]}")
    path = place + ".tokens.json"
    if (pair := _find(path, key)) is not None:
        return pair
    with _turn(place, show_progress):
        if (pair := _find(path, key)) is not None:
            return pair
        pair = _make(rows, encoder, place, show_progress=show_progress, **options)
        with atomic_file(path) as file:
            file.write(arrays.seal({"key": key, **pair._asdict()}))
        return pair._replace(prefix=os.path.join(folder, pair.prefix))


def _find(path: str, key: Any) -> Pair | None:
    record = arrays.read_record(path)
    with contextlib.suppress(*arrays.NO_RECORD):
        if record is not None and record.pop("key") == key:
            pair = Pair(**record)
            pair = pair._replace(prefix=os.path.join(os.path.dirname(path), pair.prefix))
            return pair if _sizes(pair.prefix) == pair.sizes else None
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
            journals = glob.glob(f"{glob.escape(place)}.journal/*/done.jsonl")
            size = sum(map(os.path.getsize, journals))
            progress.update(0, f"another process tokenises the rows ({size:,} bytes of journal)")
        yield


def _make(rows: Rows, encoder: RowEncoder, place: str, **options: Any) -> Pair:
    """Runs the job; the pair's prefix is relative to the folder, which may be moved."""
    inputs, lines = [file.path for file in rows.files], place + ".rows.jsonl"
    if isinstance(rows, _MemoryRows):
        rows.write_lines(lines)
        inputs = [lines]
    else:
        options["max_document_size"] = rows.max_size  # type: ignore[attr-defined]
    if isinstance(encoder, TextRows):
        tokenizer = encoder.tokenizer
        options |= {"append_eod": encoder.append_eod, "prepend_bos": encoder.prepend_bos}
        options["json_keys"] = [encoder.key]
    else:
        tokenizer, options["row_encoder"] = _tokenizer_of(encoder), encoder
    if not inputs:
        raise ConfigError("there are no rows to tokenise")
    try:
        result = tokenize(inputs, place, tokenizer, **options)
    except ConfigError:  # of files that were moved or touched since a run that was killed
        result = tokenize(inputs, place, tokenizer, restart=True, **options)
    rows.read(np.arange(min(len(rows), 1)))  # an error if the files have changed meanwhile
    with contextlib.suppress(FileNotFoundError):
        os.unlink(lines)
    [prefix] = result.prefixes.values()
    has_mask = os.path.exists(prefix + ".loss.json")
    return Pair(os.path.basename(prefix), has_mask, _sizes(prefix), result.num_skipped)


def _tokenizer_of(encoder: Any) -> Tokenizer:
    """The tokenizer that the job notes: the encoder's, or one that stands for the encoder."""
    tokenizer = getattr(encoder, "tokenizer", None)
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    return Tokenizer.from_function(
        _no_ids,
        vocabulary_size=int(np.iinfo(encoder.dtype).max),
        name=type(encoder).__name__,
        version=arrays.fingerprint(encoder.fingerprint()),
    )


def _no_ids(text: str) -> list[int]:
    raise ConfigError("a row encoder has no tokenizer of texts")
