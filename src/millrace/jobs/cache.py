"""What is in a cache folder, whether it is whole, and what can go."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from millrace.errors import ConfigError
from millrace.feed.manifest import MANIFEST, is_unchanged, read_manifest
from millrace.feed.plan import RunPlan
from millrace.files import TMP, file_lock
from millrace.order import arrays

_DAY = 24 * 60 * 60.0


@dataclass(frozen=True, kw_only=True)
class CacheEntry:
    """A manifest, a set of arrays, or what is left of one.

    Attributes:
        name: that its files share.
        kind: "run" (a manifest), "set", or "leftover": files that belong to no whole set.
        paths: of its files.
        num_bytes: of all of them.
        age: seconds since its last file was written.
        prefixes: token files that a manifest was made from.
        sets: that a manifest needs.
        problems: what is wrong with it, a line each.
    """

    name: str
    kind: str
    paths: list[str]
    num_bytes: int
    age: float
    prefixes: list[str] = field(default_factory=list)
    sets: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def list_cache(folder: str | os.PathLike[str], *, check_contents: bool = False) -> list[CacheEntry]:
    """What millrace keeps in a folder; files of others are left out.

    Args:
        check_contents: read every array and compare its checksum.

    Raises:
        ConfigError: no such folder.
    """
    place = os.fspath(folder)
    if not os.path.isdir(place):
        raise ConfigError(f"{place} is no folder; give the cache folder of a run")
    groups: dict[str, list[str]] = {}
    for file in sorted(os.listdir(place)):
        name = _name_of(file)
        if name is not None:
            groups.setdefault(name, []).append(os.path.join(place, file))
    return [_entry(place, name, paths, check_contents) for name, paths in groups.items()]


def prune_cache(
    folder: str | os.PathLike[str], *, older_than_days: float | None = None, dry_run: bool = False
) -> list[CacheEntry]:
    """Removes what no run can use any more, and says what that was.

    That is: leftovers, what is damaged, manifests whose token files are gone or changed, and sets
    that no manifest needs. What a process is building is left alone.

    Args:
        older_than_days: remove manifests that were written longer ago, too.
        dry_run: remove nothing.
    """
    place = os.fspath(folder)
    entries = list_cache(place)
    kept = {
        name
        for entry in entries
        if entry.kind == "run" and not _is_useless(entry, older_than_days)
        for name in entry.sets
    }
    gone = []
    for entry in entries:
        is_useless = _is_useless(entry, older_than_days) or (
            entry.kind == "set" and entry.name not in kept
        )
        if is_useless and (dry_run or _remove(place, entry)):
            gone.append(entry)
    return gone


def _is_useless(entry: CacheEntry, older_than_days: float | None) -> bool:
    is_old = older_than_days is not None and entry.age > older_than_days * _DAY
    return entry.kind == "leftover" or bool(entry.problems) or (entry.kind == "run" and is_old)


def _name_of(file: str) -> str | None:
    """The name of the entry that a file belongs to; None for files that are not ours."""
    rest = file.removesuffix(TMP)
    prefix = MANIFEST if rest.startswith(MANIFEST) else ""
    digits = rest[len(prefix) : len(prefix) + 32]
    tail = rest[len(prefix) + 32 :]
    is_name = len(digits) == 32 and set(digits) <= set("0123456789abcdef")
    is_array = tail.startswith("-") and tail.endswith("_index.npy") and tail.count("-") == 1
    return prefix + digits if is_name and (tail == arrays.JSON or is_array) else None


def _entry(folder: str, name: str, paths: list[str], check_contents: bool) -> CacheEntry:
    stats = [os.stat(path) for path in paths if os.path.exists(path)]
    common: dict[str, Any] = {
        "name": name,
        "paths": paths,
        "num_bytes": sum(stat.st_size for stat in stats),
        "age": time.time() - max((stat.st_mtime for stat in stats), default=0.0),
    }
    if name.startswith(MANIFEST):
        record = read_manifest(os.path.join(folder, name + arrays.JSON))
        if record is None:
            return CacheEntry(kind="leftover", **common)
        _, plan, sets = record
        return CacheEntry(
            kind="run",
            prefixes=[file.prefix for file in plan.files],
            sets=[name for name in sets if name is not None],
            problems=list(_changed(plan)),
            **common,
        )
    stored = arrays.load(folder, name)
    if stored is None:
        return CacheEntry(kind="leftover", **common)
    return CacheEntry(kind="set", problems=stored.damage(contents=check_contents), **common)


def _changed(plan: RunPlan) -> Iterator[str]:
    for file in plan.files:
        if not is_unchanged(file):
            yield f"{file.prefix} is gone, or is not what it was"


def _remove(folder: str, entry: CacheEntry) -> bool:
    """Whether it was removed: not if a process is at work on it."""
    try:
        with file_lock(os.path.join(folder, entry.name + arrays.LOCK), wait=False):
            # The record first: without it the rest does not count.
            for path in sorted(entry.paths, key=lambda path: not path.endswith(arrays.JSON)):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
    except BlockingIOError:
        return False
    return True
