"""What objects forget in a forked child: the threads of the parent, and the locks they hold."""

import os
import threading
import weakref
from typing import Any, Protocol


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


class Renewed:
    """An object whose copies, and whose twins in other processes, make some attributes anew.

    `after_fork` makes those whose names are `_renewed`, and `__init__` calls `renew`.
    """

    _renewed: tuple[str, ...]

    def after_fork(self) -> None:
        raise NotImplementedError

    def renew(self) -> None:
        self.after_fork()
        watch_forks(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in self._renewed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.renew()


def watch_forks(one: Forked) -> None:
    """Calls `after_fork` of an object in each forked child, as long as the object is in use."""
    _objects.add(one)


_objects: weakref.WeakSet[Forked] = weakref.WeakSet()


def _tell_all() -> None:
    for one in list(_objects):
        one.after_fork()


os.register_at_fork(after_in_child=_tell_all)
