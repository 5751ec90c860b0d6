"""Errors that are also of Megatron-LM's kinds, which other code may catch."""

import contextlib
from collections.abc import Iterator

from millrace.errors import ConfigError, DataError, MillraceError, TextError


class ConfigAssertionError(ConfigError, AssertionError):
    """An argument or option outside its limits, which Megatron-LM asserts."""


class DataAssertionError(DataError, AssertionError):
    """A token file or cache file that is damaged or does not fit, where Megatron-LM asserts."""


class MissingFileError(DataAssertionError, FileNotFoundError):
    """A token file or cache file that does not exist."""


class ConversationError(TextError, AssertionError):
    """A conversation without tokens or masks, where Megatron-LM asserts or raises a ValueError."""


class OversampledError(ConfigError, IndexError):
    """A blend that draws more samples of a dataset than it has."""


class BuildError(MillraceError):
    """Datasets that could not be built, where Megatron-LM raises a plain Exception."""


def require(condition: object, message: str) -> None:
    if not condition:
        raise ConfigAssertionError(message)


@contextlib.contextmanager
def as_assertions() -> Iterator[None]:
    """Turns ConfigError and DataError into AssertionErrors."""
    try:
        yield
    except DataError as error:
        raise DataAssertionError(str(error)) from error
    except ConfigError as error:
        raise ConfigAssertionError(str(error)) from error
