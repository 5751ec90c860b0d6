"""From sample numbers to batches.

A *dataset* (`GPTDataset`, `ShardedDataset`, `BlendedDataset`) turns sample numbers into arrays, the
*sampler* says which sample numbers a data-parallel rank takes at each step, and the *loader* hands
over micro batches and remembers one number, `consumed_samples`.
"""

from millrace.feed.loader import Loader as Loader
from millrace.feed.steps import WaitStats as WaitStats
from millrace.feed.streams import ExternalBatches as ExternalBatches
from millrace.feed.streams import StreamDataset as StreamDataset
from millrace.options import SampleOptions as SampleOptions
from millrace.samples import BatchForm as BatchForm
from millrace.samples import BlendedDataset as BlendedDataset
from millrace.samples import Dataset as Dataset
from millrace.samples import FillInMiddle as FillInMiddle
from millrace.samples import GPTDataset as GPTDataset
from millrace.samples import LossRanges as LossRanges
from millrace.samples import RepeatGuard as RepeatGuard
from millrace.samples import ShardedDataset as ShardedDataset
from millrace.samples import TokenBatch as TokenBatch
from millrace.samples import TokenDataset as TokenDataset
from millrace.samples import TokenSource as TokenSource
from millrace.samples import TokenStream as TokenStream
from millrace.samples import Transform as Transform
from millrace.samples import TransformedDataset as TransformedDataset
from millrace.samples import write_loss_ranges as write_loss_ranges
from millrace.sampling import BatchSizeSchedule as BatchSizeSchedule
from millrace.sampling import CyclicSampler as CyclicSampler
from millrace.sampling import FullValidationSampler as FullValidationSampler
from millrace.sampling import GlobalBatchSampler as GlobalBatchSampler
from millrace.sampling import RampUp as RampUp
from millrace.sampling import Sampler as Sampler
from millrace.sampling import SequentialSampler as SequentialSampler
