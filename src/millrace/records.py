"""Records in JSON files, checked against the annotations of a dataclass.

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
or `dict` of these, one `| None`, or `Annotated[int, least, most]`.
"""

import dataclasses
import functools
import itertools
import types
import typing
from typing import Annotated, Any, Literal, TypeVar, Union

from millrace.checks import MAX_INT64, NOTHING, place_of, shown

T = TypeVar("T")


Count = Annotated[int, 0, MAX_INT64]
"""A number of things."""


def record_from(kind: type[T], value: Any, name: str = "the record") -> T:
    """The dataclass of a JSON object, without entries that the dataclass lacks.

    Args:
        kind: The dataclass.
        value: Result of `json.loads`.
        name: Name of the value in messages.

    Raises:
        ValueError: A missing entry, or a value of another type or outside its limits.
    """
    record: T = _read(kind, value, (name,))
    return record


_PLAIN: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    Any: "a value",
}


def _read(kind: Any, value: Any, place: tuple[Any, ...]) -> Any:
    """A value of a type, or a ValueError with its place."""
    if kind in _PLAIN and type(value) is kind:
        return value
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        (kind,) = (one for one in arguments if one is not type(None))
        return None if value is None else _read(kind, value, place)
    if kind in _PLAIN:
        needed = _PLAIN[kind]
        is_valid = (kind is float and type(value) is int) or (kind is Any and value is not NOTHING)
    elif origin is Annotated:
        _, least, most = arguments
        needed = f"a whole number between {least} and {'2**63 - 1' if most == MAX_INT64 else most}"
        is_valid = type(value) is int and least <= value <= most
    elif origin is Literal:
        needed, is_valid = f"one of {arguments}", value in arguments
    elif origin in (list, tuple):
        kinds = [one for one in arguments if one is not ...]
        needed = "a list" if len(kinds) == 1 else f"a list of {len(kinds)}"
        is_valid = isinstance(value, list) and (len(kinds) == 1 or len(kinds) == len(value))
    else:
        needed, is_valid = "an object", isinstance(value, dict)
    if not is_valid:
        raise ValueError(f"{place_of(place)} must be {needed}, not {shown(value, 80)}")
    if origin in (list, tuple):
        entries = enumerate(zip(itertools.cycle(kinds), value, strict=False))
        return origin([_read(one, entry, (*place, i)) for i, (one, entry) in entries])
    if origin is dict:
        return {key: _read(arguments[1], one, (*place, key)) for key, one in value.items()}
    if dataclasses.is_dataclass(kind):
        entries_of = {
            name: _read(one, value.get(name, NOTHING), (*place, name))
            for name, one, is_needed in _fields(kind)  # type: ignore[arg-type]
            if is_needed or name in value
        }
        return kind(**entries_of)  # type: ignore[operator]
    return value


@functools.cache
def _fields(kind: Any) -> list[tuple[str, Any, bool]]:
    """Name and type of each field, and whether it is needed."""
    types_of_fields = typing.get_type_hints(kind, include_extras=True)
    # A field without a default has MISSING in both places.
    return [
        (field.name, types_of_fields[field.name], field.default is field.default_factory)
        for field in dataclasses.fields(kind)
    ]
