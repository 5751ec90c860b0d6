"""Whether an encoder gives the ids of the library that defines the vocabulary."""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.checks import shown
from millrace.encoding.edge_cases import edge_cases
from millrace.encoding.flat_ids import EncodeBatch, split_ids
from millrace.encoding.vocabulary import MUST_PASS, Options, Vocabulary
from millrace.errors import ConfigError, TextError

_BATCH = 256  # texts compared at a time: the reference takes 20 kB of memory for each
_NUM_TOKENS_AS_TEXTS = 3000

Result = tuple[str, NDArray[np.uint32] | str]  # a text, and its ids or error
_VERDICTS: dict[tuple[str, Options, str], str | None] = {}
"""How the first built-in text differs, or None, by fingerprint, options and encoder: a second job
of a process need not compare the 16,000 texts."""


def choose_encoder(
    vocabulary: Vocabulary,
    name: str = "auto",
    texts: Iterable[str] = (),
    encode_batch: EncodeBatch | None = None,
) -> tuple[str, EncodeBatch, str]:
    """An encoder that agrees with the reference on the built-in texts and on some of the data.

    Args:
        vocabulary: Vocabulary, which has the reference.
        name: Name of the encoder; "auto" for the fastest one.
        texts: Texts of the data; a thread iterates over them.
        encode_batch: The encoder of that name, if it is loaded already, which takes 0.4 s.

    Returns:
        The encoder's name, the encoder, and ""; or the reference, and why it is used instead.
    """
    reference = vocabulary.reference_name
    candidate = vocabulary.encoder_names[0] if name == "auto" else name
    if candidate == reference:
        return reference, vocabulary.encode_batch, ""
    key = vocabulary.fingerprint, vocabulary.options, candidate
    batches = [] if key in _VERDICTS else _built_in_batches(vocabulary)
    with ThreadPoolExecutor(1) as thread:
        # While the candidate is loaded, which takes about as long as the reference's results.
        *of_built_in, of_texts = [
            thread.submit(results_of, vocabulary.encode_batch, batch) for batch in (*batches, texts)
        ]
        try:
            encode_batch = encode_batch or vocabulary.encoder(candidate)
        except (TextError, ConfigError) as error:
            problem = f"{candidate} is not used: {error}"
        else:
            if key not in _VERDICTS:
                _VERDICTS[key] = _first_difference(encode_batch, of_built_in)
            difference = _VERDICTS[key] or _first_difference(encode_batch, [of_texts])
            if difference is None:
                return candidate, encode_batch, ""
            problem = f"{candidate} differs from {reference}: {difference}"
        thread.shutdown(cancel_futures=True)
    return reference, vocabulary.encode_batch, f"{problem}; {reference} is used instead"


def _built_in_batches(vocabulary: Vocabulary) -> list[list[str]]:
    """The edge cases, and the texts of many tokens, alone and in a row."""
    texts = []
    for number in range(0, vocabulary.size, max(1, vocabulary.size // _NUM_TOKENS_AS_TEXTS)):
        try:
            texts.append(vocabulary.decode([number]))
        except MUST_PASS:
            raise
        except BaseException:
            pass  # ids may have gaps
    rows = [texts[start : start + 20] for start in range(0, len(texts), 20)]
    cases = [*edge_cases(vocabulary.added_tokens()), *texts]
    cases += [*map("".join, rows), *map(" ".join, rows)]
    return [cases[start : start + _BATCH] for start in range(0, len(cases), _BATCH)]


def _first_difference(encode: EncodeBatch, expected: Iterable[Future[Any]]) -> str | None:
    differences = (difference(encode, future.result()) for future in expected)
    return next(filter(None, differences), None)


def difference(encode: EncodeBatch, expected: list[Result]) -> str | None:
    """How an encoder differs from the reference's results on the first such text, or None."""
    results = results_of(encode, [text for text, _ in expected])
    for (text, ids), (_, reference_ids) in zip(results, expected, strict=True):
        if isinstance(reference_ids, str):
            continue
        if isinstance(ids, str):
            return f"it cannot encode the text {shown(text, 300)} ({ids})"
        if not np.array_equal(ids, reference_ids):
            length = min(len(ids), len(reference_ids))
            differs = np.append(ids[:length] != reference_ids[:length], True)
            place = int(differs.argmax())
            window = slice(max(place - 3, 0), place + 5)
            return (
                f"from token {place} the ids are {ids[window].tolist()} instead of "
                f"{reference_ids[window].tolist()}, for the text {shown(text, 300)}"
            )
    return None


def results_of(encode: EncodeBatch, batch: Iterable[str]) -> list[Result]:
    """What an encoder gives for each text; if it fails for some, each is encoded alone."""
    texts = list(batch)
    try:
        ids, lengths = encode(texts)
        if len(lengths) != len(texts) or lengths.sum() != len(ids):
            raise TextError(f"it returned {len(lengths)} lengths for {len(texts)} texts")
        return list(zip(texts, split_ids(ids, lengths), strict=True))
    except MUST_PASS:
        raise
    except BaseException as error:
        if len(texts) == 1:
            return [(texts[0], f"{error}" or type(error).__name__)]
    return [result for text in texts for result in results_of(encode, [text])]
