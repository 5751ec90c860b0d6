"""One step: its place in the order of all samples, how its batch is made, and its error."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from millrace.checks import shown, whole
from millrace.errors import ConfigError, MillraceError
from millrace.feed.state import Position
from millrace.feed.streams import EndOfBatches, StreamDataset, StreamSampler
from millrace.samples.dataset import Dataset, batch_of_form
from millrace.samples.fields import BatchForm
from millrace.sampling import Sampler

_PARTS = ("sampler", "dataset", "prepare")  # of the work for a step, in their order


class Step(NamedTuple):
    """A step that was made, or could not be made.

    Attributes:
        before: The position before it.
        after: The position after it; None if it failed, or if there is no step left.
        batch: The rank's batch.
        error: Why it failed.
        cause: The part of the work that took the longest: "sampler", "dataset" or "prepare".
    """

    before: Position
    after: Position | None = None
    batch: Any = None
    error: BaseException | None = None
    cause: str = _PARTS[0]

    @property
    def is_end(self) -> bool:
        """Whether no step is left."""
        return self.after is None and self.error is None

    def result(self) -> Any:
        """The batch; raises the step's error."""
        if self.error is not None:
            raise self.error
        return self.batch


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
        dataset: Dataset | StreamDataset,
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

    def end_of(self, consumed_samples: int) -> int | None:
        """Number of samples consumed after the step that starts there; None at the end."""
        if not self.sampler.has_step(consumed_samples):
            return None
        end = self.sampler.consumed_after(consumed_samples)
        return whole("consumed_after", end, consumed_samples + 1)

    def step(self, before: Position) -> Step:
        """The step that starts there."""
        try:
            end = self.end_of(before.consumed_samples)
        except BaseException as error:
            return failed_step(before, error)
        return Step(before) if end is None else self.make(before, end)

    def make(self, before: Position, end: int) -> Step:
        """The step with these bounds."""
        marks: list[float] = []
        numbers = None
        try:
            with self.lock:
                marks.append(time.perf_counter())
                numbers = self.sampler.sample_numbers(before.consumed_samples)
                marks.append(time.perf_counter())
                batch, after = self._read(before, end, numbers)
                marks.append(time.perf_counter())
                if self.prepare is not None:
                    batch = self.prepare(batch)
            step = Step(before, after, batch)
        except EndOfBatches:
            return Step(before)
        except BaseException as error:
            step = failed_step(before, error, numbers)
        seconds = [end - start for start, end in pairwise([*marks, time.perf_counter()])]
        longest = max(range(len(seconds)), key=seconds.__getitem__, default=0)
        return step._replace(cause=_PARTS[longest])

    def _read(self, before: Position, end: int, numbers: NDArray[np.int64]) -> tuple[Any, Position]:
        """The arrays of a step, and the position after it."""
        if isinstance(self.dataset, StreamDataset):
            return self.dataset.read(before, cast(StreamSampler, self.sampler), self.form)
        return batch_of_form(self.dataset, numbers, self.form), Position(end)

    def is_making(self) -> bool:
        """Whether this thread is making a step."""
        is_locked_here = self.num_threads == 1 and self.lock._is_owned()  # type: ignore[attr-defined]
        return is_locked_here or getattr(worker, "maker", None) is self

    def check_thread(self) -> None:
        """Raises ConfigError in a thread that is making a step: it would wait for itself."""
        if self.is_making():
            raise ConfigError(
                "the dataset, sampler or `prepare` of a loader uses the same loader, whose thread "
                "would wait for itself: use it in `transform`"
            )


worker = threading.local()
"""Of a thread of a queue: `maker`, the `StepMaker` whose step it is making."""


def failed_step(
    before: Position, error: BaseException, numbers: NDArray[np.int64] | None = None
) -> Step:
    """A step with an error, which names the step and the samples that it belongs to."""
    place = f"in the step that starts at consumed_samples={before.consumed_samples}"
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
    return Step(before, error=error)
