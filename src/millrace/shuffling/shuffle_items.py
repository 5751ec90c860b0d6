"""What a shuffle moves: items, either fixed-length sequences or whole documents."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.checks import MAX_INT32, MAX_INT64, printable, text_table
from millrace.errors import ConfigError, DataError
from millrace.ragged import Numbers, equal_runs, even_sizes, spread, starts_of
from millrace.shuffling.domains import Input
from millrace.store.writer import write_index

ItemsAt = Callable[[int, int], Numbers]
"""The item at each place [start, stop) of the output; see `Permutation.sources`."""

_OF_FILE = "path", "size", "mtime_ns", "index_mtime_ns", "num_tokens"  # of an input's entry
_BLOCK = 1 << 14  # items that are read at a time
_ENTRIES = 1 << 16  # entries of an index that are written at a time


class WeightedUnits:
    """Items: the units of domains (sequences or documents), as often as weights say.

    A domain of n units and weight 5/2 has 5n/2 items, rounded down: each unit, each unit again, and
    n/2 units at even distances. `num_items` are the items of each domain; a ConfigError if 64 bits
    cannot count them.

    >>> WeightedUnits([4], [Fraction(5, 2)]).units(np.arange(10)).tolist()
    [0, 1, 2, 3, 0, 1, 2, 3, 0, 2]
    """

    def __init__(self, num_units: Sequence[int], weights: Sequence[Fraction]) -> None:
        self.num_items = [int(count * w) for count, w in zip(num_units, weights, strict=True)]
        if sum(self.num_items) > MAX_INT64:
            raise ConfigError(
                f"the weights make {sum(self.num_items)} items, which must be at most {MAX_INT64}: "
                "give smaller weights"
            )
        self.is_identity = self.num_items == list(num_units)  # item i is unit i
        self._num_units = np.array(num_units, np.int64)
        self._first_units = starts_of(num_units)[:-1]
        self._first_items = starts_of(self.num_items)[:-1]
        num_items = np.array(self.num_items, np.int64)
        self._num_rest = num_items % np.maximum(self._num_units, 1)  # items of the last pass
        self._num_whole = num_items - self._num_rest  # items of whole passes
        is_large = max(num_units, default=0) ** 2 > MAX_INT64
        self._product_type: Any = object if is_large else np.int64  # of exact, slow integers

    def units(self, items: Numbers) -> Numbers:
        if self.is_identity:
            return items
        domains = np.searchsorted(self._first_items, items, side="right") - 1
        places = items - self._first_items[domains]
        counts = self._num_units[domains]
        units = places % counts
        in_rest = places - self._num_whole[domains]  # place in the last pass, or negative
        last = np.flatnonzero(in_rest >= 0)
        in_rest = in_rest[last].astype(self._product_type)
        units[last] = in_rest * counts[last] // self._num_rest[domains[last]]
        return units + self._first_units[domains]


class DomainCounts(NamedTuple):
    """Counts of one domain."""

    name: str
    num_files: int
    num_items: int  # one that a weight takes twice counts twice
    num_tokens: int
    num_left: int  # tokens in no item: the remainders of the files


class Items(ABC):
    """Items by number: by domain, then path, then place in the file.

    Items can be pickled: tables that grow with the number of documents are files of the job.

    `item_size` is the number of tokens of each item; None: they differ. With `has_origins`, the
    shards get sidecars of their documents' origins, which takes Arrow. `inputs` are the files as
    `metadata.json` lists them. Units are ranges of one stream of tokens, of which each file has a
    part, from its first token on; `token_starts` are the starts of these parts, and the end of the
    last: int64 [files + 1].

    Args:
        found: The input.
        num_units: Number of units (sequences or documents) that begin in each file: int64 [files].
        num_used: Tokens of each file that are in a unit: int64 [files].
        unit: Name of a unit, for messages.
        remedy: Remedy if the input has no units.

    Raises:
        ConfigError: No unit, or none that the weights take; two dtypes or tokenizers.
    """

    item_size: int | None = None
    has_origins = False

    def __init__(
        self, found: Input, num_units: Numbers, num_used: Numbers, *, unit: str, remedy: str
    ) -> None:
        self.dtype, self.tokenizer, self.files = found.dtype(), found.tokenizer(), found.files
        num_tokens = np.array([file.num_tokens for file in self.files])
        counts = np.stack([num_units, num_tokens, num_tokens - num_used])
        of_domains = [counts[:, part].sum(axis=1).tolist() for part in found.slices]
        weights = [domain.weight for domain in found.domains]
        self.units = WeightedUnits([count for count, *_ in of_domains], weights)
        self.num_items = sum(self.units.num_items)
        self.domains: list[DomainCounts] = []
        self.inputs = [
            {"domain": domain.name, **{name: getattr(file, name) for name in _OF_FILE}}
            for domain in found.domains
            for file in domain.files
        ]
        self.notices = list(found.notices)
        self.token_starts = starts_of(num_used)
        self._byte_offsets = np.array([file.byte_offset for file in self.files], np.int64)
        rows = zip(found.domains, self.units.num_items, of_domains, strict=True)
        for domain, num_items, (count, *tokens) in rows:
            self.domains.append(DomainCounts(domain.name, len(domain.files), num_items, *tokens))
            if num_items == 0:
                self.notices.append(
                    f"domain {domain.name} gives no {unit}: its {len(domain.files):,} files have "
                    f"{tokens[0]:,} tokens, and {count:,} whole ones, of which the weight "
                    f"{float(domain.weight):g} takes none"
                )
        if self.num_items == 0:
            first = self.notices[len(found.notices)]
            raise ConfigError(f"no domain has items: {first}. Give {remedy}, or larger weights")

    @property
    def domain_stats(self) -> dict[str, int]:
        return {domain.name: domain.num_items for domain in self.domains}

    def table(self, unit: str) -> str:
        """The domains as a table for people; `unit` is "sequences" or "documents"."""
        totals = map(sum, zip(*(domain[1:] for domain in self.domains), strict=True))
        rows: list[Any] = [*self.domains, ("total", *totals)]
        table = [["domain", "files", unit, "tokens", "tokens left out"]]
        table += [[printable(name), *(f"{n:,}" for n in numbers)] for name, *numbers in rows]
        return "\n".join(text_table(table))

    @abstractmethod
    def token_ranges(self, units: Numbers) -> Numbers:
        """The first token of each unit in the stream, and the end of its tokens: int64 [2, n]."""

    def sizes(self, numbers: Numbers) -> Numbers:
        """Tokens of each item: int64 [n]."""
        sizes = np.empty_like(numbers)
        for start in range(0, len(numbers), _BLOCK):
            block = slice(start, start + _BLOCK)
            sizes[block] = np.diff(self.token_ranges(self.units.units(numbers[block])), axis=0)
        return sizes

    def read(self, numbers: Numbers, buffer: NDArray[Any], targets: Numbers) -> None:
        """Reads items, whose numbers ascend, to any places of a buffer.

        A DataError for a file that has changed, or a uint32 token of 2**31 or more.
        """
        units = self.units.units(numbers)
        if not self.units.is_identity:  # else they ascend
            order = np.argsort(units, kind="stable")
            units, targets = units[order], targets[order]
        for start in range(0, len(units), _BLOCK):
            block = slice(start, start + _BLOCK)
            first, end = self.token_ranges(units[block])
            self._read_ranges(first, end, buffer, targets[block])

    def _read_ranges(
        self, starts: Numbers, stops: Numbers, buffer: NDArray[Any], targets: Numbers
    ) -> None:
        """Reads ascending ranges of the stream to targets."""
        first = np.searchsorted(self.token_starts, starts, side="right") - 1
        last = np.searchsorted(self.token_starts, stops, side="left") - 1
        # A piece for each file that a range is in: none for a range without tokens.
        rows, steps = spread(np.maximum(last - first + 1, 0))
        files = first[rows] + steps
        low = np.maximum(starts[rows], self.token_starts[files])
        sizes = np.minimum(stops[rows], self.token_starts[files + 1]) - low
        places, targets = low - self.token_starts[files], targets[rows] + low - starts[rows]
        width, bits, or_words = self.dtype.itemsize, 0, self.dtype == np.uint32
        pieces = self._byte_offsets[files] + places * width, sizes * width, targets * width
        for run in equal_runs(files):
            offsets, counts, ends = (column[run] for column in pieces)
            with self.files[files[run.start]].reading() as descriptor:
                bits |= _native.read_pieces(
                    descriptor, offsets, counts, buffer.view(np.uint8), ends, or_words=or_words
                )
        if bits > MAX_INT32:
            self._refuse_large_ids(buffer, files, places, sizes, targets)

    def _refuse_large_ids(self, buffer: NDArray[Any], *pieces: Numbers) -> None:
        """Raises the error for the first token of 2**31 or more in pieces of files."""
        for file, place, size, target in zip(*pieces, strict=True):
            tokens = buffer[target : target + size]
            for column in np.flatnonzero(tokens > MAX_INT32)[:1]:
                raise DataError(
                    f"{self.files[file].path} holds the token {tokens[column]} at position "
                    f"{place + column}; ids must be below 2**31 (2147483648). The file is damaged, "
                    "or its dtype is not uint32: correct --dtype, or write it again"
                )

    @abstractmethod
    def write_index(self, prefix: str, items_at: ItemsAt, start: int, stop: int) -> None:
        """Writes the index and perhaps the origins of the shard with the places [start, stop).

        Its `.bin` is there; a DataError if it does not have the size of these items. Each file
        appears whole or not at all.
        """


class SequenceItems(Items):
    """Sequences of `seq_len` tokens: the token streams of files, or of whole domains, cut up.

    Sequence s is tokens [s * seq_len, (s + 1) * seq_len) of the stream. What is left over at the
    end of a file is cut off; with `carry`, a file continues the remainder of the last, and it is
    cut off only at the end of a domain.
    """

    item_size: int

    def __init__(self, found: Input, seq_len: int, carry: bool) -> None:
        self.item_size = seq_len
        num_tokens = np.array([file.num_tokens for file in found.files], np.int64)
        lengths = num_tokens // seq_len * seq_len  # tokens of each file in sequences
        for part in found.slices if carry else ():
            ends = np.cumsum(num_tokens[part])
            lengths[part] = np.diff(np.minimum(ends, ends[-1:] // seq_len * seq_len), prepend=0)
        super().__init__(
            found,
            np.diff(-(-starts_of(lengths) // seq_len)),
            lengths,
            unit=f"sequence of {seq_len:,} tokens",
            remedy="a smaller --seq-len" + ("" if carry else ", or join files with --carry"),
        )

    def sizes(self, numbers: Numbers) -> Numbers:
        return np.full(len(numbers), self.item_size, np.int64)

    def token_ranges(self, units: Numbers) -> Numbers:
        return np.stack([units, units + 1]) * self.item_size

    def write_index(self, prefix: str, items_at: ItemsAt, start: int, stop: int) -> None:
        """Writes an index in which each sequence is a document.

        Megatron-LM has no uint32, so these tokens stand as int32: the ids are below 2**31.
        """
        dtype = np.int32 if self.dtype == np.uint32 else self.dtype
        counts = even_sizes(stop - start, -(-(stop - start) // _ENTRIES)).tolist()
        ones = (np.ones(count, np.int64) for count in counts)
        write_index(prefix, dtype, ((one * self.item_size, one, None) for one in ones))


def in_units(num_bytes: float) -> str:
    """A number of bytes for a message: "6.0 GB"."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"
