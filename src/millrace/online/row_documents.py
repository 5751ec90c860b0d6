"""A document for each sample: encoded when it is asked for, or read from token files."""

import itertools
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from operator import itemgetter
from typing import Any

import numpy as np

from millrace.cache.loss_files import ARRAY, read_loss_ranges
from millrace.checks import MAX_INT64, check_int
from millrace.encoding.row_encoders import RowEncoder, encode_rows
from millrace.errors import ConfigError, TextError
from millrace.forks import Renewed
from millrace.online.numbered_rows import BLOCK, Rows
from millrace.order import Spans
from millrace.order.permutation import KeyedPermutation
from millrace.ragged import sizes_of, spread
from millrace.samples.loss_ranges import LossRanges
from millrace.samples.stored import StoredTokens
from millrace.samples.tokens import EMPTY, Numbers, TokenBatch, concatenate
from millrace.storage.transfers import closing
from millrace.store import IndexedDataset


@lru_cache(maxsize=64)
def epoch_order(count: int, seed: int, epoch: int) -> KeyedPermutation:
    """The order of so many documents in an epoch, or of rows in a window of a stream."""
    return KeyedPermutation(count, seed << 64 | epoch)


class DocumentSamples:
    """A source of tokens whose samples are a document each, by the document's number.

    Each epoch takes the documents in a new order; without a seed, as they stand.

    Args:
        count: Number of documents.
        capacity: Number of tokens after which a document is cut.
        identity: What decides the documents, as plain values.
    """

    def __init__(
        self,
        count: int,
        capacity: int,
        identity: dict[str, Any],
        seed: int | None,
        num_samples: int | None,
    ) -> None:
        self._count, self._capacity, self._seed = count, capacity, seed
        self._identity = {**identity, "num_documents": count, "seed": seed}
        num_samples = count if num_samples is None else num_samples
        self._num_samples = check_int("num_samples", num_samples, 0, MAX_INT64)
        if num_samples > 0 and count == 0:
            raise ConfigError(
                f"num_samples is {num_samples}, but there are no rows: give at least one"
            )

    def __len__(self) -> int:
        return self._num_samples

    def _documents(self, sample_numbers: Numbers) -> Numbers:
        """The documents of some samples."""
        epochs, numbers = np.divmod(sample_numbers, max(self._count, 1))
        for epoch in {*epochs.tolist()} if self._seed is not None else ():
            here = epochs == epoch
            numbers[here] = epoch_order(self._count, self._seed, epoch).sources(numbers[here])
        return numbers

    def fingerprint(self, consumed_samples: int | None = None) -> dict[str, Any]:
        """The same with and without token files: a run may go on with the one or the other."""
        return self._identity


def _document_batch(tokens: Any, ends: Numbers, trained: Any, numbers: Numbers) -> TokenBatch:
    """Samples that are a document each: those with tokens are a part, by the document's number."""
    sizes = sizes_of(ends)
    has_tokens = sizes > 0
    starts = (ends - sizes)[has_tokens]
    parts: Any = {"part_starts": starts, "part_offset": np.zeros_like(starts)}
    parts["part_sequence"] = numbers[has_tokens]
    return EMPTY.with_arrays(tokens=tokens, ends=ends, trained=trained, **parts)


def _counts_of(behind: Numbers, num_labels: Numbers) -> dict[str, int]:
    """What a report says of samples, by their tokens behind the cut, and labels to train on."""
    return {
        "cut documents": int(np.count_nonzero(behind)),
        "tokens behind the cut": int(behind.sum()),
        "samples without a target": int(np.count_nonzero(num_labels < 1)),
    }


class StoredDocuments(DocumentSamples):
    """The documents of token files, counted from document `first` on."""

    def __init__(self, store: IndexedDataset, first: int, has_mask: bool, *options: Any) -> None:
        super().__init__(*options)
        self._first = first
        self._stored = StoredTokens(store, self)
        self._ranges = LossRanges(self._stored) if has_mask else None

    @property
    def report(self) -> dict[str, int]:
        """Counts of all documents, as samples."""
        store: Any = self._stored.store
        bounds = store.document_indices[self._first : self._first + self._count + 1]
        ends = np.append(0, np.cumsum(store.sequence_lengths, dtype=np.int64))
        sizes = np.diff(ends[bounds])
        behind = (sizes - self._capacity).clip(min=0)
        num_labels = (sizes - behind - 1).clip(min=0)  # all tokens but the first
        if self._ranges is not None:
            sequences, starts, stops = read_loss_ranges(store)[ARRAY].T
            off = stops.clip(max=self._capacity) - starts.clip(min=1)
            off = np.bincount(sequences, off.clip(min=0), len(store)).astype(np.int64)
            num_labels -= np.diff(np.append(0, np.cumsum(off))[bounds])
        return _counts_of(behind, num_labels)

    def spans(self, numbers: Numbers) -> Spans:
        """Documents by number: their sequences, as far as the capacity goes."""
        store: Any = self._stored.store
        firsts, stops = store.document_indices[self._first + np.stack((numbers, numbers + 1))]
        samples, places = spread(stops - firsts)
        sequences = firsts[samples] + places
        bounds = np.append(0, np.cumsum(stops - firsts))
        lengths = store.sequence_lengths[sequences].astype(np.int64)
        ends = np.append(0, np.cumsum(lengths))
        before = ends[:-1] - ends[bounds[:-1]][samples]
        counts = np.clip(self._capacity - before, 0, lengths)
        return Spans(sequences, np.zeros_like(counts), counts, bounds)

    def tokens(self, sample_numbers: Numbers) -> TokenBatch:
        """See `TokenSource`."""
        numbers = self._documents(sample_numbers)
        batch = self._stored.tokens(numbers)
        if self._ranges is not None:
            _, batch = self._ranges(batch, numbers)
        return _document_batch(batch.tokens, batch.ends, batch.trained, numbers)


class RowDocuments(DocumentSamples, Renewed):
    """The documents of rows, which are encoded when they are asked for.

    If a loader says which samples follow, it reads their rows some at a time, and threads encode
    them meanwhile. A sample does not depend on that: of a block that fails, the samples that are
    asked for are made alone.

    Attributes:
        report: Counts of the rows that this process has encoded.
    """

    is_remote = True  # see `TokenDataset.is_remote`
    prefix = "rows"  # in messages
    _renewed = ("report", "_lock", "_pool", "_blocks")

    def __init__(self, rows: Rows, encoder: RowEncoder, threads: int, *options: Any) -> None:
        super().__init__(len(rows), *options)
        self._rows, self._encoder, self._threads = rows, encoder, threads
        self.look_ahead = 2 * (threads + 1) * BLOCK  # two for each thread, and two that are used
        self.renew()

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self.report = Counter[str]()
        self._pool = ThreadPoolExecutor(self._threads, "millrace-encoder")
        # By the number of each sample that was not asked for yet: its block, and its place there.
        self._blocks: dict[int, tuple[Future[TokenBatch], int]] = {}

    def prefetch(self, sample_numbers: Numbers) -> None:
        """Samples that are asked for soon, in this order."""
        for numbers in np.array_split(sample_numbers, max(round(len(sample_numbers) / BLOCK), 1)):
            documents = self._documents(numbers)
            with suppress(Exception):  # who asks for a sample will see the error
                block = self._pool.submit(self._ahead, documents, self._rows.rows(documents))
                entries = ((block, place) for place in range(len(numbers)))
                with self._lock:
                    self._blocks.update(zip(numbers.tolist(), entries, strict=True))
                    # Of loaders that went elsewhere, the oldest samples are forgotten.
                    num_old = max(len(self._blocks) - 4 * self.look_ahead, 0)
                    for old in list(itertools.islice(self._blocks, num_old)):
                        del self._blocks[old]

    def _ahead(self, numbers: Numbers, rows: list[dict[str, Any]]) -> TokenBatch:
        if closing.is_set():
            raise RuntimeError("Python ends, so nobody needs what waits here")
        return self._encoded(numbers, rows)

    def tokens(self, sample_numbers: Numbers) -> TokenBatch:
        """See `TokenSource`; TextError for a bad row, with its place."""
        with self._lock:
            entries = [self._blocks.pop(one, (None, 0)) for one in sample_numbers.tolist()]
        batches, start = [], 0
        for block, run in itertools.groupby(entries, itemgetter(0)):
            places = np.array([place for _, place in run])
            numbers, start = sample_numbers[start : start + len(places)], start + len(places)
            if block is None or block.exception() is not None:
                batches.append(self._alone(numbers))
            else:
                batches.append(block.result().select(places))
        if len(batches) > 1:
            return concatenate(batches)
        return batches[0] if batches else self._alone(sample_numbers)

    def _alone(self, sample_numbers: Numbers) -> TokenBatch:
        numbers = self._documents(sample_numbers)
        return self._encoded(numbers, self._rows.rows(numbers))

    def _encoded(self, numbers: Numbers, rows: list[dict[str, Any]]) -> TokenBatch:
        """The documents of some rows."""
        encoded = encode_rows(self._encoder, rows)
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
        if (sizes > kept).any():
            firsts = encoded.ends - sizes
            ranges = [*map(slice, firsts.tolist(), (firsts + kept).tolist())]
            tokens = np.concatenate([tokens[one] for one in ranges])
            if trained is not None:
                trained = np.concatenate([trained[one] for one in ranges])
        ends = np.cumsum(kept)
        num_labels = (kept - 1).clip(min=0)  # all tokens but the first
        if trained is not None:
            sums = np.append(0, np.cumsum(trained))
            num_labels = sums[ends] - sums[ends - num_labels]
        counts = {"rows": len(numbers), "tokens": len(encoded.tokens), **encoded.report}
        with self._lock:
            self.report.update(counts | _counts_of(sizes - kept, num_labels))
        return _document_batch(tokens, ends, trained, numbers)
