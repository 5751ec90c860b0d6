"""Items of a fixed length: the token streams of files, or of whole domains, cut into sequences.

The sequences lie one after the other on a line of tokens: sequence s is tokens
[s * seq_len, (s + 1) * seq_len) of the line. Each file has a piece of the line, from its first
token on. What is left over at its end is cut off; with `carry`, only at the end of a domain. If EOD
tokens are put after documents, they count as tokens of the file. So the ends of the files' pieces,
and the places of the EOD tokens, say where a sequence lies.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from millrace.checks import MAX_INT32, absolute_path, flag, one_path, whole
from millrace.errors import ConfigError, DataError
from millrace.jobs.shuffling.indices import open_index
from millrace.jobs.shuffling.inputs import (
    InputDomain,
    Inputs,
    TokenArray,
    common_dtype,
    find_domains,
    tokenizer_of,
)
from millrace.jobs.shuffling.items import Sources
from millrace.jobs.shuffling.passes import Passes, describe, starts_of
from millrace.jobs.shuffling.sources import Numbers, read_files, spread
from millrace.jobs.shuffling.tables import Table, new_table
from millrace.ragged import equal_runs
from millrace.store.index_writer import Entries, write_index
from millrace.store.layout import Header
from millrace.store.publish import idx_path

EOD_REASON = "an EOD token is put after each: give indexed datasets, or leave --eod out"
"""Why `find_domains` must find documents."""

_BLOCK = 1 << 20  # tokens that are read at a time
_EODS = 1 << 16  # EOD tokens that are looked up at a time, about
_LEAST_PAGE, _PAGES = 1 << 9, 1 << 18  # rows of a page of their table, and most pages, about
_ENTRIES = 1 << 16  # entries of an index that are written at a time
_FIRST_DOCUMENTS = 100  # documents of a file that are looked at for EOD tokens
_LEAST_DOCUMENTS = 3  # documents that must be looked at: one or two may end so by chance


def sequence_items(
    inputs: Inputs,
    *,
    seq_len: int,
    dtype: DTypeLike = "uint32",
    carry: bool = False,
    eod: int | None = None,
    folder: str | os.PathLike[str],
) -> SequenceItems:
    """The sequences of an input.

    Args:
        inputs: Folder with a folder for each domain, or a list of weights and paths; see
            `find_domains`.
        seq_len: Tokens of a sequence, 1 to 2**31 - 1.
        dtype: Dtype of raw files.
        carry: Whether the remainder of a file is continued in the next file of its domain.
        eod: Token to put after each document with tokens; all files must be indexed datasets. None:
            documents follow one another as they are stored.
        folder: Folder for the places of the EOD tokens, which all workers can read.

    Raises:
        ConfigError: An input without a whole sequence, an argument outside its limits, or EOD
            tokens that do not fit the dtype or are there already; and see `find_domains`.
        DataError: See `find_domains`.

    >>> import tempfile, pathlib
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pathlib.Path(folder, "web").mkdir()
    ...     np.save(f"{folder}/web/a.npy", np.arange(10, dtype=np.int32))
    ...     items = sequence_items(folder, seq_len=3, folder=folder)
    ...     buffer = np.zeros(6, np.int32)
    ...     items.read(np.array([0, 2]), buffer, np.array([3, 0]))
    >>> items.num_items, items.domains[0].num_left, buffer.tolist()
    (3, 1, [6, 7, 8, 0, 1, 2])
    """
    seq_len = whole("seq_len", seq_len, 1, MAX_INT32)
    carry, folder = flag("carry", carry), one_path("folder", folder)
    documents_for = "" if eod is None else EOD_REASON
    domains, notices = find_domains(inputs, dtype=dtype, documents_for=documents_for)
    return SequenceItems(domains, notices, seq_len=seq_len, carry=carry, eod=eod, folder=folder)


class SequenceItems:
    """Sequences of a fixed length, of domains that `find_domains` has found; see `Items`.

    `sequence_items` describes the other arguments.
    """

    def __init__(
        self,
        domains: Sequence[InputDomain],
        notices: Sequence[str],
        *,
        seq_len: int,
        carry: bool,
        eod: int | None,
        folder: str,
    ) -> None:
        arrays = [file for domain in domains for file in domain.files]
        self.dtype = common_dtype(domains)
        self._eods = None
        num_tokens = np.array([file.num_tokens for file in arrays], np.int64)
        if eod is not None:
            path = os.path.join(absolute_path(folder), "eods.npy")
            self._eods = _Eods(arrays, _token(eod, self.dtype), path)
            num_tokens += self._eods.num_eods
        bounds = starts_of(len(domain.files) for domain in domains).tolist()
        slices = [slice(*pair) for pair in itertools.pairwise(bounds)]
        lengths = np.concatenate(
            [np.empty(0, np.int64), *(_lengths(num_tokens[s], seq_len, carry) for s in slices)]
        )
        num_sequences = [int(lengths[s].sum()) // seq_len for s in slices]
        self._passes = Passes(num_sequences, [domain.weight for domain in domains])
        self._ends = np.cumsum(lengths)
        self._starts = self._ends - lengths
        self._byte_offsets = np.array([file.byte_offset for file in arrays], np.int64)
        self.item_size = self._seq_len = seq_len
        self.num_items = sum(self._passes.num_items)
        self.tokenizer = tokenizer_of(domains)
        self.has_origins = False
        self.domains, self.files = describe(
            domains,
            self._passes,
            bounds=-(-starts_of(lengths) // seq_len),
            num_tokens=num_tokens,
            num_left=[int((num_tokens[s] - lengths[s]).sum()) for s in slices],
        )
        self.notices = (*notices, *self._shortages(domains, num_sequences))
        if sum(num_sequences) == 0:
            raise ConfigError(_no_sequence(seq_len, num_tokens, carry))
        if self.num_items == 0:
            raise ConfigError(
                f"the weights take none of the {sum(num_sequences):,} sequences of the input; give "
                "larger weights"
            )

    def sizes(self, numbers: Numbers) -> Numbers:
        """Tokens of each item: int64 [n]."""
        return np.full(len(numbers), self._seq_len, np.int64)

    def read(self, numbers: Numbers, buffer: NDArray[Any], targets: Numbers) -> None:
        """Reads items to any places of a buffer; see `Items`."""
        sequences, targets = self._passes.ascending_units(numbers, targets)
        step = max(_BLOCK // self._seq_len, 1)
        for start in range(0, len(sequences), step):
            block = slice(start, start + step)
            self._read_block(sequences[block] * self._seq_len, buffer, targets[block])

    def write_index(self, prefix: str, sources: Sources, start: int, stop: int) -> list[str]:
        """Writes an index in which each sequence is a document; see `Items`.

        Megatron-LM has no uint32, so these tokens stand as int32: the ids are below 2**31.
        """
        header = Header(
            dtype=np.dtype("<i4") if self.dtype == np.uint32 else self.dtype,
            num_sequences=stop - start,
            num_document_entries=stop - start + 1,
            has_modes=False,
        )
        write_index(prefix, header, self._entries(stop - start))
        return [idx_path(prefix)]

    def _entries(self, count: int) -> Iterator[Entries]:
        for start in range(0, count, _ENTRIES):
            rest = min(count - start, _ENTRIES)
            yield Entries(np.full(rest, self._seq_len), np.ones(rest, np.int64))

    def _read_block(self, starts: Numbers, buffer: NDArray[Any], targets: Numbers) -> None:
        """Reads the sequences that start at these places of the line."""
        pieces = _pieces(starts, targets, self._seq_len, self._starts, self._ends)
        size, bits = self.dtype.itemsize, 0
        for part in [pieces] if self._eods is None else self._eods.write(pieces, buffer):
            bits |= read_files(
                self.files,
                part.files,
                self._byte_offsets[part.files] + part.places * size,
                part.sizes * size,
                buffer.view(np.uint8),
                part.targets * size,
                or_words=self.dtype == np.uint32,
            )
        if bits > MAX_INT32:
            raise self._large_id(starts, buffer, targets)

    def _large_id(self, starts: Numbers, buffer: NDArray[np.uint32], targets: Numbers) -> DataError:
        """The error for a token of 2**31 or more, which is in one of these sequences."""
        sequences = [buffer[target : target + self._seq_len] for target in targets.tolist()]
        row = next(row for row, tokens in enumerate(sequences) if tokens.max() > MAX_INT32)
        column = int(sequences[row].argmax())
        place = int(starts[row]) + column
        file = int(np.searchsorted(self._ends, place, side="right"))
        return DataError(
            f"{self.files[file].path} holds the token {sequences[row][column]} at position "
            f"{place - int(self._starts[file])}; ids must be below 2**31 (2147483648). "
            "The file is damaged, or its dtype is not uint32: correct --dtype, or write it again"
        )

    def _shortages(self, domains: Sequence[InputDomain], num_sequences: Sequence[int]) -> list[str]:
        """Notices about domains without items."""
        notices = []
        for domain, count, result in zip(domains, num_sequences, self.domains, strict=True):
            if count == 0 and domain.files:
                notices.append(
                    f"domain {domain.name} has no whole sequence of {self._seq_len:,} tokens: its "
                    f"{len(domain.files):,} files have {result.num_tokens:,} tokens"
                )
            elif count > 0 and result.num_items == 0:
                notices.append(
                    f"domain {domain.name} has the weight {float(domain.weight):g}, which takes "
                    f"none of its {count:,} sequences"
                )
        return notices


class _Pieces(NamedTuple):
    """Pieces of files, each one with its target in a buffer; all int64 [pieces].

    Attributes:
        files: Number of the file, ascending.
        places: Number of the first token in the file.
        sizes: Number of tokens.
        targets: Place in the buffer.
    """

    files: Numbers
    places: Numbers
    sizes: Numbers
    targets: Numbers


def _pieces(
    starts: Numbers, targets: Numbers, seq_len: int, file_starts: Numbers, file_ends: Numbers
) -> _Pieces:
    """The pieces of files that sequences are made of.

    Args:
        starts: Where the sequences start on the line, ascending: int64 [n].
        targets: Where they go to: int64 [n].
        file_starts, file_ends: Where the files start and end on the line: int64 [files].
    """
    first = np.searchsorted(file_ends, starts, side="right")
    last = np.searchsorted(file_ends, starts + seq_len - 1, side="right")
    if np.array_equal(first, last):  # no sequence crosses files
        return _Pieces(first, starts - file_starts[first], np.full_like(starts, seq_len), targets)
    rows, steps = spread(last - first + 1)
    files = first[rows] + steps
    low = np.maximum(starts[rows], file_starts[files])
    high = np.minimum(starts[rows] + seq_len, file_ends[files])
    return _Pieces(files, low - file_starts[files], high - low, targets[rows] + low - starts[rows])


class _Eods:
    """The EOD tokens that are put after documents.

    Their places are in a NumPy file. They count on a line of tokens that has all files with their
    EOD tokens one after the other, without anything cut off.

    Args:
        files: Indexed datasets.
        eod: The token.
        path: Path of the file.

    Attributes:
        num_eods: Number of EOD tokens of each file: int64 [files].
    """

    def __init__(self, files: Sequence[TokenArray], eod: int, path: str) -> None:
        self._eod = eod
        num_eods, file_starts = [], [0]
        with new_table(path, np.int64) as append:
            for file in files:
                count = 0
                for places in _eod_places(file, eod):
                    append(places + file_starts[-1])
                    count += len(places)
                num_eods.append(count)
                file_starts.append(file_starts[-1] + file.num_tokens + count)
        self.num_eods = np.array(num_eods, np.int64)
        self._first_eods = np.cumsum(self.num_eods) - self.num_eods
        self._file_starts = np.array(file_starts[:-1], np.int64)
        # The table is read page by page; the first place of each page is in memory. A map of the
        # file would count as memory, and a search in it touches many pages.
        self._table = Table(path)
        self._page = max(_LEAST_PAGE, self._table.num_rows // _PAGES)
        firsts = np.arange(0, self._table.num_rows, self._page)
        self._page_firsts = self._table.windows(firsts, 1)[:, 0]

    def write(self, pieces: _Pieces, buffer: NDArray[Any]) -> Iterator[_Pieces]:
        """Writes the EOD tokens of pieces to the buffer; yields the text between them, in parts.

        A part has a bounded number of EOD tokens: of short documents, they take more memory than
        the tokens.
        """
        lows = pieces.places + self._file_starts[pieces.files]
        low_pages = np.searchsorted(self._page_firsts, lows, side="right") - 1
        high_pages = np.searchsorted(self._page_firsts, lows + pieces.sizes) - 1
        pages = np.maximum(np.stack([low_pages, high_pages]), 0)
        num_new = pages[1] - pages[0] + (np.diff(pages[0], prepend=-1) != 0)
        parts = np.cumsum(num_new) * self._page // _EODS
        for part in equal_runs(parts):
            yield self._write(_Pieces(*(column[part] for column in pieces)), pages[:, part], buffer)

    def _write(self, pieces: _Pieces, pages: NDArray[np.int64], buffer: NDArray[Any]) -> _Pieces:
        """Writes the EOD tokens of pieces; returns the text between them.

        Args:
            pieces: Pieces of files.
            pages: First and last page of the table that each piece needs: int64 [2, n].
            buffer: The buffer.
        """
        shifts = self._file_starts[pieces.files]
        lows = pieces.places + shifts
        owners, steps = spread(pages[1] - pages[0] + 1)
        needed = np.unique(pages[0][owners] + steps)
        starts = needed * self._page
        places = self._table.ranges(starts, np.minimum(self._page, self._table.num_rows - starts))
        first = np.searchsorted(places, lows)
        counts = np.searchsorted(places, lows + pieces.sizes) - first
        rows, steps = spread(counts)
        eods = places[first[rows] + steps]
        first += (pages[0] - np.searchsorted(needed, pages[0])) * self._page  # in the table
        buffer[pieces.targets[rows] + eods - lows[rows]] = self._eod
        # Each EOD ends a text; one more text ends with the piece.
        rows, steps = spread(counts + 1)
        starts, ends = lows[rows], (lows + pieces.sizes)[rows]
        starts[steps > 0] = eods + 1
        ends[steps < counts[rows]] = eods
        # Texts have their place in the file without the EOD tokens before them.
        num_before = first[rows] + steps - self._first_eods[pieces.files[rows]]
        texts = _Pieces(
            pieces.files[rows],
            starts - shifts[rows] - num_before,
            ends - starts,
            pieces.targets[rows] + starts - lows[rows],
        )
        return _Pieces(*(column[texts.sizes > 0] for column in texts))


def _eod_places(file: TokenArray, eod: int) -> Iterator[NDArray[np.int64]]:
    """The places of the EOD tokens among the tokens of a file, some at a time."""
    count, ends_with_eod = 0, True
    with open_index(file) as index:
        for documents in index.documents():
            ends = documents.tokens[1:][np.diff(documents.tokens) > 0]
            for end in ends[: max(_FIRST_DOCUMENTS - count, 0)].tolist():
                ends_with_eod = ends_with_eod and index.has_token_at(end - 1, eod)
            yield ends + np.arange(count, count + len(ends))
            count += len(ends)
    if ends_with_eod and count >= _LEAST_DOCUMENTS:
        raise ConfigError(
            f"the documents of {file.path} already end with the token {eod}: all of the first "
            f"{min(count, _FIRST_DOCUMENTS)} do. Leave --eod out"
        )


# ---- arguments and sums ----


def _token(value: int, dtype: np.dtype[Any]) -> int:
    most = min(int(np.iinfo(dtype).max), MAX_INT32)
    try:
        return whole("eod", value, 0, most)
    except ConfigError as error:
        raise ConfigError(f"{error} in files of {dtype}") from None


def _lengths(num_tokens: Numbers, seq_len: int, carry: bool) -> Numbers:
    """The tokens of each file of a domain that are in sequences: int64 [files]."""
    if not carry:
        return num_tokens // seq_len * seq_len
    ends = np.cumsum(num_tokens)
    total = int(ends[-1]) // seq_len * seq_len if len(ends) else 0
    return np.diff(np.minimum(ends, total), prepend=0)


def _no_sequence(seq_len: int, num_tokens: Numbers, carry: bool) -> str:
    remedy = "" if carry else ", or join the files of each domain with --carry"
    return (
        f"the input has no whole sequence of {seq_len:,} tokens: its {len(num_tokens):,} files "
        f"have {int(num_tokens.sum()):,} tokens, the longest {int(num_tokens.max()):,}. Give a "
        f"smaller --seq-len{remedy}"
    )
