"""Pure functions from sample number to token spans: numbers in, arrays out, no files.

`spans` says what an order is, and `plans` how a run makes one. `splits` cuts a dataset into train,
valid and test. `gpt` is the order of one dataset, and `blends` mixes datasets by weight: both equal
Megatron-LM's bit for bit. `packed` is the order of packs of whole documents. `permutation` shuffles
without a table.
"""

from millrace.order.blends import (
    BlendIndices,
    BlendOrder,
    Mixture,
    blend,
    blend_exhaustively,
    build_blend_indices,
    count_draws,
    normalize,
    samples_per_dataset,
)
from millrace.order.gpt import (
    GPTIndices,
    GPTOrder,
    GPTPlan,
    build_gpt_indices,
    build_gpt_indices_of,
    plan_gpt,
)
from millrace.order.order_plans import OrderInputs, OrderPlan
from millrace.order.packed import PackedOrder, PackPlan
from millrace.order.permutation import KeyedPermutation
from millrace.order.spans import RULES_VERSION, Order, SequenceOrder, Spans
from millrace.order.splits import SPLITS, parse_split, part_range, split_ranges

__all__ = [
    "RULES_VERSION",
    "SPLITS",
    "BlendIndices",
    "BlendOrder",
    "GPTIndices",
    "GPTOrder",
    "GPTPlan",
    "KeyedPermutation",
    "Mixture",
    "Order",
    "OrderInputs",
    "OrderPlan",
    "PackPlan",
    "PackedOrder",
    "SequenceOrder",
    "Spans",
    "blend",
    "blend_exhaustively",
    "build_blend_indices",
    "build_gpt_indices",
    "build_gpt_indices_of",
    "count_draws",
    "normalize",
    "parse_split",
    "part_range",
    "plan_gpt",
    "samples_per_dataset",
    "split_ranges",
]
