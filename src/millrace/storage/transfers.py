"""An object as a file: requests side by side, pieces read ahead, neighbours in one request."""

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from millrace.errors import StorageError
from millrace.files import checksum
from millrace.forks import Renewed
from millrace.names import BIN, INFO
from millrace.storage import Bytes, Identity, Numbers, gather_range
from millrace.storage.mirror import BLOCK, Copy, Mirror, copy_of

Piece = tuple[int, int]  # offset, count

_MOST_BYTES = 8 << 20  # of a request: a larger piece is several requests, side by side
_LEAST_USE = 20  # a gap is read where it is at most 1/20 of what is used before it
_MOST_AHEAD = 1 << 28  # bytes of a file: those that a seek has made useless are dropped
_FEW_THREADS, _FEW_REQUESTS = 8, 64  # at the start of a process

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


class ObjectFile(Renewed):
    """An object as it was when it was opened, read by ranges.

    Pieces that are announced are asked for at once, and kept until they are read.

    Attributes:
        following: The file that is read after this one; False: none, None: unknown.
        begin: Latest time, by `time.monotonic`, from which the time limit of its requests counts.
    """

    _renewed = ("_parts", "_lock", "following")
    begin = math.inf

    def __init__(
        self, storage: Any, path: str, identity: Identity, mirror: Mirror | None = None
    ) -> None:
        self._storage, self._path = storage, path
        self.identity, self.size = identity, identity.size
        self._copy = copy_of(mirror, path, identity) if mirror and self.size > 0 else None
        self.renew()

    def after_fork(self) -> None:
        self._parts: dict[Piece, list[Part]] = {}
        self._lock = threading.Lock()
        self.following: Any = None

    def read(self, byte_offset: int, num_bytes: int) -> Bytes:
        return gather_range(self, byte_offset, byte_offset + num_bytes)

    def prefetch(self, byte_offsets: Numbers, byte_counts: Numbers) -> None:
        """Asks for pieces without waiting, unless they are announced already."""
        pieces = self._checked(byte_offsets, byte_counts)
        if self._copy is not None and self._copy.is_whole():
            for start, count in pieces[-1:]:
                self._fill_ahead(self._copy, start, start + count)
            return
        with self._lock:
            new = [piece for piece in dict.fromkeys(pieces) if piece not in self._parts]
            self._parts.update(zip(new, start_pieces(self._start, new), strict=True))
            num_bytes = sum(count for _, count in self._parts)
            while num_bytes > _MOST_AHEAD:
                oldest = next(iter(self._parts))
                num_bytes -= oldest[1]
                del self._parts[oldest]

    def gather(self, byte_offsets: Numbers, byte_counts: Numbers) -> Bytes:
        """Pieces, one after the other, of which some may have been announced."""
        data = None if self._copy is None else self._copy.gather(byte_offsets, byte_counts)
        if data is not None:
            with self._lock:
                self._parts.clear()  # announced before all of the copy was there
            return data
        pieces = self._checked(byte_offsets, byte_counts)
        with self._lock:
            parts = {piece: self._parts.pop(piece, []) for piece in dict.fromkeys(pieces)}
        # What has failed is asked for again: the store may be well by now.
        missing = [
            piece for piece, some in parts.items() if not some or any(map(Part.has_failed, some))
        ]
        parts.update(zip(missing, start_pieces(self._start, missing), strict=True))
        flat = [part.result() for piece in pieces for part in parts[piece]]
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

    def _start(self, start: int, stop: int) -> Any:
        """Bytes [start, stop) if they are here, or a `Future` of them."""
        if self._copy is not None:
            self._fill_ahead(self._copy, start, stop)
            if (data := self._copy.read(start, stop)) is not None:
                return data
        return self._submit(self._fetch_or_fill, start, stop)

    def _submit(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """A `Future` of some work, whose last argument is when its time limit begins: now."""
        note_use()  # in a forked child the work might wait for a lock of the parent
        return self._storage.pool.submit(work, *arguments, min(time.monotonic(), self.begin))

    def _fill_ahead(self, copy: Copy, start: int, stop: int) -> None:
        """Asks for the blocks that come next where bytes [start, stop) of a shard read on.

        A random order, which does by chance, may not need those. A forked child does not ask: it
        cannot fetch, and its parent's threads may hold the locks.
        """
        file, is_refused = self, client_use["was_forked"] or self.following is None
        first, end = (0, 0) if is_refused else copy.blocks_ahead(start, stop)
        while file and file._copy is not None and end > first:
            for block in file._copy.new_blocks(first, end):
                file._submit(file._copy.fill, *block, file)
            first, end = 0, end - file._copy.num_blocks
            file = file.following

    def _fetch_or_fill(self, start: int, stop: int, begin: float) -> Any:
        copy, data = self._copy, None
        if copy is not None and copy.fill(start, stop, self, begin):
            data = copy.read(start, stop)
        return self.fetch(begin, start, stop) if data is None else data

    def sums(self, begin: float) -> list[str]:
        """The checksums of the blocks of a `.bin`; none if its sidecar does not have them."""
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            if self._path.endswith(BIN):
                path = self._path.removesuffix(BIN) + INFO
                sidecar = ObjectFile(self._storage, path, self._storage.stat(path, begin))
                # By this thread: the pool's others may all wait for these checksums.
                data = sidecar.fetch(begin, 0, sidecar.size)
                sums = json.loads(bytes(data))["checksums"]
                kind = sums["algorithm"], sums["block_size"], sums["bin"]["size"]
                if kind == ("xxh3_64", BLOCK, self.size):
                    return list(sums["bin"]["blocks"])
        return []

    def fetch(self, begin: float, start: int, stop: int, expected: str = "") -> Any:
        """Bytes [start, stop) of the object, and of no other; asked for at `begin`.

        Bytes of another checksum than the expected one are asked for again.
        """
        options: Any = {"range": (start, stop)}
        if self.identity.version is not None:
            options["if_match"] = self.identity.version

        def request(store: Any, key: str) -> Any:
            reply = store.get(key, options=options)
            now = identity_of(reply.meta)
            if now[::2] != self.identity[::2]:
                is_now = f"an object of {now.size} bytes and the ETag {now.version}"
                raise changed(self._path, is_now)
            body = reply.bytes()
            if reply.range != (start, stop) or len(body) != stop - start:
                problem = f"{len(body)} bytes came for bytes {start} to {stop}"
                raise EOFError(f"wrong length: {problem}")
            if expected and checksum([body]) != expected:
                raise EOFError(f"bytes {start} to {stop} do not have the checksum of the sidecar")
            return body

        try:
            return self._storage.ask(self._path, request, begin=begin)
        except FileNotFoundError:
            raise changed(self._path, "gone") from None


def changed(path: str, now: str) -> StorageError:
    return StorageError(
        f"{path} changed after it was opened: it is {now} now. Objects of a run must not change: "
        "write new data under a new name"
    )


def identity_of(meta: Any) -> Identity:
    return Identity(meta["size"], int(meta["last_modified"].timestamp()) * 10**9, meta["e_tag"])


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
