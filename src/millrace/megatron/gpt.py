"""`GPTDataset`: samples of fixed length, in Megatron-LM's order."""

from __future__ import annotations

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
from millrace.megatron import rules
from millrace.megatron.base import MegatronDataset
from millrace.megatron.caching import CachedIndices
from millrace.megatron.config import GPTDatasetConfig
from millrace.megatron.errors import ConfigAssertionError, DataAssertionError, require
from millrace.megatron.indexed import IndexedDataset, _LocalBinReader
from millrace.megatron.utils import Split, log_on_first_rank
from millrace.options import SampleOptions
from millrace.order import GPTPlan, build_gpt_indices_of, plan_gpt
from millrace.order.gpt import check_seed
from millrace.samples.fields import Batch
from millrace.samples.rows import rows
from millrace.samples.stored import StoredTokens

_sample_options = lru_cache(maxsize=64)(SampleOptions)  # a configuration may change
_causal_mask = lru_cache(maxsize=1)(rules.causal_mask)

Sample = dict[str, torch.Tensor]


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
        self._source: tuple[tuple[Any, ...], StoredTokens] | None = None
        self.document_index, self.sample_index, self.shuffle_index = (
            self._build_document_sample_shuffle_indices()
        )

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """The number of sequences: GPT datasets are split by sequence, not by document."""
        return int(low_level_dataset.sequence_lengths.shape[0])

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> IndexedDataset:  # type: ignore[override]
        """Opens the token file at a path prefix, a key of `sequences_per_dataset` if given."""
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
            tokens = np.asarray(text).astype(np.int64, copy=False)
            extra = bool(self.config.add_extra_token_to_sequence)
            arrays = rules.fill_sample(tokens, self._row_options(len(tokens) - extra))
        if idx is None:
            arrays[2][:] = 0.0
        sample = self._sample(arrays)
        if self.config.inter_document_masking:
            self._add_document_bounds(sample, number)
        return sample

    def _query_document_sample_shuffle_indices(
        self, idx: Any
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """A sample's tokens with the extra one, padded if short, and their sequences (both int64).

        Subclasses that make their own tokens override this hook; without an override, one call of
        the core gathers the sample instead.
        """
        if self.shuffle_index is None:
            self._open_deferred()
        sequences, start, stop = self._span(idx)
        extra = 1 if self.config.add_extra_token_to_sequence else 0
        parts = []
        for place, sequence in enumerate(sequences, start=1):
            begin = start if place == 1 else 0
            length = stop + extra - begin if place == len(sequences) else None
            parts.append(self.dataset.get(sequence, offset=begin, length=length))
        missing = self.config.sequence_length + extra - sum(len(part) for part in parts)
        if missing > 0:
            parts.append([self._pad_token_id] * missing)
        return np.concatenate(parts, dtype=np.int64), np.array(sequences, dtype=np.int64)

    def _span(self, idx: Any) -> tuple[NDArray[np.int32], int, int]:
        """A sample's sequences, its start in the first, and the start of the next in the last."""
        row = int(self.shuffle_index[idx])
        (first, start), (last, stop) = self.sample_index[row : row + 2].tolist()
        return self.document_index[first : last + 1], start, stop

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

    def _gather(self, idx: Any) -> tuple[Any, ...]:
        number = operator.index(idx)
        count = len(self.shuffle_index)
        if not -count <= number < count:
            raise IndexError(f"there is no sample {number}; the dataset has 0 to {count - 1}")
        try:
            batch = self._batch(np.array([number % count]))
        except ValueError as error:
            raise DataAssertionError(
                f"{self.dataset_path}, sample {number}: {error}. Remove the cached indices, and "
                "see `millrace verify`"
            ) from None
        return tuple(array[0] for array in batch.values())

    def _batch(self, numbers: NDArray[np.int64]) -> Batch:
        """Samples of the token file and the indices; of a new source if any was replaced."""
        options = self._row_options(self.config.sequence_length)
        token_file = self.dataset.token_file
        indices = self.document_index, self.sample_index, self.shuffle_index
        parts = (options, token_file, *indices)
        if self._source is None or any(map(operator.is_not, parts, self._source[0])):
            order = _native.gpt_order(
                token_file.sequence_lengths,
                *map(np.asarray, indices),
                sequence_length=options.sequence_length,
                add_extra_token=options.add_extra_token,
            )
            self._source = parts, StoredTokens(token_file, order)
        source: StoredTokens = self._source[1]
        if source.is_in_core:
            return source.gather(numbers, options)
        return rows(source.tokens(numbers), options)

    def _sample(self, arrays: tuple[Any, ...]) -> Sample:
        tokens, labels, loss_mask, position_ids = arrays
        sample = {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}
        if self.config.create_attention_mask and not self.config.inter_document_masking:
            mask = _causal_mask(len(tokens))
            if self._masks_documents():
                mask = rules.mask_across_documents(mask, position_ids)
            sample["attention_mask"] = torch.from_numpy(mask)
        if self._masks_documents() and not self.config.reset_position_ids:
            position_ids = np.arange(len(tokens))
        sample["loss_mask"] = torch.from_numpy(loss_mask)
        sample["position_ids"] = torch.from_numpy(position_ids)
        return sample

    def _add_document_bounds(self, sample: Sample, idx: Any) -> None:
        """Adds where the sample's documents start, and restarts the position ids there."""
        length = self.config.sequence_length
        sequences, start, stop = self._span(idx)
        lengths = self.dataset.sequence_lengths[sequences].astype(np.int64)
        lengths[-1] = stop
        lengths[0] -= start
        if self.config.add_extra_token_to_sequence and lengths[-1] == 0 and len(lengths) > 1:
            lengths = lengths[:-1]  # It gave only the extra token.
        lengths[-1] += length - lengths.sum()  # padding
        if len(lengths) > length:  # Too many documents for the array: leave out the empty ones.
            lengths = lengths[lengths > 0]
        bounds = np.concatenate(([0], np.cumsum(lengths)))
        cu_seqlens = np.full(length + 1, length, np.int32)
        cu_seqlens[: len(bounds)] = bounds
        starts = np.repeat(bounds[:-1], lengths)
        sample["position_ids"] = torch.from_numpy(np.arange(length) - starts)
        sample["cu_seqlens"] = torch.from_numpy(cu_seqlens)
        sample["max_seqlen"] = torch.tensor(int(lengths.max()), dtype=torch.int32)

    # ---- indices ----

    def _build_document_sample_shuffle_indices(self) -> tuple[Any, Any, Any]:
        """The three indices, loaded or built; (None, None, None) if deferred."""
        config = self.config
        if not (config.defer_npy_index_mmap or config.fast_cache_load):
            # Refuse what cannot be built before touching the cache.
            _ = self._plan
            check_seed(config.random_seed)
        folder, name = config.path_to_cache, type(self).__name__
        if folder is None and not config.mock:
            folder = os.path.join(self.dataset.path_prefix, "cache", f"{name}_indices")
        split, is_trusted = self.index_split, config.fast_cache_load
        documents, samples, shuffle = self._prepare_indices(
            folder, split, f"{name} {split.name} indices", is_trusted=is_trusted
        )
        if samples is not None:
            log_on_first_rank(f"> total number of samples: {samples.shape[0] - 1}")
        return documents, samples, shuffle

    def _check(self, arrays: cache.Arrays) -> None:
        is_trusted = self.config.fast_cache_load and not self.config.defer_npy_index_mmap
        if is_trusted or self.indices is None:
            cache.check_gpt_forms(arrays)
        else:
            lengths = self.dataset.sequence_lengths
            cache.check_gpt_arrays(arrays, self._plan, len(self.indices), lengths)

    def _build(self) -> cache.Arrays:
        plan, lengths, seed = self._plan, self.dataset.sequence_lengths, self.config.random_seed
        indices = np.arange(len(lengths)) if self.indices is None else self.indices
        log_on_first_rank(f"> total number of epochs: {plan.num_epochs}")
        require(
            lengths.dtype == np.int32, f"the sequence lengths are {lengths.dtype}; int32 is needed"
        )
        try:
            return build_gpt_indices_of(lengths, indices, plan, seed)._asdict()
        except ConfigError as error:
            raise ConfigAssertionError(f"{self.dataset_path}: {error}") from error
        except ValueError as error:
            raise DataAssertionError(f"{self.dataset_path}: {error}; see `verify`") from error

    @cached_property
    def _plan(self) -> GPTPlan:
        """Epochs and samples; no samples if one epoch suffices and holds none.

        Samples of no tokens are an error. (Megatron-LM would look for enough epochs for ever.)
        """
        config, split, num_samples = self.config, self.index_split.name, self.num_samples
        length, extra = config.sequence_length, 1 if config.add_extra_token_to_sequence else 0
        drops_partial = bool(
            split != Split.valid.name or config.drop_last_partial_validation_sequence
        )
        num_tokens = self._get_num_tokens_per_epoch()
        requested = 0 if num_samples is None else num_samples * length + extra
        is_empty = num_tokens - extra < (length if drops_partial else 1)
        if is_empty and requested <= num_tokens and length >= 1:
            return GPTPlan(
                num_tokens_per_epoch=num_tokens,
                num_epochs=1,
                num_samples=0,
                num_samples_before_final_epoch=None,
                sequence_length=length,
                add_extra_token=bool(extra),
                allow_partial=not drops_partial,
            )
        try:
            return plan_gpt(
                num_tokens,
                None if num_samples is None else max(num_samples, 0),
                length,
                add_extra_token=bool(extra),
                drop_last_partial_sequence=drops_partial,
            )
        except ValueError as error:
            raise ConfigAssertionError(f"{self.dataset_path}, {split} split: {error}") from error

    def _get_num_tokens_per_epoch(self) -> int:
        lengths = self.dataset.sequence_lengths
        return int(
            np.sum(lengths if self.indices is None else lengths[self.indices], dtype=np.int64)
        )

    def _get_num_epochs(self, num_tokens_per_epoch: int) -> int:
        """The least number of epochs that holds the samples."""
        return self._plan.num_epochs

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_source": None}


class MockGPTLowLevelDataset:
    """Sequences of random lengths: the tokens 1, 2, 3, ... and an EOD token at the end.

    Args:
        tokenizer: Tokenizer, for the size of the vocabulary and the EOD token.
    """

    seed: int = 0
    size: int = 100000
    max_sequence_length: int = 4096

    def __init__(self, tokenizer: Any) -> None:
        self.vocab_size = tokenizer.vocab_size
        self.eod_token = tokenizer.eod
        random = np.random.default_rng(seed=self.seed)
        self.sequence_lengths = random.integers(
            low=1, high=self.max_sequence_length, size=self.size, dtype=np.int32
        )

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, idx: Any) -> NDArray[np.int64]:
        """A sequence's tokens, int64 [length]."""
        tokens: NDArray[np.int64] = np.arange(1, self.sequence_lengths[idx] + 1, dtype=np.int64)
        tokens %= self.vocab_size
        tokens[-1] = self.eod_token
        return tokens

    def get(self, idx: Any, offset: int = 0, length: int | None = None) -> NDArray[np.int64]:
        """Tokens [offset, offset + length) of a sequence; without a length, all from `offset`."""
        return self[idx][offset : None if length is None else offset + length]


class MockGPTDataset(GPTDataset):
    """A GPT dataset of made-up tokens, for a configuration without a blend."""

    def __init__(
        self,
        dataset: Any,
        dataset_path: str | None,
        indices: NDArray[np.int32],
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        require(config.mock, "MockGPTDataset needs a configuration without a blend (mock is False)")
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)

    @staticmethod
    def build_low_level_dataset(  # type: ignore[override]
        dataset_path: str | None, config: GPTDatasetConfig
    ) -> MockGPTLowLevelDataset:
        """The made-up sequences; the path is not used."""
        return MockGPTLowLevelDataset(config.tokenizer)
