"""Is a pair whole and unchanged?

The structure is always checked: the header, the sizes, and that each sequence and each document
starts where the one before it ends. Checksums are checked if a sidecar has them; a damaged block
of tokens is reported with its sequences and documents. A sidecar of origins is checked too.
"""

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from millrace import _native
from millrace.checks import check_int, check_list, check_path
from millrace.cores import available_cores
from millrace.errors import ConfigError, DataError
from millrace.files import check_split, checksum
from millrace.names import BIN, IDX
from millrace.storage import StoredFile, exists, storage_of
from millrace.store.info import BLOCK_SIZE, Checksums, read_info
from millrace.store.publish import open_pair, paths_to_read
from millrace.store.reader import IndexedDataset


@dataclass(kw_only=True)
class Report:
    """The result of `verify` for one pair, or of `verify_shards` for a folder.

    Attributes:
        prefix: Path prefix of the pair, or the folder.
        problems: One sentence for each problem; empty for a whole pair.
        has_checksums: Whether the content was checked too, not only the structure.
        notices: One sentence for each file that does not belong to the folder.
        num_unread: Number of problems that are files which cannot be read.
    """

    prefix: str
    problems: list[str] = field(default_factory=list)
    has_checksums: bool = False
    notices: list[str] = field(default_factory=list)
    num_unread: int = 0


class Checks:
    """The checks of a pair or folder, their report, and the threads that read for them."""

    def __init__(self, name: str, pool: ThreadPoolExecutor, on_bytes: Any) -> None:
        self.report, self.pool, self.count = Report(prefix=name), pool, on_bytes or (lambda _: None)

    def add(self, *problems: str | None) -> None:
        self.report.problems += filter(None, problems)

    @contextlib.contextmanager
    def errors_of(self, name: str | None = None) -> Iterator[None]:
        """Adds an error of the block as a problem of the file or folder with this name."""
        name = name or self.report.prefix
        try:
            yield
        except (ConfigError, DataError) as error:
            self.add(str(error))
        except OSError as error:
            self.report.num_unread += 1
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
            self.add(f"{path} has {file.size} bytes; its checksums are of a file of {sums.size}")
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

    def map(self, check: Callable[["Checks", Any], None], items: Collection[Any]) -> None:
        """Adds the problems of items, checked by the threads."""
        parts = [Checks(self.report.prefix, self.pool, self.count) for _ in items]
        list(self.pool.map(check, parts, items))
        for part in parts:
            self.add(*part.report.problems)
            self.report.num_unread += part.report.num_unread


def verify(
    prefixes: Sequence[str | os.PathLike[str]],
    *,
    threads: int | None = None,
    on_bytes: Callable[[int], Any] | None = None,
) -> list[Report]:
    """Checks the structure of indexed datasets, and their checksums if they have any.

    Args:
        prefixes: Path prefixes of the pairs.
        threads: Number of threads that read and hash; None: one for each core.
        on_bytes: Function that any thread calls with the number of bytes read since the last call.

    Returns:
        A report for each prefix, in order; damage is reported, not raised.

    Raises:
        ConfigError: If there is less than one thread.
    """
    names = check_list("prefixes", prefixes, "paths", check_path)
    with make_pool(threads) as pool:
        return [_verify(name, pool, on_bytes) for name in names]


def make_pool(threads: int | None) -> ThreadPoolExecutor:
    threads = available_cores() if threads is None else check_int("threads", threads, least=1)
    return ThreadPoolExecutor(threads)


def _verify(prefix: str, pool: ThreadPoolExecutor, on_bytes: Any) -> Report:
    """Opens all files before it reads any: another pair may be published meanwhile."""
    checks, sums = Checks(prefix, pool, on_bytes), dict[str, Any]()
    with checks.errors_of():
        info = read_info(prefix)
        sums = vars(info.checksums) if info and info.checksums else {}
    checks.report.has_checksums = bool(sums)
    with checks.errors_of():
        storage, path = storage_of(prefix), paths_to_read(prefix).origins
        data, index = open_pair(prefix, "file", storage=storage)
        assert data is not None
        origins = storage.open(path, "file") if exists(storage, path) else None
        checks.blocks(prefix + IDX, index, sums.get("idx"))
        checks.blocks(prefix + BIN, data, sums.get("bin"), partial(_sequences_in, prefix))
        dataset = IndexedDataset(prefix, access="file")
        dataset.check()
        check_split(prefix)
        if origins is not None:
            checks.blocks(path, origins, sums.get("origins"))
        if not checks.report.problems:  # the fingerprint of a damaged pair may have changed
            with contextlib.suppress(ConfigError):  # pyarrow is not installed
                rows = dataset.origins_file
                if rows is not None and sums.get("origins") is None:
                    for _ in rows.tables(0, dataset.num_documents):  # reading tells
                        pass
    return checks.report


def _sequences_in(prefix: str, start: int, stop: int) -> str:
    """The sequences and documents between two bytes of the `.bin`."""
    dataset = IndexedDataset(prefix, access="file")
    numbers = _native.find_documents(dataset.sequence_pointers, np.array([start, stop - 1]))
    documents = dataset.documents_of(numbers)
    return f"sequences {numbers[0]} to {numbers[1]}, documents {documents[0]} to {documents[1]}"
