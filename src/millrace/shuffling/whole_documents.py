"""Items that are whole documents of indexed datasets, with their sequences, modes and origins."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.errors import ConfigError
from millrace.files import atomic_file
from millrace.provenance import has_origins
from millrace.ragged import Numbers, starts_of
from millrace.shuffling.document_tables import DocumentOrigins, DocumentTables
from millrace.shuffling.domains import Input
from millrace.shuffling.shuffle_items import ItemsAt, WeightedUnits, contents_of
from millrace.shuffling.token_files import read_files
from millrace.store.columns import write_index
from millrace.store.info import Info
from millrace.store.publish import idx_path, info_path, origins_path

_BLOCK = 1 << 13  # documents that are read, or whose entries are written, at a time


class DocumentItems:
    """Whole documents; see `Items`.

    Args:
        found: The input, of indexed datasets.
        folder: Folder for tables of the documents, which all workers can read.

    Raises:
        ConfigError: An input without documents, of two dtypes or tokenizers, files with and without
            modes, or origins where pyarrow is not installed.
        DataError: An index that is damaged.
    """

    item_size = None

    def __init__(self, found: Input, folder: str) -> None:
        self.dtype, self._tokenizer = found.dtype(), found.tokenizer()
        files = self._files = found.files
        counts = [sum(file.num_documents for file in domain.files) for domain in found.domains]
        self._units = WeightedUnits(counts, [domain.weight for domain in found.domains])
        self._first_documents = starts_of(file.num_documents for file in files)
        self._first_tokens = starts_of(file.num_tokens for file in files)
        self.num_items = sum(self._units.num_items)
        if self.num_items == 0:
            raise ConfigError(
                f"the input has no documents: {len(files)} files have {sum(counts)} documents, and "
                "their weights take none of them"
            )
        self._tables = DocumentTables(files, folder)
        self._origins = None
        missing = [f.path for f in files if f.num_documents and not has_origins(f.prefix or "")]
        if not missing:
            self._origins = DocumentOrigins(files, folder)
        elif len(missing) < sum(file.num_documents > 0 for file in files):
            notice = (
                f"{len(missing)} of {len(files)} files have no origins of their documents "
                f"({missing[0]} is the first), so the shards have none"
            )
            found = replace(found, notices=(*found.notices, notice))
        self.contents = contents_of(
            found,
            self._units,
            unit_name="document",
            first_units=self._first_documents,
            num_left=[0] * len(counts),
        )

    @property
    def has_origins(self) -> bool:
        return self._origins is not None

    def sizes(self, numbers: Numbers) -> Numbers:
        first, end = self._tables.token_ranges(self._units.units(numbers))
        return np.asarray(end - first)

    def read(self, numbers: Numbers, buffer: NDArray[Any], targets: Numbers) -> None:
        documents, targets = self._units.ascending_units(numbers, targets)
        size = self.dtype.itemsize
        for start in range(0, len(documents), _BLOCK):
            part = documents[start : start + _BLOCK]
            files = np.searchsorted(self._first_documents, part, side="right") - 1
            first, end = self._tables.token_ranges(part)
            has_tokens = first < end
            read_files(
                self._files,
                files[has_tokens],
                (first - self._first_tokens[files])[has_tokens] * size,
                (end - first)[has_tokens] * size,
                buffer.view(np.uint8),
                targets[start : start + _BLOCK][has_tokens] * size,
            )

    def write_index(self, prefix: str, items_at: ItemsAt, start: int, stop: int) -> list[str]:
        """Writes the index, with the sequences and modes of the documents.

        The sidecar of origins is written if all files have one; `.info.json` names the tokenizer,
        if all files name the same one.
        """

        def documents() -> Iterator[Numbers]:
            for first in range(start, stop, _BLOCK):
                yield self._units.units(items_at(first, min(first + _BLOCK, stop)))

        entries = itertools.chain.from_iterable(map(self._tables.entries, documents()))
        write_index(prefix, self.dtype, entries, has_modes=self._tables.has_modes)
        paths = [idx_path(prefix)]
        if self._origins is not None:
            self._origins.write(prefix, documents())
            paths.append(origins_path(prefix))
        if self._tokenizer is not None:
            info = Info(provenance={"tokenizer": self._tokenizer})
            with atomic_file(info_path(prefix), durable=False) as file:
                file.write(info.to_json().encode())
            paths.append(info_path(prefix))
        return paths
