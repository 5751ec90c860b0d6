"""Is a folder of shards whole and unchanged?

The metadata are compared with the sizes of the shards, and each index file with what it must hold.
Every byte is read and compared if the metadata have checksums. Files that do not belong to the
folder are named.
"""

import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from millrace.checks import check_path
from millrace.files import sum_of
from millrace.names import SHUFFLE_RESULT
from millrace.shards.metadata import (
    JOURNAL,
    METADATA,
    ShardsMetadata,
    bin_paths,
    metadata_problem,
    parse_metadata,
    shard_prefix,
    shard_problem,
)
from millrace.storage import LOCAL, copied
from millrace.store.checking import Checks, Report, make_pool
from millrace.store.layout import WRITE_AGAIN, Header, read_header
from millrace.store.reader import IndexedDataset

_ENTRIES = 1 << 20  # index entries that are compared at a time
_SHARD_FILE = re.compile(r"shard_\d+\.(bin|idx)")


def verify_shards(
    folder: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    threads: int | None = None,
    on_bytes: Callable[[int], Any] | None = None,
) -> Report:
    """Checks the output folder of a global shuffle.

    Args:
        folder: Folder of the shards.
        dtype: Dtype of the tokens, for metadata that do not say it; None: uint32.
        threads, on_bytes: As for `millrace.store.verify`.

    Returns:
        The report; damage is reported, not raised.

    Raises:
        ConfigError: If there is less than one thread, or a dtype that token files cannot have.
    """
    folder = check_path("folder", folder)
    with make_pool(threads) as pool:
        checks = Checks(folder, pool, on_bytes)
        with checks.errors_of():
            metadata = parse_metadata(folder, dtype)
            checks.report.has_checksums = bool(metadata.checksums)
            checks.add(metadata_problem(folder, metadata))
            shards, sums = range(metadata.num_shards), metadata.checksums.items()
            structure = checks.map(partial(_check_shard, folder, metadata), shards)
            checks.report.num_bytes = checks.map(partial(_check_sum, folder), sums) or structure
            _check_strays(folder, metadata, checks.report)
    return checks.report


def _check_shard(folder: str, metadata: ShardsMetadata, checks: Checks, number: int) -> None:
    """Checks the size of a shard, and its index file against what it must hold."""
    prefix, size = shard_prefix(folder, number), metadata.shard_sizes[number]
    path = f"{prefix}.idx"
    with checks.errors_of(prefix):
        if problem := shard_problem(folder, metadata, number):
            checks.add(problem)
        elif not os.path.exists(path):
            if not metadata.is_of_another_tool:
                checks.add(f"{path} is missing: restore it, or shuffle again")
        else:
            header = read_header(LOCAL.open(path, "file"), path)
            checks.report.num_bytes += header.size
            checks.add(problem := _header_problem(path, header, metadata, size))
            if metadata.has_documents or problem is None:
                dataset = IndexedDataset(prefix, access="file")
                dataset.check()
                if not metadata.has_documents:
                    checks.add(_sequences_problem(path, dataset, metadata.seq_len or 0))


def _sequences_problem(path: str, dataset: IndexedDataset, length: int) -> str | None:
    """The problem of an index whose documents are not one sequence of that length each."""
    for start in range(0, len(dataset), _ENTRIES):
        part = slice(start, start + _ENTRIES)
        lengths = copied(dataset.sequence_lengths[part])
        firsts = copied(dataset.document_indices[:-1][part])
        bad = (lengths != length) | (firsts != np.arange(start, start + len(lengths)))
        if bad.any():
            place = int(bad.argmax())
            return (
                f"{path}: sequence {start + place} has {lengths[place]} tokens, and document "
                f"{start + place} begins with sequence {firsts[place]}; each document should be "
                f"one sequence of {length} tokens. {WRITE_AGAIN}"
            )
    return None


def _header_problem(path: str, header: Header, metadata: ShardsMetadata, size: int) -> str | None:
    """What the metadata contradict in the header of a shard with so many items."""
    expected, num_documents = metadata.token_dtype, header.num_document_entries - 1
    if header.dtype != expected:
        suffix = "" if str(expected) == metadata.dtype else f", stored as {expected}"
        problem = f"says {header.dtype}; {METADATA} says {metadata.dtype}{suffix}"
    elif num_documents != size:
        problem = f"has {num_documents} documents; {METADATA} says {size}"
    elif not metadata.has_documents and (header.num_sequences, header.has_modes) != (size, False):
        modes = " with modes" if header.has_modes else ""
        problem = f"has {header.num_sequences} sequences{modes}; {METADATA} says {size}"
    else:
        return None
    return f"{path} {problem}. {WRITE_AGAIN}"


def _check_sum(folder: str, checks: Checks, file: tuple[str, str]) -> None:
    """Compares the checksum of a file, given its name and the checksum."""
    name, expected = file
    path = os.path.join(folder, name)
    if os.path.basename(name) != name:
        checks.add(f"{METADATA} has the checksum of {name!r}, which is not a name of a file")
        return
    with checks.errors_of(path):
        try:
            size, digest = sum_of(path, checks.count)
        except FileNotFoundError:
            if not _SHARD_FILE.fullmatch(name):  # else `_check_shard` has named it
                checks.add(f"{path} is missing, although {METADATA} has its checksum: restore it")
            return
        checks.report.num_bytes += size
        if digest != expected:
            checks.add(
                f"{path} is damaged: its checksum is {digest}; when it was written it was "
                f"{expected}. Restore it, or shuffle again"
            )


def _check_strays(folder: str, metadata: ShardsMetadata, report: Report) -> None:
    """Names the files that do not belong to the folder; another shuffle's shards do harm."""
    names = {METADATA, SHUFFLE_RESULT, *metadata.checksums}
    for path in bin_paths("", metadata):
        names |= {path, f"{path.removesuffix('.bin')}.idx"}
    for name in sorted(set(os.listdir(folder)) - names):
        path = os.path.join(folder, name)
        if _SHARD_FILE.fullmatch(name):
            report.problems.append(
                f"{path} is not one of the {metadata.num_shards} shards of this folder: another "
                "shuffle has left it. Remove it"
            )
        elif name.startswith(JOURNAL):
            report.notices.append(
                f"{path} is the journal of a shuffle that has not ended: run its command again"
            )
        else:
            report.notices.append(f"{path} does not belong to the shuffle")
