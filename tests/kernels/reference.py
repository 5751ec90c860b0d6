"""The slow twin of every kernel: the same names and results as `millrace._native`, in plain Python.

These functions define what the kernels compute, and the tests compare the two. They check what only
reading the data can show, and leave dtypes and ranges to `_native`. None calls the native core.
"""

import os
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace.samples.fields import SampleOptions

Numbers = NDArray[np.int64]
Lengths = NDArray[np.int32]
Bytes = NDArray[np.uint8]
Span = tuple[int, int, int]  # sequence, offset, count
Samples = tuple[Any, ...]

MAX_32_BIT_STEP = 2**32 - 1
"""Up to this step of a shuffle NumPy draws 32 bits, above it 64."""


def shuffled_ranges(
    ranges: Sequence[tuple[int, int, int]], dtype: Any, random: np.random.RandomState
) -> NDArray[Any]:
    """NumPy's own shuffle is the definition."""
    runs = [np.array([], dtype)]
    for start, stop, copies in ranges:
        runs.append(np.array(list(range(start, stop)) * copies, dtype))
        random.shuffle(runs[-1])
    return np.concatenate(runs)


def draw_targets(first: int, count: int, random: np.random.RandomState) -> Numbers:
    """Masked rejection: draw as many bits as the step has until their number is no greater than the
    step. NumPy takes the bits from one 32-bit word, or from two (the high one first).
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
    sequence_lengths: Lengths,
    document_index: Lengths,
    sequence_length: int,
    num_samples: int,
    *,
    add_extra_token: bool = True,
    allow_partial: bool = False,
    dtype: Any = np.int32,
) -> NDArray[Any]:
    """With all documents' tokens in a row, sample k draws the tokens from k * sequence_length up to
    (k + 1) * sequence_length + extra. Row k + 1 is where sample k + 1 starts, seen from the
    document that holds the last token which sample k draws. The end of a partial sample is the last
    document that can name it.
    """
    if np.any((document_index < 0) | (document_index >= len(sequence_lengths))):
        raise ValueError("an entry of document_index is not a sequence")
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
            place = int(np.searchsorted(ends, drawn))
            rows.append((place, start - int(ends[place] - lengths[place])))
        elif allow_partial and sample == num_samples - 1 and np.any(lengths >= extra):
            place = int(np.flatnonzero(lengths >= extra)[-1])
            rows.append((place, int(lengths[place]) - extra))
        else:
            raise ValueError(f"{num_tokens} tokens are too few for {num_samples} samples")
    return np.array(rows, dtype=dtype)


def blend_by_weights(weights: NDArray[np.float64], size: int) -> tuple[NDArray[np.int16], Numbers]:
    return _blend(weights, np.full(len(weights), size), size)


def blend_by_sizes(sizes: Numbers) -> tuple[NDArray[np.int16], Numbers]:
    total = int(sizes.sum())
    return _blend(sizes / max(total, 1), sizes, total)


def _blend(
    weights: NDArray[np.float64], limits: Numbers, size: int
) -> tuple[NDArray[np.int16], Numbers]:
    """`size` samples, at most limits[d] of them from dataset d."""
    taken = np.where(limits > 0, 0.0, np.inf)  # infinite where nothing is left
    dataset_index = np.zeros(size, np.int16)
    dataset_sample_index = np.zeros(size, np.int64)
    with np.errstate(over="ignore"):
        for sample in range(size):
            best = np.argmax(weights * max(sample, 1) - taken)  # the first of equals
            count = taken[best]
            dataset_index[sample], dataset_sample_index[sample] = best, count
            taken[best] = count + 1 if count + 1 < limits[best] else np.inf
    return dataset_index, dataset_sample_index


def look_up_draws(
    dataset_index: NDArray[np.int16], dataset_sample_index: Numbers, sample_numbers: Numbers
) -> tuple[NDArray[np.int16], Numbers]:
    if np.any((sample_numbers < 0) | (sample_numbers >= len(dataset_index))):
        raise IndexError(f"one of {sample_numbers} is outside [0, {len(dataset_index)})")
    return dataset_index[sample_numbers], dataset_sample_index[sample_numbers]


class TokenSource(NamedTuple):
    tokens: NDArray[Any]
    sequence_pointers: Numbers
    sequence_lengths: Lengths
    num_bytes: int

    def locate(self, sequence: int, offset: int, count: int) -> tuple[int, int]:
        """The byte offset and byte count of a span."""
        length = int(_entry(self.sequence_lengths, sequence))
        if not 0 <= offset <= offset + count <= length or count < 0:
            raise ValueError(f"{count} tokens from {offset} on are outside a sequence of {length}")
        width = self.tokens.itemsize
        pointer = int(self.sequence_pointers[sequence])
        if not 0 <= pointer <= pointer + (offset + count) * width <= self.num_bytes:
            raise ValueError(f"sequence {sequence} lies outside the token file")
        return pointer + offset * width, count * width

    def cut(self, spans: list[Span]) -> list[Span]:
        """A span of the whole file (sequence -1), as spans of its sequences."""
        if not spans or spans[0][0] >= 0:
            return spans
        [(_, start, count)] = spans
        first = np.asarray(self.sequence_pointers) // self.tokens.itemsize
        begin = np.maximum(first, start)
        counts = np.minimum(first + self.sequence_lengths, start + count) - begin
        places = np.flatnonzero(counts > 0)
        columns = places, (begin - first)[places], counts[places]
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def read(self, sequence: int, offset: int, count: int) -> list[int]:
        """The tokens of a span; a sequence may start at any byte of the token file."""
        start, size = self.locate(sequence, offset, count)
        data = self.tokens.view(np.uint8)[start : start + size]
        tokens: list[int] = np.frombuffer(data.tobytes(), self.tokens.dtype).tolist()
        return tokens


def sharded_source(
    shards: Sequence[NDArray[Any]], shard_sizes: Sequence[int], sequence_length: int
) -> TokenSource:
    """The tokens of all shards, one after the other, as those of one file."""
    total = sum(shard_sizes)
    num_bytes = total * sequence_length * shards[0].itemsize
    pointers: Any = range(0, num_bytes, sequence_length * shards[0].itemsize)
    lengths = np.broadcast_to(np.int32(sequence_length), total)
    return TokenSource(np.concatenate(shards), pointers, lengths, num_bytes)


class SequenceOrder(NamedTuple):
    num_sequences: int
    sequence_length: int

    def spans(self, sample_number: int) -> list[Span]:
        """A sample's (sequence, offset, count)."""
        if not 0 <= sample_number < self.num_sequences:
            raise ValueError(f"there is no sample {sample_number}")
        return [(sample_number, 0, self.sequence_length)]


class GPTOrder(NamedTuple):
    sequence_lengths: Lengths
    document_index: Lengths
    sample_index: NDArray[Any]
    shuffle_index: NDArray[Any]
    sequence_length: int
    add_extra_token: bool

    def spans(self, sample_number: int) -> list[Span]:
        """A sample's (sequence, offset, count): from one row of the sample index to the next, and
        the extra token."""
        extra = 1 if self.add_extra_token else 0
        row = int(_entry(self.shuffle_index, sample_number))
        first, start = (int(number) for number in _entry(self.sample_index, row))
        last, stop = (int(number) for number in _entry(self.sample_index, row + 1))
        if first > last or min(start, stop) < 0:
            raise ValueError(f"sample {row} goes from {first, start} to {last, stop}")
        out = []
        room = self.sequence_length + extra
        for place in range(first, last + 1):
            sequence = int(_entry(self.document_index, place))
            length = int(_entry(self.sequence_lengths, sequence))
            begin = start if place == first else 0
            end = stop + extra if place == last else length
            if not 0 <= begin <= end <= length or end - begin > room:
                raise ValueError(f"tokens {begin} to {end} of {length} do not fit sample {row}")
            room -= end - begin
            if begin < end:
                out.append((sequence, begin, end - begin))
        return out


gpt_order = GPTOrder
AnyOrder = GPTOrder | SequenceOrder
Sources = tuple[TokenSource, ...]
Orders = tuple[AnyOrder, ...]


def spans(
    order: AnyOrder, sample_numbers: Numbers, token_source: TokenSource | None = None
) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    samples = [order.spans(number) for number in sample_numbers.tolist()]
    if token_source is not None:
        samples = [token_source.cut(sample) for sample in samples]
    return *_columns(samples), np.cumsum([0, *map(len, samples)], dtype=np.int64)


def locate_spans(
    token_source: TokenSource, sequences: Numbers, offsets: Numbers, counts: Numbers
) -> tuple[Numbers, Numbers]:
    columns = (column.tolist() for column in (sequences, offsets, counts))
    pieces = [token_source.locate(*span) for span in zip(*columns, strict=True)]
    byte_offsets, byte_counts = np.array(pieces, np.int64).reshape(-1, 2).T.copy()
    return byte_offsets, byte_counts


class RowForm(NamedTuple):
    tokens: bool = True
    labels: bool = True
    loss_mask: bool = True
    position_ids: bool = True
    parts: bool = False
    token_dtype: str = "int64"
    share_labels: bool = False
    vocab_size: int | None = None


def gather_samples(
    token_sources: Sources,
    orders: Orders,
    source_numbers: Numbers,
    sample_numbers: Numbers,
    options: SampleOptions,
    form: RowForm | None = None,
) -> Samples:
    form = RowForm() if form is None else form
    samples = _spans(orders, source_numbers, sample_numbers)
    used = [token_sources[number].tokens.dtype for number in source_numbers.tolist()]
    if form.token_dtype == "file" and len(set(used)) > 1:
        raise ValueError("the token files of a batch have several dtypes")
    dtype = (*used, *(source.tokens.dtype for source in token_sources), np.dtype(np.int64))[0]
    rows = _rows(_read(token_sources, source_numbers, samples), options, form, dtype)
    if not form.parts:
        return rows
    sequences, _, counts = _columns(samples)
    return *rows, sequences, counts, np.cumsum([0, *map(len, samples)], dtype=np.int64)


def gather_tokens(
    token_sources: Sources, orders: Orders, source_numbers: Numbers, sample_numbers: Numbers
) -> tuple[NDArray[Any], Numbers, Numbers, Numbers, Numbers]:
    samples = _spans(orders, source_numbers, sample_numbers)
    tokens = _read(token_sources, source_numbers, samples)
    used = {token_sources[number].tokens.dtype for number in source_numbers.tolist()}
    dtypes = used or {source.tokens.dtype for source in token_sources[:1]}
    ids = [token for sample in tokens for token in sample]
    flat = np.array(ids, dtypes.pop() if len(dtypes) == 1 else np.int64)
    return flat, np.cumsum([len(sample) for sample in tokens], dtype=np.int64), *_columns(samples)


def _spans(orders: Orders, source_numbers: Numbers, sample_numbers: Numbers) -> list[list[Span]]:
    """The spans of each sample."""
    pairs = zip(source_numbers.tolist(), sample_numbers.tolist(), strict=True)
    return [_entry(orders, source).spans(number) for source, number in pairs]


def _read(sources: Sources, numbers: Numbers, samples: list[list[Span]]) -> list[list[int]]:
    """The tokens of each sample."""
    return [
        [token for span in sample for token in sources[number].read(*span)]
        for number, sample in zip(numbers.tolist(), samples, strict=True)
    ]


def _columns(samples: list[list[Span]]) -> tuple[Numbers, Numbers, Numbers]:
    """The sequences, offsets and counts of all spans."""
    spans = [span for sample in samples for span in sample]
    sequences, offsets, counts = np.array(spans, np.int64).reshape(-1, 3).T.copy()
    return sequences, offsets, counts


def fill_rows(
    tokens: NDArray[Any],
    ends: Numbers,
    options: SampleOptions,
    form: RowForm | None = None,
    part_starts: Numbers | None = None,
) -> Samples:
    bounds = [0, *ends.tolist()]
    for start, end in pairwise(bounds):
        if not start <= end <= len(tokens):
            raise ValueError(f"a row from token {start} to {end} does not fit")
    samples = [tokens[start:end].tolist() for start, end in pairwise(bounds)]
    rows = _rows(samples, options, RowForm() if form is None else form, tokens.dtype)
    return rows if part_starts is None else _cut_at_parts(rows, bounds, part_starts.tolist())


def _cut_at_parts(rows: Samples, bounds: list[int], part_starts: list[int]) -> Samples:
    """Each token of a row in turn; padding starts with a part of its own."""
    firsts = [start for start, end in pairwise(bounds) if start < end]
    starts = {*part_starts, *firsts}
    if part_starts != sorted(starts) or not starts <= {*range(bounds[-1])}:
        raise ValueError(f"the parts start at {part_starts}, and the samples at {firsts}")
    tokens, *others = (array if array is None else array.copy() for array in rows)
    labels, loss_mask, position_ids = others
    lengths = [array.shape[1] for array in others if array is not None]
    for row, (start, end) in enumerate(pairwise(bounds)):
        places = {*(one - start for one in starts if start <= one < end), end - start}
        position = 0
        for place in range(max(lengths, default=0)):
            position = 0 if place in places else position + 1
            if position_ids is not None:
                position_ids[row, place] = position
            for array in (labels, loss_mask):
                if array is not None and place + 1 in places and place + 1 < end - start:
                    array[row, place] = 0
    return tokens, labels, loss_mask, position_ids


def _rows(
    samples: list[list[int]], options: SampleOptions, form: RowForm, file_dtype: np.dtype[Any]
) -> Samples:
    """The rows of some samples, padded and masked; None for arrays that the form leaves out."""
    length, pad, eod = options.sequence_length, options.pad_token, options.eod_token
    dtype = file_dtype if form.token_dtype == "file" else np.dtype(form.token_dtype)
    least, limit = np.iinfo(dtype).min, np.iinfo(dtype).max + 1
    if form.vocab_size is not None:
        least, limit = 0, min(form.vocab_size, limit)
    shape = (len(samples), length)
    both = np.zeros((len(samples), length + 1), dtype)
    loss_mask, position_ids = np.ones(shape, np.float32), np.zeros(shape, np.int64)
    capacity = length + (1 if options.add_extra_token else 0)
    for i, sample in enumerate(samples):
        if len(sample) > capacity:
            raise ValueError(f"row {i} has {len(sample)} tokens, above {capacity}; does not fit")
        if bad := [token for token in sample if token != pad and not least <= token < limit]:
            raise ValueError(f"token id {bad[0]} of row {i} is outside [{least}, {limit})")
        padded = [*sample, *[pad] * (length + 1 - len(sample))]
        ends = [token is not None and token == eod for token in padded]
        is_pad = [token == pad for token in padded]
        both[i] = [0 if token is None or token == pad else token for token in padded]
        if options.eod_mask_loss:
            loss_mask[i][ends[:-1]] = 0.0
        loss_mask[i][is_pad[1:]] = 0.0
        position_ids[i] = _positions(ends[:-1] if options.reset_position_ids else [False] * length)
    return (
        both[:, :-1] if form.tokens else None,
        both[:, 1:] if form.labels else None,
        loss_mask if form.loss_mask else None,
        position_ids if form.position_ids else None,
    )


def _positions(ends: list[bool]) -> list[int]:
    """0, 1, 2, ...; from 0 again after each end of a document."""
    return list(accumulate(ends[:-1], lambda place, is_end: 0 if is_end else place + 1, initial=0))


def _entry(values: Any, number: int) -> Any:
    """values[number], for numbers from 0 alone (Python would count negative ones from the end)."""
    if not 0 <= number < len(values):
        raise ValueError(f"{number} is outside a sequence of {len(values)} entries")
    return values[number]


def find_documents(document_indices: Numbers, sequences: Numbers) -> Numbers:
    return np.searchsorted(document_indices, sequences, side="right").astype(np.int64) - 1


def copy_pieces(data: Bytes, byte_offsets: Numbers, byte_counts: Numbers) -> Bytes:
    pieces = [np.empty(0, np.uint8)]
    for offset, count in zip(byte_offsets.tolist(), byte_counts.tolist(), strict=True):
        if offset < 0 or count < 0 or offset + count > len(data):
            raise ValueError(f"{count} bytes from byte {offset} on lie outside {len(data)}")
        pieces.append(data[offset : offset + count])
    return np.concatenate(pieces)


def prefetch_mapped(data: Bytes, *pieces: Numbers) -> None:
    # Its errors are what can be seen of it.
    copy_pieces(data, *pieces)


def prefetch_file(descriptor: int, num_bytes: int, *pieces: Numbers) -> None:
    read_packed(descriptor, num_bytes, *pieces)


def copy_sequences(
    data: Bytes, pointers: Numbers, lengths: Lengths, ids: Numbers, token_size: int
) -> tuple[Bytes, Numbers]:
    counts = lengths[ids].astype(np.int64)
    if np.any(counts < 0):
        raise ValueError("a length is outside [0, 2**31 - 1]")
    flat = copy_pieces(data, pointers[ids], counts * token_size)
    return flat, np.concatenate(([0], np.cumsum(counts)))


def read_packed(descriptor: int, num_bytes: int, *pieces: Numbers) -> Bytes:
    return copy_pieces(np.frombuffer(os.pread(descriptor, num_bytes, 0), np.uint8), *pieces)


def read_pieces(
    descriptor: int,
    byte_offsets: Numbers,
    sizes: Numbers,
    buffer: Bytes,
    targets: Numbers,
    *,
    or_words: bool = False,
) -> int:
    bits = 0
    pieces = list(zip(byte_offsets.tolist(), sizes.tolist(), targets.tolist(), strict=True))
    for offset, size, target in pieces:
        if min(offset, size) < 0 or offset + size > 2**63 - 1:
            raise ValueError(f"{size} bytes from byte {offset} on are outside any file")
        if target < 0 or target + size > len(buffer):
            raise ValueError(f"{size} bytes for byte {target} on lie outside {len(buffer)}")
        if or_words and size % 4:
            raise ValueError(f"{size} bytes are not 32-bit words")
    for offset, size, target in pieces:
        data = os.pread(descriptor, size, offset)
        if len(data) < size:
            raise ValueError(f"the file ends at byte {os.fstat(descriptor).st_size}")
        buffer[target : target + size] = np.frombuffer(data, np.uint8)
        if or_words:
            bits |= int(np.bitwise_or.reduce(np.frombuffer(data, np.uint32)))
    return bits


def first_bad_sequence(
    lengths: Lengths, pointers: Numbers, token_size: int, byte_offset: int
) -> tuple[int, int]:
    pairs = zip(lengths.tolist(), pointers.tolist(), strict=True)
    for place, (length, pointer) in enumerate(pairs):
        if length < 0 or pointer != byte_offset:
            return place, byte_offset
        byte_offset += length * token_size
    return len(lengths), byte_offset


def first_bad_document(entries: Numbers, num_sequences: int) -> int:
    previous = 0
    for place, entry in enumerate(entries.tolist()):
        if not previous <= entry <= num_sequences:
            return place
        previous = entry
    return len(entries)


def torch_randperm(
    size: int, seed: int, *, dtype: Any = np.int64, has_64_bit_draws: bool = False
) -> NDArray[Any]:
    """NumPy's legacy generator and torch's are seeded alike, and draw the same words."""
    next_word = np.random.RandomState(seed % 2**32)._bit_generator.random_raw
    values = list(range(size))
    if has_64_bit_draws:
        for step in range(size):
            words = next_word() << 32 | next_word()
            target = words % (step + 1)
            values[step], values[target] = values[target], step
    else:
        for step in range(size - 1):
            target = step + next_word() % (size - step)
            values[step], values[target] = values[target], values[step]
    return np.array(values, dtype=dtype)


MIN_FIM_TOKENS = 3  # a document of which fewer would remain is not permuted


def swap_or_not(numbers: Numbers, size: int, key: int, is_inverse: bool) -> Numbers:
    """In each round, x and its partner (K - x) mod size change places, or not. K and an offset are
    NumPy's own draws; the top bit of a hash of the larger of the two, SplitMix64's finalizer,
    decides.
    """
    if np.any((numbers < 0) | (numbers >= size)):
        raise ValueError(f"a number is outside [0, {size})")
    rounds = range(48 + 2 * size.bit_length())
    words = [np.random.Philox(key=key, counter=[r, size, 0, 0]).random_raw(2) for r in rounds]
    values = numbers.astype(np.uint64)
    for word, offset in words[::-1] if is_inverse else words:
        total = np.uint64(int(word) * size >> 64)
        partners = total - values + np.where(total < values, np.uint64(size), np.uint64(0))
        hashes = np.maximum(values, partners) + offset
        hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        values = np.where(hashes >> np.uint64(63) == 1, partners, values)
    return values.astype(np.int64)


def pack(lengths: Lengths, capacity: int) -> tuple[Numbers, Numbers]:
    """Packs are lists of documents, and a document looks at all of them."""
    if len(lengths) > 0 and not 1 <= lengths.min() <= lengths.max() <= capacity:
        raise ValueError(f"a document does not fit a pack of {capacity} tokens")
    packs: list[list[int]] = []
    rooms: list[int] = []
    filled: list[int] = []  # when each pack was filled last
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    for time, number in enumerate(order):
        fitting = [pack for pack in range(len(packs)) if rooms[pack] >= lengths[number]]
        pack = min(fitting, key=lambda pack: (rooms[pack], -filled[pack]), default=len(packs))
        if pack == len(packs):
            packs.append([])
            rooms.append(capacity)
            filled.append(time)
        packs[pack].append(number)
        rooms[pack] -= int(lengths[number])
        filled[pack] = time
    documents = [number for pack in packs for number in sorted(pack)]
    return np.array(documents, np.int64), np.cumsum([len(pack) for pack in packs], dtype=np.int64)


def deal(costs: NDArray[np.float64], num_ranks: int) -> Numbers:
    """Lists of places among the sorted costs, which each step searches from end to end."""
    if num_ranks == 0 or len(costs) % num_ranks != 0 or not np.all((costs >= 0) & (costs <= 1e300)):
        raise ValueError(f"{len(costs)} costs cannot be dealt to {num_ranks} ranks")
    order = np.argsort(-costs, kind="stable")
    dearest, share = costs[order].tolist(), len(costs) // num_ranks
    if share == 0:
        return np.empty(0, np.int64)

    def fill(limit: float, reserve: float) -> list[list[int]] | None:
        free, ranks = list(range(len(dearest))), []
        for _ in range(num_ranks):
            mine, room = [], limit
            for left in range(share, 0, -1):
                rest = sum(dearest[place] for place in free[:-left:-1])
                place = free[0]
                if left < share:
                    most = room - max(rest, (left - 1) * reserve)
                    fitting = [place for place in free if dearest[place] <= most]
                    if not fitting:
                        last = len(free) - left + 1
                        fitting = [one for one in free[:last] if dearest[one] <= room - rest]
                    if not fitting:
                        return None
                    place = fitting[0]
                if dearest[place] > room - (rest if left == share else 0):
                    return None
                free.remove(place)
                mine.append(place)
                room -= dearest[place]
            ranks.append(mine)
        return ranks

    def fits(limit: float) -> list[list[int]] | None:
        return fill(limit, 0) or fill(limit, dearest[len(dearest) * 31 // 32])

    least, total, cheapest = sum(dearest) / num_ranks, 0.0, iter(dearest[::-1])
    for rank in range(num_ranks):
        total += dearest[rank]
        for _ in range(share - 1):
            total += next(cheapest)
        least = max(least, total / (rank + 1))
    excess = 0.001
    while (ranks := fits(least * (1 + excess))) is None:
        excess *= 2
    too_low, best = excess / 2, ranks
    for _ in range(6):
        if excess - too_low > 0.001:
            middle = (too_low + excess) / 2
            if (ranks := fits(least * (1 + middle))) is None:
                too_low = middle
            else:
                excess, best = middle, ranks
    return np.array([order[place] for places in best for place in sorted(places)], np.int64)


def fill_in_middle(
    tokens: Numbers, ends: Numbers, sample_numbers: Numbers, **options: Any
) -> tuple[Numbers, Numbers]:
    """The draws are NumPy's own: four words of Philox for each document."""
    eod_token, pad_token = options["eod_token"], options["pad_token"]
    marks = [(options[f"{name}_token"], -1) for name in ("prefix", "middle", "suffix")]

    def permuted(document: list[tuple[int, int]], draw: list[int]) -> list[tuple[int, int]]:
        cuts = sorted(word * (len(document) + 1) >> 64 for word in draw[2:])
        prefix, middle, suffix = (
            document[start:stop] for start, stop in pairwise([0, *cuts, len(document)])
        )
        begin, fill, end = marks
        if _is_drawn(draw[1], options["spm_rate"]):
            return [begin, end, *suffix, fill, *prefix, *middle]
        return [begin, *prefix, end, *suffix, fill, *middle]

    pieces: list[tuple[int, int]] = []
    bounds = _bounds(ends, len(tokens))
    for (start, end), number in zip(bounds, sample_numbers.tolist(), strict=True):
        sample = list(zip(tokens[start:end].tolist(), range(start, end), strict=True))
        num_tokens = len(sample)
        while pad_token is not None and num_tokens > 0 and sample[num_tokens - 1][0] == pad_token:
            num_tokens -= 1
        out: list[tuple[int, int]] = []
        first = place = 0
        while first < num_tokens and len(out) < len(sample):
            stop = first
            while stop < num_tokens and (eod_token is None or sample[stop][0] != eod_token):
                stop += 1
            generator = np.random.Philox(key=options["seed"], counter=[place, number, 0, 0])
            draw = generator.random_raw(4).tolist()
            room = len(sample) - len(out)
            document = sample[first : min(stop, first + max(room - 3, 0))]
            if len(document) >= MIN_FIM_TOKENS and _is_drawn(draw[0], options["rate"]):
                out += permuted(document, draw)
            else:
                out += sample[first:stop][:room]
            out += sample[stop:num_tokens][:1][: len(sample) - len(out)]  # EOD
            first, place = stop + 1, place + 1
        pieces += out + sample[len(out) :]
    columns = np.array(pieces, np.int64).reshape(-1, 2)
    return columns[:, 0].copy(), columns[:, 1].copy()


def _is_drawn(word: int, rate: float) -> bool:
    return (word >> 11) / 2**53 < rate


def _bounds(ends: Numbers, num_tokens: int) -> list[tuple[int, int]]:
    """The start and end of each sample."""
    bounds = list(pairwise([0, *ends.tolist()]))
    if any(start > end for start, end in bounds) or (bounds[-1][1] if bounds else 0) != num_tokens:
        raise ValueError(f"the samples' ends {ends} do not fit {num_tokens} tokens")
    return bounds


def mark_repeats(
    tokens: Numbers, ends: Numbers, max_period: int, min_repeats: int, is_whole: bool
) -> Bytes:
    marks = np.zeros(len(tokens), np.uint8)
    for start, end in _bounds(ends, len(tokens)):
        sample, row = tokens[start:end].tolist(), marks[start:end]
        for period in range(1, min(max_period, len(sample)) + 1):
            for first in range(len(sample) - period * min_repeats + 1):
                ngram = sample[first : first + period]
                if sample[first : first + period * min_repeats] == ngram * min_repeats:
                    row[first : first + period * min_repeats] = 1
        if is_whole and row.any():
            row[:] = 1
    return marks


def mark_ranges(ranges: Lengths, sequences: Numbers, offsets: Numbers, counts: Numbers) -> Bytes:
    if np.any(offsets < 0) or np.any(counts < 0):
        raise ValueError("an offset or a count is negative")
    places = {
        (sequence, token)
        for sequence, start, stop in ranges.tolist()
        for token in range(start, stop)
    }
    columns = (column.tolist() for column in (sequences, offsets, counts))
    marks = [
        (sequence, token) in places
        for sequence, offset, count in zip(*columns, strict=True)
        for token in range(offset, offset + count)
    ]
    return np.array(marks, np.uint8)


def mask_losses(
    loss_masks: NDArray[np.float32], flags: Bytes, ends: Numbers
) -> NDArray[np.float32]:
    out: NDArray[np.float32] = loss_masks.copy()
    for row, (start, end) in zip(out, _bounds(ends, len(flags)), strict=True):
        labels = flags[start + 1 : end]
        if len(labels) > len(row):
            raise ValueError(f"a sample of {end - start} tokens does not fit a row of {len(row)}")
        row[: len(labels)][labels == 0] = 0
    return out
