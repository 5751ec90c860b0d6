"""Is a folder of shards whole and unchanged?

The metadata are compared with the sizes of the shards, and each index file with what it must hold.
Every byte is read and compared if the metadata have checksums. Files that do not belong to the
folder are named.
"""

import os
import re
from collections.abc import Callable, Iterator
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
    metadata_path,
    metadata_problem,
    parse_metadata,
    shard_prefix,
    shard_problem,
)
from millrace.storage import LOCAL
from millrace.store.checking import CheckedIndex, Checks, Report, make_pool
from millrace.store.layout import WRITE_AGAIN

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
        metadata = None
        with checks.errors_of():
            metadata = parse_metadata(folder, dtype)
        if metadata is None:
            return checks.report
        checks.report.has_checksums = bool(metadata.checksums)
        with checks.errors_of():
            checks.add(metadata_problem(folder, metadata))
        sums = metadata.checksums.items()
        structure = checks.map(partial(_check_shard, folder, metadata), range(metadata.num_shards))
        checks.report.num_bytes = checks.map(partial(_check_sum, folder), sums) or structure
    missing = sorted(set(bin_paths("", metadata)) - set(metadata.checksums))
    if metadata.checksums and missing:
        checks.add(
            f"{metadata_path(folder)} has checksums, but none of {missing[0]}: it was "
            "changed since it was written. Restore it, or shuffle again"
        )
    with checks.errors_of():
        _check_strays(folder, metadata, checks.report)
    return checks.report


def _check_shard(folder: str, metadata: ShardsMetadata, checks: Checks, number: int) -> None:
    """Checks the size of a shard, and its index file against what it must hold."""
    prefix = shard_prefix(folder, number)
    with checks.errors_of(prefix):
        checks.add(shard_problem(folder, metadata, number))
    with checks.errors_of(prefix):
        try:
            index = CheckedIndex(prefix, LOCAL.open(f"{prefix}.idx", "file"))
        except FileNotFoundError:
            if not metadata.is_of_another_tool:
                checks.add(f"{prefix}.idx is missing: restore it, or shuffle again")
            return
        checks.report.num_bytes += index.header.size
        size = LOCAL.stat(f"{prefix}.bin").size if metadata.has_documents else 0
        checks.add(*_index_problems(index, metadata, metadata.shard_sizes[number]))
        if metadata.has_documents:
            checks.add(*index.problems(f"{prefix}.bin", size))


def _index_problems(index: CheckedIndex, metadata: ShardsMetadata, size: int) -> Iterator[str]:
    """What the metadata contradict in the index of a shard with so many items."""
    header, expected = index.header, metadata.token_dtype
    if header.dtype != expected:
        suffix = "" if str(expected) == metadata.dtype else f", stored as {expected}"
        yield (
            f"{index.path} says {header.dtype}; {METADATA} says {metadata.dtype}{suffix}. "
            f"{WRITE_AGAIN}"
        )
    counts = header.num_sequences, header.num_document_entries
    if metadata.has_documents:
        if counts[1] != size + 1:
            yield (
                f"{index.path} has {counts[1] - 1} documents; {METADATA} says {size}. {WRITE_AGAIN}"
            )
        return
    if counts != (size, size + 1) or header.has_modes:
        modes = " with modes" if header.has_modes else ""
        yield (
            f"{index.path} has {counts[0]} sequences{modes} and {counts[1]} document entries; the "
            f"shard has {size} sequences, each a document. {WRITE_AGAIN}"
        )
        return
    for name, what, first, step in (
        ("lengths", "the length of sequence", metadata.seq_len or 0, 0),
        ("pointers", "the byte offset of sequence", 0, metadata.sequence_bytes),
        ("documents", "document entry", 0, 1),
    ):
        for start, entries in index.pieces(name):
            wanted = first + step * np.arange(start, start + len(entries))
            if different := np.flatnonzero(entries != wanted).tolist():
                place = different[0]
                yield (
                    f"{index.path}: {what} {start + place} is {entries[place]}; it should be "
                    f"{wanted[place]}. The index is damaged: shuffle again, or restore it"
                )
                break


def _check_sum(folder: str, checks: Checks, file: tuple[str, str]) -> None:
    """Compares the checksum of a file, given its name and the checksum."""
    name, expected = file
    path = os.path.join(folder, name)
    if os.path.basename(name) != name or "\0" in name:
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
