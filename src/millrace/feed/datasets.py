"""Datasets: sample numbers in, tokens, labels, loss masks and position ids out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from millrace import _core, _native
from millrace.errors import ConfigError, DataError
from millrace.order import blend, blend_exhaustively, build_gpt_indices, normalize, plan_gpt
from millrace.store import IndexedDataset
from millrace.store.bytes import MMapReader

Batch = dict[str, NDArray[Any]]

NO_TOKEN = -1
"""A pad or EOD id that no token equals."""


class GPTDataset:
    """Samples of fixed length from one indexed dataset, in Megatron-LM's order.

    Args:
        dataset: the token file.
        sequence_length: tokens to train on in a sample.
        seed: of the order, 0 to 2**32 - 1.
        num_samples: to have at least; the sequences are repeated for as many epochs as that takes.
            None: what one epoch gives.
        sequences: (start, stop), the range of sequences to draw from (see `split_ranges`); None:
            all.
        eod_token: the end-of-document token; the next two options need it.
        reset_position_ids: position ids start again after each EOD.
        eod_mask_loss: the loss mask is 0 where the input is EOD.
        pad_token: the padding token, which is never trained on: where a label equals it, the
            loss mask is 0. None where the token file holds no padding.
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
        if (reset_position_ids or eod_mask_loss) and eod_token is None:
            raise ConfigError("reset_position_ids and eod_mask_loss look for EOD: give eod_token")
        if dataset.dtype.kind not in "iu":
            raise DataError(f"{dataset.prefix} holds {dataset.dtype}; token ids are integers")
        self.dataset = dataset
        self.sequence_length = sequence_length
        self.seed = seed
        self.sequences = (0, len(dataset)) if sequences is None else sequences
        start, stop = self.sequences
        num_tokens = int(np.sum(dataset.sequence_lengths[start:stop], dtype=np.int64))
        if num_tokens > dataset.num_tokens:
            raise DataError(
                f"{dataset.prefix}.idx: sequences {start} to {stop} have {num_tokens} tokens by "
                f"their lengths; the .bin holds {dataset.num_tokens}. The index is damaged: write "
                "the pair again"
            )
        try:
            self.plan = plan_gpt(
                num_tokens,
                num_samples,
                sequence_length,
                add_extra_token=add_extra_token,
                drop_last_partial_sequence=drop_last_partial_sequence,
            )
        except ConfigError as error:
            raise ConfigError(f"{dataset.prefix}, sequences {start} to {stop}: {error}") from None
        try:
            self.indices = build_gpt_indices(
                dataset.sequence_lengths, self.sequences, self.plan, seed
            )
        except ValueError as error:
            kind = ConfigError if isinstance(error, ConfigError) else DataError
            raise kind(f"{dataset.prefix}: {error}") from None
        self._options: dict[str, Any] = {
            "sequence_length": sequence_length,
            "add_extra_token": add_extra_token,
            "pad_token": NO_TOKEN if pad_token is None else pad_token,
            "eod_token": NO_TOKEN if eod_token is None else eod_token,
            "reset_position_ids": reset_position_ids,
            "eod_mask_loss": eod_mask_loss,
        }
        self._is_mapped = isinstance(dataset.reader, MMapReader)
        self._source = _native.sample_source(
            dataset.tokens if self._is_mapped else np.empty(0, dataset.dtype),
            dataset.sequence_pointers,
            dataset.sequence_lengths,
            self.indices.document_index,
            self.indices.sample_index,
            self.indices.shuffle_index,
            dataset.reader.size,
        )

    def __len__(self) -> int:
        return self.plan.num_samples

    def __getitem__(self, sample_number: SupportsIndex) -> Batch:
        """One sample: the arrays of `batch` without their first dimension."""
        return _one(self, sample_number)

    def batch(self, sample_numbers: ArrayLike) -> Batch:
        """The samples of these numbers, in one call of the core.

        Args:
            sample_numbers: integers [batch], each in [0, len).

        Returns:
            `tokens` int64, `labels` int64, `loss_mask` float32 and `position_ids` int64, each
            [batch, sequence_length].

        Raises:
            IndexError: no such sample.
            DataError: an index entry that points outside the token file.
        """
        numbers = _check_numbers(sample_numbers, len(self))
        try:
            if not self._is_mapped:
                return _batch(self._read(numbers))
            zeros = np.zeros(len(numbers), np.int64)
            return _batch(_native.gather_samples((self._source,), zeros, numbers, **self._options))
        except ValueError as error:
            raise _damaged(error) from None

    def _read(self, numbers: NDArray[np.int64]) -> Any:
        """The samples' arrays where the token file is not mapped: find, read, fill."""
        offsets, counts, bounds = _native.find_pieces(
            self._source, numbers, self.sequence_length, self._options["add_extra_token"]
        )
        tokens = self.dataset.reader.gather(offsets, counts).view(self.dataset.dtype)
        ends = np.concatenate(([0], np.cumsum(counts // self.dataset.dtype.itemsize)))
        return _native.fill_rows(tokens, ends[bounds[1:]].astype(np.int64), **self._options)

    def fingerprint(self) -> dict[str, Any]:
        """What decides the samples and their order, for comparison with a saved state."""
        return {
            "kind": "gpt",
            "content": self.dataset.fingerprint,
            "sequences": list(self.sequences),
            "num_samples": len(self),
            "num_epochs": self.plan.num_epochs,
            "samples_before_final_epoch": self.plan.num_samples_before_final_epoch,
            "seed": self.seed,
            **self._options,
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
        if weights is not None and len(weights) != len(datasets):
            raise ConfigError(f"there are {len(weights)} weights for {len(datasets)} datasets")
        if weights is not None and size is None:
            raise ConfigError(
                "a blend with weights needs a size; without weights it may be left out"
            )
        for number, dataset in enumerate(datasets):
            if dataset._options != datasets[0]._options:
                raise ConfigError(
                    f"dataset {number} ({dataset.dataset.prefix}) has the options "
                    f"{dataset._options}, dataset 0 {datasets[0]._options}: make them equal"
                )
        self.datasets = list(datasets)
        lengths = [len(dataset) for dataset in datasets]
        shares = lengths if weights is None else weights
        self.dataset_index, self.dataset_sample_index = (
            blend_exhaustively(lengths) if size is None else blend(shares, size)
        )
        self.weights = normalize(shares)
        self._check_sizes(lengths)
        self._sources: tuple[_core.SampleSource, ...] = tuple(d._source for d in datasets)

    def _check_sizes(self, lengths: list[int]) -> None:
        wanted = np.bincount(self.dataset_index, minlength=len(lengths)).tolist()
        short = [d for d, length in enumerate(lengths) if wanted[d] > length]
        if short:
            table = "\n".join(
                f"  dataset {d} ({self.datasets[d].dataset.prefix}): has {lengths[d]}, "
                f"{wanted[d]} are drawn, {wanted[d] - lengths[d]} short"
                for d in short
            )
            raise ConfigError(
                f"the blend draws more samples than {len(short)} of its datasets have:\n{table}\n"
                "Build these with a larger num_samples (see samples_per_dataset)"
            )

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, sample_number: SupportsIndex) -> Batch:
        """One sample: the arrays of `batch` without their first dimension."""
        return _one(self, sample_number)

    def batch(self, sample_numbers: ArrayLike) -> Batch:
        """The samples of these numbers: as `GPTDataset.batch`, in one call of the core."""
        numbers = _check_numbers(sample_numbers, len(self))
        sources = self.dataset_index[numbers].astype(np.int64)
        in_source = self.dataset_sample_index[numbers]
        if not all(self.datasets[number]._is_mapped for number in np.unique(sources)):
            return self._batch_by_dataset(sources, in_source)
        try:
            return _batch(
                _native.gather_samples(
                    self._sources, sources, in_source, **self.datasets[0]._options
                )
            )
        except ValueError as error:
            raise _damaged(error) from None

    def _batch_by_dataset(self, sources: NDArray[np.int64], in_source: NDArray[np.int64]) -> Batch:
        """Where a token file is not mapped: a batch of each dataset, put in its rows."""
        batch: Batch = {}
        for number in np.unique(sources):
            rows = sources == number
            for name, array in self.datasets[number].batch(in_source[rows]).items():
                shape = (len(sources), *array.shape[1:])
                batch.setdefault(name, np.empty(shape, array.dtype))[rows] = array
        return batch

    def fingerprint(self) -> dict[str, Any]:
        """What decides the samples and their order, for comparison with a saved state."""
        return {
            "kind": "blend",
            "size": len(self),
            "weights": self.weights,
            "datasets": [dataset.fingerprint() for dataset in self.datasets],
        }


def _check_numbers(sample_numbers: ArrayLike, limit: int) -> NDArray[np.int64]:
    numbers = np.asarray(sample_numbers)
    if numbers.ndim != 1 or (numbers.size > 0 and numbers.dtype.kind not in "iu"):
        raise ConfigError(
            f"sample_numbers have shape {numbers.shape} and dtype {numbers.dtype}; "
            "integers of shape [batch] are needed"
        )
    numbers = numbers.astype(np.int64, copy=False)
    # As unsigned numbers negative ones are large: one look finds both.
    if numbers.size > 0 and numbers.view(np.uint64).max() >= limit:
        raise IndexError(
            f"sample numbers from {numbers.min()} to {numbers.max()} were asked for; "
            f"the dataset has 0 to {limit - 1}"
        )
    return numbers


def _one(dataset: GPTDataset | BlendedDataset, sample_number: SupportsIndex) -> Batch:
    number = sample_number.__index__()
    if number < 0:
        number += len(dataset)
    return {name: array[0] for name, array in dataset.batch([number]).items()}


def _batch(arrays: tuple[NDArray[Any], ...]) -> Batch:
    return dict(zip(("tokens", "labels", "loss_mask", "position_ids"), arrays, strict=True))


def _damaged(error: ValueError) -> DataError:
    if isinstance(error, DataError):
        return error
    return DataError(f"an index points outside its data: {error}. Write it again")
