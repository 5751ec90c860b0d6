"""What a template does with a few conversations: whether it can be used, and how turns stop."""

from dataclasses import replace

from millrace.chats.conversations import Conversation, Message
from millrace.chats.proof import Document, Rules, prove, shared_length
from millrace.chats.templates import JinjaTemplate, Template
from millrace.errors import ConfigError, TextError

LOOKS_SPECIAL = r"<[^\s<>]{1,60}>|\[\|[^\s\[\]|]{1,60}\|\]"
"""What is taken for a special token although the tokenizer has none of that text."""

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
_NO_STOP = (
    ", so that the model would never learn to stop: give stop=TEXT of the token that stops, or "
    "another template"
)


def learn(rules: Rules) -> tuple[Rules, list[Document]]:
    """The rules with the template as it reads contents, and with its stop tokens; and the documents
    of a probe. ConfigError for a template that cannot be used."""
    template, messages = _readable(rules.template)
    rules, stop = replace(rules, template=template), rules.options.stop
    rules = replace(rules, stops=(stop,) if stop else _stops(rules, messages))
    options = replace(rules.options, turns="all", history="documents")
    try:
        chat = Conversation(messages, None, [None] * len(messages))
        documents = prove(chat, replace(rules, options=options))
    except TextError as error:
        raise ConfigError(f"the masks of {template.name} cannot be proven. {error}") from None
    if not any(turn.stop[0] < turn.stop[1] for one in documents for turn in one.turns):
        what = " or ".join(map(repr, rules.stops)) or "a special token"
        raise ConfigError(f"{template.name} does not end turns with {what}{_NO_STOP}")
    return rules, documents


def _readable(template: Template) -> tuple[Template, list[Message]]:
    """The template, with contents as texts or as parts, and a probe that it renders as a whole."""
    error = "it leaves out what the assistant says"
    templates = [template]
    if isinstance(template, JinjaTemplate):
        templates.append(replace(template, has_parts=True))
    for candidate in templates:
        for messages in (_CHAT, _CHAT[:2]):
            try:
                text = candidate.render(messages, None)
            except TextError as problem:
                error = str(problem)
                continue
            is_whole = all(one["content"] in text for one in messages if one["role"] == "assistant")
            if is_whole and "'type': 'text'" not in text:  # not a list as Python prints it
                return candidate, messages
    raise ConfigError(f"{template.name} cannot be used: {error}")


def _stops(rules: Rules, messages: list[Message]) -> tuple[str, ...]:
    """The texts that stop turns, of contents and of tool calls; empty if what begins the next turn
    does."""
    stops, template = list[str](), rules.template
    asked, answer = (one["content"] for one in messages[:2])
    after_user = rules.special.search(template.render(messages, None).partition(asked)[2])
    usual = [template.arguments.get("eos_token"), after_user[0] if after_user else None]
    for probe, content in ((messages, answer), (_CALLS, "the upper one")):
        try:
            texts = [template.render(probe[:length], None) for length in (2, 3)]
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
