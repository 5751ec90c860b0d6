"""Chats into tokens with a proven mask."""

import datetime
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.chats.chat_report import ChatReport
from millrace.chats.conversations import Conversation, RowReader, plain, texts_in
from millrace.chats.probes import learn, shown_stops, special_pattern
from millrace.chats.proof import Document, Rules, prove
from millrace.chats.templates import find_template
from millrace.chats.token_borders import (
    Bools,
    BorderEncoder,
    EncodedTexts,
    places_of,
    trained_tokens,
)
from millrace.checks import shown
from millrace.encoding.rows import EncodedRows
from millrace.encoding.tokenizer import Tokenizer
from millrace.errors import ConfigError, TextError
from millrace.option_class import check_options, identity_of, option


def _check_names(name: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a dictionary, not {shown(value)}")
    try:
        return plain(value, name)  # type: ignore[no-any-return]
    except TextError as error:
        raise ConfigError(str(error)) from None


def _check_date(name: str, value: Any) -> str | None:
    if value is None:
        return None
    try:
        return datetime.date.fromisoformat(str(value)).isoformat()
    except ValueError:
        raise ConfigError(f"{name} is {shown(value)}; give a day, such as 2025-01-31") from None


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """How chats become tokens, and which of these are trained on.

    Args:
        template_name: Name of one of several templates of a tokenizer.
        template_arguments: Plain values that the template reads, such as `enable_thinking`.
        date: Day that the template takes for today's; templates that read the clock need it.
        turns: Turns to train on: "all", "last", or "weight" for those without a `weight` or
            `train` of 0.
        reasoning: Whether to train on reasoning.
        tool_calls: Whether to train on tool calls.
        stop: Text of the token that stops a turn. None: the one that the template shows.
        history: What to do where a template renders a turn in another way if more messages follow:
            "documents" for a document that ends with the turn, or "refuse".
        mask_routes: Least number of routes that must agree, 1 or 2.
        special_text: "refuse" for rows that hold the text of a special token, or "keep" to encode
            it as that token, as transformers does.
        columns: Names of columns by part: messages, conversations, prompt, completion,
            instruction, input, output, tools, system. None: the usual names.
        roles: Further roles of messages, and the usual ones that they stand for.
    """

    template_name: str | None = option("name of one of several templates of the tokenizer", None)
    template_arguments: Any = option(
        "values that the template reads", None, check=_check_names, flags=None
    )
    date: Any = option("day that the template takes for today's", None, check=_check_date)
    turns: str = option("turns to train on", "all", choices=("all", "last", "weight"))
    reasoning: bool = option("leave reasoning out of the loss", True, flags="--no-reasoning")
    tool_calls: bool = option("leave tool calls out of the loss", True, flags="--no-tool-calls")
    stop: str | None = option("text of the token that stops a turn", None)
    history: str = option(
        "what becomes of rewritten turns", "documents", choices=("documents", "refuse")
    )
    mask_routes: int = option("least number of routes that must agree", 2, least=1, most=2)
    special_text: str = option(
        "what becomes of special tokens in contents", "refuse", choices=("refuse", "keep")
    )
    columns: Any = option("names of columns by part", None, check=_check_names, flags=None)
    roles: Any = option("further roles", None, check=_check_names, flags=None)

    def __post_init__(self) -> None:
        check_options(self)


class ChatEncoder:
    """Conversations into documents of tokens, with a mask that is proven.

    Rows may have `messages`, ShareGPT's `conversations`, `prompt` and `completion`, or
    `instruction`, `input` and `output`. The mask of each is found by independent routes, which must
    agree on what the assistant says; a row for which they do not is a problem with a reason.

    Args:
        tokenizer: Tokenizer that tells where its tokens end (`token_borders`).
        template: Path or text of a chat template, or "chatml". None: the tokenizer's own, or
            ChatML.
        options: Fields of `ChatOptions`.

    Attributes:
        tokenizer: The tokenizer.
        options: The `ChatOptions`.
        template: The template.
        rules: What the probe conversations told of the template.
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
        if not isinstance(tokenizer, Tokenizer):
            raise ConfigError(
                f"tokenizer is {shown(tokenizer)}; give a millrace.encoding.Tokenizer"
            )
        if tokenizer.options.get("add_special_tokens"):
            raise ConfigError("add_special_tokens is True, but templates add them: leave it out")
        self.tokenizer, self.options = tokenizer, ChatOptions(**options)
        self.dtype = tokenizer.dtype
        known = {"bos_token": tokenizer.vocabulary.bos_token, "eos_token": tokenizer.eod_token}
        self.template = find_template(
            tokenizer.path,
            template,
            name=self.options.template_name,
            arguments=self.options.template_arguments,
            special={name: text for name, text in known.items() if text is not None},
            date=self.options.date,
        )
        self._reader = RowReader(self.options.columns, self.options.roles)
        self._borders = BorderEncoder.of(tokenizer)
        special = tokenizer.special_tokens()
        self._special = re.compile("|".join(sorted(map(re.escape, special), key=len)) or "(?!)")
        rules = Rules(
            turns=self.options.turns,
            has_reasoning=self.options.reasoning,
            has_tool_calls=self.options.tool_calls,
            history=self.options.history,
            num_routes=self.options.mask_routes,
            special=special_pattern(special),
        )
        learned, documents = learn(
            self.template, rules, self.options.stop, self.template.arguments.get("eos_token")
        )
        self.rules = learned
        self._check_stops(documents)

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> EncodedRows:
        """The documents of some rows.

        Args:
            rows: Rows, of which those that cannot be rendered or proven are problems.
        """
        return self.encode_with_report(rows)[0]

    def encode_with_report(
        self, rows: Sequence[Mapping[str, Any]]
    ) -> tuple[EncodedRows, ChatReport]:
        """The documents of some rows, and their counts."""
        problems: dict[int, str] = {}
        documents: list[Document] = []
        counts = np.zeros(len(rows), np.int64)
        for number, row in enumerate(rows):
            try:
                proven = self.documents(row)
            except TextError as error:
                problems[number] = str(error)
                continue
            documents += proven
            counts[number] = len(proven)
        tokens = self._borders.encode([one.text for one in documents])
        spans, stops = _global_spans(documents, tokens)
        trained, border = trained_tokens(tokens, spans)
        owners = np.repeat(np.arange(len(rows)), counts)
        late = _late_problems(documents, tokens, trained, stops, owners)
        without_target = sum("target" in reason for reason in late.values())
        is_bad = np.isin(owners, [*late])
        problems |= late
        if late:
            counts[[*late]] = 0
        keep = np.repeat(~is_bad, tokens.lengths)
        kept = [one for one, bad in zip(documents, is_bad, strict=True) if not bad]
        routes = Counter("+".join(one.routes) for one in kept)
        turns = [turn for one in kept for turn in one.turns]
        report = ChatReport(
            rows=len(rows),
            bad_rows=len(problems),
            rows_without_target=without_target,
            documents=len(kept),
            rewritten=len(kept) - int((counts > 0).sum()),
            turns=len(turns),
            turns_without_stop=sum(turn.stop[0] == turn.stop[1] for turn in turns),
            tokens=int(keep.sum()),
            trained=int(trained[keep].sum()),
            border_tokens=int(border[keep].sum()),
            routes=dict(routes),
        )
        ids = tokens.ids[keep].astype(self.dtype, copy=False)
        ends = np.cumsum(tokens.lengths[~is_bad])
        order = dict(sorted(problems.items()))
        return EncodedRows(ids, ends, trained[keep], counts, order), report

    def documents(self, row: Mapping[str, Any]) -> list[Document]:
        """The rendered documents of a row, and what is trained of them.

        Raises:
            TextError: A row that is a problem.
        """
        try:
            chat = self._reader.read(row)
            self._check_texts(chat)
            return prove(chat, self.template, self.rules)
        except RecursionError:
            raise TextError("the row is nested too deeply: make it flat") from None

    def explain(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What becomes of a row, for people.

        Returns:
            For each document: `text`; `tokens` (ids), `texts` (of the tokens) and `trained`, lists
            of one length; `routes`; and `spans`, the characters by route: "markers" (pieces of the
            assistant's turns), "prompt" (beginnings and ends of turns), "tags", and "trained".

        Raises:
            TextError: A row that is a problem.
        """
        explained = []
        for document in self.documents(row):
            tokens = self._borders.encode([document.text])
            spans, stops = _global_spans([document], tokens)
            trained, _ = trained_tokens(tokens, spans)
            late = _late_problems([document], tokens, trained, stops, np.zeros(1, np.int64))
            if late:
                raise TextError(late[0])
            data: Any = document.text.encode() if tokens.is_bytes else document.text
            pieces = [
                data[start:end] for start, end in zip(tokens.starts, tokens.ends, strict=True)
            ]
            explained.append(
                {
                    "text": document.text,
                    "tokens": tokens.ids.tolist(),
                    "texts": [
                        one.decode(errors="replace") if tokens.is_bytes else one for one in pieces
                    ],
                    "trained": trained.tolist(),
                    "routes": document.routes,
                    "spans": _spans_by_route(document),
                }
            )
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
            "options": identity_of(self.options),
        }

    def _check_texts(self, chat: Conversation) -> None:
        """Raises TextError for texts that cannot be encoded, or hold special tokens."""
        for number, message in enumerate([*chat.messages, {"tools": chat.tools}]):
            for text in texts_in(message):
                name = f"message {number}" if number < len(chat.messages) else "tools"
                if not text.isascii() and (lone := re.search(r"[\ud800-\udfff]", text)):
                    what = f"the lone surrogate U+{ord(lone[0]):04X}: repair the text"
                    raise TextError(f"{name} has {what}")
                special = self._special.search(text)
                if special and self.options.special_text == "refuse":
                    raise TextError(
                        f"{name} holds the text of the special token {special[0]!r}: remove it, or "
                        'give special_text="keep" to encode it as that token'
                    )

    def _check_stops(self, documents: list[Document]) -> None:
        """Raises ConfigError if no probe trains a stop token, or it is not the tokenizer's."""
        tokens = self._borders.encode([one.text for one in documents])
        spans, stops = _global_spans(documents, tokens)
        trained, _ = trained_tokens(tokens, spans)
        late = _late_problems(documents, tokens, trained, stops, np.zeros(len(documents), np.int64))
        names = shown_stops(self.rules.stops)
        if late:
            raise ConfigError(
                f"{self.template.name} stops turns with {names}, which {self.tokenizer.path} joins "
                f"with other text, so that it would never be trained ({late[0]}): give the "
                "tokenizer this special token, or another template"
            )
        for stop in self.rules.stops:
            number = self.tokenizer.special_tokens().get(stop)
            if number is not None and self.tokenizer.encode([stop]) != [[number]]:
                if self.tokenizer.path == "bytes":
                    continue
                raise ConfigError(
                    f"{self.tokenizer.path} encodes {stop!r} as plain text, though it is a special "
                    "token: give special_tokens_in_text=True"
                )


def _global_spans(documents: list[Document], tokens: EncodedTexts) -> tuple[Any, Any]:
    """Trained spans, int64 [spans, 2], and stop tokens with their documents, int64 [stops, 3], in
    the places of the tokens."""
    spans, stops = [], []
    for number, (document, base) in enumerate(zip(documents, tokens.bases.tolist(), strict=True)):
        of_text = places_of(document.text, document.spans, tokens.is_bytes)
        spans += [(start + base, end + base) for start, end in of_text]
        of_text = places_of(document.text, [one.stop for one in document.turns], tokens.is_bytes)
        stops += [(start + base, end + base, number) for start, end in of_text if start < end]
    return np.array(spans, np.int64).reshape(-1, 2), np.array(stops, np.int64).reshape(-1, 3)


def _late_problems(
    documents: list[Document], tokens: EncodedTexts, trained: Bools, stops: Any, owners: Any
) -> dict[int, str]:
    """Rows whose tokens show a problem: their stop token, or no token at all, is not trained."""
    problems: dict[int, str] = {}
    last = np.searchsorted(tokens.ends, stops[:, 1] - 1, "right")
    for place in np.flatnonzero(~trained[last]).tolist():
        document = documents[stops[place, 2]]
        token = slice(int(tokens.starts[last[place]]), int(tokens.ends[last[place]]))
        base = tokens.bases[stops[place, 2]]
        data: Any = document.text.encode() if tokens.is_bytes else document.text
        problems[int(owners[stops[place, 2]])] = (
            f"a stop token is part of the token {shown(data[token.start - base : token.stop - base])}"
        )
    ends = np.cumsum(tokens.lengths)
    sums = np.append(0, np.cumsum(trained))
    for number in np.flatnonzero(sums[ends] == sums[ends - tokens.lengths]).tolist():
        problems.setdefault(int(owners[number]), "it has no target: no token of its turns is whole")
    return problems


def _spans_by_route(document: Document) -> dict[str, list[tuple[int, int]]]:
    messages = {turn.message for turn in document.turns}
    pieces = [(one.start, one.end) for one in document.pieces if one.message in messages]
    prompts = [(turn.start, turn.stop[1]) for turn in document.turns if turn.start is not None]
    spans = {"markers": pieces, "prompt": prompts, "tags": document.tags, "trained": document.spans}
    return {name: one for name, one in spans.items() if one is not None}
