"""Megatron-LM's arguments: configurations, splits, weights and blends, and dtypes."""

import itertools
import logging
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from millrace import order, store
from millrace.errors import ConfigError
from millrace.megatron.errors import ConfigAssertionError, as_assertions, require
from millrace.run.arguments import parse_blend
from millrace.torch import distributed_rank

__all__ = [
    "BlendedMegatronDatasetConfig",
    "DType",
    "GPTDatasetConfig",
    "Split",
    "compile_helpers",
    "convert_split_vector_to_split_matrix",
    "get_blend_from_list",
    "normalize",
    "parse_and_normalize_split",
]

logger = logging.getLogger(__name__)

Blend = tuple[list[str], list[float] | None]
"""Path prefixes, and their weights; None: their numbers of samples."""

SplitMatrix = list[tuple[float, float] | None]


class Split(Enum):
    """The part of the data that a dataset draws from."""

    train = 0
    valid = 1
    test = 2


class DType(Enum):
    """The codes of token dtypes in an index file."""

    uint8 = 1
    int8 = 2
    int16 = 3
    int32 = 4
    int64 = 5
    float64 = 6
    float32 = 7
    uint16 = 8

    @classmethod
    def code_from_dtype(cls, value: Any) -> int:
        """The code of a NumPy type such as `numpy.uint16`; KeyError if it has none."""
        return int(cls[np.dtype(value).name].value)

    @classmethod
    def dtype_from_code(cls, value: int) -> Any:
        """The NumPy type of a code; ValueError for an unknown code."""
        return getattr(np, cls(value).name)

    @staticmethod
    def size(key: Any) -> int:
        """Bytes of a token, by its code or NumPy type; ValueError for anything else."""
        if isinstance(key, int):
            key = DType.dtype_from_code(key)
        if not (isinstance(key, type) and issubclass(key, np.number)):
            raise ConfigError(f"{key!r} is neither the code of a dtype nor a NumPy number type")
        return np.dtype(key).itemsize

    @staticmethod
    def optimal_dtype(cardinality: int | None) -> Any:
        """The NumPy type for a vocabulary: uint16 below 65,500 tokens, else int32."""
        return store.optimal_dtype(cardinality).type


@dataclass
class BlendedMegatronDatasetConfig:
    """Options of all datasets.

    Attributes:
        random_seed: Seed of every shuffle, 0 to 2**32 - 1.
        sequence_length: Tokens to train on in a sample.
        blend: One blend for all splits, which `split` cuts.
        blend_per_split: Blend (or None) of each of train, valid and test; excludes `split`. Without
            any blend, data are mocked.
        multiple_validation_sets: Whether validation is a list of datasets, not their blend; for
            `blend_per_split`.
        full_validation: Whether each validation set is one epoch; its size must be None.
        split: Shares such as "969,30,1".
        split_matrix: Start and end of each split as fractions. Computed; cannot be passed.
        num_dataset_builder_threads: Number of datasets of a blend to build at a time.
        path_to_cache: Folder of cached indices; None: beside each token file; "": no cache.
        mmap_bin_files: Whether to map the token files, or use positioned reads.
        mock: Whether there is no blend. Computed; cannot be passed.
        tokenizer: Tokenizer, with `eod`, `pad`, `vocab_size`, `unique_identifiers`, ...
        mid_level_dataset_surplus: Share of extra samples to build of each dataset in a blend.
        allow_ambiguous_pad_tokens: Whether a pad token that is another special token is padding.
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
        per_split = self.blend_per_split if any(self.blend_per_split or ()) else None
        if per_split is not None:
            require(
                self.blend is None and self.split is None,
                "blend_per_split excludes blend and split: give either",
            )
            require(
                len(per_split) == len(Split),
                f"blend_per_split has {len(per_split)} entries; it needs {len(Split)}: for train, "
                "valid and test, a blend or None",
            )
        elif self.blend is None:
            self.mock, self.split = True, "1,1,1"
        else:
            require(self.split is not None, 'a blend needs a split: give split="969,30,1"')
        for prefixes, weights in filter(None, per_split or [self.blend]):
            require(
                weights is None or len(prefixes) == len(weights),
                f"a blend has {len(prefixes)} prefixes and {len(weights or [])} weights: give one "
                "weight for each prefix, or None for all",
            )
        if per_split is None:
            vector = parse_and_normalize_split(self.split or "")
            self.split_matrix = convert_split_vector_to_split_matrix(vector)


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
        object_storage_cache_path: Folder of this node for copies of indices, of pairs in buckets.
        data_parallel_size, sequence_parallel_size, hybrid_context_parallel, context_parallel_size:
            Unused; for other code.
        sequences_per_dataset: Numbers of sequences and of document entries, by prefix.
        token_dtype_code: Dtype code by the size of the vocabulary. Computed; cannot be passed.
        inter_document_masking: Whether samples hold `cu_seqlens` and `max_seqlen` instead of an
            attention mask. (From Megatron-LM 0.19 on.)
        sft_release: Release of Megatron-LM whose samples an `SFTDataset` gives: "0.16", "0.17",
            "0.18" or "0.19"; None: that of the imported `megatron.core`, or "0.19" without one.
            (Not in Megatron-LM.)
        loss_ranges: "refuse" a pair with a mask, or "ignore" the mask. (Not in Megatron-LM.)

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
    sft_release: str | None = None
    loss_ranges: str = "refuse"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tokenizer", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
            require(getattr(self, name) is not None, f"{name} is None: give it")
        is_known = self.loss_ranges in ("refuse", "ignore")
        require(is_known, f'loss_ranges is {self.loss_ranges!r}; give "refuse" or "ignore"')
        self.sft_release = self.sft_release or imported_release() or "0.19"
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
        if len(shares) > len(Split):
            raise ValueError(f"it has {len(shares)} shares; one to three are needed")
        return normalize(shares + [0.0] * (len(Split) - len(shares)))
    except ValueError as error:
        raise ConfigAssertionError(f'split "{split}": {error}; write "969,30,1"') from None


def convert_split_vector_to_split_matrix(
    vector_a: list[float], vector_b: list[float] | None = None
) -> SplitMatrix:
    """Start and end of each split as fractions of the data; None for a split without a share.

    Args:
        vector_a: Shares.
        vector_b: Other shares, to cut each split down to its data by both.

    Example:
        >>> convert_split_vector_to_split_matrix([0.9, 0.1, 0.0])
        [(0, 0.9), (0.9, 1.0), None]
    """
    intervals_a, intervals_b = (
        itertools.pairwise(itertools.accumulate(vector, initial=0))
        for vector in (vector_a, vector_a if vector_b is None else vector_b)
    )
    pairs = zip(intervals_a, intervals_b, strict=False)
    common = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in pairs]
    return [(low, high) if low < high else None for low, high in common]


def normalize(weights: Sequence[float]) -> list[float]:
    """The weights divided by their sum, in float64 and in NumPy's order of addition.

    Raises:
        ConfigAssertionError: If there are none, one is below 0 or not finite, or all are 0.
            (Megatron-LM goes on with NaN or negative shares.)
    """
    with as_assertions():
        return order.normalize(np.array(weights, np.float64).tolist())


def get_blend_from_list(blend: Sequence[Any] | None) -> Blend | None:
    """The blend in the words of an argument such as --data-path.

    Args:
        blend: Path prefixes, or weights (as words or numbers) and path prefixes by turns; None: no
            blend. An odd number of words, or no number in a weight's place, means prefixes alone.

    Returns:
        The prefixes and the weights (None without weights), or None.

    Raises:
        ConfigAssertionError: If there are no words, a prefix is a number, or only some of the
            weights are numbers.
    """
    if blend is None:
        return None
    require(len(blend) > 0, "the blend is an empty list; give path prefixes, or None")
    words = [word.item() if isinstance(word, np.generic) else word for word in blend]
    with as_assertions():
        prefixes, weights = parse_blend(words, "the blend")
    places = words if weights is None else words[1::2]
    require(
        all(isinstance(word, (str, os.PathLike)) for word in places),
        f"the blend has {places} in the places of path prefixes; write prefixes alone, or a weight "
        "before each prefix",
    )
    return [str(prefix) for prefix in prefixes], None if weights is None else list(weights)


def imported_release() -> str | None:
    """The release of the imported `megatron.core`, such as "0.16", at most "0.19"; None without."""
    version = getattr(sys.modules.get("megatron.core"), "__version__", None)
    earlier = re.match(r"0\.(\d|1[0-8])\b", version or "")
    return version and (earlier[0] if earlier else "0.19")


def compile_helpers() -> None:
    """Does nothing: the core is compiled at installation."""


def log_on_first_rank(message: str, *, is_warning: bool = False) -> None:
    level = logging.WARNING if is_warning else logging.INFO
    if logger.isEnabledFor(level) and distributed_rank() in (None, 0):
        logger.log(level, message)
