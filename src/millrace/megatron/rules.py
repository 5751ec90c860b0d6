"""The rules of a GPT dataset: the order of its samples, and their masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from millrace import _native
from millrace.dtypes import shuffle_index_dtype
from millrace.options import SampleOptions


def _build_document_index(
    documents: NDArray[np.int32],
    num_epochs: int,
    numpy_random_state: np.random.RandomState,
    separate_final_epoch: bool,
) -> NDArray[np.int32]:
    """A shuffled document index, int32 [num_epochs * documents], for subclasses."""
    final_epochs = 1 if separate_final_epoch and num_epochs > 1 else 0
    count = len(documents)
    places = _native.shuffled_ranges(
        [(0, count, num_epochs - final_epochs), (0, count, final_epochs)],
        np.int32,
        numpy_random_state,
    )
    index: NDArray[np.int32] = np.asarray(documents, np.int32)[places]
    return index


def _build_shuffle_index(
    num_samples: int, total_size: int, numpy_random_state: np.random.RandomState
) -> NDArray[np.uint32] | NDArray[np.int64]:
    """A shuffle index [total_size], for subclasses; its two parts are shuffled separately."""
    return _native.shuffled_ranges(
        [(0, num_samples, 1), (num_samples, total_size, 1)],
        shuffle_index_dtype(total_size),
        numpy_random_state,
    )


def _get_ltor_masks_and_position_ids(
    data: torch.Tensor,
    eod_token: int,
    reset_position_ids: bool,
    reset_attention_mask: bool,
    eod_mask_loss: bool,
    create_attention_mask: bool,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """The attention mask (or None), loss mask and position ids of tokens, for subclasses."""
    tokens = np.ascontiguousarray(data.numpy(), np.int64)
    options = SampleOptions(
        sequence_length=len(tokens),
        add_extra_token=False,
        eod_token=eod_token,
        reset_position_ids=bool(reset_position_ids or reset_attention_mask),
        eod_mask_loss=bool(eod_mask_loss),
    )
    _, _, loss_mask, position_ids = fill_sample(tokens, options)
    loss_mask[-1] = 1.0 - (bool(eod_mask_loss) and tokens[-1] == eod_token)
    mask = None
    if create_attention_mask:
        mask = causal_mask(len(tokens))
        if reset_attention_mask:
            mask = mask_across_documents(mask, position_ids)
    if not reset_position_ids:
        position_ids = np.arange(len(tokens))
    return (
        None if mask is None else torch.from_numpy(mask),
        torch.from_numpy(loss_mask),
        torch.from_numpy(position_ids),
    )


def fill_sample(tokens: NDArray[np.int64], options: SampleOptions) -> tuple[Any, ...]:
    """Tokens, labels, loss mask and position ids of one sample, from its tokens."""
    arrays = _native.fill_rows(tokens, np.array([len(tokens)]), options)
    return tuple(array[0] for array in arrays)


# NumPy makes the masks: torch would use threads, and then hangs in a forked process if its parent
# has used them.


def causal_mask(length: int) -> NDArray[np.bool_]:
    """The mask of all later tokens: bool [1, length, length], True where masked."""
    mask: NDArray[np.bool_] = ~np.tri(length, dtype=np.bool_)[None]
    return mask


def mask_across_documents(
    mask: NDArray[np.bool_], position_ids: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """A mask of other documents' tokens too; a document starts where its position id is 0."""
    documents = np.cumsum(position_ids == 0, dtype=np.int32)
    masked: NDArray[np.bool_] = mask | (documents[:, None] != documents[None, :])
    return masked
