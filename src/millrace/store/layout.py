"""The bytes of an index file (`.idx`), all little-endian:

offset  size     what
0       9        magic: MMIDIDX, two zero bytes
9       8        uint64 version, 1
17      1        uint8 dtype code of the tokens
18      8        uint64 number of sequences, N
26      8        uint64 number of document entries, D (documents + 1)
34      4 N      int32 lengths, in tokens
        8 N      int64 pointers, byte offsets into the .bin
        8 D      int64 document indices: each document's first sequence; starts with 0, ends N
        N        int8 modes, in multimodal files alone; only the file's size shows it
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from millrace.errors import ConfigError, DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")

DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
"""The dtype of each code in an index file."""

_CODES = {dtype: code for code, dtype in DTYPES.items()}


def dtype_code(dtype: DTypeLike) -> int:
    """The code of a dtype in an index file.

    Raises:
        ConfigError: the format has no code for it.
    """
    try:
        dtype = np.dtype(dtype)
        code = _CODES.get(dtype.newbyteorder("<"))
    except (TypeError, ValueError):  # NumPy knows no such dtype
        code = None
    if code is None:
        names = ", ".join(str(known) for known in DTYPES.values())
        raise ConfigError(f"dtype {dtype} cannot be stored; choose one of {names}")
    return code


@dataclass(frozen=True, kw_only=True)
class Header:
    """What an index file's first 34 bytes say, and the places that follow from it."""

    dtype: np.dtype[Any]
    num_sequences: int
    num_document_entries: int

    @property
    def lengths_offset(self) -> int:
        return HEADER.size

    @property
    def pointers_offset(self) -> int:
        return self.lengths_offset + 4 * self.num_sequences

    @property
    def documents_offset(self) -> int:
        return self.pointers_offset + 8 * self.num_sequences

    @property
    def modes_offset(self) -> int:
        return self.documents_offset + 8 * self.num_document_entries

    def pack(self) -> bytes:
        return HEADER.pack(
            MAGIC, VERSION, dtype_code(self.dtype), self.num_sequences, self.num_document_entries
        )


def parse_header(data: bytes, size: int, path: str) -> tuple[Header, bool]:
    """Reads and checks a header against the size of its file.

    Args:
        data: the file's first bytes.
        size: of the whole file, in bytes.
        path: for the messages.

    Returns:
        the header, and whether the file holds modes.

    Raises:
        DataError: no index file, another version or dtype, or counts that do not fit the size.
    """
    if size < HEADER.size or len(data) < HEADER.size:
        raise DataError(
            f"{path} has {size} bytes; an index file has at least {HEADER.size}. "
            "It is truncated, empty or no index: write it again from its source"
        )
    magic, version, code, num_sequences, num_entries = HEADER.unpack_from(data)
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
    header = Header(
        dtype=DTYPES[code], num_sequences=num_sequences, num_document_entries=num_entries
    )
    if size == header.modes_offset and num_entries > 0:
        return header, False
    if size == header.modes_offset + num_sequences and num_entries > 0:
        return header, True
    raise DataError(
        f"{path} has {size} bytes, but its {num_sequences} sequences and {num_entries} document "
        f"entries take {header.modes_offset}, or {header.modes_offset + num_sequences} with modes. "
        "It is truncated or damaged: write it again from its source"
    )
