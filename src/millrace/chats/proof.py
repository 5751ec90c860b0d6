"""Which characters of a rendered chat are trained on, by three routes that must agree.

- "markers" (`millrace.chats.markers`) tells where the contents of each message are.
- "prompt" renders the chat up to a turn with the generation prompt, which the model will be given,
  and the chat that ends with the turn. Both must be the beginning of the whole.
- "tags" are the template's own marks around what the model has written.

Trained are the characters from the end of the generation prompt to the end of the stop token.
"""

import itertools
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

from millrace.chats.conversations import Conversation, Weight
from millrace.chats.markers import Marker, MessageSpan
from millrace.chats.options import CALL, THOUGHT, ChatOptions
from millrace.chats.templates import JinjaTemplate, Tags, Template
from millrace.errors import TextError

Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Rules:
    """What to train on, and what is known of the template."""

    options: ChatOptions
    template: Template
    special: re.Pattern[str]
    stops: tuple[str, ...] = ()  # texts that stop turns; none: the token that begins the next does


class Turn(NamedTuple):
    """What is trained of one turn, in characters: spans, and the stop token, which is in them; it
    is empty for a turn without one."""

    spans: list[Span]
    stop: Span


class Document(NamedTuple):
    """A rendered text, what is trained of it, the names of the routes that agree, and the number of
    turns whose reasoning the template never renders."""

    text: str
    turns: list[Turn]
    routes: tuple[str, ...]
    num_bare: int = 0

    @property
    def spans(self) -> list[Span]:
        """Characters that are trained on."""
        return [span for turn in self.turns for span in turn.spans]


class NoTargetError(TextError):
    """A chat of which no token is trained on."""


class _RewrittenError(Exception):
    """A turn whose context is another one in the whole chat."""


def prove(chat: Conversation, rules: Rules) -> list[Document]:
    """The documents of a conversation, several if a template rewrites its history. TextError
    for a chat that the template refuses, a mask that is not proven, or no target."""
    pending, template = _turns_to_train(chat, rules.options.turns), rules.template

    @cache
    def text_of(length: int, has_prompt: bool) -> str:
        return template.render(chat.messages[:length], chat.tools, has_prompt)

    documents: list[Document] = []
    length = len(chat.messages)
    while pending:
        if length < len(chat.messages) and rules.options.history == "refuse":
            raise TextError(
                f"message {pending[-1]}: {template.name} renders it in another way if more "
                'messages follow: give history="documents" for a document that ends with it'
            )
        proof = _Proof(chat, rules, length, text_of)
        document, proven = proof.document(pending)
        if document.turns:
            num_bare = sum(THOUGHT in proof.lost.get(message, ()) for message in proven)
            documents.append(document._replace(num_bare=num_bare))
        pending = [message for message in pending if message not in proven]
        length = pending[-1] + 1 if pending else 0
    if not documents:
        raise NoTargetError("it has no target: its turns have nothing of the kinds to train on")
    return documents[::-1]


def _turns_to_train(chat: Conversation, which: str) -> list[int]:
    turns = [
        number
        for number, one in enumerate(chat.messages)
        if one["role"] == "assistant" and chat.weights[number] != "prompt"
    ]
    turns = turns[-1:] if which == "last" else turns
    kept = [number for number in turns if chat.weights[number] is not False]
    if which != "weight" and kept != turns:
        what = f"message {min({*turns} - {*kept})} has the weight 0"
        raise TextError(f'{what}: give turns="weight" to heed weights, or remove them')
    if not kept:
        what = "all its turns have the weight 0, or are the prompt's"
        raise NoTargetError(f"it has no target: {what}")
    return kept


class _Proof:
    """The proof of the turns of the first `length` messages."""

    def __init__(
        self, chat: Conversation, rules: Rules, length: int, text_of: Callable[[int, bool], str]
    ) -> None:
        template, self.rules, self.name = rules.template, rules, rules.template.name
        self.messages = chat.messages[:length]
        self.text_of = text_of  # renders the first messages, with a generation prompt or without
        self.tags: Tags | None = [] if template.has_tags else None
        if self.tags is None:
            self.text = text_of(length, False)
        else:
            self.text = template.render(self.messages, chat.tools, tags=self.tags)
        marker = Marker(self.text, template.literals)
        marked = [marker.marked(*numbered) for numbered in enumerate(self.messages)]
        self.where, self.lost = marker.find(template.render(marked, chat.tools))
        self._opening = re.compile(rf"((?:{rules.special.pattern})\s*)*")
        self.without_prompt: list[int] = []
        self._starts: dict[Any, int] = {}  # of turns that are rendered alike, from their content on
        self._stops: dict[Any, Span] = {}

    def document(self, pending: Sequence[int]) -> tuple[Document, set[int]]:
        """The document, and the pending turns whose context it has. TextError for a last turn that
        is not proven though nothing follows it."""
        if self.tags is not None:
            self._check_tags(sorted(self.tags))
        turns, proven = [], set()
        for message in pending:
            try:
                turns += self._turn(message)
                proven.add(message)
            except _RewrittenError as problem:
                if message + 1 == len(self.messages):  # so what is generated tells another context
                    try:
                        return self._after_prompt(message), {message}
                    except _RewrittenError:
                        raise TextError(f"message {message}: {problem}") from None
        others = {"prompt": not self.without_prompt, "tags": self.tags is not None}
        routes = ["markers", *(name for name, is_there in others.items() if is_there)]
        if turns and len(routes) < self.rules.options.mask_routes:
            raise TextError(
                f"message {self.without_prompt[0]}: {self.name} does not render the chat before "
                "it, so that only markers tell the mask: give mask_routes=1 to trust them"
            )
        return Document(self.text, turns, tuple(routes)), proven

    def _turn(self, message: int) -> list[Turn]:
        """What is trained of a turn, if anything."""
        where = self._where(message)
        begin, end = where.begin, where.end
        # A template rewrites history by leaving pieces out, or by other text around a turn. So
        # turns between the same texts, with no piece left out before, have been rendered alike,
        # and the first of them stands for all. The prompt of a turn may hold tags with which its
        # content begins: they are text before it.
        words = self._opening.match(self.text, begin, end).end()  # type: ignore[union-attr]
        key: Any = message
        if message < min(self.lost, default=len(self.messages)):
            role, kinds = self.messages[message - 1]["role"], [one.kind for one in where.pieces]
            key = (role, *self.messages[message], *kinds, self.text[where.before : words])
        if key not in self._starts:
            self._starts[key] = self._start(message, where, words) - begin
        around = key, self.text[end : where.after]
        if around not in self._stops:
            first, last = self._stop(message, where)
            self._stops[around] = first - end, last - end
        first, last = self._stops[around]
        return self._trained(where, begin + self._starts[key], (end + first, end + last))

    def _where(self, message: int) -> MessageSpan:
        if CALL in self.lost.get(message, ()):
            raise _RewrittenError("the template leaves out a part of its tool calls")
        if message not in self.where:
            raise _RewrittenError("route markers: nothing of its content is in the rendered text")
        return self.where[message]

    def _rendered(self, message: int, length: int, has_prompt: bool = False) -> str | None:
        """The text of the first messages; None if the template refuses them, which is noted."""
        try:
            text = self.text_of(length, has_prompt)
        except TextError:
            self.without_prompt.append(message)
            return None
        if self.rules.template.is_sealed and not self.text.startswith(text):
            raise TextError("where texts part may depend on the words")
        return text

    def _start(self, message: int, where: MessageSpan, words: int) -> int:
        """Where the generation prompt ends, or where the text says something else than it: where
        the turn's words begin, behind tags, at the latest."""
        prompt = self._rendered(message, message, True)
        if prompt is None:
            return where.begin
        start = shared_length(prompt, self.text)
        if start == len(prompt):
            return start
        # It must agree with the text as far as the chat before the turn does.
        chat = self._rendered(message, message) or ""
        if start < max(where.before, shared_length(prompt, chat.rstrip())):
            raise _RewrittenError(
                "route prompt: when the turn is generated, what is before it is rendered in "
                "another way than when it is trained"
            )
        # The prompt ends with something else than the turn begins with, such as "<think>".
        tags = self.rules.special.finditer(self.text, where.before, words)
        cut = [tag.start() for tag in tags if tag.start() < start < tag.end()]
        return min([start, words, *cut])

    def _stop(self, message: int, where: MessageSpan) -> Span:
        """The stop token after the last piece, up to which the chat that ends with the turn must be
        the beginning of this one."""
        end, after, ended = where.end, where.after, self.text
        if message + 1 < len(self.messages):
            ended = self._rendered(message, message + 1) or ended
        if self.rules.stops:
            places = [
                (place, place + len(stop))
                for stop in self.rules.stops
                if (place := self.text.find(stop, end, after)) >= 0
            ]
            if not places:
                raise _RewrittenError(f"no stop token ({', '.join(self.rules.stops)}) follows it")
            span = min(places)
            is_alike = ended[: span[1]] == self.text[: span[1]]
        else:  # the token that begins the next turn
            limit = shared_length(ended, self.text)
            own = max(end, len(self.text[:limit].rstrip()))
            most = len(self.text) if after is None else after
            special = self.rules.special.search(self.text, own, most)
            span = special.span() if special else (own, own)
            is_alike = limit >= end
        if not is_alike:
            raise _RewrittenError("route prompt: its text differs")
        return span

    def _after_prompt(self, message: int) -> Document:
        """The last turn behind its generation prompt, for a template that renders what is before a
        turn in one way to generate it, and in another once the turn is there."""
        prompt, where = self._rendered(message, message, True), self._where(message)
        if prompt is None or self.rules.options.history == "refuse":
            raise _RewrittenError
        for start in range(where.begin, where.before, -1):
            if prompt.endswith(self.text[where.before : start]):
                stop, shift = self._stop(message, where), len(prompt) - start
                turns = self._trained(where, start, stop, shift)
                return Document(prompt + self.text[start:], turns, ("markers", "prompt"))
        raise _RewrittenError

    def _trained(self, where: MessageSpan, start: int, stop: Span, shift: int = 0) -> list[Turn]:
        """The turn from start to stop, without pieces that are not asked for and what is around
        these; moved by `shift`. Empty if no piece is asked for."""
        kinds, spans, before = self.rules.options.kinds, list[Span](), start
        for is_asked, group in itertools.groupby(where.pieces, lambda one: one.kind in kinds):
            run = [*group]
            if is_asked:
                first = run[0].start if run[0].start > where.begin else start
                if first > before and run[0].kind == CALL:
                    # Its tag and its name stand before it, behind the tag that ends the reasoning.
                    parts = self.rules.special.split(self.text[before:first], maxsplit=1)
                    first -= len(parts[-1].lstrip())
                spans.append((first, run[-1].end))
            before = run[-1].end
        if not spans:
            return []
        spans.append((spans.pop()[0] if is_asked else stop[0], stop[1]))
        moved = [(first + shift, last + shift) for first, last in spans if first < last]
        return [Turn(moved, (stop[0] + shift, stop[1] + shift))]

    def _check_tags(self, tags: Tags) -> None:
        """Raises TextError if tags are around another message, or not around an assistant's."""
        for message, where in self.where.items():
            is_ours = self.messages[message]["role"] == "assistant"
            for piece in where.pieces:
                place = bisect_right(tags, piece.start, key=lambda tag: tag[0]) - 1
                is_tagged = place >= 0 and piece.end <= tags[place][1]
                is_asked = not is_ours or piece.kind in self.rules.options.kinds
                if is_tagged != is_ours and is_asked:
                    what = "do not hold" if is_ours else "hold"
                    raise TextError(
                        f"message {message}: route tags: the generation tags of {self.name} "
                        f"{what} its {piece.kind}"
                    )


def shared_length(first: str, second: str) -> int:
    """Number of characters with which two texts begin alike."""
    low, high = 0, min(len(first), len(second))
    while low < high:  # comparing halves costs less than a loop over the characters
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


# ---- chats of one shape, which differ in their words alone: proven once, for a stand-in ----

_NUMBERS = [f"90417{number:04d}" for number in range(40)]
"""For the words of each message: longer chats are rarely of one shape."""
_NUMBER, _WIDTH = re.compile("90417([0-9]{4})"), 9

_Shape = tuple[tuple[str, str, Weight], ...]
"""The role, the content with a number for its words, and the weight of each message."""


def prove_chat(chat: Conversation, rules: Rules) -> list[Document]:
    """As `prove`, whose proof of a stand-in serves all chats of one shape, if all that it rendered
    is the beginning of the whole, and if the template does not read the words."""
    shape, words = _shape_of(chat, rules)
    stand_ins = _stand_ins(shape, rules) if shape else None
    if stand_ins is None:
        return prove(chat, rules)
    return [_with_words(words, *one) for one in stand_ins]


def _with_words(
    words: list[str], document: Document, pieces: list[Any], ends: list[int]
) -> Document:
    """A stand-in's document with words in place of the numbers, which are every second piece of its
    text, and end at `ends`."""
    pieces = [*pieces]
    pieces[1::2] = own = [words[number] for number in pieces[1::2]]
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
def _stand_ins(shape: _Shape, rules: Rules) -> list[tuple[Document, list[Any], list[int]]] | None:
    """The documents of a shape, as `_with_words` takes them; None if its proof tells nothing of
    others. It renders the numbers as sealed texts: what a template writes without reading it, it
    writes for all words."""
    if isinstance(rules.template, JinjaTemplate):  # ours reads no text
        rules = replace(rules, template=replace(rules.template, is_sealed=True))
    messages = [{"role": role, "content": content} for role, content, _ in shape]
    try:
        documents = prove(Conversation(messages, None, [weight for *_, weight in shape]), rules)
    except TextError:
        return None
    stand_ins = []
    for one in documents:
        if "prompt" not in one.routes:
            return None
        pieces: list[Any] = _NUMBER.split(one.text)
        pieces[1::2] = [int(number) for number in pieces[1::2]]
        stand_ins.append((one, pieces, [match.end() for match in _NUMBER.finditer(one.text)]))
    return stand_ins
