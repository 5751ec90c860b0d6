"""Batches that are made ahead of their use: the same steps, errors in their place, clean ends."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace import (
    BlendedDataset,
    ConfigError,
    CyclicSampler,
    DataError,
    GPTDataset,
    IndexedDataset,
    Loader,
    TransformedDataset,
)
from millrace.storage import gather_in_turn
from tests.feed.helpers import Numbers, wait_for, workers

Make = Callable[..., IndexedDataset]


pytestmark = pytest.mark.usefixtures("no_thread_is_left")


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 60),
    micro=st.integers(1, 7),
    prefetch=st.one_of(st.none(), st.integers(0, 9)),
    threads=st.integers(1, 4),
    stop=st.integers(0, 12),
    drop_last=st.booleans(),
)
def test_what_is_made_ahead_changes_no_step(
    size: int, micro: int, prefetch: int | None, threads: int, stop: int, drop_last: bool
) -> None:
    options: dict[str, Any] = {"micro_batch_size": min(micro, size), "drop_last": drop_last}
    expected = [b["tokens"].tolist() for b in Loader(Numbers(size), prefetch=0, **options)]
    with Loader(Numbers(size), prefetch=prefetch, threads=threads, **options) as loader:
        batches = [batch["tokens"].tolist() for _, batch in zip(range(stop), loader, strict=False)]
        state = json.loads(json.dumps(loader.state_dict()))
    with Loader(Numbers(size), prefetch=prefetch, threads=threads, **options) as loader:
        loader.load_state_dict(state)
        batches += [batch["tokens"].tolist() for batch in loader]
        assert batches == expected
        assert len(loader) == len(expected)
        assert [loader.batch(k)["tokens"].tolist() for k in range(len(expected))] == expected
        with pytest.raises(IndexError, match="there is no step"):
            loader.batch(len(expected))


def test_no_more_than_prefetch_batches_are_made_ahead() -> None:
    made: list[int] = []
    loader = Loader(Numbers(work=made.append), micro_batch_size=5, prefetch=3)  # type: ignore[arg-type]
    loader.start()
    wait_for(lambda: len(made) == 3)
    time.sleep(0.05)
    assert len(made) == 3
    next(loader)
    wait_for(lambda: len(made) == 4)
    time.sleep(0.05)
    assert len(made) == 4


def test_an_error_comes_in_its_step_with_its_place_and_the_step_can_be_tried_again() -> None:
    failures = [DataError("a.bin is cut short"), ValueError("no")]

    def work(numbers: Any) -> None:
        if 8 in numbers and failures:
            raise failures.pop(0)

    loader = Loader(Numbers(20, work), micro_batch_size=2, prefetch=8, threads=3)
    for number in range(4):
        assert next(loader)["tokens"][0] == 2 * number
    with pytest.raises(DataError, match=r"cut short \(in the step .*=8, sample numbers \[8, 9\]"):
        next(loader)
    assert loader.consumed_samples == 8
    with pytest.raises(ValueError, match="no") as caught:
        next(loader)
    if sys.version_info >= (3, 11):
        assert "consumed_samples=8" in caught.value.__notes__[0]
    assert [batch["tokens"][0] for batch in loader] == [8, 10, 12, 14, 16, 18]


def test_an_error_of_the_sampler_comes_in_its_step() -> None:
    class Broken:
        def has_step(self, consumed_samples: int) -> bool:
            if consumed_samples >= 6:
                raise RuntimeError("lost")
            return True

        def sample_numbers(self, consumed_samples: int) -> Any:
            return np.arange(consumed_samples, consumed_samples + 3)

        def consumed_after(self, consumed_samples: int) -> int:
            return consumed_samples + 3

    loader = Loader(Numbers(), sampler=Broken())
    assert [next(loader)["tokens"][0] for _ in range(2)] == [0, 3]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="lost"):
            next(loader)
    with pytest.raises(TypeError, match="Broken has no number of steps"):
        len(loader)
    assert loader.batch(1)["tokens"][0] == 3


def test_a_closed_loader_says_so_and_keeps_its_state() -> None:
    with Loader(Numbers(), micro_batch_size=2) as loader:
        next(loader)
    assert not workers()
    loader.close()
    loader.start()
    with pytest.raises(ConfigError, match="the loader is closed"):
        next(loader)
    assert loader.state_dict()["consumed_samples"] == 2


def test_close_wakes_a_thread_that_waits() -> None:
    may_end = threading.Event()
    loader = Loader(Numbers(work=lambda numbers: may_end.wait()), micro_batch_size=2)
    errors: list[Exception] = []

    def draw() -> None:
        try:
            next(loader)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=draw)
    thread.start()
    wait_for(lambda: bool(workers()))
    closing = threading.Thread(target=loader.close)
    closing.start()
    thread.join(20)
    assert isinstance(errors[0], ConfigError)
    may_end.set()
    closing.join(20)


def test_a_loader_that_is_dropped_ends_its_threads() -> None:
    loader = Loader(Numbers(), micro_batch_size=2, threads=2, prefetch=4)
    next(loader)
    assert len(workers()) == 2
    del loader
    gc.collect()
    wait_for(lambda: not workers())


@pytest.mark.parametrize("place", ["dataset", "prepare"])
def test_a_loader_that_refers_to_itself_is_collected(place: str) -> None:
    batches: list[weakref.ref[np.ndarray]] = []

    class Owner:
        loader: Loader

        def work(self, batch: Any) -> Any:
            return batch

    class Kept(Numbers):
        def batch(self, sample_numbers: Any) -> dict[str, np.ndarray]:
            batch = super().batch(sample_numbers)
            batches.append(weakref.ref(batch["tokens"]))
            return batch

    owner = Owner()
    options = {} if place == "dataset" else {place: owner.work}
    dataset = Kept(work=owner.work if place == "dataset" else None)
    loader = owner.loader = Loader(dataset, micro_batch_size=2, threads=2, prefetch=4, **options)
    next(loader)
    wait_for(lambda: len(batches) == 5)
    del owner, dataset, options, loader
    for _ in range(500):  # a thread may still be putting its last step away
        gc.collect()
        if not workers():
            break
        time.sleep(0.01)
    assert not workers()
    assert [batch() for batch in batches] == [None] * 5


def test_a_step_does_not_wait_for_later_ones() -> None:
    class Small(Numbers):
        takes_form = True

        def batch(self, sample_numbers: Any, form: Any = None) -> dict[str, np.ndarray]:
            return super().batch(sample_numbers)

    permits = threading.Semaphore(0)
    num_prepared = 0

    def prepare(batch: Any) -> Any:
        nonlocal num_prepared
        if not permits.acquire(timeout=5):
            raise TimeoutError(f"step {num_prepared} is made before an earlier one is handed out")
        num_prepared += 1
        return batch

    loader = Loader(Small(), micro_batch_size=2, prepare=prepare)
    for number in range(5):
        permits.release()
        assert next(loader)["tokens"][0] == 2 * number
    closing = threading.Thread(target=loader.close)
    closing.start()
    wait_for(lambda: loader._is_closed)
    permits.release(100)
    closing.join()
    assert num_prepared <= 6


def test_a_dataset_that_asks_its_loader_is_told_how() -> None:
    loader: Loader
    loader = Loader(Numbers(work=lambda numbers: next(loader)), micro_batch_size=2)
    with pytest.raises(ConfigError, match="use it in `transform`"):
        next(loader)


def test_prepare_runs_ahead_and_transform_does_not() -> None:
    places: dict[str, set[str]] = {"prepare": set(), "transform": set()}

    def note(name: str) -> Callable[[Any], Any]:
        def function(batch: Any) -> Any:
            places[name].add(threading.current_thread().name)
            return batch

        return function

    loader = Loader(
        Numbers(10), micro_batch_size=2, prepare=note("prepare"), transform=note("transform")
    )
    assert len(list(loader)) == 5
    assert places["transform"] == {threading.current_thread().name}
    assert all(name.startswith("millrace-loader") for name in places["prepare"])


def test_waits_are_counted_by_their_cause() -> None:
    loader = Loader(Numbers(20, lambda numbers: time.sleep(0.002)), micro_batch_size=2, prefetch=2)
    for _ in loader:
        pass
    stats = loader.wait_stats()
    assert stats.steps == 10
    assert 1 <= stats.waited_steps <= 10
    assert set(stats.by_cause) == {"dataset"}
    assert stats.first is not None
    assert 0 < stats.first <= stats.longest <= stats.seconds
    on_demand = Loader(Numbers(20), micro_batch_size=2, prefetch=0)
    for _ in on_demand:
        pass
    assert on_demand.wait_stats().waited_steps == 10


@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_watchdog_prints_all_stacks(prefetch: int, capfd: pytest.CaptureFixture[str]) -> None:
    is_slow = [True]

    def a_slow_read(numbers: Any) -> None:
        if is_slow:
            is_slow.pop()
            time.sleep(0.3)

    loader = Loader(Numbers(work=a_slow_read), micro_batch_size=2, prefetch=prefetch, watchdog=0.05)
    next(loader)
    next(loader)
    printed = capfd.readouterr().err
    assert printed.count("a batch takes more than 0.05 s") == 1
    assert "in a_slow_read" in printed


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("prefetch", -1, r"prefetch must be .*, not -1"),
        ("prefetch", 1.5, r"prefetch must be .*, not 1.5"),
        ("threads", 0, r"threads must be .*, not 0"),
        ("threads", True, r"threads must be .*, not True"),
        ("watchdog", float("nan"), r"watchdog must be .*, not nan"),
        ("fields", ("tokens", "labels"), "Numbers returns tokens; it has no labels"),
        ("token_dtype", "int31", "token_dtype is 'int31'"),
    ],
)
def test_wrong_arguments_are_refused(argument: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        next(Loader(Numbers(), micro_batch_size=2, **{argument: value}))


def test_fields_of_another_dataset_are_picked() -> None:
    options: dict[str, Any] = {"micro_batch_size": 2, "fields": ("tokens",)}
    batch = next(Loader(Numbers(), token_dtype="int32", **options))
    assert (batch["tokens"].dtype, batch["tokens"].tolist()) == (np.int32, [0, 1])
    with pytest.raises(DataError, match="token id 1, which is outside"):
        next(Loader(Numbers(), vocab_size=1, **options))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_starts_threads_of_its_own() -> None:
    loader = Loader(Numbers(), micro_batch_size=2, threads=2, prefetch=4)
    next(loader)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        is_next = next(loader)["tokens"].tolist() == [2, 3] and len(workers()) == 2
        loader.close()
        os._exit(0 if is_next else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert next(loader)["tokens"].tolist() == [2, 3]


PROGRAM = """
import signal, sys, time
import numpy as np
from millrace import Loader

class Slow:
    def __len__(self):
        return 1000
    def batch(self, sample_numbers):
        time.sleep(float(sys.argv[1]))
        return {"tokens": np.asarray(sample_numbers)}
    def fingerprint(self):
        return {}

loader = Loader(Slow(), micro_batch_size=2, threads=3, prefetch=9)
loader.start()
if sys.argv[2] == "wait":
    print("waiting", flush=True)
    next(loader)
"""


def test_python_ends_while_batches_are_in_work() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM, "0.2", "end"], timeout=60, check=False)
    assert run.returncode == 0


def test_ctrl_c_ends_a_wait() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "1.0", "wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    assert process.returncode == -signal.SIGINT


# ---- look-ahead ----


class RemoteReader:
    """A reader of a file elsewhere, which notes what it is told."""

    def __init__(self, data: np.ndarray) -> None:
        self.data, self.size = data, len(data)
        self.told: set[int] = set()
        self.untold_reads = 0

    def read(self, byte_offset: int, num_bytes: int) -> np.ndarray:
        return self.data[byte_offset : byte_offset + num_bytes]

    def gather(self, byte_offsets: np.ndarray, byte_counts: np.ndarray) -> np.ndarray:
        self.untold_reads += len(set(byte_offsets.tolist()) - self.told)
        return gather_in_turn(self.read, byte_offsets, byte_counts)

    def prefetch(self, byte_offsets: np.ndarray, byte_counts: np.ndarray) -> None:
        self.told |= set(byte_offsets.tolist())


def test_remote_storage_is_told_what_is_read_next(make_dataset: Make, tmp_path: Path) -> None:
    make_dataset([100] * 50)
    reader = RemoteReader(np.fromfile(tmp_path / "data.bin", np.uint8))
    data = IndexedDataset(tmp_path / "data", bin_reader=reader)
    dataset = GPTDataset(data, sequence_length=8, seed=3)
    plain = GPTDataset(IndexedDataset(tmp_path / "data"), sequence_length=8, seed=3)
    blend = BlendedDataset([dataset, plain], [1, 2], 300)
    for source in (dataset, blend, TransformedDataset(blend, [])):
        reader.told, reader.untold_reads = set(), 0
        loader = Loader(source, micro_batch_size=5)
        batches = list(loader)
        assert len(batches) == len(loader)
        assert reader.untold_reads <= 30  # the first steps
    expected = plain.batch(np.arange(5))
    assert np.array_equal(next(Loader(dataset, micro_batch_size=5))["tokens"], expected["tokens"])


def test_an_error_of_a_hint_is_not_the_batches_own(make_dataset: Make, tmp_path: Path) -> None:
    class Unwilling(RemoteReader):
        def prefetch(self, byte_offsets: np.ndarray, byte_counts: np.ndarray) -> None:
            raise OSError("busy")

    make_dataset([100] * 50)
    reader = Unwilling(np.fromfile(tmp_path / "data.bin", np.uint8))
    data = IndexedDataset(tmp_path / "data", bin_reader=reader)
    loader = Loader(GPTDataset(data, sequence_length=8, seed=3), micro_batch_size=5)
    assert len(list(loader)) == len(loader)


def test_a_sampler_that_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="which has no has_step, sample_numbers, consumed_after"):
        Loader(Numbers(), sampler=3)  # type: ignore[arg-type]
    sampler = CyclicSampler(101, micro_batch_size=2)
    with pytest.raises(ConfigError, match="draws from 101 samples; the dataset has 100"):
        Loader(Numbers(100), sampler=sampler)
    assert Loader(Numbers(101), sampler=sampler)  # endless, and true
