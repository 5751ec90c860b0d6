from pathlib import Path

import pytest

from tests.shard_folders import make_sequences, write_sequences


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of shards: ten sequences of 8 tokens in three shards."""
    write_sequences(tmp_path / "out", make_sequences(10, 8))
    return tmp_path / "out"
