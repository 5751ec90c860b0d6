"""Runs a function over items in worker processes; results come back in the items' order.

A worker is a Python of its own that is sent the function once, and then one item at a time over a
socket pair; it never runs the caller's script. No thread and no lock is shared, so that a worker
can be killed at any instant, which is how all of them end.
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
_READY = None, None  # what a worker answers when it has started, and when it knows the function


def ordered_map(
    function: Callable[[Any, Item], Result],
    items: Iterable[Item],
    *,
    context: Any,
    workers: int,
) -> Generator[Result, None, None]:
    """Yields function(context, item) for each item, in order.

    At most 3 items for each worker are on their way, so that memory is bounded however long
    `items` is. With one worker the work is done in this process. Close the iterator to end the
    workers; inside `interrupts_held` Ctrl-C is taken while it waits for items, workers or (with one
    worker) the function.

    Args:
        function: of a module that can be imported; not of the script that runs.
        context: what every call needs; it is sent to each worker once.
        workers: number of processes, at least 1.

    Raises:
        ConfigError: workers that are no whole number above 0, or a function, context or item that a
            worker cannot load.
        MillraceError: a worker process died, or cannot be started.
    """
    workers = checks.whole("workers", workers, 1)
    if workers == 1:
        for item in _taken(items):
            with interruptible():
                result = function(context, item)
            yield result
        return
    pool = _Pool(pickle.dumps((function, context)), workers)
    num_given = num_yielded = 0
    try:
        for item in _taken(items):
            pool.give(num_given, pickle.dumps(item))
            num_given += 1
            while num_yielded in pool.results or num_given - num_yielded == 3 * workers:
                yield pool.take(num_yielded)
                num_yielded += 1
        while num_yielded < num_given:
            yield pool.take(num_yielded)
            num_yielded += 1
    finally:
        pool.kill()


def _taken(items: Iterable[Item]) -> Iterator[Item]:
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
    """A worker process, as its parent sees it.

    Attributes:
        number: of the item that it is at work on.
        messages: that it will be sent one by one, each after an answer to the one before.
    """

    process: subprocess.Popen[bytes]
    number: int
    messages: deque[bytes]


class _Pool:
    """Worker processes, of which each is at work on one item or idle.

    Args:
        work: the function and the context, pickled.
        size: how many processes there may be.

    Attributes:
        results: that have come back, by the numbers of their items: each a value and None, or an
            error and its traceback.
    """

    def __init__(self, work: bytes, size: int) -> None:
        self._work = work
        self._size = size
        self._workers: dict[Connection, _Worker] = {}
        self._idle: list[Connection] = []
        self.results: dict[int, tuple[Any, str | None]] = {}

    def give(self, number: int, item: bytes) -> None:
        """Hands an item to a worker; waits for one if all are busy."""
        while not self._idle and len(self._workers) == self._size:
            self._receive()
        if not self._idle:
            self._start(number, item)
            return
        connection = self._idle.pop()
        self._workers[connection].number = number
        self._send(connection, item)

    def take(self, number: int) -> Any:
        """The result of an item; waits for it. An error is raised: that of the first bad item."""
        while number not in self.results:
            self._receive()
        value, trace = self.results.pop(number)
        if trace is not None:
            raise value from (RuntimeError(trace) if trace else None)
        return value

    def kill(self) -> None:
        """Ends the workers, whatever they are at."""
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
        # Its first answer says that it has started, and listens.
        messages = deque([self._work, item])
        self._workers[ours] = _Worker(process=process, number=number, messages=messages)

    def _receive(self) -> None:
        """Waits until busy workers have answered, and takes their answers."""
        busy = [connection for connection in self._workers if connection not in self._idle]
        with interruptible():
            answered = wait(busy)
        for connection in answered:
            assert isinstance(connection, Connection)
            try:
                with interruptible():
                    data = connection.recv_bytes()
            except (EOFError, OSError):
                raise self._death_of(connection) from None
            result = pickle.loads(data)
            worker = self._workers[connection]
            if worker.messages and result == _READY:
                self._send(connection, worker.messages.popleft())
            else:
                self.results[worker.number] = result
                self._idle.append(connection)

    def _send(self, connection: Connection, message: bytes) -> None:
        """Sends to a worker that listens, and so takes all of it at once."""
        try:
            with interruptible():
                connection.send_bytes(message)
        except OSError:
            raise self._death_of(connection) from None

    def _death_of(self, connection: Connection) -> MillraceError:
        status = self._workers[connection].process.wait()
        if status < 0:
            return MillraceError(
                f"a worker process died of signal {-status} ({signal.strsignal(-status)}): "
                "somebody killed it, the kernel did because memory ran out, or it crashed. "
                "Run again, with fewer workers if memory is short"
            )
        return MillraceError(
            f"a worker process died with exit status {status}; what it wrote to stderr says why"
        )


def _spawn(descriptor: int) -> subprocess.Popen[bytes]:
    """A worker process, with its end of a socket pair."""
    code = (
        f"import sys; sys.path[:] = {sys.path!a}; "
        f"from millrace.jobs.executor import work; work({descriptor}, {os.getpid()})"
    )
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    # A worker is born with Ctrl-C blocked: the terminal sends it to all processes, and it is this
    # one that ends the others.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        return subprocess.Popen(
            [sys.executable, *flags, "-c", code], stdin=subprocess.DEVNULL, pass_fds=[descriptor]
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


# ---- in a worker ----


def work(descriptor: int, parent: int) -> None:
    """What a worker process does until it is killed.

    Args:
        descriptor: of its end of the socket pair.
        parent: process that started it.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker is one core's; threads would compete
    if sys.platform == "linux":
        # A parent that is killed cannot end its workers: let the kernel do it.
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
                answer = _pickled_error(error)


def _load(data: bytes) -> Any:
    try:
        return pickle.loads(data)
    except (AttributeError, ImportError) as error:
        raise ConfigError(
            f"a worker process cannot load what it is sent: {error}. Workers do not run the script "
            "that starts them: put what it defines for them into a module, or use workers=1"
        ) from None


def _pickled_error(error: Exception) -> bytes:
    """An error as an answer, with its traceback if it is a surprise."""
    trace = "" if isinstance(error, MillraceError) else traceback.format_exc()
    try:
        data = pickle.dumps((error, trace))
        pickle.loads(data)
    except Exception:  # its class is one of those that pickle cannot make again
        data = pickle.dumps((MillraceError(f"in a worker process: {error!r}"), trace))
    return data
