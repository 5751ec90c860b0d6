"""Chats into tokens with a proven mask."""

import datetime
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from millrace.chats import conversations
from millrace.chats.chat_report import ChatReport
from millrace.chats.markers import CALL, CONTENT, THOUGHT
from millrace.chats.probes import LOOKS_SPECIAL, learn
from millrace.chats.proof import Document, Rules, prove
from millrace.chats.templates import find_template
from millrace.chats.token_borders import BorderEncoder, byte_places, trained_tokens
from millrace.checks import shown
from millrace.encoding.row_encoders import EncodedRows
from millrace.encoding.tokenizer import Tokenizer
from millrace.errors import ConfigError, TextError
from millrace.option_class import check_options, identity_of, option

_chats = partial(option, group="chats")


def _check_values(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping | None):
        raise ConfigError(f"{name} must be a dictionary, not {shown(value)}")
    try:
        values: dict[str, Any] = conversations.plain(value or {}, name)
    except TextError as error:
        raise ConfigError(str(error)) from None
    known = {*(conversations.COLUMNS if name == "columns" else conversations.ROLES)}
    for key, one in values.items() if name != "template_arguments" else ():
        if (key if name == "columns" else one) not in known or not isinstance(one, str):
            raise ConfigError(f"{name} has {key!r}: {shown(one)}; the known ones: {[*known]}")
    return values


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{text!r} is not JSON, such as '{{\"key\": true}}': {error}") from None


def _check_date(name: str, value: Any) -> str | None:
    try:
        return None if value is None else datetime.date.fromisoformat(str(value)).isoformat()
    except ValueError:
        raise ConfigError(f"{name} is {shown(value)}; give a day, such as 2025-01-31") from None


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """How chats become tokens, and which of these are trained on; the help of each field says how.
    A ConfigError for one that cannot work."""

    # fmt: off
    template_name: str | None = _chats("name of one of several templates of the tokenizer", None)
    template_arguments: Any = option(
        'values that the template reads: {"enable_thinking": false}', None, check=_check_values,
        parse=_parse_json, metavar="JSON", group="chats")
    date: Any = option(
        "day that the template takes for today's, if it reads the clock", None, check=_check_date,
        group="chats")
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
    columns: Any = option(
        'names of columns, by the usual names: {"messages": "data.turns"}', None,
        check=_check_values, parse=_parse_json, metavar="JSON", group="chats")
    roles: Any = option(
        'the usual roles that others stand for: {"customer": "user"}', None, check=_check_values,
        parse=_parse_json, metavar="JSON", group="chats")
    # fmt: on

    def __post_init__(self) -> None:
        check_options(self)


class ChatEncoder:
    """Conversations into documents of tokens, with a mask that is proven.

    Rows may have `messages`, ShareGPT's `conversations`, `prompt` and `completion`, or
    `instruction`, `input` and `output`. The mask of each is found by independent routes, which must
    agree on what the assistant says; a row for which they do not is a problem with a reason.

    Args:
        tokenizer: Tokenizer that tells where its tokens end: byte-level BPE, or a tokenizer.json.
        template: Path or text of a chat template, or "chatml". None: the tokenizer's own, or
            ChatML.
        options: Fields of `ChatOptions`.

    Attributes:
        rules: What a probe conversation told of the template, `stops` above all.
        dtype: Dtype of the tokens, the tokenizer's.

    Raises:
        ConfigError: A template that cannot be used or whose masks cannot be proven; a tokenizer
            that does not fit it.

    >>> encoder = ChatEncoder(Tokenizer("bytes"))
    >>> chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    >>> rows = encoder.encode([{"messages": chat}, {"messages": []}])
    >>> bytes(rows.tokens[rows.trained].tolist()).decode()
    'Yes?<|im_end|>'
    >>> rows.counts.tolist(), rows.problems
    ([1, 0], {1: "none of the 0 messages is an assistant's"})
    """

    def __init__(
        self, tokenizer: Tokenizer, template: str | os.PathLike[str] | None = None, **options: Any
    ) -> None:
        if not isinstance(tokenizer, Tokenizer) or tokenizer.options.get("add_special_tokens"):
            what = f"tokenizer is {shown(tokenizer)}"
            raise ConfigError(f"{what}; give a Tokenizer, without add_special_tokens")
        if not tokenizer.options.get("special_tokens_in_text", True):
            raise ConfigError("special_tokens_in_text is False, but templates write special tokens")
        self.tokenizer, self.options = tokenizer, ChatOptions(**options)
        self.dtype, path = tokenizer.dtype, tokenizer.path
        special = {"bos_token": tokenizer.vocabulary.bos_token, "eos_token": tokenizer.eod_token}
        self.template = find_template(
            path if os.path.isdir(path) else os.path.dirname(path),
            "chatml" if template is None and path == "bytes" else template,
            name=self.options.template_name,
            arguments=self.options.template_arguments,
            special={name: text for name, text in special.items() if text is not None},
            date=self.options.date,
        )
        self._borders = BorderEncoder(tokenizer)
        texts = sorted(map(re.escape, tokenizer.special_tokens()), key=len, reverse=True)
        self._special = re.compile("|".join(texts) or "(?!)")
        kinds = {CONTENT: True, THOUGHT: self.options.reasoning, CALL: self.options.tool_calls}
        rules = Rules(
            turns=self.options.turns,
            kinds=frozenset(kind for kind, is_asked in kinds.items() if is_asked),
            history=self.options.history,
            num_routes=self.options.mask_routes,
            special=re.compile("|".join([*texts, LOOKS_SPECIAL])),
        )
        self.rules, probes = learn(self.template, rules, self.options.stop)
        if problems := _Masks(self._borders, probes).problems:
            raise ConfigError(
                f"{path} does not fit {self.template.name}: {next(iter(problems.values()))}. "
                "Give the tokenizer this special token, or another template"
            )

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> EncodedRows:
        """The documents of some rows; those that cannot be rendered or proven are problems."""
        return self.encode_with_report(rows)[0]

    def encode_with_report(
        self, rows: Sequence[Mapping[str, Any]]
    ) -> tuple[EncodedRows, ChatReport]:
        """The documents of some rows, and their counts."""
        problems: dict[int, str] = {}
        documents: list[tuple[int, Document]] = []
        for number, row in enumerate(rows):
            try:
                documents += [(number, one) for one in self.documents(row)]
            except TextError as error:
                problems[number] = str(error)
        masks = _Masks(self._borders, [one for _, one in documents])
        for place, problem in masks.problems.items():
            problems.setdefault(documents[place][0], problem)
        is_kept = np.array([number not in problems for number, _ in documents], bool)
        owners = np.array([number for number, _ in documents], np.int64)[is_kept]
        counts = np.bincount(owners, minlength=len(rows)).astype(np.int64)
        keep = np.repeat(is_kept, masks.tokens.lengths)
        ids, trained = masks.tokens.ids[keep].astype(self.dtype, copy=False), masks.trained[keep]
        kept = [one for number, one in documents if number not in problems]
        turns = [turn for one in kept for turn in one.turns]
        report = {
            "rows": len(rows),
            "bad rows": len(problems),
            "rows without a target": sum("has no target" in one for one in problems.values()),
            "documents": len(kept),
            "documents of rewritten history": len(kept) - int((counts > 0).sum()),
            "turns": len(turns),
            "turns without a stop token": sum(turn.stop[0] == turn.stop[1] for turn in turns),
            "tokens": len(ids),
            "trained tokens": int(trained.sum()),
            "tokens across a border": int(masks.is_border[keep].sum()),
            **Counter(f"routes: {', '.join(one.routes)}" for one in kept),
        }
        ends = np.cumsum(masks.tokens.lengths[is_kept])
        encoded = EncodedRows(ids, ends, trained, counts, dict(sorted(problems.items())))
        return encoded, ChatReport(counts=Counter(report))

    def documents(self, row: Mapping[str, Any]) -> list[Document]:
        """The rendered documents of a row, and what is trained of them.

        Raises:
            TextError: A row that is a problem.
        """
        try:
            chat = conversations.conversation_of(row, self.options.columns, self.options.roles)
            for number, message in enumerate(chat.messages):
                self._check_texts(f"message {number}", message)
            self._check_texts("the tools", chat.tools)
            return prove(chat, self.template, self.rules)
        except RecursionError:
            raise TextError("the row is nested too deeply: make it flat") from None

    def explain(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What becomes of a row, for people; TextError for one that is a problem.

        Returns:
            For each document: `text`; `tokens` (ids), `texts` (of the tokens) and `trained`, lists
            of one length; `routes`; and `spans`, the characters by route: "markers" (pieces of the
            trained turns), "prompt" (beginnings and ends of turns), "tags", and "trained".
        """
        explained = []
        for document in self.documents(row):
            masks = _Masks(self._borders, [document])
            if masks.problems:
                raise TextError(masks.problems[0])
            messages = {turn.message for turn in document.turns}
            prompts = [(turn.start, turn.stop[1]) for turn in document.turns]
            spans = {
                "markers": [piece[2:] for piece in document.pieces if piece.message in messages],
                "prompt": [span for span in prompts if span[0] is not None],
                "tags": document.tags or [],
                "trained": document.spans,
            }
            texts = [masks.text_of(0, place) for place in range(len(masks.trained))]
            of_tokens = {"tokens": masks.tokens.ids.tolist(), "trained": masks.trained.tolist()}
            of_text = {"text": document.text, "routes": document.routes, "spans": spans}
            explained.append({**of_text, **of_tokens, "texts": texts})
        return explained

    def fingerprint(self) -> dict[str, Any]:
        """All that decides the tokens and the mask, in plain values."""
        return {
            "kind": "chats",
            "version": 1,
            "tokenizer": self.tokenizer.fingerprint,
            "tokenizer_options": self.tokenizer.options,
            "tokenizer_versions": self.tokenizer.versions,
            **self.template.fingerprint(),
            "stops": list(self.rules.stops),
            "options": identity_of(self.options),
        }

    def _check_texts(self, name: str, value: Any) -> None:
        """Raises TextError for texts that cannot be encoded, or hold special tokens."""
        for text in conversations.texts_in(value):
            if not text.isascii() and (lone := re.search(r"[\ud800-\udfff]", text)):
                what = f"the lone surrogate U+{ord(lone[0]):04X}: repair the text"
                raise TextError(f"{name} has {what}")
            special = self._special.search(text)
            if special and self.options.special_text == "refuse":
                raise TextError(
                    f"{name} holds the text of the special token {special[0]!r}: remove it, or "
                    'give special_text="keep" to encode it as that token'
                )


class _Masks:
    """The tokens of some documents, which of them are trained on or across a border, and the
    problems that they show, by document."""

    def __init__(self, borders: BorderEncoder, documents: list[Document]) -> None:
        self._documents = documents
        self.tokens = borders.encode([one.text for one in documents])
        spans: list[list[int]] = []
        stops: list[tuple[int, int]] = []
        for number, document in enumerate(documents):
            of_turns = [turn.stop for turn in document.turns if turn.stop[0] < turn.stop[1]]
            pairs = np.array([*document.spans, *of_turns], np.int64).reshape(-1, 2)
            places = byte_places(document.text, pairs) + self.tokens.bases[number]
            count = len(document.spans)
            spans += places[:count].tolist()
            stops += [(end - 1, number) for end in places[count:, 1].tolist()]
        array = np.array(spans, np.int64).reshape(-1, 2)
        self.trained, self.is_border = trained_tokens(self.tokens, array)
        ends, sums = np.cumsum(self.tokens.lengths), np.append(0, np.cumsum(self.trained))
        empty = np.flatnonzero(sums[ends] == sums[ends - self.tokens.lengths]).tolist()
        self.problems = dict.fromkeys(empty, "it has no target: no token of its turns is whole")
        last, numbers = np.array(stops, np.int64).reshape(-1, 2).T
        tokens = np.searchsorted(self.tokens.ends, last, "right")
        for place in np.flatnonzero(~self.trained[tokens]).tolist():
            text = self.text_of(int(numbers[place]), int(tokens[place]))
            what = f"a stop token is part of the token {shown(text)}, which holds other text, too"
            self.problems[int(numbers[place])] = what

    def text_of(self, document: int, token: int) -> str:
        """The text of a token of a document."""
        text, base = self._documents[document].text, self.tokens.bases[document]
        place = slice(self.tokens.starts[token] - base, self.tokens.ends[token] - base)
        return text.encode()[place].decode(errors="replace")
