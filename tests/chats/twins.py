"""Small chat templates, and a twin of each in Python that says which characters must be trained.

A twin knows its template's layout, so that its rules are not those of the routes: it gives the text
of a chat in segments, and for each segment the message that it trains, or None.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Messages = Sequence[dict[str, Any]]
Segments = list[tuple[str, int | None]]

_CALLS = (
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}</call>{% endfor %}"
)
_PROMPT = "{% if add_generation_prompt %}[|assistant|]{% endif %}"

PLAIN = (
    f"{{% for m in messages %}}[|{{{{ m.role }}}}|]{{{{ m.content }}}}{_CALLS}<|end|>\n"
    f"{{% endfor %}}{_PROMPT}"
)
TAGGED = (
    "{% for m in messages %}[|{{ m.role }}|]{% if m.role == 'assistant' %}{% generation %}"
    f"{{{{ m.content }}}}{_CALLS}<|end|>{{% endgeneration %}}{{% else %}}{{{{ m.content }}}}<|end|>"
    f"{{% endif %}}{{{{ '\\n' }}}}{{% endfor %}}{_PROMPT}"
)
STRIPPED = (
    f"<s>{{% for m in messages %}}[|{{{{ m.role }}}}|]{{{{ m.content | trim }}}}{_CALLS}<|end|>"
    f"{{% endfor %}}{_PROMPT}"
)
THINKING = (  # the reasoning of all but the last turn is left out
    "{% for m in messages %}[|{{ m.role }}|]{% if m.role == 'assistant' and loop.last %}<think>"
    f"{{{{ m.reasoning_content or '' }}}}</think>{{% endif %}}{{{{ m.content }}}}{_CALLS}<|end|>\n"
    f"{{% endfor %}}{_PROMPT}"
)
THINKING_BY_CONTENT = (  # what a content says before a tag is left out, and the tag shows that
    "{% for m in messages %}[|{{ m.role }}|]{% if m.role == 'assistant' %}"
    "{% if loop.last or '</think>' in m.content %}<think></think>{% endif %}"
    f"{{{{ m.content.split('</think>')[-1] }}}}{_CALLS}{{% else %}}{{{{ m.content }}}}{{% endif %}}"
    f"<|end|>\n{{% endfor %}}{_PROMPT}"
)
MARKED_BY_NEXT = (  # as in GLM, nothing ends a turn but the role of the next one
    f"{{% for m in messages %}}<|{{{{ m.role }}}}|>{{{{ m.content }}}}{_CALLS}{{% endfor %}}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PARTS = (
    "{% for m in messages %}[|{{ m.role }}|]{% for part in m.content %}{% if part.type == 'text' %}"
    f"{{{{ part.text }}}}{{% endif %}}{{% endfor %}}{_CALLS}<|end|>\n{{% endfor %}}{_PROMPT}"
)
SYSTEM_LAST = (  # as in Mistral's, the system message stands before the last message, if a user's
    "{% set first = messages[0].content + '\\n' if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'assistant' %}"
    f" {{{{ m.content }}}}{_CALLS}<|end|>{{% else %}}[|{{{{ m.role }}}}|]"
    "{{ first if loop.last else '' }}{{ m.content }}[|/{{ m.role }}|]{% endif %}{% endfor %}"
)


def _calls(message: dict[str, Any]) -> str:
    functions = [call["function"] for call in message.get("tool_calls", [])]
    return "".join(
        f"<call>{one['name']}{json.dumps(one['arguments'], ensure_ascii=False)}</call>"
        for one in functions
    )


def _segments(
    messages: Messages,
    body: Callable[[int, dict[str, Any]], str] = lambda number, message: message["content"],
    *,
    start: str = "",
    after: str = "\n",
) -> Segments:
    segments: Segments = [(start, None)]
    for number, message in enumerate(messages):
        role, text = message["role"], body(number, message) + _calls(message)
        target = number if role == "assistant" else None
        segments += [(f"[|{role}|]", None), (text + "<|end|>", target), (after, None)]
    return segments


def _thinking(messages: Messages) -> Segments:
    def body(number: int, message: dict[str, Any]) -> str:
        is_last = message["role"] == "assistant" and number + 1 == len(messages)
        thought = message.get("reasoning_content", "")
        return (f"<think>{thought}</think>" if is_last else "") + message["content"]

    return _segments(messages, body)


def _thinking_by_content(messages: Messages) -> Segments:
    def body(number: int, message: dict[str, Any]) -> str:
        text = message["content"]
        if message["role"] != "assistant":
            return str(text)
        is_shown = number + 1 == len(messages) or "</think>" in text
        return ("<think></think>" if is_shown else "") + str(text.split("</think>")[-1])

    return _segments(messages, body)


def _marked_by_next(messages: Messages) -> Segments:
    segments: Segments = []
    for number, message in enumerate(messages):
        is_after = number > 0 and messages[number - 1]["role"] == "assistant"
        target = number if message["role"] == "assistant" else None
        segments.append((f"<|{message['role']}|>", number - 1 if is_after else None))
        segments.append((message["content"] + _calls(message), target))
    return segments


def _system_last(messages: Messages) -> Segments:
    """Of a chat that ends with a turn: what its generation is given, and the turn."""
    segments: Segments = []
    first = f"{messages[0]['content']}\n" if messages[0]["role"] == "system" else ""
    for number, message in enumerate(messages):
        role = message["role"]
        if role == "assistant":
            target = number if number + 1 == len(messages) else None
            segments.append((f" {message['content']}{_calls(message)}<|end|>", target))
        elif role != "system":
            start = first if number + 2 == len(messages) else ""
            segments.append((f"[|{role}|]{start}{message['content']}[|/{role}|]", None))
    return segments


class Twin(NamedTuple):
    """A template, its twin, and the routes that prove it."""

    template: str
    segments: Callable[[Messages], Segments]
    routes: tuple[str, ...] = ("markers", "prompt")


TWINS = {
    "plain": Twin(PLAIN, _segments),
    "tagged": Twin(TAGGED, _segments, ("markers", "prompt", "tags")),
    "stripped": Twin(
        STRIPPED,
        lambda messages: _segments(
            messages, lambda _, one: one["content"].strip(), start="<s>", after=""
        ),
    ),
    "thinking": Twin(THINKING, _thinking),
    "marked by next": Twin(MARKED_BY_NEXT, _marked_by_next),
    "thinking by content": Twin(THINKING_BY_CONTENT, _thinking_by_content),
    "parts": Twin(PARTS, _segments),
    "system last": Twin(SYSTEM_LAST, _system_last),
}


def expected(twin: Twin, messages: Messages, message: int) -> tuple[str, set[int]]:
    """The text up to the end of a turn, and the characters that train it."""
    text, trained = "", set[int]()
    for segment, target in twin.segments(messages):
        if target == message:
            trained |= set(range(len(text), len(text) + len(segment)))
        text += segment
    return text[: max(trained) + 1], trained
