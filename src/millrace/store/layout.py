"""The bytes of an index file (`.idx`), all little-endian:

offset  size     content
0       9        magic: MMIDIDX, two zero bytes
9       8        uint64 version, 1
17      1        uint8 dtype code of the tokens
18      8        uint64 number of sequences, N
26      8        uint64 number of document entries, D (documents + 1)
34      4 N      int32 lengths, in tokens
        8 N      int64 pointers, byte offsets into the .bin
        8 D      int64 document indices: each document's first sequence; the first is 0, the last N
        N        int8 modes, only in multimodal files; only the file's size shows it
"""

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from millrace import _native
from millrace.errors import ConfigError, DataError
from millrace.storage import BinReader, gather_range
from millrace.store.publish import idx_path

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")

_STORED = ("<u1", "<i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2")
DTYPES: dict[int, np.dtype[Any]] = {n: np.dtype(name) for n, name in enumerate(_STORED, 1)}
"""The dtype of each code in an index file."""

WRITE_AGAIN = "The files do not belong together or are damaged: write them again"

_CODES = {dtype: code for code, dtype in DTYPES.items()}


def dtype_code(dtype: DTypeLike) -> int:
    """The code of a dtype in an index file; a ConfigError if the format has none for it."""
    try:
        dtype = np.dtype(dtype)
        return _CODES[dtype.newbyteorder("<")]
    except (TypeError, ValueError, KeyError):
        names = ", ".join(map(str, DTYPES.values()))
        raise ConfigError(f"dtype {dtype} cannot be stored; choose one of {names}") from None


class Column(NamedTuple):
    """The place of a column in an index file: `length` entries from byte `offset` to `end`."""

    dtype: np.dtype[Any]
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length * self.dtype.itemsize


@dataclass(frozen=True)
class Header:
    """The content of an index file's first 34 bytes, and whether the file holds modes."""

    dtype: np.dtype[Any]
    num_sequences: int
    num_document_entries: int
    has_modes: bool

    @cached_property
    def columns(self) -> dict[str, Column]:
        """The columns by name, in the order of the file; without modes, "modes" is empty."""
        columns: dict[str, Column] = {}
        end = HEADER.size
        for name, dtype, count in (
            ("lengths", DTYPES[4], self.num_sequences),
            ("pointers", DTYPES[5], self.num_sequences),
            ("documents", DTYPES[5], self.num_document_entries),
            ("modes", DTYPES[2], self.num_sequences * self.has_modes),
        ):
            columns[name] = Column(dtype, end, count)
            end = columns[name].end
        return columns

    @property
    def size(self) -> int:
        """The size of the index file in bytes."""
        return self.columns["modes"].end

    def pack(self) -> bytes:
        counts = self.num_sequences, self.num_document_entries
        return HEADER.pack(MAGIC, VERSION, dtype_code(self.dtype), *counts)


class IndexFile:
    """An open index file, whose entries are copied: a view of a map may be a bus error."""

    def __init__(self, prefix: str, file: BinReader) -> None:
        self.path = idx_path(prefix)
        self._file = file
        self.header = _read_header(file, self.path)

    def read(self, name: str, start: int, count: int) -> NDArray[Any]:
        """Entries of a column: `count` of them, or those up to its end."""
        column = self.header.columns[name]
        stop = min(start + count, column.length)
        size = column.dtype.itemsize
        data = gather_range(self._file, column.offset + start * size, column.offset + stop * size)
        return data.view(column.dtype)

    def entry(self, name: str, place: int) -> int:
        return int(self.read(name, place, 1)[0])

    def document_ends_problem(self) -> str | None:
        """The problem of the first and last document entries."""
        count, num_entries = self.header.num_sequences, self.header.num_document_entries
        first, last = self.entry("documents", 0), self.entry("documents", num_entries - 1)
        if (first, last) == (0, count):
            return None
        return (
            f"{self.path}: the document indices go from {first} to {last}, not from 0 to {count}, "
            "the number of sequences"
        )

    def check_ends(self, bin_path: str, bin_size: int) -> None:
        """Raises DataError if the first and last entries are wrong, or do not fit the `.bin`."""
        problem, end = self.document_ends_problem(), 0
        if problem is None and self.header.num_sequences > 0:
            last = self.header.num_sequences - 1
            start, length = self.entry("pointers", 0), self.entry("lengths", last)
            end = self.entry("pointers", last) + length * self.header.dtype.itemsize
            if start != 0:
                problem = f"{self.path}: the first sequence starts at byte {start}, not at 0"
            elif length < 0:
                problem = f"{self.path}: the last sequence has the negative length {length}"
        if problem:
            raise DataError(f"{problem}. {WRITE_AGAIN}")
        if problem := size_problem(bin_size, end):
            raise DataError(f"{bin_path} {problem}")


def _read_header(file: BinReader, path: str) -> Header:
    size = file.size
    if size < HEADER.size:
        raise DataError(
            f"{path} has {size} bytes; an index file has at least {HEADER.size}. It is truncated, "
            "empty or not an index: write it again from its source"
        )
    head = gather_range(file, 0, HEADER.size).tobytes()
    magic, version, code, num_sequences, num_entries = HEADER.unpack(head)
    if magic != MAGIC:
        raise DataError(
            f"{path} starts with {magic!r}, not {MAGIC!r}: it is not a Megatron-LM index file. "
            "Give the path prefix of a .bin/.idx pair"
        )
    if version != VERSION:
        raise DataError(f"{path} has version {version}; version {VERSION} can be read")
    if code not in DTYPES:
        raise DataError(
            f"{path} has dtype code {code}; the codes are {min(DTYPES)} to {max(DTYPES)}. "
            "The file is damaged: write it again from its source"
        )
    headers = [Header(DTYPES[code], num_sequences, num_entries, modes) for modes in (False, True)]
    if num_entries > 0:
        for header in headers:
            if header.size == size:
                return header
    raise DataError(
        f"{path} has {size} bytes, but its {num_sequences} sequences and {num_entries} "
        f"document entries take {headers[0].size}, or {headers[1].size} with modes. "
        "It is truncated or damaged: write it again from its source"
    )


# ---- what is wrong with the entries: a phrase, or None ----


def sequence_problem(
    lengths: NDArray[np.int32], pointers: NDArray[np.int64], token_size: int, byte: int, first: int
) -> tuple[str | None, int]:
    """The problem of sequences from number `first` and `byte` on; the end of the last good one."""
    bad, end = _native.first_bad_sequence(lengths, pointers, token_size, byte)
    if bad == len(lengths):
        return None, end
    return (
        f"sequence {first + bad} has the length {lengths[bad]} and starts at byte {pointers[bad]}; "
        f"it should start at byte {end}, with no negative length"
    ), end


def document_problem(entries: NDArray[np.int64], num_sequences: int, first: int) -> str | None:
    """The problem of some document entries, of which the first has the number `first`."""
    bad = _native.first_bad_document(entries, num_sequences)
    if bad == len(entries):
        return None
    return (
        f"document entry {first + bad} is {entries[bad]}; it should be at least "
        f"{entries[bad - 1] if bad else 0} and at most {num_sequences}"
    )


def size_problem(size: int, end: int) -> str | None:
    """The problem of a `.bin` of `size` bytes whose index ends at byte `end`."""
    if size == end:
        return None
    return (
        f"has {size} bytes, but its index ends at byte {end}. "
        f"{'It is truncated or empty' if size < end else 'It is too long'}. {WRITE_AGAIN}"
    )


def index_damage(prefix: str, problem: str) -> DataError:
    return DataError(f"{prefix}.idx: {problem}. The index is damaged: write the pair again")
