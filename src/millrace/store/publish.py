"""How a pair of files appears whole or not at all.

A builder writes `PREFIX.bin.tmp` and `PREFIX.idx.tmp` under a lock, and publishes them in steps of
which each is one rename or unlink:

    1. PREFIX.bin.tmp -> PREFIX.bin.new      (all were flushed to disk before; so does the
                                             sidecar, PREFIX.info.json, if there is one)
    2. PREFIX.idx.tmp -> PREFIX.idx.new      from here on the new pair is the one that counts
    3. an old PREFIX.idx goes, then an old sidecar
    4. PREFIX.bin.new -> PREFIX.bin, then the sidecar
    5. PREFIX.idx.new -> PREFIX.idx

Between 3 and 5 there is no PREFIX.idx, so that no reader, Megatron-LM included, pairs an old index
with new tokens. `open_pair` finds a whole pair after every step: the old one until 3, then the new
one. A builder that dies leaves names that the next builder of the same prefix cleans up: it
finishes a publication that reached step 2 and drops everything that did not.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import BinaryIO

from millrace.errors import DataError, MillraceError
from millrace.files import TMP, file_lock, fsync_folder, is_at

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
    if not os.path.exists(index) and os.path.exists(index + NEW):
        return (data + NEW if os.path.exists(data + NEW) else data), index + NEW
    return data, index


def info_to_read(prefix: str) -> str:
    """The path of the sidecar of the pair that counts; there may be no such file."""
    data, info, index = bin_path(prefix), info_path(prefix), idx_path(prefix)
    if os.path.exists(index) or not os.path.exists(index + NEW):
        return info
    # Between steps 3 and 5. While PREFIX.bin.new is there, PREFIX.info.json is the old pair's.
    if os.path.exists(info + NEW) or os.path.exists(data + NEW):
        return info + NEW
    return info


@contextlib.contextmanager
def building(prefix: str) -> Iterator[None]:
    """Holds the lock of a prefix, and cleans up after a builder that died.

    Raises:
        MillraceError: another process is building this prefix.
    """
    lock = prefix + LOCK
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(file_lock(lock, wait=False))
        except BlockingIOError:
            raise MillraceError(
                f"{prefix} is being built by another process (it holds {lock}). "
                "Wait for it, or give another prefix"
            ) from None
        _clean_up(prefix)
        yield


def _clean_up(prefix: str) -> None:
    if os.path.exists(idx_path(prefix) + NEW):
        _finish(prefix)
    for path in (bin_path(prefix), info_path(prefix), idx_path(prefix)):
        for leftover in (path + TMP, path + NEW):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(leftover)


def publish_pair(prefix: str) -> None:
    """Publishes PREFIX.bin.tmp, PREFIX.idx.tmp and, if there is one, the sidecar's temporary.

    All are whole and flushed (see the top).
    """
    for path in (bin_path(prefix), info_path(prefix), idx_path(prefix)):
        if path != info_path(prefix) or os.path.exists(path + TMP):
            os.rename(path + TMP, path + NEW)
    fsync_folder(prefix)
    _finish(prefix)


def _finish(prefix: str) -> None:
    """Steps 3 to 5, also of a publication that was cut off among them."""
    data, info, index = bin_path(prefix), info_path(prefix), idx_path(prefix)
    if os.path.exists(data + NEW):  # else the old sidecar went before, and the new one may be here
        for old in (index, info):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(old)
        fsync_folder(prefix)
        os.rename(data + NEW, data)
    with contextlib.suppress(FileNotFoundError):
        os.rename(info + NEW, info)
    os.rename(index + NEW, index)
    fsync_folder(prefix)
