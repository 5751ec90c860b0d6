"""What open token files share: pickles, and files that are read as one.

Also token files without an index: raw tokens, or a one-dimensional `.npy` array of NumPy.
"""

import contextlib
import io
import operator
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, SupportsIndex

import numpy as np
from numpy.typing import DTypeLike, NDArray

from millrace import _native
from millrace.checks import check_path, shown
from millrace.deferred import cached_property
from millrace.errors import ConfigError, DataError
from millrace.files import blake2b
from millrace.ragged import Numbers, equal_runs, starts_of
from millrace.storage import (
    Access,
    BinReader,
    Bytes,
    Storage,
    StoredFile,
    bytes_in_memory,
    gather_range,
    sample_of,
    storage_of,
)
from millrace.store.layout import count_tokens

TOKEN_DTYPES = "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64"
_HEADER_SIZE = 1 << 16  # bytes that hold the header of any array of one dimension
# NumPy reads a header by ast.literal_eval, which Python 3.11 cannot do in two threads at once ("AST
# constructor recursion depth mismatch").
_ONE_HEADER_AT_A_TIME = threading.Lock()


class OpenTokens:
    """Tokens of a path, which keep showing the files that were opened.

    They can be forked, shared by threads, and pickled. A pickle can only be opened where the path
    has the same files or (on another machine, or after a copy) the same content.

    Attributes:
        prefix: The path.
        dtype: Dtype of the tokens as they are read.
        reader: The bytes of the tokens, a `BinReader`.
        files: Plain values that are equal if the same files are read in the same way.
        fingerprint: A hash of the content (32 hex digits).
    """

    prefix: str
    dtype: np.dtype[Any]
    reader: BinReader
    files: tuple[Any, ...]
    fingerprint: Any  # str, computed once
    _options: dict[str, Any]  # the other arguments of the class

    @property
    def num_tokens(self) -> int:
        return self.reader.size // self.dtype.itemsize

    def identity(self) -> tuple[Any, ...]:
        """Plain values that tell these data from others."""
        return self.files, self.fingerprint, getattr(self, "lengths_checksum", None)

    def check_identity(self, pickled: tuple[Any, ...]) -> None:
        """Raises DataError if the identity of pickled data is another."""
        if self.files != pickled[0] and self.identity()[1:] != pickled[1:]:
            raise DataError(
                f"{self.prefix} holds other data than the dataset that was pickled: they were "
                "replaced since. Open the dataset anew, and pickle that one"
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.prefix!r}: {self.num_tokens:,} tokens, {self.dtype})"

    def __getstate__(self) -> tuple[Any, ...]:
        return self.prefix, self._options, self.identity()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        prefix, options, pickled = state
        self.__init__(prefix, **options)  # type: ignore[misc]  # each class has its options
        self.check_identity(pickled)

    def _number(self, kind: str, index: SupportsIndex, count: int) -> int:
        """A number below `count`, from one that may count from the end; or an IndexError."""
        number = operator.index(index)
        if not -count <= number < count:
            raise IndexError(f"there is no {kind} {number}; {self.prefix} has 0 to {count - 1}")
        return number % count


class JoinedFiles:
    """The bytes of several files, one after the other, as a `BinReader`.

    Args:
        files: The files.
        start: First byte of each that counts.

    Attributes:
        parts: The bytes of each file in memory; None: it is read.
        is_mapped: Whether all bytes are in memory.
    """

    def __init__(self, files: Sequence[BinReader], start: int = 0) -> None:
        self._files = files
        ends = starts_of(file.size - start for file in files)
        self._shifts, self._ends, self.size = start - ends[:-1], ends[1:], int(ends[-1])
        found = map(bytes_in_memory, files)
        # Off the grid of 8 bytes, where NumPy never puts them, tokens are copied.
        self.parts = [None if data is None or start % 8 else data[start:] for data in found]
        self.is_mapped = all(part is not None for part in self.parts)
        remote = [file for file in files if hasattr(file, "prefetch")]
        self.is_local = all(getattr(file, "is_local", False) for file in remote)

    def source(
        self, dtype: np.dtype[Any], counts: Sequence[int], length: int
    ) -> _native.TokenSource:
        """The tokens for the core: `counts[i]` sequences of one length in file i."""
        nothing = np.empty(0, dtype)
        arrays = [nothing if part is None else part.view(dtype) for part in self.parts]
        sizes = np.array(counts, np.int64)
        return _native.TokenSource(tuple(arrays), sizes, length, any(map(len, arrays)))

    def read(self, byte_offset: int, num_bytes: int) -> Bytes:
        return self.gather(np.array([byte_offset]), np.array([num_bytes]))

    def gather(self, byte_offsets: Numbers, byte_counts: Numbers) -> Bytes:
        """The pieces; none may lie in two files."""
        runs = self._runs(byte_offsets, byte_counts)
        parts = [file.gather(*pieces) for file, *pieces in runs]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint8), *parts])

    def prefetch(self, byte_offsets: Numbers, byte_counts: Numbers) -> None:
        for file, *pieces in self._runs(byte_offsets, byte_counts):
            if hasattr(file, "prefetch"):
                file.prefetch(*pieces)

    def _runs(
        self, byte_offsets: Numbers, byte_counts: Numbers
    ) -> Iterator[tuple[Any, Numbers, Numbers]]:
        """Runs of pieces in one file: the file, their offsets in it, and their sizes."""
        numbers = np.searchsorted(self._ends[:-1], byte_offsets, side="right")
        for run in equal_runs(numbers):
            file = int(numbers[run.start])
            yield self._files[file], byte_offsets[run] + self._shifts[file], byte_counts[run]


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
        count_tokens(self.prefix, self.reader.size, self.dtype)

    def _start_and_dtype(
        self, file: StoredFile, dtype: DTypeLike | None
    ) -> tuple[int, np.dtype[Any]]:
        """The first byte of the tokens and their dtype, by the header if there is one."""
        given = None if dtype is None else token_dtype(dtype)
        head = gather_range(file, 0, min(file.size, _HEADER_SIZE)).tobytes()
        if not head.startswith(np.lib.format.MAGIC_PREFIX):
            if given is None:
                raise ConfigError(f"{self.prefix} has no header: give the dtype of its tokens")
            return 0, given
        stream = io.BytesIO(head)
        try:
            shape, _, found = read_npy_header(stream)
        except ValueError as error:
            raise DataError(f"{self.prefix} has a damaged header of NumPy: {error}") from None
        start = stream.tell()
        if len(shape) != 1 or file.size - start != shape[0] * found.itemsize:
            raise DataError(
                f"{self.prefix} is an array of shape {shape} and dtype {found}, and has "
                f"{file.size - start} bytes after its header: an array of one dimension is needed"
            )
        stored = token_dtype(found)
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


def read_npy_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether in Fortran's order, and dtype of NumPy's array; ValueError for damage."""
    npy = np.lib.format
    try:
        with _ONE_HEADER_AT_A_TIME:
            versions = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
            return versions[npy.read_magic(file)](file)
    except (LookupError, EOFError, AttributeError, SyntaxError) as error:
        raise ValueError(f"its header is damaged, or of another version: {error}") from None


def token_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """A dtype that raw tokens may have, as they are read; ConfigError for another one."""
    with contextlib.suppress(TypeError):
        stored = np.dtype(dtype)
        if stored.name in TOKEN_DTYPES and stored.byteorder != ">":
            return np.dtype(np.int32) if stored.name == "uint32" else stored.newbyteorder("<")
    names = ", ".join(TOKEN_DTYPES)
    raise ConfigError(f"dtype is {shown(dtype)}; it is one of {names}, little-endian")
