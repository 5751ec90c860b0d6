"""Option classes: dataclasses whose fields describe each option of a job once.

The checks, the job's identity, the command line's arguments and the docs' table come from them:

>>> @dataclass(frozen=True, kw_only=True)
... class ShuffleOptions(Options):
...     output_dir: StrPath = option("folder for the shards", metavar="DIR")
...     seed: int = option("seed of the permutation", 42, least=0)
...     workers: int = option("worker processes", 4, least=1, most=1024, identity="never")
>>> identity_of(ShuffleOptions(output_dir="out"))
{'output_dir': 'out', 'seed': 42}
>>> ShuffleOptions(output_dir="out", workers=0)
Traceback (most recent call last):
millrace.errors.ConfigError: workers must be between 1 and 1024, not 0

The type of a field decides its check: `bool`, `int`, `float`, `str`, `StrPath`, `Sequence[str]`,
`Sequence[StrPath]`, or `Any` for none; each may be `| None`. Another type needs a `check`.
"""

import argparse
import dataclasses
import functools
import operator
import os
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from millrace import checks
from millrace.errors import ConfigError, MillraceError

StrPath = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class Option:
    """What `option` says about a field.

    Args:
        help: Phrase for the help and the docs, without capital or full stop.
        least, most: Least and largest value of a number.
        choices: Possible texts; empty: any.
        default_text: Default in words, for a None or an empty list that stands for something.
        flags: Names on the command line, such as "--num-workers"; empty: the field's name
            (`--no-NAME` for a True). A name without dashes is a positional argument; None: the
            command line lacks the option.
        group: Heading above the option in the verb's help.
        identity: Whether the option is part of the job's identity.
        check: Function of name and value that returns the plain value, instead of the type's.
        parse: Function of a text on the command line, instead of the type's. The verb may make the
            field's value from its result.
        settings: Other keywords of `argparse`'s `add_argument`: metavar, nargs, const.
    """

    help: str
    least: float | None = None
    most: float | None = None
    choices: Sequence[str] = ()
    default_text: str = ""
    flags: Sequence[str] | None = ()
    group: str = ""
    identity: Literal["always", "never"] = "always"
    check: Callable[[str, Any], Any] | None = None
    parse: Callable[[str], Any] | None = None
    settings: Mapping[str, Any]


_OPTION_FIELDS = {field.name for field in dataclasses.fields(Option)} - {"settings"}


def option(text: str, default: Any = MISSING, **details: Any) -> Any:
    """Returns a field of an option class.

    Args:
        text: The `help` of `Option`.
        default: Default, never changed in place (a tuple rather than a list); without it, the
            option is required.
        details: Other fields of `Option`, and `settings` as keywords.
    """
    own = {name: details.pop(name) for name in _OPTION_FIELDS & details.keys()}
    if isinstance(own.get("flags"), str):
        own["flags"] = (own["flags"],)
    return dataclasses.field(
        default=default, metadata={"option": Option(help=text, **own, settings=details)}
    )


class Options:
    """The base of option classes, which makes their values plain.

    Raises:
        ConfigError: A value of another type, or outside its limits.
    """

    def __post_init__(self) -> None:
        for field in fields_of(type(self)):  # type: ignore[arg-type]
            object.__setattr__(self, field.name, field.check(getattr(self, field.name)))


def identity_of(options: Any) -> dict[str, Any]:
    """The options that decide a job's output, as JSON values."""
    fields = fields_of(type(options))  # type: ignore[arg-type]
    own = [one for one in fields if one.option.identity == "always"]
    values = {field.name: getattr(options, field.name) for field in own}
    return {name: list(one) if isinstance(one, tuple) else one for name, one in values.items()}


def add_options(parser: argparse.ArgumentParser, *option_classes: type) -> None:
    """Adds the fields of option classes to a parser, which leaves out options without a value."""
    groups: dict[str, Any] = {"": parser}
    for option_class in option_classes:
        for field in fields_of(option_class):
            group = field.option.group
            if group not in groups:
                groups[group] = parser.add_argument_group(group)
            if field.flags:
                groups[group].add_argument(*field.flags, **field.settings())


def take_options(option_class: type, values: dict[str, Any]) -> dict[str, Any]:
    """Removes the fields of an option class from parsed values, and returns them."""
    names = [field.name for field in dataclasses.fields(option_class)]
    return {name: values.pop(name) for name in names if name in values}


# ---- a field ----


class Field(NamedTuple):
    """A field of an option class: `kind` is its type without None."""

    name: str
    default: Any
    kind: Any
    allows_none: bool
    option: Option

    def check(self, value: Any) -> Any:
        """The value in Python's own types, or a ConfigError."""
        if value is None and self.allows_none:
            return None
        details = self.option
        name = self.name + " (a number of bytes)" * (details.parse is parse_size)
        value = (details.check or _KINDS[self.kind][0])(name, value)
        if details.choices:
            checks.check_choice(self.name, value, details.choices)
        checks.check_within(self.name, value, details.least, details.most)
        return value

    def parse(self, text: str) -> Any:
        """The value of a text on the command line; of a list, one entry."""
        try:
            if self.option.parse is not None:
                return self.option.parse(text)
            return text if self.is_list else self.check(_number(text, self.kind))
        except MillraceError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    @property
    def is_list(self) -> bool:
        return get_origin(self.kind) is Sequence

    @property
    def is_required(self) -> bool:
        return self.default is MISSING

    @property
    def flags(self) -> Sequence[str]:
        name = self.name.replace("_", "-")
        default = [f"--no-{name}" if self.default is True else f"--{name}"]
        return () if self.option.flags is None else self.option.flags or default

    @property
    def default_text(self) -> str:
        default = self.default
        if self.option.default_text or isinstance(default, bool) or default in (None, MISSING):
            return self.option.default_text
        return " ".join(default) if isinstance(default, tuple) else f"{default}"

    def settings(self) -> dict[str, Any]:
        """The keywords of `add_argument`."""
        words = f" (default: {self.default_text})" if self.default_text else ""
        settings: dict[str, Any] = {
            "default": argparse.SUPPRESS,
            "help": (self.option.help + words).replace("%", "%%"),
        }
        if self.flags[0].startswith("-"):
            settings |= {"dest": self.name, "required": self.is_required}
        if self.kind is bool:
            settings["action"] = "store_false" if self.default is True else "store_true"
            return settings | dict(self.option.settings)
        settings["type"] = self.parse
        if self.option.choices:
            settings["choices"] = self.option.choices
        else:
            settings["metavar"] = _KINDS.get(self.kind, ("", "VALUE"))[1]
        if self.is_list:
            settings["nargs"] = "+"
        return settings | dict(self.option.settings)


@functools.cache
def fields_of(option_class: type) -> Sequence[Field]:
    """The fields of an option class, in order."""
    hints, fields = get_type_hints(option_class), []
    for field in dataclasses.fields(option_class):
        hint = hints[field.name]
        kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        kind = functools.reduce(operator.or_, [one for one in kinds if one is not types.NoneType])
        allows_none = types.NoneType in kinds
        own = field.metadata["option"]
        fields.append(Field(field.name, field.default, kind, allows_none, own))
    return fields


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be a text, not {checks.shown(value)}")
    return value


def _list_of(kind: str, check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, values: tuple(checks.check_list(name, values, kind, check))


_KINDS: dict[Any, tuple[Callable[[str, Any], Any], str]] = {
    bool: (checks.check_bool, ""),
    int: (checks.check_int, "N"),
    float: (checks.check_float, "NUMBER"),
    str: (_text, "TEXT"),
    StrPath: (checks.check_path, "PATH"),
    Sequence[str]: (_list_of("texts", _text), "TEXT"),
    Sequence[StrPath]: (_list_of("paths", checks.check_path), "PATH"),
    Any: (lambda name, value: value, "VALUE"),
}
"""The check of each type, and its name on the command line."""


# ---- texts on the command line ----


def _number(text: str, kind: Any) -> Any:
    """The number in a text, or else the text, for the message of the check."""
    try:
        return kind(text) if kind in (int, float) else text
    except ValueError:
        return text


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_size(text: str) -> int:
    """A number of bytes, at least 1: "500M" or "20G"."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if not number.isdecimal() or int(number) < 1 or unit not in _UNITS:
        raise ConfigError(f"{text!r} is not a size; write 500M or 20G")
    return int(number) * _UNITS[unit]


def parse_escapes(text: str) -> str:
    """A text with \\n, \\t, \\r and \\\\ replaced."""
    characters = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
    return re.sub(r"\\([ntr\\])", lambda match: characters[match[1]], text)
