"""Lists what is in a cache folder, checks it, and removes what no run needs."""

import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.cache import arrays
from millrace.errors import CacheError, ConfigError
from millrace.files import file_lock, written_name
from millrace.option_class import StrPath, check_options, option
from millrace.order import RULES_VERSION
from millrace.run.plan import MANIFEST, Manifest, manifests_lock

_DAY = 24 * 60 * 60.0
_FILE = re.compile(
    rf"((?:{MANIFEST})?[0-9a-f]{{32}})(?:{re.escape(arrays.JSON)}|-[^-]+_index\.npy)"
)


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """The option of every action on a cache folder."""

    folder: StrPath = option("cache folder", flags="folder", metavar="DIR")

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class PruneOptions(CacheOptions):
    """The options of `prune_cache`."""

    older_than_days: float | None = option(
        "also remove older runs, and older entries that cannot be judged",
        None,
        flags="--older-than",
        metavar="DAYS",
    )
    dry_run: bool = option("remove nothing, only list", False)


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
    groups = _groups(place).items()
    return [_entry(place, name, paths, check_contents) for (name, _), paths in groups]


def prune_cache(
    folder: str | os.PathLike[str], *, older_than_days: float | None = None, dry_run: bool = False
) -> list[CacheEntry]:
    """Removes what no run can use any more: leftovers, damaged sets and manifests, manifests whose
    token files are gone or changed, and sets that no manifest needs.

    What cannot be checked from here stays: data on a disk that is not mounted, files without read
    permission, records of another version. On a file system without locks, sets and leftovers stay
    for their first day.

    Args:
        folder: Cache folder of runs.
        older_than_days: Age from which manifests, and entries that cannot be checked, are removed
            as well; None: no age.
        dry_run: Whether to remove nothing.

    Returns:
        The entries that were removed, or would be, each with its `reason`.

    Raises:
        ConfigError: A missing folder.
        CacheError: Another process is building one of the entries, and nothing is removed; or an
            entry could not be removed, and the others are.
    """
    options = PruneOptions(folder=folder, older_than_days=older_than_days, dry_run=dry_run)
    place = os.fspath(options.folder)
    useless = _useless(list_cache(place), options.older_than_days)
    if options.dry_run or not useless:
        return useless
    removed, errors = [], []
    # Held to the end, so that no build starts in between that counts on what is removed.
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
        for entry in _useless(list_cache(place), options.older_than_days):
            may_be_built = not has_locks and entry.kind != "run" and entry.age < _DAY
            if entry.name not in names or may_be_built:
                continue
            try:
                _remove(entry)
                removed.append(entry)
            except OSError as error:
                errors.append(f"{error.filename or entry.name}: {error.strerror or error}")
    if errors:
        raise CacheError(
            f"{len(removed)} entries are removed; {len(errors)} could not be: "
            f"{'; '.join(errors[:5])}"
        )
    return removed


def format_entries(entries: Sequence[CacheEntry], state: str) -> str:
    """Entries as text for people: what each is, and why it goes or cannot be used."""
    lines = []
    for entry in entries:
        data = f", of {len(entry.prefixes)} token files" if entry.prefixes else ""
        sets = f", needs {', '.join(entry.sets)}" if entry.sets else ""
        size, days = f"{entry.num_bytes / 1e6:,.1f} MB", f"{entry.age / _DAY:.1f} days old"
        lines.append(f"{entry.kind:8} {entry.name}  {size}, {days}{data}{sets}")
        details = [entry.reason] if entry.reason else [*entry.problems, *entry.doubts]
        lines += [f"  {line}" for line in details]
    total = sum(entry.num_bytes for entry in entries) / 1e6
    return "\n".join([*lines, f"{len(entries)} entries {state}, {total:,.1f} MB"])


def _useless(entries: list[CacheEntry], older_than_days: float | None) -> list[CacheEntry]:
    """What can be removed, each with its reason: runs first, then what only they needed."""
    useless = []
    needed: set[str] = set()
    for entry in sorted(entries, key=lambda entry: entry.kind != "run"):
        is_old = older_than_days is not None and entry.age > older_than_days * _DAY
        if entry.problems:
            reason = entry.problems[0]
        elif entry.kind == "leftover":
            reason = "a leftover: no whole set or manifest"
        elif is_old and (entry.kind == "run" or entry.doubts):
            reason = f"{entry.age / _DAY:.1f} days old"
        elif entry.kind == "set" and entry.name not in needed and not entry.doubts:
            reason = "no run needs it"
        else:
            needed.update(entry.sets)
            continue
        useless.append(dataclasses.replace(entry, reason=reason))
    return useless


def _groups(folder: str) -> dict[tuple[str, bool], list[str]]:
    """The files of each entry, by its name and whether they are temporaries."""
    groups: dict[tuple[str, bool], list[str]] = {}
    for file in sorted(os.listdir(folder)):
        written = written_name(file)
        match = _FILE.fullmatch(file if written is None else written)
        if match is not None:  # else it is another program's file
            paths = groups.setdefault((match[1], written is not None), [])
            paths.append(os.path.join(folder, file))
    return groups


def _entry(folder: str, name: str, paths: list[str], check_contents: bool) -> CacheEntry:
    stats = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # a temporary may get its name at any moment
            stats.append(os.stat(path))
    kind = "run" if name.startswith(MANIFEST) else "set"
    return CacheEntry(
        name=name,
        paths=paths,
        num_bytes=sum(stat.st_size for stat in stats),
        age=time.time() - max((stat.st_mtime for stat in stats), default=0.0),
        **{"kind": kind, **_findings(folder, name, paths, check_contents)},
    )


def _findings(folder: str, name: str, paths: list[str], check_contents: bool) -> dict[str, Any]:
    """The fields of an entry that its content decides."""
    path = os.path.join(folder, name + arrays.JSON)
    unreadable = [*filter(None, map(_unreadable, paths))]
    record = {} if unreadable else arrays.read_record(path)
    if written_name(paths[0]) is not None or record is None:
        return {"kind": "leftover"}
    if unreadable:
        return {"doubts": unreadable}
    sets = record.get("sets")
    sets = [one for one in sets if isinstance(one, str)] if isinstance(sets, list) else []
    if record.get("logic") != RULES_VERSION:
        doubt = f"another version of millrace wrote it (its rules are {record.get('logic')!r})"
        return {"sets": sets, "doubts": [doubt]}
    if name.startswith(MANIFEST):
        manifest = Manifest.read(path)
        if manifest is None:  # removed meanwhile, or with other entries than ours
            return {"sets": sets, "doubts": ["it cannot be understood"]}
        return {"sets": sets, **_judge(manifest)}
    array_set = arrays.load(folder, name)
    if array_set is None:
        return {"kind": "leftover"}
    return {"problems": array_set.damage(contents=check_contents)}


def _unreadable(path: str) -> str:
    try:
        with contextlib.suppress(FileNotFoundError):  # gone, or a temporary that was renamed
            open(path, "rb").close()
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return ""


def _judge(manifest: Manifest) -> dict[str, Any]:
    """What a manifest's token files say about it."""
    prefixes, problems, doubts = [], [], []
    for file, path in zip(manifest.files, manifest.paths, strict=True):
        prefixes.append(path or file.prefix)
        if path is None:
            doubts.append(f"{file.prefix} is a relative path, and its folder is not known")
            continue
        folder = os.path.dirname(path)
        try:
            problem = dataclasses.replace(file, prefix=path).change()
            if problem and not (os.path.isdir(folder) and os.listdir(folder)):
                doubts.append(f"{path} and all else in its folder is missing: not mounted?")
            elif problem:
                problems.append(problem)
        except OSError as error:
            doubts.append(f"{path} cannot be read: {error.strerror}")
    return {"prefixes": prefixes, "problems": problems, "doubts": doubts}


def _remove(entry: CacheEntry) -> None:
    # The record first: without it the rest is not used.
    for path in sorted(entry.paths, key=lambda path: not path.endswith(arrays.JSON)):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
