"""Runs a function over items in worker processes; results come back in the items' order."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from millrace.errors import MillraceError

Item = TypeVar("Item")
Result = TypeVar("Result")

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def ordered_map(
    function: Callable[[Any, Item], Result],
    items: Iterable[Item],
    *,
    context: Any,
    workers: int,
) -> Iterator[Result]:
    """Yields function(context, item) for each item, in order.

    At most 3 items for each worker are on their way, so that memory is bounded however long
    `items` is. With one worker the work is done in this process. Worker processes are spawned:
    a script that calls this needs the usual `if __name__ == "__main__"`.

    Args:
        context: what every call needs; it is sent to each worker once.
        workers: number of processes, at least 1.

    Raises:
        MillraceError: a worker process died.
    """
    if workers == 1:
        for item in items:
            yield function(context, item)
        return
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(context, os.getpid()),
    )
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(_call, function, item))
            if len(waiting) >= 3 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise MillraceError(
            "a worker process died: it was killed, or the machine ran out of memory. "
            "Run again, with fewer workers if memory is short"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_context: Any = None


def _start_worker(context: Any, parent: int) -> None:
    global _context
    _context = context
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker is one core's; threads would compete
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which ends the pool
    if sys.platform == "linux":
        # A parent that is killed cannot end its workers: let the kernel do it.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was killed before we got here
        os._exit(1)


def _call(function: Callable[[Any, Item], Result], item: Item) -> Result:
    return function(_context, item)
