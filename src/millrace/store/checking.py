"""Is a pair whole and unchanged?

The structure is always checked: the header, the sizes, and that each sequence and each document
starts where the one before it ends. Checksums are checked if the pair has a sidecar with them; a
damaged block is reported with its sequences and documents. A sidecar of origins is checked too.
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from millrace.checks import check_int, check_paths
from millrace.cores import available_cores
from millrace.errors import ConfigError, DataError
from millrace.files import checksum
from millrace.storage import Storage, StoredFile, storage_of
from millrace.store import layout
from millrace.store.info import BLOCK_SIZE, Checksums, Info, read_info
from millrace.store.publish import bin_path, idx_path, open_pair, paths_to_read
from millrace.store.reader import IndexedDataset

_ENTRIES = 1 << 20  # index entries that are checked at a time
_ATTEMPTS = 10  # to check a pair; one fails only if the pair is replaced meanwhile


@dataclass(kw_only=True)
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
    problems: list[str] = field(default_factory=list)
    has_checksums: bool = False
    num_bytes: int = 0
    notices: list[str] = field(default_factory=list)


class Checks:
    """The checks of a pair or folder, which fill a report, and the threads that read for them."""

    def __init__(
        self, name: str, pool: ThreadPoolExecutor, on_bytes: Callable[[int], Any] | None
    ) -> None:
        self.report, self.pool, self._on_bytes = Report(prefix=name), pool, on_bytes

    def count(self, num_bytes: int) -> None:
        """Tells the caller of the progress."""
        if self._on_bytes is not None:
            self._on_bytes(num_bytes)

    def add(self, *problems: str | None) -> None:
        self.report.problems += filter(None, problems)

    @contextlib.contextmanager
    def errors_of(self, name: str | None = None) -> Iterator[None]:
        """Makes an error of the block a problem, of the file or folder with this name."""
        name = name or self.report.prefix
        try:
            yield
        except DataError as error:
            self.add(str(error))
        except OSError as error:
            self.add(f"{error.filename or name} cannot be read: {error.strerror or error}")
        except ValueError as error:
            self.add(f"{name!a} cannot be the name of a file: {error}")

    def blocks(
        self,
        path: str,
        file: StoredFile,
        sums: Checksums | None,
        describe: Callable[[int, int], str] | None = None,
    ) -> None:
        """Compares a file with checksums; `describe` says what bytes [start, stop) hold."""
        if sums is None:
            return
        if file.size != sums.size:
            self.add(
                f"{path} has {file.size} bytes; when its checksums were made it had {sums.size}"
            )
            return

        def is_ok(block: int) -> bool:
            start = block * BLOCK_SIZE
            data = file.read(start, min(BLOCK_SIZE, file.size - start))
            self.count(len(data))
            return checksum([data.data]) == sums.blocks[block]

        for block, ok in enumerate(self.pool.map(is_ok, range(len(sums.blocks)))):
            if ok:
                continue
            start, stop = block * BLOCK_SIZE, min((block + 1) * BLOCK_SIZE, file.size)
            text = f"{path}: block {block} (bytes {start} to {stop - 1}) is damaged"
            # If the index is damaged too, the check of the structure reports it.
            with contextlib.suppress(DataError, OSError):
                text += f": {describe(start, stop)}" if describe is not None else ""
            self.add(text)
        self.report.num_bytes += file.size

    def map(self, check: Callable[[Checks, Any], None], items: Iterable[Any]) -> int:
        """Adds the problems of items, checked by the threads; returns how many bytes they read."""

        def one(item: Any) -> Report:
            checks = Checks(self.report.prefix, self.pool, self._on_bytes)
            check(checks, item)
            return checks.report

        reports = list(self.pool.map(one, items))
        for report in reports:
            self.add(*report.problems)
        return sum(report.num_bytes for report in reports)


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
    names = check_paths("prefixes", prefixes)
    with make_pool(threads) as pool:
        return [_verify(name, pool, on_bytes) for name in names]


def make_pool(threads: int | None) -> ThreadPoolExecutor:
    threads = available_cores() if threads is None else check_int("threads", threads, least=1)
    return ThreadPoolExecutor(threads)


def require_sound(dataset: IndexedDataset) -> None:
    """Checks the whole index of a dataset; a DataError if entries do not agree with each other."""
    dataset.check_documents(0, dataset.num_documents)
    dataset.check_sequences(0, len(dataset))


def _verify(prefix: str, pool: ThreadPoolExecutor, on_bytes: Any) -> Report:
    """Checks again if a new pair was published meanwhile: the old sidecar is not for its files."""
    for _ in range(_ATTEMPTS):
        before = _identity(prefix)
        checks = Checks(prefix, pool, on_bytes)
        _check_pair(prefix, checks)
        if not checks.report.problems or _identity(prefix) == before:
            break
    return checks.report


def _identity(prefix: str) -> list[tuple[str, Any]]:
    """Paths and identities of the files that there are."""
    identity: list[tuple[str, Any]] = []
    with contextlib.suppress(OSError, ValueError):  # a prefix that no file can have
        storage = storage_of(prefix)
        for path in paths_to_read(prefix, storage):
            with contextlib.suppress(FileNotFoundError):
                identity.append((path, storage.stat(path)))
    return identity


def _check_pair(prefix: str, checks: Checks) -> None:
    info = Info()
    with checks.errors_of():
        info = read_info(prefix, storage_of(prefix)) or info
    checks.report.has_checksums = info.bin is not None
    # Positioned reads of open files: if a file is cut short meanwhile, that is a problem to report;
    # a map would end the process.
    with checks.errors_of():
        storage = storage_of(prefix)
        data, index = open_pair(prefix, "file", storage=storage)
        assert data is not None
        checked = partial(CheckedIndex, prefix, index)  # an error if its header is damaged
        checks.blocks(idx_path(prefix), index, info.idx, lambda a, b: checked().entries_in(a, b))
        checks.blocks(bin_path(prefix), data, info.bin, lambda a, b: checked().sequences_in(a, b))
        checks.add(*checked().problems(bin_path(prefix), data.size))
        _check_origins(prefix, storage, info, checks)
        checks.report.num_bytes = checks.report.num_bytes or index.size


def _check_origins(prefix: str, storage: Storage, info: Info, checks: Checks) -> None:
    """Compares every byte of the sidecar of origins, or reads every row if it has no checksums."""
    path = paths_to_read(prefix, storage).origins
    try:
        file = storage.open(path, "file")
    except FileNotFoundError:
        return
    checks.blocks(path, file, info.origins)
    if checks.report.problems:  # of a damaged pair, the fingerprint may have changed
        return
    with checks.errors_of(), contextlib.suppress(ConfigError):  # pyarrow is not installed
        dataset = IndexedDataset(prefix, access="file", storage=storage)
        origins = dataset.origins_file
        if origins is not None and info.origins is None:
            for _ in origins.tables(0, dataset.num_documents):
                pass
            checks.report.num_bytes += file.size


class CheckedIndex(layout.IndexFile):
    """An open index file, with what is wrong in it and where bytes belong."""

    def pieces(self, name: str) -> Iterator[tuple[int, Any]]:
        """The entries of a column, in pieces, and the number of the first one of each."""
        for start in range(0, self.header.columns[name].length, _ENTRIES):
            yield start, self.read(name, start, _ENTRIES)

    def problems(self, bin_path: str, bin_size: int) -> Iterator[str]:
        """The first thing that is wrong with the sequences, and with the documents."""
        size, byte = self.header.dtype.itemsize, 0
        for start, lengths in self.pieces("lengths"):
            pointers = self.read("pointers", start, _ENTRIES)
            problem, byte = layout.sequence_problem(lengths, pointers, size, byte, start)
            if problem:
                yield f"{self.path}: {problem}"
                break
        else:
            if problem := layout.size_problem(bin_size, byte):
                yield f"{bin_path} {problem}"
        last = np.zeros(1, np.int64)
        for start, entries in self.pieces("documents"):
            # The entries of a part go on from the last of the part before.
            part, last = np.concatenate((last, entries)), entries[-1:]
            if problem := layout.document_problem(part, self.header.num_sequences, start - 1):
                yield f"{self.path}: {problem}"
                return
        if problem := self.document_ends_problem():
            yield problem

    def sequences_in(self, start: int, stop: int) -> str:
        """The sequences and documents between two bytes of the `.bin`."""
        first, last = (self._find("pointers", byte) for byte in (start, stop - 1))
        documents = [self._find("documents", number) for number in (first, last)]
        return f"sequences {first} to {last}, documents {documents[0]} to {documents[1]}"

    def entries_in(self, start: int, stop: int) -> str:
        """The parts of the index between two of its bytes."""
        parts = ["header"] if start < layout.HEADER.size else []
        for name, column in self.header.columns.items():
            first, end = max(start, column.offset), min(stop, column.end)
            if first < end:
                size = column.dtype.itemsize
                low, high = (first - column.offset) // size, (end - 1 - column.offset) // size
                label = "document indices" if name == "documents" else f"{name} of sequences"
                parts.append(f"{label} {low} to {high}")
        return ", ".join(parts)

    def _find(self, name: str, value: int) -> int:
        """The number of a column's last entry that is at most `value`."""
        numbers = range(self.header.columns[name].length)
        return bisect_right(numbers, value, key=lambda number: self.entry(name, number)) - 1
