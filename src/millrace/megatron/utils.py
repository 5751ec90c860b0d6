"""Splits, weights and blends as Megatron-LM's arguments spell them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np

from millrace.megatron.errors import require
from millrace.torch import distributed_rank

logger = logging.getLogger(__name__)

Blend = tuple[list[str], list[float] | None]
"""Path prefixes, and their weights (None: their numbers of samples)."""


class Split(Enum):
    """The part of the data that a dataset draws from."""

    train = 0
    valid = 1
    test = 2


def normalize(weights: Sequence[float]) -> list[float]:
    """The weights divided by their sum, in float64 and in NumPy's order of addition.

    Raises:
        ConfigAssertionError: If the sum is 0 or not finite. (Megatron-LM goes on with NaN.)
    """
    array = np.array(weights, dtype=np.float64)
    total = np.sum(array)
    require(
        array.size == 0 or (np.isfinite(total) and total != 0),
        f"the weights {list(weights)} sum to {total}, which gives no shares. Give weights that are "
        "finite and not all 0",
    )
    return [float(share) for share in array / total]


def get_blend_from_list(blend: Sequence[Any] | None) -> Blend | None:
    """The blend in the words of an argument such as --data-path.

    Args:
        blend: Path prefixes, or weights and path prefixes by turns (weights as words or numbers);
            None: no blend. An odd number of words, or no number in any weight's place, means
            prefixes alone.

    Returns:
        The prefixes and the weights (None without weights), or None.

    Raises:
        ConfigAssertionError: If there are no words, a prefix is a number, or only some of the
            weights are numbers.
    """
    if blend is None:
        return None
    require(len(blend) > 0, "the blend is an empty list; give path prefixes, or None")
    words = blend[::2]
    weights = [weight for weight in map(_weight, words) if weight is not None]
    if len(blend) % 2 == 1 or not weights:
        return [_prefix(word) for word in blend], None
    require(
        len(weights) == len(words),
        f"{len(weights)} of {len(words)} words in the weights' places are numbers: "
        f"{words}. Write a weight before each prefix, or none",
    )
    return [_prefix(word) for word in blend[1::2]], weights


def _weight(word: Any) -> float | None:
    try:
        return float(word)
    except (TypeError, ValueError):
        return None


def _prefix(word: Any) -> str:
    require(
        isinstance(word, (str, os.PathLike)),
        f"the blend has {word!r} in the place of a path prefix; write prefixes alone, or a weight "
        "before each prefix",
    )
    return str(os.fspath(word)).strip()


def compile_helpers() -> None:
    """Does nothing: installing millrace compiles the core."""


def log_on_first_rank(message: str, *, is_warning: bool = False) -> None:
    """Logs on rank 0 alone."""
    level = logging.WARNING if is_warning else logging.INFO
    if logger.isEnabledFor(level) and distributed_rank() in (None, 0):
        logger.log(level, message)
