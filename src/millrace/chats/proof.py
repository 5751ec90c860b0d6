"""Which characters of a rendered chat are trained on, by three routes that must agree.

- "markers" (`millrace.chats.markers`) tells where the contents of each message are.
- "prompt" renders the chat up to a turn with the generation prompt, which the model will be given,
  and the chat that ends with the turn. Both must be the beginning of the whole.
- "tags" are the template's own marks around what the model has written.

Trained are the characters from the end of the generation prompt to the end of the stop token.
"""

import bisect
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from millrace.chats.conversations import Conversation
from millrace.chats.markers import CALL, CONTENT, THOUGHT, Marker, Piece, Pieces
from millrace.chats.templates import Tags, Template
from millrace.errors import TextError

Span = tuple[int, int]

_NO_THOUGHT = re.compile(r"\s*(<think>\s*)?</think>\s*")


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What to train on, and what is known of the template."""

    turns: str = "all"
    kinds: frozenset[str] = frozenset({CONTENT, THOUGHT, CALL})
    history: str = "documents"
    num_routes: int = 2
    stops: tuple[str, ...] = ()  # texts that stop turns; none: the token that begins the next does
    special: re.Pattern[str] = re.compile("(?!)")
    has_parts: bool = False  # whether the template reads contents as lists of parts
    has_prompt: bool = True  # whether generation prompts hold all that stands before the answers


class Turn(NamedTuple):
    """What is trained of one turn, in characters."""

    message: int  # its number
    spans: list[Span]
    stop: Span  # the stop token, which is in the spans; empty without one
    start: int | None  # where the route of the prompt begins the turn; None without that route


class Document(NamedTuple):
    """A rendered text, what is trained of it, and what the routes say: `pieces` of all messages,
    generation `tags` or None, and the names of the `routes` that agree."""

    text: str
    turns: list[Turn]
    pieces: list[Piece]
    tags: Tags | None
    routes: tuple[str, ...]

    @property
    def spans(self) -> list[Span]:
        """Characters that are trained on."""
        return [span for turn in self.turns for span in turn.spans]


class _RewrittenError(Exception):
    """A turn whose context is another one in the whole chat."""


def prove(chat: Conversation, template: Template, rules: Rules) -> list[Document]:
    """The documents of a conversation: one, or more where a template rewrites its history.
    TextError for a chat that the template refuses, a mask that is not proven, or no target."""
    pending = _turns_to_train(chat, rules)
    renderings = Renderings(chat, template, rules)
    documents: list[Document] = []
    length = len(chat.messages)
    while pending:
        if length < len(chat.messages) and rules.history == "refuse":
            raise TextError(
                f"message {pending[-1]}: {template.name} renders it in another way if more "
                'messages follow: give history="documents" for a document that ends with it'
            )
        document, proven = renderings.prove(length, pending)
        if document.turns:
            documents.append(document)
        pending = [message for message in pending if message not in proven]
        length = pending[-1] + 1 if pending else 0
    if not documents:
        raise TextError("it has no target: its turns have nothing of the kinds to train on")
    return documents[::-1]


def _turns_to_train(chat: Conversation, rules: Rules) -> list[int]:
    turns = [number for number, one in enumerate(chat.messages) if one["role"] == "assistant"]
    if rules.turns == "last":
        return turns[-1:]
    kept = [number for number in turns if chat.weights[number] is not False]
    if rules.turns == "all" and kept != turns:
        what = f"message {min({*turns} - {*kept})} has the weight 0"
        raise TextError(f'{what}: give turns="weight" to heed weights, or remove them')
    if not kept:
        raise TextError("it has no target: all weights are 0")
    return kept


class Renderings:
    """The renderings of a conversation's beginnings, each made once."""

    def __init__(self, chat: Conversation, template: Template, rules: Rules) -> None:
        self.tools, self.template, self.rules = chat.tools, template, rules
        self.messages = chat.messages
        if rules.has_parts:
            self.messages = [
                {**one, "content": [{"type": "text", "text": one["content"]}]}
                for one in chat.messages
            ]
        self._texts: dict[tuple[int, bool], str] = {}

    def text(self, length: int, has_prompt: bool = False) -> str:
        """The text of the first messages."""
        key = length, has_prompt
        if key not in self._texts:
            self._texts[key] = self.template.render(self.messages[:length], self.tools, has_prompt)
        return self._texts[key]

    def prove(self, length: int, pending: Sequence[int]) -> tuple[Document, set[int]]:
        """The document of the first messages, and the pending turns whose context it has. TextError
        for a last turn that is not proven though nothing follows it."""
        messages = self.messages[:length]
        tags: Tags | None = None
        if self.template.has_tags:
            tags = []
            self._texts[length, False] = self.template.render(messages, self.tools, tags=tags)
        text = self.text(length)
        marker = Marker(text, self.template.literals)
        pieces = marker.find(self.template.render(marker.marked(messages), self.tools))
        proof = _Proof(self, length, text, pieces)
        if tags is not None:
            proof.check_tags(tags)
        turns, proven = [], set()
        for message in (one for one in pending if one < length):
            try:
                turns += proof.turn(message)
                proven.add(message)
            except _RewrittenError as problem:
                if message + 1 < length:
                    continue
                try:  # nothing follows, so only what is generated can be told otherwise
                    proof, tags = proof.after_prompt(message), None
                    turns, proven = proof.turn(message), {message}
                except _RewrittenError:
                    raise TextError(f"message {message}: {problem}") from None
        others = {"prompt": not proof.without_prompt, "tags": tags is not None}
        routes = ["markers", *(name for name, is_there in others.items() if is_there)]
        if turns and len(routes) < self.rules.num_routes:
            raise TextError(
                f"message {proof.without_prompt[0]}: {self.template.name} does not render the chat "
                "before it, so that only markers tell the mask: give mask_routes=1 to trust them"
            )
        return Document(proof.text, turns, proof.pieces.pieces, tags, tuple(routes)), proven


class _Proof:
    """The proof of the turns of one rendering, of the first `length` messages."""

    def __init__(self, renderings: Renderings, length: int, text: str, pieces: Pieces) -> None:
        self.renderings, self.length, self.text, self.pieces = renderings, length, text, pieces
        self.runs: dict[int, tuple[int, int]] = {}  # of marks; a name may come again in later turns
        for message, run in itertools.groupby(enumerate(pieces.marks), lambda one: one[1][1]):
            numbers = [number for number, _ in run]
            self.runs.setdefault(message, (numbers[0], numbers[-1]))
        self.by_message: dict[int, list[Piece]] = {}
        for piece in pieces.pieces:
            self.by_message.setdefault(piece.message, []).append(piece)
        self._prompts: dict[Any, str] = {}
        self._ends: dict[Any, int] = {}
        self.without_prompt: list[int] = []

    def turn(self, message: int) -> list[Turn]:
        """What is trained of a turn, if anything; _RewrittenError if it differs from the chat that
        ends with it."""
        if message in self.pieces.lost_calls:
            raise _RewrittenError("the template leaves out a part of its tool calls")
        if message not in self.runs:
            raise _RewrittenError("route markers: its content is not in the rendered text")
        marks, (first, last) = self.pieces.marks, self.runs[message]
        begin, end = marks[first][0], marks[last][0]
        before = marks[first - 1][0] if first else 0
        after = marks[last + 1][0] if last + 1 < len(marks) else None
        messages = self.renderings.messages
        said = messages[message]["content"]
        shown = self.text[before:begin].rstrip()
        if isinstance(said, str) and said.lstrip()[:8] == "</think>" == shown[-8:]:
            begin = before + len(shown) - 8  # this tag has no marker, see `Marker`
        everything = self.by_message.get(message, [])
        pieces = [one for one in everything if begin <= one.start <= end]
        if not pieces:
            raise _RewrittenError("route markers: nothing of its content is in the rendered text")
        if any(one.kind == CONTENT for one in everything[len(pieces) :]):
            raise _RewrittenError("route markers: its content is rendered twice")
        # A template rewrites history by leaving pieces out, or by other text around a turn. So
        # turns between the same texts, with no piece left out before, have been rendered alike,
        # and the first of them stands for all. A turn without a key is looked at alone.
        key: Any = None
        if message < self.pieces.lost:
            role, names = messages[message - 1]["role"], tuple(messages[message])
            key = role, names, tuple(one.kind for one in everything), self.text[before:begin]
        is_call = pieces[0].kind == CALL
        start = self._start(message, key, before, begin, is_call)
        stop = self._stop(message, key and (*key, self.text[end:after], after is None), end, after)
        kept = {piece for piece in pieces if piece.kind in self.renderings.rules.kinds}
        spans = _spans(pieces, kept, begin if start is None else start, stop)
        return [Turn(message, spans, stop, start)] if kept else []

    def after_prompt(self, message: int) -> "_Proof":
        """The proof of the last turn behind its generation prompt, for a template that renders what
        is before a turn in one way to generate it, and in another once the turn is there."""
        try:
            prompt = self.renderings.text(message, True)
        except TextError:
            raise _RewrittenError from None
        marks, (first, last) = self.pieces.marks, self.runs.get(message, (0, -1))
        before, begin = (marks[one][0] if 0 <= one <= last else 0 for one in (first - 1, first))
        ends = range(min(begin, before + 999), before, -1)  # headers are short
        start = next((one for one in ends if prompt.endswith(self.text[before:one])), None)
        if start is None or self.renderings.rules.history == "refuse":
            raise _RewrittenError
        shift = len(prompt) - start
        pieces = [
            Piece(message, kind, first + shift, last + shift)
            for _, kind, first, last in self.by_message.get(message, [])
        ]
        marks = [(place + shift, message) for place, _ in marks[first : last + 1]]
        moved = self.pieces._replace(pieces=pieces, marks=marks)
        return _Proof(self.renderings, self.length, prompt + self.text[start:], moved)

    def _start(self, message: int, key: Any, before: int, begin: int, is_call: bool) -> int | None:
        """Where the generation prompt ends; None if the template cannot render it."""
        rules, prompt = self.renderings.rules, self._prompts.get(key)
        if key is None or prompt is None:
            try:
                prompt = self.renderings.text(message, True)
            except TextError:
                self.without_prompt.append(message)
                return None
            # It begins as the text does, or agrees with it as far as the chat before the turn.
            shared = shared_length(prompt, self.text)
            try:
                chat = self.renderings.text(message) if shared < len(prompt) else ""
            except TextError:
                chat = ""
            common = shared_length(prompt, chat.rstrip())
            if shared < len(prompt) and shared < max(before, common):
                raise _RewrittenError(
                    "route prompt: when the turn is generated, what is before it is rendered in "
                    "another way than when it is trained"
                )
            prompt = self._prompts[key] = prompt[before:]
        shared = before + shared_length(prompt, self.text[before : begin + len(prompt)])
        is_whole = shared == before + len(prompt)
        if is_whole and (rules.has_prompt or not self.text[shared:begin].strip()):
            return shared
        # The prompt holds something else than the turn begins with, such as "<think>": what stands
        # between is trained on only if it belongs to a tool call.
        if not (is_call and rules.has_prompt):
            tags = rules.special.finditer(self.text, begin, max(shared, begin))
            return max((tag.end() for tag in tags), default=begin)  # the prompt holds these
        for tag in rules.special.finditer(self.text, before, begin):
            shared = tag.start() if tag.start() < shared < tag.end() else shared
        thought = _NO_THOUGHT.match(self.text, shared, begin)
        return thought.end() if thought else shared

    def _stop(self, message: int, key: Any, end: int, after: int | None) -> Span:
        """The stop token after the last piece."""
        rules = self.renderings.rules
        if not rules.stops:
            place = end + self._check_end(message, key, end)
            special = rules.special.search(self.text, place)
            is_near = special is not None and (after is None or special.end() <= after)
            return special.span() if special and is_near else (place, place)
        limit = len(self.text) if after is None else after
        places = [(self.text.find(stop, end, limit), -len(stop)) for stop in rules.stops]
        place, length = min((one for one in places if one[0] >= 0), default=(-1, 0))
        if place < 0:
            raise _RewrittenError(f"no stop token ({', '.join(rules.stops)}) follows it")
        self._check_end(message, key, place - length)
        return place, place - length

    def _check_end(self, message: int, key: Any, limit: int) -> int:
        """Compares with the chat that ends with the turn, of which it must be the beginning up to
        `limit`. Returns how many characters follow there but white space."""
        if key is not None and key in self._ends:
            return self._ends[key]
        ended = self.text
        if message + 1 < self.length:
            try:
                ended = self.renderings.text(message + 1)
            except TextError:
                self.without_prompt.append(message)
        if ended[:limit] != self.text[:limit]:
            raise _RewrittenError("route prompt: its text differs")
        self._ends[key] = max(shared_length(ended.rstrip(), self.text) - limit, 0)
        return self._ends[key]

    def check_tags(self, tags: Tags) -> None:
        """Raises TextError if tags are around another message, or not around an assistant's."""
        tags = sorted(tags)
        starts = [start for start, _ in tags]
        for piece in self.pieces.pieces:
            is_ours = self.renderings.messages[piece.message]["role"] == "assistant"
            place = bisect.bisect_right(starts, piece.start) - 1
            is_tagged = place >= 0 and piece.end <= tags[place][1]
            first, last = (self.pieces.marks[mark][0] for mark in self.runs[piece.message])
            is_copy = not first <= piece.start <= last
            is_asked = not is_ours or piece.kind in self.renderings.rules.kinds
            if is_tagged != is_ours and is_asked and not is_copy:
                what = "do not hold" if is_ours else "hold"
                raise TextError(
                    f"message {piece.message}: route tags: the generation tags of "
                    f"{self.renderings.template.name} {what} its {piece.kind}"
                )


def _spans(pieces: list[Piece], kept: set[Piece], start: int, stop: Span) -> list[Span]:
    """The spans from start to stop, without pieces that are not kept and what is around these."""
    if len(kept) == len(pieces):
        return [(start, stop[1])] if start < stop[1] else []
    spans = []
    for is_kept, group in itertools.groupby(pieces, kept.__contains__):
        run = [*group]
        first = start if run[0] is pieces[0] else run[0].start
        if is_kept:
            spans.append((first, stop[1] if run[-1] is pieces[-1] else run[-1].end))
    if spans and spans[-1][1] < stop[1]:
        spans.append(stop)
    return [span for span in spans if span[0] < span[1]]


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
