"""Is a pair whole and unchanged?

Structure is checked always: the header, the sizes, and that every sequence starts where the one
before it ends and every document where the one before it ends. Checksums are checked where the
pair has a sidecar with them; a damaged block is named together with the sequences and documents
that lie in it.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO, overload

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.checks import paths, whole
from millrace.cores import available_cores
from millrace.errors import DataError
from millrace.files import naming
from millrace.store.info import BLOCK_SIZE, Checksums, Info, block_hash, read_info
from millrace.store.layout import HEADER, Header, parse_header
from millrace.store.publish import bin_path, idx_path, info_to_read, open_pair
from millrace.store.reader import IndexedDataset

_ENTRIES = 1 << 20  # index entries that are checked at a time
_ATTEMPTS = 10  # to check a pair; one fails only where the pair is replaced meanwhile


@dataclass(frozen=True, kw_only=True)
class Report:
    """What `verify` found in one pair.

    Attributes:
        prefix: of the pair.
        problems: a sentence each; empty if all is well.
        has_checksums: whether the content was checked too, not only the structure.
        num_bytes: that were read.
    """

    prefix: str
    problems: list[str]
    has_checksums: bool
    num_bytes: int


def verify(
    prefixes: Sequence[str | os.PathLike[str]],
    *,
    threads: int | None = None,
    on_bytes: Callable[[int], Any] | None = None,
) -> list[Report]:
    """Checks indexed datasets: their structure, and their checksums where they have any.

    Args:
        prefixes: of the pairs.
        threads: that read and hash at the same time; None: one a core.
        on_bytes: called now and then with the number of bytes that were read since, from any
            thread.

    Returns:
        a report for each prefix, in order; damage is reported, not raised.

    Raises:
        ConfigError: fewer than one thread.
    """
    names = paths("prefixes", prefixes)
    threads = available_cores() if threads is None else whole("threads", threads, least=1)
    with ThreadPoolExecutor(threads) as pool:
        return [_verify_settled(name, pool, on_bytes) for name in names]


def _verify_settled(
    prefix: str, pool: ThreadPoolExecutor, on_bytes: Callable[[int], Any] | None
) -> Report:
    """Checks again if a new pair was published meanwhile: its files are not the old sidecar's."""
    for _ in range(_ATTEMPTS):
        before = _identity(prefix)
        report = _verify_one(prefix, pool, on_bytes)
        if not report.problems or _identity(prefix) == before:
            break
    return report


def _identity(prefix: str) -> list[tuple[int, int] | None]:
    """Which files are at the prefix."""
    found: list[tuple[int, int] | None] = []
    for name in (idx_path, bin_path, info_to_read):
        try:
            stat = os.stat(name(prefix))
            found.append((stat.st_ino, stat.st_mtime_ns))
        except (OSError, ValueError):
            found.append(None)
    return found


def _verify_one(
    prefix: str, pool: ThreadPoolExecutor, on_bytes: Callable[[int], Any] | None
) -> Report:
    problems: list[str] = []
    info: Info | None = None
    num_bytes = 0
    # Positioned reads, of one opening: a file that is cut short meanwhile is a problem to report,
    # where a map would end the process.
    try:
        info = read_info(prefix)
    except (OSError, ValueError) as error:  # DataErrors, and paths that no file can have
        problems.append(_told(prefix, error))
    try:
        bin_file, idx_file = open_pair(prefix)
        assert bin_file is not None
        with bin_file, idx_file:
            if info is not None and info.bin is not None and info.idx is not None:
                parts = (".idx", idx_file, info.idx), (".bin", bin_file, info.bin)
                for suffix, file, sums in parts:
                    size = os.fstat(file.fileno()).st_size
                    if size != sums.size:
                        problems.append(
                            f"{prefix}{suffix} has {size} bytes; when its checksums were made it "
                            f"had {sums.size}"
                        )
                        continue
                    with naming(prefix + suffix):
                        bad = _bad_blocks(file, sums, pool, on_bytes)
                    problems += [
                        _name_block(prefix, suffix, block, size, idx_file) for block in bad
                    ]
                    num_bytes += size
            problems += _check_structure(prefix, bin_file, idx_file)
            num_bytes = num_bytes or os.fstat(idx_file.fileno()).st_size
    except (OSError, ValueError) as error:
        problems.append(_told(prefix, error))
    return Report(
        prefix=prefix,
        problems=problems,
        has_checksums=info is not None and info.bin is not None,
        num_bytes=num_bytes,
    )


def _told(prefix: str, error: OSError | ValueError) -> str:
    """An error as a problem of a pair."""
    if isinstance(error, DataError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename or prefix} cannot be read: {error.strerror or error}"
    return f"{prefix!a} cannot be the name of a file: {error}"


# ---- structure ----


def _check_structure(prefix: str, bin_file: BinaryIO, idx_file: BinaryIO) -> Iterator[str]:
    """The first thing that is wrong with the sequences, and with the documents."""
    idx, size = f"{prefix}.idx", os.fstat(bin_file.fileno()).st_size
    header, columns = _header(prefix, idx_file), _columns(prefix, idx_file)
    byte = 0
    for start in range(0, header.num_sequences, _ENTRIES):
        lengths = columns["lengths"][start : start + _ENTRIES]
        pointers = columns["pointers"][start : start + _ENTRIES]
        place, byte = _native.first_bad_sequence(lengths, pointers, header.dtype.itemsize, byte)
        if place < len(lengths):
            yield (
                f"{idx}: sequence {start + place} has the length {lengths[place]} and starts at "
                f"byte {pointers[place]}; it should start at byte {byte}, with no negative length"
            )
            break
    else:
        if byte != size:
            yield (
                f"{prefix}.bin has {size} bytes, but its index ends at byte {byte}. "
                f"{'It is truncated or empty' if size < byte else 'It is too long'}. The files do "
                "not belong together or are damaged: write them again"
            )
    least = 0
    for start in range(0, header.num_document_entries, _ENTRIES):
        documents = columns["documents"][start : start + _ENTRIES]
        # The entries of a part go on from the last of the part before.
        place = _native.first_bad_document(
            np.concatenate(([least], documents)), header.num_sequences
        )
        if place <= len(documents):
            yield (
                f"{idx}: document entry {start + place - 1} is {documents[place - 1]}; it should "
                f"be at least {documents[place - 2] if place > 1 else least} and at most "
                f"{header.num_sequences}"
            )
            return
        least = int(documents[-1])
    first = columns["documents"][0]
    if first != 0 or least != header.num_sequences:
        yield (
            f"{idx}: the document indices go from {first} to {least}, not from 0 to "
            f"{header.num_sequences}, the number of sequences"
        )


def _header(prefix: str, idx_file: BinaryIO) -> Header:
    head = os.pread(idx_file.fileno(), HEADER.size, 0)
    return parse_header(head, os.fstat(idx_file.fileno()).st_size, f"{prefix}.idx")[0]


def _columns(prefix: str, idx_file: BinaryIO) -> dict[str, _Column]:
    header = _header(prefix, idx_file)
    return {
        name: _Column(prefix, idx_file, dtype, offset, count)
        for name, dtype, offset, count in (
            ("lengths", "<i4", header.lengths_offset, header.num_sequences),
            ("pointers", "<i8", header.pointers_offset, header.num_sequences),
            ("documents", "<i8", header.documents_offset, header.num_document_entries),
        )
    }


@dataclass(frozen=True)
class _Column:
    """A column of an index that is read, not mapped."""

    prefix: str
    file: BinaryIO
    dtype: str
    offset: int
    count: int

    def __len__(self) -> int:
        return self.count

    @overload
    def __getitem__(self, part: int) -> int: ...
    @overload
    def __getitem__(self, part: slice) -> NDArray[Any]: ...
    def __getitem__(self, part: Any) -> Any:
        if not isinstance(part, slice):
            return int(self[part : part + 1][0])
        start, stop, _ = part.indices(self.count)
        values = np.empty(stop - start, self.dtype)
        at = self.offset + start * values.itemsize
        if _read_at(self.file, at, values.view(np.uint8)) < values.nbytes:
            raise DataError(f"{self.prefix}.idx was cut short while it was read: verify it again")
        return values


def check_documents(dataset: IndexedDataset, start: int, stop: int) -> tuple[int, int]:
    """Checks the entries of documents [start, stop); returns the sequences that they have.

    Raises:
        DataError: entries that are out of order.
    """
    part = dataset.document_indices[start : stop + 1]
    bad = _native.first_bad_document(part, len(dataset))
    if bad < len(part):
        raise DataError(
            f"{dataset.prefix}.idx: document entry {start + bad} is {part[bad]}, out of order or "
            f"not within the {len(dataset)} sequences. The index is damaged: write the pair again"
        )
    return int(part[0]), int(part[-1])


def check_sequences(dataset: IndexedDataset, first: int, last: int) -> tuple[int, int]:
    """Checks that sequences [first, last) lie one after the other; returns their bytes, (start,
    stop).

    Raises:
        DataError: a sequence that does not start where the one before it ends.
    """
    start, stop = (
        int(dataset.sequence_pointers[number]) if number < len(dataset) else dataset.reader.size
        for number in (first, last)
    )
    lengths = dataset.sequence_lengths[first:last]
    pointers = dataset.sequence_pointers[first:last]
    bad, end = _native.first_bad_sequence(lengths, pointers, dataset.dtype.itemsize, start)
    if bad < len(lengths) or end != stop or not 0 <= start <= stop <= dataset.reader.size:
        raise DataError(
            f"{dataset.prefix}.idx: sequence {first + bad} does not start where the one before it "
            "ends. The index is damaged: write the pair again"
        )
    return start, stop


def require_sound(dataset: IndexedDataset) -> None:
    """Checks the whole index of a dataset.

    Raises:
        DataError: entries that do not agree with each other.
    """
    check_documents(dataset, 0, dataset.num_documents)
    check_sequences(dataset, 0, len(dataset))


# ---- checksums ----


def _bad_blocks(
    file: BinaryIO,
    sums: Checksums,
    pool: ThreadPoolExecutor,
    on_bytes: Callable[[int], Any] | None,
) -> list[int]:
    """The blocks of a file whose checksums are others."""
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
    memory = threading.local()  # a block for each thread

    def is_well(block: int) -> bool:
        if not hasattr(memory, "block"):
            memory.block = np.empty(BLOCK_SIZE, np.uint8)
        count = _read_at(file, block * BLOCK_SIZE, memory.block)
        if on_bytes is not None:
            on_bytes(count)
        return block_hash(memory.block[:count].data) == sums.blocks[block]

    wells = pool.map(is_well, range(len(sums.blocks)))
    return [block for block, well in enumerate(wells) if not well]


def _read_at(file: BinaryIO, offset: int, buffer: NDArray[np.uint8]) -> int:
    """Fills a buffer from a place in a file; returns how many bytes there were."""
    view = memoryview(buffer.data)
    done = 0
    while done < len(view):
        count = os.preadv(file.fileno(), [view[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def _name_block(prefix: str, suffix: str, block: int, size: int, idx_file: BinaryIO) -> str:
    """A damaged block, with what lies in it."""
    start, stop = block * BLOCK_SIZE, min((block + 1) * BLOCK_SIZE, size)
    text = f"{prefix}{suffix}: block {block} (bytes {start} to {stop - 1}) is damaged"
    try:
        if suffix == ".idx":
            return f"{text}: {_name_columns(_header(prefix, idx_file), start, stop)}"
        columns = _columns(prefix, idx_file)
        sequences = [bisect_right(columns["pointers"], byte) - 1 for byte in (start, stop - 1)]
        documents = [bisect_right(columns["documents"], number) - 1 for number in sequences]
        return (
            f"{text}: sequences {sequences[0]} to {sequences[1]}, "
            f"documents {documents[0]} to {documents[1]}"
        )
    except (DataError, OSError):
        return text  # the index is damaged as well, and named by itself


def _name_columns(header: Header, start: int, stop: int) -> str:
    """Which parts of an index lie between two bytes."""
    columns = [
        ("header", 0, header.lengths_offset, HEADER.size),
        ("lengths of sequences", header.lengths_offset, header.pointers_offset, 4),
        ("pointers of sequences", header.pointers_offset, header.documents_offset, 8),
        ("first sequences of documents", header.documents_offset, header.modes_offset, 8),
        ("modes of sequences", header.modes_offset, header.modes_offset + header.num_sequences, 1),
    ]
    parts = []
    for name, low, high, width in columns:
        first, last = max(start, low), min(stop, high)
        if first < last:
            span = f" {(first - low) // width} to {(last - 1 - low) // width}"
            parts.append(name + ("" if name == "header" else span))
    return ", ".join(parts)
