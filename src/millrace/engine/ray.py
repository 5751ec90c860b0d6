"""Runs tasks on all machines of a Ray cluster, which share the file system of the output.

Every machine has millrace and the module of the function. Ray runs a task again if it loses the
worker or the machine.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from millrace import checks
from millrace.cores import available_cores
from millrace.engine.tasks import (
    ATTEMPTS,
    ENVIRONMENT,
    PAUSE,
    Answer,
    Function,
    Results,
    Task,
    answer_of,
    from_bytes,
    run_tasks,
    to_bytes,
)
from millrace.errors import ConfigError, MillraceError
from millrace.interrupts import interruptible

_ANSWER_TIME = 10.0  # seconds until a cluster answers
_CANCEL_TIME = 10.0  # seconds until cancelled tasks have ended


def run_ray(
    function: Function,
    context: Any,
    tasks: Iterable[Task],
    *,
    workers: int | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Results:
    """Runs a function on tasks on a Ray cluster; an `Executor` with its arguments and errors.

    Uses the Ray runtime of this process if there is one, and leaves it running. Otherwise joins the
    cluster that the environment variable RAY_ADDRESS names ("auto": one on this machine), and
    leaves it at the end. Without that variable, starts a cluster on this machine, and ends it. Jobs
    in several threads at once need a runtime that was started before them.

    Each task takes one CPU. Close the iterator to cancel what runs. Inside `interrupts_held`,
    Ctrl-C is taken while this waits for tasks or results.

    Args:
        function, context, tasks: As of any `Executor`.
        workers: Number of tasks that the cluster has at a time, at least 1; None: twice its CPUs,
            so that a free CPU finds its next task there.
        note: Function of a sentence that says which cluster runs the tasks.

    Raises:
        ConfigError: No Ray, or a cluster that cannot be joined or started, or has no CPUs.
    """
    if workers is not None:
        workers = checks.check_int("workers", workers, 1)
    work = to_bytes("the function or its context", (function, context))
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            f"Ray cannot be loaded: {error}. Install it on every machine, "
            "`pip install 'millrace[ray]'`, or use the local engine"
        ) from None
    with _connected(ray) as where:
        num_cpus = int(ray.cluster_resources().get("CPU", 0))
        address = ray.get_runtime_context().gcs_address
        note(f"the tasks run on {where}, {address}, with {num_cpus} CPUs")
        limit = workers or 2 * num_cpus
        if limit == 0:
            raise ConfigError(
                "the Ray cluster has no CPUs for tasks: add machines to it, or give the number of "
                "workers if machines are added when tasks wait"
            )
        # In a list, a reference is sent to the worker instead of the bytes.
        key, work_references = os.urandom(8), [ray.put(work)]
        remote = ray.remote(num_cpus=1, max_retries=ATTEMPTS - 1, retry_exceptions=False)(_run)
        running: dict[Any, Task] = {}

        def submit(task: Task, data: bytes) -> None:
            running[remote.options(name=str(task)).remote(key, work_references, data)] = task

        try:
            yield from run_tasks(tasks, limit, submit, partial(_finished, ray, running))
        finally:
            _cancel(ray, list(running))


@contextlib.contextmanager
def _connected(ray: Any) -> Iterator[str]:
    """A block with a Ray runtime, which ends with the block if the process had none; its name."""
    if ray.is_initialized():
        yield "the Ray cluster of this process"
        return
    previous = signal.getsignal(signal.SIGTERM)  # Ray sets its own
    address, options, name = os.environ.get("RAY_ADDRESS"), {}, "the Ray cluster of RAY_ADDRESS"
    if not address:  # Ray itself would join any cluster that it finds
        address, options = "local", {"num_cpus": available_cores(), "include_dashboard": False}
        name = "a Ray cluster of this job, because RAY_ADDRESS names none"
    try:
        with interruptible():
            _check_address(address)
            ray.init(address, log_to_driver=False, logging_level="ERROR", **options)
    except (OSError, RuntimeError, ValueError) as error:
        text = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(
            f"no connection to a Ray cluster: {text}. Start one with `ray start --head`, and give "
            "its address in the environment variable RAY_ADDRESS; or use the local engine"
        ) from None
    try:
        yield name
    finally:
        ray.shutdown()
        if previous is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, previous)


def _check_address(address: str) -> None:
    """Raises a ConnectionError if nothing answers at HOST:PORT; leaves other addresses to Ray.

    Ray itself would try for 14 minutes, and ignore Ctrl-C meanwhile.
    """
    host, _, port = address.rpartition(":")
    if "/" in address or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_TIME).close()
    except OSError as error:
        raise ConnectionError(f"nothing answers at {address}: {error}") from None


def _finished(ray: Any, running: dict[Any, Task], seconds: float) -> Iterator[Answer]:
    """Takes a finished task; waits for it up to some seconds."""
    with interruptible():
        ready, _ = ray.wait(list(running), timeout=seconds)
    for reference in ready:
        task = running.pop(reference)
        try:
            with interruptible():
                answer = ray.get(reference)
        except ray.exceptions.RayError as error:
            text = " ".join(str(error).split())[:1000].rstrip(".")
            answer = MillraceError(
                f"{task} cannot be run on the Ray cluster: {type(error).__name__}: {text}. Install "
                "the same version of millrace on every machine, and use fewer CPUs per machine or "
                "smaller tasks if memory is short: a task whose worker or machine is lost is tried "
                f"{ATTEMPTS} times"
            )
        yield task, answer


def _cancel(ray: Any, references: list[Any]) -> None:
    """Ends tasks, and waits some seconds for their end."""
    deadline = time.monotonic() + _CANCEL_TIME
    while references and time.monotonic() < deadline:
        # Repeatedly: Ray may lose a request for a task that is just being started.
        for reference in references:
            ray.cancel(reference, force=True)
        _, references = ray.wait(references, num_returns=len(references), timeout=PAUSE)


# ---- in a worker ----

_loaded: tuple[bytes, Function, Any] | None = None  # the key, the function and its context


def _run(key: bytes, work_references: list[Any], data: bytes) -> bytes:
    """Runs a task; loads its function and context if the last task had others."""
    os.environ.update(ENVIRONMENT)  # before a library of the function looks at it

    def call() -> Any:
        global _loaded
        if _loaded is None or _loaded[0] != key:
            import ray

            _loaded = None  # the memory of the last context
            _loaded = key, *from_bytes(ray.get(work_references[0]))
        _, function, context = _loaded
        return function(context, from_bytes(data))

    return answer_of(call)
