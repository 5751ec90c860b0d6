"""Ctrl-C that waits for the right moment, so that nothing is left half done."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Inside the block Ctrl-C is raised only once, in an `interruptible` block or at the end.

    Python raises KeyboardInterrupt between any two instructions: also just after a file or process
    was made and before it is recorded, and again during the clean-up. Does nothing outside the main
    thread, where Python raises none, and if the program ignores Ctrl-C or ends at once.
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
        held.is_waiting = False  # further signals meant the same
        raise
    finally:
        signal.signal(signal.SIGINT, previous)
        if held.is_waiting:
            previous(signal.SIGINT, None)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """A block that Ctrl-C may end, inside `interrupts_held`: the job does not need its rest."""
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
    """Lets only the first Ctrl-C count, unless the program has another answer than Python's."""
    is_over = False

    def raise_once(number: int, frame: FrameType | None) -> None:
        nonlocal is_over
        if not is_over:
            is_over = True
            raise KeyboardInterrupt

    def on_unraisable(dropped: "sys.UnraisableHookArgs") -> None:
        """Python drops what is raised while it runs a finalizer: then the next Ctrl-C counts."""
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
