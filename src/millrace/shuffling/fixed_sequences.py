"""Items of a fixed length: the token streams of files, or of whole domains, cut into sequences.

Sequence s is tokens [s * seq_len, (s + 1) * seq_len) of a stream. Each file has a part of the
stream, from its first token on. What is left over at its end is cut off; with `carry`, only at the
end of a domain. So the ends of the files' parts say where a sequence lies.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.checks import MAX_INT32
from millrace.errors import DataError
from millrace.names import IDX
from millrace.ragged import Numbers, even_sizes, spread, starts_of
from millrace.shuffling.domains import Input
from millrace.shuffling.shuffle_items import Items, ItemsAt
from millrace.shuffling.token_files import read_files
from millrace.store.writer import Entries, write_index

_BLOCK = 1 << 20  # tokens that are read at a time
_ENTRIES = 1 << 16  # entries of an index that are written at a time


class SequenceItems(Items):
    """Sequences of `seq_len` tokens; with `carry`, a file continues the remainder of the last."""

    item_size: int

    def __init__(self, found: Input, seq_len: int, carry: bool) -> None:
        self.item_size = seq_len
        num_tokens = np.array([file.num_tokens for file in found.files], np.int64)
        lengths = num_tokens // seq_len * seq_len  # tokens of each file in sequences
        for part in found.slices if carry else ():
            ends = np.cumsum(num_tokens[part])
            lengths[part] = np.diff(np.minimum(ends, ends[-1:] // seq_len * seq_len), prepend=0)
        self._ends = np.cumsum(lengths)
        self._starts = self._ends - lengths
        self._byte_offsets = np.array([file.byte_offset for file in found.files], np.int64)
        super().__init__(
            found,
            np.diff(-(-starts_of(lengths) // seq_len)),
            lengths,
            unit=f"sequence of {seq_len:,} tokens",
            remedy="a smaller --seq-len" + ("" if carry else ", or join files with --carry"),
        )

    def sizes(self, numbers: Numbers) -> Numbers:
        return np.full(len(numbers), self.item_size, np.int64)

    def read(self, numbers: Numbers, buffer: NDArray[Any], targets: Numbers) -> None:
        sequences, targets = self.units.ascending_units(numbers, targets)
        step = max(_BLOCK // self.item_size, 1)
        for start in range(0, len(sequences), step):
            block = slice(start, start + step)
            self._read_block(sequences[block] * self.item_size, buffer, targets[block])

    def write_index(self, prefix: str, items_at: ItemsAt, start: int, stop: int) -> list[str]:
        """Writes an index in which each sequence is a document.

        Megatron-LM has no uint32, so these tokens stand as int32: the ids are below 2**31.
        """
        dtype = np.int32 if self.dtype == np.uint32 else self.dtype
        counts = even_sizes(stop - start, -(-(stop - start) // _ENTRIES)).tolist()
        ones = (np.ones(count, np.int64) for count in counts)
        write_index(prefix, dtype, (Entries(one * self.item_size, one) for one in ones))
        return [prefix + IDX]

    def _read_block(self, starts: Numbers, buffer: NDArray[Any], targets: Numbers) -> None:
        """Reads the sequences that start at these ascending places of the stream to targets."""
        first = np.searchsorted(self._ends, starts, side="right")
        last = np.searchsorted(self._ends, starts + self.item_size - 1, side="right")
        rows, steps = spread(last - first + 1)  # a piece for each file that a sequence is in
        files = first[rows] + steps
        low = np.maximum(starts[rows], self._starts[files])
        high = np.minimum(starts[rows] + self.item_size, self._ends[files])
        size = self.dtype.itemsize
        bits = read_files(
            self.files,
            files,
            self._byte_offsets[files] + (low - self._starts[files]) * size,
            (high - low) * size,
            buffer.view(np.uint8),
            (targets[rows] + low - starts[rows]) * size,
            or_words=self.dtype == np.uint32,
        )
        if bits > MAX_INT32:
            raise self._large_id(starts, buffer, targets)

    def _large_id(self, starts: Numbers, buffer: NDArray[np.uint32], targets: Numbers) -> DataError:
        """The error for a token of 2**31 or more in one of these sequences."""
        sequences = [buffer[target : target + self.item_size] for target in targets.tolist()]
        row = next(row for row, tokens in enumerate(sequences) if tokens.max() > MAX_INT32)
        column = int(sequences[row].argmax())
        place = int(starts[row]) + column
        file = int(np.searchsorted(self._ends, place, side="right"))
        return DataError(
            f"{self.files[file].path} holds the token {sequences[row][column]} at position "
            f"{place - int(self._starts[file])}; ids must be below 2**31 (2147483648). "
            "The file is damaged, or its dtype is not uint32: correct --dtype, or write it again"
        )
