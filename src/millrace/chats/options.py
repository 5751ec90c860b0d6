"""The options of chats: how they become tokens, and which of these are trained on."""

import datetime
import json
from dataclasses import dataclass
from functools import partial
from typing import Any

from millrace.checks import plain_json, shown
from millrace.errors import ConfigError
from millrace.option_class import Options, StrPath, option

CONTENT, THOUGHT, CALL = "content", "reasoning", "tool calls"
"""The kinds of what a turn says."""


_EXAMPLE = '{"enable_thinking": false}'


def _check_arguments(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str):  # of the command line
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{value!r} is not JSON ({error}); write {_EXAMPLE}") from None
    values = plain_json({} if value is None else value, name)
    if not isinstance(values, dict):
        raise ConfigError(f"{name} is {shown(value)}; give a dictionary, such as {_EXAMPLE}")
    return values


def _check_date(name: str, value: Any) -> str:
    try:
        return datetime.date.fromisoformat(str(value)).isoformat()
    except ValueError:
        raise ConfigError(f"{name} is {shown(value)}; give a day, such as 2025-01-31") from None


_chats = partial(option, group="chats")


@dataclass(frozen=True, kw_only=True)
class ChatOptions(Options):
    """How chats become tokens, and which of these are trained on; the help of each field says how.
    A ConfigError for one that cannot work."""

    # fmt: off
    template: StrPath | None = option(
        "file of a chat template, or chatml", None, default_text="the tokenizer's own, else chatml",
        flags="--chat-template", metavar="FILE", group="chats", identity="never")
    template_arguments: Any = option(
        f"values that the template reads: {_EXAMPLE}", None, check=_check_arguments, metavar="JSON",
        group="chats")
    date: str | None = option(
        "day that the template takes for today's, if it reads the clock", None, check=_check_date,
        metavar="YYYY-MM-DD", group="chats")
    turns: str = _chats(
        "turns to train on; weight: those without a `weight` or `train` of 0", "all",
        choices=("all", "last", "weight"))
    reasoning: bool = _chats("do not train on reasoning", True)
    tool_calls: bool = _chats("do not train on tool calls", True)
    stop: str | None = _chats(
        "text of the token that stops a turn", None, default_text="the one that the template shows")
    history: str = _chats(
        "what a turn becomes that is rendered in another way if more messages follow: a document "
        "that ends with it, or a bad row", "documents", choices=("documents", "refuse"))
    mask_routes: int = _chats("least number of routes that must agree", 2, least=1, most=2)
    special_text: str = _chats(
        "what a row with the text of a special token becomes: a bad row, or that token", "refuse",
        choices=("refuse", "keep"))
    # fmt: on

    @property
    def kinds(self) -> set[str]:
        """The kinds of what is trained on."""
        kinds = {CONTENT: True, THOUGHT: self.reasoning, CALL: self.tool_calls}
        return {kind for kind, is_asked in kinds.items() if is_asked}
