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
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace.checks import shown, whole
from millrace.errors import ConfigError, MillraceError
from millrace.feed.datasets import Dataset, batch_of_form
from millrace.feed.fields import BatchForm
from millrace.feed.look_ahead import LookAhead
from millrace.feed.samplers import Sampler

_MAX_AHEAD = 32  # steps; more would only fill memory
_AHEAD_BYTES = 1 << 23  # how much is made ahead, where a step is small
_BLOCK_BYTES = 1 << 21  # how much one call of the core makes: it stays in a core's cache
# A trainer that comes back at once leaves a thread nothing to hide, and each wait of one thread for
# the other costs 50 us. After so many waits in a row it makes the steps itself, in half the time.
_MAX_RUSH = 8
_RUSH_GAP = 3e-5  # seconds: a trainer that takes longer for a step does not rush
_RUSH_WORK = 2e-3  # seconds: a call that takes longer may read from a disk, which threads hide
_PAUSE = 5e-3  # seconds without a step after which the threads go on
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


@dataclass(frozen=True)
class StepMaker:
    """Makes steps: which samples, their arrays, and what the caller prepares.

    Args:
        dataset: The dataset.
        sampler: The sampler.
        form: Arrays of a batch; None: those that the dataset's `batch` returns.
        prepare: Function of each batch, or None.
    """

    dataset: Dataset
    sampler: Sampler
    form: BatchForm | None
    prepare: Callable[[Any], Any] | None

    def claim(self, start: int, count: int) -> list[tuple[int, int]]:
        """The starts and ends of up to `count` steps from a position on; fewer at the end.

        An error of the sampler is raised only at the first step: a later step is claimed again.
        """
        steps: list[tuple[int, int]] = []
        try:
            while len(steps) < count and self.sampler.has_step(start):
                end = whole("consumed_after", self.sampler.consumed_after(start), start + 1)
                steps.append((start, end))
                start = end
        except BaseException:
            if not steps:
                raise
        return steps

    def step(self, start: int) -> tuple[Step | None, dict[str, float]]:
        """The step that starts there, or None at the end, and the seconds as of `make`."""
        try:
            bounds = self.claim(start, 1)
        except BaseException as error:
            return _failed_step(start, error), {}
        steps, seconds = self.make(bounds) if bounds else ([], {})
        return (steps[0] if steps else None), seconds

    def make(self, bounds: list[tuple[int, int]]) -> tuple[list[Step], dict[str, float]]:
        """The steps with these bounds, and the seconds that each part of the work took.

        Several steps are one batch of the dataset, cut into slices. They end with the first that
        fails; fewer steps without an error mean that the batches have ended.
        """
        clock = [time.perf_counter()]
        numbers: list[NDArray[np.int64]] = []
        try:
            numbers += [self.sampler.sample_numbers(start) for start, _ in bounds]
            clock.append(time.perf_counter())
            batches = self._batches(numbers)
            clock.append(time.perf_counter())
            if self.prepare is not None:
                batches = [self.prepare(batch) for batch in batches]
            clock.append(time.perf_counter())
            steps = [
                Step(start, end, batch) for (start, end), batch in zip(bounds, batches, strict=True)
            ]
        except EndOfBatches:
            steps = []
        except BaseException as error:
            if len(bounds) > 1:
                return self._make_in_turn(bounds)
            steps = [_failed_step(bounds[0][0], error, numbers)]
        clock += [time.perf_counter()] * (4 - len(clock))
        names = ("sampler", "dataset", "prepare")
        return steps, {name: clock[i + 1] - clock[i] for i, name in enumerate(names)}

    def _batches(self, numbers: list[NDArray[np.int64]]) -> list[Any]:
        if len(numbers) == 1:
            return [batch_of_form(self.dataset, numbers[0], self.form)]
        batch = batch_of_form(self.dataset, np.concatenate(numbers), self.form)
        ends = np.cumsum([len(part) for part in numbers]).tolist()
        if any(len(array) != ends[-1] for array in batch.values()):
            raise ValueError("an array of the batch is not by row: the steps are made one by one")
        return [
            {name: array[start:end] for name, array in batch.items()}
            for start, end in zip([0, *ends], ends, strict=False)
        ]

    def _make_in_turn(self, bounds: list[tuple[int, int]]) -> tuple[list[Step], dict[str, float]]:
        """Steps one by one, up to the first that fails."""
        steps: list[Step] = []
        seconds: dict[str, float] = {}
        for one in bounds:
            made, seconds = self.make([one])
            steps += made
            if not made or made[0].error is not None:
                break
        return steps, seconds

    def check_thread(self) -> None:
        """Raises ConfigError in a thread that makes these steps: it would wait for itself."""
        if getattr(_worker, "maker", None) is self:
            raise ConfigError(
                "the dataset, sampler or `prepare` of a loader uses the same loader, whose thread "
                "would wait for itself: use it in `transform`"
            )

    @property
    def is_plain(self) -> bool:
        """Whether the dataset's class says `takes_form`, not only one that it is derived from."""
        return bool(vars(type(self.dataset)).get("takes_form", False))

    def steps_per_call(self, step_bytes: int, most: int) -> int:
        """How many steps one call of the dataset makes: several, if they are small.

        Only datasets are cut whose class says `takes_form`: another one, also a class derived from
        ours, may pad a batch to its longest sample, for example.
        """
        can_cut = self.is_plain and (self.form is None or self.form.has_rows)
        return max(1, min(_BLOCK_BYTES // max(step_bytes, 1), most)) if can_cut else 1


class Ahead:
    """Steps in their order, made by threads before they are asked for.

    A thread claims the next steps under the lock and makes them without it. The queue takes at most
    `prefetch` steps, those in work included. After a step that failed no other is made.

    If the trainer rushes (see `_MAX_RUSH`), it claims and makes the next steps in its own thread,
    and the threads pause. That is ruled out by a given `prefetch`, several threads, `prepare`, a
    watchdog, remote storage, and a dataset of another class.

    Args:
        maker: What makes the steps.
        start: Number of samples consumed before the first step.
        prefetch: Number of steps made ahead at most; None: 2, or more if they are small.
        num_threads: Number of threads.

    Attributes:
        position: Number of samples consumed before the next step that is handed out; -1 if there
            is no other: after `close`, after a step that failed, and after an interruption (Ctrl-C)
            at an instant that leaves the queue in an unknown state.
    """

    def __init__(
        self, maker: StepMaker, start: int, prefetch: int | None, num_threads: int
    ) -> None:
        self._maker = maker
        self.position = self._next_claim = start
        self._is_automatic = prefetch is None
        self._limit = max(2, 2 * num_threads) if prefetch is None else prefetch
        self._look_ahead = LookAhead(maker.dataset, maker.sampler)
        self._num_threads = num_threads
        self._steps_per_call = 1
        self._lock = threading.RLock()  # `close` may be called by a garbage collection under it
        self._news = threading.Lock()  # what `take` waits for: `_tell` releases it
        self._news.acquire()
        self._has_room = threading.Condition(self._lock)
        self._blocks: dict[int, tuple[list[Step], dict[str, float]]] = {}  # by number, if ready
        self._first_block = self._num_blocks = 0  # the next one to hand out, and to claim
        self._num_steps = 0  # claimed, and not handed out
        self._is_over = self._is_closed = False
        self._steps: deque[Step] = deque()  # of the block that is handed out
        self._can_rush = (
            (prefetch, num_threads, maker.prepare) == (None, 1, None)
            and maker.is_plain  # another dataset may rely on one thread
            and not self._look_ahead.is_remote
        )
        self._rush = 0  # waits in a row; from _MAX_RUSH on the threads pause
        self._last_take, self._num_taken = 0.0, 1  # when the last block was taken, and its steps
        self._process = os.getpid()
        self._threads: list[threading.Thread] = []
        _open.add(self)

    def start(self) -> None:
        """Starts the threads that do not run yet.

        Raises:
            ConfigError: The system refuses another thread.
        """
        while len(self._threads) < self._num_threads:
            name = f"millrace-loader-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            try:
                thread.start()
            except BaseException as error:  # at Ctrl-C the thread may run or not
                self.close()
                if isinstance(error.__context__, KeyboardInterrupt):  # Ctrl-C inside `start`
                    raise error.__context__ from None
                if not isinstance(error, RuntimeError):
                    raise
                raise ConfigError(
                    f"thread {len(self._threads) + 1} of {self._num_threads} does not start: "
                    f"{error}. Lower `threads`, raise the limit on processes (ulimit -u), or pass "
                    "prefetch=0"
                ) from None
            self._threads.append(thread)

    def take(self, stats: WaitStats, watchdog: float | None) -> Step | None:
        """The next step, perhaps one with an error; None if there is no other.

        Raises:
            ConfigError: The queue was closed.
        """
        if not self._steps and not self._take_block(stats, watchdog):
            return None
        step = self._steps[0]
        self.position = step.end  # first: Ctrl-C may come between any two lines
        return self._steps.popleft()

    def _take_block(self, stats: WaitStats, watchdog: float | None) -> bool:
        """Waits for the next block and takes its steps; False at the end."""
        begin, has_waited = time.perf_counter(), False
        can_rush = self._can_rush and watchdog is None
        if self._rush and begin - self._last_take > _RUSH_GAP * self._num_taken:
            with self._lock:
                self._rush = 0
                self._has_room.notify_all()
        while not self._is_answered():
            has_waited = True
            if self._rush >= _MAX_RUSH and self._make_here():
                continue
            limit = None if watchdog is None else begin + watchdog - time.perf_counter()
            # A plain lock: Ctrl-C in a Condition's `wait` can leave its lock in the wrong state.
            if not self._news.acquire(timeout=-1 if limit is None else max(limit, 0)):
                print_stacks(watchdog)
                watchdog = None  # once for each batch
        with self._lock:
            if self._is_closed:
                raise ConfigError("the loader was closed while a batch was asked for")
            steps, seconds = self._blocks.get(self._first_block, ([], {}))
            if not steps:
                return False
            if has_waited:
                cause = max(seconds, key=seconds.__getitem__, default="sampler")
                stats.add_wait(time.perf_counter() - begin, cause)
            self.position = -1  # until `take` knows it: see there
            del self._blocks[self._first_block]
            self._first_block += 1
            self._num_steps -= len(steps)
            self._steps.extend(steps)
            is_rush = has_waited and can_rush and sum(seconds.values()) < _RUSH_WORK
            self._rush = self._rush + 1 if is_rush else 0
            self._last_take, self._num_taken = time.perf_counter(), len(steps)
            if self._rush < _MAX_RUSH:
                self._has_room.notify_all()
            return True

    def _make_here(self) -> bool:
        """Makes the next block in this thread; False if a thread of the queue is making it."""
        with self._lock:
            if self._first_block < self._num_blocks:
                return False
        _worker.maker = self._maker
        try:
            claim = self._claim_block()
            if claim is not None:
                self._make_block(*claim)
        except BaseException:  # Ctrl-C may have come after the claim
            self.close()
            raise
        finally:
            _worker.maker = None
        return True

    def _is_answered(self) -> bool:
        """Whether the next block is there, or will never be."""
        with self._lock:
            is_end = self._is_over and self._first_block == self._num_blocks
            return self._is_closed or is_end or self._first_block in self._blocks

    def _tell(self) -> None:
        """Wakes the thread that waits in `take`. The caller has the lock."""
        with contextlib.suppress(RuntimeError):  # it is released already
            self._news.release()

    def _work(self) -> None:
        _worker.maker = self._maker
        while (claim := self._claim()) is not None:
            self._make_block(*claim)

    def _make_block(self, number: int, bounds: list[tuple[int, int]]) -> None:
        try:
            make = partial(self._maker.make, bounds)
            steps, seconds = self._look_ahead.read(bounds[-1][1], make)
            if number == 0 and steps:
                self._measure(steps[0])
        except BaseException as error:  # without it the trainer would wait for ever
            steps, seconds = [Step(bounds[0][0], -1, None, error)], {}
        with self._lock:
            self._blocks[number] = steps, seconds
            self._num_steps -= len(bounds) - len(steps)
            if len(steps) < len(bounds) or steps[-1].error is not None:
                self._is_over = True
                self._has_room.notify_all()
            self._tell()

    def _claim(self) -> tuple[int, list[tuple[int, int]]] | None:
        """The next block: its number and its steps; None if none is left to make."""
        with self._lock:
            while not (self._is_closed or self._is_over):
                room = self._limit - self._num_steps
                if self._rush >= _MAX_RUSH:
                    self._has_room.wait(_PAUSE)
                    if time.perf_counter() - self._last_take > _PAUSE:
                        self._rush = 0
                    continue
                # Whole blocks, unless the queue is empty: a call for few steps costs the same.
                if room >= self._steps_per_call or self._num_steps == 0:
                    break
                self._has_room.wait()
            return self._claim_block()

    def _claim_block(self) -> tuple[int, list[tuple[int, int]]] | None:
        with self._lock:
            if self._is_closed or self._is_over:
                return None
            number, start = self._num_blocks, self._next_claim
            try:
                bounds = self._maker.claim(start, self._steps_per_call)
            except BaseException as error:
                self._blocks[number] = [_failed_step(start, error)], {}
                self._num_blocks, self._num_steps, bounds = number + 1, self._num_steps + 1, []
            if bounds:
                self._num_blocks, self._num_steps = number + 1, self._num_steps + len(bounds)
                self._next_claim = bounds[-1][1]
                return number, bounds
            self._is_over = True
            self._has_room.notify_all()
            self._tell()
            return None

    def _measure(self, step: Step) -> None:
        """Chooses how much is made ahead, from the size of the first batch."""
        size = num_bytes(step.batch)
        if self._is_automatic and size > 0:
            self._limit = max(self._limit, min(_AHEAD_BYTES // size, _MAX_AHEAD))
        most = self._limit // (2 * self._num_threads)
        self._steps_per_call = self._maker.steps_per_call(size, most) if size > 0 else 1

    def close(self, wait: float | None = 0.0) -> None:
        """Ends the threads after the work that they have in hand.

        Args:
            wait: Seconds to wait for their end; None: no limit. A thread of the queue does not
                wait, nor does a signal handler that has interrupted the queue.
        """
        if self._process != os.getpid():  # a fork: the threads are not here, the lock may be held
            return
        with self._lock:
            self._is_closed = True
            self.position = -1
            self._blocks.clear()
            self._has_room.notify_all()
            self._tell()
        if wait == 0.0 or threading.current_thread() in self._threads or self._is_locked_here():
            return
        end = None if wait is None else time.monotonic() + wait
        for thread in self._threads:
            thread.join(None if end is None else max(end - time.monotonic(), 0.0))

    def _is_locked_here(self) -> bool:
        """Whether this thread holds the lock, which the others need for their end."""
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]


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
    start: int, error: BaseException, numbers: Sequence[NDArray[np.int64]] = ()
) -> Step:
    """A step with an error, which tells the step and the samples that it belongs to."""
    place = f"in the step that starts at consumed_samples={start}"
    if isinstance(error, StopIteration):  # it would end the trainer's loop
        stop, error = error, RuntimeError(f"StopIteration was raised {place}")
        error.__cause__ = stop
    with contextlib.suppress(Exception):  # an error that takes no more text stays as it is
        if numbers:
            place += f", sample numbers {shown(np.asarray(numbers[0]).tolist(), 80)}"
        if isinstance(error, MillraceError) and len(error.args) == 1:
            placed = type(error)(f"{error} ({place})")
            placed.__cause__, placed.__traceback__ = error.__cause__, error.__traceback__
            error = placed
        elif hasattr(error, "add_note") and place not in getattr(error, "__notes__", ()):
            error.add_note(place)  # not on Python 3.10
    return Step(start, -1, None, error)


_worker = threading.local()  # `maker`: whose steps this thread makes
_open: weakref.WeakSet[Ahead] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that is in the core when Python ends would end the process by a signal."""
    end = time.monotonic() + _EXIT_LIMIT
    queues = list(_open)
    for queue in queues:
        queue.close()
    for queue in queues:
        queue.close(max(end - time.monotonic(), 0.001))
