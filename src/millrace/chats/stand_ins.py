"""Chats that differ in their words alone are proven once: for a stand-in, which has numbers there.

Its proof renders the numbers as sealed texts. A template that writes them without reading them
writes the same for all words, so the mask is the stand-in's.
"""

import itertools
import re
from bisect import bisect_right
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from millrace.chats.conversations import Conversation, Weight
from millrace.chats.proof import Document, Rules, Span, Turn, prove
from millrace.chats.templates import JinjaTemplate
from millrace.errors import TextError

_NUMBERS = [f"90417{number:04d}" for number in range(40)]
"""For the words of each message: longer chats are rarely of one shape."""
_NUMBER, _WIDTH = re.compile("90417([0-9]{4})"), 9

_Shape = tuple[tuple[str, str, Weight], ...]
"""The role, the content with a number for its words, and the weight of each message."""


class _StandIn(NamedTuple):
    """A document with numbers in place of words."""

    document: Document
    pieces: list[str]  # of its text: every second one is a number
    messages: list[int]  # of the numbers
    ends: list[int]  # of the numbers


def prove_chat(chat: Conversation, rules: Rules) -> list[Document]:
    """As `prove`, whose proof of a stand-in serves all chats of one shape, if all that it rendered
    is the beginning of the whole, and if the template does not read the words."""
    shape, words = _shape_of(chat, rules)
    stand_ins = _stand_ins(shape, rules) if shape else None
    if stand_ins is None:
        return prove(chat, rules)
    return [_with_words(one, words) for one in stand_ins]


def _with_words(stand_in: _StandIn, words: list[str]) -> Document:
    document, pieces, messages, ends = stand_in
    own, pieces = [words[message] for message in messages], [*pieces]
    pieces[1::2] = own
    shifts = [*itertools.accumulate((len(word) - _WIDTH for word in own), initial=0)]

    def moved(span: Span) -> Span:
        first, last = span
        return first + shifts[bisect_right(ends, first)], last + shifts[bisect_right(ends, last)]

    turns = [Turn([*map(moved, spans)], moved(stop)) for spans, stop in document.turns]
    return Document("".join(pieces), turns, document.routes)


def _shape_of(chat: Conversation, rules: Rules) -> tuple[_Shape, list[str]]:
    """The shape of a chat, and its words; an empty shape for one that is proven alone."""
    words, shape, messages = list[str](), [], chat.messages
    if chat.tools or len(messages) > len(_NUMBERS) or any(len(one) > 2 for one in messages):
        return (), words
    for message, number, weight in zip(messages, _NUMBERS, chat.weights, strict=False):
        content = message["content"]
        words.append(content.strip())
        # Without words, the white space is a part of the shape.
        held = content.replace(words[-1], number, 1) if words[-1] else content
        shape.append((message["role"], held, weight))
    joined = "\0".join([message["content"] for message in messages])
    # Templates may look for these, and the prompt of a turn may hold the tag with which it begins.
    if any(literal in joined for literal in rules.template.literals):
        return (), words
    return () if any(map(rules.special.match, words)) else tuple(shape), words


@lru_cache(1024)
def _stand_ins(shape: _Shape, rules: Rules) -> list[_StandIn] | None:
    """The documents of a shape; None if its proof tells nothing of others."""
    if isinstance(rules.template, JinjaTemplate):  # ours reads no text
        rules = replace(rules, template=replace(rules.template, is_sealed=True))
    messages = [{"role": role, "content": content} for role, content, _ in shape]
    try:
        documents = prove(Conversation(messages, None, [weight for *_, weight in shape]), rules)
    except TextError:
        return None
    return None if any("prompt" not in one.routes for one in documents) else [*map(_cut, documents)]


def _cut(document: Document) -> _StandIn:
    pieces = _NUMBER.split(document.text)
    ends = [match.end() for match in _NUMBER.finditer(document.text)]
    return _StandIn(document, pieces, [int(number) for number in pieces[1::2]], ends)
