"""Ctrl-C that leaves nothing half done."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Raises Ctrl-C in the block only once: in an `interruptible` block or at the end.

    Python raises KeyboardInterrupt between any two instructions: also before a new file or process
    is recorded, and again during the clean-up. Does nothing outside the main thread, where Python
    raises none, and if the program ignores Ctrl-C or ends at once.
    """
    previous = signal.getsignal(signal.SIGINT)
    if not callable(previous) or threading.current_thread() is not threading.main_thread():
        yield
        return
    held = _Held(previous)
    signal.signal(signal.SIGINT, held)
    try:
        yield
    except KeyboardInterrupt:
        held.is_waiting = False  # later signals meant the same
        raise
    finally:
        signal.signal(signal.SIGINT, previous)
        if held.is_waiting:
            previous(signal.SIGINT, None)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """A block in `interrupts_held` that Ctrl-C may end: the job does not need its rest."""
    held = signal.getsignal(signal.SIGINT)
    if not isinstance(held, _Held) or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        held.is_open = True
        if held.is_waiting:
            held.is_waiting = False
            held(signal.SIGINT, None)
        yield
    finally:
        held.is_open = False


def interrupt_once() -> None:
    """Ignores all but the first Ctrl-C, unless the program has its own handler."""
    is_over = False

    def raise_once(number: int, frame: FrameType | None) -> None:
        nonlocal is_over
        if not is_over:
            is_over = True
            raise KeyboardInterrupt

    def on_unraisable(dropped: "sys.UnraisableHookArgs") -> None:
        """Python drops what a finalizer raises: then the next Ctrl-C counts."""
        nonlocal is_over
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            is_over = False
        else:
            sys.__unraisablehook__(dropped)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, raise_once)
        sys.unraisablehook = on_unraisable


class _Held:
    """A signal handler that keeps signals for later."""

    def __init__(self, previous: Callable[[int, FrameType | None], Any]) -> None:
        self._previous = previous
        self.is_open = False
        self.is_waiting = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.is_open:
            self.is_waiting = True
            return
        self.is_open = False  # first: nothing interrupts the handling of the error
        self._previous(number, frame)
        self.is_open = True
