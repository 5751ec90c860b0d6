"""The threads of a loader: errors in their place, clean ends, interruptions, forks, hints."""

import contextlib
import copy
import gc
import math
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from millrace import ConfigError, DataError, IndexedDataset
from millrace.feed import BlendedDataset, GPTDataset, Loader, SequentialSampler, TransformedDataset
from millrace.torch import to_tensors
from tests.feed.helpers import (
    AHEAD,
    FORKS,
    Interruption,
    MemoryReader,
    Numbers,
    alarms,
    firsts,
    is_true_in_child,
    run_together,
    small_loader,
    wait_for,
    workers,
)

Make = Callable[..., IndexedDataset]

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


# ---- ahead of the trainer ----


def test_no_more_than_prefetch_batches_are_made_ahead() -> None:
    made: list[int] = []
    loader = small_loader(made.append, prefetch=3)
    loader.start()
    for number in (3, 4):
        wait_for(lambda number=number: len(made) == number)  # type: ignore[misc]
        time.sleep(0.05)
        assert len(made) == number
        next(loader)


@pytest.mark.parametrize("prepare", [None, to_tensors])
def test_more_small_batches_are_made_ahead(prepare: Any) -> None:
    made: list[int] = []
    with small_loader(made.append, prepare=prepare) as loader:
        next(loader)
        wait_for(lambda: len(made) == 33)
        time.sleep(0.05)
        assert len(made) == 33


def test_a_step_does_not_wait_for_later_ones() -> None:
    permits, num_prepared = threading.Semaphore(0), 0

    def prepare(batch: Any) -> Any:
        nonlocal num_prepared
        assert permits.acquire(timeout=5), "it is made before an earlier step is handed out"
        num_prepared += 1
        return batch

    loader = small_loader(prepare=prepare)
    for number in range(5):
        permits.release()
        assert next(loader)["tokens"][0] == 2 * number
    closing = threading.Thread(target=loader.close)
    closing.start()
    wait_for(lambda: loader._is_closed)
    permits.release(100)
    closing.join()
    assert num_prepared <= 6  # with the step in hand


def test_an_error_comes_in_its_step_with_its_place_and_the_step_can_be_tried_again() -> None:
    failures = [DataError("a.bin is cut short"), ValueError("no")]

    def work(numbers: Any) -> None:
        if 8 in numbers and failures:
            raise failures.pop(0)

    loader = small_loader(work, 20, prefetch=8, threads=3)
    assert firsts(islice(loader, 4)) == [0, 2, 4, 6]
    with pytest.raises(DataError, match=r"cut short \(in the step .*=8, sample numbers \[8, 9\]"):
        next(loader)
    assert loader.consumed_samples == 8
    with pytest.raises(ValueError, match="no") as caught:
        next(loader)
    if sys.version_info >= (3, 11):
        assert "consumed_samples=8" in caught.value.__notes__[0]
    assert firsts(loader) == [8, 10, 12, 14, 16, 18]


def test_a_closed_loader_says_so_and_keeps_its_state() -> None:
    with small_loader() as loader:
        next(loader)
    assert not workers()
    loader.close()
    loader.start()
    with pytest.raises(ConfigError, match="the loader is closed"):
        next(loader)
    assert loader.state_dict()["consumed_samples"] == 2


def test_close_wakes_a_thread_that_waits() -> None:
    may_end = threading.Event()
    loader = small_loader(lambda numbers: may_end.wait(20))
    is_in_time: list[bool] = []

    def draw() -> None:
        with pytest.raises(ConfigError, match="closed while a batch was asked for"):
            next(loader)
        is_in_time.append(not may_end.is_set())

    drawing, closing = (threading.Thread(target=target) for target in (draw, loader.close))
    drawing.start()
    wait_for(lambda: bool(workers()))
    closing.start()
    drawing.join(10)
    may_end.set()
    closing.join()
    assert is_in_time == [True]


@pytest.mark.parametrize("place", ["dataset", "prepare"])
def test_a_loader_that_refers_to_itself_is_collected(place: str) -> None:
    batches: list[weakref.ref[np.ndarray]] = []
    owner: Any = SimpleNamespace()

    def work(batch: Any, owner: Any = owner) -> Any:
        return batch

    class Kept(Numbers):
        def batch(self, sample_numbers: Any) -> dict[str, np.ndarray]:
            batch = super().batch(sample_numbers)
            batches.append(weakref.ref(batch["tokens"]))
            return batch

    dataset = Kept(work=work if place == "dataset" else None)
    options: Any = {"micro_batch_size": 2, "threads": 2, "prefetch": 4}
    options |= {} if place == "dataset" else {place: work}
    owner.loader = Loader(dataset, **options)
    next(owner.loader)
    wait_for(lambda: len(batches) == 5)
    del owner, work, dataset, options
    wait_for(lambda: gc.collect() < 0 or not workers())  # one may still put its last step away
    assert [batch() for batch in batches] == [None] * 5


@pytest.mark.parametrize("place", ["dataset", "prepare"])
@pytest.mark.parametrize("call", ["next", "load_state_dict"])
def test_a_loader_that_its_own_threads_use_says_how(place: str, call: str) -> None:
    def work(batch: Any) -> None:
        next(loader) if call == "next" else loader.load_state_dict(loader.state_dict())

    loader = small_loader(**{"work" if place == "dataset" else place: work})
    with pytest.raises(ConfigError, match="use it in `transform`"):
        next(loader)


def test_prepare_runs_ahead_and_transform_does_not() -> None:
    def place(batch: Any) -> list[str]:
        return [*(batch if isinstance(batch, list) else []), threading.current_thread().name]

    batches = list(small_loader(size=10, prepare=place, transform=place))
    assert len(batches) == 5
    for ahead, now in batches:
        assert ahead.startswith("millrace-loader")
        assert now == threading.current_thread().name


def test_waits_are_counted_by_their_cause() -> None:
    loader = small_loader(lambda numbers: time.sleep(0.002), 20, prefetch=2)
    assert len(list(loader)) == 10
    stats = loader.wait_stats()
    # On a busy machine, a sampler may be interrupted for longer than a read takes.
    assert stats.steps == 10
    assert {"dataset"} <= stats.by_cause.keys() <= {"sampler", "dataset"}
    assert sum(stats.by_cause.values()) == pytest.approx(stats.seconds)
    assert 1 <= stats.waited_steps <= 10
    on_demand = small_loader(size=20, prefetch=0)
    assert len(list(on_demand)) == on_demand.wait_stats().waited_steps == 10


@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_watchdog_prints_all_stacks(prefetch: int, capfd: pytest.CaptureFixture[str]) -> None:
    def a_slow_read(numbers: Any) -> None:
        time.sleep(0.3 if numbers[0] == 0 else 0)

    loader = small_loader(a_slow_read, prefetch=prefetch, watchdog=0.05)
    next(loader)
    next(loader)
    time.sleep(0.1)  # a batch that has come prints nothing later
    printed = capfd.readouterr().err
    assert printed.count("a batch takes more than 0.05 s") == 1
    assert "in a_slow_read" in printed
    for watchdog in (math.inf, 1e300):
        next(small_loader(lambda _: time.sleep(0.001), prefetch=prefetch, watchdog=watchdog))
    assert capfd.readouterr().err == ""
    next(small_loader(lambda _: time.sleep(0.1), prefetch=prefetch, watchdog=0))
    assert capfd.readouterr().err.count("a batch takes more than 0 s") == 1


def test_the_watchdog_leaves_other_timers_and_forks_alone(tmp_path: Path) -> None:
    program = """
import faulthandler, os, signal, sys, threading, time
from tests.feed.test_attacks import small_loader
own = open(sys.argv[1], "w")
faulthandler.dump_traceback_later(1, file=own)
waiting = small_loader(lambda _: time.sleep(0.6), prefetch=0, watchdog=30)
thread = threading.Thread(target=lambda: next(waiting))
thread.start()
time.sleep(0.2)
child = os.fork()
if child == 0:
    signal.alarm(20)
    next(small_loader(prefetch=0, watchdog=30))
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
thread.join()
time.sleep(1)
"""
    command = [sys.executable, "-c", program, tmp_path / "own"]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
    assert "Timeout" in (tmp_path / "own").read_text()


@FORKS
def test_a_fork_starts_threads_of_its_own() -> None:
    loader = small_loader(threads=2, prefetch=4)
    next(loader)

    def is_next() -> bool:
        is_next = next(loader)["tokens"].tolist() == [2, 3] and len(workers()) == 2
        loader.close()
        return is_next

    assert is_true_in_child(is_next)
    assert next(loader)["tokens"].tolist() == [2, 3]


@FORKS
def test_a_forked_child_frees_no_batch_of_its_parent() -> None:
    """torch ends a child that frees a tensor on a GPU which another stream has used."""
    freed: list[int] = []  # the processes that made what was freed

    class Batch(dict[str, Any]):
        def __init__(self, *arrays: Any) -> None:
            super().__init__(*arrays)
            self.process = os.getpid()

        def __del__(self) -> None:
            freed.append(self.process)

    made: list[Any] = []
    loader = small_loader(made.append, prefetch=3, prepare=Batch)
    first = next(loader)
    wait_for(lambda: len(made) == 4)

    def is_spared() -> bool:
        copies = [next(copy.copy(loader)), next(loader)]
        loader.close()
        del copies
        gc.collect()
        return set(freed) == {os.getpid()}

    assert is_true_in_child(is_spared)
    assert first["tokens"].tolist() == [0, 1]


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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a callback
@pytest.mark.parametrize(("prefetch", "threads"), [(0, 1), (1, 1), (8, 3)])
def test_an_interruption_at_any_instant_loses_no_step(prefetch: int, threads: int) -> None:
    interruption = Interruption()
    loader = small_loader(size=10**9, prefetch=prefetch, threads=threads)
    with loader, alarms(interruption, 0.0003, 0.0003):
        while interruption.count < 300:
            start = loader.consumed_samples
            try:
                interruption.is_ready = True
                batch = next(loader)
                interruption.is_ready = False
            except KeyboardInterrupt:
                assert loader.consumed_samples in (start, start + 2)
            except (RuntimeError, ConfigError) as error:
                interruption.is_ready = False
                assert "unlocked lock" in str(error)  # noqa: PT017 - see the next test
            else:
                assert (batch["tokens"][0], loader.consumed_samples) == (start, start + 2)


# ---- interruptions ----


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a callback
@pytest.mark.parametrize(("prefetch", "threads"), [(0, 1), (1, 1), (8, 3)])
def test_a_batch_that_an_interruption_keeps_from_the_trainer_comes_again(
    prefetch: int, threads: int
) -> None:
    last: Any = -1
    interruption = Interruption()
    loader = small_loader(size=10**9, micro_batch_size=1, prefetch=prefetch, threads=threads)
    with loader, alarms(interruption, 0.001, 0.0013):
        while interruption.count < 400:
            try:
                interruption.is_ready = True
                for batch in loader:
                    last = batch
                    interruption.is_ready = True  # also if Python dropped it in a callback
            except KeyboardInterrupt:
                pass
            except (RuntimeError, ConfigError) as error:
                # Python's own, if the start of a thread is interrupted at a certain instant.
                interruption.is_ready = False
                assert "unlocked lock" in str(error)  # noqa: PT017
            if not isinstance(last, int):
                last = int(last["tokens"][0])
            assert loader.consumed_samples == last + 1


def test_no_interruption_of_a_loop_that_only_draws_is_lost() -> None:
    raised: list[int] = []
    caught = 0

    def interrupt(*_: Any) -> None:
        raised.append(1)
        raise KeyboardInterrupt

    loader = small_loader(lambda numbers: time.sleep(0.00015), 10**9)
    with loader, alarms(interrupt, 0):
        for number in range(40):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.02 + number * 1e-5)
                while len(raised) == number:
                    start = loader.consumed_samples
                    assert next(loader)["tokens"][0] == start
            except KeyboardInterrupt:
                caught += 1
            except (RuntimeError, ConfigError) as error:
                assert "unlocked lock" in str(error)  # noqa: PT017 - see the test above
                caught += 1
    assert caught == len(raised) == 40


def test_a_signal_handler_may_close_a_loader_inside_the_queue() -> None:
    loader = small_loader(threads=2)
    next(loader)
    queue = loader._queue
    assert queue is not None
    with queue._lock:  # what the handler has interrupted
        loader.close()


@pytest.mark.parametrize("call", ["next", "load_state_dict"])
def test_a_signal_handler_may_not_move_a_loader_inside_next(call: str) -> None:
    goes_on = threading.Event()
    loader = small_loader(lambda numbers: goes_on.wait(20))
    state = loader.state_dict() | {"consumed_samples": 50}

    def interrupt(*_: Any) -> None:
        try:
            next(loader) if call == "next" else loader.load_state_dict(state)
        finally:
            goes_on.set()

    with alarms(interrupt, 0.05), pytest.raises(ConfigError, match="signal handler"):
        next(loader)
    assert firsts(islice(loader, 3)) == [0, 2, 4]
    loader.load_state_dict(state)
    assert next(loader)["tokens"][0] == 50
    loader.close()


def test_a_sampler_that_hangs_does_not_hold_up_the_trainer() -> None:
    hangs, goes_on = threading.Event(), threading.Event()
    is_in_time: list[bool] = []  # False: the trainer has waited for it

    class Hanging(SequentialSampler):
        def has_step(self, consumed_samples: int) -> bool:
            if consumed_samples == 2:
                hangs.set()
                is_in_time.append(goes_on.wait(20))
            return super().has_step(consumed_samples)

    loader = Loader(Numbers(), sampler=Hanging(100, micro_batch_size=2))
    next(loader)
    assert hangs.wait(20)
    queue = loader._queue
    assert queue is not None
    closing = threading.Thread(target=queue.close, daemon=True)  # as at the end of Python
    closing.start()
    closing.join(10)
    goes_on.set()
    wait_for(lambda: is_in_time == [True])


def test_a_loader_may_be_closed_by_its_own_threads() -> None:
    meeting = threading.Barrier(2)

    def prepare(batch: Any) -> None:
        meeting.wait(20)
        loader.close()

    loader = small_loader(threads=2, prefetch=2, prepare=prepare)
    with pytest.raises(ConfigError, match="closed while"):
        next(loader)


# ---- errors ----


class Failing:
    """A sampler of two samples a step, one of whose methods fails from the third step on."""

    def __init__(self, error: BaseException, method: str = "sample_numbers") -> None:
        def fail_at_4(consumed_samples: int) -> Any:
            if consumed_samples >= 4:
                raise error
            return answer(consumed_samples)

        answer = getattr(self, method)
        setattr(self, method, fail_at_4)

    def has_step(self, consumed_samples: int) -> bool:
        return True

    def sample_numbers(self, consumed_samples: int) -> Any:
        return [consumed_samples] * 2

    def consumed_after(self, consumed_samples: int) -> int:
        return consumed_samples + 2


@AHEAD
@pytest.mark.parametrize("place", ["dataset", "sampler", "prepare", "transform"])
def test_a_stop_iteration_is_not_the_end(prefetch: int, place: str) -> None:
    def work(batch: Any) -> Any:
        if 4 in np.asarray(batch["tokens"] if isinstance(batch, dict) else batch):
            next(iter(()))
        return batch

    options: dict[str, Any] = {"work" if place == "dataset" else place: work}
    if place == "sampler":
        options = {"sampler": Failing(StopIteration()), "micro_batch_size": None}
    loader = small_loader(prefetch=prefetch, **options)
    next(loader)
    next(loader)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="StopIteration"):
            next(loader)
    assert loader.consumed_samples == 4


class StubbornError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    def add_note(self, note: str) -> None:
        raise RuntimeError("no note")


@AHEAD
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError, StubbornError])
@pytest.mark.parametrize("method", ["has_step", "sample_numbers", "consumed_after"])
def test_any_error_of_a_sampler_comes_in_its_step(
    prefetch: int, error: type[BaseException], method: str
) -> None:
    dataset: Any = Numbers()
    dataset.is_remote, dataset.prefetch = True, len  # so that the sampler is asked ahead, too
    loader = Loader(dataset, sampler=Failing(error(), method), prefetch=prefetch)
    assert firsts(islice(loader, 2)) == [0, 2]
    for _ in range(2):
        with pytest.raises(error):
            next(loader)
    assert loader.consumed_samples == 4
    assert loader.batch(1)["tokens"][0] == 2
    with pytest.raises(TypeError, match="Failing has no number of steps"):
        len(loader)


@AHEAD
def test_an_error_that_comes_again_gets_one_note(prefetch: int) -> None:
    error = ValueError("always")

    def work(numbers: Any) -> None:
        raise error

    loader = small_loader(work, prefetch=prefetch)
    for _ in range(5):
        with pytest.raises(ValueError, match="always"):
            next(loader)
    assert len(getattr(error, "__notes__", [""])) == 1


def test_a_thread_that_does_not_start_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "millrace-loader-2":
            raise RuntimeError("can't start new thread")
        start(thread)

    loader = small_loader(prefetch=8, threads=4)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(ConfigError, match=r"thread 3 of 4 does not start: can't .*prefetch=0"):
            next(loader)
        wait_for(lambda: not workers())
    assert next(loader)["tokens"].tolist() == [0, 1]
    assert len(workers()) == 4


@pytest.mark.parametrize("prefetch", [None, 0, 8])
def test_an_error_that_comes_once_is_raised_once_and_no_step_is_prepared_again(
    prefetch: int | None,
) -> None:
    prepared: list[int] = []

    def prepare(batch: Any) -> int:
        prepared.append(int(batch["tokens"][0]))
        if prepared.count(300) == 1 and prepared[-1] == 300:
            raise OSError("once")
        return prepared[-1]

    loader = small_loader(size=500, prefetch=prefetch, prepare=prepare)
    starts = [next(loader) for _ in range(150)]
    with pytest.raises(OSError, match="once"):
        next(loader)
    assert loader.consumed_samples == 300
    assert [*starts, *loader] == list(range(0, 500, 2))
    assert prepared == sorted([*starts, 300, *range(300, 500, 2)])


# ---- one thread ----


def test_one_thread_at_a_time_is_in_the_dataset_when_the_loader_moves() -> None:
    num_inside = most_inside = 0

    def work(numbers: Any) -> None:
        nonlocal num_inside, most_inside
        num_inside += 1
        most_inside = max(num_inside, most_inside)
        time.sleep(0.002)
        num_inside -= 1

    loader = small_loader(work, 1000, micro_batch_size=4)
    states = [loader.state_dict() | {"consumed_samples": 40 * number} for number in range(15)]
    for number, state in enumerate(states):
        loader.load_state_dict(state)
        assert firsts(islice(loader, 2)) == [40 * number, 40 * number + 4]
        assert firsts([loader.batch(number)]) == [4 * number]
        if number % 3 == 0:
            loader.load_state_dict(state)
            loader.start()
    loader.close()
    assert most_inside == 1


def test_a_loader_moves_away_from_a_read_that_hangs() -> None:
    may_end, has_begun = threading.Event(), threading.Event()
    inside: list[int] = []

    def hang(numbers: Any) -> None:
        inside.append(int(numbers[0]))
        if numbers[0] == 0:
            has_begun.set()
            may_end.wait(20)

    loader = small_loader(hang)
    state = loader.state_dict() | {"consumed_samples": 50}
    loader.start()
    has_begun.wait(20)
    loader.load_state_dict(state)
    loader.start()
    time.sleep(0.2)
    assert inside == [0]
    may_end.set()
    assert next(loader)["tokens"].tolist() == [50, 51]
    loader.load_state_dict(state)
    loader.close()
    assert not workers()


# ---- copies, and many threads ----


@pytest.mark.parametrize(("prefetch", "threads"), [(0, 1), (1, 2), (9, 4)])
def test_threads_share_the_steps_of_a_loader(prefetch: int, threads: int) -> None:
    loader = small_loader(size=20000, micro_batch_size=4, prefetch=prefetch, threads=threads)
    starts: list[list[int]] = []
    errors: list[BaseException] = []

    def draw() -> None:
        starts.append(firsts(loader))

    def look() -> None:
        try:
            while (consumed := loader.state_dict()["consumed_samples"]) < 20000:
                assert consumed % 4 == 0
                assert loader.batch(consumed // 4)["tokens"][0] == consumed
                loader.start()
                loader.wait_stats()
                copy.deepcopy(loader)
        except BaseException as error:
            errors.append(error)

    run_together(*[draw] * 4, look)
    assert not errors
    assert sorted(chain(*starts)) == list(range(0, 20000, 4))
    assert all(part == sorted(part) for part in starts)
    assert loader.wait_stats().steps == 5000


@pytest.mark.parametrize("prefetch", [0, 4])
def test_a_step_whose_transform_fails_in_one_thread_is_the_next_of_another(prefetch: int) -> None:
    failing = set(range(0, 2000, 10))

    def transform(batch: Any) -> Any:
        start = int(batch["tokens"][0])
        if start in failing:
            failing.remove(start)
            raise OSError("once")
        return start

    loader = small_loader(size=2000, prefetch=prefetch, transform=transform)
    starts: list[int] = []

    def draw() -> None:
        while loader.consumed_samples < 2000:
            with contextlib.suppress(OSError):
                starts.extend(loader)

    run_together(*[draw] * 4)
    assert not failing
    assert sorted(starts) == list(range(0, 2000, 2))


# ---- look-ahead ----


class RemoteReader(MemoryReader):
    """A reader of a file elsewhere, which notes what it is told, or refuses to listen."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.error: OSError | None = None
        self.told: set[int] = set()
        self.untold_reads = 0

    def gather(self, byte_offsets: np.ndarray, byte_counts: np.ndarray) -> np.ndarray:
        self.untold_reads += len(set(byte_offsets.tolist()) - self.told)
        return super().gather(byte_offsets, byte_counts)

    def prefetch(self, byte_offsets: np.ndarray, byte_counts: np.ndarray) -> None:
        if self.error is not None:
            raise self.error
        self.told |= set(byte_offsets.tolist())


class StandsStill(SequentialSampler):
    def consumed_after(self, consumed_samples: int) -> int:
        return min(super().consumed_after(consumed_samples), 10)


def test_remote_storage_is_told_what_is_read_next(make_dataset: Make, tmp_path: Path) -> None:
    make_dataset([100] * 50)
    reader = RemoteReader(tmp_path / "data.bin")
    data = IndexedDataset(tmp_path / "data", bin_reader=reader)
    dataset = GPTDataset(data, sequence_length=8, seed=3)
    plain = GPTDataset(IndexedDataset(tmp_path / "data"), sequence_length=8, seed=3)
    blend = BlendedDataset([dataset, plain], [1, 2], 300)
    for source in (dataset, blend, TransformedDataset(blend, [])):
        reader.told, reader.untold_reads = set(), 0
        loader = Loader(source, micro_batch_size=5)
        assert len(list(loader)) == len(loader)
        assert reader.untold_reads <= 30  # the first steps
    expected = plain.batch(np.arange(5))
    assert np.array_equal(next(Loader(dataset, micro_batch_size=5))["tokens"], expected["tokens"])
    with pytest.raises(ConfigError, match="consumed_after must be at least 11"):  # and no hang
        list(Loader(dataset, sampler=StandsStill(len(dataset), micro_batch_size=5)))
    reader.error = OSError("busy")  # of a hint: it is not the batch's own
    assert len(list(Loader(dataset, micro_batch_size=5))) == len(dataset) // 5
