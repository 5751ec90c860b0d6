"""What objects forget in a forked child: the threads of the parent, and the locks they hold."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol


class Forked(Protocol):
    """An object with something that a forked child cannot use."""

    def after_fork(self) -> None:
        """Forgets it; called in the child, before any other code."""
        ...


class ForkLock:
    """A lock that its thread may take again, and that is free in a forked child."""

    def __init__(self) -> None:
        self.after_fork()
        watch_forks(self)

    def after_fork(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def watch_forks(one: Forked) -> None:
    """Calls `after_fork` of an object in each forked child, as long as the object is in use."""
    _objects.add(one)


_objects: weakref.WeakSet[Forked] = weakref.WeakSet()


def _tell_all() -> None:
    for one in list(_objects):
        one.after_fork()


os.register_at_fork(after_in_child=_tell_all)
