"""Requests side by side: pieces that are read ahead, and neighbours in one request."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace.errors import StorageError
from millrace.forks import Renewed

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]
Piece = tuple[int, int]  # offset, count

_MOST_BYTES = 8 << 20  # of a request: a larger piece is several requests, side by side
_LEAST_USE = 20  # a gap is read where it is at most 1/20 of what is used before it
_FEW_THREADS, _FEW_REQUESTS = 8, 64  # at the start of a process
_MOST_AHEAD = 1 << 28  # bytes of a file: those that a seek has made useless are dropped

closing = threading.Event()  # set when Python ends: requests are not tried again
# Before the end of Python joins the threads of pools, which would wait for all retries.
threading._register_atexit(closing.set)  # type: ignore[attr-defined]

# Of obstore, by this process or before its fork.
client_use = {"began": False, "was_forked": False}
os.register_at_fork(after_in_child=lambda: client_use.update(was_forked=client_use["began"]))
_FORK = (
    "this process was forked after its parent had read from a bucket: its client would wait for "
    "ever. Use threads, or start workers by forkserver or spawn: "
    'DataLoader(multiprocessing_context="forkserver"), or, where a trainer makes the DataLoader, '
    'torch.multiprocessing.set_start_method("forkserver") at the start of the program'
)


def note_use() -> None:
    if client_use["was_forked"]:
        raise StorageError(_FORK)
    client_use["began"] = True


class RequestPool(ThreadPoolExecutor):
    """Threads that make requests: few for the first requests of a process, then all.

    Each thread opens a connection, and all processes of a run start at one time: with eight threads
    at first, 64 processes on two cores have their first batches a fifth sooner.
    """

    def __init__(self, threads: int) -> None:
        super().__init__(min(threads, _FEW_THREADS), "millrace-requests")
        self._num_threads, self._num_submitted = threads, 0

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        self._num_submitted += 1
        if self._num_submitted > _FEW_REQUESTS:
            self._max_workers = self._num_threads  # which start at need
        return super().submit(work, *arguments, **options)


class Part(NamedTuple):
    """Bytes of a piece: `num_bytes` from `place` on, of bytes or of a `Future` of them."""

    body: Any
    place: int
    num_bytes: int

    def result(self) -> Bytes:
        """Waits for the bytes, or raises what went wrong."""
        body = self.body.result() if isinstance(self.body, Future) else self.body
        return np.frombuffer(body, np.uint8, self.num_bytes, self.place)

    def has_failed(self) -> bool:
        return isinstance(self.body, Future) and self.body.done() and bool(self.body.exception())


class Ahead(Renewed):
    """A file whose pieces are asked for when they are announced, and kept until they are read."""

    size: int
    _renewed: tuple[str, ...] = ("_parts", "_lock")

    def start(self, start: int, stop: int) -> Any:
        """Bytes [start, stop) if they are here, or a `Future` of them."""
        raise NotImplementedError

    def after_fork(self) -> None:
        self._parts: dict[Piece, list[Part]] = {}
        self._lock = threading.Lock()

    def prefetch(self, byte_offsets: Numbers, byte_counts: Numbers) -> None:
        """Asks for pieces without waiting, unless they are announced already."""
        pieces = self._checked(byte_offsets, byte_counts)
        with self._lock:
            new = [piece for piece in dict.fromkeys(pieces) if piece not in self._parts]
            self._parts.update(zip(new, start_pieces(self.start, new), strict=True))
            num_bytes = sum(count for _, count in self._parts)
            while num_bytes > _MOST_AHEAD:
                oldest = next(iter(self._parts))
                num_bytes -= oldest[1]
                del self._parts[oldest]

    def gather(self, byte_offsets: Numbers, byte_counts: Numbers) -> Bytes:
        """Pieces, one after the other, of which some may have been announced."""
        pieces = self._checked(byte_offsets, byte_counts)
        with self._lock:
            parts = {piece: self._parts.pop(piece, None) for piece in dict.fromkeys(pieces)}
        # What has failed is asked for again: the store may be well by now.
        missing = [
            piece for piece, some in parts.items() if not some or any(map(Part.has_failed, some))
        ]
        parts.update(zip(missing, start_pieces(self.start, missing), strict=True))
        flat = [part.result() for piece in pieces for part in parts[piece] or ()]
        return flat[0] if len(flat) == 1 else np.concatenate([np.empty(0, np.uint8), *flat])

    def _checked(self, byte_offsets: Numbers, byte_counts: Numbers) -> list[Piece]:
        is_outside = (byte_offsets < 0) | (byte_counts < 0)
        is_outside |= byte_counts > self.size - byte_offsets
        if is_outside.any():
            place = int(is_outside.argmax())
            raise ValueError(
                f"a piece has {byte_counts[place]} bytes from byte {byte_offsets[place]} on; the "
                f"file has {self.size}"
            )
        return list(zip(byte_offsets.tolist(), byte_counts.tolist(), strict=True))


def start_pieces(start: Callable[[int, int], Any], pieces: list[Piece]) -> list[list[Part]]:
    """Asks for pieces of a file; the parts of each, one after the other."""
    chunks = [
        (at, min(_MOST_BYTES, offset + count - at), number)
        for number, (offset, count) in enumerate(pieces)
        for at in range(offset, offset + count, _MOST_BYTES)
    ]
    parts: list[list[Part]] = [[] for _ in pieces]
    groups = _neighbours(sorted(chunks))
    for group in sorted(groups, key=lambda group: min(number for *_, number in group)):
        first = group[0][0]
        body = start(first, max(offset + count for offset, count, _ in group))
        for offset, count, number in group:
            parts[number].append(Part(body, offset - first, count))
    return parts


def _neighbours(chunks: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Sorted chunks in groups that one request brings."""
    groups: list[list[tuple[int, int, int]]] = []
    start = end = used = 0
    for chunk in chunks:
        offset, stop = chunk[0], chunk[0] + chunk[1]
        is_near = groups and (offset - end) * _LEAST_USE <= used
        if is_near and max(stop, end) - start <= _MOST_BYTES:
            groups[-1].append(chunk)
            used += max(stop - max(offset, end), 0)
            end = max(stop, end)
        else:
            groups.append([chunk])
            start, end, used = offset, stop, stop - offset
    return groups
