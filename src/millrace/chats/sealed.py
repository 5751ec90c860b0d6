"""Texts that a template can write but not read: what it renders then holds for all other texts."""

from collections.abc import Iterable
from functools import partial
from typing import Any

from millrace.errors import TextError


def _refuse(*_: Any, **__: Any) -> Any:
    raise TextError("it reads what the messages say")


class SealedText:
    """What templates get for a text: it can be written, joined with others and stripped of white
    space. All else raises, except that a text alone is searched for `literals`, which must not
    occur in what it stands for."""

    __hash__ = __index__ = __str__ = __repr__ = __getitem__ = _refuse

    def __init__(self, text: str, literals: frozenset[str] = frozenset()) -> None:
        self._text, self._literals = text, literals

    def __len__(self) -> int:  # transformers asks where its tags are; templates may not
        return len(self._text)

    def __eq__(self, other: object) -> Any:
        return bool(other) and _refuse()

    def __add__(self, other: Any) -> "SealedText":
        return SealedText(self._text + written(other))

    def __radd__(self, other: str) -> "SealedText":
        return SealedText(other + self._text)

    def __contains__(self, text: str) -> Any:
        return self._search("__contains__", text)

    def __getattr__(self, name: str) -> Any:
        if name in ("strip", "lstrip", "rstrip"):
            return partial(self._strip, name)
        if name in ("startswith", "endswith", "find", "count", "split", "replace"):
            return partial(self._search, name)
        raise AttributeError(name)

    def _strip(self, name: str, chars: str | None = None) -> "SealedText":
        if chars is not None and not chars.isspace():
            _refuse()
        return SealedText(getattr(self._text, name)(chars), self._literals)

    def _search(self, name: str, text: str, *options: Any) -> Any:
        if text not in self._literals:
            _refuse()
        answer = getattr(self._text, name)(text, *options)
        return {"split": [self], "replace": self}.get(name, answer)


class _Written(str):
    """A sealed text in what a template has written, whose blocks and macros it may read."""

    __html__ = _refuse

    def __str__(self) -> str:
        return self


def written(value: Any) -> Any:
    """What a template writes for a value."""
    return _Written(value._text) if isinstance(value, SealedText) else value


def _concat(parts: Iterable[Any]) -> Any:
    texts = [written(one) for one in parts]
    is_sealed = any(isinstance(one, _Written) for one in texts)
    return SealedText("".join(texts)) if is_sealed else "".join(texts)


def _trim(value: Any, chars: str | None = None) -> Any:
    text: Any = value if isinstance(value, SealedText) else str(value)
    return text.strip(chars)


def _length(value: Any) -> int:
    return _refuse() if isinstance(value, SealedText) else len(value)


_FILTERS = "d default first last list map reject rejectattr select selectattr string".split()
"""Filters that read a text by its methods alone."""


def guarded(template: Any, source: str) -> Any:
    """A compiled template, made anew for sealed texts, which changes its environment."""
    environment = template.environment
    environment.finalize, environment.concat = written, _concat
    filters = {**dict.fromkeys(environment.filters, _refuse), "trim": _trim}
    filters |= {name: environment.filters[name] for name in _FILTERS}
    environment.filters = {**filters, "length": _length, "count": _length}
    environment.tests["string"] = lambda value: isinstance(value, (str, SealedText))
    return environment.from_string(source)
