"""Splits, as strings and as fractions."""

from typing import Any

import numpy as np
import pytest

from millrace import ConfigError, parse_split, split_ranges
from millrace.order import part_range

NAN = float("nan")


@pytest.mark.parametrize("split", ["", "a", "0,0,0", "1,1,1,1", "-1,2", "1.2.3,1", "1e3,1", "."])
def test_invalid_splits_are_refused(split: str) -> None:
    with pytest.raises(ConfigError, match="split"):
        parse_split(split)


def test_ranges_cover_the_sequences_without_overlap() -> None:
    assert split_ranges(1000, "969,30,1") == [(0, 969), (969, 999), (999, 1000)]
    assert split_ranges(3, "1,1") == [(0, 2), (2, 3), None]  # 1.5 is rounded to the even 2
    assert split_ranges(0, "1,1,1") == [(0, 0), (0, 0), (0, 0)]
    for count in range(12):
        first, second, _ = split_ranges(count, [(0, 0.625), (0.625, 1), None])
        assert (part_range(count, (0, 0.625)), part_range(count, (0.625, 1))) == (first, second)
    # Fractions may leave gaps and come in any order.
    assert split_ranges(100, [(0.5, 1), (0, 0.25), None]) == [(50, 100), (0, 25), None]
    assert split_ranges(100, [None, (np.float32(0.5), 1), None]) == [None, (50, 100), None]


@pytest.mark.parametrize(
    ("fractions", "message"),
    [
        ([(0, 0.5)], "three entries"),
        ([], "three entries"),
        ([None, None, None], "not all None"),
        ([(0, 0.5), (0.4, 1), None], "overlap"),
        ([(0, 1), None, (0, 1)], "overlap"),
        ([(0, 0.5), (0.5, 1.001), None], "0 <= start < end <= 1"),
        ([(-0.1, 0.5), None, None], "0 <= start < end <= 1"),
        ([(0.5, 0.5), None, None], "0 <= start < end <= 1"),
        ([(0.5, 0.1), None, None], "0 <= start < end <= 1"),
        ([(0, float("nan")), None, None], "0 <= start < end <= 1"),
        ([(float("nan"), 1), None, None], "0 <= start < end <= 1"),
        ([(0, 0.1, 0.2), None, None], "0 <= start < end <= 1"),
        (["a", (0.5, 1), None], "a list of numbers, not 'a'"),
        ([0.5, 0.25, 0.25], "a list of numbers, not 0.5"),
        (7, "not iterable"),
    ],
)
def test_invalid_fractions_are_refused(fractions: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"fractions of the split are .*{message}"):
        split_ranges(100, fractions)


@pytest.mark.parametrize("part", [(0.5, 0.5), (0.5, 1.1), (-0.1, 1), (0.5,), 0.5, "a", (0, NAN)])
def test_invalid_parts_are_refused(part: Any) -> None:
    with pytest.raises(ConfigError, match="part"):
        part_range(10, part)
