"""Ids of several texts in one flat array."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

FlatIds = tuple[NDArray[np.uint32], NDArray[np.int64]]
"""The ids of several texts in one array, and the number of ids of each text."""

EncodeBatch = Callable[[list[str]], FlatIds]
"""A function from texts to their flat ids. It runs on the threads that the environment of its
library allows; the workers of a job set one."""


def flat_ids(lists: Sequence[Sequence[int]]) -> FlatIds:
    """The flat ids of a list per text, without an array for each."""
    lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    ids = itertools.chain.from_iterable(lists)
    return np.fromiter(ids, np.uint32, int(lengths.sum())), lengths


def joined_ids(arrays: Sequence[NDArray[Any]]) -> FlatIds:
    """The flat ids of an array per text, of any integer dtype, whose ids fit uint32."""
    lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))
    ids = np.concatenate(arrays) if len(arrays) else np.empty(0, np.uint32)
    return ids.astype(np.uint32, copy=False), lengths


def starts_and_ends(lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The start and the end of each text in the flat array: int64 [texts] each."""
    ends = np.cumsum(lengths)
    return ends - lengths, ends


def split_ids(ids: NDArray[np.uint32], lengths: NDArray[np.int64]) -> list[NDArray[np.uint32]]:
    """The ids of each text."""
    return [ids[start:end] for start, end in zip(*starts_and_ends(lengths), strict=True)]


def with_tokens(
    ids: NDArray[np.uint32],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    first_token: int | None,
    last_token: int | None,
    dtype: np.dtype[Any],
) -> NDArray[Any]:
    """Flat ids in a dtype, with a token before each start and after each end: int64 [runs] each."""
    pairs = [(starts, first_token), (ends, last_token)]
    columns = [(places, token) for places, token in pairs if token is not None]
    ids = ids.astype(dtype, copy=False)
    if not columns:
        return ids
    places, tokens = zip(*columns, strict=True)
    # Where runs meet, a last token comes before the next first one: `insert` keeps this order.
    return np.insert(ids, np.stack(places, axis=1).ravel(), tokens * len(starts))
