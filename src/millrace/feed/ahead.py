"""Steps made ahead of their use: threads, and a bounded queue in the order of the steps."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace.checks import shown, whole
from millrace.errors import ConfigError, MillraceError
from millrace.feed.look_ahead import LookAhead
from millrace.feed.samplers import Sampler
from millrace.samples.datasets import Dataset, batch_of_form
from millrace.samples.fields import BatchForm

_MAX_AHEAD = 32  # steps; more would only fill memory
_AHEAD_BYTES = 1 << 23  # how much is made ahead, where a step is small
_EXIT_LIMIT = 10.0  # seconds that the end of Python waits for a read


class Step(NamedTuple):
    """A step that is ready.

    Attributes:
        start: Number of samples consumed before it.
        end: Number of samples consumed after it; -1 if it failed.
        batch: The rank's batch, or None if the step failed.
        error: Why it failed.
    """

    start: int
    end: int
    batch: Any
    error: BaseException | None = None


class EndOfBatches(Exception):  # noqa: N818 - not an error
    """Raised by `batch` of a dataset that learns only by reading that no step is left."""


@dataclass
class WaitStats:
    """How long the trainer has waited for batches.

    Attributes:
        steps: Number of steps that were handed out.
        waited_steps: Number of steps that were not ready when they were asked for.
        seconds: Seconds of waiting in all.
        longest: Seconds of the longest wait.
        first: Seconds of the wait for the first batch, which `seconds` includes.
        by_cause: Seconds of waiting by what took the longest in making the batch: "sampler",
            "dataset" or "prepare".
    """

    steps: int = 0
    waited_steps: int = 0
    seconds: float = 0.0
    longest: float = 0.0
    first: float | None = None
    by_cause: dict[str, float] = field(default_factory=dict)

    def add_wait(self, seconds: float, cause: str) -> None:
        """Counts the wait for one step."""
        self.waited_steps += 1
        self.seconds += seconds
        self.longest = max(self.longest, seconds)
        self.first = seconds if self.first is None else self.first
        self.by_cause[cause] = self.by_cause.get(cause, 0.0) + seconds


class StepMaker:
    """Makes steps: which samples, their arrays, and what the caller prepares.

    Args:
        dataset: The dataset.
        sampler: The sampler.
        form: Arrays of a batch; None: those that the dataset's `batch` returns.
        prepare: Function of each batch, or None.
        num_threads: Number of threads that may make steps at the same time. With 1, each step is
            made under `lock`, also after a seek, while the thread of before is still reading.
    """

    lock: contextlib.AbstractContextManager[Any]

    def __init__(
        self,
        dataset: Dataset,
        sampler: Sampler,
        form: BatchForm | None,
        prepare: Callable[[Any], Any] | None,
        num_threads: int = 1,
    ) -> None:
        self.dataset, self.sampler, self.form, self.prepare = dataset, sampler, form, prepare
        self.num_threads = num_threads
        self.renew()

    def renew(self) -> None:
        """Makes the lock anew, which a thread may hold that a fork has not taken along."""
        self.lock = threading.RLock() if self.num_threads == 1 else contextlib.nullcontext()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.renew()

    def end_of(self, start: int) -> int | None:
        """Number of samples consumed after the step that starts there; None at the end."""
        if not self.sampler.has_step(start):
            return None
        return whole("consumed_after", self.sampler.consumed_after(start), start + 1)

    def step(self, start: int) -> tuple[Step | None, dict[str, float]]:
        """The step that starts there, or None at the end, and the seconds as of `make`."""
        try:
            end = self.end_of(start)
        except BaseException as error:
            return _failed_step(start, error), {}
        return (None, {}) if end is None else self.make(start, end)

    def make(self, start: int, end: int) -> tuple[Step | None, dict[str, float]]:
        """The step with these bounds, and the seconds that each part of the work took.

        Instead of the step it is None if the dataset says that the batches have ended.
        """
        clock: list[float] = []
        numbers = None
        step: Step | None = None
        try:
            with self.lock:
                clock.append(time.perf_counter())
                numbers = self.sampler.sample_numbers(start)
                clock.append(time.perf_counter())
                batch: Any = batch_of_form(self.dataset, numbers, self.form)
                clock.append(time.perf_counter())
                if self.prepare is not None:
                    batch = self.prepare(batch)
            step = Step(start, end, batch)
        except EndOfBatches:
            pass
        except BaseException as error:
            step = _failed_step(start, error, numbers)
        clock += [time.perf_counter()] * (4 - len(clock))
        names = ("sampler", "dataset", "prepare")
        return step, {name: clock[i + 1] - clock[i] for i, name in enumerate(names)}

    def is_making(self) -> bool:
        """Whether this thread is making a step."""
        is_locked_here = getattr(self.lock, "_is_owned", bool)
        return getattr(_worker, "maker", None) is self or is_locked_here()

    def check_thread(self) -> None:
        """Raises ConfigError in a thread that is making a step: it would wait for itself."""
        if self.is_making():
            raise ConfigError(
                "the dataset, sampler or `prepare` of a loader uses the same loader, whose thread "
                "would wait for itself: use it in `transform`"
            )


class Ahead:
    """Steps in their order, made by threads before they are asked for.

    One thread at a time claims the next step; each makes its own. For each step it needs a
    permit; there are as many as steps may be ready or in work, and `take` gives one back. After a
    step that failed no other is made. A thread that waits for a permit does not know its queue, so
    that a loader that is no longer used is collected, also if its own dataset refers to it.

    Args:
        maker: What makes the steps, and in how many threads.
        start: Number of samples consumed before the first step.
        prefetch: Number of steps made ahead at most; None: 2 for each thread, or more if they are
            small.

    Attributes:
        position: Number of samples consumed before the next step that is handed out; -1 after
            `close`.
    """

    def __init__(self, maker: StepMaker, start: int, prefetch: int | None) -> None:
        self._maker = maker
        self.position = self._next_claim = start
        self._is_automatic = prefetch is None  # until the first step shows its size
        self._look_ahead = LookAhead(maker.dataset, maker.sampler)
        self._claim = threading.Lock()  # of the thread that asks the sampler for the next step
        self._lock = threading.RLock()  # `close` may be called by a signal handler under it
        self._news = threading.Lock()  # what `take` waits for: `_tell` releases it
        self._news.acquire()
        # Its methods are safe in a garbage collection and at Ctrl-C. False ends the threads.
        self._permits: SimpleQueue[Any] = SimpleQueue()
        for _ in range(2 * maker.num_threads if prefetch is None else prefetch):
            self._permits.put(True)
        # By start. None: in work. A step that is None: the end.
        self._steps: dict[int, tuple[Step | None, dict[str, float]] | None] = {}
        self._is_over = self._is_closed = False
        self._threads: list[threading.Thread] = []
        _open.add(self)

    def start(self) -> None:
        """Starts the threads that do not run yet.

        Raises:
            ConfigError: The system refuses another thread.
        """
        num_threads, permits = self._maker.num_threads, self._permits
        while len(self._threads) < num_threads:
            name = f"millrace-loader-{len(self._threads)}"
            queue = weakref.ref(self, permits.put)  # a callback in C: Ctrl-C cannot stop it
            thread = threading.Thread(target=_work, args=(queue, permits), name=name, daemon=True)
            try:
                thread.start()
            except BaseException as error:  # at Ctrl-C the thread may run or not
                self.close()
                if isinstance(error.__context__, KeyboardInterrupt):  # Ctrl-C inside `start`
                    raise error.__context__ from None
                if not isinstance(error, RuntimeError):
                    raise
                raise ConfigError(
                    f"thread {len(self._threads) + 1} of {num_threads} does not start: "
                    f"{error}. Lower `threads`, raise the limit on processes (ulimit -u), or pass "
                    "prefetch=0"
                ) from None
            self._threads.append(thread)

    def take(self, stats: WaitStats, watchdog: float | None) -> Step | None:
        """The next step; None at the end. A step that failed stays the next one.

        Raises:
            ConfigError: The queue was closed.
        """
        begin, has_waited = time.perf_counter(), False
        while not self._is_answered():
            has_waited = True
            limit = None if watchdog is None else begin + watchdog - time.perf_counter()
            # A plain lock: Ctrl-C in a Condition's `wait` can leave its lock in the wrong state.
            if not self._news.acquire(timeout=-1 if limit is None else max(limit, 0)):
                print_stacks(watchdog)
                watchdog = None  # once for each batch
        with self._lock:
            step, seconds = self._steps.get(self.position) or (None, {})
            if self._is_closed:
                raise ConfigError("the loader was closed while a batch was asked for")
            if step is None:
                return None
            if has_waited:
                cause = max(seconds, key=seconds.__getitem__, default="sampler")
                stats.add_wait(time.perf_counter() - begin, cause)
            if step.error is None:
                self.position = step.end  # first: Ctrl-C may come between any two lines
                self._steps.pop(step.start, None)
                self._permits.put(True)
            return step

    def _is_answered(self) -> bool:
        """Whether the next step is there, or will never be."""
        with self._lock:
            return self._is_closed or self._steps.get(self.position) is not None

    def _make_next(self) -> bool:
        """Makes the next step; False if no other is to be made."""
        with self._claim:  # and not the lock: a sampler that hangs must not hold up `close`
            if self._is_over:
                return False
            start = self._next_claim
            try:
                end = self._maker.end_of(start)
            except BaseException as error:
                return self._put(start, _failed_step(start, error), {})
            if end is None:
                return self._put(start, None, {})
            self._steps[start], self._next_claim = None, end
        _worker.maker = self._maker
        try:
            with self._maker.lock:
                if self._is_closed:  # while an earlier queue's thread was still reading
                    return False
                make = partial(self._maker.make, start, end)
                step, seconds = self._look_ahead.read(end, make)
            if step is not None:
                self._measure(step)
        except BaseException as error:  # without it the trainer would wait for ever
            step, seconds = Step(start, -1, None, error), {}
        finally:
            _worker.maker = None
        return self._put(start, step, seconds)

    def _put(self, start: int, step: Step | None, seconds: dict[str, float]) -> bool:
        """Keeps a step for `take`; False if it is the last."""
        with self._lock:
            is_last = step is None or step.error is not None
            self._is_over = self._is_over or is_last
            if not self._is_closed:
                self._steps[start] = step, seconds
            self._tell()
            return not is_last

    def _tell(self) -> None:
        """Wakes the thread that waits in `take`. The caller has the lock."""
        with contextlib.suppress(RuntimeError):  # it is released already
            self._news.release()

    def _measure(self, step: Step) -> None:
        """Chooses how much is made ahead, from the size of the first batch."""
        with self._lock:
            is_automatic, self._is_automatic = self._is_automatic, False
        size = num_bytes(step.batch) if is_automatic else 0
        if size > 0:
            num_steps = min(_AHEAD_BYTES // size, _MAX_AHEAD)
            for _ in range(num_steps - 2 * self._maker.num_threads):
                self._permits.put(True)

    def close(self, wait: float | None = 0.0) -> None:
        """Ends the threads after the step that they have in hand.

        Args:
            wait: Seconds to wait for their end; None: no limit. A thread that makes the loader's
                steps does not wait, nor does a signal handler that has interrupted the queue.
        """
        with self._lock:
            self._is_over = self._is_closed = True
            self.position = -1
            self._steps.clear()
            self._permits.put(False)
            self._tell()
        is_locked_here: bool = self._lock._is_owned()  # type: ignore[attr-defined]
        if wait == 0.0 or self._maker.is_making() or is_locked_here:
            return
        end = None if wait is None else time.monotonic() + wait
        for thread in self._threads:
            thread.join(None if end is None else max(end - time.monotonic(), 0.0))


def _work(queue_ref: weakref.ref[Ahead], permits: SimpleQueue[Any]) -> None:
    """What a thread does, which keeps the queue alive only while it makes a step."""
    while permits.get() is True:  # a reference that has died ends it, too
        queue = queue_ref()
        if queue is None or not queue._make_next():
            break
        del queue
    permits.put(False)  # for the next thread


def num_bytes(batch: Any) -> int:
    """The bytes of a batch that it does not share with other batches; 0 if that is unknown."""
    if type(batch) is not dict:
        return 0
    arrays = [array for array in batch.values() if isinstance(array, np.ndarray)]
    return sum(array.nbytes for array in arrays if array.flags.writeable)


def print_stacks(seconds: float | None) -> None:
    """Prints what all threads are doing to stderr, because a batch takes too long."""
    stream = sys.__stderr__
    if stream is not None:
        with contextlib.suppress(OSError, ValueError):  # it is closed
            message = f"millrace: a batch takes more than {seconds:g} s; all threads:"
            print(message, file=stream, flush=True)
            faulthandler.dump_traceback(stream, all_threads=True)


def _failed_step(
    start: int, error: BaseException, numbers: NDArray[np.int64] | None = None
) -> Step:
    """A step with an error, which tells the step and the samples that it belongs to."""
    place = f"in the step that starts at consumed_samples={start}"
    if isinstance(error, StopIteration):  # it would end the trainer's loop
        stop, error = error, RuntimeError(f"StopIteration was raised {place}")
        error.__cause__ = stop
    with contextlib.suppress(Exception):  # an error that takes no more text stays as it is
        if numbers is not None:
            place += f", sample numbers {shown(np.asarray(numbers).tolist(), 80)}"
        if isinstance(error, MillraceError) and len(error.args) == 1:
            placed = type(error)(f"{error} ({place})")
            placed.__cause__, placed.__traceback__ = error.__cause__, error.__traceback__
            error = placed
        elif hasattr(error, "add_note") and place not in getattr(error, "__notes__", ()):
            error.add_note(place)  # not on Python 3.10
    return Step(start, -1, None, error)


_worker = threading.local()  # `maker`: whose step this thread is making
_open: weakref.WeakSet[Ahead] = weakref.WeakSet()
os.register_at_fork(after_in_child=_open.clear)  # the threads are not there


@atexit.register
def _close_all() -> None:
    """A thread that is in the core when Python ends would end the process by a signal."""
    end = time.monotonic() + _EXIT_LIMIT
    queues = list(_open)
    for queue in queues:
        queue.close()
    for queue in queues:
        queue.close(max(end - time.monotonic(), 0.001))
