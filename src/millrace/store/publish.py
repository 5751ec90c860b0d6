"""How a pair of files appears whole or not at all.

A builder locks the prefix, writes its files under temporary names, and publishes them in steps of
one rename or unlink for each file.

    1. .bin's temporary -> PREFIX.bin.new     (all files were flushed before), and the same for
                                              the sidecar PREFIX.info.json, if there is one
    2. .idx's temporary -> PREFIX.idx.new     from here on the new pair is the one that counts
    3. an old PREFIX.loss.json is removed (the new tokens may be the same, with another mask),
       then an old PREFIX.idx, then other old sidecars
    4. PREFIX.bin.new -> PREFIX.bin, then the sidecar
    5. PREFIX.idx.new -> PREFIX.idx

The folder is flushed after each step: a file system may bring renames to the disk in any order, and
after a power cut no later one may be there without the earlier ones.

Between 3 and 5 there is no PREFIX.idx, so that no reader, Megatron-LM included, pairs an old index
with new tokens. `open_pair` finds a whole pair after every step: the old one until 3, then the new
one. The next builder of a prefix finishes a dead one's publication if it reached step 2, and drops
it otherwise, or if another tool has since written its own pair there. Times tell: the index of a
new pair is never older than its tokens.
"""

import contextlib
import glob
import os
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from millrace.checks import check_local, shown
from millrace.errors import ConfigError, DataError, MillraceError
from millrace.files import fsync_folder, temporary_name, writers_lock
from millrace.names import BIN, IDX, INFO, LOSS, NEW, ORIGINS
from millrace.storage import LOCAL, Access, Storage, StoredFile, exists, storage_of

LOCK = ".tmp.lock"

_ATTEMPTS = 20  # to open a pair; one fails only during a publication
_PAUSE = 0.001  # seconds; a publication's renames take less


class Temporaries(NamedTuple):
    """The paths of a pair's files, temporary or final."""

    bin: str
    idx: str
    info: str
    origins: str


def _paths(prefix: str) -> Temporaries:
    return Temporaries(*(prefix + ending for ending in (BIN, IDX, INFO, ORIGINS)))


def files_of(prefix: str) -> tuple[str, ...]:
    """The paths of a pair and its sidecars, the index first: without it the others are ignored."""
    data, *others = _paths(prefix)
    return (*others, prefix + LOSS, data)


def open_pair(
    prefix: str, access: Access | None, *, index_access: Access = "file", storage: Storage
) -> tuple[StoredFile | None, StoredFile]:
    """Opens the `.bin` and the `.idx` of a whole pair, even while a builder replaces it.

    Without an access, the `.bin` stays closed (None). A missing file is a DataError.
    """
    for _ in range(_ATTEMPTS):
        paths = paths_to_read(prefix, storage)
        try:
            index = storage.open(paths.idx, index_access)
            data = None if access is None else storage.open(paths.bin, access)
            if not getattr(storage, "has_renames", True) or (
                paths[:2] == paths_to_read(prefix, storage)[:2]
                and storage.stat(paths.idx).version == index.identity.version
                and (data is None or storage.stat(paths.bin).version == data.identity.version)
            ):
                return data, index
        except FileNotFoundError:  # perhaps a publication has just renamed it
            time.sleep(_PAUSE)
    needed = _paths(prefix)[1 if access is None else 0 : 2]
    missing = [path for path in needed if not exists(storage, path)]
    if not missing:
        raise DataError(f"{prefix}.bin/.idx were replaced at every attempt to open them; try again")
    hint = "Write both again, or give another prefix; it is given without .bin or .idx"
    if prefix.replace(".", "", 1).isdigit():
        hint = "Is it a weight? A list of odd length has prefixes alone: one entry is missing"
    elif others := sorted(glob.glob(f"{glob.escape(prefix)}_*{IDX}")):
        hint = f"There is {others[0].removesuffix(IDX)}"
    raise DataError(f"{' and '.join(missing)} not found. {hint}")


def paths_to_read(prefix: str, storage: Storage | None = None) -> Temporaries:
    """The files of the pair that counts, perhaps without sidecars."""
    paths, storage = _paths(prefix), storage_of(prefix, storage)
    if not getattr(storage, "has_renames", True):  # no name is that of a new pair
        return paths
    if exists(storage, paths.idx) or not _is_half_published(prefix, storage):
        return paths
    # Between steps 3 and 5. While PREFIX.bin.new exists, sidecars without .new are the old pair's.
    new = Temporaries(*(path + NEW for path in paths))
    if exists(storage, new.bin):
        return new
    info = new.info if exists(storage, new.info) else paths.info
    return paths._replace(idx=new.idx, info=info)


def _is_half_published(prefix: str, storage: Storage = LOCAL) -> bool:
    """Whether a new pair counts before its files have their names."""

    def written_at(path: str) -> int:
        """The time of a file's last write; 0 without a file, or access to it."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            return storage.stat(path).time
        return 0

    data, index = prefix + BIN, prefix + IDX
    written = written_at(index + NEW)
    # A builder's index is its latest file: a later one is another tool's.
    others = [index] if exists(storage, data + NEW) else [index, data]
    return written > 0 and all(written_at(path) <= written for path in others)


def check_prefix(prefix: str) -> None:
    """Raises ConfigError, before any work, if a pair could not be published there."""
    folder = os.path.dirname(check_local(prefix)) or "."
    if not os.path.isdir(folder):
        raise ConfigError(f"{folder} is not a folder; create it, or give another prefix")
    if prefix.endswith((".bin", ".idx")):
        raise ConfigError(f"the prefix is {prefix}; give it without {prefix[-4:]}, which is added")
    name = os.path.basename(prefix)
    size = len(os.fsencode(name))
    most = os.pathconf(folder, "PC_NAME_MAX") - len(temporary_name(ORIGINS))
    if size > most:
        problem = f"has {size} bytes; in {folder}, {most} are possible: give a shorter prefix"
        raise ConfigError(f"the name {shown(name, 80)} of the prefix {problem}")
    for path in files_of(prefix):
        if os.path.isdir(path):
            raise ConfigError(f"{path} is a folder; remove it, or give another prefix")


@contextlib.contextmanager
def prefix_lock(prefix: str) -> Iterator[None]:
    """Holds the lock of a prefix, and removes a dead builder's temporaries.

    A MillraceError if another process is building a pair there.
    """
    lock = prefix + LOCK
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(writers_lock(lock, *_paths(prefix), limit=0))
        except BlockingIOError as error:
            problem = f"is being built by another process ({lock} is {error.strerror})"
            raise MillraceError(f"{prefix} {problem}. Wait, or give another prefix") from None
        yield


@contextlib.contextmanager
def building(prefix: str) -> Iterator[Temporaries]:
    """Holds the lock of a prefix, cleans up after a dead builder, and lends temporaries."""
    temporaries = Temporaries(*map(temporary_name, _paths(prefix)))
    with prefix_lock(prefix):
        if _is_half_published(prefix):
            _finish([prefix])
        _withdraw([prefix])
        builder = os.getpid()
        try:
            yield temporaries
        finally:
            if os.getpid() == builder:  # the files are not a forked child's
                remove(*temporaries)


def publish(pairs: Sequence[tuple[str, Temporaries]], *, durable: bool = True) -> None:
    """Publishes pairs: all, or (if it fails in the first two steps) none of them.

    The temporaries are whole and flushed; the folders are flushed only if the pairs are durable.
    The caller holds Ctrl-C back.
    """
    prefixes = [prefix for prefix, _ in pairs]
    try:
        for prefix, files in pairs:
            os.rename(files.bin, prefix + BIN + NEW)
            if os.path.exists(files.info):
                os.rename(files.info, prefix + INFO + NEW)
        _flush_folders(prefixes, durable)
        for prefix, files in pairs:
            os.rename(files.idx, prefix + IDX + NEW)
        _flush_folders(prefixes, durable)
    except BaseException:
        _withdraw(prefixes)
        raise
    try:
        _finish(prefixes, durable)
    except OSError:
        # An old file cannot be removed, perhaps another user's. If all old indices remain, the old
        # pairs count, and the new ones must not appear later.
        if all(os.path.exists(prefix + IDX) for prefix in prefixes):
            _withdraw(prefixes)
        raise


def _finish(prefixes: Sequence[str], durable: bool = True) -> None:
    """Steps 3 to 5, or the rest of them."""
    prefixes = [prefix for prefix in prefixes if os.path.exists(prefix + IDX + NEW)]
    # Once the tokens have their name, the old sidecars are gone, and new ones may be there.
    waiting = [prefix for prefix in prefixes if os.path.exists(prefix + BIN + NEW)]
    for prefix in waiting:
        remove(prefix + LOSS, prefix + IDX, prefix + INFO, prefix + ORIGINS)
    _flush_folders(waiting, durable)
    for prefix in waiting:
        os.rename(prefix + BIN + NEW, prefix + BIN)
    for prefix in prefixes:
        with contextlib.suppress(FileNotFoundError):
            os.rename(prefix + INFO + NEW, prefix + INFO)
    _flush_folders(prefixes, durable)
    for prefix in prefixes:
        os.rename(prefix + IDX + NEW, prefix + IDX)
    _flush_folders(prefixes, durable)


def _withdraw(prefixes: Sequence[str]) -> None:
    """Removes the new files of pairs, first the index, by which a pair counts."""
    for prefix in prefixes:
        remove(*(path + NEW for path in files_of(prefix)))


def remove(*paths: str) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _flush_folders(prefixes: Sequence[str], durable: bool) -> None:
    for prefix in {os.path.dirname(prefix): prefix for prefix in prefixes if durable}.values():
        fsync_folder(prefix)
