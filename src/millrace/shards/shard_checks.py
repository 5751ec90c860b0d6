"""Is a folder of shards whole and unchanged?

The metadata are compared with the sizes of the shards, each index file with what it must hold, and
every byte with the checksums, if there are any. Files that do not belong to the folder are named.
"""

import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any

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
from millrace.storage import copied
from millrace.store.checking import Checks, Report, make_pool
from millrace.store.layout import WRITE_AGAIN
from millrace.store.reader import IndexedDataset

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
        threads: Number of threads, which read and hash one file each; None: one for each core.
        on_bytes: Called now and then with the number of bytes read since the last call, from any
            thread.

    Returns:
        The report; damage is reported, not raised.

    Raises:
        ConfigError: Less than one thread, or a dtype that token files cannot have.
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
        if problem := shard_problem(folder, metadata, number, os.path.getsize):
            checks.add(problem)
        elif not os.path.exists(path):
            if not metadata.is_of_another_tool:
                checks.add(f"{path} is missing: restore it, or shuffle again")
        else:
            dataset = IndexedDataset(prefix, access="file")
            checks.report.num_bytes += dataset.num_bytes - dataset.reader.size
            dataset.check()
            found, expected = (dataset.num_documents, dataset.dtype), (size, metadata.token_dtype)
            lengths = copied(dataset.sequence_lengths)
            is_fixed = not metadata.has_documents
            if found != expected or (is_fixed and (lengths != metadata.seq_len).any()):
                each = f", each of {metadata.seq_len} tokens" if is_fixed else ""
                checks.add(
                    f"{path} has {found[0]} documents of {found[1]}; by {METADATA} it should have "
                    f"{expected[0]} of {expected[1]}{each}. {WRITE_AGAIN}"
                )


def _check_sum(folder: str, checks: Checks, file: tuple[str, str]) -> None:
    """Compares the checksum of a file, given as name and checksum."""
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
    """Names files that do not belong to the folder; another shuffle's shards do harm."""
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
