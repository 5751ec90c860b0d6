"""Splits, weights and blends as Megatron-LM's arguments spell them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import Enum

import numpy as np
import torch

from millrace.megatron.errors import require

Blend = tuple[list[str], list[float] | None]
"""Path prefixes, and their weights (or None: by their lengths)."""


class Split(Enum):
    """Which part of the data a dataset draws from."""

    train = 0
    valid = 1
    test = 2


def normalize(weights: Sequence[float]) -> list[float]:
    """The weights divided by their sum, in float64 and in NumPy's order of addition.

    Raises:
        ConfigAssertionError: their sum is 0 or not finite. (Megatron-LM goes on with NaN.)
    """
    array = np.array(weights, dtype=np.float64)
    total = np.sum(array)
    require(
        array.size == 0 or (np.isfinite(total) and total != 0),
        f"the weights {list(weights)} sum to {total}: no shares can be made of them. Give weights "
        "that are finite and not all 0",
    )
    normalized: list[float] = (array / total).tolist() if array.size > 0 else []
    return normalized


def get_blend_from_list(blend: list[str] | None) -> Blend | None:
    """Reads the words of an argument such as --data-path.

    Args:
        blend: path prefixes alone, or weights and path prefixes by turns; None: no blend. An odd
            number of words, or no number at any weight's place, means prefixes alone.

    Returns:
        the prefixes and the weights (None without weights), or None.

    Raises:
        ConfigAssertionError: no words, or numbers at some of the weights' places only.
    """
    if blend is None:
        return None
    require(blend, "the blend is an empty list; give path prefixes, or None")
    prefixes = [word.strip() for word in blend]
    weights = [_weight(word) for word in blend[::2]]
    if len(blend) % 2 == 1 or all(weight is None for weight in weights):
        return prefixes, None
    known = [weight for weight in weights if weight is not None]
    require(
        len(known) == len(weights),
        f"{len(known)} of {len(weights)} words at the weights' places are numbers: {blend[::2]}. "
        "Write a weight before each prefix, or none",
    )
    return prefixes[1::2], known


def _weight(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def distributed_rank() -> int | None:
    """This process's rank, or None where torch.distributed is not initialised."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    rank: int = torch.distributed.get_rank()
    return rank


def log_on_first_rank(logger: logging.Logger, level: int, message: str) -> None:
    """Logs on rank 0 alone."""
    if logger.isEnabledFor(level) and distributed_rank() in (None, 0):
        logger.log(level, message)
