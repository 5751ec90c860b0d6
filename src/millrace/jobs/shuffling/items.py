"""What a shuffle moves: items, which are fixed-length sequences or whole documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Domain:
    """The items of one domain. Their numbers follow those of the domain before.

    Attributes:
        name: Name of the domain.
        num_files: Number of its files.
        num_items: Number of its items; one that is taken twice, by a weight, counts twice.
        num_tokens: Number of tokens of its files, with the EOD tokens that are added to them.
        num_left: Number of tokens that are in no sequence: the remainders of its files.
    """

    name: str
    num_files: int
    num_items: int
    num_tokens: int
    num_left: int


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file of tokens, as it was when the items were counted.

    Attributes:
        domain: Name of its domain.
        path: Absolute path; of an indexed dataset, of the `.bin`.
        size: Size in bytes.
        mtime_ns: Time of the last change, in nanoseconds.
        index_mtime_ns: Time of the last change of the `.idx`; None: there is none.
        num_items: Number of items that begin in it, as in `Domain`.
        num_tokens: Number of its tokens, as in `Domain`.
    """

    domain: str
    path: str
    size: int
    mtime_ns: int
    index_mtime_ns: int | None
    num_items: int
    num_tokens: int


Sources = Callable[[int, int], NDArray[np.int64]]
"""The item at each place [start, stop) of the output; see `Permutation.sources`."""


class Items(Protocol):
    """Items by number: by domain, then path, then place in the file.

    Items can be pickled: they hold paths and tables of the domains and files. Tables that grow with
    the number of documents are in files of the job's folder.

    Attributes:
        dtype: Dtype of the tokens: uint16, uint32 or int32, little-endian.
        num_items: Number of items.
        item_size: Number of tokens of each item; None: they differ.
        domains: The domains, sorted by name.
        files: The files, sorted by domain, then by path within the domain.
        notices: Sentences about the input that a user should read.
        tokenizer: The tokenizer that all files name in their sidecars, an entry for the provenance
            of the output; None if not all of them name one.
        has_origins: Whether the shards get sidecars of their documents' origins, which takes Arrow.
    """

    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def num_items(self) -> int: ...
    @property
    def item_size(self) -> int | None: ...
    @property
    def domains(self) -> tuple[Domain, ...]: ...
    @property
    def files(self) -> tuple[SourceFile, ...]: ...
    @property
    def notices(self) -> tuple[str, ...]: ...
    @property
    def tokenizer(self) -> dict[str, Any] | None: ...
    @property
    def has_origins(self) -> bool: ...

    def sizes(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of each item: int64 [n]."""
        ...

    def read(
        self, numbers: NDArray[np.int64], buffer: NDArray[Any], targets: NDArray[np.int64]
    ) -> None:
        """Reads items to any places of a buffer.

        Args:
            numbers: Numbers of the items, ascending: int64 [n].
            buffer: Array for the tokens: [m] of `dtype`, contiguous.
            targets: Place of each item's first token in the buffer: int64 [n].

        Raises:
            DataError: A file that changed since the items were counted or cannot be read, or a
                uint32 token of 2**31 or more.
        """
        ...

    def write_index(self, prefix: str, sources: Sources, start: int, stop: int) -> list[str]:
        """Writes the other files of a shard: the index, and sidecars if there are any.

        Args:
            prefix: Path prefix of the shard, whose `.bin` is there.
            sources: The item at each place of the output.
            start, stop: First place of the shard, and its end.

        Returns:
            The paths of the files; each appears whole or not at all.

        Raises:
            DataError: A `.bin` that does not have the size of these items.
        """
        ...
