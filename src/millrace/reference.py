"""The slow twin of every kernel: the same names and results as `millrace._native`, in plain Python.

These functions say what the kernels compute, in the fewest words, and the tests hold the kernels
to them. They check what only reading the data can show, and leave dtypes and shapes to the doors in
`_native`. None of them calls the native core.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_32_BIT_STEP = 2**32 - 1
"""Up to this step of a shuffle NumPy draws 32 bits, above it 64."""


def shuffled(values: NDArray[Any], random: np.random.RandomState) -> NDArray[Any]:
    """A shuffled copy of `values`: NumPy's own shuffle is the definition.

    Args:
        values: shape [n].
        random: a legacy generator; it is advanced.

    Returns:
        shape [n], the dtype of `values`.
    """
    out: NDArray[Any] = values.copy()
    random.shuffle(out)
    return out


def shuffled_ranges(
    ranges: Sequence[tuple[int, int, int]], dtype: Any, random: np.random.RandomState
) -> NDArray[Any]:
    """Runs of consecutive numbers, each run shuffled by itself, one after the other.

    Args:
        ranges: (start, stop, copies) of each run; `stop` is left out.
        dtype: of the result.
        random: a legacy generator; it is advanced by the draws.

    Returns:
        shape [sum of (stop - start) * copies], of `dtype`.
    """
    runs = [
        shuffled(np.array(list(range(start, stop)) * copies, dtype=dtype), random)
        for start, stop, copies in ranges
    ]
    return np.concatenate([np.array([], dtype=dtype), *runs])


def draw_targets(first: int, count: int, random: np.random.RandomState) -> NDArray[np.int64]:
    """The swap targets of `count` steps of a shuffle: the k-th is uniform in [0, first - k].

    Masked rejection: draw as many bits as the step has until their number is no greater than the
    step. NumPy takes the bits from one 32-bit word, or from two (the high one first).

    Returns:
        int64 [count].
    """
    next_word = random._bit_generator.random_raw
    targets = []
    for step in range(first, first - count, -1):
        mask = 2 ** step.bit_length() - 1
        target = step + 1
        while target > step:
            word = next_word()
            if step > MAX_32_BIT_STEP:
                word = word << 32 | next_word()
            target = word & mask
        targets.append(target)
    return np.array(targets, dtype=np.int64)


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

    With all documents' tokens in a row, sample k draws the tokens from k * sequence_length up to
    (k + 1) * sequence_length + extra. Row k + 1 is where sample k + 1 starts, seen from the
    document that holds the last token which sample k draws.

    Args:
        sequence_lengths: int32 [sequences], in tokens.
        document_index: int32 [documents], places in `sequence_lengths`, in reading order.
        sequence_length: tokens to train on in a sample, at least 1.
        num_samples: number of samples; the documents must suffice, but for the last one
            where `allow_partial` is set: it ends with the last document that can name its end.
        dtype: int32 or int64, of the rows.

    Returns:
        [num_samples + 1, 2] of `dtype`.

    Raises:
        ValueError: too few tokens, a negative length or an entry of the document index outside
            the sequences.
    """
    if np.any((document_index < 0) | (document_index >= len(sequence_lengths))):
        raise ValueError("an entry of document_index is no sequence")
    lengths = sequence_lengths[document_index].astype(np.int64)
    if np.any(lengths < 0):
        raise ValueError("a length is negative")
    ends = np.cumsum(lengths)
    num_tokens = int(lengths.sum())
    extra = 1 if add_extra_token else 0
    rows = [(0, 0)]
    for sample in range(num_samples):
        start = (sample + 1) * sequence_length  # of the next sample
        drawn = start + extra
        if drawn <= num_tokens:
            place = int(np.argmax(ends >= drawn))
            rows.append((place, start - int(ends[place] - lengths[place])))
        elif allow_partial and sample == num_samples - 1 and np.any(lengths >= extra):
            place = int(np.flatnonzero(lengths >= extra)[-1])
            rows.append((place, int(lengths[place]) - extra))
        else:
            raise ValueError(f"{num_tokens} tokens are too few for {num_samples} samples")
    return np.array(rows, dtype=dtype)


def blend_by_weights(
    weights: NDArray[np.float64], size: int
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """The greedy blend: each sample comes from the dataset that lags most behind its weight.

    Args:
        weights: float64 [datasets].
        size: number of samples.

    Returns:
        dataset_index int16 [size] and dataset_sample_index int64 [size].
    """
    return _blend(weights, np.full(len(weights), size), size)


def blend_by_sizes(sizes: NDArray[np.int64]) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """The exhaustive blend: exactly sizes[d] samples of each dataset d, evenly mixed.

    Args:
        sizes: int64 [datasets], at least 0.

    Returns:
        dataset_index int16 [sum(sizes)] and dataset_sample_index int64 [sum(sizes)].
    """
    total = int(sizes.sum())
    return _blend(sizes / max(total, 1), sizes, total)


def _blend(
    weights: NDArray[np.float64], limits: NDArray[np.int64], size: int
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """`size` samples, at most limits[d] of them from dataset d."""
    taken = np.zeros(len(weights), np.int64)
    dataset_index = np.zeros(size, np.int16)
    dataset_sample_index = np.zeros(size, np.int64)
    for sample in range(size):
        with np.errstate(over="ignore"):
            errors = weights * max(sample, 1) - taken
        best = np.argmax(np.where(taken < limits, errors, -np.inf))  # the first of equals
        dataset_index[sample], dataset_sample_index[sample] = best, taken[best]
        taken[best] += 1
    return dataset_index, dataset_sample_index


class SampleSource(NamedTuple):
    """One dataset's arrays; see `millrace._native.sample_source`."""

    tokens: NDArray[Any]
    sequence_pointers: NDArray[np.int64]
    sequence_lengths: NDArray[np.int32]
    document_index: NDArray[np.int32]
    sample_index: NDArray[Any]
    shuffle_index: NDArray[Any]


def sample_source(
    tokens: NDArray[Any],
    sequence_pointers: NDArray[np.int64],
    sequence_lengths: NDArray[np.int32],
    document_index: NDArray[np.int32],
    sample_index: NDArray[Any],
    shuffle_index: NDArray[Any],
) -> SampleSource:
    """One dataset's arrays, held for `gather_samples`.

    Args:
        tokens: [n], an integer dtype: the whole token file.
        sequence_pointers: int64 [sequences], byte offsets into it.
        sequence_lengths: int32 [sequences], in tokens.
        document_index: int32 [documents].
        sample_index: int32 or int64 [samples + 1, 2].
        shuffle_index: uint32 or int64 [samples].
    """
    return SampleSource(
        tokens, sequence_pointers, sequence_lengths, document_index, sample_index, shuffle_index
    )


def gather_samples(
    sources: tuple[SampleSource, ...],
    source_numbers: NDArray[np.int64],
    sample_numbers: NDArray[np.int64],
    *,
    sequence_length: int,
    add_extra_token: bool,
    pad_token: int | None,
    eod_token: int | None,
    reset_position_ids: bool,
    eod_mask_loss: bool,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
    """The samples of a batch: row i is sample sample_numbers[i] of sources[source_numbers[i]].

    Args:
        source_numbers, sample_numbers: int64 [batch].
        pad_token: fills what a partial sample lacks; where a label equals it the loss mask is 0,
            and it becomes token 0 in tokens and labels. None: what a sample lacks is token 0, its
            labels are masked, and no token of the sample is.
        eod_token: the token that `reset_position_ids` and `eod_mask_loss` look for; None: none.

    Returns:
        tokens int64, labels int64, loss_mask float32 and position_ids int64, each
        [batch, sequence_length].

    Raises:
        ValueError: a number, or an entry of an index, that points outside its array.
    """
    pairs = zip(source_numbers.tolist(), sample_numbers.tolist(), strict=True)
    texts = [
        _text(_entry(sources, source_number), sample_number, add_extra_token)
        for source_number, sample_number in pairs
    ]
    return _fill(
        texts,
        sequence_length,
        add_extra_token,
        pad_token,
        eod_token,
        reset_position_ids,
        eod_mask_loss,
    )


def find_pieces(
    source: SampleSource,
    sample_numbers: NDArray[np.int64],
    sequence_length: int,
    add_extra_token: bool,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Which bytes of its token file some samples of one source take.

    Returns:
        byte_offsets and byte_counts, int64 [pieces], and bounds, int64 [batch + 1].

    Raises:
        ValueError: a number, or an entry of an index, that points outside its array.
    """
    width = source.tokens.itemsize
    offsets, counts, bounds = [], [], [0]
    for number in sample_numbers.tolist():
        for sequence, begin, end in _parts(source, number, add_extra_token):
            if begin < end:
                _stored(source, sequence, begin, end)  # or it raises
                offsets.append(int(source.sequence_pointers[sequence]) + begin * width)
                counts.append((end - begin) * width)
        bounds.append(len(offsets))
        num_tokens = sum(counts[bounds[-2] :]) // width
        if num_tokens > sequence_length + (1 if add_extra_token else 0):
            raise ValueError(f"sample {number} has {num_tokens} tokens")
    return np.array(offsets, np.int64), np.array(counts, np.int64), np.array(bounds, np.int64)


def fill_rows(
    tokens: NDArray[Any],
    ends: NDArray[np.int64],
    *,
    sequence_length: int,
    add_extra_token: bool,
    pad_token: int | None,
    eod_token: int | None,
    reset_position_ids: bool,
    eod_mask_loss: bool,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
    """What `gather_samples` returns, from tokens that were read: row i has those up to ends[i].

    Raises:
        ValueError: a sample that is longer than its row, or ends outside the tokens.
    """
    starts = [0, *ends.tolist()]
    for start, end in zip(starts, ends.tolist(), strict=False):
        if not start <= end <= len(tokens):
            raise ValueError(f"a row from token {start} to {end} does not fit")
    texts = [tokens[a:b].tolist() for a, b in zip(starts, ends.tolist(), strict=False)]
    return _fill(
        texts,
        sequence_length,
        add_extra_token,
        pad_token,
        eod_token,
        reset_position_ids,
        eod_mask_loss,
    )


def _fill(
    texts: list[list[int]],
    sequence_length: int,
    add_extra_token: bool,
    pad_token: int | None,
    eod_token: int | None,
    reset_position_ids: bool,
    eod_mask_loss: bool,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
    """The rows of some texts, padded and masked."""
    shape = (len(texts), sequence_length)
    tokens, labels = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    loss_mask, position_ids = np.ones(shape, np.float32), np.zeros(shape, np.int64)
    capacity = sequence_length + (1 if add_extra_token else 0)
    for i, text in enumerate(texts):
        if len(text) > capacity:
            raise ValueError(f"row {i} has {len(text)} tokens, above {capacity}; does not fit")
        padded = [*text, *[pad_token] * (sequence_length + 1 - len(text))]
        ends = [token is not None and token == eod_token for token in padded]
        is_pad = [token == pad_token for token in padded]
        plain = [0 if token is None or token == pad_token else token for token in padded]
        tokens[i], labels[i] = plain[:-1], plain[1:]
        if eod_mask_loss:
            loss_mask[i][ends[:-1]] = 0.0
        loss_mask[i][is_pad[1:]] = 0.0
        position_ids[i] = _positions(ends[:-1] if reset_position_ids else [False] * sequence_length)
    return tokens, labels, loss_mask, position_ids


def _text(source: SampleSource, sample_number: int, add_extra_token: bool) -> list[int]:
    """A sample's tokens."""
    text: list[int] = []
    for sequence, begin, end in _parts(source, sample_number, add_extra_token):
        text += _stored(source, sequence, begin, end)
    return text


def _parts(
    source: SampleSource, sample_number: int, add_extra_token: bool
) -> list[tuple[int, int, int]]:
    """A sample as tokens [begin, end) of sequences: from one row of the sample index to the next,
    and the extra one."""
    row = int(_entry(source.shuffle_index, sample_number))
    first, start = (int(number) for number in _entry(source.sample_index, row))
    last, stop = (int(number) for number in _entry(source.sample_index, row + 1))
    if first > last or min(start, stop) < 0:
        raise ValueError(f"sample {row} goes from {first, start} to {last, stop}")
    parts = []
    for place in range(first, last + 1):
        sequence = int(_entry(source.document_index, place))
        length = int(_entry(source.sequence_lengths, sequence))
        begin = start if place == first else 0
        end = stop + (1 if add_extra_token else 0) if place == last else length
        if not 0 <= begin <= end <= length:
            raise ValueError(f"tokens {begin} to {end} of a sequence of {length} were asked for")
        parts.append((sequence, begin, end))
    return parts


def _stored(source: SampleSource, sequence: int, begin: int, end: int) -> list[int]:
    """Tokens [begin, end) of a sequence; it may start at any byte of the token file."""
    if begin == end:
        return []
    width = source.tokens.itemsize
    pointer = int(source.sequence_pointers[sequence])
    if not 0 <= pointer <= pointer + end * width <= source.tokens.nbytes:
        raise ValueError(f"sequence {sequence} lies outside the token file")
    data = source.tokens.view(np.uint8)[pointer + begin * width : pointer + end * width]
    tokens: list[int] = np.frombuffer(data.tobytes(), source.tokens.dtype).tolist()
    return tokens


def _positions(ends: list[bool]) -> list[int]:
    """0, 1, 2, ...; from 0 again after each end of a document."""
    positions: list[int] = []
    position = 0
    for is_end in ends:
        positions.append(position)
        position = 0 if is_end else position + 1
    return positions


def _entry(values: Any, number: int) -> Any:
    """values[number], for numbers from 0 alone (Python would count negative ones from the end)."""
    if not 0 <= number < len(values):
        raise ValueError(f"{number} is outside [0, {len(values)})")
    return values[number]


def copy_pieces(
    data: NDArray[np.uint8], byte_offsets: NDArray[np.int64], byte_counts: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """Pieces of some bytes, one after the other: uint8 [sum of byte_counts].

    Raises:
        ValueError: a piece outside the data.
    """
    pieces = [np.empty(0, np.uint8)]
    for offset, count in zip(byte_offsets.tolist(), byte_counts.tolist(), strict=True):
        if offset < 0 or count < 0 or offset + count > len(data):
            raise ValueError(f"{count} bytes from byte {offset} on lie outside {len(data)}")
        pieces.append(data[offset : offset + count])
    return np.concatenate(pieces)


def copy_sequences(
    data: NDArray[np.uint8],
    pointers: NDArray[np.int64],
    lengths: NDArray[np.int32],
    ids: NDArray[np.int64],
    token_size: int,
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Sequences of a token file, one after the other: uint8 [bytes], and where each starts among
    the tokens, int64 [batch + 1].

    Raises:
        IndexError: no such sequence.
        ValueError: a sequence outside the data.
    """
    counts = lengths[ids].astype(np.int64)
    if np.any(counts < 0):
        raise ValueError("a length is outside [0, 2**31 - 1]")
    flat = copy_pieces(data, pointers[ids], counts * token_size)
    return flat, np.concatenate(([0], np.cumsum(counts)))


def read_pieces(
    descriptor: int,
    num_bytes: int,
    byte_offsets: NDArray[np.int64],
    byte_counts: NDArray[np.int64],
) -> NDArray[np.uint8]:
    """Pieces of an open file, one after the other: uint8 [sum of byte_counts].

    Raises:
        ValueError: a piece outside the file.
    """
    data = np.frombuffer(os.pread(descriptor, num_bytes, 0), np.uint8)
    return copy_pieces(data, byte_offsets, byte_counts)


def first_bad_sequence(
    lengths: NDArray[np.int32], pointers: NDArray[np.int64], token_size: int, byte_offset: int
) -> tuple[int, int]:
    """The first sequence with a negative length, or that does not start where the last one ended,
    and where the next one after the well ones must start."""
    for place, (length, pointer) in enumerate(
        zip(lengths.tolist(), pointers.tolist(), strict=True)
    ):
        if length < 0 or pointer != byte_offset:
            return place, byte_offset
        byte_offset += length * token_size
    return len(lengths), byte_offset


def first_bad_document(entries: NDArray[np.int64], num_sequences: int) -> int:
    """The first entry that is smaller than the one before it, or outside [0, num_sequences]."""
    previous = 0
    for place, entry in enumerate(entries.tolist()):
        if not previous <= entry <= num_sequences:
            return place
        previous = entry
    return len(entries)
