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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from millrace.errors import ConfigError, DataError
from millrace.storage import BinReader, gather_range

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")

_STORED = ("<u1", "<i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2")
DTYPES: dict[int, np.dtype[Any]] = {n: np.dtype(name) for n, name in enumerate(_STORED, 1)}
"""The dtype of each code in an index file."""

WRITE_AGAIN = "The files do not belong together or are damaged: write them again"

_CODES = {dtype: code for code, dtype in DTYPES.items()}


def dtype_code(dtype: DTypeLike) -> int:
    """The code of a dtype in an index file; a ConfigError if there is none."""
    try:
        dtype = np.dtype(dtype)
        return _CODES[dtype.newbyteorder("<")]
    except (TypeError, ValueError, KeyError):
        names = ", ".join(map(str, DTYPES.values()))
        raise ConfigError(f"dtype {dtype} cannot be stored; choose one of {names}") from None


def optimal_dtype(vocabulary_size: int | None) -> np.dtype[Any]:
    """The dtype of a vocabulary in Megatron-LM's files: uint16 below 65,500 tokens, else int32."""
    if vocabulary_size is not None and vocabulary_size < 65500:
        return np.dtype(np.uint16)
    return np.dtype(np.int32)


def count_tokens(path: str, num_bytes: int, dtype: np.dtype[Any]) -> int:
    """The number of tokens in the bytes of a file; a DataError if they end within one."""
    count, rest = divmod(num_bytes, dtype.itemsize)
    if rest:
        raise DataError(
            f"{path} has {num_bytes} bytes, which is not a multiple of {dtype.itemsize}, the size "
            f"of {dtype}: it is truncated, or has another dtype. Write it again, or correct the "
            "dtype"
        )
    return count


@dataclass(frozen=True)
class Header:
    """The first 34 bytes of an index file, and whether it holds modes."""

    dtype: np.dtype[Any]
    num_sequences: int
    num_document_entries: int
    has_modes: bool

    def columns(self) -> Iterator[tuple[np.dtype[Any], int, int]]:
        """Dtype, length and byte offset of lengths, pointers, documents, modes (may be empty)."""
        offset = HEADER.size
        for dtype, length in (
            (DTYPES[4], self.num_sequences),
            (DTYPES[5], self.num_sequences),
            (DTYPES[5], self.num_document_entries),
            (DTYPES[2], self.num_sequences * self.has_modes),
        ):
            yield dtype, length, offset
            offset += length * dtype.itemsize

    @property
    def size(self) -> int:
        """The size of the index file in bytes."""
        *_, (dtype, length, offset) = self.columns()
        return offset + length * dtype.itemsize

    def pack(self) -> bytes:
        counts = self.num_sequences, self.num_document_entries
        return HEADER.pack(MAGIC, VERSION, dtype_code(self.dtype), *counts)


def read_header(file: BinReader, path: str) -> Header:
    """The header of an index file; a DataError if it does not fit the file."""
    size = file.size
    head = gather_range(file, 0, min(size, HEADER.size)).tobytes()
    whole = head.ljust(HEADER.size, b"\0")
    magic, version, code, num_sequences, num_entries = HEADER.unpack(whole)
    if size < HEADER.size or (magic, version) != (MAGIC, VERSION) or code not in DTYPES:
        raise DataError(
            f"{path} has {size} bytes and starts with {magic!r}, version {version} and dtype code "
            f"{code}; a Megatron-LM index has at least {HEADER.size}, {MAGIC!r}, {VERSION} and a "
            f"code from {min(DTYPES)} to {max(DTYPES)}. It is truncated, or not an index: give the "
            "path prefix of a .bin/.idx pair, or write it again from its source"
        )
    headers = [Header(DTYPES[code], num_sequences, num_entries, modes) for modes in (False, True)]
    for header in headers if num_entries > 0 else []:
        if header.size == size:
            return header
    raise DataError(
        f"{path} has {size} bytes, but its {num_sequences} sequences and {num_entries} "
        f"document entries take {headers[0].size}, or {headers[1].size} with modes. "
        "It is truncated or damaged: write it again from its source"
    )
