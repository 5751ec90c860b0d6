"""Values that are loaded at their first use."""

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Deferred(Generic[T]):
    """A value that is loaded at its first use, and again in each process it is sent to.

    Args:
        load: Function that returns the value. It must be picklable where the value's owner is.
    """

    def __init__(self, load: Callable[[], T]) -> None:
        self._load = load
        self._values: list[T] = []  # the value, once it is loaded

    @classmethod
    def of(cls, value: T) -> "Deferred[T]":
        """A value that is there already: a pickle holds the value itself."""
        return cls(partial(_same, value))

    @property
    def value(self) -> T:
        # Without a lock, which a fork beside a thread that loads would leave locked for ever: two
        # threads may both load the value.
        if not self._values:
            self._values = [self._load()]
        return self._values[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return Deferred, (self._load,)


def _same(value: T) -> T:
    return value
