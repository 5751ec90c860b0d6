"""The manifest of a run: from which token files its indices are made, and where they lie.

It is written before the first set is built, so that `prune` in another process leaves them to the
run; one whose sets are missing is not used. Whoever writes or removes one holds the folder's lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from millrace.cache import arrays
from millrace.errors import DataError
from millrace.files import atomic_file, file_lock, temporaries_of
from millrace.order import GPTPlan
from millrace.run.config import DatasetConfig
from millrace.run.plan import DatasetPlan, RunPlan, SplitPlan, TokenFile, has_same_times, look_at

MANIFEST = "run-"
"""What the names of manifests start with; then follow a fingerprint and .json."""

_LOCK = "manifests.lock"


class Manifest(NamedTuple):
    """What a manifest says.

    Attributes:
        config: the configuration's `order_key`.
        plan: of the run; the prefixes of its token files are as they were given.
        sets: the name of each split's arrays; None for a split without a share.
        paths: the absolute path of each token file's prefix; None where it is not known.
    """

    config: dict[str, Any]
    plan: RunPlan
    sets: list[str | None]
    paths: list[str | None]


@contextlib.contextmanager
def manifests_lock(folder: str, *, limit: float | None = None) -> Iterator[bool]:
    """Holds the lock of all manifests of a folder; see `file_lock`."""
    with file_lock(os.path.join(folder, _LOCK), limit=limit) as is_held:
        yield is_held


def manifest_path(config: DatasetConfig) -> str:
    """Where the manifest of a configuration is in its cache folder."""
    assert config.cache is not None
    name = MANIFEST + arrays.fingerprint(config.order_key()) + arrays.JSON
    return os.path.join(os.fspath(config.cache), name)


def write_manifest(
    config: DatasetConfig,
    plan: RunPlan,
    sets: Sequence[str | None],
    *,
    limit: float | None = None,
) -> None:
    """Writes it, or makes one that says the same as young as a new one.

    Args:
        sets: the name of each split's arrays.
        limit: Seconds to wait for the folder's lock; None: no limit.
    """
    record = {
        "logic": arrays.LOGIC_VERSION,
        "config": config.order_key(),
        "files": [dataclasses.asdict(file) for file in plan.files],
        "splits": [None if split is None else dataclasses.asdict(split) for split in plan.splits],
        "sets": list(sets),
        "paths": [os.path.abspath(file.prefix) for file in plan.files],
    }
    text = arrays.seal(record)
    path = manifest_path(config)
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    with manifests_lock(folder, limit=limit) as is_alone:
        if is_alone:  # else a temporary may be that of a living process
            for temporary in temporaries_of(path):
                os.unlink(temporary)
        if _holds(path, text):
            with contextlib.suppress(PermissionError):  # another user's, as young as it is
                os.utime(path)
        else:
            with atomic_file(path) as out:
                out.write(text)


def _holds(path: str, text: bytes) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read() == text
    except FileNotFoundError:
        return False


def read_manifest(path: str) -> Manifest | None:
    """What a manifest says; None where there is none, or none of this version."""
    record = arrays.read_record(path)
    try:
        if record is None or record["logic"] != arrays.LOGIC_VERSION:
            return None
        files = [TokenFile(**_with_tuples(entry)) for entry in record["files"]]
        splits = [None if entry is None else _split_from(entry) for entry in record["splits"]]
        plan = RunPlan(files=files, splits=splits)
        return Manifest(record["config"], plan, record["sets"], _paths(record, plan))
    except arrays.NO_RECORD:
        return None  # no record of ours, or a damaged one: it is made again


def _paths(record: dict[str, Any], plan: RunPlan) -> list[str | None]:
    """Older manifests have only the prefixes as they were given."""
    if "paths" in record:
        return list(record["paths"])
    return [file.prefix if os.path.isabs(file.prefix) else None for file in plan.files]


def _split_from(entry: dict[str, Any]) -> SplitPlan:
    datasets = [
        DatasetPlan(
            file=part["file"],
            sequences=tuple(part["sequences"]),
            num_samples=part["num_samples"],
            gpt=GPTPlan(**part["gpt"]),
        )
        for part in entry["datasets"]
    ]
    return SplitPlan(**{**entry, "datasets": datasets})


def _with_tuples(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(v) if isinstance(v, list) else v for name, v in entry.items()}


def is_unchanged(file: TokenFile) -> bool:
    """Whether a token file is what a manifest says: by sizes and times, else by its content."""
    if has_same_times(file):
        return True
    try:
        return dataclasses.replace(look_at(file.prefix)[1], times=file.times) == file
    except DataError:
        return False
