"""Lists what is in a cache folder, checks it, and removes what no run needs."""

import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.cache import arrays
from millrace.checks import check_local, check_path
from millrace.errors import CacheError, ConfigError, StorageError
from millrace.files import file_lock, written_name
from millrace.option_class import Options, StrPath, option
from millrace.run.plan import MANIFEST, Manifest, manifests_lock

_DAY = 24 * 60 * 60.0
_FILE = re.compile(
    rf"((?:{MANIFEST})?[0-9a-f]{{32}})(?:{re.escape(arrays.JSON)}|-[^-]+_index\.npy)"
)


@dataclass(frozen=True, kw_only=True)
class CacheOptions(Options):
    """The option of every action on a cache folder."""

    folder: StrPath = option("cache folder", flags="folder", metavar="DIR")


@dataclass(frozen=True, kw_only=True)
class PruneOptions(CacheOptions):
    # fmt: off
    older_than_days: float | None = option(
        "also remove older runs, and older entries that cannot be judged", None,
        flags="--older-than", metavar="DAYS")
    dry_run: bool = option("remove nothing, only list", False)
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class CacheEntry:
    """A manifest, a set of arrays, or leftovers of an unfinished one.

    Attributes:
        name: Name that its files share.
        kind: "run" (a manifest); "set"; "leftover": files of no whole set or manifest; or
            "unknown": files that cannot be read, or another version's.
        paths: Paths of its files.
        num_bytes: Size of all its files.
        age: Seconds since its last file was written.
        prefixes: Absolute paths of a manifest's token files.
        sets: Names of the sets that a manifest needs.
        problems: Reasons why no run can use it, or it cannot be judged, a line each.
        reason: Reason why `prune_cache` removes it.
    """

    name: str
    kind: str
    paths: list[str]
    num_bytes: int
    age: float
    prefixes: list[str] = field(default_factory=list)
    sets: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    reason: str = ""


def list_cache(folder: StrPath, *, check_contents: bool = False) -> list[CacheEntry]:
    """What millrace keeps in a folder; other programs' files are left out.

    Args:
        folder: Cache folder of runs.
        check_contents: Whether to read every array and compare its checksum.

    Raises:
        ConfigError: A missing folder.
    """
    place = check_local(check_path("folder", folder))
    if not os.path.isdir(place):
        raise ConfigError(f"{place} is not a folder; give the cache folder of a run")
    groups: dict[tuple[str, bool], list[str]] = {}
    for file in sorted(os.listdir(place)):
        written = written_name(file)
        if match := _FILE.fullmatch(written or file):
            groups.setdefault((match[1], written is None), []).append(os.path.join(place, file))
    return [_entry(place, *key, paths, check_contents) for key, paths in groups.items()]


def prune_cache(folder: StrPath, **options: Any) -> list[CacheEntry]:
    """Removes what no run can use any more: leftovers, damaged sets, manifests whose token files
    have changed or are gone from their folder, and sets that no manifest needs.

    All else stays: manifests of data on a disk that is not mounted, files without read permission,
    records of another version. On a file system without locks, sets and leftovers stay for a day.

    Args:
        folder: Cache folder of runs.
        options: The other fields of `PruneOptions`: the age `older_than_days` from which manifests,
            and entries of kind "unknown", go as well, and whether a `dry_run` removes nothing.

    Returns:
        The entries that were removed, or would be, each with its `reason`.

    Raises:
        ConfigError: A missing folder.
        CacheError: Another process is building one of the entries, and nothing is removed; or some
            entries could not be removed, and the others are.
    """
    own = PruneOptions(folder=folder, **options)
    place = os.fspath(own.folder)
    useless = [*_useless(list_cache(place), own.older_than_days)]
    if own.dry_run or not useless:
        return useless
    removed, errors = [], []
    # Locks are held to the end: no build may begin to count on what is removed.
    with contextlib.ExitStack() as stack:
        has_locks = stack.enter_context(file_lock(manifests_lock(place)))
        names = {entry.name for entry in useless}
        for name in sorted(names):
            try:
                stack.enter_context(file_lock(os.path.join(place, name + arrays.LOCK), limit=0))
            except BlockingIOError:
                raise CacheError(
                    f"another process is building {name} in {place}: prune when it has ended"
                ) from None
        for entry in _useless(list_cache(place), own.older_than_days):
            may_be_built = not has_locks and entry.kind != "run" and entry.age < _DAY
            if entry.name not in names or may_be_built:
                continue
            try:
                # The record first: without it no run uses the rest.
                for path in sorted(entry.paths, key=lambda path: not path.endswith(arrays.JSON)):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path)
                removed.append(entry)
            except OSError as error:
                errors.append(str(error))
    if errors:
        raise CacheError(
            f"{len(removed)} entries are removed; {len(errors)} could not be: {errors[0]}"
        )
    return removed


def format_entries(entries: Sequence[CacheEntry], state: str) -> str:
    """Entries as text for people, with the reasons why they go or cannot be used."""
    lines = []
    for entry in entries:
        data = f", of {len(entry.prefixes)} token files" if entry.prefixes else ""
        sets = f", needs {', '.join(entry.sets)}" if entry.sets else ""
        size, days = f"{entry.num_bytes / 1e6:,.1f} MB", f"{entry.age / _DAY:.1f} days old"
        lines.append(f"{entry.kind:8} {entry.name}  {size}, {days}{data}{sets}")
        details = [entry.reason] if entry.reason else entry.problems
        lines += [f"  {line}" for line in details]
    total = sum(entry.num_bytes for entry in entries) / 1e6
    return "\n".join([*lines, f"{len(entries)} entries {state}, {total:,.1f} MB"])


def _useless(entries: list[CacheEntry], older_than_days: float | None) -> Iterator[CacheEntry]:
    """What can be removed, each with its reason; sets last, as the other entries need them."""
    needed: set[str] = set()
    for entry in sorted(entries, key=lambda entry: entry.kind == "set"):
        reason, days = "", entry.age / _DAY
        if entry.problems and entry.kind != "unknown":
            reason = entry.problems[0]
        elif entry.kind == "set":
            reason = "" if entry.name in needed else "no run needs it"
        elif older_than_days is not None and days > older_than_days:
            reason = f"{days:.1f} days old"
        if reason:
            yield dataclasses.replace(entry, reason=reason)
        else:
            needed.update(entry.sets)


def _entry(
    folder: str, name: str, is_whole: bool, paths: list[str], check_contents: bool
) -> CacheEntry:
    stats, is_readable, problem = [], True, "another version of millrace wrote it"
    for path in paths:
        try:
            stats.append(os.stat(path))
            open(path, "rb").close()
        except FileNotFoundError:  # a temporary may get its name at any moment
            pass
        except OSError as error:  # no permission, or a disk that fails
            is_readable, problem = False, f"{path} cannot be read: {error.strerror}"
    fields: dict[str, Any] = {"kind": "unknown", "problems": [problem]}
    path = os.path.join(folder, name + arrays.JSON)
    if is_readable:
        record = arrays.read_record(path) if is_whole else None
        if record is None:
            fields = {"kind": "leftover", "problems": ["a leftover: no whole set or manifest"]}
        elif not name.startswith(MANIFEST):
            if (array_set := arrays.load(folder, name)) is not None:
                fields = {"kind": "set", "problems": array_set.damage(contents=check_contents)}
        else:
            sets = record.get("sets")  # another version's may be anything
            if isinstance(sets, list):
                fields["sets"] = [one for one in sets if isinstance(one, str)]
            if (manifest := Manifest.read(path)) is not None:
                changes = _changes(manifest)
                fields |= {"kind": "run", "prefixes": manifest.paths, "problems": changes}
    age = time.time() - max((stat.st_mtime for stat in stats), default=0.0)
    num_bytes = sum(stat.st_size for stat in stats)
    return CacheEntry(name=name, paths=paths, num_bytes=num_bytes, age=age, **fields)


def _changes(manifest: Manifest) -> list[str]:
    """How the token files of a manifest have changed, as far as can be seen from here."""
    changes = []
    for file, path in zip(manifest.files, manifest.paths, strict=True):
        with contextlib.suppress(OSError, StorageError):  # its place may be missing, or not be read
            change = dataclasses.replace(file, prefix=path).change()
            if change and os.listdir(os.path.dirname(path)):  # an empty one is not mounted
                changes.append(change)
    return changes
