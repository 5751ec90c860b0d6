"""A row of a dataset into a conversation: messages, tools, and which turns to train on."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.checks import shown
from millrace.errors import ConfigError, TextError

Message = dict[str, Any]

ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool", "developer")},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "model", "bot", "chatgpt", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "function", "tool_response"), "tool"),
}
"""The roles that messages may name, and what templates call them."""

COLUMNS = {
    "messages": ("messages",),
    "conversations": ("conversations", "conversation"),
    "prompt": ("prompt",),
    "completion": ("completion",),
    "instruction": ("instruction",),
    "input": ("input",),
    "output": ("output", "response"),
    "tools": ("tools", "functions"),
    "system": ("system", "system_prompt"),
}
"""The parts of a row, and the usual names of their columns."""

FORMS = (("messages",), ("conversations",), ("prompt", "completion"), ("instruction", "output"))
"""The parts that make a conversation: the first form whose parts a row has."""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names of a message's reasoning; templates read the first two."""


@dataclass(frozen=True)
class Conversation:
    """A conversation as templates read it.

    Attributes:
        messages: Messages of plain values, each with `role` and `content` (a text).
        tools: Descriptions of tools, or None.
        weights: Whether to train on each message: None where the row says nothing.
    """

    messages: list[Message]
    tools: list[Any] | None
    weights: list[bool | None]


@dataclass(frozen=True)
class RowReader:
    """Reads rows by the names of their columns and roles.

    Args:
        columns: Names of columns by part of `COLUMNS`, instead of the usual ones. A dot reaches
            into an object.
        roles: Further roles, and those of `ROLES` that they stand for.

    >>> row = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes?"}]}
    >>> [message["role"] for message in RowReader().read(row).messages]
    ['user', 'assistant']
    """

    columns: Mapping[str, str] | None = None
    roles: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        for part, name in (self.columns or {}).items():
            if part not in COLUMNS or not isinstance(name, str):
                what = f"columns has {shown(part)}: {shown(name)}"
                raise ConfigError(f"{what}; give names of columns for some of {', '.join(COLUMNS)}")
        for role, name in (self.roles or {}).items():
            if name not in ROLES:
                what = f"roles has {shown(role)}: {shown(name)}"
                raise ConfigError(f"{what}; give one of {', '.join(ROLES)} for each role")

    def read(self, row: Any) -> Conversation:
        """The conversation of a row.

        Raises:
            TextError: What cannot be rendered; it names the message.
        """
        if not isinstance(row, Mapping):
            raise TextError(f"a row is {shown(row)}; give a dictionary")
        parts = {part: self._column(row, part) for part in COLUMNS}
        form = next((one for one in FORMS if all(parts[part] is not None for part in one)), None)
        if form is None:
            forms = ", or ".join(" and ".join(one) for one in FORMS)
            names = shown(sorted(map(str, row)))
            raise TextError(f"the row has the columns {names}; it needs {forms} (see `columns`)")
        given = [*_given_messages(form, parts)]
        messages, weights = [], []
        for number, (place, one) in enumerate(given):
            message = self._message(place, one)
            if number == 0 and isinstance(parts["system"], str) and message["role"] != "system":
                messages.append({"role": "system", "content": parts["system"]})
                weights.append(None)
            weights.append(_weight_of(place, message))
            messages.append(message)
        if not any(message["role"] == "assistant" for message in messages):
            raise TextError(f"none of the {len(messages)} messages is an assistant's")
        return Conversation(messages, _tools_of(parts["tools"]), weights)

    def _column(self, row: Mapping[str, Any], part: str) -> Any:
        names = [self.columns[part]] if part in (self.columns or {}) else COLUMNS[part]  # type: ignore[index]
        for name in names:
            value: Any = row
            for key in [name] if name in row else name.split("."):
                value = value.get(key) if isinstance(value, Mapping) else None
            if value is not None:
                return value
        return None

    def _message(self, place: str, given: Any) -> Message:
        if not isinstance(given, Mapping):
            raise TextError(f"{place} is {shown(given)}; give an object with role and content")
        # Arrow gives each message all keys of the file: a None stands for an absent one.
        message = {
            key: plain(value, f"{place}.{key}") for key, value in given.items() if value is not None
        }
        role, content = message.pop("from", None), message.pop("value", None)
        role, content = message.get("role", role), message.get("content", content)
        if role is None:
            raise TextError(f"{place} has no role")
        known = {**ROLES, **(self.roles or {})}
        if not isinstance(role, str) or role not in known:
            what = f"{place} has the role {shown(role)}"
            raise TextError(f"{what}; the known ones are {', '.join(known)} (see `roles`)")
        if role == "function_call" and "tool_calls" not in message:
            message["tool_calls"], content = _calls_in(place, content), ""
        message |= {
            "role": known.get(known[role], known[role]),
            "content": _text_of(place, content),
        }
        for name in REASONING:
            if not isinstance(message.get(name, ""), str):
                raise TextError(f"{place}.{name} is {shown(message[name])}; give a text")
        reasoning = next((message[name] for name in REASONING if name in message), None)
        if reasoning is not None:  # as transformers does, for the templates of both names
            message |= {"reasoning_content": reasoning, "thinking": reasoning}
        _check_calls(place, message)
        is_spoken = message["role"] in ("user", "assistant")
        if is_spoken and not (message["content"].strip() or reasoning or message.get("tool_calls")):
            raise TextError(f"{place} ({message['role']}) is empty")
        return message


def plain(value: Any, place: str) -> Any:
    """A value in JSON's types, from Python's and NumPy's; TextError for another."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TextError(f"{place} has the keys {shown([*value])}; give texts")
        return {str(key): plain(one, f"{place}.{key}") for key, one in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist(), place)
    if isinstance(value, (list, tuple)):
        return [plain(one, f"{place}[{number}]") for number, one in enumerate(value)]
    if isinstance(value, str):
        return str(value)
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        return value.item()
    raise TextError(f"{place} is {shown(value)}; give texts, numbers, lists or objects")


def texts_in(value: Any) -> Iterator[str]:
    """All texts in a plain value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for one in value:
            yield from texts_in(one)
            if isinstance(value, dict):
                yield from texts_in(value[one])


def _given_messages(form: tuple[str, ...], parts: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The messages of a row as they stand there, with their places for errors."""
    if form == ("instruction", "output"):
        texts = [parts["instruction"], parts["input"]]
        if not all(isinstance(text, str) for text in (texts[0], texts[1] or "")):
            raise TextError(f"instruction and input are {shown(texts)}; give texts")
        yield "instruction", {"role": "user", "content": "\n\n".join(filter(None, texts))}
        yield "output", {"role": "assistant", "content": parts["output"]}
        return
    for part, role in zip(form, ("user", "assistant"), strict=False):
        value = parts[part]
        if isinstance(value, np.ndarray):
            value = [*value]
        if len(form) == 2 and isinstance(value, str):
            yield part, {"role": role, "content": value}
        elif isinstance(value, (list, tuple)):
            yield from ((f"{part}[{number}]", one) for number, one in enumerate(value))
        else:
            raise TextError(f"{part} is {shown(value)}; give a list of messages")


def _text_of(place: str, content: Any) -> str:
    """A content as one text: the texts of its parts stand one after the other."""
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content if isinstance(content, list) else [content]):
        text = part.get("text") if isinstance(part, dict) else part
        if part is None:
            text = ""
        elif not isinstance(text, str) or (isinstance(part, dict) and _is_other(part)):
            raise TextError(
                f"{place}.content[{number}] is {shown(part)}; only texts can be encoded"
            )
        texts.append(text)
    return "".join(texts)


def _is_other(part: dict[str, Any]) -> bool:
    return part.get("type", "text") != "text"


def _calls_in(place: str, text: Any) -> list[Any]:
    """The tool calls that ShareGPT writes as JSON into a turn."""
    try:
        value = json.loads(text)
    except (TypeError, ValueError):
        raise TextError(f"{place} is {shown(text)}; a function_call is JSON") from None
    calls = value if isinstance(value, list) else [value]
    return [{"type": "function", "function": call} for call in calls]


def _check_calls(place: str, message: Message) -> None:
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list):
        raise TextError(f"{place}.tool_calls is {shown(calls)}; give a list")
    for number, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            what = f"{place}.tool_calls[{number}] is {shown(call)}"
            raise TextError(f'{what}; give {{"function": {{"name": ..., "arguments": ...}}}}')
    if not calls:
        message.pop("tool_calls", None)


def _tools_of(value: Any) -> list[Any] | None:
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError:
            raise TextError(f"tools are {shown(value)}, which is not JSON") from None
    tools = plain(value, "tools")
    if not isinstance(tools, list | None) or not all(isinstance(one, dict) for one in tools or ()):
        raise TextError(f"tools are {shown(value)}; give a list of objects")
    return tools or None


def _weight_of(place: str, message: Message) -> bool | None:
    """Takes `weight` and `train` out of a message."""
    given = [message.pop(name) for name in ("weight", "train") if name in message]
    if any(type(one) not in (int, float, bool) or one not in (0, 1) for one in given):
        raise TextError(f"{place} has the weight {shown(given)}; give 0 or 1")
    return all(given) if given else None
