"""Copies of indices on the node: one of its processes fetches an object, all of them map it."""

import contextlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Callable
from typing import Any

from millrace.errors import ConfigError
from millrace.files import atomic_file, blake2b, checksum, write_file, writers_lock, xxh3
from millrace.storage import MappedFile, StoredFile, map_file

_PAUSE = 0.02  # seconds between two looks for a file that another process makes
_PIECE = 64 << 20  # bytes that are asked for at once, by requests side by side


def own_folder(folder: str | None) -> str:
    """A folder for copies, made with mode 0700; None: one of this user for temporary files.

    Raises:
        ConfigError: A folder in which other users could write.
    """
    place = folder or os.path.join(tempfile.gettempdir(), f"millrace-{os.getuid()}")
    os.makedirs(place, 0o700, exist_ok=True)
    status = os.stat(place, follow_symlinks=folder is not None)
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.getuid() or mode & 0o022:
        raise ConfigError(
            f"{place}, where copies of objects would lie, is not yours alone: its owner is user "
            f"{status.st_uid}, its mode {mode:04o}. Give another folder, or change them"
        )
    return place


def fetch_index(folder: str | None, path: str, file: StoredFile, *, waits: bool = True) -> str:
    """The path of an index and its checksum on the node, to which it is brought."""
    name = blake2b(repr((path, file.identity)).encode()).hexdigest()
    copy = os.path.join(own_folder(folder), name + os.path.splitext(path)[1])
    fetch(copy, file, with_sum=True, waits=waits)
    return copy


def copied_file(folder: str | None, path: str, file: StoredFile) -> MappedFile:
    """A whole object, in memory where the folder cannot be written or has no room for it."""
    with contextlib.suppress(OSError):
        for _ in range(2):
            copy = fetch_index(folder, path, file)
            content = map_file(copy).bytes
            data, expected = content[: file.size], content[file.size :]
            if checksum([data]) == expected.tobytes().hex():
                return MappedFile(data, file.identity)
            os.unlink(copy)  # the disk has damaged it
    # A copy: the bytes of a reply begin anywhere, and those of a file at a multiple of 8.
    return MappedFile(file.read(0, file.size).copy(), file.identity)


def shared_value(folder: str | None, name: str, seconds: float, make: Callable[[], Any]) -> Any:
    """A plain value that processes of the node share, if one made it in the last seconds."""

    def write() -> None:
        write_file(path, json.dumps(make()).encode(), durable=False)

    with contextlib.suppress(OSError, json.JSONDecodeError):
        path = os.path.join(own_folder(folder), name + ".json")
        is_fresh = lambda status: abs(time.time() - status.st_mtime) < seconds  # noqa: E731
        _make_once(path, is_fresh, write)
        with open(path, "rb") as file:
            return json.load(file)
    return make()


def fetch(copy: str, file: StoredFile, *, with_sum: bool = False, waits: bool = True) -> None:
    """Copies an object to a path, perhaps with its XXH3-64 behind it, unless it is there."""

    def write() -> None:
        digest = xxh3()
        with atomic_file(copy, durable=not with_sum) as out:  # after a power cut, the sum tells
            for start in range(0, file.size, _PIECE):
                piece = file.read(start, min(_PIECE, file.size - start)).data
                digest.update(piece)
                out.write(piece)
            out.write(digest.digest() * with_sum)

    size = file.size + 8 * with_sum
    _make_once(copy, lambda status: status.st_size == size, write, waits)


def _make_once(
    path: str,
    is_right: Callable[[os.stat_result], bool],
    make: Callable[[], None],
    waits: bool = True,
) -> None:
    """Makes a file, unless it is there or another process or thread makes it, and perhaps waits.

    Those who wait look for the file: if each of them took the lock, the last one would wait long.
    """

    def is_there() -> bool:
        with contextlib.suppress(FileNotFoundError):
            return is_right(os.stat(path))
        return False

    while not is_there():
        with contextlib.suppress(BlockingIOError), writers_lock(f"{path}.lock", path, limit=0):
            if not is_there():
                make()
            return
        if not waits:
            return
        for _ in range(10):
            time.sleep(_PAUSE)
            if is_there():
                return
