"""What open token files share: pickles, and files that are read as one."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from millrace import _native
from millrace.errors import DataError
from millrace.ragged import Numbers, equal_runs, starts_of
from millrace.storage import BinReader, Bytes, bytes_in_memory


class OpenTokens:
    """Tokens of a path, which keep showing the files that were opened.

    They can be forked, shared by threads, and pickled. A pickle can only be opened where the path
    has the same files or (on another machine, or after a copy) the same content.

    Attributes:
        prefix: The path.
        dtype: Dtype of the tokens as they are read.
        reader: The bytes of the tokens, a `BinReader`.
        files: Plain values that are equal if the same files are read in the same way.
    """

    prefix: str
    dtype: np.dtype[Any]
    reader: BinReader
    files: tuple[Any, ...]
    _options: dict[str, Any]  # the other arguments of the class

    @property
    def num_tokens(self) -> int:
        return self.reader.size // self.dtype.itemsize

    @property
    def fingerprint(self) -> str:
        """A hash of the content (32 hex digits)."""
        raise NotImplementedError

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

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_same, (type(self), self.prefix, self._options, self.identity())


def _open_same(
    kind: Any, prefix: str, options: dict[str, Any], pickled: tuple[Any, ...]
) -> OpenTokens:
    tokens: OpenTokens = kind(prefix, **options)
    tokens.check_identity(pickled)
    return tokens


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
        return _native.sharded_source(arrays, counts, length)

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
