"""The doors to the native core: they check dtype, shape and range, then call a kernel.

Wrong arguments raise ConfigError; what only reading the data shows, such as an index that points
outside its array, is a plain ValueError of the kernel. A page of a mapped file that cannot be read
is a DataError.

This module alone imports the core. Each function here has a slow twin of the same name in
`tests.kernels.reference`; what needs no check is the core's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace import _core
from millrace._core import GPTOrder as GPTOrder
from millrace._core import Order as Order
from millrace._core import RowForm as RowForm
from millrace._core import SequenceOrder as SequenceOrder
from millrace._core import TokenBuffer as TokenBuffer
from millrace._core import TokenSource as TokenSource
from millrace._core import map_file as map_file
from millrace._core import start_writeback as start_writeback
from millrace.checks import MAX_INT32 as MAX_INT32
from millrace.checks import MAX_INT64 as MAX_INT64
from millrace.cores import available_cores
from millrace.errors import ConfigError
from millrace.options import SampleOptions

MAX_DATASETS = 32767 - 1  # dataset numbers are int16, and Megatron-LM leaves out the largest

_UINT8, _INT16, _INT32 = np.dtype(np.uint8), np.dtype(np.int16), np.dtype(np.int32)
_INT64, _FLOAT64 = np.dtype(np.int64), np.dtype(np.float64)

Numbers = NDArray[np.int64]
Flags = NDArray[np.uint8]
Samples = tuple[Any, ...]

_SHUFFLED = (_INT32, np.dtype(np.uint32), _INT64)


def shuffled(values: NDArray[Any], random: np.random.RandomState) -> NDArray[Any]:
    """A shuffled copy of `values`, equal to the result of `random.shuffle(values)`.

    Args:
        values: [n] of int32, uint32 or int64.
        random: A legacy generator (MT19937); it is advanced as by `random.shuffle`.

    Returns:
        [n], the dtype of `values`.
    """
    if values.ndim != 1 or values.dtype not in _SHUFFLED:
        raise ConfigError(
            f"values has shape {values.shape} and dtype {values.dtype}; "
            "[n] of int32, uint32 or int64 is needed"
        )
    out: NDArray[Any] = _draw(random, _core.shuffled, np.ascontiguousarray(values))
    return out


def shuffled_ranges(
    ranges: Sequence[tuple[int, int, int]], dtype: Any, random: np.random.RandomState
) -> NDArray[Any]:
    """Ranges of consecutive numbers, each shuffled alone, one after the other.

    Equal to `values = np.tile(np.arange(start, stop, dtype=dtype), copies)`, then
    `random.shuffle(values)`, for each (start, stop, copies), concatenated.

    Args:
        ranges: (start, stop, copies) of each range, without `stop`.
        dtype: int32, uint32 or int64; every number must fit.
        random: A legacy generator (MT19937); it is advanced by the draws.

    Returns:
        [sum of (stop - start) * copies] of `dtype`.
    """
    dtype = np.dtype(dtype)
    if dtype not in _SHUFFLED:
        raise ConfigError(f"dtype is {dtype}; int32, uint32 or int64 is needed")
    limits = np.iinfo(dtype)
    for start, stop, copies in ranges:
        if not limits.min <= start <= stop <= min(limits.max + 1, MAX_INT64) or copies < 0:
            raise ConfigError(
                f"the range ({start}, {stop}) times {copies} is empty backwards, has a negative "
                f"count or does not fit {dtype}"
            )
    # Drop empty ranges: the kernel would loop `copies` times over nothing, and the product could
    # overflow.
    ranges = [
        (start, stop, copies) for start, stop, copies in ranges if start < stop and copies > 0
    ]
    if sum((stop - start) * copies for start, stop, copies in ranges) > MAX_INT64 // 8:
        raise ConfigError(f"the ranges {ranges} hold more numbers than memory can")
    table = np.array(ranges, dtype=np.int64).reshape(-1, 3)
    out: NDArray[Any] = _draw(random, _core.shuffled_ranges, table, np.empty(0, dtype))
    return out


def draw_targets(first: int, count: int, random: np.random.RandomState) -> Numbers:
    """The swap targets of `count` steps of a shuffle: the k-th is uniform in [0, first - k].

    The random part of a shuffle: so tests of its 64-bit draws (from step 2**32 on) need no array of
    that size.

    Returns:
        int64 [count].
    """
    if not 0 <= count <= first <= MAX_INT64:
        raise ConfigError(f"count is {count} and first is {first}; 0 <= count <= first is needed")
    out: Numbers = _draw(random, _core.draw_targets, first, count)
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
    _check_vector("sequence_lengths", sequence_lengths, _INT32)
    _check_vector("document_index", document_index, _INT32)
    dtype = np.dtype(dtype)
    if dtype not in (_INT32, _INT64):
        raise ConfigError(f"dtype is {dtype}; int32 or int64 is needed")
    if not 1 <= sequence_length <= MAX_INT64 // 4:
        raise ConfigError(f"sequence_length is {sequence_length}; at least 1 is needed")
    # Even the longest documents could not meet a larger count: it would only fill memory.
    num_tokens = document_index.size * MAX_INT32
    if num_samples < 0 or (num_samples > 0 and (num_samples - 1) * sequence_length > num_tokens):
        raise ConfigError(
            f"num_samples is {num_samples} for {document_index.size} documents; "
            "at least 0 and, without documents, 0 is needed"
        )
    if dtype == _INT32 and document_index.size > MAX_INT32:
        raise ConfigError(f"{document_index.size} documents need an int64 sample index")
    rows = _core.sample_index(
        sequence_lengths,
        document_index,
        sequence_length,
        num_samples,
        add_extra_token,
        allow_partial,
        np.empty(0, dtype),
    )
    return rows.reshape(-1, 2)


def blend_by_weights(
    weights: NDArray[np.float64], size: int, threads: int | None = None
) -> tuple[NDArray[np.int16], Numbers]:
    """The greedy blend: each sample comes from the dataset furthest behind its weight.

    Sample n is drawn from the first dataset with the largest weight * max(n, 1) - taken, in
    float64: Megatron-LM's `build_blending_indices`.

    Args:
        weights: float64 [datasets], normalised, positive and finite, at most 32,766 of them.
        size: Number of samples.
        threads: Number of worker threads; the result does not depend on it. None: one per core.

    Returns:
        dataset_index int16 [size] and dataset_sample_index int64 [size], the number of earlier
        samples from the same dataset.
    """
    _check_vector("weights", weights, _FLOAT64)
    _check_num_datasets(weights.size)
    if not np.all(np.isfinite(weights) & (weights > 0)):
        raise ConfigError(f"weights are {weights}; each must be positive and finite")
    if not 0 <= size <= MAX_INT64 // 8:
        raise ConfigError(f"size is {size}; at least 0 is needed")
    return _core.blend_by_weights(weights, size, _num_threads(threads))


def blend_by_sizes(sizes: Numbers, threads: int | None = None) -> tuple[NDArray[np.int16], Numbers]:
    """The exhaustive blend: exactly sizes[d] samples of each dataset d, evenly mixed.

    The greedy rule with the weights sizes / sum(sizes), over the datasets that have samples left:
    Megatron-LM's `build_exhaustive_blending_indices`.

    Args:
        sizes: int64 [datasets], at least 0, at most 32,766 of them.
        threads: Number of worker threads; the result does not depend on it. None: one per core.

    Returns:
        dataset_index int16 [sum(sizes)] and dataset_sample_index int64 [sum(sizes)].
    """
    _check_vector("sizes", sizes, _INT64)
    _check_num_datasets(sizes.size)
    total = sum(sizes.tolist())
    if np.any(sizes < 0) or total > MAX_INT64 // 8:
        raise ConfigError(f"sizes are {sizes}; each must be at least 0, and their sum fit memory")
    return _core.blend_by_sizes(sizes, total, _num_threads(threads))


def look_up_draws(
    dataset_index: NDArray[np.int16], dataset_sample_index: Numbers, sample_numbers: Numbers
) -> tuple[NDArray[np.int16], Numbers]:
    """The datasets that samples of a blend come from, and their sample numbers there.

    The same as indexing both arrays with `sample_numbers`, but these may be mapped files.

    Args:
        dataset_index: int16 [samples].
        dataset_sample_index: int64 [samples].
        sample_numbers: int64 [batch].

    Returns:
        int16 [batch] and int64 [batch].

    Raises:
        IndexError: No such sample.
    """
    _check_vector("dataset_index", dataset_index, _INT16)
    _check_vector("dataset_sample_index", dataset_sample_index, _INT64)
    _check_vector("sample_numbers", sample_numbers, _INT64)
    return _core.look_up_draws(dataset_index, dataset_sample_index, sample_numbers)


def token_source(
    tokens: NDArray[Any],
    sequence_pointers: Numbers,
    sequence_lengths: NDArray[np.int32],
    num_bytes: int | None = None,
) -> TokenSource:
    """A token file's arrays, converted once for all calls.

    Args:
        tokens: [n] of an integer dtype, the whole token file; empty if it is not mapped.
        sequence_pointers: int64 [sequences], in bytes.
        sequence_lengths: int32 [sequences], in tokens.
        num_bytes: Size of the token file; None: the size of `tokens`.
    """
    _check_vector("sequence_pointers", sequence_pointers, _INT64)
    _check_vector("sequence_lengths", sequence_lengths, _INT32)
    if tokens.ndim != 1:
        raise ConfigError(f"tokens has shape {tokens.shape}; one dimension is needed")
    num_bytes = tokens.nbytes if num_bytes is None else num_bytes
    return TokenSource(np.ascontiguousarray(tokens), sequence_pointers, sequence_lengths, num_bytes)


def sharded_source(
    shards: Sequence[NDArray[Any]], shard_sizes: Sequence[int], sequence_length: int
) -> TokenSource:
    """The token files of shards, whose sequences all have one length, as one.

    The sequences of the first shard come first. Byte offsets count through all files.

    Args:
        shards: The tokens of each file, [n] of one integer dtype; all empty if they are not mapped.
        shard_sizes: Number of sequences of each file.
        sequence_length: Number of tokens in a sequence, at least 1.
    """
    sizes = np.array(shard_sizes, np.int64)
    _check_rows(sequence_length, sum(sizes.tolist()))
    if len(shards) != len(sizes) or len(shards) == 0 or np.any(sizes < 0):
        raise ConfigError(
            f"there are {len(shards)} shards with {len(sizes)} sizes, {sizes}; one of at least 0 "
            "is needed for each, and at least one shard"
        )
    is_mapped = any(len(shard) > 0 for shard in shards)
    tokens = tuple(np.ascontiguousarray(shard) for shard in shards)
    return TokenSource(tokens, sizes, sequence_length, is_mapped)


def sequence_order(num_sequences: int, sequence_length: int) -> SequenceOrder:
    """The order of sequences of one length as they are stored: sample n is sequence n.

    Args:
        num_sequences: Number of sequences, at least 0.
        sequence_length: Number of tokens in a sequence, at least 1.
    """
    if num_sequences < 0:
        raise ConfigError(f"num_sequences is {num_sequences}; at least 0 is needed")
    _check_rows(sequence_length, num_sequences)
    return SequenceOrder(num_sequences, sequence_length)


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

    Args:
        sequence_lengths: int32 [sequences], in tokens.
        document_index: int32 [documents], places in `sequence_lengths`.
        sample_index: int32 or int64 [samples + 1, 2], as `sample_index` makes it.
        shuffle_index: uint32 or int64 [samples], rows of `sample_index`.
        sequence_length: Number of tokens to train on in a sample, at least 1.
        add_extra_token: Whether a sample has one token more.
    """
    _check_vector("sequence_lengths", sequence_lengths, _INT32)
    _check_vector("document_index", document_index, _INT32)
    if sample_index.ndim != 2 or sample_index.shape[1] != 2:
        raise ConfigError(
            f"sample_index has shape {sample_index.shape}; [samples + 1, 2] is needed"
        )
    if shuffle_index.ndim != 1:
        raise ConfigError(f"shuffle_index has shape {shuffle_index.shape}; one dimension is needed")
    _check_rows(sequence_length, 1)
    return GPTOrder(
        sequence_lengths,
        document_index,
        np.ascontiguousarray(sample_index),
        np.ascontiguousarray(shuffle_index),
        sequence_length,
        add_extra_token,
    )


def spans(order: Order, sample_numbers: Numbers) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """The tokens of samples: for each sample its spans, in reading order.

    Args:
        order: The order, such as a `gpt_order`.
        sample_numbers: int64 [batch].

    Returns:
        sequences, offsets and counts, int64 [spans]: a span is `counts` tokens of a sequence from
        token `offsets` on, at least one; and bounds, int64 [batch + 1]: sample i has the spans
        bounds[i] up to bounds[i + 1].

    Raises:
        ValueError: No such sample, or indices that point outside their arrays.
    """
    _check_vector("sample_numbers", sample_numbers, _INT64)
    return _core.spans(order, sample_numbers)


def locate_spans(
    token_source: TokenSource, sequences: Numbers, offsets: Numbers, counts: Numbers
) -> tuple[Numbers, Numbers]:
    """The bytes of spans in their token file.

    Args:
        token_source: The token file, which need not be mapped.
        sequences, offsets, counts: int64 [spans], in tokens; of any order.

    Returns:
        byte_offsets and byte_counts, int64 [spans].

    Raises:
        ValueError: A span outside its sequence, or outside the token file.
    """
    _check_vector("sequences", sequences, _INT64)
    _check_vector("offsets", offsets, _INT64)
    _check_vector("counts", counts, _INT64)
    return _core.locate_spans(token_source, sequences, offsets, counts)


def row_form(
    *,
    tokens: bool = True,
    labels: bool = True,
    loss_mask: bool = True,
    position_ids: bool = True,
    parts: bool = False,
    token_dtype: str = "int64",
    share_labels: bool = False,
    share_plain: bool = False,
    vocab_size: int | None = None,
) -> RowForm:
    """Which arrays `gather_samples` and `fill_rows` write, and how.

    Args:
        tokens, labels, loss_mask, position_ids: Whether this array is written.
        parts: Whether `gather_samples` returns the spans of the samples too.
        token_dtype: Dtype of tokens and labels: "int64", "int32" or "file", that of the token file.
        share_labels: Whether tokens and labels are views of one array [batch, sequence_length + 1].
        share_plain: Whether to leave out loss masks and position ids that are plain in every row: a
            mask of ones (but for the last label, if there is no extra token), and the ids 0, 1, ...
        vocab_size: Least number above all token ids, which are checked; the padding token, which
            becomes 0, may be above it. None: not checked.
    """
    if token_dtype not in ("int64", "int32", "file"):
        raise ConfigError(f"token_dtype is {token_dtype!r}; int64, int32 or file is needed")
    if vocab_size is not None and not 1 <= vocab_size <= MAX_INT64:
        raise ConfigError(f"vocab_size is {vocab_size}; at least 1 is needed")
    return RowForm(
        tokens,
        labels,
        loss_mask,
        position_ids,
        parts,
        token_dtype,
        share_labels,
        share_plain,
        vocab_size,
    )


def gather_samples(
    token_sources: tuple[TokenSource, ...],
    orders: tuple[Order, ...],
    source_numbers: Numbers,
    sample_numbers: Numbers,
    options: SampleOptions,
    form: RowForm | None = None,
) -> Samples:
    """The samples of a batch, straight from mapped token files.

    Row i is sample sample_numbers[i] of orders[n] over token_sources[n], n = source_numbers[i].

    Args:
        token_sources: Mapped token files.
        orders: As many orders, one over each token file.
        source_numbers, sample_numbers: int64 [batch].
        options: Options of all samples.
        form: The arrays that are written; None: all, as int64.

    Returns:
        tokens, labels, loss_mask float32 and position_ids int64, each [batch, sequence_length];
        None for an array that the form leaves out. A sample with fewer tokens ends in 0, with
        masked labels. With `parts`, also the sequences, counts and bounds of the samples' spans, as
        `spans` returns them.

    Raises:
        ValueError: No such sample, one that does not fit its row, indices that point outside
            their arrays or the token file.
        DataError: A token id that does not fit the vocabulary or int32.
    """
    _check_vector("source_numbers", source_numbers, _INT64)
    _check_vector("sample_numbers", sample_numbers, _INT64)
    _check_rows(options.sequence_length, sample_numbers.size)
    return _core.gather_samples(
        token_sources, orders, source_numbers, sample_numbers, options, form
    )


def gather_tokens(
    token_sources: tuple[TokenSource, ...],
    orders: tuple[Order, ...],
    source_numbers: Numbers,
    sample_numbers: Numbers,
) -> tuple[NDArray[Any], Numbers, Numbers, Numbers, Numbers]:
    """The tokens of the samples of a batch, unpadded, straight from mapped token files.

    The arguments are those of `gather_samples`.

    Returns:
        The tokens of all samples, one sample after the other, [n] of the token files' dtype (int64
        if the samples' files have several); where each sample ends, int64 [batch]; and the
        sequences, offsets and counts of the samples' spans, as `spans` returns them.

    Raises:
        ValueError: No such sample, or indices that point outside their arrays or the token file.
    """
    _check_vector("source_numbers", source_numbers, _INT64)
    _check_vector("sample_numbers", sample_numbers, _INT64)
    return _core.gather_tokens(token_sources, orders, source_numbers, sample_numbers)


def fill_rows(
    tokens: NDArray[Any], ends: Numbers, options: SampleOptions, form: RowForm | None = None
) -> Samples:
    """The result of `gather_samples` from tokens that were read already.

    Args:
        tokens: [n] of an integer dtype: all samples' tokens, one after the other.
        ends: int64 [batch], where each sample's tokens end.
        options: Options of all samples.
        form: The arrays that are written; None: all, as int64. "file" is the dtype of `tokens`, and
            `parts` has no meaning here.

    Raises:
        ValueError: A sample that is longer than its row or ends outside the tokens.
        DataError: A token id that does not fit the vocabulary or int32.
    """
    _check_vector("ends", ends, _INT64)
    _check_rows(options.sequence_length, ends.size)
    return _core.fill_rows(tokens, ends, options, form)


def find_documents(document_indices: Numbers, sequences: Numbers) -> Numbers:
    """The documents that sequences belong to, by `np.searchsorted`.

    Args:
        document_indices: int64 [documents + 1], ascending: document j has the sequences
            document_indices[j] up to document_indices[j + 1].
        sequences: int64 [n].

    Returns:
        int64 [n].
    """
    _check_vector("document_indices", document_indices, _INT64)
    _check_vector("sequences", sequences, _INT64)
    return _core.find_documents(document_indices, sequences)


def copy_pieces(
    data: NDArray[np.uint8], byte_offsets: Numbers, byte_counts: Numbers
) -> NDArray[np.uint8]:
    """Pieces of mapped bytes, one after the other.

    Args:
        data: uint8 [n].
        byte_offsets, byte_counts: int64 [pieces].

    Returns:
        uint8 [sum of byte_counts].

    Raises:
        ValueError: A piece outside the data.
    """
    _check_vector("data", data, _UINT8)
    _check_vector("byte_offsets", byte_offsets, _INT64)
    _check_vector("byte_counts", byte_counts, _INT64)
    return _core.copy_pieces(data, byte_offsets, byte_counts)


def read_packed(
    descriptor: int,
    num_bytes: int,
    byte_offsets: Numbers,
    byte_counts: Numbers,
) -> NDArray[np.uint8]:
    """Pieces of an open file, one after the other, read in the order of their offsets.

    Args:
        descriptor: Descriptor of a file that is open for reading.
        num_bytes: Size of the file.
        byte_offsets, byte_counts: int64 [pieces].

    Returns:
        uint8 [sum of byte_counts].

    Raises:
        ValueError: A piece outside the file.
        OSError: A failed read.
    """
    _check_vector("byte_offsets", byte_offsets, _INT64)
    _check_vector("byte_counts", byte_counts, _INT64)
    return _core.read_packed(descriptor, num_bytes, byte_offsets, byte_counts)


def read_pieces(
    descriptor: int,
    byte_offsets: Numbers,
    sizes: Numbers,
    buffer: NDArray[np.uint8],
    targets: Numbers,
    *,
    or_words: bool = False,
) -> int:
    """Reads pieces of an open file, each to its own place in a buffer.

    They are read in the order of their offsets, and neighbours by one call of the system. Fastest
    if the offsets ascend. While it runs, no other thread may change the arrays.

    Args:
        descriptor: Descriptor of a file that is open for reading.
        byte_offsets: First byte of each piece in the file, int64 [pieces].
        sizes: Bytes of each piece, int64 [pieces].
        buffer: Writable uint8 [n].
        targets: First byte of each piece in the buffer, int64 [pieces]. Where pieces overlap in the
            buffer, the result is not defined.
        or_words: Whether to look at all 32-bit words while they are in the processor's cache.

    Returns:
        With `or_words`, the bitwise OR of all 32-bit words that were read; otherwise 0.

    Raises:
        ValueError: A piece outside the buffer, or with `or_words` one that is not of 32-bit words,
            before anything is read; or a file that ends before the end of a piece, when part of the
            buffer may have been written.
        OSError: A failed read.
    """
    _check_vector("byte_offsets", byte_offsets, _INT64)
    _check_vector("sizes", sizes, _INT64)
    _check_vector("targets", targets, _INT64)
    _check_vector("buffer", buffer, _UINT8)
    if not byte_offsets.size == sizes.size == targets.size:
        raise ConfigError(
            f"byte_offsets, sizes and targets have {byte_offsets.size}, {sizes.size} and "
            f"{targets.size} numbers; as many of each are needed"
        )
    if not buffer.flags.writeable:
        raise ConfigError("buffer is read-only; a writable array is needed")
    return _core.read_pieces(descriptor, byte_offsets, sizes, buffer, targets, or_words)


def prefetch_mapped(data: NDArray[np.uint8], byte_offsets: Numbers, byte_counts: Numbers) -> None:
    """Starts to read pieces of a mapped file into memory, without waiting for them.

    Args:
        data: uint8 [n], the mapped file.
        byte_offsets, byte_counts: int64 [pieces].

    Raises:
        ValueError: A piece outside the data.
    """
    _check_vector("data", data, _UINT8)
    _check_vector("byte_offsets", byte_offsets, _INT64)
    _check_vector("byte_counts", byte_counts, _INT64)
    _core.prefetch_mapped(data, byte_offsets, byte_counts)


def prefetch_file(
    descriptor: int, num_bytes: int, byte_offsets: Numbers, byte_counts: Numbers
) -> None:
    """Starts to read pieces of an open file into memory, without waiting for them.

    Args:
        descriptor: Descriptor of a file that is open for reading.
        num_bytes: Size of the file.
        byte_offsets, byte_counts: int64 [pieces].

    Raises:
        ValueError: A piece outside the file.
    """
    _check_vector("byte_offsets", byte_offsets, _INT64)
    _check_vector("byte_counts", byte_counts, _INT64)
    _core.prefetch_file(descriptor, num_bytes, byte_offsets, byte_counts)


def copy_sequences(
    data: NDArray[np.uint8],
    pointers: Numbers,
    lengths: NDArray[np.int32],
    ids: Numbers,
    token_size: int,
) -> tuple[NDArray[np.uint8], Numbers]:
    """Sequences of a mapped token file, one after the other.

    Args:
        data: uint8 [n], the token file.
        pointers, lengths: int64 and int32 [sequences], in bytes and in tokens.
        ids: int64 [batch]; negative ones count from the end.
        token_size: Number of bytes in a token, 1 to 8.

    Returns:
        The bytes, uint8 [n], and where each sequence starts among the tokens, int64 [batch + 1].

    Raises:
        IndexError: No such sequence.
        ValueError: A sequence outside the data.
    """
    _check_vector("data", data, _UINT8)
    _check_vector("pointers", pointers, _INT64)
    _check_vector("lengths", lengths, _INT32)
    _check_vector("ids", ids, _INT64)
    if not 1 <= token_size <= 8:
        raise ConfigError(f"token_size is {token_size}; 1 to 8 is possible")
    return _core.copy_sequences(data, pointers, lengths, ids, token_size)


def first_bad_sequence(
    lengths: NDArray[np.int32], pointers: Numbers, token_size: int, byte_offset: int
) -> tuple[int, int]:
    """The first sequence that has a negative length, or does not start where the last one ended.

    Args:
        lengths: int32 [sequences], in tokens.
        pointers: int64 [sequences], in bytes.
        token_size: Number of bytes in a token.
        byte_offset: Where the first sequence must start.

    Returns:
        The place of that sequence (the number of sequences if all are ok), and the byte where it
        must start.
    """
    _check_vector("lengths", lengths, _INT32)
    _check_vector("pointers", pointers, _INT64)
    return _core.first_bad_sequence(lengths, pointers, token_size, byte_offset)


def first_bad_document(entries: Numbers, num_sequences: int) -> int:
    """The first document entry that is smaller than the one before it, or outside its limits.

    Args:
        entries: int64 [entries].
        num_sequences: The largest value that is possible.

    Returns:
        The place of that entry; the number of entries if all are ok.
    """
    _check_vector("entries", entries, _INT64)
    return _core.first_bad_document(entries, num_sequences)


def torch_randperm(
    size: int, seed: int, *, dtype: Any = np.int64, has_64_bit_draws: bool | None = None
) -> NDArray[Any]:
    """`torch.randperm(size, generator=torch.Generator().manual_seed(seed))`, on the CPU.

    Args:
        size: Number of numbers, at least 0.
        seed: Seed of the generator, -2**63 to 2**64 - 1. Its low 32 bits decide the result.
        dtype: uint32 (up to 2**32 numbers) or int64.
        has_64_bit_draws: Whether two words of the generator are drawn for each number. None: as
            torch decides, from 214,748,364 numbers on. Tests choose it for smaller sizes.

    Returns:
        A permutation of 0 to size - 1, [size] of `dtype`.
    """
    dtype = np.dtype(dtype)
    if dtype not in (np.dtype(np.uint32), _INT64):
        raise ConfigError(f"dtype is {dtype}; uint32 or int64 is needed")
    largest = 2**32 if dtype.kind == "u" else MAX_INT64 // 8
    if not 0 <= size <= largest:
        raise ConfigError(f"size is {size}; 0 to {largest} is possible for {dtype}")
    if not -(2**63) <= seed < 2**64:
        raise ConfigError(f"seed is {seed}; -2**63 to 2**64 - 1 is possible")
    if has_64_bit_draws is None:
        has_64_bit_draws = size >= (2**32 - 1) // 20
    if not has_64_bit_draws and size > 2**32 - 1:
        raise ConfigError(f"size is {size}; 32-bit draws need fewer than 2**32 numbers")
    return _core.torch_randperm(size, seed % 2**32, has_64_bit_draws, np.empty(0, dtype))


def swap_or_not(numbers: Numbers, size: int, key: int, is_inverse: bool) -> Numbers:
    """A keyed permutation of 0 to size - 1: the place of each number, in constant memory.

    The swap-or-not shuffle of Hoang, Morris and Rogaway (CRYPTO 2012), with
    48 + 2 * size.bit_length() rounds. It is a permutation for every size; like a random one for
    all statistics, but not made to keep a secret.

    Args:
        numbers: int64 [n], in any order.
        size: Number of numbers that are permuted, 0 to 2**63 - 1.
        key: Key that chooses the permutation, 0 to 2**64 - 1.
        is_inverse: Whether `numbers` are places, and the numbers there are the result.

    Returns:
        int64 [n].

    Raises:
        ValueError: A number outside [0, size).
    """
    _check_vector("numbers", numbers, _INT64)
    if not 0 <= size <= MAX_INT64:
        raise ConfigError(f"size is {size}; 0 to {MAX_INT64} is possible")
    if not 0 <= key < 2**64:
        raise ConfigError(f"key is {key}; 0 to 2**64 - 1 is possible")
    return _core.swap_or_not(numbers, size, key, is_inverse)


def _check_vector(name: str, array: NDArray[Any], dtype: np.dtype[Any]) -> None:
    if array.ndim != 1 or array.dtype != dtype or not array.flags.c_contiguous:
        raise ConfigError(
            f"{name} has shape {array.shape} and dtype {array.dtype}; "
            f"a contiguous [n] of {dtype} is needed"
        )


def _check_num_datasets(count: int) -> None:
    if not 1 <= count <= MAX_DATASETS:
        raise ConfigError(f"there are {count} datasets; 1 to {MAX_DATASETS} can be blended")


def _num_threads(threads: int | None) -> int:
    threads = available_cores() if threads is None else threads
    if not 1 <= threads <= MAX_INT32:
        raise ConfigError(f"threads is {threads}; at least 1 is needed")
    return threads


def _check_rows(sequence_length: int, num_rows: int) -> None:
    """A row has a token at least, and the bytes of all rows can be counted."""
    if not 1 <= sequence_length <= MAX_INT64 // 16 // max(num_rows, 1):
        raise ConfigError(f"sequence_length is {sequence_length}; at least 1 is needed")


def _draw(random: np.random.RandomState, kernel: Callable[..., Any], *arguments: Any) -> Any:
    """The array that a kernel draws from a generator, which is advanced."""
    full = random.get_state(legacy=False)
    if full["bit_generator"] != "MT19937":
        raise ConfigError("the random state is not an MT19937 generator")
    out, (key, position) = kernel(*arguments, full["state"]["key"], full["state"]["pos"])
    full["state"] = {"key": key, "pos": position}
    random.set_state(full)
    return out


# ---- transforms of samples ----


def fill_in_middle(
    tokens: Numbers,
    ends: Numbers,
    sample_numbers: Numbers,
    *,
    rate: float,
    spm_rate: float,
    prefix_token: int,
    middle_token: int,
    suffix_token: int,
    eod_token: int | None,
    pad_token: int | None,
    seed: int,
) -> tuple[Numbers, Numbers]:
    """Samples with some of their documents permuted for fill-in-the-middle.

    Args:
        tokens: int64 [n], the tokens of all samples, one sample after the other.
        ends: int64 [batch], where each sample ends; the last one ends at n.
        sample_numbers: int64 [batch], which decide the draws.
        rate, spm_rate, prefix_token, middle_token, suffix_token, eod_token, pad_token, seed: See
            `millrace.FillInMiddle`.

    Returns:
        The tokens, and the old place of each, -1 for those that are inserted: int64 [n], int64 [n].
        The samples end where they did.

    Raises:
        ValueError: A sample that ends outside the tokens, or before it starts.
    """
    for name, array in (("tokens", tokens), ("ends", ends), ("sample_numbers", sample_numbers)):
        _check_vector(name, array, _INT64)
    if not (0 <= rate <= 1 and 0 <= spm_rate <= 1):
        raise ConfigError(f"rate is {rate} and spm_rate {spm_rate}; 0 to 1 is possible")
    return _core.fill_in_middle(
        tokens,
        ends,
        sample_numbers,
        rate,
        spm_rate,
        prefix_token,
        middle_token,
        suffix_token,
        eod_token,
        pad_token,
        seed,
    )


def mark_repeats(
    tokens: Numbers, ends: Numbers, max_period: int, min_repeats: int, is_whole: bool
) -> Flags:
    """Marks of the tokens in runs that repeat themselves.

    Args:
        tokens: int64 [n], the tokens of all samples, one sample after the other.
        ends: int64 [batch], where each sample ends; the last one ends at n.
        max_period: Largest number of tokens that are repeated, at least 1.
        min_repeats: Smallest number of times they stand in a row, at least 2.
        is_whole: Whether to mark all tokens of a sample that has such a run.

    Returns:
        uint8 [n], 1 in such runs, else 0.

    Raises:
        ValueError: A sample that ends outside the tokens, or before it starts.
    """
    _check_vector("tokens", tokens, _INT64)
    _check_vector("ends", ends, _INT64)
    if not (1 <= max_period <= MAX_INT32 and 2 <= min_repeats <= MAX_INT32):
        raise ConfigError(
            f"max_period is {max_period} and min_repeats {min_repeats}; at least 1 and 2 are "
            f"needed, and at most {MAX_INT32} is possible"
        )
    return _core.mark_repeats(tokens, ends, max_period, min_repeats, is_whole)


def mark_ranges(
    ranges: NDArray[np.int32], sequences: Numbers, offsets: Numbers, counts: Numbers
) -> Flags:
    """Marks of the tokens of spans that lie in ranges.

    Args:
        ranges: int32 [ranges, 3], (sequence, start, stop) in tokens, sorted and without overlap;
            it may be mapped.
        sequences, offsets, counts: int64 [spans], `counts` tokens of a sequence from `offsets` on.

    Returns:
        uint8 [sum of counts], 1 in a range, else 0.

    Raises:
        ValueError: A span with a negative offset or count.
    """
    if ranges.ndim != 2 or ranges.shape[1] != 3:
        raise ConfigError(f"ranges has shape {ranges.shape}; [ranges, 3] is needed")
    _check_vector("ranges", ranges.reshape(-1), _INT32)
    _check_vector("sequences", sequences, _INT64)
    _check_vector("offsets", offsets, _INT64)
    _check_vector("counts", counts, _INT64)
    return _core.mark_ranges(ranges.reshape(-1), sequences, offsets, counts)


def mask_losses(
    loss_masks: NDArray[np.float32], flags: Flags, ends: Numbers
) -> NDArray[np.float32]:
    """Loss masks with 0 where the flag of the label is 0.

    Label k of row i is token k + 1 of sample i; where the sample has no such token, the loss mask
    stays as it is.

    Args:
        loss_masks: float32 [batch, length].
        flags: uint8 [n], a flag of each token of all samples.
        ends: int64 [batch], where each sample ends; the last one ends at n.

    Returns:
        float32 [batch, length].

    Raises:
        ValueError: A sample that does not fit its row, or ends outside the flags.
    """
    if loss_masks.ndim != 2 or loss_masks.dtype != np.float32:
        raise ConfigError(
            f"loss_masks has shape {loss_masks.shape} and dtype {loss_masks.dtype}; "
            "[batch, length] of float32 is needed"
        )
    _check_vector("flags", flags, _UINT8)
    _check_vector("ends", ends, _INT64)
    return _core.mask_losses(np.ascontiguousarray(loss_masks), flags, ends)
