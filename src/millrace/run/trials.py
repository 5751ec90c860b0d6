"""Small runs that repeat their sources as a large run does."""

from dataclasses import replace

from millrace.checks import check_float
from millrace.errors import ConfigError
from millrace.order.splits import bookends_of
from millrace.run.instant_config import InstantConfig
from millrace.run.skips import Skips
from millrace.sampling import BatchSizeSchedule


def trial_of(
    config: InstantConfig, share: float, batches: BatchSizeSchedule | None = None
) -> InstantConfig:
    """A trial of a run: so much shorter, and of so much smaller sources, that epochs are the same.

    Each source's range for training is cut to its first part. Phases, skips and the number of
    samples end at the same share of theirs, phases at a step. Weights, sequence lengths, caps,
    validation and test stay as they are.

    Args:
        config: The configuration of the large run.
        share: Size of the trial, above 0 and up to 1.
        batches: Global batch sizes, in fact one; None: not known.

    Raises:
        ConfigError: A share outside its limits, a global batch whose size changes, or a
            configuration without training.
    """
    share = check_float("trial", share, 0, 1)
    sizes = [1] if batches is None else [size for _, size in batches.changes]
    train, *others = bookends_of(config.split or "1,0,0")
    if share == 0 or len(sizes) > 1 or train is None:
        raise ConfigError(
            f"trial is {share}, global batch {sizes}, split {config.split}: a trial needs a share "
            "above 0, steps of one size, and a split with training"
        )
    (step,) = sizes
    ends = [[round(number * share) for number in pair] for pair in config.skips]
    before, after = Skips(config.skips), Skips([pair for pair in ends if pair[0] < pair[1]])

    def position(consumed_samples: int) -> int:
        return max(round(consumed_samples * share / step), 1) * step

    def scaled(sample_number: int) -> int:
        return after.sample(position(before.position(sample_number)))

    num, *rest = config.num_samples
    try:
        return replace(
            config,
            split=[(train[0], train[0] + share * (train[1] - train[0])), *others],
            skips=after.ranges,
            phases=[replace(one, until=one.until and scaled(one.until)) for one in config.phases],
            num_samples=(None if num is None else position(num), *rest),
        )
    except ConfigError as error:
        raise ConfigError(f"trial is {share}: {error}; or give a larger share") from None
