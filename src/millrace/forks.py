"""What objects forget in a forked child (the parent's threads, and the locks that these hold), and
what threads of pools are told when Python ends."""

import concurrent.futures.thread  # noqa: F401  # its own function, which joins threads, runs last
import os
import threading
import weakref
from typing import Any

closing = threading.Event()  # set when Python ends: threads of pools begin and repeat nothing more
# Before the end of Python joins the threads of pools, which would wait for all retries.
threading._register_atexit(closing.set)  # type: ignore[attr-defined]


class Renewed:
    """An object whose copies, and whose twins in other processes, make some attributes anew.

    `after_fork` makes the attributes in `_renewed`, and `__init__` calls `renew`.
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


def watch_forks(one: Any) -> None:
    """Calls a living object's `after_fork` in each forked child, before other code runs there."""
    _objects[id(one)] = one  # not a set: an object may have no hash


_objects: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def _tell_all() -> None:
    for one in list(_objects.values()):
        one.after_fork()


os.register_at_fork(after_in_child=_tell_all)
