"""Encoders: libraries that turn texts into ids, each behind one function.

The fast one never makes a Python object per id. All of them run on the threads that the environment
of their library allows, which the workers of a job set to one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from millrace.encoding.flat_ids import FlatIds
from millrace.encoding.vocabulary import (
    FAST_ENCODER,
    EncodeBatch,
    Vocabulary,
    import_package,
    must_pass,
)
from millrace.errors import ConfigError, TextError

ENCODERS = (FAST_ENCODER, "tokenizers", "tiktoken", "sentencepiece", "bytes")
"""The names of the encoders; "auto" chooses among them."""


def make_encoder(name: str, vocabulary: Vocabulary) -> EncodeBatch:
    """The encoder of a library, one of the vocabulary's `encoder_names`.

    Raises:
        TextError: A package that is not installed, or a vocabulary that the library refuses.
    """
    if name == vocabulary.reference_name:
        return vocabulary.encode_batch
    try:
        return vocabulary.fast_encoder()
    except (ConfigError, TextError):
        raise
    except BaseException as error:
        if must_pass(error):
            raise
        raise TextError(f"{name} cannot read this vocabulary: {error}") from None


def import_fastokens() -> Any:
    """The package of the fast encoder, which is optional."""
    return import_package("fastokens", "the encoder fastokens", "tokenizers")


def fastokens_encoder(
    tokenizer: Any, *, add_special_tokens: bool = False, split_special_tokens: bool = False
) -> EncodeBatch:
    """The encoder of a `fastokens.Tokenizer`."""

    def encode_batch(texts: list[str]) -> FlatIds:
        ids, offsets = tokenizer.encode_batch_flat(
            texts,
            add_special_tokens=add_special_tokens,
            split_special_tokens=split_special_tokens,
        )
        bounds = np.frombuffer(offsets, np.uint64).astype(np.int64)
        return np.frombuffer(ids, np.uint32), np.diff(bounds)

    return encode_batch
