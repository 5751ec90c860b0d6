"""What is in a cache folder, whether it is whole, and what can go."""

from __future__ import annotations

import contextlib
import dataclasses
import os
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


@dataclass(frozen=True, kw_only=True)
class CacheEntry:
    """A manifest, a set of arrays, or what is left of one that was not written to its end.

    Attributes:
        name: that its files share.
        kind: "run" (a manifest), "set", or "leftover": files that belong to no whole set.
        paths: of its files.
        num_bytes: of all of them.
        age: seconds since its last file was written.
        prefixes: token files that a manifest was made from, as absolute paths where it has them.
        sets: that a manifest needs.
        problems: what is wrong with it, a line each: it is of no use any more.
        doubts: what cannot be judged from here, a line each: it may be of use elsewhere.
        reason: why `prune_cache` removes it.
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
    """What millrace keeps in a folder; files of others are left out.

    Args:
        check_contents: read every array and compare its checksum.

    Raises:
        ConfigError: no such folder.
    """
    place = os.fspath(folder)
    if not os.path.isdir(place):
        raise ConfigError(f"{place} is no folder; give the cache folder of a run")
    groups = _groups(place)
    return [_entry(place, name, groups[name, half], check_contents) for name, half in groups]


def prune_cache(
    folder: str | os.PathLike[str], *, older_than_days: float | None = None, dry_run: bool = False
) -> list[CacheEntry]:
    """Removes what no run can use any more, and says what that was and why.

    That is: leftovers, what is damaged, manifests whose token files are gone or changed, and sets
    that no manifest needs. What a process builds stays, and so does what cannot be judged from
    here: data on a disk that is not mounted, files that may not be read, records of another
    version. On a file system without locks, sets and leftovers stay for their first day.

    Args:
        older_than_days: remove manifests that were written longer ago, too, and what cannot be
            judged if it is that old.
        dry_run: remove nothing.

    Returns:
        what was removed, or would be, each with its `reason`.

    Raises:
        ConfigError: no such folder.
        CacheError: something could not be removed; the rest is.
    """
    place = os.fspath(folder)
    planned = _useless(list_cache(place), older_than_days)
    if dry_run or not planned:
        return planned
    gone, errors = [], []
    # Held to the end, so that no build begins in between that counts on what goes.
    with manifests_lock(place):
        for entry in _useless(list_cache(place), older_than_days):
            try:
                if _remove(place, entry):
                    gone.append(entry)
            except OSError as error:
                errors.append(f"{error.filename or entry.name}: {error.strerror or error}")
    if errors:
        raise CacheError(
            f"{len(gone)} entries are removed; {len(errors)} could not be: {'; '.join(errors[:5])}"
        )
    return gone


def _useless(entries: list[CacheEntry], older_than_days: float | None) -> list[CacheEntry]:
    """What can go, each with its reason: the runs first, then what they alone needed."""

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
    found = [entry for entry in judged if entry.reason]
    return sorted(found, key=lambda entry: entry.kind != "run")


def _groups(folder: str) -> dict[tuple[str, bool], list[str]]:
    """The files of each entry, by its name and whether they are temporaries."""
    groups: dict[tuple[str, bool], list[str]] = {}
    for file in sorted(os.listdir(folder)):
        written = written_name(file)
        name = _name_of(file if written is None else written)
        if name is not None:
            groups.setdefault((name, written is not None), []).append(os.path.join(folder, file))
    return groups


def _name_of(rest: str) -> str | None:
    """The name of the entry that a file belongs to; None for files that are not ours."""
    prefix = MANIFEST if rest.startswith(MANIFEST) else ""
    digits = rest[len(prefix) : len(prefix) + 32]
    tail = rest[len(prefix) + 32 :]
    is_name = len(digits) == 32 and set(digits) <= set("0123456789abcdef")
    is_array = tail.startswith("-") and tail.endswith("_index.npy") and tail.count("-") == 1
    return prefix + digits if is_name and (tail == arrays.JSON or is_array) else None


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
        version = [f"it is of another version of millrace (its logic is {record.get('logic')!r})"]
        return dataclasses.replace(entry, sets=_names(record.get("sets")), doubts=version)
    if entry.kind == "run":
        manifest = Manifest.read(record_path)
        if manifest is None:  # gone meanwhile, or with entries that are not ours
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
                f"{path} is not there: a process builds it, or did not build it to its end"
                for path in (
                    os.path.join(folder, needed + arrays.JSON) for needed in _names(manifest.sets)
                )
                if not os.path.exists(path)
            ],
        )
    stored = arrays.load(folder, name)
    if stored is None:
        return dataclasses.replace(entry, kind="leftover")
    return dataclasses.replace(entry, problems=stored.damage(contents=check_contents))


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
    """(What is wrong with its token files, what cannot be said of them), a line each."""
    problems: list[str] = []
    doubts: list[str] = []
    for file, path in zip(manifest.files, manifest.paths, strict=True):
        if path is None:
            doubts.append(f"{file.prefix} is a relative path, and nobody knows from which folder")
            continue
        try:
            problem = _change(dataclasses.replace(file, prefix=path))
        except OSError as error:
            doubts.append(f"{path} cannot be read: {error.strerror}")
            continue
        if problem and not _has_files(os.path.dirname(path)):
            doubts.append(f"{path} is not there, nor anything beside it: its disk is not mounted?")
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
    """Whether it was removed: not if a process is, or may be, at work on it."""
    try:
        with file_lock(os.path.join(folder, entry.name + arrays.LOCK), wait=False) as is_alone:
            if not is_alone and entry.kind != "run" and entry.age < _DAY:
                return False
            is_half = written_name(entry.paths[0]) is not None
            paths = _groups(folder).get((entry.name, is_half), [])
            now = _entry(folder, entry.name, paths, check_contents=False)
            if (now.kind, now.paths, now.problems) != (entry.kind, entry.paths, entry.problems):
                return False  # it was built to its end, or anew, since it was looked at
            # The record first: without it the rest does not count.
            for path in sorted(entry.paths, key=lambda path: not path.endswith(arrays.JSON)):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
    except BlockingIOError:
        return False
    return True
