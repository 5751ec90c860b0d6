"""Documents of rows: encoded when they are asked for, and cut into pieces that make up samples."""

import itertools
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from millrace.encoding.row_encoders import EncodedRows, RowEncoder, encode_rows
from millrace.errors import TextError
from millrace.forks import Renewed
from millrace.online.numbered_rows import Rows
from millrace.ragged import sizes_of, starts_of
from millrace.samples.tokens import Numbers, TokenBatch

_EMPTY = TokenBatch(np.empty(0, np.int64), np.empty(0, np.int64))
BLOCK = 64
"""Rows that are encoded at a time: encoders take twice as long for a text alone."""

_AHEAD = 256  # rows that a loader names ahead
_Documents = dict[int, list["Piece"]]  # by the numbers of rows


class Piece(NamedTuple):
    """Some tokens of a row: those from `start` up to `stop` of encoded rows."""

    encoded: EncodedRows
    start: int
    stop: int
    row: int  # its number
    offset: int  # of the first token in the row

    @property
    def size(self) -> int:
        return self.stop - self.start

    def cut(self, start: int, stop: int) -> "Piece":
        """The tokens from `start` up to `stop` of the piece."""
        first, end = self.start + start, min(self.start + stop, self.stop)
        return Piece(self.encoded, first, end, self.row, self.offset + start)


def encoded_documents(
    encoder: RowEncoder, numbers: Sequence[int], rows: Sequence[Mapping[str, Any]]
) -> tuple[EncodedRows, list[list[Piece]]]:
    """Encoded rows, and the documents of each; `numbers` are those of the rows."""
    encoded = encode_rows(encoder, rows)
    documents: list[list[Piece]] = []
    start, stops = 0, iter(encoded.ends.tolist())
    for number, count in zip(numbers, encoded.counts.tolist(), strict=True):
        first, pieces = start, []
        for stop in itertools.islice(stops, count):
            pieces.append(Piece(encoded, start, stop, number, start - first))
            start = stop
        documents.append(pieces)
    return encoded, documents


def token_batch(samples: Sequence[Sequence[Piece]]) -> TokenBatch:
    """Samples of pieces that are not empty."""
    pieces = [piece for sample in samples for piece in sample]
    ends = starts_of(stop - start for _, start, stop, *_ in pieces)
    trained = None
    if any(piece.encoded.trained is not None for piece in pieces):
        trained = np.ones(ends[-1], np.bool_)
        for place, (encoded, start, stop, *_) in zip(ends.tolist(), pieces, strict=False):
            if encoded.trained is not None:
                trained[place : place + stop - start] = encoded.trained[start:stop]
    tokens = [encoded.tokens[start:stop] for encoded, start, stop, *_ in pieces]
    return _EMPTY.with_arrays(
        tokens=np.concatenate(tokens or [_EMPTY.tokens]),
        ends=ends[starts_of(map(len, samples))[1:]],
        trained=trained,
        part_starts=ends[:-1],
        part_sequence=np.array([piece.row for piece in pieces], np.int64),
        part_offset=np.array([piece.offset for piece in pieces], np.int64),
    )


class RowDocuments(Renewed):
    """A document for each row, cut to a number of tokens, by the row's number.

    Rows that `prefetch` has named are encoded together with those that are asked for. What a row
    becomes does not depend on that: of a block that fails, the rows asked for are encoded alone.

    Attributes:
        report: Counts of the rows that this process has encoded.
    """

    _renewed = ("report", "_lock", "_expected", "_blocks")

    def __init__(self, rows: Rows, encoder: RowEncoder, capacity: int) -> None:
        self._rows, self._encoder, self._capacity = rows, encoder, capacity
        self.renew()

    def after_fork(self) -> None:
        self._lock, self.report = threading.Lock(), Counter[str]()
        self._expected: dict[int, None] = {}  # rows that are read soon, in their order
        self._blocks: dict[int, Future[_Documents]] = {}  # that encode rows not asked for yet

    def prefetch(self, numbers: Numbers) -> None:
        """Rows that are read soon, in this order."""
        with self._lock:
            self._expected |= dict.fromkeys(numbers.tolist())

    def tokens(self, numbers: Numbers) -> TokenBatch:
        """The documents of some rows, a part each; TextError for a bad row, with its place."""
        asked = numbers.tolist()
        documents = self._encoded(asked) if len(asked) >= BLOCK else self._from_blocks(asked)
        return token_batch([documents[number] for number in asked])

    def _from_blocks(self, asked: list[int]) -> _Documents:
        own: Future[_Documents] = Future()
        with self._lock:
            if not all(one in self._blocks or one in self._expected for one in asked):
                # A loader that goes elsewhere says first which steps follow.
                self._expected, self._blocks = dict([*self._expected.items()][-_AHEAD:]), {}
            blocks = {one: self._blocks.pop(one, own) for one in dict.fromkeys(asked)}
            new = [one for one, block in blocks.items() if block is own]
            others = (one for one in self._expected if one not in blocks)
            ahead = list(itertools.islice(others, BLOCK - len(new) if new else 0))
            self._blocks |= dict.fromkeys(ahead, own)
            for one in (*new, *ahead):
                self._expected.pop(one, None)
        documents: _Documents = {}
        try:
            with suppress(Exception):
                documents = self._encoded([*new, *ahead]) if new else {}
        finally:
            own.set_result(documents)
        for block in {*blocks.values()}:
            documents = {**documents, **block.result()}
        failed = [one for one in blocks if one not in documents]
        return {**documents, **self._encoded(failed)} if failed else documents

    def _encoded(self, numbers: list[int]) -> _Documents:
        """The document of each row: one piece, or none if it is empty."""
        rows, capacity = self._rows.rows(np.array(numbers, np.int64)), self._capacity
        encoded, documents = encoded_documents(self._encoder, numbers, rows)
        for place in np.flatnonzero(encoded.counts != 1)[:1].tolist():
            where = self._rows.place(numbers[place])
            if place not in encoded.problems:
                raise TextError(
                    f"{where} becomes several documents, so that samples have no numbers before "
                    'all rows are tokenised: give cache="FOLDER"'
                )
            remedy = 'Or go on without such rows: cache="FOLDER", on_error="skip"'
            raise TextError(f"{where}: {encoded.problems[place]}. {remedy}")
        sizes, kept = sizes_of(encoded.ends), sizes_of(encoded.ends).clip(max=capacity)
        labels = kept - 1  # all tokens but the first
        if encoded.trained is not None:
            sums, firsts = np.append(0, np.cumsum(encoded.trained)), encoded.ends - sizes
            labels = sums[firsts + kept] - sums[np.minimum(firsts + 1, firsts + kept)]
        counts = {"rows": len(rows), "tokens": len(encoded.tokens), **encoded.report}
        counts["cut documents"] = int((sizes > capacity).sum())
        counts["tokens behind the cut"] = int((sizes - kept).sum())
        counts["samples without a target"] = int((labels < 1).sum())
        with self._lock:
            self.report.update(counts)
        return {
            number: [piece.cut(0, capacity) if size > capacity else piece] if size else []
            for number, [piece], size in zip(numbers, documents, sizes.tolist(), strict=True)
        }
