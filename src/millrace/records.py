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

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union

from millrace.checks import MAX_INT64, shown

T = TypeVar("T")


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
    try:
        record: T = _reader(kind).read(value)  # type: ignore[arg-type]
    except _MismatchError as error:
        place = "".join(reversed(error.place))
        raise ValueError(f"{name}{place} must be {error.needed}, not {error.shown}") from None
    return record


class _Reader(NamedTuple):
    """How to read the values of a type.

    Attributes:
        type: The type in words, for messages.
        read: Function that returns a value in the type, or raises _MismatchError.
    """

    type: str
    read: Callable[[Any], Any]


class _MismatchError(ValueError):
    """A value that is not of its type; `place` is extended on the way up, innermost part first."""

    def __init__(self, needed: str, shown: str) -> None:
        self.needed, self.shown = needed, shown
        self.place: list[str] = []

    def within(self, part: str) -> _MismatchError:
        self.place.append(part)
        return self


_PLAIN = {int: "a whole number", str: "a text", bool: "true or false", type(None): "null"}


@functools.cache
def _reader(kind: Any) -> _Reader:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return _Reader("a value", lambda value: value)
    if kind in _PLAIN:
        return _plain_reader(_PLAIN[kind], lambda value: type(value) is kind)
    if kind is float:
        return _plain_reader("a number", lambda value: type(value) in (int, float))
    if dataclasses.is_dataclass(kind):
        return _record_reader(kind)
    if origin is Annotated:
        return _limited_reader(*arguments)
    if origin is Literal:
        return _plain_reader(f"one of {arguments}", lambda value: value in arguments)
    if origin in (Union, types.UnionType):
        return _optional_reader(*(_reader(one) for one in arguments if one is not type(None)))
    if origin in (list, tuple):
        return _list_reader(origin, [_reader(one) for one in arguments if one is not ...])
    if origin is dict:
        return _dict_reader(_reader(arguments[1]))
    raise TypeError(f"{kind} is not the type of a value of a record")


def _plain_reader(needed: str, is_valid: Callable[[Any], bool]) -> _Reader:
    def read(value: Any) -> Any:
        if not is_valid(value):
            raise _MismatchError(needed, shown(value, 80))
        return value

    return _Reader(needed, read)


def _limited_reader(kind: Any, limits: Limits) -> _Reader:
    least, most = limits
    end = "2**63 - 1" if most == MAX_INT64 else str(most)
    return _plain_reader(
        f"a whole number between {least} and {end}",
        lambda value: type(value) is int and least <= value <= most,
    )


def _optional_reader(reader: _Reader) -> _Reader:
    return _Reader(
        f"{reader.type} or null", lambda value: None if value is None else reader.read(value)
    )


def _list_reader(kind: Callable[[Any], Any], entries: list[_Reader]) -> _Reader:
    has_any_length = len(entries) == 1
    needed = "a list" if has_any_length else f"a list of {len(entries)}"

    def read(value: Any) -> Any:
        if not isinstance(value, list) or not (has_any_length or len(value) == len(entries)):
            raise _MismatchError(needed, shown(value, 80))
        readers = entries * len(value) if has_any_length else entries
        values: list[Any] = []
        try:
            for reader, one in zip(readers, value, strict=True):
                values.append(reader.read(one))
        except _MismatchError as error:
            raise error.within(f"[{len(values)}]") from None
        return kind(values)

    return _Reader(needed, read)


def _dict_reader(entry: _Reader) -> _Reader:
    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _MismatchError("an object", shown(value, 80))
        return {key: _read_part(entry, one, f".{key}") for key, one in value.items()}

    return _Reader("an object", read)


def _record_reader(kind: Any) -> _Reader:
    types_of_fields = typing.get_type_hints(kind, include_extras=True)
    fields = [
        (field.name, f".{field.name}", _reader(types_of_fields[field.name]), _is_needed(field))
        for field in dataclasses.fields(kind)
        if field.init
    ]

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _MismatchError("an object", shown(value, 80))
        entries = {}
        for name, part, reader, is_needed in fields:
            if name in value:
                entries[name] = _read_part(reader, value[name], part)
            elif is_needed:
                raise _MismatchError(reader.type, "left out").within(part)
        return kind(**entries)

    return _Reader("an object", read)


def _read_part(reader: _Reader, value: Any, part: str) -> Any:
    try:
        return reader.read(value)
    except _MismatchError as error:
        raise error.within(part) from None


def _is_needed(field: dataclasses.Field[Any]) -> bool:
    return field.default is field.default_factory is dataclasses.MISSING
