"""One run of a job: its lock, its journal, its tasks on an executor, and its publication.

Killed at any instant, the same command continues: tasks that are done do not run again.
`docs/design/README.md` has a job of 20 lines.
"""

import contextlib
import functools
import itertools
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, NamedTuple

from millrace.checks import check_path, plain_json
from millrace.engine import ray
from millrace.engine.journal import Journal, differences
from millrace.engine.progress import Progress
from millrace.engine.tasks import Executor, Function, Task, run_attempt, run_local
from millrace.errors import ConfigError, MillraceError
from millrace.files import fsync_folder, temporaries_of, write_file
from millrace.interrupts import interruptible, interrupts_held
from millrace.names import JOURNAL, RESULT
from millrace.storage import storage_of

ENGINES = ("local", "ray")

ALREADY = "the output is there already: the same command wrote it before"
"""What a job says when it returns an earlier result."""

_FORMAT = 1  # version of the file of a result


class Done(NamedTuple):
    """A finished task.

    Attributes:
        task: The task.
        record: Record that its function returned, in plain JSON values.
        folder: Folder of its files.
        is_kept: Whether an earlier run has done it.
    """

    task: Task
    record: Any
    folder: str
    is_kept: bool


_Line = OrderedDict[str, Done | MillraceError | None]
"""Answers of tasks, in the order in which the tasks were drawn; None: none yet."""


class Run:
    """One run of a job, in a `with` block; the docstring of this module shows one.

    The journal lies beside the output, in `PREFIX.journal`, until the output is published. The
    result stays in `PREFIX.job.info.json`: a finished command that runs again with the same inputs
    and options returns it. Inside the block Ctrl-C is taken only where nothing can be left half
    done: while tasks are drawn or waited for, and in `once` and `phase`.

    Args:
        prefix: First part of the paths of the output.
        job: Plain JSON values that decide the tasks and their files: a job that differs in them
            cannot continue.
        inputs: Plain JSON values that decide the rest of the output. A job that differs in them
            continues, and the tasks say what they depend on.
        outputs: Paths of files, or objects in buckets, without which the output is not whole.
        engine: "local" for worker processes, "ray" for a Ray cluster, or an `Executor`.
        restart: Whether to discard what an earlier run has done, and replace its output.
        on_restart: Function called before the journal of an earlier run is discarded.
        show_progress: Whether to show progress on stderr.

    Attributes:
        result: Result of an earlier run that has published the output; None if there is work to do.
        folder: Absolute path of the journal's folder of this run, where the tasks have theirs.
        scratch: Folder in `folder` for files of the job itself, empty at the start.
        identity: What decides the output: `job` and `inputs`.
        num_done, num_kept: Number of tasks that ran now, and that an earlier run had done.

    Raises:
        ConfigError: Output that is not of this job, or the journal of another job.
        MillraceError: Another process is at work on the job.
        OSError: The journal cannot be written.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        job: Mapping[str, Any],
        *,
        inputs: Mapping[str, Any] | None = None,
        outputs: Sequence[str] = (),
        engine: str | Executor = "local",
        restart: bool = False,
        on_restart: Callable[[], None] = lambda: None,
        show_progress: bool = False,
    ) -> None:
        self._prefix = check_path("prefix", prefix)
        self._job, details = plain_json([dict(job), dict(inputs or {})])
        self.identity = {**self._job, **details}
        self._outputs = outputs
        self._engine, self._show_progress = engine, show_progress
        self._start = restart, on_restart
        self.num_done = self.num_kept = 0
        self.result: Any = None

    def __enter__(self) -> "Run":
        restart, on_restart = self._start
        with contextlib.ExitStack() as stack:
            stack.enter_context(interrupts_held())
            journal = self._journal = Journal(self._prefix + JOURNAL)
            stack.callback(journal.close)
            for left in temporaries_of(self._prefix + RESULT):
                os.unlink(left)
            earlier = _read_result(self._prefix + RESULT)
            is_whole = earlier.get("outputs") == self._stats() != {}
            changes = differences(earlier.get("job"), self.identity)
            if restart:
                on_restart()
                journal.open(self._job, restart=True)
            elif is_whole and not changes:
                journal.remove_if_of(self._job)
                self.result = earlier["result"]
            elif not journal.open(self._job):
                reason = f", written by a command that differs: {changes}" if is_whole else ""
                for path in filter(os.path.exists, self._outputs):
                    raise ConfigError(
                        f"{path} is there already{reason}. Give --restart (restart=True) to "
                        "replace it, or another output"
                    )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    @property
    def folder(self) -> str:
        return self._journal.folder

    @property
    def scratch(self) -> str:
        return os.path.join(self.folder, "scratch")

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Returns what `make` returned in this run or an earlier one: plain JSON."""
        value = self.stored(name)
        if value is None:
            with interruptible():
                value = make()
            value = self._journal.store(name, value)
        return value

    def stored(self, name: str) -> Any:
        """The value under a name, or None."""
        return self._journal.value(name)

    def store(self, name: str, value: Any) -> None:
        """Stores a value, plain JSON, instead of an earlier one."""
        self._journal.store(name, value)

    @contextlib.contextmanager
    def phase(self, label: str) -> Iterator[Progress]:
        """A step of the job in this process, with a progress bar; Ctrl-C may end it."""
        with Progress(label, enabled=self._show_progress) as progress, interruptible():
            yield progress

    def note(self, text: str) -> None:
        """Shows a sentence that the user should read."""
        Progress("", enabled=self._show_progress).note(f"millrace: {text}")

    def map(
        self,
        function: Function,
        tasks: Iterable[Task],
        context: Any = None,
        *,
        phase: str,
        workers: int | None = None,
        total: int | None = None,
        report: Callable[[Done], tuple[int, str]] | None = None,
        keep: Callable[[Task, Any], bool] = lambda task, record: True,
        is_durable: bool = False,
    ) -> Iterator[Done]:
        """Runs a function on the tasks that are not done yet; yields all in the order of `tasks`.

        The function writes files into `task.folder`, which no other attempt has. It returns a
        record, plain JSON, and its files: their paths, or a dict from path to size and XXH3-64 if
        it has hashed them.

        A MillraceError of the function, or of drawing a task, is raised after all tasks before it
        were yielded, so that the error of a job does not depend on which task was fast.

        Args:
            function: Function of a context and a task, in an importable module.
            tasks: The tasks, drawn as workers become free.
            context: First argument of the function, sent to each worker once.
            phase: Label of the progress.
            workers: Number of worker processes; None: the engine chooses.
            total: Amount of all tasks together; None: their number, if it is known.
            report: Function of a finished task that the job has used: its amount of `total`, and a
                text beside the bar. None: each counts as one.
            keep: Function of a finished task and its record: whether it need not run again.
            is_durable: Whether the files of a task are on the disk when it is done. Those of other
                machines always are.
        """
        if total is None and isinstance(tasks, Sized):
            total = len(tasks)

        def work() -> Generator[Done, None, None]:
            amount = 0
            with Progress(phase, total, enabled=self._show_progress) as progress:
                on_ray = functools.partial(ray.run_ray, note=progress.note)
                engines: dict[Any, Any] = {"local": run_local, "ray": on_ray}
                executor = self._engine if callable(self._engine) else engines[self._engine]
                line: _Line = OrderedDict()
                new = self._new_tasks(tasks, keep, line)
                flushes = is_durable or self._engine != "local"
                arguments = function, context, self._journal.folder_of(""), flushes
                results = executor(run_attempt, arguments, new, workers=workers)
                # Closed at an error, too: the generators hold the input open.
                with contextlib.closing(new), contextlib.closing(results):
                    for done in self._in_order(results, line):
                        yield done
                        size, text = (1, "") if report is None else report(done)
                        if done.is_kept:
                            progress.skip(size)
                        else:
                            amount += size
                        progress.update(amount, text)

        results = work()
        self._stack.callback(results.close)  # if an error in the job's own loop ends it
        return results

    def _in_order(self, results: Iterable[tuple[Task, Any]], line: _Line) -> Iterator[Done]:
        """Puts results into the journal; yields or raises those that wait for none before them."""
        for result in itertools.chain(results, [None]):
            if result is not None:
                task, answer = result
                if not isinstance(answer, MillraceError):
                    attempt, record, sums = answer
                    record = self._journal.add(task.id, attempt, record, sums)
                    answer = Done(task, record, self._journal.folder_of(attempt), is_kept=False)
                    self.num_done += 1
                line[task.id] = answer
            while line and (answer := next(iter(line.values()))) is not None:
                line.popitem(last=False)
                if isinstance(answer, MillraceError):
                    raise answer
                yield answer

    def _new_tasks(
        self, tasks: Iterable[Task], keep: Callable[[Task, Any], bool], line: _Line
    ) -> Generator[Task, None, None]:
        """The tasks that must run; the others, and an error of the input, go into the line."""
        try:
            for task in tasks:
                line[task.id] = None
                known = self._journal.record(task.id)
                if known is not None and keep(task, known[0]):
                    line[task.id] = Done(task, *known, is_kept=True)
                    self.num_kept += 1
                else:
                    yield task
        except MillraceError as error:  # of reading the input, after what tasks have read
            line[""] = error
        finally:
            if isinstance(tasks, Generator):
                tasks.close()  # it may hold the input open, and an error may hold it

    def publish(self, make_public: Callable[[], None], result: Any) -> Any:
        """Publishes the output, stores the result beside it, and removes the journal.

        A run that is killed meanwhile continues: `make_public` may be called again.

        Args:
            make_public: Function that gives the files of the output their names, on the disk.
            result: Result of the job, in plain JSON values, which is returned.
        """
        result, path = plain_json(result), self._prefix + RESULT
        with interruptible():
            pass  # Ctrl-C may end the job here for the last time
        with contextlib.suppress(FileNotFoundError):  # it would speak of other output
            os.unlink(path)
            fsync_folder(path)
        make_public()
        content = {
            "format": _FORMAT,
            "job": self.identity,
            "outputs": self._stats(),
            "result": result,
        }
        write_file(path, json.dumps(content).encode())
        self._journal.remove()
        return result

    def _stats(self) -> dict[str, list[int]]:
        """Size and time of each file of the output; empty if one is missing."""
        with contextlib.suppress(FileNotFoundError):
            stats = {os.path.basename(path): storage_of(path).stat(path) for path in self._outputs}
            return {name: [identity.size, identity.time] for name, identity in stats.items()}
        return {}


def _read_result(path: str) -> dict[str, Any]:
    """What `Run.publish` has stored; empty if nothing can be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        content: dict[str, Any] = json.loads(Path(path).read_bytes())
        if content["format"] == _FORMAT:
            return content
    return {}
