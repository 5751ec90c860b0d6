"""Every sampler against golden batches and the slow model, and what they refuse."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace import (
    ConfigError,
    CyclicSampler,
    FullValidationSampler,
    GlobalBatchSampler,
    Loader,
    ResumeError,
    SequentialSampler,
)
from tests.feed.laws import permutation

GOLDEN = json.loads((Path(__file__).parent / "golden_samplers.json").read_text())
"""Batches of Megatron-LM's own samplers (main of August 2026, not on PyPI), each to its end."""


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case['sampler']}{case['arguments']}")
def test_batches_are_megatrons(case: dict[str, Any]) -> None:
    numbers = case["arguments"]
    batches, consumed = case["batches"], 0
    if case["sampler"] == "MegatronFullValidationSampler":
        total, rank, size = numbers
        sampler: Any = FullValidationSampler(
            total, data_parallel_rank=rank, data_parallel_size=size
        )
        num_steps = sampler.num_steps()
        assert num_steps - len(batches) in (0, 1)
        batches = batches + [[]] * (num_steps - len(batches))  # they are silent, ours is empty
    elif case["sampler"] == "MegatronPretrainingSampler":
        total, consumed, micro, rank, size, drop_last = numbers
        sampler = SequentialSampler(
            total,
            micro_batch_size=micro,
            data_parallel_rank=rank,
            data_parallel_size=size,
            drop_last=drop_last,
        )
    elif case["sampler"] == "HybridCPMegatronPretrainingSampler":
        total, consumed, micro, global_batch_size, rank, size, drop_last = numbers
        sampler = GlobalBatchSampler(
            total,
            global_batch_size=global_batch_size,
            micro_batch_size=micro,
            data_parallel_rank=rank,
            data_parallel_size=size,
            drop_last=drop_last,
        )
    else:
        _, total, consumed, micro, rank, size, data_sharding = numbers
        sampler = CyclicSampler(
            total,
            micro_batch_size=micro,
            data_parallel_rank=rank,
            data_parallel_size=size,
            data_sharding=data_sharding,
        )
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


def global_order(make: Callable[..., Any], size: int, start: int, stop: int) -> list[int]:
    """The samples of all ranks from one position to another, each step's in rising order."""
    samplers = [make(data_parallel_rank=rank, data_parallel_size=size) for rank in range(size)]
    numbers: list[int] = []
    while start < stop:
        step = np.concatenate([sampler.sample_numbers(start) for sampler in samplers])
        numbers += sorted(step.tolist())
        start = samplers[0].consumed_after(start)
    assert start == stop
    return numbers


@given(
    num_samples=st.integers(1, 200),
    first=st.tuples(st.integers(1, 4), st.integers(1, 6), st.booleans()),
    second=st.tuples(st.integers(1, 4), st.integers(1, 6), st.booleans()),
    num_steps=st.integers(0, 60),
)
@settings(deadline=None, derandomize=True, max_examples=300)
def test_equal_fingerprints_are_equal_orders(
    num_samples: int,
    first: tuple[int, int, bool],
    second: tuple[int, int, bool],
    num_steps: int,
) -> None:
    """Two cyclic samplers with one fingerprint see the same samples between any two positions."""

    def make(micro: int, data_sharding: bool) -> Callable[..., Any]:
        return lambda **ranks: CyclicSampler(
            num_samples, micro_batch_size=micro, data_sharding=data_sharding, **ranks
        )

    if any(micro * size > num_samples for micro, size, _ in (first, second)):
        return
    makers = [make(micro, sharded) for micro, _, sharded in (first, second)]
    sizes = [first[1], second[1]]
    ours, theirs = (
        maker(data_parallel_rank=0, data_parallel_size=size)
        for maker, size in zip(makers, sizes, strict=True)
    )
    common = int(np.lcm(ours.block_size, theirs.block_size))
    orders = [
        [
            sorted(global_order(maker, size, position, position + common))
            for position in range(0, 3 * num_samples, common)
        ]
        for maker, size in zip(makers, sizes, strict=True)
    ]
    if ours.fingerprint() == theirs.fingerprint():
        assert orders[0] == orders[1]
    elif ours.fingerprint()["samples_per_epoch"] > 20:  # equal by chance below
        assert orders[0] != orders[1]


def test_the_fingerprint_of_a_cyclic_order() -> None:
    def fingerprint(num_samples: int, micro: int, size: int, sharded: bool) -> dict[str, Any]:
        sampler = CyclicSampler(
            num_samples, micro_batch_size=micro, data_parallel_size=size, data_sharding=sharded
        )
        return sampler.fingerprint()

    # Not sharded: any numbers whose steps fill the same epoch.
    assert fingerprint(48, 2, 8, False) == fingerprint(48, 4, 3, False)
    assert fingerprint(50, 2, 8, False) != fingerprint(50, 3, 5, False)
    # Sharded: the ranks decide.
    assert fingerprint(48, 2, 8, True) == fingerprint(48, 3, 8, True)
    assert fingerprint(48, 2, 8, True) != fingerprint(48, 4, 4, True)
    # One rank has one shard.
    assert fingerprint(50, 4, 1, True) == fingerprint(50, 4, 1, False)
    for sampler in (
        SequentialSampler(9, micro_batch_size=1),
        GlobalBatchSampler(9, global_batch_size=3, micro_batch_size=1),
        FullValidationSampler(9),
    ):
        assert not hasattr(sampler, "fingerprint")


def test_a_cyclic_step_must_start_where_a_step_of_its_ranks_does() -> None:
    sampler = CyclicSampler(50, micro_batch_size=2, data_parallel_size=3)
    message = (
        r"consumed_samples is 100, which is 4 samples into epoch 2; .* = 6 samples and starts at "
        r"96 or 102\. Resume with .* divides 4$"  # and the 48 samples of an epoch
    )
    for call in (
        sampler.check_position,
        sampler.sample_numbers,
        sampler.consumed_after,
        sampler.step_at,
    ):
        with pytest.raises(ConfigError, match=message):
            call(100)
    assert sampler.has_step(100)
    assert not hasattr(sampler, "num_steps")


def test_a_loader_refuses_other_cyclic_orders() -> None:
    class Numbers:
        def __len__(self) -> int:
            return 50

        def batch(self, sample_numbers: Any) -> dict[str, Any]:
            return {"numbers": np.asarray(sample_numbers)}

        def fingerprint(self) -> dict[str, Any]:
            return {"kind": "numbers"}

    def loader(micro: int, size: int, data_sharding: bool) -> Loader:
        sampler = CyclicSampler(
            50, micro_batch_size=micro, data_parallel_size=size, data_sharding=data_sharding
        )
        return Loader(Numbers(), sampler=sampler, prefetch=0)

    first = loader(2, 3, False)
    for _ in range(12):
        next(first)
    state = json.loads(json.dumps(first.state_dict()))
    for micro, size in ((2, 3), (2, 4), (1, 12)):  # 48 of 50 shuffled samples fill an epoch
        other = loader(micro, size, False)
        other.load_state_dict(state)
        assert next(other)["numbers"][0] == first.batch(12)["numbers"][0]
        with pytest.raises(TypeError, match="has no number of steps"):
            len(other)
    reason = r"(?s)sampler\.\w+: saved .*\nA cyclic order depends on .* the saved run, or"
    for micro, size, data_sharding in ((2, 5, False), (3, 2, False), (2, 3, True)):
        with pytest.raises(ResumeError, match=reason):
            loader(micro, size, data_sharding).load_state_dict(state)
    state["consumed_samples"] = 66
    with pytest.raises(ConfigError, match=r"starts at 64 or 72\. .* divides 6$"):
        loader(2, 4, False).load_state_dict(state)


def test_positions_beyond_the_end_are_refused() -> None:
    for sampler in (
        SequentialSampler(50, micro_batch_size=4),
        GlobalBatchSampler(50, global_batch_size=8, micro_batch_size=4),
        FullValidationSampler(50, micro_batch_size=4),
    ):
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
        if not (name == "data_parallel_rank" and value == 0 and value is not False):
            with pytest.raises(ConfigError, match=f"{name} {message}"):
                make(100, **{**valid, name: value})
    with pytest.raises(ConfigError, match=f"num_samples {message}"):
        make(value, **valid)
    with pytest.raises(ConfigError, match="data_parallel_rank must be between 0 and 3, not 4"):
        make(100, **valid, data_parallel_rank=4)
    if value == 0 and value is not False:
        return
    sampler = make(100, **valid)
    calls = [sampler.has_step, sampler.sample_numbers, sampler.consumed_after]
    calls += [sampler.check_position, sampler.step_at]
    for call in calls:
        with pytest.raises(ConfigError, match=f"consumed_samples {message}"):
            call(value)
    with pytest.raises(ConfigError, match=f"step {message}"):
        sampler.consumed_at(value)


def test_flags_and_batch_sizes_are_checked() -> None:
    for make in (
        lambda: SequentialSampler(9, micro_batch_size=1, drop_last=1),  # type: ignore[arg-type]
        lambda: FullValidationSampler(9, pad="no"),  # type: ignore[arg-type]
        lambda: CyclicSampler(9, micro_batch_size=1, data_sharding=None),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match="True or False"):
            make()
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
    failures: list[str] = []

    def read(offset: int) -> None:
        for place in range(0, 6000, 5):
            consumed = (place + 5 * offset) % 6000
            if sampler.sample_numbers(consumed).tolist() != expected[consumed : consumed + 5]:
                failures.append(f"step at {consumed}")

    threads = [threading.Thread(target=read, args=(100 * number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(sampler._permutations) == 2


def test_a_fork_beside_a_thread_that_draws_is_not_blocked() -> None:
    sampler = CyclicSampler(3_000_000, micro_batch_size=8, data_sharding=False)
    is_drawing = threading.Event()

    def draw() -> None:
        is_drawing.set()
        for epoch in range(3):
            sampler.sample_numbers(epoch * sampler.samples_per_epoch)

    thread = threading.Thread(target=draw)
    thread.start()
    is_drawing.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if len(sampler.sample_numbers(5 * sampler.samples_per_epoch)) == 8 else 1)
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


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
