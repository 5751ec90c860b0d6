"""Pure functions from sample number to token spans: numbers in, arrays out, no files.

`splits` cuts a dataset into train, valid and test; `gpt` is the order of one dataset, by its
document index, sample index and shuffle index; `blends` and `draws` say which dataset each sample
comes from. All of them give Megatron-LM's results, bit for bit. `sequences` is the order of
sequences as they are stored, `permutation` a permutation without a table, for the global shuffle.
`spans` says what any order is.
"""

from millrace.order.blends import (
    blend,
    blend_exhaustively,
    count_draws,
    normalize,
    samples_per_dataset,
)
from millrace.order.draws import BlendIndices, BlendOrder, build_blend_indices
from millrace.order.gpt import GPTIndices, GPTOrder, GPTPlan, build_gpt_indices, plan_gpt
from millrace.order.permutation import KeyedPermutation
from millrace.order.sequences import SequenceOrder
from millrace.order.spans import RULES_VERSION, Order, Spans
from millrace.order.splits import SPLITS, parse_split, split_ranges

__all__ = [
    "RULES_VERSION",
    "SPLITS",
    "BlendIndices",
    "BlendOrder",
    "GPTIndices",
    "GPTOrder",
    "GPTPlan",
    "KeyedPermutation",
    "Order",
    "SequenceOrder",
    "Spans",
    "blend",
    "blend_exhaustively",
    "build_blend_indices",
    "build_gpt_indices",
    "count_draws",
    "normalize",
    "parse_split",
    "plan_gpt",
    "samples_per_dataset",
    "split_ranges",
]
