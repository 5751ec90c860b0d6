"""Is a pair whole and unchanged?

The structure is always checked: the header, the sizes, and that each sequence and each document
starts where the one before it ends. Checksums are checked if the pair has a sidecar with them; a
damaged block is reported with its sequences and documents. A sidecar of origins is checked too.
"""

from __future__ import annotations

import contextlib
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from millrace.checks import paths, whole
from millrace.cores import available_cores
from millrace.errors import DataError
from millrace.files import advise_sequential, checksum, naming
from millrace.store import layout
from millrace.store.bytes import read_at
from millrace.store.info import BLOCK_SIZE, Checksums, Info, read_info
from millrace.store.origins import OriginsFile, has_pyarrow
from millrace.store.publish import bin_path, idx_path, open_pair, paths_to_read
from millrace.store.reader import IndexedDataset, fingerprint_of

_ENTRIES = 1 << 20  # index entries that are checked at a time
_OnBytes = Callable[[int], Any] | None
_ATTEMPTS = 10  # to check a pair; one fails only if the pair is replaced meanwhile


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of `verify` for one pair, or of `verify_shards` for a folder.

    Attributes:
        prefix: Path prefix of the pair, or the folder.
        problems: One sentence for each problem; empty for a whole pair.
        has_checksums: Whether the content was checked too, not only the structure.
        num_bytes: Number of bytes that were read.
        notices: One sentence for each file of a folder that does not belong to it.
    """

    prefix: str
    problems: list[str]
    has_checksums: bool
    num_bytes: int
    notices: list[str] = field(default_factory=list)


def verify(
    prefixes: Sequence[str | os.PathLike[str]],
    *,
    threads: int | None = None,
    on_bytes: Callable[[int], Any] | None = None,
) -> list[Report]:
    """Checks indexed datasets: their structure, and their checksums if they have any.

    Args:
        prefixes: Path prefixes of the pairs.
        threads: Number of threads that read and hash; None: one for each core.
        on_bytes: Called now and then with the number of bytes read since the last call, from any
            thread.

    Returns:
        A report for each prefix, in order; damage is reported, not raised.

    Raises:
        ConfigError: If there is less than one thread.
    """
    names = paths("prefixes", prefixes)
    threads = available_cores() if threads is None else whole("threads", threads, least=1)
    with ThreadPoolExecutor(threads) as pool:
        return [_verify(name, pool, on_bytes) for name in names]


def require_sound(dataset: IndexedDataset) -> None:
    """Checks the whole index of a dataset; a DataError if entries do not agree with each other."""
    dataset.check_documents(0, dataset.num_documents)
    dataset.check_sequences(0, len(dataset))


def _verify(prefix: str, pool: ThreadPoolExecutor, on_bytes: _OnBytes) -> Report:
    """Checks again if a new pair was published meanwhile: the old sidecar is not for its files."""
    for _ in range(_ATTEMPTS):
        before = _identity(prefix)
        report = _verify_once(prefix, pool, on_bytes)
        if not report.problems or _identity(prefix) == before:
            break
    return report


def _identity(prefix: str) -> list[tuple[str, int, int]]:
    """Paths, inodes and times of the files that there are."""
    identity = []
    with contextlib.suppress(OSError, ValueError):  # a prefix that no file can have
        for path in filter(os.path.exists, paths_to_read(prefix)):
            stat = os.stat(path)
            identity.append((path, stat.st_ino, stat.st_mtime_ns))
    return identity


def _verify_once(prefix: str, pool: ThreadPoolExecutor, on_bytes: _OnBytes) -> Report:
    problems: list[str] = []
    info, num_bytes = Info(), 0
    with as_problems(prefix, problems):
        info = read_info(prefix) or info
    # Positioned reads of open files: if a file is cut short meanwhile, that is a problem to report;
    # a map would end the process.
    with as_problems(prefix, problems), contextlib.ExitStack() as stack:
        bin_file, idx_file = map(stack.enter_context, open_pair(prefix))
        for path, file, sums, describe in (
            (idx_path(prefix), idx_file, info.idx, CheckedIndex.entries_in),
            (bin_path(prefix), bin_file, info.bin, CheckedIndex.sequences_in),
        ):
            size = os.fstat(file.fileno()).st_size
            if sums is None:
                continue
            if size != sums.size:
                problems.append(
                    f"{path} has {size} bytes; when its checksums were made it had {sums.size}"
                )
                continue
            with naming(path):
                blocks = _damaged_blocks(file, sums, pool, on_bytes)
            for block in blocks:
                start, stop = block * BLOCK_SIZE, min((block + 1) * BLOCK_SIZE, size)
                text = f"{path}: block {block} (bytes {start} to {stop - 1}) is damaged"
                # If the index is damaged too, the check of the structure reports it.
                with contextlib.suppress(DataError, OSError):
                    text += f": {describe(CheckedIndex(prefix, idx_file), start, stop)}"
                problems.append(text)
            num_bytes += size
        bin_size = os.fstat(bin_file.fileno()).st_size
        problems += CheckedIndex(prefix, idx_file).problems(bin_path(prefix), bin_size)
        num_bytes += _check_origins(prefix, (idx_file, bin_file), info, pool, on_bytes, problems)
        num_bytes = num_bytes or os.fstat(idx_file.fileno()).st_size
    return Report(
        prefix=prefix,
        problems=problems,
        has_checksums=info.bin is not None,
        num_bytes=num_bytes,
    )


def _check_origins(
    prefix: str,
    pair: tuple[BinaryIO, BinaryIO],
    info: Info,
    pool: ThreadPoolExecutor,
    on_bytes: _OnBytes,
    problems: list[str],
) -> int:
    """Checks the sidecar of origins, if there is one; returns the number of bytes that were read.

    With checksums every byte is compared. Without, every row is read, if pyarrow is installed.
    """
    path = paths_to_read(prefix).origins
    try:
        file = open(path, "rb")  # noqa: SIM115
    except FileNotFoundError:
        return 0
    with file, naming(path):
        size = os.fstat(file.fileno()).st_size
        if info.origins is not None:
            if size != info.origins.size:
                problems.append(
                    f"{path} has {size} bytes; when its checksums were made it had "
                    f"{info.origins.size}"
                )
                return 0
            for block in _damaged_blocks(file, info.origins, pool, on_bytes):
                start, stop = block * BLOCK_SIZE, min((block + 1) * BLOCK_SIZE, size)
                problems.append(f"{path}: block {block} (bytes {start} to {stop - 1}) is damaged")
        # Of a damaged pair, the fingerprint may have changed.
        if not problems and has_pyarrow():
            with as_problems(prefix, problems):
                num_documents = layout.IndexFile(prefix, pair[0]).header.num_document_entries - 1
                origins = OriginsFile(prefix, fingerprint_of(*pair), num_documents)
                if info.origins is None:
                    for _ in origins.tables(0, num_documents):
                        pass
    return size


@contextlib.contextmanager
def as_problems(prefix: str, problems: list[str]) -> Iterator[None]:
    """Adds an error of the block to the problems of a pair, a file or a folder."""
    try:
        yield
    except DataError as error:
        problems.append(str(error))
    except OSError as error:
        problems.append(f"{error.filename or prefix} cannot be read: {error.strerror or error}")
    except ValueError as error:
        problems.append(f"{prefix!a} cannot be the name of a file: {error}")


def _damaged_blocks(
    file: BinaryIO, sums: Checksums, pool: ThreadPoolExecutor, on_bytes: _OnBytes
) -> list[int]:
    advise_sequential(file)
    memory = threading.local()  # a buffer for each thread

    def is_ok(block: int) -> bool:
        if not hasattr(memory, "block"):
            memory.block = np.empty(BLOCK_SIZE, np.uint8)
        count = read_at(file.fileno(), block * BLOCK_SIZE, memory.block)
        if on_bytes is not None:
            on_bytes(count)
        return checksum([memory.block[:count].data]) == sums.blocks[block]

    results = pool.map(is_ok, range(len(sums.blocks)))
    return [block for block, ok in enumerate(results) if not ok]


class CheckedIndex(layout.IndexFile):
    """An open index file, with what is wrong in it and where bytes belong."""

    def problems(self, bin_path: str, bin_size: int) -> Iterator[str]:
        """The first thing that is wrong with the sequences, and with the documents."""
        header, byte, problem = self.header, 0, ""
        for start in range(0, header.num_sequences, _ENTRIES):
            lengths = self.read("lengths", start, _ENTRIES)
            pointers = self.read("pointers", start, _ENTRIES)
            problem, byte = layout.sequence_problem(
                lengths, pointers, header.dtype.itemsize, byte, start
            )
            if problem:
                yield f"{self.path}: {problem}"
                break
        if not problem and (problem := layout.size_problem(bin_size, byte)):
            yield f"{bin_path} {problem}"
        last = np.zeros(1, np.int64)
        for start in range(0, header.num_document_entries, _ENTRIES):
            # The entries of a part go on from the last of the part before.
            entries = np.concatenate((last, self.read("documents", start, _ENTRIES)))
            if problem := layout.document_problem(entries, header.num_sequences, start - 1):
                yield f"{self.path}: {problem}"
                return
            last = entries[-1:]
        if problem := self.document_ends_problem():
            yield problem

    def sequences_in(self, start: int, stop: int) -> str:
        """The sequences and documents between two bytes of the `.bin`."""
        sequences = [self._find("pointers", byte) for byte in (start, stop - 1)]
        documents = [self._find("documents", number) for number in sequences]
        return (
            f"sequences {sequences[0]} to {sequences[1]}, documents {documents[0]} to "
            f"{documents[1]}"
        )

    def entries_in(self, start: int, stop: int) -> str:
        """The parts of the index between two of its bytes."""
        parts = ["header"] if start < layout.HEADER.size else []
        for name, column in self.header.columns.items():
            first, end = max(start, column.offset), min(stop, column.end)
            if first < end:
                low, high = (
                    (byte - column.offset) // column.dtype.itemsize for byte in (first, end - 1)
                )
                label = "document indices" if name == "documents" else f"{name} of sequences"
                parts.append(f"{label} {low} to {high}")
        return ", ".join(parts)

    def _find(self, name: str, value: int) -> int:
        """The number of a column's last entry that is at most `value`."""
        numbers = range(self.header.columns[name].length)
        return bisect_right(numbers, value, key=lambda number: self.entry(name, number)) - 1
