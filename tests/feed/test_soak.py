"""A small soak; `tests.feed.soak` runs any number of samples."""

from __future__ import annotations

from pathlib import Path

from tests.feed.soak import FlakyReader, Soak


def test_every_sample_comes_exactly_once(tmp_path: Path) -> None:
    soak = Soak(40_000, 5, tmp_path, num_sessions=15)
    soak.run()
    assert soak.counts["sessions"] > 5
    assert soak.counts["checked"] > 0
    assert FlakyReader.num_failures > 0
    assert soak.descriptors < 200
