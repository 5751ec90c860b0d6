"""What each verb of the command line does: its options, its call of the API, and its report.

`millrace.cli` imports the module of the verb that is run, and no other.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from millrace.errors import ConfigError, DataError
from millrace.option_class import option

T = TypeVar("T")


class Verb(NamedTuple):
    """A verb: the words that call it, a function of its options that returns the report to print,
    their option classes, and a text whose first sentence is the summary."""

    name: str
    run: Callable[..., str]
    option_classes: Sequence[type]
    text: str


@dataclass(frozen=True, kw_only=True)
class JsonOption:
    """The option of verbs that report numbers."""

    as_json: bool = option("print JSON", False, flags="--json")


class UsageError(Exception):
    """Options that cannot work together; the command exits with 2."""


class DamageError(DataError):
    """Damage that a verb has found; its report is printed first.

    Args:
        message: The error.
        report: What the verb prints.
    """

    def __init__(self, message: str, report: str) -> None:
        super().__init__(message)
        self.report = report


def checked(option_class: type[T], options: dict[str, Any]) -> T:
    """The options of a command; those that are wrong together are wrong usage."""
    try:
        return option_class(**options)
    except ConfigError as error:
        raise UsageError(str(error)) from None


def json_text(value: Any, *, ensure_ascii: bool = True) -> str:
    """A dataclass, or a list of them, as JSON.

    What stdout cannot encode is written as JSON's escapes: those of Python would not be JSON.
    """
    text = json.dumps(value, default=dataclasses.asdict, ensure_ascii=ensure_ascii, indent=2)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(value, default=dataclasses.asdict, indent=2)
    return text
