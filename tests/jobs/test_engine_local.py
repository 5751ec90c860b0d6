"""Tasks in worker processes: order, deaths, errors, and what a worker inherits."""

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.engine import Task, run_local
from millrace.errors import ConfigError, MillraceError, TextError
from tests.jobs import engine_functions as functions
from tests.jobs.engine_functions import HANG, PRELUDE, tasks_of
from tests.jobs.kills import workers_of


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_task_has_its_result(workers: int) -> None:
    tasks = tasks_of(*range(50))
    results = dict(run_local(functions.multiply, 3, iter(tasks), workers=workers))
    assert results == {task: 3 * task.payload for task in tasks}
    assert list(run_local(functions.multiply, 3, [], workers=workers)) == []
    assert workers_of(os.getpid()) == []


def test_large_contexts_payloads_and_many_small_tasks() -> None:
    sizes = [5_000_000, 1, 40_000, 3_000_000, 1 << 15, *range(100)]
    tasks = tasks_of(*map(bytes, sizes))
    context = bytes(20_000_000)
    results = dict(run_local(functions.size_of, context, tasks, workers=2))
    assert sorted(results.values()) == sorted(size + len(context) for size in sizes)


def test_tasks_are_drawn_at_most_two_per_worker_ahead() -> None:
    functions.assert_drawn_as_they_finish(run_local, 2, 2 * 2 + 1)


def test_tasks_run_at_the_same_time_and_come_back_as_they_finish() -> None:
    """Closing the iterator ends the workers at once."""
    results = run_local(functions.sleep, None, tasks_of(1000, 0, 0, 1000, 1000), workers=3)
    done = [next(results) for _ in range(2)]
    assert [task.number for task, _ in done] in ([1, 2], [2, 1])
    assert len(workers_of(os.getpid())) == 3
    results.close()
    assert workers_of(os.getpid()) == []


# ---- deaths ----


def test_a_task_is_tried_again_when_its_worker_dies(tmp_path: Path) -> None:
    results = run_local(functions.die_at_first, str(tmp_path), tasks_of(*range(3)), workers=2)
    attempts = {task.number: count for task, (count, _) in results}
    assert attempts == {number: 3 if number % 3 == 0 else 1 for number in range(3)}


@pytest.mark.parametrize(
    ("how", "attempts", "message"),
    [
        (signal.SIGKILL, 3, "was ended by signal 9 (Killed)"),
        (signal.SIGTERM, 1, "was ended by signal 15 (Terminated)"),
        ("abort", 1, "was ended by signal 6 (Aborted)"),
        ("exit", 1, "exited with status 3"),
    ],
)
def test_a_task_whose_worker_always_dies_is_an_error(how: Any, attempts: int, message: str) -> None:
    times = "3 times" if attempts == 3 else "once"
    text = re.escape(f"the worker process of task 0 (part 0) died {times}: it {message}")
    with pytest.raises(MillraceError, match=text):
        list(run_local(functions.die, how, tasks_of(0), workers=2, attempts=attempts))
    assert workers_of(os.getpid()) == []


def test_a_worker_that_leaves_a_process_behind_is_missed(tmp_path: Path) -> None:
    """The process holds the worker's socket, which therefore does not close."""
    start = time.monotonic()
    results = run_local(functions.fork_and_die, str(tmp_path), tasks_of(0), workers=2)
    assert [result for _, result in results] == ["second attempt"]
    assert time.monotonic() - start < HANG


# ---- errors ----


@pytest.mark.parametrize(("payload", "kind", "message"), functions.FAILURES)
def test_an_error_of_the_function_ends_the_job(
    payload: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        list(run_local(functions.fail, None, tasks_of("wait", payload), workers=2))
    if not isinstance(caught.value, (TextError, ConfigError)):
        assert "in fail" in str(caught.value.__cause__)  # the worker's traceback
    assert workers_of(os.getpid()) == []


def test_an_error_in_drawing_a_task_ends_the_job() -> None:
    def tasks() -> Iterator[Task]:
        yield Task(0, 1000)
        raise TextError("the input is gone")

    with pytest.raises(TextError, match="the input is gone"):
        list(run_local(functions.sleep, None, tasks(), workers=2))
    assert workers_of(os.getpid()) == []


def test_what_workers_cannot_load_is_refused() -> None:
    for workers in (0, -1, 1.5, "2"):
        with pytest.raises(ConfigError, match="workers must be"):
            list(run_local(functions.multiply, 2, [], workers=workers))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the function or its context cannot be sent"):
        list(run_local(lambda *_: 0, None, tasks_of(1), workers=2))
    with pytest.raises(ConfigError, match=r"task 0 \(part 0\) cannot be sent"):
        list(run_local(functions.multiply, 2, tasks_of(lambda: 0), workers=2))


# ---- what workers inherit ----


def test_libraries_in_workers_use_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RAYON_NUM_THREADS", "1"), ("TOKENIZERS_PARALLELISM", "false")):
        monkeypatch.delenv(name, raising=False)  # the command line sets it in its own process
        ((_, result),) = run_local(functions.environment, name, tasks_of(0), workers=2)
        assert result == value
        assert os.environ.get(name) != value


def run_script(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    options |= {"capture_output": True, "text": True, "timeout": HANG}
    return subprocess.run([sys.executable, "-c", PRELUDE + code], **options)


def test_output_of_workers_goes_to_stderr() -> None:
    """Also where Python holds back what goes to a pipe, and the worker is killed."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    result = run_script(
        "print([r for _, r in run_local(write_everywhere, None, [Task(0, 0)], workers=2)])",
        env=environment,
    )
    assert (result.returncode, result.stdout) == (0, "['done']\n")
    assert sorted(result.stderr.split("\n")) == ["", "on stderr", "on stdout"]


def test_too_few_descriptors_for_the_workers() -> None:
    result = run_script(
        "try: list(run_local(sleep, None, [Task(n, 1) for n in range(99)], workers=99))\n"
        "except Exception as error: print(error)",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16)),
    )
    assert re.fullmatch(
        r"worker process \d+ of 99 cannot be started: \[Errno 24\] Too many open files.*\. Run "
        r"again with fewer workers; workers=1 starts none\n",
        result.stdout,
    ), result


def test_a_script_needs_no_main_guard(tmp_path: Path) -> None:
    """Workers do not run the script that starts them, and cannot load what it defines."""
    code = "print(len(list(run_local(sleep, None, [Task(0, 0)] * 3, workers=2))))"
    assert run_script(code).stdout == "3\n"
    for name, other in (
        ("sleep", "def sleep(*_): pass\n" + code),
        ("Own", "class Own: pass\n" + code.replace("None", "Own()")),
    ):
        result = run_script(other)
        last = result.stderr.splitlines()[-1]
        assert last.startswith("millrace.errors.ConfigError: a worker process cannot load")
        assert name in last
        assert "into a module" in last
        assert result.stderr.count("Traceback") == 1


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # from Python 3.12 on
def test_a_forked_child_leaves_the_workers_alone() -> None:
    results = run_local(functions.sleep, None, tasks_of(0, 0.5, 0.5), workers=2)
    next(results)
    if (child := os.fork()) == 0:
        results.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert len(workers_of(os.getpid())) == 2
    assert len(list(results)) == 2


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_ends_the_job_and_its_workers(workers: int) -> None:
    pid = functions.assert_interruptible(
        "print('starts', flush=True)\n"
        "from millrace.interrupts import interrupts_held\n"
        "with interrupts_held():\n"
        f"    list(run_local(sleep, None, [Task(n, 9) for n in range(9)], workers={workers}))"
    )
    assert workers_of(pid) == []
