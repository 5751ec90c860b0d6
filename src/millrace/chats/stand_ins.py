"""Chats that differ in their words alone are proven once: for a stand-in, which has numbers there.

What the proof of the stand-in rendered is rendered for each chat, too, and must say the same but
for the words. So nothing in it depends on the words, and the mask is that of the stand-in.
"""

import bisect
import itertools
import re
from functools import lru_cache
from typing import NamedTuple

from millrace.chats.conversations import Conversation
from millrace.chats.proof import Document, Rules, Span, Turn, prove
from millrace.chats.templates import Tags
from millrace.errors import TextError

_NUMBERS = [f"90417{number:04d}" for number in range(1000)]  # at most so many messages
_NUMBER = re.compile("90417([0-9]{4})")
_WIDTH = len(_NUMBERS[0])

_Shape = tuple[tuple[str, str, bool | None], ...]
"""The role, the content with a number for its words, and the weight of each message."""


class _StandIn(NamedTuple):
    parts: list[str]  # of its text: every other one is a number
    order: list[int]  # these numbers
    ranks: dict[int, int]  # how many numbers are before a place in the text
    beginnings: dict[tuple[int, bool], int]  # lengths of other renderings: the text begins so
    tags: Tags | None
    document: Document


def prove_chat(chat: Conversation, rules: Rules) -> list[Document]:
    """As `prove`, whose proof of a stand-in serves all chats of one shape if it has one document,
    with which all that it rendered begins."""
    shape, words = _shape_of(chat, rules)
    stand_in = _stand_in(shape, rules) if shape else None
    document = _document(chat, words, rules, stand_in) if stand_in else None
    return prove(chat, rules) if document is None else [document]


def _shape_of(chat: Conversation, rules: Rules) -> tuple[_Shape, list[str]]:
    """The shape of a chat, and its words; an empty shape for one that is proven alone."""
    words, shape, messages = list[str](), [], chat.messages
    if chat.tools or len(messages) > len(_NUMBERS) or any(len(one) > 2 for one in messages):
        return (), words
    for message, number, weight in zip(messages, _NUMBERS, chat.weights, strict=False):
        content = message["content"]
        words.append(content.strip())
        if words[-1] == content:
            shape.append((message["role"], content and number, weight))
        else:  # white space around them, or nothing else
            before, _, after = content.partition(words[-1] or content)
            shape.append((message["role"], f"{before}{words[-1] and number}{after}", weight))
    joined = "\0".join(words)
    # Templates may look for these, and the prompt of a turn may hold the tag with which it begins.
    if any(literal in joined for literal in rules.template.literals):
        return (), words
    return () if any(map(rules.special.match, words)) else tuple(shape), words


@lru_cache(256)
def _stand_in(shape: _Shape, rules: Rules) -> _StandIn | None:
    """The stand-in of a shape; None if its proof tells nothing of others."""
    messages = [{"role": role, "content": content} for role, content, _ in shape]
    texts: dict[tuple[int, bool], str] = {}
    tags: Tags | None = [] if rules.template.has_tags else None
    try:
        documents = prove(Conversation(messages, None, [one for *_, one in shape]), rules, texts)
        text = texts.pop((len(messages), False), "")
        if tags is not None:
            text = rules.template.render(messages, None, tags=tags)
    except TextError:
        return None
    document, is_one = documents[0], len(documents) == 1 and "prompt" in documents[0].routes
    if not is_one or document.text != text or not all(map(text.startswith, texts.values())):
        return None
    parts = _NUMBER.split(text)
    starts = [match.start() for match in _NUMBER.finditer(text)]
    spans = [*(tags or ()), *document.spans, *(turn.stop for turn in document.turns)]
    places = {*itertools.chain(*spans), *map(len, texts.values())}
    ranks = {place: bisect.bisect_left(starts, place) for place in places}
    if any(rank and place < starts[rank - 1] + _WIDTH for place, rank in ranks.items()):
        return None  # it is within a number
    lengths = {key: len(one) for key, one in texts.items()}
    return _StandIn(parts, [*map(int, parts[1::2])], ranks, lengths, tags, document)


def _document(
    chat: Conversation, words: list[str], rules: Rules, stand_in: _StandIn
) -> Document | None:
    """The document of a chat by that of its stand-in; None if they are rendered in other ways."""
    parts, order, ranks, beginnings, tags, document = stand_in
    parts = [*parts]
    parts[1::2] = here = [words[number] for number in order]
    sums = [*itertools.accumulate([len(one) - _WIDTH for one in here], initial=0)]
    places = {place: place + sums[rank] for place, rank in ranks.items()}

    def moved(spans: list[Span]) -> list[Span]:
        return [(places[start], places[end]) for start, end in spans]

    render, own = rules.template.render, None if tags is None else list[Span]()
    text = render(chat.messages, None, tags=own)
    if text != "".join(parts) or own != (None if tags is None else moved(tags)):
        return None
    for (length, has_prompt), end in beginnings.items():
        try:
            if render(chat.messages[:length], None, has_prompt) != text[: places[end]]:
                return None
        except TextError:
            return None
    turns = [Turn(moved(spans), *moved([stop])) for spans, stop in document.turns]
    return Document(text, turns, document.routes)
