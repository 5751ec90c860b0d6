"""The verbs of the command line: their options, calls of the API, and reports."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from millrace.errors import DataError
from millrace.option_class import option


class Verb(NamedTuple):
    """The words of a verb, a function of its options that returns the report to print, the option
    classes, and a text whose first sentence is the summary."""

    name: str
    run: Callable[..., str]
    option_classes: Sequence[type]
    text: str


@dataclass(frozen=True, kw_only=True)
class JsonOption:
    as_json: bool = option("print JSON", False, flags="--json")


@dataclass(frozen=True, kw_only=True)
class RunOption:
    config: str = option("YAML or TOML file of the run", flags="config", metavar="RUN")


class UsageError(Exception):
    """Options that cannot work together; the command exits with 2."""


class DamageError(DataError):
    """Damage that a verb has found; `report` is printed before the message."""

    def __init__(self, message: str, report: str) -> None:
        super().__init__(message)
        self.report = report


def json_text(value: Any) -> str:
    """A dataclass, or a list of them, as JSON in ASCII."""
    return json.dumps(value, default=dataclasses.asdict, indent=2)
