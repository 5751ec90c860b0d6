"""Chats that differ in their words alone are proven once: for a stand-in, which has numbers there.

All that its proof rendered is rendered again with sealed texts in place of the numbers. A template
that writes the same without reading them writes it for all words, so the mask is the stand-in's.
"""

import bisect
import itertools
import re
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from millrace.chats.conversations import Conversation, Weight
from millrace.chats.proof import Document, Rules, Span, Turn, prove
from millrace.chats.sealed import SealedText
from millrace.chats.templates import JinjaTemplate
from millrace.errors import TextError

_NUMBERS = [f"90417{number:04d}" for number in range(40)]
"""For the words of each message: longer chats are rarely of one shape."""
_NUMBER = re.compile("90417([0-9]{4})")
_WIDTH = len(_NUMBERS[0])

_Shape = tuple[tuple[str, str, Weight], ...]
"""The role, the content with a number for its words, and the weight of each message."""


class _StandIn(NamedTuple):
    parts: list[str]  # of its text: every other one is a number
    order: list[int]  # these numbers
    ranks: dict[int, int]  # how many numbers are before a place in the text
    document: Document


def prove_chat(chat: Conversation, rules: Rules) -> list[Document]:
    """As `prove`, whose proof of a stand-in serves all chats of one shape if it has one document,
    with which all that it rendered begins, and if the template does not read the words."""
    shape, words = _shape_of(chat, rules)
    stand_in = _stand_in(shape, rules) if shape else None
    if stand_in is None:
        return prove(chat, rules)
    parts, order, ranks, document = stand_in
    parts = [*parts]
    parts[1::2] = here = [words[number] for number in order]
    sums = [*itertools.accumulate([len(one) - _WIDTH for one in here], initial=0)]

    def moved(span: Span) -> Span:
        start, end = span
        return start + sums[ranks[start]], end + sums[ranks[end]]

    turns = [Turn([*map(moved, spans)], moved(stop)) for spans, stop in document.turns]
    return [Document("".join(parts), turns, document.routes)]


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
def _stand_in(shape: _Shape, rules: Rules) -> _StandIn | None:
    """The stand-in of a shape; None if its proof tells nothing of others."""
    template, weights = rules.template, [weight for *_, weight in shape]
    messages = [{"role": role, "content": content} for role, content, _ in shape]
    sealed = [
        {**one, "content": SealedText.alone(one["content"], template.literals)}
        if _NUMBER.search(one["content"])
        else one
        for one in messages
    ]
    texts: dict[tuple[int, bool], str] = {}
    if isinstance(template, JinjaTemplate):  # ours reads no text
        template = replace(template, is_sealed=True)
    try:
        text = template.render(sealed, None)
        document, *others = prove(Conversation(messages, None, weights), rules, texts)
        for (length, has_prompt), one in texts.items():
            is_alike = one == template.render(sealed[:length], None, has_prompt)
            if not (is_alike and text.startswith(one)):
                return None
    except TextError:
        return None
    if others or document.text != text or "prompt" not in document.routes:
        return None
    parts, starts = _NUMBER.split(text), [match.start() for match in _NUMBER.finditer(text)]
    spans = [*document.spans, *(turn.stop for turn in document.turns)]
    ranks = {place: bisect.bisect_left(starts, place) for place in itertools.chain(*spans)}
    if any(rank and place < starts[rank - 1] + _WIDTH for place, rank in ranks.items()):
        return None  # it is within a number
    return _StandIn(parts, [*map(int, parts[1::2])], ranks, document)
