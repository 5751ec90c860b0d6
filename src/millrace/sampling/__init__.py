"""Which sample numbers a data-parallel rank takes at each step.

A sampler's answers are pure functions of `consumed_samples`, the number of samples that all ranks
have consumed before the step.
"""

from millrace.sampling.balanced import BalancedSampler, DocumentCosts, imbalance, least_imbalance
from millrace.sampling.samplers import (
    CyclicSampler,
    FullValidationSampler,
    GlobalBatchSampler,
    Sampler,
    SequentialSampler,
)
from millrace.sampling.schedules import BatchSizeSchedule, RampUp

__all__ = [
    "BalancedSampler",
    "BatchSizeSchedule",
    "CyclicSampler",
    "DocumentCosts",
    "FullValidationSampler",
    "GlobalBatchSampler",
    "RampUp",
    "Sampler",
    "SequentialSampler",
    "imbalance",
    "least_imbalance",
]
