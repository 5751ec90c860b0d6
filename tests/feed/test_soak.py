"""A small soak; `tests.feed.soak` runs any number of samples."""

from __future__ import annotations

from pathlib import Path

from tests.feed import soak


def test_every_sample_comes_exactly_once(tmp_path: Path) -> None:
    result = soak.soak(40_000, 3, tmp_path, num_sessions=15)
    assert result.sessions > 5
    assert result.errors > 0
    assert result.checked > 0
    assert result.descriptors < 200
