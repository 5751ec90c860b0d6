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

from millrace._native import mark_ranges
from millrace.cache.loss_files import ARRAY, read_loss_ranges
from millrace.checks import MAX_INT64, check_int
from millrace.encoding.row_encoders import EncodedRows, encode_rows
from millrace.errors import ConfigError, TextError
from millrace.forks import Renewed, closing
from millrace.online.numbered_rows import BLOCK
from millrace.order.permutation import KeyedPermutation
from millrace.ragged import sizes_of, spread
from millrace.samples.stored import Sources
from millrace.samples.tokens import EMPTY, Numbers, TokenBatch, concatenate
from millrace.store import IndexedDataset


@lru_cache(maxsize=64)
def epoch_order(count: int, seed: int, epoch: int) -> KeyedPermutation:
    """The order of so many documents in an epoch, or of rows in a window of a stream."""
    return KeyedPermutation(count, seed << 64 | epoch)


def documents_of(encoded: EncodedRows, numbers: Numbers) -> TokenBatch:
    """Rows as samples, by their numbers; their documents that have tokens are the parts."""
    bounds, has_tokens = np.append(0, encoded.ends), sizes_of(encoded.ends) > 0
    ends = bounds[np.cumsum(encoded.counts)]
    rows = np.repeat(np.arange(len(numbers)), encoded.counts)[has_tokens]
    starts = bounds[:-1][has_tokens]
    parts = {"part_starts": starts, "part_sequence": numbers[rows]}
    parts["part_offset"] = starts - (ends - sizes_of(ends))[rows]
    return EMPTY.with_arrays(tokens=encoded.tokens, ends=ends, trained=encoded.trained, **parts)


def ranges_of(batch: Any, starts: Numbers, stops: Numbers) -> TokenBatch:
    """The tokens of a batch from `starts` up to `stops` as samples, which may share tokens."""
    ends, ranges = np.cumsum(stops - starts), [*map(slice, starts.tolist(), stops.tolist())]
    arrays: Any = {"tokens": batch.tokens, "trained": batch.trained}
    for name in arrays if batch.trained is not None else ("tokens",):
        arrays[name] = np.concatenate([arrays[name][:0], *map(arrays[name].__getitem__, ranges)])
    first_parts = np.searchsorted(batch.part_starts, starts, "right") - 1
    counts = np.searchsorted(batch.part_starts, stops) - first_parts
    samples, places = spread(np.where(stops > starts, counts, 0))
    parts = first_parts[samples] + places
    firsts = np.maximum(batch.part_starts[parts], starts[samples])
    arrays |= {"part_starts": firsts + (ends - stops)[samples]}
    arrays |= {"part_sequence": batch.part_sequence[parts]}
    arrays |= {"part_offset": batch.part_offset[parts] + firsts - batch.part_starts[parts]}
    return EMPTY.with_arrays(ends=ends, **arrays)


def cut(batch: Any, capacity: int) -> tuple[TokenBatch, dict[str, int]]:
    """Samples without the tokens behind their first `capacity`, and counts of what was cut."""
    starts = batch.ends - batch.sizes
    stops = np.minimum(starts + capacity, batch.ends)
    limits = np.repeat(starts + capacity, np.diff(batch.part_bounds))
    num_cut = int((batch.part_starts + batch.part_counts > limits).sum())
    counts = {"cut documents": num_cut, "tokens behind the cut": int((batch.ends - stops).sum())}
    return ranges_of(batch, starts, stops) if num_cut > 0 else batch, counts


class StoredDocuments:
    """The documents of token files, counted from document `first` on, as rows that are encoded
    already: their numbers are the rows, and this is their encoder."""

    def __init__(self, store: IndexedDataset, first: int, count: int, has_mask: bool) -> None:
        self._store, self._first, self._count, self.dtype = store, first, count, store.dtype
        self._ranges = read_loss_ranges(store) if has_mask else None

    def __len__(self) -> int:
        return self._count

    def rows(self, numbers: Numbers) -> Numbers:
        return numbers

    def encode(self, numbers: Numbers) -> EncodedRows:
        """As `RowEncoder.encode`."""
        edges = self._store.document_indices[self._first + np.stack((numbers, numbers + 1))]
        documents, places = spread(edges[1] - edges[0])
        sequences = edges[0, documents] + places
        tokens, bounds = self._store.read(sequences)
        trained = None
        if self._ranges is not None:
            spans = sequences, np.zeros_like(sequences), np.diff(bounds)
            trained = mark_ranges(self._ranges[ARRAY], *spans) == 0
        ends, counts = bounds[np.cumsum(edges[1] - edges[0])], np.ones(len(numbers), np.int64)
        return EncodedRows(tokens, ends, trained, counts, {})


class RowDocuments(Renewed):
    """A source of tokens whose samples are a document of a row each, by the row's number, which are
    encoded when they are asked for.

    Each epoch takes the rows in a new order; without a seed, as they stand. If a loader says which
    samples follow, this reads their rows some at a time, and threads encode them meanwhile. A
    sample does not depend on that: of a block that fails, the samples that are asked for are made
    alone.

    Args:
        rows: `Rows`, or `StoredDocuments`, which is its own encoder.
        capacity: Number of tokens after which a document is cut.
        identity: What decides the documents, as plain values. It is the same with and without
            token files: a run may go on with the one or the other.

    Attributes:
        report: Counts of the rows that this process has encoded.
    """

    prefix = "rows"
    is_remote = True  # see `TokenDataset.is_remote`
    _renewed = ("report", "_lock", "_pool", "_blocks")

    def __init__(
        self,
        rows: Any,
        encoder: Any,
        threads: int,
        capacity: int,
        identity: dict[str, Any],
        seed: int | None,
        num_samples: int | None,
    ) -> None:
        self._rows, self._encoder, self._threads = rows, encoder, threads
        self._capacity, self._seed = capacity, seed
        self._identity = {**identity, "num_documents": len(rows), "seed": seed}
        num_samples = len(rows) if num_samples is None else num_samples
        self._num_samples = check_int("num_samples", num_samples, 0, MAX_INT64)
        if num_samples > 0 and len(rows) == 0:
            what = f"num_samples is {num_samples}, but there are no rows"
            raise ConfigError(f"{what}: give at least one")
        self.look_ahead = 2 * (threads + 1) * BLOCK  # two for each thread, and two that are used
        self.renew()

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self.report = Counter[str]()
        self._pool = ThreadPoolExecutor(self._threads, "millrace-encoder")
        # By the number of each sample that was not asked for yet: its block, and its place there.
        self._blocks: dict[int, tuple[Future[TokenBatch], int]] = {}

    def __len__(self) -> int:
        return self._num_samples

    def sources_of(self, numbers: Numbers) -> Sources:
        """See `TokenDataset`."""
        last = int(max(numbers, default=-1))
        return {self.prefix: (len(numbers), (last + 1) / max(len(self._rows), 1))}

    def fingerprint(self, consumed_samples: int | None = None) -> dict[str, Any]:
        return self._identity

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

    def _ahead(self, numbers: Numbers, rows: Any) -> TokenBatch:
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

    def _documents(self, sample_numbers: Numbers) -> Numbers:
        """The rows of some samples."""
        epochs, numbers = np.divmod(sample_numbers, max(len(self._rows), 1))
        for epoch in {*epochs.tolist()} if self._seed is not None else ():
            here = epochs == epoch
            order = epoch_order(len(self._rows), self._seed, epoch)
            numbers[here] = order.sources(numbers[here])
        return numbers

    def _encoded(self, numbers: Numbers, rows: Any) -> TokenBatch:
        """The documents of some rows, cut; TextError for a row with none or several."""
        encoded = encode_rows(self._encoder, rows)
        for place in np.flatnonzero(encoded.counts != 1)[:1].tolist():
            where = self._rows.place(int(numbers[place]))
            several = "it becomes several documents, so that samples have no numbers on the fly"
            remedy = 'Give cache="FOLDER"; then on_error="skip" goes on without bad rows'
            raise TextError(f"{where}: {encoded.problems.get(place, several)}. {remedy}")
        batch, cuts = cut(documents_of(encoded, numbers), self._capacity)
        num_labels = (batch.sizes - 1).clip(min=0)  # all tokens but the first
        if batch.trained is not None:
            sums = np.append(0, np.cumsum(batch.trained))
            num_labels = sums[batch.ends] - sums[batch.ends - num_labels]
        counts = {"rows": len(numbers), "tokens": len(encoded.tokens), **encoded.report, **cuts}
        counts["samples without a target"] = int(np.count_nonzero(num_labels < 1))
        with self._lock:
            self.report.update(counts)
        return batch
