"""Records in JSON files: values that are checked against the annotations of a dataclass.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True, kw_only=True)
    ... class Shard:
    ...     name: str
    ...     num_tokens: Count
    ...     sizes: tuple[int, ...] = ()
    >>> record_from(Shard, {"name": "a", "num_tokens": 3, "sizes": [1, 2]})
    Shard(name='a', num_tokens=3, sizes=(1, 2))
    >>> record_from(Shard, {"name": "a", "num_tokens": -3}, "shards[0]")
    Traceback (most recent call last):
    ValueError: shards[0].num_tokens must be a whole number between 0 and 2**63 - 1, not -3

The caller adds the path of the file and the remedy, and checks what concerns several fields. An
annotation may be `int`, `float`, `str`, `bool`, `Any`, a dataclass, a `Literal`, a `list`, `tuple`
or `dict` of these, one `| None`, or `Annotated[int, Limits(least, most)]`.
"""

import dataclasses
import functools
import itertools
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union

from millrace.checks import MAX_INT64, NOTHING, place_of, shown

T = TypeVar("T")

Read = Callable[[Any, tuple[Any, ...]], Any]
"""A function of a value and its place that returns the value in a type, or raises ValueError."""


class Limits(NamedTuple):
    """The least and the largest value of a whole number."""

    least: int
    most: int


Count = Annotated[int, Limits(0, MAX_INT64)]
"""A number of things."""


def record_from(kind: type[T], value: Any, name: str = "the record") -> T:
    """The dataclass of a JSON object; entries that the dataclass does not have are left out.

    Args:
        kind: The dataclass.
        value: What `json.loads` has returned.
        name: What to call the value in a message.

    Raises:
        ValueError: A missing entry, or a value of another type or outside its limits.
    """
    record: T = _reader(kind)(value, (name,))  # type: ignore[arg-type]
    return record


_PLAIN = {int: "a whole number", str: "a text", bool: "true or false", type(None): "null"}


@functools.cache
def _reader(kind: Any) -> Read:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return _plain("a value", lambda value: value is not NOTHING)
    if kind in _PLAIN:
        return _plain(_PLAIN[kind], lambda value: type(value) is kind)
    if kind is float:
        return _plain("a number", lambda value: type(value) in (int, float))
    if dataclasses.is_dataclass(kind):
        return _record(kind)
    if origin is Annotated:
        least, most = arguments[1]
        needed = f"a whole number between {least} and {'2**63 - 1' if most == MAX_INT64 else most}"
        return _plain(needed, lambda value: type(value) is int and least <= value <= most)
    if origin is Literal:
        return _plain(f"one of {arguments}", lambda value: value in arguments)
    if origin in (Union, types.UnionType):
        (read,) = (_reader(one) for one in arguments if one is not type(None))
        return lambda value, place: None if value is None else read(value, place)
    if origin in (list, tuple):
        return _list(origin, [_reader(one) for one in arguments if one is not ...])
    if origin is dict:
        entry, check = _reader(arguments[1]), _plain("an object", _is_object)
        return lambda value, place: {
            key: entry(one, (*place, key)) for key, one in check(value, place).items()
        }
    raise TypeError(f"{kind} is not the type of a value of a record")


def _plain(needed: str, is_valid: Callable[[Any], bool]) -> Read:
    def read(value: Any, place: tuple[Any, ...]) -> Any:
        if not is_valid(value):
            raise ValueError(f"{place_of(place)} must be {needed}, not {shown(value, 80)}")
        return value

    return read


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _list(kind: Callable[[Any], Any], entries: list[Read]) -> Read:
    length = None if len(entries) == 1 else len(entries)
    check = _plain(
        "a list" if length is None else f"a list of {length}",
        lambda value: isinstance(value, list) and length in (None, len(value)),
    )

    def read(value: Any, place: tuple[Any, ...]) -> Any:
        pairs = zip(itertools.cycle(entries), check(value, place), strict=False)
        return kind([entry(one, (*place, i)) for i, (entry, one) in enumerate(pairs)])

    return read


def _record(kind: Any) -> Read:
    types_of_fields = typing.get_type_hints(kind, include_extras=True)
    # A field without a default has MISSING in both places.
    fields = [
        (field.name, _reader(types_of_fields[field.name]), field.default is field.default_factory)
        for field in dataclasses.fields(kind)
        if field.init
    ]
    check = _plain("an object", _is_object)

    def read(value: Any, place: tuple[Any, ...]) -> Any:
        entries = check(value, place)
        return kind(
            **{
                name: read_one(entries.get(name, NOTHING), (*place, name))
                for name, read_one, is_needed in fields
                if is_needed or name in entries
            }
        )

    return read
