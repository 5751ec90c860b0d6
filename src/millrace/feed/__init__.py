"""From sample numbers to batches.

A *dataset* (`GPTDataset`, `ShardedDataset`, `BlendedDataset`) turns sample numbers into arrays, a
*sampler* says which of them a data-parallel rank takes at each step, and the *loader* hands over
micro batches and remembers one number, `consumed_samples`.

The names of `millrace.samples` and `millrace.sampling` are names of this package, too.
"""

from millrace import samples, sampling
from millrace.feed.loader import Loader
from millrace.feed.steps import WaitStats
from millrace.feed.stream_data import ExternalBatches, StreamDataset
from millrace.samples import *  # noqa: F403
from millrace.sampling import *  # noqa: F403

__all__ = ["ExternalBatches", "Loader", "StreamDataset", "WaitStats"]
__all__ += samples.__all__
__all__ += sampling.__all__
