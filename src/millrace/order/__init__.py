"""Pure functions from sample number to token spans: numbers in, arrays out, no files.

`splits` cuts a dataset into train, valid and test; `gpt` makes the document index, sample index
and shuffle index of one dataset and split; `blends` says which dataset each sample comes from. All
of them give Megatron-LM's results, bit for bit.
"""

from millrace.order.blends import (
    blend,
    blend_exhaustively,
    count_draws,
    normalize,
    samples_per_dataset,
)
from millrace.order.gpt import GPTIndices, GPTPlan, build_gpt_indices, plan_gpt
from millrace.order.splits import SPLITS, parse_split, split_ranges

__all__ = [
    "SPLITS",
    "GPTIndices",
    "GPTPlan",
    "blend",
    "blend_exhaustively",
    "build_gpt_indices",
    "count_draws",
    "normalize",
    "parse_split",
    "plan_gpt",
    "samples_per_dataset",
    "split_ranges",
]
