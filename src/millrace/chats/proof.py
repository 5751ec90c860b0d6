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
from dataclasses import dataclass, field
from typing import Any

from millrace.chats.conversations import Conversation, Message
from millrace.chats.markers import CALL, CONTENT, THOUGHT, Marker, Piece, Pieces, runs_of
from millrace.chats.templates import Tags, Template
from millrace.errors import TextError

Span = tuple[int, int]

_NO_THOUGHT = re.compile(r"\s*(<think>\s*)?</think>\s*")

PROMPT, TAGS, MARKERS = "prompt", "tags", "markers"


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What to train on, and what is known of the template.

    Args:
        turns: "all", "last" or "weight".
        has_reasoning, has_tool_calls: Whether reasoning and tool calls are trained on.
        history: "documents" or "refuse".
        num_routes: Least number of routes that must agree.
        stops: Texts that stop a turn; none: the next special token does, which begins the next.
        special: Pattern of special tokens.
        has_parts: Whether the template reads contents as lists of parts.
        has_prompt: Whether the template has a generation prompt.
    """

    turns: str = "all"
    has_reasoning: bool = True
    has_tool_calls: bool = True
    history: str = "documents"
    num_routes: int = 2
    stops: tuple[str, ...] = ()
    special: re.Pattern[str] = re.compile("(?!)")
    has_parts: bool = False
    has_prompt: bool = True


@dataclass(frozen=True)
class Turn:
    """What is trained of one turn.

    Attributes:
        message: Number of the message.
        spans: Characters that are trained on.
        stop: Characters of the stop token, which are among them; empty without one.
        start: Where the route of the prompt begins the turn; None without that route.
    """

    message: int
    spans: list[Span]
    stop: Span
    start: int | None


@dataclass(frozen=True)
class Document:
    """A rendered text, and what is trained of it.

    Attributes:
        text: The text.
        turns: Trained turns, in the order of the text.
        pieces: Pieces of all messages.
        tags: Generation tags, or None.
        routes: Names of the routes that agree.
    """

    text: str
    turns: list[Turn]
    pieces: list[Piece]
    tags: Tags | None
    routes: tuple[str, ...]

    @property
    def spans(self) -> list[Span]:
        return [span for turn in self.turns for span in turn.spans]


class _RewrittenError(Exception):
    """A turn whose context is another one in the whole chat."""


def prove(chat: Conversation, template: Template, rules: Rules) -> list[Document]:
    """The documents of a conversation: one, or more where a template rewrites its history.

    Raises:
        TextError: A chat that the template refuses, a mask that is not proven, or no turn to train.
    """
    pending = _turns_to_train(chat, rules)
    renderings = Renderings(chat, template, rules)
    documents: list[Document] = []
    length = len(chat.messages)
    while pending:
        if length < len(chat.messages) and rules.history == "refuse":
            raise TextError(
                f"{_named(pending[-1])}: {template.name} renders it in another way if more "
                'messages follow: give history="documents" for a document that ends with it'
            )
        document = renderings.prove(length, pending)
        if document.turns:
            documents.append(document)
            proven = {turn.message for turn in document.turns}
            pending = [message for message in pending if message not in proven]
        length = pending[-1] + 1 if pending else 0
    if not any(document.spans for document in documents):
        raise TextError("no turn is trained on: reasoning or tool calls are all that they have")
    return documents[::-1]


def _turns_to_train(chat: Conversation, rules: Rules) -> list[int]:
    turns = [number for number, one in enumerate(chat.messages) if one["role"] == "assistant"]
    if rules.turns == "last":
        return turns[-1:]
    if rules.turns == "weight":
        turns = [number for number in turns if chat.weights[number] is not False]
        if not turns:
            raise TextError("no turn is trained on: all weights are 0")
        return turns
    for number in turns:
        if chat.weights[number] is False:
            raise TextError(f'{_named(number)} has the weight 0: give turns="weight" to heed it')
    return turns


def _named(message: int) -> str:
    return f"message {message}"


@dataclass
class Renderings:
    """The renderings of a conversation's beginnings, each made once."""

    chat: Conversation
    template: Template
    rules: Rules
    messages: list[Message] = field(init=False)
    texts: dict[tuple[int, bool], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.messages = self.chat.messages
        if self.rules.has_parts:
            self.messages = [
                {**one, "content": [{"type": "text", "text": one["content"]}]}
                for one in self.messages
            ]

    def text(self, length: int, has_prompt: bool = False) -> str:
        key = length, has_prompt
        if key not in self.texts:
            messages = self.messages[:length]
            self.texts[key] = self.template.render(messages, self.chat.tools, has_prompt)
        return self.texts[key]

    def tagged(self, length: int) -> tuple[str, Tags | None]:
        if not self.template.has_tags:
            return self.text(length), None
        text, tags = self.template.render_tagged(self.messages[:length], self.chat.tools)
        self.texts[length, False] = text
        return text, tags

    def prove(self, length: int, pending: Sequence[int]) -> Document:
        """The document of the first messages, with the pending turns whose context it has.

        Raises:
            TextError: A last turn that is not proven though nothing follows it.
        """
        text, tags = self.tagged(length)
        marker = Marker(text, self.template.literals)
        marked = self.template.render(marker.marked(self.messages[:length]), self.chat.tools)
        proof = _Proof(self, length, text, tags, marker.find(marked))
        turns = []
        for message in pending:
            if message >= length:
                continue
            try:
                turns += proof.turn(message)
            except _RewrittenError as problem:
                if message + 1 == length:  # nothing follows: no rewriting can be the reason
                    raise TextError(f"{_named(message)}: {problem}") from None
        routes = {MARKERS: True, PROMPT: not proof.without_prompt, TAGS: tags is not None}
        names = tuple(name for name, is_there in routes.items() if is_there)
        if turns and len(names) < self.rules.num_routes:
            raise TextError(
                f"{_named(proof.without_prompt[0])}: {self.template.name} does not render the chat "
                "before it, so that only markers tell the mask: give mask_routes=1 to trust them"
            )
        return Document(text, turns, proof.pieces.pieces, tags, names)


@dataclass
class _Proof:
    """The proof of the turns of one rendering."""

    renderings: Renderings
    length: int
    text: str
    tags: Tags | None
    pieces: Pieces
    runs: dict[int, tuple[int, int]] = field(default_factory=dict)
    by_message: dict[int, list[Piece]] = field(default_factory=dict)
    starts: dict[Any, str] = field(default_factory=dict)
    ends: dict[Any, int] = field(default_factory=dict)
    without_prompt: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for message, first, last in runs_of(self.pieces.places):
            self.runs.setdefault(message, (first, last))  # a name may come again in later turns
        for piece in self.pieces.pieces:
            self.by_message.setdefault(piece.message, []).append(piece)
        if self.tags is not None:
            self._check_tags()

    def turn(self, message: int) -> list[Turn]:
        """What is trained of a turn: none if it has nothing that is to be trained.

        Raises:
            _RewrittenError: A turn whose context, or own text, differs from the chat that ends with it.
        """
        if message in self.pieces.lost_calls:
            raise _RewrittenError("the template leaves out a part of its tool calls")
        if message not in self.runs:
            raise _RewrittenError("route markers: its content is not in the rendered text")
        places = self.pieces.places
        first, last = self.runs[message]
        begin, end = places[first][0], places[last][0]
        before = places[first - 1][0] if first else 0
        after = places[last + 1][0] if last + 1 < len(places) else None
        pieces = [one for one in self.by_message.get(message, ()) if begin <= one.start <= end]
        kept = [piece for piece in pieces if self._is_kept(piece)]
        if len(pieces) < len(self.by_message.get(message, ())) and any(
            one.kind == CONTENT for one in self.by_message[message] if one not in pieces
        ):
            raise _RewrittenError("route markers: its content is rendered twice")
        key: Any = self._kind_of(message)
        is_call = bool(pieces) and pieces[0].kind == CALL
        start = self._start(message, key and (key, self.text[before:begin]), before, begin, is_call)
        key = key and (key, self.text[end:after], after is None)
        stop = self._stop(message, key, end, after)
        if not kept:
            return []
        spans = _without(pieces, kept, (begin if start is None else start), stop)
        return [Turn(message, spans, stop, start)]

    def _kind_of(self, message: int) -> Any:
        """What tells turns apart beside the text around them; None for a turn to look at alone.

        A template rewrites history by leaving pieces out, or by other text around a turn. So turns
        between the same texts, with no piece left out before, have been rendered alike, and the
        first of them stands for all.
        """
        if message >= self.pieces.lost:
            return None
        messages = self.renderings.messages
        kinds = tuple(piece.kind for piece in self.by_message.get(message, ()))
        return messages[message - 1]["role"], tuple(messages[message]), kinds

    def _start(
        self, message: int, key: Any, before: int, begin: int, is_call: bool
    ) -> int | None:
        """Where the generation prompt ends; None if the template cannot render it."""
        prompt = self.starts.get(key)
        if key is None or prompt is None:
            try:
                prompt = self.renderings.text(message, True)
            except TextError:
                self.without_prompt.append(message)
                return None
            if prompt[:before] != self.text[:before]:
                raise _RewrittenError("route prompt: the text before it differs")
            prompt = self.starts[key] = prompt[before:]
        shared = before + shared_length(prompt, self.text[before : begin + len(prompt)])
        has_prompt = self.renderings.rules.has_prompt
        if shared == before + len(prompt) and (has_prompt or not self.text[shared:begin].strip()):
            return shared
        # The prompt holds something else than the turn begins with, such as "<think>": what stands
        # between is trained on only if it belongs to a tool call.
        return self._call_start(shared, before, begin) if is_call and has_prompt else begin

    def _call_start(self, place: int, before: int, begin: int) -> int:
        """The beginning of a tool call behind a place that may be within a tag."""
        for tag in self.renderings.rules.special.finditer(self.text, before, begin):
            if tag.start() < place < tag.end():
                place = tag.start()
        thought = _NO_THOUGHT.match(self.text, place, begin)
        return thought.end() if thought else place

    def _stop(self, message: int, key: Any, end: int, after: int | None) -> Span:
        """The stop token after the last piece."""
        rules = self.renderings.rules
        limit = len(self.text) if after is None else after
        if not rules.stops:
            limit = end + self._check_end(message, key, end)
            special = rules.special.search(self.text, limit)
            is_near = special is not None and (after is None or special.end() <= after)
            return special.span() if special and is_near else (limit, limit)
        places = [self.text.find(stop, end, limit) for stop in rules.stops]
        found = [(at, -len(stop)) for at, stop in zip(places, rules.stops, strict=True) if at >= 0]
        if not found:
            raise _RewrittenError(f"no stop token ({', '.join(rules.stops)}) follows it")
        at, length = min(found)
        self._check_end(message, key, at - length)
        return at, at - length

    def _check_end(self, message: int, key: Any, limit: int) -> int:
        """Compares with the chat that ends with the turn, of which it must be the beginning up to
        `limit`. Returns how many characters follow there but white space."""
        if key is not None and key in self.ends:
            return self.ends[key]
        ended = self.text
        if message + 1 < self.length:
            try:
                ended = self.renderings.text(message + 1)
            except TextError:
                self.without_prompt.append(message)
        if ended[:limit] != self.text[:limit]:
            raise _RewrittenError("route prompt: its text differs")
        length = max(shared_length(ended.rstrip(), self.text) - limit, 0)
        if key is not None:
            self.ends[key] = length
        return length

    def _is_kept(self, piece: Piece) -> bool:
        rules = self.renderings.rules
        kinds = {CONTENT: True, THOUGHT: rules.has_reasoning, CALL: rules.has_tool_calls}
        return kinds[piece.kind]

    def _check_tags(self) -> None:
        """Raises TextError if tags are around another message, or not around an assistant's."""
        tags = sorted(self.tags or ())
        starts = [start for start, _ in tags]
        messages = self.renderings.messages
        for piece in self.pieces.pieces:
            is_ours = messages[piece.message]["role"] == "assistant"
            place = bisect.bisect_right(starts, piece.start) - 1
            is_tagged = place >= 0 and piece.end <= tags[place][1]
            first, last = self.runs[piece.message]
            places = self.pieces.places
            is_copy = not places[first][0] <= piece.start <= places[last][0]
            if is_tagged != is_ours and not is_copy and (is_ours <= self._is_kept(piece)):
                what = "do not hold" if is_ours else "hold"
                name = self.renderings.template.name
                raise TextError(
                    f"{_named(piece.message)}: route tags: the generation tags of {name} {what} "
                    f"its {piece.kind}, against route markers"
                )


def _without(pieces: list[Piece], kept: list[Piece], start: int, stop: Span) -> list[Span]:
    """The spans from start to stop, without the pieces that are not kept and what is around them."""
    if len(kept) == len(pieces):
        return [(start, stop[1])] if start < stop[1] else []
    spans = []
    chosen = {*kept}
    for is_kept, group in itertools.groupby(pieces, chosen.__contains__):
        run = [*group]
        if is_kept:
            is_first, is_last = run[0] is pieces[0], run[-1] is pieces[-1]
            spans.append((start if is_first else run[0].start, stop[1] if is_last else run[-1].end))
    if spans[-1][1] < stop[1]:
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
