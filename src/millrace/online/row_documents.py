"""Documents of rows, encoded when they are asked for, and samples that are made some at a time."""

import itertools
import threading
from collections import Counter
from contextlib import suppress
from operator import itemgetter
from typing import Any

import numpy as np

from millrace.encoding.row_encoders import RowEncoder, encode_rows
from millrace.errors import TextError
from millrace.forks import Renewed
from millrace.online.numbered_rows import Rows
from millrace.ragged import sizes_of
from millrace.samples.tokens import EMPTY, Numbers, TokenBatch, concatenate

BLOCK = 64
"""Rows that are encoded at a time: encoders take twice as long for a text alone."""

_MOST_AHEAD = 1024  # samples; of loaders that went elsewhere, the oldest are forgotten


class RowDocuments(Renewed):
    """A document for each row, cut to a number of tokens, by the row's number.

    Attributes:
        report: Counts of the rows that this process has encoded.
    """

    _renewed = ("report", "_lock")

    def __init__(self, rows: Rows, encoder: RowEncoder, capacity: int) -> None:
        self._rows, self._encoder, self._capacity = rows, encoder, capacity
        self.renew()

    def after_fork(self) -> None:
        self._lock, self.report = threading.Lock(), Counter[str]()

    def tokens(self, numbers: Numbers) -> TokenBatch:
        """The documents of some rows, a part each; TextError for a bad row, with its place."""
        encoded = encode_rows(self._encoder, self._rows.rows(numbers))
        for place in np.flatnonzero(encoded.counts != 1)[:1].tolist():
            where = self._rows.place(int(numbers[place]))
            if place not in encoded.problems:
                raise TextError(
                    f"{where} becomes several documents, so that samples have no numbers before "
                    'all rows are tokenised: give cache="FOLDER"'
                )
            remedy = 'Or go on without such rows: cache="FOLDER", on_error="skip"'
            raise TextError(f"{where}: {encoded.problems[place]}. {remedy}")
        tokens, trained = encoded.tokens, encoded.trained
        sizes = sizes_of(encoded.ends)
        kept = sizes.clip(max=self._capacity)
        if (is_cut := sizes > kept).any():
            firsts = encoded.ends - sizes
            ranges = [*map(slice, firsts.tolist(), (firsts + kept).tolist())]
            tokens = np.concatenate([tokens[one] for one in ranges])
            trained = (
                trained if trained is None else np.concatenate([trained[one] for one in ranges])
            )
        ends = np.cumsum(kept)
        batch = document_batch(tokens, ends, trained, numbers)
        labels = kept - 1  # all tokens but the first
        if trained is not None:
            sums = np.append(0, np.cumsum(trained))
            labels = sums[ends] - sums[np.minimum(ends - kept + 1, ends)]
        counts = {"rows": len(numbers), "tokens": len(encoded.tokens), **encoded.report}
        counts["cut documents"] = int(is_cut.sum())
        counts["tokens behind the cut"] = int((sizes - kept).sum())
        counts["samples without a target"] = int((labels < 1).sum())
        with self._lock:
            self.report.update(counts)
        return batch


def document_batch(tokens: Any, ends: Numbers, trained: Any, numbers: Numbers) -> TokenBatch:
    """Samples that are a document each: those with tokens are a part, by the document's number."""
    sizes = sizes_of(ends)
    has_tokens = sizes > 0
    starts = (ends - sizes)[has_tokens]
    parts: Any = {"part_starts": starts, "part_offset": np.zeros_like(starts)}
    parts["part_sequence"] = numbers[has_tokens]
    return EMPTY.with_arrays(tokens=tokens, ends=ends, trained=trained, **parts)


class TokenBlocks(Renewed):
    """A source of tokens whose samples are made some at a time, if a loader says which ones follow.

    A sample does not depend on that: of a block that fails, the samples asked for are made alone.
    """

    is_remote = True  # see `TokenDataset.is_remote`
    prefix = "rows"  # in messages
    _renewed = ("_lock", "_blocks")

    def __init__(self, source: Any) -> None:
        self.source = source
        self.renew()

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        # By the number of each sample that was not asked for yet: its block, and its place there.
        self._blocks: dict[int, tuple[_Block, int]] = {}

    def __len__(self) -> int:
        return len(self.source)

    def prefetch(self, sample_numbers: Numbers) -> None:
        """Samples that are asked for soon, in this order."""
        for numbers in np.array_split(sample_numbers, max(round(len(sample_numbers) / BLOCK), 1)):
            block = _Block(numbers)
            with self._lock:
                self._blocks |= {one: (block, place) for place, one in enumerate(numbers.tolist())}
                num_old = max(len(self._blocks) - _MOST_AHEAD, 0)
                for old in list(itertools.islice(self._blocks, num_old)):
                    del self._blocks[old]

    def tokens(self, sample_numbers: Numbers) -> TokenBatch:
        """See `TokenSource`."""
        with self._lock:
            entries = [self._blocks.pop(one, (None, 0)) for one in sample_numbers.tolist()]
        batches, start = [], 0
        for block, run in itertools.groupby(entries, itemgetter(0)):
            places = np.array([place for _, place in run])
            numbers, start = sample_numbers[start : start + len(places)], start + len(places)
            batch = None if block is None else self._made(block)
            batches.append(self.source.tokens(numbers) if batch is None else batch.select(places))
        if len(batches) > 1:
            return concatenate(batches)
        return batches[0] if batches else self.source.tokens(sample_numbers)

    def _made(self, block: "_Block") -> TokenBatch | None:
        """The samples of a block. While another thread makes them, this one makes later ones."""
        if block.lock.locked():
            with self._lock:
                others = (other for other, _ in self._blocks.values() if other.is_untouched())
                later = next(others, block)
            later.tokens(self.source)
        return block.tokens(self.source)

    def fingerprint(self, consumed_samples: int | None = None) -> Any:
        return self.source.fingerprint(consumed_samples)


class _Block:
    """Samples that are made together when the first of them is asked for."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers, self.lock, self._is_tried = numbers, threading.Lock(), False
        self._batch: TokenBatch | None = None

    def is_untouched(self) -> bool:
        return not self._is_tried and not self.lock.locked()

    def tokens(self, source: Any) -> TokenBatch | None:
        """The samples; None if they cannot be made together."""
        with self.lock, suppress(Exception):
            if not self._is_tried:
                self._is_tried = True
                self._batch = source.tokens(self._numbers)
        return self._batch
