"""Samples of several datasets, mixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace.checks import reals, whole
from millrace.deferred import Deferred
from millrace.errors import ConfigError, DataError
from millrace.options import SampleOptions
from millrace.order import BlendOrder, Mixture, build_blend_indices, normalize
from millrace.samples.dataset import (
    Dataset,
    TokenDataset,
    batch_of_form,
    is_ours,
    name_of,
)
from millrace.samples.fields import FIELDS, SOURCE_FIELDS, Batch, BatchForm, merge_rows
from millrace.samples.rows import rows
from millrace.samples.stored import StoredTokens, gather, gather_tokens
from millrace.samples.tokens import (
    Numbers,
    StoredSource,
    TokenBatch,
    check_tokens,
    concatenate,
    fingerprint_of,
)

_UNEVEN = ("cu_seqlens", "max_seqlen", "document_numbers", "document_bounds")


class Draws(NamedTuple):
    """The datasets that samples of a blend come from.

    Attributes:
        dataset_numbers: Dataset of each sample: integers [batch].
        used: Numbers of the datasets in use, ascending; 0 if the batch is empty.
        datasets: The datasets in use.
        places: Place of each sample's dataset among these: int64 [batch].
        in_dataset: Number of each sample in its dataset: int64 [batch].
    """

    dataset_numbers: NDArray[Any]
    used: list[int]
    datasets: list[Any]
    places: Numbers
    in_dataset: Numbers

    def rows_of(self, place: int) -> Numbers:
        """Places in the batch of the samples of a dataset in use."""
        return np.flatnonzero(self.places == place)


class _Leaves(NamedTuple):
    """The sources in the core that samples come from, also of blends in the blend.

    Attributes:
        sources: The sources in use.
        places: Place of each sample's source among these: int64 [batch].
        numbers: Number of each sample in its source: int64 [batch].
        source_numbers: Number of its source among those of the blend: int32 [batch].
    """

    sources: list[StoredTokens]
    places: Numbers
    numbers: Numbers
    source_numbers: NDArray[np.int32]


class BlendedTokens(StoredSource):
    """The tokens of several datasets, mixed.

    Args:
        datasets: The datasets.
        order: The mixture: its `draws` gives the dataset of each sample, and its number there.
    """

    def __init__(self, datasets: Sequence[Any], order: Mixture) -> None:
        self.datasets, self.order = list(datasets), order
        stores = [one.stores if isinstance(one, StoredSource) else (None,) for one in datasets]
        self.stores = [store for some in stores for store in some]
        self._first_sources = np.cumsum([0, *map(len, stores)], dtype=np.int32)

    def __len__(self) -> int:
        return len(self.order)

    def draws(self, sample_numbers: Numbers) -> Draws:
        """The datasets that samples come from.

        Raises:
            DataError: A damaged mixture, which names datasets that there are not.
        """
        dataset_numbers, in_dataset = self.order.draws(sample_numbers)
        # A dict takes a tenth of the time of np.unique for a micro batch.
        used = sorted(set(of_sample := dataset_numbers.tolist()))
        if used and not 0 <= used[0] <= used[-1] < len(self.datasets):
            raise DataError(
                f"the dataset index has entries from {used[0]} to {used[-1]}; there are "
                f"{len(self.datasets)} datasets. It is damaged: build it again"
            )
        used = used or [0]
        place_of = {number: place for place, number in enumerate(used)}
        return Draws(
            dataset_numbers,
            used,
            [self.datasets[number] for number in used],
            np.array([place_of[number] for number in of_sample], np.int64),
            np.asarray(in_dataset, np.int64),
        )

    def _leaves(self, draws: Draws) -> _Leaves | None:
        """The sources that samples come from; None if one is not in the core."""
        sources: list[StoredTokens] = []
        source_numbers = self._first_sources[draws.dataset_numbers]
        places, numbers = draws.places.copy(), draws.in_dataset.copy()
        for place, dataset in enumerate(draws.datasets):
            if not is_ours(dataset) or dataset.transforms:
                return None
            source = dataset.source
            if isinstance(source, BlendedTokens):
                here = draws.rows_of(place)
                inner = source._leaves(source.draws(draws.in_dataset[here]))
                if inner is None:
                    return None
                places[here], numbers[here] = len(sources) + inner.places, inner.numbers
                source_numbers[here] += inner.source_numbers
                sources += inner.sources
            elif isinstance(source, StoredTokens) and source.is_in_core:
                if place != len(sources):
                    places[draws.places == place] = len(sources)
                sources.append(source)
            else:
                return None
        return _Leaves(sources, places, numbers, source_numbers)

    def gather(
        self, sample_numbers: Numbers, options: SampleOptions, form: BatchForm | None
    ) -> Batch | None:
        """See `StoredSource.gather`."""
        draws = self.draws(sample_numbers)
        leaves = self._leaves(draws)
        if leaves is None:
            return None
        return gather(
            leaves.sources,
            leaves.places,
            leaves.numbers,
            options,
            form,
            sample_numbers=sample_numbers,
            dataset_numbers=draws.dataset_numbers,
        )

    def tokens(self, sample_numbers: Numbers) -> TokenBatch:
        """See `TokenSource.tokens`."""
        draws = self.draws(sample_numbers)
        leaves = self._leaves(draws)
        if leaves is not None:
            batch = gather_tokens(leaves.sources, leaves.places, leaves.numbers)
            sources = np.repeat(leaves.source_numbers, np.diff(batch.part_bounds))
            batch = batch.with_arrays(part_source=sources)
        else:
            batch = self._merged(draws)
        numbers = draws.dataset_numbers.astype(np.int64)
        return batch.with_field("dataset_numbers", "sample", numbers)

    def _merged(self, draws: Draws) -> TokenBatch:
        """The tokens of the datasets, each read by its own method."""
        batches: list[TokenBatch] = []
        order: list[Numbers] = []
        for place, dataset in enumerate(draws.datasets):
            if not hasattr(dataset, "tokens"):
                raise ConfigError(
                    f"{name_of(dataset)} has no method `tokens`, which returns the tokens of "
                    "samples: leave this dataset out of the blend, or what needs the tokens"
                )
            here = draws.rows_of(place)
            batch = check_tokens(
                name_of(dataset), dataset.tokens(draws.in_dataset[here]), len(here)
            )
            if batch.part_starts is not None:
                inner = np.int32(0) if batch.part_source is None else batch.part_source
                sources = np.full(len(batch.part_starts), self._first_sources[draws.used[place]])
                batch = batch.with_arrays(part_source=sources + inner)
            batches.append(batch)
            order.append(here)
        if len(batches) == 1:
            return batches[0]
        return concatenate(batches).select(np.argsort(np.concatenate(order)))

    def prefetch(self, sample_numbers: Numbers) -> None:
        """See `StoredSource.prefetch`."""
        draws = self.draws(sample_numbers)
        for place, dataset in enumerate(draws.datasets):
            if isinstance(dataset, StoredSource):
                dataset.prefetch(draws.in_dataset[draws.rows_of(place)])

    def fingerprint(self, consumed_samples: int | None = None) -> dict[str, Any]:
        """See `TokenSource.fingerprint`; each dataset tells all of its samples."""
        return {
            **fingerprint_of(self.order, consumed_samples),
            "datasets": [dataset.fingerprint() for dataset in self.datasets],
        }


class BlendedDataset(TokenDataset):
    """Samples of several datasets, mixed by weight or until all are used up.

    Args:
        datasets: Datasets whose samples have the same arrays, with the same dtypes and shapes.
        weights: Weight of each dataset; None: its length. They are normalised here; Megatron-LM's
            builder has normalised them once before, which may change their last bit: pass
            `normalize(weights)` for its order.
        size: Number of samples; None (without weights): all samples of all datasets.
        order: Any mixture, in place of weights and size.

    Attributes:
        datasets: The datasets.
        order: From which of them each sample is drawn.

    Raises:
        ConfigError: Weights that are not positive, too few samples in a dataset, or datasets whose
            samples differ in shape.
    """

    source: BlendedTokens

    def __init__(
        self,
        datasets: Sequence[Dataset],
        weights: Sequence[float] | None = None,
        size: int | None = None,
        *,
        order: Mixture | None = None,
    ) -> None:
        if len(datasets) == 0:
            raise ConfigError("a blend needs at least one dataset")
        self.datasets = list(datasets)
        if order is None:
            order = _build_blend_order(self.datasets, weights, size)
        elif weights is not None or size is not None:
            raise ConfigError("give an order, or weights and a size: one of the two")
        views = [getattr(dataset, "options", None) for dataset in self.datasets]
        _check_forms(self.datasets, views)
        is_one_view = views.count(views[0]) == len(views)
        super().__init__(BlendedTokens(self.datasets, order), views[0] if is_one_view else None)
        self.order: Any = order

    @property
    def prefix(self) -> str:
        """The blend's name in messages."""
        return type(self).__name__

    @property
    def weights(self) -> list[float]:
        """The normalised weights of Megatron-LM's blend."""
        weights: list[float] = self.order.weights
        return weights

    @property
    def dataset_index(self) -> NDArray[np.int16]:
        """Number of the dataset that each sample comes from: int16 [size]."""
        index: NDArray[np.int16] = self.order.indices.dataset_index
        return index

    @property
    def dataset_sample_index(self) -> NDArray[np.int64]:
        """Number of each sample in its dataset: int64 [size]."""
        index: NDArray[np.int64] = self.order.indices.dataset_sample_index
        return index

    def _batch(self, numbers: Numbers, form: BatchForm | None) -> Batch:
        if form is not None and form.token_dtype == "file":
            _ = self.file_dtype  # an error, if there are several
        options = self.options
        if options is not None and options.boundaries == "eod":
            batch = self.source.gather(numbers, options, form)
            if batch is not None:
                return batch
        draws = self.source.draws(numbers)
        views: list[Any] = [
            dataset.options if is_ours(dataset) else None for dataset in draws.datasets
        ]
        if None in views:
            return _merge_finished(draws, numbers, form)
        tokens = self._tokens_for(numbers, form)
        if views.count(views[0]) == len(views):
            return rows(tokens, views[0], form)
        return rows(tokens, [views[place] for place in draws.places.tolist()], form)

    def _read_alone(self, method: str, number: Numbers, form: BatchForm | None) -> None:
        draws = self.source.draws(number)
        dataset = draws.datasets[0]  # which names its own sample
        if method == "tokens":
            dataset.tokens(draws.in_dataset)
        else:
            batch_of_form(dataset, draws.in_dataset, _form_of_rows(form))

    def _where(self, samples: str) -> str:
        return f"{samples} of the blend"

    def _source_fingerprint(self, consumed_samples: int | None) -> dict[str, Any]:
        return self.source.fingerprint(consumed_samples)


def _merge_finished(draws: Draws, sample_numbers: Numbers, form: BatchForm | None) -> Batch:
    """The rows of several datasets, each made by its own method."""
    if form is not None and (uneven := [name for name in form.fields if name in _UNEVEN]):
        finished = next(one for one in draws.datasets if not is_ours(one))
        raise ConfigError(
            f"{name_of(finished)} returns finished rows, of which a blend cannot make "
            f"{', '.join(uneven)}: leave these fields out"
        )
    batches = []
    for place, dataset in enumerate(draws.datasets):
        here = draws.rows_of(place)
        batches.append(
            (
                name_of(dataset),
                here,
                batch_of_form(dataset, draws.in_dataset[here], _form_of_rows(form)),
            )
        )
    batch = merge_rows(batches, len(sample_numbers))
    if form is None:
        return batch
    batch["sample_numbers"] = sample_numbers.copy()
    batch["dataset_numbers"] = draws.dataset_numbers.astype(np.int64)
    return {name: batch[name] for name in form.fields}


def _form_of_rows(form: BatchForm | None) -> BatchForm | None:
    """The form of the rows of one dataset, without what the blend alone knows."""
    if form is None:
        return None
    names = tuple(name for name in form.fields if name not in SOURCE_FIELDS)
    return replace(form, fields=names or FIELDS[:1], share_labels=False)


def _build_blend_order(
    datasets: Sequence[Dataset], weights: Sequence[float] | None, size: int | None
) -> BlendOrder:
    size = None if size is None else whole("the blend's size", size, 0)
    if weights is not None:
        weights = reals("the weights", weights)
        if len(weights) != len(datasets):
            raise ConfigError(f"there are {len(weights)} weights for {len(datasets)} datasets")
        if size is None:
            raise ConfigError(
                "a blend with weights needs a size; without weights it may be left out"
            )
    lengths = [len(dataset) for dataset in datasets]
    indices = build_blend_indices([name_of(d) for d in datasets], lengths, weights, size)
    weights = normalize(lengths if weights is None else weights)
    return BlendOrder(weights, len(indices.dataset_index), Deferred.of(indices))


def _check_forms(datasets: Sequence[Any], views: Sequence[Any]) -> None:
    """Checks that all samples have the same arrays; datasets that share their options do."""
    first = _form(datasets[0])
    for number, dataset in enumerate(datasets):
        if views[number] is not None and views[number] is views[0]:
            continue
        form = _form(dataset)
        if form != first:
            raise ConfigError(
                f"dataset {number} ({name_of(dataset)}) has samples of {form}, dataset 0 of "
                f"{first}: make them equal"
            )


def _form(dataset: Any) -> dict[str, str]:
    """The arrays of a sample: names, dtypes and shapes. A token file need not be opened for it."""
    if isinstance(dataset, BlendedDataset):
        return _form(dataset.datasets[0])
    if isinstance(dataset, TokenDataset) and dataset.options is not None:
        shape = [dataset.options.sequence_length]
        return {name: f"{'float32' if name == 'loss_mask' else 'int64'} {shape}" for name in FIELDS}
    batch = dataset.batch(np.empty(0, np.int64))
    return {name: f"{array.dtype} {list(array.shape[1:])}" for name, array in batch.items()}
