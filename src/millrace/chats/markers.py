"""The route of markers: where the contents of messages stand in a rendered text.

The messages are rendered a second time, with a number of fixed width before and after each piece of
content. Without the numbers, the second text must equal the first: so the template does nothing
with the contents that depends on what was put into them, and the numbers' places are the contents'
places. That is two renderings, whatever the number of messages.
"""

import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from millrace.chats.conversations import REASONING, Message
from millrace.errors import TextError

CONTENT, THOUGHT, CALL = "content", "reasoning", "tool calls"

_DIGITS = 6


class Piece(NamedTuple):
    """A piece of a message in a rendered text: its message, kind, and characters."""

    message: int
    kind: str
    start: int
    end: int


class Pieces(NamedTuple):
    """The pieces of all messages in a rendered text."""

    pieces: list[Piece]  # in the order of the text
    marks: list[tuple[int, int]]  # the place of each marker in the text, and its message
    lost: int  # the first message of which a piece or literal is missing; a large number for none
    lost_calls: set[int]  # messages of which a piece of a tool call is missing


class Marker:
    """Puts markers into messages, and finds them in their text. `literals`, for which the template
    may search contents, such as "</think>", stay as they are, between the pieces."""

    def __init__(self, text: str, literals: frozenset[str]) -> None:
        # Digits, which no filter changes; 9 is only the first, so that none can overlap the next.
        nonces = (f"9{number:03o}1" for number in itertools.count())
        self._nonce = next(nonce for nonce in nonces if nonce not in text)
        self._text, self._owners = text, [(-1, "", False)]
        self._with_literals: list[tuple[int, str, int, int]] = []
        parts = "|".join(sorted(map(re.escape, literals), key=len, reverse=True))
        self._literals = re.compile(f"({parts})" if parts else "(?!)()")

    def marked(self, messages: Sequence[Message]) -> list[Message]:
        """Copies of the messages, with markers."""
        return [self._marked_message(number, one) for number, one in enumerate(messages)]

    def find(self, marked_text: str) -> Pieces:
        """The pieces, from the text of the marked messages; TextError if it says other things."""
        split = re.split(f"{self._nonce}([0-9]{{{_DIGITS}}})", marked_text)
        texts, found = split[::2], [int(number) for number in split[1::2]]
        if "".join(texts) != self._text:
            raise TextError("route markers: the template changes with what the messages say")
        places = itertools.accumulate(map(len, texts[:-1]))
        marks = [(place, self._owners[one][0]) for place, one in zip(places, found, strict=True)]
        pieces = []
        for number, (first, second) in enumerate(itertools.pairwise(found)):
            message, kind, is_start = self._owners[first]
            if is_start and second == first + 1:
                pieces.append(Piece(message, kind, marks[number][0], marks[number + 1][0]))
        there = {*found}
        missing = [one for number, one in enumerate(self._owners) if number and number not in there]
        lost_calls = {message for message, kind, _ in missing if kind == CALL}
        lost = [message for message, _, _ in missing]
        at = dict(zip(found, marks, strict=True))
        for message, core, marker, offset in self._with_literals:
            place = at[marker][0] - offset if marker in at else -1
            if place < 0 or not self._text.startswith(core, place):
                lost.append(message)
        return Pieces(pieces, marks, min(lost, default=1 << 60), lost_calls)

    def _put(self, message: int, kind: str, is_start: bool) -> str:
        self._owners.append((message, kind, is_start))
        return f"{self._nonce}{len(self._owners) - 1:0{_DIGITS}d}"

    def _wrap(self, number: int, kind: str, text: str) -> str:
        core = text.strip()
        if not core:
            return text
        before, _, after = text.partition(core)
        first, last = self._put(number, kind, True), self._put(number, kind, False)
        return f"{before}{first}{core}{last}{after}"

    def _wrap_parts(self, number: int, text: str, role: str) -> str:
        """Wraps the texts between literals. An assistant's literals at both ends belong to what is
        trained on, and get markers, too."""
        parts = self._literals.split(text)
        if len(parts) == 1 or not any(part.strip() for part in parts[::2]):
            return self._wrap(number, CONTENT, text)
        first = next(at for at, part in enumerate(parts) if at % 2 == 0 and part.strip())
        offset = text.index(parts[first].lstrip(), len("".join(parts[:first])))
        core, indent = text.strip(), len(text) - len(text.lstrip())
        self._with_literals.append((number, core, len(self._owners), offset - indent))
        last_thought = max((at for at, one in enumerate(parts) if one == "</think>"), default=-1)
        for place in range(0, len(parts), 2):
            kind = THOUGHT if place < last_thought else CONTENT
            parts[place] = self._wrap(number, kind, parts[place])
        # Before a tag that closes, a marker would make a reasoning of nothing.
        if role == "assistant" and not parts[0].strip() and parts[1][:2] != "</":
            parts[1] = self._put(number, CONTENT, False) + parts[1]
        if role == "assistant" and not parts[-1].strip():
            parts[-2] += self._put(number, CONTENT, False)
        return "".join(parts)

    def _marked_message(self, number: int, message: Message) -> Message:
        marked, role, content = {**message}, message["role"], message["content"]
        if isinstance(content, list):
            texts = [self._wrap_parts(number, one["text"], role) for one in content]
            marked["content"] = [{"type": "text", "text": text} for text in texts]
        else:
            marked["content"] = self._wrap_parts(number, content, role)
        if "reasoning_content" in message:
            text = self._wrap(number, THOUGHT, message["reasoning_content"])
            marked |= {name: text for name in REASONING if name in message}
        if "tool_calls" in message:
            marked["tool_calls"] = [self._marked_call(number, one) for one in message["tool_calls"]]
        return marked

    def _marked_call(self, number: int, call: dict[str, Any]) -> dict[str, Any]:
        function, count = {**call.get("function", call)}, len(self._owners)
        function["arguments"] = self._marked_values(number, function.get("arguments", {}))
        if len(self._owners) == count:  # only then: templates may look for a tool by its name
            function["name"] = self._wrap(number, CALL, function["name"])
        return {**call, "function": function} if "function" in call else function

    def _marked_values(self, number: int, value: Any) -> Any:
        if isinstance(value, str):
            is_json = value[:1] == "{" and value[-1:] == "}" and len(value) > 2
            text = self._wrap(number, CALL, value[1:-1] if is_json else value)
            return f"{{{text}}}" if is_json else text
        if isinstance(value, dict):
            return {key: self._marked_values(number, one) for key, one in value.items()}
        if isinstance(value, list):
            return [self._marked_values(number, one) for one in value]
        return value
