"""Texts and ids of JSON records and rows: what Python's `json` reads, as fast as `orjson`."""

import contextlib
import json
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from millrace import checks

Text: TypeAlias = "str | list[str]"
"""What a document has under a key: a text, or the texts of its sequences."""

_MISSING = object()
_RENAME = "Name the text's key (--json-keys)"


class BadDocumentError(Exception):
    """A document that cannot be used, and the reason."""


def parse_json(line: bytes) -> Any:
    """The value of a line, as Python's `json` reads it; BadDocumentError if it is not JSON.

    >>> parse_json(b'{"a": NaN, "a": 1}')
    {'a': 1}
    """
    text = decode_text(line, "")
    begin = repr(line[:60].decode(errors="replace") + "..." * (len(line) > 60))
    try:
        return json.loads(text)
    except (RecursionError, ValueError) as error:
        raise BadDocumentError(
            f"not valid JSON ({error}): {begin}. Each line must be one JSON object; repair or "
            "remove the line"
        ) from None


def decode_text(data: bytes, place: str = " of the text") -> str:
    """The text of bytes; BadDocumentError if they are not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BadDocumentError(
            f"byte {error.start + 1}{place} is not UTF-8 ({error.reason}). "
            "Convert the file to UTF-8"
        ) from None


def text_at(record: Any, key: str) -> Text:
    """The text, or list of texts, of a record under a key; BadDocumentError if it has none.

    >>> text_at({"doc": {"text": "a"}}, "doc.text"), text_at({"doc.text": ["a", "b"]}, "doc.text")
    ('a', ['a', 'b'])
    """
    value = _value_at(check_object(record), key)
    if value is _MISSING:
        keys = ", ".join(list(record)[:10]) or "none"
        raise BadDocumentError(f'there is no key "{key}"; its keys are: {keys}. {_RENAME}')
    return check_text(value, key)


def check_object(record: Any) -> dict[str, Any]:
    """A record, if it is an object; BadDocumentError if it is not."""
    if isinstance(record, dict):
        return record
    raise BadDocumentError(
        f"a JSON {'null' if record is None else type(record).__name__}, not an object; each line "
        'must be an object such as {"text": "..."}'
    )


def check_text(value: Any, key: str) -> Text:
    """A value as a text or list of texts; BadDocumentError if it is not one."""
    if isinstance(value, str):
        return value
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, bytes) for item in items):
        raise BadDocumentError(f'the value of "{key}" is not UTF-8: {checks.shown(value, 60)}')
    if not all(isinstance(item, str) for item in items):
        shown = "null" if value is None else checks.shown(value, 60)
        raise BadDocumentError(
            f'the value of "{key}" is {shown}, not a string or a list of strings. {_RENAME}'
        )
    return items


def texts_of(values: Iterable[Text]) -> Iterator[str]:
    """All texts, one by one."""
    for value in values:
        yield from [value] if isinstance(value, str) else value


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can encode a text: it has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def id_of(record: dict[str, Any], key: str, line: bytes) -> str | None:
    """The id of a record as text.

    >>> id_of({"id": 7}, "id", b'{"id": 7}'), id_of({"id": None}, "id", b'{"id": null}')
    ('7', None)
    """
    value = _value_at(record, key)
    if isinstance(value, float):  # orjson rounds whole numbers beyond 64 bits
        with contextlib.suppress(RecursionError):  # orjson reads deeper nesting
            value = _value_at(json.loads(line), key)
    return id_text(value)


def id_text(value: Any) -> str | None:
    """An id as text: a string as it is, a number as JSON text, and None for others."""
    if isinstance(value, str):
        return value if value.isascii() or is_unicode(value) else None
    if type(value) is int:
        return str(value)
    return json.dumps(value) if isinstance(value, float) else None


def _value_at(record: dict[str, Any], key: str) -> Any:
    if key in record:
        return record[key]
    value: Any = record
    for name in key.split("."):
        if not isinstance(value, dict) or name not in value:
            return _MISSING
        value = value[name]
    return value
