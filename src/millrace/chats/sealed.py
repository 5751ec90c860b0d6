"""Texts that a template can write but not read: what it renders then holds for all other texts."""

from types import NoneType
from typing import Any

from millrace.errors import TextError


def _refuse(*_: Any, **__: Any) -> Any:
    raise TextError("it reads what the messages say")


class SealedText(str):
    """A text that can be written, joined with others and stripped of white space. All else raises,
    except that a text alone is searched for `literals`, which must not occur in what it stands for.
    """

    literals: frozenset[str] = frozenset()

    @classmethod
    def alone(cls, text: str, literals: frozenset[str]) -> "SealedText":
        """A text that is not joined with another."""
        sealed = cls(text)
        sealed.literals = literals
        return sealed

    def __str__(self) -> str:
        return self

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Any:
        yield _refuse()

    def __eq__(self, other: object) -> Any:
        return bool(other) and _refuse()

    def __ne__(self, other: object) -> Any:
        return not other or _refuse()

    def __add__(self, other: str) -> "SealedText":
        return SealedText(str.__add__(self, other))

    def __radd__(self, other: str) -> "SealedText":
        return SealedText(str.__add__(other, self))


def _stripping(name: str) -> Any:
    def strip(self: SealedText, chars: str | None = None) -> SealedText:
        if chars is not None and (type(chars) is not str or not chars.isspace()):
            _refuse()
        return SealedText.alone(getattr(str, name)(self, chars), self.literals)

    return strip


def _searching(name: str) -> Any:
    def search(self: SealedText, text: str, *options: Any) -> Any:
        if type(text) is not str or text not in self.literals:
            _refuse()
        answer = getattr(str, name)(self, text, *options)
        answer = self if isinstance(answer, str) else answer
        return [self] if isinstance(answer, list) else answer

    return search


_REFUSED = {"__hash__", "__repr__", "__format__", "__lt__", "__le__", "__gt__", "__ge__"}
for _name in _REFUSED | {*dir(str)} - {*dir(object)} - {*vars(SealedText)}:
    setattr(SealedText, _name, _refuse)
for _name in ("strip", "lstrip", "rstrip"):
    setattr(SealedText, _name, _stripping(_name))
for _name in ("__contains__", "startswith", "endswith", "find", "count", "split", "replace"):
    setattr(SealedText, _name, _searching(_name))


def _trim(value: Any, chars: str | None = None) -> str:
    _check_plain(chars)
    return str(value).strip(chars)


_FILTERS = """count d default first last length list map reject rejectattr select selectattr
    string""".split()
"""Filters that read a text by its methods alone."""

_CONTEXT = ("caller", "_loop_vars", "_block_vars")  # what Jinja adds to a call


class _Guard:
    """Jinja's sandbox, which refuses what would read a sealed text without its methods."""

    intercepted_binops = frozenset({"%"})

    @staticmethod
    def concat(parts: Any) -> str:
        parts = [*parts]
        is_sealed = any(isinstance(one, SealedText) for one in parts)
        return (SealedText if is_sealed else str)("".join(parts))

    def getitem(self: Any, obj: Any, argument: Any) -> Any:
        _check_plain(argument)
        return super().getitem(obj, argument)  # type: ignore[misc]

    def call_binop(self: Any, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_plain(left, right)
        return super().call_binop(context, operator, left, right)  # type: ignore[misc]

    def call(self: Any, context: Any, function: Any, /, *args: Any, **options: Any) -> Any:
        kind = function if isinstance(function, type) else type(function)
        is_own = isinstance(getattr(function, "__self__", None), SealedText)
        if not is_own and kind.__name__ not in ("Namespace", "Macro"):
            _check_plain(*args, *(one for name, one in options.items() if name not in _CONTEXT))
        return super().call(context, function, *args, **options)  # type: ignore[misc]


def _check_plain(*values: Any) -> None:
    if any(type(one) not in (str, int, float, bool, NoneType) for one in values):
        _refuse()


def guarded(template: Any, source: str) -> Any:
    """A compiled template made for sealed texts; None for one that reads where no guard sees it."""
    from jinja2 import nodes

    environment = template.environment.overlay()
    tree = environment.parse(source)
    for node in tree.find_all(nodes.Compare):
        is_of_constant = isinstance(node.expr, nodes.Const) and len(node.ops) == 1
        for one in node.ops:  # Python searches a text for another without a method of the latter
            is_in_list = isinstance(one.expr, (nodes.List, nodes.Tuple))
            if one.op in ("in", "notin") and not (is_of_constant or is_in_list):
                return None
    if tree.find((nodes.Concat, nodes.EvalContextModifier)):
        return None
    environment.__class__ = type("Environment", (_Guard, type(environment)), {})
    filters, tests = environment.filters, environment.tests
    environment.filters = {one: filters[one] if one in _FILTERS else _refuse for one in filters}
    environment.filters["trim"] = _trim
    environment.tests = {**tests, "in": _refuse}
    return environment.from_string(source)
