"""From spans to the arrays of samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.options import SampleOptions
from millrace.order import Order
from millrace.order.spans import checked_spans
from millrace.store import IndexedDataset

Batch = dict[str, NDArray[Any]]
"""Arrays by name, one row for each sample."""

Arrays = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]

Texts = tuple[NDArray[Any], NDArray[np.int64]]
"""The tokens of some samples, one sample after the other, [n], and where each ends, [batch]."""

FIELDS = ("tokens", "labels", "loss_mask", "position_ids")


class SampleSource:
    """The samples of one token file in one order.

    Args:
        dataset: The token file.
        order: The order of its samples, or an order of the native core itself.
        options: What a sample looks like.
    """

    def __init__(
        self, dataset: IndexedDataset, order: Order | _native.Order, options: SampleOptions
    ) -> None:
        self.options = options
        self._dataset, self._order = dataset, cast(Order, order)
        is_core = isinstance(order, _native.Order)
        self._core: Any = order if is_core else getattr(order, "core", None)
        self.tokens = _native.token_source(
            dataset.tokens if dataset.is_mapped else np.empty(0, dataset.dtype),
            dataset.sequence_pointers,
            dataset.sequence_lengths,
            dataset.reader.size,
        )
        # With one, a call of the core reads samples of this and of other such sources.
        self.core_order: Any = self._core if dataset.is_mapped else None

    def read(self, numbers: NDArray[np.int64]) -> Arrays:
        """The samples of these numbers: FIELDS, each [batch, sequence_length].

        Raises:
            ValueError: An index, or an order, that points outside the token file.
        """
        if self.core_order is not None:
            return gather([self], np.zeros(len(numbers), np.int64), numbers)
        return _native.fill_rows(*self.texts(numbers), self.options)

    def texts(self, numbers: NDArray[np.int64]) -> Texts:
        """The tokens of the samples of these numbers, in the dtype of the token file.

        Raises:
            ValueError: An index, or an order, that points outside the token file.
        """
        if self._core is None:
            sequences, offsets, counts, bounds = checked_spans(self._order, numbers)
        else:
            sequences, offsets, counts, bounds = _native.spans(self._core, numbers)
        places = _native.locate_spans(self.tokens, sequences, offsets, counts)
        tokens = self._dataset.reader.gather(*places).view(self._dataset.dtype)
        ends = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))[bounds[1:]]
        return tokens, ends


def gather(
    sources: Sequence[SampleSource], source_numbers: NDArray[np.int64], numbers: NDArray[np.int64]
) -> Arrays:
    """Samples of several sources with core orders and equal options, in one call of the core.

    Args:
        sources: The sources.
        source_numbers: Source of each sample: int64 [batch].
        numbers: Number of each sample in its source: int64 [batch].

    Raises:
        ValueError: An index that points outside a token file.
    """
    return _native.gather_samples(
        tuple([source.tokens for source in sources]),  # a list takes half of a generator's time
        tuple([source.core_order for source in sources]),
        source_numbers,
        numbers,
        sources[0].options,
    )
