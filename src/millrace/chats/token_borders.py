"""From characters to tokens: where tokens end in their texts, and which of them are trained on.

A token that holds characters of both is not trained on, and counted.
"""

import itertools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace.encoding.flat_ids import starts_and_ends
from millrace.encoding.hugging_face import JsonVocabulary
from millrace.encoding.tiktoken_file import TiktokenVocabulary
from millrace.encoding.tokenizer import Tokenizer
from millrace.encoding.tokenizer_files import ByteVocabulary
from millrace.encoding.vocabulary import Vocabulary
from millrace.errors import ConfigError

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class EncodedTexts(NamedTuple):
    """Tokens of some texts that stand one after the other."""

    ids: NDArray[Any]  # [n] of all texts
    lengths: Ints  # [texts] number of tokens of each
    starts: Ints  # [n] where a token begins in all texts, in characters or bytes
    ends: Ints  # [n] where it ends
    bases: Ints  # [texts] where each text begins
    is_bytes: bool  # whether places are of bytes of UTF-8


class BorderEncoder:
    """Encodes texts, and finds the borders of their tokens; ConfigError for a tokenizer without."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self._sizes = tokenizer, _sizes(tokenizer.vocabulary)
        if self._sizes is None and not isinstance(tokenizer.vocabulary, JsonVocabulary):
            raise ConfigError(
                f"{tokenizer.path} does not tell where its tokens end: give a tokenizer.json, a "
                'folder with one, a .tiktoken file, or "bytes"'
            )

    def encode(self, texts: list[str]) -> EncodedTexts:
        """The tokens of some texts, in one call of the encoder."""
        if self._sizes is None:
            return self._with_offsets(texts)
        counts = [len(text) if text.isascii() else len(text.encode()) for text in texts]
        bases, totals = starts_and_ends(np.array(counts, np.int64))
        ids, lengths = self.tokenizer.encode_batch(texts)
        places = np.append(0, np.cumsum(self._sizes[ids], dtype=np.int64))
        if not np.array_equal(places[np.cumsum(lengths)], totals):
            return self._with_offsets(texts)  # such as tokens that swallow white space
        return EncodedTexts(ids, lengths, places[:-1], places[1:], bases, True)

    def _with_offsets(self, texts: list[str]) -> EncodedTexts:
        vocabulary = self.tokenizer.vocabulary
        if not isinstance(vocabulary, JsonVocabulary):
            raise ConfigError(f"the tokens of {self.tokenizer.path} are not the bytes of the texts")
        encoded = vocabulary.library.encode_batch(texts, add_special_tokens=False)
        lengths = np.array([len(one.ids) for one in encoded], np.int64)
        bases, _ = starts_and_ends(np.array([*map(len, texts)], np.int64))
        ids = np.array([number for one in encoded for number in one.ids], np.uint32)
        offsets = np.array([end for one in encoded for _, end in one.offsets], np.int64)
        # Offsets may leave out the space before a word: a token begins where the last one ended.
        ends = np.maximum.accumulate(offsets + np.repeat(bases, lengths))
        starts = np.append(0, ends)[:-1]
        firsts, _ = starts_and_ends(lengths)
        starts[firsts[lengths > 0]] = bases[lengths > 0]
        return EncodedTexts(ids, lengths, starts, ends, bases, False)


def trained_tokens(tokens: EncodedTexts, spans: Ints) -> tuple[Bools, Bools]:
    """Which tokens are in one of the spans, [spans, 2] in order, and which are across a border.

    >>> starts, ends = np.array([0, 2, 4]), np.array([2, 4, 6])
    >>> tokens = EncodedTexts(starts, np.array([3]), starts, ends, np.array([0]), True)
    >>> [mask.tolist() for mask in trained_tokens(tokens, np.array([[1, 4]]))]
    [[False, True, False], [True, False, False]]
    """
    first, last = np.append(-1, spans[:, 0]), np.append(-1, spans[:, 1])
    is_whole = tokens.starts < tokens.ends
    place = np.searchsorted(first, tokens.starts, "right") - 1
    is_inside = (tokens.ends <= last[place]) & is_whole
    place = np.searchsorted(first, tokens.ends, "left") - 1
    is_touched = (last[place] > tokens.starts) & is_whole
    # The bytes of one character may be several tokens, of which only the first has an offset.
    before = np.maximum.accumulate(np.where(is_whole, np.arange(len(is_whole)), 0))
    return is_inside[before], (is_touched & ~is_inside)[before]


def places_of(text: str, spans: Sequence[tuple[int, int]], is_bytes: bool) -> list[tuple[int, int]]:
    """Spans of characters as they are, or as spans of bytes."""
    if not is_bytes or text.isascii():
        return [*spans]
    borders = sorted({0, *(place for span in spans for place in span)})
    sizes = [len(text[start:end].encode()) for start, end in itertools.pairwise(borders)]
    places = dict(zip(borders, np.cumsum([0, *sizes]).tolist(), strict=True))
    return [(places[start], places[end]) for start, end in spans]


def _sizes(vocabulary: Vocabulary) -> NDArray[np.int32] | None:
    """The bytes of each id: int32 [ids]; None if tokens are not the bytes of the text."""
    sizes = np.ones(vocabulary.largest_id + 1, np.int32)
    if isinstance(vocabulary, TiktokenVocabulary):
        of_tokens = {number: len(token) for token, number in vocabulary.ranks.items()}
        added = {number: text for text, number in vocabulary.special_ids.items()}
    elif isinstance(vocabulary, JsonVocabulary) and _is_byte_level(vocabulary.content):
        tokens = vocabulary.library.get_vocab(with_added_tokens=False)
        of_tokens = {number: len(text) for text, number in tokens.items()}  # a character a byte
        tokens = vocabulary.library.get_added_tokens_decoder()
        added = {number: token.content for number, token in tokens.items()}
    else:
        return sizes if isinstance(vocabulary, ByteVocabulary) else None
    of_tokens |= {number: len(text.encode()) for number, text in added.items()}
    sizes[[*of_tokens]] = [*of_tokens.values()]
    return sizes


def _is_byte_level(content: str) -> bool:
    settings = json.loads(content)
    first = settings.get("pre_tokenizer") or {}
    kinds = [first.get("type"), *(one.get("type") for one in first.get("pretokenizers", ()))]
    is_bpe = settings["model"].get("type", "BPE") == "BPE"
    return is_bpe and settings.get("normalizer") is None and "ByteLevel" in kinds
