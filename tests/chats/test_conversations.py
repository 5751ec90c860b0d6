"""Rows of every form into conversations, and what is refused of them."""

from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.chats import ChatEncoder
from millrace.chats.conversations import conversation_of
from millrace.encoding import Tokenizer
from millrace.errors import TextError
from millrace.online import TextDataset

USER = {"role": "user", "content": "u"}
CHAT = [USER, {"role": "assistant", "content": "a"}]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": [None, 1]}}}
ARROW = {**CALL, "id": None}
ARROW["function"] = {"name": "f", "arguments": {"x": np.array([None, 1]), "of other rows": None}}


def said(**values: Any) -> dict[str, Any]:
    """A row in which the assistant's message has these values."""
    return {"messages": [USER, {"role": "assistant", **values}]}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT},
        {"messages": tuple(CHAT), "conversations": None},
        {"messages": np.array(CHAT, object)},
        {"messages": [USER, {"role": "gpt", "content": np.str_("a"), "tool_calls": None}]},
        said(content=[{"type": "text", "text": "a"}]),
        {"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]},
        {"prompt": "u", "completion": "a"},
        {"prompt": CHAT[:1], "completion": CHAT[1:]},
        {"instruction": "u", "output": "a"},
        {"instruction": "u", "input": "", "output": "a"},
    ],
)
def test_forms_of_rows(row: dict[str, Any]) -> None:
    weights = ["prompt" if "prompt" in row else None, None]
    chat = conversation_of(row)
    assert chat == (CHAT, None, weights)
    assert all(type(value) is str for one in chat.messages for value in one.values())


def test_the_other_parts_of_messages() -> None:
    row = {"instruction": "u", "input": "more", "output": "a", "system": "s"}
    chat = conversation_of({**row, "tools": [{"name": "f", "b": None}]})
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
        ({}, "it needs messages, or conversations"),
        ({"messages": "u"}, "messages is 'u'; give a list"),
        ({"messages": CHAT[:1]}, "none of the 1 messages is an assistant's"),
        ({"messages": [USER, "a"]}, r"messages\[1\] is 'a'"),
        ({"messages": [USER, {"content": "a"}]}, r"messages\[1\] has the role None"),
        ({"messages": [{**USER, "role": "boss"}]}, r"messages\[0\] has the role 'boss'"),
        ({"messages": [USER, {"role": "function_call"}]}, "the tool_calls of an assistant"),
        (said(content=" \n"), r"\[1\] .* is empty"),
        ({"messages": [{"role": "user"}, CHAT[1]]}, r"messages\[0\] \(user\) is empty"),
        (said(content=3), r"messages\[1\] has 3; only"),
        (said(content=date(2020, 1, 1)), r"messages\[1\].content is .*date"),
        (said(content="a", x=[{1: "a"}]), r"messages\[1\].x\[0\] has the key 1"),
        ({"messages": CHAT, "tools": [{None: 1}]}, r"tools\[0\] has the key None"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "text": "a"}]}]}, "only"),
        (said(content="a", tool_calls="f"), r"a tool call of messages\[1\]"),
        (said(content="a", tool_calls=[{"function": {}}]), "a tool call of"),
        (said(content="a", thinking=3), r"reasoning of messages\[1\] is 3"),
        (said(content="a", weight=0.5), r"messages\[1\] has the weight \[0.5\]"),
        ({"messages": CHAT, "system": 3}, "content of system has 3; only texts"),
        (
            {"messages": [{"from": "system", "value": "b"}, *CHAT], "system": "s"},
            r"system is 's', but messages\[0\] is 'b': keep one",
        ),
        ({"messages": CHAT, "tools": "{"}, "tools are '{'; give a list"),
        ({"messages": CHAT, "tools": '[{"a": NaN}]'}, r"tools\[0\].a is nan, which"),
        ({"messages": CHAT, "tools": ["f"]}, "give a list of objects"),
        ({"prompt": 3, "completion": "a"}, "prompt is 3"),
        ({"prompt": "u", "completion": ""}, "completion .* is empty"),
        ({"instruction": "u", "input": ["a", 3], "output": "a"}, "content of input has 3; only"),
    ],
)
def test_rows_that_are_refused(row: Any, reason: str, tmp_path: Path) -> None:
    """On the fly, and by the job, whose file of rows could not hold all of them."""
    for cache in (None, tmp_path):
        options: Any = {"sequence_length": 4, "workers": 1, "cache": cache}
        with pytest.raises(TextError, match=f"list, row 0: .*{reason}"):
            TextDataset([row], ChatEncoder(Tokenizer("bytes")), **options)[0]


def test_a_nested_row_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    rows = ChatEncoder(Tokenizer("bytes")).encode([said(content="a", x=deep), {"messages": CHAT}])
    assert rows.counts.tolist() == [0, 1]
    assert "nested too deeply" in rows.problems[0]
    while deep:  # else its destruction would be nested, too
        deep = deep.pop()
