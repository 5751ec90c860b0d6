"""check_consistency in real processes."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace import ConfigError, Loader
from millrace.torch import check_consistency
from tests.trainers.ranks import Numbers
from tests.trainers.test_examples import launch

RANKS = 4
DEAD = 2


@pytest.fixture(scope="module")
def cases_by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each rank wrote, by case; rank 2 died before the last one."""
    folder = tmp_path_factory.mktemp("ranks")
    runs = [{"ranks": RANKS, "arguments": [str(folder), str(DEAD)]}]
    launch(str(Path(__file__).with_name("ranks.py")), "millrace.torch", runs, "-W", "error")
    return [
        dict(line.split(": ", 1) for line in (folder / f"rank-{rank}").read_text().splitlines())
        for rank in range(RANKS)
    ]


AGREE = ("all differ", "replicas", "elastic", "group", "afterwards")
# By case: what the message names.
NAMED = {
    "position": (
        "on ranks [2] consumed_samples is 32",
        "on ranks [0, 1, 3] consumed_samples is 24",
    ),
    "fingerprint": ("on ranks [0] the checksum", "on ranks [1, 2, 3] the checksum"),
    "overlap": ("rank 1 takes sample 24 ", "rank 0", "data-parallel ranks 1 and 0"),
    "not replicas": (
        "on ranks [1] the next samples are [26, 27]",
        "on ranks [0] the next",
        "[24, 25]",
    ),
    "content": ("on ranks [3] the checksums", "at sample 20'", "`millrace verify`"),
    "elastic content": ("on ranks [3] the checksums", "at sample 16'", "`millrace verify`"),
}


def test_ranks_that_differ_are_named_on_every_rank(cases_by_rank: list[dict[str, str]]) -> None:
    for rank, cases in enumerate(cases_by_rank):
        assert [cases[case] for case in AGREE] == ["agree"] * len(AGREE)
        for case, parts in NAMED.items():
            assert cases[case].startswith("MillraceError: ")
            assert all(part in cases[case] for part in parts), cases[case]
        error = "DataError: text.bin has 0 bytes"
        for number, pair in enumerate([(0, 1), (1, 2)]):
            outside = "ConfigError: this process is not in the group"
            assert cases[f"pair {number}"].startswith("agree" if rank in pair else outside)
        refused = "ConfigError: timeout must be between 0 and 1000000, not -1.0"
        others = "" if rank == 1 else "MillraceError: rank 1: "
        assert (cases["bad argument"], cases["failure"]) == (others + refused, others + error)


def test_a_dead_rank_does_not_hold_up_the_others(cases_by_rank: list[dict[str, str]]) -> None:
    for rank, cases in enumerate(cases_by_rank):
        message = f"MillraceError: ranks [{DEAD}] did not answer within "
        assert ("dead" in cases) == (rank != DEAD)
        assert cases.get("dead", message).startswith(message)


def test_without_a_process_group_only_arguments_are_checked() -> None:
    loader: Any = Loader(Numbers(), micro_batch_size=2)
    check_consistency(loader)
    for name, wrong in (("timeout", "nan"), ("checksum_batches", -1), ("data_parallel_rank", 0.5)):
        value: Any = float(wrong) if wrong == "nan" else wrong
        with pytest.raises(ConfigError, match=rf"{name} must be .* not {wrong}"):
            check_consistency(loader, **{name: value})


def test_checksums_are_taken_while_no_thread_is_in_the_dataset(tmp_path: Path) -> None:
    inside: list[int] = []
    most: list[int] = []

    class Seeking(Numbers):
        """Numbers of a file with one position."""

        def batch(self, sample_numbers: Any) -> dict[str, Any]:
            inside.append(1)
            time.sleep(0.001)
            most.append(len(inside))
            inside.pop()
            return super().batch(sample_numbers)

    meeting = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        with Loader(Seeking(), micro_batch_size=2) as loader:
            for _ in range(10):
                next(loader)
                check_consistency(loader, checksum_batches=2)
    finally:
        torch.distributed.destroy_process_group()
    assert set(most) == {1}
