"""The value of a YAML document, made from the parser's events: the nodes that PyYAML makes of them
take 8 times the memory, and 3 times the time."""

import sys
from typing import Any, BinaryIO

from millrace.errors import ConfigError


def load_yaml(file: BinaryIO) -> Any:
    """The value of a document; ValueError for a text that is none, ConfigError for a name twice."""
    import yaml

    try:
        return _Values(yaml, file).document()
    except (yaml.YAMLError, TypeError, AttributeError, LookupError) as error:
        raise ValueError(error) from None


class _Values:
    def __init__(self, yaml: Any, file: BinaryIO) -> None:
        # The parser in C, if there is one, takes an eighth of the time of Python's.
        self._yaml, self._loader = yaml, getattr(yaml, "CSafeLoader", yaml.SafeLoader)(file)
        self._events, self._anchors = iter(self._loader.get_event, None), dict[str, Any]()

    def document(self) -> Any:
        nodes = (one for one in self._events if isinstance(one, self._yaml.NodeEvent))
        values = [self._value(one) for one in nodes]
        if len(values) > 1:
            raise ValueError("it holds several documents")
        return values[0] if values else None

    def _value(self, event: Any) -> Any:
        if isinstance(event, self._yaml.AliasEvent):
            if event.anchor not in self._anchors:
                raise ValueError(f"*{event.anchor} is unknown, or nested in itself")
            return self._anchors[event.anchor]
        if isinstance(event, self._yaml.ScalarEvent):
            value = self._scalar(event)
        elif event.tag not in (None, "!"):
            raise ValueError(f"it has the tag {event.tag}: leave it out")
        elif isinstance(event, self._yaml.MappingStartEvent):
            value = self._mapping()
        else:
            value = []
            while not isinstance(one := next(self._events), self._yaml.SequenceEndEvent):
                value.append(self._value(one))
        if event.anchor is not None:
            self._anchors[event.anchor] = value
        return value

    def _scalar(self, event: Any) -> Any:
        tag = event.tag if event.tag not in (None, "!") else None
        tag = tag or self._loader.resolve(self._yaml.ScalarNode, event.value, event.implicit)
        if tag == "tag:yaml.org,2002:str":
            return sys.intern(event.value)  # names come again in each phase
        makers = self._loader.yaml_constructors
        node = self._yaml.ScalarNode(tag, event.value, event.start_mark, event.end_mark)
        return makers.get(tag, makers[None])(self._loader, node)

    def _mapping(self) -> dict[Any, Any]:
        values: dict[Any, Any] = {}
        merged: list[Any] = []
        while not isinstance(event := next(self._events), self._yaml.MappingEndEvent):
            is_merge = getattr(event, "value", "") == "<<" and event.implicit[0]
            key = "<<" if is_merge else self._value(event)
            if key in values:
                raise ConfigError(f"it gives {key} twice: leave one out")
            value = values[key] = self._value(next(self._events))
            if is_merge:
                merged += value if isinstance(value, list) else [value]
        if not merged:
            return values
        del values["<<"]
        return {key: one[key] for one in [*merged[::-1], values] for key in one}
