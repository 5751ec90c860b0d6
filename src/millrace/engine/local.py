"""Runs tasks in worker processes of this machine.

A worker is a new Python process with one socket pair to this process. It is sent the function and
the context once, and then tasks; it never runs the caller's script. Workers share no thread and no
lock with each other or with this process, so each can be killed at any instant, and that is how all
of them end. A worker that dies for another reason is replaced, and its task given to another one.

A busy worker is sent its next task ahead, so that it does not wait while this process draws a task
or uses a result.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from millrace import checks
from millrace.cores import available_cores
from millrace.engine.tasks import (
    ATTEMPTS,
    ENVIRONMENT,
    Function,
    Task,
    answer_of,
    error_answer,
    from_bytes,
    interruptible_tasks,
    result_of,
    to_bytes,
)
from millrace.errors import MillraceError
from millrace.interrupts import interruptible

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_READY = b""  # a worker's message when it has started, and again when it has loaded the function
# A task of at most this size is sent to a busy worker. It fits the socket's buffer, so this process
# does not wait for a worker that may itself wait until its result is read.
_MOST_AHEAD = 1 << 15
_CHECK_AFTER = 1.0  # seconds without a message, after which dead workers are looked for


def run_local(
    function: Function,
    context: Any,
    tasks: Iterable[Task],
    *,
    workers: int | None = None,
    attempts: int = ATTEMPTS,
) -> Generator[tuple[Task, Any], None, None]:
    """Runs a function on tasks in worker processes; an `Executor`, which tells the arguments.

    With one worker, this process does the work. Close the iterator to end the workers; they also
    end when this process dies. Inside `interrupts_held`, Ctrl-C is taken while this waits for
    tasks, workers or (with one worker) the function.

    Args:
        workers: Number of processes, at least 1; None: one per core.
        attempts: Number of times that a task is tried if its worker dies, at least 1.

    Raises:
        MillraceError: A task whose worker died in every attempt, or a worker that cannot be
            started.
    """
    workers = checks.whole("workers", available_cores() if workers is None else workers, 1)
    attempts = checks.whole("attempts", attempts, 1)
    if workers == 1:
        for task in interruptible_tasks(tasks):
            with interruptible():
                result = function(context, task)
            yield task, result
        return
    pool = _Pool(to_bytes("the function or its context", (function, context)), workers, attempts)
    try:
        for task in interruptible_tasks(tasks):
            pool.submit(task)
            pool.receive(block=False)
            while pool.num_unfinished == 2 * workers:
                pool.receive()
            yield from pool.results()
        while pool.num_unfinished:
            pool.receive()
            yield from pool.results()
    finally:
        pool.kill()


@dataclass(kw_only=True, eq=False)
class _Attempt:
    """A task that is not finished.

    Attributes:
        data: The pickled task.
        deaths: What happened to each worker that died with it.
    """

    task: Task
    data: bytes
    deaths: list[str] = field(default_factory=list)


@dataclass(kw_only=True, eq=False)
class _Worker:
    """A worker process, as its parent sees it.

    Attributes:
        attempts: The tasks that it was sent and has not answered; it runs the first.
        has_work: Whether it was sent the function and the context.
        is_ready: Whether it has loaded them, and takes tasks.
    """

    process: subprocess.Popen[bytes]
    connection: Connection
    attempts: deque[_Attempt] = field(default_factory=deque)
    has_work: bool = False
    is_ready: bool = False


class _Pool:
    """Up to `size` worker processes, started as they are needed."""

    def __init__(self, work: bytes, size: int, attempts: int) -> None:
        self._work = work  # the function and the context, pickled
        self._size = size
        self._attempts = attempts
        self._owner = os.getpid()
        self._workers: list[_Worker] = []
        self._queue: deque[_Attempt] = deque()  # tasks that no worker has
        self._results: deque[tuple[Task, Any]] = deque()
        self._num_kills = _num_memory_kills()

    @property
    def num_unfinished(self) -> int:
        return len(self._queue) + sum(len(worker.attempts) for worker in self._workers)

    def results(self) -> Generator[tuple[Task, Any], None, None]:
        while self._results:
            yield self._results.popleft()

    def submit(self, task: Task) -> None:
        self._queue.append(_Attempt(task=task, data=to_bytes(str(task), task)))
        self._distribute()

    def receive(self, *, block: bool = True) -> None:
        """Takes the messages of workers; waits until there is one, or for a second."""
        by_connection = {worker.connection: worker for worker in self._workers}
        with interruptible():
            ready = wait(list(by_connection), _CHECK_AFTER if block else 0)
        for connection in ready:
            assert isinstance(connection, Connection)
            self._receive_from(by_connection[connection])
        if block and not ready:
            # A process that a dead worker has left behind holds its end of the socket open.
            for worker in list(self._workers):
                if worker.process.poll() is not None and not worker.connection.poll():
                    self._bury(worker)
        self._distribute()

    def kill(self) -> None:
        """Ends all workers."""
        if os.getpid() == self._owner:  # the workers are not a forked child's
            for worker in self._workers:
                worker.process.kill()
            for worker in self._workers:
                worker.process.wait()
        for worker in self._workers:
            worker.connection.close()
        self._workers.clear()

    def _distribute(self) -> None:
        """Gives queued tasks to workers: first one each, then a second to those that are busy."""
        while self._queue:
            worker = min(self._workers, key=_load_of, default=None)
            if (worker is None or worker.attempts) and len(self._workers) < self._size:
                worker = self._start()
            if worker is None or len(worker.attempts) == 2:
                return
            if worker.attempts and len(self._queue[0].data) > _MOST_AHEAD:
                return
            attempt = self._queue.popleft()
            worker.attempts.append(attempt)
            if worker.is_ready:
                self._send(worker, attempt.data)

    def _start(self) -> _Worker:
        try:
            connection, process = _spawn()
        except OSError as error:
            raise MillraceError(
                f"worker process {len(self._workers) + 1} of {self._size} cannot be started: "
                f"{error}. Run again with fewer workers; workers=1 starts none"
            ) from None
        worker = _Worker(process=process, connection=connection)
        self._workers.append(worker)
        return worker

    def _receive_from(self, worker: _Worker) -> None:
        try:
            with interruptible():
                data = worker.connection.recv_bytes()
        except (EOFError, OSError):
            self._bury(worker)
            return
        if data != _READY:
            result = result_of(data)
            self._results.append((worker.attempts.popleft().task, result))
        elif not worker.has_work:
            worker.has_work = True
            self._send(worker, self._work)
        else:
            worker.is_ready = True
            for attempt in worker.attempts:
                self._send(worker, attempt.data)

    def _send(self, worker: _Worker, message: bytes) -> None:
        # If the worker has died, the main loop notices after it has read the remaining answers.
        with contextlib.suppress(OSError), interruptible():
            worker.connection.send_bytes(message)

    def _bury(self, worker: _Worker) -> None:
        """Takes back the tasks of a worker that has died."""
        worker.connection.close()
        death = self._cause(worker.process.wait())
        self._workers.remove(worker)
        if worker.attempts:
            attempt = worker.attempts[0]
            attempt.deaths.append(death)
            if len(attempt.deaths) == self._attempts:
                raise MillraceError(_failure(attempt))
        self._queue.extendleft(reversed(worker.attempts))

    def _cause(self, status: int) -> str:
        """How a worker ended, and what can be done."""
        if status >= 0:
            return f"exited with status {status}; its output on stderr says why"
        name = f"signal {-status} ({signal.strsignal(-status)})"
        if -status == signal.SIGKILL and _num_memory_kills() > self._num_kills:
            return (
                f"was ended by {name}; the kernel has ended processes for lack of memory "
                "meanwhile. Use fewer workers or smaller tasks"
            )
        return (
            f"was ended by {name}: by a user, a limit on memory or time, or a fault in a library. "
            "Run again, with fewer workers or smaller tasks if memory is short"
        )


def _load_of(worker: _Worker) -> int:
    return len(worker.attempts)


def _failure(attempt: _Attempt) -> str:
    count = len(attempt.deaths)
    times = "once" if count == 1 else f"{count} times"
    return f"the worker process of {attempt.task} died {times}: it {attempt.deaths[-1]}"


def _num_memory_kills() -> int:
    """The number of processes that the kernel has ended for lack of memory; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError), open("/proc/vmstat") as file:
        for line in file:
            name, count = line.split()
            if name == "oom_kill":
                return int(count)
    return 0


def _spawn() -> tuple[Connection, subprocess.Popen[bytes]]:
    """Starts a worker process; returns this process's end of the socket pair."""
    ours, theirs = Pipe()
    code = (
        f"import sys; sys.path[:] = {sys.path!a}; "
        f"from millrace.engine.local import work; work({theirs.fileno()}, {os.getpid()})"
    )
    with theirs:
        # A worker starts with Ctrl-C blocked: the terminal sends the signal to all processes, but
        # only this one ends the workers.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a library prints must not mix with the output of the job
                pass_fds=[theirs.fileno()],
                env={**os.environ, **ENVIRONMENT},
            )
        except BaseException:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return ours, process


# ---- in a worker ----


def work(descriptor: int, parent: int) -> None:
    """The main function of a worker process, which runs until it or its parent is killed."""
    os.set_inheritable(descriptor, False)
    sys.stdout = sys.stderr  # the same file, written at each line: a worker ends by being killed
    if sys.platform == "linux":
        # A parent that is killed cannot end its workers, so the kernel does.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    function, context = None, None
    answer = _READY
    with Connection(descriptor) as connection:
        while os.getppid() == parent:
            try:
                connection.send_bytes(answer)
                message = connection.recv_bytes()
            except (EOFError, OSError):  # the parent has ended
                return
            if function is not None:
                answer = answer_of(function, context, message)
                continue
            try:
                function, context = from_bytes(message)
            except Exception as error:
                answer = error_answer(error)
