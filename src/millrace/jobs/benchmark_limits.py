"""What `bench` needs of the machine: an empty page cache, and the rate of copying memory."""

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

_COPY_SIZE = 128 << 20  # bytes that all threads copy together: more than caches hold
_NUM_COPIES = 4


def drop_from_page_cache(paths: Sequence[str]) -> str:
    """Drops files from the page cache, so that the next reads go to the disk.

    Pages that a process has mapped and touched stay, and so do files of memory file systems.
    Returns a text for people: "dropped (12.3 MB in 4 files)", or why not.
    """
    num_bytes = num_resident = 0
    for path in paths:
        # Opening the run says what is wrong with a file.
        with contextlib.suppress(OSError), open(path, "rb") as file:
            descriptor, size = file.fileno(), os.path.getsize(path)
            os.fdatasync(descriptor)  # pages that are not on the disk cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            num_bytes += size
            num_resident += int(resident_pages(descriptor, 0, size).sum()) * mmap.PAGESIZE
    amount = f"{num_bytes / 1e6:,.1f} MB in {len(paths)} files"
    if num_resident > 0.01 * num_bytes:
        return (
            f"partly dropped: {num_resident / 1e6:,.1f} of {amount} stay in memory. Another "
            "process has mapped them, or the file system is in memory. They are warm"
        )
    return f"dropped ({amount})"


def resident_pages(descriptor: int, start: int, size: int) -> NDArray[np.bool_]:
    """Which pages of an open file's bytes are in the page cache; asking starts no read.

    `start` is the first byte of a page.
    """
    states = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    if size:
        # A writable private map, as ctypes takes no address of a read-only one.
        with mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY, offset=start) as pages:
            holder = ctypes.c_char.from_buffer(pages)
            address = ctypes.addressof(holder)
            del holder  # the map cannot be closed while it is there
            ctypes.CDLL(None).mincore(*map(ctypes.c_void_p, (address, size, states.ctypes.data)))
    return (states & 1).astype(bool)


def copy_bytes_per_second(num_threads: int) -> float:
    """Bytes that threads read and write per second in copying memory: the best of some copies."""
    size = _COPY_SIZE // num_threads
    buffers = np.ones((2, num_threads, size), np.uint8)
    times = []
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(_NUM_COPIES):
            start = time.perf_counter()
            list(pool.map(np.copyto, *buffers))
            times.append(time.perf_counter() - start)
    return 2 * size * num_threads / min(times)
