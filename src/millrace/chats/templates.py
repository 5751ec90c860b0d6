"""Chat templates: Jinja as transformers sets it up, and our own ChatML, which needs no package."""

import datetime
import json
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version as version_of
from typing import Any

from millrace.chats.conversations import Message
from millrace.checks import shown
from millrace.deferred import cached_property
from millrace.encoding.vocabulary import MUST_PASS, read_file, sha256
from millrace.errors import ConfigError, TextError

Tags = list[tuple[int, int]]
Tools = list[Any] | None
Messages = Sequence[Message]

_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_CLOCK = re.compile(r"\b(strftime_now|datetime)\b")
_LITERALS = re.compile(r"</?[\w|｜▁]+>|\[/?[A-Z_]+\]")


@dataclass(frozen=True)
class JinjaTemplate:
    """A chat template in Jinja, with what it reads beside the messages.

    Args:
        source: The template.
        arguments: Plain values that it reads: `bos_token`, `enable_thinking` and the like.
        date: Day that the template takes for today's, as "2025-01-31"; None: the template must not
            read the clock.
        name: Name for messages.

    Attributes:
        has_tags: Whether the template marks what the model has written.
        literals: Texts in the template that look like tags: it may search contents for them.

    Raises:
        ConfigError: A template that reads the clock, and no date.
    """

    source: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    date: str | None = None
    name: str = "the template"

    def __post_init__(self) -> None:
        clock = _CLOCK.search(_COMMENT.sub("", self.source))
        if clock and self.date is None:
            raise ConfigError(
                f"{self.name} reads the clock ({clock[0]}), so that each day would give other "
                'tokens: give date="2025-01-31", or the day that you mean'
            )

    @cached_property
    def has_tags(self) -> bool:
        return re.search(r"\{%[-+]?\s*generation\b", self.source) is not None

    @cached_property
    def literals(self) -> frozenset[str]:
        return frozenset(_LITERALS.findall(self.source))

    def render(
        self, messages: Messages, tools: Tools, has_prompt: bool = False, tags: Tags | None = None
    ) -> str:
        """The text of some messages, with the generation prompt if `has_prompt`; TextError for
        messages that the template refuses. Where its generation tags are goes to `tags`."""
        values = {"documents": None, **self.arguments, "messages": messages, "tools": tools}
        values["add_generation_prompt"] = has_prompt
        if self.date is not None:
            values["strftime_now"] = datetime.datetime.fromisoformat(self.date).strftime
        try:
            template = _compiled(self.source)
            if tags is None:
                return str(template.render(**values))
            blocks: list[str] = []
            with template.environment.activate_tracker(blocks, tags):
                for block in template.generate(**values):
                    blocks.append(block)
                    if len(blocks) > 99:  # transformers joins all of them at each tag
                        blocks[:] = ["".join(blocks)]
            return "".join(blocks)
        except (*MUST_PASS, ConfigError):
            raise
        except BaseException as error:
            reason = f"{error}" or type(error).__name__
            raise TextError(f"{self.name} refuses the chat: {reason}") from None

    def fingerprint(self) -> dict[str, Any]:
        """Plain values: all that decides the text."""
        return {
            "template": sha256(self.source.encode()),
            "template_arguments": dict(self.arguments),
            "date": self.date,
            "jinja2": version_of("jinja2"),
        }


_LOCAL = threading.local()


def _compiled(source: str) -> Any:
    """The compiled template. Each thread has its own: a template tracks one rendering's tags."""
    templates = vars(_LOCAL).setdefault("templates", {})
    if source not in templates:
        try:
            from transformers.utils import chat_template_utils

            compile_template = chat_template_utils._compile_jinja_template
            # without transformers' cache, which all threads share
            templates[source] = getattr(compile_template, "__wrapped__", compile_template)(source)
        except ImportError as error:
            raise ConfigError(
                f"chat templates need transformers and jinja2 ({error}): pip install "
                "'millrace[chats]', or give template=\"chatml\""
            ) from None
        except MUST_PASS:
            raise
        except BaseException as error:
            raise ConfigError(f"the template is not Jinja ({error}): correct it") from None
    return templates[source]


_CALLS_HELP = (
    "To call functions, end the answer with one block for each call:\n"
    '<tool_call>\n{"name": "the name", "arguments": {}}\n</tool_call>\n'
    "The functions, a JSON schema on each line:\n"
)


class ChatML:
    """Our own ChatML, for tokenizers without a template: `<|im_start|>role`, the content,
    `<|im_end|>`. Reasoning stands in `<think>`, tool calls in `<tool_call>`.

    >>> ChatML().render([{"role": "user", "content": "Hi"}], None, has_prompt=True)
    '<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n'
    """

    name = "ChatML"
    arguments: Mapping[str, Any] = {}
    has_tags = True
    literals: frozenset[str] = frozenset()

    def render(
        self, messages: Messages, tools: Tools, has_prompt: bool = False, tags: Tags | None = None
    ) -> str:
        """As `JinjaTemplate.render`."""
        text, header = "", "<|im_start|>assistant\n"
        for role, body in _turns(messages, tools):
            start = len(text)
            text += f"<|im_start|>{role}\n{body}<|im_end|>\n"
            if role == "assistant" and tags is not None:
                tags.append((start + len(header), len(text) - 1))
        return text + header if has_prompt else text

    def fingerprint(self) -> dict[str, Any]:
        """As `JinjaTemplate.fingerprint`."""
        return {"template": "millrace ChatML 1"}


Template = JinjaTemplate | ChatML


def _turns(messages: Messages, tools: Tools) -> list[tuple[str, str]]:
    """The role and the text of each turn of ChatML."""
    turns = []
    for message in messages:
        body = message["content"]
        if message.get("reasoning_content"):
            body = f"<think>\n{message['reasoning_content']}\n</think>\n\n{body}"
        for call in message.get("tool_calls", ()):
            function = call.get("function", call)
            call = {"name": function["name"], "arguments": function.get("arguments", {})}
            text = json.dumps(call, ensure_ascii=False)
            body += f"\n<tool_call>\n{text}\n</tool_call>"
        turns.append((message["role"], body))
    if tools and turns:
        body = _CALLS_HELP + "\n".join(json.dumps(one, ensure_ascii=False) for one in tools)
        is_there = turns[0][0] == "system"
        turns[:is_there] = [("system", f"{turns[0][1]}\n\n{body}" if is_there else body)]
    return turns


def find_template(
    folder: str,
    template: str | os.PathLike[str] | None,
    *,
    name: str | None,
    arguments: Mapping[str, Any],
    special: Mapping[str, str],
    date: str | None,
) -> Template:
    """The template of a file or text, "chatml", or for None the tokenizer's folder's own, if it has
    one. `special` are the tokens that the tokenizer's file names, such as `bos_token`."""
    settings = _json_file(os.path.join(folder, "special_tokens_map.json"))
    settings |= _json_file(os.path.join(folder, "tokenizer_config.json"))
    place = "the template"
    if template is None:
        source, place = _own_template(folder, settings, name or "default"), folder
    elif template == "chatml":
        source = None
    elif isinstance(template, str) and re.search(r"\{[{%]", template):
        source = template
    elif isinstance(template, (str, os.PathLike)) and os.path.isfile(template):
        source, place = read_file(os.fspath(template)).decode(), os.fspath(template)
    else:
        raise ConfigError(f"template is {shown(template)}; give a file, Jinja, or chatml")
    if source is None:
        if name is not None or arguments:
            raise ConfigError("ChatML has no names and takes no template_arguments: leave them out")
        return ChatML()
    values = dict(special)
    for key, value in settings.items():  # transformers gives these to templates
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            values[key] = text
    return JinjaTemplate(source, {**values, **arguments}, date, place)


def _own_template(folder: str, settings: dict[str, Any], name: str) -> str | None:
    given = settings.get("chat_template") or {}
    if isinstance(given, list):
        given = {one["name"]: one["template"] for one in given}
    templates = {"default": given} if isinstance(given, str) else dict(given)
    file = os.path.join(folder, "chat_template.jinja")
    if os.path.isfile(file):  # it wins, as in transformers
        templates["default"] = read_file(file).decode()
    if templates and name not in templates:
        names = ", ".join(templates)
        raise ConfigError(f"{folder} has no template {name!r}: give template_name one of {names}")
    return templates.get(name)


def _json_file(path: str) -> dict[str, Any]:
    try:
        return {**json.loads(read_file(path))} if os.path.isfile(path) else {}
    except (ValueError, TypeError) as error:
        raise TextError(
            f"{path} is not a JSON object ({error}). Save the tokenizer again"
        ) from None
