"""build_datasets over torch.distributed."""

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millrace
from millrace import ConfigError, DatasetConfig
from tests.conftest import results_of_processes
from tests.run.test_build import write

RANKS = 3
FORKS = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # from Python 3.12 on


def config_of(folder: Path, **options: Any) -> DatasetConfig:
    prefix = write(folder / "data", range(1, 60))
    given = {"blend": ([prefix], None), "cache": str(folder / "cache"), **options}
    counts = (300, 20, None)
    return DatasetConfig(sequence_length=16, seed=5, num_samples=counts, split="8,2,0", **given)


Case = tuple[DatasetConfig, dict[str, Any]]


def _rank(rank: int, meeting: str, cases: list[Case], out: Any) -> None:
    from torch import distributed

    from millrace.torch import build_datasets

    place = f"file://{meeting}"
    distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=RANKS)
    for number, (config, options) in enumerate(cases):
        try:
            train: Any = build_datasets(config, **options).train
            out.put((number, rank, train.batch(np.arange(300))["tokens"].tolist()))
        except Exception as error:
            out.put((number, rank, f"{type(error).__name__}: {error}"))
    distributed.destroy_process_group()


@FORKS
def test_ranks_get_the_same_datasets_and_the_same_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("where the cache folder should be")
    of_nodes = {"builders": "one per node", "local_rank": 0}  # three nodes of one rank each
    cases: list[Case] = [
        (config_of(tmp_path), {"builders": "one"}),
        (config_of(tmp_path, cache=str(tmp_path / "local")), of_nodes),
        (config_of(tmp_path, cache=str(tmp_path / "file")), {}),
        (config_of(tmp_path, blend=([str(tmp_path / "nowhere")], None)), {}),
    ]
    ranks = [(rank, str(tmp_path / "meeting"), cases) for rank in range(RANKS)]
    found = sorted(results_of_processes("fork", _rank, ranks, len(cases)))
    alone: Any = millrace.build_datasets(config_of(tmp_path, cache=None)).train
    expected = alone.batch(np.arange(300))["tokens"].tolist()
    by_case = [[result for number, _, result in found if number == n] for n in range(len(cases))]
    assert by_case[0] == by_case[1] == [expected] * RANKS
    for case, start in ((2, "CacheError: the indices must be built"), (3, "DataError:")):
        assert all(text.startswith(start) for text in by_case[case])


def test_without_a_process_group_it_is_the_same(tmp_path: Path) -> None:
    from millrace.torch import build_datasets

    config = config_of(tmp_path)
    both: list[Any] = [millrace.build_datasets(config).train, build_datasets(config).train]
    assert both[0].fingerprint() == both[1].fingerprint()
    with pytest.raises(ConfigError, match="give local_rank"):
        build_datasets(config, builders="one per node")
    with pytest.raises(ConfigError, match="'one' or 'one per node'"):
        build_datasets(config, builders="two")  # type: ignore[arg-type]


def _stopped(rank: int, meeting: Path, stop: str, out: Any) -> None:
    from torch import distributed

    from millrace.torch import first_then_rest

    is_first, code, seconds = STOPS[stop]
    place = f"file://{meeting}"
    distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=RANKS)

    def work() -> None:
        if rank == 1:
            exec(code)
        time.sleep(seconds)

    if rank == 1 and seconds:
        threading.Timer(seconds / 2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        first_then_rest(work, (rank == 1) == is_first)
    except BaseException as error:
        out.put((rank, f"{type(error).__name__}: {error}"))
    time.sleep(600)  # it stays alive, as a notebook does: no closed connection tells the others


# By kind of stop of rank 1: whether it works in the first turn, its code, and how long all work.
# The last one is stopped while it waits for the others.
STOPS = {
    "KeyboardInterrupt()": (True, "os.kill(os.getpid(), signal.SIGINT); time.sleep(600)", 0),
    "SystemExit(3)": (False, "raise SystemExit(3)", 0),
    "KeyboardInterrupt() ": (False, "raise AssertionError('it has been interrupted')", 2),
}


@FORKS
@pytest.mark.parametrize("stop", STOPS)
def test_a_rank_that_is_stopped_stops_the_others(stop: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    processes = [
        context.Process(target=_stopped, args=(rank, tmp_path / "meeting", stop, out))
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    try:
        said = dict(out.get(timeout=120) for _ in processes)
    finally:
        for process in processes:
            process.kill()
            process.join()
    others = f"MillraceError: rank 1 was stopped by {stop.strip()}; so every rank stops"
    assert said[0] == said[2] == others, said
    assert said[1].startswith(stop.partition("(")[0])
