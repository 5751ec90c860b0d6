"""Train, valid and test as ranges of one dataset."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from millrace.errors import ConfigError
from millrace.order.blend import normalize

SPLITS = ("train", "valid", "test")

Bookends = tuple[float, float]
Range = tuple[int, int]


def parse_split(split: str) -> list[Bookends | None]:
    """The fractions at which each split starts and ends, from a string such as "969,30,1".

    Shares need not sum to anything; splits that are left out get none. A split with no share is
    None. The arithmetic is Megatron-LM's: float64 shares, added up one by one from 0.

    Raises:
        ConfigError: no number, more than three, or none above 0.

    Example:
        >>> parse_split("9,1,0")
        [(0, 0.9), (0.9, 1.0), None]
    """
    parts = re.findall(r"[.0-9]+", split)
    try:
        shares = [float(part) for part in parts]
    except ValueError:
        raise ConfigError(
            f'split "{split}" holds no number at some place; write "969,30,1"'
        ) from None
    rest = re.sub(r"[.0-9]+", "", split).strip(" ,/:;[]()")
    if not 1 <= len(shares) <= len(SPLITS) or rest.strip(" ,/:;") or sum(shares) <= 0:
        raise ConfigError(
            f'split "{split}" must be one to three shares (train, valid, test), none negative, '
            'not all 0: write "969,30,1"'
        )
    shares = normalize(shares + [0.0] * (len(SPLITS) - len(shares)))
    ends: list[float] = [0]
    for share in shares:
        ends.append(ends[-1] + share)
    return [(low, high) if low < high else None for low, high in itertools.pairwise(ends)]


def split_ranges(num_sequences: int, split: str | Sequence[Bookends | None]) -> list[Range | None]:
    """Each split's sequences as (start, stop), `stop` left out; None for a split with no share.

    A GPT dataset is split by sequence. Ends are rounded half to even, as Megatron-LM does, so that
    a split with a share may still come out empty in a small dataset.

    Args:
        num_sequences: of the dataset.
        split: a string for `parse_split`, or its result.
    """
    bookends = parse_split(split) if isinstance(split, str) else split
    return [
        None
        if ends is None
        else (round(ends[0] * float(num_sequences)), round(ends[1] * float(num_sequences)))
        for ends in bookends
    ]
