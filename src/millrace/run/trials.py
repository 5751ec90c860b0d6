"""Small runs that repeat their sources as a large run does."""

from dataclasses import replace
from typing import Any

import numpy as np

from millrace.checks import check_float
from millrace.errors import ConfigError
from millrace.order.splits import parse_split
from millrace.run.instant_config import InstantConfig
from millrace.run.skips import Skips


def trial_of(config: InstantConfig, share: float) -> InstantConfig:
    """A trial of a run: so much shorter, and of so much smaller sources, that epochs are the same.

    Each source's range for training is cut to its first part. Phases, skips and the number of
    samples end at the same share of theirs, phases at a step. Weights, sequence lengths, caps,
    validation and test stay as they are.

    Args:
        config: The configuration of the large run.
        share: Size of the trial, above 0 and up to 1.

    Raises:
        ConfigError: A share outside its limits, a global batch whose size changes, or a
            configuration without training.
    """
    share, step = check_float("trial", share, 0, 1), config.global_batch_size or 1
    splits: Any = "1,0,0" if config.split is None else config.split
    train, *others = parse_split(splits) if isinstance(splits, str) else splits
    if share == 0 or not isinstance(step, int) or train is None:
        raise ConfigError(
            f"trial is {share}, global_batch_size {step}, split {config.split}: a trial needs a "
            "share above 0, steps of one size, and a split with training"
        )
    ends = [[round(number * share) for number in pair] for pair in config.skips]
    before, after = Skips(config.skips), Skips([pair for pair in ends if pair[0] < pair[1]])

    def position(consumed_samples: int) -> int:
        return max(round(consumed_samples * share / step), 1) * step

    phases = []
    for phase in config.phases:
        until = phase.until
        if until is not None:
            until = int(after.samples(np.array([position(before.position(until))]))[0])
        phases.append(replace(phase, until=until))
    num, *rest = config.num_samples
    return replace(
        config,
        split=[(train[0], train[0] + share * (train[1] - train[0])), *others],
        skips=after.ranges,
        phases=phases,
        num_samples=(None if num is None else position(num), *rest),
    )
