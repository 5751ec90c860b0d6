"""What tests of the loader share: a dataset of numbers, its threads, forks and alarms."""

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.feed import Loader
from millrace.storage import gather_in_turn

AHEAD = pytest.mark.parametrize("prefetch", [0, 8])
FORKS = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


class Numbers:
    """Samples that are their own numbers; `work` is called for each batch, and may fail."""

    def __init__(self, size: int = 100, work: Callable[[Any], None] | None = None) -> None:
        self.size = size
        self.work = work

    def __len__(self) -> int:
        return self.size

    def batch(self, sample_numbers: Any) -> dict[str, Any]:
        if self.work is not None:
            self.work(sample_numbers)
        return {"tokens": np.asarray(sample_numbers).copy()}

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "numbers"}


def small_loader(work: Any = None, size: int = 100, **options: Any) -> Loader:
    """A loader of two numbers a step."""
    return Loader(Numbers(size, work), **{"micro_batch_size": 2, **options})


def firsts(batches: Iterable[Any]) -> list[int]:
    """The first number of each batch."""
    return [int(batch["tokens"][0]) for batch in batches]


class MemoryReader:
    """A reader of a file whose bytes it has in memory."""

    def __init__(self, path: Path | str) -> None:
        self.data = np.fromfile(path, np.uint8)
        self.size = len(self.data)

    def read(self, byte_offset: int, num_bytes: int) -> np.ndarray:
        return self.data[byte_offset : byte_offset + num_bytes]

    def gather(self, byte_offsets: np.ndarray, byte_counts: np.ndarray) -> np.ndarray:
        return gather_in_turn(self.read, byte_offsets, byte_counts)


def workers() -> list[threading.Thread]:
    """The threads of all loaders."""
    threads = [one for one in threading.enumerate() if one.name.startswith("millrace-loader")]
    return [thread for thread in threads if thread.is_alive()]


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def run_together(*functions: Callable[[], Any]) -> None:
    """Runs each function in a thread of its own, to its end."""
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def is_true_in_child(check: Callable[[], bool], before_wait: Callable[[], None] = int) -> bool:
    """Whether a check holds in a forked child, which may not wait for ever."""
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        os._exit(0 if check() else 1)
    before_wait()
    return os.waitpid(child, 0)[1] == 0


class Interruption:
    """A handler that raises KeyboardInterrupt, once for each time that it is made ready."""

    def __init__(self) -> None:
        self.is_ready, self.count = False, 0

    def __call__(self, *_: Any) -> None:
        if self.is_ready:
            self.is_ready = False
            self.count += 1
            raise KeyboardInterrupt


@contextlib.contextmanager
def alarms(handler: Callable[..., None], first: float, interval: float = 0.0) -> Iterator[None]:
    """Calls a handler by SIGALRM, in the main thread, as Ctrl-C would.

    Without garbage collections: Python drops an exception in one of their callbacks, and hypothesis
    has one.
    """
    gc.disable()
    old = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, first, interval)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
        gc.enable()
