"""Moves the shards of a shuffle into the output folder, and checks that folder.

    1. the folders of the shards in the journal are flushed to the disk
    2. the journal stores what the next steps need: names, metadata and result
    3. each file is renamed into the output folder, the .bin of a shard before its .idx
    4. metadata.json is written: the output is whole
    5. the result is kept beside it, and the journal is removed

A job that is killed after step 2 is continued by steps 3 to 5, which then compare each file with
its checksum.

`--restart` removes the shards, metadata.json, and then the journal. One of the last two is there at
each instant, so the next job in this folder knows that the shards may go.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from millrace.checks import absolute_path
from millrace.engine import Done
from millrace.errors import ConfigError, DataError
from millrace.files import fsync_folder, sum_of, temporaries_of
from millrace.interrupts import interruptible
from millrace.names import JOURNAL, SHUFFLE_JOURNAL
from millrace.shards.metadata import METADATA, ShardsMetadata, metadata_path, write_metadata

Report = Callable[[int, int], None]  # of the number of files done, and of all
LAST = {"/shard_": f"/{METADATA}"}  # of an upload, by how the names of the others begin
JOB = SHUFFLE_JOURNAL.removesuffix(JOURNAL)  # first part of the job's file names
_OUTPUT = re.compile(
    r"shard_[0-9]{4,}\.(bin|idx|info\.json|origins\.parquet)|metadata\.json(\.(.*\.)?tmp)?"
)


@contextlib.contextmanager
def output_folder(folder: str) -> Iterator[None]:
    """Makes the output folder, or checks that it holds only an output or a journal.

    A new folder that the job leaves empty is removed.
    """
    is_new = not os.path.isdir(folder)
    if is_new:
        try:
            os.makedirs(folder, exist_ok=True)  # another process may do the same
            fsync_folder(absolute_path(folder))
        except OSError as error:
            raise ConfigError(
                f"the output folder {folder} cannot be made: {error.strerror}; give another one"
            ) from None
    entries = sorted(os.listdir(folder))
    may_have_shards = SHUFFLE_JOURNAL in entries or METADATA in entries  # of this job
    for entry in entries:
        if not (entry.startswith(f"{JOB}.") or (_OUTPUT.fullmatch(entry) and may_have_shards)):
            raise ConfigError(
                f"{folder} is not empty: it holds {entry}. Give an empty folder, or remove what is "
                "in it"
            )
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if is_new:
                os.rmdir(folder)


def remove_output(folder: str) -> None:
    """Removes the output of an earlier job: the shards first, and the metadata last."""
    for entry in sorted(filter(_OUTPUT.fullmatch, os.listdir(folder)), reverse=True):
        os.unlink(os.path.join(folder, entry))
    fsync_folder(metadata_path(folder))


def publication(done: Sequence[Done], metadata: dict[str, Any]) -> dict[str, Any]:
    """What steps 3 and 4 need, as plain JSON; `metadata` lacks only the checksums."""
    files, checksums = [], {}
    for task in done:
        for name, (size, digest) in task.record["files"].items():
            files.append([os.path.basename(task.folder), name, size])
            checksums[name] = digest
    return {"files": files, "metadata": {**metadata, "checksums": checksums}}


def flush_folders(folder: str) -> None:
    """Flushes the folders above a task's, which has flushed its own and the files in it."""
    for _ in range(4):  # of files, run, journal and output
        fsync_folder(folder)
        folder = os.path.dirname(folder)


def publish(source: str, folder: str, content: dict[str, Any], report: Report | None) -> None:
    """Renames the shards and writes the metadata, of which an earlier run may have done a part.

    `source` is the journal's folder of the run, and `content` the result of `publication`. With
    `report`, files are compared with their checksums; else this process has written them.
    """
    files, checksums = content["files"], content["metadata"]["checksums"]
    for count, (attempt, name, size) in enumerate(files, 1):
        path = os.path.join(folder, name)
        with contextlib.suppress(FileNotFoundError):
            os.rename(os.path.join(source, "files", attempt, name), path)
        is_whole = os.path.exists(path) and os.path.getsize(path) == size
        if report is not None and is_whole:
            with interruptible():
                is_whole = sum_of(path) == (size, checksums[name])
            report(count, len(files))
        if not is_whole:
            raise DataError(
                f"{path} is missing, or does not have its {size} bytes and the checksum "
                f"{checksums[name]}: another program has changed it. Start over: --restart"
            )
    path = metadata_path(folder)
    for left in temporaries_of(path):  # of a run that was killed
        os.unlink(left)
    fsync_folder(path)
    write_metadata(folder, ShardsMetadata(**content["metadata"]))
