"""How a pair of files appears whole or not at all.

A builder writes its files under temporary names of its own, holds a lock on the prefix meanwhile,
and publishes them in steps of which each is one rename or unlink for each file (where nothing is
replaced, two do: the .bin and the sidecar get their names, then the .idx):

    1. .bin's temporary -> PREFIX.bin.new     (all were flushed to disk before; so does the
                                              sidecar, PREFIX.info.json, if there is one)
    2. .idx's temporary -> PREFIX.idx.new     from here on the new pair is the one that counts
    3. an old PREFIX.idx goes, then an old sidecar
    4. PREFIX.bin.new -> PREFIX.bin, then the sidecar
    5. PREFIX.idx.new -> PREFIX.idx

The folder is flushed after each step: a file system may bring renames to the disk in any order, and
after a power cut a later one must not be there without the earlier ones.

Between 3 and 5 there is no PREFIX.idx, so that no reader, Megatron-LM included, pairs an old index
with new tokens. `open_pair` finds a whole pair after every step: the old one until 3, then the new
one. A builder that dies leaves names that the next builder of the same prefix cleans up: it
finishes a publication that reached step 2 and drops everything that did not. A publication that was
cut off is dropped, too, where another tool has written its own pair to the prefix since.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from millrace.errors import DataError, MillraceError
from millrace.files import file_lock, fsync_folder, is_at, temporaries_of, temporary_name

NEW = ".new"
LOCK = ".tmp.lock"

_ATTEMPTS = 20  # to open a pair; an attempt fails only where it meets a publication
_PAUSE = 0.001  # seconds; a publication's renames take less


def bin_path(prefix: str) -> str:
    return prefix + ".bin"


def idx_path(prefix: str) -> str:
    return prefix + ".idx"


def info_path(prefix: str) -> str:
    """The sidecar, which a pair may have (see `info`)."""
    return prefix + ".info.json"


def open_pair(prefix: str, *, has_bin: bool = True) -> tuple[BinaryIO | None, BinaryIO]:
    """Opens a whole pair for reading: (`.bin`, `.idx`), also while a builder replaces it.

    Args:
        prefix: the path of the pair.
        has_bin: whether the `.bin` is a file beside the index; if not, it is None.

    Raises:
        DataError: one or both files are missing.
    """
    for _ in range(_ATTEMPTS):
        names = _pair_to_read(prefix)
        with contextlib.ExitStack() as opened:
            try:
                index = opened.enter_context(open(names[1], "rb"))
                data = opened.enter_context(open(names[0], "rb")) if has_bin else None
            except FileNotFoundError:
                # A publication may just have renamed it; if not, the next attempts show that too.
                time.sleep(_PAUSE)
                continue
            if (
                names == _pair_to_read(prefix)
                and is_at(index, names[1])
                and (data is None or is_at(data, names[0]))
            ):
                opened.pop_all()
                return data, index
    wanted = [bin_path(prefix), idx_path(prefix)] if has_bin else [idx_path(prefix)]
    missing = [path for path in wanted if not os.path.exists(path)]
    if not missing:
        raise DataError(f"{prefix}.bin/.idx were replaced at every attempt to open them; try again")
    hint = (
        "A prefix is given without .bin or .idx"
        if prefix.endswith((".bin", ".idx"))
        else "Both files of a pair are needed: write them again, or give another prefix"
    )
    raise DataError(f"{' and '.join(missing)} not found. {hint}")


def _pair_to_read(prefix: str) -> tuple[str, str]:
    data, index = bin_path(prefix), idx_path(prefix)
    if not os.path.exists(index) and _is_half_published(prefix):
        return (data + NEW if os.path.exists(data + NEW) else data), index + NEW
    return data, index


def _is_half_published(prefix: str) -> bool:
    """Whether a new pair counts whose files do not have their names yet."""
    data, index = bin_path(prefix), idx_path(prefix)
    written = _written_at(index + NEW)
    if written is None:
        return False
    # A builder writes its tokens before its index. What is later than both is of another tool.
    others = [index] if os.path.exists(data + NEW) else [index, data]
    return all((_written_at(path) or 0) <= written for path in others)


def _written_at(path: str) -> int | None:
    """When a file was last written, in nanoseconds; None where there is none, or none to see."""
    try:
        return os.stat(path).st_mtime_ns
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None


def info_to_read(prefix: str) -> str:
    """The path of the sidecar of the pair that counts; there may be no such file."""
    data, info, index = bin_path(prefix), info_path(prefix), idx_path(prefix)
    if os.path.exists(index) or not _is_half_published(prefix):
        return info
    # Between steps 3 and 5. While PREFIX.bin.new is there, PREFIX.info.json is the old pair's.
    if os.path.exists(info + NEW) or os.path.exists(data + NEW):
        return info + NEW
    return info


@dataclass(frozen=True)
class Temporaries:
    """The names of a pair's files while they are written."""

    bin: str
    idx: str
    info: str


@contextlib.contextmanager
def building(prefix: str) -> Iterator[Temporaries]:
    """Holds the lock of a prefix, cleans up after a builder that died, and names the temporaries.

    Those that are left are removed at the end.

    Raises:
        MillraceError: another process is building this prefix.
    """
    lock = prefix + LOCK
    temporaries = Temporaries(*map(temporary_name, _paths(prefix)))
    with contextlib.ExitStack() as held:
        try:
            is_locked = held.enter_context(file_lock(lock, wait=False))
        except BlockingIOError as error:
            raise MillraceError(
                f"{prefix} is being built by another process ({lock} is {error.strerror}). "
                "Wait for it, or give another prefix"
            ) from None
        _clean_up(prefix)
        if is_locked:  # else temporaries may be those of a builder that is at work
            for path in _paths(prefix):
                for leftover in temporaries_of(path):
                    with contextlib.suppress(OSError):  # another user's: it is in nobody's way
                        _remove(leftover)
        builder = os.getpid()
        try:
            yield temporaries
        finally:
            if os.getpid() == builder:  # not a forked child, which drops what it has inherited
                for path in (temporaries.bin, temporaries.idx, temporaries.info):
                    _remove(path)


def _paths(prefix: str) -> tuple[str, str, str]:
    return bin_path(prefix), idx_path(prefix), info_path(prefix)


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _clean_up(prefix: str) -> None:
    """Finishes a publication that was cut off, or drops what it left."""
    if _is_half_published(prefix):
        _finish([prefix])
    for path in _paths(prefix):
        _remove(path + NEW)


def publish(pairs: Sequence[tuple[str, Temporaries]]) -> None:
    """Publishes pairs, all or (if it fails in the first two steps) none of them.

    Args:
        pairs: (prefix, temporaries) of each; the files are whole and flushed. A sidecar is
            published where there is its temporary.
    """
    prefixes = [prefix for prefix, _ in pairs]
    # Where nothing is replaced, the files get their names at once: they count with the index.
    is_replacing = any(os.path.exists(path) for prefix in prefixes for path in _paths(prefix))
    suffix = NEW if is_replacing else ""
    try:
        for prefix, files in pairs:
            os.rename(files.bin, bin_path(prefix) + suffix)
            if os.path.exists(files.info):
                os.rename(files.info, info_path(prefix) + suffix)
        _flush_folders(prefixes)
        for prefix, files in pairs:
            os.rename(files.idx, idx_path(prefix) + suffix)
        _flush_folders(prefixes)
    except BaseException:
        for prefix in prefixes:
            for path in (idx_path(prefix), info_path(prefix), bin_path(prefix)):
                _remove(path + suffix)
        raise
    try:
        _finish(prefixes)
    except KeyboardInterrupt:  # the pairs count already: they must not wait for a next builder
        _finish(prefixes)
        raise
    except OSError:
        # Old files that we may not remove, another user's perhaps: as long as all old indices are
        # there, the old pairs count, and the new ones must not appear later.
        if is_replacing and all(os.path.exists(idx_path(prefix)) for prefix in prefixes):
            for prefix in prefixes:
                for path in (idx_path(prefix), info_path(prefix), bin_path(prefix)):
                    _remove(path + NEW)
        raise


def _finish(prefixes: Sequence[str]) -> None:
    """Steps 3 to 5, also of a publication that was cut off among them."""
    prefixes = [prefix for prefix in prefixes if os.path.exists(idx_path(prefix) + NEW)]
    # Where the tokens have their name, the old sidecar went before, and the new one may be there.
    waiting = [prefix for prefix in prefixes if os.path.exists(bin_path(prefix) + NEW)]
    for prefix in waiting:
        _remove(idx_path(prefix))
        _remove(info_path(prefix))
    _flush_folders(waiting)
    for prefix in waiting:
        os.rename(bin_path(prefix) + NEW, bin_path(prefix))
    for prefix in prefixes:
        with contextlib.suppress(FileNotFoundError):
            os.rename(info_path(prefix) + NEW, info_path(prefix))
    _flush_folders(prefixes)
    for prefix in prefixes:
        os.rename(idx_path(prefix) + NEW, idx_path(prefix))
    _flush_folders(prefixes)


def _flush_folders(prefixes: Sequence[str]) -> None:
    """Brings the renames to the disk."""
    for folder in {os.path.dirname(prefix): prefix for prefix in prefixes}.values():
        fsync_folder(folder)
