"""The samplers' rules as plain lists, step by step from sample 0, for comparison.

Each function gives the steps of all ranks: steps[k] is (consumed_samples before step k, the sample
numbers of each rank).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from itertools import islice

import numpy as np

Steps = list[tuple[int, list[list[int]]]]


def sequential(num_samples: int, micro: int, ranks: int, drop_last: bool = True) -> Steps:
    """Blocks of micro * ranks numbers, a slice to each rank."""
    return global_batches(num_samples, [(0, micro * ranks)], micro, ranks, drop_last)


def global_batches(
    num_samples: int,
    changes: Sequence[tuple[int, int]],
    micro: int,
    ranks: int,
    drop_last: bool = True,
) -> Steps:
    """Global batches; each rank has a slice of every micro * ranks numbers of it."""
    steps = []
    consumed = 0
    while consumed < num_samples:
        size = [size for start, size in changes if start <= consumed][-1]
        batch = list(range(num_samples))[consumed : consumed + size]
        if len(batch) < size and drop_last:
            break
        parts: list[list[int]] = [[] for _ in range(ranks)]
        for start in range(0, size, micro):
            parts[start // micro % ranks] += batch[start : start + micro]
        steps.append((consumed, parts))
        consumed += len(batch)
    return steps


def full_validation(num_samples: int, micro: int, ranks: int, pad: bool) -> Steps:
    """All samples; padded, a rank's missing samples are those that it had first."""
    steps = sequential(num_samples, micro, ranks, drop_last=False)
    if pad:
        samples = list(range(num_samples)) * (micro * ranks)
        for rank, part in enumerate(steps[-1][1]):
            first = samples[rank * micro : (rank + 1) * micro]
            part += first[len(part) :]
    return steps


def cyclic(num_samples: int, micro: int, ranks: int, sharded: bool, num_epochs: int) -> Steps:
    """Epochs; a rank draws from its shuffled shard, or every ranks-th of all shuffled samples."""
    steps_per_epoch = num_samples // (micro * ranks)
    steps = []
    for epoch in range(num_epochs):
        if sharded:
            size = steps_per_epoch * micro
            draws = [
                [rank * size + place for place in permutation(size, epoch)] for rank in range(ranks)
            ]
        else:
            shuffled = permutation(num_samples // micro * micro, epoch)
            draws = [shuffled[rank::ranks] for rank in range(ranks)]
        for step in range(steps_per_epoch):
            parts = [list(islice(numbers, step * micro, (step + 1) * micro)) for numbers in draws]
            steps.append(((epoch * steps_per_epoch + step) * micro * ranks, parts))
    return steps


@cache
def permutation(size: int, seed: int) -> list[int]:
    """torch.randperm of a generator with that seed, by its rule for small sizes."""
    next_word = np.random.RandomState(seed)._bit_generator.random_raw
    left = list(range(size))
    for place in range(size - 1):
        other = place + next_word() % (size - place)
        left[place], left[other] = left[other], left[place]
    return left


def ramp_up(start: int, increment: int, samples: int, final: int, consumed: int) -> int:
    """The batch size by Megatron-LM's calculator, in float64."""
    if consumed > samples or start == final:
        return final
    samples_per_increment = samples / ((final - start) // increment)
    return start + int(consumed / samples_per_increment) * increment


def size_at(changes: Sequence[tuple[int, int]], consumed: int) -> int:
    return changes[bisect_right([start for start, _ in changes], consumed) - 1][1]
