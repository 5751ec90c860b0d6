"""`GPTDataset`: samples of fixed length, in Megatron-LM's order."""

from __future__ import annotations

import logging
import operator
import os
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from millrace import _native
from millrace.cache import megatron as cache
from millrace.errors import ConfigError
from millrace.feed.samples import SampleSource
from millrace.megatron import rules
from millrace.megatron.base import MegatronDataset
from millrace.megatron.caching import CachedIndices
from millrace.megatron.config import GPTDatasetConfig
from millrace.megatron.errors import ConfigAssertionError, DataAssertionError, require
from millrace.megatron.indexed import IndexedDataset, _LocalBinReader
from millrace.megatron.utils import Split, log_on_first_rank
from millrace.options import SampleOptions
from millrace.order.gpt import GPTPlan, check_seed
from millrace.order.spans import CoreOrder

logger = logging.getLogger(__name__)

_sample_options = lru_cache(maxsize=64)(SampleOptions)  # a configuration may change

Sample = dict[str, torch.Tensor]
Arrays = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]


class GPTDataset(CachedIndices, MegatronDataset):
    """Samples of fixed length from the sequences of a token file, in shuffled order.

    Args:
        indexed_dataset, dataset_path: Token file and its path prefix.
        indexed_indices: int32 [sequences], the sequences to draw from; None (with
            `fast_cache_load`): those of the cached indices.
        num_samples, index_split, config: As in `MegatronDataset`.

    Attributes:
        document_index: int32 [epochs * sequences].
        sample_index: int32 or int64 [samples + 1, 2].
        shuffle_index: uint32 or int64 [samples]. With `defer_npy_index_mmap` all three are None
            until the first sample.

    Raises:
        ConfigAssertionError: If an option is outside its limits, or samples of a split without
            tokens are requested.
        DataAssertionError: If the token file (with `fast_cache_load`, the cache) is damaged.
        OSError: If the indices cannot be cached or, with `fast_cache_load`, are missing.
    """

    _INDICES = cache.GPT_ARRAYS

    config: GPTDatasetConfig

    def __init__(
        self,
        indexed_dataset: Any,
        dataset_path: str | None,
        indexed_indices: NDArray[np.int32],
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        super().__init__(
            indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config
        )
        self._source: SampleSource | None = None
        self._source_parts: tuple[Any, ...] = ()
        self._causal_mask: NDArray[np.bool_] | None = None
        self.document_index, self.sample_index, self.shuffle_index = (
            self._build_document_sample_shuffle_indices()
        )

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """The number of sequences: GPT datasets are split by sequence, not by document."""
        return int(low_level_dataset.sequence_lengths.shape[0])

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> IndexedDataset:  # type: ignore[override]
        """Opens the token file at a path prefix.

        Raises:
            MissingFileError, DataAssertionError: As in `IndexedDataset`.
            KeyError: If it is not in `sequences_per_dataset`.
        """
        counts = config.sequences_per_dataset
        return IndexedDataset(
            dataset_path,
            multimodal=False,
            mmap=config.mmap_bin_files,
            fast_cache_load=config.fast_cache_load,
            sequences_per_dataset=counts[dataset_path] if counts else None,
            dtype_code=config.token_dtype_code,
        )

    def __len__(self) -> int:
        """The number of samples; with `defer_npy_index_mmap`, from the plan."""
        if self.config.defer_npy_index_mmap:
            return self._plan.num_samples
        return int(self.sample_index.shape[0]) - 1

    # ---- samples ----

    def __getitem__(self, idx: Any) -> Sample:
        """A sample.

        Args:
            idx: Sample number; negative ones count from the end. None: sample 0 with a loss mask
                of zeros, to fill a batch.

        Returns:
            `tokens`, `labels` and `position_ids` int64 and `loss_mask` float32, each
            [sequence_length]. With `create_attention_mask`, also `attention_mask`, bool
            [1, sequence_length, sequence_length], True where there is no attention; without
            `reset_attention_mask` all samples share one, which must not be written to. With
            `inter_document_masking`, instead of that mask `cu_seqlens` int32
            [sequence_length + 1], where the documents start (filled up with sequence_length), and
            `max_seqlen` int32 [].

        Raises:
            IndexError: If there is no such sample.
            DataAssertionError: If an index points outside the token file.
        """
        number = 0 if idx is None else idx
        if self.shuffle_index is None:
            self._open_deferred()
        if self._is_plain():
            arrays = self._gather(number)
        else:
            text, *_ = self._query_document_sample_shuffle_indices(number)
            arrays = self._fill(np.asarray(text))
        if idx is None:
            arrays[2][:] = 0.0
        sample = self._sample(arrays)
        if self.config.inter_document_masking:
            self._add_document_bounds(sample, number)
        return sample

    def _query_document_sample_shuffle_indices(
        self, idx: Any
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """A sample's tokens with the extra one, padded if short, and their sequences.

        Subclasses that make their own tokens override this hook; without an override, one call of
        the core gathers the sample instead.

        Returns:
            int64 [sequence_length, + 1 with the extra token], and int64 [parts].
        """
        if self.shuffle_index is None:
            self._open_deferred()
        row = self.shuffle_index[idx]
        (first, start), (last, stop) = self.sample_index[row : int(row) + 2].tolist()
        extra = 1 if self.config.add_extra_token_to_sequence else 0
        sequences = self.document_index[first : last + 1]
        parts = []
        for place, sequence in enumerate(sequences, start=first):
            begin = start if place == first else 0
            length = stop + extra - begin if place == last else None
            parts.append(self.dataset.get(sequence, offset=begin, length=length))
        missing = self.config.sequence_length + extra - sum(len(part) for part in parts)
        if missing > 0:
            parts.append([self._pad_token_id] * missing)
        return np.concatenate(parts, dtype=np.int64), np.array(sequences, dtype=np.int64)

    def _is_plain(self) -> bool:
        """Whether the core can read the samples: no hook or reader was replaced."""
        dataset, reader = self.dataset, getattr(self.dataset, "bin_reader", None)
        return (
            type(self)._query_document_sample_shuffle_indices
            is GPTDataset._query_document_sample_shuffle_indices
            and isinstance(dataset, IndexedDataset)
            and type(dataset).get is IndexedDataset.get
            and isinstance(reader, _LocalBinReader)
            and type(reader).read is _LocalBinReader.read
            and reader.reader is dataset.token_file.reader
            and dataset.token_file.dtype.kind in "iu"
            and not dataset.multimodal
        )

    def _row_options(self, sequence_length: int) -> SampleOptions:
        config = self.config
        looks_for_eod = (
            config.reset_position_ids or config.reset_attention_mask or config.eod_mask_loss
        )
        pad = self._pad_token_id
        return _sample_options(
            sequence_length=sequence_length,
            add_extra_token=bool(config.add_extra_token_to_sequence),
            pad_token=None if pad is None else int(pad),
            eod_token=int(config.tokenizer.eod) if looks_for_eod else None,
            # The attention mask follows from the position ids.
            reset_position_ids=bool(config.reset_position_ids or self._masks_documents()),
            eod_mask_loss=bool(config.eod_mask_loss),
        )

    def _masks_documents(self) -> bool:
        config = self.config
        return bool(config.reset_attention_mask and config.create_attention_mask)

    def _gather(self, idx: Any) -> Arrays:
        number = operator.index(idx)
        count = len(self.shuffle_index)
        if not -count <= number < count:
            raise IndexError(f"there is no sample {number}; the dataset has 0 to {count - 1}")
        try:
            arrays = self._get_source().read(np.array([number % count]))
        except ValueError as error:
            raise DataAssertionError(
                f"{self.dataset_path}, sample {number}: an index points outside its data: {error}. "
                "Remove the cached indices, and see `millrace verify`"
            ) from None
        return tuple(array[0] for array in arrays)

    def _get_source(self) -> SampleSource:
        """The samples of the token file and the indices; a new source if any was replaced."""
        parts = (
            self._row_options(self.config.sequence_length),
            self.dataset.token_file,
            self.document_index,
            self.sample_index,
            self.shuffle_index,
        )
        if self._source is None or any(map(operator.is_not, parts, self._source_parts)):
            options, token_file, *indices = parts
            order = _native.gpt_order(
                token_file.sequence_lengths,
                *map(np.asarray, indices),
                sequence_length=options.sequence_length,
                add_extra_token=options.add_extra_token,
            )
            self._source = SampleSource(token_file, CoreOrder(order), options)
            self._source_parts = parts
        return self._source

    def _fill(self, text: NDArray[Any]) -> Arrays:
        """The arrays of a sample from its tokens."""
        tokens = text.astype(np.int64, copy=False)
        extra = bool(self.config.add_extra_token_to_sequence)
        options = self._row_options(len(tokens) - extra)
        arrays = _native.fill_rows(tokens, np.array([len(tokens)]), options)
        return tuple(array[0] for array in arrays)

    def _sample(self, arrays: Arrays) -> Sample:
        tokens, labels, loss_mask, position_ids = arrays
        sample = {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}
        if self.config.create_attention_mask and not self.config.inter_document_masking:
            sample["attention_mask"] = torch.from_numpy(self._attention_mask(position_ids))
        if self._masks_documents() and not self.config.reset_position_ids:
            position_ids = np.arange(len(tokens))
        sample["loss_mask"] = torch.from_numpy(loss_mask)
        sample["position_ids"] = torch.from_numpy(position_ids)
        return sample

    def _attention_mask(self, position_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        length = len(position_ids)
        if self._causal_mask is None or self._causal_mask.shape[-1] != length:
            self._causal_mask = rules.causal_mask(length)
        if not self._masks_documents():
            return self._causal_mask
        return rules.mask_across_documents(self._causal_mask, position_ids)

    def _add_document_bounds(self, sample: Sample, idx: Any) -> None:
        """Adds where the sample's documents start, and restarts the position ids there."""
        length = self.config.sequence_length
        ends = np.cumsum(self._part_lengths(idx))
        if len(ends) > length:  # Too many documents for the array: leave out the empty ones.
            ends = np.unique(ends)
            ends = ends[ends > 0]
        bounds = np.concatenate(([0], ends))
        lengths = np.diff(bounds)
        cu_seqlens = np.full(length + 1, length, np.int32)
        cu_seqlens[: len(bounds)] = bounds
        starts = np.repeat(bounds[:-1], lengths)
        sample["position_ids"] = torch.from_numpy(np.arange(length) - starts)
        sample["cu_seqlens"] = torch.from_numpy(cu_seqlens)
        sample["max_seqlen"] = torch.tensor(int(lengths.max()), dtype=torch.int32)

    def _part_lengths(self, idx: Any) -> NDArray[np.int64]:
        """Lengths of a sample's documents without the extra token; they sum to sequence_length."""
        row = int(self.shuffle_index[idx])
        (first, start), (last, stop) = self.sample_index[row : row + 2].tolist()
        sequences = self.document_index[first : last + 1]
        lengths: NDArray[np.int64] = self.dataset.sequence_lengths[sequences].astype(np.int64)
        lengths[-1] = stop
        lengths[0] -= start
        if self.config.add_extra_token_to_sequence and lengths[-1] == 0 and len(lengths) > 1:
            lengths = lengths[:-1]  # It gave only the extra token.
        lengths[-1] += self.config.sequence_length - lengths.sum()  # padding
        return lengths

    # ---- indices ----

    def _build_document_sample_shuffle_indices(self) -> tuple[Any, Any, Any]:
        """The three indices, loaded or built; (None, None, None) if deferred."""
        config = self.config
        if not (config.defer_npy_index_mmap or config.fast_cache_load):
            # Refuse what cannot be built before touching the cache.
            _ = self._plan
            check_seed(config.random_seed)
        document_index, sample_index, shuffle_index = self._prepare_indices(config.fast_cache_load)
        if sample_index is not None:
            message = f"> total number of samples: {sample_index.shape[0] - 1}"
            log_on_first_rank(logger, message)
        return document_index, sample_index, shuffle_index

    def _files(self) -> cache.CacheSet:
        folder = self.config.path_to_cache
        if folder is None and not self.config.mock:
            name = f"{type(self).__name__}_indices"
            folder = os.path.join(self.dataset.path_prefix, "cache", name)
        return self._cache_set(folder, self.index_split)

    def _what(self) -> str:
        return f"{type(self).__name__} {self.index_split.name} indices"

    def _check(self, arrays: cache.Arrays) -> None:
        config = self.config
        is_trusted = config.fast_cache_load and not config.defer_npy_index_mmap
        if is_trusted or self.indices is None:
            cache.check_gpt_forms(arrays)
        else:
            lengths = self.dataset.sequence_lengths
            cache.check_gpt_arrays(arrays, self._plan, len(self._get_indices()), lengths)

    def _build(self) -> cache.Arrays:
        plan, lengths = self._plan, self.dataset.sequence_lengths
        log_on_first_rank(logger, f"> total number of epochs: {plan.num_epochs}")
        require(
            lengths.dtype == np.int32, f"the sequence lengths are {lengths.dtype}; int32 is needed"
        )
        try:
            indices = rules.build_indices(
                lengths, self._get_indices(), plan, self.config.random_seed
            )
        except ConfigError as error:
            raise ConfigAssertionError(f"{self.dataset_path}: {error}") from error
        except ValueError as error:
            raise DataAssertionError(f"{self.dataset_path}: {error}; see `verify`") from error
        return cache.gpt_arrays(indices)

    @cached_property
    def _plan(self) -> GPTPlan:
        """Epochs and samples.

        Raises:
            ConfigAssertionError: If samples are requested and there are no tokens. (Megatron-LM
                would look for enough epochs for ever.)
        """
        config, split = self.config, self.index_split.name
        try:
            return rules.plan_samples(
                self._get_num_tokens_per_epoch(),
                self.num_samples,
                config.sequence_length,
                add_extra_token=bool(config.add_extra_token_to_sequence),
                drop_last_partial_sequence=bool(
                    split != Split.valid.name or config.drop_last_partial_validation_sequence
                ),
            )
        except ValueError as error:
            raise ConfigAssertionError(f"{self.dataset_path}, {split} split: {error}") from error

    def _get_indices(self) -> NDArray[np.int32]:
        if self.indices is None:
            return np.arange(len(self.dataset.sequence_lengths), dtype=np.int32)
        return self.indices

    def _get_num_tokens_per_epoch(self) -> int:
        indices, lengths = self._get_indices(), self.dataset.sequence_lengths
        run = rules.as_range(indices)
        return int(np.sum(lengths[slice(*run) if run else indices], dtype=np.int64))

    def _get_num_epochs(self, num_tokens_per_epoch: int) -> int:
        """The least number of epochs that holds the samples."""
        return self._plan.num_epochs

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_source": None, "_source_parts": (), "_causal_mask": None}
