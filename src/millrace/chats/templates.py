"""Chat templates: Jinja as transformers sets it up, and our own ChatML, which needs no package."""

import datetime
import json
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version as version_of
from typing import Any, Protocol

from millrace.chats.conversations import Message
from millrace.checks import shown
from millrace.encoding.vocabulary import MUST_PASS, read_file, sha256
from millrace.errors import ConfigError, TextError

Tags = list[tuple[int, int]]

_TAG = re.compile(r"\{%[-+]?\s*generation\b")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_CLOCK = re.compile(r"\b(strftime_now|datetime)\b")
_LITERALS = re.compile(r"</?[\w|｜▁]+>|\[/?[A-Z_]+\]")


class Template(Protocol):
    """What renders conversations.

    Attributes:
        name: Name for messages.
        arguments: Plain values that the template reads.
        has_tags: Whether the template marks what the model has written.
        literals: Texts in the template that look like tags: it may search contents for them.
    """

    name: str
    arguments: Mapping[str, Any]
    has_tags: bool
    literals: frozenset[str]

    def render(
        self, messages: Sequence[Message], tools: list[Any] | None, has_prompt: bool = False
    ) -> str:
        """The text of some messages, with the generation prompt if `has_prompt`.

        Raises:
            TextError: Messages that the template refuses.
        """

    def render_tagged(
        self, messages: Sequence[Message], tools: list[Any] | None
    ) -> tuple[str, Tags]:
        """The text of some messages, and where the generation tags begin and end in it."""

    def fingerprint(self) -> dict[str, Any]:
        """Plain values: all that decides the text."""


@dataclass(frozen=True)
class JinjaTemplate:
    """A chat template in Jinja, with what it reads beside the messages.

    Args:
        source: The template.
        arguments: Plain values that it reads: `bos_token`, `enable_thinking` and the like.
        date: Day that the template takes for today's, as "2025-01-31"; None: the template must not
            read the clock.
        name: Name for messages.

    Raises:
        ConfigError: A template that reads the clock, and no date.
    """

    source: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    date: str | None = None
    name: str = "the template"

    def __post_init__(self) -> None:
        if self.date is None and (clock := _CLOCK.search(_COMMENT.sub("", self.source))):
            raise ConfigError(
                f"{self.name} reads the clock ({clock[0]}), so that each day would give other "
                'tokens: give date="2025-01-31", or the day that you mean'
            )
        object.__setattr__(self, "has_tags", _TAG.search(self.source) is not None)
        object.__setattr__(self, "literals", frozenset(_LITERALS.findall(self.source)))

    has_tags: bool = field(init=False, default=False)
    literals: frozenset[str] = field(init=False, default=frozenset())

    def render(
        self, messages: Sequence[Message], tools: list[Any] | None, has_prompt: bool = False
    ) -> str:
        try:
            values = self._values(messages, tools, has_prompt)
            return _compiled(self.source).render(**values)  # type: ignore[no-any-return]
        except (*MUST_PASS, ConfigError):
            raise
        except BaseException as error:
            raise TextError(f"{self.name} refuses the chat: {_reason(error)}") from None

    def render_tagged(
        self, messages: Sequence[Message], tools: list[Any] | None
    ) -> tuple[str, Tags]:
        blocks, tags = _Blocks(), []  # type: ignore[var-annotated]
        try:
            template = _compiled(self.source)
            with template.environment.activate_tracker(blocks, tags):
                for block in template.generate(**self._values(messages, tools, False)):
                    blocks.append(block)
        except (*MUST_PASS, ConfigError):
            raise
        except BaseException as error:
            raise TextError(f"{self.name} refuses the chat: {_reason(error)}") from None
        return "".join(blocks), tags

    def fingerprint(self) -> dict[str, Any]:
        return {
            "template": sha256(self.source.encode()),
            "template_arguments": dict(self.arguments),
            "date": self.date,
            "versions": {"jinja2": version_of("jinja2")},
        }

    def _values(
        self, messages: Sequence[Message], tools: list[Any] | None, has_prompt: bool
    ) -> dict[str, Any]:
        values = {"documents": None, **self.arguments, "messages": messages, "tools": tools}
        values["add_generation_prompt"] = has_prompt
        if self.date is not None:
            day = datetime.datetime.fromisoformat(self.date)
            values["strftime_now"] = day.strftime
        return values


class _Blocks:
    """The rendered blocks. transformers joins all of them at each tag: joined once, the next time
    costs no more than a copy."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def append(self, text: str) -> None:
        self._texts.append(text)

    def __iter__(self) -> Any:
        self._texts = ["".join(self._texts)]
        return iter(self._texts)


_LOCAL = threading.local()


def _compiled(source: str) -> Any:
    """The compiled template; each thread has its own, because the tags of one are being tracked."""
    templates = vars(_LOCAL).setdefault("templates", {})
    if source not in templates:
        try:
            from transformers.utils import chat_template_utils as utils
        except ImportError:
            raise ConfigError(
                "chat templates need transformers and jinja2: pip install 'millrace[trainers]' "
                'jinja2, or give template="chatml"'
            ) from None
        compile_template = utils._compile_jinja_template
        try:  # without transformers' cache, which all threads share
            templates[source] = getattr(compile_template, "__wrapped__", compile_template)(source)
        except ImportError as error:  # jinja2 is missing, or too old
            raise ConfigError(f"chat templates cannot be compiled: {error}") from None
        except (*MUST_PASS, ConfigError):
            raise
        except BaseException as error:
            raise ConfigError(f"the template is not Jinja ({_reason(error)}); correct it") from None
    return templates[source]


def _reason(error: BaseException) -> str:
    return f"{error}" or type(error).__name__


_CALLS_HELP = (
    "\nTo call functions, end the answer with one block for each call:\n"
    '<tool_call>\n{"name": "the name", "arguments": {}}\n</tool_call>\n'
    "The functions, a JSON schema on each line:\n"
)


@dataclass(frozen=True)
class ChatML:
    """Our own ChatML, for tokenizers without a template: `<|im_start|>role`, the content,
    `<|im_end|>`. Reasoning stands in `<think>`, tool calls in `<tool_call>`.

    >>> ChatML().render([{"role": "user", "content": "Hi"}], None, has_prompt=True)
    '<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n'
    """

    name: str = "ChatML"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    has_tags: bool = True
    literals: frozenset[str] = frozenset()

    def render(
        self, messages: Sequence[Message], tools: list[Any] | None, has_prompt: bool = False
    ) -> str:
        prompt = "<|im_start|>assistant\n" if has_prompt else ""
        return self.render_tagged(messages, tools)[0] + prompt

    def render_tagged(
        self, messages: Sequence[Message], tools: list[Any] | None
    ) -> tuple[str, Tags]:
        texts: list[str] = []
        tags: Tags = []
        length = 0
        for role, body in _turns(messages, tools):
            text = f"<|im_start|>{role}\n{body}<|im_end|>\n"
            if role == "assistant":
                tags.append((length + len(role) + 13, length + len(text) - 1))
            texts.append(text)
            length += len(text)
        return "".join(texts), tags

    def fingerprint(self) -> dict[str, Any]:
        return {"template": "millrace ChatML 1"}


def _turns(messages: Sequence[Message], tools: list[Any] | None) -> list[tuple[str, str]]:
    """The role and the text of each turn of ChatML."""
    turns = []
    for message in messages:
        body = message["content"]
        if message.get("reasoning_content"):
            body = f"<think>\n{message['reasoning_content']}\n</think>\n\n{body}"
        for call in message.get("tool_calls", ()):
            function = call.get("function", call)
            call = {"name": function["name"], "arguments": function.get("arguments", {})}
            body += f"\n<tool_call>\n{_json(call)}\n</tool_call>"
        turns.append((message["role"], body))
    if tools:
        body = _CALLS_HELP + "\n".join(map(_json, tools))
        if turns and turns[0][0] == "system":
            turns[0] = ("system", f"{turns[0][1]}\n{body}")
        else:
            turns.insert(0, ("system", body.lstrip()))
    return turns


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def find_template(
    tokenizer_path: str,
    template: str | os.PathLike[str] | None,
    *,
    name: str | None,
    arguments: Mapping[str, Any],
    special: Mapping[str, str],
    date: str | None,
) -> Template:
    """The template of a tokenizer, a file or a text.

    Args:
        tokenizer_path: The tokenizer's file, or folder of transformers.
        template: Path of a template; its text, with braces of Jinja; "chatml"; None for the
            tokenizer's own, or ChatML where there is none.
        name: Name of one of several templates of the tokenizer. None: "default".
        arguments: Plain values that the template reads.
        special: Special tokens that the tokenizer's file names, such as `bos_token`.
        date: Day that the template takes for today's.
    """
    folder = tokenizer_path if os.path.isdir(tokenizer_path) else os.path.dirname(tokenizer_path)
    values = {**special, **_special_texts(folder), **arguments}
    if template is None and tokenizer_path != "bytes":
        source, place = _own_template(folder, name)
    elif template is None or template == "chatml":
        source, place = None, ""
    elif isinstance(template, str) and re.search(r"\{[{%]", template):
        source, place = template, "the template"
    else:
        place = os.fspath(template)
        if not isinstance(place, str) or not os.path.isfile(place):
            raise ConfigError(f"template is {shown(template)}; give a file, Jinja, or chatml")
        source = read_file(place).decode()
    if source is None:
        if name is not None:
            raise ConfigError(
                f"template_name is {name!r}, but {folder} has no templates: leave it out"
            )
        if arguments:
            raise ConfigError(
                f"ChatML takes no template_arguments, but there are {shown(arguments)}"
            )
        return ChatML()
    return JinjaTemplate(source, values, date, place)


def _own_template(folder: str, name: str | None) -> tuple[str | None, str]:
    """The template in a tokenizer's folder, and where it is."""
    templates: dict[str, str] = {}
    path = os.path.join(folder, "tokenizer_config.json")
    given = _json_file(path).get("chat_template")
    if isinstance(given, list):
        templates = {one["name"]: one["template"] for one in given}
    elif isinstance(given, str):
        templates = {"default": given}
    more = os.path.join(folder, "additional_chat_templates")
    files = {os.path.join(more, one) for one in (os.listdir(more) if os.path.isdir(more) else ())}
    for file in sorted(files | {os.path.join(folder, "chat_template.jinja")}):
        if file.endswith(".jinja") and os.path.isfile(file):  # it wins, as in transformers
            stem = os.path.basename(file).removesuffix(".jinja")
            templates["default" if stem == "chat_template" else stem] = read_file(file).decode()
            path = file
    if not templates:
        return None, ""
    chosen = name or "default"
    if chosen not in templates:
        raise ConfigError(
            f"{folder} has no template {chosen!r}: give template_name one of {', '.join(templates)}"
        )
    return templates[chosen], path if chosen == "default" else f"{folder} ({chosen})"


def _special_texts(folder: str) -> dict[str, str]:
    """The special tokens that transformers gives to templates, such as `bos_token`."""
    settings = {
        **_json_file(os.path.join(folder, "special_tokens_map.json")),
        **_json_file(os.path.join(folder, "tokenizer_config.json")),
    }
    texts = {}
    for key, value in settings.items():
        value = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(value, str):
            texts[key] = value
    return texts


def _json_file(path: str) -> dict[str, Any]:
    if not os.path.isfile(path):
        return {}
    try:
        return {**json.loads(read_file(path))}
    except (ValueError, TypeError) as error:
        raise TextError(
            f"{path} is not a JSON object ({error}). Save the tokenizer again"
        ) from None
