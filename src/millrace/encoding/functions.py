"""Functions as tokenizers, and what a function is: a job does not go on with another one."""

import dis
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from millrace.checks import check_int, check_ints, shown
from millrace.encoding.flat_ids import FlatIds, joined_ids
from millrace.encoding.vocabulary import Vocabulary, sha256
from millrace.errors import ConfigError, TextError

_PLAIN = (type(None), type(...), bool, int, float, complex, str, bytes)


@dataclass(frozen=True)
class FunctionVocabulary(Vocabulary):
    """A function from a text to ids."""

    function: Callable[[str], Any]
    name: str
    size: int = 0
    eod: int | None = None
    version: str | None = None

    reference_name = "function"
    encoder_names = ("function",)

    @property
    def eod_token(self) -> str | None:
        return None if self.eod is None else "eod"

    @property
    def fingerprint(self) -> str:
        return sha256(f"function {self.name} {self.size}".encode())

    def special_tokens(self) -> dict[str, int]:
        return {} if self.eod is None else {"eod": self.eod}

    def decode(self, ids: list[int]) -> str:
        raise ConfigError(f"{self.name} is a function from texts to ids, and cannot decode ids")

    def encode_batch(self, texts: list[str]) -> FlatIds:
        arrays = []
        for text in texts:
            returned = self.function(text)
            try:
                ids = check_ints("ids", returned)
                for number in (ids.min(), ids.max()) if ids.size else ():
                    check_int("an id", number, 0, self.size - 1)
            except ConfigError as error:
                place = f"{self.name} (vocabulary_size {self.size}) on the text {shown(text)}"
                raise TextError(f"{place}: {error}") from None
            arrays.append(ids)
        return joined_ids(arrays)


class _UnseenError(Exception): ...


def code_of(function: Callable[..., Any]) -> str | None:
    """A hash of a function's code and of what it refers to; None if it cannot be seen.

    Beside what `Tokenizer.from_function` lists, its attributes, containers of plain values and the
    version of Python are seen. It cannot be seen if it names another object, such as a callable
    instance or a class of its own package. Globals named in texts are not looked at.
    """
    package = _package(function)
    try:
        parts = [repr(sys.version_info[:2]), *_parts(function, package, {})]
    except (_UnseenError, RecursionError, ValueError):  # the last: an empty cell of a closure
        return None
    return sha256("\0".join(parts).encode(errors="surrogatepass"))


def _parts(value: Any, package: str, seen: dict[int, int]) -> Iterator[str]:
    """Texts that tell values apart; `seen` numbers functions by their ids."""
    # An instance of a plain type's subclass may have methods of the package.
    if isinstance(value, _PLAIN) and (type(value) in _PLAIN or _package(value) != package):
        yield f"{type(value).__name__} {value!r}"
    elif id(value) in seen:
        yield f"seen {seen[id(value)]}"
    elif isinstance(value, FunctionType):
        seen[id(value)] = len(seen)
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        # `functools.wraps` names a wrapper after what it wraps, which may be of another package.
        home = str(value.__globals__.get("__name__")).partition(".")[0]
        if package in (_package(value), home):
            names = sorted(set(_globals_of(value.__code__)) & {*value.__globals__})
            values = [(name, value.__globals__[name]) for name in names]
            yield "function"
            contents = (value.__code__, value.__defaults__, value.__kwdefaults__, vars(value))
            yield from _parts((*contents, values), package, seen)
        else:
            yield _name_of(value)
        yield from _parts(cells, package, seen)
    elif isinstance(value, CodeType):
        handlers = getattr(value, "co_exceptiontable", b"")  # from Python 3.11
        yield f"code {value.co_code.hex()} {handlers.hex()} {value.co_flags}"
        yield f"{value.co_argcount} {value.co_kwonlyargcount}"
        yield f"{value.co_names} {value.co_varnames}"
        yield from _parts(value.co_consts, package, seen)
    elif isinstance(value, re.Pattern):
        yield f"pattern {value.pattern!r} {value.flags}"
    elif type(value) in (tuple, list):
        yield f"{type(value).__name__} {len(value)}"
        for item in value:
            yield from _parts(item, package, seen)
    elif type(value) in (set, frozenset, dict):
        items = value.items() if type(value) is dict else sorted(value, key=repr)
        yield from _parts([type(value).__name__, *items], package, seen)
    elif _package(value) != package and isinstance(value, (ModuleType, BuiltinFunctionType, type)):
        yield _name_of(value)
    else:
        raise _UnseenError


def _globals_of(code: CodeType) -> Iterator[str]:
    """The names that code and the code in it look up in the module."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_of(constant)


def _module(value: Any) -> str:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return str(name or "")


def _package(value: Any) -> str:
    return _module(value).partition(".")[0]


def _name_of(value: Any) -> str:
    """The name of a module, function or class of another package, and the package's version."""
    name, package = getattr(value, "__qualname__", value.__name__), _package(value)
    if package in sys.stdlib_module_names:  # these change with Python's version
        return f"{_module(value)} {name} {package}"
    version = getattr(sys.modules.get(package), "__version__", None)
    if not isinstance(version, str):
        raise _UnseenError
    return f"{_module(value)} {name} {package} {version}"
