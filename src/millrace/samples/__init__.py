"""Samples: the tokens of sample numbers, and the arrays made of them.

    numbers -> source.tokens -> TokenBatch -> transforms -> TokenBatch -> rows -> arrays

Whatever makes samples by number is a `TokenSource`, and what has no numbers a `TokenStream`.
"""

from millrace.cache.loss_files import write_loss_ranges
from millrace.samples.blended import BlendedDataset
from millrace.samples.dataset import Dataset, TokenDataset, TransformedDataset
from millrace.samples.fields import BatchForm, SampleOptions
from millrace.samples.gpt_dataset import GPTDataset, ShardedDataset
from millrace.samples.loss_ranges import LossRanges
from millrace.samples.tokens import TokenBatch, TokenSource, TokenStream
from millrace.samples.transforms import FillInMiddle, RepeatGuard, Transform

__all__ = [
    "BatchForm",
    "BlendedDataset",
    "Dataset",
    "FillInMiddle",
    "GPTDataset",
    "LossRanges",
    "RepeatGuard",
    "SampleOptions",
    "ShardedDataset",
    "TokenBatch",
    "TokenDataset",
    "TokenSource",
    "TokenStream",
    "Transform",
    "TransformedDataset",
    "write_loss_ranges",
]
