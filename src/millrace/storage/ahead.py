"""Reading ahead: pieces of a file that were asked for before they are read."""

import threading
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.forks import Renewed
from millrace.storage.transfers import Part, start_pieces

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]
Piece = tuple[int, int]  # offset, count

_MOST_AHEAD = 1 << 28  # bytes of a file: those that a seek has made useless are dropped


class Ahead(Renewed):
    """A file whose pieces are asked for when they are announced, and kept until they are read."""

    size: int
    _renewed = ("_pieces", "_num_bytes", "_lock")

    def start(self, start: int, stop: int) -> "Future[Any]":
        """Starts a request for bytes [start, stop)."""
        raise NotImplementedError

    def after_fork(self) -> None:
        self._pieces: dict[Piece, list[Any]] = {}  # parts, and how often they will be read
        self._num_bytes = 0
        self._lock = threading.Lock()

    def prefetch(self, byte_offsets: Numbers, byte_counts: Numbers) -> None:
        """Asks for pieces without waiting."""
        pieces = self._checked(byte_offsets, byte_counts)
        with self._lock:
            new = []
            for piece in pieces:
                if piece in self._pieces:
                    self._pieces[piece][1] += 1
                else:
                    self._pieces[piece] = [None, 1]
                    new.append(piece)
            for piece, parts in zip(new, start_pieces(self.start, new), strict=True):
                self._pieces[piece][0] = parts
                self._num_bytes += piece[1]
            while self._num_bytes > _MOST_AHEAD:
                oldest = next(iter(self._pieces))
                self._num_bytes -= oldest[1]
                del self._pieces[oldest]

    def gather(self, byte_offsets: Numbers, byte_counts: Numbers) -> Bytes:
        """Pieces, one after the other, of which some may have been announced."""
        pieces = self._checked(byte_offsets, byte_counts)
        with self._lock:
            parts = [self._take(piece) for piece in pieces]
        missing = [piece for piece, some in zip(pieces, parts, strict=True) if some is None]
        new = iter(start_pieces(self.start, missing))
        flat = [part for some in parts for part in (next(new) if some is None else some)]
        if len(flat) == 1:
            return flat[0].result()
        out, place = np.empty(int(byte_counts.sum()), np.uint8), 0
        for part in flat:
            out[place : place + part.num_bytes] = part.result()
            place += part.num_bytes
        return out

    def _take(self, piece: Piece) -> list[Part] | None:
        entry = self._pieces.get(piece)
        if entry is None:
            return None
        entry[1] -= 1
        if entry[1] == 0:
            del self._pieces[piece]
            self._num_bytes -= piece[1]
        parts: list[Part] = entry[0]
        # What has failed is asked for again: the store may be well by now.
        is_lost = any(part.body.done() and part.body.exception() for part in parts)
        return None if is_lost else parts

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
