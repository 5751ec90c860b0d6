"""The work of `bench_store.py` other than reading: writing, finalising, plain copies and reads.

    python store_work.py '{"side": "ours", "count": 10000000, "prefix": "/tmp/x"}'

finalises `count` sequences in a fresh process and prints a JSON object: the seconds of `finalize`,
the seconds of these spent in `os.fsync`, the growth of the process's peak memory during adding and
finalising, and a digest of the index, which shows that both sides wrote the same.
"""

import contextlib
import ctypes
import hashlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import memory_kib, quiet_megatron

import millrace

VOCAB_SIZE = 50304
MAX_LENGTH = 1200  # lengths are uniform in [1, 1200): 600 on average
CHUNK = 10_000  # documents in one call of `add_documents`

Documents = Sequence[tuple[Any, list[int]]]
"""Tokens and sequence lengths of each document, as arguments of `add_document`."""

_MEMCPY = """
#include <stdint.h>
#include <string.h>
void copy(const char *from, const int64_t *offsets, const int64_t *counts, int64_t n, char *to) {
  for (int64_t i = 0; i < n; ++i) {
    memcpy(to, from + offsets[i], (size_t)counts[i]);
    to += counts[i];
  }
}
"""


# ---- writing ----


def make_documents(count: int) -> list[np.ndarray]:
    """Random documents, int64."""
    random = np.random.default_rng(1)
    lengths = random.integers(1, MAX_LENGTH, count)
    return [random.integers(0, VOCAB_SIZE, length) for length in lengths]


def write_ours(prefix: str, documents: Documents, repeats: int) -> None:
    """Calls `add_document` for each document, `repeats` times over."""
    builder = millrace.IndexedDatasetBuilder(prefix, np.uint16)
    for _ in range(repeats):
        for tokens, lengths in documents:
            builder.add_document(tokens, lengths)
    builder.finalize()


def write_theirs(prefix: str, documents: Documents, repeats: int) -> None:
    """Makes the same calls, as Megatron-LM's preprocess_data.py does."""
    with quiet_megatron():
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(prefix + ".bin", np.uint16)
    for _ in range(repeats):
        for tokens, lengths in documents:
            builder.add_document(tokens, lengths)
    builder.finalize(prefix + ".idx")


def write_chunks(
    prefix: str, tokens: np.ndarray, lengths: np.ndarray, repeats: int, checksums: bool = False
) -> None:
    """Writes the same with our builder, one chunk of documents per call."""
    builder = millrace.IndexedDatasetBuilder(prefix, np.uint16, checksums=checksums)
    for _ in range(repeats):
        builder.add_documents(tokens, lengths)
    builder.finalize()


def write_plainly(prefix: str, tokens: np.ndarray, repeats: int) -> None:
    """Writes the bytes of the .bin with one write per chunk, and an fsync at the end."""
    with open(prefix + ".bin", "wb", buffering=0) as file:
        for _ in range(repeats):
            view = memoryview(tokens).cast("B")
            while len(view) > 0:
                view = view[file.write(view) :]
        os.fsync(file.fileno())


@contextlib.contextmanager
def timed_fsync() -> Iterator[list[float]]:
    """Yields a list that receives the seconds of each `os.fsync` in the block."""
    original, seconds = os.fsync, []

    def fsync(descriptor: int) -> None:
        start = time.perf_counter()
        original(descriptor)
        seconds.append(time.perf_counter() - start)

    os.fsync = fsync  # type: ignore[assignment]
    try:
        yield seconds
    finally:
        os.fsync = original


# ---- the limits ----


def compile_memcpy(folder: Path) -> Callable[..., None]:
    """A compiled C loop over memcpy, with the arguments (from, offsets, counts, n, to)."""
    source, library = folder / "copy.c", folder / "copy.so"
    source.write_text(_MEMCPY)
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    copy = ctypes.CDLL(str(library)).copy
    copy.restype = None
    copy.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_int64, ctypes.c_void_p]
    return copy


def drop_from_cache(paths: Sequence[str]) -> None:
    """Drops these files from the page cache."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_plainly(paths: Sequence[str], block_size: int = 4 << 20) -> int:
    """Reads files from start to end and returns the number of bytes."""
    buffer, total = bytearray(block_size), 0
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
    return total


# ---- finalising, in a fresh process ----


def finalize_ours(prefix: str, count: int) -> Callable[[], None]:
    """Adds sequences of one token each and returns the call that finalises them."""
    builder = millrace.IndexedDatasetBuilder(prefix, np.uint8)
    for start in range(0, count, CHUNK):
        size = min(CHUNK, count - start)
        builder.add_documents(np.zeros(size, np.uint8), np.ones(size, np.int64))
    return builder.finalize


def finalize_theirs(prefix: str, count: int) -> Callable[[], None]:
    """The same, directly in its lists: `add_document` takes longer and as much memory."""
    with quiet_megatron():
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(prefix + ".bin", np.uint8)
    builder.data_file.write(bytes(count))
    builder.sequence_lengths.extend(itertools.repeat(1, count))
    builder.document_indices.extend(range(1, count + 1))
    return lambda: builder.finalize(prefix + ".idx")


def main() -> None:
    task = json.loads(sys.argv[1])
    if task["side"] == "theirs":
        with quiet_megatron():
            import megatron.core.datasets.indexed_dataset  # noqa: F401  (otherwise it counts as growth)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current resident size
    before = memory_kib("VmRSS")
    add = finalize_ours if task["side"] == "ours" else finalize_theirs
    finalize = add(task["prefix"], task["count"])
    with timed_fsync() as fsyncs:
        start = time.perf_counter()
        finalize()
        seconds = time.perf_counter() - start
    peak = (memory_kib("VmHWM") - before) / 1024
    with open(task["prefix"] + ".idx", "rb") as index:
        digest = hashlib.sha256(index.read()).hexdigest()
    print(
        json.dumps({"seconds": seconds, "fsync": sum(fsyncs), "peak_mib": peak, "digest": digest})
    )


if __name__ == "__main__":
    main()
