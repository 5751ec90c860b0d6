"""Megatron-LM's indices over a token file."""

from __future__ import annotations

import numpy as np

from millrace.checks import MAX_INT64, whole
from millrace.errors import ConfigError, DataError
from millrace.options import SampleOptions
from millrace.order import GPTIndices, GPTPlan, build_gpt_indices, plan_gpt
from millrace.order.gpt import check_range
from millrace.store import IndexedDataset

_MAX_INDEX_BYTES = 1 << 46  # 64 TiB; a process can address 128


def plan_indices(
    dataset: IndexedDataset,
    sequences: tuple[int, int],
    num_samples: int | None,
    options: SampleOptions,
    *,
    drop_last_partial_sequence: bool = True,
) -> GPTPlan:
    """Epochs and samples of a range of sequences of a token file.

    Raises:
        ConfigError: No tokens, or too few for a sample.
        DataError: Tokens that are not integers, or a damaged index.
    """
    if dataset.dtype.kind not in "iu":
        raise DataError(f"{dataset.prefix} holds {dataset.dtype}; token ids are integers")
    start, stop = check_range(sequences, len(dataset))
    if num_samples is not None:
        num_samples = whole("num_samples", num_samples, 0, MAX_INT64)
    num_tokens = int(np.sum(dataset.sequence_lengths[start:stop], dtype=np.int64))
    if num_tokens > dataset.num_tokens:
        raise DataError(
            f"{dataset.prefix}.idx: sequences {start} to {stop} have {num_tokens} tokens by "
            f"their lengths; the .bin holds {dataset.num_tokens}. The index is damaged: write "
            "the pair again"
        )
    place = f"{dataset.prefix}, sequences {start} to {stop}"
    try:
        plan = plan_gpt(
            num_tokens,
            num_samples,
            options.sequence_length,
            add_extra_token=options.add_extra_token,
            drop_last_partial_sequence=drop_last_partial_sequence,
        )
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    num_bytes = plan.num_index_bytes(stop - start)
    if num_bytes > _MAX_INDEX_BYTES:
        raise ConfigError(
            f"{place}: {plan.num_samples:,} samples take {plan.num_epochs:,} epochs and "
            f"{num_bytes:,} bytes of indices; {_MAX_INDEX_BYTES:,} is the limit. Ask for fewer "
            "samples, or give more data"
        )
    return plan


def build_indices(
    dataset: IndexedDataset, sequences: tuple[int, int], plan: GPTPlan, seed: int
) -> GPTIndices:
    """The three indices of a range of sequences of a token file.

    Raises:
        ConfigError: A seed or range outside its limits.
        DataError: A damaged index.
        MemoryError: The indices do not fit; the message gives their size.
    """
    try:
        return build_gpt_indices(dataset.sequence_lengths, sequences, plan, seed)
    except ValueError as error:
        kind = ConfigError if isinstance(error, ConfigError) else DataError
        raise kind(f"{dataset.prefix}: {error}") from None
    except MemoryError:
        start, stop = sequences
        raise MemoryError(
            f"{dataset.prefix}: the indices of {plan.num_samples:,} samples take "
            f"{plan.num_index_bytes(stop - start):,} bytes, and there is no memory for them. Ask "
            "for fewer samples, or build with fewer threads"
        ) from None
