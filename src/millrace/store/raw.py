"""Token files without an index: raw tokens, or a one-dimensional `.npy` array of NumPy."""

import io
import os
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from millrace import _native
from millrace.checks import check_path, shown
from millrace.deferred import cached_property
from millrace.errors import ConfigError, DataError
from millrace.files import blake2b
from millrace.storage import Access, Storage, StoredFile, gather_range, sample_of, storage_of
from millrace.store.opened import JoinedFiles, OpenTokens

_DTYPES = "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64"
_NPY_MAGIC = b"\x93NUMPY"
_HEADER_SIZE = 1 << 16  # bytes that hold the header of any array of one dimension


class RawTokens(OpenTokens):
    """The stream of tokens of a file without an index.

    The file may be headerless, whatever its ending (as OLMo-core's `.npy` files), or an array of
    `numpy.save`. It has no sequences or documents: an order over it gives spans of positions.

    Args:
        path: Path of the file.
        dtype: Dtype of the tokens, integers; None: that of the file's header.
        access: How the file is read: "mmap", or "file" (positioned reads).
        storage: Where the file is; None: in the file system.

    Attributes:
        prefix: The path, str.
        dtype: Dtype of the tokens as they are read: int32 for uint32, else the file's.
        reader: The bytes of the tokens, without the header.
        is_mapped: Whether all tokens are in memory; else each read copies.

    Raises:
        ConfigError: A headerless file without a dtype, or a dtype other than the header's.
        DataError: A file that is missing or cut within a token, or an array of another shape or
            dtype.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        dtype: DTypeLike | None = None,
        *,
        access: Access = "mmap",
        storage: Storage | None = None,
    ) -> None:
        self.prefix = check_path("path", path)
        self._options = {"dtype": dtype, "access": access, "storage": storage}
        try:
            file = storage_of(self.prefix, storage).open(self.prefix, access)
        except FileNotFoundError:
            raise DataError(f"{self.prefix} not found: give the path of a token file") from None
        start, self.dtype = self._start_and_dtype(file, dtype)
        self.reader: JoinedFiles = JoinedFiles([file], start)
        self.files = (file.identity,)
        self.is_mapped = self.reader.is_mapped
        if self.reader.size % self.dtype.itemsize:
            raise DataError(
                f"{self.prefix} has {self.reader.size} bytes of tokens, which is not a multiple of "
                f"{self.dtype.itemsize} ({self.dtype}): it is truncated, or the dtype is wrong"
            )

    def _start_and_dtype(
        self, file: StoredFile, dtype: DTypeLike | None
    ) -> tuple[int, np.dtype[Any]]:
        """The first byte of the tokens and their dtype, by the header if there is one."""
        given = None if dtype is None else _token_dtype(dtype)
        head = gather_range(file, 0, min(file.size, _HEADER_SIZE)).tobytes()
        if not head.startswith(_NPY_MAGIC):
            if given is None:
                raise ConfigError(f"{self.prefix} has no header: give the dtype of its tokens")
            return 0, given
        stream, npy = io.BytesIO(head), np.lib.format
        try:
            is_first = npy.read_magic(stream) == (1, 0)
            read = npy.read_array_header_1_0 if is_first else npy.read_array_header_2_0
            shape, _, found = read(stream)
        except ValueError as error:
            raise DataError(f"{self.prefix} has a damaged header of NumPy: {error}") from None
        start = stream.tell()
        if len(shape) != 1 or file.size - start != shape[0] * found.itemsize:
            raise DataError(
                f"{self.prefix} is an array of shape {shape} and dtype {found}, and has "
                f"{file.size - start} bytes after its header: an array of one dimension is needed"
            )
        stored = _token_dtype(found)
        if given not in (None, stored):
            raise ConfigError(
                f"dtype is {given}, but the header of {self.prefix} says {found}: leave it out"
            )
        return start, stored

    def token_source(self) -> _native.TokenSource:
        """The tokens for the core, as one sequence: offsets in it are token positions."""
        # The core divides by the length.
        return self.reader.source(self.dtype, [int(self.num_tokens > 0)], max(self.num_tokens, 1))

    def documents_of(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """Raises ConfigError."""
        raise ConfigError(
            f"{self.prefix} has no index, so its documents are not known: leave out what asks for "
            "them, or make an indexed dataset of it with `millrace convert`"
        )

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the size, dtype and evenly spaced blocks of the tokens (32 hex digits)."""
        digest = blake2b(f"{self.num_tokens} {self.dtype.str}".encode())
        digest.update(sample_of(self.reader).data)
        return digest.hexdigest()


def _token_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    try:
        stored = np.dtype(dtype)
    except TypeError:
        raise ConfigError(f"dtype is {shown(dtype)}; it is one of {', '.join(_DTYPES)}") from None
    if stored.name not in _DTYPES or stored.byteorder == ">":
        raise ConfigError(f"dtype is {stored}; it is one of {', '.join(_DTYPES)}, little-endian")
    return np.dtype(np.int32) if stored.name == "uint32" else stored.newbyteorder("<")
