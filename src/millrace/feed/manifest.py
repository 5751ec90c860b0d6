"""The manifest of a run: from which token files its indices were made, and where they lie."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from millrace.errors import DataError
from millrace.feed.config import DatasetConfig
from millrace.feed.plan import DatasetPlan, RunPlan, SplitPlan, TokenFile, has_same_times, look_at
from millrace.files import atomic_file, file_lock
from millrace.order import GPTPlan, arrays

MANIFEST = "run-"
"""What the names of manifests start with; then follow a fingerprint and .json."""


def manifest_path(config: DatasetConfig) -> str:
    """Where the manifest of a configuration is in its cache folder."""
    assert config.cache is not None
    name = MANIFEST + arrays.fingerprint(config.order_key()) + arrays.JSON
    return os.path.join(os.fspath(config.cache), name)


def write_manifest(
    config: DatasetConfig,
    plan: RunPlan,
    sets: Sequence[arrays.ArraySet | None],
) -> None:
    record = {
        "logic": arrays.LOGIC_VERSION,
        "config": config.order_key(),
        "files": [dataclasses.asdict(file) for file in plan.files],
        "splits": [None if split is None else dataclasses.asdict(split) for split in plan.splits],
        "sets": [None if stored is None else stored.name for stored in sets],
    }
    text = arrays.seal(record)
    path = manifest_path(config)
    if _holds(path, text):
        return
    with file_lock(path.removesuffix(arrays.JSON) + arrays.LOCK):
        if not _holds(path, text):  # of many that waited, the first one wrote it
            with atomic_file(path) as out:
                out.write(text)


def _holds(path: str, text: bytes) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read() == text
    except FileNotFoundError:
        return False


def read_manifest(path: str) -> tuple[dict[str, Any], RunPlan, list[str | None]] | None:
    """(the configuration's `order_key`, the plan, the sets' names); None where there is none."""
    try:
        with open(path, "rb") as file:
            record = arrays.unseal(file.read())
        if record["logic"] != arrays.LOGIC_VERSION:
            return None
        files = [TokenFile(**_with_tuples(entry)) for entry in record["files"]]
        splits = [None if entry is None else _split_from(entry) for entry in record["splits"]]
        plan = RunPlan(files=files, splits=splits)
        return record["config"], plan, record["sets"]
    except arrays.NO_RECORD:
        return None  # no record of ours, or a damaged one: it is made again


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
