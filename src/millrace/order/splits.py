"""Train, valid and test as ranges of one dataset."""

import itertools
import re
from collections.abc import Sequence

from millrace.checks import MAX_INT64, check_floats, check_int, shown
from millrace.errors import ConfigError
from millrace.order.blends import normalize

SPLITS = ("train", "valid", "test")
VALID = SPLITS.index("valid")

Bookends = tuple[float, float]
Range = tuple[int, int]


def parse_split(split: str) -> list[Bookends | None]:
    """The fractions at which each split starts and ends, from a string such as "969,30,1".

    Shares may have any sum; a split without a share, or left out, is None. The arithmetic is
    Megatron-LM's: float64 shares, added one by one from 0.

    Raises:
        ConfigError: No number, more than three numbers, or none above 0.

    Example:
        >>> parse_split("9,1,0")
        [(0, 0.9), (0.9, 1.0), None]
    """
    try:
        shares = [float(part) for part in re.findall(r"[.0-9]+", split)]
    except ValueError:
        raise ConfigError(f'split "{split}" holds no numbers: write "969,30,1"') from None
    has_others = re.search(r"[^.0-9 ,/:;[\]()]", split)
    if not 1 <= len(shares) <= len(SPLITS) or has_others or sum(shares) <= 0:
        raise ConfigError(
            f'split "{split}" must be one to three shares (train, valid, test), none negative, '
            'not all 0: write "969,30,1"'
        )
    shares = normalize(shares + [0.0] * (len(SPLITS) - len(shares)))
    ends = itertools.accumulate(shares, initial=0)
    return [(low, high) if low < high else None for low, high in itertools.pairwise(ends)]


def split_ranges(num_sequences: int, split: str | Sequence[Bookends | None]) -> list[Range | None]:
    """Each split's sequences as (start, stop), exclusive of stop; None for a split without a share.

    Ends are rounded half to even, as Megatron-LM does: in a small dataset a split with a share may
    still be empty.

    Args:
        num_sequences: Number of sequences of the dataset.
        split: String for `parse_split`, or fractions such as its result.

    Raises:
        ConfigError: See `parse_split`; fractions outside [0, 1], or splits that overlap.
    """
    size = float(check_int("num_sequences", num_sequences, 0, MAX_INT64))
    return [None if ends is None else _range(ends, size) for ends in bookends_of(split)]


def part_range(count: int, part: Bookends) -> Range:
    """A part of so many things as (start, stop), rounded as splits are.

    Raises:
        ConfigError: A part that is not (start, end) with 0 <= start < end <= 1.

    Example:
        >>> part_range(10, (0.6, 1.0))
        (6, 10)
    """
    return _range(check_part(part), float(count))


def _range(ends: Bookends, size: float) -> Range:
    return round(ends[0] * size), round(ends[1] * size)


def check_part(part: Bookends, most: float = 1) -> Bookends:
    """The ends of a part as floats; ConfigError unless 0 <= start < end <= `most`."""
    ends = check_floats("the ends of the part", part)
    if len(ends) != 2 or not 0 <= ends[0] < ends[1] <= most:
        raise ConfigError(f"a part must be (start, end), 0 <= start < end <= 1, not {shown(part)}")
    return ends[0], ends[1]


def bookends_of(split: str | Sequence[Bookends | None]) -> list[Bookends | None]:
    """The fractions of a split as floats; see `split_ranges` for its forms and errors."""
    if isinstance(split, str):
        return parse_split(split)
    most = 1 + 1e-12  # the largest sum of shares in float64
    try:
        checked = [None if ends is None else check_part(ends, most) for ends in split]
        shares = sorted(filter(None, checked))
        if len(checked) != len(SPLITS) or not shares:
            raise ConfigError("there must be three entries, and not all None")
        if any(low[1] > high[0] for low, high in itertools.pairwise(shares)):
            raise ConfigError("they overlap, so that one split would train on another's data")
        return checked
    except (TypeError, ConfigError) as error:
        raise ConfigError(
            f"the fractions of the split are {shown(split)}: {error}. Write "
            "[(0, 0.9), (0.9, 1.0), None] for train, valid and test"
        ) from None
