"""What has no sample numbers: batches that another program makes, in the same loader."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from millrace.checks import MAX_INT64, whole
from millrace.errors import ConfigError, ResumeError
from millrace.feed.steps import EndOfBatches
from millrace.forks import watch_forks

Batches = Iterable[Any] | Callable[[int], Iterable[Any]]


class ExternalBatches:
    """Any iterable of batches as a dataset of a `Loader` (Megatron-LM's `external`).

    It is its own sampler: `Loader(ExternalBatches(batches, samples_per_step=32))`. The loader reads
    it ahead, in one thread, and its state is the number of samples. The iterable gives one rank's
    batches, a step each; which samples they hold is its own affair.

    To resume, a function gets the number of consumed samples and returns the batches from there.
    Any other iterable is read from its beginning and its first batches are thrown away, which takes
    as long as reading them; an iterator, which cannot begin again, resumes only if it has not been
    read.

    Args:
        batches: Iterable of batches from the first step on, or function of consumed_samples that
            returns the batches from there on.
        samples_per_step: Number of samples that all ranks together take at a step.
        fingerprint: Plain values that tell these batches from others, for the loader's state.
        num_steps: Number of steps, if it is known; with fewer batches the end is an error.

    Raises:
        ConfigError: A number outside its limits, or batches that cannot be iterated.

    Example:
        >>> from millrace import Loader
        >>> batches = ExternalBatches(lambda consumed: range(consumed, 12, 4), samples_per_step=4)
        >>> loader = Loader(batches, consumed_samples=4)
        >>> list(loader), loader.consumed_samples
        ([4, 8], 12)
    """

    _iterator: Iterator[Any]
    _position: int  # of the iterator, or -1
    _failure: BaseException | None  # of the batches: the first one since a batch was read

    def __init__(
        self,
        batches: Batches,
        *,
        samples_per_step: int,
        fingerprint: dict[str, Any] | None = None,
        num_steps: int | None = None,
    ) -> None:
        if not (callable(batches) or isinstance(batches, Iterable)):
            raise ConfigError(
                f"batches is a {type(batches).__name__}; give an iterable of batches, or a "
                "function of consumed_samples that returns one"
            )
        self._batches = batches
        self._samples_per_step = whole("samples_per_step", samples_per_step, 1, MAX_INT64)
        self._fingerprint = {} if fingerprint is None else dict(fingerprint)
        most = MAX_INT64 // self._samples_per_step
        self._num_steps = None if num_steps is None else whole("num_steps", num_steps, 0, most)
        self._has_begun = False  # kept in copies, whose iterator stands where this one stood
        self.after_fork()
        watch_forks(self)

    # ---- a dataset ----

    def __len__(self) -> int:
        if self._num_steps is None:
            raise TypeError("the number of external batches is not known: pass num_steps")
        return self._num_steps * self._samples_per_step

    def batch(self, sample_numbers: ArrayLike) -> Any:
        """The batch of the step that starts at the first of these numbers.

        Raises:
            EndOfBatches: The batches have ended before.
            ResumeError: An iterator that has been read cannot begin again.
            ConfigError: The batches end before the first of these numbers.
        """
        start = int(np.asarray(sample_numbers)[0])
        with self._lock:
            try:
                iterator = self._iterator if start == self._position else self._open(start)
                self._position = -1  # unknown, if `next` fails
                self._iterator = iterator
                batch = next(iterator, self)
            except BaseException as error:
                if self._failure is None and not isinstance(error, ResumeError):
                    self._failure = error
                raise
            self._failure = None
            if batch is self:
                self._position = start  # the end stays the end
                self._check_end(start)
                raise EndOfBatches
            self._position = start + self._samples_per_step
            return batch

    def fingerprint(self) -> dict[str, Any]:
        """See `Dataset.fingerprint`."""
        return {"kind": "external", **self._fingerprint}

    # ---- a sampler ----

    def has_step(self, consumed_samples: int) -> bool:
        """Whether a step is left, as far as is known before it is read."""
        return self._num_steps is None or consumed_samples < len(self)

    def sample_numbers(self, consumed_samples: int) -> NDArray[np.int64]:
        """The numbers that all ranks' samples count as: int64 [samples_per_step]."""
        return np.arange(
            consumed_samples, consumed_samples + self._samples_per_step, dtype=np.int64
        )

    def consumed_after(self, consumed_samples: int) -> int:
        """The number of consumed samples after the step."""
        return consumed_samples + self._samples_per_step

    def consumed_at(self, step: int) -> int:
        """The number of samples consumed before a step."""
        return whole("step", step, 0) * self._samples_per_step

    def step_at(self, consumed_samples: int) -> int:
        """The number of the step that starts there."""
        self.check_position(consumed_samples)
        return consumed_samples // self._samples_per_step

    def check_position(self, consumed_samples: int) -> None:
        """Raises ConfigError where no step starts, and beyond the end if that is known."""
        if self._num_steps is not None and consumed_samples > len(self):
            raise ConfigError(
                f"consumed_samples is {consumed_samples}; the batches have {len(self)} samples "
                f"(num_steps={self._num_steps})"
            )
        if consumed_samples % self._samples_per_step != 0:
            raise ConfigError(
                f"consumed_samples is {consumed_samples}; external batches are of "
                f"{self._samples_per_step} samples: give a multiple"
            )

    def num_steps(self, consumed_samples: int = 0) -> int:
        """The number of steps from a position to the end; a TypeError if it is not known."""
        return max(len(self) - consumed_samples, 0) // self._samples_per_step

    # ---- the iterable ----

    def _open(self, start: int) -> Iterator[Any]:
        if callable(self._batches):
            return iter(self._batches(start))
        iterator = iter(self._batches)
        if iterator is self._batches and self._has_begun:
            cause = "" if self._failure is None else f" after {self._failure!r}"
            raise ResumeError(
                f"the batches are an iterator, which cannot go back to consumed_samples={start}"
                f"{cause}: give an iterable that can begin again, or a function of consumed_samples"
            ) from self._failure
        self._has_begun = True
        for step in range(start // self._samples_per_step):
            if next(iterator, self) is self:
                raise ConfigError(
                    f"consumed_samples is {start}; the batches end after "
                    f"{step * self._samples_per_step} samples: give the batches of the saved run"
                )
        return iterator

    def _check_end(self, start: int) -> None:
        if self._num_steps is not None:
            raise ConfigError(
                f"the batches end at or before consumed_samples={start}; num_steps="
                f"{self._num_steps} promises {len(self)} samples"
            )

    def __getstate__(self) -> dict[str, Any]:
        hidden = ("_lock", "_iterator", "_position", "_failure")
        return {name: value for name, value in vars(self).items() if name not in hidden}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.after_fork()
        watch_forks(self)

    def after_fork(self) -> None:
        """Forgets the reading of another process, whose thread may hold the lock."""
        self._lock = threading.Lock()
        self._iterator = iter(())
        self._position = -1
        self._failure = None
