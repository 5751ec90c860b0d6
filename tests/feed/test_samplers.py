"""Every sampler against golden batches and the slow model, and what they refuse."""

import copy
import json
import pickle
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from millrace import ConfigError, ResumeError
from millrace.feed import (
    BatchSizeSchedule,
    CyclicSampler,
    FullValidationSampler,
    GlobalBatchSampler,
    Loader,
    RampUp,
    SequentialSampler,
)
from tests.feed.helpers import Numbers, is_true_in_child, run_together
from tests.feed.laws import permutation

GOLDEN = json.loads((Path(__file__).parent / "golden_samplers.json").read_text())
"""Batches of Megatron-LM's own samplers (main of August 2026, not on PyPI), each to its end."""


def named(ranks: list[int], micro: int = 1) -> dict[str, int]:
    rank, size = ranks
    return {"micro_batch_size": micro, "data_parallel_rank": rank, "data_parallel_size": size}


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case['sampler']}{case['arguments']}")
def test_batches_are_megatrons(case: dict[str, Any]) -> None:
    numbers = case["arguments"]
    batches, consumed = case["batches"], 0
    if case["sampler"] == "MegatronFullValidationSampler":
        total, *ranks = numbers
        sampler: Any = FullValidationSampler(total, **named(ranks))
        num_empty = sampler.num_steps() - len(batches)
        assert num_empty in (0, 1)
        batches = batches + [[]] * num_empty  # they are silent, ours is empty
    elif case["sampler"] == "MegatronPretrainingSampler":
        total, consumed, micro, *ranks, drop_last = numbers
        sampler = SequentialSampler(total, **named(ranks, micro), drop_last=drop_last)
    elif case["sampler"] == "HybridCPMegatronPretrainingSampler":
        total, consumed, micro, size, *ranks, drop_last = numbers
        share = named(ranks, micro)
        sampler = GlobalBatchSampler(total, global_batch_size=size, **share, drop_last=drop_last)
    else:
        _, total, consumed, micro, *ranks, data_sharding = numbers
        sampler = CyclicSampler(total, **named(ranks, micro), data_sharding=data_sharding)
        # Not sharded, Megatron-LM gives some ranks one batch more.
        left = sampler.steps_per_epoch - sampler.step_at(consumed) % sampler.steps_per_epoch
        assert 0 <= len(batches) - left <= (not data_sharding)
        batches = batches[:left]
    if case["sampler"] != "MegatronPretrainingRandomSampler":
        assert sampler.num_steps(consumed) == len(batches)
    for batch in batches:
        assert sampler.has_step(consumed)
        assert sampler.sample_numbers(consumed).tolist() == batch
        consumed = sampler.consumed_after(consumed)


def test_the_pages_examples_run() -> None:
    page = (Path(__file__).parents[2] / "docs" / "samplers.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 3
    for example in examples:
        exec(compile(example, "samplers.md", "exec"), {})


# ---- resuming on other ranks ----


def test_a_cyclic_step_must_start_where_a_step_of_its_ranks_does() -> None:
    sampler = CyclicSampler(50, micro_batch_size=2, data_parallel_size=3)
    message = "is 100; .* = 6 samples and starts at 96 or 102.* "
    for name in ("check_position", "sample_numbers", "consumed_after", "step_at"):
        with pytest.raises(ConfigError, match=f"{message}divides 4$"):  # and the 48 of an epoch
            getattr(sampler, name)(100)
    assert sampler.has_step(100)
    assert not hasattr(sampler, "num_steps")


def test_a_loader_says_why_it_refuses_another_cyclic_order() -> None:
    def loader(micro: int, size: int, data_sharding: bool = False) -> Loader:
        sampler = CyclicSampler(50, **named([0, size], micro), data_sharding=data_sharding)
        return Loader(Numbers(50), sampler=sampler, prefetch=0)

    state = loader(2, 3).state_dict(72)
    for micro, size in ((2, 3), (2, 4), (1, 12)):  # 48 of 50 shuffled samples fill an epoch
        other = loader(micro, size)
        other.load_state_dict(state)
        assert next(other)["tokens"][0] == loader(2, 3).batch(12)["tokens"][0]
    reason = r"(?s)sampler\.\w+: saved .*\nThe order may depend on .* ranks and"
    for micro, size, data_sharding in ((2, 5, False), (3, 2, False), (2, 3, True)):
        with pytest.raises(ResumeError, match=reason):
            loader(micro, size, data_sharding).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"starts at 64 or 72\. .* divides 6$"):
        loader(2, 4).load_state_dict(state | {"consumed_samples": 66})


def test_positions_beyond_the_end_are_refused() -> None:
    for sampler in (
        SequentialSampler(50, micro_batch_size=4),
        GlobalBatchSampler(50, global_batch_size=8, micro_batch_size=4),
        FullValidationSampler(50, micro_batch_size=4),
    ):
        assert not hasattr(sampler, "fingerprint")
        for consumed in (0, 7, 50):
            sampler.check_position(consumed)
        for call in (sampler.check_position, sampler.step_at):
            with pytest.raises(ConfigError, match=r"is 51; the dataset has 50 samples"):
                call(51)
        end = sampler.num_steps()
        assert sampler.consumed_at(end) == (50 if not sampler.drop_last else 48)
        with pytest.raises(IndexError, match=rf"no step {end + 1}: the sampler has {end} steps"):
            sampler.consumed_at(end + 1)
        with pytest.raises(ConfigError, match=r"inside step 1"):
            sampler.step_at(sampler.consumed_at(1) + 1)


def test_far_positions_are_exact() -> None:
    sampler = CyclicSampler(1000, micro_batch_size=2, data_parallel_size=4)
    step = 10**17 + 3
    consumed = sampler.consumed_at(step)
    assert sampler.step_at(consumed) == step
    assert len(sampler.sample_numbers(consumed)) == 2
    with pytest.raises(ConfigError, match=r"consumed_samples must be .* not 0x"):
        sampler.sample_numbers(16**5000 + 1)
    for other in (
        SequentialSampler(2**63 - 1, micro_batch_size=2),
        GlobalBatchSampler(2**63 - 1, global_batch_size=4, micro_batch_size=2),
    ):
        assert other.sample_numbers(2**63 - 3)[:2].tolist() == [2**63 - 3, 2**63 - 2]
        for beyond in (2**63, 2**70):
            assert other.sample_numbers(beyond).tolist() == []


# ---- schedules, padding, flags ----


MAKERS: list[Callable[..., Any]] = [
    SequentialSampler,
    lambda num, **o: GlobalBatchSampler(num, **{"global_batch_size": 32, **o}),
    FullValidationSampler,
    CyclicSampler,
]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("value", [1.0, float("nan"), True, "1", None, -1, 0])
def test_invalid_numbers_are_refused(make: Callable[..., Any], value: Any) -> None:
    valid = {"micro_batch_size": 2, "data_parallel_size": 4}
    message = r"must be (a whole number|at least|between [01] and)"
    for name in ("micro_batch_size", "data_parallel_size", "data_parallel_rank"):
        if not (name == "data_parallel_rank" and value == 0):
            with pytest.raises(ConfigError, match=f"{name} {message}"):
                make(100, **{**valid, name: value})
    with pytest.raises(ConfigError, match=f"num_samples {message}"):
        make(value, **valid)
    with pytest.raises(ConfigError, match="data_parallel_rank must be between 0 and 3, not 4"):
        make(100, **valid, data_parallel_rank=4)
    if value == 0:
        return
    sampler = make(100, **valid)
    methods = "has_step sample_numbers consumed_after check_position step_at consumed_at".split()
    for method in methods:
        with pytest.raises(ConfigError, match=f"(consumed_samples|step) {message}"):
            getattr(sampler, method)(value)


def test_flags_and_batch_sizes_are_checked() -> None:
    kinds: Any = (SequentialSampler, FullValidationSampler, CyclicSampler)
    flags: Any = ({"drop_last": 1}, {"pad": "no"}, {"data_sharding": None})
    for kind, flag in zip(kinds, flags, strict=True):
        with pytest.raises(ConfigError, match="True or False"):
            kind(9, micro_batch_size=1, **flag)
    with pytest.raises(ConfigError, match=r"global batch size is 20 .* = 4 \* 2 = 8"):
        GlobalBatchSampler(90, global_batch_size=20, micro_batch_size=4, data_parallel_size=2)
    for value in (0, 2.0, "8", [(0, 8)]):
        with pytest.raises(ConfigError, match="global_batch_size must be"):
            GlobalBatchSampler(90, global_batch_size=value, micro_batch_size=4)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"is 12; the dataset has 9 samples, so that no step"):
        CyclicSampler(9, micro_batch_size=3, data_parallel_size=4)


# ---- permutations are shared by threads, and belong to no pickle ----


def test_threads_share_the_permutations_of_neighbouring_epochs() -> None:
    sampler = CyclicSampler(1000, micro_batch_size=5, data_sharding=False)
    expected = [number for epoch in range(6) for number in permutation(1000, epoch)]
    failures: list[int] = []

    def read(offset: int) -> None:
        for consumed in (*range(offset, 6000, 5), *range(0, offset, 5)):
            if sampler.sample_numbers(consumed).tolist() != expected[consumed : consumed + 5]:
                failures.append(consumed)

    run_together(*(partial(read, 500 * number) for number in range(8)))
    assert failures == []
    assert len(sampler._permutations) == 2


def test_a_fork_beside_a_thread_that_draws_is_not_blocked() -> None:
    sampler = CyclicSampler(3_000_000, micro_batch_size=8, data_sharding=False)
    *starts, start = (epoch * sampler.samples_per_epoch for epoch in (0, 1, 2, 5))
    is_drawing = threading.Event()

    def draw() -> None:
        is_drawing.set()
        for one in starts:
            sampler.sample_numbers(one)

    thread = threading.Thread(target=draw)
    thread.start()
    is_drawing.wait()
    assert is_true_in_child(lambda: len(sampler.sample_numbers(start)) == 8, thread.join)


def test_copies_draw_for_themselves() -> None:
    sampler = CyclicSampler(10_000, micro_batch_size=5)
    numbers = sampler.sample_numbers(20).tolist()
    data = pickle.dumps(sampler)
    assert len(data) < 1000
    for other in (pickle.loads(data), copy.copy(sampler), copy.deepcopy(sampler)):
        assert other.sample_numbers(20).tolist() == numbers
    numbers_again = sampler.sample_numbers(20)
    numbers_again[:] = 0  # the caller's own
    assert sampler.sample_numbers(20).tolist() == numbers


def test_a_sampler_may_be_a_dataclass_and_lack_optional_methods() -> None:
    @dataclass(kw_only=True)  # equal to others, so that it has no hash
    class Mine(CyclicSampler):
        consumed_at = num_steps = fingerprint = check_position = None  # type: ignore[assignment]

    sampler = Mine(10, micro_batch_size=5)
    loader = Loader(Numbers(10), sampler=sampler)
    assert is_true_in_child(lambda: len(sampler.sample_numbers(0)) == 5)
    assert loader.batch(1)["tokens"].tolist() == permutation(10, 0)[5:]
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(TypeError, match="no number of steps"):
        len(loader)


# ---- batch sizes that change ----


@given(
    gaps_and_sizes=st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=6
    ),
    num_samples=st.integers(0, 500),
    drop_last=st.booleans(),
)
@settings(deadline=None, derandomize=True, max_examples=200)
def test_steps_and_consumed_samples_follow_from_each_other(
    gaps_and_sizes: list[tuple[int, int]], num_samples: int, drop_last: bool
) -> None:
    gaps, sizes = zip(*gaps_and_sizes, strict=True)
    changes = [*zip(accumulate(gaps[1:], initial=0), sizes, strict=True)]
    schedule, consumed = BatchSizeSchedule(changes), 0
    for step in range(40):
        assert (schedule.consumed_at(step), schedule.step_at(consumed)) == (consumed, step)
        size = schedule.batch_size(consumed)
        assert size == [size for start, size in changes if start <= consumed][-1]
        end = consumed + size
        for inside in {consumed + 1, end - 1} - {consumed, end}:
            with pytest.raises(ConfigError, match=f"step {step}; .* at {consumed} and at {end}$"):
                schedule.step_at(inside)
        consumed = end
    for start in (0, num_samples // 3, num_samples, num_samples + 3):
        end, steps = start, 0
        while end < num_samples:
            end, steps = end + schedule.batch_size(end), steps + 1
        steps -= steps > 0 and drop_last and end > num_samples
        assert schedule.num_steps(num_samples, start, drop_last=drop_last) == steps


def test_large_numbers_take_no_time() -> None:
    schedule = BatchSizeSchedule([(0, 256), (1_000_000, 512), (10**15, 3)])
    step = 10**17
    assert schedule.step_at(schedule.consumed_at(step)) == step
    steps = schedule.num_steps(10**18)
    assert schedule.num_steps(7, 99) == schedule.num_steps(7, 7) == 0  # beyond the end
    assert schedule.consumed_at(steps) <= 10**18 < schedule.consumed_at(steps + 1)


def test_micro_batches_are_counted_and_must_be_whole() -> None:
    assert RampUp(16, 8, 1000, 16).changes == ((0, 16),)
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
def test_invalid_numbers_of_schedules_are_refused(value: Any) -> None:
    numbers = {"start": 16, "increment": 8, "samples": 1000, "global_batch_size": 32}
    for name in numbers:
        with pytest.raises(ConfigError, match=f"{name} must be (a whole number|between 1 and)"):
            RampUp(**{**numbers, name: value})
    with pytest.raises(ConfigError, match=r"global_batch_size of change 1 "):
        BatchSizeSchedule([(0, 4), (8, value)])
    schedule = RampUp(**numbers)
    for arguments in ((0, value, 1), (0, 1, value)):
        with pytest.raises(ConfigError, match=r"_size must be"):
            schedule.num_micro_batches(*arguments)
    if value != 0:
        for method in (schedule.batch_size, schedule.step_at, schedule.consumed_at):
            with pytest.raises(ConfigError, match=r"(consumed_samples|step) must be"):
                method(value)
        with pytest.raises(ConfigError, match="consumed_samples must be"):
            schedule.num_steps(100, value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([], "give pairs"),
        ([(5, 4)], "consumed_samples of change 0 must be between 0 and 0, not 5"),
        ([(0, 4), (10, 8), (10, 16)], "samples of change 2 must be between 11 and .*, not 10"),
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
    for numbers, message in (
        ((16, 8, 1000, 30), r"global_batch_size is 30; .* increments of 8"),
        ((16, 8, 1000, 8), "global_batch_size is 8; "),
        ((1, 1, 1000, 10**7), "would grow 9999999 times; at most 1000000"),
        ((16, 8, 2**53 + 1, 32), r"samples must be between 1 and 2\*\*53, not \d+"),
    ):
        with pytest.raises(ConfigError, match=message):
            RampUp(*numbers)
