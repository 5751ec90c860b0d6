"""Lists what is in a cache folder, checks it, and removes what no run needs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from millrace.cache import arrays
from millrace.errors import CacheError, ConfigError
from millrace.files import file_lock, written_name
from millrace.order import RULES_VERSION
from millrace.run.manifest import MANIFEST, Manifest, manifests_lock
from millrace.store.publish import bin_path, idx_path
from millrace.store.token_file import TokenFileRecord

_DAY = 24 * 60 * 60.0
_FILE = re.compile(
    rf"((?:{MANIFEST})?[0-9a-f]{{32}})(?:{re.escape(arrays.JSON)}|-[^-]+_index\.npy)"
)


@dataclass(frozen=True, kw_only=True)
class CacheEntry:
    """A manifest, a set of arrays, or leftovers of an unfinished one.

    Attributes:
        name: Name that its files share.
        kind: "run" (a manifest), "set", or "leftover": files that belong to no whole set.
        paths: Paths of its files.
        num_bytes: Size of all its files.
        age: Seconds since its last file was written.
        prefixes: Token files that a manifest was made from, as absolute paths where it has them.
        sets: Names of the sets that a manifest needs.
        problems: Why it cannot be used any more, a line each.
        doubts: What cannot be checked from here, a line each: it may be of use elsewhere.
        reason: Why `prune_cache` removes it.
    """

    name: str
    kind: str
    paths: list[str]
    num_bytes: int
    age: float
    prefixes: list[str] = field(default_factory=list)
    sets: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    reason: str = ""


def list_cache(folder: str | os.PathLike[str], *, check_contents: bool = False) -> list[CacheEntry]:
    """What millrace keeps in a folder; other programs' files are left out.

    Args:
        folder: Cache folder of runs.
        check_contents: Whether to read every array and compare its checksum.

    Raises:
        ConfigError: A missing folder.
    """
    place = os.fspath(folder)
    if not os.path.isdir(place):
        raise ConfigError(f"{place} is not a folder; give the cache folder of a run")
    groups = _groups(place)
    return [_entry(place, name, groups[name, half], check_contents) for name, half in groups]


def prune_cache(
    folder: str | os.PathLike[str], *, older_than_days: float | None = None, dry_run: bool = False
) -> list[CacheEntry]:
    """Removes what no run can use any more: leftovers, damaged sets and manifests, manifests whose
    token files are gone or changed, and sets that no manifest needs.

    What another process is building stays. So does what cannot be checked from here: data on a
    disk that is not mounted, files without read permission, records of another version. On a file
    system without locks, sets and leftovers stay for their first day.

    Args:
        folder: Cache folder of runs.
        older_than_days: Age from which manifests, and entries that cannot be checked, are removed
            as well; None: no age.
        dry_run: Whether to remove nothing.

    Returns:
        The entries that were removed, or would be, each with its `reason`.

    Raises:
        ConfigError: A missing folder.
        CacheError: An entry could not be removed; the others are.
    """
    place = os.fspath(folder)
    useless = _useless(list_cache(place), older_than_days)
    if dry_run or not useless:
        return useless
    removed, errors = [], []
    # Held to the end, so that no build starts in between that counts on what is removed.
    with file_lock(manifests_lock(place)):
        for entry in _useless(list_cache(place), older_than_days):
            try:
                if _remove(place, entry):
                    removed.append(entry)
            except OSError as error:
                errors.append(f"{error.filename or entry.name}: {error.strerror or error}")
    if errors:
        raise CacheError(
            f"{len(removed)} entries are removed; {len(errors)} could not be: "
            f"{'; '.join(errors[:5])}"
        )
    return removed


def _useless(entries: list[CacheEntry], older_than_days: float | None) -> list[CacheEntry]:
    """What can be removed, each with its reason: runs first, then what only they needed."""

    def is_old(entry: CacheEntry) -> bool:
        return older_than_days is not None and entry.age > older_than_days * _DAY

    def reason_of(entry: CacheEntry) -> str:
        if entry.problems:
            return entry.problems[0]
        if entry.kind == "leftover":
            return "a leftover: no whole set or manifest"
        if is_old(entry) and (entry.kind == "run" or entry.doubts):
            return f"{entry.age / _DAY:.1f} days old"
        return ""

    judged = [dataclasses.replace(entry, reason=reason_of(entry)) for entry in entries]
    needed = {name for entry in judged if not entry.reason for name in entry.sets}
    for place, entry in enumerate(judged):
        is_needed = entry.name in needed or bool(entry.doubts)
        if entry.kind == "set" and not (entry.reason or is_needed):
            judged[place] = dataclasses.replace(entry, reason="no run needs it")
    useless = (entry for entry in judged if entry.reason)
    return sorted(useless, key=lambda entry: entry.kind != "run")


def _groups(folder: str) -> dict[tuple[str, bool], list[str]]:
    """The files of each entry, by its name and whether they are temporaries."""
    groups: dict[tuple[str, bool], list[str]] = {}
    for file in sorted(os.listdir(folder)):
        written = written_name(file)
        name = _name_of(file if written is None else written)
        if name is not None:
            groups.setdefault((name, written is not None), []).append(os.path.join(folder, file))
    return groups


def _name_of(file: str) -> str | None:
    """The name of the entry that a file belongs to; None for another program's file."""
    match = _FILE.fullmatch(file)
    return match and match[1]


def _entry(folder: str, name: str, paths: list[str], check_contents: bool) -> CacheEntry:
    stats = [os.stat(path) for path in paths if os.path.exists(path)]
    entry = CacheEntry(
        name=name,
        kind="run" if name.startswith(MANIFEST) else "set",
        paths=paths,
        num_bytes=sum(stat.st_size for stat in stats),
        age=time.time() - max((stat.st_mtime for stat in stats), default=0.0),
    )
    if paths and written_name(paths[0]) is not None:
        return dataclasses.replace(entry, kind="leftover")
    unreadable = list(_unreadable(paths))
    if unreadable:
        return dataclasses.replace(entry, doubts=unreadable)
    record_path = os.path.join(folder, name + arrays.JSON)
    record = arrays.read_record(record_path)
    if record is None:
        return dataclasses.replace(entry, kind="leftover")
    if record.get("logic") != RULES_VERSION:
        version = [f"another version of millrace wrote it (its rules are {record.get('logic')!r})"]
        return dataclasses.replace(entry, sets=_names(record.get("sets")), doubts=version)
    if entry.kind == "run":
        manifest = Manifest.read(record_path)
        if manifest is None:  # removed meanwhile, or with other entries than ours
            return dataclasses.replace(
                entry, sets=_names(record.get("sets")), doubts=["it cannot be understood"]
            )
        problems, doubts = _judge(manifest)
        return dataclasses.replace(
            entry,
            prefixes=[
                path or file.prefix
                for file, path in zip(manifest.files, manifest.paths, strict=True)
            ],
            sets=_names(manifest.sets),
            problems=problems,
            doubts=doubts
            + [
                f"{path} is missing: a process builds it, or died before it was built"
                for path in (
                    os.path.join(folder, needed + arrays.JSON) for needed in _names(manifest.sets)
                )
                if not os.path.exists(path)
            ],
        )
    array_set = arrays.load(folder, name)
    if array_set is None:
        return dataclasses.replace(entry, kind="leftover")
    return dataclasses.replace(entry, problems=array_set.damage(contents=check_contents))


def _names(sets: Any) -> list[str]:
    return [name for name in sets if isinstance(name, str)] if isinstance(sets, list) else []


def _unreadable(paths: list[str]) -> Iterator[str]:
    for path in paths:
        try:
            with open(path, "rb"):
                pass
        except FileNotFoundError:
            pass  # a temporary that was renamed meanwhile
        except OSError as error:
            yield f"{path} cannot be read: {error.strerror}"


def _judge(manifest: Manifest) -> tuple[list[str], list[str]]:
    """Problems and doubts about a manifest's token files (see `CacheEntry`)."""
    problems: list[str] = []
    doubts: list[str] = []
    for file, path in zip(manifest.files, manifest.paths, strict=True):
        if path is None:
            doubts.append(
                f"{file.prefix} is a relative path, and the folder that it starts from is not known"
            )
            continue
        try:
            problem = _change(dataclasses.replace(file, prefix=path))
        except OSError as error:
            doubts.append(f"{path} cannot be read: {error.strerror}")
            continue
        if problem and not _has_files(os.path.dirname(path)):
            doubts.append(
                f"{path} is missing, and so is all else in its folder: its disk is not mounted?"
            )
        elif problem:
            problems.append(problem)
    return problems, doubts


def _change(file: TokenFileRecord) -> str:
    """See `TokenFileRecord.change`. A file that may not be read is an OSError: it is not gone."""
    if not file.has_same_times():
        for path in (bin_path(file.prefix), idx_path(file.prefix)):
            with contextlib.suppress(FileNotFoundError), open(path, "rb"):
                pass
    return file.change()


def _has_files(folder: str) -> bool:
    try:
        with os.scandir(folder) as files:
            return any(True for _ in files)
    except OSError:
        return False


def _remove(folder: str, entry: CacheEntry) -> bool:
    """Removes an entry and returns True; False if a process works, or may work, on it."""
    try:
        with file_lock(os.path.join(folder, entry.name + arrays.LOCK), limit=0) as is_alone:
            if not is_alone and entry.kind != "run" and entry.age < _DAY:
                return False
            is_half = written_name(entry.paths[0]) is not None
            paths = _groups(folder).get((entry.name, is_half), [])
            now = _entry(folder, entry.name, paths, check_contents=False)
            if (now.kind, now.paths, now.problems) != (entry.kind, entry.paths, entry.problems):
                return False  # it was finished, or built anew, since it was listed
            # The record first: without it the rest is not used.
            for path in sorted(entry.paths, key=lambda path: not path.endswith(arrays.JSON)):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
    except BlockingIOError:
        return False
    return True
