"""From sample numbers to batches.

A *dataset* (`GPTDataset`, `BlendedDataset`) turns sample numbers into arrays, the *sampler* says
which sample numbers a data-parallel rank takes at each step, and the *loader* hands over micro
batches and remembers one number, `consumed_samples`.
"""

from millrace.feed.datasets import BlendedDataset, Dataset, GPTDataset
from millrace.feed.fields import BatchForm
from millrace.feed.fill_in_middle import FillInMiddle
from millrace.feed.loader import Loader
from millrace.feed.loss_ranges import LossRanges, write_loss_ranges
from millrace.feed.repeat_guard import RepeatGuard
from millrace.feed.samplers import Sampler, SequentialSampler
from millrace.feed.transforms import TransformedDataset

__all__ = [
    "BatchForm",
    "BlendedDataset",
    "Dataset",
    "FillInMiddle",
    "GPTDataset",
    "Loader",
    "LossRanges",
    "RepeatGuard",
    "Sampler",
    "SequentialSampler",
    "TransformedDataset",
    "write_loss_ranges",
]
