"""A task of a tokenise job: documents of some parts of the input become a small indexed dataset."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from millrace.encoding import compare_encoders
from millrace.engine import Task
from millrace.errors import TextError
from millrace.files import xxh3
from millrace.store import IndexedDatasetBuilder, finalize_together
from millrace.text import Documents, Part, Query, first_line_of, read_documents
from millrace.text.streams import open_stream
from millrace.tokenizing.columns import Column, encode_column
from millrace.tokenizing.tokenize_options import TokenizeOptions

Item = TypeVar("Item")

_READ_SIZE = 1 << 20
_BLOCK_SIZE = 1 << 19  # 7 % faster than half of it: fewer calls for each byte
_LONGEST_CHECK = 100_000  # characters of a document that are compared: the reference is slow


@dataclass(frozen=True, kw_only=True)
class Work:
    """The payload of a task.

    Attributes:
        parts: What it reads.
        checksum: Checksum of an unpacked piece that it reads, or None.
    """

    parts: tuple[Part, ...]
    checksum: str | None = None


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


def run_task(options: TokenizeOptions, task: Task) -> tuple[dict[str, Any], list[str]]:
    """Reads and encodes the parts of a task; returns its record and its files.

    The record has `documents`, `tokens` (per key), `bytes` (of UTF-8 text), `lines` (per part),
    `rejects` (of `REJECTS`), `empty` (number of documents without text), `inputs` (per part: path
    and range, size and time of the file, checksum of the lines), and `on_error` and `checksum` as
    they were.
    """
    work: Work = task.payload
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(_Writer(options, task.folder))
        # The first is written by the reader's thread, the second by this one.
        lines, texts = (
            stack.enter_context(Rejects(os.path.join(task.folder, name), options, work.parts))
            for name in REJECTS
        )
        reader = _Reader(options, work.parts, lines)
        batches = stack.enter_context(contextlib.closing(_ahead(reader.batches())))
        compare = Comparison(options, task)
        options.tokenizer.load()  # takes 0.25 s, in which the first batch is read
        for batch in batches:
            columns, mask = _encode(options, batch, texts)
            compare(batch.documents)
            writer.add(batch, columns, mask)
        for rejects in (lines, texts):
            rejects.close()
        writer.finish()
    record = {
        "documents": writer.num_documents,
        "tokens": writer.num_tokens,
        "bytes": writer.num_bytes,
        "lines": reader.num_lines,
        "rejects": [lines.count, texts.count],
        "empty": writer.num_empty,
        "inputs": [] if work.checksum is not None else reader.inputs,
        "on_error": options.on_error,
        "checksum": work.checksum,
    }
    return record, [*writer.files, *lines.files, *texts.files]


REJECTS = ("lines", "texts")
"""The starts of the names of a task's rejects: lines, and documents that are not encoded."""


def prefix_of(folder: str, key: int, partition: int) -> str:
    """The prefix of the indexed dataset of a key and a partition in the folder of a task."""
    return os.path.join(folder, f"{key}-{partition}")


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

    def __init__(self, options: TokenizeOptions, parts: Sequence[Part], rejects: Rejects) -> None:
        self._options, self._parts, self._rejects = options, parts, rejects
        self.num_lines = [0] * len(parts)
        self.inputs: list[Any] = []

    def batches(self) -> Iterator[_Batch]:
        options = self._options
        for number, part in enumerate(self._parts):
            query = Query(
                keys=tuple(options.json_keys),
                reject=functools.partial(self._rejects.add, number),
                id_key=options.id_key,
                # Megatron-LM makes an empty document of an empty text.
                skip_empty=options.on_error != "stop",
                max_size=options.longest_document,
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


def _ahead(items: Iterator[Item]) -> Generator[Item, None, None]:
    """Items, each of which a thread makes while the caller works: encoders release the GIL."""
    with ThreadPoolExecutor(1, "millrace-reader") as pool:
        future = pool.submit(next, items, None)
        while (item := future.result()) is not None:
            future = pool.submit(next, items, None)
            yield item


# ---- lines that are not documents ----


class Rejects:
    """What one thread of a task rejects, in order: raised, or written to two files.

    `STEM.rejects.jsonl` has an object per line: the part, the line within the part, the byte
    offset, the reason and the size; `STEM.rejects.bin` has the bytes of all, one after the other.
    """

    def __init__(self, stem: str, options: TokenizeOptions, parts: Sequence[Part]) -> None:
        self._on_error, self._parts = options.on_error, parts
        self._names = stem + ".rejects.jsonl", stem + ".rejects.bin"
        self._resources = contextlib.ExitStack()
        self._rows: Any = None
        self._bytes: Any = None
        self.count = 0

    @property
    def files(self) -> list[str]:
        return [] if self._rows is None else list(self._names)

    def add(self, part: int, line: int, byte_offset: int, reason: str, data: bytes) -> None:
        """Raises a TextError, or keeps a line that is not a document."""
        if self._on_error == "stop":
            raise TextError(self._message(part, line, byte_offset, reason))
        if self._rows is None:
            self._rows = self._resources.enter_context(open(self._names[0], "wb"))  # noqa: SIM115
            self._bytes = self._resources.enter_context(open(self._names[1], "wb"))  # noqa: SIM115
        self.count += 1
        if self._on_error == "quarantine":
            self._bytes.write(data)
        row = {
            "part": part,
            "line": line,
            "byte_offset": byte_offset,
            "reason": reason,
            "size": len(data) if self._on_error == "quarantine" else 0,
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
    options: TokenizeOptions, batch: _Batch, rejects: Rejects
) -> tuple[list[Column], NDArray[np.bool_]]:
    """The tokens of each key, and whether each document could be encoded; else it is empty."""
    documents = batch.documents
    mask = np.ones(len(documents.lines), np.bool_)
    try:
        return [encode_column(texts, options) for texts in documents.texts], mask
    except TextError:
        for number, texts in enumerate(zip(*documents.texts, strict=True)):
            try:
                for text in texts:
                    encode_column([text], options)
            except TextError as error:
                line, byte_offset = documents.lines[number], documents.byte_offsets[number]
                data = json.dumps(list(texts)).encode()
                rejects.add(batch.part, int(line), int(byte_offset), str(error), data)
                mask[number] = False
        for column in documents.texts:
            for number in np.flatnonzero(~mask).tolist():
                column[number] = ""
        return [encode_column(texts, options) for texts in documents.texts], mask


# ---- the reference ----


class Comparison:
    """Compares a random sample of documents with the reference library."""

    def __init__(self, options: TokenizeOptions, task: Task) -> None:
        self._tokenizer, self._rate = options.tokenizer, options.check_rate
        if self._tokenizer.encoder_name == self._tokenizer.reference_name:
            self._rate = 0.0
        self._random = np.random.default_rng(task.number)

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


# ---- what a task writes ----

ORIGIN = np.dtype(
    [
        ("part", "<i4"),
        ("partition", "<i4"),
        ("line", "<i8"),
        ("byte_offset", "<i8"),
        ("id_length", "<i4"),  # bytes of UTF-8; -1: no id
    ]
)
"""A document in the file `origins`; the file `ids` has the ids, one after the other."""


class _Writer:
    """Writes the documents of a task, and where they come from.

    Attributes:
        files: Paths of its files.
        num_documents, num_bytes, num_empty: Counts, as in the record.
        num_tokens: Number of tokens of each key.
    """

    def __init__(self, options: TokenizeOptions, folder: str) -> None:
        self._num_partitions = options.num_partitions
        self._resources = contextlib.ExitStack()
        prefixes = [
            [prefix_of(folder, key, partition) for partition in range(self._num_partitions)]
            for key in range(len(options.json_keys))
        ]
        enter, dtype = self._resources.enter_context, options.tokenizer.dtype
        self._builders = [
            [enter(IndexedDatasetBuilder(prefix, dtype, durable=False)) for prefix in group]
            for group in prefixes
        ]
        paths = [os.path.join(folder, name) for name in ("origins", "ids")]
        self._origins, self._ids = (enter(open(path, "wb")) for path in paths)  # noqa: SIM115
        pairs = itertools.product(itertools.chain.from_iterable(prefixes), (".bin", ".idx"))
        self.files = [*paths, *map("".join, pairs)]
        self.num_documents = self.num_bytes = self.num_empty = 0
        self.num_tokens = [0] * len(options.json_keys)

    def add(self, batch: _Batch, columns: Sequence[Column], mask: NDArray[np.bool_]) -> None:
        """Appends the documents of a batch where `mask`, bool [documents], is True."""
        count = int(np.count_nonzero(mask))
        numbers = np.arange(self.num_documents, self.num_documents + count)
        partitions = numbers % self._num_partitions
        for key, column in enumerate(columns):
            kept = column.select(mask)
            self.num_tokens[key] += len(kept.tokens)
            for partition, builder in enumerate(self._builders[key]):
                kept.select(partitions == partition).add_to(builder)
        documents = batch.documents
        ids = [
            None if text is None else text.encode()
            for text in itertools.compress(documents.ids, mask)
        ]
        rows = np.empty(count, ORIGIN)
        rows["part"] = batch.part
        rows["partition"] = partitions
        rows["line"] = documents.lines[mask]
        rows["byte_offset"] = documents.byte_offsets[mask]
        rows["id_length"] = [-1 if name is None else len(name) for name in ids]
        self._origins.write(rows.tobytes())
        self._ids.write(b"".join(name for name in ids if name is not None))
        self.num_documents += count
        self.num_bytes += sum(map(_num_bytes, documents.texts))
        self.num_empty += _num_empty(documents)

    def finish(self) -> None:
        """Completes the files."""
        finalize_together([builder for group in self._builders for builder in group])
        self._resources.close()

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *error: Any) -> None:
        self._resources.__exit__(*error)
