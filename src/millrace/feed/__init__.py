"""From sample numbers to batches.

A *dataset* (`GPTDataset`, `ShardedDataset`, `BlendedDataset`) turns sample numbers into arrays, the
*sampler* says which sample numbers a data-parallel rank takes at each step, and the *loader* hands
over micro batches and remembers one number, `consumed_samples`.
"""

from millrace.feed.loader import Loader
from millrace.feed.steps import WaitStats
from millrace.feed.stream_data import ExternalBatches, StreamDataset
from millrace.options import SampleOptions
from millrace.samples import (
    BatchForm,
    BlendedDataset,
    Dataset,
    FillInMiddle,
    GPTDataset,
    LossRanges,
    RepeatGuard,
    ShardedDataset,
    TokenBatch,
    TokenDataset,
    TokenSource,
    TokenStream,
    Transform,
    TransformedDataset,
    write_loss_ranges,
)
from millrace.sampling import (
    BatchSizeSchedule,
    CyclicSampler,
    FullValidationSampler,
    GlobalBatchSampler,
    RampUp,
    Sampler,
    SequentialSampler,
)

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
    "SampleOptions",
    "Sampler",
    "SequentialSampler",
    "ShardedDataset",
    "StreamDataset",
    "TokenBatch",
    "TokenDataset",
    "TokenSource",
    "TokenStream",
    "Transform",
    "TransformedDataset",
    "WaitStats",
    "write_loss_ranges",
]
