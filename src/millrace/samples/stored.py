"""From spans to the arrays of samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.options import SampleOptions
from millrace.order import Order, Spans
from millrace.order.spans import checked_spans
from millrace.samples.fields import (
    FIELDS,
    BatchForm,
    Parts,
    find_parts,
    make_batch,
    needs_parts,
    row_form,
)
from millrace.samples.fields import Batch as Batch
from millrace.store import BinReader

Arrays = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]

Texts = tuple[NDArray[Any], NDArray[np.int64]]
"""The tokens of some samples, one sample after the other, [n], and where each ends, [batch]."""


class TokenStore(Protocol):
    """Token sequences by number: an `IndexedDataset`, or the `Shards` of a folder.

    Attributes:
        dtype: Dtype of the tokens.
        reader: The bytes of the token file, or of several as if they were one.
    """

    dtype: np.dtype[Any]
    reader: BinReader

    @property
    def is_mapped(self) -> bool:
        """Whether all tokens are in memory."""
        ...

    def token_source(self) -> _native.TokenSource:
        """The tokens for the core."""
        ...

    def documents_of(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """The documents that sequences belong to: int64 [sequences]."""
        ...


class SampleSource:
    """The samples of one token file, or of the shards of one dataset, in one order.

    Args:
        dataset: The token file.
        order: The order of its samples, or an order of the native core itself.
        options: What a sample looks like.
    """

    def __init__(
        self, dataset: TokenStore, order: Order | _native.Order, options: SampleOptions
    ) -> None:
        self.options = options
        self._dataset, self._order = dataset, cast(Order, order)
        is_core = isinstance(order, _native.Order)
        self._core: Any = order if is_core else getattr(order, "core", None)
        self.tokens = dataset.token_source()
        # With one, a call of the core reads samples of this and of other such sources.
        self.core_order: Any = self._core if dataset.is_mapped else None

    def read(self, numbers: NDArray[np.int64]) -> Arrays:
        """The samples of these numbers: FIELDS, each [batch, sequence_length].

        Raises:
            ValueError: An index, or an order, that points outside the token file.
        """
        arrays: Arrays = self._read(numbers, None)
        return arrays

    def batch(self, numbers: NDArray[np.int64], form: BatchForm | None = None) -> Batch:
        """The batch of a form; None: FIELDS.

        Raises:
            ValueError: An index, or an order, that points outside the token file, or a token id
                that does not fit.
        """
        arrays = self._read(numbers, form)
        if form is None:
            return dict(zip(FIELDS, arrays, strict=True))
        return _make_batch(form, arrays, [self], None, numbers, None)

    def _read(self, numbers: NDArray[np.int64], form: BatchForm | None) -> Any:
        core_form = None if form is None else row_form(form)
        if self.core_order is not None:
            return _native.gather_samples(
                (self.tokens,),
                (self.core_order,),
                np.zeros(len(numbers), np.int64),
                numbers,
                self.options,
                core_form,
            )
        spans = self._spans(numbers)
        arrays = _native.fill_rows(*self._read_spans(spans), self.options, core_form)
        if form is None or not needs_parts(form):
            return arrays
        return *arrays, spans.sequences, spans.counts, spans.bounds

    def texts(self, numbers: NDArray[np.int64]) -> Texts:
        """The tokens of the samples of these numbers, as int64.

        Raises:
            ValueError: An index, or an order, that points outside the token file.
        """
        if self.core_order is not None:
            return gather_texts([self], np.zeros(len(numbers), np.int64), numbers)
        tokens, ends = self._read_spans(self._spans(numbers))
        return tokens.astype(np.int64, copy=False), ends

    @property
    def is_remote(self) -> bool:
        """Whether the bytes come from elsewhere than a local file, by a reader that prefetches."""
        reader = self._dataset.reader
        return hasattr(reader, "prefetch") and not getattr(reader, "is_local", False)

    def prefetch(self, numbers: NDArray[np.int64]) -> None:
        """Tells the storage that the samples of these numbers are read soon."""
        prefetch = getattr(self._dataset.reader, "prefetch", None)
        if prefetch is not None:
            prefetch(*_native.locate_spans(self.tokens, *self._spans(numbers)[:3]))  # type: ignore[arg-type]

    def documents(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """The documents that sequences belong to: int64 [sequences]."""
        return self._dataset.documents_of(sequences)

    def _spans(self, numbers: NDArray[np.int64]) -> Spans:
        if self._core is None:
            return checked_spans(self._order, numbers)
        return Spans(*_native.spans(self._core, numbers))

    def _read_spans(self, spans: Spans) -> Texts:
        places = _native.locate_spans(self.tokens, *spans[:3])  # type: ignore[arg-type]
        tokens = self._dataset.reader.gather(*places).view(self._dataset.dtype)
        ends = np.concatenate(([0], np.cumsum(spans.counts, dtype=np.int64)))[spans.bounds[1:]]
        return tokens, ends


def gather(
    sources: Sequence[SampleSource],
    source_numbers: NDArray[np.int64],
    numbers: NDArray[np.int64],
    form: BatchForm | None = None,
    *,
    sample_numbers: NDArray[np.int64],
    dataset_numbers: NDArray[Any],
) -> Batch:
    """A batch from several sources with core orders and equal options, in one call of the core.

    Args:
        sources: The sources.
        source_numbers: Source of each sample: int64 [batch].
        numbers: Number of each sample in its source: int64 [batch].
        form: Which arrays the batch has; None: FIELDS.
        sample_numbers: Number of each sample in the blend: int64 [batch].
        dataset_numbers: Dataset of each sample: integers [batch].

    Raises:
        ValueError: An index that points outside a token file, or a token id that does not fit.
    """
    arrays = _native.gather_samples(
        tuple([source.tokens for source in sources]),  # a list takes half of a generator's time
        tuple([source.core_order for source in sources]),
        source_numbers,
        numbers,
        sources[0].options,
        None if form is None else row_form(form),
    )
    if form is None:
        return dict(zip(FIELDS, arrays, strict=True))
    return _make_batch(form, arrays, sources, source_numbers, sample_numbers, dataset_numbers)


def gather_texts(
    sources: Sequence[SampleSource], source_numbers: NDArray[np.int64], numbers: NDArray[np.int64]
) -> Texts:
    """The tokens of samples of several sources with core orders; the arguments are `gather`'s.

    Raises:
        ValueError: An index that points outside a token file.
    """
    return _native.gather_texts(
        tuple([source.tokens for source in sources]),
        tuple([source.core_order for source in sources]),
        source_numbers,
        numbers,
    )


def _make_batch(
    form: BatchForm,
    arrays: Sequence[Any],
    sources: Sequence[SampleSource],
    source_numbers: NDArray[np.int64] | None,
    sample_numbers: NDArray[np.int64],
    dataset_numbers: NDArray[Any] | None,
) -> Batch:
    """The batch of what the core has returned; `source_numbers` None: all of the first source."""
    options = sources[0].options
    parts: Parts | None = None
    if needs_parts(form):
        sequences, counts, bounds = arrays[4:]
        documents = np.zeros_like(sequences)
        if "document_numbers" in form.fields:
            if source_numbers is None:
                documents = sources[0].documents(sequences)
            else:
                places = np.repeat(source_numbers, np.diff(bounds))
                for place, source in enumerate(sources):
                    is_here = places == place
                    documents[is_here] = source.documents(sequences[is_here])
        parts = find_parts(counts, bounds, documents, options)
    return make_batch(
        form,
        arrays[:4],
        options,
        sample_numbers,
        dataset_numbers=dataset_numbers,
        parts=parts,
    )
