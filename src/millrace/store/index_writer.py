"""Writing the index of a `.bin` that exists already, in one pass over its documents."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace.errors import DataError
from millrace.files import atomic_file
from millrace.store.layout import Header
from millrace.store.publish import idx_path


class Entries(NamedTuple):
    """The entries of some sequences, and of the documents that end with one of them.

    Attributes:
        lengths: Length of each sequence in tokens: integers [sequences].
        counts: Number of these sequences that each document has: integers [documents]. Sequences of
            a document that ends later are at the end of `lengths`, and not counted.
        modes: Mode of each sequence, int8 [sequences]; None in a file without modes.
    """

    lengths: NDArray[Any]
    counts: NDArray[Any]
    modes: NDArray[np.int8] | None = None


def write_index(prefix: str, header: Header, documents: Iterable[Entries]) -> None:
    """Writes `PREFIX.idx` for the `.bin` that is there. The file appears whole or not at all.

    It is not flushed to the disk.

    Args:
        prefix: Path prefix of the pair.
        header: Header of the index: its numbers of sequences and document entries are needed before
            the first entry.
        documents: Entries of all documents, some at a time, in order.

    Raises:
        DataError: Entries that are not as many as the header says, or whose tokens are not as many
            as those of the `.bin`.
    """
    num_sequences = num_documents = num_bytes = 0
    columns = header.columns
    path = idx_path(prefix)
    with atomic_file(path, durable=False) as file:
        _write(file, 0, header.pack())
        _write(file, columns["documents"].offset, np.zeros(1, "<i8"))
        for lengths, counts, modes in documents:
            ends = np.cumsum(lengths, dtype="<i8") * header.dtype.itemsize
            pointers = num_bytes + np.concatenate(([0], ends))
            entries = num_sequences + np.cumsum(counts, dtype="<i8")
            for name, row, values in (
                ("lengths", num_sequences, lengths),
                ("pointers", num_sequences, pointers[:-1]),
                ("documents", num_documents + 1, entries),
                ("modes", num_sequences, modes),
            ):
                column = columns[name]
                if values is not None:
                    place = column.offset + row * column.dtype.itemsize
                    _write(file, place, np.ascontiguousarray(values, column.dtype))
            num_sequences += len(lengths)
            num_documents += len(counts)
            num_bytes = int(pointers[-1])
        size = os.path.getsize(prefix + ".bin")
        expected = header.num_sequences, header.num_document_entries - 1, size
        if (num_sequences, num_documents, num_bytes) != expected:
            raise DataError(
                f"{prefix}: the entries are of {num_sequences} sequences, {num_documents} "
                f"documents and {num_bytes} bytes; the header and the .bin have {expected[0]}, "
                f"{expected[1]} and {size}. No index is written"
            )


def _write(file: BinaryIO, place: int, data: Any) -> None:
    file.seek(place)
    file.write(data)
