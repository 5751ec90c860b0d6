"""Stored tokens in an order, and their path through the core."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.deferred import cached_property
from millrace.order import Order, Spans
from millrace.order.spans import checked_spans, core_spans
from millrace.samples.fields import FIELDS, Batch, BatchForm, SampleOptions, needs_parts, row_form
from millrace.samples.rows import core_errors, find_parts, finish
from millrace.samples.tokens import EMPTY, Numbers, TokenBatch, fingerprint_of
from millrace.shards.shard_reader import Shards
from millrace.store import IndexedDataset, RawTokens
from millrace.store.token_file import TokenFile

_OUTSIDE = "an index points outside its data: {}. Write it again"


Sources = dict[str, tuple[int, float | None]]
"""How many samples each source has, by its name, and its epochs up to the last one, if known."""

TokenStore = IndexedDataset | RawTokens | Shards
"""Stored tokens: a token file, raw tokens, or the shards of a folder."""


class StoredTokens:
    """The tokens of a store in an order, as a source of token batches.

    A `TokenFile` is opened for the first sample at the latest.
    """

    def __init__(self, store: TokenStore | TokenFile, order: Order | _native.Order) -> None:
        self._file = store
        self.order: Any = order

    @property
    def stores(self) -> tuple["StoredTokens"]:
        """See `TokenDataset`."""
        return (self,)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "core"}

    def __len__(self) -> int:
        return len(self.order)

    @property
    def prefix(self) -> str:
        return self._file.prefix

    @property
    def store(self) -> TokenStore:
        return self._file.dataset if isinstance(self._file, TokenFile) else self._file

    @cached_property
    def core(self) -> tuple[_native.TokenSource, _native.Order | None, bool]:
        """The tokens and the order in the core (None: only Python knows it), and `is_in_core`."""
        order = self.order
        core_order = order if isinstance(order, _native.Order) else getattr(order, "core", None)
        is_in_core = core_order is not None and self.store.is_mapped
        return self.store.token_source(), core_order, is_in_core

    def tokens(self, sample_numbers: Numbers) -> TokenBatch:
        """See `TokenSource`; DataError where an index, or an order, points outside the store."""
        leaves = self.leaves(sample_numbers)
        if leaves is not None:
            return gather_tokens(leaves)
        store, spans = self.store, self.spans(sample_numbers)
        with core_errors(_OUTSIDE):
            tokens = store.reader.gather(*self._bytes_of(spans)).view(store.dtype)
        ends = np.append(0, np.cumsum(spans.counts, dtype=np.int64))[spans.bounds[1:]]
        return _token_batch(tokens, ends, *spans[:3])

    def leaves(self, sample_numbers: Numbers) -> "Leaves | None":
        """See `TokenDataset.leaves`."""
        if not self.core[2]:
            return None
        return Leaves([self], np.zeros(len(sample_numbers), np.int64), sample_numbers)

    def spans(self, sample_numbers: Numbers) -> Spans:
        tokens, order, _ = self.core
        with core_errors(_OUTSIDE):
            if order is None:
                return checked_spans(self.order, sample_numbers)
            return core_spans(order, sample_numbers, tokens)

    def _bytes_of(self, spans: Spans) -> tuple[Numbers, Numbers]:
        sequences, offsets, counts, _ = spans
        if sequences is not None:
            return _native.locate_spans(self.core[0], sequences, offsets, counts)
        size = self.store.dtype.itemsize
        num_tokens = self.store.reader.size // size
        is_outside = (offsets < 0) | (counts < 0) | (counts > num_tokens - offsets)
        if is_outside.any():
            place = int(is_outside.argmax())
            span = f"{counts[place]} tokens from token {offsets[place]} on"
            raise ValueError(f"a span has {span}; the store has {num_tokens}")
        return offsets * size, counts * size

    def sources_of(self, sample_numbers: Numbers) -> Sources:
        """See `TokenDataset`."""
        epochs = getattr(self.order, "epochs", None)
        last = int(max(sample_numbers, default=-1))
        return {self.prefix: (len(sample_numbers), None if epochs is None else epochs(last + 1))}

    @property
    def is_remote(self) -> bool:
        """See `TokenDataset.is_remote`."""
        if isinstance(self._file, TokenFile):
            # To open thousands of files would delay the first batch.
            return self._file.is_remote
        reader = self.store.reader
        return hasattr(reader, "prefetch") and not getattr(reader, "is_local", False)

    @property
    def look_ahead(self) -> int:
        """Number of samples to announce: four times the requests in flight."""
        return 4 * getattr(getattr(self._file, "storage", None), "requests", 64)

    def ranges(self, sample_numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Offset and size in bytes of each piece of the samples, in the store's reader."""
        with core_errors(_OUTSIDE):
            return self._bytes_of(self.spans(sample_numbers))

    def prefetch(self, sample_numbers: Numbers) -> None:
        prefetch = getattr(self.store.reader, "prefetch", None)
        if prefetch is not None:
            prefetch(*self.ranges(sample_numbers))

    def fingerprint(self, consumed_samples: int | None = None) -> dict[str, Any]:
        file: Any = self._file
        content = {"content": file.fingerprint}
        if hasattr(file, "lengths_checksum"):  # a store of sequences
            content["lengths"] = file.lengths_checksum
        return content | fingerprint_of(self.order, consumed_samples)


class Leaves(NamedTuple):
    """Samples of sources that are in the core, which one call of it reads."""

    sources: Sequence[StoredTokens]
    places: Numbers  # of each sample's source among these: int64 [batch]
    numbers: Numbers  # of each sample in its source: int64 [batch]
    store_numbers: Sequence[int] = (0,)  # of each source among all stores of the dataset
    dataset_numbers: NDArray[Any] | None = None  # of each sample's dataset in a blend: [batch]

    @property
    def core(self) -> tuple[Any, Any, Numbers, Numbers]:
        token_sources, orders, _ = zip(*(source.core for source in self.sources), strict=True)
        return token_sources, orders, self.places, self.numbers


def gather(
    leaves: Leaves,
    options: SampleOptions,
    form: BatchForm | None = None,
    sample_numbers: Numbers | None = None,
) -> Batch:
    """The arrays of a batch, in one call of the core: `rows` of the tokens, with boundaries "eod".

    A form needs `sample_numbers`, those of the dataset: int64 [batch].

    Raises:
        DataError: An index that points outside a store, or a token id that does not fit.
    """
    with core_errors(_OUTSIDE):
        arrays = _native.gather_samples(*leaves.core, options, row_form(form))
    if form is None:
        return dict(zip(FIELDS, arrays, strict=True))
    parts, fields = None, {"sample_numbers": ("sample", np.array(sample_numbers))}
    if leaves.dataset_numbers is not None:
        fields["dataset_numbers"] = "sample", leaves.dataset_numbers.astype(np.int64)
    if needs_parts(form):
        sequences, counts, bounds = arrays[4:]
        parts = find_parts(counts, bounds, options)
        if "document_numbers" in form.fields:
            places = np.repeat(leaves.places, np.diff(bounds))
            documents = documents_of(leaves.sources, places, sequences)
            fields["document_numbers"] = "part", documents
    return finish(form, arrays[:4], (len(leaves.numbers), options.sequence_length), parts, fields)


def documents_of(stores: Sequence[Any], sources: Any, sequences: Numbers) -> Numbers:
    """The document of each part in its token file; without one, its sequence: int64 [parts].

    `sources` are the places of their stores: integers [parts], or one for all.
    """
    documents: Numbers = sequences.copy()
    for number in np.unique(sources).tolist():
        if stores[number] is not None:
            here = (sources == number) & (sequences >= 0)
            documents[here] = stores[number].store.documents_of(sequences[here])
    return documents


def gather_tokens(leaves: Leaves) -> TokenBatch:
    """The tokens of samples, in one call of the core; DataError as `gather`."""
    with core_errors(_OUTSIDE):
        batch = _token_batch(*_native.gather_tokens(*leaves.core))
    if leaves.dataset_numbers is None:
        return batch
    sources = np.array(leaves.store_numbers, np.int32)[leaves.places]
    return batch.with_arrays(part_source=np.repeat(sources, np.diff(batch.part_bounds)))


def _token_batch(
    tokens: Any, ends: Numbers, sequences: Numbers | None, offsets: Numbers, counts: Numbers
) -> TokenBatch:
    """The batch whose parts are the spans that have tokens."""
    starts = np.cumsum(counts) - counts
    if not counts.all():
        has_tokens = counts > 0
        starts, offsets = starts[has_tokens], offsets[has_tokens]
        sequences = None if sequences is None else sequences[has_tokens]
    parts = {"part_starts": starts, "part_sequence": sequences, "part_offset": offsets}
    return EMPTY.with_arrays(tokens=tokens, ends=ends, **parts)
