"""Is a folder of shards whole and unchanged?

The metadata are compared with the sizes of the shards, and each index file with what it must hold.
Every byte is read and compared if the metadata have checksums. Files that do not belong to the
folder are named.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from millrace.checks import one_path, whole
from millrace.cores import available_cores
from millrace.files import sum_of
from millrace.store import layout
from millrace.store.checking import CheckedIndex, Report, as_problems
from millrace.store.shards import (
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

_ENTRIES = 1 << 20  # index entries that are compared at a time
_SHARD_FILE = re.compile(r"shard_\d+\.(bin|idx)")
_OnBytes = Callable[[int], Any] | None
_Result = tuple[list[str], int]  # problems, and the number of bytes that were read


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
        threads: Number of threads, each of which reads and hashes one file at a time; None: one for
            each core.
        on_bytes: Called now and then with the number of bytes read since the last call, from any
            thread.

    Returns:
        The report; damage is reported, not raised.

    Raises:
        ConfigError: If there is less than one thread, or a dtype that token files cannot have.
    """
    folder = one_path("folder", folder)
    threads = available_cores() if threads is None else whole("threads", threads, least=1)
    problems: list[str] = []
    metadata = None
    with as_problems(folder, problems):
        metadata = parse_metadata(folder, dtype)
    if metadata is None:
        return Report(prefix=folder, problems=problems, has_checksums=False, num_bytes=0)
    with as_problems(folder, problems):
        if problem := metadata_problem(folder, metadata):
            problems.append(problem)
    check = partial(_check_shard, folder, metadata)
    check_sum = partial(_check_sum, folder, on_bytes)
    with ThreadPoolExecutor(threads) as pool:
        structure = [*pool.map(check, range(metadata.num_shards))]
        content = [*pool.map(check_sum, metadata.checksums, metadata.checksums.values())]
    for shard_problems, _ in structure + content:
        problems += shard_problems
    missing = sorted(set(bin_paths("", metadata)) - set(metadata.checksums))
    if metadata.checksums and missing:
        problems.append(
            f"{metadata_path(folder)} has checksums, but none of {missing[0]}: it was "
            "changed since it was written. Restore it, or shuffle again"
        )
    notices: list[str] = []
    with as_problems(folder, problems):
        for sentence, is_problem in _strays(folder, metadata):
            (problems if is_problem else notices).append(sentence)
    return Report(
        prefix=folder,
        problems=problems,
        has_checksums=bool(metadata.checksums),
        num_bytes=sum(count for _, count in content or structure),
        notices=notices,
    )


def _check_shard(folder: str, metadata: ShardsMetadata, number: int) -> _Result:
    """Checks the size of a shard, and its index file against what it must hold."""
    prefix = shard_prefix(folder, number)
    problems: list[str] = []
    num_bytes = 0
    with as_problems(prefix, problems):
        if problem := shard_problem(folder, metadata, number):
            problems.append(problem)
    with as_problems(prefix, problems), contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(f"{prefix}.idx", "rb"))
        except FileNotFoundError:
            if not metadata.is_of_another_tool:
                problems.append(f"{prefix}.idx is missing: restore it, or shuffle again")
            return problems, 0
        index = CheckedIndex(prefix, file)
        num_bytes = index.header.size
        if metadata.has_documents:
            size = os.stat(f"{prefix}.bin").st_size
            problems += _document_problems(index, metadata, number)
            problems += index.problems(f"{prefix}.bin", size)
        else:
            problems += _index_problems(index, metadata, number)
    return problems, num_bytes


def _header_problems(index: CheckedIndex, metadata: ShardsMetadata) -> Iterator[str]:
    expected = metadata.token_dtype
    if index.header.dtype != expected:
        suffix = "" if str(expected) == metadata.dtype else f", stored as {expected}"
        yield (
            f"{index.path} says {index.header.dtype}; {METADATA} says {metadata.dtype}{suffix}. "
            f"{layout.WRITE_AGAIN}"
        )


def _document_problems(index: CheckedIndex, metadata: ShardsMetadata, number: int) -> Iterator[str]:
    yield from _header_problems(index, metadata)
    count, expected = index.header.num_document_entries - 1, metadata.shard_sizes[number]
    if count != expected:
        yield (
            f"{index.path} has {count} documents; {METADATA} says {expected}. {layout.WRITE_AGAIN}"
        )


def _index_problems(index: CheckedIndex, metadata: ShardsMetadata, number: int) -> Iterator[str]:
    """What differs from an index in which each sequence of the shard is a document."""
    header, size = index.header, metadata.shard_sizes[number]
    yield from _header_problems(index, metadata)
    counts = header.num_sequences, header.num_document_entries
    if counts != (size, size + 1) or header.has_modes:
        modes = " with modes" if header.has_modes else ""
        yield (
            f"{index.path} has {counts[0]} sequences{modes} and {counts[1]} document entries; the "
            f"shard has {size} sequences, each a document. {layout.WRITE_AGAIN}"
        )
        return
    for name, what, first, step, length in (
        ("lengths", "the length of sequence", metadata.seq_len or 0, 0, size),
        ("pointers", "the byte offset of sequence", 0, metadata.sequence_bytes, size),
        ("documents", "document entry", 0, 1, size + 1),
    ):
        for start in range(0, length, _ENTRIES):
            entries = index.read(name, start, _ENTRIES)
            expected = first + step * np.arange(start, start + len(entries))
            different = np.flatnonzero(entries != expected)
            if different.size > 0:
                place = different[0]
                yield (
                    f"{index.path}: {what} {start + place} is {entries[place]}; it should be "
                    f"{expected[place]}. The index is damaged: shuffle again, or restore it"
                )
                break


def _check_sum(folder: str, on_bytes: _OnBytes, name: str, expected: str) -> _Result:
    """Compares the checksum of a file."""
    path = os.path.join(folder, name)
    problems: list[str] = []
    size = 0
    if os.path.basename(name) != name or "\0" in name:
        return [f"{METADATA} has the checksum of {name!r}, which is not a name of a file"], 0
    with as_problems(path, problems):
        try:
            size, digest = sum_of(path, on_bytes)
        except FileNotFoundError:
            if _SHARD_FILE.fullmatch(name):  # `_check_shard` has named it
                return [], 0
            return [f"{path} is missing, although {METADATA} has its checksum: restore it"], 0
        if digest != expected:
            problems.append(
                f"{path} is damaged: its checksum is {digest}; when it was written it was "
                f"{expected}. Restore it, or shuffle again"
            )
    return problems, size


def _strays(folder: str, metadata: ShardsMetadata) -> Iterator[tuple[str, bool]]:
    """Files that do not belong to the folder: a sentence, and whether they do harm."""
    names = {METADATA, *metadata.checksums}
    for number in range(metadata.num_shards):
        name = shard_prefix("", number)
        names |= {f"{name}.bin", f"{name}.idx"}
    for name in sorted(set(os.listdir(folder)) - names):
        path = os.path.join(folder, name)
        if _SHARD_FILE.fullmatch(name):
            yield (
                f"{path} is not one of the {metadata.num_shards} shards of this folder: another "
                "shuffle has left it. Remove it",
                True,
            )
        elif name.startswith(JOURNAL):
            yield (
                f"{path} is the journal of a shuffle that has not ended: run its command again",
                False,
            )
        else:
            yield f"{path} does not belong to the shuffle", False
