"""Megatron-LM's own names, over millrace.

Change only the imports:

    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from millrace.megatron import GPTDataset, GPTDatasetConfig

Files, cached indices, samples and their order are Megatron-LM's, bit for bit (megatron-core
0.16.1). `docs/megatron.md` is the guide, `docs/differences.md` lists where Megatron-LM fails, and
`errors` lists the errors.
"""

import types

from millrace.megatron.base import (
    _PAD_TOKEN_ID as _PAD_TOKEN_ID,
    LowLevelDataset as LowLevelDataset,
    MegatronDataset as MegatronDataset,
)
from millrace.megatron.blended import (
    BlendedDataset as BlendedDataset,
    BlendedMegatronDatasetBuilder as BlendedMegatronDatasetBuilder,
    DistributedDataset as DistributedDataset,
    MidLevelDataset as MidLevelDataset,
    TopLevelDataset as TopLevelDataset,
    _get_size_per_split_per_dataset as _get_size_per_split_per_dataset,
)
from millrace.megatron.gpt import (
    GPTDataset as GPTDataset,
    MockGPTDataset as MockGPTDataset,
    MockGPTLowLevelDataset as MockGPTLowLevelDataset,
    _build_document_index as _build_document_index,
    _build_shuffle_index as _build_shuffle_index,
    _get_ltor_masks_and_position_ids as _get_ltor_masks_and_position_ids,
)
from millrace.megatron.helpers import (
    build_blending_indices as build_blending_indices,
    build_exhaustive_blending_indices as build_exhaustive_blending_indices,
    build_sample_idx as build_sample_idx,
    build_sample_idx_int32 as build_sample_idx_int32,
    build_sample_idx_int64 as build_sample_idx_int64,
)
from millrace.megatron.indexed import (
    IndexedDataset as IndexedDataset,
    IndexedDatasetBuilder as IndexedDatasetBuilder,
    _BinReader as _BinReader,
    _FileBinReader as _FileBinReader,
    _IndexReader as _IndexReader,
    _MMapBinReader as _MMapBinReader,
    get_bin_path as get_bin_path,
    get_idx_path as get_idx_path,
)
from millrace.megatron.samplers import (
    build_pretraining_data_loader as build_pretraining_data_loader,
)
from millrace.megatron.utils import (
    BlendedMegatronDatasetConfig as BlendedMegatronDatasetConfig,
    DType as DType,
    GPTDatasetConfig as GPTDatasetConfig,
    Split as Split,
    compile_helpers as compile_helpers,
    convert_split_vector_to_split_matrix as convert_split_vector_to_split_matrix,
    get_blend_from_list as get_blend_from_list,
    normalize as normalize,
    parse_and_normalize_split as parse_and_normalize_split,
)
from millrace.store.layout import MAGIC as _INDEX_HEADER  # noqa: F401

__all__ = ["helpers"] + [
    name
    for name, value in list(globals().items())
    if not (name.startswith("__") or isinstance(value, types.ModuleType))
]
