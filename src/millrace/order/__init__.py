"""Pure functions from sample number to token spans: numbers in, arrays out, no files.

`spans` says what an order is, and `plans` how a run makes one. `splits` cuts a dataset into train,
valid and test. `gpt` is the order of one dataset, and `blends` mixes datasets by weight: both equal
Megatron-LM's bit for bit. `permutation` shuffles without a table.
"""

from millrace.order.blends import BlendIndices as BlendIndices
from millrace.order.blends import BlendOrder as BlendOrder
from millrace.order.blends import Mixture as Mixture
from millrace.order.blends import blend as blend
from millrace.order.blends import blend_exhaustively as blend_exhaustively
from millrace.order.blends import build_blend_indices as build_blend_indices
from millrace.order.blends import count_draws as count_draws
from millrace.order.blends import normalize as normalize
from millrace.order.blends import samples_per_dataset as samples_per_dataset
from millrace.order.gpt import GPTIndices as GPTIndices
from millrace.order.gpt import GPTOrder as GPTOrder
from millrace.order.gpt import GPTPlan as GPTPlan
from millrace.order.gpt import build_gpt_indices as build_gpt_indices
from millrace.order.gpt import build_gpt_indices_of as build_gpt_indices_of
from millrace.order.gpt import plan_gpt as plan_gpt
from millrace.order.permutation import KeyedPermutation as KeyedPermutation
from millrace.order.plans import OrderInputs as OrderInputs
from millrace.order.plans import OrderPlan as OrderPlan
from millrace.order.spans import RULES_VERSION as RULES_VERSION
from millrace.order.spans import Order as Order
from millrace.order.spans import SequenceOrder as SequenceOrder
from millrace.order.spans import Spans as Spans
from millrace.order.splits import SPLITS as SPLITS
from millrace.order.splits import parse_split as parse_split
from millrace.order.splits import part_range as part_range
from millrace.order.splits import split_ranges as split_ranges
