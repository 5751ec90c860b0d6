"""Is a pair whole and unchanged?

Structure is checked always: the header, the sizes, and that every sequence starts where the one
before it ends and every document where the one before it ends. Checksums are checked where the
pair has a sidecar with them; a damaged block is named together with the sequences and documents
that lie in it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace import _native
from millrace.cores import available_cores
from millrace.errors import ConfigError, DataError
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
    threads = available_cores() if threads is None else threads
    if threads < 1:
        raise ConfigError(f"threads is {threads}; at least 1 is needed")
    with ThreadPoolExecutor(threads) as pool:
        return [_verify_settled(os.fspath(prefix), pool, on_bytes) for prefix in prefixes]


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
    for path in (idx_path(prefix), bin_path(prefix), info_to_read(prefix)):
        try:
            stat = os.stat(path)
            found.append((stat.st_ino, stat.st_mtime_ns))
        except OSError:
            found.append(None)
    return found


def _verify_one(
    prefix: str, pool: ThreadPoolExecutor, on_bytes: Callable[[int], Any] | None
) -> Report:
    problems: list[str] = []
    info: Info | None = None
    try:
        info = read_info(prefix)
    except DataError as error:
        problems.append(str(error))
    num_bytes = 0
    if info is not None and info.bin is not None and info.idx is not None:
        found, num_bytes = _check_blocks(prefix, info.bin, info.idx, pool, on_bytes)
        problems += found
    try:
        dataset = IndexedDataset(prefix)
    except DataError as error:
        problems.append(str(error))
    else:
        problems += _check_structure(dataset)
        num_bytes = num_bytes or dataset.num_bytes - dataset.reader.size
    return Report(
        prefix=prefix,
        problems=problems,
        has_checksums=info is not None and info.bin is not None,
        num_bytes=num_bytes,
    )


# ---- structure ----


def _check_structure(dataset: IndexedDataset) -> Iterator[str]:
    """The first thing that is wrong with the sequences, and with the documents."""
    idx, width = f"{dataset.prefix}.idx", dataset.dtype.itemsize
    offset = 0
    for start in range(0, len(dataset), _ENTRIES):
        lengths = dataset.sequence_lengths[start : start + _ENTRIES]
        pointers = dataset.sequence_pointers[start : start + _ENTRIES]
        place, offset = _native.first_bad_sequence(lengths, pointers, width, offset)
        if place < len(lengths):
            yield (
                f"{idx}: sequence {start + place} has the length {lengths[place]} and starts at "
                f"byte {pointers[place]}; it should start at byte {offset}, with no negative length"
            )
            break
    entries = dataset.document_indices
    place = _native.first_bad_document(entries, len(dataset))
    if place < len(entries):
        yield (
            f"{idx}: document entry {place} is {entries[place]}; it should be at least "
            f"{entries[place - 1] if place else 0} and at most {len(dataset)}"
        )


# ---- checksums ----


def _check_blocks(
    prefix: str,
    bin_sums: Checksums,
    idx_sums: Checksums,
    pool: ThreadPoolExecutor,
    on_bytes: Callable[[int], Any] | None,
) -> tuple[list[str], int]:
    """What the checksums show, and how many bytes were read."""
    try:
        bin_file, idx_file = open_pair(prefix)
    except DataError:
        return [], 0  # opening the dataset says so
    problems: list[str] = []
    num_bytes = 0
    memory = threading.local()  # a block for each thread
    assert bin_file is not None
    with bin_file, idx_file:
        for suffix, file, sums in ((".idx", idx_file, idx_sums), (".bin", bin_file, bin_sums)):
            size = os.fstat(file.fileno()).st_size
            if size != sums.size:
                problems.append(
                    f"{prefix}{suffix} has {size} bytes; when its checksums were made it had "
                    f"{sums.size}"
                )
                continue
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)

            def is_well(block: int, file: Any = file, sums: Checksums = sums) -> bool:
                if not hasattr(memory, "block"):
                    memory.block = np.empty(BLOCK_SIZE, np.uint8)
                count = _read_block(file.fileno(), block, memory.block)
                if on_bytes is not None:
                    on_bytes(count)
                return block_hash(memory.block[:count].data) == sums.blocks[block]

            bad = [
                block
                for block, well in enumerate(pool.map(is_well, range(len(sums.blocks))))
                if not well
            ]
            num_bytes += size
            problems += [_name_block(prefix, suffix, block, size) for block in bad]
    return problems, num_bytes


def _read_block(descriptor: int, block: int, buffer: NDArray[np.uint8]) -> int:
    view = memoryview(buffer.data)
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], block * BLOCK_SIZE + done)
        if count == 0:
            break
        done += count
    return done


def _name_block(prefix: str, suffix: str, block: int, size: int) -> str:
    """A damaged block, with what lies in it."""
    start, stop = block * BLOCK_SIZE, min((block + 1) * BLOCK_SIZE, size)
    text = f"{prefix}{suffix}: block {block} (bytes {start} to {stop - 1}) is damaged"
    try:
        with open(f"{prefix}.idx", "rb") as file:
            header, _ = parse_header(
                file.read(HEADER.size), os.fstat(file.fileno()).st_size, f"{prefix}.idx"
            )
        if suffix == ".idx":
            return f"{text}: {_name_columns(header, start, stop)}"
        dataset = IndexedDataset(prefix)
        first = int(np.searchsorted(dataset.sequence_pointers, start, side="right")) - 1
        last = int(np.searchsorted(dataset.sequence_pointers, stop - 1, side="right")) - 1
        documents = np.searchsorted(dataset.document_indices, [first, last], side="right") - 1
        return f"{text}: sequences {first} to {last}, documents {documents[0]} to {documents[1]}"
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
