"""From characters to tokens: where tokens end in their texts, and which of them are trained on.

A token that holds characters of both is not trained on, and counted.
"""

import json
import unicodedata
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace.encoding.flat_ids import flat_ids, starts_and_ends
from millrace.encoding.hugging_face import JsonVocabulary
from millrace.encoding.tiktoken_file import TiktokenVocabulary
from millrace.encoding.tokenizer import Tokenizer
from millrace.encoding.tokenizer_files import ByteVocabulary
from millrace.encoding.vocabulary import Vocabulary
from millrace.errors import ConfigError

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_NFC = {"type": "NFC"}  # changes no text that is in this form already


class BorderedTexts(NamedTuple):
    """Tokens of some texts, which stand one after the other, apart by a byte."""

    starts: Ints  # [n] where a token begins in all texts, in bytes of UTF-8
    ends: Ints  # [n] where it ends
    ids: NDArray[Any]  # [n] of all texts
    lengths: Ints  # [texts] number of tokens of each


class BorderEncoder:
    """Encodes texts, and finds the borders of their tokens; ConfigError for a tokenizer without."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        vocabulary = tokenizer.vocabulary
        settings = json.loads(vocabulary.content) if isinstance(vocabulary, JsonVocabulary) else {}
        self.tokenizer, self._sizes = tokenizer, _sizes(vocabulary, settings)
        self._is_nfc = settings.get("normalizer") == _NFC
        if self._sizes is None and not settings:
            raise ConfigError(
                f"{tokenizer.path} does not tell where its tokens end: give a tokenizer.json, a "
                'folder with one, a .tiktoken file, or "bytes"'
            )

    def encode(self, texts: list[str]) -> BorderedTexts:
        """The tokens of some texts, in one call of the encoder."""
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
            if self._is_nfc:
                is_nfc = [unicodedata.is_normalized("NFC", text) for text in texts]
                is_other |= ~np.array(is_nfc, np.bool_)
            others = np.flatnonzero(is_other).tolist()
            encodings = self._reference([texts[number] for number in others]) if others else []
        for number, one in zip(others, encodings, strict=True):
            places = byte_places(texts[number], np.array([end for _, end in one.offsets], np.int64))
            # Offsets may leave out the space before a word: a token begins where the last ended.
            ends[firsts[number] : lasts[number]] = bases[number] + np.maximum.accumulate(places)
        starts = np.append(0, ends)[:-1]
        starts[firsts[lengths > 0]] = bases[lengths > 0]
        return BorderedTexts(starts, ends, ids, lengths)

    def _reference(self, texts: list[str]) -> Any:
        """The encodings of some texts by the library of a tokenizer.json, which have offsets."""
        library: Any = self.tokenizer.vocabulary.library  # type: ignore[attr-defined]
        return library.encode_batch(texts, add_special_tokens=False)


def trained_tokens(starts: Ints, ends: Ints, spans: Ints) -> tuple[Bools, Bools]:
    """Which tokens are in one of the spans, [spans, 2] in order, and which are across a border.

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
        added = vocabulary.special_ids
    elif isinstance(vocabulary, JsonVocabulary) and _is_byte_level(settings):
        library = vocabulary.library
        tokens = library.get_vocab(with_added_tokens=False)  # a character a byte
        added = {one.content: number for number, one in library.get_added_tokens_decoder().items()}
    else:
        return sizes if isinstance(vocabulary, ByteVocabulary) else None
    sizes[[*tokens.values()]] = [*map(len, tokens)]
    sizes[[*added.values()]] = [len(text.encode()) for text in added]
    return sizes


def _is_byte_level(settings: dict[str, Any]) -> bool:
    first = settings.get("pre_tokenizer") or {}
    kinds = [first.get("type"), *(one.get("type") for one in first.get("pretokenizers", ()))]
    is_bpe = settings["model"].get("type", "BPE") == "BPE"
    return is_bpe and settings.get("normalizer") in (None, _NFC) and "ByteLevel" in kinds
