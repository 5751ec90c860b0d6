"""Megatron-LM's own names, over millrace.

Change the imports, and nothing else:

    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from millrace.megatron import GPTDataset, GPTDatasetConfig

Files, cached indices, samples and their order are Megatron-LM's, bit for bit
(megatron-core 0.16.1); `docs/megatron.md` says how to use it, `docs/differences.md` where
Megatron-LM fails and this does not. `errors` says which errors are raised.
"""

from millrace.megatron import helpers
from millrace.megatron.base import MegatronDataset
from millrace.megatron.blended import BlendedDataset
from millrace.megatron.builder import (
    BlendedMegatronDatasetBuilder,
    _get_size_per_split_per_dataset,
)
from millrace.megatron.config import (
    BlendedMegatronDatasetConfig,
    GPTDatasetConfig,
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from millrace.megatron.gpt import GPTDataset
from millrace.megatron.helpers import (
    build_blending_indices,
    build_exhaustive_blending_indices,
    build_sample_idx,
)
from millrace.megatron.indexed import (
    DType,
    IndexedDataset,
    IndexedDatasetBuilder,
    get_bin_path,
    get_idx_path,
)
from millrace.megatron.mock import MockGPTDataset, MockGPTLowLevelDataset
from millrace.megatron.rules import (
    get_ltor_masks_and_position_ids as _get_ltor_masks_and_position_ids,
)
from millrace.megatron.utils import Split, get_blend_from_list, normalize

__all__ = [
    "BlendedDataset",
    "BlendedMegatronDatasetBuilder",
    "BlendedMegatronDatasetConfig",
    "DType",
    "GPTDataset",
    "GPTDatasetConfig",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "MegatronDataset",
    "MockGPTDataset",
    "MockGPTLowLevelDataset",
    "Split",
    "_get_ltor_masks_and_position_ids",
    "_get_size_per_split_per_dataset",
    "build_blending_indices",
    "build_exhaustive_blending_indices",
    "build_sample_idx",
    "convert_split_vector_to_split_matrix",
    "get_bin_path",
    "get_blend_from_list",
    "get_idx_path",
    "helpers",
    "normalize",
    "parse_and_normalize_split",
]
