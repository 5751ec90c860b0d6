"""Moves the shards of a shuffle into the output folder, and checks what is in that folder.

    1. the shards in the journal are flushed to the disk
    2. all that the next steps need is stored in the journal's plan: names, metadata and result
    3. each file is renamed into the output folder, the .bin of a shard before its .idx
    4. metadata.json is written: the output is whole
    5. the journal is removed

A job that is killed after step 2 is continued by steps 3 to 5 alone, which then compare each file
with its checksum.

`--restart` removes metadata.json, then the journal's `job.json`: from there on the earlier job is
gone, and what it has published is removed by the next one in this folder.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from millrace.checks import absolute_path
from millrace.engine import Journal
from millrace.errors import ConfigError, DataError
from millrace.files import fsync_folder, naming, sum_of, temporaries_of
from millrace.interrupts import interruptible
from millrace.jobs.shuffling.shard_work import SHARD
from millrace.shards.metadata import (
    JOURNAL,
    METADATA,
    ShardsMetadata,
    metadata_path,
    shard_prefix,
    write_metadata,
)

_FLUSHES = 8  # files that are flushed at a time
_SHARD = re.compile(r"shard_[0-9]{4,}\.(bin|idx|info\.json|origins\.parquet)")


def check_folder(folder: str) -> None:
    """Raises a ConfigError if the output folder holds anything but a whole output or a journal.

    Shards may lie beside a journal. A whole output passes: it may be the output of this job.
    """
    try:
        entries = sorted(os.listdir(folder))
    except FileNotFoundError:
        return
    except NotADirectoryError:
        file = folder
        while not os.path.exists(file):
            file = os.path.dirname(file)
        raise ConfigError(f"{file} is a file; give a folder for the output") from None
    may_have_shards = JOURNAL in entries or METADATA in entries
    for entry in entries:
        is_ours = entry == JOURNAL or entry.startswith(f"{JOURNAL}.")
        if not (is_ours or (_is_output(entry) and may_have_shards)):
            raise not_empty(folder, entry)


def make_folder(folder: str) -> None:
    """Makes the output folder, and its parents; another process may do the same."""
    try:
        os.makedirs(folder, exist_ok=True)
        fsync_folder(absolute_path(folder))
    except OSError as error:
        reason = error.strerror or str(error)
        if os.path.islink(folder):
            reason = f"it is a link to {os.readlink(folder)}, which does not exist"
        raise ConfigError(
            f"the output folder {folder} cannot be made: {reason}; give another one"
        ) from None


def not_empty(folder: str, entry: str) -> ConfigError:
    return ConfigError(
        f"{folder} is not empty: it holds {entry}. Give an empty folder, or remove what is in it"
    )


def output_in(folder: str) -> list[str]:
    """Names of the output's files in a folder that `check_folder` has let through."""
    return [entry for entry in sorted(os.listdir(folder)) if _is_output(entry)]


def remove_metadata(folder: str) -> None:
    """Makes an output one that is not whole: its job can publish it again, or begin anew."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(metadata_path(folder))
    fsync_folder(metadata_path(folder))


def remove_rest(folder: str) -> None:
    """Removes the shards of an earlier job that `--restart` has discarded.

    They are those that lie beside the journal of a job that has not published any, and that have no
    metadata.
    """
    if not os.path.exists(metadata_path(folder)):
        for entry in output_in(folder):
            os.unlink(os.path.join(folder, entry))


def publication(
    records: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any]
) -> dict[str, Any]:
    """What steps 3 and 4 need, as plain JSON.

    Args:
        records: The record of each shard's task.
        metadata: Fields of `ShardsMetadata`, without the checksums.
    """
    files, checksums = [], {}
    for shard, record in enumerate(records):
        for name, (size, digest) in record["files"].items():
            target = shard_prefix("", shard) + name.removeprefix(SHARD)
            files.append([shard, name, target, size])
            checksums[target] = digest
    return {"files": files, "metadata": {**metadata, "checksums": checksums}}


def flush_shards(
    journal: Journal, records: Sequence[Mapping[str, Any]], report: Callable[[int, int], None]
) -> None:
    """Flushes the files of all shards, and the folders on the way to them, several at a time.

    Args:
        journal: The journal.
        records: The record of each shard's task.
        report: Called with the number of flushed files and of all files, after each.
    """

    def flush(path: str) -> None:
        with naming(path), open(path, "rb") as file:
            os.fsync(file.fileno())

    paths = [
        os.path.join(journal.folder_of(shard), name)
        for shard, record in enumerate(records)
        for name in record["files"]
    ]
    with ThreadPoolExecutor(_FLUSHES) as pool:
        for count, _ in enumerate(pool.map(flush, paths), 1):
            report(count, len(paths))
        folders = [journal.folder_of(shard) for shard in range(len(records))]
        list(pool.map(fsync_folder, [os.path.join(folder, "") for folder in folders]))
    for path in (folders[0], os.path.dirname(folders[0]), journal.folder, journal.path):
        fsync_folder(path)


def publish(
    journal: Journal,
    folder: str,
    content: Mapping[str, Any],
    report: Callable[[int, int], None] | None = None,
) -> None:
    """Renames the shards and writes the metadata; an earlier run may have done a part of it.

    Args:
        journal: The journal.
        folder: The output folder.
        content: What `publication` has returned.
        report: Called with the number of files that were read and compared with their checksums,
            and of all files, after each; None: the files are as this process has written them.
    """
    files, checksums = content["files"], content["metadata"]["checksums"]
    for count, (shard, name, target, size) in enumerate(files, 1):
        path = os.path.join(folder, target)
        with contextlib.suppress(FileNotFoundError):
            os.rename(os.path.join(journal.folder_of(shard), name), path)
        is_whole = os.path.exists(path) and os.path.getsize(path) == size
        if report is not None and is_whole:
            with interruptible():
                is_whole = sum_of(path) == (size, checksums[target])
            report(count, len(files))
        if not is_whole:
            raise DataError(
                f"{path} is missing, or does not have its {size} bytes and the checksum "
                f"{checksums[target]}: another program has changed it. Start over: --restart"
            )
    path = metadata_path(folder)
    for left in temporaries_of(path):  # of a run that was killed
        os.unlink(left)
    fsync_folder(path)
    write_metadata(folder, ShardsMetadata(**content["metadata"]))


def _is_output(entry: str) -> bool:
    is_temporary = entry.startswith(f"{METADATA}.") and entry.endswith(".tmp")
    return entry == METADATA or is_temporary or _SHARD.fullmatch(entry) is not None
