"""Samples of several datasets, mixed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from millrace.checks import reals, whole
from millrace.deferred import Deferred
from millrace.errors import ConfigError, DataError
from millrace.order import BlendOrder, Mixture, build_blend_indices, normalize
from millrace.samples.dataset import (
    Dataset,
    TokenDataset,
    batch_of_form,
    check_numbers,
    is_ours,
    name_of,
)
from millrace.samples.fields import FIELDS, SOURCE_FIELDS, Batch, BatchForm
from millrace.samples.rows import rows
from millrace.samples.stored import StoredTokens, gather, gather_tokens
from millrace.samples.tokens import Numbers, TokenBatch, check_tokens, concatenate, fingerprint_of

_UNEVEN = ("cu_seqlens", "max_seqlen", "document_numbers", "document_bounds")


class _Draws(NamedTuple):
    """The datasets that samples of a blend come from.

    Attributes:
        dataset_numbers: Dataset of each sample: integers [batch].
        in_dataset: Number of each sample in its dataset: int64 [batch].
        used: Numbers of the datasets in use, ascending; 0 if the batch is empty.
        datasets: These datasets.
        places: Place of each sample's dataset among these: int64 [batch].
    """

    dataset_numbers: NDArray[Any]
    in_dataset: Numbers
    used: list[int]
    datasets: list[Any]
    places: Numbers

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
        self.datasets: list[Any] = list(datasets)
        if order is None:
            order = _build_blend_order(self.datasets, weights, size)
        elif weights is not None or size is not None:
            raise ConfigError("give an order, or weights and a size: one of the two")
        views = [getattr(dataset, "options", None) for dataset in self.datasets]
        _check_forms(self.datasets, views)
        # It is its own source of tokens, so there is none to hand to TokenDataset.
        self.options = views[0] if views.count(views[0]) == len(views) else None
        self.transforms = []
        self.order: Any = order
        stores = [one.stores if isinstance(one, TokenDataset) else (None,) for one in self.datasets]
        self._stores: list[StoredTokens | None] = list(itertools.chain(*stores))
        self._first_stores = np.cumsum([0, *map(len, stores)], dtype=np.int32)

    @property
    def prefix(self) -> str:
        """The blend's name in messages."""
        return type(self).__name__

    def __len__(self) -> int:
        return len(self.order)

    @property
    def weights(self) -> list[float]:
        """The normalised weights of Megatron-LM's blend."""
        return self.order.weights  # type: ignore[no-any-return]

    @property
    def dataset_index(self) -> NDArray[np.int16]:
        """Number of the dataset that each sample comes from: int16 [size]."""
        return self.order.indices.dataset_index  # type: ignore[no-any-return]

    @property
    def dataset_sample_index(self) -> NDArray[np.int64]:
        """Number of each sample in its dataset: int64 [size]."""
        return self.order.indices.dataset_sample_index  # type: ignore[no-any-return]

    @property
    def stores(self) -> Sequence[StoredTokens | None]:
        """See `TokenDataset.stores`."""
        return self._stores

    def _draws(self, sample_numbers: Numbers) -> _Draws:
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
        places = np.array([place_of[number] for number in of_sample], np.int64)
        datasets = [self.datasets[number] for number in used]
        return _Draws(dataset_numbers, np.asarray(in_dataset, np.int64), used, datasets, places)

    def _leaves(self, draws: _Draws) -> _Leaves | None:
        """The sources that samples come from; None if one is not in the core."""
        sources: list[StoredTokens] = []
        source_numbers = self._first_stores[draws.dataset_numbers]
        places, numbers = draws.places.copy(), draws.in_dataset.copy()
        for place, dataset in enumerate(draws.datasets):
            if not is_ours(dataset) or dataset.transforms:
                return None
            if isinstance(dataset, BlendedDataset):
                here = draws.rows_of(place)
                inner = dataset._leaves(dataset._draws(draws.in_dataset[here]))
                if inner is None:
                    return None
                places[here], numbers[here] = len(sources) + inner.places, inner.numbers
                source_numbers[here] += inner.source_numbers
                sources += inner.sources
            elif isinstance(dataset.source, StoredTokens) and dataset.source.is_in_core:
                if place != len(sources):
                    places[draws.rows_of(place)] = len(sources)
                sources.append(dataset.source)
            else:
                return None
        return _Leaves(sources, places, numbers, source_numbers)

    def _batch(self, numbers: Numbers, form: BatchForm | None) -> Batch:
        if form is not None and form.token_dtype == "file":
            _ = self.file_dtype  # an error, if there are several
        options, draws = self.options, self._draws(numbers)
        if options is not None and options.boundaries == "eod":
            leaves = self._leaves(draws)
            if leaves is not None:
                return gather(
                    *leaves[:3],
                    options,
                    form,
                    sample_numbers=numbers,
                    dataset_numbers=draws.dataset_numbers,
                )
        views = [one.options if is_ours(one) else None for one in draws.datasets]
        if None in views:
            return _merge_finished(draws, numbers, form)
        tokens = self._tokens_for(numbers, form)
        if views.count(views[0]) == len(views):
            return rows(tokens, views[0], form)
        return rows(tokens, [views[place] for place in draws.places.tolist()], form)

    def _tokens(self, numbers: Numbers) -> TokenBatch:
        draws = self._draws(numbers)
        leaves = self._leaves(draws)
        if leaves is not None:
            batch = gather_tokens(*leaves[:3])
            sources = np.repeat(leaves.source_numbers, np.diff(batch.part_bounds))
            batch = batch.with_arrays(part_source=sources)
        else:
            batch = self._merged(draws)
        dataset_numbers = draws.dataset_numbers.astype(np.int64)
        return batch.with_field("dataset_numbers", "sample", dataset_numbers)

    def _merged(self, draws: _Draws) -> TokenBatch:
        """The tokens of the datasets, each read by its own method."""
        batches: list[TokenBatch] = []
        for place, dataset in enumerate(draws.datasets):
            if not hasattr(dataset, "tokens"):
                raise ConfigError(
                    f"{name_of(dataset)} has no method `tokens`, which returns the tokens of "
                    "samples: leave this dataset out of the blend, or what needs the tokens"
                )
            numbers = draws.in_dataset[draws.rows_of(place)]
            batch = check_tokens(name_of(dataset), dataset.tokens(numbers), len(numbers))
            if batch.part_starts is not None:
                inner = np.int32(0) if batch.part_source is None else batch.part_source
                sources = np.full(len(batch.part_starts), self._first_stores[draws.used[place]])
                batch = batch.with_arrays(part_source=sources + inner)
            batches.append(batch)
        if len(batches) == 1:
            return batches[0]
        order = np.argsort(draws.places, kind="stable")
        return concatenate(batches).select(np.argsort(order))

    def prefetch(self, sample_numbers: ArrayLike) -> None:
        """See `TokenDataset.prefetch`."""
        draws = self._draws(check_numbers(sample_numbers, len(self)))
        for place, dataset in enumerate(draws.datasets):
            if isinstance(dataset, TokenDataset):
                dataset.prefetch(draws.in_dataset[draws.rows_of(place)])

    def _read_alone(self, read: Callable[..., Any], number: Numbers, *form: Any) -> None:
        draws = self._draws(number)
        dataset = draws.datasets[0]  # which names its own sample
        if form:
            batch_of_form(dataset, draws.in_dataset, _form_of_rows(*form))
        else:
            dataset.tokens(draws.in_dataset)

    def _where(self, samples: str) -> str:
        return f"{samples} of the blend"

    def fingerprint(self, consumed_samples: int | None = None) -> dict[str, Any]:
        """See `Dataset.fingerprint`; each dataset tells all of its samples."""
        return {
            **fingerprint_of(self.order, consumed_samples),
            "datasets": [dataset.fingerprint() for dataset in self.datasets],
        }


def _merge_finished(draws: _Draws, sample_numbers: Numbers, form: BatchForm | None) -> Batch:
    """The rows of several datasets, each made by its own method.

    Raises:
        ConfigError: A field without a row for each sample.
        DataError: Batches whose arrays differ in name, dtype or shape.
    """
    if form is not None and (uneven := [name for name in form.fields if name in _UNEVEN]):
        finished = next(one for one in draws.datasets if not is_ours(one))
        raise ConfigError(
            f"{name_of(finished)} returns finished rows, of which a blend cannot make "
            f"{', '.join(uneven)}: leave these fields out"
        )
    merged: Batch = {}
    for place, dataset in enumerate(draws.datasets):
        here = draws.rows_of(place)
        batch = batch_of_form(dataset, draws.in_dataset[here], _form_of_rows(form))
        if place == 0:
            size = len(sample_numbers)
            merged = {
                name: np.empty((size, *array.shape[1:]), array.dtype)
                for name, array in batch.items()
            }
        if batch.keys() != merged.keys():
            raise DataError(f"{name_of(dataset)} returned {[*batch]}; {[*merged]} are needed")
        for name, array in batch.items():
            column = merged[name]
            shape = (len(here), *column.shape[1:])
            if array.shape != shape or array.dtype != column.dtype:
                raise DataError(
                    f"{name_of(dataset)} returned {name} as {array.dtype} {list(array.shape)}; "
                    f"{column.dtype} {list(shape)} is needed"
                )
            column[here] = array
    if form is None:
        return merged
    merged["sample_numbers"] = sample_numbers.copy()
    merged["dataset_numbers"] = draws.dataset_numbers.astype(np.int64)
    return {name: merged[name] for name in form.fields}


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
