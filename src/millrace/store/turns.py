"""Turns: one caller at a time changes something, until it is closed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from millrace.errors import ConfigError
from millrace.interrupts import interrupts_held


class Turns:
    """Gives one thread at a time the right to change something of several parts.

    Args:
        name: What is changed, for messages.
        free: Function that discards it. It is called at least once after the last turn, and with
            Ctrl-C held back.

    Attributes:
        closed_because: Why there are no more turns; None: there are.
    """

    def __init__(self, name: str, free: Callable[[], None]) -> None:
        self._name, self._free = name, free
        self.closed_because: str | None = None
        self._lock = threading.Lock()
        self._holder: int | None = None

    @contextlib.contextmanager
    def take(self) -> Iterator[None]:
        """Holds the lock for work of several steps, which no other thread may see half-done.

        An error in the block closes the turns, as the work may be half-done. A ConfigError does
        not: it is raised before the first step.
        """
        if self._holder == threading.get_ident():
            raise ConfigError(
                f"{self._name} was called from within one of its own calls, perhaps by a signal "
                "handler: let the call end first"
            )
        with self._lock:
            try:
                self._holder = threading.get_ident()
                self.check_open()
                yield
            except BaseException as error:
                if not isinstance(error, ConfigError):
                    self.end(f"an addition failed: {error!r}")
                raise
            finally:
                self._holder = None
                if self.closed_because is not None:  # perhaps by `close` in a signal handler
                    self.end(self.closed_because)

    def check_open(self) -> None:
        """Raises ConfigError if there are no more turns."""
        if self.closed_because is not None:
            raise ConfigError(f"{self._name} is closed ({self.closed_because}); make another one")

    def close(self, reason: str) -> None:
        """Waits for the turn of another thread, and closes."""
        if self._holder == threading.get_ident():  # in a signal handler: the call ends first
            self.closed_because = self.closed_because or reason
            return
        with self._lock:
            self.end(reason)

    def end(self, reason: str) -> None:
        """Closes inside a turn."""
        self.closed_because = self.closed_because or reason
        with interrupts_held():  # a second Ctrl-C leaves nothing behind
            self._free()

    def leave_to_parent(self) -> None:
        """In a forked child: closes without freeing, and forgets the turns of other threads."""
        self._lock, self._holder = threading.Lock(), None
        self.closed_because = (
            self.closed_because or "it belongs to the process that this one was forked from"
        )

    def end_at_exit(self, limit: float) -> None:
        """Frees what is changed, if the turn of another thread ends within `limit` seconds.

        The lock stays taken: a daemon thread that comes later waits for the end of the process.
        """
        if self._lock.acquire(timeout=limit):
            with interrupts_held():
                self._free()
