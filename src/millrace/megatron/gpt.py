"""`GPTDataset`: samples of fixed length, in Megatron-LM's order."""

import operator
import os
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from millrace import _native
from millrace.cache import megatron as cache
from millrace.checks import SCHEME
from millrace.deferred import cached_property
from millrace.errors import ConfigError
from millrace.megatron.base import CachedIndices, MegatronDataset, filled_bounds
from millrace.megatron.bin_readers import ObjectStorageConfig, _BinReader
from millrace.megatron.errors import ConfigAssertionError, DataAssertionError, require
from millrace.megatron.indexed import IndexedDataset
from millrace.megatron.utils import GPTDatasetConfig, Split, imported_release, log_on_first_rank
from millrace.order import GPTPlan, build_gpt_indices_of, plan_gpt
from millrace.order.gpt import check_seed
from millrace.samples.dataset import TokenDataset
from millrace.samples.fields import SampleOptions
from millrace.samples.stored import StoredTokens
from millrace.store.info import has_mask

__all__ = [
    "GPTDataset",
    "MockGPTDataset",
    "MockGPTLowLevelDataset",
    "_get_ltor_masks_and_position_ids",
]

Mask = NDArray[np.bool_]

_sample_options = lru_cache(maxsize=64)(SampleOptions)  # a configuration may change


class GPTDataset(CachedIndices, MegatronDataset):
    """Samples of fixed length from a token file, in shuffled order.

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
        DataAssertionError: If the token file, or a cache with `fast_cache_load`, is damaged.
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
        what = indexed_dataset, dataset_path, indexed_indices, num_samples
        super().__init__(*what, index_split, config)

    def __post_init__(self) -> None:
        super().__post_init__()
        path = self.dataset_path
        require(
            self.config.loss_ranges == "ignore" or path is None or not has_mask(path),
            f"{path}.info.json says which tokens are not trained on, which Megatron-LM's dataset "
            'cannot do: use millrace.GPTDataset, or give loss_ranges="ignore" to train on all',
        )
        self._rows: tuple[tuple[Any, ...], TokenDataset] | None = None
        indices = self._build_document_sample_shuffle_indices()
        self.document_index, self.sample_index, self.shuffle_index = indices

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """The number of sequences: GPT datasets are split by sequence, not by document."""
        return int(low_level_dataset.sequence_lengths.shape[0])

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> IndexedDataset:  # type: ignore[override]
        """Opens the token file at a path prefix, a key of `sequences_per_dataset` if given."""
        counts = config.sequences_per_dataset
        folder = config.object_storage_cache_path
        is_remote = folder and SCHEME.match(dataset_path)
        return IndexedDataset(
            dataset_path,
            mmap=config.mmap_bin_files,
            object_storage_config=ObjectStorageConfig(folder or "") if is_remote else None,
            fast_cache_load=config.fast_cache_load,
            sequences_per_dataset=counts[dataset_path] if counts else None,
            dtype_code=config.token_dtype_code,
        )

    def __len__(self) -> int:
        if self.config.defer_npy_index_mmap:
            return self._plan.num_samples
        return int(self.sample_index.shape[0]) - 1

    def __getitem__(self, idx: Any) -> dict[str, torch.Tensor]:
        """A sample; negative numbers count from the end, None is one with a loss mask of zeros.

        Returns:
            `tokens`, `labels` and `position_ids` int64 and `loss_mask` float32, each
            [sequence_length]. With `create_attention_mask`, also `attention_mask`, bool
            [1, sequence_length, sequence_length], True where there is no attention; without
            `reset_attention_mask` all samples share one, which must not be written to. With
            `inter_document_masking`, `cu_seqlens` int32 [sequence_length + 1], where the documents
            start (filled up with sequence_length), and `max_seqlen` int32 [] instead.

        Raises:
            IndexError: If there is no such sample.
            DataAssertionError: If an index points outside the token file.
        """
        config, number = self.config, 0 if idx is None else idx
        self._open_deferred()
        if self._is_plain():
            tokens, labels, loss_mask, position_ids = self._gather(number)
            lengths = [self._span(number)[2]] if config.inter_document_masking else []
        else:
            text, _, *lengths = self._query_document_sample_shuffle_indices(number)
            row = np.asarray(text).astype(np.int64, copy=False)
            length = len(row) - bool(config.add_extra_token_to_sequence)
            tokens, labels, loss_mask, position_ids = _fill(row, self._row_options(length))
        if idx is None:
            loss_mask[:] = 0.0
        sample = {"tokens": tokens, "labels": labels}
        if config.create_attention_mask and not config.inter_document_masking:
            sample["attention_mask"] = _attention_mask(position_ids, config.reset_attention_mask)
            if not config.reset_position_ids:
                position_ids = np.arange(len(tokens))
        sample |= {"loss_mask": loss_mask, "position_ids": position_ids}
        if config.inter_document_masking:
            sample |= self._document_bounds(*lengths)
        return {name: torch.from_numpy(array) for name, array in sample.items()}

    def _query_document_sample_shuffle_indices(self, idx: Any) -> tuple[Any, ...]:
        """A sample's tokens with the extra one, padded if short, and their sequences (both int64).

        With `inter_document_masking`, or if `megatron.core` 0.19 is imported, also a list of the
        tokens of each sequence, without padding. A hook for subclasses that make their own tokens;
        else the core gathers the sample.
        """
        self._open_deferred()
        sequences, start, lengths = self._span(idx)
        parts = [
            self.dataset.get(sequence, offset=0 if place else start, length=length)
            for place, (sequence, length) in enumerate(zip(sequences, lengths, strict=True))
        ]
        row_length = self.config.sequence_length + bool(self.config.add_extra_token_to_sequence)
        missing = row_length - sum(lengths)
        if missing > 0:
            parts.append([self._pad_token_id] * missing)
        both = np.concatenate(parts, dtype=np.int64), np.array(sequences, dtype=np.int64)
        has_lengths = self.config.inter_document_masking or imported_release() == "0.19"
        return (*both, lengths) if has_lengths else both

    def _span(self, idx: Any) -> tuple[NDArray[np.int32], int, list[int]]:
        """A sample's sequences, its start in the first, and its tokens of each: with the extra one
        and without padding."""
        row = int(self.shuffle_index[idx])
        (first, start), (last, stop) = self.sample_index[row : row + 2].tolist()
        sequences = self.document_index[first : last + 1]
        lengths = self.dataset.sequence_lengths[sequences].tolist()
        lengths[-1] = stop + bool(self.config.add_extra_token_to_sequence)
        lengths[0] -= start
        return sequences, start, lengths

    def _is_plain(self) -> bool:
        """Whether the core can read samples: no hook or reader was replaced."""
        dataset, reader = self.dataset, getattr(self.dataset, "bin_reader", None)
        return (
            type(self)._query_document_sample_shuffle_indices
            is GPTDataset._query_document_sample_shuffle_indices
            and isinstance(dataset, IndexedDataset)
            and type(dataset).get is IndexedDataset.get
            and isinstance(reader, _BinReader)
            and type(reader).read is _BinReader.read
            and reader.reader is dataset.token_file.reader
            and dataset.token_file.dtype.kind in "iu"
            and not dataset.multimodal
        )

    def _row_options(self, sequence_length: int) -> SampleOptions:
        config, pad = self.config, self._pad_token_id
        resets = config.reset_position_ids or config.reset_attention_mask
        return _sample_options(
            sequence_length=sequence_length,
            add_extra_token=bool(config.add_extra_token_to_sequence),
            pad_token=None if pad is None else int(pad),
            eod_token=int(config.tokenizer.eod) if resets or config.eod_mask_loss else None,
            # The attention mask follows from the position ids.
            reset_position_ids=bool(
                config.reset_position_ids
                or (config.reset_attention_mask and config.create_attention_mask)
            ),
            eod_mask_loss=bool(config.eod_mask_loss),
        )

    def _gather(self, idx: Any) -> tuple[Any, ...]:
        """Tokens, labels, loss mask and position ids, of new rows if a part was replaced."""
        number, count = operator.index(idx), len(self.shuffle_index)
        if not -count <= number < count:
            raise IndexError(f"there is no sample {number}; the dataset has 0 to {count - 1}")
        options = self._row_options(self.config.sequence_length)
        token_file = self.dataset.token_file
        indices = self.document_index, self.sample_index, self.shuffle_index
        parts = (options, token_file, *indices)
        try:
            if self._rows is None or any(map(operator.is_not, parts, self._rows[0])):
                order = _native.gpt_order(
                    token_file.sequence_lengths,
                    *map(np.asarray, indices),
                    sequence_length=options.sequence_length,
                    add_extra_token=options.add_extra_token,
                )
                self._rows = parts, TokenDataset(StoredTokens(token_file, order), options)
            batch = self._rows[1]._batch(np.array([number % count]), None)
            return tuple(array[0] for array in batch.values())
        except ValueError as error:
            raise DataAssertionError(
                f"{self.dataset_path}, sample {number}: {error}. Remove the cached indices, and "
                "see `millrace verify`"
            ) from None

    def _document_bounds(self, document_lengths: Any = (-1,)) -> dict[str, NDArray[Any]]:
        length, lengths = self.config.sequence_length, np.array(document_lengths, np.int64)
        if self.config.add_extra_token_to_sequence:
            lengths[-1] -= 1
            if lengths[-1] == 0 and len(lengths) > 1:
                lengths = lengths[:-1]  # It gave only the extra token.
        require(
            lengths.min() >= 0 and lengths.sum() <= length,
            f"inter_document_masking needs the tokens of each document in a sample, with the extra "
            f"one and without padding, as the third value of {type(self).__name__}."
            f"_query_document_sample_shuffle_indices; it is missing, or does not fit: {lengths}",
        )
        lengths[-1] += length - lengths.sum()  # padding
        bounds = np.concatenate(([0], np.cumsum(lengths)))
        position_ids = np.arange(length) - np.repeat(bounds[:-1], lengths)
        return {"position_ids": position_ids, **filled_bounds(bounds, length + 1)}

    def _build_document_sample_shuffle_indices(self) -> tuple[Any, Any, Any]:
        """The three indices, loaded or built; (None, None, None) if deferred."""
        config = self.config
        if not (config.defer_npy_index_mmap or config.fast_cache_load):
            # Raise errors before touching the cache.
            _ = self._plan
            check_seed(config.random_seed)
        folder, name = config.path_to_cache, type(self).__name__
        if folder is None and not config.mock:
            # Of a prefix in a bucket a local folder, ./s3:, as for Megatron-LM.
            place = os.path.join(os.getcwd(), self.dataset.path_prefix)
            folder = os.path.join(place, "cache", f"{name}_indices")
        description = f"{name} {self.index_split.name} indices"
        documents, samples, shuffle = self._prepare_indices(
            folder, self.index_split, description, is_trusted=config.fast_cache_load
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
        try:
            return build_gpt_indices_of(lengths, indices, plan, seed)._asdict()
        except ConfigError as error:
            raise ConfigAssertionError(f"{self.dataset_path}: {error}") from error
        except ValueError as error:
            raise DataAssertionError(f"{self.dataset_path}: {error}; see `verify`") from error

    @cached_property
    def _plan(self) -> GPTPlan:
        """Epochs and samples, a negative number as 0; no samples if one epoch holds none."""
        config, split, num_samples = self.config, self.index_split.name, self.num_samples
        length, has_extra = config.sequence_length, bool(config.add_extra_token_to_sequence)
        keeps_partial = split == "valid" and not config.drop_last_partial_validation_sequence
        num_tokens = self._get_num_tokens_per_epoch()
        requested = 0 if num_samples is None else num_samples * length + has_extra
        rules = {"add_extra_token": has_extra, "drop_last_partial_sequence": not keeps_partial}
        is_empty = num_tokens - has_extra < (1 if keeps_partial else length)
        try:
            if is_empty and requested <= num_tokens and length >= 1:
                one_sample = plan_gpt(length + has_extra, None, length, **rules)
                return replace(one_sample, num_tokens_per_epoch=num_tokens, num_samples=0)
            return plan_gpt(num_tokens, num_samples and max(num_samples, 0), length, **rules)
        except ValueError as error:
            raise ConfigAssertionError(f"{self.dataset_path}, {split} split: {error}") from error

    def _get_num_tokens_per_epoch(self) -> int:
        lengths = self.dataset.sequence_lengths
        used = lengths if self.indices is None else lengths[self.indices]
        return int(np.sum(used, dtype=np.int64))

    def _get_num_epochs(self, num_tokens_per_epoch: int) -> int:
        return self._plan.num_epochs

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_rows": None}


class MockGPTLowLevelDataset:
    """Sequences of random lengths: the tokens 1, 2, 3, ... and an EOD token at the end."""

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
        tokens: NDArray[np.int64] = np.arange(1, self.sequence_lengths[idx] + 1, dtype=np.int64)
        tokens %= self.vocab_size
        tokens[-1] = self.eod_token
        return tokens

    def get(self, idx: Any, offset: int = 0, length: int | None = None) -> NDArray[np.int64]:
        """Tokens [offset, offset + length) of a sequence; without a length, all from `offset`."""
        return self[idx][offset : None if length is None else offset + length]


class MockGPTDataset(GPTDataset):
    """A GPT dataset of mock tokens, for a configuration without a blend."""

    __init__ = MegatronDataset.__init__

    def __post_init__(self) -> None:
        require(self.config.mock, "mock is False: MockGPTDataset needs a config without a blend")
        super().__post_init__()

    @staticmethod
    def build_low_level_dataset(  # type: ignore[override]
        dataset_path: str | None, config: GPTDatasetConfig
    ) -> MockGPTLowLevelDataset:
        return MockGPTLowLevelDataset(config.tokenizer)


def _get_ltor_masks_and_position_ids(
    data: torch.Tensor,
    eod_token: int,
    reset_position_ids: bool,
    reset_attention_mask: bool,
    eod_mask_loss: bool,
    create_attention_mask: bool,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """The attention mask (or None), loss mask and position ids."""
    tokens = np.ascontiguousarray(data.numpy(), np.int64)
    options = SampleOptions(
        sequence_length=len(tokens),
        add_extra_token=False,
        eod_token=eod_token,
        reset_position_ids=bool(reset_position_ids or reset_attention_mask),
        eod_mask_loss=bool(eod_mask_loss),
    )
    _, _, loss_mask, position_ids = _fill(tokens, options)
    loss_mask[-1] = 1.0 - (bool(eod_mask_loss) and tokens[-1] == eod_token)
    mask = None
    if create_attention_mask:
        mask = torch.from_numpy(_attention_mask(position_ids, reset_attention_mask).copy())
    if not reset_position_ids:
        position_ids = np.arange(len(tokens))
    return mask, torch.from_numpy(loss_mask), torch.from_numpy(position_ids)


def _fill(tokens: NDArray[Any], options: SampleOptions) -> tuple[Any, ...]:
    """Tokens, labels, loss mask and position ids of one sample."""
    return tuple(a[0] for a in _native.fill_rows(tokens, np.array([len(tokens)]), options))


# NumPy makes the masks: torch would use threads, and hang in a fork of a process that used them.


@lru_cache(maxsize=1)
def _causal_mask(length: int) -> Mask:
    """The mask of all later tokens: bool [1, length, length], True where masked."""
    mask: Mask = ~np.tri(length, dtype=np.bool_)[None]
    return mask


def _attention_mask(position_ids: NDArray[np.int64], is_reset: bool | None) -> Mask:
    """True where there is no attention: a later token or, with resets, one of another document.
    Documents start where the position id is 0."""
    mask = _causal_mask(len(position_ids))
    if not is_reset:
        return mask
    documents = np.cumsum(position_ids == 0, dtype=np.int32)
    masked: Mask = mask | (documents[:, None] != documents[None, :])
    return masked
