"""Datasets: sample numbers in, tokens, labels, loss masks and position ids out."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from millrace import _native
from millrace.cache.arrays import ArraySet
from millrace.checks import MAX_INT64, reals, shown, whole, whole_numbers
from millrace.errors import ConfigError, DataError, MillraceError
from millrace.options import SampleOptions
from millrace.order import (
    GPTIndices,
    GPTPlan,
    blend,
    blend_exhaustively,
    build_gpt_indices,
    count_draws,
    normalize,
    plan_gpt,
)
from millrace.order.gpt import check_range, check_seed
from millrace.store import IndexedDataset
from millrace.store.bytes import MMapReader

_MAX_INDEX_BYTES = 1 << 46  # 64 TiB: what a process can address is 128

Batch = dict[str, NDArray[Any]]


def plan_dataset(
    dataset: IndexedDataset,
    sequences: tuple[int, int],
    num_samples: int | None,
    options: SampleOptions,
    *,
    drop_last_partial_sequence: bool = True,
) -> GPTPlan:
    """Epochs and samples of a range of sequences of a token file.

    Raises:
        ConfigError: no tokens or too few for a sample.
        DataError: tokens that are no integers, or a damaged index.
    """
    if dataset.dtype.kind not in "iu":
        raise DataError(f"{dataset.prefix} holds {dataset.dtype}; token ids are integers")
    start, stop = check_range(sequences, len(dataset))
    if num_samples is not None:
        num_samples = whole("num_samples", num_samples, 0, MAX_INT64)
    num_tokens = int(np.sum(dataset.sequence_lengths[start:stop], dtype=np.int64))
    if num_tokens > dataset.num_tokens:
        raise DataError(
            f"{dataset.prefix}.idx: sequences {start} to {stop} have {num_tokens} tokens by "
            f"their lengths; the .bin holds {dataset.num_tokens}. The index is damaged: write "
            "the pair again"
        )
    try:
        plan = plan_gpt(
            num_tokens,
            num_samples,
            options.sequence_length,
            add_extra_token=options.add_extra_token,
            drop_last_partial_sequence=drop_last_partial_sequence,
        )
    except ConfigError as error:
        raise ConfigError(f"{dataset.prefix}, sequences {start} to {stop}: {error}") from None
    if _index_bytes((start, stop), plan) > _MAX_INDEX_BYTES:
        raise ConfigError(
            f"{dataset.prefix}, sequences {start} to {stop}: {plan.num_samples:,} samples take "
            f"{plan.num_epochs:,} epochs and {_index_bytes((start, stop), plan):,} bytes of "
            f"indices; {_MAX_INDEX_BYTES:,} is the limit. Ask for fewer samples, or give more data"
        )
    return plan


def build_indices(
    dataset: IndexedDataset, sequences: tuple[int, int], plan: GPTPlan, seed: int
) -> GPTIndices:
    """The three indices of a range of sequences of a token file.

    Raises:
        ConfigError: a seed or range outside its limits.
        DataError: a damaged index.
        MemoryError: they do not fit; the message gives their size.
    """
    try:
        return build_gpt_indices(dataset.sequence_lengths, sequences, plan, seed)
    except ValueError as error:
        kind = ConfigError if isinstance(error, ConfigError) else DataError
        raise kind(f"{dataset.prefix}: {error}") from None
    except MemoryError:
        raise MemoryError(
            f"{dataset.prefix}: the indices of {plan.num_samples:,} samples take "
            f"{_index_bytes(sequences, plan):,} bytes, and there is no memory for them. Ask for "
            "fewer samples, or build with fewer threads"
        ) from None


def _index_bytes(sequences: tuple[int, int], plan: GPTPlan) -> int:
    """What the three indices take, in their smallest dtypes."""
    start, stop = sequences
    return 4 * (stop - start) * plan.num_epochs + (8 + 4) * plan.num_samples + 8


class GPTDataset:
    """Samples of fixed length from one indexed dataset, in Megatron-LM's order.

    Args:
        dataset: the token file.
        sequence_length: tokens to train on in a sample, 1 to 2**31 - 1.
        seed: of the order, 0 to 2**32 - 1.
        num_samples: to have at least; the sequences are repeated for as many epochs as that takes.
            None: what one epoch gives.
        sequences: (start, stop), the range of sequences to draw from (see `split_ranges`); None:
            all.
        eod_token: the end-of-document token; the next two options need it.
        reset_position_ids: position ids start again after each EOD.
        eod_mask_loss: the loss mask is 0 where the input is EOD.
        pad_token: the padding token, which is never trained on: where a label equals it, the
            loss mask is 0. None where the token file holds no padding: every token is trained on,
            whatever its number.
        drop_last_partial_sequence: leave out a last sample that the tokens do not fill.
        add_extra_token: draw one token more in each sample, the last label. Without it the last
            label is missing and masked.

    Raises:
        ConfigError: no tokens or too few for a sample, or an option outside its limits.
        DataError: tokens that are no integers, or a damaged index.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        *,
        sequence_length: int,
        seed: int,
        num_samples: int | None = None,
        sequences: tuple[int, int] | None = None,
        eod_token: int | None = None,
        reset_position_ids: bool = False,
        eod_mask_loss: bool = False,
        pad_token: int | None = None,
        drop_last_partial_sequence: bool = True,
        add_extra_token: bool = True,
    ) -> None:
        options = SampleOptions(
            sequence_length=sequence_length,
            add_extra_token=add_extra_token,
            eod_token=eod_token,
            pad_token=pad_token,
            reset_position_ids=reset_position_ids,
            eod_mask_loss=eod_mask_loss,
        )
        seed = check_seed(seed)
        sequences = check_range((0, len(dataset)) if sequences is None else sequences, len(dataset))
        plan = plan_dataset(
            dataset,
            sequences,
            num_samples,
            options,
            drop_last_partial_sequence=drop_last_partial_sequence,
        )
        self._set(dataset.prefix, sequences, seed, plan, options)
        self.__dict__["dataset"] = dataset
        self.__dict__["indices"] = build_indices(dataset, sequences, plan, seed)

    @classmethod
    def stored(
        cls,
        prefix: str,
        sequences: tuple[int, int],
        seed: int,
        plan: GPTPlan,
        options: SampleOptions,
        *,
        open_dataset: Callable[[], IndexedDataset],
        load_indices: Callable[[], GPTIndices],
        content: str | None = None,
        lengths: str | None = None,
        cached: ArraySet | None = None,
    ) -> GPTDataset:
        """A dataset whose indices are there already: nothing is opened before the first sample.

        Args:
            plan: of the range of sequences.
            open_dataset, load_indices: called at the first sample; they must be picklable where
                the dataset is to be sent to other processes.
            content: the token file's fingerprint, if it is known.
            lengths: the checksum of its sequence lengths, if it is known.
            cached: the set that holds the indices, if they are mapped from one.
        """
        self = cls.__new__(cls)
        self._set(prefix, sequences, seed, plan, options)
        self._open_dataset, self._load_indices = open_dataset, load_indices
        self._content, self._lengths = content, lengths
        self._cached = cached
        return self

    def _set(
        self,
        prefix: str,
        sequences: tuple[int, int],
        seed: int,
        plan: GPTPlan,
        options: SampleOptions,
    ) -> None:
        self.prefix = prefix
        self.sequences = sequences
        self.seed = seed
        self.plan = plan
        self.sequence_length = plan.sequence_length
        self.options = options
        self._watch = SizeWatch()
        self._cached: ArraySet | None = None
        self._open_dataset: Callable[[], IndexedDataset] | None = None
        self._load_indices: Callable[[], GPTIndices] | None = None
        self._content: str | None = None
        self._lengths: str | None = None

    @cached_property
    def dataset(self) -> IndexedDataset:
        """The token file."""
        assert self._open_dataset is not None
        return self._open_dataset()

    @property
    def is_open(self) -> bool:
        """Whether the token file was opened, as it is for the first sample."""
        return "dataset" in self.__dict__

    @cached_property
    def indices(self) -> GPTIndices:
        """The document index, sample index and shuffle index."""
        assert self._load_indices is not None
        return self._load_indices()

    @cached_property
    def _is_mapped(self) -> bool:
        return isinstance(self.dataset.reader, MMapReader)

    @cached_property
    def _token_source(self) -> _native.TokenSource:
        return _native.token_source(
            self.dataset.tokens if self._is_mapped else np.empty(0, self.dataset.dtype),
            self.dataset.sequence_pointers,
            self.dataset.sequence_lengths,
            self.dataset.reader.size,
        )

    @cached_property
    def _order(self) -> _native.GPTOrder:
        return _native.gpt_order(
            self.dataset.sequence_lengths,
            self.indices.document_index,
            self.indices.sample_index,
            self.indices.shuffle_index,
            sequence_length=self.sequence_length,
            add_extra_token=self.options.add_extra_token,
        )

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state.pop("_token_source", None)  # made again where they are needed
        state.pop("_order", None)
        if self._open_dataset is not None:
            state.pop("dataset", None)
        if self._load_indices is not None:
            state.pop("indices", None)
        return state

    def __len__(self) -> int:
        return self.plan.num_samples

    def __getitem__(self, sample_number: SupportsIndex) -> Batch:
        """One sample: the arrays of `batch` without their first dimension."""
        return _one(self, sample_number)

    def batch(self, sample_numbers: ArrayLike) -> Batch:
        """The samples of these numbers, in one call of the core.

        Args:
            sample_numbers: integers [batch], each in [0, len); a list, or an array of any integer
                dtype, byte order and stride.

        Returns:
            `tokens` int64, `labels` int64, `loss_mask` float32 and `position_ids` int64, each
            [batch, sequence_length].

        Raises:
            ConfigError: sample numbers that are no integers, or have another shape.
            IndexError: no such sample.
            DataError: an index entry that points outside the token file.
        """
        numbers = _check_numbers(sample_numbers, len(self))
        try:
            self._watch.look(self._files)
            if not self._is_mapped:
                return _batch(self._read(numbers))
            zeros = np.zeros(len(numbers), np.int64)
            return _batch(
                _native.gather_samples(
                    (self._token_source,), (self._order,), zeros, numbers, self.options
                )
            )
        except ValueError as error:
            raise _damaged(error) from None

    def _files(self) -> tuple[Watched, ...]:
        return (self.dataset,) if self._cached is None else (self.dataset, self._cached)

    def _read(self, numbers: NDArray[np.int64]) -> Any:
        """The samples' arrays where the token file is not mapped: find, read, fill."""
        *spans, bounds = _native.spans(self._order, numbers)
        pieces = _native.locate_spans(self._token_source, *spans)
        tokens = self.dataset.reader.gather(*pieces).view(self.dataset.dtype)
        ends = np.concatenate(([0], np.cumsum(spans[2])))[bounds[1:]]
        return _native.fill_rows(tokens, ends, self.options)

    def fingerprint(self) -> dict[str, Any]:
        """What decides the samples and their order, for comparison with a saved state."""
        if self._lengths is None:
            self._lengths = self.dataset.lengths_checksum
        return {
            "kind": "gpt",
            "content": self._content or self.dataset.fingerprint,
            "lengths": self._lengths,
            "sequences": list(self.sequences),
            "num_samples": len(self),
            "num_epochs": self.plan.num_epochs,
            "samples_before_final_epoch": self.plan.num_samples_before_final_epoch,
            "seed": self.seed,
            **dataclasses.asdict(self.options),
        }


class BlendedDataset:
    """Samples of several datasets, mixed by weight or until all are used up.

    Args:
        datasets: of one sequence length and the same options.
        weights: one for each dataset; None: each dataset's length. They are normalised here;
            Megatron-LM's builder has normalised them once before, which may change their last bit:
            pass `normalize(weights)` for its order.
        size: number of samples; None (without weights): all of every dataset's.

    Attributes:
        dataset_index: int16 [size], the number of the dataset that each sample comes from.
        dataset_sample_index: int64 [size], the sample's number in that dataset.

    Raises:
        ConfigError: weights that are not positive, or too few samples in a dataset.
    """

    def __init__(
        self,
        datasets: Sequence[GPTDataset],
        weights: Sequence[float] | None = None,
        size: int | None = None,
    ) -> None:
        if len(datasets) == 0:
            raise ConfigError("a blend needs at least one dataset")
        size = None if size is None else whole("the blend's size", size, 0)
        if weights is not None:
            weights = reals("the weights", weights)
        if weights is not None and len(weights) != len(datasets):
            raise ConfigError(f"there are {len(weights)} weights for {len(datasets)} datasets")
        if weights is not None and size is None:
            raise ConfigError(
                "a blend with weights needs a size; without weights it may be left out"
            )
        for number, dataset in enumerate(datasets):
            if dataset.options != datasets[0].options:
                raise ConfigError(
                    f"dataset {number} ({dataset.prefix}) has the options {dataset.options}, "
                    f"dataset 0 {datasets[0].options}: make them equal"
                )
        lengths = [len(dataset) for dataset in datasets]
        shares = lengths if weights is None else weights
        arrays = blend_exhaustively(lengths) if size is None else blend(shares, size)
        check_draws([dataset.prefix for dataset in datasets], lengths, arrays[0])
        self._set(list(datasets), normalize(shares), len(arrays[0]))
        self.__dict__["_arrays"] = arrays

    @classmethod
    def stored(
        cls,
        datasets: Sequence[GPTDataset],
        weights: Sequence[float],
        size: int,
        load_arrays: Callable[[], tuple[NDArray[np.int16], NDArray[np.int64]]],
        cached: ArraySet | None = None,
    ) -> BlendedDataset:
        """A blend whose index is there already, and is loaded for the first sample.

        Args:
            weights: normalised.
            load_arrays: gives the dataset index and the dataset sample index; must be picklable
                where the blend is to be sent to other processes.
            cached: the set that holds them, if they are mapped from one.
        """
        self = cls.__new__(cls)
        self._set(list(datasets), list(weights), size)
        self._load_arrays = load_arrays
        self._cached = cached
        return self

    def _set(self, datasets: list[GPTDataset], weights: list[float], size: int) -> None:
        self.datasets = datasets
        self.weights = weights
        self._size = size
        self._watch = SizeWatch()
        self._cached: ArraySet | None = None
        self._load_arrays: Callable[[], tuple[NDArray[np.int16], NDArray[np.int64]]] | None = None

    @cached_property
    def _arrays(self) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        assert self._load_arrays is not None
        return self._load_arrays()

    @property
    def dataset_index(self) -> NDArray[np.int16]:
        return self._arrays[0]

    @property
    def dataset_sample_index(self) -> NDArray[np.int64]:
        return self._arrays[1]

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if self._load_arrays is not None:
            state.pop("_arrays", None)
        return state

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, sample_number: SupportsIndex) -> Batch:
        """One sample: the arrays of `batch` without their first dimension."""
        return _one(self, sample_number)

    def batch(self, sample_numbers: ArrayLike) -> Batch:
        """The samples of these numbers: as `GPTDataset.batch`, in one call of the core."""
        numbers = _check_numbers(sample_numbers, len(self))
        self._watch.look(self._files)
        if self._cached is None:  # in memory, where no bus error can be: a third of the time
            dataset_numbers, in_source = self._arrays[0][numbers], self._arrays[1][numbers]
        else:
            dataset_numbers, in_source = _native.look_up_draws(*self._arrays, numbers)
        drawn, sources = np.unique(dataset_numbers, return_inverse=True)
        if drawn.size > 0 and not 0 <= drawn[0] <= drawn[-1] < len(self.datasets):
            raise DataError(
                f"the dataset index has entries from {drawn[0]} to {drawn[-1]}; there are "
                f"{len(self.datasets)} datasets. It is damaged: build it again"
            )
        datasets = [self.datasets[number] for number in drawn.tolist()] or self.datasets[:1]
        if not all(dataset._is_mapped for dataset in datasets):
            return _batch_by_dataset(datasets, sources, in_source)
        try:
            return _batch(
                _native.gather_samples(
                    tuple(dataset._token_source for dataset in datasets),
                    tuple(dataset._order for dataset in datasets),
                    sources.astype(np.int64, copy=False),
                    in_source,
                    datasets[0].options,
                )
            )
        except ValueError as error:
            raise _damaged(error) from None

    def _files(self) -> Iterator[Watched]:
        yield from (one.dataset for one in self.datasets if one.is_open)
        if self._cached is not None:
            yield self._cached

    def fingerprint(self) -> dict[str, Any]:
        """What decides the samples and their order, for comparison with a saved state."""
        return {
            "kind": "blend",
            "size": len(self),
            "weights": self.weights,
            "datasets": [dataset.fingerprint() for dataset in self.datasets],
        }


class Watched(Protocol):
    """Files that are mapped."""

    def check_sizes(self) -> None: ...


class SizeWatch:
    """Looks now and then whether files that are mapped were cut short.

    Where a page is gone, a batch is an error anyway; a page of which a part is gone reads as zeros.
    A look takes 3 us a file, a tenth of a batch: so not at every batch, but at every step of a
    training run, which takes longer than `_PAUSE`.
    """

    _PAUSE = 0.01  # seconds between looks, at least
    _SHARE = 200  # times as long as a look itself

    def __init__(self) -> None:
        self._next = 0.0

    def look(self, files: Callable[[], Iterable[Watched]]) -> None:
        """Looks, if it is time to, at what `files` gives.

        Raises:
            DataError: a file has become shorter.
        """
        if time.monotonic() < self._next:
            return
        there = list(files())  # which opens them, the first time: no part of a look
        start = time.monotonic()
        for watched in there:
            watched.check_sizes()
        end = time.monotonic()
        self._next = end + max(self._PAUSE, self._SHARE * (end - start))

    def __reduce__(self) -> tuple[Any, ...]:
        return SizeWatch, ()  # another machine has another clock


def check_draws(
    prefixes: Sequence[str], lengths: Sequence[int], dataset_index: NDArray[np.int16]
) -> None:
    """Checks that each dataset has the samples that a blend draws from it.

    Raises:
        ConfigError: a table of those that have too few.
    """
    wanted = count_draws(dataset_index, len(lengths))
    short = [d for d, length in enumerate(lengths) if wanted[d] > length]
    if short:
        table = "\n".join(
            f"  dataset {d} ({prefixes[d]}): has {lengths[d]}, {wanted[d]} are drawn, "
            f"{wanted[d] - lengths[d]} short"
            for d in short
        )
        raise ConfigError(
            f"the blend draws more samples than {len(short)} of its datasets have:\n{table}\n"
            "Build these with a larger num_samples or surplus (see samples_per_dataset)"
        )


def _batch_by_dataset(
    datasets: Sequence[GPTDataset], sources: NDArray[Any], in_source: NDArray[np.int64]
) -> Batch:
    """Where a token file is not mapped: a batch of each dataset, put in its rows."""
    batch: Batch = {}
    for number, dataset in enumerate(datasets):
        rows = sources == number
        for name, array in dataset.batch(in_source[rows]).items():
            shape = (len(sources), *array.shape[1:])
            batch.setdefault(name, np.empty(shape, array.dtype))[rows] = array
    return batch


def _check_numbers(sample_numbers: ArrayLike, limit: int) -> NDArray[np.int64]:
    numbers = whole_numbers("sample numbers", sample_numbers)
    # As unsigned numbers negative ones are large: one look finds both.
    if numbers.size > 0 and numbers.view(np.uint64).max() >= limit:
        raise IndexError(
            f"sample numbers from {numbers.min()} to {numbers.max()} were asked for; "
            f"the dataset has 0 to {limit - 1}"
        )
    return numbers


def _one(dataset: GPTDataset | BlendedDataset, sample_number: SupportsIndex) -> Batch:
    number = whole("the sample number", sample_number)
    number += len(dataset) if number < 0 else 0
    if not 0 <= number < len(dataset):
        raise IndexError(
            f"there is no sample {shown(number)}; the dataset has 0 to {len(dataset) - 1}"
        )
    return {name: array[0] for name, array in dataset.batch([number]).items()}


def _batch(arrays: tuple[NDArray[Any], ...]) -> Batch:
    return dict(zip(("tokens", "labels", "loss_mask", "position_ids"), arrays, strict=True))


def _damaged(error: ValueError) -> ValueError:
    if isinstance(error, MillraceError):  # of what was opened for this, or of the arguments
        return error
    return DataError(f"an index points outside its data: {error}. Write it again")
