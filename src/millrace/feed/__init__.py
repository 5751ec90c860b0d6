"""From sample numbers to batches.

A *dataset* (`GPTDataset`, `ShardedDataset`, `BlendedDataset`) turns sample numbers into arrays, the
*sampler* says which sample numbers a data-parallel rank takes at each step, and the *loader* hands
over micro batches and remembers one number, `consumed_samples`.
"""

from millrace.feed.ahead import WaitStats
from millrace.feed.cyclic import CyclicSampler
from millrace.feed.datasets import BlendedDataset, Dataset, GPTDataset
from millrace.feed.external import ExternalBatches
from millrace.feed.fields import BatchForm
from millrace.feed.fill_in_middle import FillInMiddle
from millrace.feed.loader import Loader
from millrace.feed.loss_ranges import LossRanges, write_loss_ranges
from millrace.feed.repeat_guard import RepeatGuard
from millrace.feed.samplers import (
    FullValidationSampler,
    GlobalBatchSampler,
    Sampler,
    SequentialSampler,
)
from millrace.feed.schedules import BatchSizeSchedule, RampUp
from millrace.feed.sharded import ShardedDataset
from millrace.feed.transforms import TransformedDataset

__all__ = [
    "BatchForm",
    "BatchSizeSchedule",
    "BlendedDataset",
    "CyclicSampler",
    "Dataset",
    "ExternalBatches",
    "FillInMiddle",
    "FullValidationSampler",
    "GPTDataset",
    "GlobalBatchSampler",
    "Loader",
    "LossRanges",
    "RampUp",
    "RepeatGuard",
    "Sampler",
    "SequentialSampler",
    "ShardedDataset",
    "TransformedDataset",
    "WaitStats",
    "write_loss_ranges",
]
