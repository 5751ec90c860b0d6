"""Random samplers of all ranks against the slow model, from any step on.

python -m tests.feed.sampler_cases --cases 2000 --seed 1
"""

from __future__ import annotations

import argparse
import sys
from random import Random
from typing import Any

import numpy as np

from millrace.feed import (
    BatchSizeSchedule,
    CyclicSampler,
    FullValidationSampler,
    GlobalBatchSampler,
    SequentialSampler,
)
from tests.feed import slow_samplers
from tests.feed.slow_samplers import Steps

KINDS = ("sequential", "global batch", "schedule", "full validation", "cyclic")


def check_case(seed: int) -> str:
    """Compares one random case; AssertionErrors say what differs. Returns its description."""
    random = Random(seed)
    kind = random.choice(KINDS)
    micro = random.choice([1, 1, 2, 3, 4, 7])
    ranks = random.choice([1, 2, 3, 4, 5, 8, 16, 63, 64])
    block = micro * ranks
    num_samples = random.choice([1, block, block + 1, random.randint(1, 6 * block + 5)])
    options: dict[str, Any] = {"micro_batch_size": micro, "data_parallel_size": ranks}
    is_endless = False
    if kind == "sequential":
        make: Any = SequentialSampler
        options["drop_last"] = random.random() < 0.5
        steps = slow_samplers.sequential(num_samples, micro, ranks, options["drop_last"])
    elif kind in ("global batch", "schedule"):
        make = GlobalBatchSampler
        options["drop_last"] = random.random() < 0.5
        changes = [(0, block * random.randint(1, 4))]
        if kind == "schedule":
            for _ in range(random.randint(0, 4)):
                start = changes[-1][0] + random.randint(1, 2 * block)
                changes.append((start, block * random.randint(1, 4)))
            options["global_batch_size"] = BatchSizeSchedule(changes)
        else:
            options["global_batch_size"] = changes[0][1]
        steps = slow_samplers.global_batches(
            num_samples, changes, micro, ranks, options["drop_last"]
        )
    elif kind == "full validation":
        make = FullValidationSampler
        options["pad"] = random.random() < 0.5
        steps = slow_samplers.full_validation(num_samples, micro, ranks, options["pad"])
    else:
        make = CyclicSampler
        is_endless = True
        num_samples = max(num_samples, block)
        options["data_sharding"] = random.random() < 0.5
        num_epochs = random.randint(1, 4)
        steps = slow_samplers.cyclic(
            num_samples, micro, ranks, options["data_sharding"], num_epochs
        )
    description = f"{kind}: {num_samples} samples, {options}"
    samplers = [make(num_samples, data_parallel_rank=rank, **options) for rank in range(ranks)]
    first = random.randint(0, len(steps))
    try:
        check_steps(samplers, steps, first, is_endless)
    except Exception as error:
        raise AssertionError(f"case {seed}, {description}, from step {first}: {error}") from error
    return description


def check_steps(samplers: list[Any], steps: Steps, first: int, is_endless: bool) -> None:
    """The samplers of all ranks make the steps from number `first` on, and no others."""
    end = steps[-1][0] + sum(map(len, steps[-1][1])) if steps else 0
    if not is_endless:
        end = min(end, samplers[0].num_samples)  # padding counts once
    starts = [consumed for consumed, _ in steps] + [end]
    consumed = starts[first]
    for sampler in samplers:
        for step in range(first, len(starts)):
            sampler.check_position(starts[step])
            assert sampler.consumed_at(step) == starts[step]
            assert sampler.step_at(starts[step]) == step
            if not is_endless:
                assert sampler.num_steps(starts[step]) == len(steps) - step
    for step in range(first, len(steps)):
        assert consumed == starts[step]
        for sampler, expected in zip(samplers, steps[step][1], strict=True):
            assert sampler.has_step(consumed)
            numbers = sampler.sample_numbers(consumed)
            assert numbers.dtype == np.int64
            assert numbers.tolist() == expected, f"step {step}: {numbers.tolist()} != {expected}"
            assert sampler.consumed_after(consumed) == starts[step + 1]
            if isinstance(sampler, FullValidationSampler):
                is_padding = sampler.is_padding(consumed)
                assert len(is_padding) == len(numbers)
                rank = sampler.data_parallel_rank * sampler.micro_batch_size
                kept = [consumed + rank + place for place in np.flatnonzero(~is_padding)]
                assert numbers[~is_padding].tolist() == kept
        consumed = starts[step + 1]
    assert all(sampler.has_step(consumed) == is_endless for sampler in samplers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for case in range(arguments.cases):
        check_case(arguments.seed * 10**9 + case)
    print(f"{arguments.cases} cases agree")
    return 0


if __name__ == "__main__":
    sys.exit(main())
