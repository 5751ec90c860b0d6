"""Some random cases of `differential.py`, which runs any number of them."""

from pathlib import Path

import pytest
from differential import main, run_case


@pytest.mark.parametrize("number", range(40))
def test_a_random_case_is_equal_on_both_sides(number: int, tmp_path: Path) -> None:
    run_case(0, number, tmp_path)


def test_the_command_counts_the_outcomes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cases", "3", "--seed", "5"]) == 0
    assert "seed 5: 3 cases" in capsys.readouterr().out
