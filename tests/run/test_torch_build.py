"""build_datasets over torch.distributed."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millrace
from millrace import ConfigError, DatasetConfig, IndexedDatasetBuilder

RANKS = 3


def config_of(folder: Path, **options: Any) -> DatasetConfig:
    prefix = folder / "data"
    if not (folder / "data.idx").exists():
        with IndexedDatasetBuilder(prefix, np.uint16) as builder:
            for length in range(1, 60):
                builder.add_document(np.arange(length))
    given: dict[str, Any] = {
        "sequence_length": 16,
        "seed": 5,
        "num_samples": (300, 20, None),
        "blend": ([str(prefix)], None),
        "split": "8,2,0",
        "cache": str(folder / "cache"),
    }
    return DatasetConfig(**{**given, **options})


Case = tuple[DatasetConfig, dict[str, Any]]


def _rank(rank: int, meeting: str, cases: list[Case], out: Any) -> None:
    from torch import distributed

    from millrace.torch import build_datasets

    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS
    )
    for number, (config, options) in enumerate(cases):
        try:
            train = build_datasets(config, **options).train
            assert train is not None
            out.put((number, rank, train.batch(np.arange(300))["tokens"].tolist()))
        except Exception as error:
            out.put((number, rank, f"{type(error).__name__}: {error}"))
    distributed.destroy_process_group()


def test_ranks_get_the_same_datasets_and_the_same_errors(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    (tmp_path / "file").write_text("where the cache folder should be")
    cases: list[Case] = [
        (config, {"builders": "one"}),
        # Three nodes of one rank each.
        (config_of(tmp_path, cache=str(tmp_path / "local")), {"builders": "one per node"}),
        (config_of(tmp_path, cache=str(tmp_path / "file")), {}),
        (config_of(tmp_path, blend=([str(tmp_path / "nowhere")], None)), {}),
    ]
    cases[1][1]["local_rank"] = 0
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    processes = [
        context.Process(target=_rank, args=(rank, str(tmp_path / "meeting"), cases, out))
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    found = sorted(out.get(timeout=200) for _ in range(RANKS * len(cases)))
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    alone = millrace.build_datasets(config_of(tmp_path, cache=None)).train
    assert alone is not None
    expected = alone.batch(np.arange(300))["tokens"].tolist()
    by_case = [[result for number, _, result in found if number == n] for n in range(len(cases))]
    assert by_case[0] == by_case[1] == [expected] * RANKS
    assert all(text.startswith("CacheError: the indices must be built") for text in by_case[2]), (
        by_case[2]
    )
    assert all(text.startswith("DataError") for text in by_case[3]), by_case[3]


def test_without_a_process_group_it_is_the_same(tmp_path: Path) -> None:
    from millrace.torch import build_datasets

    config = config_of(tmp_path)
    ours, torch_ours = millrace.build_datasets(config).train, build_datasets(config).train
    assert ours is not None
    assert torch_ours is not None
    assert ours.fingerprint() == torch_ours.fingerprint()
    with pytest.raises(ConfigError, match="give local_rank"):
        build_datasets(config, builders="one per node")
    with pytest.raises(ConfigError, match="'one' or 'one per node'"):
        build_datasets(config, builders="two")  # type: ignore[arg-type]


# By kind of stop: whether the rank works in the first turn, and its code.
STOPS = {
    "Ctrl-C": (True, "os.kill(os.getpid(), signal.SIGINT); time.sleep(600)"),
    "sys.exit": (False, "sys.exit(3)"),
}

STOPPED = """
import os, signal, sys, threading, time
from torch import distributed
from millrace.torch import first_then_rest
rank, meeting, is_first = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
distributed.init_process_group("gloo", init_method="file://" + meeting, rank=rank, world_size=3)
def work():
    if rank == 1:
        exec(sys.argv[4])
    return "done"
try:
    print(first_then_rest(work, (rank == 1) == is_first))
except BaseException as error:
    print(f"{type(error).__name__}: {error}", flush=True)
sys.stdin.read()  # stays alive, as a notebook does: no closed connection tells the others
"""


def said_by_ranks(tmp_path: Path, is_first: bool, code: str) -> list[str]:
    meeting = tmp_path / "meeting"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", STOPPED, str(rank), str(meeting), str(is_first), code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    timer = threading.Timer(120, lambda: [process.kill() for process in processes])
    timer.start()
    try:
        return [process.stdout.readline().strip() for process in processes if process.stdout]
    finally:
        timer.cancel()
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("case", STOPS)
def test_a_rank_that_is_stopped_stops_the_others(case: str, tmp_path: Path) -> None:
    said = said_by_ranks(tmp_path, *STOPS[case])
    own = "SystemExit(3)" if case == "sys.exit" else "KeyboardInterrupt()"
    others = f"MillraceError: rank 1 was stopped by {own}; so every rank stops"
    assert said[0] == said[2] == others, said
    assert said[1].startswith(own.partition("(")[0])


def test_ctrl_c_of_a_rank_that_waits_reaches_the_others(tmp_path: Path) -> None:
    """Rank 1 works in the second turn; the signal comes while it waits for the first."""
    code = "raise AssertionError('it has been interrupted')"
    press = "threading.Timer(2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()"
    slow = STOPPED.replace('    return "done"', '    time.sleep(4)\n    return "done"')
    slow = slow.replace("try:\n", f"if rank == 1: {press}\ntry:\n", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "STOPPED", slow)
        said = said_by_ranks(tmp_path, False, code)
    assert (
        said[0]
        == said[2]
        == ("MillraceError: rank 1 was stopped by KeyboardInterrupt(); so every rank stops")
    ), said
    assert said[1].startswith("KeyboardInterrupt")
