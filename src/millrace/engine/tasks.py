"""Tasks, the protocol of executors, and what executors and workers have in common."""

import os
import pickle
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from millrace.errors import ConfigError, MillraceError
from millrace.files import flush_to_disk, fsync_folder, naming, sum_of
from millrace.interrupts import interruptible


class Task(NamedTuple):
    """One step of a job, which runs in one process without the other steps.

    Attributes:
        number: Number of the task, or a pair of numbers; no two tasks of a job have the same.
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
    the disk before the task is done, because the job survives this machine. Returns the name of the
    attempt's folder, the record, and size and checksum of each file; or the function's
    MillraceError.
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
            name = os.path.relpath(file, path)
            if os.path.dirname(name):
                return ConfigError(f"{name} is not in {path}, the folder of {task}")
            size, digest = files[file] if isinstance(files, Mapping) else sum_of(file)
            if (size_now := os.path.getsize(file)) != size:
                return MillraceError(
                    f"{file} has {size_now} bytes, and {size} were written: another program has "
                    "changed it. Run again"
                )
            if is_durable:
                with naming(file), open(file, "rb") as written:
                    flush_to_disk(written)
            sums[name] = size, digest
    except MillraceError as error:
        return error
    if is_durable:
        fsync_folder(os.path.join(path, ""))
    return attempt, record, sums
