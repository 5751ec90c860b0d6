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
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np

from millrace.errors import ConfigError
from millrace.feed.look_ahead import LookAhead
from millrace.feed.state import Position
from millrace.feed.steps import Step, StepMaker, failed_step, worker

_MAX_AHEAD = 32  # steps; more would only fill memory
_AHEAD_BYTES = 1 << 23  # how much is made ahead, where a step is small
_EXIT_LIMIT = 10.0  # seconds that the end of Python waits for a read


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


class StepQueue:
    """Steps in their order, made by threads before they are asked for.

    One thread at a time claims the next step; each makes its own. For each step it needs a
    permit; there are as many as steps may be ready or in work, and `take` gives one back. After a
    step that failed no other is made. A thread that waits for a permit does not know its queue, so
    that a loader that is no longer used is collected, also if its own dataset refers to it.

    Args:
        maker: What makes the steps, and in how many threads.
        start: The position before the first step.
        prefetch: Number of steps made ahead at most; None: 2 for each thread, or more if they are
            small.

    Attributes:
        position: Number of samples consumed before the next step that is handed out; -1 after
            `close`.
    """

    def __init__(self, maker: StepMaker, start: Position, prefetch: int | None) -> None:
        self._maker = maker
        self.position = start.consumed_samples
        self._next = start  # of the next step that a thread makes
        self._is_automatic = prefetch is None  # until the first step shows its size
        self._look_ahead = LookAhead(maker.dataset, maker.sampler)
        self._claim_lock = threading.Lock()  # of the thread that asks the sampler for a step
        self._lock = threading.RLock()  # `close` may be called by a signal handler under it
        self._signal = threading.Lock()  # what `take` waits for: `_wake` releases it
        self._signal.acquire()
        # Its methods are safe in a garbage collection and at Ctrl-C. False ends the threads.
        self._permits: SimpleQueue[Any] = SimpleQueue()
        for _ in range(2 * maker.num_threads if prefetch is None else prefetch):
            self._permits.put(True)
        self._steps: dict[int, Step | None] = {}  # by consumed_samples before them; None: in work
        self._is_over = False  # no other step is made
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

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self.position < 0

    def take(self, stats: WaitStats, watchdog: float | None) -> Step:
        """The next step. One that failed, or the end, stays the next one.

        Raises:
            ConfigError: The queue was closed.
        """
        begin, has_waited = time.perf_counter(), False
        while not self._is_answered():
            has_waited = True
            limit = None if watchdog is None else begin + watchdog - time.perf_counter()
            # A plain lock: Ctrl-C in a Condition's `wait` can leave its lock in the wrong state.
            if not self._signal.acquire(timeout=-1 if limit is None else max(limit, 0)):
                print_stacks(watchdog)
                watchdog = None  # once for each batch
        with self._lock:
            step = self._steps.get(self.position)
            if step is None:
                raise ConfigError("the loader was closed while a batch was asked for")
            if has_waited and not step.is_end:
                stats.add_wait(time.perf_counter() - begin, step.cause)
            if step.after is not None:
                self.position = step.after.consumed_samples  # first: Ctrl-C may come at any line
                self._steps.pop(step.before.consumed_samples, None)
                self._permits.put(True)
            return step

    def _is_answered(self) -> bool:
        """Whether the next step is there, or will never be."""
        with self._lock:
            return self.is_closed or self._steps.get(self.position) is not None

    def make_next(self) -> bool:
        """Makes the next step, in a thread of the queue; False if no other is to be made."""
        with self._claim_lock:  # not the lock: a sampler that hangs must not hold up `close`
            if self._is_over:
                return False
            before = self._next
            try:
                end = self._maker.end_of(before.consumed_samples)
            except BaseException as error:
                return self._put(failed_step(before, error))
            if end is None:
                return self._put(Step(before))
            self._steps[before.consumed_samples], self._next = None, Position(end)
        worker.maker = self._maker
        try:
            with self._maker.lock:
                if self.is_closed:  # while an earlier queue's thread was still reading
                    return False
                step = self._look_ahead.read(end, partial(self._maker.make, before, end))
            self._measure(step.batch)
        except BaseException as error:  # without it the trainer would wait for ever
            step = Step(before, error=error)
        finally:
            worker.maker = None
        return self._put(step)

    def _put(self, step: Step) -> bool:
        """Keeps a step for `take`; False if it is the last."""
        with self._lock:
            self._is_over = self._is_over or step.after is None
            if not self.is_closed:
                self._steps[step.before.consumed_samples] = step
            if step.after is not None and step.after.stream is not None:
                self._next = step.after  # one thread makes the steps of a stream
            self._wake()
            return step.after is not None

    def _wake(self) -> None:
        """Wakes the thread that waits in `take`. The caller has the lock."""
        with contextlib.suppress(RuntimeError):  # it is released already
            self._signal.release()

    def _measure(self, batch: Any) -> None:
        """Chooses how much is made ahead, from the size of the first batch."""
        with self._lock:
            is_automatic, self._is_automatic = self._is_automatic, False
        size = num_bytes(batch) if is_automatic else 0
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
            self._is_over, self.position = True, -1
            self._steps.clear()
            self._permits.put(False)
            self._wake()
        is_locked_here: bool = self._lock._is_owned()  # type: ignore[attr-defined]
        if wait == 0.0 or self._maker.is_making() or is_locked_here:
            return
        end = None if wait is None else time.monotonic() + wait
        for thread in self._threads:
            thread.join(None if end is None else max(end - time.monotonic(), 0.0))


def _work(queue_ref: weakref.ref[StepQueue], permits: SimpleQueue[Any]) -> None:
    """What a thread does, which keeps the queue alive only while it makes a step."""
    while permits.get() is True:  # a reference that has died ends it, too
        queue = queue_ref()
        if queue is None or not queue.make_next():
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


@contextlib.contextmanager
def stacks_printed_after(seconds: float | None) -> Iterator[None]:
    """Prints what all threads are doing if the block takes longer; None: it may take any time."""
    if seconds is None:
        yield
        return
    timer = threading.Timer(seconds, print_stacks, [seconds])
    timer.daemon = True
    try:
        timer.start()
        yield
    finally:
        timer.cancel()


_open: weakref.WeakSet[StepQueue] = weakref.WeakSet()
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
