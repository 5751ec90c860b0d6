"""What a shuffle moves: items, which are fixed-length sequences or whole documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from millrace.checks import printable, text_table
from millrace.ragged import Numbers
from millrace.shuffling.domains import Input
from millrace.shuffling.weights import WeightedUnits

ItemsAt = Callable[[int, int], Numbers]
"""The item at each place [start, stop) of the output; see `Permutation.sources`."""


class Items(Protocol):
    """Items by number: by domain, then path, then place in the file.

    Items can be pickled: they hold paths and tables of the domains and files. Tables that grow with
    the number of documents are in files of the job's folder.

    Attributes:
        contents: What the items are of.
        dtype: Dtype of the tokens: uint16, uint32 or int32, little-endian.
        num_items: Number of items.
        item_size: Number of tokens of each item; None: they differ.
        has_origins: Whether the shards get sidecars of their documents' origins, which takes Arrow.
    """

    @property
    def contents(self) -> Contents: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def num_items(self) -> int: ...
    @property
    def item_size(self) -> int | None: ...
    @property
    def has_origins(self) -> bool: ...

    def sizes(self, numbers: Numbers) -> Numbers:
        """Tokens of each item: int64 [n]."""
        ...

    def read(self, numbers: Numbers, buffer: NDArray[Any], targets: Numbers) -> None:
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

    def write_index(self, prefix: str, items_at: ItemsAt, start: int, stop: int) -> list[str]:
        """Writes the other files of a shard: the index, and sidecars if there are any.

        Args:
            prefix: Path prefix of the shard, whose `.bin` is there.
            items_at: The item at each place of the output.
            start, stop: First place of the shard, and its end.

        Returns:
            The paths of the files; each appears whole or not at all.

        Raises:
            DataError: A `.bin` that does not have the size of these items.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class DomainCounts:
    """The items of one domain. Their numbers follow those of the domain before.

    Attributes:
        name: Name of the domain.
        num_files: Number of its files.
        num_items: Number of its items; one that is taken twice, by a weight, counts twice.
        num_tokens: Number of tokens of its files.
        num_left: Number of tokens that are in no item: the remainders of its files.
    """

    name: str
    num_files: int
    num_items: int
    num_tokens: int
    num_left: int


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The domains and files that items are of, for people and for the metadata.

    Attributes:
        domains: The domains, sorted by name.
        inputs: The files, sorted by domain and path, as `metadata.json` lists them: `domain`,
            `path`, `size`, `mtime_ns`, `index_mtime_ns`, `num_items` (which begin in the file) and
            `num_tokens` of each.
        notices: Sentences about the input that a user should read.
    """

    domains: tuple[DomainCounts, ...]
    inputs: list[dict[str, Any]]
    notices: tuple[str, ...]

    def table(self, unit: str) -> str:
        """A table of the domains, for people; `unit` is "sequences" or "documents"."""
        rows = [
            [domain.num_files, domain.num_items, domain.num_tokens, domain.num_left]
            for domain in self.domains
        ]
        rows.append([sum(column) for column in zip(*rows, strict=True)])
        names = [*(printable(domain.name) for domain in self.domains), "total"]
        table = [["domain", "files", unit, "tokens", "tokens left out"]]
        for name, row in zip(names, rows, strict=True):
            table.append([name, *(f"{value:,}" for value in row)])
        return "\n".join(text_table(table))


def contents_of(
    found: Input,
    units: WeightedUnits,
    *,
    unit_name: str,
    first_units: Numbers,
    num_left: Sequence[int],
) -> Contents:
    """The contents of items.

    Args:
        found: The input.
        units: How often its units are taken.
        unit_name: What a unit is, for notices: "document".
        first_units: First unit of each file, and the end: int64 [files + 1].
        num_left: Number of tokens of each domain that are in no unit.
    """
    domains: list[DomainCounts] = []
    inputs: list[dict[str, Any]] = []
    notices = list(found.notices)
    for number, domain in enumerate(found.domains):
        num_units = -int(first_units[len(inputs)])
        for file in domain.files:
            start, stop = first_units[len(inputs) : len(inputs) + 2].tolist()
            inputs.append(
                {
                    "domain": domain.name,
                    "path": file.path,
                    "size": file.size,
                    "mtime_ns": file.mtime_ns,
                    "index_mtime_ns": file.index_mtime_ns,
                    "num_items": units.items_in(number, start, stop),
                    "num_tokens": file.num_tokens,
                }
            )
        num_units += int(first_units[len(inputs)])
        domains.append(
            DomainCounts(
                name=domain.name,
                num_files=len(domain.files),
                num_items=units.num_items[number],
                num_tokens=sum(file.num_tokens for file in domain.files),
                num_left=num_left[number],
            )
        )
        if domains[-1].num_items == 0 and domain.files:
            notices.append(_shortage(domains[-1], float(domain.weight), num_units, unit_name))
    return Contents(domains=tuple(domains), inputs=inputs, notices=tuple(notices))


def _shortage(domain: DomainCounts, weight: float, num_units: int, unit_name: str) -> str:
    """The notice about a domain with files and without items."""
    if num_units > 0:
        return (
            f"domain {domain.name} has the weight {weight:g}: too small to take a {unit_name}, of "
            f"which it has {num_units:,}"
        )
    return (
        f"domain {domain.name} has no whole {unit_name}: its {domain.num_files:,} files have "
        f"{domain.num_tokens:,} tokens"
    )
