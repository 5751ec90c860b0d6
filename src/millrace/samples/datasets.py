"""Datasets: sample numbers in, tokens, labels, loss masks and position ids out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from millrace.checks import reals, shown, whole, whole_numbers
from millrace.deferred import Deferred
from millrace.errors import ConfigError, DataError, MillraceError
from millrace.options import SampleOptions
from millrace.order import (
    BlendOrder,
    GPTIndices,
    GPTPlan,
    Order,
    OrderInputs,
    Spans,
    build_blend_indices,
    normalize,
)
from millrace.order.gpt import check_seed
from millrace.order.plans import build_order, check_range, check_token_dtype
from millrace.order.spans import checked_spans
from millrace.samples.fields import (
    FIELDS,
    Batch,
    BatchForm,
    DatasetBatch,
    check_form,
    form_of_datasets,
    merge_batches,
    merge_rows,
    select_fields,
)
from millrace.samples.stored import SampleSource, Texts, gather, gather_texts
from millrace.store import IndexedDataset
from millrace.store.token_file import TokenFile


class Dataset(Protocol):
    """Samples by number: what a blend and a loader need.

    A dataset may offer attributes more. `takes_form`, if true, says that `batch` has a second
    argument `form` (a `BatchForm`, or None). Other datasets give no other arrays than they return
    anyway. `texts(sample_numbers)` returns the tokens of samples
    (see `GPTDataset.texts`). `source` (a `SampleSource`) and its `options` let a blend read samples
    of several datasets in one call of the core. `prefix` names the dataset in messages, and
    `file_dtype` is the dtype of its token files.
    """

    def __len__(self) -> int:
        """The number of samples."""
        ...

    def batch(self, sample_numbers: ArrayLike) -> Batch:
        """The samples of these numbers: arrays by name, one row for each sample."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """What decides the samples, as plain values, for comparison with a saved state.

        Strings, numbers but NaN, None, lists, and dicts with strings as keys: a loader refuses
        other values. An entry "view", wherever it stands, holds what changes masks and padding
        alone: a loader warns if it has changed, and refuses all other changes.
        """
        ...


class GPTDataset:
    """Samples of fixed length from one indexed dataset, in Megatron-LM's order or another one.

    Args:
        dataset: The token file.
        sequence_length: Tokens to train on in a sample, 1 to 2**31 - 1.
        seed: Seed of the order, 0 to 2**32 - 1.
        num_samples: Least number of samples; the sequences are repeated for as many epochs as that
            takes. None: the samples of one epoch.
        sequences: (start, stop), the range of sequences to draw from (see `split_ranges`); None:
            all.
        eod_token: End-of-document token; the next two options need it.
        reset_position_ids: Whether position ids start again after each EOD.
        eod_mask_loss: Whether the loss mask is 0 where the input is EOD.
        pad_token: Padding token, which is never trained on: where a label equals it, the loss mask
            is 0. None: the token file holds no padding, and every token is trained on.
        drop_last_partial_sequence: Whether to leave out a last sample that the tokens do not fill.
        add_extra_token: Whether a sample has one more token, the last label. Without it the last
            label is missing and masked.
        order: Another order than Megatron-LM's, in place of seed, num_samples, sequences and
            drop_last_partial_sequence.
        options: The options of samples as one object, in place of the single ones.

    Attributes:
        prefix: Path prefix of the token file.
        order: The order of the samples.
        options: What a sample looks like.

    Raises:
        ConfigError: No tokens, too few for a sample, or an option outside its limits.
        DataError: Tokens that are not integers, or a damaged index.
    """

    takes_form = True

    def __init__(
        self,
        dataset: IndexedDataset | TokenFile,
        *,
        sequence_length: int | None = None,
        seed: int | None = None,
        num_samples: int | None = None,
        sequences: tuple[int, int] | None = None,
        eod_token: int | None = None,
        reset_position_ids: bool = False,
        eod_mask_loss: bool = False,
        pad_token: int | None = None,
        drop_last_partial_sequence: bool = True,
        add_extra_token: bool = True,
        order: Order | None = None,
        options: SampleOptions | None = None,
    ) -> None:
        if options is None:
            options = SampleOptions(
                sequence_length=sequence_length,  # type: ignore[arg-type]
                add_extra_token=add_extra_token,
                eod_token=eod_token,
                pad_token=pad_token,
                reset_position_ids=reset_position_ids,
                eod_mask_loss=eod_mask_loss,
            )
        elif (sequence_length, eod_token, pad_token) != (None, None, None) or not (
            add_extra_token is True and reset_position_ids is eod_mask_loss is False
        ):
            raise ConfigError("give options, or single options of samples: one of the two")
        self._file = dataset
        self.prefix = dataset.prefix
        self.options = options
        if order is None:
            order = _build_order(
                self.dataset, options, seed, num_samples, sequences, drop_last_partial_sequence
            )
        elif (seed, num_samples) != (None, None) or not (
            sequences is None and drop_last_partial_sequence is True
        ):
            raise ConfigError(
                "seed, num_samples, sequences and drop_last_partial_sequence belong to "
                "Megatron-LM's order: leave them out where another order is given"
            )
        self.order = order
        self._source: SampleSource | None = None

    @property
    def dataset(self) -> IndexedDataset:
        """The token file, which is opened for the first sample at the latest."""
        return self._file.dataset if isinstance(self._file, TokenFile) else self._file

    @property
    def indices(self) -> GPTIndices:
        """The document index, sample index and shuffle index of Megatron-LM's order.

        Raises:
            AttributeError: Another order.
        """
        indices: GPTIndices = self.order.indices  # type: ignore[attr-defined]
        return indices

    @property
    def source(self) -> SampleSource:
        """The samples, for a call of the core that reads from several datasets."""
        if self._source is None:
            self._source = SampleSource(self.dataset, self.order, self.options)
        return self._source

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_source": None}  # made again where it is needed

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, sample_number: SupportsIndex) -> Batch:
        """One sample: the arrays of `batch` without their first dimension."""
        return _sample(self, sample_number)

    @property
    def file_dtype(self) -> np.dtype[Any]:
        """The dtype of the token file."""
        return self.dataset.dtype

    def batch(self, sample_numbers: ArrayLike, form: BatchForm | None = None) -> Batch:
        """The samples of these numbers.

        Args:
            sample_numbers: Integers [batch], each in [0, len): a list, or an array of any integer
                dtype, byte order and stride.
            form: Which arrays the batch has. None: `tokens` int64, `labels` int64, `loss_mask`
                float32 and `position_ids` int64, each [batch, sequence_length].

        Returns:
            The arrays by name. Without a form, they are new; with one, loss masks and position ids
            may be read-only arrays that batches share.

        Raises:
            ConfigError: Sample numbers that are not integers, or have another shape; another form.
            IndexError: No such sample.
            DataError: An index entry that points outside the token file, or a token id that does
                not fit the vocabulary or dtype of the form; the message names file and sample.
        """
        check_form(form)
        numbers = _check_numbers(sample_numbers, len(self))
        try:
            return self.source.batch(numbers, form)
        except (ValueError, OSError) as error:
            raise _error_of_sample(
                error, self.prefix, numbers, lambda one: self.source.batch(one, form)
            ) from None

    def texts(self, sample_numbers: ArrayLike) -> Texts:
        """The tokens of the samples of these numbers, as the token file has them.

        They include the extra token, the last label. Nothing is padded or masked: a last partial
        sample is shorter than the others.

        Returns:
            The tokens of all samples, one sample after the other: int64 [n]. Where each sample ends
            among them: int64 [batch].

        Raises:
            ConfigError, IndexError, DataError: As `batch`.
        """
        numbers = _check_numbers(sample_numbers, len(self))
        try:
            return self.source.texts(numbers)
        except (ValueError, OSError) as error:
            raise _error_of_sample(
                error, self.prefix, numbers, lambda one: self.source.texts(one)
            ) from None

    def spans(self, sample_numbers: ArrayLike) -> Spans:
        """Which tokens of which sequences the samples of these numbers are made of.

        Raises:
            ConfigError, IndexError, DataError: As `batch`.
        """
        numbers = _check_numbers(sample_numbers, len(self))
        try:
            return checked_spans(self.order, numbers)
        except ValueError as error:
            raise _damage(error) from None

    @property
    def is_remote(self) -> bool:
        """See `SampleSource.is_remote`."""
        return self.source.is_remote

    def prefetch(self, sample_numbers: ArrayLike) -> None:
        """Tells the storage that these samples are read soon, and does not wait for it.

        Raises:
            ConfigError, IndexError, DataError: As `batch`.
        """
        numbers = _check_numbers(sample_numbers, len(self))
        try:
            self.source.prefetch(numbers)
        except ValueError as error:
            raise _damage(error) from None

    def fingerprint(self) -> dict[str, Any]:
        """See `Dataset.fingerprint`."""
        order = self.order.fingerprint()
        view = {name: value for name, value in vars(self.options).items() if name not in order}
        return {
            "content": self._file.fingerprint,
            "lengths": self._file.lengths_checksum,
            **order,
            "view": view,
        }


def _build_order(
    dataset: IndexedDataset,
    options: SampleOptions,
    seed: Any,
    num_samples: int | None,
    sequences: tuple[int, int] | None,
    drop_last_partial_sequence: bool,
) -> Order:
    check_token_dtype(dataset.dtype, dataset.prefix)
    every = (0, len(dataset))
    inputs = OrderInputs(
        num_sequences=len(dataset),
        num_tokens=dataset.num_tokens,
        sequences=check_range(every if sequences is None else sequences, len(dataset)),
        num_samples=num_samples,
        sequence_length=options.sequence_length,
        add_extra_token=options.add_extra_token,
        drop_last_partial_sequence=drop_last_partial_sequence,
        seed=check_seed(seed),
        load_lengths=partial(getattr, dataset, "sequence_lengths"),
    )
    return build_order(GPTPlan, inputs, dataset.prefix)


class _Draws(NamedTuple):
    """The samples of a batch of a blend.

    Attributes:
        numbers: Number of each sample: int64 [batch].
        dataset_numbers: Dataset of each sample: int16 [batch].
        datasets: The datasets in use, by number; the first one, if the batch is empty.
        places: Place of each sample's dataset among these: int64 [batch].
        in_dataset: Number of each sample in its dataset: int64 [batch].
    """

    numbers: NDArray[np.int64]
    dataset_numbers: NDArray[np.int16]
    datasets: list[Dataset]
    places: NDArray[np.int64]
    in_dataset: NDArray[np.int64]


class BlendedDataset:
    """Samples of several datasets, mixed by weight or until all are used up.

    Args:
        datasets: Datasets whose samples have the same arrays, with the same dtypes and shapes.
        weights: Weight of each dataset; None: its length. They are normalised here; Megatron-LM's
            builder has normalised them once before, which may change their last bit: pass
            `normalize(weights)` for its order.
        size: Number of samples; None (without weights): all samples of all datasets.
        order: An order of the blend that is there already, in place of weights and size.

    Attributes:
        datasets: The datasets.
        order: From which of them each sample is drawn.

    Raises:
        ConfigError: Weights that are not positive, too few samples in a dataset, or datasets whose
            samples differ in shape.
    """

    takes_form = True

    def __init__(
        self,
        datasets: Sequence[Dataset],
        weights: Sequence[float] | None = None,
        size: int | None = None,
        *,
        order: BlendOrder | None = None,
    ) -> None:
        if len(datasets) == 0:
            raise ConfigError("a blend needs at least one dataset")
        self.datasets = list(datasets)
        if order is None:
            order = _build_blend_order(self.datasets, weights, size)
        elif weights is not None or size is not None:
            raise ConfigError("give an order, or weights and a size: one of the two")
        options = [getattr(dataset, "options", None) for dataset in self.datasets]
        _check_forms(self.datasets, options)
        self.order = order
        self._has_one_view = options[0] is not None and options.count(options[0]) == len(options)

    @property
    def weights(self) -> list[float]:
        """The normalised weights."""
        return self.order.weights

    @property
    def dataset_index(self) -> NDArray[np.int16]:
        """Number of the dataset that each sample comes from: int16 [size]."""
        return self.order.indices.dataset_index

    @property
    def dataset_sample_index(self) -> NDArray[np.int64]:
        """Number of each sample in its dataset: int64 [size]."""
        return self.order.indices.dataset_sample_index

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, sample_number: SupportsIndex) -> Batch:
        """One sample; see `GPTDataset`."""
        return _sample(self, sample_number)

    @cached_property
    def file_dtype(self) -> np.dtype[Any]:
        """The dtype of the token files.

        Raises:
            ConfigError: Token files of several dtypes.
        """
        dtypes = [getattr(dataset, "file_dtype", None) for dataset in self.datasets]
        names = {str(dtype): number for number, dtype in enumerate(dtypes) if dtype is not None}
        if len(names) > 1:
            some = ", ".join(f"{_name(self.datasets[n])} {dtype}" for dtype, n in names.items())
            raise ConfigError(
                f"the token files of the blend have several dtypes ({some}), so that there is no "
                "token_dtype 'file': use 'int32' or 'int64'"
            )
        return np.dtype(next(iter(names), "int64"))

    def batch(self, sample_numbers: ArrayLike, form: BatchForm | None = None) -> Batch:
        """The samples of these numbers; see `GPTDataset.batch`.

        Raises:
            ConfigError: Also a field that one of the datasets does not have, or the dtype of the
                token file, if there are several.
        """
        check_form(form)
        if form is not None and form.token_dtype == "file":
            _ = self.file_dtype
        draws = self._draws(sample_numbers)
        try:
            return self._batch(draws, form)
        except (ValueError, OSError) as error:
            part = None if form is None else form_of_datasets(form)
            raise _error_of_draw(error, draws, partial(batch_of_form, form=part)) from None

    def _batch(self, draws: _Draws, form: BatchForm | None) -> Batch:
        numbers, dataset_numbers, datasets, places, in_dataset = draws
        sources = self._core_sources(datasets, "batch")
        if sources and self._has_one_view:
            return gather(
                sources,
                places,
                in_dataset,
                form,
                sample_numbers=numbers,
                dataset_numbers=dataset_numbers,
            )
        form_of_each = None if form is None else form_of_datasets(form)
        batches = []
        for place, dataset in enumerate(datasets):
            rows = np.flatnonzero(places == place)
            batch = batch_of_form(dataset, in_dataset[rows], form_of_each)
            batches.append(DatasetBatch(_name(dataset), rows, batch))
        if form is None:
            return merge_rows(batches, len(numbers))
        return merge_batches(form, batches, numbers, dataset_numbers)

    def texts(self, sample_numbers: ArrayLike) -> Texts:
        """The tokens of the samples of these numbers; see `GPTDataset.texts`."""
        draws = self._draws(sample_numbers)
        try:
            return self._texts(draws)
        except (ValueError, OSError) as error:
            raise _error_of_draw(error, draws, _texts_of_one) from None

    def _texts(self, draws: _Draws) -> Texts:
        numbers, _, datasets, places, in_dataset = draws
        if sources := self._core_sources(datasets, "texts"):
            return gather_texts(sources, places, in_dataset)
        texts: list[NDArray[np.int64]] = [np.empty(0, np.int64)] * len(numbers)
        for place, dataset in enumerate(datasets):
            rows = np.flatnonzero(places == place)
            tokens, ends = _texts_of_one(dataset, in_dataset[rows])
            bounds = pairwise([0, *ends.tolist()])
            for row, (start, end) in zip(rows.tolist(), bounds, strict=True):
                texts[row] = tokens[start:end]
        ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
        return np.concatenate([np.empty(0, np.int64), *texts]), ends

    @property
    def is_remote(self) -> bool:
        """Whether one of the datasets is remote; see `SampleSource.is_remote`."""
        return any(getattr(dataset, "is_remote", False) for dataset in self.datasets)

    def prefetch(self, sample_numbers: ArrayLike) -> None:
        """Tells the storage that these samples are read soon; see `GPTDataset.prefetch`."""
        _, _, datasets, places, in_dataset = self._draws(sample_numbers)
        for place, dataset in enumerate(datasets):
            prefetch = getattr(dataset, "prefetch", None)
            if prefetch is not None:
                prefetch(in_dataset[places == place])

    def _draws(self, sample_numbers: ArrayLike) -> _Draws:
        numbers = _check_numbers(sample_numbers, len(self))
        dataset_numbers, in_dataset = self.order.draws(numbers)
        # A dict takes a tenth of the time of np.unique for a micro batch.
        used = sorted(set(of_sample := dataset_numbers.tolist()))
        if used and not 0 <= used[0] <= used[-1] < len(self.datasets):
            raise DataError(
                f"the dataset index has entries from {used[0]} to {used[-1]}; there are "
                f"{len(self.datasets)} datasets. It is damaged: build it again"
            )
        place_of = {number: place for place, number in enumerate(used)}
        return _Draws(
            numbers,
            dataset_numbers,
            [self.datasets[number] for number in used] or self.datasets[:1],
            np.array([place_of[number] for number in of_sample], np.int64),
            in_dataset,
        )

    @staticmethod
    def _core_sources(datasets: Sequence[Dataset], method: str) -> list[SampleSource] | None:
        """The datasets' sources, if the core can read all of them in place of this method."""
        own = getattr(GPTDataset, method)

        def source_of(dataset: Any) -> SampleSource | None:
            kind, names = type(dataset), getattr(dataset, "__dict__", {})
            # A derived class, or a method of the object, may change what ours returns.
            is_ours = isinstance(dataset, GPTDataset)
            if method in names or (is_ours and getattr(kind, method) is not own):
                return None
            # A wrapper that hands on all names has the source of the dataset in it.
            has_source = is_ours or hasattr(kind, "source") or "source" in names
            return dataset.source if has_source else None

        sources = [source_of(dataset) for dataset in datasets]
        core_orders = [source and source.core_order for source in sources]
        return None if None in core_orders else sources  # type: ignore[return-value]

    def fingerprint(self) -> dict[str, Any]:
        """See `Dataset.fingerprint`."""
        return {
            **self.order.fingerprint(),
            "datasets": [dataset.fingerprint() for dataset in self.datasets],
        }


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
    indices = build_blend_indices([_name(d) for d in datasets], lengths, weights, size)
    weights = normalize(lengths if weights is None else weights)
    return BlendOrder(weights, len(indices.dataset_index), Deferred.of(indices))


def _name(dataset: Dataset) -> str:
    return str(getattr(dataset, "prefix", type(dataset).__name__))


def _check_forms(datasets: Sequence[Dataset], options: Sequence[Any]) -> None:
    """Checks that all samples have the same arrays; datasets that share their options do."""
    first = _form(datasets[0])
    for number, dataset in enumerate(datasets):
        if options[number] is not None and options[number] is options[0]:
            continue
        form = _form(dataset)
        if form != first:
            raise ConfigError(
                f"dataset {number} ({_name(dataset)}) has samples of {form}, dataset 0 of {first}: "
                "make them equal"
            )


def _form(dataset: Dataset) -> dict[str, str]:
    """The arrays of a sample: names, dtypes and shapes. A GPT dataset need not be opened for it."""
    if isinstance(dataset, GPTDataset):
        shape = [dataset.options.sequence_length]
        return {name: f"{'float32' if name == 'loss_mask' else 'int64'} {shape}" for name in FIELDS}
    if isinstance(dataset, BlendedDataset):
        return _form(dataset.datasets[0])
    batch = dataset.batch(np.empty(0, np.int64))
    return {name: f"{array.dtype} {list(array.shape[1:])}" for name, array in batch.items()}


def batch_of_form(dataset: Dataset, numbers: NDArray[np.int64], form: BatchForm | None) -> Batch:
    """A batch of a form, of a dataset that need not know forms."""
    if form is None:
        return dataset.batch(numbers)
    if getattr(dataset, "takes_form", False):
        batch: Batch = dataset.batch(numbers, form)  # type: ignore[call-arg]
        return batch
    return select_fields(dataset.batch(numbers), form, _name(dataset))


def _texts_of_one(dataset: Dataset, numbers: NDArray[np.int64]) -> Texts:
    read = getattr(dataset, "texts", None)
    if read is None:
        raise ConfigError(
            f"{_name(dataset)} has no method `texts`, which returns the tokens of samples: leave "
            "this dataset out of the blend, or leave out what needs the tokens"
        )
    texts: Texts = read(numbers)
    return texts


# ---- errors of a batch ----


def _error_of_sample(
    error: Exception,
    prefix: str,
    numbers: NDArray[np.int64],
    read: Callable[[NDArray[np.int64]], object],
) -> Exception:
    """The error of the first sample that cannot be read, with its place."""
    if isinstance(error, ConfigError):  # of the call, not of a sample
        return error
    for number in numbers.tolist():
        try:
            read(np.array([number]))
        except (ValueError, OSError) as its_error:
            return _at(f"{prefix}, sample {number}", its_error)
    return _at(f"{prefix}, samples {shown(numbers.tolist())}", error)


def _error_of_draw(
    error: Exception, draws: _Draws, read: Callable[[Dataset, NDArray[np.int64]], object]
) -> Exception:
    """The same for a blend, whose datasets name their own samples."""
    if isinstance(error, ConfigError):
        return error
    numbers, _, datasets, places, in_dataset = draws
    for row, number in enumerate(numbers.tolist()):
        try:
            read(datasets[int(places[row])], in_dataset[row : row + 1])
        except (ValueError, OSError) as its_error:
            return _at(f"sample {number} of the blend", its_error)
    return _at(f"samples {shown(numbers.tolist())} of the blend", error)


def _at(place: str, error: Exception) -> Exception:
    if isinstance(error, OSError):
        return OSError(error.errno, f"{place}: {error.strerror or error}")
    if isinstance(error, MillraceError):
        return type(error)(f"{place}: {error}")
    return DataError(f"{place}: an index points outside its data: {error}. Write it again")


def _check_numbers(sample_numbers: ArrayLike, limit: int) -> NDArray[np.int64]:
    numbers = whole_numbers("sample numbers", sample_numbers)
    # Python finds the ends of a short list in a fifth of NumPy's time.
    ends = numbers.tolist() if numbers.size <= 64 else [numbers.min(), numbers.max()]
    if ends and not 0 <= min(ends) <= max(ends) < limit:
        raise IndexError(
            f"sample numbers from {numbers.min()} to {numbers.max()} were asked for; "
            f"the dataset has 0 to {limit - 1}"
        )
    return numbers


def _sample(dataset: Dataset, sample_number: SupportsIndex) -> Batch:
    number = whole("the sample number", sample_number)
    number += len(dataset) if number < 0 else 0
    if not 0 <= number < len(dataset):
        raise IndexError(
            f"there is no sample {shown(number)}; the dataset has 0 to {len(dataset) - 1}"
        )
    return {name: array[0] for name, array in dataset.batch([number]).items()}


def _damage(error: ValueError) -> ValueError:
    if isinstance(error, MillraceError):  # has its place and remedy
        return error
    return DataError(f"an index points outside its data: {error}. Write it again")
