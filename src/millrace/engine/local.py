"""Runs tasks in worker processes of this machine.

A worker is a new Python process, which never runs the caller's script. A socket pair brings it the
function and the context once, and then tasks. Workers share no thread and no lock with each other
or with this process, so each can be killed at any instant, which is how all of them end. A worker
that dies for another reason is replaced, and its task is tried again.

Each worker has a thread here, so that it does not wait while a task is drawn or a result is used.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from multiprocessing.connection import Connection, Pipe
from queue import Empty, SimpleQueue
from typing import Any

from millrace import checks
from millrace.cores import available_cores
from millrace.engine.tasks import (
    ATTEMPTS,
    ENVIRONMENT,
    Answer,
    Function,
    Results,
    Task,
    answer_of,
    from_bytes,
    interruptible_tasks,
    result_of,
    run_tasks,
    to_bytes,
)
from millrace.errors import MillraceError
from millrace.interrupts import interruptible

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_CHECK_AFTER = 1.0  # seconds without an answer, before a check that the worker lives


def run_local(
    function: Function,
    context: Any,
    tasks: Iterable[Task],
    *,
    workers: int | None = None,
    attempts: int = ATTEMPTS,
) -> Results:
    """Runs a function on tasks in worker processes; an `Executor` with its arguments and errors.

    With one worker, this process does the work. Close the iterator to end the workers; they also
    end when this process dies. Inside `interrupts_held`, Ctrl-C is taken while this waits for
    tasks, workers or (with one worker) the function.

    Args:
        workers: Number of processes, at least 1; None: one per core.
        attempts: Number of times that a task is tried if its worker dies, at least 1.

    Raises:
        MillraceError: A worker that cannot be started.
    """
    workers = checks.check_int("workers", available_cores() if workers is None else workers, 1)
    attempts = checks.check_int("attempts", attempts, 1)
    if workers == 1:
        for task in interruptible_tasks(tasks):
            with interruptible():
                result = function(context, task)
            yield task, result
        return
    pool = _Pool(to_bytes("the function or its context", (function, context)), workers, attempts)
    try:
        yield from run_tasks(tasks, 2 * workers, pool.submit, pool.receive)
    finally:
        pool.close()


class _DeathError(Exception):
    """The death of a worker; its argument is the exit status."""


class _Worker:
    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        code = (
            f"import sys; sys.path[:] = {sys.path!a}; "
            f"from millrace.engine.local import work; work({theirs.fileno()}, {os.getpid()})"
        )
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a library prints must not mix with the output of the job
                pass_fds=[theirs.fileno()],
                env={**os.environ, **ENVIRONMENT},
            )

    def ask(self, message: bytes) -> bytes:
        try:
            self._connection.send_bytes(message)
            while not self._connection.poll(_CHECK_AFTER):
                # A process that a dead worker has left behind may hold the socket open.
                if self.process.poll() is not None and not self._connection.poll():
                    raise EOFError
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            self._connection.close()
            raise _DeathError(self.process.wait()) from None


class _Pool:
    """Up to `size` workers, started as they are needed; `work` is the pickled function."""

    def __init__(self, work: bytes, size: int, attempts: int) -> None:
        self._work, self._size, self._attempts = work, size, attempts
        self._tasks: SimpleQueue[tuple[Task, bytes] | None] = SimpleQueue()
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        self._num_unfinished = 0
        self._threads: list[threading.Thread] = []
        self._workers: list[_Worker] = []
        self._owner, self._is_closed = os.getpid(), False

    def submit(self, task: Task, data: bytes) -> None:
        self._tasks.put((task, data))
        self._num_unfinished += 1
        if len(self._threads) < min(self._num_unfinished, self._size):
            self._threads.append(threading.Thread(target=self._serve, daemon=True))
            self._threads[-1].start()

    def receive(self, seconds: float) -> list[Answer]:
        try:
            with interruptible():
                answer = self._answers.get(timeout=seconds)
        except Empty:
            return []
        self._num_unfinished -= 1
        return [answer]

    def close(self) -> None:
        if self._owner != os.getpid():  # the workers are not a forked child's
            return
        self._is_closed = True
        for worker in self._workers:
            worker.process.kill()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()
        for worker in self._workers:
            worker.process.wait()

    def _serve(self) -> None:
        """The thread of a worker: gives it tasks, and replaces it if it dies."""
        # Workers inherit this: the terminal sends Ctrl-C to them too, but only this process ends
        # them.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        worker: _Worker | None = None
        item, num_deaths = self._tasks.get(), 0
        while item is not None and not self._is_closed:
            task, data = item
            answer: bytes | Exception
            try:
                if worker is None or worker.process.poll() is not None:
                    worker = self._start()
                answer = worker.ask(data)
            except _DeathError as error:
                worker, num_deaths = None, num_deaths + 1
                if num_deaths < self._attempts:
                    continue
                times = "once" if num_deaths == 1 else f"{num_deaths} times"
                answer = MillraceError(
                    f"the worker process of {task} died {times}: it {_cause(*error.args)}"
                )
            except Exception as error:  # it cannot be started, or cannot load the function
                answer = error
            self._answers.put((task, answer))
            item, num_deaths = self._tasks.get(), 0

    def _start(self) -> _Worker:
        try:
            worker = _Worker()
        except OSError as error:
            raise MillraceError(
                f"worker process {len(self._threads)} of {self._size} cannot be started: {error}. "
                "Run again with fewer workers; workers=1 starts none"
            ) from None
        self._workers.append(worker)
        if self._is_closed:  # which may not have seen it
            worker.process.kill()
        result_of(worker.ask(self._work))
        return worker


def _cause(status: int) -> str:
    """How a worker ended, and what can be done."""
    if status >= 0:
        return f"exited with status {status}; its output on stderr says why"
    return (
        f"was ended by signal {-status} ({signal.strsignal(-status)}): by a user, a limit on "
        "memory or time (`dmesg` tells of the kernel's), or a fault in a library. Run again, with "
        "fewer workers or smaller tasks if memory is short"
    )


def work(descriptor: int, parent: int) -> None:
    """The main function of a worker, which runs until it or its parent is killed."""
    os.set_inheritable(descriptor, False)
    sys.stdout = sys.stderr  # the same file, written at each line: a worker ends by being killed
    # A parent that is killed cannot end its workers, so the kernel does.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    loaded: list[Any] = []  # the function and the context

    def use(message: bytes) -> Any:
        value = from_bytes(message)
        if not loaded:
            loaded.extend(value)
            return None
        function, context = loaded
        return function(context, value)

    # An error of the connection: the parent has ended.
    with Connection(descriptor) as connection, contextlib.suppress(EOFError, OSError):
        while os.getppid() == parent:
            connection.send_bytes(answer_of(use, connection.recv_bytes()))
