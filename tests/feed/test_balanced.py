"""The balanced sampler: what it keeps of a global batch, and how even its deal is."""

from functools import partial
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from millrace import BlendedDataset, ConfigError
from millrace.encoding import Tokenizer
from millrace.feed import (
    BalancedSampler,
    BatchSizeSchedule,
    DocumentCosts,
    GlobalBatchSampler,
    imbalance,
    least_imbalance,
)
from millrace.online import TextDataset, TextRows
from millrace.order import PackedOrder


def costs_of(numbers: Any) -> Any:
    return 1 + (numbers * 2654435761 % 97) ** 2


def costs_in_place(numbers: Any) -> Any:
    """Costs of a function that writes to what it is given."""
    costs = costs_of(numbers)
    numbers[:] = 0
    return costs


@given(
    ranks=st.integers(1, 5),
    micro=st.integers(1, 3),
    steps=st.integers(1, 4),
    size=st.integers(1, 150),
    lockstep=st.booleans(),
)
@settings(deadline=None, max_examples=200)
def test_each_global_batch_keeps_its_samples(
    ranks: int, micro: int, steps: int, size: int, lockstep: bool
) -> None:
    """Also a last one that is not complete, and batches that grow."""
    block = ranks * micro
    schedule = BatchSizeSchedule([(0, block), (block * 2, block * steps)])
    make: Any = partial(BalancedSampler, costs=costs_in_place, lockstep=lockstep)
    for drop_last in (True, False)[: 2 - lockstep]:
        options: Any = {
            "global_batch_size": schedule,
            "micro_batch_size": micro,
            "data_parallel_size": ranks,
            "drop_last": drop_last,
        }
        if block > size and drop_last:
            continue
        dealt, plain = (
            [kind(size, data_parallel_rank=rank, **options) for rank in range(ranks)]
            for kind in (make, GlobalBatchSampler)
        )
        position = 0
        while plain[0].has_step(position):
            assert dealt[0].has_step(position)
            one, other = (
                [sampler.sample_numbers(position) for sampler in samplers]
                for samplers in (dealt, plain)
            )
            assert sorted(np.concatenate(one)) == sorted(np.concatenate(other))
            assert [len(part) for part in one] == [len(part) for part in other]
            whole = position + schedule.batch_size(position) <= size
            if whole:
                assert all(np.all(np.diff(costs_of(part)) <= 0) for part in one)
                drawn, even = (costs_of(np.concatenate(parts)) for parts in (other, one))
                share = len(even) // ranks
                if lockstep:  # the least that there is: the maxima are those of sorted groups
                    most = np.sort(drawn)[::-1][::ranks].sum() / drawn.sum() * ranks
                    assert imbalance(even, ranks, share) == pytest.approx(most)
                else:
                    assert imbalance(even, ranks) <= imbalance(drawn, ranks) * 1.03
            position = plain[0].consumed_after(position)
        assert not dealt[0].has_step(position)


@given(costs=st.lists(st.integers(0, 20), min_size=6, max_size=6), ranks=st.sampled_from([2, 3]))
@settings(deadline=None, max_examples=100)
def test_no_deal_is_below_the_bound(costs: list[int], ranks: int) -> None:
    best = min(imbalance(deal, ranks) for deal in permutations(costs))
    assert least_imbalance(costs, ranks) <= best * (1 + 1e-9)


def test_costs_are_those_of_the_documents_of_packs() -> None:
    lengths = np.random.default_rng(0).integers(1, 30, 500)
    order = PackedOrder(lengths, 32, 1, num_samples=400)
    numbers = np.arange(50, 200)
    for multiple in (1, 4):
        costs = DocumentCosts(spans=order.spans, quadratic=2, linear=3, multiple=multiple)
        spans = order.spans(numbers)
        for number, cost in enumerate(costs(numbers)):
            here = spans.counts[spans.bounds[number] : spans.bounds[number + 1]]
            padded = [-(-length // multiple) * multiple for length in here.tolist()]
            assert cost == sum(2 * length**2 + 3 * length for length in padded)


def test_wrong_costs_are_refused() -> None:
    options: Any = {"global_batch_size": 2, "micro_batch_size": 1, "data_parallel_size": 2}
    answers: Any = [lambda n: n[:1], lambda n: -1.0 - n, lambda n: n / 0.0, lambda n: [[1, 2]], 3]
    for costs in (*answers, lambda n: n.astype(str)):
        with np.errstate(all="ignore"), pytest.raises(ConfigError, match=r"cost"):
            BalancedSampler(8, costs=costs, **options).sample_numbers(0)
    with pytest.raises(ConfigError, match="would hang in lockstep: leave out drop_last"):
        BalancedSampler(8, costs=len, lockstep=True, drop_last=False, **options)
    rows = TextDataset([{"text": "a"}], TextRows(Tokenizer("bytes")), sequence_length=4)
    for dataset in (rows, BlendedDataset([rows])):
        with pytest.raises(ConfigError, match=r'a TextDataset has no .* order="packs"'):
            BalancedSampler.of(dataset, **options)
    for wrong in ({"quadratic": -1}, {"linear": np.nan}, {"multiple": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            DocumentCosts(spans=print, **wrong)  # type: ignore[arg-type]
    for measure in (imbalance, least_imbalance):
        assert measure([0, 0], 2) == 1
        with pytest.raises(ConfigError, match="3 samples cannot be dealt evenly to 2 ranks"):
            measure([1, 2, 3], 2)
