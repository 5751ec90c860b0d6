"""From characters to tokens: where tokens end in their texts, and which of them are trained on.

A token that holds characters of both is not trained on, and counted.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
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
    """Tokens of some texts that stand one after the other.

    Attributes:
        ids: [n] Token ids of all texts.
        lengths: [texts] Number of tokens of each.
        starts, ends: [n] Where a token begins and ends, in characters or bytes of all texts.
        bases: [texts] Where each text begins.
        is_bytes: Whether places are of bytes of UTF-8.
    """

    ids: NDArray[Any]
    lengths: Ints
    starts: Ints
    ends: Ints
    bases: Ints
    is_bytes: bool


@dataclass(frozen=True)
class BorderEncoder:
    """Encodes texts, and finds the borders of their tokens.

    Args:
        tokenizer: Tokenizer of byte-level BPE, or of a `tokenizer.json`, which has offsets.

    Raises:
        ConfigError: A tokenizer without borders.
    """

    tokenizer: Tokenizer
    sizes: NDArray[np.int32] | None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "BorderEncoder":
        vocabulary = tokenizer.vocabulary
        sizes = _sizes(vocabulary)
        if sizes is None and not isinstance(vocabulary, JsonVocabulary):
            raise ConfigError(
                f"{tokenizer.path} does not tell where its tokens end: give a tokenizer.json, a "
                'folder with one, a .tiktoken file, or "bytes"'
            )
        return cls(tokenizer, sizes)

    def encode(self, texts: list[str]) -> EncodedTexts:
        """The tokens of some texts, in one call of the encoder."""
        if self.sizes is not None:
            counts = [len(text) if text.isascii() else len(text.encode()) for text in texts]
            bases, totals = starts_and_ends(np.array(counts, np.int64))
            ids, lengths = self.tokenizer.encode_batch(texts)
            ends = np.cumsum(self.sizes[ids], dtype=np.int64)
            last = np.append(0, ends)[np.cumsum(lengths)]
            if np.array_equal(last, totals):
                return EncodedTexts(ids, lengths, np.append(0, ends)[:-1], ends, bases, True)
        return self._with_offsets(texts)

    def _with_offsets(self, texts: list[str]) -> EncodedTexts:
        vocabulary = self.tokenizer.vocabulary
        if not isinstance(vocabulary, JsonVocabulary):
            raise ConfigError(f"the tokens of {self.tokenizer.path} are not the bytes of the texts")
        encoded = vocabulary.library.encode_batch(texts, add_special_tokens=False)
        lengths = np.array([len(one.ids) for one in encoded], np.int64)
        bases, _ = starts_and_ends(np.array([*map(len, texts)], np.int64))
        ids = np.concatenate([np.array(one.ids, np.uint32) for one in encoded])
        offsets = [np.array(one.offsets, np.int64).reshape(-1, 2)[:, 1] for one in encoded]
        # Offsets may leave out the space before a word: a token begins where the last one ended.
        ends = np.maximum.accumulate(np.concatenate(offsets) + np.repeat(bases, lengths))
        starts = np.append(0, ends)[:-1]
        firsts = (np.cumsum(lengths) - lengths)[lengths > 0]
        starts[firsts] = bases[lengths > 0]
        return EncodedTexts(ids, lengths, starts, ends, bases, False)


def trained_tokens(tokens: EncodedTexts, spans: Ints) -> tuple[Bools, Bools]:
    """Which tokens are in a span, and which hold characters on both sides of a span's border.

    Args:
        tokens: Tokens of some texts.
        spans: [spans, 2] Beginnings and ends, in order, in the same places as the tokens.

    >>> starts, ends = np.array([0, 2, 4]), np.array([2, 4, 6])
    >>> tokens = EncodedTexts(starts, np.array([3]), starts, ends, np.array([0]), True)
    >>> [mask.tolist() for mask in trained_tokens(tokens, np.array([[1, 4]]))]
    [[False, True, False], [True, False, False]]
    """
    if not len(spans):
        nothing = np.zeros(len(tokens.ids), bool)
        return nothing, nothing.copy()
    first, last = spans[:, 0].copy(), spans[:, 1].copy()
    place = np.searchsorted(first, tokens.starts, "right") - 1
    is_whole = tokens.starts < tokens.ends
    is_inside = (place >= 0) & (tokens.ends <= last[place]) & is_whole
    place = np.searchsorted(first, tokens.ends, "left") - 1
    is_touched = (place >= 0) & (last[place] > tokens.starts) & is_whole
    # The bytes of one character may be several tokens of the same offsets.
    before = np.maximum.accumulate(np.where(is_whole, np.arange(len(is_whole)), 0))
    return is_inside[before], (is_touched & ~is_inside)[before]


def places_of(text: str, spans: Sequence[tuple[int, int]], is_bytes: bool) -> list[tuple[int, int]]:
    """Spans of characters as they are, or as spans of bytes."""
    if not is_bytes or text.isascii():
        return [*spans]
    borders = sorted({place for span in spans for place in span})
    sizes = [
        len(text[start:end].encode()) for start, end in zip([0, *borders], borders, strict=False)
    ]
    places = dict(zip(borders, np.cumsum(sizes).tolist(), strict=True))
    return [(places[start], places[end]) for start, end in spans]


def _sizes(vocabulary: Vocabulary) -> NDArray[np.int32] | None:
    """The bytes of each id: int32 [ids]; None if tokens are not the bytes of the text."""
    if isinstance(vocabulary, ByteVocabulary):
        return np.ones(vocabulary.size, np.int32)
    sizes = np.zeros(vocabulary.largest_id + 1, np.int32)
    if isinstance(vocabulary, TiktokenVocabulary):
        for token, number in vocabulary.ranks.items():
            sizes[number] = len(token)
        for text, number in vocabulary.special_ids.items():
            sizes[number] = len(text.encode())
        return sizes
    if not isinstance(vocabulary, JsonVocabulary) or not _is_byte_level(vocabulary.content):
        return None
    for text, number in vocabulary.library.get_vocab(with_added_tokens=False).items():
        sizes[number] = len(text)  # a character for each byte
    for number, token in vocabulary.library.get_added_tokens_decoder().items():
        sizes[number] = len(token.content.encode())
    return sizes


def _is_byte_level(content: str) -> bool:
    settings = json.loads(content)
    first = settings.get("pre_tokenizer") or {}
    kinds = [first.get("type"), *(one.get("type") for one in first.get("pretokenizers", ()))]
    is_bpe = settings["model"].get("type", "BPE") == "BPE"
    return is_bpe and settings.get("normalizer") is None and "ByteLevel" in kinds
