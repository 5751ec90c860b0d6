"""Samples of several datasets, mixed."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from millrace.checks import check_floats, check_int
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
    """The datasets that samples of a blend come from, and where the samples are in them."""

    dataset_numbers: NDArray[Any]  # of each sample
    in_dataset: Numbers  # the number of each sample in its dataset
    used: list[int]  # the datasets' numbers, ascending; 0 if the batch is empty
    datasets: list[Any]  # those in use
    places: Numbers  # of each sample's dataset among these

    def each(self) -> Iterator[tuple[int, Any, Numbers]]:
        """Number of each dataset in use, the dataset, and its samples' numbers in it."""
        for place, (number, dataset) in enumerate(zip(self.used, self.datasets, strict=True)):
            yield number, dataset, self.in_dataset[self.places == place]

    def order(self) -> Numbers:
        """Where each sample is among those of `each`, one dataset after the other."""
        return np.argsort(np.argsort(self.places, kind="stable"))


class _Leaves(NamedTuple):
    """The sources in the core that samples come from, also of blends in the blend."""

    sources: list[StoredTokens]
    places: Numbers  # of each sample's source among these
    numbers: Numbers  # of each sample in its source
    source_numbers: NDArray[np.int32]  # of each sample's source among all of the blend


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
        datasets, order: The datasets, and from which of them each sample is drawn.

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
                here = draws.places == place
                inner = dataset._leaves(dataset._draws(draws.in_dataset[here]))
                if inner is None:
                    return None
                places[here], numbers[here] = len(sources) + inner.places, inner.numbers
                source_numbers[here] += inner.source_numbers
                sources += inner.sources
            elif isinstance(dataset.source, StoredTokens) and dataset.source.is_in_core:
                if place != len(sources):
                    places[draws.places == place] = len(sources)
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
                return gather(*leaves[:3], options, form, numbers, draws.dataset_numbers)
        views: list[Any] = [one.options if is_ours(one) else None for one in draws.datasets]
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
        for number, dataset, in_dataset in draws.each():
            if not hasattr(dataset, "tokens"):
                raise ConfigError(
                    f"{name_of(dataset)} has no method `tokens`, which returns the tokens of "
                    "samples: leave this dataset out of the blend, or what needs the tokens"
                )
            batch = check_tokens(name_of(dataset), dataset.tokens(in_dataset), len(in_dataset))
            if batch.part_starts is not None:
                inner = np.int32(0) if batch.part_source is None else batch.part_source
                sources = np.full(len(batch.part_starts), self._first_stores[number])
                batch = batch.with_arrays(part_source=sources + inner)
            batches.append(batch)
        return batches[0] if len(batches) == 1 else concatenate(batches).select(draws.order())

    def prefetch(self, sample_numbers: ArrayLike) -> None:
        for _, dataset, numbers in self._draws(check_numbers(sample_numbers, len(self))).each():
            if isinstance(dataset, TokenDataset):
                dataset.prefetch(numbers)

    def _read_alone(self, read: Callable[..., Any], number: Numbers, *form: Any) -> None:
        ((_, dataset, in_dataset),) = self._draws(number).each()  # which names its own sample
        if form:
            batch_of_form(dataset, in_dataset, _form_of_rows(*form))
        else:
            dataset.tokens(in_dataset)

    def _where(self, samples: str) -> str:
        return f"{samples} of the blend"

    def fingerprint(self, consumed_samples: int | None = None) -> dict[str, Any]:
        """See `Dataset`; each dataset of the blend tells all of its samples."""
        datasets = [dataset.fingerprint() for dataset in self.datasets]
        return {**fingerprint_of(self.order, consumed_samples), "datasets": datasets}


def _merge_finished(draws: _Draws, sample_numbers: Numbers, form: BatchForm | None) -> Batch:
    """The rows of several datasets, each made by its own method."""
    if form is not None and (uneven := [name for name in form.fields if name in _UNEVEN]):
        finished = next(one for one in draws.datasets if not is_ours(one))
        raise ConfigError(
            f"{name_of(finished)} returns finished rows, of which a blend cannot make "
            f"{', '.join(uneven)}: leave these fields out"
        )
    batches: list[Batch] = []
    for _, dataset, numbers in draws.each():
        batch = batch_of_form(dataset, numbers, _form_of_rows(form))
        batches.append(batch)
        is_even = all(array.shape[:1] == numbers.shape for array in batch.values())
        if not is_even or _layout(batch) != _layout(batches[0]):
            raise DataError(
                f"{name_of(dataset)} returned rows of {_layout(batch)}, of which each array must "
                f"have {len(numbers)}; rows of {_layout(batches[0])} are needed"
            )
    order = draws.order()
    merged = {
        name: np.concatenate([batch[name] for batch in batches])[order] for name in batches[0]
    }
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
    size = None if size is None else check_int("the blend's size", size, 0)
    if weights is not None:
        weights = check_floats("the weights", weights)
        if len(weights) != len(datasets):
            raise ConfigError(f"there are {len(weights)} weights for {len(datasets)} datasets")
        if size is None:
            raise ConfigError("a blend with weights needs a size; without weights it may lack one")
    lengths = [len(dataset) for dataset in datasets]
    indices = build_blend_indices([name_of(d) for d in datasets], lengths, weights, size)
    weights = normalize(lengths if weights is None else weights)
    return BlendOrder(weights, len(indices.dataset_index), Deferred.of(indices))


def _check_forms(datasets: Sequence[Any], views: Sequence[Any]) -> None:
    """A ConfigError unless all samples have the same arrays; with the same options they do."""
    first = _form(datasets[0])
    for number, (dataset, view) in enumerate(zip(datasets, views, strict=True)):
        is_same = view is not None and view is views[0]
        if not is_same and (form := _form(dataset)) != first:
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
    return _layout(dataset.batch(np.empty(0, np.int64)))


def _layout(batch: Batch) -> dict[str, str]:
    """Dtype and shape of the rows of each array."""
    return {name: f"{array.dtype} {list(array.shape[1:])}" for name, array in batch.items()}
