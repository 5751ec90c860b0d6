"""Faults that were found by attacks on the shuffle job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.errors import ConfigError, MillraceError
from millrace.jobs import shuffle
from millrace.jobs.shuffling import writing


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """An input of 100 sequences of 10 tokens."""
    (tmp_path / "input" / "a").mkdir(parents=True)
    np.arange(1000, dtype=np.uint32).tofile(tmp_path / "input" / "a" / "x.bin")
    return tmp_path / "input"


def run(source: Path, output: Any, **options: Any) -> Any:
    return shuffle(source, output, **{"seq_len": 10, "num_shards": 3, "workers": 1, **options})


# ---- arguments ----


@pytest.mark.parametrize("name", ["plan", "permutation", "engine"])
def test_arrays_are_not_names(source: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is array.*; one of"):
        run(source, tmp_path / "output", **{name: np.array(["auto", "local"])})


def test_an_empty_path_is_not_the_current_folder(source: Path) -> None:
    with pytest.raises(ConfigError, match="output_dir is empty"):
        run(source, "")


def test_output_folders_that_cannot_be_made(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"link to .*nowhere, which does not exist"):
        run(source, tmp_path / "link")
    with pytest.raises(ConfigError, match="/proc/x cannot be made: No such file"):
        run(source, "/proc/x")


@pytest.mark.parametrize("weight", [1e10, 1e16])
def test_weights_that_no_disk_has_room_for(source: Path, tmp_path: Path, weight: float) -> None:
    """Before the permutation of so many items is measured, which takes years."""
    with pytest.raises(MillraceError, match=r"No space left for the output: it has .* TB"):
        shuffle(None, tmp_path / "output", input_list=[(weight, source)], seq_len=10)
    assert not (tmp_path / "output").exists()


# ---- threads ----


def test_another_thread_takes_the_last_block(tmp_path: Path, monkeypatch: Any) -> None:
    class Blocks(list[Any]):
        def __bool__(self) -> bool:
            return True  # there was one a moment ago

    monkeypatch.setattr(writing, "_blocks", Blocks())
    with writing.HashedFile(str(tmp_path / "file")) as file:
        file.write(np.zeros(10, np.uint8))
    assert (tmp_path / "file").read_bytes() == bytes(10)
