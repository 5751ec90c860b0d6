"""The errors that millrace raises on purpose.

    MillraceError
    ├── ConfigError     also a ValueError
    ├── DataError       also a ValueError
    ├── TextError       also a ValueError
    ├── CacheError      also an OSError
    ├── StorageError
    └── ResumeError

    DuplicateDataWarning  a UserWarning
    ViewChangeWarning     a UserWarning

Each message gives the place, the value, the limit and the remedy.
"""


class MillraceError(Exception):
    """Base class of every error that millrace raises on purpose."""


class ConfigError(MillraceError, ValueError):
    """An argument, option or combination of them that cannot work."""


class DataError(MillraceError, ValueError):
    """A token file that is missing, truncated, damaged or of another format."""


class CacheError(MillraceError, OSError):
    """A cache folder that cannot be written, although indices must be built."""


class StorageError(MillraceError):
    """An object in a bucket that was denied, changed, or did not come in time."""


class TextError(MillraceError, ValueError):
    """An input file, line, document or tokenizer file that cannot be read."""


class ResumeError(MillraceError):
    """A saved state of other data or another order."""


class DuplicateDataWarning(UserWarning):
    """A blend that holds the same data twice, and so draws the same samples twice."""


class ViewChangeWarning(UserWarning):
    """A saved state whose masks or padding have changed since, but not its tokens."""
