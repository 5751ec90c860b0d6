"""Batch sizes that change, and the two directions between steps and consumed samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace import BatchSizeSchedule, ConfigError, GlobalBatchSampler, RampUp


def ramp_up(start: int, increment: int, samples: int, final: int, consumed: int) -> int:
    """The batch size by Megatron-LM's calculator, in float64."""
    if consumed > samples or start == final:
        return final
    samples_per_increment = samples / ((final - start) // increment)
    return start + int(consumed / samples_per_increment) * increment


gaps_and_sizes = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=6)


@given(
    start=st.integers(1, 100),
    increment=st.integers(1, 40),
    num_increments=st.integers(0, 30),
    samples=st.one_of(st.integers(1, 40), st.integers(1, 10**6), st.integers(1, 2**53)),
    numbers=st.lists(st.floats(0, 1.5), max_size=20),
)
@settings(deadline=None, derandomize=True, max_examples=300)
def test_a_ramp_up_has_the_sizes_of_the_calculator(
    start: int, increment: int, num_increments: int, samples: int, numbers: list[float]
) -> None:
    final = start + num_increments * increment
    schedule = RampUp(start, increment, samples, final)
    places = {int(number * samples) for number in numbers} | {0, samples - 1, samples, samples + 1}
    for change, _ in schedule.changes:
        places |= {max(change - 1, 0), change, change + 1}
    for place in places:
        expected = ramp_up(start, increment, samples, final, place)
        assert schedule.batch_size(place) == expected


@given(gaps_and_sizes=gaps_and_sizes, num_samples=st.integers(0, 500), drop_last=st.booleans())
@settings(deadline=None, derandomize=True, max_examples=200)
def test_steps_and_consumed_samples_follow_from_each_other(
    gaps_and_sizes: list[tuple[int, int]], num_samples: int, drop_last: bool
) -> None:
    starts = np.cumsum([0] + [gap for gap, _ in gaps_and_sizes[1:]]).tolist()
    changes = list(zip(starts, [size for _, size in gaps_and_sizes], strict=True))
    schedule = BatchSizeSchedule(changes)
    consumed, ends = 0, [0]
    for step in range(40):
        assert schedule.consumed_at(step) == consumed
        assert schedule.step_at(consumed) == step
        size = schedule.batch_size(consumed)
        assert size == [size for start, size in changes if start <= consumed][-1]
        for inside in {consumed + 1, consumed + size - 1} - {consumed, consumed + size}:
            with pytest.raises(
                ConfigError,
                match=rf"inside step {step}, .* at {consumed} and at {consumed + size}$",
            ):
                schedule.step_at(inside)
        consumed += size
        ends.append(consumed)
    for start in (0, num_samples // 3, num_samples, num_samples + 3):
        end, steps = start, 0
        while end < num_samples:
            end += schedule.batch_size(end)
            steps += 1
        expected = max(steps - (drop_last and end > num_samples), 0)
        assert schedule.num_steps(num_samples, start, drop_last=drop_last) == expected


def test_large_numbers_take_no_time() -> None:
    schedule = BatchSizeSchedule([(0, 256), (1_000_000, 512), (10**15, 3)])
    step = 10**17
    assert schedule.step_at(schedule.consumed_at(step)) == step
    steps = schedule.num_steps(10**18)
    assert schedule.num_steps(7, 99) == schedule.num_steps(7, 7) == 0  # beyond the end
    assert schedule.consumed_at(steps) <= 10**18 < schedule.consumed_at(steps + 1)


def test_a_change_inside_a_step_waits_for_its_end() -> None:
    schedule = BatchSizeSchedule([(0, 10), (15, 100), (17, 4), (20, 5)])
    assert [schedule.consumed_at(step) for step in range(4)] == [0, 10, 20, 25]
    assert [schedule.batch_size(consumed) for consumed in (14, 15, 17, 20)] == [10, 100, 4, 5]


def test_micro_batches_are_counted_and_must_be_whole() -> None:
    schedule = RampUp(16, 8, 1000, 32)
    assert schedule.num_micro_batches(0, 2, 4) == 2
    assert schedule.num_micro_batches(1000, np.int64(2), np.int32(4)) == 4
    message = r"size is 24 after 500 samples; it must be a multiple of .* = 4 \* 4 = 16"
    with pytest.raises(ConfigError, match=message):
        schedule.num_micro_batches(500, 4, 4)
    with pytest.raises(ConfigError, match=r"size is 24 after 512 samples"):
        GlobalBatchSampler(
            600, global_batch_size=schedule, micro_batch_size=4, data_parallel_size=4
        )
    # A size that no step reaches need not fit.
    GlobalBatchSampler(500, global_batch_size=schedule, micro_batch_size=4, data_parallel_size=4)


@pytest.mark.parametrize("value", [0, -1, 1.0, float("nan"), True, "5", None])
def test_invalid_numbers_are_refused(value: Any) -> None:
    numbers = {"start": 16, "increment": 8, "samples": 1000, "global_batch_size": 32}
    for name in numbers:
        with pytest.raises(ConfigError, match=f"{name} must be (a whole number|between 1 and)"):
            RampUp(**{**numbers, name: value})
    with pytest.raises(ConfigError, match=r"global_batch_size of change 1 "):
        BatchSizeSchedule([(0, 4), (8, value)])
    schedule = RampUp(**numbers)
    for call in (
        lambda: schedule.num_micro_batches(0, value, 1),
        lambda: schedule.num_micro_batches(0, 1, value),
    ):
        with pytest.raises(ConfigError, match=r"_size must be"):
            call()
    if value != 0 or isinstance(value, float):
        for call in (
            lambda: schedule.batch_size(value),
            lambda: schedule.step_at(value),
            lambda: schedule.consumed_at(value),
            lambda: schedule.num_steps(100, value),
        ):
            with pytest.raises(ConfigError, match=r"(consumed_samples|step) must be"):
                call()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([], "there are no changes"),
        ([(5, 4)], "the first change is at 5 consumed samples; it must be at 0"),
        ([(0, 4), (10, 8), (10, 16)], "change 2 is at 10 .* after change 1, at 10"),
        ([(0, 4), (-10, 8)], r"consumed_samples of change 1 must be .*, not -10"),
        ([(0, 4, 1)], "give pairs"),
        (7, "give pairs"),
        ("ab", "give pairs"),
    ],
)
def test_invalid_changes_are_refused(changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BatchSizeSchedule(changes)


def test_ramp_ups_that_miss_their_end_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"global_batch_size is 30; .* increments of 8"):
        RampUp(16, 8, 1000, 30)
    with pytest.raises(ConfigError, match=r"global_batch_size is 8; "):
        RampUp(16, 8, 1000, 8)
    with pytest.raises(ConfigError, match=r"would grow 9999999 times"):
        RampUp(1, 1, 1000, 10**7)
    with pytest.raises(ConfigError, match=r"samples must be between 1 and 2\*\*53, not \d+"):
        RampUp(16, 8, 2**53 + 1, 32)


def test_schedules_print_as_they_are_made() -> None:
    for schedule in (RampUp(16, 8, 1000, 32), BatchSizeSchedule([(0, 4), (10, 8)])):
        assert eval(repr(schedule)).changes == schedule.changes
