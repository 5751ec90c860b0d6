"""A task of a tokenise job: documents of some parts of the input become a small indexed dataset."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from millrace.encoding import Tokenizer, compare_encoders
from millrace.errors import MillraceError, TextError
from millrace.files import xxh3
from millrace.jobs.engine import Task, commit
from millrace.jobs.tokenizing.columns import Column, encode_column
from millrace.store import IndexedDatasetBuilder, finalize_together
from millrace.text import (
    Documents,
    Format,
    Part,
    Query,
    SentenceSplitter,
    first_line_of,
    read_documents,
)
from millrace.text.records import Text
from millrace.text.streams import open_stream

Item = TypeVar("Item")

_READ_SIZE = 1 << 20
_BLOCK_SIZE = 1 << 19  # 7 % faster than half of it: fewer calls for each byte
_LONGEST_CHECK = 100_000  # characters of a document that are compared: the reference is slow


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What each task of a job needs to know.

    Attributes:
        tokenizer: The tokenizer.
        keys: Keys of the texts in a document.
        id_key: Key of a document's id.
        separator: Text between the documents of a plain text file, or None: the file is one.
        format: Format of all inputs, or None: their names and first bytes tell it.
        splitter: Splitter of texts into sentences, or None.
        first_token, last_token: Token at the start and end of each document, or None.
        unknown: Token that makes a document unfit, or None.
        num_partitions: Number of groups among which documents are dealt round robin.
        on_error: What happens to lines that are not documents: "stop", "skip" or "quarantine".
        max_document_size: Longest line, or text, in bytes.
        check_rate: Share of documents that are compared with the reference library.
    """

    tokenizer: Tokenizer
    keys: tuple[str, ...]
    id_key: str
    separator: str | None
    format: Format | None = None
    splitter: SentenceSplitter | None
    first_token: int | None
    last_token: int | None
    unknown: int | None
    num_partitions: int
    on_error: str
    max_document_size: int
    check_rate: float


@dataclass(frozen=True, kw_only=True)
class Work:
    """The payload of a task.

    Attributes:
        journal: The first argument of `commit`.
        folder: Path of the task's folder in the journal.
        parts: What it reads.
        checksum: Checksum of an unpacked piece that it reads, or None.
    """

    journal: str
    folder: str
    parts: tuple[Part, ...]
    checksum: str | None


def task_name(parts: Sequence[Part]) -> str:
    """What a task reads, for messages."""
    part = parts[0]
    stop = "the end" if part.stop is None else f"{part.stop:,}"
    more = f" and {len(parts) - 1:,} more" if len(parts) > 1 else ""
    return f"{part.source} from {part.start:,} to {stop}{more}"


def is_of(record: dict[str, Any], parts: Sequence[Part], checksum: str | None) -> bool:
    """Whether a task that has read these parts would write what the record's task has written.

    A file that has another size or time since then is read again, if it is cut at line breaks: all
    that such a task depends on is the lines that begin in its part.
    """
    if checksum is not None or record["checksum"] is not None:
        return bool(checksum == record["checksum"])
    return len(record["inputs"]) == len(parts) and all(
        [part.path, part.start, part.stop] == place
        and (
            [part.file_size, part.mtime_ns] == identity
            or (digest is not None and digest == _sum_of_lines(part))
        )
        for part, (place, identity, digest) in zip(parts, record["inputs"], strict=True)
    )


def _sum_of_lines(part: Part) -> str | None:
    """XXH3-64 of the lines of a part and their position; None of files that are not so cut."""
    if not part.is_range_of_lines:
        return None
    digest = xxh3()
    with open_stream(
        part.path, source=part.source, start=part.start, stop=part.stop, identity=part.identity
    ) as stream:
        digest.update(str(stream.first_byte).encode())
        while data := stream.read(_READ_SIZE):
            digest.update(data)
    return str(digest.hexdigest())


def run_task(settings: Settings, task: Task) -> dict[str, Any] | MillraceError:
    """Reads, encodes and commits a task; returns its record, or the error of its input.

    The record has `stem` (start of the names of its files), `documents`, `tokens` (per key),
    `bytes` (of UTF-8 text), `lines` (per part), `rejects` (per file of `reject_stems`), `empty`
    (number of documents without text), `inputs` (per part: path and range, size and time of the
    file, checksum of the lines), and `on_error` and `checksum` as they were.
    """
    try:
        return _run_task(settings, task)
    except MillraceError as error:
        return error


def _run_task(settings: Settings, task: Task) -> dict[str, Any]:
    work: Work = task.payload
    # Each attempt has its own names: one that was lost, and is not dead, disturbs no other.
    stem = os.path.join(work.folder, os.urandom(6).hex())
    tokenizer = settings.tokenizer
    prefixes = [
        [f"{stem}-{key}-{partition}" for partition in range(settings.num_partitions)]
        for key in range(len(settings.keys))
    ]
    num_tokens = [0] * len(settings.keys)
    num_documents = num_bytes = num_empty = 0
    compare = _Comparison(settings, task.number)
    with contextlib.ExitStack() as stack:
        builders = [
            [
                stack.enter_context(IndexedDatasetBuilder(prefix, tokenizer.dtype, durable=False))
                for prefix in group
            ]
            for group in prefixes
        ]
        origins = stack.enter_context(_Origins(stem))
        # The first is written by the reader's thread, the second by this one.
        rejects, unknown = (
            stack.enter_context(Rejects(reject_stem, settings, work.parts))
            for reject_stem in reject_stems(stem)
        )
        reader = _Reader(settings, work.parts, rejects)
        batches = stack.enter_context(_Ahead(reader.batches()))
        tokenizer.load()  # takes 0.25 s, in which the first batch is read
        for batch in batches:
            columns, mask = _encode(settings, batch, unknown)
            compare(batch.documents)
            mask &= _accepted(settings, columns, batch, unknown)
            columns = [column.select(mask) for column in columns]
            numbers = np.arange(num_documents, num_documents + np.count_nonzero(mask))
            partitions = numbers % settings.num_partitions
            for key, column in enumerate(columns):
                num_tokens[key] += len(column.tokens)
                for partition, builder in enumerate(builders[key]):
                    column.select(partitions == partition).add_to(builder)
            num_documents += len(numbers)
            num_bytes += sum(map(_num_bytes, batch.documents.texts))
            num_empty += _num_empty(batch.documents)
            origins.add(batch, mask, partitions)
        origins.close()
        rejects.close()
        unknown.close()
        finalize_together([builder for group in builders for builder in group])
    files = [*origins.files, *rejects.files, *unknown.files]
    for group in prefixes:
        files += [prefix + suffix for prefix in group for suffix in (".bin", ".idx")]
    record = {
        "stem": os.path.basename(stem),
        "documents": num_documents,
        "tokens": num_tokens,
        "bytes": num_bytes,
        "lines": reader.num_lines,
        "rejects": [rejects.count, unknown.count],
        "empty": num_empty,
        "inputs": [] if work.checksum is not None else reader.inputs,
        "on_error": settings.on_error,
        "checksum": work.checksum,
    }
    commit(work.journal, task.number, record, files, durable=task.durable)
    return record


def reject_stems(stem: str) -> tuple[str, str]:
    """The starts of the names of a task's rejects: lines, and documents that are not encoded."""
    return stem + ".lines", stem + ".unknown"


def prefix_of(folder: str, record: dict[str, Any], key: int, partition: int) -> str:
    """The prefix of a committed task's indexed dataset."""
    return os.path.join(folder, f"{record['stem']}-{key}-{partition}")


# ---- reading ahead ----


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """Documents of one part.

    Attributes:
        documents: The documents.
        part: Number of the part.
    """

    documents: Documents
    part: int


class _Reader:
    """The batches of all parts; counts the lines of each part, and notes what was read."""

    def __init__(self, settings: Settings, parts: Sequence[Part], rejects: Rejects) -> None:
        self._settings, self._parts, self._rejects = settings, parts, rejects
        self.num_lines = [0] * len(parts)
        self.inputs: list[Any] = []

    def batches(self) -> Iterator[_Batch]:
        settings = self._settings
        for number, part in enumerate(self._parts):
            query = Query(
                keys=settings.keys,
                reject=functools.partial(self._rejects.add, number),
                id_key=settings.id_key,
                # Megatron-LM makes an empty document of an empty text.
                skip_empty=settings.on_error != "stop",
                max_size=settings.max_document_size,
                block_size=_BLOCK_SIZE,
            )
            for documents in read_documents(part, query):
                self.num_lines[number] += documents.num_lines
                yield _Batch(documents=documents, part=number)
            place = [part.path, part.start, part.stop]
            # The pages are in memory still: this takes a hundredth of the time of the encoder.
            self.inputs.append([place, list(part.identity), _sum_of_lines(part)])


def _num_empty(documents: Documents) -> int:
    """The number of documents whose texts are empty under all keys, or more."""
    return min(
        sum(not (any(text) if isinstance(text, list) else text) for text in texts)
        for texts in documents.texts
    )


def _num_bytes(texts: Sequence[str | list[str]]) -> int:
    # Python keeps the UTF-8 that an encoder has asked for: after it, this is a copy at most.
    return sum(
        (len(text) if text.isascii() else len(text.encode()))
        if isinstance(text, str)
        else _num_bytes(text)
        for text in texts
    )


class _Ahead(Generic[Item]):
    """Items that a thread makes while the caller works: encoders release the GIL."""

    def __init__(self, items: Iterator[Item]) -> None:
        self._ready: queue.Queue[tuple[Item | None, BaseException | None]] = queue.Queue(maxsize=1)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(
            target=self._make, args=(items,), name="millrace-reader", daemon=True
        )

    def __enter__(self) -> _Ahead[Item]:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed.set()
        self._thread.join()

    def __iter__(self) -> Iterator[Item]:
        while True:
            item, error = self._ready.get()
            if error is not None:
                raise error
            if item is None:
                return
            yield item

    def _make(self, items: Iterator[Item]) -> None:
        try:
            for item in items:
                self._put(item, None)
                if self._is_closed.is_set():
                    return
            self._put(None, None)
        except BaseException as error:  # raised again in the caller's thread
            self._put(None, error)

    def _put(self, item: Item | None, error: BaseException | None) -> None:
        while not self._is_closed.is_set():
            with contextlib.suppress(queue.Full):
                self._ready.put((item, error), timeout=0.1)
                return


# ---- lines that are not documents ----


class Rejects:
    """What one thread of a task rejects, in order: raised, or written to two files.

    `STEM.rejects.jsonl` has an object per line: the part, the line within the part, the byte
    offset, the reason and the size; `STEM.rejects.bin` has the bytes of all, one after the other.
    """

    def __init__(self, stem: str, settings: Settings, parts: Sequence[Part]) -> None:
        self._settings, self._parts = settings, parts
        self._names = stem + ".rejects.jsonl", stem + ".rejects.bin"
        self._resources = contextlib.ExitStack()
        self._rows: Any = None
        self._bytes: Any = None
        self.count = 0

    @property
    def files(self) -> list[str]:
        return [] if self._rows is None else list(self._names)

    def add(
        self, part: int, line: int, byte_offset: int, reason: str, data: Iterable[bytes]
    ) -> None:
        """Raises a TextError, or keeps a line that is not a document."""
        if self._settings.on_error == "stop":
            raise TextError(self._message(part, line, byte_offset, reason))
        if self._rows is None:
            self._rows = self._resources.enter_context(open(self._names[0], "wb"))  # noqa: SIM115
            self._bytes = self._resources.enter_context(open(self._names[1], "wb"))  # noqa: SIM115
        self.count += 1
        size = 0
        if self._settings.on_error == "quarantine":
            for piece in data:
                self._bytes.write(piece)
                size += len(piece)
        row = {
            "part": part,
            "line": line,
            "byte_offset": byte_offset,
            "reason": reason,
            "size": size,
        }
        self._rows.write(json.dumps(row).encode() + b"\n")

    def close(self) -> None:
        self._resources.close()

    def _message(self, part_number: int, line: int, byte_offset: int, reason: str) -> str:
        part = self._parts[part_number]
        return (
            f"{part.source}, {part.unit} {first_line_of(part) + line}: {reason}. Or go on without "
            f"such {part.unit}s: --on-error skip, or quarantine, which keeps their bytes"
        )

    def __enter__(self) -> Rejects:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _encode(
    settings: Settings, batch: _Batch, rejects: Rejects
) -> tuple[list[Column], NDArray[np.bool_]]:
    """The tokens of each key, and whether each document could be encoded; else it is empty."""

    def columns(texts: Sequence[list[Text]]) -> list[Column]:
        return [
            encode_column(
                column,
                settings.tokenizer,
                splitter=settings.splitter,
                first_token=settings.first_token,
                last_token=settings.last_token,
            )
            for column in texts
        ]

    documents = batch.documents
    mask = np.ones(len(documents.lines), np.bool_)
    try:
        return columns(documents.texts), mask
    except TextError:
        for number, texts in enumerate(zip(*documents.texts, strict=True)):
            try:
                columns([[text] for text in texts])
            except TextError as error:
                _reject_document(batch, number, str(error), rejects)
                mask[number] = False
        for column in documents.texts:
            for number in np.flatnonzero(~mask).tolist():
                column[number] = ""
        return columns(documents.texts), mask


def _reject_document(batch: _Batch, number: int, reason: str, rejects: Rejects) -> None:
    documents = batch.documents
    rejects.add(
        batch.part,
        int(documents.lines[number]),
        int(documents.byte_offsets[number]),
        reason,
        [json.dumps([texts[number] for texts in documents.texts]).encode()],
    )


def _accepted(
    settings: Settings, columns: Sequence[Column], batch: _Batch, rejects: Rejects
) -> NDArray[np.bool_]:
    """Whether each document is wanted: False where the unknown token makes it unfit."""
    mask = np.ones(len(batch.documents.lines), np.bool_)
    if settings.unknown is None:
        return mask
    for column in columns:
        mask &= ~column.has_token(settings.unknown)
    for number in np.flatnonzero(~mask).tolist():
        reason = "a character that the tokenizer does not know"
        _reject_document(batch, number, reason, rejects)
    return mask


# ---- the reference ----


class _Comparison:
    """Compares a random sample of documents with the reference library."""

    def __init__(self, settings: Settings, number: int) -> None:
        self._tokenizer, self._rate = settings.tokenizer, settings.check_rate
        if self._tokenizer.encoder_name == self._tokenizer.reference_name:
            self._rate = 0.0
        self._random = np.random.default_rng([number])

    def __call__(self, documents: Documents) -> None:
        if self._rate == 0:
            return
        chosen = np.flatnonzero(self._random.random(len(documents.lines)) < self._rate)
        texts = []
        for number in chosen.tolist():
            for column in documents.texts:
                text = column[number]
                texts += [part[:_LONGEST_CHECK] for part in ([text] if type(text) is str else text)]
        if not texts:
            return
        tokenizer = self._tokenizer
        difference = compare_encoders(
            tokenizer, tokenizer.with_encoder(tokenizer.reference_name), texts
        )
        if difference is not None:
            raise TextError(
                f"{tokenizer.encoder_name} and {tokenizer.reference_name} differ: {difference}. "
                "The tokens cannot be trusted: run again with "
                f"--encoder {tokenizer.reference_name} --restart"
            )


# ---- origins ----

ORIGIN = np.dtype(
    [
        ("part", "<i4"),
        ("partition", "<i4"),
        ("line", "<i8"),
        ("byte_offset", "<i8"),
        ("id_length", "<i4"),  # bytes of UTF-8; -1: no id
    ]
)
"""A document in `STEM.origins`; `STEM.ids` has the ids, one after the other."""


class _Origins:
    """Writes where the documents of a task come from."""

    def __init__(self, stem: str) -> None:
        self.files = [stem + ".origins", stem + ".ids"]
        self._resources = contextlib.ExitStack()
        self._rows, self._ids = (
            self._resources.enter_context(open(path, "wb"))  # noqa: SIM115
            for path in self.files
        )

    def add(self, batch: _Batch, mask: NDArray[np.bool_], partitions: NDArray[np.int64]) -> None:
        documents = batch.documents
        ids = [
            None if text is None else text.encode()
            for text in itertools.compress(documents.ids, mask)
        ]
        rows = np.empty(len(ids), ORIGIN)
        rows["part"] = batch.part
        rows["partition"] = partitions
        rows["line"] = documents.lines[mask]
        rows["byte_offset"] = documents.byte_offsets[mask]
        rows["id_length"] = [-1 if name is None else len(name) for name in ids]
        self._rows.write(rows.tobytes())
        self._ids.write(b"".join(name for name in ids if name is not None))

    def close(self) -> None:
        self._resources.close()

    def __enter__(self) -> _Origins:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
