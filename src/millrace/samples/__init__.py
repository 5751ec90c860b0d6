"""Samples: the tokens of sample numbers, and the arrays that are made of them.

    numbers -> source.tokens -> TokenBatch -> transforms -> TokenBatch -> rows -> arrays

`tokens` is the token batch, the seam: whatever makes samples by number is a `TokenSource`, and what
has no numbers a `TokenStream`. `stored` is the source that reads stored tokens in an order, and
`blended` the one that mixes others. `transforms` map a batch. `rows` makes arrays of a batch,
`fields` says which, and `dataset` joins a source, options and transforms into one class.
"""

from millrace.options import SampleOptions
from millrace.samples.blended import BlendedDataset
from millrace.samples.dataset import Dataset, TokenDataset, TransformedDataset
from millrace.samples.fields import BatchForm
from millrace.samples.gpt import GPTDataset
from millrace.samples.sharded import ShardedDataset
from millrace.samples.tokens import TokenBatch, TokenSource, TokenStream
from millrace.samples.transforms.fill_in_middle import FillInMiddle
from millrace.samples.transforms.loss_ranges import LossRanges, write_loss_ranges
from millrace.samples.transforms.protocol import Transform
from millrace.samples.transforms.repeat_guard import RepeatGuard

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
