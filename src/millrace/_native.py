"""The native core, which only this module imports.

Most names are the core's own: nanobind checks dtypes and shapes (TypeError), and `cpp/` documents
them. The functions here check ranges first (ConfigError). What only the data can show, such as an
index outside its array, is a ValueError of the kernel; a page of a mapped file that cannot be read
is a DataError. `tests.kernels.reference` has a slow twin of each kernel.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace import _core
from millrace._core import (  # noqa: F401 - for the others
    GPTOrder,
    InstantOrder,
    MixtureTree,
    Order,
    PackOrder,
    RowForm,
    SequenceOrder,
    TokenBuffer,
    TokenSource,
    copy_pieces,
    copy_sequences,
    fill_in_middle,
    fill_rows,
    find_documents,
    first_bad_document,
    first_bad_sequence,
    gather_samples,
    gather_tokens,
    locate_spans,
    look_up_draws,
    map_file,
    mark_ranges,
    mark_repeats,
    mask_losses,
    pack,
    prefetch_file,
    prefetch_mapped,
    read_packed,
    read_pieces,
    spans,
    start_writeback,
    swap_or_not,
)
from millrace.checks import MAX_INT32, MAX_INT64, check_within
from millrace.cores import available_cores
from millrace.errors import ConfigError

MAX_DATASETS = 32767 - 1  # dataset numbers are int16, and Megatron-LM leaves out the largest

Numbers = NDArray[np.int64]
Blend = tuple[NDArray[np.int16], Numbers]


def shuffled_ranges(
    ranges: Sequence[tuple[int, int, int]], dtype: Any, random: np.random.RandomState
) -> NDArray[Any]:
    """Ranges of consecutive numbers, each shuffled alone, one after the other.

    For each (start, stop, copies): `values = np.tile(np.arange(start, stop, dtype=dtype), copies)`,
    then `random.shuffle(values)`.

    Args:
        ranges: (start, stop, copies) of each range, without `stop`.
        dtype: int32, uint32 or int64; every number must fit.
        random: Legacy generator (MT19937), which the draws advance.

    Returns:
        [sum of (stop - start) * copies] of `dtype`.
    """
    low, high = int(np.iinfo(dtype).min), min(int(np.iinfo(dtype).max) + 1, MAX_INT64)
    fits = all(low <= start <= stop <= high and copies >= 0 for start, stop, copies in ranges)
    if not fits or sum((stop - start) * copies for start, stop, copies in ranges) > MAX_INT64 // 8:
        raise ConfigError(
            f"the ranges {ranges} go backwards, do not fit {np.dtype(dtype)}, or hold more numbers "
            "than memory can"
        )
    # Drop empty ranges: the kernel would loop `copies` times over nothing, and the product could
    # overflow.
    ranges = [row for row in ranges if row[0] < row[1] and row[2] > 0]
    full = random.get_state(legacy=False)
    state = full["state"]
    out, (state["key"], state["pos"]) = _core.shuffled_ranges(
        np.array(ranges, np.int64).reshape(-1, 3), np.empty(0, dtype), state["key"], state["pos"]
    )
    random.set_state(full)
    return out


def sample_index(
    sequence_lengths: NDArray[np.int32],
    document_index: NDArray[np.int32],
    sequence_length: int,
    num_samples: int,
    *,
    add_extra_token: bool = True,
    allow_partial: bool = False,
    dtype: Any = np.int32,
) -> NDArray[Any]:
    """Where each sample starts: (place in the document index, token offset in that document).

    Rows k and k + 1 bound sample k; it takes sequence_length tokens, plus one with the extra token,
    which the next sample draws again. The rule is Megatron-LM's `build_sample_idx`.

    Args:
        sequence_lengths: int32 [sequences], in tokens.
        document_index: int32 [documents], places in `sequence_lengths`, in reading order.
        sequence_length: Number of tokens to train on in a sample, at least 1.
        num_samples: Number of samples, all of which the documents must fill.
        add_extra_token: Whether a sample has one token more.
        allow_partial: Whether the last sample may have fewer tokens.
        dtype: int32 or int64.

    Returns:
        [num_samples + 1, 2] of `dtype`.

    Raises:
        ValueError: Too few tokens, a negative length or an entry of the document index outside
            the sequences.
    """
    check_within("sequence_length", sequence_length, 1, MAX_INT64 // 4)
    # Even the longest documents could not meet a larger count: it would only fill memory.
    num_tokens = document_index.size * MAX_INT32
    if num_samples < 0 or (num_samples - 1) * sequence_length > num_tokens:
        raise ConfigError(
            f"num_samples is {num_samples} for {document_index.size} documents; "
            "at least 0 and, without documents, 0 is needed"
        )
    if np.dtype(dtype) == np.int32 and document_index.size > MAX_INT32:
        raise ConfigError(f"{document_index.size} documents need an int64 sample index")
    return _core.sample_index(
        sequence_lengths,
        document_index,
        sequence_length,
        num_samples,
        add_extra_token,
        allow_partial,
        np.empty(0, dtype),
    ).reshape(-1, 2)


def blend_by_weights(weights: NDArray[np.float64], size: int, threads: int | None = None) -> Blend:
    """The greedy blend, `millrace.order.blend`, of weights float64 [datasets]: normalised, above 0.

    Sample n is drawn from the first dataset with the largest weight * max(n, 1) - taken, in
    float64: Megatron-LM's `build_blending_indices`.
    """
    check_within("the number of datasets", weights.size, 1, MAX_DATASETS)
    if not np.all(np.isfinite(weights) & (weights > 0)):
        raise ConfigError(f"weights are {weights}; each must be positive and finite")
    check_within("size", size, 0, MAX_INT64 // 8)
    return _core.blend_by_weights(weights, size, threads or available_cores())


def blend_by_sizes(sizes: Numbers, threads: int | None = None) -> Blend:
    """The exhaustive blend: exactly sizes[d] samples of each dataset d, evenly mixed.

    The greedy rule with the weights sizes / sum(sizes), over the datasets that have samples left:
    Megatron-LM's `build_exhaustive_blending_indices`. The arguments and the result are those of
    `blend_by_weights`, for sizes int64 [datasets], at least 0.
    """
    check_within("the number of datasets", sizes.size, 1, MAX_DATASETS)
    total = sum(sizes.tolist())
    if np.any(sizes < 0) or total > MAX_INT64 // 8:
        raise ConfigError(f"sizes are {sizes}; each must be at least 0, and their sum fit memory")
    return _core.blend_by_sizes(sizes, total, threads or available_cores())


def deal(costs: NDArray[np.float64], num_ranks: int) -> Numbers:
    """The places of costs, 0 to 1e300, by rank: see `millrace.sampling.balanced.deal`.

    Raises:
        ValueError: Other costs, or ranks that cannot have as many items each.
    """
    order = np.argsort(-costs, kind="stable")
    return order[np.argsort(_core.deal(costs[order], num_ranks), kind="stable")]


def gpt_order(
    sequence_lengths: NDArray[np.int32],
    document_index: NDArray[np.int32],
    sample_index: NDArray[Any],
    shuffle_index: NDArray[Any],
    *,
    sequence_length: int,
    add_extra_token: bool,
) -> GPTOrder:
    """Megatron-LM's order: the three indices of a GPT dataset, converted once for all calls.

    The other arguments are those of `sample_index`.

    Args:
        sample_index: int32 or int64 [samples + 1, 2], as `sample_index` makes it.
        shuffle_index: uint32 or int64 [samples], rows of `sample_index`.
    """
    for name, array, dtypes, width in (  # users may replace the arrays of a dataset
        ("sequence_lengths", sequence_lengths, ("int32",), ()),
        ("document_index", document_index, ("int32",), ()),
        ("sample_index", sample_index, ("int32", "int64"), (2,)),
        ("shuffle_index", shuffle_index, ("uint32", "int64"), ()),
    ):
        if array.shape[1:] != width or array.ndim == 0 or array.dtype.name not in dtypes:
            raise ConfigError(
                f"{name} has shape {array.shape} and dtype {array.dtype}; "
                f"{['n', *width]} of {' or '.join(dtypes)} is needed"
            )
    # The bytes of a row can be counted.
    check_within("sequence_length", sequence_length, 1, MAX_INT64 // 16)
    lengths, documents, samples, shuffled = map(
        np.ascontiguousarray, (sequence_lengths, document_index, sample_index, shuffle_index)
    )
    return GPTOrder(lengths, documents, samples, shuffled, sequence_length, add_extra_token)


def torch_randperm(size: int, seed: int, *, dtype: Any = np.int64) -> NDArray[Any]:
    """`torch.randperm(size, generator=torch.Generator().manual_seed(seed))`, on the CPU.

    Args:
        size: Number of numbers, at least 0.
        seed: Seed of the generator. Its low 32 bits decide the result.
        dtype: uint32 (up to 2**32 numbers) or int64.

    Returns:
        A permutation of 0 to size - 1, [size] of `dtype`.
    """
    dtype = np.dtype(dtype)
    check_within(f"the size for {dtype}", size, 0, 2**32 if dtype.kind == "u" else MAX_INT64 // 8)
    # For so many numbers, torch draws two words of the generator each.
    has_64_bit_draws = size >= (2**32 - 1) // 20
    return _core.torch_randperm(size, seed % 2**32, has_64_bit_draws, np.empty(0, dtype))
