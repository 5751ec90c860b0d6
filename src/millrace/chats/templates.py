"""Chat templates: Jinja as transformers sets it up, and our own ChatML, which needs no package."""

import contextlib
import datetime
import json
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version as version_of
from typing import Any

from millrace.chats.conversations import Message
from millrace.chats.options import ChatOptions
from millrace.checks import shown
from millrace.deferred import cached_property
from millrace.encoding.hugging_face import read_object, texts_in
from millrace.encoding.tokenizer import Tokenizer
from millrace.encoding.vocabulary import MUST_PASS, read_file, sha256
from millrace.errors import ConfigError, TextError

Tags = list[tuple[int, int]]
Tools = list[Any] | None
Messages = Sequence[Message]

_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_CLOCK = re.compile(r"\b(strftime_now|datetime)\b")
# A string that is searched for: `.split("</think>")`, or `"/no_think" in`.
_SEARCHED = re.compile(r"""\.\w+\(\s*(['"])([^'"]*)\1|(['"])([^'"]*)\3\s+(?:not\s+)?in\b""")


@dataclass(frozen=True)
class JinjaTemplate:
    """A chat template in Jinja, with what it reads beside the messages.

    Args:
        source: The template.
        arguments: Plain values that it reads: `bos_token`, `enable_thinking` and the like.
        date: Day that the template takes for today's, as "2025-01-31"; None: the template must not
            read the clock.
        name: Name for messages.
        has_parts: Whether the template reads contents as lists of parts.
        is_sealed: Whether to refuse to read contents, which are `_SealedText`.

    Attributes:
        has_tags: Whether the template marks what the model has written.
        literals: Texts like tags, such as "</think>", for which it searches contents.

    Raises:
        ConfigError: A template that reads the clock, and no date.
    """

    source: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    date: str | None = None
    name: str = "the template"
    has_parts: bool = False
    is_sealed: bool = False

    def __post_init__(self) -> None:
        clock = _CLOCK.search(_COMMENT.sub("", self.source))
        if clock and self.date is None:
            what = f"{self.name} reads the clock ({clock[0]}), and gives other tokens each day"
            raise ConfigError(f'{what}: give date="2025-01-31", or the day that you mean')

    @cached_property
    def has_tags(self) -> bool:
        return re.search(r"\{%[-+]?\s*generation\b", self.source) is not None

    @cached_property
    def literals(self) -> frozenset[str]:
        texts = {match[2] or match[4] or "" for match in _SEARCHED.finditer(self.source)}
        return frozenset(text for text in texts if re.search(r"[<\[/]\S", text))

    def render(
        self, messages: Messages, tools: Tools, has_prompt: bool = False, tags: Tags | None = None
    ) -> str:
        """The text of some messages, with the generation prompt if `has_prompt`; TextError for
        messages that the template refuses. Where its generation tags are goes to `tags`."""
        if self.is_sealed:
            messages = [_sealed(one, self.literals) for one in messages]
        if self.has_parts:
            messages = [
                {**one, "content": [{"type": "text", "text": one["content"]}]} for one in messages
            ]
        try:
            template = _compiled(self.source, self.is_sealed)
            values = {"documents": None, **self.arguments, "messages": messages, "tools": tools}
            values["add_generation_prompt"] = has_prompt
            if self.date is not None:
                values["strftime_now"] = datetime.datetime.fromisoformat(self.date).strftime
            # Blocks of tags come as they are.
            rendered = map(template.environment.finalize or str, template.generate(values))
            if tags is None:
                return "".join(rendered)
            blocks: list[str] = []
            with template.environment.activate_tracker(blocks, tags):
                for block in rendered:
                    blocks.append(block)
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


def _compiled(source: str, is_sealed: bool) -> Any:
    """The compiled template. Each thread has its own: a template tracks one rendering's tags."""
    templates = vars(_LOCAL).setdefault("templates", {})
    if (source, is_sealed) not in templates:
        try:
            from transformers.utils.chat_template_utils import _compile_jinja_template as compiling

            # without transformers' cache, which all threads share
            template = getattr(compiling, "__wrapped__", compiling)(source)
        except ImportError as error:
            raise ConfigError(
                f"chat templates need transformers and jinja2 ({error}): pip install "
                "'millrace[chats]', or give template=\"chatml\""
            ) from None
        templates[source, is_sealed] = _guarded(template, source) if is_sealed else template
    return templates[source, is_sealed]


def _sealed(message: Message, literals: frozenset[str]) -> Message:
    """The message with its content sealed; one of white space stays, as it is not replaced."""
    text = message["content"]
    return {**message, "content": _SealedText(text, literals)} if text.strip() else message


# ---- texts that a template can write but not read: what it renders holds for all others ----


def _refuse(*_: Any, **__: Any) -> Any:
    raise TextError("it reads what the messages say")


class _SealedText:
    """What templates get for a text: it can be written, joined with others and stripped of white
    space. All else raises, except that a text alone is searched for `literals`, which must not
    occur in what it stands for."""

    __hash__ = __index__ = __str__ = __repr__ = __getitem__ = _refuse

    def __init__(self, text: str, literals: frozenset[str] = frozenset()) -> None:
        self._text, self._literals = text, literals

    def __len__(self) -> int:  # transformers asks where its tags are; templates may not
        return len(self._text)

    def __eq__(self, other: object) -> Any:
        return bool(other) and _refuse()

    def __add__(self, other: Any) -> "_SealedText":
        return _SealedText(self._text + _written(other))

    def __radd__(self, other: str) -> "_SealedText":
        return _SealedText(other + self._text)

    def __contains__(self, text: str) -> Any:
        return self._search("__contains__", text)

    def __getattr__(self, name: str) -> Any:
        if name in ("strip", "lstrip", "rstrip"):
            return partial(self._strip, name)
        if name in ("startswith", "endswith", "find", "count", "split", "replace"):
            return partial(self._search, name)
        raise AttributeError(name)

    def _strip(self, name: str, chars: str | None = None) -> "_SealedText":
        if chars is not None and not chars.isspace():
            _refuse()
        return _SealedText(getattr(self._text, name)(chars), self._literals)

    def _search(self, name: str, text: str, *options: Any) -> Any:
        if text not in self._literals:
            _refuse()
        answer = getattr(self._text, name)(text, *options)
        return {"split": [self], "replace": self}.get(name, answer)


class _Written(str):
    """A sealed text in what a template has written, whose blocks and macros it may read."""

    __html__ = _refuse

    def __str__(self) -> str:
        return self


def _written(value: Any) -> Any:
    """What a template writes for a value."""
    return _Written(value._text) if isinstance(value, _SealedText) else value


def _concat(parts: Iterable[Any]) -> Any:
    texts = [_written(one) for one in parts]
    is_sealed = any(isinstance(one, _Written) for one in texts)
    return _SealedText("".join(texts)) if is_sealed else "".join(texts)


def _trim(value: Any, chars: str | None = None) -> Any:
    text: Any = value if isinstance(value, _SealedText) else str(value)
    return text.strip(chars)


def _length(value: Any) -> int:
    return _refuse() if isinstance(value, _SealedText) else len(value)


_FILTERS = "d default first last list map reject rejectattr select selectattr string".split()
"""Filters that read a text by its methods alone."""


def _guarded(template: Any, source: str) -> Any:
    """A compiled template, made anew for sealed texts, which changes its environment."""
    environment = template.environment
    environment.finalize, environment.concat = _written, _concat
    filters = {**dict.fromkeys(environment.filters, _refuse), "trim": _trim}
    filters |= {name: environment.filters[name] for name in _FILTERS}
    environment.filters = {**filters, "length": _length, "count": _length}
    environment.tests["string"] = lambda value: isinstance(value, (str, _SealedText))
    return environment.from_string(source)


# ---- without Jinja ----


class ChatML:
    """Our own ChatML, for tokenizers without a template: `<|im_start|>role`, the content,
    `<|im_end|>`. Reasoning stands in `<think>`, tool calls in `<tool_call>`.

    >>> ChatML().render([{"role": "user", "content": "Hi"}], None, has_prompt=True)
    '<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n'
    """

    name = "ChatML"
    arguments: Mapping[str, Any] = {}
    has_tags = is_sealed = False
    literals: frozenset[str] = frozenset()

    def render(
        self, messages: Messages, tools: Tools, has_prompt: bool = False, tags: Tags | None = None
    ) -> str:
        """As `JinjaTemplate.render`."""
        if tools:
            raise TextError("our ChatML does not describe tools: give a template (--chat-template)")
        bodies = [f"<|im_start|>{one['role']}\n{_chatml_body(one)}<|im_end|>\n" for one in messages]
        return "".join(bodies) + "<|im_start|>assistant\n" * has_prompt

    def fingerprint(self) -> dict[str, Any]:
        """As `JinjaTemplate.fingerprint`."""
        return {"template": "millrace ChatML 1"}


def _chatml_body(message: Message) -> str:
    thought, body = message.get("reasoning_content"), str(message["content"])
    body = f"<think>\n{thought}\n</think>\n\n{body}" if thought else body
    for call in message.get("tool_calls", ()):
        function = call.get("function", call)
        arguments = function.get("arguments") or {}
        if not isinstance(arguments, str):  # OpenAI's are texts of JSON
            arguments = json.dumps(arguments, ensure_ascii=False)
        name = json.dumps(function["name"], ensure_ascii=False)
        body += f'\n<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
    return body


Template = JinjaTemplate | ChatML


def find_template(tokenizer: Tokenizer, options: ChatOptions) -> Template:
    """The template of the options, or that of the tokenizer's folder, or else ChatML."""
    path, place, source = tokenizer.path, "the template", None
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    settings = {} if path == "bytes" else read_object(folder, "tokenizer_config.json")
    template = options.template
    file = os.path.join(folder, "chat_template.jinja") if template is None else os.fspath(template)
    if template is not None and re.search(r"\{[{%]", file):
        source = file
    elif os.path.isfile(file) and not (template is None and path == "bytes"):
        place = folder if template is None else file  # the folder's wins, as in transformers
        try:
            source = read_file(file).decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file} is not UTF-8 ({error}): convert it") from None
    elif template is None:
        source, place = settings.get("chat_template"), folder
        if isinstance(source, list):  # several by name
            with contextlib.suppress(KeyError, TypeError):  # without a default, it is refused below
                source = {one["name"]: one["template"] for one in source}["default"]
        if not isinstance(source, str | None):
            what = f"the chat_template of {folder} is {shown(source)}, without a default"
            raise ConfigError(f"{what}. Write one of them to a file, and give template=")
    elif file != "chatml":
        what = f"template is {file!r}, and there is no such file; give a file, Jinja, or chatml"
        raise ConfigError(what)
    if source is None:
        if options.template_arguments:
            raise ConfigError("ChatML takes no template_arguments: leave them out")
        return ChatML()
    tokens = {"bos_token": tokenizer.vocabulary.bos_token, "eos_token": tokenizer.named_eod_token}
    if "eos_token" in source:  # to others it would be nothing but another fingerprint
        tokens["eos_token"] = tokenizer.eod_token
    tokens |= {name: next(texts_in(one), None) for name, one in settings.items()}
    if "bos_token" in source and tokenizer.bos_token != tokenizer.vocabulary.bos_token:
        tokens["bos_token"] = tokenizer.bos_token  # which was given
    # As transformers does; a None would be printed.
    arguments = {name: text for name, text in tokens.items() if name[-6:] == "_token" and text}
    return JinjaTemplate(source, arguments | options.template_arguments, options.date, place)
