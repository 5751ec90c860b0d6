"""Rows of every form into conversations, and what is refused of them."""

from typing import Any

import numpy as np
import pytest

from millrace.chats import ChatEncoder
from millrace.chats.conversations import conversation_of
from millrace.encoding import Tokenizer
from millrace.errors import TextError

USER = {"role": "user", "content": "u"}
CHAT = [USER, {"role": "assistant", "content": "a"}]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": [None, 1]}}}
ARROW = {**CALL, "id": None}
ARROW["function"] = {"name": "f", "arguments": {"x": np.array([None, 1]), "of other rows": None}}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT},
        {"messages": tuple(CHAT), "conversations": None},
        {"messages": np.array(CHAT, object)},
        {"messages": [USER, {"role": "gpt", "content": np.str_("a"), "tool_calls": None}]},
        {"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}]},
        {"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]},
        {"prompt": "u", "completion": "a"},
        {"prompt": CHAT[:1], "completion": CHAT[1:]},
        {"instruction": "u", "output": "a"},
        {"instruction": "u", "input": "", "output": "a"},
    ],
)
def test_forms_of_rows(row: dict[str, Any]) -> None:
    chat = conversation_of(row)
    assert [(one["role"], one["content"]) for one in chat.messages] == [
        ("user", "u"), ("assistant", "a")
    ]  # fmt: skip
    assert chat.tools is None
    assert chat.weights == ["prompt" if "prompt" in row else None, None]
    assert all(type(value) is str for one in chat.messages for value in one.values())


def test_the_other_parts_of_messages() -> None:
    row = {
        "instruction": "u", "input": "more", "output": "a", "system": "s",
        "tools": [{"name": "f", "b": None}],
    }  # fmt: skip
    chat = conversation_of(row)
    assert [one["content"] for one in chat.messages] == ["s", "u\n\nmore", "a"]
    assert chat.tools == [{"name": "f"}]
    system = {"role": "system", "content": "s"}
    assert conversation_of({"messages": [system, *CHAT], "system": "s"}).messages[1:] == CHAT
    turns = [
        USER,
        {"role": "assistant", "tool_calls": [ARROW]},
        {"from": "observation", "value": ""},
        {"role": "assistant", "content": "a", "reasoning": "r", "weight": np.float32(1)},
        {"role": "assistant", "content": "b", "train": False, "weight": True},
    ]
    chat = conversation_of({"messages": turns})
    assert chat.messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert chat.messages[2] == {"role": "tool", "content": ""}
    assert chat.messages[3]["reasoning_content"] == chat.messages[3]["thinking"] == "r"
    assert chat.weights == [None, None, None, True, False]
    assert "weight" not in chat.messages[3]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (3, "a row is 3; give a dictionary"),
        ({}, "it needs messages, or conversations"),
        ({"messages": "u"}, "messages is 'u'; give a list"),
        ({"messages": CHAT[:1]}, "none of the 1 messages is an assistant's"),
        ({"messages": [USER, "a"]}, r"messages\[1\] is 'a'"),
        ({"messages": [USER, {"content": "a"}]}, r"messages\[1\] has no role"),
        ({"messages": [{**USER, "role": "boss"}]}, r"messages\[0\] has the role 'boss'"),
        ({"messages": [USER, {"role": "assistant", "content": " \n"}]}, r"\[1\] .* is empty"),
        ({"messages": [{"role": "user"}, CHAT[1]]}, r"messages\[0\] \(user\) is empty"),
        ({"messages": [USER, {"role": "assistant", "content": 3}]}, r"messages\[1\] has 3; only"),
        (
            {"messages": [USER, {"role": "assistant", "content": b"a"}]},
            r"messages\[1\].content is b'a'",
        ),
        ({"messages": [USER, {**CHAT[1], "x": [{1: "a"}]}]}, r"messages\[1\].x\[0\] has the key 1"),
        ({"messages": CHAT, "tools": [{None: 1}]}, r"tools\[0\] has the key None"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "text": "a"}]}]}, "only"),
        ({"messages": [USER, {**CHAT[1], "tool_calls": "f"}]}, r"a tool call of messages\[1\]"),
        ({"messages": [USER, {**CHAT[1], "tool_calls": [{"function": {}}]}]}, "a tool call of"),
        ({"messages": [USER, {**CHAT[1], "thinking": 3}]}, r"reasoning of messages\[1\] is 3"),
        ({"messages": [USER, {**CHAT[1], "weight": 0.5}]}, r"messages\[1\] has the weight \[0.5\]"),
        ({"messages": CHAT, "system": 3}, "content of system has 3; only texts"),
        (
            {"messages": [{"from": "system", "value": "b"}, *CHAT], "system": "s"},
            r"system is 's', but messages\[0\] is 'b': keep one",
        ),
        ({"messages": CHAT, "tools": "{"}, "tools: '{' is not JSON"),
        ({"messages": CHAT, "tools": '[{"a": NaN}]'}, r"tools\[0\].a is nan, which"),
        ({"messages": CHAT, "tools": ["f"]}, "give a list of objects"),
        ({"prompt": 3, "completion": "a"}, "prompt is 3"),
        ({"prompt": "u", "completion": ""}, "completion .* is empty"),
        (
            {"instruction": "u", "input": np.array(["a", 3], object), "output": "a"},
            "content of input has 3; only",
        ),
    ],
)
def test_rows_that_are_refused(row: Any, reason: str) -> None:
    with pytest.raises(TextError, match=reason):
        conversation_of(row)


def test_a_nested_row_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    row = {"messages": [USER, {**CHAT[1], "x": deep}]}
    rows = ChatEncoder(Tokenizer("bytes")).encode([row, {"messages": CHAT}])
    assert rows.counts.tolist() == [0, 1]
    assert "nested too deeply" in rows.problems[0]
    while deep:  # else its destruction would be nested, too
        deep = deep.pop()
