"""Values that are loaded at their first use.

There is no lock, which a fork beside a loading thread would leave locked for ever in the child:
two threads may both load a value.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Deferred(Generic[T]):
    """A value that is loaded at its first use, and again in each process it is sent to.

    Args:
        load: Function that returns the value, picklable where the value's owner is.
    """

    def __init__(self, load: Callable[[], T]) -> None:
        self._load = load
        self._values: list[T] = []  # the value, once it is loaded

    @classmethod
    def of(cls, value: T) -> "Deferred[T]":
        """A value that is there already. A pickle holds it."""
        return cls(partial(_same, value))

    @property
    def value(self) -> T:
        if not self._values:
            self._values = [self._load()]
        return self._values[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return Deferred, (self._load,)


class cached_property(functools.cached_property[T]):  # noqa: N801 - as Python's
    """Python's `cached_property`; before 3.12, that has one lock for all objects of a class."""

    def __get__(self, one: Any, owner: type[Any] | None = None) -> T:  # type: ignore[override]
        if one is None:
            return self  # type: ignore[return-value]
        return vars(one).setdefault(self.attrname, self.func(one))  # type: ignore[no-any-return]


def _same(value: T) -> T:
    return value
