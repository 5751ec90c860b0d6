"""Chats into tokens with a proven mask.

A token that holds characters of both, trained on and not, is not trained on, and counted.
"""

import codecs
import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.chats.conversations import all_texts, conversation_of
from millrace.chats.markers import any_of
from millrace.chats.options import ChatOptions
from millrace.chats.probes import LOOKS_SPECIAL, learn
from millrace.chats.proof import Document, NoTargetError, Rules, Span, prove_chat
from millrace.chats.templates import find_template
from millrace.checks import shown
from millrace.encoding.flat_ids import flat_ids, starts_and_ends
from millrace.encoding.hugging_face import JsonVocabulary
from millrace.encoding.row_encoders import EncodedRows
from millrace.encoding.tiktoken_file import TiktokenVocabulary
from millrace.encoding.tokenizer import Tokenizer
from millrace.encoding.tokenizer_files import ByteVocabulary
from millrace.encoding.vocabulary import Vocabulary
from millrace.errors import ConfigError, TextError
from millrace.option_class import identity_of

Ints = NDArray[np.int64]

_NFC = {"type": "NFC"}  # changes no text that is in this form already


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
        self.tokenizer, self.dtype = tokenizer, tokenizer.dtype
        self.options = ChatOptions(template=template, **options)
        chat_template = find_template(tokenizer, self.options)
        self._borders = _BorderEncoder(tokenizer)
        ids = tokenizer.special_tokens()
        tokens = {*ids}
        special = re.compile(f"{any_of(tokens)}|{LOOKS_SPECIAL}")
        rules = Rules(options=self.options, template=chat_template, special=special)
        self.rules, probes = learn(rules)
        # What the template writes would imitate a turn, even where it is no token. A tag that the
        # template looks for, such as "<think>", would not.
        written = {text for one in probes for text in re.findall(LOOKS_SPECIAL, one.text)}
        handled = {*chat_template.literals}
        handled |= {text.replace("/", "", 1) for text in handled}
        self.edge_tokens = [ids[text] for text in self.rules.stops if text in ids]
        tokens |= {*self.rules.stops} | (written - handled)
        hidden = {*map(self._borders.normalized, tokens - self._borders.exact)} - {""}
        self._special, self._hidden = (re.compile(any_of(one)) for one in (tokens | hidden, hidden))
        for problem in _Masks(self._borders, probes).problems.values():
            what = f"{tokenizer.path} does not fit {chat_template.name}: {problem}"
            raise ConfigError(f"{what}. Give the tokenizer this special token, or another template")

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> EncodedRows:
        """The documents of some rows; those that cannot be rendered or proven are problems.

        Returns:
            Arrays as `EncodedRows` says, with a `report`: "rows"; "bad rows", of which "rows
            without a target" would train on no token; "documents", of which "documents of
            rewritten history" are beyond the first of their row; "turns" that are trained on, of
            which "turns without a stop token" and "turns without their reasoning", which the
            template never renders; "tokens", of which "trained tokens"; "tokens across
            a border" of trained and other characters, which are not trained on; and documents by
            the routes that agree on their masks.
        """
        problems: dict[int, TextError] = {}
        documents: list[tuple[int, Document]] = []
        for number, row in enumerate(rows):
            try:
                documents += [(number, one) for one in self.documents(row)]
            except TextError as error:
                problems[number] = error.with_traceback(None)
        masks = _Masks(self._borders, [one for _, one in documents])
        if masks.problems:
            for place, problem in masks.problems.items():
                problems.setdefault(documents[place][0], problem)
            documents = [pair for pair in documents if pair[0] not in problems]
            masks = _Masks(self._borders, [one for _, one in documents])
        trained = masks.trained
        counts = np.bincount([number for number, _ in documents], minlength=len(rows))
        stops = [turn.stop for _, one in documents for turn in one.turns]
        report = {
            "rows": len(rows),
            "bad rows": len(problems),
            "rows without a target": [*map(type, problems.values())].count(NoTargetError),
            "documents": len(documents),
            "documents of rewritten history": len(documents) - int((counts > 0).sum()),
            "turns": len(stops),
            "turns without a stop token": sum(start == end for start, end in stops),
            "turns without their reasoning": sum(one.num_bare for _, one in documents),
            "tokens": len(trained),
            "trained tokens": int(trained.sum()),
            "tokens across a border": int(masks.is_across.sum()),
        }
        routes = Counter(one.routes for _, one in documents)
        report |= {f"routes: {', '.join(names)}": count for names, count in routes.items()}
        ids, ends = masks.ids.astype(self.dtype, copy=False), np.cumsum(masks.lengths)
        reasons = {number: str(problems[number]) for number in sorted(problems)}
        return EncodedRows(ids, ends, trained, counts, reasons, report)

    def documents(self, row: Mapping[str, Any]) -> list[Document]:
        """The rendered documents of a row, and what is trained of them.

        Raises:
            TextError: A row that is a problem.
        """
        try:
            chat = conversation_of(row)
            if self._problem_of([chat.messages, chat.tools]):  # which one is it?
                places = {f"message {number}": one for number, one in enumerate(chat.messages)}
                for place, value in {**places, "the tools": chat.tools}.items():
                    if problem := self._problem_of(value):
                        raise TextError(f"{place} {problem}")
            return prove_chat(chat, self.rules)
        except RecursionError:
            raise TextError("the row is nested too deeply: make it flat") from None

    def explain(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What becomes of a row, for people; TextError for one that is a problem.

        Returns:
            For each document: `tokens` (ids), `texts` (of the tokens) and `trained`, lists of one
            length; and `routes`. A character of several tokens stands in the text of the last.
        """
        explained = []
        for document in self.documents(row):
            masks = _Masks(self._borders, [document])
            if masks.problems:
                raise masks.problems[0]
            text, decoder = document.text.encode(), codecs.getincrementaldecoder("utf-8")()
            places = zip(masks.starts, masks.ends, strict=True)
            texts = [decoder.decode(text[start:end]) for start, end in places]
            of_tokens = {"tokens": masks.ids.tolist(), "trained": masks.trained.tolist()}
            explained.append({"routes": document.routes, **of_tokens, "texts": texts})
        return explained

    def fingerprint(self) -> dict[str, Any]:
        """All that decides the tokens and the mask, in plain values."""
        return {
            "kind": "chats",
            "version": 2,
            # A derived class encodes in its own way.
            **({} if type(self) is ChatEncoder else {"class": type(self).__qualname__}),
            "tokenizer": self.tokenizer.fingerprint,
            "tokenizer_options": self.tokenizer.options,
            "tokenizer_versions": self.tokenizer.versions,
            **self.rules.template.fingerprint(),
            "stops": list(self.rules.stops),
            "options": identity_of(self.options),
        }

    def _problem_of(self, value: Any) -> str:
        """What is wrong with texts that cannot be encoded, or that hold special tokens."""
        text = "\0".join(all_texts(value))
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return f"has the lone surrogate U+{ord(text[error.start]):04X}: repair the text"
        if self.options.special_text == "keep":
            return ""
        special, normalized = self._special.search(text), self._borders.normalized(text)
        if special is None and normalized != text:
            special = self._hidden.search(normalized)
        if special is None:
            return ""
        how = "" if special[0] in text else " once it is normalized"
        return (
            f"holds {special[0]!r}{how}, a special token or a border of messages: remove it, or "
            'give special_text="keep" to encode it as the template\'s own'
        )


# ---- from characters to tokens ----


class _BorderEncoder:
    """Encodes texts, and finds the borders of their tokens; ConfigError for a tokenizer without."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        vocabulary = tokenizer.vocabulary
        settings = json.loads(vocabulary.content) if isinstance(vocabulary, JsonVocabulary) else {}
        self.tokenizer, self._sizes = tokenizer, _sizes(vocabulary, settings)
        self._normalizer = settings.get("normalizer")
        added = settings.get("added_tokens", ())
        # Tokens that the tokenizer looks for in texts as they are, and not in normalized ones.
        self.exact = {one["content"] for one in added if not one["normalized"]}
        if self._sizes is None and not settings:
            raise ConfigError(
                f"{tokenizer.path} does not tell where its tokens end: give a tokenizer.json, a "
                'folder with one, a .tiktoken file, or "bytes"'
            )

    def encode(self, texts: list[str]) -> tuple[Ints, Ints, NDArray[Any], Ints]:
        """The tokens of texts that stand one after the other, apart by a byte, in one call of the
        encoder: where each token begins and ends, in bytes of UTF-8, and its id, [n] each; and the
        number of tokens of each text."""
        sizes = [len(text) if text.isascii() else len(text.encode()) for text in texts]
        bases, _ = starts_and_ends(np.array(sizes, np.int64) + 1)
        if self._sizes is None:
            others, encodings = [*range(len(texts))], self._reference(texts)
            ids, lengths = flat_ids([one.ids for one in encodings])
            firsts, lasts = starts_and_ends(lengths)
            ends = np.zeros(len(ids), np.int64)
        else:
            ids, lengths = self.tokenizer.encode_batch(texts)
            firsts, lasts = starts_and_ends(lengths)
            sums = np.append(0, np.cumsum(self._sizes[ids], dtype=np.int64))
            ends = sums[1:] + np.repeat(bases - sums[firsts], lengths)
            # Such as tokens that swallow white space around them.
            is_other = sums[lasts] - sums[firsts] != np.array(sizes, np.int64)
            is_other |= np.array([self.normalized(text) != text for text in texts], np.bool_)
            others = np.flatnonzero(is_other).tolist()
            encodings = self._reference([texts[number] for number in others]) if others else []
        for number, one in zip(others, encodings, strict=True):
            places = byte_places(texts[number], np.array([end for _, end in one.offsets], np.int64))
            # Offsets may leave out the space before a word: a token begins where the last ended.
            ends[firsts[number] : lasts[number]] = bases[number] + np.maximum.accumulate(places)
        starts = np.append(0, ends)[:-1]
        starts[firsts[lengths > 0]] = bases[lengths > 0]
        return starts, ends, ids, lengths

    def normalized(self, text: str) -> str:
        """The text as the tokenizer's normalizer makes it."""
        if self._normalizer in (None, _NFC):  # takes no time for most texts
            return unicodedata.normalize("NFC", text) if self._normalizer else text
        library: Any = self.tokenizer.vocabulary.library  # type: ignore[attr-defined]
        return str(library.normalizer.normalize_str(text))

    def _reference(self, texts: list[str]) -> Any:
        """The encodings of some texts by the library of a tokenizer.json, which have offsets."""
        library: Any = self.tokenizer.vocabulary.library  # type: ignore[attr-defined]
        return library.encode_batch(texts, add_special_tokens=False)


class _Masks:
    """The tokens of some documents, which of them are trained on or across a border, and the
    problems that they show, by document."""

    def __init__(self, borders: _BorderEncoder, documents: list[Document]) -> None:
        texts = [one.text for one in documents]
        starts, ends, self.ids, self.lengths = borders.encode(texts)
        self.starts, self.ends = starts, ends
        spans: list[Span] = []
        stops: list[tuple[int, int, int]] = []  # start and end of a stop token, and its document
        before = 0
        for number, one in enumerate(documents):
            spans += [(before + start, before + end) for start, end in one.spans]
            own = [turn.stop for turn in one.turns]
            stops += [(before + start, before + end, number) for start, end in own if start < end]
            before += len(one.text) + 1
        text = "\0".join(texts)
        edges = np.array(spans, np.int64).reshape(-1, 2)
        self.trained, self.is_across = trained_tokens(starts, ends, byte_places(text, edges))
        self.problems: dict[int, TextError] = {}
        places = np.array([end for _, end, _ in stops], np.int64)
        tokens = np.searchsorted(ends, byte_places(text, places) - 1, "right")
        data = text.encode()
        for place in np.flatnonzero(~self.trained[tokens]).tolist():
            token, (start, end, number) = tokens[place], stops[place]
            part = data[starts[token] : ends[token]].decode(errors="replace")
            if part.strip() == text[start:end]:  # a stop token that swallows white space around it
                self.trained[token], self.is_across[token] = True, False
                continue
            what = f"the stop token {text[start:end]!r} is part of the token {shown(part)}"
            self.problems[number] = TextError(f"{what}, which holds other text, too")
        lasts, sums = np.cumsum(self.lengths), np.append(0, np.cumsum(self.trained))
        nothing = NoTargetError("it has no target: no token of its turns is whole")
        for number in np.flatnonzero(sums[lasts] == sums[lasts - self.lengths]).tolist():
            self.problems.setdefault(number, nothing)


def trained_tokens(starts: Ints, ends: Ints, spans: Ints) -> tuple[NDArray[Any], NDArray[Any]]:
    """Which tokens are in one of the spans, [spans, 2] in order, and across a border: bool [n].

    >>> masks = trained_tokens(np.array([0, 2, 4]), np.array([2, 4, 6]), np.array([[1, 4]]))
    >>> [mask.tolist() for mask in masks]
    [[False, True, False], [True, False, False]]
    """
    edges = np.searchsorted(ends, spans, "right")  # the tokens with the characters there
    there = np.minimum(edges, len(ends) - 1)
    # The bytes of one character may be several tokens, of which only the first has a width.
    behind = np.searchsorted(ends, ends[there], "right")
    behind = np.where(starts[there] < spans, behind, edges)
    is_inside, is_across = np.zeros((2, len(ends)), bool)
    for (first, last), (begin, end) in zip(edges.tolist(), behind.tolist(), strict=True):
        is_inside[begin:last] = True
        if first < begin or last < end:
            is_across[first:begin] = is_across[last:end] = True
    return is_inside, is_across


def byte_places(text: str, places: Ints) -> Ints:
    """Places of characters as places of bytes."""
    if text.isascii():
        return places
    data = np.frombuffer(text.encode(), np.int8)
    return np.append(np.flatnonzero(data > -65), len(data))[places]  # others continue a character


def _sizes(vocabulary: Vocabulary, settings: dict[str, Any]) -> NDArray[np.int32] | None:
    """The bytes of each id: int32 [ids]; None if tokens are not the bytes of the text.

    `settings`: content of a tokenizer.json; empty for other vocabularies.
    """
    sizes = np.ones(vocabulary.largest_id + 1, np.int32)
    if isinstance(vocabulary, TiktokenVocabulary):
        tokens: dict[Any, int] = vocabulary.ranks
    elif isinstance(vocabulary, JsonVocabulary) and _is_byte_level(settings):
        tokens = vocabulary.library.get_vocab(with_added_tokens=False)  # a character a byte
    else:
        return sizes if isinstance(vocabulary, ByteVocabulary) else None
    sizes[[*tokens.values()]] = [*map(len, tokens)]
    for text in vocabulary.added_tokens():
        sizes[vocabulary.id_of(text)] = len(text.encode())
    return sizes


def _is_byte_level(settings: dict[str, Any]) -> bool:
    first = settings.get("pre_tokenizer") or {}
    steps = [first, *first.get("pretokenizers", ())]
    is_bpe = settings["model"].get("type", "BPE") == "BPE"
    # A space before each word would make up for white space that added tokens swallow.
    is_as_text = not any(one.get("add_prefix_space") for one in steps)
    is_as_text &= settings.get("normalizer") in (None, _NFC)
    return is_bpe and is_as_text and "ByteLevel" in [one.get("type") for one in steps]
