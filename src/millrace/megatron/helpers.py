"""Megatron-LM's compiled helpers."""

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from millrace import _native
from millrace.megatron.errors import require
from millrace.order.gpt import sample_index_dtype

__all__ = [
    "build_blending_indices",
    "build_exhaustive_blending_indices",
    "build_sample_idx",
    "build_sample_idx_int32",
    "build_sample_idx_int64",
]


def build_sample_idx(
    sizes: NDArray[np.int32],
    document_indices: NDArray[np.int32],
    sequence_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
    drop_last_partial_sequence: bool = True,
    add_extra_token_to_sequence: bool = True,
    *,
    dtype: Any = None,
) -> NDArray[Any]:
    """Where each sample starts, as (place in the document index, offset).

    Args:
        sizes: int32 [sequences], lengths in tokens.
        document_indices: int32 [documents], the sequences in reading order.
        sequence_length, add_extra_token_to_sequence: As in `GPTDatasetConfig`.
        num_epochs, tokens_per_epoch: Factors of the number of tokens.
        drop_last_partial_sequence: Whether to leave out a last sample that the tokens do not fill.
        dtype: int32 or int64; None: int64 for 2**31 documents and more.

    Returns:
        [samples + 1, 2] of the dtype.

    Raises:
        ValueError: If there are too few tokens, or entries outside their arrays.
    """
    require(sequence_length >= 1, f"sequence_length is {sequence_length}; at least 1 is needed")
    has_extra = bool(add_extra_token_to_sequence)
    num_tokens = max(num_epochs * tokens_per_epoch - has_extra, 0)
    partial = 0 if drop_last_partial_sequence else sequence_length - 1
    return _native.sample_index(
        np.ascontiguousarray(sizes, np.int32),
        np.ascontiguousarray(document_indices, np.int32),
        sequence_length,
        (num_tokens + partial) // sequence_length,
        add_extra_token=has_extra,
        allow_partial=not drop_last_partial_sequence,
        dtype=sample_index_dtype(len(document_indices)) if dtype is None else dtype,
    )


build_sample_idx_int32 = partial(build_sample_idx, dtype=np.int32)
build_sample_idx_int64 = partial(build_sample_idx, dtype=np.int64)


def build_blending_indices(
    dataset_index: NDArray[np.int16],
    dataset_sample_index: NDArray[np.int64],
    weights: ArrayLike,
    num_datasets: int,
    size: int,
    verbose: bool = False,
) -> None:
    """Writes a blend by weights into two arrays.

    Args:
        dataset_index: int16 [size or more], output: the dataset of each sample.
        dataset_sample_index: int64 [size or more], output: the sample's number in that dataset.
        weights: [num_datasets or more], positive and finite; they are not normalised.
        verbose: Ignored; nothing is printed.
    """
    weights = np.array(weights, dtype=np.float64)[:num_datasets]
    _write(_native.blend_by_weights(weights, size), dataset_index, dataset_sample_index)


def build_exhaustive_blending_indices(
    dataset_index: NDArray[np.int16],
    dataset_sample_index: NDArray[np.int64],
    sizes: ArrayLike,
    num_datasets: int,
) -> None:
    """Writes a blend of exactly sizes[d] samples of each dataset d into two arrays, as
    `build_blending_indices` does for the sum of the sizes."""
    sizes = np.array(sizes, dtype=np.int64)[:num_datasets]
    _write(_native.blend_by_sizes(sizes), dataset_index, dataset_sample_index)


def _write(indices: tuple[NDArray[Any], ...], *outputs: NDArray[Any]) -> None:
    for output, index in zip(outputs, indices, strict=True):
        require(
            output.dtype == index.dtype and output.ndim == 1 and len(output) >= len(index),
            f"an output is {output.dtype} {list(output.shape)}; {index.dtype} [{len(index)}] is "
            "needed",
        )
        output[: len(index)] = index
