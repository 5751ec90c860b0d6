"""Telling the storage what will be read next."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from millrace.sampling import Sampler

_PATIENCE = 64  # reads in a row from memory, by all threads, that end the prefetching
_DISTANCE = 256  # samples: what a disk, or an object store, serves side by side

_THREAD = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)


@runtime_checkable
class Prefetched(Protocol):
    """A dataset that can tell its storage which samples are read soon."""

    @property
    def is_remote(self) -> bool:
        """Whether the storage is not local, so that hints are worth their time always."""
        ...

    def prefetch(self, sample_numbers: Any) -> None:
        """Tells the storage that these samples are read soon, and does not wait for it."""
        ...


class LookAhead:
    """Prefetches the samples of coming steps, while reads go to the disk.

    Cold samples that are read in turn wait for the disk one after the other; those that the storage
    knows of are brought in side by side. For samples that are in memory the calls would cost more
    than reading them, so they are made only after a read that went to the disk, and for remote
    storage always.

    Args:
        dataset: The dataset; nothing is prefetched unless it is `Prefetched`.
        sampler: The sampler.
    """

    def __init__(self, dataset: Any, sampler: Sampler) -> None:
        self._dataset = dataset if isinstance(dataset, Prefetched) else None
        self._is_remote = self._dataset is not None and self._dataset.is_remote
        self._num_cold = 0  # reads that still prefetch
        self._sampler = sampler
        self._told: deque[tuple[int, int]] = deque()  # starts of steps, and their samples
        self._end = 0  # of these steps
        self._lock = threading.Lock()

    def read(self, position: int, work: Callable[[], Any]) -> Any:
        """Does work that reads samples; the samples from `position` on are read soon."""
        if self._dataset is None:
            return work()
        before = resource.getrusage(_THREAD).ru_inblock
        if self._is_remote or self._num_cold > 0:
            with contextlib.suppress(BaseException):  # the read itself will say what is wrong
                for numbers in self._coming(position):
                    self._dataset.prefetch(numbers)
        result = work()
        # A thread whose samples another thread has prefetched does not see the disk.
        has_read_disk = resource.getrusage(_THREAD).ru_inblock > before
        self._num_cold = _PATIENCE if has_read_disk else max(self._num_cold - 1, 0)
        return result

    def _coming(self, position: int) -> list[NDArray[np.int64]]:
        """The sample numbers, step by step, that the storage is not told of yet."""
        steps: list[NDArray[np.int64]] = []
        with self._lock:
            while self._told and self._told[0][0] < position:
                self._told.popleft()
            num_samples = sum(count for _, count in self._told)
            self._end = max(self._end, position)
            while num_samples < _DISTANCE and self._sampler.has_step(self._end):
                steps.append(self._sampler.sample_numbers(self._end))
                self._told.append((self._end, len(steps[-1])))
                num_samples += max(len(steps[-1]), 1)  # a rank's last step may be empty
                self._end = self._sampler.consumed_after(self._end)
        return steps
