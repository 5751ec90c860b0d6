"""The configurations, with Megatron-LM's fields in its order, and their splits."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from typing import Any

from millrace.megatron.errors import ConfigAssertionError, require
from millrace.megatron.indexed import DType
from millrace.megatron.utils import Blend, Split, log_on_first_rank, normalize

SplitMatrix = list[tuple[float, float] | None]


@dataclass
class BlendedMegatronDatasetConfig:
    """Options of all datasets.

    Attributes:
        random_seed: Seed of every shuffle, 0 to 2**32 - 1.
        sequence_length: Tokens to train on in a sample.
        blend: One blend for all splits, which `split` cuts.
        blend_per_split: A blend (or None) for each of train, valid and test; excludes `split`.
            Without any blend, mock data is made.
        multiple_validation_sets: Whether to give a list of validation datasets instead of their
            blend; for `blend_per_split`.
        full_validation: Whether each validation set is one epoch; its size must be None.
        split: Shares such as "969,30,1".
        split_matrix: Start and end of each split as fractions; not an argument.
        num_dataset_builder_threads: Number of datasets of a blend to build at a time.
        path_to_cache: Folder of cached indices; None: beside each token file; "": no cache.
        mmap_bin_files: Whether to map the token files, or use positioned reads.
        mock: Whether there is no blend; not an argument.
        tokenizer: Tokenizer, with `eod`, `pad`, `vocab_size`, `unique_identifiers`, ...
        mid_level_dataset_surplus: Share of extra samples to build of each dataset in a blend.
        allow_ambiguous_pad_tokens: Whether the pad token is padding even if it is another special
            token too.
        fast_cache_load: Whether to trust that the cache holds everything, and build nothing.
        defer_npy_index_mmap: Whether to open the cached indices at the first sample.

    Raises:
        ConfigAssertionError: If options exclude each other, or one is missing.
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
        for name in ("fast_cache_load", "defer_npy_index_mmap"):
            require(
                not getattr(self, name) or self.path_to_cache is not None,
                f"{name} reads cached indices, and path_to_cache is None: give the folder",
            )
        require(
            not self.fast_cache_load or self.blend is None,
            "fast_cache_load and blend exclude each other: give blend_per_split",
        )
        if self.blend_per_split is not None and any(self.blend_per_split):
            self._check_blend_per_split(self.blend_per_split)
            return
        if self.blend is None:
            self.mock, self.split = True, "1,1,1"
            log_on_first_rank("Let mock = True: there is no blend")
        else:
            _check_weights("blend", self.blend)
            require(self.split is not None, 'a blend needs a split: give split="969,30,1"')
        assert self.split is not None
        vector = parse_and_normalize_split(self.split)
        self.split_matrix = convert_split_vector_to_split_matrix(vector)
        log_on_first_rank(f"Let split_matrix = {self.split_matrix}")

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
                log_on_first_rank(f"no blend for the {split.name} split")
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
    """Options of GPT datasets, beyond those of all datasets.

    Attributes:
        reset_position_ids: Whether position ids restart after each EOD.
        reset_attention_mask: Whether to mask attention across an EOD.
        eod_mask_loss: Whether to mask the loss where the input is EOD.
        create_attention_mask: Whether samples hold an attention mask.
        drop_last_partial_validation_sequence: Whether to leave out a last validation sample that
            the tokens do not fill.
        add_extra_token_to_sequence: Whether a sample draws one more token, for the last label.
        object_storage_cache_path, data_parallel_size, sequence_parallel_size,
            hybrid_context_parallel, context_parallel_size: Unused here; kept for other code.
        sequences_per_dataset: Numbers of sequences and of document entries, by prefix.
        token_dtype_code: Dtype code by the size of the vocabulary; not an argument.
        inter_document_masking: Whether samples hold `cu_seqlens` and `max_seqlen` instead of an
            attention mask. (An option of Megatron-LM's main, not of megatron-core 0.16.1.)

    Raises:
        ConfigAssertionError: If a required option is None.
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
            dtype = DType.int32 if vocabulary_size > 2**16 else DType.uint16
            self.token_dtype_code = dtype.value
        require(
            self.sequences_per_dataset is None or self.token_dtype_code is not None,
            "sequences_per_dataset needs the tokenizer's vocab_size, which is None",
        )


def parse_and_normalize_split(split: str) -> list[float]:
    """The shares of train, valid and test in a string such as "969,30,1"; their sum is 1.

    All characters but digits and dots separate numbers (a sign too); missing shares are 0.

    Raises:
        ConfigAssertionError: If there are more than three numbers, none is above 0, or digits and
            dots do not form a number.
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
    """Start and end of each split as fractions of the data; None for a split without a share.

    Args:
        vector_a: Shares.
        vector_b: Other shares, to cut each split down to the data that it has by both.

    Example:
        >>> convert_split_vector_to_split_matrix([0.9, 0.1, 0.0])
        [(0, 0.9), (0.9, 1.0), None]
    """
    intervals_a, intervals_b = (
        itertools.pairwise(itertools.accumulate(vector, initial=0))
        for vector in (vector_a, vector_a if vector_b is None else vector_b)
    )
    matrix: SplitMatrix = []
    for a, b in zip(intervals_a, intervals_b, strict=False):
        low, high = max(a[0], b[0]), min(a[1], b[1])
        matrix.append((low, high) if low < high else None)
    return matrix
