"""Requests side by side: threads, a limit of requests in flight, and neighbours in one request."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace.forks import Renewed

MOST_BYTES = 8 << 20  # of a request: a larger piece is several requests, side by side
_LEAST_USE = 20  # a gap is read where it is at most 1/20 of what is used before it

closing = threading.Event()  # set when Python ends: requests are not tried again
# Before the end of Python joins the threads of pools, which would wait for all retries.
threading._register_atexit(closing.set)  # type: ignore[attr-defined]


class Transfers(Renewed):
    """Threads that make requests, at most `most` at a time; a forked child has none of them."""

    _renewed = ("pool",)

    def __init__(self, most: int) -> None:
        self._most = most
        self.renew()

    def after_fork(self) -> None:
        self.pool = ThreadPoolExecutor(self._most, "millrace-requests")  # threads start at need


class Part(NamedTuple):
    """Bytes of a piece: `num_bytes` of those that a request brings, from `place` on."""

    body: "Future[Any]"
    place: int
    num_bytes: int

    def result(self) -> NDArray[np.uint8]:
        """Waits for the bytes, or raises what went wrong."""
        return np.frombuffer(self.body.result(), np.uint8, self.num_bytes, self.place)


def start_pieces(
    start: Callable[[int, int], "Future[Any]"], pieces: list[tuple[int, int]]
) -> list[list[Part]]:
    """Asks for pieces (offset, count) of a file; the parts of each, one after the other."""
    chunks = [
        (at, min(MOST_BYTES, offset + count - at), number)
        for number, (offset, count) in enumerate(pieces)
        for at in range(offset, offset + count, MOST_BYTES)
    ]
    parts: list[list[Part]] = [[] for _ in pieces]
    for group in _neighbours(sorted(chunks)):
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
        if is_near and max(stop, end) - start <= MOST_BYTES:
            groups[-1].append(chunk)
            used += max(stop - max(offset, end), 0)
            end = max(stop, end)
        else:
            groups.append([chunk])
            start, end, used = offset, stop, stop - offset
    return groups
