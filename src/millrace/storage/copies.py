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
from millrace.files import atomic_file, blake2b, writers_lock
from millrace.storage import Bytes, Identity, MappedFile, StoredFile

_PAUSE = 0.02  # seconds between two looks for a file that another process makes
_PIECE = 64 << 20  # bytes that are asked for at once, by requests side by side


class CopiedFile(MappedFile):
    """The bytes of an object, mapped from a copy or in memory."""

    def __init__(self, data: Bytes, identity: Identity) -> None:
        self.bytes, self.identity, self.size = data, identity, identity.size


def own_folder(folder: str | None) -> str:
    """A folder for copies, made with mode 0700; None: one of this user for temporary files.

    Raises:
        ConfigError: A folder in which other users could write.
    """
    place = folder or os.path.join(tempfile.gettempdir(), f"millrace-{os.getuid()}")
    os.makedirs(place, 0o700, exist_ok=True)
    status = os.stat(place, follow_symlinks=folder is not None)
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise ConfigError(
            f"others than you may write in {place}, where copies of objects would lie: give "
            "another folder, or change its owner and mode"
        )
    return place


def copied_file(folder: str, path: str, file: StoredFile) -> CopiedFile:
    """A whole object, in memory where the folder has no room for it."""
    name = blake2b(repr((path, file.identity)).encode()).hexdigest()
    copy = os.path.join(folder, name + os.path.splitext(path)[1])
    with contextlib.suppress(OSError):
        fetch(copy, file)
        return CopiedFile(MappedFile(copy).bytes, file.identity)
    return CopiedFile(file.read(0, file.size), file.identity)


def shared_value(folder: str, name: str, seconds: float, make: Callable[[], Any]) -> Any:
    """A plain value that processes of the node share, if one made it in the last seconds."""
    path = os.path.join(folder, name + ".json")

    def is_fresh() -> bool:
        with contextlib.suppress(FileNotFoundError):
            return abs(time.time() - os.stat(path).st_mtime) < seconds
        return False

    def write() -> None:
        with atomic_file(path, durable=False) as out:
            out.write(json.dumps(make()).encode())

    with contextlib.suppress(OSError, ValueError):
        make_once(path, is_fresh, write)
        with open(path, "rb") as file:
            return json.load(file)
    return make()


def make_once(path: str, is_there: Callable[[], bool], make: Callable[[], None]) -> None:
    """Makes a file, unless it is there or another process or thread makes it meanwhile.

    Those who wait look for the file: if each of them took the lock, the last one would wait long.
    """
    while not is_there():
        with contextlib.suppress(BlockingIOError), writers_lock(f"{path}.lock", path, limit=0):
            if not is_there():
                make()
            return
        for _ in range(10):
            time.sleep(_PAUSE)
            if is_there():
                return


def is_whole(copy: str, size: int) -> bool:
    """Whether a copy is there, and of the right size."""
    try:
        return os.path.getsize(copy) == size
    except FileNotFoundError:
        return False


def fetch(copy: str, file: StoredFile) -> None:
    """Copies an object to a path, unless it is there."""

    def write() -> None:
        with atomic_file(copy, durable=False) as out:
            for start in range(0, file.size, _PIECE):
                out.write(file.read(start, min(_PIECE, file.size - start)).data)

    make_once(copy, lambda: is_whole(copy, file.size), write)
