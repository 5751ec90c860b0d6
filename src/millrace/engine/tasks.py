"""What a task is, and what an executor does with tasks."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from millrace.errors import ConfigError, MillraceError
from millrace.interrupts import interruptible


class Task(NamedTuple):
    """One step of a job, which runs in one process without the other steps.

    Attributes:
        number: Number of the task, or a pair of numbers; no two tasks of a job have the same.
        payload: What the function needs for this task; picklable.
        name: Text that tells a user which part of the input this is, for error messages.
        folder: Folder for the files of this attempt; `Run.map` makes it.
    """

    number: Any
    payload: Any
    name: str = ""
    folder: str = ""

    @property
    def id(self) -> str:
        """The number as a text, which sorts like the numbers."""
        numbers = (self.number,) if isinstance(self.number, int) else self.number
        return "-".join(f"{number:06d}" for number in numbers)

    def __str__(self) -> str:
        return f"task {self.number} ({self.name})" if self.name else f"task {self.number}"


Function = Callable[[Any, Task], Any]
"""Called with the context and a task. A task may run twice, after a worker or a machine has died;
both runs must have the same effect."""


class Executor(Protocol):
    """Runs a function on tasks, several at a time."""

    def __call__(
        self, function: Function, context: Any, tasks: Iterable[Task], *, workers: int | None
    ) -> Generator[tuple[Task, Any], None, None]:
        """Yields each task and its result, in the order in which they finish.

        Args:
            function: A function of an importable module, not of the script that runs.
            context: First argument of every call; sent to each worker once.
            tasks: The tasks. They are drawn as workers become free, at most 2 per worker ahead.
            workers: Number of processes, at least 1; None: the executor chooses.

        Raises:
            ConfigError: A function, context or task that a worker cannot load.
            MillraceError: A task whose worker died in each of `ATTEMPTS` attempts.
            Exception: The error of the function, or of drawing a task. It ends the job at once.
        """


ATTEMPTS = 3
"""How often a task is tried whose worker dies. An error of the function is not tried again."""

ENVIRONMENT = {
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "FASTOKENS_BPE_THREADS": "1",
}
"""Environment variables of workers: threads of a library would compete with other workers."""


def interruptible_tasks(tasks: Iterable[Task]) -> Iterator[Task]:
    """The tasks; Ctrl-C is taken while the next one is drawn."""
    iterator = iter(tasks)
    while True:
        with interruptible():
            try:
                task = next(iterator)
            except StopIteration:
                return
        yield task


# ---- between processes ----


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
    """Restores the value of `to_bytes` in a worker."""
    try:
        return pickle.loads(data)
    except (AttributeError, ImportError) as error:
        raise ConfigError(
            f"a worker process cannot load the function or its data: {error}. Workers do not run "
            "the script that starts them: move its definitions into a module that they can import, "
            "or use one local worker"
        ) from None


def answer_of(function: Function, context: Any, task: bytes) -> bytes:
    """Runs the function on a pickled task, in a worker; the answer is for `result_of`."""
    try:
        return to_bytes("the result of a task", (function(context, from_bytes(task)), None))
    except Exception as error:
        return error_answer(error)


def error_answer(error: Exception) -> bytes:
    """An error as an answer, with its traceback unless it is a MillraceError."""
    trace = "" if isinstance(error, MillraceError) else traceback.format_exc()
    try:
        data = pickle.dumps((error, trace))
        pickle.loads(data)
    except Exception:  # an error whose class cannot be pickled, or not restored
        data = pickle.dumps((MillraceError(f"in a worker process: {error!r}"), trace))
    return data


def result_of(answer: bytes) -> Any:
    """The result in a worker's answer; raises the error in it."""
    value, trace = pickle.loads(answer)
    if trace is not None:
        raise value from (RuntimeError(trace) if trace else None)
    return value
