"""The configurations, with Megatron-LM's fields in its order, and the splits they give."""

from __future__ import annotations

import itertools
import logging
import re
from dataclasses import dataclass, field
from typing import Any

from millrace.megatron.errors import ConfigAssertionError, require
from millrace.megatron.utils import Blend, Split, log_on_first_rank, normalize

logger = logging.getLogger(__name__)

_INT32_CODE, _UINT16_CODE = 4, 8
_UINT16_VALUES = 2**16
_MOCK_SPLIT = "1,1,1"

SplitMatrix = list[tuple[float, float] | None]


@dataclass
class BlendedMegatronDatasetConfig:
    """What decides a set of datasets.

    Attributes:
        random_seed: of every shuffle, 0 to 2**32 - 1.
        sequence_length: tokens to train on in a sample.
        blend: one blend for all splits; `split` says who gets which part of it.
        blend_per_split: a blend (or None) for train, valid and test; without `split`. Without any
            blend at all, mock data is made.
        multiple_validation_sets: with `blend_per_split`, a list of validation datasets instead of
            their blend.
        full_validation: each validation set is one epoch; its size must be None.
        split: shares such as "969,30,1".
        split_matrix: the book-ends that follow from `split`; not an argument.
        num_dataset_builder_threads: how many datasets of a blend are built at a time.
        path_to_cache: the folder of cached indices; None: beside each token file.
        mmap_bin_files: map the token files, or read them by positioned reads.
        mock: whether there is no blend; not an argument.
        tokenizer: an object with `eod`, `pad`, `vocab_size`, `unique_identifiers`, ...
        mid_level_dataset_surplus: what is built of each dataset beyond its share of a blend.
        allow_ambiguous_pad_tokens: take the pad token as padding also where it equals another
            special token.
        fast_cache_load: trust that the cache holds everything, and build nothing.
        defer_npy_index_mmap: open the cached indices at the first sample.

    Raises:
        ConfigAssertionError: options that exclude each other, or one that is missing.
    """

    random_seed: int
    sequence_length: int
    blend: Blend | None = None
    blend_per_split: list[Blend | None] | None = None
    multiple_validation_sets: bool | None = None
    full_validation: bool | None = None
    split: str | None = None
    split_matrix: SplitMatrix | None = field(init=False, default=None)
    num_dataset_builder_threads: int = 1
    path_to_cache: str | None = None
    mmap_bin_files: bool = True
    mock: bool = field(init=False, default=False)
    tokenizer: Any = None
    mid_level_dataset_surplus: float = 0.005
    allow_ambiguous_pad_tokens: bool | None = False
    fast_cache_load: bool = False
    defer_npy_index_mmap: bool = False

    def __post_init__(self) -> None:
        self._check_cache_options()
        if self.blend_per_split is not None and any(self.blend_per_split):
            self._check_blend_per_split(self.blend_per_split)
            return
        if self.blend is None:
            self.mock, self.split = True, _MOCK_SPLIT
            log_on_first_rank(logger, logging.INFO, "Let mock = True: there is no blend")
        else:
            _check_weights("blend", self.blend)
            require(self.split is not None, 'a blend needs a split: give split="969,30,1"')
        assert self.split is not None
        vector = parse_and_normalize_split(self.split)
        self.split_matrix = convert_split_vector_to_split_matrix(vector)
        log_on_first_rank(logger, logging.INFO, f"Let split_matrix = {self.split_matrix}")

    def _check_cache_options(self) -> None:
        for name in ("fast_cache_load", "defer_npy_index_mmap"):
            require(
                not getattr(self, name) or self.path_to_cache is not None,
                f"{name} reads cached indices, and path_to_cache is None: give the folder",
            )
        require(
            not self.fast_cache_load or self.blend is None,
            "fast_cache_load and blend exclude each other: give blend_per_split",
        )

    def _check_blend_per_split(self, blends: list[Blend | None]) -> None:
        require(self.blend is None, "blend and blend_per_split exclude each other: give one")
        require(self.split is None, "split and blend_per_split exclude each other: give one")
        require(
            len(blends) == len(Split),
            f"blend_per_split has {len(blends)} entries; it needs {len(Split)}: for train, valid "
            "and test, a blend or None",
        )
        for split, blend in zip(Split, blends, strict=True):
            if blend is None:
                log_on_first_rank(logger, logging.INFO, f"no blend for the {split.name} split")
            else:
                _check_weights(f"blend_per_split[{split.value}]", blend)


def _check_weights(name: str, blend: Blend) -> None:
    prefixes, weights = blend[0], blend[1]
    if weights is not None:
        require(
            len(prefixes) == len(weights),
            f"{name} has {len(prefixes)} prefixes and {len(weights)} weights: give one weight for "
            "each prefix, or None for all",
        )


@dataclass
class GPTDatasetConfig(BlendedMegatronDatasetConfig):
    """What decides GPT datasets, beyond what decides all.

    Attributes:
        reset_position_ids: position ids start again after each EOD.
        reset_attention_mask: no attention across an EOD.
        eod_mask_loss: no loss where the input is EOD.
        create_attention_mask: whether samples hold an attention mask.
        drop_last_partial_validation_sequence: in validation, leave out a last sample that the
            tokens do not fill.
        add_extra_token_to_sequence: draw one token more in each sample, the last label.
        object_storage_cache_path: accepted, and refused together with paths in object stores.
        data_parallel_size, sequence_parallel_size, hybrid_context_parallel, context_parallel_size:
            kept for other code; they decide nothing here.
        sequences_per_dataset: for each prefix, its number of sequences and of document entries.
        token_dtype_code: what the vocabulary's size says of the token files; not an argument.
        inter_document_masking: samples hold `cu_seqlens` and `max_seqlen` in place of an attention
            mask. (megatron-core 0.16.1 does not have this option; Megatron-LM's main has.)

    Raises:
        ConfigAssertionError: a required option is None.
    """

    reset_position_ids: bool | None = None
    reset_attention_mask: bool | None = None
    eod_mask_loss: bool | None = None
    create_attention_mask: bool = True
    drop_last_partial_validation_sequence: bool = True
    add_extra_token_to_sequence: bool = True
    object_storage_cache_path: str | None = None
    data_parallel_size: int = 1
    sequence_parallel_size: int = 0
    hybrid_context_parallel: bool = False
    sequences_per_dataset: dict[str, tuple[int, int]] | None = None
    token_dtype_code: int | None = field(init=False, default=None)
    context_parallel_size: int | None = None
    inter_document_masking: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tokenizer", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
            require(getattr(self, name) is not None, f"{name} is None: give it")
        vocabulary_size = self.tokenizer.vocab_size
        if vocabulary_size is not None:
            is_wide = vocabulary_size > _UINT16_VALUES
            self.token_dtype_code = _INT32_CODE if is_wide else _UINT16_CODE
        require(
            self.sequences_per_dataset is None or self.token_dtype_code is not None,
            "sequences_per_dataset needs the tokenizer's vocab_size, which is None",
        )


def parse_and_normalize_split(split: str) -> list[float]:
    """The shares of train, valid and test in a string such as "969,30,1"; their sum is 1.

    Whatever is no digit and no dot separates numbers (a sign too); missing ones are 0.

    Raises:
        ConfigAssertionError: more than three numbers, none above 0, or a run of digits and dots
            that is no number.
    """
    try:
        shares = [float(number) for number in re.findall(r"[.0-9]+", split)]
    except ValueError as error:
        raise ConfigAssertionError(f'split "{split}": {error}; write "969,30,1"') from None
    require(
        len(shares) <= len(Split) and any(shares),
        f'split "{split}" has the shares {shares}; one to three are needed, not all 0: write '
        '"969,30,1"',
    )
    return normalize(shares + [0.0] * (len(Split) - len(shares)))


def convert_split_vector_to_split_matrix(
    vector_a: list[float], vector_b: list[float] | None = None
) -> SplitMatrix:
    """Where each split starts and ends, as fractions of the data; None for one without a share.

    Args:
        vector_a: the shares.
        vector_b: other shares; each split is then cut down to what both give it.

    Example:
        >>> convert_split_vector_to_split_matrix([0.9, 0.1, 0.0])
        [(0, 0.9), (0.9, 1.0), None]
    """
    ends_a = list(itertools.accumulate(vector_a, initial=0))
    ends_b = ends_a
    if vector_b is not None:
        ends_b = list(itertools.accumulate(vector_b, initial=0))
    matrix: SplitMatrix = []
    for (low_a, high_a), (low_b, high_b) in zip(
        itertools.pairwise(ends_a), itertools.pairwise(ends_b), strict=False
    ):
        low, high = max(low_a, low_b), min(high_a, high_b)
        matrix.append((low, high) if low < high else None)
    return matrix
