"""Samples of several datasets, mixed."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from millrace.checks import check_floats
from millrace.deferred import Deferred
from millrace.errors import ConfigError, DataError
from millrace.order import BlendOrder, Mixture, Spans, build_blend_indices, normalize
from millrace.order.spans import join_spans
from millrace.samples.dataset import (
    Dataset,
    TokenDataset,
    batch_of_form,
    check_numbers,
    is_ours,
    name_of,
)
from millrace.samples.fields import FIELDS, SOURCE_FIELDS, Batch, BatchForm, SampleOptions
from millrace.samples.rows import rows
from millrace.samples.stored import Leaves, Sources, StoredTokens, gather, gather_tokens
from millrace.samples.tokens import Numbers, TokenBatch, check_tokens, concatenate, fingerprint_of

_UNEVEN = ("cu_seqlens", "max_seqlen", "document_numbers", "document_bounds")


_Draw = tuple[int, Any, Numbers, Numbers]
"""Number of a dataset, the dataset, its samples' numbers in it, and their places in the batch."""


class BlendedDataset(TokenDataset):
    """Samples of several datasets, mixed by weight or until all are used up.

    Args:
        datasets: Datasets whose samples have arrays of the same names, dtypes and shapes. If their
            options differ, it gives no `cu_seqlens`, `max_seqlen` and `document_numbers`.
        weights: Weight of each dataset, normalised here; None: its length. Megatron-LM's builder
            has normalised weights once before, which may change their last bit: pass
            `normalize(weights)` for its order.
        size: Number of samples; None (without weights): all samples of all datasets.
        order: Any mixture, in place of weights and size.

    Attributes:
        datasets: The datasets.
        order: The mixture: from which dataset each sample is drawn.

    Raises:
        ConfigError: Weights that are not positive, too few samples in a dataset, or datasets whose
            samples differ in shape.
    """

    prefix = property(lambda self: type(self).__name__)

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
        self._inputs = self.datasets
        for number, dataset in enumerate(self.datasets):
            if not hasattr(dataset, "batch"):
                remedy = "a blend needs sample numbers, such as those of a TextDataset"
                raise ConfigError(f"dataset {number} is a {type(dataset).__name__}: {remedy}")
        if order is None:
            order = _build_blend_order(self.datasets, weights, size)
        elif weights is not None or size is not None:
            raise ConfigError("give an order, or weights and a size: one of the two")
        first = _form(self.datasets[0])
        for number, dataset in enumerate(self.datasets):
            if (form := _form(dataset)) != first:
                name = f"dataset {number} ({name_of(dataset)})"
                raise ConfigError(f"{name} has {form}, dataset 0 has {first}: make them equal")
        self.source = None  # of tokens, to hand to TokenDataset
        inner = [getattr(one, "all_options", [getattr(one, "options", None)]) for one in datasets]
        self.all_options = views = [*itertools.chain(*inner)]
        self.options = views[0] if views.count(views[0]) == len(views) else None
        self.transforms = []
        self.order: Any = order
        stores = [getattr(one, "stores", (None,)) for one in self.datasets]
        self.stores = list(itertools.chain(*stores))
        self._first_stores = np.cumsum([0, *map(len, stores)], dtype=np.int32)

    def __len__(self) -> int:
        return len(self.order)

    @property
    def weights(self) -> list[float]:
        """The normalised weights of Megatron-LM's blend."""
        return self.order.weights  # type: ignore[no-any-return]

    @property
    def dataset_index(self) -> NDArray[np.int16]:
        """Number of each sample's dataset: int16 [size]."""
        return self.order.indices.dataset_index  # type: ignore[no-any-return]

    @property
    def dataset_sample_index(self) -> NDArray[np.int64]:
        """Each sample's number in its dataset: int64 [size]."""
        return self.order.indices.dataset_sample_index  # type: ignore[no-any-return]

    def _draws(self, sample_numbers: Numbers) -> tuple[NDArray[Any], list[_Draw]]:
        """The dataset of each sample, and the datasets in use, or the first for an empty batch."""
        dataset_numbers, in_dataset = self.order.draws(self.run_numbers(sample_numbers))
        used = sorted(set(dataset_numbers.tolist())) or [0]  # np.unique takes ten times as long
        if not 0 <= used[0] <= used[-1] < len(self.datasets):
            found = f"{used[0]} to {used[-1]} for {len(self.datasets)} datasets"
            raise DataError(f"the dataset index, {found}, is damaged: build it again")
        in_dataset = np.asarray(in_dataset, np.int64)
        draws = []
        for number in used:
            here = (dataset_numbers == number).nonzero()[0]
            draws.append((number, self.datasets[number], in_dataset[here], here))
        return dataset_numbers, draws

    def leaves(self, numbers: Numbers) -> Leaves | None:
        return self._leaves(*self._draws(numbers))

    def _leaves(self, dataset_numbers: NDArray[Any], draws: list[_Draw]) -> Leaves | None:
        places, in_source = np.empty((2, len(dataset_numbers)), np.int64)
        sources: list[StoredTokens] = []
        store_numbers: list[int] = []
        for number, dataset, in_dataset, here in draws:
            inner: Leaves | None = dataset.leaves(in_dataset) if is_ours(dataset) else None
            if inner is None:
                return None
            store_numbers += [self._first_stores[number] + one for one in inner.store_numbers]
            if len(draws) == 1:
                return inner._replace(store_numbers=store_numbers, dataset_numbers=dataset_numbers)
            places[here] = inner.places + len(sources)
            in_source[here] = inner.numbers
            sources += inner.sources
        return Leaves(sources, places, in_source, store_numbers, dataset_numbers)

    def _batch(self, numbers: Numbers, form: BatchForm | None) -> Batch:
        if form is not None and form.token_dtype == "file":
            _ = self.file_dtype  # an error, if there are several
        dataset_numbers, draws = self._draws(numbers)
        options = self._options_of(draws)
        if options is not None and options.boundaries == "eod":
            leaves = self._leaves(dataset_numbers, draws)
            if leaves is not None:
                return gather(leaves, options, form, self.run_numbers(numbers))
        if options is not None and all(is_ours(one) for _, one, *_ in draws):
            return rows(self._tokens_for(numbers, form), options, form)
        batch = _merge_finished(draws, form)
        if form is None:
            return batch
        batch["sample_numbers"] = numbers.copy()
        batch["dataset_numbers"] = dataset_numbers.astype(np.int64)
        return {name: batch[name] for name in form.fields}

    def _options_of(self, draws: list[_Draw]) -> SampleOptions | None:
        """The options of all samples of a batch; None: they differ."""
        return self.options

    def _tokens(self, numbers: Numbers) -> TokenBatch:
        dataset_numbers, draws = self._draws(numbers)
        leaves = self._leaves(dataset_numbers, draws)
        batch = self._merged(draws) if leaves is None else gather_tokens(leaves)
        return batch.with_field("dataset_numbers", "sample", dataset_numbers.astype(np.int64))

    def _merged(self, draws: list[_Draw]) -> TokenBatch:
        """The tokens of the datasets, each read by its own method."""
        batches: list[TokenBatch] = []
        for number, dataset, in_dataset, _ in draws:
            name = name_of(dataset)
            if not hasattr(dataset, "tokens"):
                raise ConfigError(f"{name} has no method `tokens`, which is needed: leave it out")
            batch = check_tokens(name, dataset.tokens(in_dataset), len(in_dataset))
            if batch.part_starts is not None:
                inner = np.int32(0) if batch.part_source is None else batch.part_source
                sources = np.full(len(batch.part_starts), self._first_stores[number])
                batch = batch.with_arrays(part_source=sources + inner)
            batches.append(batch)
        return batches[0] if len(batches) == 1 else concatenate(batches).select(_order(draws))

    def sources_of(self, numbers: Numbers) -> Sources:
        sources: Sources = {}
        for _, dataset, in_dataset, _ in self._draws(numbers)[1]:
            own = {name_of(dataset): (len(in_dataset), None)}
            if hasattr(dataset, "sources_of"):
                own = dataset.sources_of(in_dataset)
            for name, (count, epochs) in own.items():
                sources[name] = sources.get(name, (0, None))[0] + count, epochs
        return sources

    def spans(self, sample_numbers: ArrayLike) -> Spans:
        """Which tokens the samples are made of; each dataset numbers sequences of its own."""
        _, draws = self._draws(check_numbers(sample_numbers, len(self)))
        parts = [dataset.spans(numbers) for _, dataset, numbers, _ in draws]
        return join_spans(parts, _order(draws))

    def prefetch(self, sample_numbers: ArrayLike) -> None:
        for _, dataset, numbers, _ in self._draws(check_numbers(sample_numbers, len(self)))[1]:
            if isinstance(dataset, TokenDataset):
                dataset.prefetch(numbers)

    def _read_alone(self, read: Callable[..., Any], number: Numbers, *form: Any) -> None:
        ((_, dataset, in_dataset, _),) = self._draws(number)[1]  # which names its own sample
        if form:
            batch_of_form(dataset, in_dataset, _form_of_rows(*form))
        else:
            dataset.tokens(in_dataset)

    def fingerprint(self, consumed_samples: int | None = None) -> dict[str, Any]:
        """See `Dataset`; each dataset of the blend tells all of its samples."""
        datasets = [dataset.fingerprint() for dataset in self.datasets]
        return {**fingerprint_of(self.order, consumed_samples), "datasets": datasets}


def _order(draws: list[_Draw]) -> Numbers:
    """Where each sample is among those of the datasets, one dataset after the other."""
    return np.argsort(np.concatenate([here for *_, here in draws]))


def _merge_finished(draws: list[_Draw], form: BatchForm | None) -> Batch:
    """The rows of several datasets, each read by its own method."""
    if form is not None and (uneven := [name for name in form.fields if name in _UNEVEN]):
        others = [one for _, one, *_ in draws if not is_ours(one)]
        why = f"{name_of(others[0])} returns finished rows" if others else "the options differ"
        raise ConfigError(
            f"{why}, so that the blend cannot make {', '.join(uneven)}: leave these fields out"
        )
    batches: list[Batch] = []
    for _, dataset, numbers, _ in draws:
        batch = batch_of_form(dataset, numbers, _form_of_rows(form))
        batches.append(batch)
        layout = _layout(batch)
        is_even = all(array.shape[:1] == numbers.shape for array in batch.values())
        if not is_even or layout != _layout(batches[0]):
            raise DataError(
                f"{name_of(dataset)} returned rows of {layout}, of which each array must "
                f"have {len(numbers)}; rows of {_layout(batches[0])} are needed"
            )
    order = _order(draws)
    return {name: np.concatenate([batch[name] for batch in batches])[order] for name in batches[0]}


def _form_of_rows(form: BatchForm | None) -> BatchForm | None:
    """The form without what the blend alone knows."""
    if form is None:
        return None
    names = tuple(name for name in form.fields if name not in SOURCE_FIELDS)
    return replace(form, fields=names or FIELDS[:1], share_labels=False)


def _build_blend_order(
    datasets: Sequence[Dataset], weights: Sequence[float] | None, size: int | None
) -> BlendOrder:
    if weights is not None:
        weights = check_floats("the weights", weights)
        if len(weights) != len(datasets):
            raise ConfigError(f"there are {len(weights)} weights for {len(datasets)} datasets")
        if size is None:
            raise ConfigError("a blend with weights needs a size; without weights it may lack one")
    lengths = [len(dataset) for dataset in datasets]
    indices = build_blend_indices([name_of(d) for d in datasets], lengths, weights, size)
    weights = normalize(lengths if weights is None else weights)
    num_samples = len(indices.dataset_index)
    return BlendOrder(weights, num_samples, Deferred.of(indices._asdict()), size is None)


def _form(dataset: Any) -> dict[str, str]:
    """Dtype and shape of a sample's arrays by name. Token files are not opened for it."""
    options = getattr(dataset, "all_options", [None])[0]
    if options is not None:
        shape = [options.sequence_length]
        return {name: f"{'float32' if name == 'loss_mask' else 'int64'} {shape}" for name in FIELDS}
    return _layout(dataset.batch(np.empty(0, np.int64)))


def _layout(batch: Batch) -> dict[str, str]:
    if others := [name for name, array in batch.items() if not hasattr(array, "shape")]:
        raise ConfigError(f"{', '.join(others)} cannot be mixed: blend the datasets of the tokens")
    return {name: f"{array.dtype} {list(array.shape[1:])}" for name, array in batch.items()}
