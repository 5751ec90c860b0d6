"""Plans with counts beyond 32 bits, and ranges too large for an index; without such data."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from millrace import ConfigError
from millrace.deferred import Deferred
from millrace.order import GPTOrder, build_gpt_indices, build_gpt_indices_of, plan_gpt
from millrace.order.gpt import MAX_SEED


@pytest.mark.parametrize("tokens", [2**31 - 1, 2**31, 2**32 + 1, 2**53 + 1, 2**62 + 3])
@pytest.mark.parametrize("length", [1, 2048, 2**31])
def test_plans_are_exact_at_any_size(tokens: int, length: int) -> None:
    plan = plan_gpt(tokens, None, length, drop_last_partial_sequence=False)
    assert plan.num_samples == (tokens - 1 + length - 1) // length
    samples = 3 * tokens // length + 5
    plan = plan_gpt(tokens, samples, length)
    assert plan.num_epochs * tokens >= samples * length + 1
    assert (plan.num_epochs - 1) * tokens < samples * length + 1
    assert plan.num_samples == (plan.num_epochs * tokens - 1) // length >= samples


def test_ranges_and_seeds_beyond_32_bits_are_refused() -> None:
    plan = plan_gpt(9, None, 8)
    few, many = (np.broadcast_to(np.int32(1), size) for size in (9, 2**31 + 10))  # four bytes
    for sequences, seed, message in (
        ((2**31 - 5, 2**31 + 1), 0, "at most 2147483648 can be numbered"),
        ((0, 2**31 + 10), 0, "at most 2147483648 can be numbered"),
        ((0, 9), -1, r"seed must be between 0 and 2\*\*32 - 1, not -1"),
        ((0, 9), MAX_SEED + 1, r"seed must be between 0 and 2\*\*32 - 1, not 4294967296"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_gpt_indices(few if sequences == (0, 9) else many, sequences, plan, seed)


@pytest.mark.parametrize("numbers", [[3, 4, 5, 6], [6, 3, 3, 0], [7]])
def test_any_choice_of_sequences_is_as_if_the_file_held_only_those(numbers: list[int]) -> None:
    lengths = np.array([9, 4, 7, 30, 12, 5, 8, 20], np.int32)
    chosen = np.array(numbers, np.int32)
    plan = plan_gpt(int(lengths[chosen].sum()), 25, 6)
    ours = build_gpt_indices_of(lengths, chosen, plan, 7)
    alone = build_gpt_indices(lengths[chosen], (0, len(chosen)), plan, 7)
    expected = alone._replace(document_index=chosen[alone.document_index])
    for ours_index, index in zip(ours, expected, strict=True):
        np.testing.assert_array_equal(ours_index, index, strict=True)


def test_a_fork_beside_a_thread_that_makes_an_order_is_not_blocked() -> None:
    lengths, plan = np.array([9, 0, 4, 17], np.int32), plan_gpt(30, 12, 4)
    indices = build_gpt_indices(lengths, (0, 4), plan, 3)

    def load() -> Any:
        time.sleep(0.5)
        return indices._asdict()

    inputs: Any = SimpleNamespace(lengths=lengths)
    order = GPTOrder(plan, inputs, Deferred(load))
    with ThreadPoolExecutor(1) as pool:
        making = pool.submit(order.spans, [0])
        time.sleep(0.1)
        if (child := os.fork()) == 0:
            signal.alarm(20)
            os._exit(int(order.spans([0]).counts.sum() - 5))
        assert os.waitpid(child, 0)[1] == 0
        assert making.result().counts.sum() == 5
