"""Runs a function over items in worker processes; results come back in the order of the items.

A worker is a new Python process. It is sent the function once, and then one item at a time over a
socket pair; it never runs the caller's script. Workers share no thread and no lock with each other
or with this process, so each can be killed at any instant, and that is how all of them end.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, TypeVar

from millrace import checks
from millrace.errors import ConfigError, MillraceError
from millrace.interrupts import interruptible

Item = TypeVar("Item")
Result = TypeVar("Result")

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_READY = None, None  # a worker's answer when it has started, and when it has loaded the function


def ordered_map(
    function: Callable[[Any, Item], Result], items: Iterable[Item], *, context: Any, workers: int
) -> Generator[Result, None, None]:
    """Yields function(context, item) for each item, in order.

    At most 3 items per worker are in flight, so memory is bounded however long `items` is. With
    one worker, this process does the work. Close the iterator to end the workers. Inside
    `interrupts_held`, Ctrl-C is taken while this waits for items, workers or (with one worker) the
    function.

    Args:
        function: A function of an importable module, not of the script that runs.
        context: First argument of every call; sent to each worker once.
        workers: Number of processes, at least 1.

    Raises:
        ConfigError: A number of workers that is not a whole number above 0, or a function, context
            or item that a worker cannot load.
        MillraceError: A worker process that died or cannot be started.
    """
    workers = checks.whole("workers", workers, 1)
    if workers == 1:
        for item in _interruptible(items):
            with interruptible():
                result = function(context, item)
            yield result
        return
    pool = _Pool(pickle.dumps((function, context)), workers)
    num_submitted = num_yielded = 0
    try:
        for item in _interruptible(items):
            pool.submit(num_submitted, pickle.dumps(item))
            num_submitted += 1
            while num_yielded in pool.results or num_submitted - num_yielded == 3 * workers:
                yield pool.result(num_yielded)
                num_yielded += 1
        for number in range(num_yielded, num_submitted):
            yield pool.result(number)
    finally:
        pool.kill()


def _interruptible(items: Iterable[Item]) -> Iterator[Item]:
    """The items; Ctrl-C is taken while the next one is awaited."""
    iterator = iter(items)
    while True:
        with interruptible():
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


@dataclass(kw_only=True)
class _Worker:
    """A worker process, as its parent sees it."""

    process: subprocess.Popen[bytes]
    item_number: int
    messages: deque[bytes]  # still to be sent, each after the answer to the one before


class _Pool:
    """Up to `size` worker processes, started as they are needed; each is idle or has one item."""

    def __init__(self, work: bytes, size: int) -> None:
        self._work = work  # the function and the context, pickled
        self._size = size
        self._workers: dict[Connection, _Worker] = {}
        self._idle: list[Connection] = []
        # By item number: a value and None, or an error and its traceback.
        self.results: dict[int, tuple[Any, str | None]] = {}

    def submit(self, number: int, item: bytes) -> None:
        """Sends an item to a worker; waits for one if all are busy."""
        while not self._idle and len(self._workers) == self._size:
            self._receive()
        if not self._idle:
            self._start(number, item)
            return
        connection = self._idle.pop()
        self._workers[connection].item_number = number
        self._send(connection, item)

    def result(self, number: int) -> Any:
        """Waits for the result of an item and returns it, or raises its error."""
        while number not in self.results:
            self._receive()
        value, trace = self.results.pop(number)
        if trace is not None:
            raise value from (RuntimeError(trace) if trace else None)
        return value

    def kill(self) -> None:
        for worker in self._workers.values():
            worker.process.kill()
        for connection, worker in self._workers.items():
            connection.close()
            worker.process.wait()

    def _start(self, number: int, item: bytes) -> None:
        try:
            ours, theirs = Pipe()
            with theirs:
                process = _spawn(theirs.fileno())
        except OSError as error:
            raise MillraceError(
                f"worker process {len(self._workers) + 1} of {self._size} cannot be started: "
                f"{error}. Run again with fewer workers; workers=1 starts none"
            ) from None
        # The messages wait for its first answer, which says that it has started and listens.
        messages = deque([self._work, item])
        self._workers[ours] = _Worker(process=process, item_number=number, messages=messages)

    def _receive(self) -> None:
        """Waits until at least one busy worker has answered, and takes the answers."""
        busy = [connection for connection in self._workers if connection not in self._idle]
        with interruptible():
            ready = wait(busy)
        for connection in ready:
            assert isinstance(connection, Connection)
            try:
                with interruptible():
                    data = connection.recv_bytes()
            except (EOFError, OSError):
                raise self._death_error(connection) from None
            result = pickle.loads(data)
            worker = self._workers[connection]
            if worker.messages and result == _READY:
                self._send(connection, worker.messages.popleft())
            else:
                self.results[worker.item_number] = result
                self._idle.append(connection)

    def _send(self, connection: Connection, message: bytes) -> None:
        """Sends to a worker that listens, and therefore reads the whole message at once."""
        try:
            with interruptible():
                connection.send_bytes(message)
        except OSError:
            raise self._death_error(connection) from None

    def _death_error(self, connection: Connection) -> MillraceError:
        status = self._workers[connection].process.wait()
        if status < 0:
            return MillraceError(
                f"a worker process died of signal {-status} ({signal.strsignal(-status)}): it "
                "crashed, or it was killed by a user or, for lack of memory, by the kernel. "
                "Run again, with fewer workers if memory is short"
            )
        return MillraceError(
            f"a worker process died with exit status {status}; its output on stderr says why"
        )


def _spawn(descriptor: int) -> subprocess.Popen[bytes]:
    """Starts a worker process that inherits `descriptor`, its end of a socket pair."""
    code = (
        f"import sys; sys.path[:] = {sys.path!a}; "
        f"from millrace.jobs.executor import work; work({descriptor}, {os.getpid()})"
    )
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    # A worker starts with Ctrl-C blocked: the terminal sends the signal to all processes, but
    # only this one ends the workers.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        return subprocess.Popen(
            [sys.executable, *flags, "-c", code], stdin=subprocess.DEVNULL, pass_fds=[descriptor]
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


# ---- in a worker ----


def work(descriptor: int, parent: int) -> None:
    """The main function of a worker process, which runs until it or its parent is killed."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core per worker; threads would compete
    if sys.platform == "linux":
        # A parent that is killed cannot end its workers, so the kernel does.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    function, context = None, None
    answer = pickle.dumps(_READY)
    with Connection(descriptor) as connection:
        while os.getppid() == parent:
            try:
                connection.send_bytes(answer)
                request = connection.recv_bytes()
            except (EOFError, OSError):  # the parent has ended
                return
            try:
                value = None
                if function is None:
                    function, context = _load(request)
                else:
                    value = function(context, _load(request))
                answer = pickle.dumps((value, None))
            except Exception as error:
                answer = _pickle_error(error)


def _load(data: bytes) -> Any:
    try:
        return pickle.loads(data)
    except (AttributeError, ImportError) as error:
        raise ConfigError(
            f"a worker process cannot load the function or its data: {error}. Workers do not run "
            "the script that starts them: move its definitions into a module, or use workers=1"
        ) from None


def _pickle_error(error: Exception) -> bytes:
    """An error as an answer, with its traceback unless it is a MillraceError."""
    trace = "" if isinstance(error, MillraceError) else traceback.format_exc()
    try:
        data = pickle.dumps((error, trace))
        pickle.loads(data)
    except Exception:  # an error whose class cannot be pickled, or not restored
        data = pickle.dumps((MillraceError(f"in a worker process: {error!r}"), trace))
    return data
