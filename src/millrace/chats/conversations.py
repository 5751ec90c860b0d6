"""A row of a dataset into a conversation: messages, tools, and which turns to train on."""

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from millrace.checks import plain_json, shown
from millrace.errors import ConfigError, TextError

Message = dict[str, Any]
Weight = bool | Literal["prompt"] | None

_PLAIN_ROLES = ("system", "user", "assistant", "tool", "developer")
ROLES = {
    **{role: role for role in _PLAIN_ROLES},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "model", "bot", "chatgpt"), "assistant"),
    **dict.fromkeys(("observation", "function", "tool_response"), "tool"),
}
"""The roles that messages may name, and what templates call them."""

FORMS = (
    ("messages",), ("conversations",), ("prompt", "completion"), ("instruction", "output", "input")
)  # fmt: skip
"""The columns that make a conversation: the first form of which a row has the first two."""

COLUMNS = (*itertools.chain(*FORMS), "system", "tools")
"""All columns that are read."""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names of a message's reasoning; templates read the first two."""


class Conversation(NamedTuple):
    """A conversation as templates read it.

    Attributes:
        messages: Messages of plain values, each with `role` and `content` (a text).
        tools: Descriptions of tools, or None.
        weights: Whether to train on each message: None where the row says nothing, "prompt" for a
            message of a prompt, which the model is given.
    """

    messages: list[Message]
    tools: list[Any] | None
    weights: list[Weight]


def conversation_of(row: Any) -> Conversation:
    """The conversation of a row.

    Args:
        row: Dictionary with the columns of one of `FORMS`, and perhaps `input`, `system`, `tools`.

    Raises:
        TextError: What cannot be rendered; it names the message.

    >>> row = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "?"}]}
    >>> [message["role"] for message in conversation_of(row).messages]
    ['user', 'assistant']
    """
    if not isinstance(row, Mapping):
        raise TextError(f"a row is {shown(row)}; give a dictionary")
    there = [name for name in COLUMNS if row.get(name) is not None]
    if there == ["messages"] and _is_plain(row["messages"]):
        messages = row["messages"]
        return Conversation(messages, None, [None] * len(messages))
    form = next((one for one in FORMS if {*there} >= {*one[:2]}), None)
    if form is None:
        forms = ", or ".join(" and ".join(one[:2]) for one in FORMS)
        names = shown(sorted(map(str, row)))
        raise TextError(f"the row has the columns {names}; it needs {forms}: rename them")
    columns = {name: row[name] for name in there if name in (*form, "system", "tools")}
    if isinstance(columns.get("tools"), str):  # tables hold them so, as their schemas differ
        with contextlib.suppress(ValueError):  # a text that is not JSON is refused below
            columns["tools"] = json.loads(columns["tools"])
    try:
        # Arrow gives each object all keys of the file: a None stands for an absent one.
        columns = {
            name: plain_json(value, name, keeps_none=False) for name, value in columns.items()
        }
    except ConfigError as error:
        raise TextError(str(error)) from None
    tools = columns.get("tools") or None
    if not isinstance(tools, list | None) or not all(isinstance(one, dict) for one in tools or ()):
        raise TextError(f"tools are {shown(tools)}; give a list of objects, or JSON of one")
    if form[0] == "instruction":
        texts = [_text_of(name, columns.get(name)) for name in ("instruction", "input")]
        columns["instruction"] = "\n\n".join(filter(None, texts))
    pairs = [*_messages_of(form, columns)]
    messages = [_message(place, one) for place, one in pairs]
    weights = [_weight_of(place, one) for (place, _), one in zip(pairs, messages, strict=True)]
    if system := _text_of("system", columns.get("system")):
        if messages[:1] and messages[0]["role"] == "system":
            own = messages[0]["content"]
            if own != system:
                what = f"system is {shown(system)}, but {pairs[0][0]} is {shown(own)}"
                raise TextError(f"{what}: keep one of them")
        else:
            messages.insert(0, {"role": "system", "content": system})
            weights.insert(0, None)
    if not any(message["role"] == "assistant" for message in messages):
        raise TextError(f"none of the {len(messages)} messages is an assistant's")
    return Conversation(messages, tools, weights)


def _is_plain(messages: Any) -> bool:
    """Whether messages are already as templates read them: most are, and this takes no time."""
    roles: list[str] = []
    for one in messages if type(messages) is list else ():
        if type(one) is not dict or len(one) != 2:
            return False
        role, content = one.get("role"), one.get("content")
        if type(role) is not str or type(content) is not str:
            return False
        if role not in _PLAIN_ROLES or not content.strip():
            return False
        roles.append(role)
    return "assistant" in roles


def all_texts(value: Any) -> list[str]:
    """All texts in a plain value, keys included."""
    texts, pending = [], [value]
    for one in pending:
        if type(one) is str:
            texts.append(one)
        elif isinstance(one, dict):
            texts += one
            pending += one.values()
        elif isinstance(one, list):
            pending += one
    return texts


def _messages_of(form: tuple[str, ...], columns: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The messages of a row as they stand there, with their places for errors."""
    for name, role in zip(form, ("user", "assistant"), strict=False):
        value = columns[name]
        if len(form) > 1 and isinstance(value, str):
            yield name, {"role": role, "content": value}
        elif isinstance(value, list):
            yield from ((f"{name}[{number}]", one) for number, one in enumerate(value))
        else:
            raise TextError(f"{name} is {shown(value)}; give a list of messages")


def _message(place: str, value: Any) -> Message:
    if not isinstance(value, dict):
        raise TextError(f"{place} is {shown(value)}; give an object with role and content")
    message = {**value}
    role, content = message.pop("from", None), message.pop("value", None)
    role, content = message.get("role", role), message.get("content", content)
    if not isinstance(role, str) or role not in ROLES:
        raise TextError(
            f"{place} has the role {shown(role)}; the known ones are {', '.join(ROLES)}: rename "
            "it, or make a call the tool_calls of an assistant's message"
        )
    message |= {"role": ROLES[role], "content": _text_of(place, content)}
    reasoning = next((message[name] for name in REASONING if name in message), None)
    if not isinstance(reasoning, str | None):
        raise TextError(f"the reasoning of {place} is {shown(reasoning)}; give a text")
    if reasoning is not None:  # as transformers does, for the templates of both names
        message |= {"reasoning_content": reasoning, "thinking": reasoning}
    calls = message.get("tool_calls", [])
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            what = f"a tool call of {place} is {shown(call)}"
            raise TextError(f'{what}; give {{"function": {{"name": ..., "arguments": ...}}}}')
    if not calls:
        message.pop("tool_calls", None)
    is_spoken = message["role"] in ("user", "assistant")
    if is_spoken and not (message["content"].strip() or reasoning or calls):
        raise TextError(f"{place} ({message['role']}) is empty")
    return message


def _text_of(place: str, content: Any) -> str:
    """A content as one text: the texts of its parts stand one after the other."""
    if isinstance(content, str | None):
        return content or ""
    texts = []
    for part in content if isinstance(content, list) else [content]:
        is_text = isinstance(part, dict) and part.get("type", "text") == "text"
        text = part.get("text") if is_text else part
        if not isinstance(text, str):
            raise TextError(f"the content of {place} has {shown(part)}; only texts can be encoded")
        texts.append(text)
    return "".join(texts)


def _weight_of(place: str, message: Message) -> Weight:
    """Takes `weight` and `train` out of a message."""
    switches = [message.pop(name) for name in ("weight", "train") if name in message]
    if any(type(one) not in (int, float, bool) or one not in (0, 1) for one in switches):
        raise TextError(f"{place} has the weight {shown(switches)}; give 0 or 1")
    if place.startswith("prompt"):
        return "prompt"
    return all(switches) if switches else None
