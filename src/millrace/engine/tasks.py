"""Tasks, what executors and workers have in common, and the executor of this machine.

A worker is a new Python process, which never runs the caller's script. A socket pair brings it the
function and the context once, and then tasks. Workers share no thread and no lock with each other
or with this process, so each can be killed at any instant, which is how all of them end. A worker
that dies for another reason is replaced, and its task is tried again.

Each worker has a thread here, so that it does not wait while a task is drawn or a result is used.
"""

import contextlib
import ctypes
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from multiprocessing.connection import Connection, Pipe
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

from millrace import checks
from millrace.cores import available_cores
from millrace.errors import ConfigError, MillraceError
from millrace.files import flush_to_disk, fsync_folder, naming, sum_of
from millrace.interrupts import interruptible


class Task(NamedTuple):
    """One step of a job, which runs in one process without the other steps.

    Attributes:
        number: Number of the task, or several numbers; no two tasks of a job have the same.
        payload: What the function needs for this task; picklable.
        name: Part of the input, as a text for error messages.
        folder: Folder for the files of this attempt; `Run.map` makes it.
    """

    number: Any
    payload: Any
    name: str = ""
    folder: str = ""

    @property
    def id(self) -> str:
        """The number as a text that sorts like the numbers."""
        numbers = (self.number,) if isinstance(self.number, int) else self.number
        return "-".join(f"{number:06d}" for number in numbers)

    def __str__(self) -> str:
        return f"task {self.number} ({self.name})" if self.name else f"task {self.number}"


Function = Callable[[Any, Task], Any]
"""Called with the context and a task; twice with the same effect, if a worker has died."""


Results = Generator[tuple[Task, Any], None, None]
Answer = tuple[Task, bytes | Exception]
"""A task, and its result or error as `result_of` takes it."""


class Executor(Protocol):
    """Runs a function on tasks, several at a time."""

    def __call__(
        self, function: Function, context: Any, tasks: Iterable[Task], *, workers: int | None
    ) -> Results:
        """Yields each task and its result, in the order in which they finish.

        Args:
            function: A function of an importable module, not of the script that runs.
            context: First argument of every call; sent to each worker once.
            tasks: The tasks, drawn as workers become free, at most 2 per worker ahead.
            workers: Number of processes, at least 1; None: the executor chooses.

        Raises:
            ConfigError: A function, context or task that a worker cannot load.
            MillraceError: A task whose worker died, or was lost, in each of `ATTEMPTS` attempts.
            Exception: The error of the function, or of drawing a task. It ends the job at once.
        """


ATTEMPTS = 3
"""How often a task is tried if its worker dies. An error of the function is not tried again."""

ENVIRONMENT = {
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "FASTOKENS_BPE_THREADS": "1",
}
"""Environment variables of workers: threads of a library would compete with other workers."""


PAUSE = 0.2  # seconds after which a wait for results lets Ctrl-C in
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_CHECK_AFTER = 1.0  # seconds without an answer, before a check that the worker lives


def interruptible_tasks(tasks: Iterable[Task]) -> Iterator[Task]:
    """The tasks; Ctrl-C is taken while the next one is drawn."""
    iterator = iter(tasks)
    while True:
        with interruptible():
            task = next(iterator, None)
        if task is None:
            return
        yield task


def run_tasks(
    tasks: Iterable[Task],
    limit: int,
    submit: Callable[[Task, bytes], None],
    receive: Callable[[float], Iterable[Answer]],
) -> Results:
    """The loop of an executor: yields each task and its result; at most `limit` are unfinished.

    `submit` begins a task, given as itself and pickled. `receive` returns the answers that have
    come, and waits up to a number of seconds for the first.
    """
    drawn, is_over, num_running = interruptible_tasks(tasks), False, 0
    while num_running or not is_over:
        if not is_over and num_running < limit:
            task = next(drawn, None)
            if task is None:
                is_over = True
                continue
            submit(task, to_bytes(str(task), task))
            num_running += 1
        for task, answer in receive(PAUSE if is_over or num_running == limit else 0.0):
            num_running -= 1
            yield task, result_of(answer)


def to_bytes(name: str, value: Any) -> bytes:
    """Pickles a value for another process."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{name} cannot be sent to another process: {error}. Use values that can be pickled, "
            "and functions and classes of an importable module; or use one local worker"
        ) from None


def from_bytes(data: bytes) -> Any:
    try:
        return pickle.loads(data)
    except (AttributeError, ImportError) as error:
        raise ConfigError(
            f"a worker process cannot load the function or its data: {error}. Workers do not run "
            "the script that starts them: move its definitions into a module that they can import, "
            "or use one local worker"
        ) from None


def answer_of(function: Callable[..., Any], *arguments: Any) -> bytes:
    """Calls a function in a worker; its result or its error, for `result_of`."""
    try:
        return to_bytes("the result of a task", (function(*arguments), None))
    except Exception as error:
        trace = "" if isinstance(error, MillraceError) else traceback.format_exc()
        try:
            data = pickle.dumps((error, trace))
            pickle.loads(data)
        except Exception:  # its class cannot be pickled, or not restored
            data = pickle.dumps((MillraceError(f"in a worker process: {error!r}"), trace))
        return data


def result_of(answer: bytes | Exception) -> Any:
    """The result in a worker's answer; raises the error in it."""
    if isinstance(answer, Exception):
        raise answer
    value, trace = pickle.loads(answer)
    if trace is not None:
        raise value from (RuntimeError(trace) if trace else None)
    return value


def run_attempt(work: tuple[Function, Any, str, bool], task: Task) -> Any:
    """Runs a task in a folder of its own, in a worker.

    `work` is the function, its context, the folder of all attempts, and whether files must be on
    the disk before the task is done. Returns the name of the attempt's folder, the record, and size
    and checksum of each file; or the function's MillraceError.
    """
    function, context, folder, is_durable = work
    attempt = f"{task.id}.{os.urandom(6).hex()}"
    path = os.path.join(folder, attempt)
    try:
        os.mkdir(path)
    except FileNotFoundError:
        return MillraceError(
            f"{folder} does not exist on {os.uname().nodename}. Either the job has ended or was "
            "started again while this task was at work, or this machine does not share the file "
            "system of the output: put the output on one that all machines share"
        )
    sums = {}
    try:
        record, files = function(context, task._replace(folder=path))
        for file in files:
            sum_ = files[file] if isinstance(files, Mapping) else sum_of(file)
            sums[os.path.relpath(file, path)] = sum_
            if is_durable:
                with naming(file), open(file, "rb") as written:
                    flush_to_disk(written)
    except MillraceError as error:
        return error
    if is_durable:
        fsync_folder(os.path.join(path, ""))
    return attempt, record, sums


# ---- workers of this machine ----


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
            f"from millrace.engine.tasks import work; work({theirs.fileno()}, {os.getpid()})"
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
        self._threads: list[threading.Thread] = []
        self._workers: list[_Worker] = []
        self._owner, self._is_closed = os.getpid(), False

    def submit(self, task: Task, data: bytes) -> None:
        self._tasks.put((task, data))
        if len(self._threads) < self._size:
            self._threads.append(threading.Thread(target=self._serve, daemon=True))
            self._threads[-1].start()

    def receive(self, seconds: float) -> list[Answer]:
        try:
            with interruptible():
                return [self._answers.get(timeout=seconds)]
        except Empty:
            return []

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
        while (item := self._tasks.get()) is not None and not self._is_closed:
            task, data = item
            answer: bytes | Exception = b""
            for _ in range(self._attempts):
                try:
                    if worker is None or worker.process.poll() is not None:
                        worker = self._start()
                    answer = worker.ask(data)
                    break
                except _DeathError as error:
                    if self._is_closed:
                        return
                    times = "once" if self._attempts == 1 else f"{self._attempts} times"
                    answer = MillraceError(
                        f"the worker process of {task} died {times}: it {_cause(*error.args)}"
                    )
                except Exception as error:  # it cannot be started, or cannot load the function
                    answer = error
                    break
            self._answers.put((task, answer))

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
