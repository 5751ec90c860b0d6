"""What a template does with a few conversations: whether it can be used, and how turns stop."""

from dataclasses import replace

from millrace.chats.conversations import Conversation, Message
from millrace.chats.proof import Document, Renderings, Rules, prove, shared_length
from millrace.chats.templates import Template
from millrace.errors import ConfigError, TextError

LOOKS_SPECIAL = r"<[^\s<>]{1,60}>|\[\|[^\s\[\]|]{1,60}\|\]"
"""What is taken for a special token although the tokenizer has none of that text."""

_SYSTEM = {"role": "system", "content": "Rivers drive mills."}
_CHAT = [
    {"role": "user", "content": "Which river drives the lower mill?"},
    {"role": "assistant", "content": "The Ouse drives it."},
    {"role": "user", "content": "And which one drives the upper mill?"},
    {"role": "assistant", "content": "That one stands on the Cam."},
]
_CALL = {"name": "find_river", "arguments": {"mill": "the upper one"}}
_CALLS: list[Message] = [
    _CHAT[0],
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": "call00001", "function": _CALL}],
    },
    {"role": "tool", "content": "River Cam", "name": "find_river", "tool_call_id": "call00001"},
]


def learn(template: Template, rules: Rules, stop: str | None) -> tuple[Rules, list[Document]]:
    """The rules of a template, from those that the caller asks for and the text of the stop token
    or None, and the documents of a probe; ConfigError for a template that cannot be used."""
    messages, has_parts = _readable(template)
    rules = replace(rules, has_parts=has_parts)
    rules = replace(rules, stops=(stop,) if stop else _stops(template, rules, messages))
    rules = replace(rules, has_prompt=_has_prompt(template, rules, messages))
    try:
        probe = replace(rules, turns="all", history="documents")
        documents = prove(_chat(messages), template, probe)
    except TextError as error:
        raise ConfigError(f"the masks of {template.name} cannot be proven. {error}") from None
    if not any(turn.stop[0] < turn.stop[1] for one in documents for turn in one.turns):
        what = " or ".join(map(repr, rules.stops)) or "a special token"
        raise ConfigError(f"{template.name} does not end turns with {what}{_NO_STOP}")
    return rules, documents


_NO_STOP = (
    ", so that the model would never learn to stop: give stop=TEXT of the token that stops, or "
    "another template"
)


def _chat(messages: list[Message]) -> Conversation:
    return Conversation(messages, None, [None] * len(messages))


def _has_prompt(template: Template, rules: Rules, messages: list[Message]) -> bool:
    """Whether generation prompts hold all that stands before answers: the template has such a
    prompt, or answers follow at once, or it ends each chat with the prompt, asked for or not."""
    try:
        plain, prompt = (_text(template, rules, messages[:-1], one) for one in (False, True))
    except TextError:
        return False
    turn = _text(template, rules, messages).removeprefix(plain)
    header, _, tail = turn.partition(str(messages[-1]["content"]))
    for stop in rules.stops:
        tail = tail.rpartition(stop)[2]
    is_always = bool(tail.strip()) and plain.endswith(tail)
    return plain != prompt or not header.strip() or is_always


def _text(
    template: Template, rules: Rules, messages: list[Message], has_prompt: bool = False
) -> str:
    return Renderings(_chat(messages), template, rules).text(len(messages), has_prompt)


def _readable(template: Template) -> tuple[list[Message], bool]:
    """A probe that the template renders with all its contents, and whether contents are parts."""
    error = "it leaves out what the assistant says"
    for has_parts in (False, True):
        for messages in (_CHAT, [_SYSTEM, *_CHAT], _CHAT[:2]):
            try:
                text = _text(template, Rules(has_parts=has_parts), messages)
            except TextError as problem:
                error = str(problem)
                continue
            is_whole = all(one["content"] in text for one in messages if one["role"] == "assistant")
            if is_whole and "'type': 'text'" not in text:  # not a list as Python prints it
                return messages, has_parts
    raise ConfigError(f"{template.name} cannot be used: {error}")


def _stops(template: Template, rules: Rules, messages: list[Message]) -> tuple[str, ...]:
    """The texts that stop turns, of contents and of tool calls; empty if what begins the next turn
    does."""
    stops: list[str] = []
    place = next(at for at, one in enumerate(messages) if one["role"] == "assistant")
    asked, answer = (str(messages[at]["content"]) for at in (place - 1, place))
    after_user = rules.special.search(_text(template, rules, messages).partition(asked)[2])
    usual = [template.arguments.get("eos_token"), after_user[0] if after_user else None]
    for probe, length, content in ((messages, place, answer), (_CALLS, 1, "the upper one")):
        try:
            texts = [_text(template, rules, probe[: length + more]) for more in (1, 2)]
        except TextError:
            continue
        if not all(content in text for text in texts):
            continue  # it leaves out tool calls
        end, middle = (text.rpartition(content)[2] for text in texts)
        shared = [one for one in stops if one in end and one in middle]
        if not shared:
            both = end[: shared_length(end, middle)]
            shared = [one[0] for one in rules.special.finditer(both)]
        if not shared:  # the end of the chat has a token of its own
            matches = rules.special.finditer(end.rstrip())
            shared = [one[0] for one in matches if one.end() == len(end.rstrip())]
        if shared:
            stops.append(next((one for one in usual if one in shared), shared[-1]))
        elif probe is messages and rules.special.search(middle):
            return ()
        elif probe is messages:
            raise ConfigError(f"{template.name} ends turns without a special token{_NO_STOP}")
    return tuple(dict.fromkeys(stops))
