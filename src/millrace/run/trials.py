"""Small runs that repeat their sources as a large run does."""

from dataclasses import replace

import numpy as np

from millrace.checks import check_float
from millrace.errors import ConfigError
from millrace.order.splits import parse_split
from millrace.run.instant_config import InstantConfig, InstantPhase
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
    share, size = check_float("trial", share, 0, 1), config.global_batch_size
    step = 1 if size is None else size
    splits = [(0.0, 1.0), None, None] if config.split is None else config.split
    splits = parse_split(splits) if isinstance(splits, str) else list(splits)
    if share == 0 or not isinstance(step, int) or splits[0] is None:
        raise ConfigError(
            f"trial is {share}, global_batch_size {size}, split {config.split}: a trial needs a "
            "share above 0, steps of one size, and a split with training"
        )
    first, end = splits[0]
    splits[0] = first, first + share * (end - first)
    ends = [[round(number * share) for number in pair] for pair in config.skips]
    before, after = Skips(config.skips), Skips([pair for pair in ends if pair[0] < pair[1]])

    def steps(position: int) -> int:
        return max(round(position * share / step), 1) * step

    def until(phase: InstantPhase) -> int | None:
        if phase.until is None:
            return None
        return int(after.samples(np.array([steps(before.position(phase.until))]))[0])

    train, *others = config.num_samples
    return replace(
        config,
        split=splits,
        skips=after.ranges,
        phases=[replace(phase, until=until(phase)) for phase in config.phases],
        num_samples=(None if train is None else steps(train), *others),
    )
