"""What can go wrong around a loader: interruptions, strange errors, forks, many threads."""

from __future__ import annotations

import copy
import math
import signal
import threading
import time
from itertools import chain
from typing import Any

import numpy as np
import pytest

from millrace import (
    ConfigError,
    Loader,
    SequentialSampler,
)
from tests.feed.helpers import Numbers, alarms, wait_for, workers

pytestmark = pytest.mark.usefixtures("no_thread_is_left")
AHEAD = pytest.mark.parametrize("prefetch", [0, 8])


# ---- interruptions ----


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a callback
@pytest.mark.parametrize(("prefetch", "threads"), [(0, 1), (1, 1), (8, 3)])
def test_an_interruption_at_any_instant_loses_no_step(prefetch: int, threads: int) -> None:
    may_interrupt, num_interruptions = False, 0

    def interrupt(*_: Any) -> None:
        nonlocal may_interrupt, num_interruptions
        if may_interrupt:
            may_interrupt = False
            num_interruptions += 1
            raise KeyboardInterrupt

    errors: list[str] = []
    loader = Loader(Numbers(10**9), micro_batch_size=2, prefetch=prefetch, threads=threads)
    with loader, alarms(interrupt, 0.0003, 0.0003):
        while num_interruptions < 300:
            start = loader.consumed_samples
            try:
                may_interrupt = True
                batch = next(loader)
                may_interrupt = False
            except KeyboardInterrupt:
                assert loader.consumed_samples in (start, start + 2)
                continue
            except (RuntimeError, ConfigError) as error:
                may_interrupt = False
                errors.append(str(error))
                continue
            assert (batch["tokens"][0], loader.consumed_samples) == (start, start + 2)
    # Python's own, if the start of a thread is interrupted at a certain instant.
    assert all("unlocked lock" in error for error in errors)


class FormNumbers(Numbers):
    """Numbers that say, as our own datasets do, that they take a form."""

    takes_form = True

    def batch(self, sample_numbers: Any, form: Any = None) -> dict[str, np.ndarray]:
        return super().batch(sample_numbers)


def test_no_interruption_of_a_loop_that_only_draws_is_lost() -> None:
    raised: list[int] = []
    caught = 0

    def interrupt(*_: Any) -> None:
        raised.append(1)
        raise KeyboardInterrupt

    dataset = FormNumbers(10**9, work=lambda numbers: time.sleep(0.00015))
    with Loader(dataset, micro_batch_size=2) as loader, alarms(interrupt, 0):
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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a callback
@AHEAD
def test_a_batch_that_an_interruption_keeps_from_the_trainer_comes_again(prefetch: int) -> None:
    last, in_loop, num_interruptions = -1, False, 0

    def interrupt(*_: Any) -> None:
        nonlocal in_loop, num_interruptions
        if in_loop:
            in_loop = False
            num_interruptions += 1
            raise KeyboardInterrupt

    loader = Loader(Numbers(10**9), micro_batch_size=1, prefetch=prefetch)
    with loader, alarms(interrupt, 0.001, 0.0013):
        while num_interruptions < 400:
            try:
                in_loop = True
                for batch in loader:
                    last = batch
                    in_loop = True  # also if Python has dropped an exception in a callback
            except KeyboardInterrupt:
                pass
            except (RuntimeError, ConfigError) as error:
                in_loop = False
                assert "unlocked lock" in str(error)  # noqa: PT017 - Python's own, as above
            if not isinstance(last, int):
                last = int(last["tokens"][0])
            assert loader.consumed_samples == last + 1


def test_a_signal_handler_may_close_a_loader_inside_the_queue() -> None:
    loader = Loader(Numbers(), micro_batch_size=2, threads=2)
    next(loader)
    queue = loader._queue
    assert queue is not None
    with queue._lock:  # what the handler has interrupted
        loader.close()


@pytest.mark.parametrize("call", ["next", "load_state_dict"])
def test_a_signal_handler_may_not_move_a_loader_inside_next(call: str) -> None:
    goes_on = threading.Event()
    loader = Loader(Numbers(work=lambda numbers: goes_on.wait(20)), micro_batch_size=2)
    states = [loader.state_dict() | {"consumed_samples": 50}]

    def interrupt(*_: Any) -> None:
        try:
            next(loader) if call == "next" else loader.load_state_dict(states[0])
        finally:
            goes_on.set()

    with alarms(interrupt, 0.05), pytest.raises(ConfigError, match="signal handler"):
        next(loader)
    assert [next(loader)["tokens"][0] for _ in range(3)] == [0, 2, 4]
    loader.load_state_dict(states[0])
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

    def prepare(batch: Any) -> Any:
        meeting.wait(20)
        loader.close()
        return batch

    loader = Loader(Numbers(), micro_batch_size=2, threads=2, prefetch=2, prepare=prepare)
    with pytest.raises(ConfigError, match="closed while"):
        next(loader)


def test_a_loader_cannot_be_moved_by_its_own_threads() -> None:
    def prepare(batch: Any) -> Any:
        loader.load_state_dict(loader.state_dict())

    loader = Loader(Numbers(), micro_batch_size=2, prepare=prepare)
    with pytest.raises(ConfigError, match="use it in `transform`"):
        next(loader)


# ---- errors ----


class StopSampler:
    """A sampler of two samples a step that fails from the third step on."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def has_step(self, consumed_samples: int) -> bool:
        return True

    def sample_numbers(self, consumed_samples: int) -> Any:
        if consumed_samples >= 4:
            raise self.error
        return [consumed_samples, consumed_samples + 1]

    def consumed_after(self, consumed_samples: int) -> int:
        return consumed_samples + 2


@AHEAD
@pytest.mark.parametrize("place", ["dataset", "sampler", "prepare", "transform"])
def test_a_stop_iteration_is_not_the_end(prefetch: int, place: str) -> None:
    def work(batch: Any) -> Any:
        if 4 in np.asarray(batch["tokens"] if isinstance(batch, dict) else batch):
            next(iter(()))
        return batch

    options: dict[str, Any] = {"micro_batch_size": 2}
    if place == "sampler":
        options = {"sampler": StopSampler(StopIteration())}
    elif place != "dataset":
        options[place] = work
    dataset = Numbers(work=work if place == "dataset" else None)
    loader = Loader(dataset, prefetch=prefetch, **options)
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
def test_any_error_of_a_worker_arrives(prefetch: int, error: type[BaseException]) -> None:
    dataset: Any = Numbers()
    dataset.is_remote, dataset.prefetch = True, len  # so that the sampler is asked ahead, too
    loader = Loader(dataset, sampler=StopSampler(error()), prefetch=prefetch)
    assert [next(loader)["tokens"][0], next(loader)["tokens"][0]] == [0, 2]
    with pytest.raises(error):
        next(loader)
    assert loader.consumed_samples == 4


@AHEAD
def test_an_error_that_comes_again_gets_one_note(prefetch: int) -> None:
    error = StubbornError.__base__("always")  # type: ignore[misc]

    def work(numbers: Any) -> None:
        raise error

    loader = Loader(Numbers(work=work), micro_batch_size=2, prefetch=prefetch)
    for _ in range(5):
        with pytest.raises(Exception, match="always"):
            next(loader)
    assert len(getattr(error, "__notes__", [""])) == 1


@AHEAD
@pytest.mark.parametrize("method", ["has_step", "sample_numbers", "consumed_after"])
def test_an_error_of_a_sampler_comes_in_its_step_of_a_larger_block(
    prefetch: int, method: str
) -> None:
    class Sampler(SequentialSampler):
        def fail(self, consumed_samples: int) -> Any:
            if consumed_samples == 1010:
                raise ValueError("lost")
            return getattr(super(), method)(consumed_samples)

    setattr(Sampler, method, Sampler.fail)
    sampler = Sampler(10**4, micro_batch_size=2)
    loader = Loader(Numbers(10**4), sampler=sampler, prefetch=4 * prefetch)
    assert [next(loader)["tokens"][0] for _ in range(505)] == list(range(0, 1010, 2))
    with pytest.raises(ValueError, match="lost"):
        next(loader)
    assert loader.consumed_samples == 1010


@AHEAD
def test_a_sampler_that_does_not_move_is_an_error(prefetch: int) -> None:
    class Still(StopSampler):
        def consumed_after(self, consumed_samples: int) -> int:
            return consumed_samples

    loader = Loader(Numbers(), sampler=Still(ValueError()), prefetch=prefetch)
    with pytest.raises(ConfigError, match="consumed_after must be at least 1, not 0"):
        next(loader)


def test_a_thread_that_does_not_start_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "millrace-loader-2":
            raise RuntimeError("can't start new thread")
        start(thread)

    loader = Loader(Numbers(), micro_batch_size=2, prefetch=8, threads=4)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(ConfigError, match=r"thread 3 of 4 does not start: can't .*prefetch=0"):
            next(loader)
        wait_for(lambda: not workers())
    assert next(loader)["tokens"].tolist() == [0, 1]
    assert len(workers()) == 4


@AHEAD
@pytest.mark.parametrize("watchdog", [math.inf, 1e300])
def test_a_watchdog_may_wait_for_ever(prefetch: int, watchdog: float) -> None:
    dataset = Numbers(work=lambda numbers: time.sleep(0.001))
    next(Loader(dataset, micro_batch_size=2, prefetch=prefetch, watchdog=watchdog))


@pytest.mark.parametrize("prefetch", [None, 0, 8])
def test_an_error_that_comes_once_is_raised_once_and_no_step_is_prepared_again(
    prefetch: int | None,
) -> None:
    prepared: list[int] = []
    failures = {"prepare": 300, "dataset": 400}  # where each fails once

    def fail_once(place: str, numbers: Any) -> None:
        if failures.get(place) in numbers:
            raise OSError(f"{place} fails at {failures.pop(place)}")

    def prepare(batch: Any) -> Any:
        prepared.append(int(batch["tokens"][0]))
        fail_once("prepare", batch["tokens"])
        return batch

    dataset = FormNumbers(500, work=lambda numbers: fail_once("dataset", numbers))
    loader = Loader(dataset, micro_batch_size=2, prefetch=prefetch, prepare=prepare)
    errors, starts = [], []
    while loader.consumed_samples < 500:
        try:
            starts.append(int(next(loader)["tokens"][0]))
        except OSError as error:
            errors.append((loader.consumed_samples, str(error)))
    assert errors == [(300, "prepare fails at 300"), (400, "dataset fails at 400")]
    assert starts == list(range(0, 500, 2))
    assert prepared == sorted([*starts, 300])


# ---- one thread ----


class OnePlace(Numbers):
    """A dataset that moves to each sample, and reads there: only one thread may use it."""

    place = 0
    num_inside = most_inside = 0

    def batch(self, sample_numbers: Any, form: Any = None) -> dict[str, np.ndarray]:
        self.num_inside += 1
        self.most_inside = max(self.num_inside, self.most_inside)
        rows = np.empty(len(sample_numbers), np.int64)
        for row, self.place in enumerate(sample_numbers):
            time.sleep(0.0005)
            rows[row] = self.place
        self.num_inside -= 1
        return {"tokens": rows}


def test_one_thread_at_a_time_is_in_the_dataset_when_the_loader_moves() -> None:
    dataset = OnePlace(1000)
    loader = Loader(dataset, micro_batch_size=4)
    states = [loader.state_dict() | {"consumed_samples": 40 * number} for number in range(15)]
    for number, state in enumerate(states):
        loader.load_state_dict(state)
        for step in range(2):
            start = 40 * number + 4 * step
            assert next(loader)["tokens"].tolist() == list(range(start, start + 4))
        assert loader.batch(number)["tokens"].tolist() == list(range(4 * number, 4 * number + 4))
        if number % 3 == 0:
            loader.load_state_dict(state)
            loader.start()
    loader.close()
    assert dataset.most_inside == 1


def test_a_loader_moves_away_from_a_read_that_hangs() -> None:
    may_end, has_begun = threading.Event(), threading.Event()
    inside: list[int] = []

    def hang(numbers: Any) -> None:
        inside.append(int(numbers[0]))
        if numbers[0] == 0:
            has_begun.set()
            may_end.wait(20)

    loader = Loader(Numbers(work=hang), micro_batch_size=2)
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
    loader = Loader(Numbers(20000), micro_batch_size=4, prefetch=prefetch, threads=threads)
    starts: list[list[int]] = [[] for _ in range(4)]
    errors: list[BaseException] = []

    def draw(number: int) -> None:
        starts[number] += [int(batch["tokens"][0]) for batch in loader]

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

    callers = [threading.Thread(target=draw, args=(number,)) for number in range(4)]
    callers.append(threading.Thread(target=look))
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not errors
    assert sorted(chain(*starts)) == list(range(0, 20000, 4))
    assert all(part == sorted(part) for part in starts)
    assert loader.wait_stats().steps == 5000


@pytest.mark.parametrize("prefetch", [0, 4])
def test_a_step_whose_transform_fails_in_one_thread_is_the_next_of_another(prefetch: int) -> None:
    num_failures = 0

    def transform(batch: Any) -> Any:
        nonlocal num_failures
        if batch["tokens"][0] % 10 == 0 and num_failures < batch["tokens"][0] // 10 + 1:
            num_failures += 1
            raise OSError("once")
        return int(batch["tokens"][0])

    loader = Loader(Numbers(2000), micro_batch_size=2, prefetch=prefetch, transform=transform)
    starts: list[int] = []

    def draw() -> None:
        while (start := draw_one()) is not None:
            starts.append(start)

    def draw_one() -> int | None:
        while True:
            try:
                return next(loader, None)
            except OSError:
                pass

    callers = [threading.Thread(target=draw) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert num_failures == 200
    assert sorted(starts) == list(range(0, 2000, 2))
