"""The route of markers: where the contents of messages stand in a rendered text.

The messages are rendered a second time, with a number of fixed width before and after each piece of
content. Without the numbers, the second text must equal the first: so the template does nothing
with the contents that depends on what was put into them, and the numbers' places are the contents'
places. That is two renderings, whatever the number of messages.
"""

import itertools
import os
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from millrace.chats.conversations import REASONING, Message
from millrace.chats.options import CALL, CONTENT, THOUGHT
from millrace.errors import TextError

_DIGITS = 6


def any_of(texts: Iterable[str]) -> str:
    """Pattern of one of some texts, the longest first; without texts, it is nowhere.

    Beginnings that texts share are tried once: a vocabulary may have 6,000 special tokens.

    >>> any_of(["<a>", "<b>", "<b>c"])
    '<(?:a>|b>(?:c)?)'
    """
    groups: dict[str, list[str]] = {}
    for text in sorted({*texts}):
        groups.setdefault(text[0], []).append(text)
    branches = []
    for group in groups.values():
        shared = os.path.commonprefix(group)  # noqa: RUF071 - by characters
        tails = [text[len(shared) :] for text in group if text != shared]
        branches.append(re.escape(shared))
        if tails:
            branches[-1] += f"(?:{any_of(tails)}){'?' * (shared in group)}"
    return "|".join(branches) or "(?!)"


class Piece(NamedTuple):
    """A piece of a message in a rendered text: its kind, and its characters."""

    kind: str
    start: int
    end: int


class MessageSpan(NamedTuple):
    """What a rendered text shows of a message."""

    pieces: list[Piece]
    before: int  # where the piece of another message before ends; 0 for none
    begin: int  # where the first piece begins
    end: int  # where the last piece ends
    after: int | None  # where the next piece of another message begins; None for none


class Marker:
    """Puts markers into messages, and finds them in their text. `literals`, for which the template
    may search contents, such as "</think>", stay as they are, between the pieces."""

    def __init__(self, text: str, literals: frozenset[str]) -> None:
        # Digits, which no filter changes; 9 is only the first, so that none can overlap the next.
        nonces = (f"9{number:03o}1" for number in itertools.count())
        self._nonce = next(nonce for nonce in nonces if nonce not in text)
        self._text = text
        self._owners: list[tuple[int, str]] = []  # message and kind of each piece
        self._with_literals: set[int] = set()  # messages
        self._literals = re.compile(f"({any_of(literals)})")

    def marked(self, number: int, message: Message) -> Message:
        """A copy of a message, with markers: of all messages in turn."""
        marked = {**message, "content": self._wrap_content(number, message["content"])}
        if "reasoning_content" in message:
            text = self._wrap(number, THOUGHT, message["reasoning_content"])
            marked |= {name: text for name in REASONING if name in message}
        if "tool_calls" in message:
            marked["tool_calls"] = [self._marked_call(number, one) for one in message["tool_calls"]]
        return marked

    def find(self, marked_text: str) -> tuple[dict[int, MessageSpan], dict[int, set[str]]]:
        """What the text shows of each message at its first place; and the kinds of the pieces that
        it leaves out, by message: none for one in several places, or of which it may leave out a
        literal. TextError if the marked text says other things."""
        split = re.split(f"{self._nonce}([0-9]{{{_DIGITS}}})", marked_text)
        texts, marks = split[::2], [int(number) for number in split[1::2]]
        if "".join(texts) != self._text:
            raise TextError("route markers: the template changes with what the messages say")
        places = [*itertools.accumulate(map(len, texts[:-1]))]
        runs: list[tuple[int, list[Piece]]] = []  # messages, and their pieces that are side by side
        for (first, start), (second, end) in itertools.pairwise(zip(marks, places, strict=True)):
            if first % 2 == 0 and second == first + 1:
                message, kind = self._owners[first // 2]
                if not runs or runs[-1][0] != message:
                    runs.append((message, []))
                runs[-1][1].append(Piece(kind, start, end))
        where: dict[int, MessageSpan] = {}
        lost: dict[int, set[str]] = {message: set() for message in self._with_literals}
        before, starts = 0, [pieces[0].start for _, pieces in runs]
        for (message, own), after in zip(runs, [*starts[1:], None], strict=False):
            if message in where:  # a tool's name in its answer, or a content behind the answer
                lost.setdefault(message, set())
            where.setdefault(message, MessageSpan(own, before, own[0].start, own[-1].end, after))
            before = own[-1].end
        present = {*marks}
        for number, (message, kind) in enumerate(self._owners):
            if not {2 * number, 2 * number + 1} <= present:
                lost.setdefault(message, set()).add(kind)
        return where, lost

    def _wrap(self, message: int, kind: str, text: str) -> str:
        core = text.strip()
        if not core:
            return text
        number = 2 * len(self._owners)
        self._owners.append((message, kind))
        first, last = (f"{self._nonce}{one:0{_DIGITS}d}" for one in (number, number + 1))
        before, _, after = text.partition(core)
        return f"{before}{first}{core}{last}{after}"

    def _wrap_content(self, message: int, text: str) -> str:
        parts = self._literals.split(text)
        if len(parts) > 1:
            self._with_literals.add(message)
        last_thought = max((at for at, one in enumerate(parts) if one == "</think>"), default=-1)
        for place in range(0, len(parts), 2):
            kind = THOUGHT if place < last_thought else CONTENT
            parts[place] = self._wrap(message, kind, parts[place])
        return "".join(parts)

    def _marked_call(self, number: int, call: dict[str, Any]) -> dict[str, Any]:
        function, count = {**call.get("function", call)}, len(self._owners)
        function["arguments"] = self._marked_values(number, function.get("arguments", {}))
        if len(self._owners) == count:  # only then: templates may look for a tool by its name
            function["name"] = self._wrap(number, CALL, function["name"])
        return {**call, "function": function} if "function" in call else function

    def _marked_values(self, number: int, value: Any) -> Any:
        if isinstance(value, str):
            return self._wrap(number, CALL, value)
        if isinstance(value, dict):
            return {key: self._marked_values(number, one) for key, one in value.items()}
        if isinstance(value, list):
            return [self._marked_values(number, one) for one in value]
        return value
