"""Checks of arguments: numbers, flags and paths become exact Python values.

Each function takes the argument's name, for messages, and its value, and raises ConfigError for any
value that its docstring does not name. NumPy's integers become Python's, whose sums do not overflow
and which JSON can hold. Floats and bools are never counts.
"""

import importlib
import math
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from millrace.errors import ConfigError, TextError

T = TypeVar("T")

SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")
"""Start of the path of an object in a bucket, or of another storage."""
MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
_MIN_INT64 = -(2**63)
_INT64 = np.dtype(np.int64)


def check_int(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """A whole number as Python's int, from an object with `__index__` that is not a bool."""
    if type(value) is int:
        number = value
    else:
        try:
            if isinstance(value, (bool, np.bool_)):
                raise TypeError
            number = int(operator.index(value))
        except TypeError:
            raise _refusal(name, "a whole number", value) from None
    check_within(name, number, least, most)
    return number


def check_within(
    name: str, number: float, least: float | None = None, most: float | None = None
) -> None:
    """Raises ConfigError for a number below `least` or above `most`, and for NaN with a limit."""
    if (least is None or number >= least) and (most is None or number <= most):
        return
    low, high = (_POWERS.get(limit, limit) for limit in (least, most))
    if low is None:
        limits = f"at most {high}"
    else:
        limits = f"at least {low}" if high is None else f"between {low} and {high}"
    raise _refusal(name, limits, number)


def _refusal(name: str, needed: str, value: Any) -> ConfigError:
    return ConfigError(f"{name} must be {needed}, not {shown(value)}")


_POWERS: dict[Any, Any] = {2**n - d: f"2**{n}{' - 1' * d}" for n in range(16, 65) for d in (0, 1)}
_POWERS[_MIN_INT64] = "-2**63"
"""Limits for a message: 2**63 - 1 rather than its 19 digits."""


def check_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """One of some texts."""
    if not isinstance(value, str) or value not in choices:
        raise _refusal(name, f"one of {', '.join(choices)}", value)
    return value


def check_token(name: str, value: Any) -> int | None:
    """A token id, a whole number of at most 64 bits, or None for no token."""
    return None if value is None else check_int(name, value, _MIN_INT64, MAX_INT64)


def check_bool(name: str, value: Any) -> bool:
    """A switch: True or False, of Python or NumPy."""
    if not isinstance(value, (bool, np.bool_)):
        raise _refusal(name, "True or False", value)
    return bool(value)


def check_float(
    name: str, value: Any, least: float | None = None, most: float | None = None
) -> float:
    """A number of Python, NumPy, `fractions` or `decimal` as Python's float."""
    try:
        if isinstance(value, (str, bytes, bytearray, bool, np.bool_, np.complexfloating)):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        is_text = isinstance(value, str) and re.fullmatch(r"[-+\d.]+[eE][-+\d]+", value)
        needed = "a number (in YAML 50 or 5.0e+1, as 5e1 is a text)" if is_text else "a number"
        raise _refusal(name, needed, value) from None
    except OverflowError:
        raise ConfigError(f"{name} must fit float64, which {shown(value)} does not") from None
    check_within(name, number, least, most)
    return number


def check_list(name: str, values: Any, kind: str, check: Callable[[str, Any], T]) -> list[T]:
    """A list of what a check returns for each entry; one text or one path is not a list.

    Args:
        name: Name of the argument.
        values: Any iterable of the entries.
        kind: What the entries are, in the plural, for the message.
        check: Function of name and value that returns an entry, or raises ConfigError.
    """
    try:
        if isinstance(values, (str, bytes, os.PathLike)):
            raise TypeError
        entries = list(values)
    except TypeError:
        raise _refusal(name, f"a list of {kind}", values) from None
    return [check(f"{name}[{place}]", value) for place, value in enumerate(entries)]


def check_floats(name: str, values: Any) -> list[float]:
    """Numbers as a list of Python's floats."""
    return check_list(name, values, "numbers", check_float)


def check_ints(name: str, values: ArrayLike) -> NDArray[np.int64]:
    """Whole numbers as one contiguous, native int64 [n]; `values` itself if it is such an array."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError):  # lists of several lengths, tensors of other devices
        raise _refusal(name, "integers of shape [n]", values) from None
    if array.ndim == 1 and array.size == 0:
        return np.empty(0, np.int64)
    # NumPy makes floats of a list of int64 and uint64, and objects of large ints.
    kind, is_list = array.dtype.kind, not isinstance(values, np.ndarray)
    if array.ndim != 1 or kind not in ("iuOf" if is_list else "iuO"):
        raise ConfigError(
            f"{name} must be integers of shape [n], not {array.dtype} of shape {list(array.shape)}"
        )
    if kind in "Of":
        check = partial(check_int, least=_MIN_INT64, most=MAX_INT64)
        return np.array(check_list(name, values, "integers", check), np.int64)
    if array.dtype == _INT64 and array.flags.c_contiguous and array.flags.aligned:
        return array
    if array.dtype == np.uint64:
        check_within(name, int(array.max()), most=MAX_INT64)
    return np.require(array, np.int64, ["C_CONTIGUOUS", "ALIGNED"])


def check_path(name: str, value: Any) -> str:
    """A path as a text, from a text, bytes or an `os.PathLike`."""
    try:
        path = os.fsdecode(value)
    except TypeError:
        path = "\0"
    if "\0" in path:  # which no file can have
        raise _refusal(name, "a path", value)
    return path


def plain_json(value: Any, place: str = "the value", *, keeps_none: bool = True) -> Any:
    """A value as JSON and pickle return it: tuples become lists, and NumPy's values Python's.

    Args:
        value: Texts, finite numbers, booleans, None, or lists, arrays and mappings by text of them.
        place: Name of the value, for messages.
        keeps_none: Whether mappings keep entries whose value is None.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    plain: Any = value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
    if isinstance(plain, Mapping):
        for key in plain:
            if not isinstance(key, str):
                raise ConfigError(f"{place} has the key {shown(key)}: keys must be texts")
        return {
            str.__str__(key): plain_json(part, f"{place}.{key}", keeps_none=keeps_none)
            for key, part in plain.items()
            if keeps_none or part is not None
        }
    if isinstance(plain, (list, tuple)):
        parts = enumerate(plain)
        return [plain_json(part, f"{place}[{n}]", keeps_none=keeps_none) for n, part in parts]
    # torch.load with weights_only refuses derived classes, such as members of an enum.
    converters: dict[type, Any] = {str: str.__str__, int: int.__int__, float: float.__float__}
    is_finite = not isinstance(plain, float) or math.isfinite(plain)
    for kind, convert in converters.items():
        if isinstance(plain, kind) and is_finite:
            return convert(plain)
    raise ConfigError(
        f"{place} is {shown(value, 80)}, which cannot be stored as JSON: give numbers, texts (such "
        "as hashes of bytes), lists, and dictionaries by text"
    )


def package(name: str, user: str = "this") -> Any:
    """An optional package, which `user` needs; TextError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        extras = {"sentencepiece": "encoders", "tiktoken": "encoders", "transformers": "chats"}
        extra = extras.get(name, "tokenizers")
        problem = f"{user} needs the {name} package: pip install 'millrace[{extra}]'"
        raise TextError(problem) from None


def absolute_path(path: str | os.PathLike[str]) -> str:
    """The path of the same file from any folder, without `..`.

    `LINK/..` is the folder above the one that LINK leads to, as for the system; `os.path.abspath`
    takes it for the folder that holds LINK. The path of an object in a bucket is absolute.
    """
    place = os.sep
    path = os.fspath(path)
    if SCHEME.match(path):
        return path
    if not os.path.isabs(path):
        path = os.path.join(os.getcwd(), path)
    for part in path.split(os.sep):
        if part == os.pardir:
            place = os.path.dirname(os.path.realpath(place) if os.path.islink(place) else place)
        elif part not in ("", os.curdir):
            place = os.path.join(place, part)
    return place


def check_local(path: str) -> str:
    """A path in a file system; ConfigError for one in a bucket, where no file can be written."""
    if SCHEME.match(path):
        raise ConfigError(
            f"{path} is in a bucket, and files are written in a file system: give a local path "
            "(`tokenize` and `shuffle` move their output to a bucket with --upload-to)"
        )
    return path


def check_folder(name: str, value: Any) -> str:
    """The path of a folder in a file system, from any folder; not an empty text."""
    if not (path := check_path(name, value)):
        raise _refusal(name, "the path of a folder", value)
    return check_local(absolute_path(path))


def printable(name: str) -> str:
    """A name for people: control characters and the like become `\\x1b` or `\\u202e`."""
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in name
    )


def printable_lines(text: str) -> str:
    """A text for a terminal, with `printable` lines: a file may be named like a command to it."""
    return "\n".join(map(printable, text.split("\n")))


def text_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table: the first column to the left, the others to the right.

    >>> text_table([["domain", "files"], ["web", "12"]])
    ['domain  files', 'web        12']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])])
        for first, *others in rows
    ]


def shown(value: Any, most: int = 200) -> str:
    """A value for a message: its repr, cut after `most` characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int of too many digits, or lists in lists
        text = f"{value:#x}" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


class _Nothing:
    def __repr__(self) -> str:
        return "nothing"


NOTHING = _Nothing()
"""Stands for an entry that only the other of two nested values has."""


def differences(
    old: Any,
    new: Any,
    is_equal: Callable[[Any, Any], bool] = operator.eq,
    path: tuple[Any, ...] = (),
) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    """Where two nested values of dicts and lists differ.

    Args:
        old, new: The two values.
        is_equal: Whether two entries, not both dicts or both lists, are equal. A missing entry is
            NOTHING.
        path: Keys and places that lead to the two values.

    Yields:
        The path of a difference, and the two entries there. Lists of different lengths are one
        difference, with the first one inside them as a second.
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys([*old, *new]):
            pair = old.get(key, NOTHING), new.get(key, NOTHING)
            yield from differences(*pair, is_equal, (*path, key))
    elif isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        entries = chain.from_iterable(
            differences(*pair, is_equal, (*path, place))
            for place, pair in enumerate(zip(old, new, strict=False))
        )
        if len(old) != len(new):
            yield path, old, new
        yield from islice(entries, None if len(old) == len(new) else 1)
    elif not is_equal(old, new):
        yield path, old, new


def place_of(path: tuple[Any, ...]) -> str:
    """A path for a message: `datasets[3].seed`."""
    parts = [f".{part}" if isinstance(part, str) else f"[{part!r}]" for part in path]
    return "".join(parts).removeprefix(".")
