"""Megatron-LM's compiled helpers, by their names and arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from millrace import _native
from millrace.megatron.errors import ConfigAssertionError


def build_sample_idx(
    sizes: NDArray[np.int32],
    document_indices: NDArray[np.int32],
    sequence_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
    drop_last_partial_sequence: bool = True,
    add_extra_token_to_sequence: bool = True,
) -> NDArray[Any]:
    """The sample index: where each sample starts, as (place in the document index, offset).

    Args:
        sizes: int32 [sequences], in tokens.
        document_indices: int32 [documents], the sequences in reading order.
        sequence_length: tokens to train on in a sample.
        num_epochs, tokens_per_epoch: their product is the number of tokens.
        drop_last_partial_sequence: leave out a last sample that the tokens do not fill.
        add_extra_token_to_sequence: a sample draws one token more, for the last label.

    Returns:
        [samples + 1, 2], int32, or int64 for 2**31 documents and more.

    Raises:
        ValueError: too few tokens, or entries outside their arrays.
    """
    build = build_sample_idx_int32
    if len(document_indices) > _native.MAX_INT32:
        build = build_sample_idx_int64
    return build(
        sizes,
        document_indices,
        sequence_length,
        num_epochs,
        tokens_per_epoch,
        drop_last_partial_sequence,
        1 if add_extra_token_to_sequence else 0,
    )


def build_sample_idx_int32(
    sizes: NDArray[np.int32],
    document_indices: NDArray[np.int32],
    sequence_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
    drop_last_partial_sequence: bool = True,
    add_extra_token_to_sequence: int = 1,
    *,
    dtype: Any = np.int32,
) -> NDArray[Any]:
    """`build_sample_idx` with int32 rows."""
    extra = 1 if add_extra_token_to_sequence else 0
    if sequence_length < 1:
        raise ConfigAssertionError(f"sequence_length is {sequence_length}; at least 1 is needed")
    num_tokens = max(num_epochs * tokens_per_epoch - extra, 0)
    num_samples = num_tokens // sequence_length
    if not drop_last_partial_sequence:
        num_samples = -(-num_tokens // sequence_length)
    return _native.sample_index(
        np.ascontiguousarray(sizes, np.int32),
        np.ascontiguousarray(document_indices, np.int32),
        sequence_length,
        num_samples,
        add_extra_token=bool(extra),
        allow_partial=not drop_last_partial_sequence,
        dtype=dtype,
    )


def build_sample_idx_int64(*arguments: Any, **named: Any) -> NDArray[np.int64]:
    """`build_sample_idx` with int64 rows."""
    return build_sample_idx_int32(*arguments, **named, dtype=np.int64)


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
        dataset_index: int16 [size or more], filled with dataset numbers.
        dataset_sample_index: int64 [size or more], filled with sample numbers in the datasets.
        weights: [num_datasets or more], positive; they are used as they are.
        verbose: accepted; nothing is printed.

    Raises:
        ConfigAssertionError: arrays of other dtypes or too short for `size`.
        ValueError: a weight that is not positive and finite.
    """
    _check_outputs(dataset_index, dataset_sample_index, size)
    used = np.array(weights, dtype=np.float64)[:num_datasets]
    dataset_index[:size], dataset_sample_index[:size] = _native.blend_by_weights(used, size)


def build_exhaustive_blending_indices(
    dataset_index: NDArray[np.int16],
    dataset_sample_index: NDArray[np.int64],
    sizes: ArrayLike,
    num_datasets: int,
) -> None:
    """Writes a blend of exactly `sizes` samples of each dataset into two arrays.

    Args:
        dataset_index: int16 [sum of sizes, or more], filled with dataset numbers.
        dataset_sample_index: int64 of the same shape, filled with sample numbers in the datasets.
        sizes: integers [num_datasets or more].

    Raises:
        ConfigAssertionError: arrays of other dtypes or too short.
        ValueError: a negative size.
    """
    used = np.array(sizes, dtype=np.int64)[:num_datasets]
    total = int(used.sum())
    _check_outputs(dataset_index, dataset_sample_index, total)
    dataset_index[:total], dataset_sample_index[:total] = _native.blend_by_sizes(used)


def _check_outputs(dataset_index: Any, dataset_sample_index: Any, size: int) -> None:
    for name, array, dtype in (
        ("dataset_index", dataset_index, np.int16),
        ("dataset_sample_index", dataset_sample_index, np.int64),
    ):
        if array.dtype != dtype or array.ndim != 1 or len(array) < size:
            raise ConfigAssertionError(
                f"{name} is {array.dtype} {list(array.shape)}; {np.dtype(dtype)} [{size}] is needed"
            )
