"""Steps: how one is made, and how threads make them ahead of their use."""

import atexit
import faulthandler
import os
import resource
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace.checks import check_int, shown
from millrace.errors import ConfigError, MillraceError
from millrace.feed.state import Position
from millrace.feed.stream_data import IN_TURN, EndOfBatches, StreamDataset
from millrace.files import checksum
from millrace.forks import Renewed
from millrace.samples.dataset import Dataset, batch_of_form
from millrace.samples.fields import FIELDS, BatchForm
from millrace.samples.tokens import Numbers
from millrace.sampling import Sampler

_PARTS = ("sampler", "dataset", "prepare")  # of the work for a step, in their order
_MAX_AHEAD = 32  # steps; more would only fill memory
_AHEAD_BYTES = 1 << 23  # made ahead, if steps are small
_EXIT_LIMIT = 10.0  # seconds that the end of Python waits for a read
_PATIENCE = 64  # reads in a row from memory, by all threads, after which prefetching ends
_DISTANCE = 256  # samples to prefetch: what a disk, or an object store, serves side by side


class Step(NamedTuple):
    """A step that was made, or could not be made."""

    before: Position
    after: Position | None = None  # None if it failed, or if there is no step left
    batch: Any = None
    error: BaseException | None = None
    cause: str = _PARTS[0]  # the part of the work that took the longest
    metrics: dict[str, float] | None = None  # of what is read in turn

    @property
    def is_end(self) -> bool:
        return self.after is None and self.error is None


@dataclass(eq=False, repr=False)
class StepMaker(Renewed):
    """Makes steps: with one thread under `lock`, as that of before a seek may still read."""

    dataset: Dataset | StreamDataset
    sampler: Sampler
    form: BatchForm | None
    prepare: Callable[[Any], Any] | None
    num_threads: int
    _renewed = ("lock",)

    def __post_init__(self) -> None:
        self.renew()

    def after_fork(self) -> None:
        self.lock: Any = threading.RLock() if self.num_threads == 1 else nullcontext()

    def outline(self, before: Position) -> Step:
        """The step that starts there without its batch, or with an error, or the end."""
        start = before.consumed_samples
        try:
            if not self.sampler.has_step(start):
                return Step(before)
            end = check_int("consumed_after", self.sampler.consumed_after(start), start + 1)
            return Step(before, Position(end))
        except BaseException as error:
            return failed_step(before, error)

    def step(self, before: Position) -> Step:
        outline = self.outline(before)
        return outline if outline.after is None else self.make(*outline[:2])

    def make(self, before: Position, after: Position | None) -> Step:
        batch: Any
        numbers: Any = None
        marks: list[float] = []
        try:
            with self.lock:
                marks.append(time.perf_counter())
                numbers = self.sampler.sample_numbers(before.consumed_samples)
                marks.append(time.perf_counter())
                if isinstance(self.dataset, StreamDataset):
                    batch, after = self.dataset.read(before, self.sampler, self.form)
                else:
                    batch = batch_of_form(self.dataset, numbers, self.form)
                # Now, as it cannot be read again, and the trainer may change it in place.
                metrics = batch_metrics(batch) if isinstance(self.dataset, IN_TURN) else None
                marks.append(time.perf_counter())
                if self.prepare is not None:
                    batch = self.prepare(batch)
            step = Step(before, after, batch, metrics=metrics)
        except EndOfBatches:
            return Step(before)
        except BaseException as error:
            step = failed_step(before, error, numbers)
        marks.append(time.perf_counter())
        seconds = [end - start for start, end in pairwise(marks)]
        _, cause = max(zip(seconds, _PARTS, strict=False), default=(0.0, _PARTS[0]))
        return step._replace(cause=cause)

    def is_making(self) -> bool:
        """Whether this thread is making a step."""
        is_locked_here: bool = self.num_threads == 1 and self.lock._is_owned()
        return is_locked_here or getattr(worker, "maker", None) is self

    def check_thread(self) -> None:
        if self.is_making():
            raise ConfigError(
                "the dataset, sampler or `prepare` of a loader uses it: use it in `transform`"
            )


worker = threading.local()  # of a thread of a queue: `maker`, whose step it is making


def failed_step(before: Position, error: BaseException, numbers: Any = None) -> Step:
    """A step with an error, which names the step and its samples."""
    place = f"in the step that starts at consumed_samples={before.consumed_samples}"
    if isinstance(error, StopIteration):  # it would end the trainer's loop
        stop, error = error, RuntimeError(f"StopIteration was raised {place}")
        error.__cause__ = stop
    with suppress(Exception):  # an error that takes no more text stays as it is
        if numbers is not None:
            place += f", sample numbers {shown(np.asarray(numbers).tolist(), 80)}"
        if isinstance(error, MillraceError) and len(error.args) == 1:
            placed = type(error)(f"{error} ({place})")
            placed.__cause__, placed.__traceback__ = error.__cause__, error.__traceback__
            error = placed
        elif hasattr(error, "add_note") and place not in getattr(error, "__notes__", ()):
            error.add_note(place)  # not on Python 3.10
    return Step(before, error=error)


def batch_metrics(batch: Any) -> dict[str, float]:
    """Tokens, the share of them that is trained on, and a checksum; nothing without arrays."""
    items = [(name, batch.get(name)) for name in FIELDS] if isinstance(batch, dict) else []
    arrays = {k: v for k, v in items if isinstance(v, np.ndarray) and v.dtype.kind in "biuf"}
    if "tokens" not in arrays:
        return {}
    metrics: dict[str, float] = {"tokens": arrays["tokens"].size}
    if "loss_mask" in arrays:
        metrics["trained_share"] = float(arrays["loss_mask"].sum()) / max(metrics["tokens"], 1)
    # Dashboards keep numbers as float64, which is exact up to 53 bits.
    metrics["checksum"] = int(checksum(map(np.ascontiguousarray, arrays.values())), 16) >> 11
    return metrics


def step_metrics(dataset: Any, numbers: Numbers) -> dict[str, float]:
    """The same of some samples, which are read for it; and tokens and epochs by source."""
    metrics = batch_metrics(getattr(dataset, "counted", dataset.batch)(numbers))
    sources = dataset.sources_of(numbers) if hasattr(dataset, "sources_of") else {}
    for name, (count, epochs) in sources.items():
        metrics[f"tokens/{name}"] = count * (metrics["tokens"] // max(len(numbers), 1))
        if epochs is not None:
            metrics[f"epoch/{name}"] = epochs
    return metrics


@dataclass
class WaitStats:
    """How long the trainer has waited for batches.

    Attributes:
        steps: Number of steps handed out.
        waited_steps: Number of steps that were not ready when asked for.
        seconds: Seconds of waiting in all.
        by_cause: Seconds of waiting by the longest part of the work: "sampler", "dataset" or
            "prepare".
    """

    steps: int = 0
    waited_steps: int = 0
    seconds: float = 0.0
    by_cause: dict[str, float] = field(default_factory=dict)

    def add_wait(self, seconds: float, cause: str) -> None:
        self.waited_steps += 1
        self.seconds += seconds
        self.by_cause[cause] = self.by_cause.get(cause, 0.0) + seconds


class StepQueue:
    """Steps in their order, made by threads before they are asked for.

    One thread at a time claims the next step; each makes its own. A step needs one of `prefetch`
    permits (None: 2 for each thread, or more if steps are small), which `take` gives back. A thread
    that waits for a permit does not know its queue, so an unused loader is collected. `position` is
    where the next step to hand out starts; -1 after `close`.
    """

    def __init__(self, maker: StepMaker, start: Position, prefetch: int | None) -> None:
        self._maker = maker
        self.position = start.consumed_samples
        self._next = start  # of the next step that a thread makes
        self._is_automatic = prefetch is None  # until the size of a step is known
        self._look_ahead = LookAhead(maker.dataset, maker.sampler, start.consumed_samples)
        self._claim_lock = threading.Lock()  # while the sampler is asked for a step
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
        """Starts the threads that are missing; ConfigError if the system refuses one."""
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
                    f"thread {len(self._threads) + 1} of {num_threads} does not start: {error}. "
                    "Lower `threads`, raise the limit (ulimit -u), or pass prefetch=0"
                ) from None
            self._threads.append(thread)

    def is_answered(self) -> bool:
        """Whether the next step is there, or will never be."""
        with self._lock:
            return self.position < 0 or self._steps.get(self.position) is not None

    def take(self) -> Step:
        """The next step. One that failed, or the end, stays the next one."""
        self._look_ahead.begin(self.position)
        while not self.is_answered():
            # A plain lock: Ctrl-C in a Condition's `wait` can leave its lock in the wrong state.
            self._signal.acquire()
        with self._lock:
            step = self._steps.get(self.position)
            if step is None:
                raise ConfigError("the loader was closed while a batch was asked for")
            if step.after is not None:
                self.position = step.after.consumed_samples  # first: Ctrl-C may come at any line
                self._steps.pop(step.before.consumed_samples, None)
                self._permits.put(True)
            return step

    def make_next(self) -> bool:
        """Makes the next step; False if no other is to be made."""
        with self._claim_lock:  # not the lock: a sampler that hangs must not hold up `close`
            if self._is_over:
                return False
            before, after, *_ = step = self._maker.outline(self._next)
            if after is None:
                return self._put(step)
            self._steps[before.consumed_samples], self._next = None, after
        worker.maker = self._maker
        try:
            with self._maker.lock:
                if self.position < 0:  # while an earlier queue's thread was still reading
                    return False
                make = partial(self._maker.make, before, after)
                step = self._look_ahead.read(before, after, make)
            self._measure(step.batch)
        except BaseException as error:  # without it the trainer would wait for ever
            step = Step(before, error=error)
        finally:
            worker.maker = None
        return self._put(step)

    def _put(self, step: Step) -> bool:
        """Keeps a step for `take`; False if it is the last."""
        with self._lock:
            self._is_over |= step.after is None
            if self.position >= 0:
                self._steps[step.before.consumed_samples] = step
            if step.after is not None and step.after.stream is not None:
                self._next = step.after  # one thread makes the steps of a stream
            self._wake()
            return step.after is not None

    def _wake(self) -> None:
        with suppress(RuntimeError):  # it is awake
            self._signal.release()

    def _measure(self, batch: Any) -> None:
        """Chooses how much is made ahead by the size of the first batch."""
        with self._lock:
            is_automatic, self._is_automatic = self._is_automatic, False
        if is_automatic and type(batch) is dict:
            size = sum(getattr(one, "nbytes", 0) for one in batch.values())  # tensors, too
            num_steps = min(_AHEAD_BYTES // size, _MAX_AHEAD) if size > 0 else 0
            for _ in range(num_steps - 2 * self._maker.num_threads):
                self._permits.put(True)

    def close(self, wait: float | None = 0.0) -> None:
        """Ends the threads after the step in hand; waits so many seconds, None: without limit, but
        not in a thread of the loader or a signal handler that interrupts the queue."""
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
    """What a thread does; only while it makes a step, it keeps the queue alive."""
    while permits.get() is True:  # a reference that has died ends it, too
        queue = queue_ref()
        if queue is None or not queue.make_next():
            break
        del queue
    permits.put(False)  # for the next thread


class LookAhead:
    """Prefetches the samples of coming steps, if the dataset has `prefetch`.

    For samples in memory the calls would cost more than reading them: they are made only after a
    read from the disk, and always for remote storage, there also for the step in hand. Until the
    trainer asks for a second step, remote storage is told of no other: all processes of a run begin
    at one time, and train once the slowest has its first step.
    """

    def __init__(self, dataset: Any, sampler: Sampler, start: int) -> None:
        self._prefetch: Any = getattr(dataset, "prefetch", None)
        self._is_remote = getattr(dataset, "is_remote", False)
        self._sampler = sampler
        self._distance = getattr(dataset, "look_ahead", 0) or _DISTANCE
        self._num_cold = 0  # reads that still prefetch
        self._told: deque[tuple[int, int]] = deque()  # starts of coming steps, and their sizes
        self._num_told = 0  # samples of these steps
        # Most samples to tell of. A quarter at a time: a call for a few costs as much as for many.
        self._all = self._distance + max(self._distance // 4, 1)
        self._limit = 1 if self._is_remote else self._all
        self._start = self._end = start  # of these steps
        self._lock = threading.Lock()  # no thread reads a step that another is about to announce

    def read(self, before: Position, after: Position, work: Callable[[], Any]) -> Any:
        """Does work that reads the samples of a step; those of later steps are read soon."""
        if self._prefetch is None:
            return work()
        position = (before if self._is_remote else after).consumed_samples
        num_blocks = resource.getrusage(resource.RUSAGE_THREAD).ru_inblock
        if self._is_remote or self._num_cold > 0:
            self._announce(position)
        result = work()
        # A thread whose samples another thread has prefetched does not see the disk.
        has_read_disk = resource.getrusage(resource.RUSAGE_THREAD).ru_inblock > num_blocks
        self._num_cold = _PATIENCE if has_read_disk else max(self._num_cold - 1, 0)
        return result

    def begin(self, position: int) -> None:
        """Tells of all coming steps, once the trainer asks for one behind the first."""
        if self._limit == 1 and position > self._start:
            self._limit = self._all
            self._announce(position)

    def _announce(self, position: int) -> None:
        """Tells of samples that the storage does not know of yet; of none at most steps."""
        steps: list[NDArray[np.int64]] = []
        with suppress(BaseException), self._lock:  # the read itself will say what is wrong
            while self._told and self._told[0][0] < position:
                self._num_told -= self._told.popleft()[1]
            self._end = max(self._end, position)
            limit = self._limit if self._num_told < self._distance else 0
            while self._num_told < limit and self._sampler.has_step(self._end):
                steps.append(self._sampler.sample_numbers(self._end))
                size = max(len(steps[-1]), 1)  # a rank's last step may be empty
                self._told.append((self._end, size))
                self._num_told += size
                self._end = max(self._sampler.consumed_after(self._end), self._end + 1)
            if steps:
                self._prefetch(np.concatenate(steps))


def _print_stacks(seconds: float) -> None:
    stream: Any = sys.__stderr__
    with suppress(AttributeError, OSError, ValueError):  # there is none, or it is closed
        stream.write(f"millrace: a batch takes more than {seconds:g} s; all threads:\n")
        stream.flush()
        faulthandler.dump_traceback(stream)


@contextmanager
def stacks_printed_after(seconds: float | None) -> Iterator[None]:
    """Prints what all threads are doing if the block takes longer; None: never.

    `faulthandler.dump_traceback_later` has one timer, which the program may use, and a lock that a
    forked child would wait for.
    """
    if seconds is None:
        yield
        return
    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), _print_stacks, [seconds])
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
    for queue in (queues := list(_open)):
        queue.close()
    for queue in queues:
        queue.close(max(end - time.monotonic(), 0.001))
