"""Integer dtypes of tokens and indices, by Megatron-LM's thresholds: the only place for them."""

from typing import Any

import numpy as np


def optimal_dtype(vocabulary_size: int | None) -> np.dtype[Any]:
    """The dtype of a vocabulary in Megatron-LM's files: uint16 below 65,500 tokens, else int32."""
    if vocabulary_size is not None and vocabulary_size < 65500:
        return np.dtype(np.uint16)
    return np.dtype(np.int32)


def sample_index_dtype(num_documents: int) -> np.dtype[Any]:
    """The dtype of a sample index over a document index of `num_documents` entries."""
    return np.dtype(np.int32 if num_documents < 2**31 else np.int64)


def shuffle_index_dtype(num_samples: int) -> np.dtype[Any]:
    """The dtype of a shuffle index of `num_samples` samples."""
    return np.dtype(np.uint32 if num_samples < 2**32 - 2 else np.int64)
