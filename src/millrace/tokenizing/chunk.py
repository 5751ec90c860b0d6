"""A task of a tokenise job: documents of some parts become a small indexed dataset."""

import base64
import contextlib
import functools
import itertools
import json
import os
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from millrace.encoding import compare_encoders
from millrace.encoding.row_encoders import EncodedTexts, encode_rows, encode_texts
from millrace.engine import Task
from millrace.errors import TextError
from millrace.files import checksum, naming
from millrace.ragged import sizes_of, spread
from millrace.store import IndexedDatasetBuilder, finalize_together
from millrace.text import Documents, Part, Query, first_line_of, open_part, read_documents
from millrace.text.json_values import texts_of
from millrace.tokenizing.tokenize_options import TokenizeOptions

Item = TypeVar("Item")
Record = dict[str, Any]  # of a task; see `run_task`

_READ_SIZE = 1 << 20
_BLOCK_SIZE = 1 << 19  # 7 % faster than half of it: fewer calls for each byte
_LONGEST_CHECK = 100_000  # characters of a document that are compared: the reference is slow

UNTRAINED = "untrained"
"""A task's file of what `write_loss_ranges` takes: int32 [ranges, 3]; empty without an encoder."""

REJECTS = "rejects"
"""A task's file of what it rejects, in order: for each a line of JSON (part, line within the part,
byte offset, reason, and its bytes in base64)."""

ORIGINS = "origins"
"""A task's file of where its documents come from: for each batch an array of `ORIGIN`, as `np.save`
writes it, and a line of JSON with the ids."""

ORIGIN = np.dtype([("part", "<i4"), ("partition", "<i4"), ("line", "<i8"), ("byte_offset", "<i8")])


class Work(NamedTuple):
    """The payload of a task: what it reads, and the checksum of an unpacked piece."""

    parts: tuple[Part, ...]
    checksum: str | None = None


def is_of(record: Record, work: Work) -> bool:
    """Whether a task with this work would write what the record's task wrote.

    A changed file is read again if it is cut at line breaks: such a task only depends on the lines
    that begin in its part.
    """
    if work.checksum is not None or record["checksum"] is not None:
        return bool(work.checksum == record["checksum"])
    return len(record["inputs"]) == len(work.parts) and all(
        [part.file.path, part.start, part.stop] == place
        and (
            [part.file.size, part.file.mtime_ns] == identity
            or (digest is not None and digest == _sum_of_lines(part))
        )
        for part, (place, identity, digest) in zip(work.parts, record["inputs"], strict=True)
    )


def _sum_of_lines(part: Part) -> str | None:
    """XXH3-64 of a part's lines and their position; None if it is not cut at lines."""
    if part.file.compression or not part.file.format.is_cut_at_lines:
        return None
    with open_part(part) as stream:
        blocks = iter(functools.partial(stream.read, _READ_SIZE), b"")
        return checksum(itertools.chain([str(stream.first_byte).encode()], blocks))


def prefix_of(folder: str, key: int, partition: int) -> str:
    """The prefix of a task's indexed dataset of a key and a partition."""
    return os.path.join(folder, f"{key}-{partition}")


def run_task(options: TokenizeOptions, task: Task) -> tuple[Record, list[str]]:
    """Reads and encodes the parts of a task; returns its record and its files.

    The record has `documents`, `tokens` (per key), `bytes` (of UTF-8 text), `lines` (per part),
    `rejects` (their number), `empty` (documents without text), `report` (of a row encoder),
    `inputs` (per part: path and range, size and time of the file, checksum of the lines), and
    `on_error` and `checksum`.
    """
    work: Work = task.payload
    record: Record = {
        "documents": 0,
        "tokens": [0] * len(options.json_keys),
        "bytes": 0,
        "rejects": 0,
        "lines": [0] * len(work.parts),
        "empty": 0,
        "report": Counter(),
        "inputs": [],
        "on_error": options.on_error,
        "checksum": work.checksum,
    }
    with contextlib.ExitStack() as stack:
        writer = _Writer(options, task.folder, record, stack)
        batches = _ahead(_read(options, work, record))
        stack.callback(batches.close)
        random, num_lines = np.random.default_rng(task.number), 0
        if options.row_encoder is None:
            options.tokenizer.load()  # 0.25 s, in which the first batch is read
        for part, documents, rejects in batches:
            num_lines += len(rejects)
            if options.row_encoder is not None:
                documents, columns, problems = _encode_rows(options, documents, writer)
            else:
                documents, columns, problems = _encode(options, documents)
                _compare(options, documents, random)
                writer.count(documents)
            writer.add_rejects(work.parts, part, rejects + problems)
            writer.add(part, documents, columns)
        finalize_together(list(writer.builders.values()))
    for name in {"rows", "bad rows"} & record["report"].keys():
        record["report"][name] += num_lines  # which the encoder has not met
    return record, writer.files


class _Reject(NamedTuple):
    """A line, or a document, that cannot be used; its line counts from the part's first."""

    line: int
    byte_offset: int
    reason: str
    data: bytes


# ---- reading ahead ----


def _read(
    options: TokenizeOptions, work: Work, record: Record
) -> Iterator[tuple[int, Documents, list[_Reject]]]:
    """Batches of documents with the number of their part, and the lines between them that are not
    documents; notes in the record what was read."""
    rejects: list[_Reject] = []

    for number, part in enumerate(work.parts):
        query = Query(
            keys=tuple(options.json_keys),
            reject=lambda *line: rejects.append(_Reject(*line)),
            id_key=options.id_key,
            # Megatron-LM makes an empty document of an empty text.
            skip_empty=options.on_error != "stop" and options.row_encoder is None,
            whole=options.row_encoder is not None,
            max_size=options.max_document_size,
            block_size=_BLOCK_SIZE,
        )
        for documents in read_documents(part, query):
            record["lines"][number] += documents.num_lines
            yield number, documents, rejects.copy()
            rejects.clear()
        if work.checksum is None:
            file, place = part.file, [part.file.path, part.start, part.stop]
            # The pages are in memory still: this is a hundredth of the encoder's time.
            record["inputs"].append([place, [file.size, file.mtime_ns], _sum_of_lines(part)])


def _ahead(items: Iterator[Item]) -> Generator[Item, None, None]:
    """Items that a thread makes while the caller works: encoders release the GIL."""
    with ThreadPoolExecutor(1, "millrace-reader") as pool:
        future = pool.submit(next, items, None)
        while (item := future.result()) is not None:
            future = pool.submit(next, items, None)
            yield item


# ---- encoding ----


def _encode(
    options: TokenizeOptions, documents: Documents
) -> tuple[Documents, list[EncodedTexts], list[_Reject]]:
    """The documents that can be encoded, the tokens of each key, and the other documents."""

    def encode(texts: Sequence[str | list[str]]) -> EncodedTexts:
        splitter = options.splitter
        split = [
            text if isinstance(text, list) else splitter.split(text) if splitter else [text]
            for text in texts
        ]
        return encode_texts(options.tokenizer, split, *options.edge_tokens)

    with contextlib.suppress(TextError):
        return documents, [encode(texts) for texts in documents.texts], []
    whole, rejects = [], []
    for number, texts in enumerate(zip(*documents.texts, strict=True)):
        try:
            for text in texts:
                encode([text])
            whole.append(number)
        except TextError as error:
            rejects.append(_rejected(documents, number, str(error), texts))
    documents = documents.select(whole)
    return documents, [encode(texts) for texts in documents.texts], rejects


def _encode_rows(
    options: TokenizeOptions, documents: Documents, writer: "_Writer"
) -> tuple[Documents, list[EncodedTexts], list[_Reject]]:
    """The documents of a batch of rows, each with its row's line and id; their tokens; bad rows."""
    rows: Any = documents.texts[0]
    writer.record["bytes"] += documents.num_bytes
    encoded = encode_rows(options.row_encoder, rows)  # type: ignore[arg-type]
    problems = encoded.problems.items()
    rejects = [_rejected(documents, place, reason, rows[place]) for place, reason in problems]
    writer.record["report"].update(encoded.report)
    sizes = sizes_of(encoded.ends)
    lengths = sizes[sizes > 0]
    if encoded.trained is not None:
        writer.add_mask(encoded.trained, lengths)
    documents = documents.select(np.repeat(np.arange(len(rows)), encoded.counts).tolist())
    columns = [EncodedTexts(encoded.tokens, lengths, (sizes > 0).astype(np.int64))]
    return documents, columns, rejects


def _rejected(documents: Documents, place: int, reason: str, value: Any) -> _Reject:
    """A document of a batch that cannot be encoded, with its texts or its row."""
    line, byte_offset = int(documents.lines[place]), int(documents.byte_offsets[place])
    return _Reject(line, byte_offset, reason, json.dumps(value, default=str).encode())


def _compare(options: TokenizeOptions, documents: Documents, random: np.random.Generator) -> None:
    """Compares a sample of documents with the reference library."""
    tokenizer = options.tokenizer
    ours, theirs = tokenizer.encoder_name, tokenizer.reference_name
    if ours == theirs:
        return
    chosen = np.flatnonzero(random.random(len(documents.lines)) < options.check_rate)
    texts = (column[number] for number in chosen.tolist() for column in documents.texts)
    pieces = [piece[:_LONGEST_CHECK] for piece in texts_of(texts)]
    if not pieces:
        return
    if difference := compare_encoders(tokenizer, tokenizer.with_encoder(theirs), pieces):
        raise TextError(
            f"{ours} and {theirs} differ: {difference}. The tokens cannot be trusted: run again "
            f"with --encoder {theirs} --restart"
        )


# ---- what a task writes ----


def _selected(encoded: EncodedTexts, mask: NDArray[np.bool_]) -> EncodedTexts:
    """The documents where `mask`, bool [documents], is True."""
    if mask.all():
        return encoded
    sequences = np.repeat(mask, encoded.counts)
    tokens = encoded.tokens[np.repeat(sequences, encoded.lengths)]
    return EncodedTexts(tokens, encoded.lengths[sequences], encoded.counts[mask])


def _append(encoded: EncodedTexts, builder: IndexedDatasetBuilder) -> None:
    tokens, lengths, counts = encoded
    if counts.max(initial=0) <= 1:  # all in one call, which is much faster
        sizes = np.zeros(len(counts), np.int64)
        sizes[counts > 0] = lengths
        builder.add_documents(tokens, sizes)
        return
    ends = np.cumsum(counts)
    token_ends = np.append(0, np.cumsum(lengths))[ends]
    documents = np.split(tokens, token_ends[:-1]), np.split(lengths, ends[:-1])
    for one, sizes in zip(*documents, strict=True):
        builder.add_document(one, sizes)


class _Writer:
    """Writes the documents of a task and their origins, and counts them in its record."""

    def __init__(
        self, options: TokenizeOptions, folder: str, record: Record, stack: contextlib.ExitStack
    ) -> None:
        self.record, self._num_partitions = record, options.num_partitions
        self._on_error = options.on_error
        paths = [os.path.join(folder, name) for name in (ORIGINS, UNTRAINED, REJECTS)]
        self._origins, self._untrained, self._rejects = (
            stack.enter_context(open(path, "wb"))  # noqa: SIM115
            for path in paths
        )
        self.builders: dict[tuple[int, int], IndexedDatasetBuilder] = {}
        for pair in itertools.product(range(len(options.json_keys)), range(self._num_partitions)):
            prefix = prefix_of(folder, *pair)
            builder = IndexedDatasetBuilder(prefix, options.dtype, durable=False)
            self.builders[pair] = stack.enter_context(builder)
            paths += [prefix + ".bin", prefix + ".idx"]
        self.files = paths

    def add_rejects(self, parts: Sequence[Part], part: int, rejects: list[_Reject]) -> None:
        """Notes what a batch of a part has rejected; or raises the error of the first."""
        for reject in sorted(rejects, key=lambda reject: reject.line):
            if self._on_error == "stop":
                unit, line = parts[part].file.format.unit, first_line_of(parts[part]) + reject.line
                raise TextError(
                    f"{parts[part].source}, {unit} {line}: {reject.reason}. Or go on without such "
                    f'{unit}s: --on-error skip (on_error="skip"), or quarantine, which keeps their '
                    "bytes"
                )
            data = reject.data if self._on_error == "quarantine" else b""
            row = {**reject._asdict(), "data": base64.b64encode(data).decode(), "part": part}
            self._rejects.write(json.dumps(row).encode() + b"\n")
        self.record["rejects"] += len(rejects)

    def add_mask(self, trained: NDArray[np.bool_], lengths: NDArray[np.int64]) -> None:
        """Notes the ranges that are not trained on of the next sequences, of these lengths."""
        sequences, places = spread(lengths)
        is_off, is_first = ~trained, places == 0
        is_start = is_off & (is_first | np.append(True, trained)[:-1])
        is_last = is_off & np.append((is_first | trained)[1:], True)
        sequences = sequences[is_start] + self.builders[0, 0].num_sequences
        rows = np.stack((sequences, places[is_start], places[is_last] + 1), axis=1)
        self._untrained.write(rows.astype(np.int32).tobytes())

    def add(self, part: int, documents: Documents, columns: Sequence[EncodedTexts]) -> None:
        record, rows = self.record, np.empty(len(documents.lines), ORIGIN)
        partitions = (record["documents"] + np.arange(len(rows))) % self._num_partitions
        for (key, partition), builder in self.builders.items():
            own = _selected(columns[key], partitions == partition)
            record["tokens"][key] += len(own.tokens)
            _append(own, builder)
        rows["part"], rows["partition"] = part, partitions
        rows["line"], rows["byte_offset"] = documents.lines, documents.byte_offsets
        with naming(self._origins.name):  # NumPy's error of a full disk has only a text
            np.save(self._origins, rows)
            self._origins.write(json.dumps(documents.ids).encode() + b"\n")
        record["documents"] += len(rows)

    def count(self, documents: Documents) -> None:
        """Counts the texts of documents."""
        texts = texts_of(itertools.chain(*documents.texts))
        self.record["bytes"] += sum(len(text.encode()) for text in texts)
        # At least the number of documents whose texts are all empty.
        self.record["empty"] += min(
            sum(not (any(text) if isinstance(text, list) else text) for text in column)
            for column in documents.texts
        )
