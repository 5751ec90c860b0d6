"""A small race; `python -m tests.run.race` is the large one."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.no_flock import no_flock
from tests.run import race


@pytest.mark.parametrize("stage", race.STAGES)
def test_the_others_finish_when_a_builder_is_killed(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(race, "STAGES", [stage])
    stages, referee = race.race(tmp_path, processes=4, kills=1, seed=stage, documents=60)
    assert (stages, len(referee.dead), len(referee.digests)) == ([stage], 1, 3)


def test_a_small_race(tmp_path: Path) -> None:
    _, referee = race.race(tmp_path, processes=12, kills=1, seed=1, documents=200)
    assert (len(referee.dead), len(referee.digests)) == (1, 11)


@pytest.mark.parametrize("rounds", [2, pytest.param(8, marks=pytest.mark.long)])
def test_a_race_without_locks(rounds: int, tmp_path: Path) -> None:
    """When writers shared temporary names, 10 of 10 such rounds failed."""
    for seed in range(rounds):
        command = [sys.executable, "-m", "tests.run.race", "8", str(seed % 2), str(seed), "400"]
        options: Any = {"env": no_flock(tmp_path), "capture_output": True, "text": True}
        result = subprocess.run(command, timeout=120, **options)
        assert result.returncode == 0, result.stderr
